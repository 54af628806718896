"""Chains that fit ranks of several stages: found wherever one does, near the bound where there is room."""

import itertools
import math
import time

import pytest

from autopipe.schedule import build
from autopipe.solve import Block, Item, Net, Problem, Stage, chain
from autopipe.solve.definition.problem import HUGE
from autopipe.solve.lines.room import roomy_chain


def line(name: str, n_ranks: int, n_stages: int, n_items: int, recompute: str = "never") -> Problem:
    """Unlike items in a row under a schedule, without limits."""
    schedule = build(name, n_ranks, n_stages, 6)
    items = [Item((f"o{v}",), 3 + v % 4, 5, 7 * v % 11, 3 + 20 * (v % 5 == 1), v % 3) for v in range(n_items)]
    if recompute == "auto":
        items = [
            Item(i.ops, i.forward_ns, i.backward_ns, i.static_bytes, i.saved_bytes, i.workspace_bytes,
                 blocks=(Block(i.ops, i.forward_ns, i.saved_bytes, 1),))
            for i in items
        ]  # fmt: skip
    nets = [Net(v, (v + 1,), 1, 1, f"o{v}", 1) for v in range(n_items - 1)]
    stages = map(Stage, schedule.placement, itertools.repeat(1.0), itertools.repeat(HUGE), schedule.in_flight)
    edges = tuple(itertools.pairwise(range(n_items)))
    return Problem(
        tuple(items), edges, tuple(nets), (), tuple(stages), recompute=recompute, moments=schedule.moments
    )


def within(problem: Problem, limit: int) -> Problem:
    stages = (Stage(s.rank, s.speed, limit, s.in_flight) for s in problem.stages)
    return Problem(
        problem.items, problem.edges, problem.nets, (), tuple(stages),
        recompute=problem.recompute, moments=problem.moments,
    )  # fmt: skip


def least_limit(problem: Problem) -> int:
    """The fewest bytes on every rank that some chain fits, by halving over all chains."""
    n, k = len(problem.items), problem.n_stages
    chains = [
        tuple(sum(v >= cut for cut in cuts) for v in range(n))
        for cuts in itertools.combinations(range(1, n), k - 1)
    ]
    low, high = 0, 10_000
    while high - low > 1:
        tight = within(problem, (low + high) // 2)
        fits = any(tight.bottleneck(tight.loads(chain)) < HUGE for chain in chains)
        low, high = (low, (low + high) // 2) if fits else ((low + high) // 2, high)
    return high


@pytest.mark.parametrize("recompute", ["never", "always", "auto"])
@pytest.mark.parametrize("name", ["interleaved", "looped-bfs", "zbv"])
def test_what_just_fits_is_found(name, recompute):
    problem = line(name, 2, 4, 9, recompute)
    tight = within(problem, least_limit(problem))
    found = roomy_chain(tight, tight, range(9), 0, 0.0, math.inf)
    assert found is not None
    assert tight.is_valid(found)
    assert tight.bottleneck(tight.loads(found)) < HUGE


@pytest.mark.parametrize("name", ["interleaved", "zbv"])
def test_where_there_is_room_loads_are_near_the_bound(name):
    problem = within(line(name, 4, 8, 36), 700)
    found = roomy_chain(problem, problem, range(36), problem.total_ns // 4, math.inf, math.inf)
    assert problem.bottleneck(problem.loads(found)) <= 1.3 * problem.total_ns / 4


@pytest.mark.parametrize("name", ["interleaved", "zbv"])
def test_more_room_loses_no_plan(name):
    problem = line(name, 4, 8, 36)
    held = []
    for limit in (430, 460, 500, 600, 800):
        answer = chain(within(problem, limit), time_limit_s=4.0)
        held.append(answer.stage_of is not None)
    assert held == sorted(held)
    assert held[2:] == [True] * 3


def test_of_many_items_runs_stay_together():
    problem = within(line("interleaved", 2, 4, 900), 40_000)
    started = time.process_time()
    found = roomy_chain(problem, problem, range(900), problem.total_ns // 2, math.inf, math.inf)
    assert time.process_time() - started < 30.0
    assert problem.bottleneck(problem.loads(found)) < 1.4 * problem.total_ns / 2
