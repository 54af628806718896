"""Calls of other kinds than the example's on two ranks, each given the batch or fed it; ``kind_ranks.py``."""

import sys

import torch
import torch.distributed as dist
from kind_models import KINDS, check_calls, model_and_twin

import autopipe


def check(name: str) -> None:
    example, calls = KINDS[name]
    for options in ({}, {"feed": 0}, {"schedule": "gpipe", "release": True}):
        model, twin = model_and_twin()
        pipe = autopipe.split(model, 2, kwargs=example, n_microbatches=3, costs="estimated")
        rt = pipe.runtime(**options)
        is_quiet = "feed" in options and dist.get_rank() != 0
        check_calls(rt, model, twin, [example, *calls, example], is_quiet)
        assert len(pipe.graph.kinds) > 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[1:] or KINDS:
        check(name)
    dist.destroy_process_group()
