"""Two replicas of a pipeline of two: one rank stops, and all others are told, of whichever pipeline."""

import os
import pathlib
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import autopipe
from autopipe.errors import AutopipeError

LIMIT_S, MARGIN_S = 4.0, 25.0


def main(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    x = torch.randn(8, 8) + mesh.get_local_rank("dp")
    pipe = autopipe.split(model, 2, (x,), n_ranks=2, costs="estimated", n_microbatches=2)
    runtime = pipe.runtime(F.mse_loss, mesh=mesh, stall_limit_s=LIMIT_S)
    runtime.wrap(lambda stage: DistributedDataParallel(stage, process_group=mesh.get_group("dp")))
    stopped_at, n_done = folder / "at", 0

    def train():
        nonlocal n_done
        while True:
            if n_done == 2 and rank == 3:
                stopped_at.write_text(str(time.monotonic()))
                os.kill(os.getpid(), signal.SIGSTOP)
            runtime.step(x, target=x)
            n_done += 1

    with pytest.raises(AutopipeError) as told:
        train()
    seconds = time.monotonic() - float(stopped_at.read_text())
    (folder / f"told-{rank}").write_text(str(told.value))
    print(f"told after {seconds:.1f} s, {n_done} steps: {told.value}", flush=True)
    assert n_done == 2
    assert seconds < LIMIT_S + MARGIN_S
    while len([*folder.glob("told-*")]) < 3:
        time.sleep(0.1)  # others read their cause in its store
    if rank == 0:
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    if os.environ["RANK"] == "3":
        (pathlib.Path(sys.argv[1]) / "pid").write_text(str(os.getpid()))
    main(pathlib.Path(sys.argv[1]))
