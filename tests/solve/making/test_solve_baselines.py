"""Splits by weight: the quick way for items in a row is the general search, its choices included."""

import dataclasses
import random
import time

import pytest

from autopipe.solve import Item, Problem, Stage
from autopipe.solve.lines.intervals import best_chain
from autopipe.solve.lines.orders import pinned
from autopipe.solve.making.baselines import by_weight


def drawn(seed, n_pins):
    """Items in a row, some of no op, a few of them pinned to a stage or kept from the first or last ones."""
    draw = random.Random(seed)
    n, k = draw.randint(1, 14), draw.randint(1, 5)
    real = [draw.random() < 0.8 for _ in range(n)]
    weights = [draw.choice((0, 1, 1, 2, 7, 30)) * held for held in real]
    items = [Item(("op",) * held, w) for w, held in zip(weights, real, strict=True)]
    for _ in range(n_pins):
        v, s = draw.randrange(n), draw.randrange(k)
        first, last = draw.choice(((s, s), (s, -1), (0, s)))
        items[v] = dataclasses.replace(items[v], first=first, last=last)
    return Problem(tuple(items), (), (), (), tuple(Stage(s) for s in range(k))), weights


@pytest.mark.parametrize("seed", range(60))
def test_even_runs_are_those_of_the_general_search(seed):
    problem, weights = drawn(seed, 0)
    found = best_chain(problem, range(len(weights)))
    assert by_weight(problem, weights) == (found and found[1])


@pytest.mark.parametrize("seed", range(200))
def test_pinned_runs_are_as_even_as_those_of_the_general_search(seed):
    problem, weights = drawn(seed, 1 + seed % 4)
    stage_of = by_weight(problem, weights)
    chains = [best_chain(problem, order) for order in pinned(problem, range(len(weights)), weights)]
    least = min((found[0] for found in chains if found is not None), default=None)
    assert (stage_of is None) == (least is None)
    if stage_of is not None:
        assert problem.is_valid(stage_of)
        assert problem.bottleneck(problem.loads(stage_of)) == least


def test_many_pinned_items_take_no_search():
    """Nearly all the weight is in one item, so that any run of the others may be a stage."""
    items = [Item((f"o{v}",), first=0, last=0 if v == 0 else -1) for v in range(3_000)]
    problem = Problem(tuple(items), (), (), (), tuple(Stage(s) for s in range(8)))
    weights = [1e6 if v == 3 else 1.0 for v in range(3_000)]
    started = time.process_time()
    stage_of = by_weight(problem, weights)
    assert time.process_time() - started < 0.2
    assert len({*stage_of}) == 8
