"""How fast ranks are at work in a pipeline, found by training a small one.

Ranks that have a core each are probed in ``tests/cli``, by the verb of that name.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
from plans import make_plan
from processes import run_ranks

import autopipe
from autopipe.api import probing
from autopipe.hardware import Cluster, Device, Link
from autopipe.measure.busy_cores import places
from autopipe.simulator import Report
from autopipe.simulator.plan_inputs import plan_schedule
from autopipe.simulator.timeline_data import Sent


@pytest.mark.timeout(150)
def test_ranks_that_outnumber_the_cores_have_one_too() -> None:
    n_ranks = places() + 1
    told = run_ranks(pathlib.Path(__file__).with_name("probe_ranks.py"), n_ranks)
    (found,) = {
        line.removeprefix("cluster ") for text in told for line in text.splitlines() if line[:8] == "cluster "
    }
    cluster = Cluster.from_dict(json.loads(found))
    assert cluster.crowd == (n_ranks, places())
    speeds = {d.speed for d in cluster.devices}
    assert len(speeds) == 1
    # on a busy machine a step takes far longer than its parts say, and never less
    assert 0.05 < speeds.pop() <= 1.0
    # what a rank waits for its core between two actions is no work of its own
    assert {(d.action_s, d.step_s) for d in cluster.devices} == {(0.0, 0.0)}


def test_ranks_on_accelerators_keep_theirs() -> None:
    cluster = Cluster.uniform(2, Device(speed=0.5))
    assert probing._rehearsed(cluster) is cluster


def test_ranks_of_a_host_take_its_cores_in_turns() -> None:
    cluster = dataclasses.replace(Cluster.uniform(7), hosts=(0, 1, 0, 1, 0, 1, 0), cores=(2, 1))
    assert probing._places(cluster) == [0, 0, 0, 1, 1, 2, 1]


def test_a_step_is_predicted_from_what_its_stages_take_alone() -> None:
    model = probing._Model(2)
    batch = probing.torch.randn(8, 4, probing._WIDTH)
    pins = {"parts.0": 0, "parts.1": 1}
    plan = autopipe.plan(model, 2, (batch,), n_microbatches=8, costs="estimated", pin=pins, schedule="1f1b")
    assert plan.step_s > 0
    # eight microbatches of 3 s through two stages, the second a microbatch behind
    assert probing._predicted_s(plan, plan.cluster, [(1.0, 2.0)] * 2) == pytest.approx(27.0, rel=1e-2)
    # the first stage's last backward is a second shorter, and it has waited for the second's otherwise
    assert probing._predicted_s(plan, plan.cluster, [(1.0, 1.0), (1.0, 2.0)]) == pytest.approx(26.0, rel=1e-2)
    # nobody waits while a rank is between two of its actions, of which there are some fifteen in a row
    shared = dataclasses.replace(plan.cluster, cores=(2,))
    busy = probing._each(shared, lambda device: dataclasses.replace(device, action_s=0.1, step_s=0.5))
    found = probing._predicted_s(plan, busy, [(1.0, 2.0)] * 2) - probing._predicted_s(
        plan, shared, [(1.0, 2.0)] * 2
    )
    assert 0.5 + 14 * 0.1 <= found <= 0.5 + 18 * 0.1


def test_the_first_stage_alone_makes_no_gradient_of_its_input(monkeypatch) -> None:
    taken = {True: (2.0, 6.0), False: (1.0, 3.0)}
    monkeypatch.setattr(probing, "_timed_s", lambda part, x, of_input: taken[of_input])
    monkeypatch.setattr(probing, "_mean", lambda seconds: seconds)
    monkeypatch.setattr(probing, "_places", lambda cluster: [0, 0, 0])
    monkeypatch.setattr(probing.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(probing.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(probing.dist, "barrier", lambda: None)
    alone = probing._alone_s(None, None, Cluster.uniform(3))
    assert alone == [taken[False], taken[True], taken[True]]


def test_turns_that_others_disturbed_tell_no_other_speed(monkeypatch) -> None:
    """What steps took and what their parts say are each typical of all turns, and not held up one by one."""
    cluster = Cluster.uniform(2)

    def speed(parts_s: list[float], steps_s: list[float]) -> float:
        parts, steps = iter(parts_s), iter(steps_s)
        monkeypatch.setattr(probing, "_TURNS", len(steps_s))
        monkeypatch.setattr(probing, "_WARM", 0)
        monkeypatch.setattr(probing, "_slowest", lambda seconds: 0.0)
        monkeypatch.setattr(probing, "_alone_s", lambda *given: [(1.0, next(parts))] * 2)
        monkeypatch.setattr(probing, "_stepped_s", lambda *given: next(steps))
        monkeypatch.setattr(probing, "_beside_actions", lambda cluster, report: cluster)
        return probing._trained(cluster).devices[0].speed

    even = speed([2.0] * 20, [30.0] * 20)
    assert even == pytest.approx(27.0 / 30.0, rel=1e-2)
    # one step in ten is held up, another day a part is
    assert speed([2.0] * 20, [30.0] * 18 + [300.0] * 2) == pytest.approx(even)
    assert speed([2.0] * 18 + [200.0] * 2, [30.0] * 20) == pytest.approx(even)
    # the machine slows down for half of the time, but not in the same half of each turn
    paces = [1.0, 1.1] * 10
    assert speed([2.0 * x for x in paces], [30.0 * x for x in reversed(paces)]) == pytest.approx(
        even, rel=0.05
    )
    # no pipeline is faster than its parts
    assert speed([2.0] * 20, [20.0] * 20) == 1.0


def test_what_ranks_do_beside_their_actions_is_told_without_their_messages() -> None:
    plan = make_plan(2, 4, ties=())
    link = Link(1e-3, 1e6, host_s=0.03)
    plan = dataclasses.replace(plan, cluster=dataclasses.replace(Cluster.uniform(2, link=link), cores=(2,)))
    rows = plan_schedule(plan).actions
    events = [(rank, action, 0.0, 1.0) for rank, row in enumerate(rows) for action in row]
    messages = [Sent(a, b, a > b, m, 0.0, 0.1, 100) for m in range(4) for a, b in ((0, 1), (1, 0))]
    report = Report((), 1.0, 1.0, 9, tuple(events), plan, (), (), tuple(messages), (0.04, 0.06), (0.7, 0.2))
    found = probing._beside_actions(plan.cluster, report)
    # of four messages in eight actions, each 0.03 s
    assert all(d.action_s == pytest.approx(0.05 - 0.015) for d in found.devices)
    assert {d.step_s for d in found.devices} == {0.2}
    assert {
        d.action_s
        for d in probing._beside_actions(
            plan.cluster, dataclasses.replace(report, between_actions_s=(0.01, 0.01))
        ).devices
    } == {0.0}


def test_every_rank_holds_one_part_of_the_model() -> None:
    model = probing._Model(3)
    batch = probing.torch.randn(4, 4, probing._WIDTH)
    pins = {f"parts.{r}": r for r in range(3)}
    pipe = autopipe.split(model, 3, (batch,), n_microbatches=4, costs="estimated", pin=pins)
    sizes = {sum(p.numel() for p in stage.parameters()) for stage in pipe.stages}
    assert len(sizes) == 1
