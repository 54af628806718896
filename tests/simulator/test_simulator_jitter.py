"""What uneven microbatches cost a step: against steps drawn one by one, at both ends, and in the account."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time

import pytest
from plans import make_plan

from autopipe.hardware import Cluster, Link
from autopipe.schedule import StageTimes, Transfer, build
from autopipe.schedule.clock import Edges, run
from autopipe.simulator import simulate, simulate_schedule
from autopipe.simulator.jitter import uneven_s

LINK = Link(0.01, 1e3)


def drawn_s(schedule, times, transfers, cluster, jitter_s, n=400) -> float:
    """The mean step of so many whose actions are drawn each on its own."""
    edges, chance, found = Edges.of(schedule, transfers), random.Random(7), []
    lengths = [times[code >> 2].by_code[code & 3] for _, code, _ in schedule.order]
    for _ in range(n):
        beside = [chance.gauss(0.0, math.sqrt(jitter_s * t)) for t in lengths]
        found.append(max(row[-1] for row in run(schedule, times, edges, cluster, beside_s=beside).ends_s))
    return statistics.fmean(found)


@pytest.mark.parametrize(
    ("name", "n_ranks", "m"), [("1f1b", 2, 8), ("1f1b", 4, 8), ("gpipe", 3, 16), ("zb-h1", 4, 6)]
)
def test_the_price_is_what_many_uneven_steps_take_longer(name: str, n_ranks: int, m: int):
    schedule, cluster = build(name, n_ranks, n_ranks, m), Cluster.uniform(n_ranks, link=LINK)
    times = tuple(StageTimes(1.0, 2.0, 1.0, 1.0) for _ in range(n_ranks))
    transfers = [Transfer(s, s + 1, 10) for s in range(n_ranks - 1)]
    jitter_s = 0.05**2  # actions of one second spread by five hundredths
    even = simulate_schedule(schedule, times, transfers, cluster)
    uneven = simulate_schedule(schedule, times, transfers, cluster, jitter_s=jitter_s)
    price_s = uneven.step_s - even.step_s
    told_s = drawn_s(schedule, times, transfers, cluster, jitter_s) - even.step_s
    assert price_s == pytest.approx(told_s, rel=0.35)
    assert 0.002 * even.step_s < price_s < 0.05 * even.step_s
    assert uneven.ends_s == even.ends_s


def test_who_waits_for_nobody_pays_nothing():
    alone = build("1f1b", 1, 1, 8)
    assert simulate_schedule(alone, (StageTimes(1.0, 2.0),), jitter_s=0.01).step_s == pytest.approx(24.0)
    schedule, crowd = build("1f1b", 2, 2, 4), dataclasses.replace(Cluster.uniform(2), cores=(1,))
    times = (StageTimes(1.0, 2.0),) * 2
    assert uneven_s(schedule, times, Edges.of(schedule), crowd, 0.01) == 0.0
    assert uneven_s(schedule, times, Edges.of(schedule), None, 0.01) > 0.0
    # a stage that is waited for always waits for nobody
    slow = (StageTimes(1.0, 2.0), StageTimes(30.0, 60.0))
    assert uneven_s(schedule, slow, Edges.of(schedule), None, 0.01) < 1e-3


def test_it_grows_with_what_is_unlike_and_is_the_same_each_time():
    schedule, times = build("1f1b", 4, 4, 16), (StageTimes(1.0, 2.0),) * 4
    found = [uneven_s(schedule, times, Edges.of(schedule), None, j) for j in (0.0, 1e-4, 1e-3, 1e-2, 1e9)]
    assert found[0] == 0.0
    assert found == sorted(found)
    assert found[2] == uneven_s(schedule, times, Edges.of(schedule), None, 1e-3)
    assert found[2] / found[1] == pytest.approx(math.sqrt(10), rel=0.4)
    assert math.isfinite(found[-1])


def test_it_is_in_the_account_of_a_plan():
    plan = make_plan(2, 4)
    shaken = dataclasses.replace(plan, settings={**plan.settings, "jitter_s": 0.01})
    even, uneven = simulate(plan), simulate(shaken)
    price_s = uneven.step_s - even.step_s
    assert price_s > 0.0
    assert uneven.before_optimizer_s == pytest.approx(even.before_optimizer_s + price_s)
    assert uneven.busy_s == even.busy_s
    assert uneven.bubble.imbalance_s >= even.bubble.imbalance_s + price_s
    for idle, busy_s in zip(uneven.bubbles, uneven.busy_s, strict=True):
        assert idle.total_s + busy_s == pytest.approx(uneven.step_s)
    spent = uneven.critical_s
    assert spent["uneven"] == pytest.approx(price_s)
    assert sum(spent.values()) == pytest.approx(uneven.step_s)
    assert type(uneven).from_dict(uneven.to_dict()).step_s == uneven.step_s


def test_ranks_that_share_a_machine_wait_too():
    plan = make_plan(2, 4, ties=())
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(plan.cluster, cores=(2,)))
    settings = {"alone": 0.8, "optimizer_s_per_byte": 0.001}
    even = simulate(dataclasses.replace(plan, settings=settings))
    uneven = simulate(dataclasses.replace(plan, settings={**settings, "jitter_s": 0.01}))
    price_s = uneven.step_s - even.step_s
    assert price_s > 0.0
    steps, later = ([e for e in t.tail if e.action == "optimizer"] for t in (even, uneven))
    assert [e.start_s for e in later] == pytest.approx([e.start_s + price_s for e in steps])


def test_large_steps_cost_a_few_times_as_much_to_simulate():
    schedule, times = build("1f1b", 128, 128, 100), (StageTimes(1.0, 2.0),) * 128
    took = []
    for jitter_s in (0.0, 1e-3):
        start = time.process_time()
        simulate_schedule(schedule, times, jitter_s=jitter_s)
        took.append(time.process_time() - start)
    assert took[1] < 10 * took[0] + 0.1
