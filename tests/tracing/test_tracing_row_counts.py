"""What code asks of how many rows there are is told from what it hands on."""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.tracing import capture
from autopipe.tracing.rows import among_many
from autopipe.tracing.rows.row_counts import RowCounts

HANDED_ON: dict[str, Callable[[Tensor], Any]] = {
    "view": lambda h: h.view(*h.shape[:-1], 2, -1).transpose(0, 1),
    "reshape": lambda h: h.reshape((h.size(0) * 2, -1)).reshape(h.shape[0], -1),
    "made": lambda h: torch.zeros(h.shape[0], 3) + h.new_full((h.shape[0], 3), 2.0),
    "expand": lambda h: torch.ones(1, 4).expand(h.shape[0], -1) * h,
    "parts": lambda h: h.view(h.shape[0] * 4 // 2, -1),
    "same": lambda h: h if h.shape[0] == (h + 1).shape[0] and h.shape == h.shape else None,
    "more than one": lambda h: h * 2 if h.shape[0] > 1 and isinstance(h.shape[0], int) else h,
    "elements": lambda h: h.view(h.shape.numel()).view(-1, 4),
    "columns": lambda h: h.chunk(2, dim=-1)[0] * (2 if h.shape[1] ** 2 == 16 else 1),
    "all": lambda h: h if (h > 0).all(0).any() else h * 2,
    "data": lambda h: h if h.isnan().any() else h.cumsum(-1),
    "layer": lambda h: nn.MultiheadAttention(4, 2)(h[:, None], h[:, None], h[:, None])[0],
}
ASKED: dict[str, Callable[[Tensor], Any]] = {
    "equal": lambda h: h.shape[0] == 15,
    "length": lambda h: len(h) > 40,
    "square": lambda h: h.size(0) * h.size(0),
    "half": lambda h: h.size(0) / 2,
    "index": lambda h: [0] * 99 and list(range(99))[h.shape[0]],
    "range": lambda h: [h[i] for i in range(h.shape[0])],
    "root": lambda h: math.isqrt(h.shape[0]),
    "text": lambda h: f"{h.shape[0]}",
    "bits": lambda h: h.shape[0].bit_length(),
    "key": lambda h: {15: 2}.get(h.shape[0]),
    "rest": lambda h: h.shape[0] % 5,
    "value": lambda h: h * h.shape[0],
    "filled": lambda h: torch.full((2,), h.shape[0]),
    "tensor": lambda h: torch.tensor(h.shape[0]),
    "one of": lambda h: F.one_hot(torch.tensor(h.shape[0]), 64),
    "pieces": lambda h: h.split(4),
    "rows": lambda h: list(h),
    "numbers": lambda h: h.tolist(),
    "array": lambda h: h.numpy(),
    "counted": lambda h: torch.ones_like(h[:, 0]).sum(),
    "caught": lambda h: _caught(h),
    "place": lambda h: h[9],
    "last place": lambda h: bool(torch.arange(h.shape[0])[-1] == 9),
    "member": lambda h: h.shape[0] == Limits.ROWS,
    "NumPy's": lambda h: h.shape[0] == np.int64(15),
    "same size": lambda h: h.is_same_size(torch.zeros(15, 4)),
    "one more": lambda h: torch.cat([h.argmax(-1), torch.zeros(1)]).long(),
    "one more of a mask": lambda h: F.pad(h[:, 0] > 0, (1, 0)),
    "made of one more": lambda h: torch.zeros(h.shape[0] + 1),
    "one fewer": lambda h: h.argmax(-1)[1:],
    "a few": lambda h: h[5:],
    "counted in columns": lambda h: (h > 0).sum(0),
    "operator": lambda h: doubled(h),
}


class Limits(enum.IntEnum):
    ROWS = 15


@torch.library.custom_op("autopipe_tests::doubled", mutates_args=())
def doubled(h: Tensor) -> Tensor:
    return h * 2 if h.shape[0] == 15 else h.clone()


def _caught(h: Tensor) -> Tensor:
    try:
        return h[20]
    except IndexError:
        return h


@pytest.mark.parametrize("name", HANDED_ON)
def test_a_number_that_is_handed_on_is_not_asked_for(name: str) -> None:
    h, counts = torch.randn(13, 4), RowCounts(13)
    with counts:
        HANDED_ON[name](h)
    assert not counts.asks


@pytest.mark.parametrize("name", ASKED)
def test_what_is_done_with_a_number_but_that_is(name: str) -> None:
    h, counts = torch.randn(13, 4), RowCounts(13)
    try:
        with counts:
            ASKED[name](h)
    except Exception:
        assert counts.asks
    assert counts.asks


class Block(nn.Module):
    """A layer that is kept whole, and may ask for a number."""

    def __init__(self, is_asking: bool) -> None:
        super().__init__()
        self.linear, self.is_asking = nn.Linear(4, 4), is_asking

    def forward(self, h: Tensor) -> Tensor:
        h = self.linear(h).view(h.shape[0], 2, -1).flatten(1)
        return h * 2 if self.is_asking and h.shape[0] ** 2 == 1 << 20 else h


BACKWARDS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "each": (lambda g: g * 2, False),
    "shaped": (lambda g: g.reshape(g.shape[0], 2, -1).flatten(1), False),
    "so many": (lambda g: g * 2 if g.shape[0] == 15 else g, True),
    "divided": (lambda g: g / g.shape[0], True),
    "mean": (lambda g: g - g.mean(0), True),
    "read": (lambda g: g if g.sum().item() else g * 2, True),
    "shared out": (lambda g: g * torch.zeros_like(g).softmax(0), True),
    "shared out by column": (lambda g: g * torch.zeros_like(g).softmax(-1), False),
    "derived": (lambda g: derived(g), True),
}
APPLIED: dict[str, tuple[Callable[[Tensor], bool], bool]] = {
    "never": (lambda h: False, False),
    "with gradients": (lambda h: h.requires_grad, False),
    "for so many": (lambda h: h.requires_grad and len(h) ** 2 == 1 << 20, True),
    "by data": (lambda h: bool((h > 9).any()), True),
    "beside noise": (lambda h: torch.rand_like(h).requires_grad is False, False),
    "by a draw": (lambda h: random.random() < 2, True),
}


class Own(torch.autograd.Function):
    """Its input, with a backward that is given."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.back(grads[0]), None


@torch.enable_grad()
def derived(g: Tensor) -> Tensor:
    """A gradient by way of one more backward, as where a layer runs again in its own."""
    h = g.detach().requires_grad_()
    by_number: Any = lambda g: g * 2 if len(g) == 15 else g  # noqa: E731
    made = Own.apply(h, by_number)  # type: ignore[no-untyped-call]
    return torch.autograd.grad(made, h, g)[0]


class Fused(nn.Module):
    """A layer that is kept whole, with a backward of its own that it may apply."""

    def __init__(self, back: str, applied: str) -> None:
        super().__init__()
        self.linear, self.back, self.applied = nn.Linear(4, 4), back, applied

    def forward(self, h: Tensor) -> Tensor:
        h = self.linear(h)
        if not APPLIED[self.applied][0](h):
            return h
        return Own.apply(h, BACKWARDS[self.back][0])  # type: ignore[no-untyped-call]


@pytest.fixture
def n_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many rows as layers are asked about, in turn."""
    of_rows, given = among_many.RowsMet._of_rows, list[int]()

    def noting(met: Any, call: Any, rows: str, *told: Any) -> Any:
        given.append(len(rows))
        return of_rows(met, call, rows, *told)

    monkeypatch.setattr(among_many.RowsMet, "_of_rows", noting)
    return given


@pytest.mark.parametrize("is_asking", [False, True])
def test_a_layer_that_hands_numbers_on_runs_once(is_asking: bool, n_rows: list[int]) -> None:
    model = nn.Sequential(*(Block(is_asking and i == 2) for i in range(3)))
    found = capture(model, (torch.randn(2, 4),), closed=["0", "1", "2"]).variation.mixing
    assert not found.always
    assert {*n_rows} >= {*range(3, 33)} if is_asking else n_rows == [13]


@pytest.mark.parametrize("back", BACKWARDS)
def test_a_backward_that_hands_numbers_on_runs_once(back: str, n_rows: list[int]) -> None:
    capture(nn.Sequential(Fused(back, "with gradients")), (torch.randn(2, 4),), closed=["0"])
    assert {*n_rows} >= {*range(3, 33)} if BACKWARDS[back][1] else {*n_rows} == {13}


@pytest.mark.parametrize("applied", APPLIED)
def test_a_backward_that_is_only_named_is_not_run_on_each_number(applied: str, n_rows: list[int]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Fused("each", applied))
    capture(model, (torch.randn(2, 4),), closed=["1"])
    assert {*n_rows} >= {*range(3, 33)} if APPLIED[applied][1] else {*n_rows} == {13}
