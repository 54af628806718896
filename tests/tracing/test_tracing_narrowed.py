"""Sizes that the model itself takes stay free: equal by chance, told as numbers, or used by opened code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from traps.registry import WIDTH, Net

import autopipe
from autopipe.tracing import capture


class Conditioned(Net):
    """Takes a text of one length beside rows of any: both are as long in the example."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(12, WIDTH))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        return self.run(x + (text + self.place).mean(1, keepdim=True))


class Squares(Conditioned):
    """The same with square images, whose sides are as long as the text."""

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        mixed = image @ image.transpose(1, 2)[:, : image.shape[1]]
        return self.run(mixed.mean((1, 2))[:, None, None] + (text + self.place))


class Padded(Net):
    """Rows of lengths of their own, of which the longest is the width of the batch."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        kept = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        return self.run(x * kept[..., None])


class Written(nn.Module):
    """Runs code that it writes for the sizes at hand, as einx does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, length = (int.__index__(n) for n in x.shape[:2])
        return self.b(eval(f"lambda t: t.reshape({n}, 2, {length // 2}, {WIDTH}).flatten(1, 2)")(self.a(x)))


def equal(model: nn.Module, pipe: object, *args: Tensor) -> None:
    torch.testing.assert_close(pipe(*args), model(*args))  # type: ignore[operator]


def lengths(*of: int) -> tuple[Tensor, Tensor]:
    return torch.randn(len(of), max(of), WIDTH), torch.tensor(of)


def test_sizes_that_are_equal_by_chance_vary_alone() -> None:
    model = Conditioned().eval()
    pipe = autopipe.split(model, 2, (torch.randn(2, 12, WIDTH), torch.randn(2, 12, WIDTH)), costs="estimated")
    for length in (12, 5, 30):
        equal(model, pipe, torch.randn(3, length, WIDTH), torch.randn(3, 12, WIDTH))


def test_sides_that_are_equal_to_another_input_by_chance_vary_together() -> None:
    model = Squares().eval()
    captured = capture(model, (torch.randn(2, 12, 12), torch.randn(2, 12, WIDTH)))
    for side in (12, 5, 30):
        equal(model, captured, torch.randn(3, side, side), torch.randn(3, 12, WIDTH))


def test_lengths_told_as_numbers_follow_the_size() -> None:
    model = Padded().eval()
    captured = capture(model, lengths(12, 7))
    for given in (lengths(12, 3), lengths(9, 9, 2), lengths(20, 4)):
        equal(model, captured, *given)


def test_a_leaf_that_fixes_sizes_when_opened_stays_whole() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Written()).eval()
    pipe = autopipe.split(model, 2, (torch.randn(2, 6, WIDTH),), costs="estimated")
    assert [op.target for op in pipe.graph.ops.compute if op.kind == "module"] == ["0", "1"]
    for rows, length in ((2, 6), (5, 4), (3, 10)):
        equal(model, pipe, torch.randn(rows, length, WIDTH))


class Chunked(Net):
    """Pads rows to a multiple of five, by a question as libraries ask it, and drops what it padded."""

    def __init__(self, at_end: bool) -> None:
        super().__init__()
        self.at_end = at_end

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        missing = -length % 5
        if missing > 0:
            x = nn.functional.pad(x, (0, 0, 0, missing))
        x = self.run(x.unflatten(1, (-1, 5))).flatten(1, 2)
        if self.at_end and x.shape[1] > length:
            x = x[:, :length]
        return x if self.at_end else x[:, :length]


class Clipped(Net):
    """Looks at no more than ten positions: a question whose other answer matters, though not at ten."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] >= 10:
            x = x[:, :10]
        return self.run(x)


class ClippedInTraining(Clipped):
    """The same in training alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else self.run(x)


class ClippedInEvaluation(Clipped):
    """The same in evaluation alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) if self.training else super().forward(x)


@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("length", [10, 12])
def test_padding_to_a_multiple_is_right_for_all_lengths(length: int, at_end: bool) -> None:
    model = Chunked(at_end).eval()
    pipe = autopipe.split(model, 3, (torch.randn(2, length, WIDTH),), costs="estimated")
    for other in (10, 12, 5, 7, 20, 23):
        equal(model, pipe, torch.randn(3, other, WIDTH))


@pytest.mark.parametrize("length", [3, 6])
@pytest.mark.parametrize("kind", [Clipped, ClippedInTraining, ClippedInEvaluation])
def test_a_question_that_matters_somewhere_is_kept(kind: type[Net], length: int) -> None:
    model = kind().train(kind is not ClippedInEvaluation)
    captured = capture(model, (torch.randn(2, length, WIDTH),))
    equal(model, captured, torch.randn(3, length + 1, WIDTH))
    if length == 3:  # no size near the example's asks it otherwise
        with pytest.raises(autopipe.InputError):
            captured.bind((torch.randn(3, 14, WIDTH),))
    for other in (10, 11, 14):
        equal(model, captured, torch.randn(3, other, WIDTH))


def test_such_a_leaf_is_opened_where_there_is_no_other_way_to_cut() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Written()).eval()
    pipe = autopipe.split(model, 3, (torch.randn(2, 6, WIDTH),), costs="estimated")
    equal(model, pipe, torch.randn(2, 6, WIDTH))
    with pytest.raises(autopipe.InputError, match="capture again at this size"):
        pipe.graph.bind((torch.randn(5, 4, WIDTH),))
    equal(model, pipe, torch.randn(5, 4, WIDTH))


def in_pieces(x: Tensor) -> Tensor:
    """Works on eight positions at a time, as memory-efficient attention does, and asks about gradients."""
    pieces = x.split(8, 1)
    scale = 1 if x.requires_grad else 1.0
    return torch.cat([piece - scale * piece.mean(1, keepdim=True) for piece in pieces], 1)


class InPieces(Net):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = in_pieces(torch.tanh(layer(x)))
        return x


def test_pieces_that_ask_about_gradients_are_right_for_all_lengths() -> None:
    model = InPieces().eval()
    pipe = autopipe.split(model, 4, (torch.randn(2, 20, WIDTH),), costs="estimated")
    for length in (5, 16, 23):
        equal(model, pipe, torch.randn(3, length, WIDTH))
        with torch.no_grad():
            equal(model, pipe, torch.randn(3, length, WIDTH))
