"""A class that is given another forward between two captures is looked into anew by the second."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError, InputError
from autopipe.tracing import capture
from autopipe.tracing.code.leaf_state import goes_by


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def _integrating(self: Cell, x: torch.Tensor) -> torch.Tensor:
    self.held = torch.tanh(0.5 * self.held + self.linear(x))
    return self.held


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(a) + self.linear(b)


def _comparing(self: Joined, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return self.linear(a) if a is b else self.linear(a) + self.linear(b)


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, object], None]:
    return lambda cls, forward: monkeypatch.setattr(cls, "forward", forward)


def test_what_a_layer_goes_by_with_another_forward_is_known(patched: Callable[[type, object], None]) -> None:
    x = torch.randn(6, 4)
    capture(nn.Sequential(Cell()), (x,))
    assert "held" not in goes_by(Cell)
    patched(Cell, _integrating)
    with contextlib.suppress(CaptureError):  # it carries its state on to the next call
        capture(nn.Sequential(Cell()), (x,))
    assert "held" in goes_by(Cell)


def test_another_forward_that_compares_by_identity_is_told(patched: Callable[[type, object], None]) -> None:
    x, other = torch.randn(6, 4), torch.randn(6, 4)
    capture(Joined(), (x, other))
    patched(Joined, _comparing)
    captured = capture(Joined(), (x, other))
    with pytest.raises(InputError, match="one tensor, which the model tells from two"):
        captured(x, x)
