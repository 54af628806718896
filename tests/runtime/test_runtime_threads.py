"""Threads that share a runtime take turns; over ranks a second one is refused, and all are told."""

import concurrent.futures
import os
import pathlib
import signal
import threading
import types

import pytest
import thread_ranks
import torch
from processes import run_ranks
from torch import nn

import autopipe
from autopipe.errors import AutopipeError, InputError


def chain(*more):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], *more)


def mean_square(output, target):
    return (output - target).square().mean()


def in_threads(call, things):
    with concurrent.futures.ThreadPoolExecutor(len(things)) as pool:
        return list(pool.map(call, things))


@pytest.mark.timeout(60)
def test_threads_get_what_each_would_get_alone():
    model = chain()
    batches = [torch.randn(8, 8) for _ in range(8)] * 4
    with torch.no_grad():
        wanted = [mean_square(model(x), x).item() for x in batches]
    pipe = autopipe.split(model, 2, args=(batches[0],), costs="estimated")
    rt = pipe.runtime(mean_square)
    found = in_threads(lambda x: rt.evaluate(x, target=x).loss.item(), batches)
    torch.testing.assert_close(found, wanted)
    found = in_threads(lambda x: mean_square(pipe(x), x).item(), batches)
    torch.testing.assert_close(found, wanted)


@pytest.mark.timeout(60)
def test_gradients_of_threads_add_up():
    model = chain()
    batches = [torch.randn(8, 8) for _ in range(8)]
    sum(mean_square(model(x), x) for x in batches).backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    rt = autopipe.split(model, 2, args=(batches[0],), costs="estimated").runtime(mean_square)

    def work(x):
        with rt.scaled(0.5):
            rt.step(x, target=x)
        rt.accumulate([{"input": x, "target": x}])

    in_threads(work, batches)
    torch.testing.assert_close([p.grad for p in model.parameters()], [1.5 * g for g in wanted])


@pytest.mark.timeout(60)
def test_draws_of_two_runtimes_do_not_mix():
    x = torch.randn(8, 8)
    runtimes = [
        autopipe.split(chain(nn.Dropout(0.5)), 2, args=(x,), costs="estimated").runtime() for _ in range(2)
    ]
    wanted = [rt.forward(x, like_step=True) for rt in runtimes]
    before = torch.get_rng_state()
    for _ in range(5):
        found = in_threads(lambda rt: [rt.forward(x, like_step=True) for _ in range(4)], runtimes)
        for outputs, one in zip(found, wanted, strict=True):
            assert all(torch.equal(output, one) for output in outputs)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", thread_ranks.CALLS)
def test_a_call_within_a_step_is_refused(name, tmp_path):
    x = torch.randn(8, 8)
    is_within = [True]

    def loss_fn(output, target):
        if is_within.pop():
            thread_ranks.CALLS[name](rt, x, tmp_path)
        return mean_square(output, target)

    rt = autopipe.split(chain(), 2, args=(x,), costs="estimated").runtime(loss_fn)
    with pytest.raises(AutopipeError, match="was called while a step was under way in the same thread"):
        rt.step(x, target=x)
    assert not [*tmp_path.iterdir()]


def test_a_call_within_a_save_is_refused(tmp_path):
    rt = autopipe.split(chain(), 2, args=(torch.randn(8, 8),), costs="estimated").runtime(mean_square)
    within = types.SimpleNamespace(state_dict=lambda: rt.save(tmp_path / "inner"), load_state_dict=None)
    with pytest.raises(AutopipeError, match=r"save\(\) was called while saving a checkpoint was under way"):
        rt.save(tmp_path / "outer", within=within)
    assert not [*tmp_path.iterdir()]


@pytest.mark.timeout(60)
def test_a_failed_call_gives_its_turn_back():
    x = torch.randn(8, 8)
    rt = autopipe.split(chain(), 2, args=(x,), costs="estimated").runtime(mean_square)
    with pytest.raises(AutopipeError):
        rt.step(torch.randn(8, 3), target=x)
    thread = threading.Thread(target=lambda: rt.step(x, target=x), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.timeout(60)
def test_a_child_that_is_forked_amid_another_threads_call_makes_a_runtime_of_its_own():
    x, within, end = torch.randn(8, 8), threading.Event(), threading.Event()

    def loss_fn(output, target):
        within.set()
        end.wait(60)
        return mean_square(output, target)

    pipe = autopipe.split(chain(nn.Dropout(0.5)), 2, args=(x,), costs="estimated")
    rt = pipe.runtime(loss_fn, loss_on="microbatches")
    thread = threading.Thread(target=lambda: rt.evaluate(x, target=x), daemon=True)
    thread.start()
    assert within.wait(60)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        told = 0
        try:
            rt.evaluate(x, target=x)
        except InputError as error:
            told = "was forked while another thread" in str(error)
        found = pipe.runtime(mean_square).evaluate(x, target=x).loss
        os._exit(0 if told and found.isfinite() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    end.set()
    thread.join(60)
    assert rt.evaluate(x, target=x).loss.isfinite()


@pytest.mark.timeout(100)
def test_on_two_ranks_a_second_thread_is_refused():
    outputs = run_ranks(pathlib.Path(thread_ranks.__file__), 2, timeout_s=80)
    assert all("told" in output for output in outputs)
