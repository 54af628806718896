"""Layers that free what they are given, as reversible ones do, in stages of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe.errors import CaptureError


class Reversing(torch.autograd.Function):
    """Frees its input, and makes it anew of its output in backward."""

    @staticmethod
    def forward(ctx: Any, block: Block, x: Tensor, *weights: Tensor) -> Tensor:
        out = block.coupled(x.detach())
        x.untyped_storage().resize_(0)
        ctx.block, ctx.weights, ctx.given, ctx.made = block, weights, x, out
        return out

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        with torch.no_grad():
            ctx.given.set_(ctx.block.inverted(ctx.made))
        with torch.enable_grad():
            given = ctx.given.detach().requires_grad_()
            made = ctx.block.coupled(given)
        return None, *torch.autograd.grad(made, (given, *ctx.weights), slope)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def coupled(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat([a + self.linear(b).tanh(), b], -1).flip(-1)

    def inverted(self, y: Tensor) -> Tensor:
        a, b = y.flip(-1).chunk(2, -1)
        return torch.cat([a - self.linear(b).tanh(), b], -1)

    def forward(self, x: Tensor) -> Tensor:
        return Reversing.apply(self, x, *self.linear.parameters())


class Reversible(nn.Module):
    """A net of reversible layers; what they free may be looked at before, and asked for its sizes behind."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.layers, self.last = nn.ModuleList([Block() for _ in range(4)]), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            before, seen = x, x.sum(-1, keepdim=True)
            x = layer(x)
            x = x + seen.tanh() / before.shape[-1]
        return self.last(x)


def stages_of_layers(pipe: autopipe.Pipe) -> set[int]:
    return {s for name, stages in pipe.plan.stages_of.items() if name.startswith("layers") for s in stages}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_frees_its_inputs_may_be_on_another_stage_than_what_made_them(schedule):
    """Else all such layers are one stage. What an earlier stage has is not freed."""
    torch.manual_seed(0)
    model, x = Reversible(nn.Linear(4, 4)).double(), torch.randn(6, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    pipe = autopipe.split(model, 3, (x,), costs="estimated", n_microbatches=3, schedule=schedule)
    assert stages_of_layers(pipe) == {0, 1, 2}
    torch.testing.assert_close(pipe(x), plain(x))
    loss = plain(x).square().mean()
    loss.backward()
    found = pipe.runtime(lambda out, _: out.square().mean()).step(x).loss
    assert float(found) == pytest.approx(loss.item(), rel=1e-12)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_a_layer_that_frees_what_the_caller_gives_is_refused():
    """Whoever reads that again, as another call on it does, ends the process."""
    with pytest.raises(CaptureError, match=r"gives back the memory of the input x, .*: x\.clone\(\)"):
        autopipe.capture(Reversible(nn.Identity()), (torch.randn(6, 4),))
