"""One rank of two: a second thread calls a runtime in the middle of a step."""

import os
import threading

import torch
import torch.distributed as dist
from torch import nn

import autopipe
from autopipe.errors import AutopipeError


def main():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    x = torch.randn(8, 4)
    dist.init_process_group("gloo")
    refused, at_once = [], threading.Event()

    def evaluate():
        try:
            rt.evaluate(x, target=x)
        except AutopipeError as error:
            refused.append(str(error))
        at_once.set()

    def loss_fn(output, target):
        if not at_once.is_set():
            threading.Thread(target=evaluate, name="second").start()
            assert at_once.wait(10)
        return (output - target).square().mean()

    rt = autopipe.split(model, 2, args=(x,), costs="estimated").runtime(loss_fn)
    try:
        rt.step(x, target=x)
        told = ""
    except AutopipeError as error:
        told = str(error)
    assert "thread second uses a runtime that another thread" in told, told
    if dist.get_rank() == 1:
        assert refused == [told], refused
    print("told")


if __name__ == "__main__":
    main()
    os._exit(0)  # the group is broken: its threads need not be waited for
