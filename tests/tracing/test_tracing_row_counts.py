"""What code asks of how many rows there are is told from what it hands on."""

from __future__ import annotations

import enum
import math
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


class Doubled(torch.autograd.Function):
    """Twice its input."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


class Fused(Block):
    """A layer with a backward of its own, where that is built."""

    def __init__(self, is_built: bool) -> None:
        super().__init__(False)
        self.is_built = is_built

    def forward(self, h: Tensor) -> Tensor:
        h = super().forward(h)
        return Doubled.apply(h) if self.is_built else h * 2  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", [Block, Fused])
@pytest.mark.parametrize("is_asking", [False, True])
def test_a_layer_that_hands_numbers_on_runs_once(
    kind: type[Block], is_asking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_rows, given = among_many.RowsMet._of_rows, list[int]()

    def noting(met: Any, call: Any, rows: str, *told: Any) -> Any:
        given.append(len(rows))
        return of_rows(met, call, rows, *told)

    monkeypatch.setattr(among_many.RowsMet, "_of_rows", noting)
    model = nn.Sequential(*(kind(is_asking and i == 2) for i in range(3)))
    found = capture(model, (torch.randn(2, 4),), closed=["0", "1", "2"]).variation.mixing
    assert not found.always
    assert {*given} >= {*range(3, 33)} if is_asking else given == [13]


class Naming(nn.Module):
    """A layer that is kept whole and names a function with a backward, which it may apply."""

    def __init__(self, applies: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.linear, self.applies = nn.Linear(4, 4), applies

    def forward(self, h: Tensor) -> Tensor:
        h = self.linear(h)
        return Doubled.apply(h) if self.applies(h) else h  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("applies", "is_asked"),
    [
        (lambda h: False, False),
        (lambda h: h.requires_grad, True),
        (lambda h: h.requires_grad and len(h) ** 2 == 1 << 20, True),
        (lambda h: bool((h > 9).any()), True),
    ],
)
def test_a_backward_that_is_only_named_is_not_run_on_each_number(
    applies: Callable[[Tensor], bool], is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_rows, given = among_many.RowsMet._of_rows, set[int]()

    def noting(met: Any, call: Any, rows: str, *told: Any) -> Any:
        given.add(len(rows))
        return of_rows(met, call, rows, *told)

    monkeypatch.setattr(among_many.RowsMet, "_of_rows", noting)
    capture(nn.Sequential(nn.Linear(4, 4), Naming(applies)), (torch.randn(2, 4),), closed=["1"])
    assert given >= {*range(3, 33)} if is_asked else given == {13}
