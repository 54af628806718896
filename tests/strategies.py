"""Hypothesis strategies that several rooms' tests share, a section per room."""

from __future__ import annotations

from hypothesis import strategies as st

from autopipe.hardware import Cluster, Link
from autopipe.schedule import NAMES, Schedule, StageTimes, Transfer, build

# ---- schedule ----


@st.composite
def schedules(
    draw, names=NAMES, max_ranks=4, max_per_rank=3, max_microbatches=7, any_placement=True
) -> Schedule:
    """A schedule by any name, on its own placement or (by default sometimes) a random one."""
    n_ranks = draw(st.integers(1, max_ranks))
    n_stages = draw(st.integers(n_ranks, n_ranks * max_per_rank))
    placement = None
    if any_placement and draw(st.booleans()):
        extra = st.lists(
            st.integers(0, n_ranks - 1), min_size=n_stages - n_ranks, max_size=n_stages - n_ranks
        )
        placement = draw(st.permutations([*range(n_ranks), *draw(extra)]))
    name = draw(st.sampled_from(names))
    return build(name, n_ranks, n_stages, draw(st.integers(1, max_microbatches)), placement=placement)


def stage_times(n_stages: int, least: float = 0.0) -> st.SearchStrategy[tuple[StageTimes, ...]]:
    """Times of each stage; with ``least`` 0 some are free."""
    seconds = st.integers(0, 8).map(lambda n: least + n / 4)
    return st.lists(
        st.builds(StageTimes, seconds, seconds, seconds, seconds), min_size=n_stages, max_size=n_stages
    ).map(tuple)


@st.composite
def boundaries(draw, n_stages: int, max_transfers: int = 8) -> tuple[Transfer, ...]:
    """Any values between stages: several per pair, skips, several consumers, some not differentiable."""
    if n_stages == 1:
        return ()
    pairs = st.tuples(st.integers(0, n_stages - 1), st.integers(0, n_stages - 1))
    pairs = pairs.filter(lambda p: p[0] != p[1]).map(lambda p: (min(p), max(p)))
    rows = st.tuples(pairs, st.integers(0, 3).map(lambda n: 100 * n), st.booleans())
    drawn = draw(st.lists(rows, max_size=max_transfers))
    return tuple(Transfer(a, b, n, d, f"v{i}") for i, ((a, b), n, d) in enumerate(drawn))


@st.composite
def clusters(draw, n_ranks: int) -> Cluster:
    """Links of one kind within a host and another across, one of them free at times."""
    link = st.builds(Link, st.sampled_from((0.0, 0.1)), st.sampled_from((float("inf"), 1000.0, 100.0)))
    hosts = draw(st.lists(st.integers(0, 1), min_size=n_ranks, max_size=n_ranks).map(sorted))
    cluster = Cluster.uniform(n_ranks, link=draw(link))
    return Cluster(cluster.devices, tuple(hosts), local=cluster.local, remote=draw(link))
