"""Branches on sizes: at any other size the capture gives what the model gives, or says why it cannot."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError
from autopipe.tracing import capture

D = 4


class PadsToEight(nn.Module):
    """Rounds its length up, with code that runs only where it must."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(D, D) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        missing = -x.shape[1] % 8
        if missing > 0:
            x = F.pad(x, (0, 0, 0, missing)) + 1
        return self.layers(x).unflatten(1, (-1, 8)).sum(2)


class TakesTheShorter(nn.Module):
    """Two strided paths whose lengths differ at some input lengths only."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv1d(D, D, 5, 3), nn.Conv1d(D, D, 3, 2, 1))
        self.right = nn.Conv1d(D, D, 6, 6)
        self.layers = nn.Sequential(*(nn.Linear(D, D) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(x.mT), self.right(x.mT)
        if a.shape[-1] > b.shape[-1]:
            a = a[..., 1 : b.shape[-1] + 1]
        elif a.shape[-1] < b.shape[-1]:
            b = b[..., : a.shape[-1]]
        return self.layers((a + b).mT)


@pytest.mark.parametrize(("cls", "length"), [(PadsToEight, 32), (TakesTheShorter, 64)])
def test_no_length_gives_a_wrong_value(cls: type[nn.Module], length: int) -> None:
    torch.manual_seed(0)
    model = cls().eval()
    x = torch.randn(2, length, D)
    pipe = autopipe.split(model, 2, (x,), costs="estimated", balance="parameters")
    captured = capture(model, (x,))
    said = []
    for other in range(16, 80, 5):
        given = torch.randn(3, other, D)
        for run in (captured, pipe):
            try:
                assert torch.equal(run(given), model(given)), other
            except InputError as error:
                said.append(str(error))
    assert len(said) < 24
    assert cls is not PadsToEight or not said
    assert all("capture again at this size" in text for text in said)


class PutsImageIntoText(nn.Module):
    """Needs as many marks in its text as the image has pieces, as vision-language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.vision = nn.Embedding(10, D), nn.Linear(D, D)
        self.layers = nn.Sequential(*(nn.Linear(D, D) for _ in range(3)))

    def forward(self, ids: Tensor, pieces: Tensor) -> Tensor:
        marked = (ids == 9).unsqueeze(-1)
        if marked.sum() * D != pieces.numel():
            raise ValueError("marks and pieces do not match")
        return self.layers(self.embed(ids).masked_scatter(marked, self.vision(pieces)))


def test_a_text_around_an_image_may_be_of_any_length() -> None:
    model = PutsImageIntoText().eval()
    pieces = torch.randn(2, 24, D)

    def text(length: int) -> Tensor:
        return torch.cat([torch.full((2, 24), 9), torch.randint(0, 9, (2, length - 24))], 1)

    captured = capture(model, (text(40), pieces))
    for length in (39, 33, 57):
        ids = text(length)
        assert torch.equal(captured(ids, pieces), model(ids, pieces))


class CutsUp(nn.Module):
    """Takes its input apart by a size, then weighs each piece by its place."""

    def __init__(self, pieces: Callable[[Tensor], Iterable[Any]]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(D, D) for _ in range(2)))
        self.pieces = pieces

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        for place, piece in enumerate(self.pieces(x), 1):
            x = x + place * (piece.sum(1, keepdim=True) if isinstance(piece, Tensor) else piece)
        return x


PIECES: dict[str, Callable[[Tensor], Iterable[Any]]] = {
    "range": lambda x: (x[:, i : i + 8] for i in range(0, x.shape[1], 8)),
    "range backwards": lambda x: (x[:, i : i + 1] for i in range(x.shape[1] - 1, 0, -8)),
    "split": lambda x: x.split(8, 1),
    "split by a size": lambda x: torch.split(x, x.shape[1] // 2, dim=1),
    "chunk": lambda x: x.chunk(4, dim=1),
    "unbind": lambda x: (row.unsqueeze(1) for row in x.unbind(1)),
    "low bit": lambda x: [x.shape[1] & 1],
    "mask": lambda x: [x.shape[1] & 6],
    "or": lambda x: [x.shape[1] | 8],
    "xor": lambda x: [3 ^ x.shape[1]],
    "shifts": lambda x: [x.shape[1] << 1, x.shape[1] >> 2, 1 << x.shape[1] // 8],
    "not": lambda x: [~x.shape[1]],
    "bits": lambda x: [x.shape[1].bit_length()],
    "power of two": lambda x: [2] if x.shape[1] & (x.shape[1] - 1) else [3],
    "root": lambda x: [int(x.shape[1] ** 0.5)],
}


@pytest.mark.parametrize("name", PIECES)
@pytest.mark.parametrize("length", [8, 9])
def test_a_size_that_python_takes_apart_is_right_or_refused(name: str, length: int) -> None:
    torch.manual_seed(0)
    model = CutsUp(PIECES[name]).eval()
    captured = capture(model, (torch.randn(2, length, D),))
    n_right = 0
    for other in (length, 2, 4, 5, 7, 12, 16, 17, 33):
        given = torch.randn(2, other, D)
        with contextlib.suppress(InputError):
            assert torch.allclose(captured(given), model(given), rtol=1e-4, atol=1e-4), other
            n_right += 1
    assert n_right


class Asks(nn.Module):
    """Goes another way at sizes far from the example's."""

    def __init__(self, question: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(D, D) for _ in range(2)))
        self.question = question

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x * 2 if self.question(x) else x


QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "a number of numpy's": lambda x: x.shape[1] > np.float64(9.5),
    "two of them": lambda x: (x.shape[1] > np.float64(9)) | (x.shape[0] > 9),
    "a tensor": lambda x: x.shape[1] > torch.tensor(9),
    "a tensor of the size": lambda x: (torch.tensor(x.shape[1]) > 9).item(),
    "the last place": lambda x: torch.arange(x.shape[1]).max() > 8,
    "places beyond": lambda x: bool((torch.arange(x.shape[1]) > 8).any()),
    "how many": lambda x: int(torch.ones(x.shape[1]).clamp(max=1).sum()) > 9,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_answer_that_other_lengths_alone_change_is_not_taken_for_granted(name: str) -> None:
    torch.manual_seed(0)
    model = Asks(QUESTIONS[name]).eval()
    captured = capture(model, (torch.randn(2, 8, D),))
    for other in (8, 7, 10, 12, 40):
        given = torch.randn(2, other, D)
        with contextlib.suppress(InputError):
            assert torch.allclose(captured(given), model(given), rtol=1e-4, atol=1e-4), other
    given = torch.randn(3, 7, D)
    torch.testing.assert_close(captured(given), model(given))


class Odd(nn.Module):
    """Goes another way at odd lengths, to results of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2 if x.size(1) % 2 else x
        for layer in self.layers:
            x = layer(x)
        return x


def test_without_data_no_question_is_taken_to_be_harmless() -> None:
    x = torch.zeros(2, 6, 4, device="meta")
    found = capture(Odd().to("meta"), (x,))
    assert found.bind((x[:, :4],))
    with pytest.raises(InputError, match="capture again at this size"):
        found.bind((x[:, :5],))


WINDOWS: dict[str, Callable[[Tensor], Any]] = {
    "in one comparison": lambda x: 2 < x.shape[1] <= 6,
    "in two, the outer one false": lambda x: x.shape[1] <= 6 and x.shape[1] > 2,
    "in two, the inner one false": lambda x: x.shape[1] > 2 and x.shape[1] <= 6,
    "of what is left over": lambda x: not (x.shape[1] / 4).is_integer(),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("length", [8, 12, 32])
def test_answers_that_do_no_harm_together_may_do_some_apart(name: str, length: int) -> None:
    torch.manual_seed(0)
    model = Asks(WINDOWS[name]).eval()
    captured = capture(model, (torch.randn(2, length, D),))
    for other in (1, 2, 3, 4, 5, 6, 7, 40):
        given = torch.randn(2, other, D)
        with contextlib.suppress(InputError):
            assert torch.allclose(captured(given), model(given), rtol=1e-4, atol=1e-4), other
    given = torch.randn(3, 16, D)
    torch.testing.assert_close(captured(given), model(given))
