"""What a model sets around some of its ops stages set around those alone, whatever becomes of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

import autopipe
from autopipe.tracing.calls.regions import ambient


def pack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


def unpack(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextlib.contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def several() -> Iterator[None]:
    with torch.autocast("cpu", torch.bfloat16), saved_tensors_hooks(pack, unpack), in_double():
        yield


REGIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "kernels": lambda: sdpa_kernel(SDPBackend.MATH),
    "default dtype": in_double,
    "hooks": lambda: saved_tensors_hooks(pack, unpack),
    "several": several,
}


class Around(nn.Module):
    """A layer in a region, between two that are in none."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.within, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        with REGIONS[self.kind]():
            y = self.within(x).tanh() + torch.ones(4).to(x.dtype)
        return self.last(x + y.float())


def refuse(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise ZeroDivisionError("within")


def in_force() -> tuple[Any, ...]:
    """What is in force now, and whether hooks get what autograd saves."""
    made: Any = torch.ones(1, requires_grad=True).exp()
    return *ambient(), made.grad_fn._saved_result.data_ptr() == made.data_ptr()


@pytest.fixture(params=[False, True], ids=["kept", "run again"])
def runs_again(request: pytest.FixtureRequest) -> bool:
    return request.param


def pipe_of(model: nn.Module, runs_again: bool) -> autopipe.Pipe:
    """Two stages, the ops of the first to run again in backward where it ``runs_again``."""
    args = (torch.randn(8, 4),)
    options = {"costs": "estimated", "pin": {"first": 0, "within": 0, "last": 1}, "recompute": "auto"}
    pipe = autopipe.split(model, 2, args=args, **options)
    if not runs_again:
        return pipe
    first, *others = pipe.plan.stages
    stages = (dataclasses.replace(first, recomputed=(first.ops,)), *others)
    return autopipe.split(model, args=args, plan=dataclasses.replace(pipe.plan, stages=stages))


@pytest.mark.parametrize("kind", REGIONS)
def test_an_op_that_raises_leaves_no_region_in_force(kind: str, runs_again: bool) -> None:
    torch.manual_seed(0)
    model = Around(kind)
    pipe = pipe_of(model, runs_again)
    runtime = pipe.runtime(loss_fn=lambda out, _: out.square().mean(), n_microbatches=2)
    runtime.step(torch.randn(8, 4))
    before = in_force()
    model.within.register_forward_pre_hook(refuse)
    for call in (runtime.step, runtime.evaluate, pipe, pipe.stages[0]):
        with pytest.raises((autopipe.StepError, ZeroDivisionError), match="within"):
            call(torch.randn(8, 4))
        assert in_force() == before


@pytest.mark.parametrize("kind", REGIONS)
def test_gradients_are_the_models_where_a_block_in_a_region_runs_again(kind: str, runs_again: bool) -> None:
    torch.manual_seed(0)
    model, x = Around(kind), torch.randn(8, 4)
    model(x).square().mean().backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    before = in_force()
    runtime = pipe_of(model, runs_again).runtime(loss_fn=lambda out, _: out.square().mean(), n_microbatches=1)
    runtime.step(x)
    assert in_force() == before
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == (wanted[name] is None)
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["no_grad", "autocast"])
def test_a_compiled_stage_is_one_graph_where_the_region_is_one_of_torchs_own(kind: str) -> None:
    pipe = pipe_of(Around(kind), False)
    torch._dynamo.reset()
    counters.clear()
    torch.compile(pipe.stages[0], backend="eager")(torch.randn(8, 4))
    assert not counters["graph_break"]
