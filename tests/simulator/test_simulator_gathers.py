"""Weights in shards: gathers delay who needs them, hide behind other work, and leave room for fewer bytes."""

import itertools

import pytest
from plans import make_plan

from autopipe.errors import InputError
from autopipe.hardware import Cluster, Link
from autopipe.memory import plan_memory, rank_memory, whole_at_once
from autopipe.schedule import build
from autopipe.simulator import StageTimes, plan_schedule, simulate, simulate_schedule

TIMES = [StageTimes(1.0, 2.0)] * 4


def test_the_first_stage_waits_and_the_others_gather_meanwhile():
    schedule = build("1f1b", 4, 4, 8)
    plain = simulate_schedule(schedule, TIMES)
    timeline = simulate_schedule(schedule, TIMES, gather_s=[0.5] * 4)
    assert timeline.step_s == pytest.approx(plain.step_s + 0.5)
    assert [(rank, stage) for rank, stage, *_ in timeline.gathered] == [(s, s) for s in range(4)]


def test_in_turn_a_stage_is_gathered_each_round_while_another_works():
    schedule = build("interleaved", 2, 4, 4)
    whole = simulate_schedule(schedule, TIMES, gather_s=[0.25] * 4)
    two, one = (simulate_schedule(schedule, TIMES, gather_s=[0.25] * 4, most_whole=n) for n in (2, 1))
    assert len(whole.gathered) == len(two.gathered) == 4
    assert two.step_s == whole.step_s
    rounds = sum(sum(a.stage != b.stage for a, b in itertools.pairwise(row)) + 1 for row in schedule.actions)
    assert len(one.gathered) == rounds > 4
    assert one.step_s > whole.step_s
    for timeline in (whole, one):
        for rank, stage, start, end in timeline.gathered:
            assert end == start + 0.25
            begun = [e for e in timeline.events_of(rank) if e.action.stage == stage]
            assert any(e.start_s >= end for e in begun)


def test_through_shared_interfaces_the_same():
    schedule = build("interleaved", 4, 8, 8)
    found = []
    for nics in (None, 1):
        cluster = Cluster.of_hosts(2, 2, local=Link(0.0, 1e9), remote=Link(0.0, 1e9), nics_per_host=nics)
        made = simulate_schedule(schedule, TIMES * 2, None, cluster, gather_s=[0.3] * 8, most_whole=1)
        found.append(made)
    assert found[0].step_s == found[1].step_s
    assert sorted(found[0].gathered) == sorted(found[1].gathered)


def test_a_plans_weights_go_round_the_ring_of_its_links():
    plan = make_plan()
    assert simulate(plan, shards=1) == simulate(plan)
    timeline = simulate(plan, shards=4)
    assert len(timeline.gathered) == plan.n_stages
    for rank, stage, start, end in timeline.gathered:
        assert plan.placement[stage] == rank
        assert end - start == pytest.approx(3 * (0.01 + 100 / 1e5))
    assert timeline.step_s > simulate(plan).step_s
    with pytest.raises(InputError, match="shards"):
        simulate(plan, shards=0)
    with pytest.raises(InputError, match="processor each"):
        simulate(plan, shards=2, overlap=False)


def test_shards_take_their_part_of_the_bytes_and_what_is_whole_beside():
    plan = make_plan()
    before, after = (simulate(plan, shards=n).rank_memory for n in (1, 4))
    for one, other in zip(before, after, strict=True):
        # 400 of weights and 800 of Adam's moments, of which a quarter stays; the weights once more when whole
        assert one.static_bytes - other.static_bytes == pytest.approx(0.75 * 1200 - 400)


def test_as_many_are_whole_as_the_limit_has_room_for():
    plan = make_plan()
    schedule = plan_schedule(plan)
    assert whole_at_once(plan, schedule, 0, [100, 100], 0) is None
    peak = rank_memory(schedule, plan_memory(plan))[0].peak_activation_bytes
    for room, n in ((1000, None), (799, 1), (400, 1), (399, 0), (-1, 0)):
        limited = make_plan(settings={"memory_limit": peak + 300 + room})
        assert whole_at_once(limited, schedule, 0, [400, 400], 300) == n
