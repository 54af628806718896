"""The memory formulas, and that simulator and formulas agree."""

import dataclasses

import pytest
from hypothesis import given
from plans import make_plan
from strategies import schedules

from autopipe.costs import CostTable, OpCost
from autopipe.errors import InputError
from autopipe.memory import plan_memory, rank_memory, stage_memory, tied_bytes
from autopipe.plans import Tie
from autopipe.schedule import build, in_flight
from autopipe.schedule.templates import TEMPLATES
from autopipe.simulator import simulate


def test_stage_by_hand():
    """100 B of weights of which 80 train, Adam's two moments, 3 microbatches of 10 B, 4 + 5 B beside."""
    m = stage_memory(
        parameter_bytes=100,
        gradient_bytes=80,
        saved_bytes=10,
        workspace_bytes=5,
        boundary_bytes=4,
        in_flight=3,
    )
    assert (m.static_bytes, m.activation_bytes, m.total_bytes) == (100 + 80 + 160, 30, 340 + 30 + 9)
    half = stage_memory(parameter_bytes=2, gradient_bytes=2, optimizer_bytes_per_parameter_byte=6.0)
    assert half.optimizer_bytes == 12


@given(schedules(TEMPLATES))
def test_one_stage_per_rank_needs_what_its_stage_needs(schedule):
    if schedule.n_stages != schedule.n_ranks:
        return
    stages = [
        stage_memory(parameter_bytes=s, saved_bytes=10 * s, workspace_bytes=3, in_flight=n)
        for s, n in enumerate(in_flight(schedule))
    ]
    by_rank = rank_memory(schedule, stages)
    assert [by_rank[r].total_bytes for r in schedule.placement] == [s.total_bytes for s in stages]


def test_several_stages_peak_together_not_apart():
    """A rank's peak is over its own order: less than its stages' peaks summed, at least the largest."""
    schedule = build("zbv", 4, 8, 8)
    stages = [stage_memory(saved_bytes=1, in_flight=n) for n in in_flight(schedule)]
    for rank, memory in enumerate(rank_memory(schedule, stages)):
        own = [stages[s].total_bytes for s in schedule.stages_of(rank)]
        assert max(own) <= memory.total_bytes <= sum(own)
        assert memory.total_bytes <= 8
    assert rank_memory(schedule, stages)[3].total_bytes < sum(stages[s].total_bytes for s in (3, 4))


def test_forward_only_saves_nothing():
    schedule = build("forward-only", 2, 2, 5)
    assert rank_memory(schedule, [stage_memory(saved_bytes=9, workspace_bytes=2)] * 2)[0].total_bytes == 2


def test_ties_on_one_rank_count_once():
    plan = make_plan(n_stages=4)
    together = dataclasses.replace(
        plan,
        stages=tuple(dataclasses.replace(s, rank=min(s.index, 2)) for s in plan.stages),
        cluster=dataclasses.replace(plan.cluster, devices=plan.cluster.devices[:3]),
        ties=(Tie("weight", ("a", "b", "c"), (0, 2, 3), 100, mode="colocate"),),
    )
    assert tied_bytes(plan) == (0, 0, 0, 0)
    assert tied_bytes(together) == (0, 0, 100 + 100 + 200)
    half = dataclasses.replace(together, settings={"optimizer_bytes_per_parameter_byte": 0.5})
    assert tied_bytes(half) == (0, 0, 250)
    untrained = tuple(dataclasses.replace(s, gradient_bytes=0) for s in together.stages)
    assert tied_bytes(dataclasses.replace(together, stages=untrained)) == (0, 0, 100)
    counted = simulate(dataclasses.replace(together, ties=())).rank_memory
    once = simulate(together).rank_memory
    assert [a.static_bytes - b.static_bytes for a, b in zip(counted, once, strict=True)] == [0, 0, 400]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1", "zb-h2"])
def test_simulated_peak_is_the_formula(name):
    """Values of 500 B: two buffers for each that comes in, one for the gradient of each that goes out."""
    plan = make_plan(n_stages=4, n_microbatches=8)
    timeline = simulate(plan, schedule=name)
    for rank, n in enumerate(in_flight(timeline.schedule)):
        buffers = (500, 1000 + 500, 2 * 1000 + 500, 1000)
        assert timeline.peak_bytes[rank] == 400 + 400 + 800 + n * 1000 + 50 + buffers[rank]


def test_op_costs_make_a_plans_memory_closer():
    """Two ops: the workspace of the first comes before the second has saved anything."""
    plan = make_plan(n_stages=2, n_microbatches=4)
    stages = tuple(dataclasses.replace(s, ops=(f"a{s.index}", f"op{s.index}")) for s in plan.stages)
    plan = dataclasses.replace(plan, stages=stages)
    costs = CostTable(
        {
            **{f"a{s}": OpCost(1.0, 2.0, saved_bytes=100, workspace_bytes=50) for s in (0, 1)},
            **{f"op{s}": OpCost(1.0, 2.0, saved_bytes=900) for s in (0, 1)},
        }
    )
    sums, walked = plan_memory(plan), plan_memory(plan, costs)
    assert [m.workspace_bytes for m in sums] == [50, 50]
    assert walked[0].saved_bytes == 1000
    assert walked[0].workspace_bytes == 0
    assert walked[1].boundary_bytes == 2 * 500
    assert simulate(plan, costs=costs).memory == tuple(
        dataclasses.replace(m, in_flight=n) for m, n in zip(walked, (2, 1), strict=True)
    )


@pytest.mark.parametrize("names", [(), ("op0",), ("another", "op1")])
def test_costs_of_another_model_are_refused(names):
    costs = CostTable(dict.fromkeys(names, OpCost(1.0, 2.0)))
    with pytest.raises(InputError, match="none of the 1 ops"):
        simulate(make_plan(n_stages=2), costs=costs)


def test_costs_of_ops_that_are_only_called_the_same_are_refused():
    plan = make_plan(n_stages=2)
    plan = dataclasses.replace(plan, settings={**plan.settings, "costs_of": "one", "dims": {"batch": 4}})
    costs = dict.fromkeys((op for stage in plan.stages for op in stage.ops), OpCost(1.0, 2.0))
    for ops in ("", "one"):
        assert simulate(plan, costs=CostTable(costs, {"batch": 4}, ops=ops)).step_s > 0
    with pytest.raises(InputError, match="of other ops"):
        simulate(plan, costs=CostTable(costs, {"batch": 4}, ops="other"))
    with pytest.raises(InputError, match="microbatch of"):
        simulate(plan, costs=CostTable(costs, {"batch": 2}, ops="one"))
