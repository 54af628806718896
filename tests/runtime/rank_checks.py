"""What a rank of checks does: those that its arguments name, one after another, in one process group."""

import sys
from collections.abc import Callable, Mapping

import torch.distributed as dist

__all__ = ["run"]


def run(checks: Mapping[str, Callable[[], None]]) -> None:
    dist.init_process_group("gloo")
    for name in sys.argv[1:]:
        print(f"check {name}", flush=True)
        checks[name]()
    if dist.is_initialized():  # a check may have ended it
        dist.destroy_process_group()
