"""Ranks that share a host's cores: equal to a core each where there are enough, bounded elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import make_plan
from strategies import boundaries, clusters, schedules, stage_times

from autopipe.hardware import Cluster, Device, Link
from autopipe.look.tables import headline
from autopipe.schedule import build
from autopipe.schedule.clock import Edges, run
from autopipe.schedule.templates import TEMPLATES
from autopipe.simulator import StageTimes, Transfer, in_turn_s, simulate, simulate_schedule
from autopipe.simulator.shared_cores import run_shared


def on_cores(n_ranks: int, n_cores: int, link: Link | None = None) -> Cluster:
    return dataclasses.replace(Cluster.uniform(n_ranks, link=link), cores=(n_cores,))


@settings(max_examples=60)
@given(data=st.data(), schedule=schedules(TEMPLATES))
def test_with_a_core_for_each_nothing_is_shared(data, schedule):
    times = data.draw(stage_times(schedule.n_stages))
    edges = Edges.of(schedule, data.draw(boundaries(schedule.n_stages)))
    cluster = dataclasses.replace(data.draw(clusters(schedule.n_ranks)), cores=(99, 99))
    own = run(schedule, times, edges, cluster)
    shared, _ = run_shared(schedule, times, edges, cluster)
    for mine, theirs in ((shared.starts_s, own.starts_s), (shared.ends_s, own.ends_s)):
        assert [pytest.approx(row) for row in mine] == theirs


@settings(max_examples=60)
@given(data=st.data(), schedule=schedules(TEMPLATES), n_cores=st.integers(1, 3))
def test_cores_do_no_more_than_they_can_and_one_is_never_idle(data, schedule, n_cores):
    times = data.draw(stage_times(schedule.n_stages, least=0.25))
    crowded = simulate_schedule(schedule, times, None, on_cores(schedule.n_ranks, n_cores))
    free = simulate_schedule(schedule, times, None, on_cores(schedule.n_ranks, 99))
    work = sum(times[a.stage].seconds(a.kind) for row in schedule.actions for a in row)
    assert crowded.step_s >= free.step_s - 1e-9
    assert crowded.step_s >= work / n_cores - 1e-9
    assert n_cores > 1 or crowded.step_s == pytest.approx(work)


def test_four_ranks_on_two_cores_take_twice_as_long_once_the_pipe_is_full():
    schedule = build("1f1b", 4, 4, 64)
    times = (StageTimes(1.0, 2.0),) * 4
    assert simulate_schedule(schedule, times, None, on_cores(4, 4)).step_s == 67 * 3
    crowded = simulate_schedule(schedule, times, None, on_cores(4, 2)).step_s
    assert 64 * 6 <= crowded <= 66 * 6


def test_who_is_alone_is_faster():
    schedule = build("gpipe", 2, 2, 1)
    times = (StageTimes(1.0, 2.0),) * 2
    alone = simulate_schedule(schedule, times, None, on_cores(2, 2), alone=0.5)
    assert alone.step_s == pytest.approx(3.0)
    full = build("1f1b", 2, 2, 8)
    # of 27 s, 48 s of work take 21 with both ranks at it and 6 with one
    assert simulate_schedule(full, times, None, on_cores(2, 2), alone=0.5).step_s == pytest.approx(21 + 6 / 2)


def test_messages_take_from_who_is_at_work():
    schedule = build("1f1b", 2, 2, 4)
    times = (StageTimes(1.0, 2.0),) * 2
    transfers = (Transfer(0, 1, 100),)
    link = Link(0.0, float("inf"), host_s=0.01, host_s_per_byte=0.001)
    free = simulate_schedule(schedule, times, transfers, on_cores(2, 2)).step_s
    busy = simulate_schedule(schedule, times, transfers, on_cores(2, 2, link)).step_s
    # the last rank sends three gradients between its actions; no rank has to do with more than eight messages
    assert free + 3 * 0.11 - 1e-9 <= busy <= free + 8 * 0.11
    idle = simulate_schedule(build("gpipe", 2, 2, 1), times, transfers, on_cores(2, 2, link)).step_s
    assert idle == pytest.approx(6.0)


def test_optimizers_share_the_cores_too():
    schedule = build("gpipe", 2, 2, 1)
    times = (StageTimes(1.0, 1.0),) * 2
    assert simulate_schedule(schedule, times, None, on_cores(2, 1), optimizer_s=2.0).step_s == pytest.approx(
        8.0
    )
    tied = simulate_schedule(schedule, times, None, on_cores(2, 1), optimizer_s=2.0, tie_s=1.0)
    assert tied.step_s == pytest.approx(7.0)


def test_a_plan_says_its_cores_and_what_small_parameters_cost():
    plan = make_plan(2, 4, ties=())
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, cores=(1,)), settings={})
    assert simulate(plan).step_s == pytest.approx(simulate(plan).work_s / 2, rel=0.5)
    assert simulate(plan).step_s >= 24.0
    assert plan.cluster.crowd == (2, 1)
    assert "(2 of which share 1 core)" in headline(plan)
    assert dataclasses.replace(plan.cluster, cores=(2,)).crowd is None
    stages = tuple(dataclasses.replace(s, n_trained=10) for s in plan.stages)
    settings = {"optimizer_s_per_byte": 0.001, "optimizer_s_per_tensor": 0.1}
    stepped = dataclasses.replace(plan, stages=stages, settings=settings, cluster=Cluster.uniform(2))
    tail = [event.end_s - event.start_s for event in simulate(stepped).tail]
    assert tail == pytest.approx([1.4, 1.4])


@pytest.mark.parametrize(
    ("placement", "offload", "steps_s"),
    [
        ((0, 1), "never", [0.04, 0.16]),
        ((1, 0), "never", [0.08, 0.08]),
        ((0, 1), "activations", [0.04, 0.16]),
        ((0, 1), "optimizer", [0.04, 0.08]),
        ((1, 0), "all", [0.08, 0.04]),
    ],
)
def test_an_optimizer_steps_at_the_speed_of_where_it_is(
    placement: tuple[int, int], offload: str, steps_s: list[float]
):
    """The second rank's device is half as fast, not its host; the second stage has twice the gradients."""
    plan = make_plan(2, 4, ties=())
    plan = dataclasses.replace(plan, settings={**plan.settings, "offload": offload})
    cluster = dataclasses.replace(plan.cluster, devices=(Device(), Device(speed=0.5)))
    stages = plan.stages[0], dataclasses.replace(plan.stages[1], gradient_bytes=800)
    timeline = simulate(
        dataclasses.replace(plan, cluster=cluster, stages=stages),
        schedule=build("gpipe", 2, 2, 4, placement=placement),
    )
    found = [e.end_s - e.start_s for e in timeline.tail if e.action == "optimizer"]
    assert found == pytest.approx(steps_s)


@pytest.mark.parametrize("n_cores", [0, 2])
def test_a_step_starts_with_binding_its_batch(n_cores: int):
    schedule, times = build("1f1b", 2, 2, 4), (StageTimes(1.0, 2.0),) * 2
    cluster = on_cores(2, n_cores, Link(0.1, host_s=0.01)) if n_cores else Cluster.uniform(2, link=Link(0.1))
    given = schedule, times, (Transfer(0, 1, 100),), cluster
    before = simulate_schedule(*given, optimizer_s=1.0)
    later = simulate_schedule(*given, optimizer_s=1.0, start_s=0.5)
    assert later.step_s == pytest.approx(before.step_s + 0.5)
    for field in ("starts_s", "ends_s"):
        for row, shifted in zip(getattr(before, field), getattr(later, field), strict=True):
            assert shifted == pytest.approx([t + 0.5 for t in row])
    assert [e.start_s for e in later.tail] == pytest.approx([e.start_s + 0.5 for e in before.tail])
    assert [(s.start_s, s.end_s) for s in later.transfers] == [
        pytest.approx((s.start_s + 0.5, s.end_s + 0.5)) for s in before.transfers
    ]


def test_a_plan_says_what_its_steps_start_takes():
    plan = make_plan(2, 4)
    begun = dataclasses.replace(plan, settings={**plan.settings, "start_s": 0.25})
    assert simulate(begun).step_s == pytest.approx(simulate(plan).step_s + 0.25)
    assert in_turn_s(begun) == pytest.approx(in_turn_s(plan) + 0.25)


@pytest.mark.parametrize("n_cores", [0, 2])
def test_ranks_agree_on_a_step_and_wait_for_its_loss(n_cores: int):
    free, link = make_plan(2, 4, ties=()), Link(0.5, float("inf"), host_s=0.125 if n_cores else 0.0)
    still = dataclasses.replace(free, boundaries=(), cluster=Cluster.uniform(2))
    cluster = dataclasses.replace(Cluster.uniform(2, link=link), cores=(2,) if n_cores else ())
    apart = dataclasses.replace(still, cluster=cluster)
    agreed_s = 0.5 + 2 * link.host_s
    before, after = simulate(still), simulate(apart)
    assert after.starts_s[0][0] == pytest.approx(before.starts_s[0][0] + agreed_s)
    # 1F1B ends on its first rank, long after the last one made the loss
    assert not [e for e in after.tail if e.action == "loss"]
    back = dataclasses.replace(
        apart,
        schedule="gpipe",
        stages=tuple(
            dataclasses.replace(s, backward_s=0.0, backward_input_s=0.0, backward_weight_s=0.0)
            for s in apart.stages
        ),
    )
    told = simulate(back)
    waits = [e for e in told.tail if e.action == "loss"]
    assert [e.rank for e in waits] == [0]
    assert told.before_optimizer_s == pytest.approx(max(told.ends_s[1]) + 0.5 + link.host_s)
    assert sum(told.critical_s.values()) == pytest.approx(told.step_s)
    assert told.critical_s["loss"] == pytest.approx(0.5 + link.host_s)
    for idle, busy_s in zip(told.bubbles, told.busy_s, strict=True):
        assert idle.total_s + busy_s == pytest.approx(told.step_s)
