"""Sizes that C reads leave guards, and so do those that are sought among keys; others vary as before."""

from __future__ import annotations

import contextlib
import itertools
import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.errors import InputError
from autopipe.tracing import capture

STEPS = [1.0] * 40 + [3.0] * 40
KEPT: dict[Any, float] = {60: 3.0, "a": 1.0}


class Layers(nn.Module):
    """Four layers between which the forwards below do something."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.table: Any = dict(KEPT)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Listed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * STEPS[x.size(1)])


class Compared(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * 2 if 0.5 * x.size(1) > 20 else x)


class Keyed(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * self.table.get(x.size(1), 1.0))


class Looped(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in itertools.repeat(None, x.size(1)):
            x = x * 1.1
        return self.run(x)


class Unread(Layers):
    """Reads sizes where Python asks for nothing that matters."""

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape.numel()
        assert count > 0
        return self.run(x.view(x.shape[0], -1, 4) + torch.arange(x.size(1))[:, None])


class ComparedInTraining(Layers):
    """Goes by a number in training alone, where a larger one leads to what it does in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * 2 if self.training and 0.5 * x.size(1) < 20 else x)


class Closing(Layers):
    """Hands a function on that holds a number, which C reads when it is called."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(1)
        return self.run(torch.func.vmap(lambda row: row * STEPS[n])(x))


@pytest.mark.parametrize("dynamic", ["auto", False])
@pytest.mark.parametrize("cls", [ComparedInTraining, Closing])
def test_a_shift_is_not_left_in_what_is_captured(cls: type[Layers], dynamic: Any) -> None:
    model = cls()
    found = capture(model, (torch.randn(3, 6, 4),), dynamic=dynamic)
    for training in (True, False):
        model.train(training)
        x = torch.randn(3, 6, 4)
        torch.testing.assert_close(found(x), model(x))


@pytest.mark.parametrize("cls", [Listed, Compared, Keyed, Looped])
def test_a_size_at_which_it_matters_is_right_or_refused(cls: type[Layers]) -> None:
    model = cls().eval()
    found = capture(model, (torch.randn(3, 6, 4),))
    for n in (6, 60):
        x = torch.randn(3, n, 4)
        with contextlib.suppress(InputError) if n == 60 else contextlib.nullcontext():
            torch.testing.assert_close(found(x), model(x))


def test_keys_leave_other_sizes_free() -> None:
    found = capture(Keyed().eval(), (torch.randn(3, 6, 4),))
    assert [(d.name, d.example) for d in found.variation.dims] == [("batch", 3), ("seq", 6)]
    assert [str(c) for c in found.variation.checks] == ["not seq == 60"]


def test_a_table_kept_by_size_leaves_all_sizes_free() -> None:
    class Kept(Layers):
        def forward(self, x: Tensor) -> Tensor:
            n = x.size(1)
            if n not in self.table:
                self.table[n] = torch.arange(n)[:, None]
            return self.run(x + self.table[n])

    model = Kept().eval()
    model.table = {}
    model(torch.randn(2, 12, 4))
    found = capture(model, (torch.randn(3, 6, 4),))
    for n in (6, 12, 24):
        x = torch.randn(3, n, 4)
        torch.testing.assert_close(found(x), model.run(x + torch.arange(n)[:, None]))


def test_what_goes_by_no_number_is_free() -> None:
    model = Unread().eval()
    found = capture(model, (torch.randn(3, 6, 4),))
    assert {*found.variation.fixed} == {("x", 2)}
    x = torch.randn(2, 600, 4)
    torch.testing.assert_close(found(x), model(x))


RUNS: Any = queue.SimpleQueue()


class Counted(Layers):
    """Counts its runs where no capture puts the count back."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        RUNS.put(self.training)
        return self.run(x + y)


def runs_in(capturing: Callable[[], Any]) -> list[bool]:
    before = RUNS.qsize()
    capturing()
    modes = [RUNS.get() for _ in range(RUNS.qsize())]
    return sorted(modes[before:])


def test_a_model_is_recorded_once_and_compared_once_in_each_mode() -> None:
    model, x, y = Counted(), torch.randn(3, 6, 4), torch.randn(3, 6, 4)
    assert runs_in(lambda: capture(model, (x, y), dynamic=False)) == [False, False, True, True]


def test_what_is_recorded_stands_for_a_run_on_equal_arguments() -> None:
    model, x = Counted(), torch.randn(3, 6, 4)
    assert runs_in(lambda: capture(model, (x, x), dynamic=False)) == [False, False, False, True, True]


class ByWidth(Layers):
    """Python's float reads the width in C; the other sizes of the same line are not read."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return self.run(x * (2.0 * width) + 1.0 / x.shape[-1]) * batch + length


def test_a_size_that_c_reads_leaves_others_of_its_line_free() -> None:
    model = ByWidth()
    found = capture(model, (torch.randn(2, 6, 4),))
    for shape in ((2, 6, 4), (5, 6, 4), (2, 9, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(found(x), model(x))
