"""Numbers are close up to what is allowed of the largest that is no fill, however that is told."""

from __future__ import annotations

import math

import pytest
import torch

from autopipe.tracing.rows.results import is_close

NAN, INF, FILL = math.nan, math.inf, -1e9
OFF = 1e-2
"""More than is allowed of numbers about one, in any of these dtypes, and less than that of fills."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize(
    ("x", "y", "is_alike"),
    [
        ([1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2.0], [1.0, 2.0 + 1e-9], True),
        ([1.0, 2.0], [1.0, 2.0 + OFF], False),
        ([0.0, 0.0], [0.0, 1e-30], False),
        ([1.0, -9e3], [1.0 + 1e-7, -9e3], True),
        ([1.0, NAN], [1.0 + 1e-9, NAN], True),
        ([1.0, NAN], [NAN, 1.0], False),
        ([1.0, NAN], [1.0 + OFF, NAN], False),
        ([1.0, 2.0], [1.0, NAN], False),
        ([], [], True),
    ],
)
def test_numbers_are_close_up_to_the_largest(x, y, is_alike, dtype):
    assert is_close(torch.tensor(x, dtype=dtype), torch.tensor(y, dtype=dtype)) is is_alike


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("fill", [FILL, -INF, INF])
def test_what_fills_stand_beside_is_held_to_what_is_left(fill, dtype):
    x = torch.tensor([1.0, fill, 2.0], dtype=dtype)
    assert is_close(x, x + torch.tensor([1e-9, 0.0, 0.0], dtype=dtype))
    assert not is_close(x, x + torch.tensor([OFF, 0.0, 0.0], dtype=dtype))
    assert not is_close(x, x.roll(1))
