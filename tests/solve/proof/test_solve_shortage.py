"""What is short without a search is so of every assignment, and told at once with the arithmetic."""

import dataclasses
import importlib
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from language_model import LINK, graph

from autopipe.costs import CostTable, OpCost
from autopipe.errors import InfeasibleError, UndecidedError
from autopipe.hardware import Cluster, Device
from autopipe.solve import Item, Problem, Stage, solve
from autopipe.solve.proof.shortage import shortage
from benchmarks.solver import drawn
from benchmarks.solver.exhaustive import exhaustive
from tests.solve.random_problems import problems

SOON_S = 30.0
N_LAYERS, N_RANKS = 1200, 32
LAYER = 64 * 64 * 4 * 4
"""Bytes of a layer's weight, its gradient and Adam's two moments."""
KEPT = 1 << 10


def found(problem):
    return shortage(problem, time.perf_counter() + SOON_S)


@given(problems(), st.sampled_from((0, 3, 5, 10, 15, 30)), st.integers(1, 3))
def test_where_something_is_short_nothing_fits(problem, limit, n_ranks):
    stages = tuple(
        dataclasses.replace(s, limit_bytes=limit, rank=x % n_ranks, speed=1.0)
        for x, s in enumerate(problem.stages)
    )
    problem = dataclasses.replace(problem, stages=stages)
    if (short := found(problem)) is not None:
        assert short.least_bytes > short.room_bytes
        assert exhaustive(problem) is None


@pytest.mark.parametrize("part", range(8))
def test_nor_does_anything_of_problems_that_have_everything(part):
    """Limits unlike by rank, pins, blocks, several stages a rank, values that may be made again."""
    seen = set()
    for number in range(part, 800, 8):
        draw = random.Random(number)
        problem = drawn.problem(draw)
        share = draw.choice((0.1, 0.3, 0.6))
        limits = {rank: round(share * draw.randint(0, 40)) for rank in problem.stages_of}
        stages = tuple(dataclasses.replace(s, limit_bytes=limits[s.rank]) for s in problem.stages)
        problem = dataclasses.replace(problem, stages=stages)
        if (short := found(problem)) is not None:
            seen.add(short.what)
            assert short.least_bytes > short.room_bytes
            assert exhaustive(problem) is None
    assert len(seen) >= 3


def layers(limits, **fields) -> Problem:
    """Six alike items of 10 bytes, that save 4, over as many stages as limits."""
    items = tuple(Item((f"o{v}",), 10, 20, 10, 4) for v in range(6))
    stages = tuple(Stage(s, limit_bytes=b, in_flight=len(limits) - s) for s, b in enumerate(limits))
    return Problem(items, tuple((v, v + 1) for v in range(5)), (), (), stages, **fields)


def pinned(problem: Problem, n: int, stage: int) -> Problem:
    """With the first so many items in one stage."""
    items = tuple(
        dataclasses.replace(i, first=stage, last=stage) if v < n else i for v, i in enumerate(problem.items)
    )
    return dataclasses.replace(problem, items=items)


@pytest.mark.parametrize(
    ("problem", "what", "static", "beside", "room", "stages"),
    [
        (layers((29, 30)), "all", 60, 0, 59, (0, -1)),
        (layers((13, 13)), "all", 60, 0, 26, (0, -1)),
        (layers((100, 13)), "least", 10, 4, 13, (1, 1)),
        (layers((100, 0), recompute="auto"), "least", 10, 4, 0, (1, 1)),
        (pinned(layers((53, 99)), 3, 0), "some", 30, 24, 53, (0, 0)),
        (pinned(layers((17, 99)), 1, 0), "one", 10, 8, 17, (0, 0)),
        (pinned(layers((17, 99), recompute="always"), 2, 0), "some", 20, 0, 17, (0, 0)),
    ],
)
def test_the_arithmetic_of_what_is_short_is_as_by_hand(problem, what, static, beside, room, stages):
    short = found(problem)
    assert (short.what, short.static_bytes, short.beside_bytes, short.room_bytes) == (
        what,
        static,
        beside,
        room,
    )
    assert (short.first, short.last) == stages


def costs(saved=KEPT, **others) -> CostTable:
    names = [op.name for op in graph(N_LAYERS).compute]
    table = {name: OpCost(1e-3, 2e-3, 1e-3, 1e-3, saved) for name in names}
    return CostTable(table | {"mask": OpCost(1e-7)} | others)


HEAVY = {"layer700": OpCost(1e-3, 2e-3, 1e-3, 1e-3, 1 << 30)}
PINS = {f"layer{i}": 0 for i in range(60)}
SHORT = {
    "parameters alone": ({"memory_limit": "1MB"}, costs(), r"the 32 ranks hold 30\.5 MiB together"),
    "activations alone": (
        {"memory_limit": "16MB"},
        costs(200_000),
        r"what microbatches in flight keep is .* at least.*recompute=.auto. keeps less",
    ),
    "what runs again too": (
        {"memory_limit": "3MB", "recompute": "auto"},
        costs(1 << 20),
        r"layer\d+ alone needs|no op needs less there|what microbatches in flight keep",
    ),
    "one op alone": (
        {"memory_limit": "900MB"},
        costs(**HEAVY),
        r"layer700 alone needs 1\.0 GiB in stage 31 \(rank 31\).*64\.0 KiB of param.*room for 858\.3 MiB",
    ),
    "pins": (
        {"memory_limit": "6MB", "pin": PINS},
        costs(),
        r"what must be in stage 0 \(rank 0\) with the pins .* needs 6\.1 MiB at least.*room for 5\.7 MiB",
    ),
    "one rank's limit": (
        {"memory_limit": ["1GB"] * 5 + [60_000] + ["1GB"] * 26},
        costs(),
        r"alone needs .* in stage 5 \(rank 5\), and no op needs less there.*room for 58\.6 KiB",
    ),
    "a rank of no memory": (
        {"memory_limit": ["1GB"] * 31 + [0]},
        costs(),
        r"in stage 31 \(rank 31\), and no op needs less there.*room for 0 B",
    ),
    "several stages a rank": (
        {"memory_limit": "900MB", "schedule": "interleaved", "n_stages": 64},
        costs(**HEAVY),
        r"layer700 alone needs .* room for 858\.3 MiB",
    ),
}


@pytest.mark.parametrize("way", SHORT)
def test_what_cannot_fit_at_all_is_told_in_under_a_second(way):
    options, table, words = SHORT[way]
    ranks = Cluster((Device(),) * N_RANKS, local=LINK)
    asked = {"n_stages": N_RANKS, "n_microbatches": 64, **options}
    large = graph(N_LAYERS)
    importlib.import_module("scipy.optimize")  # the solver is timed, not its imports
    started = time.process_time()
    with pytest.raises(InfeasibleError, match=words) as told:
        solve(large, table, ranks, **asked)
    assert time.process_time() - started < 1.0
    assert not isinstance(told.value, UndecidedError)
