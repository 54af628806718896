"""Gathers: every action finds its stage whole, no more are whole than may be, as few are made as can be."""

import functools
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopipe.schedule import NAMES, Action, build, gathers, placement

ROWS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def actions(stages):
    return [Action(stage, "F", i) for i, stage in enumerate(stages)]


def follow(row, before, sharded, most):
    """How many are gathered; fails where one is missing, there twice, or one too many."""
    whole, n = set(), 0
    for i, found in enumerate(before):
        for gather in found:
            assert (gather.stage in whole) is gather.is_end, (i, gather)
            (whole.discard if gather.is_end else whole.add)(gather.stage)
            n += not gather.is_end
            assert most is None or len(whole) <= most
        assert i == len(row) or row[i].stage in whole or row[i].stage not in sharded
    assert not whole
    return n


def fewest(stages, most):
    """By trying every choice of what goes."""

    @functools.cache
    def best(i, whole):
        if i == len(stages):
            return 0
        if stages[i] in whole:
            return best(i + 1, whole)
        if len(whole) < most:
            return 1 + best(i + 1, whole | {stages[i]})
        return 1 + min(best(i + 1, whole - {goes} | {stages[i]}) for goes in whole)

    return best(0, frozenset())


@given(ROWS, st.sets(st.integers(0, 3)), st.integers(1, 4))
def test_each_action_finds_its_stage_whole(stages, sharded, most):
    row = actions(stages)
    follow(row, gathers(row, tuple(sharded), most), sharded, most)


@given(ROWS)
def test_without_a_limit_each_is_gathered_once(stages):
    row = actions(stages)
    assert follow(row, gathers(row, range(4)), range(4), None) == len(set(stages))


@given(ROWS, st.integers(1, 3))
def test_as_few_are_gathered_as_can_be(stages, most):
    row = actions(stages)
    n, least = follow(row, gathers(row, range(4), most), range(4), most), fewest(tuple(stages), most)
    # made ahead, while another stage is at work, one may have to go that could have stayed
    assert least <= n <= (least if most == 1 else 2 * least)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "cost-aware"])
def test_stages_of_schedules_stay_whole_over_a_round(name):
    placed = placement(name, 2, 4)
    schedule = build(name, 2, 4, 8, placement=placed)
    for row in schedule.actions:
        own = {a.stage for a in row}
        rounds = sum(a.stage != b.stage for a, b in itertools.pairwise(row)) + 1
        assert follow(row, gathers(row, tuple(own), 1), own, 1) == rounds
        assert follow(row, gathers(row, tuple(own), len(own)), own, len(own)) == len(own)
