"""One rank of two: it saves in the background, and leaves at once by the end of its script or another way."""

import pathlib
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.runtime.checkpoint import saving


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


def main(folder, how):
    dist.init_process_group("gloo")
    rank, write = dist.get_rank(), saving._write
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    runtime = autopipe.split(net(), 2, (x,), costs="estimated", n_microbatches=2).runtime(
        F.mse_loss, stall_limit_s=30.0
    )
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1, momentum=0.9)
    runtime.step(x, target=x)
    optimizer.step()

    def slow(*args, **options):
        time.sleep(0.7 if rank == 1 else 0.0)
        return write(*args, **options)

    saving._write = slow
    runtime.save(folder / "before", optimizer=optimizer, background=True)
    torch.save({n: p.detach() for n, p in runtime.named_parameters()}, folder / f"own-{rank}")
    runtime.save(folder / "c", optimizer=optimizer, background=True)  # a second waits for the first
    assert (folder / "before" / "autopipe.json").exists()
    if how == "destroyed":
        dist.destroy_process_group()
    if how == "exit":
        sys.exit(0)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
