"""Kernels of the meta device are asked once for each form of call, and what comes of a call is the same."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe import capture
from autopipe.tracing.runs.meta_kernels import asked_once

META = torch.device("meta")


class Asked(TorchDispatchMode):
    """Counts what reaches the kernels."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))


def tensor(*sizes, dtype=torch.float32):
    return torch.empty(*sizes, dtype=dtype, device="meta")


def whole(*sizes):
    return tensor(*sizes, dtype=torch.int64)


def cross(x):
    return nn.functional.cross_entropy(x, whole(3))


CALLS = [
    lambda: tensor(3, 4) + tensor(4),
    lambda: tensor(3, 4, dtype=torch.bfloat16) + tensor(3, 4),
    lambda: tensor(4, 3).t() + tensor(4, 3).t(),
    lambda: whole(3) + 1,
    lambda: whole(3) + 1.0,
    lambda: whole(3) + True,
    lambda: whole(3) / whole(3),
    lambda: torch.cat([tensor(2, 3), tensor(4, 3)]),
    lambda: torch.cat([tensor(2, 3), tensor(2, 3)], 1),
    lambda: tensor(3, 4).sum(1, keepdim=True),
    lambda: tensor(3, 4).sum(1, keepdim=False),
    lambda: tensor(3, 4).sum(1, dtype=torch.float64),
    lambda: cross(tensor(3, 5)),
    lambda: nn.functional.linear(tensor(2, 3, 4), tensor(5, 4)),
    lambda: tensor(3, 4).to(torch.float64),
    lambda: tensor(2, 3, 4, 5).contiguous(memory_format=torch.channels_last) * 2,
    lambda: torch.complex(tensor(3), tensor(3)).conj() * 2,
    lambda: tensor(3).max(0).values,
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_results_are_those_of_the_kernels_at_the_first_call_and_at_later_ones(dtype):
    torch.set_default_dtype(dtype)
    try:
        expected = [call() for call in CALLS]
        with asked_once(META):
            for _ in range(2):
                found = [call() for call in CALLS]
                for one, other in zip(found, expected, strict=True):
                    form = one.shape, one.stride(), one.dtype, one.device, one.requires_grad
                    assert form == (other.shape, other.stride(), other.dtype, other.device, False)
                    assert one.untyped_storage().nbytes() == other.untyped_storage().nbytes()
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_defaults_decide_is_asked_again():
    with asked_once(META):
        found = []
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            found.append((whole(3) / whole(3)).dtype)
        torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64]


def test_each_result_has_its_own_place_but_views_and_writes():
    x = tensor(3, 4)
    with asked_once(META):
        first, second, view, written = x * 2, x * 2, x.view(4, 3), x.add_(1)
    places = [t.untyped_storage()._cdata for t in (x, first, second)]
    assert len({*places}) == 3
    assert view.untyped_storage()._cdata == places[0]
    assert written is x


def test_kernels_are_asked_once_for_each_form_of_call():
    with Asked() as asked, asked_once(META):
        for _ in range(5):
            tensor(3, 4) + tensor(3, 4)
            tensor(3, 4) + tensor(4)
            nn.functional.dropout(tensor(3), 0.5, training=True)
            with pytest.raises(RuntimeError):
                tensor(3) + tensor(4)
    assert asked.counts[torch.ops.aten.add.Tensor] == 2 + 5


def test_gradients_go_through_results_that_were_known():
    w = nn.Parameter(tensor(4, 4))
    with asked_once(META):
        for _ in range(2):
            w.grad = None
            (tensor(3, 4) @ w).sum().backward()
    assert w.grad is not None
    assert w.grad.shape == (4, 4)


def test_on_other_devices_nothing_is_between():
    with Asked() as asked, asked_once(torch.device("cpu")):
        for _ in range(3):
            torch.ones(3) + torch.ones(3)
    assert asked.counts[torch.ops.aten.add.Tensor] == 3


class Residual(nn.Module):
    def __init__(self, n_blocks):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(n_blocks))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def test_a_capture_asks_no_more_kernels_of_a_deeper_model():
    counts = []
    for n_blocks in (2, 9):
        with Asked() as asked:
            capture(Residual(n_blocks).to("meta"), (tensor(4, 8),))
        counts.append(
            {
                f: n
                for f, n in asked.counts.items()
                if f in (torch.ops.aten.add.Tensor, torch.ops.aten.tanh.default)
            }
        )
    assert counts[0] == counts[1]
    assert all(counts[0].values())
