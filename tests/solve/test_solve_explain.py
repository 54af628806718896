"""What an explanation says of a move is what solving with that move made says."""

import dataclasses

import pytest
from language_model import N_LAYERS, cluster, costs, graph, made, stage_of

from autopipe.errors import PlanError
from autopipe.solve import explain


def test_the_bottleneck_is_the_dearest_op_of_the_fullest_stage():
    told = explain(made(costs=costs(head_s=8e-3)), graph(), costs(head_s=8e-3))
    assert (told.bottleneck_stage, told.bottleneck_op) == (2, "head")
    (tie,) = made(costs=costs(head_s=8e-3)).ties
    assert told.bottleneck_s == pytest.approx(24e-3 + tie.seconds / 6)
    assert "stage 2" in str(told)


def test_no_move_improves_a_proved_bottleneck():
    plan = made()
    assert plan.bounds.proved
    told = explain(plan, graph(), costs())
    assert [(m.cut, m.source, m.target) for m in told.moves] == [(0, 0, 1), (0, 1, 0), (1, 1, 2)]
    assert all(m.bottleneck_s >= 0 for m in told.moves)
    assert {m.ops for m in told.moves} == {("layer2",), ("layer3",), ("layer5",)}


@pytest.mark.parametrize("move", [0, 1, 2])
def test_a_move_costs_what_the_moved_plan_costs(move):
    plan = made()
    told = explain(plan, graph(), costs()).moves[move]
    pins = {name: stage_of(plan, name) for name in ("embed", *(f"layer{i}" for i in range(N_LAYERS)), "head")}
    moved = made(pin={**pins, told.ops[0]: told.target})
    assert told.bottleneck_s == pytest.approx(moved.bounds.bottleneck_s - plan.bounds.bottleneck_s)
    assert told.step_s == pytest.approx(moved.step_s - plan.step_s)
    assert told.fits


def test_pinned_ops_are_not_moved():
    plan = made(pin={"layer2": 0, "layer5": 1})
    assert [m.ops for m in explain(plan, graph(), costs()).moves] == [("layer3",)]


def test_a_move_that_memory_forbids_says_so():
    need = max(s.memory_bytes for s in made().stages)
    told = explain(made(memory_limit=need), graph(), costs())
    assert not any(m.fits for m in told.moves if m.source == 1 and m.target == 0)
    assert "memory does not suffice" in str(told)


def test_a_price_of_memory_is_what_more_of_it_saves():
    """The first rank is a byte short of what the best cut needs there; the others have room."""
    plain = made()
    assert explain(plain, graph(), costs()).memory_prices_s == (0.0, 0.0, 0.0)
    tight = made(memory_limit=[plain.stages[0].memory_bytes - 1, "1GB", "1GB"])
    assert tight.step_s > plain.step_s
    told = explain(tight, graph(), costs())
    assert told.memory_prices_s[0] == pytest.approx(tight.step_s - plain.step_s)
    assert told.memory_prices_s[2] == 0
    assert "one more GiB on rank 0 would save" in str(told)


def test_another_graph_is_refused():
    other = dataclasses.replace(graph(), model="other")
    with pytest.raises(PlanError, match="capture the model"):
        explain(made(), other, costs())


@pytest.mark.parametrize(("op", "to"), [("layer1", None), ("layer1", 2)])
def test_a_plan_changed_against_its_graph_is_refused(op, to):
    plan = made()
    stages = [dataclasses.replace(s, ops=tuple(x for x in s.ops if x != op)) for s in plan.stages]
    if to is not None:
        stages[to] = dataclasses.replace(stages[to], ops=(op, *stages[to].ops))
    with pytest.raises(PlanError, match="which the graph of LM does not allow"):
        explain(dataclasses.replace(plan, stages=tuple(stages)), graph(), costs())


def test_a_rank_without_a_limit_beside_one_with_one_is_explained():
    limited = cluster()
    room = made().stages[0].memory_bytes - 1
    devices = (dataclasses.replace(limited.devices[0], memory_bytes=room), *limited.devices[1:])
    plan = made(cluster=dataclasses.replace(limited, devices=devices))
    told = explain(plan, graph(), costs(), time_limit_s=0.5)
    assert told.memory_prices_s[1:] == (0.0, 0.0)


def test_running_again_takes_as_long_as_the_slower_of_device_and_host():
    table = costs()
    launched = {
        name: dataclasses.replace(c, host_forward_s=5 * c.forward_s) for name, c in table.costs.items()
    }
    table = dataclasses.replace(table, costs=launched)
    plan = made(costs=table, recompute="always")
    told = explain(plan, graph(), table).recomputed_s
    again = [sum(launched[op].host_forward_s for op in s.ops) for s in plan.stages]
    assert told == pytest.approx(again)
    # what a stage takes for its backward beside
    kept = made(costs=table, pin={op: s.index for s in plan.stages for op in s.ops if op != "mask"})
    more = [a.backward_s - b.backward_s for a, b in zip(plan.stages, kept.stages, strict=True)]
    assert more == pytest.approx(again)
