"""One rank of two: a forked child calls a runtime, then a second thread in the middle of a step."""

import os
import pathlib
import signal
import threading

import torch
import torch.distributed as dist
from torch import nn

import autopipe
from autopipe.errors import AutopipeError, InputError

CALLS = {
    "step": lambda rt, x, folder: rt.step(x, target=x),
    "forward": lambda rt, x, folder: rt.forward(x),
    "save": lambda rt, x, folder: rt.save(folder / "save"),
    "load": lambda rt, x, folder: rt.load(folder / "save"),
    "resume": lambda rt, x, folder: rt.resume(folder),
    "publish": lambda rt, x, folder: rt.publish(folder),
    "report": lambda rt, x, folder: rt.report(),
    "clip": lambda rt, x, folder: rt.clip_grad_norm_(1.0),
    "gather": lambda rt, x, folder: rt.gather_weights(),
    "rebalance": lambda rt, x, folder: rt.rebalance(),
}
"""What a rank may call between steps alone."""


def interrupted(rt, x, folder):
    """A signal's handler that saves in the middle of a step ends that step on every rank, with the cause."""
    signal.signal(signal.SIGUSR1, lambda *_: CALLS["save"](rt, x, folder))
    told = ""
    try:
        rt.step(x, target=x)
    except AutopipeError as error:
        told = str(error)
    assert "save() was called while a step was under way in the same thread" in told, told


def alone(rt, x):
    """A child of one rank is refused whatever it calls, and the rank goes on."""
    loss = rt.step(x, target=x).loss
    if dist.get_rank() == 0:
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (rt.step, rt.evaluate):
                try:
                    call(x, target=x)
                except InputError as error:
                    refused += "was forked from" in str(error)
            for call in (rt.report, lambda: rt.clip_grad_norm_(1.0), lambda: rt.save("never")):
                try:
                    call()
                except InputError as error:
                    refused += "was forked from" in str(error)
            waited = []
            rt.engine.peers.watch.close = lambda: waited.append(True)  # for threads that no child has
            rt.engine.peers.close()  # as a child does that lets go of it
            refused += not waited
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
    assert torch.equal(rt.step(x, target=x).loss, loss)


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

    pipe = autopipe.split(model, 2, args=(x,), costs="estimated")
    alone(pipe.runtime(nn.functional.mse_loss), x)

    def signalled(output, target):
        signal.raise_signal(signal.SIGUSR1)
        return nn.functional.mse_loss(output, target)

    interrupted(pipe.runtime(signalled), x, pathlib.Path("never"))
    rt = pipe.runtime(loss_fn)
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
