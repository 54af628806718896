"""Timelines: bubbles add up and are told apart by cause; memory, JSON, text and traces say what happened."""

import collections
import dataclasses
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_plan
from strategies import boundaries, clusters, schedules, stage_times

from autopipe.errors import InputError, StoreError
from autopipe.hardware import Cluster, Link
from autopipe.memory import stage_memory
from autopipe.schedule import Action, Schedule, build
from autopipe.schedule.templates import TEMPLATES
from autopipe.simulator import (
    Bubble,
    StageTimes,
    Timeline,
    Transfer,
    chrome_trace,
    simulate,
    simulate_schedule,
)

CHAIN = [Transfer(s, s + 1, 100) for s in range(3)]


@settings(max_examples=200)
@given(data=st.data(), schedule=schedules(TEMPLATES))
def test_bubbles_sum_to_the_idle_time(data, schedule):
    n, ranks = schedule.n_stages, schedule.n_ranks
    seconds = st.lists(st.sampled_from((0.0, 0.5, 2.0)), min_size=ranks, max_size=ranks)
    timeline = simulate_schedule(
        schedule,
        data.draw(stage_times(n)),
        data.draw(boundaries(n)),
        data.draw(clusters(ranks)),
        tie_s=data.draw(seconds),
        optimizer_s=data.draw(seconds),
        overlap=data.draw(st.booleans()),
    )
    for bubble, busy in zip(timeline.bubbles, timeline.busy_s, strict=True):
        assert bubble.total_s == pytest.approx(timeline.step_s - busy, abs=1e-9)
        assert min(dataclasses.astuple(bubble)) >= -1e-9
    assert timeline.bubble.total_s == pytest.approx(sum(b.total_s for b in timeline.bubbles))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages_idle_only_at_the_ends(name):
    bubble = simulate_schedule(build(name, 4, 4, 8), (StageTimes(),) * 4).bubble
    assert bubble.imbalance_s == bubble.communication_s == 0
    assert bubble.warmup_s + bubble.drain_s == 4 * 3 * 3.0
    assert bubble.warmup_s > 0
    assert bubble.drain_s > 0


def test_a_heavy_stage_shows_as_imbalance():
    times = [StageTimes(), StageTimes(), StageTimes(2.0, 4.0), StageTimes()]
    even, uneven = (
        simulate_schedule(build("1f1b", 4, 4, 32), t).bubble for t in ((StageTimes(),) * 4, times)
    )
    assert uneven.imbalance_s > 3 * 20 * 3.0 * 0.9
    assert even.imbalance_s == 0


def test_a_slow_link_shows_as_communication():
    """Alone it is all there is: one microbatch down and up again, each way three hops of 1.5 s."""
    cluster = Cluster.uniform(4, link=Link(0.5, 100.0))
    timeline = simulate_schedule(build("1f1b", 4, 4, 1), (StageTimes(),) * 4, CHAIN, cluster)
    free = simulate_schedule(build("1f1b", 4, 4, 1), (StageTimes(),) * 4, CHAIN)
    assert timeline.step_s - free.step_s == 6 * 1.5
    assert [b.communication_s for b in timeline.bubbles] == [1.5, 3.0, 3.0, 1.5]
    assert timeline.bubble.imbalance_s == 0


def test_waiting_for_a_contended_link_is_communication():
    schedule = build("forward-only", 2, 4, 1, placement=(0, 1, 1, 1))
    transfers = [Transfer(0, 1, 100), Transfer(0, 2, 100), Transfer(1, 2), Transfer(2, 3)]
    cluster = Cluster.uniform(2, link=Link(0.0, 10.0))
    bubble = simulate_schedule(schedule, (StageTimes(),) * 4, transfers, cluster).bubbles[1]
    assert bubble == Bubble(warmup_s=1.0, communication_s=10.0 + 9.0)


def test_tied_gradients_are_communication():
    bubble = simulate_schedule(
        build("gpipe", 2, 2, 1), (StageTimes(),) * 2, tie_s=1.0, optimizer_s=1.0
    ).bubbles[1]
    assert bubble.communication_s == 1.0
    assert bubble.drain_s == 2.0


@settings(max_examples=100)
@given(data=st.data(), schedule=schedules(TEMPLATES))
def test_json_round_trip(data, schedule):
    n = schedule.n_stages
    memory = [stage_memory(parameter_bytes=7, gradient_bytes=5, saved_bytes=3, workspace_bytes=2)] * n
    timeline = simulate_schedule(
        schedule,
        data.draw(stage_times(n)),
        data.draw(boundaries(n)),
        data.draw(clusters(schedule.n_ranks)),
        optimizer_s=1.0,
        memory=data.draw(st.sampled_from((None, memory))),
        shared_bytes=data.draw(st.sampled_from(((), (1,) * schedule.n_ranks))),
    )
    back = Timeline.from_dict(json.loads(json.dumps(timeline.to_dict())))
    assert back.to_dict() == timeline.to_dict()
    assert back.schedule == schedule
    assert back.transfers == timeline.transfers


def test_damaged_files_are_refused():
    data = simulate_schedule(build("1f1b", 2, 2, 2), (StageTimes(),) * 2).to_dict()
    with pytest.raises(StoreError, match="version 0"):
        Timeline.from_dict({**data, "version": 0})
    with pytest.raises(StoreError, match="damaged"):
        Timeline.from_dict({k: v for k, v in data.items() if k != "events"})


def test_a_measured_step_is_the_same_kind_of_thing():
    schedule = build("1f1b", 2, 2, 2)
    predicted = simulate_schedule(schedule, (StageTimes(),) * 2, optimizer_s=0.5)
    late = [(e.rank, e.action, e.start_s * 1.1, e.end_s * 1.1) for e in predicted.events]
    measured = Timeline.from_events(schedule, late)
    assert measured.source == "measured"
    assert measured.step_s == pytest.approx(1.1 * predicted.step_s)
    assert measured.busy_s == pytest.approx([1.1 * b for b in predicted.busy_s])
    assert measured.bubble_fraction == pytest.approx(predicted.bubble_fraction)
    assert "measured" in measured.summary
    assert Timeline.from_events(schedule, reversed(late)).starts_s == measured.starts_s
    with pytest.raises(InputError, match="1 actions of schedule '1f1b' have no times, the first rank 0: 0F0"):
        Timeline.from_events(schedule, late[1:])


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_measured_step_tells_its_messages_by_its_waits(name):
    """Without recorded messages, what a rank that was free waited is known; the rest stays untold."""
    cluster = Cluster.uniform(4, link=Link(0.5, 100.0))
    known = simulate_schedule(build(name, 4, 4, 6), (StageTimes(),) * 4, CHAIN, cluster)
    untold = dataclasses.replace(known, sent=(), source="measured")
    assert untold.transfers == ()
    assert untold.bubble.communication_s > 0
    for a, b in zip(known.bubbles, untold.bubbles, strict=True):
        assert b.communication_s <= a.communication_s + 1e-9
        assert b.total_s == pytest.approx(a.total_s)
    assert sum(untold.critical_s.values()) == pytest.approx(known.step_s)
    assert dataclasses.replace(known, sent=()).bubble.communication_s == 0
    alone = simulate_schedule(build(name, 4, 4, 1), (StageTimes(),) * 4, CHAIN, cluster)
    untold = dataclasses.replace(alone, sent=(), source="measured")
    assert untold.critical_s == pytest.approx(alone.critical_s)
    assert untold.critical_s["communication"] == pytest.approx(6 * 1.5)


def test_memory_over_time():
    """Weights stay, a microbatch's bytes live from F to B, workspace only while an action runs."""
    memory = [stage_memory(parameter_bytes=10, gradient_bytes=10, saved_bytes=100, workspace_bytes=7)] * 2
    timeline = simulate_schedule(build("1f1b", 2, 2, 3), (StageTimes(),) * 2, memory=memory)
    static = 10 + 10 + 20
    assert timeline.memory_over_time(1) == (
        (0.0, static),
        *(
            row
            for start in (1.0, 4.0, 7.0)
            for row in (
                (start, static + 107),
                (start + 1, static + 100),
                (start + 1, static + 107),
                (start + 3, static),
            )
        ),
    )
    assert timeline.peak_bytes == (static + 207, static + 107)
    assert simulate_schedule(build("1f1b", 2, 2, 3), (StageTimes(),) * 2).memory_over_time(0) == ()


@settings(max_examples=100)
@given(data=st.data(), schedule=schedules(TEMPLATES))
def test_peak_is_the_highest_point(data, schedule):
    sizes = st.integers(0, 50)
    memory = [
        stage_memory(
            parameter_bytes=data.draw(sizes),
            saved_bytes=data.draw(sizes),
            workspace_bytes=data.draw(sizes),
            boundary_bytes=data.draw(sizes),
        )
        for _ in range(schedule.n_stages)
    ]
    timeline = simulate_schedule(schedule, (StageTimes(),) * schedule.n_stages, memory=memory)
    for rank, peak in enumerate(timeline.peak_bytes):
        points = timeline.memory_over_time(rank)
        assert max(n for _, n in points) == peak
        assert [t for t, _ in points] == sorted(t for t, _ in points)
        assert points[-1][1] == points[0][1]


def test_text():
    text = str(simulate_schedule(build("zb-h1", 2, 2, 3), (StageTimes(),) * 2, tie_s=1.0, optimizer_s=1.0))
    lines = text.splitlines()
    assert lines[0].startswith("zb-h1, 2 stages on 2 ranks, 3 microbatches: 12.00 s simulated, bubble ")
    assert lines[1].startswith("rank 0 0▒▒▒")
    assert lines[2].startswith("rank 1        ")
    for word in ("forward", "input gradient", "weight gradient", "ties", "optimizer"):
        assert word in lines[3]
    assert "backward" not in lines[3]
    assert str(Timeline(Schedule("empty", (0,), 1, ((),)), [[]], [[]], 0.0))


def trace_of(plan, **options):
    return chrome_trace({"predicted": simulate(plan)}, **options)["traceEvents"]


def test_trace_has_a_process_per_rank_with_its_actions():
    plan = dataclasses.replace(make_plan(n_stages=3, n_microbatches=4), cluster=Cluster.uniform(3))
    events = json.loads(json.dumps(trace_of(plan)))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    kernels = [e for e in events if e.get("cat") == "kernel"]
    assert collections.Counter(e["pid"] for e in kernels) == {0: 4 * 2 + 2, 1: 4 * 2 + 1, 2: 4 * 2 + 2}
    first = next(e for e in kernels if e["name"] == "0F0")
    assert (first["ts"], first["dur"]) == (0.0, 1e6)
    assert first["args"] == {"stream": 0, "critical": True, "stage": 0, "kind": "forward", "microbatch": 0}
    assert all(e["ph"] in "XMCsf" and {"pid", "tid", "name"} <= set(e) for e in events)


def test_flow_arrows_go_from_send_to_the_action_that_needs_it():
    plan = make_plan(n_stages=3, n_microbatches=4)
    timeline, events = simulate(plan), trace_of(plan)
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    slices = [e for e in events if e["ph"] == "X"]
    assert begins.keys() == ends.keys()
    assert len(begins) == len(timeline.transfers) == 2 * 3 * 4
    for flow, begin in begins.items():
        end = ends[flow]
        sent = next(
            e for e in slices if (e["pid"], e["tid"], e["ts"]) == (begin["pid"], begin["tid"], begin["ts"])
        )
        taken = next(e for e in slices if (e["pid"], e["tid"], e["ts"]) == (end["pid"], 0, end["ts"]))
        assert end["ts"] >= sent["ts"] + sent["dur"] - 1e-3
        assert taken["args"]["microbatch"] == int(sent["name"][4:])
        assert taken["args"]["stage"] == int(sent["name"][2])


def test_slices_of_a_thread_never_overlap():
    """Two messages on a link whose latency is longer than it is busy are under way at once."""
    schedule = build("gpipe", 2, 2, 4)
    cluster = Cluster.uniform(2, link=Link(5.0, 1000.0))
    timeline = simulate_schedule(schedule, (StageTimes(),) * 2, CHAIN[:1], cluster)
    threads = collections.defaultdict(list)
    for e in timeline.to_chrome_trace()["traceEvents"]:
        if e["ph"] == "X":
            threads[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    assert len(threads) == 4
    for spans in threads.values():
        assert all(b[0] >= a[1] - 1e-3 for a, b in itertools.pairwise(sorted(spans)))


def test_memory_counters_follow_the_timeline():
    plan = make_plan(n_stages=2)
    counters = [(e["ts"], e["args"]["bytes"]) for e in trace_of(plan) if e["ph"] == "C" and e["pid"] == 1]
    assert counters == [(t * 1e6, n) for t, n in simulate(plan).memory_over_time(1)]


def test_predicted_beside_measured():
    predicted = simulate(make_plan(n_stages=2))
    measured = dataclasses.replace(predicted, source="measured")
    events = chrome_trace({"predicted": predicted, "measured": measured})["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    order = [e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"]
    assert [name for _, name in sorted(zip(order, names, strict=True))] == [
        "rank 0 predicted",
        "rank 0 measured",
        "rank 1 predicted",
        "rank 1 measured",
    ]
    flows = [e["id"] for e in events if e["ph"] == "s"]
    assert len(flows) == len(set(flows))


def test_one_rank_alone_for_tools_that_want_a_file_each():
    timeline = simulate(make_plan(n_stages=3))
    trace = chrome_trace({"predicted": timeline}, rank=1)
    assert trace["distributedInfo"] == {"rank": 1, "world_size": 3}
    assert {e["pid"] for e in trace["traceEvents"]} == {1}
    assert timeline.to_chrome_trace()["traceEvents"]


def test_events_name_their_actions():
    timeline = simulate_schedule(build("gpipe", 1, 1, 1), (StageTimes(),), optimizer_s=1.0)
    assert [tuple(e) for e in timeline.events] == [
        (0, Action(0, "F", 0), 0.0, 1.0),
        (0, Action(0, "B", 0), 1.0, 3.0),
        (0, "optimizer", 3.0, 4.0),
    ]
