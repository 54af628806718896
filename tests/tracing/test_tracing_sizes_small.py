"""All sizes are changed at once to such as take no more than the batch that a model is captured for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.tracing import capture
from autopipe.tracing.sizes import explore


class Largest(TorchDispatchMode):
    """How many numbers a convolution of three channels was given at the most."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default and args[0].shape[1] == 3:
            self.n = max(self.n, args[0].numel())
        return func(*args, **(kwargs or {}))


class Halving(nn.Module):
    """Takes even sizes of volumes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(3, 4, 3, padding=1), nn.Conv3d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + h.unflatten(-1, (-1, 2)).mean(-1).repeat_interleave(2, -1))


@pytest.mark.parametrize("little", [0, explore._LITTLE_BYTES])
def test_all_sizes_together_take_no_more_than_the_batch(little: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explore, "_LITTLE_BYTES", little)
    torch.manual_seed(0)
    model, x, largest = Halving(), torch.randn(8, 3, 12, 12, 12), Largest()
    with largest:
        captured = capture(model, (x,))
    assert (largest.n <= x.numel()) is not bool(little)
    assert [d.name for d in captured.ops.dims] == [d.name for d in capture(model, (x,)).ops.dims]
    assert len(captured.ops.dims) == 4
    for shape in ((6, 3, 12, 12, 12), (3, 3, 7, 9, 8), (9, 3, 24, 5, 20)):
        given = torch.randn(shape)
        torch.testing.assert_close(captured(given), model(given))
