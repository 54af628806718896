"""Three and more stages a rank: proofs over paths and packed items, memory of all of them together."""

import itertools
import random
import time

import pytest

from autopipe.schedule import build
from autopipe.solve import Item, Net, Problem, Share, Stage, chain
from autopipe.solve.definition.problem import HUGE
from autopipe.solve.proof.packing import packed
from autopipe.solve.ranks.paths import Paths
from autopipe.solve.ranks.spans import downsets
from benchmarks.solver.exhaustive import exhaustive


def line(n_layers, n_ranks, per_rank, *, overlap=True, limit=HUGE, draw=None, tied=False) -> Problem:
    """An embedding, layers in a row, a head; stages in a loop over the ranks."""
    schedule = build("interleaved", n_ranks, n_ranks * per_rank, 8)
    works = [(draw.randint(800, 1200), 2000) if draw else (1000, 2000) for _ in range(n_layers)]
    items = [Item(("embed",), 300, 600, 500, 5)]
    items += [Item((f"layer{v}",), *work, 100, 50) for v, work in enumerate(works)]
    items += [Item(("head",), 700, 1400, 500, 20), Item(first=schedule.n_stages - 1)]
    nets = tuple(Net(v, (v + 1,), 40, 40, f"v{v}", 10, 10) for v in range(len(items) - 1))
    shares = (Share((0, n_layers + 1), "w", static_bytes=400, sync_ns=30, tied=True),) * tied
    alive = zip(schedule.placement, schedule.in_flight, strict=True)
    return Problem(
        tuple(items),
        tuple(itertools.pairwise(range(len(items)))),
        nets,
        shares,
        tuple(Stage(rank, 1.0, limit, n) for rank, n in alive),
        overlap=overlap,
        moments=schedule.moments,
    )


@pytest.mark.parametrize(
    ("n_layers", "n_ranks", "per_rank", "overlap"),
    [(24, 4, 3, True), (24, 4, 3, False), (30, 3, 4, False), (80, 8, 4, True), (126, 16, 3, True)],
)
def test_long_chains_of_alike_layers_are_proved(n_layers, n_ranks, per_rank, overlap):
    started = time.process_time()
    answer = chain(line(n_layers, n_ranks, per_rank, overlap=overlap), time_limit_s=60.0)
    assert answer.proved
    assert time.process_time() - started < 6.0


def test_memory_of_all_stages_of_a_rank_together_is_proved_too():
    """What fits to the byte is found; one byte less costs time or is proved to fit no more."""
    free = line(24, 4, 3)
    answer = chain(free, time_limit_s=60.0)
    loads = free.loads(answer.stage_of)
    peak = max(free.rank_bytes(rank, [loads[s] for s in own]) for rank, own in free.stages_of.items())
    before = answer.bottleneck_ns
    for limit in (peak, peak - 1, peak - 400):
        tight = chain(line(24, 4, 3, limit=limit), time_limit_s=60.0)
        assert tight.proved
        if tight.stage_of is not None:
            assert tight.bottleneck_ns >= before
            before = tight.bottleneck_ns


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("limit", [HUGE, 2_200])
def test_paths_bound_the_oracle_and_meet_it(seed, limit):
    draw = random.Random(seed)
    tied = draw.random() < 0.5
    problem = line(4, 2, 3, overlap=draw.random() < 0.5, limit=limit, draw=draw, tied=tied)
    best = exhaustive(problem) if seed < 3 else None
    sets = downsets(problem, 100)
    found = Paths(problem, sets).search(HUGE, 0, time.perf_counter() + 10)
    answer = chain(problem, time_limit_s=60.0)
    assert answer.proved
    assert found.lower_ns <= answer.bottleneck_ns
    if answer.stage_of is not None and not problem.shares:
        assert found.lower_ns == answer.bottleneck_ns
        assert found.assignments[-1] is not None
    if best is not None:
        assert answer.bottleneck_ns == best[0]


def test_unlike_layers_have_a_bound_from_what_crosses():
    """Sums of work alone leave out what every chain of twelve stages must send and receive."""
    problem = line(60, 4, 3, overlap=False, draw=random.Random(1))
    found = Paths(problem, downsets(problem, 700)).search(HUGE, 0, time.perf_counter() + 2)
    assert found.lower_ns > -(-problem.total_ns // 4) + 2 * 40
    answer = chain(problem, time_limit_s=1.5)
    assert answer.lower_ns >= found.lower_ns
    assert answer.bottleneck_ns <= 1.04 * answer.lower_ns


@pytest.mark.parametrize("seed", range(20))
def test_packed_items_are_the_least_of_any_spread(seed):
    draw = random.Random(seed)
    n_ranks = draw.randint(1, 3)
    works = [7] * draw.randint(0, 5) + [draw.randint(0, 20) for _ in range(draw.randint(0, 3))]
    spreads = itertools.product(range(n_ranks), repeat=len(works))
    best = min(
        max(sum(w for w, r in zip(works, s, strict=True) if r == x) for x in range(n_ranks)) for s in spreads
    )
    assert packed(works, n_ranks) <= best
    if len([w for w in works if w and w != 7]) < 3:
        assert packed(works, n_ranks) == best or not works
