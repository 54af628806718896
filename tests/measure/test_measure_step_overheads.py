"""An optimizer's step for each parameter and each byte; what peers, drift and cores do to a profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from measure_models import Stack, captured
from torch import nn

from autopipe.measure import Store, profile, profiler, step_overheads
from autopipe.measure.passes import ALONE, CPU, FIRST, Passes
from autopipe.measure.samples import Samples
from autopipe.measure.step_overheads import beginning_s, optimizer_cost

QUICK = {"progress": False, "min_s": 0.0, "min_passes": 3}
EACH_S, PER_BYTE_S = 2e-3, 2e-8


class Sleeper(torch.optim.SGD):
    """Takes as long as it says, for each parameter and for each byte."""

    steps: ClassVar[list[int]] = []

    def step(self, closure=None):
        self.steps.append(len(self.param_groups[0]["params"]))
        parameters = self.param_groups[0]["params"]
        time.sleep(EACH_S * len(parameters) + PER_BYTE_S * sum(p.nbytes for p in parameters))


def test_parameters_and_bytes_are_told_apart() -> None:
    parameters = [nn.Parameter(torch.zeros(1 << 18)) for _ in range(3)]
    parameters += [nn.Parameter(torch.zeros(4)) for _ in range(5)]
    per_byte, of_one, _ = optimizer_cost(Sleeper, parameters, torch.device("cpu"), 0)
    assert of_one == pytest.approx(EACH_S, rel=0.5)
    assert per_byte == pytest.approx(PER_BYTE_S, rel=0.5)


def test_nothing_trained_costs_nothing() -> None:
    assert optimizer_cost(Sleeper, [], torch.device("cpu"), 0) == (0.0, 0.0, 0)


@pytest.mark.parametrize(("touched", "passed"), [(0, 1 << 23), (1 << 25, 1 << 25), (1 << 40, 1 << 26)])
def test_what_a_step_touches_passes_through_the_caches(
    monkeypatch: pytest.MonkeyPatch, touched: int, passed: int
) -> None:
    made, zeros = [], torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda n, **kwargs: made.append(n) or zeros(n, **kwargs))
    beginning_s(lambda: None, touched)
    assert made == [passed]
    made.clear()
    optimizer_cost(Sleeper, [nn.Parameter(zeros(4))], torch.device("cpu"), touched)
    assert made.count(passed) == 1  # for all its steps


def test_peers_step_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def beside(work: Callable[[int, int], object], n: int, device: torch.device):
        before = len(steps)
        work(0, 0)
        begun.append((len(steps) - before, n))
        return busy(work, 0, device)

    busy, steps = step_overheads.busy, Sleeper.steps
    monkeypatch.setattr(step_overheads, "busy", beside)
    optimizer_cost(Sleeper, [nn.Parameter(torch.zeros(4))], torch.device("cpu"), 0, n_peers=3)
    assert begun == [(1, 3)]


def test_a_steps_beginning_is_priced_once(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    capture = captured(Stack(2), torch.randn(4, 16))
    changed = type(capture.assumptions).changed
    looked = []

    def slowly(assumptions):
        looked.append(time.sleep(5e-3))
        return changed(assumptions)

    monkeypatch.setattr(type(capture.assumptions), "changed", slowly)
    assert beginning_s(lambda: time.sleep(2e-3), 0) >= 2e-3
    table = profile(capture, store=Store(tmp_path), **QUICK)
    assert table.start_s >= 5e-3
    looked.clear()
    assert profile(capture, store=Store(tmp_path), **QUICK).start_s == table.start_s
    assert not looked
    begun = profile(capture, store=Store(tmp_path / "other"), begin=lambda: time.sleep(0.02), **QUICK)
    assert begun.start_s >= 0.02


def test_first_microbatches_make_their_gradients_and_are_paid_for_once_a_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    capture = captured(Stack(2), torch.randn(4, 16))
    whole, made = Passes._whole, []

    def slowly(passes):
        is_first = all(p.grad is None for p in passes.replay.parameters)
        made.append(is_first)
        whole(passes)
        with passes.watch("B"):
            time.sleep(0.06 if is_first else 0.02)

    monkeypatch.setattr(Passes, "_whole", slowly)
    kept = profile(capture, store=Store(tmp_path), **QUICK)
    assert made.count(True) == 1
    assert made[-3:] == [True, False, False]
    begun_s = profile(capture, begin=lambda: None, store=Store(tmp_path), **QUICK).start_s
    assert begun_s == kept.start_s  # nothing is measured again
    share = 0.04 / 0.02
    microbatch_s = sum(c.forward_s + c.backward_s for c in kept.costs.values())
    assert kept.start_s == pytest.approx(share * microbatch_s, rel=0.5)


@pytest.mark.parametrize(
    ("took_s", "longer"),
    [
        ([], 0.0),
        ([3.0, 2.0, 2.0], 0.5),
        ([3.0, 2.0, 2.0, 5.0, 2.0, 2.0, 2.0, 2.0, 2.0], 0.5),
        ([1.0, 1.0, 2.0], 0.0),
    ],
)
def test_by_how_much_first_microbatches_take_longer(took_s: list[float], longer: float) -> None:
    passes = Passes.__new__(Passes)
    passes.samples = Samples({}, "model")
    for seconds in took_s:
        for part in "FB":
            passes.samples.add("", part + FIRST, seconds / 2)
    assert passes.first_longer == pytest.approx(longer)


def test_a_mean_takes_the_highest_tenth_for_what_is_next_below() -> None:
    samples = Samples({}, "model")
    assert samples.mean("", "F") == 0.0
    for seconds in (50.0, 1.0, 2.0, 3.0, 2.0):
        samples.add("", "F", seconds)
    assert samples.mean("", "F") == pytest.approx(2.2)
    samples.add("", "B", 7.0)
    assert samples.mean("", "B") == 7.0


def test_no_more_peers_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    busy = profiler.busy
    monkeypatch.setattr(profiler, "busy", lambda work, n, device: begun.append(n) or busy(work, 0, device))
    for n_cores in (1, 3):
        monkeypatch.setattr(profiler, "places", lambda n=n_cores: n)
        table = profile(captured(Stack(2), torch.randn(4, 16)), n_peers=7, **QUICK)
        assert 0 < table.alone <= 1
    assert begun == [0, 2]


@pytest.mark.parametrize(
    ("alone_s", "told"),
    [
        ([0.7] * 8, 0.7),
        # one pair of ten may tell otherwise, two are chance
        ([0.7] * 9 + [1.1], 0.7),
        ([0.7] * 8 + [1.1] * 2, 1.0),
        ([0.99, 1.02, 0.97, 0.98, 1.01, 0.96], 1.0),
        ([1.2] * 8, 1.0),
        ([], 1.0),
    ],
)
def test_an_idle_peer_is_a_gain_where_next_to_every_pair_tells_it(alone_s: list[float], told: float) -> None:
    passes = Passes.__new__(Passes)
    passes.samples = Samples({}, "model")
    for i, seconds in enumerate(alone_s):
        pace = 1.0 + 0.3 * (i % 3)  # of a machine that changes it: pairs see the same
        passes.samples.add("", CPU, pace)
        passes.samples.add("", CPU + ALONE, seconds * pace)
    assert passes.alone == pytest.approx(told)


@pytest.mark.parametrize(("last_s", "told"), [(1.0, False), (1.2, True)])
def test_a_device_that_slows_down_is_told(last_s: float, told: bool) -> None:
    passes = Passes.__new__(Passes)
    passes.samples = Samples({}, "model")
    for seconds in (1.0, 1.0, 1.0, 1.0, last_s, last_s):
        passes.samples.add("", "F", seconds)
        passes.samples.add("", "B", 2 * seconds)
    assert any("slowed down" in note for note in passes._drifted()) is told


def test_jitter_is_told_from_neighbouring_passes() -> None:
    samples = Samples({}, "model")
    assert samples.jitter_s("", "FB") == 0.0
    for i in range(20):
        samples.add("", "F", 1.0 + 0.1 * (i % 2))
        samples.add("", "B", 2.0)
    mean_s = samples.mean("", "F") + samples.mean("", "B")
    assert samples.jitter_s("", "FB") == pytest.approx(0.1**2 / 2 / mean_s)
    slowing = Samples({}, "model")
    for i in range(20):
        slowing.add("", "F", 1.0 + 0.1 * i)
    # a machine that changes its pace over the profile makes no microbatch unlike its neighbours
    assert slowing.jitter_s("", "F") < 0.1**2 / slowing.mean("", "F")
