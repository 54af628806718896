"""Ranks with several stages: equal to exhaustive search on small problems."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import problems, solved

from autopipe.schedule import build
from autopipe.solve import Item, Problem, Share, Stage, chain
from autopipe.solve.definition.problem import HUGE

LAYOUTS = (
    ("zbv", 1, 2),
    ("zbv", 2, 3),
    ("zbv", 2, 4),
    ("interleaved", 2, 3),
    ("interleaved", 2, 4),
    ("dualpipev", 2, 4),
)
OTHERS = (("1f1b", 2, 4), ("interleaved", 2, 5), ("1f1b", 1, 3))


@st.composite
def placed(draw, layouts) -> Problem:
    """A problem of the oracle with its stages laid on ranks as a schedule lays them."""
    problem = draw(problems())
    schedule = build(*draw(st.sampled_from(layouts)), draw(st.integers(1, 4)))
    speeds = draw(st.lists(st.sampled_from((1.0, 1.0, 2.0, 0.7)), min_size=2, max_size=2))
    limit = draw(st.sampled_from((HUGE, HUGE, 60, 30)))
    alive = zip(schedule.placement, schedule.in_flight, strict=True)
    shares = tuple(dataclasses.replace(s, tied=draw(st.booleans())) for s in problem.shares)
    pinned = tuple(dataclasses.replace(i, first=0, last=-1) for i in problem.items)
    if draw(st.booleans()):
        again = st.sampled_from((-1, -1, 1, 3))
        problem = dataclasses.replace(
            problem, nets=tuple(dataclasses.replace(n, again_ns=draw(again)) for n in problem.nets)
        )
    for v in draw(st.sets(st.integers(0, len(pinned) - 1), max_size=2)):
        s = draw(st.integers(0, schedule.n_stages - 1))
        pinned = (*pinned[:v], dataclasses.replace(pinned[v], first=s, last=s), *pinned[v + 1 :])
    return dataclasses.replace(
        problem,
        items=pinned,
        shares=shares,
        stages=tuple(Stage(rank, speeds[rank], limit, n) for rank, n in alive),
        moments=schedule.moments,
    )


@settings(max_examples=150)
@given(placed(LAYOUTS))
def test_two_stages_a_rank_equal_exhaustive_search(problem):
    if (found := solved(problem)) is not None:
        answer, least_ns = found
        assert answer.bottleneck_ns == least_ns
        assert answer.proved


@settings(max_examples=60)
@given(placed(OTHERS))
def test_other_layouts_equal_exhaustive_search_where_they_are_small(problem):
    if (found := solved(problem)) is not None:
        answer, least_ns = found
        assert answer.bottleneck_ns == least_ns
        assert answer.proved


def test_the_first_round_of_a_loop_may_be_empty():
    items = tuple(Item((f"o{v}",), 0, 0, 0, 0, 0, first=0 if v else 3, last=-1) for v in range(3))
    stages = tuple(Stage(s % 2, 1.0 + s % 2, HUGE, 1) for s in range(4))
    shares = (Share(items=(0, 1), name="w", forward_ns=2, backward_ns=0, static_bytes=0),)
    moments = build("interleaved", 2, 4, 1).moments
    answer = chain(Problem(items, ((1, 2),), (), shares, stages, allow_empty=True, moments=moments))
    assert (answer.stage_of, answer.bottleneck_ns, answer.proved) == ((3, 3, 3), 1, True)
