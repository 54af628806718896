"""Hosts that launch work more slowly than devices do it: a stage takes as long as the slower of the two."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import problems, solved

from autopipe.costs import CostTable, OpCost
from autopipe.graph import Op, OpGraph, TensorSpec
from autopipe.hardware import Cluster, Link
from autopipe.plans import Plan
from autopipe.solve import Item, Problem, Stage, chain, solve
from autopipe.solve.definition.relaxed import at_one_pace, cheapest
from benchmarks.solver.exhaustive import exhaustive


@st.composite
def hosted(draw) -> Problem:
    """A problem of the oracle, some of whose parts a host takes long to launch."""
    problem, ns = draw(problems()), st.integers(0, 12)

    def launched(part):
        return dataclasses.replace(part, host_ns=(draw(ns), draw(ns))) if draw(st.booleans()) else part

    items, shares = tuple(map(launched, problem.items)), tuple(map(launched, problem.shares))
    return dataclasses.replace(problem, items=items, shares=shares)


@settings(max_examples=150)
@given(hosted())
def test_equals_exhaustive_search(problem):
    if (found := solved(problem)) is not None:
        answer, least_ns = found
        assert answer.bottleneck_ns == least_ns
        assert answer.proved


@settings(max_examples=150)
@given(hosted())
def test_one_pace_is_a_bound_and_the_truth_where_the_other_is_never_slower(problem):
    truth, bound, paced = (exhaustive(p) for p in (problem, cheapest(problem), at_one_pace(problem)))
    if truth is not None:
        assert bound is not None
        assert bound[0] <= truth[0]
        assert paced is not None
        assert paced[0] == truth[0]


def test_a_host_that_is_as_slow_in_all_and_slower_forward_counts_where_that_runs_again():
    item = Item(("a",), 0, 2, host_ns=(1, 1))
    problem = Problem((item,), (), (), (), (Stage(0),), recompute="always")
    assert exhaustive(at_one_pace(problem))[0] == exhaustive(problem)[0] == 3


def test_a_stage_takes_as_long_as_the_slower_of_the_two():
    items = Item(("a",), 1, 2, host_ns=(30, 10)), Item(("b",), 20, 40, host_ns=(2, 3)), Item(("c",), 5, 9)
    problem = Problem(items, ((0, 1), (1, 2)), (), (), (Stage(0), Stage(1)))
    both, last = problem.loads((0, 0, 1))
    assert (both.forward_ns, both.backward_ns, both.load_ns) == (21, 42, 63)
    first, rest = problem.loads((0, 1, 1))
    assert (first.forward_ns, first.backward_ns, first.load_ns) == (30, 10, 40)
    assert (rest.load_ns, last.load_ns) == (74, 14)
    again = dataclasses.replace(problem, recompute="always").loads((0, 1, 1))
    assert [load.load_ns for load in again] == [70, 99]


GLUE = OpCost(5e-4, 5e-4, 5e-4, host_forward_s=9e-3, host_backward_s=1e-3)
HEAVY = OpCost(4e-3, 8e-3, 4e-3, 4e-3, host_forward_s=1e-4, host_backward_s=1e-4)


def made(costs: dict[str, OpCost], **options) -> Plan:
    """A plan of a line of ops for two ranks."""
    hidden = (TensorSpec((8, 64), "float32", True),)
    ops = [Op("x", "input", "x", outputs=hidden)]
    ops += [Op(name, "module", name, name, outputs=hidden) for name in costs]
    ops.append(Op("output", "output", "output"))
    graph = OpGraph("Line", tuple(ops), tuple(itertools.pairwise(op.name for op in ops)))
    cluster = Cluster.uniform(2, link=Link(1e-6, 1e10))
    options = {"n_stages": 2, "n_microbatches": 8, **options}
    return solve(graph, CostTable(costs), cluster, **options)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_launch_bound_glue_decides_the_cut(schedule):
    """What two hosts launch in 20 ms hides behind what their device does meanwhile."""
    line = {"glue0": GLUE, "glue1": GLUE, **{f"heavy{i}": HEAVY for i in range(4)}}
    plan = made(line, schedule=schedule)
    assert plan.stages[0].ops == ("glue0", "glue1", "heavy0", "heavy1")
    assert plan.stages[0].seconds == pytest.approx(26e-3)
    assert plan.bounds.proved
    assert plan.bounds.bottleneck_s == pytest.approx(26e-3, rel=1e-2)
    # as if each op took the longer of the two, glue would leave room for one heavy op
    no_host = {"host_forward_s": 0.0, "host_backward_s": 0.0}
    longer = {name: dataclasses.replace(cost.paced, **no_host) for name, cost in line.items()}
    assert made(longer, schedule=schedule).stages[0].ops == ("glue0", "glue1", "heavy0")


def test_a_stage_that_waits_for_its_host_has_the_hosts_seconds():
    plan = made({f"glue{i}": GLUE for i in range(4)})
    for stage in plan.stages:
        assert len(stage.ops) == 2
        assert (stage.forward_s, stage.backward_s) == pytest.approx((18e-3, 2e-3))
    split = made({f"glue{i}": GLUE for i in range(4)}, schedule="zb-h1").stages[0]
    assert split.backward_input_s + split.backward_weight_s == pytest.approx(split.backward_s)


def test_ranks_of_several_stages():
    line = {f"op{i}": GLUE if i % 4 < 2 else HEAVY for i in range(16)}
    plan = made(line, n_stages=4, schedule="interleaved")
    for stage in plan.stages:
        cost = CostTable(line).total(stage.ops)
        assert (stage.forward_s, stage.backward_s) == pytest.approx((cost.forward_s, cost.backward_s))
    assert plan.bounds.bottleneck_lower_s <= plan.bounds.bottleneck_s
    # eight of each: the devices' 104 ms in halves, were they to be had
    assert plan.bounds.bottleneck_s < 1.3 * 52e-3


def test_the_costs_of_several_ops_are_those_of_the_slower():
    table = CostTable({"glue": GLUE, "heavy": HEAVY})
    assert table.total(("glue",)) == dataclasses.replace(
        table.total(("glue",)), forward_s=9e-3, backward_s=1e-3, backward_input_s=1e-3
    )
    both = table.total(("glue", "heavy"))
    assert both.forward_s == GLUE.forward_s + HEAVY.forward_s
    assert CostTable.from_dict(table.to_dict()) == table


def test_a_line_too_long_for_exhaustive_search_is_bounded():
    hosts = [(4, 4) if v % 3 else (60, 10) for v in range(240)]
    items = (Item((f"o{v}",), 10 + v % 7, 20 + v % 5, host_ns=host) for v, host in enumerate(hosts))
    stages = tuple(Stage(s) for s in range(4))
    problem = Problem(tuple(items), tuple(itertools.pairwise(range(240))), (), (), stages)
    answer = chain(problem, time_limit_s=3.0)
    assert answer.stage_of is not None
    assert problem.bottleneck(problem.loads(answer.stage_of)) == answer.bottleneck_ns
    assert answer.lower_ns <= answer.bottleneck_ns <= 1.02 * answer.lower_ns
