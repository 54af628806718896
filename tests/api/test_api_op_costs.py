"""Costs that are given are of the graph that is planned, and of all of it."""

import dataclasses
import json

import pytest
import torch
from torch import nn

import autopipe
from autopipe import measure
from autopipe.costs import CostTable, OpCost
from autopipe.errors import AutopipeError, CostError, InfeasibleError, InputError, StoreError
from autopipe.hardware import Cluster
from autopipe.look.plan_tables import candidate_table


class Glued(nn.Module):
    """Two leaves, a block of two, sizes, a tuple taken apart, and an op of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.ReLU())

    def forward(self, x):
        a, b = self.block(self.first(x)).chunk(2, dim=-1)
        return self.last((a + b).view(x.shape[0], -1))


X = torch.randn(8, 8)


def planned(costs, **options) -> autopipe.Plan:
    return autopipe.plan(Glued(), 2, (X,), costs=costs, n_microbatches=2, **options)


@pytest.fixture(scope="module")
def table() -> CostTable:
    return measure.estimate(autopipe.capture(Glued(), (X,), closed=["block"]), measure.device("H200"))


def test_a_table_of_the_graph_is_taken_as_it_is_and_from_its_file(table, tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(table.to_dict()))
    for given in (table, str(path)):
        assert planned(given, closed=["block"]).settings["dims"] == table.dims
    dims = {"batch": 4}
    by_hand = {
        op.name: OpCost(1e-3, 2e-3) for op in autopipe.capture(Glued(), (X,)).ops.compute if op.outputs
    }
    assert planned(CostTable(by_hand, dims)).n_stages == 2
    with pytest.raises(CostError, match="at which batch its costs hold"):
        planned(CostTable(by_hand))


class Moded(nn.Module):
    """A layer that training alone runs, and one of evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x):
        first, learnt, shown, last = self.layers
        return last(learnt(first(x)) if self.training else shown(first(x)))


@pytest.mark.parametrize("training", [True, False])
def test_a_profile_of_one_mode_is_a_whole_table(training):
    captured = autopipe.capture(Moded(), (X,))
    costs = autopipe.profile(captured, n_microbatches=2, training=training)
    plan = autopipe.plan(captured, 2, costs=costs, n_microbatches=2)
    assert {op.name for op in captured.ops.compute} == costs.costs.keys()
    assert costs["layers_2" if training else "layers_1"] == OpCost()
    assert plan.n_stages == 2


def test_costs_of_other_microbatches_are_told(table, caplog):
    planned(table, closed=["block"])
    assert "microbatch of batch 8, and one of the example has batch 4" in caplog.text
    caplog.clear()
    planned(dataclasses.replace(table, dims={"batch": 4}), closed=["block"])
    assert not caplog.text


@pytest.mark.parametrize("left", [0, 1, -1])
def test_ops_that_a_table_lacks_are_no_free_ones(table, left, tmp_path):
    some = dict(list(table.costs.items())[:left])
    path = tmp_path / "costs.json"
    lacking = dataclasses.replace(table, costs=some)
    path.write_text(json.dumps(lacking.to_dict()))
    for given in (lacking, str(path)):
        with pytest.raises(CostError, match=r"has no cost for \d of the \d ops .* would count as free"):
            planned(given, closed=["block"])


def test_a_table_of_other_open_modules_is_refused(table):
    with pytest.raises(CostError, match=r"block_0|block_1"):
        planned(table, open=["block"])


def test_a_capture_is_split_by_a_plan_of_it_and_of_what_was_opened():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8))
    for how in ({"closed": ["0"]}, {"open": ["0"]}):
        captured = autopipe.capture(model, (X,), **how)
        plan = autopipe.plan(captured, 2, costs="estimated", device="H200", n_microbatches=2)
        pipe = autopipe.split(captured, plan=plan)
        assert pipe.plan == plan
        assert torch.equal(pipe(X), model(X))
    with pytest.raises(AutopipeError, match="graph"):
        autopipe.split(autopipe.capture(nn.Sequential(nn.Linear(8, 8)), (X,)), plan=plan)


class Pieces(nn.Module):
    """Takes its rows three by three: sizes of one piece are formulas that are below nothing for few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.cat([self.last(piece) for piece in self.first(x).split(3)])


def test_microbatches_are_of_sizes_that_the_model_was_captured_for(caplog):
    x = torch.randn(4, 8)
    pipe = autopipe.split(Pieces(), 2, (x,), costs="estimated")
    assert pipe.plan.n_microbatches == 1
    assert not caplog.text
    assert torch.isfinite(pipe.runtime(lambda y, _: y.square().mean()).step(x).loss)
    asked = autopipe.split(Pieces(), 2, (x,), costs="estimated", n_microbatches=4)
    assert asked.plan.n_microbatches == 4
    assert "4 rows have 1 each" in caplog.text
    assert "take n_microbatches=1" in caplog.text


def test_microbatches_of_a_batch_that_is_fixed_are_told_why(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    pipe = autopipe.split(model, 2, (torch.randn(4, 8),), costs="estimated", dynamic=False, n_microbatches=4)
    assert pipe.plan.n_microbatches == 1
    assert "fixed in this capture (dynamic=False)" in caplog.text


class Wider(Glued):
    """The same ops by name, on twice as many channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 32), nn.Linear(16, 8)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.ReLU())


def test_a_table_of_ops_that_are_only_called_the_same_is_refused(table):
    names = [autopipe.capture(model(), (X,), closed=["block"]).ops.position for model in (Glued, Wider)]
    assert names[0] == names[1]
    with pytest.raises(CostError, match="of other ops"):
        autopipe.plan(Wider(), 2, (X,), costs=table, n_microbatches=2, closed=["block"])


@pytest.mark.parametrize("rows", [2, 4, 16])
def test_a_table_is_of_the_same_ops_whatever_the_batch_and_the_device(table, rows):
    with torch.device("meta"):
        model = Glued()
    there = autopipe.capture(model, (torch.randn(rows, 8, device="meta"),), closed=["block"])
    assert there.ops.ops_digest == table.ops


def test_a_word_that_is_no_file_is_told_with_those_that_costs_may_be():
    with pytest.raises(InputError, match=r"costs is 'measure'; use one of .* \(did you mean 'measured'\?\)"):
        planned("measure")
    with pytest.raises(StoreError, match=r"cannot read the cost table from nowhere\.json"):
        planned("nowhere.json")


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def test_auto_cuts_the_example_s_batch_and_takes_the_shortest_step():
    x = torch.randn(24, 64)

    def made(n, **options) -> autopipe.Plan:
        return autopipe.plan(blocks(), 2, (x,), n_microbatches=n, costs="estimated", **options)

    each = {n: made(n) for n in (8, 4, 2)}
    found = made("auto")
    # each microbatch costs its launches, which on so small a model are nearly all
    assert found.step_s == min(plan.step_s for plan in each.values()) < each[8].step_s
    assert found.n_microbatches == min(each, key=lambda n: each[n].step_s)
    assert found.settings["dims"]["batch"] * found.n_microbatches == 24
    assert found.settings["steps_by_microbatches"] == {str(n): plan.step_s for n, plan in each.items()}
    assert all(f"as {n}" in candidate_table(found).note for n in each)
    assert autopipe.Plan.from_json(found.to_json()) == found


def test_auto_takes_smaller_microbatches_where_larger_ones_do_not_fit():
    x = torch.randn(2400, 64)

    def made(n, **options) -> autopipe.Plan:
        return autopipe.plan(blocks(), 2, (x,), n_microbatches=n, costs="estimated", device="H200", **options)

    def needs(n: int) -> int:
        return max(stage.memory_bytes for stage in made(n).stages)

    least, other = made("auto").n_microbatches, 8
    assert needs(other) < needs(least)
    limit = [needs(other)] * 2
    with pytest.raises(InfeasibleError):
        made(least, memory_limit=limit)
    assert made("auto", memory_limit=limit).n_microbatches > least
    with pytest.raises(InfeasibleError):
        made("auto", memory_limit=1000)


def test_auto_with_a_table_has_microbatches_of_its_size():
    x = torch.randn(24, 64)
    given = measure.estimate(autopipe.capture(blocks(), (x,)), measure.device("H200"), dims={"batch": 6})
    assert autopipe.plan(blocks(), 2, (x,), n_microbatches="auto", costs=given).n_microbatches == 4


@pytest.mark.parametrize("where", ["cpu", "meta"])
def test_estimates_for_a_cluster_are_of_its_devices(where, tmp_path):
    with torch.device(where):
        model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), torch.ones(8, 64)
    cluster, file = Cluster.uniform(2, measure.device("H200")), tmp_path / "cluster.json"
    file.write_text(json.dumps(cluster.to_dict()))
    named = autopipe.plan(model, 2, (x,), costs="estimated", device="H200", cluster=cluster)
    for given in (cluster, file):
        assert autopipe.plan(model, 2, (x,), costs="estimated", cluster=given) == named


def test_unlike_devices_of_one_speed_are_told(caplog):
    model, options = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"costs": "estimated"}
    fast, slow = map(measure.device, ("H200", "A100"))
    autopipe.plan(model, 2, (torch.ones(4, 8),), cluster=Cluster((fast, slow)), **options)
    (told,) = caplog.messages
    assert f"{fast.name} and {slow.name}, which can do unlike much" in told
    caplog.clear()
    slow = dataclasses.replace(slow, speed=0.3)
    for devices in ((fast, slow), (fast, fast)):
        autopipe.plan(model, 2, (torch.ones(4, 8),), cluster=Cluster(devices), **options)
    assert not caplog.messages
