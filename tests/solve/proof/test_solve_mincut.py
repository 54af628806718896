"""The single-stage bound holds for every assignment, is exact however large costs are, keeps stages whole."""

import dataclasses
import math

import pytest
from integer_program import random_problem

from autopipe.solve import Item, Net, Problem, Stage, chain
from autopipe.solve.proof.mincut import dearest_item

FOREVER = math.inf
LARGE = 10**12 + 39


def bound(problem: Problem, enough: int = 1 << 29) -> int:
    return dearest_item(problem, enough, FOREVER, tries=99)


def free(seed: int, factor: int = 1) -> Problem:
    """A random problem without memory limits and shares, its costs multiplied."""
    p = random_problem(seed)
    items = tuple(Item(i.ops, i.forward_ns * factor, i.backward_ns * factor) for i in p.items)
    nets = tuple(
        Net(n.producer, n.consumers, n.send_ns * factor, n.receive_ns * factor, n.value) for n in p.nets
    )
    return dataclasses.replace(p, items=items, nets=nets, shares=(), overlap=False)


@pytest.mark.parametrize("seed", range(20))
def test_no_assignment_beats_the_bound(seed):
    problem = free(seed)
    assert 0 < bound(problem) <= chain(problem).bottleneck_ns


@pytest.mark.parametrize("seed", range(20))
def test_large_costs_are_not_rounded(seed):
    exact = bound(free(seed)) * LARGE
    assert bound(free(seed, LARGE), exact) == exact


@pytest.mark.parametrize("seed", range(20))
def test_no_assignment_beats_the_bound_where_transfers_hide(seed):
    problem = dataclasses.replace(free(seed), overlap=True)
    assert 0 < bound(problem) <= chain(problem).bottleneck_ns


def test_hidden_transfers_count_too():
    """1 takes and makes dear values: alone it pays 20 for transfers, with a neighbour 10 and its work."""
    items = (Item(("a",), 30), Item(("b",), 2), Item(("c",), 30))
    nets = (Net(0, (1,), 10, 10, "a"), Net(1, (2,), 10, 10, "b"))
    problem = Problem(items, ((0, 1), (1, 2)), nets, (), tuple(Stage(s) for s in range(3)), overlap=True)
    assert bound(problem) > 30 * 3 // 4
    assert bound(problem) <= chain(problem).bottleneck_ns == 30


def test_what_lies_between_two_items_of_a_stage_counts():
    """0 → 1 → 2: whoever holds both ends, as the dear value between them asks, holds the middle too."""
    items = (Item(("a",), 10), Item(("b",), 6), Item(("c",), 1))
    nets = (Net(0, (2,), 100, 100, "a"), Net(0, (1,), 0, 0, "a'"), Net(1, (2,), 0, 0, "b"))
    problem = Problem(items, ((0, 1), (0, 2), (1, 2)), nets, (), (Stage(0), Stage(1)), allow_empty=True)
    assert bound(problem) == 17 == chain(problem).bottleneck_ns
