"""An optimizer's step for each parameter and each byte; what peers, drift and cores do to a profile."""

from __future__ import annotations

import time

import pytest
import torch
from measure_models import Stack, captured
from torch import nn

from autopipe.measure import profile, profiler
from autopipe.measure.passes import Passes
from autopipe.measure.samples import Samples
from autopipe.measure.stepping import optimizer_cost

QUICK = {"progress": False, "min_s": 0.0, "min_passes": 3}
EACH_S, PER_BYTE_S = 2e-3, 2e-8


class Sleeper(torch.optim.SGD):
    """Takes as long as it says, for each parameter and for each byte."""

    def step(self, closure=None):
        parameters = self.param_groups[0]["params"]
        time.sleep(EACH_S * len(parameters) + PER_BYTE_S * sum(p.nbytes for p in parameters))


def test_parameters_and_bytes_are_told_apart() -> None:
    parameters = [nn.Parameter(torch.zeros(1 << 18)) for _ in range(3)]
    parameters += [nn.Parameter(torch.zeros(4)) for _ in range(5)]
    per_byte, of_one, _ = optimizer_cost(Sleeper, parameters, torch.device("cpu"))
    assert of_one == pytest.approx(EACH_S, rel=0.5)
    assert per_byte == pytest.approx(PER_BYTE_S, rel=0.5)


def test_nothing_trained_costs_nothing() -> None:
    assert optimizer_cost(Sleeper, [], torch.device("cpu")) == (0.0, 0.0, 0)


def test_no_more_peers_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    busy = profiler.busy
    monkeypatch.setattr(profiler, "busy", lambda work, n, device: begun.append(n) or busy(work, 0, device))
    for n_cores in (1, 3):
        monkeypatch.setattr(profiler, "places", lambda n=n_cores: n)
        table = profile(captured(Stack(2), torch.randn(4, 16)), n_peers=7, **QUICK)
        assert 0 < table.alone <= 1
    assert begun == [0, 2]


@pytest.mark.parametrize(("last_s", "told"), [(1.0, False), (1.2, True)])
def test_a_device_that_slows_down_is_told(last_s: float, told: bool) -> None:
    passes = Passes.__new__(Passes)
    passes.samples = Samples({}, "model")
    for seconds in (1.0, 1.0, 1.0, 1.0, last_s, last_s):
        passes.samples.add("", "F", seconds)
        passes.samples.add("", "B", 2 * seconds)
    assert any("slowed down" in note for note in passes._drifted()) is told
