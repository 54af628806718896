"""Stages that no item can fill are told at once, and nothing is told of what can be filled."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_problems import problems

from autopipe.costs import CostTable, OpCost
from autopipe.errors import InfeasibleError, UndecidedError
from autopipe.graph import Op, OpGraph, TensorSpec
from autopipe.hardware import Cluster
from autopipe.solve import Answer, Item, Problem, Stage, chain, solve
from autopipe.solve.definition.problem import HUGE
from autopipe.solve.proof.filling import can_fill, windows
from benchmarks.solver.exhaustive import exhaustive


@st.composite
def windowed(draw) -> Problem:
    """Items in any stages of a window each, and nothing else that decides; some hold no op."""
    k, n = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    spans = [sorted(draw(st.tuples(st.integers(0, k - 1), st.integers(0, k - 1)))) for _ in range(n)]
    ops = [draw(st.sampled_from(((f"o{v}",), (f"o{v}",), ()))) for v in range(n)]
    items = tuple(Item(o, 1, 1, first=a, last=b) for o, (a, b) in zip(ops, spans, strict=True))
    return Problem(items, (), (), (), tuple(Stage(r) for r in range(k)), allow_empty=draw(st.booleans()))


@given(windowed())
def test_windows_alone_are_told_exactly(problem):
    assert can_fill(problem) == (exhaustive(problem) is not None)


@given(problems())
def test_what_cannot_be_filled_has_no_assignment(problem):
    best = exhaustive(problem)
    if not can_fill(problem):
        assert best is None
        assert chain(problem) == Answer(None, HUGE, HUGE)
    if best is not None:
        assert all(a <= s <= b for s, (a, b) in zip(best[1], windows(problem), strict=True))


def test_many_items_of_the_last_stage_leave_the_others_empty_for_sure():
    """However many there are: what is looked for in the time is no proof."""
    items = (Item(("free",), 1, 1), *(Item((f"o{v}",), 1 + v % 7, 2, first=3) for v in range(300)))
    edges = tuple((v, v + 1) for v in range(1, 299))
    problem = Problem(items, edges, (), (), tuple(Stage(r) for r in range(4)))
    answer = chain(problem, time_limit_s=0.0)
    assert (answer.stage_of, answer.proved) == (None, True)


HIDDEN = (TensorSpec((4, 8), "float32", True),)


def with_a_tail(n_before: int) -> OpGraph:
    """A row of ops before one whose rows mix, and two after it."""
    names = [f"layer{x}" for x in range(n_before)] + ["mixes", "then", "head"]
    ops = (Op("x", "input", "x", outputs=HIDDEN), *(Op(n, "module", n, n, outputs=HIDDEN) for n in names))
    ops += (Op("output", "output", "output"),)
    order = ["x", *names, "output"]
    return OpGraph("Mixing", ops, tuple(itertools.pairwise(order)), tail=("mixes", "then", "head"))


@pytest.mark.parametrize("n_before", [1, 2])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_stages_that_a_tail_leaves_empty_are_told_with_a_number_that_works(n_before, schedule):
    graph = with_a_tail(n_before)
    table = CostTable({op.name: OpCost(1e-3, 1e-3) for op in graph.compute})
    for k in range(1, 6):
        options = {"n_stages": k, "n_microbatches": 2, "schedule": schedule}
        if k <= n_before + 1:
            assert solve(graph, table, Cluster.uniform(k), **options).n_stages == k
            continue
        most = n_before + 1
        words = f"{most} stages at most.* mix the rows .*use n_stages={most},"
        with pytest.raises(InfeasibleError, match=words) as told:
            solve(graph, table, Cluster.uniform(k), **options)
        assert not isinstance(told.value, UndecidedError)
        with pytest.raises(InfeasibleError, match=r"with the pins .*; drop a pin"):
            solve(graph, table, Cluster.uniform(k), pin={"head": -1}, **options)
