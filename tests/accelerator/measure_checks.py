"""The profiler on the simulated accelerator; ``python measure_checks.py CHECK`` runs one check.

Device 1 is measured while device 0 is current.
"""

import sys
import time

import simulated
import torch
from torch import nn

import autopipe
from autopipe import accelerator
from autopipe.measure import passes, profile
from autopipe.measure.timers import Stopwatch

DEVICE = torch.device("sim", 1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(3)
        )

    def forward(self, x):
        for layer in self.inner:
            x = x + layer(x)
        return x.square().mean()


def costs():
    """Bytes and FLOPs equal the CPU's, seconds are the device's own, and nothing is left on the other one."""
    captured = autopipe.capture(Net(), (torch.randn(4, 8),))
    here = profile(captured, progress=False, min_s=0.01)
    for races, lazy in ((2, False), (0, True)):
        with simulated.settings(races=races, lazy=lazy):
            before = torch.accelerator.memory_allocated(0)
            there = profile(captured, device=DEVICE, progress=False, min_s=0.01)
            assert torch.accelerator.current_device_index() == 0
            assert torch.accelerator.memory_allocated(0) == before
        assert not simulated.take_races()
        assert set(there.costs) == set(here.costs)
        for name, cost in there.costs.items():
            assert cost.forward_s > 0, name
            assert cost.flops == here[name].flops, name
            assert cost.saved_bytes == here[name].saved_bytes, name
        assert there.optimizer_s_per_tensor > 0
        assert there.alone == 1.0
    plan = autopipe.split(Net(), 2, (torch.randn(4, 8),), costs=there, n_ranks=2, n_microbatches=2).plan
    assert plan.step_s > 0


def host_and_device():
    """A device that takes its time is told from a host that does; work is timed on the device it runs on."""
    x = torch.ones(64, device=DEVICE) + 1  # the first op of its kind loads it
    watch = Stopwatch(DEVICE)
    with simulated.settings(delay_us=10000):
        with accelerator.using(DEVICE), watch("slow"):
            for _ in range(5):
                x = x + 1
        slow = watch.read()["slow"]
    assert slow > 0.01
    assert watch.host_s["slow"] < slow / 2
    captured = autopipe.capture(Net(), (torch.randn(4, 8),))
    bound = profile(captured, device=DEVICE, progress=False, min_s=0.01)
    assert any("launch-bound" in note for note in bound.notes), bound.notes
    with simulated.settings(delay_us=5000):
        slow = profile(captured, device=DEVICE, progress=False, min_passes=2, min_s=0.01)
    assert not any("launch-bound" in note for note in slow.notes), slow.notes
    assert slow.total(slow.costs).forward_s > bound.total(bound.costs).forward_s


class Glue(nn.Module):
    """Little for the device, but the host takes its time to launch it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        time.sleep(0.015)
        return x * self.weight


class Heavy(nn.Module):
    """Much for the device that is launched at once."""

    def forward(self, x):
        for _ in range(8):
            x = x * 0.99
        return x


def the_host_decides_the_cut():
    """Launching glue hides behind what the device does: with two of each in the first stage both are busy."""
    model, x = nn.Sequential(Glue(), Glue(), *(Heavy() for _ in range(4))), torch.randn(4, 8)
    captured = autopipe.capture(model, (x,), closed=[name for name, _ in model.named_children()])
    passes._HEAVY_THERE_S = 0.0  # each is timed by itself, though none does much
    with simulated.settings(delay_us=1500):
        costs = profile(captured, device=DEVICE, progress=False, min_passes=2, min_s=0.01)
    glue, *_, heavy = (costs[op.name] for op in captured.ops.compute)
    assert glue.host_forward_s > 0.01
    assert glue.seconds < glue.host_s
    assert heavy.host_s < heavy.seconds
    plan = autopipe.plan(captured, 2, costs=costs, n_ranks=2, n_microbatches=4)
    assert [len(stage.ops) for stage in plan.stages] == [4, 2], plan
    first = plan.stages[0]
    assert first.seconds < sum(costs[op].paced.seconds for op in first.ops) - glue.seconds


CHECKS = {f.__name__: f for f in (costs, host_and_device, the_host_decides_the_cut)}

if __name__ == "__main__":
    CHECKS[sys.argv[1]]()
