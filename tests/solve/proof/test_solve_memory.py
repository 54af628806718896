"""What memory leaves is a bound for every assignment, near the optimum where rows of layers run again."""

import dataclasses
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopipe.solve import Block, Item, Problem, Stage, chain
from autopipe.solve.definition.problem import HUGE
from autopipe.solve.proof import memory
from autopipe.solve.proof.bounds import lower_bound
from autopipe.solve.proof.memory import least_in_room, least_total_in_room, part_with_room
from autopipe.solve.proof.shortage import shortage
from benchmarks.solver.exhaustive import exhaustive
from tests.solve.random_problems import problems

SOON_S = 30.0


def bound(problem: Problem, most: int) -> int:
    return least_in_room(problem, 0, most, time.perf_counter() + SOON_S)


def has_room(problem: Problem) -> bool:
    return part_with_room(problem, time.perf_counter() + SOON_S) >= 1


@given(problems(), st.sampled_from((5, 10, 15, 30)))
def test_no_assignment_beats_what_memory_leaves(problem, limit):
    stages = tuple(dataclasses.replace(s, limit_bytes=limit) for s in problem.stages)
    problem = dataclasses.replace(problem, stages=stages)
    best = exhaustive(problem)
    if best is not None:
        assert has_room(problem)
        assert bound(problem, best[0] + 5) <= best[0]


@given(problems(), st.integers(0, 3), st.sampled_from((10, 20, 40)))
def test_nor_where_ranks_hold_several_stages(problem, shift, limit):
    stages = tuple(
        dataclasses.replace(s, rank=(x + shift) % 2, limit_bytes=limit, speed=1.0)
        for x, s in enumerate(problem.stages)
    )
    problem = dataclasses.replace(problem, stages=stages)
    best = exhaustive(problem)
    if best is not None:
        assert has_room(problem)
        assert bound(problem, best[0] + 5) <= best[0]


@settings(max_examples=30)
@given(problems(), st.sampled_from((5, 10, 20, 40)))
def test_nor_the_sum_of_what_ranks_take(problem, limit):
    stages = tuple(dataclasses.replace(s, limit_bytes=limit, speed=1.0) for s in problem.stages)
    problem = dataclasses.replace(problem, stages=stages)
    least = least_total_in_room(problem, time.perf_counter() + SOON_S)
    for stage_of in itertools.product(range(problem.n_stages), repeat=len(problem.items)):
        loads = problem.loads(stage_of)
        if problem.is_valid(stage_of) and problem.bottleneck(loads) < HUGE:
            assert least <= sum(load.forward_ns + load.backward_ns for load in loads)


def test_what_must_run_again_is_in_the_sum():
    """Of 640 bytes and more that each of the first ranks would keep, 320 have room."""
    roomy, tight = (
        least_total_in_room(layers(64, 8, limit), time.perf_counter() + SOON_S) for limit in (10_000, 320)
    )
    assert roomy <= 64 * 30 < 1.05 * 64 * 30 < tight <= 64 * 40


def layers(n: int, n_stages: int, limit: int) -> Problem:
    """Alike layers of 30 ns that save 10 bytes, of which a block of 10 ns gives up 9, under 1F1B."""
    block = Block(("b",), 10, 10, 1)
    items = tuple(Item((f"o{v}",), 10, 20, 20, 10, blocks=(block,)) for v in range(n))
    stages = tuple(Stage(s, limit_bytes=limit, in_flight=n_stages - s) for s in range(n_stages))
    edges = tuple((v, v + 1) for v in range(n - 1))
    return Problem(items, edges, (), (), stages, recompute="auto")


def test_it_knows_what_must_run_again():
    problem = layers(64, 8, 320)
    answer = chain(problem)
    assert lower_bound(problem) == 240
    assert 240 < bound(problem, HUGE) <= answer.bottleneck_ns <= 1.1 * bound(problem, HUGE)


@pytest.mark.parametrize("recompute", ["never", "auto", "always"])
def test_what_has_no_room_is_told_at_once(recompute):
    problem = dataclasses.replace(layers(640, 8, 1600), recompute=recompute)
    started = time.process_time()
    answer = chain(problem)
    assert answer.stage_of is None
    assert answer.proved
    assert time.process_time() - started < 3.0
    assert not has_room(problem)


def test_most_of_the_time_is_left_to_look_for_assignments(monkeypatch):
    from scipy import optimize

    given, linprog = [], optimize.linprog

    def timed(*args, options, **others):
        given.append(options["time_limit"])
        return linprog(*args, options=options, **others)

    monkeypatch.setattr(optimize, "linprog", timed)
    problem = layers(64, 8, 320)
    least_in_room(problem, 0, HUGE, time.perf_counter() + SOON_S)
    part_with_room(problem, time.perf_counter() + SOON_S)
    assert len(given) > 1
    assert max(given) <= SOON_S / 4


def test_a_program_that_is_too_large_is_given_up_while_it_is_made():
    n = 1000
    items = tuple(Item((f"o{v}",), 10 + v, 20, 20, 10) for v in range(n))
    stages = tuple(Stage(s, limit_bytes=n, in_flight=32 - s) for s in range(32))
    edges = tuple((v, v + 1) for v in range(n - 1))
    problem = Problem(items, edges, (), (), stages, recompute="auto")
    program = memory._Program(problem)
    assert program.is_large
    assert program.n_columns < 1.5 * memory._COLUMNS
    assert has_room(problem)
    assert bound(problem, HUGE) == 0


@pytest.mark.parametrize("limits", [(40, 10_000), (0, 0)])
def test_what_has_no_room_where_it_must_be_is_no_shortage_of_all_ranks(limits):
    items = tuple(Item((f"o{v}",), 10, 20, 0, 10, first=0, last=0) for v in range(8))
    stages = tuple(Stage(s, limit_bytes=limit, in_flight=2 - s) for s, limit in enumerate(limits))
    problem = Problem(items, (), (), (), stages, allow_empty=True)
    assert not has_room(problem)
    short = shortage(problem, time.perf_counter() + SOON_S)
    assert short is not None
    assert short.what == ("some" if limits[0] else "one")
    answer = chain(problem)
    assert answer.stage_of is None
    assert answer.proved
