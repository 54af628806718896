"""Splits by weight: the quick way for items in a row is the general search, its choices included."""

import random
import time

import pytest

from autopipe.solve import Item, Problem, Stage
from autopipe.solve.definition.answer import OutOfTime
from autopipe.solve.lines.intervals import best_chain
from autopipe.solve.making.baselines import _even, by_weight


@pytest.mark.parametrize("seed", range(60))
def test_even_runs_are_those_of_the_general_search(seed):
    draw = random.Random(seed)
    n, k = draw.randint(1, 14), draw.randint(1, 5)
    real = [draw.random() < 0.8 for _ in range(n)]
    weights = [draw.choice((0, 1, 1, 2, 7, 30)) * held for held in real]
    items = tuple(Item(("op",) * held, w) for w, held in zip(weights, real, strict=True))
    found = best_chain(Problem(items, (), (), (), tuple(Stage(s) for s in range(k))), range(n))
    assert _even(weights, real, k) == (found and found[1])


@pytest.mark.parametrize("seed", range(20))
def test_pins_are_met_with_the_least_largest_weight(seed):
    draw = random.Random(seed)
    n, k = draw.randint(4, 9), draw.randint(2, 3)
    weights = [draw.randint(1, 9) for _ in range(n)]
    items = [Item((f"o{v}",), w) for v, w in enumerate(weights)]
    v, s = draw.randrange(n), draw.randrange(k)
    items[v] = Item(items[v].ops, first=s, last=s)
    stage_of = by_weight(Problem(tuple(items), (), (), (), tuple(Stage(s) for s in range(k))), weights)
    free = by_weight(Problem(tuple(items[:v] + items[v + 1 :]), (), (), (), (Stage(0),)), weights[1:])
    assert free == (0,) * (n - 1)
    if stage_of is None:
        assert v < s or n - 1 - v < k - 1 - s
    else:
        assert stage_of[v] == s
        assert list(stage_of) == sorted(stage_of)
        assert len({*stage_of}) == k


def test_a_search_among_many_pinned_items_keeps_the_time():
    """Nearly all the weight is in one item, so that any run of the others may be a stage."""
    items = [Item((f"o{v}",), first=0, last=0 if v == 0 else -1) for v in range(3_000)]
    problem = Problem(tuple(items), (), (), (), tuple(Stage(s) for s in range(8)))
    weights = [1e6 if v == 3 else 1.0 for v in range(3_000)]
    with pytest.raises(OutOfTime):
        by_weight(problem, weights, time.perf_counter() + 0.05)
