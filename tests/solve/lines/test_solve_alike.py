"""Chains over all downsets, interchangeable items counted instead of told apart, equal exhaustive search."""

import dataclasses
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from integer_program import Program

from autopipe.solve import Item, Net, Problem, Stage, chain
from autopipe.solve.lines import exact
from autopipe.solve.lines.alike import likes
from benchmarks.solver.exhaustive import exhaustive

WORKS = st.integers(0, 30)
PRICES = st.tuples(st.integers(0, 6), st.integers(0, 6))


@st.composite
def memories(draw) -> Problem:
    """Sources, items that are (mostly) each other's like, and a row of takers, some of two of them."""
    n_sources, n_likes = draw(st.integers(0, 2)), draw(st.integers(2, 4))
    sources = list(range(n_sources))
    middle = [n_sources + x for x in range(n_likes)]
    row = [n_sources + n_likes + x for x in range(draw(st.integers(1, 8 - n_sources - n_likes)))]
    work, price = draw(WORKS), draw(PRICES)
    works = [
        draw(WORKS) if v not in middle else draw(st.sampled_from((work, work, work, 1)))
        for v in range(len(sources + middle + row))
    ]
    takers = sorted(draw(st.sampled_from(row)) for _ in middle)
    nets = [Net(v, tuple(middle), *draw(PRICES), f"o{v}") for v in sources]
    for v, taker in zip(middle, takers, strict=True):
        nets.append(Net(v, (taker,), *draw(st.sampled_from((price, price, price, (2, 3)))), f"o{v}"))
    for v, after in itertools.pairwise(row):
        if draw(st.integers(0, 5)):
            nets.append(Net(v, (after,), *draw(PRICES), f"o{v}"))
    edges = {(net.producer, v) for net in nets for v in net.consumers}
    if draw(st.booleans()):
        edges.add((middle[-1], row[0]))
    items = tuple(Item((f"o{v}",), w) for v, w in enumerate(works))
    stages = tuple(Stage(s) for s in range(draw(st.integers(2, 3))))
    return Problem(items, tuple(sorted(edges)), tuple(nets), (), stages, allow_empty=draw(st.booleans()))


def chains(problem: Problem, bound: int) -> exact.Chains:
    return exact.Chains(problem, bound, time.perf_counter() + 60)


@settings(max_examples=250)
@given(memories())
def test_counting_likes_equals_exhaustive_search(problem):
    best = exhaustive(problem)
    if best is None:
        assert chains(problem, 1000).best() is None
        return
    for bound in (1000, best[0]):
        found = chains(problem, bound).best()
        assert found[0] == best[0]
        assert problem.is_valid(found[1])
        assert problem.bottleneck(problem.loads(found[1])) == best[0]
    assert chains(problem, best[0] - 1).best() is None


def attention(n_layers: int, n_stages: int) -> Problem:
    """A long encoder, then layers that each take a key of its output and the layer before."""
    items = [Item((f"e{v}",), 70) for v in range(2 * n_layers)]
    nets = [Net(v, (v + 1,), 4, 4, f"e{v}") for v in range(2 * n_layers - 1)]
    memory, first = 2 * n_layers - 1, 2 * n_layers
    items += [Item((f"k{v}",), 33) for v in range(n_layers)]
    items += [Item((f"d{v}",), 51) for v in range(n_layers)]
    nets.append(Net(memory, tuple(range(first, first + n_layers)), 4, 4, "memory"))
    nets += [Net(first + v, (first + n_layers + v,), 2, 3, f"k{v}") for v in range(n_layers)]
    nets += [
        Net(first + n_layers + v, (first + n_layers + v + 1,), 4, 4, f"d{v}") for v in range(n_layers - 1)
    ]
    edges = tuple(sorted({(net.producer, v) for net in nets for v in net.consumers}))
    return Problem(tuple(items), edges, tuple(nets), (), tuple(Stage(s) for s in range(n_stages)))


@pytest.mark.parametrize("overlap", [False, True])
def test_keys_of_a_cross_attention_are_alike_and_equal_the_integer_program(overlap):
    problem = dataclasses.replace(attention(6, 3), overlap=overlap)
    (found,) = likes(problem)[2]
    assert [problem.items[v].ops[0] for v in found.items] == [f"k{v}" for v in range(6)]
    answer = chain(problem)
    assert answer.proved
    assert answer.bottleneck_ns == Program(problem).optimum()


@pytest.mark.parametrize(
    "odd",
    [
        Net(11, (14,), 1, 1, "takes more"),
        Net(14, (20,), 1, 1, "makes more"),
        Net(14, (19,), 1, 1, "taken twice"),
    ],
    ids=lambda net: net.value,
)
def test_an_item_with_a_value_more_is_no_like(odd):
    problem = attention(6, 3)
    edges = tuple(sorted({*problem.edges, *((odd.producer, v) for v in odd.consumers)}))
    problem = dataclasses.replace(problem, nets=(*problem.nets, odd), edges=edges)
    (found,) = likes(problem)[2]
    assert found.items == (12, 13, 15, 16, 17)


def test_more_keys_than_all_downsets_allow_are_proved():
    answer = chain(attention(24, 6))
    assert answer.proved
