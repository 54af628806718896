"""Attributes that each call sets before it reads them are of no account, whatever they held before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe.errors import AutopipeError
from autopipe.tracing import capture


class Normed(nn.Module):
    """Keeps what it norms by in attributes, as layers that norm a series and put it back do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.before, self.after, self.how = nn.Linear(4, 4), nn.Linear(4, 4), how
        self.seen: list[Tensor] = []
        self.mean: Tensor | None = None

    def norm(self, x: Tensor) -> Tensor:
        self.mean, self.seen = x.mean(1, keepdim=True).detach(), []
        return x - self.mean

    def forward(self, x: Tensor, is_long: Tensor) -> Tensor:
        old = self.mean
        if self.how == "reads" and old is not None and old.shape != x[:, :1].shape:
            x = x * 2
        if self.how == "sometimes" and is_long.any():
            return self.after(x if self.mean is None else x + self.mean)
        x = self.before(self.norm(x))
        self.seen.append(x)
        return self.after(x) + self.mean + self.seen[0]


class Silent(Normed):
    """The same, without asking for what an earlier call has left."""

    def forward(self, x: Tensor, is_long: Tensor) -> Tensor:
        x = self.before(self.norm(x))
        self.seen.append(x)
        return self.after(x) + self.mean + self.seen[0]


def test_attributes_set_first_are_not_looked_at() -> None:
    torch.manual_seed(0)
    model = Silent("")
    captured = capture(model, (torch.randn(2, 3, 4), torch.zeros(2)))
    assert captured.assumptions.filled == {("", "mean"), ("", "seen")}
    records = []
    object.__setattr__(captured, "again", lambda *told: records.append(told))
    for n in range(12):
        x = torch.randn(3, 4 + n, 4)
        torch.testing.assert_close(captured(x, torch.zeros(3)), model(x, torch.zeros(3)))
    assert not records


class Left(nn.Module):
    """Leaves its loss in an attribute that it does not read, in training alone or always."""

    def __init__(self, *, always: bool) -> None:
        super().__init__()
        self.layer, self.always = nn.Linear(4, 4), always
        self.last_loss: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.layer(x).tanh()
        if self.training or self.always:
            self.last_loss = (out - y).square().mean()
        return out


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("always", [False, True])
def test_attributes_that_no_code_reads_are_not_looked_at(always: bool, is_called: bool) -> None:
    torch.manual_seed(0)
    model, x, y = Left(always=always), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    if is_called:
        model(x, y)
    captured = capture(model, (x, y))
    assert captured.assumptions.filled == {("", "last_loss")}
    records = []
    object.__setattr__(captured, "again", lambda *told: records.append(told))
    for n in range(12):
        model.train(n % 2 == 0)
        torch.testing.assert_close(captured(x + n, y), model(x + n, y))
    assert not records


class Masked(Silent):
    """The same, and a branch on the input behind it."""

    def forward(self, x: Tensor, is_long: Tensor) -> Tensor:
        x = self.before(self.norm(x))
        if is_long.any():
            x = x * 2
        self.seen.append(x)
        return self.after(x) + self.mean + self.seen[0]


def test_attributes_set_first_are_not_looked_at_where_code_may_branch_either_way() -> None:
    torch.manual_seed(0)
    model = Masked("")
    captured = capture(model, (torch.randn(2, 3, 4), torch.zeros(2)))
    assert captured.assumptions.filled == {("", "mean"), ("", "seen")}
    for n in range(12):
        x, is_long = torch.randn(3, 4 + n, 4), torch.full((3,), float(n % 2))
        torch.testing.assert_close(captured(x, is_long), model(x, is_long))
    assert len(captured.kinds) == 1


def test_steps_go_on_between_calls_of_the_model() -> None:
    torch.manual_seed(0)
    model = Silent("")
    pipe = autopipe.split(model, 2, (torch.randn(2, 3, 4), torch.zeros(2)), costs="estimated")
    runtime = pipe.runtime(lambda y, _: y.square().mean(), n_microbatches=2)
    for _ in range(10):
        x, zeros = torch.randn(4, 5, 4), torch.zeros(4)
        expected = model(x, zeros).square().mean()
        torch.testing.assert_close(runtime.step(x, zeros).loss, expected.detach())


@pytest.mark.parametrize("how", ["reads", "sometimes"])
def test_attributes_that_some_call_reads_first_are_never_stale(how: str) -> None:
    torch.manual_seed(0)
    model = Normed(how)
    example = torch.randn(2, 3, 4), torch.zeros(2)
    try:
        captured = capture(model, example)
    except AutopipeError:
        return  # what a call leaves decides the next one
    assert ("", "mean") not in captured.assumptions.filled
    for is_long in (0.0, 1.0, 0.0, 1.0, 1.0):
        x = torch.randn(2, 3, 4)
        before = model.mean
        expected = model(x, torch.full((2,), is_long))
        model.mean = before
        try:
            got = captured(x, torch.full((2,), is_long))
        except AutopipeError:
            continue
        torch.testing.assert_close(got, expected)
