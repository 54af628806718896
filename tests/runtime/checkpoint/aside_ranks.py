"""One rank of two: the second stops in the thread that writes its part of a save; the first waits for it."""

import os
import pathlib
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import StepError
from autopipe.runtime.checkpoint import saving

LIMIT_S, MARGIN_S = 2.0, 30.0


def main(folder):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    x = torch.randn(8, 8)
    runtime = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=2).runtime(
        F.mse_loss, stall_limit_s=LIMIT_S
    )
    runtime.step(x, target=x)
    write = saving._write

    def slow(*args, **options):
        """Slower than the limit, which is no fault; the next time stopped."""
        if rank == 1 and not (folder / "c").exists():
            time.sleep(2 * LIMIT_S)
        elif rank == 1:
            (folder / "at").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return write(*args, **options)

    saving._write = slow
    runtime.save(folder / "c", background=True).wait()
    with pytest.raises(StepError, match="rank 1 shows no sign of life") as told:
        runtime.save(folder / "c", background=True).wait()
    seconds = time.monotonic() - float((folder / "at").read_text())
    assert seconds < LIMIT_S + MARGIN_S
    print(f"told after {seconds:.1f} s: {told.value}", flush=True)
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        (pathlib.Path(sys.argv[1]) / "pid").write_text(str(os.getpid()))
    main(pathlib.Path(sys.argv[1]))
