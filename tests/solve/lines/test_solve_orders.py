"""Every order an answer may be cut from is a topological order of all items."""

import dataclasses
import random

import pytest

from autopipe.solve import Item, Net, Problem, Stage, chain
from autopipe.solve.definition.problem import HUGE
from autopipe.solve.lines.intervals import near_chain
from autopipe.solve.lines.orders import orders


def layered(seed: int, n: int = 40) -> Problem:
    """Values with several takers each, as masks and residual streams have."""
    draw = random.Random(seed)
    items = tuple(Item((f"o{v}",), draw.randint(0, 9), draw.randint(0, 9)) for v in range(n))
    nets = tuple(
        Net(v, takers, draw.randint(0, 5), draw.randint(0, 5), f"v{v}", 1)
        for v in range(n - 1)
        for takers in [tuple(sorted(draw.sample(range(v + 1, n), min(draw.randint(1, 5), n - 1 - v))))]
    )
    edges = tuple(sorted({(net.producer, v) for net in nets for v in net.consumers}))
    return Problem(items, edges, nets, (), tuple(Stage(s, 1.0, HUGE, 1) for s in range(3)))


@pytest.mark.parametrize("seed", range(40))
def test_orders_are_topological(seed):
    problem = layered(seed)
    for order in orders(problem):
        assert sorted(order) == list(range(len(problem.items)))
        place = {v: i for i, v in enumerate(order)}
        assert all(place[a] < place[b] for a, b in problem.edges)


@pytest.mark.parametrize("seed", range(10))
def test_data_never_flows_back(seed):
    problem = layered(seed)
    stage_of = chain(problem, time_limit_s=1.0).stage_of
    assert all(stage_of[a] <= stage_of[b] for a, b in problem.edges)


def pinned_as_cut(seed: int, k: int = 5) -> Problem:
    """Up to five items pinned where a cut in the items' order has them."""
    problem, draw = layered(seed, 30), random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(problem.items)), k - 1))
    items = list(problem.items)
    for v in draw.sample(range(len(items)), draw.randint(1, 5)):
        stage = sum(v >= cut for cut in cuts)
        items[v] = dataclasses.replace(items[v], first=stage, last=stage)
    stages = tuple(Stage(s) for s in range(k))
    return dataclasses.replace(problem, items=tuple(items), stages=stages)


@pytest.mark.parametrize("seed", range(100))
def test_pins_in_the_middle_leave_an_order_to_cut(seed):
    """Items that no pin holds fill stages before and after those of one that is pinned."""
    problem = pinned_as_cut(seed)
    found = list(orders(problem))
    assert all(order.index(a) < order.index(b) for order in found for a, b in problem.edges)
    assert any(near_chain(problem, order, 1) for order in found)
