"""The validator finds every fault, names it, and marks it in the grid."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import schedules

from autopipe.errors import ScheduleError
from autopipe.schedule import Action, Schedule, build, check, draw
from autopipe.schedule.actions import parse_action
from autopipe.schedule.templates import TEMPLATES


def of_rows(placement, n_microbatches, *rows):
    return Schedule(
        "given", placement, n_microbatches, tuple(tuple(map(parse_action, r.split())) for r in rows)
    )


def faults(schedule):
    with pytest.raises(ScheduleError) as caught:
        check(schedule)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rows", "text", "mark"),
    [
        (("0F0 0B0 0F0", "1F0 1B0"), "0F0 runs twice", ">0F0<"),
        (("0F0 0B0 0B0", "1F0 1B0"), "0B0 runs twice", ">0B0<"),
        (("0F0 0B0", "1B0 1F0"), "1B0 runs before its F", ">1B0<"),
        (("0F0 0W0 0I0", "1F0 1B0"), "0W0 runs before its I", ">0W0<"),
        (("0F0 0I0", "1F0 1B0"), "0W0 is missing, 0I0 is there", ">0I0<"),
        (("0F0 0B0 0W0", "1F0 1B0"), "0W0 repeats what its B already did", ">0W0<"),
        (("0F0 0I0 0B0", "1F0 1B0"), "0B0 repeats what its I or W already did", ">0B0<"),
        (("0F0 0B0 1F0", "1B0"), "1F0 belongs on rank 1", ">1F0<"),
        (("0F0 0B0 2F0", "1F0 1B0"), "2F0 is of stage 2, there are 2", ">2F0<"),
        (("0F0 0B0 0F1", "1F0 1B0"), "0F1 is of microbatch 1, there are 1", ">0F1<"),
        (("0F0", "1F0 1B0"), "0B0 is missing", "rank 0"),
        (("0F0 0B0", ""), "1F0 is missing", "rank 1"),
    ],
)
def test_each_fault_is_named_and_marked(rows, text, mark):
    message = faults(of_rows((0, 1), 1, *rows))
    assert text in message
    assert mark in message


def test_a_deadlock_is_marked_where_every_rank_stands():
    message = faults(of_rows((0, 1), 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert "2 faults" in message
    assert ">0B0<" in message
    assert ">1F1<" in message
    with pytest.raises(ScheduleError, match="deadlocks: rank 0 at 0B0, rank 1 at 1F1"):
        _ = of_rows((0, 1), 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1").order


def test_all_faults_at_once():
    message = faults(of_rows((0, 1), 2, "0B0 0F0 0F1", "1F0 1F0 1B0"))
    for text in (
        "0B0 runs before its F",
        "1F0 runs twice",
        "0B1 is missing",
        "1F1 is missing",
        "1B1 is missing",
    ):
        assert text in message
    assert "5 faults" in message


def test_a_long_schedule_is_drawn_around_its_fault():
    good = build("1f1b", 4, 4, 500)
    rows = (*good.actions[:2], good.actions[2][:400] + good.actions[2][401:], good.actions[3])
    message = faults(dataclasses.replace(good, actions=rows))
    assert max(map(len, message.splitlines())) < 200
    many = faults(dataclasses.replace(good, actions=(*good.actions[:3], ())))
    assert "1000 faults" in many
    assert "and 980 more" in many


@settings(max_examples=200)
@given(schedule=schedules(TEMPLATES), seed=st.integers(0, 2**16))
def test_a_lost_or_doubled_action_never_passes(schedule, seed):
    rng = random.Random(seed)
    rank = rng.randrange(schedule.n_ranks)
    row = list(schedule.actions[rank])
    i = rng.randrange(len(row))
    lost, doubled = row[:i] + row[i + 1 :], [*row, row[i]]
    for broken in (lost, doubled):
        rows = (*schedule.actions[:rank], tuple(broken), *schedule.actions[rank + 1 :])
        changed = dataclasses.replace(schedule, actions=rows)
        if schedule.has_backward and not changed.has_backward:
            check(changed)  # its only backward lost, it is a sound forward-only schedule
            continue
        text = faults(changed)
        assert str(row[i]) in text or "is missing" in text


@settings(max_examples=200)
@given(schedule=schedules(TEMPLATES, max_ranks=3), seed=st.integers(0, 2**16))
def test_a_shuffled_row_passes_only_if_it_can_run(schedule, seed):
    """Against the definition: each rank takes its next action as soon as what it needs is done."""
    rng = random.Random(seed)
    rank = rng.randrange(schedule.n_ranks)
    row = rng.sample(schedule.actions[rank], len(schedule.actions[rank]))
    rows = [*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]]
    shuffled = dataclasses.replace(schedule, actions=tuple(rows), overlapped=frozenset())
    done: set[Action] = set()
    left = [list(r) for r in rows]
    while any(r and _can_run(r[0], done, schedule.n_stages) for r in left):
        for r in left:
            if r and _can_run(r[0], done, schedule.n_stages):
                done.add(r.pop(0))
    if any(left):
        faults(shuffled)
    else:
        check(shuffled)


def _can_run(a, done, n_stages):
    def backward(stage):
        return {Action(stage, "B", a.microbatch), Action(stage, "I", a.microbatch)} & done

    if a.kind == "F":
        return a.stage == 0 or Action(a.stage - 1, "F", a.microbatch) in done
    if a.kind == "W":
        return Action(a.stage, "I", a.microbatch) in done
    own = Action(a.stage, "F", a.microbatch) in done
    return own and (a.stage == n_stages - 1 or bool(backward(a.stage + 1)))


def test_forward_only_needs_no_backward():
    check(of_rows((0, 1), 2, "0F0 0F1", "1F0 1F1"))


def test_drawing_lines_up_in_time():
    lines = draw(build("gpipe", 2, 2, 2)).splitlines()
    assert lines[0].split() == ["rank", "0", "0F0", "0F1", ".", ".", ".", "0B0", "0B0", "0B1", "0B1"]
    assert lines[1].split() == ["rank", "1", ".", "1F0", "1F1", "1B0", "1B0", "1B1", "1B1", ".", "."]
