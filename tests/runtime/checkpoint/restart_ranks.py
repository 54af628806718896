"""What ``torchrun --max-restarts`` does, its ranks forked: one is killed, all go on from the last save."""

import itertools
import json
import os
import pathlib
import signal
import sys

import torch
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional as F

import autopipe


class Loader:
    """Batches in an order of its own, with a position."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __iter__(self):
        while True:
            yield torch.randn(8, 8, generator=self.generator, dtype=torch.float64)

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


def train(folder, n_stages, n_steps, kill_at=None):
    """The documented pattern; the losses of the steps that this start ran."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(6)]
    model = nn.Sequential(*layers).double()
    x = torch.randn(8, 8, dtype=torch.float64)
    rt = autopipe.split(model, n_stages, (x,), costs="estimated", n_microbatches=2).runtime(
        F.mse_loss, stall_limit_s=10.0
    )
    optimizer = torch.optim.AdamW(rt.parameters(), 0.01)
    kept = {"optimizer": optimizer, "loader": Loader()}
    done = rt.resume(folder / "run", **kept) if folder else 0
    losses = {}
    for n, x in zip(
        range(done + 1, n_steps + 1), itertools.islice(kept["loader"], n_steps - done), strict=True
    ):
        if n == kill_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rt.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        losses[n] = rt.step(x, target=x).loss.item()
        optimizer.step()
        optimizer.zero_grad()
        if folder and n % 2 == 0:
            rt.save(folder / "run", keep_last=2, **kept)
    return losses


def rank(folder, n_stages, n_steps, kill_at):
    losses = train(pathlib.Path(folder), n_stages, n_steps, kill_at)
    torch.distributed.destroy_process_group()
    return json.dumps([os.environ["TORCHELASTIC_RESTART_COUNT"], losses])


def launch(folder, n_ranks, n_steps, kill_at=None):
    config = LaunchConfig(
        1,
        1,
        n_ranks,
        max_restarts=1,
        monitor_interval=0.1,
        start_method="fork",
        run_id=f"{n_ranks}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
    )
    found = elastic_launch(config, rank)(folder, n_ranks, n_steps, kill_at)
    return json.loads(found[0])


def main(folder):
    restarts, first = launch(folder, 2, 8, kill_at=6)
    assert restarts == "1"
    assert sorted(map(int, first)) == [5, 6, 7, 8]  # from the save at 4
    restarts, second = launch(folder, 3, 11)
    assert restarts == "0"
    assert sorted(map(int, second)) == [9, 10, 11]
    plain = train(None, 1, 11)
    for n, loss in {**first, **second}.items():
        assert abs(plain[int(n)] - loss) < 1e-12, (n, loss, plain)
    print("went on")


if __name__ == "__main__":
    main(sys.argv[1])
