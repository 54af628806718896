"""One rank of a job that is watched: ``python publish_ranks.py FOLDER``; rank 1 takes longer than planned."""

import pathlib
import sys
import time

import torch
from torch import nn

import autopipe
from autopipe.simulator import watched


class Slow(nn.Module):
    """A layer that takes its time once training has begun."""

    pause_s = 0.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x):
        time.sleep(Slow.pause_s)
        return torch.tanh(self.linear(x))


def main(folder):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16), Slow())
    x, y = torch.randn(8, 16), torch.randn(8, 16)
    pipe = autopipe.split(model, 2, (x,), n_microbatches=4, costs="estimated", balance="uniform")
    rt = pipe.runtime(nn.functional.mse_loss)
    rt.publish(folder, every_s=0.02)
    Slow.pause_s = 0.01
    for _ in range(6):
        rt.step(x, target=y)
    seen, report = watched(folder), rt.report()
    assert seen is not None
    assert seen.step in (5, 6), seen.step
    assert seen.report.measured_step_s > 0.04
    assert seen.loss is not None
    assert 1 <= seen.report.n_steps <= 4
    assert seen.report.slowness[1] > 1.1 > seen.report.slowness[0], seen.report.slowness
    assert [str(a) for _, a, _, _ in seen.report.events] or report.events
    assert len(seen.report.events) == len(report.events) == 16
    assert len(seen.report.messages) == len(report.messages) == 8
    assert abs(seen.report.timeline.bubble_fraction - report.timeline.bubble_fraction) < 0.5
    told = report.peak_bytes
    assert len(told) in (0, 2)
    if told:
        assert "memory" in str(report)
        assert all(0 <= held < 200 << 20 for held in told), told


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(pathlib.Path(sys.argv[1]))
