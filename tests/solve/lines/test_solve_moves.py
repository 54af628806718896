"""Moves from one assignment to others, and what they find: steps that no order of chains has."""

import itertools
import random
import time

import pytest

from autopipe.solve import Item, Problem, Stage
from autopipe.solve.lines.moves import carried, improve, neighbours, past

WAYS = (neighbours, past, carried)


def drawn(seed: int) -> tuple[Problem, tuple[int, ...]]:
    """A small graph, and stages that follow it, none empty."""
    draw = random.Random(seed)
    n, k = draw.randint(4, 9), draw.randint(2, 4)
    items = (*(Item((f"o{v}",)) for v in range(n)), Item(first=k - 1))
    edges = tuple((a, b) for a, b in itertools.combinations(range(n), 2) if draw.random() < 0.25)
    problem = Problem(items, edges, (), (), tuple(Stage(s) for s in range(k)))
    cuts = sorted(draw.sample(range(1, n), k - 1))
    return problem, (*(sum(v >= c for c in cuts) for v in range(n)), k - 1)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("way", WAYS)
def test_every_move_is_to_another_valid_assignment(way, seed):
    problem, stage_of = drawn(seed)
    assert problem.is_valid(stage_of)
    found = list(way(problem, stage_of))
    assert stage_of not in found
    assert all(map(problem.is_valid, found))


def test_a_branch_goes_as_one_and_stages_go_past_one_another():
    """Two lines side by side, of two ops each, and the output."""
    items = (*(Item((f"o{v}",)) for v in range(4)), Item(first=1))
    problem = Problem(items, ((0, 1), (2, 3)), (), (), (Stage(0), Stage(1)))
    assert (1, 1, 0, 0, 1) in past(problem, (0, 0, 1, 1, 1))
    assert (0, 0, 1, 1, 1) in carried(problem, (0, 0, 0, 1, 1))
    assert (1, 1, 0, 0, 1) in carried(problem, (0, 1, 0, 0, 1))


@pytest.mark.parametrize("number", [64, 97, 188])
def test_no_split_that_is_pinned_has_a_shorter_step(number):
    """Branches whose best order is none of the chains': each way to cut is planned by pins."""
    from benchmarks.solver.audit import Reading, drawn

    asked = drawn(number)
    reading, limits = Reading(asked), Reading(asked).limits()
    found, steps = asked.plan().step_s, []
    for home in reading.splits():
        # what no rank has room for is refused with a remedy, which takes longer to find than all plans
        if reading.priced(home).fits(limits):
            steps.append(asked.plan(pin=home).step_s)
    assert found <= min(steps) * (1 + 1e-6)


@pytest.mark.parametrize("n", [500, 2000])
def test_moves_of_many_items_of_which_none_helps_keep_their_time(n):
    """A chain on ranks that are all short of memory: no two items may change places, whichever they are."""
    items = tuple(Item((f"o{v}",), 10, 20, 10) for v in range(n))
    stages = tuple(Stage(s, limit_bytes=1) for s in range(10))
    problem = Problem(items, tuple(itertools.pairwise(range(n))), (), (), stages)
    stage_of = tuple(10 * v // n for v in range(n))
    started = time.perf_counter()
    assert improve(problem, stage_of, started + 0.1) == stage_of
    assert time.perf_counter() - started < 2.0
