"""A plan that one leaf keeps from balance opens it by itself; what is pinned closed stays whole."""

import collections
import dataclasses
import functools
import itertools
import signal

import pytest
import torch
from torch import nn

import autopipe
from autopipe.api.refine import AGAIN, HURRY, TOLERANCE, _imbalance
from autopipe.costs import CostTable, OpCost
from autopipe.errors import CaptureError, InfeasibleError, PlanError
from autopipe.hardware import Cluster
from autopipe.solve import chain, solve


class Block(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.inner = nn.Sequential(*(nn.Linear(64, 64) for _ in range(depth)))

    def forward(self, x):
        return x + self.inner(x)


class Uneven(nn.Module):
    """Three small blocks and one with the work of fifteen."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(depth) for depth in (1, 1, 15, 1))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def split(model, **options):
    return autopipe.split(model, 2, (torch.randn(64, 64),), costs="estimated", **options)


def imbalance(plan):
    loads = [s.forward_s + s.backward_s for s in plan.stages]
    return max(loads) / (sum(loads) / len(loads)) - 1


def leaves(pipe):
    return {op.target for op in pipe.graph.ops.compute if op.kind == "module"}


def test_the_leaf_in_the_way_of_balance_is_opened_and_no_other():
    pipe = split(Uneven())
    assert "blocks.2" not in leaves(pipe)
    assert {"blocks.0", "blocks.1", "blocks.3"} <= leaves(pipe)
    assert imbalance(pipe.plan) <= TOLERANCE


@pytest.mark.parametrize(
    "asked", [{"pin": {"blocks_2": 0}}, {"together": [["blocks_2"]]}, {"uncut": ["blocks_2"]}]
)
def test_where_ops_are_named_modules_stay_whole_in_which_others_would_have_these_names(asked):
    pipe = split(Uneven(), **asked)
    assert "blocks_2" in pipe.plan.stages_of


def test_ops_that_a_plan_shows_are_named_once_what_it_opened_is_opened():
    opened, pin = split(Uneven()).plan.settings["opened"], {"blocks_2_inner_10": 0}
    assert split(Uneven(), open=opened, pin=pin).plan.stages_of["blocks_2_inner_10"] == (0,)
    with pytest.raises(PlanError, match=r"did you mean 'blocks_2' .* open=plan.settings\['opened'\]"):
        split(Uneven(), pin=pin)


def test_a_module_that_is_pinned_by_its_path_may_be_opened():
    pipe = split(Uneven(), pin={"blocks.3": 1})
    assert "blocks_2" not in pipe.plan.stages_of
    assert pipe.plan.stages_of["blocks_3"] == (1,)


def test_a_leaf_pinned_closed_stays_whole():
    captured = autopipe.capture(Uneven(), (torch.randn(64, 64),), closed=["blocks.2"])
    plan = autopipe.plan(captured, 2, costs="estimated")
    assert "blocks_2" in plan.stages_of
    assert imbalance(plan) > 0.5
    with pytest.raises(CaptureError, match=r"blocks.2 is pinned closed"):
        captured.open("blocks.2.inner.0")


def test_what_runs_again_to_fit_memory_is_no_part_of_an_even_share():
    """Stages that are even for it alone are opened further: of finer blocks less may have to run again."""
    plan = split(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))).plan
    costs = CostTable({op: OpCost(forward_s=1.0) for stage in plan.stages for op in stage.ops})
    for recomputes in (False, True):
        stages = tuple(
            dataclasses.replace(
                s, forward_s=2.0, backward_s=4.0 + recomputes, recomputed=(s.ops[:1],) * recomputes
            )
            for s in plan.stages
        )
        made = dataclasses.replace(plan, stages=stages, cluster=Cluster.uniform(2))
        assert _imbalance(made, costs) == pytest.approx(1 / 6 if recomputes else 0.0)


def test_a_shorter_bottleneck_with_a_longer_step_is_not_kept(monkeypatch):
    steps = []

    @functools.wraps(solve)
    def ever_longer(*args, **options):
        plan = solve(*args, **options)
        steps.append(1.0 + len(steps))
        return dataclasses.replace(plan, step_s=steps[-1])

    assert split(Uneven()).plan.settings["opened"]
    monkeypatch.setattr("autopipe.api.planning.solve", ever_longer)
    plan = split(Uneven()).plan
    assert len(steps) > 1
    assert plan.step_s == min(steps)
    assert plan.settings["opened"] == []


def test_opening_ends_at_single_ops():
    class Fat(nn.Module):
        def __init__(self):
            super().__init__()
            self.small, self.fat = nn.Linear(64, 64), nn.Linear(64, 64 * 64)

        def forward(self, x):
            return self.fat(self.small(x))

    pipe = split(Fat())
    assert leaves(pipe) == {"small", "fat"}
    assert imbalance(pipe.plan) > TOLERANCE


def test_nothing_is_opened_beside_an_op_that_takes_as_long_as_the_fullest_rank(monkeypatch):
    class Headed(nn.Module):
        """Two layers with more work than all the blocks, each of which must be beside one of them."""

        def __init__(self):
            super().__init__()
            self.blocks = nn.Sequential(*(Block(1) for _ in range(2)))
            self.head, self.last = nn.Linear(32, 1 << 25), nn.Linear(1 << 25, 64)
            self.after = Block(2)

        def forward(self, x):
            return self.after(self.last(self.head(self.blocks(x)[:, :32])))

    monkeypatch.setattr(autopipe.tracing.Capture, "open", lambda self, *paths: pytest.fail("opened"))
    with torch.device("meta"):
        model, x = Headed(), torch.randn(64, 64)
    plan = autopipe.plan(model, 2, (x,), costs="estimated", device="H100")
    loads = [s.forward_s + s.backward_s for s in plan.stages]
    fullest = plan.stages[loads.index(max(loads))]
    assert {"last", "after"} <= {*fullest.ops}
    assert imbalance(plan) > AGAIN


def test_without_training_an_ops_backward_keeps_no_leaf_closed():
    class Headed(nn.Module):
        """A layer whose forward takes half as long as that of the blocks, and with its backward longer."""

        def __init__(self):
            super().__init__()
            self.head, self.blocks = nn.Linear(64, 64 * 12), nn.Sequential(Block(1), Block(24), Block(1))

        def forward(self, x):
            return self.blocks(self.head(x)[:, :64])

    x = torch.randn(4096, 64)
    pipe = autopipe.split(Headed(), 2, (x,), costs="estimated", n_microbatches=2, schedule="forward-only")
    assert "blocks.1" not in leaves(pipe)
    assert imbalance(pipe.plan) <= TOLERANCE


@pytest.mark.parametrize("n_stages", [3])
def test_a_model_of_one_leaf_is_opened_until_it_can_be_cut(n_stages):
    pipe = autopipe.split(nn.Sequential(Block(6)), n_stages, (torch.randn(64, 64),), costs="estimated")
    assert len(pipe.plan.stages) == n_stages
    assert len([op for op in leaves(pipe) if op.startswith("0.inner")]) == 6


class Halved(nn.Module):
    """A block of two parts that are as large as each other."""

    def __init__(self, depth):
        super().__init__()
        self.first, self.second = Block(depth), Block(depth)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize(
    ("kind", "parts", "recompute"),
    [(Block, ("inner",), "never"), (Halved, (), "never"), (Block, (), "always")],
    ids=["one part", "two parts", "run again"],
)
def test_leaves_that_are_alike_are_opened_together_with_what_is_most_of_them(
    monkeypatch, kind, parts, recompute
):
    class Even(nn.Module):
        """Four equal blocks for three stages, after a small one."""

        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(1), *(kind(8) for _ in range(4))])

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    opened = []
    once = autopipe.tracing.Capture.open
    monkeypatch.setattr(
        autopipe.tracing.Capture, "open", lambda self, *paths: opened.append(paths) or once(self, *paths)
    )
    plan = autopipe.plan(Even(), 3, (torch.randn(64, 64),), costs="estimated", recompute=recompute)
    blocks = tuple(f"blocks.{i}" for i in range(1, 5))
    assert opened[0] == (*blocks, *(f"{block}.{part}" for block in blocks for part in parts))
    assert len(opened) == len(set(opened))
    # of whole blocks, one stage would have two of four
    assert imbalance(plan) < 0.4


def test_what_no_finer_graph_can_fit_is_told_without_opening(monkeypatch):
    monkeypatch.setattr(autopipe.tracing.Capture, "open", lambda self, *paths: pytest.fail("opened"))
    with pytest.raises(InfeasibleError, match=r"hold 2\.0 KiB together"):
        split(Uneven(), memory_limit="1KiB")


@pytest.mark.parametrize("n_stages", [2, "auto"])
@pytest.mark.parametrize("precision", [None, "bf16-mixed"])
def test_parameters_that_no_ranks_have_room_for_are_told_before_anything_is_measured(
    monkeypatch, n_stages, precision
):
    monkeypatch.setattr("autopipe.measure.profile", lambda *args, **options: pytest.fail("measured"))
    options = {"costs": "measured", "n_ranks": 2, "precision": precision, "memory_limit": "1KiB"}
    with pytest.raises(InfeasibleError, match=r"hold 2\.0 KiB together.*before any activation") as told:
        autopipe.plan(Uneven(), n_stages, (torch.randn(8, 64),), **options)
    assert not told.value.finer_may_help


def test_parameters_that_are_too_much_are_told_before_it_is_looked_which_sizes_may_vary(monkeypatch):
    monkeypatch.setattr("autopipe.api.planning.captured", lambda *given: pytest.fail("recorded in full"))
    with pytest.raises(InfeasibleError, match=r"hold 2\.0 KiB together.*before any activation"):
        split(Uneven(), memory_limit="1KiB")


def test_parameters_that_no_forward_uses_need_no_room():
    """They are sixteen times all that fits."""
    model = Uneven()
    model.spare = nn.Linear(4096, 4096)
    assert split(model, memory_limit="2MiB").plan.n_stages == 2


def test_room_is_looked_at_ahead_where_tensors_lie_otherwise():
    model = Uneven()
    model.register_buffer("sparse", torch.eye(64).to_sparse())
    assert split(model, memory_limit="2MiB").plan.n_stages == 2


class Sized(Uneven):
    """Has an op that makes a size, where sizes may vary, and parameters that no forward uses."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(4096, 4096)

    def forward(self, x):
        return super().forward(x).reshape(x.shape[0] * 2, -1)


def test_an_op_that_makes_a_size_may_be_pinned_where_room_is_looked_at_ahead():
    size = next(op.name for op in autopipe.capture(Sized(), (torch.randn(16, 64),)).ops.compute if op.is_size)
    assert split(Sized(), memory_limit="2MiB", pin={size: 1}).plan.n_stages == 2


def test_ctrl_c_between_grains_keeps_the_plan_of_the_coarser_one(monkeypatch):
    once = autopipe.tracing.Capture.open

    def interrupted(self, *paths):
        signal.raise_signal(signal.SIGINT)
        return once(self, *paths)

    monkeypatch.setattr(autopipe.tracing.Capture, "open", interrupted)
    pipe = split(Uneven())
    assert pipe.plan.settings["opened"] == []
    pipe.verify()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_time_limit_is_for_all_grains_together(monkeypatch):
    given = []

    @functools.wraps(solve)
    def told(*args, time_limit_s, **options):
        given.append(time_limit_s)
        return solve(*args, time_limit_s=time_limit_s, **options)

    monkeypatch.setattr("autopipe.api.planning.solve", told)
    split(Uneven(), time_limit_s=30.0)
    assert given[0] == 30.0 * HURRY
    assert len(given) > 1
    assert all(later < before for before, later in itertools.pairwise(given) if later < 30.0 * HURRY)
    assert max(given) < 30.0
    del given[:]
    split(Uneven(), time_limit_s=0.0)
    assert given == [0.0]


def hurried(monkeypatch, lower):
    """The plan of a model whose blocks are opened, and the seconds that each graph was given in turn.

    Blocks are opened without their parts, which alone helps nothing.
    Every bound is said to be this part of the bottleneck, and none to be met.
    """
    given = []

    @functools.wraps(solve)
    def told(graph, *args, time_limit_s, **options):
        given.append((graph, time_limit_s))
        plan = solve(graph, *args, time_limit_s=time_limit_s, **options)
        least_s = lower * plan.bounds.bottleneck_s
        bounds = dataclasses.replace(plan.bounds, bottleneck_lower_s=least_s, proved=False)
        return dataclasses.replace(plan, bounds=bounds)

    monkeypatch.setattr("autopipe.api.planning.solve", told)
    monkeypatch.setattr("autopipe.api.refine.HURRY_S", 0.0)
    monkeypatch.setattr("autopipe.api.refine.MOST", 1.0)
    plan = split(Uneven()).plan
    return plan, {graph.digest: [s for g, s in given if g is graph] for graph, _ in given}


def test_graphs_are_planned_in_a_hurry_and_the_one_that_is_kept_with_all_the_time(monkeypatch):
    plan, of = hurried(monkeypatch, lower=0.5)
    assert len(of) > 1
    assert all(seconds[0] == 2.0 * HURRY for seconds in of.values())
    assert of[plan.graph_digest][1:] == [2.0]
    # so was what is given up, and as that told nothing more, it was the last
    *earlier, last = of.values()
    assert last[1:] == [2.0]
    assert sum(seconds[1:] == [2.0] for seconds in earlier) == 1


@pytest.mark.parametrize(("lower", "n_more"), [(1.0, 0), (0.995, 1), (0.5, 1)])
def test_a_draft_that_is_kept_is_looked_for_again_unless_it_is_proved(monkeypatch, lower, n_more):
    """Of the drafts' bottlenecks the kept one is all that more time is for, and only where it may be less."""
    drafts, found = [], []

    @functools.wraps(solve)
    def told(*args, is_draft, **options):
        drafts.append(is_draft)
        return solve(*args, is_draft=is_draft, **options)

    @functools.wraps(chain)
    def bounded(problem, **options):
        answer = chain(problem, **options)
        answer = dataclasses.replace(answer, lower_ns=int(lower * answer.bottleneck_ns))
        if any(net.send_ns for net in problem.nets):  # the bound on steps has one where nothing is sent
            found.append(answer)
        return answer

    monkeypatch.setattr("autopipe.api.planning.solve", told)
    monkeypatch.setattr("autopipe.solve.answers.chain", bounded)
    monkeypatch.setattr(autopipe.api.refine._Refining, "_may_be_better", lambda self, plan: False)
    split(Uneven())
    assert drafts == [True] * (len(drafts) - 1) + [False]
    assert len(found) == len(drafts) - 1 + n_more


def test_a_bottleneck_that_more_time_does_not_better_has_the_bound_that_it_found(monkeypatch):
    """What was found first stays where the second search finds less, and each search's bound holds."""
    n_found = collections.Counter()

    @functools.wraps(chain)
    def ever_worse(problem, **options):
        answer = chain(problem, **options)
        n_found[problem] += 1
        share = 0.5 if n_found[problem] == 1 else 0.9
        value = answer.bottleneck_ns * n_found[problem]
        return dataclasses.replace(answer, bottleneck_ns=value, lower_ns=int(share * answer.bottleneck_ns))

    monkeypatch.setattr("autopipe.solve.answers.chain", ever_worse)
    plan = split(Uneven()).plan
    assert max(n_found.values()) == 2
    assert plan.bounds.bottleneck_lower_s == pytest.approx(0.9 * plan.bounds.bottleneck_s, rel=0.05)
    assert not plan.bounds.proved
