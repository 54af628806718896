"""Threads that capture at once, and those that run models meanwhile."""

import concurrent.futures
import copy
import os
import signal
import sys
import threading

import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError, ModelError
from autopipe.tracing import capture
from autopipe.tracing.state import turns


class Net(nn.Module):
    def __init__(self, gain: float = 2.0) -> None:
        super().__init__()
        self.gain, self.layers = gain, nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) * self.gain + (x if place % 2 else 0)
        return x * 0.5 if x.shape[1] > 4 else x


@pytest.fixture
def hurried():
    """Threads that change places often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


def in_threads(*calls):
    """What each call gives in a thread of its own, all at once; raises what one raises."""
    made, start = {}, threading.Barrier(len(calls))

    def run(place, call):
        start.wait()
        try:
            made[place] = call()
        except BaseException as error:
            made[place] = error

    threads = [threading.Thread(target=run, args=one, daemon=True) for one in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in made.values():
        if isinstance(result, BaseException):
            raise result
    return [made[place] for place in range(len(calls))]


def test_threads_that_capture_models_at_once_take_turns(hurried):
    models = [Net(gain) for gain in (1.0, 2.0, 3.0)]
    x = torch.randn(3, 4, 4)
    found = in_threads(*(lambda m=m: capture(m, (x,), dynamic=False) for m in models))
    assert all(torch.equal(each(x), model(x)) for model, each in zip(models, found, strict=True))
    assert torch.equal(
        capture(models[0], (x,), dynamic=False)(x), models[0](x)
    )  # nothing is left of them in torch


def test_threads_that_capture_one_model_leave_it_as_it_was(hurried):
    model = Net()
    model(torch.randn(2, 4, 4)).sum().backward()
    before, gradients = copy.deepcopy(model.state_dict()), [p.grad for p in model.parameters()]
    x = torch.randn(3, 4, 4)
    found = in_threads(*[lambda: capture(model, (x,), dynamic=False)] * 3)
    assert all(torch.equal(each(x), model(x)) for each in found)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))
    assert model.training


def test_threads_that_meet_new_sizes_at_once_take_turns(hurried):
    class Unrolled(Net):
        def forward(self, x):
            for step in range(x.shape[1]):
                x = x + self.layers[step % 3](x[:, step : step + 1])
            return x

    model = Unrolled()
    found = capture(model, (torch.randn(3, 2, 4),))

    def met(length):
        x = torch.randn(2, length, 4)
        return torch.equal(found(x), model(x))

    assert in_threads(*(lambda n=n: met(n) for n in (3, 3, 4, 5))) == [True] * 4


def test_a_model_that_another_thread_runs_meanwhile_is_itself(hurried):
    model, done = Net(), threading.Event()
    x = torch.randn(3, 4, 4)
    expected = model(x)

    def runs():
        times = 0
        while not done.is_set() or not times:
            y = model(x)
            assert torch.equal(y, expected)
            assert y.requires_grad
            assert type(y.shape[0]) is int
            assert type(y.reshape(-1)) is torch.Tensor
            y.sum().backward()
            times += 1

    def captures():
        try:
            return capture(Net(3.0), (x,))
        finally:
            done.set()

    in_threads(runs, captures)


def test_a_child_that_is_forked_while_another_thread_captures_is_told_so():
    """Its lock is one that nobody gives back, and torch is there as it is amid a capture."""
    begun, end = threading.Event(), threading.Event()

    def captures():
        with turns.in_turn():
            begun.set()
            end.wait(60)

    thread = threading.Thread(target=captures, daemon=True)
    thread.start()
    assert begun.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            capture(Net(), (torch.randn(3, 4, 4),))
        except CaptureError as error:
            os._exit(0 if "was forked while another thread" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    end.set()
    thread.join(60)
    capture(Net(), (torch.randn(3, 4, 4),), dynamic=False)


def test_a_child_of_a_thread_that_captures_goes_on():
    with turns.in_turn():
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            with turns.in_turn():
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.timeout(60)
def test_a_forward_that_waits_for_a_thread_which_captures_is_told_so(monkeypatch):
    monkeypatch.setattr(turns, "_STUCK_S", 0.2)

    class Asking(Net):
        def forward(self, x):
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                pool.submit(capture, Net(), (x.detach() * 1,)).result()
            return super().forward(x)

    with pytest.raises(
        (CaptureError, ModelError), match=r"is to capture, while thread .* captures and has waited"
    ):
        capture(Asking(), (torch.randn(3, 4, 4),))


def test_threads_wait_for_one_that_captures_long(monkeypatch):
    """Who computes all the while, or waits here and there, is not stuck."""
    monkeypatch.setattr(turns, "_STUCK_S", 0.2)
    begun, never = threading.Event(), threading.Event()

    def captures():
        with turns.in_turn():
            begun.set()
            for _ in range(8):
                never.wait(0.1)
                sum(range(100_000))

    thread = threading.Thread(target=captures, daemon=True)
    thread.start()
    assert begun.wait(60)
    with turns.in_turn():
        thread.join(60)
    assert not thread.is_alive()
