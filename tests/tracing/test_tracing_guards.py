"""Branches on sizes: at any other size the capture gives what the model gives, or says why it cannot."""

from __future__ import annotations

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
    assert 0 < len(said) < 24
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
