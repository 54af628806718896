"""Calls of other kinds than the example's on two ranks, each given the batch or fed it; ``kind_ranks.py``."""

import sys

import pytest
import torch
import torch.distributed as dist
from kind_models import KINDS, check_calls, given, model_and_twin

import autopipe
from autopipe.errors import InputError


def check(name: str) -> None:
    example, calls = KINDS[name]
    for options in ({}, {"feed": 0}, {"schedule": "gpipe", "release": True}):
        model, twin = model_and_twin()
        pipe = autopipe.split(model, 2, kwargs=example, n_microbatches=3, costs="estimated")
        rt = pipe.runtime(**options)
        is_quiet = "feed" in options and dist.get_rank() != 0
        check_calls(rt, model, twin, [example, *calls, example], is_quiet)
        assert len(pipe.graph.kinds) > 1


def check_refused() -> None:
    """What a batch recorded that the source refused, the others record with the next that needs it."""
    model, twin = model_and_twin()
    pipe = autopipe.split(model, 2, kwargs=given("labels"), n_microbatches=2, costs="estimated")
    is_source = dist.get_rank() == 0
    refuses = [True]

    def weight(args, kwargs, target):
        if refuses[0]:
            raise ValueError("no weight")
        return float(kwargs["ids"].shape[0])

    rt = pipe.runtime(feed=0, loss_weight=weight)
    for kwargs in (given("labels", "mask"), given("labels", "image")):
        with pytest.raises((InputError, ValueError), match="no weight"):
            rt.step(**(kwargs if is_source else {}))
    assert len(pipe.graph.kinds) == (3 if is_source else 1)
    refuses[0] = False
    calls = [
        given("labels"),
        given("labels", as_dict=False),
        given("labels", "mask"),
        given("labels", "image"),
    ]
    check_calls(rt, model, twin, calls, is_quiet=not is_source)
    assert len(pipe.graph.kinds) == 4


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in sys.argv[1:] or KINDS:
        check(name)
    check_refused()
    dist.destroy_process_group()
