"""The critical path: unbroken, as long as the step, and the only thing worth shortening."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import boundaries, clusters, schedules, stage_times

from autopipe.hardware import Cluster, Link
from autopipe.schedule import Action, Schedule, build
from autopipe.schedule.templates import TEMPLATES
from autopipe.simulator import Event, Sent, StageTimes, Timeline, Transfer, simulate_schedule


@settings(max_examples=200)
@given(data=st.data(), schedule=schedules(TEMPLATES))
def test_unbroken_from_start_to_end(data, schedule):
    ranks = schedule.n_ranks
    seconds = st.lists(st.sampled_from((0.0, 0.5, 2.0)), min_size=ranks, max_size=ranks)
    timeline = simulate_schedule(
        schedule,
        data.draw(stage_times(schedule.n_stages, least=0.25)),
        data.draw(boundaries(schedule.n_stages)),
        data.draw(clusters(ranks)),
        tie_s=data.draw(seconds),
        optimizer_s=data.draw(seconds),
    )
    path = timeline.critical_path
    assert sum(timeline.critical_s.values()) == pytest.approx(timeline.step_s)
    assert timeline.critical_s.get("overhead", 0.0) == pytest.approx(0.0, abs=1e-9)
    assert path[0].start_s == 0
    assert path[-1].end_s == timeline.step_s
    for a, b in itertools.pairwise(path):
        if isinstance(b, Sent):
            assert b.start_s >= a.end_s
        else:
            assert b.start_s == pytest.approx(a.end_s)


def test_only_what_is_on_it_matters():
    """Behind a heavy stage all its actions are on the path, but for 2F1 beside the first turn of stage 3."""
    times = [StageTimes(), StageTimes(), StageTimes(2.0, 4.0), StageTimes()]
    schedule = build("1f1b", 4, 4, 8)
    timeline = simulate_schedule(schedule, times)
    path = [e.action for e in timeline.critical_path if isinstance(e, Event)]
    assert {a for row in schedule.actions for a in row if a.stage == 2} - set(path) == {Action(2, "F", 1)}
    assert [str(a) for a in path if a.stage == 3] == ["3F0", "3B0"]
    slower = [*times[:3], dataclasses.replace(times[3], forward_s=1.5)]
    assert simulate_schedule(schedule, slower).step_s == timeline.step_s + 0.5


def test_messages_are_on_it_where_waited_for():
    cluster = Cluster.uniform(2, link=Link(5.0, 1000.0))
    timeline = simulate_schedule(build("gpipe", 2, 2, 1), (StageTimes(),) * 2, [Transfer(0, 1, 8)], cluster)
    shown = [e.label if isinstance(e, Sent) else str(e.action) for e in timeline.critical_path]
    assert shown == ["0F0", "0→1F0", "1F0", "1B0", "1→0B0", "0B0"]

    assert timeline.critical_s == pytest.approx({"communication": 2 * 5.008, "stage 0": 3.0, "stage 1": 3.0})


def test_what_lies_between_measured_actions_is_overhead():
    schedule = build("gpipe", 1, 1, 1)
    actions = schedule.actions[0]
    timeline = Timeline.from_events(
        schedule, [(0, actions[0], 0.5, 1.0), (0, actions[1], 1.25, 3.0)], step_s=4.0
    )
    assert timeline.critical_s == {"stage 0": 2.25, "overhead": 1.75}


def test_ties_wait_for_the_last_rank():
    timeline = simulate_schedule(build("gpipe", 2, 2, 1), (StageTimes(),) * 2, tie_s=1.0, optimizer_s=1.0)
    shown = [e.label if isinstance(e, Sent) else str(e.action) for e in timeline.critical_path]
    assert shown[-3:] == ["0B0", "ties", "optimizer"]


def test_an_empty_timeline_has_none():
    assert Timeline(Schedule("empty", (0,), 1, ((),)), [[]], [[]], 0.0).critical_path == ()
