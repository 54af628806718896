"""Prices that depend on who holds what: links of unlike speed, senders paid per receiver, many-way ties."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_solve_oracle import problems, solved

from autopipe.hardware import Link
from autopipe.solve import Item, Problem, Share, Stage


@st.composite
def entangled(draw) -> Problem:
    """A problem of the oracle with true prices above those of its nets and shares."""
    problem = dataclasses.replace(draw(problems()), sender_pays=draw(st.sampled_from(("once", "receiver"))))
    more = st.lists(st.integers(0, 4), min_size=1, max_size=2)
    shares = tuple(
        dataclasses.replace(s, more_ns=tuple(itertools.accumulate(draw(more), initial=s.sync_ns))[1:])
        for s in problem.shares
    )
    pairs = None
    if draw(st.booleans()):
        pairs = {
            (a, b): tuple(
                (n.send_ns + draw(st.integers(0, 3)), n.receive_ns + draw(st.integers(0, 3)))
                for n in problem.nets
            )
            for a, b in itertools.permutations(range(problem.n_stages), 2)
        }
    return dataclasses.replace(problem, shares=shares, pair_ns=pairs)


@settings(max_examples=150, deadline=None)
@given(entangled())
def test_found_plans_are_scored_with_true_prices_and_bounded(problem):
    if (found := solved(problem)) is not None:
        answer, least_ns = found
        assert answer.bottleneck_ns >= least_ns


def test_a_tie_of_three_costs_more_than_one_of_two():
    share = Share((0, 1, 2), "w", sync_ns=10, more_ns=(15,))
    assert [share.price_ns(n) for n in (1, 2, 3, 4)] == [0, 10, 15, 15]
    items = tuple(Item((f"o{v}",), 5, 5) for v in range(3))
    problem = Problem(items, ((0, 1), (1, 2)), (), (share,), tuple(Stage(s) for s in range(3)))
    assert [load.sync_ns for load in problem.loads((0, 1, 2))] == [15, 15, 15]
    assert [load.sync_ns for load in problem.loads((0, 0, 2))] == [10, 0, 10]
    assert [load.sync_ns for load in problem.loads((1, 1, 1))] == [0, 0, 0]


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_an_all_reduce_goes_twice_round_the_ring(n_ranks):
    link = Link(1e-3, 1e6)
    assert link.all_reduce_s(1e6, n_ranks) == pytest.approx(2 * (n_ranks - 1) * (1e-3 + 1 / n_ranks))
    assert link.all_reduce_s(1e6, 1) == 0
