"""The simulator equals an event loop written for the test, and never beats what no step can beat."""

import collections
import dataclasses
import heapq
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_plan
from strategies import boundaries, clusters, schedules, stage_times

from autopipe.errors import InputError, PlanError
from autopipe.hardware import Cluster, Device, Link
from autopipe.memory import memory_limits
from autopipe.schedule import NAMES, Action, build, check, from_csv, in_flight
from autopipe.schedule.templates import TEMPLATES
from autopipe.simulator import (
    StageTimes,
    Transfer,
    plan_schedule,
    simulate,
    simulate_schedule,
    warn_if_changed,
)
from autopipe.units import format_seconds
from benchmarks.solver.audit import drawn


class EventLoop:
    """Ranks and links as queues over a heap of events: slow, and nothing like the code it tests."""

    def __init__(self, schedule, times, transfers, cluster):
        self.schedule, self.times, self.cluster = schedule, times, cluster
        self.bytes = collections.Counter()
        self.back = set()
        for t in transfers:
            self.bytes["F", t.source, t.destination] += t.n_bytes
            if t.differentiable:
                self.bytes["B", t.destination, t.source] += t.n_bytes
        self.at = [0] * schedule.n_ranks
        self.busy = [False] * schedule.n_ranks
        self.queues = collections.defaultdict(collections.deque)
        self.link_busy = collections.Counter()
        self.arrived = set()
        self.starts, self.heap, self.count = {}, [], itertools.count()

    def run(self):
        self.begin(0.0)
        while self.heap:
            now, _, then = heapq.heappop(self.heap)
            then(now)
            self.begin(now)
        return self.starts

    def later(self, when, then):
        heapq.heappush(self.heap, (when, next(self.count), then))

    def begin(self, now):
        for rank, row in enumerate(self.schedule.actions):
            if not self.busy[rank] and self.at[rank] < len(row):
                a = row[self.at[rank]]
                way = "F" if a.kind == "F" else "B"
                needed = {
                    (way, x, a.stage, a.microbatch) for w, x, y in self.bytes if (w, y) == (way, a.stage)
                }
                if a.kind == "W" or needed <= self.arrived:
                    self.at[rank] += 1
                    self.busy[rank] = True
                    self.starts[a] = now
                    t = self.times[a.stage].seconds(a.kind)
                    self.later(now + t, lambda end, rank=rank, a=a: self.finish(rank, a, end))

    def finish(self, rank, a, now):
        self.busy[rank] = False
        if a.kind == "W":
            return
        way = "F" if a.kind == "F" else "B"
        for (w, x, y), n_bytes in self.bytes.items():
            if (w, x) == (way, a.stage):
                peer = self.schedule.placement[y]
                if peer == rank:
                    self.arrived.add((way, x, y, a.microbatch))
                else:
                    self.queues[rank, peer].append(((way, x, y, a.microbatch), n_bytes))
                    self.serve(rank, peer, now)

    def serve(self, rank, peer, now):
        if self.link_busy[rank, peer] or not self.queues[rank, peer]:
            return
        message, n_bytes = self.queues[rank, peer].popleft()
        link = self.cluster.link(rank, peer) if n_bytes else Link()
        self.link_busy[rank, peer] = 1
        sent = now + n_bytes / link.bandwidth_bytes_s

        def free(end):
            self.link_busy[rank, peer] = 0
            self.serve(rank, peer, end)

        self.later(sent + link.latency_s, lambda _: self.arrived.add(message))
        self.later(sent, free)


@settings(max_examples=300)
@given(data=st.data(), schedule=schedules(TEMPLATES))
def test_equals_an_event_loop(data, schedule):
    times = data.draw(stage_times(schedule.n_stages, least=0.25))
    transfers = data.draw(boundaries(schedule.n_stages))
    cluster = data.draw(clusters(schedule.n_ranks))
    starts = EventLoop(schedule, times, transfers, cluster).run()
    timeline = simulate_schedule(schedule, times, transfers, cluster)
    assert {e.action: pytest.approx(e.start_s) for e in timeline.events} == starts


@settings(max_examples=200)
@given(data=st.data(), schedule=schedules(TEMPLATES))
def test_never_below_the_obvious_bounds(data, schedule):
    times = data.draw(stage_times(schedule.n_stages))
    transfers = data.draw(boundaries(schedule.n_stages))
    cluster = data.draw(clusters(schedule.n_ranks))
    timeline = simulate_schedule(schedule, times, transfers, cluster)
    work = [sum(times[a.stage].seconds(a.kind) for a in row) for row in schedule.actions]
    assert timeline.busy_s == pytest.approx(tuple(work))
    assert timeline.step_s >= max(work) - 1e-9
    assert 0 <= timeline.bubble_fraction + 1e-9 <= 1 + 2e-9
    done = {e.action: e for e in timeline.events}
    for t in transfers:
        here, there = schedule.placement[t.source], schedule.placement[t.destination]
        least = cluster.link(here, there).seconds(t.n_bytes)
        for m in range(schedule.n_microbatches):
            sent, needed = done[Action(t.source, "F", m)], done[Action(t.destination, "F", m)]
            assert needed.start_s >= sent.end_s + least - 1e-9
    for starts, ends in zip(timeline.starts_s, timeline.ends_s, strict=True):
        assert all(b >= a - 1e-9 for a, b in zip(ends, starts[1:], strict=False))
    links = collections.defaultdict(list)
    for sent in timeline.transfers:
        pair = schedule.placement[sent.source], schedule.placement[sent.destination]
        links[pair].append((sent.start_s, sent.end_s - cluster.link(*pair).latency_s * bool(sent.n_bytes)))
    for spans in links.values():
        assert all(b[0] >= a[1] - 1e-9 for a, b in itertools.pairwise(sorted(spans)))


@settings(max_examples=100)
@given(data=st.data(), schedule=schedules(TEMPLATES))
def test_dearer_is_never_faster(data, schedule):
    """Slower stages, slower links and blocking transfers."""
    n = schedule.n_stages
    times, transfers = data.draw(stage_times(n, least=0.25)), data.draw(boundaries(n))
    cluster = data.draw(clusters(schedule.n_ranks))
    base = simulate_schedule(schedule, times, transfers, cluster).step_s + 1e-9
    assert simulate_schedule(schedule, times, transfers).step_s <= base
    quicker = [dataclasses.replace(t, forward_s=t.forward_s / 2) for t in times]
    assert simulate_schedule(schedule, quicker, transfers, cluster).step_s <= base
    blocking = simulate_schedule(schedule, times, transfers, cluster, overlap=False)
    assert blocking.step_s >= base - 2e-9
    assert blocking.busy_s == pytest.approx(simulate_schedule(schedule, times).busy_s)


@pytest.mark.parametrize(("s", "m"), [(1, 3), (2, 4), (4, 8), (8, 5)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_uniform_stages(name, s, m):
    timeline = simulate_schedule(build(name, s, s, m), (StageTimes(),) * s)
    assert timeline.bubble_fraction == pytest.approx((s - 1) / (m + s - 1))


def test_messages_share_a_link():
    """Two values of 10 s for different stages of one rank: the second waits for the first."""
    schedule = build("forward-only", 2, 4, 1, placement=(0, 1, 1, 1))
    transfers = [Transfer(0, 1, 100), Transfer(0, 2, 100), Transfer(1, 2), Transfer(2, 3)]
    timeline = simulate_schedule(
        schedule, (StageTimes(),) * 4, transfers, Cluster.uniform(2, link=Link(0.5, 10.0))
    )
    assert [(t.start_s, t.end_s) for t in timeline.transfers] == [(1.0, 11.5), (11.0, 21.5)]
    assert [e.start_s for e in timeline.events] == [0.0, 11.5, 21.5, 22.5]


def test_both_ways_of_a_link_are_apart():
    """The first gradient leaves while the last value is still on its way down."""
    schedule = from_csv("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n")
    cluster = Cluster.uniform(2, link=Link(0.0, 1.0))
    timeline = simulate_schedule(schedule, (StageTimes(1.0, 1.0),) * 2, [Transfer(0, 1, 2)], cluster)
    spans = {t.label: (t.start_s, t.end_s) for t in timeline.transfers}
    assert spans["0→1F2"] == spans["1→0B0"] == (5.0, 7.0)


def test_blocking_transfers_occupy_both_ranks():
    schedule = build("forward-only", 2, 2, 2)
    cluster = Cluster.uniform(2, link=Link(0.0, 1.0))
    timeline = simulate_schedule(schedule, (StageTimes(),) * 2, [Transfer(0, 1, 3)], cluster, overlap=False)
    assert timeline.starts_s == [[0.0, 4.0], [8.0, 9.0]]
    assert simulate_schedule(schedule, (StageTimes(),) * 2, [Transfer(0, 1, 3)], cluster).starts_s == [
        [0.0, 1.0],
        [4.0, 7.0],
    ]


def test_ties_then_optimizer():
    """Ranks 0 and 2 reduce together once both are done; each then steps its own optimizer."""
    timeline = simulate_schedule(
        build("gpipe", 3, 3, 1), (StageTimes(),) * 3, tie_s=(0.5, 0.0, 0.5), optimizer_s=(1.0, 2.0, 0.0)
    )
    assert [tuple(e) for e in timeline.tail] == [
        (0, "ties", 9.0, 9.5),
        (2, "ties", 9.0, 9.5),
        (0, "optimizer", 9.5, 10.5),
        (1, "optimizer", 7.0, 9.0),
    ]
    assert timeline.step_s == 10.5
    assert timeline.before_optimizer_s == 9.5
    everywhere = simulate_schedule(build("gpipe", 3, 3, 1), (StageTimes(),) * 3, tie_s=1.0, optimizer_s=2.0)
    assert everywhere.step_s == 12.0


def test_unknown_parts_of_backward_count_half_each():
    whole = (StageTimes(1.0, 3.0, 0.0, 0.0),) * 4
    parts = (StageTimes(1.0, 3.0, 1.5, 1.5),) * 4
    schedule = build("zb-h1", 4, 4, 8)
    assert simulate_schedule(schedule, whole).step_s == simulate_schedule(schedule, parts).step_s


def test_wrong_lengths_say_so():
    with pytest.raises(InputError, match="times has 3 entries for 2 stages"):
        simulate_schedule(build("1f1b", 2, 2, 2), (StageTimes(),) * 3)
    with pytest.raises(InputError, match="memory has 1 entries for 2 stages"):
        simulate_schedule(build("1f1b", 2, 2, 2), (StageTimes(),) * 2, memory=make_memory(1))


def make_memory(n):
    from autopipe.memory import stage_memory

    return [stage_memory(saved_bytes=1)] * n


@pytest.mark.parametrize("name", NAMES)
def test_any_schedule_of_a_plan(name):
    plan = make_plan(n_stages=4)
    timeline = simulate(plan, schedule=name, n_microbatches=6)
    assert timeline.schedule.n_microbatches == 6
    assert timeline.schedule.placement == plan.placement
    check(timeline.schedule)
    has_backward = name != "forward-only"
    assert {e.action for e in timeline.tail} - {"loss"} == ({"ties", "optimizer"} if has_backward else set())


def test_a_plan_as_it_is():
    plan = make_plan(n_stages=4, n_microbatches=8)
    timeline = simulate(plan)
    assert timeline.schedule is build("1f1b", 4, 4, 8)
    assert simulate(plan, schedule=build("gpipe", 4, 4, 3)).schedule.n_microbatches == 3
    assert simulate(plan, overlap=False).step_s > timeline.step_s
    ties = [e for e in timeline.tail if e.action == "ties"]
    assert {e.rank for e in ties} == {0, 3}
    assert timeline.step_s > simulate_schedule(timeline.schedule, [StageTimes(1, 2, 1, 1)] * 4).step_s


def test_a_stage_that_owes_no_gradient_does_its_backward_in_w():
    plan = make_plan(n_stages=3, n_microbatches=2, schedule="zb-h1")
    seconds = collections.defaultdict(set)
    for rank, action, start, end in simulate(plan).events:
        if not isinstance(action, str):
            seconds[rank, action.kind].add(round(end - start, 9))
    assert seconds[0, "I"] == {0.0}
    assert seconds[0, "W"] == {2.0}
    assert seconds[1, "I"] == seconds[1, "W"] == {1.0}


def test_a_cost_aware_plan_keeps_to_the_devices_memory():
    roomy = make_plan(n_stages=4, n_microbatches=12)
    static = max(m.static_bytes for m in simulate(roomy).rank_memory)
    buffers = [m.boundary_bytes for m in simulate(roomy).memory]
    devices = tuple(Device(memory_bytes=static + 3 * 1000 + 50 + b) for b in buffers)
    tight = dataclasses.replace(roomy, cluster=Cluster(devices, local=Link(0.01, 1e6)))
    assert max(in_flight(plan_schedule(roomy, "cost-aware"))) > 3
    schedule = plan_schedule(tight, "cost-aware")
    assert max(in_flight(schedule)) == 3
    peaks = simulate(tight, schedule=schedule).peak_bytes
    assert all(peak <= limit for peak, limit in zip(peaks, memory_limits(tight), strict=True))
    limits = [static + 2 * 1000 + 50 + b for b in buffers]
    limited = dataclasses.replace(roomy, settings={**roomy.settings, "memory_limit": limits})
    assert max(in_flight(plan_schedule(limited, "cost-aware"))) == 2
    words = dataclasses.replace(limited, settings={**limited.settings, "memory_limit": "1 GB"})
    assert memory_limits(words) == (10**9,) * 4
    assert memory_limits(dataclasses.replace(words, cluster=tight.cluster)) == tuple(
        d.memory_bytes for d in devices
    )
    assert memory_limits(dataclasses.replace(limited, cluster=tight.cluster)) == tuple(limits)
    assert memory_limits(make_plan()) == (None,) * 4


def test_a_given_schedule_must_be_for_the_plan():
    plan = make_plan(n_stages=4)
    with pytest.raises(
        InputError, match="has 2 stages on 2 ranks, the plan 4 on 4; plan again with n_stages=2"
    ):
        simulate(plan, schedule=build("1f1b", 2, 2, 2))
    with pytest.raises(InputError, match="n_microbatches is 0"):
        simulate(plan, n_microbatches=0)


def test_on_another_cluster_stages_messages_and_ties_take_as_long_as_there():
    plan = make_plan(settings={})
    way = Link(1.0)
    devices = Device(speed=0.5), Device(), Device(), Device()
    slow = Cluster(devices, local=Link(0.02, 5e4), links={(0, 3): way, (3, 0): way})
    there = simulate(plan, cluster=slow)
    rows = zip(there.starts_s, there.ends_s, strict=True)
    takes = [{round(b - a, 9) for a, b in zip(*row, strict=True)} for row in rows]
    assert takes == [{2.0, 4.0}] + [{1.0, 2.0}] * 3
    first = there.transfers[0]
    assert first.end_s - first.start_s == pytest.approx(0.02 + 500 / 5e4)
    tied = next(e for e in there.tail if e.action == "ties")
    assert tied.end_s - tied.start_s == pytest.approx(slow.all_reduce_s(200, (0, 3)))
    assert simulate(plan, cluster=plan.cluster).starts_s == simulate(plan).starts_s
    with pytest.raises(PlanError, match="for 4 ranks, the cluster has 3"):
        simulate(plan, cluster=Cluster.uniform(3))


def test_a_plan_that_was_changed_by_hand_is_told_by_its_step(caplog):
    made = drawn(64).plan(n_microbatches=4, schedule="zb-h1")
    warn_if_changed(made, "it")
    assert not caplog.messages
    warn_if_changed(dataclasses.replace(made, n_microbatches=8), "it")
    (told,) = caplog.messages
    assert told.startswith(
        f"it says that a step takes {format_seconds(made.step_s)}, and as it stands it takes "
    )


def test_what_if_stages_were_placed_otherwise():
    """Ties, optimizer and memory follow the given schedule's placement."""
    plan = make_plan(n_stages=4, cluster=Cluster.uniform(2, link=Link(0.01, 1e5)))
    plan = dataclasses.replace(
        plan, stages=tuple(dataclasses.replace(s, rank=s.index // 2) for s in plan.stages)
    )
    assert {e.rank for e in simulate(plan).tail if e.action == "ties"} == {0, 1}
    folded = simulate(plan, schedule=build("zbv", 2, 4, 8))
    assert {e.action for e in folded.tail} == {"optimizer"}
    assert [m.static_bytes for m in folded.rank_memory] == [2 * 1600 - 800, 2 * 1600]


def fastest(fn, repeats=5):
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        fn()
        best = min(best, time.process_time() - start)
    return best


def test_fast_enough_to_search_with():
    transfers = [Transfer(s, s + 1, 1000) for s in range(7)]
    cluster = Cluster.uniform(8, link=Link(1e-5, 1e9))

    def whole():
        fresh = dataclasses.replace(build("zb-h1", 8, 8, 64))
        return simulate_schedule(fresh, (StageTimes(),) * 8, transfers, cluster).bubble

    assert fastest(whole) < 0.020


def test_large_in_seconds():
    transfers = [Transfer(s, s + 1, 1000) for s in range(127)]
    cluster = Cluster.uniform(128, link=Link(1e-5, 1e9))
    start = time.process_time()
    schedule = build("zb-h1", 128, 128, 1024)
    timeline = simulate_schedule(schedule, (StageTimes(),) * 128, transfers, cluster)
    assert timeline.bubble_fraction < 0.12
    assert time.process_time() - start < 10
