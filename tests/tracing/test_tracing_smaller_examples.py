"""Large images are recorded on few of their pixels, where that is all the same to the model."""

from __future__ import annotations

import queue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.errors import InputError
from autopipe.tracing import capture
from autopipe.tracing.runs.session import Session

RUNS: Any = queue.SimpleQueue()
"""What each run had to do with, where no state that a capture puts back is."""


def taken() -> list[Any]:
    return [RUNS.get() for _ in range(RUNS.qsize())]


class Convolved(nn.Module):
    """Layers that halve an image twice, and what the classes below do with it before and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4)
        self.second, self.head = nn.Conv2d(4, 4, 3, 2, 1), nn.Linear(4, 5)

    def forward(self, image: Tensor) -> Tensor:
        RUNS.put(image.shape[-1])
        x = self.second(self.norm(self.first(self.before(image))).relu())
        return self.head(self.behind(x).mean((2, 3)))

    def before(self, image: Tensor) -> Tensor:
        return image

    def behind(self, x: Tensor) -> Tensor:
        return x


class Sharpened(Convolved):
    """Does more with large images than with small ones."""

    def before(self, image: Tensor) -> Tensor:
        return image * 2 if image.shape[-1] > 100 else image


class Placed(Convolved):
    """Adds what it has learnt for images of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.randn(4, 32, 32))

    def behind(self, x: Tensor) -> Tensor:
        return x + self.place


class Windowed(Convolved):
    """Looks in training at windows for which small images have no room."""

    def behind(self, x: Tensor) -> Tensor:
        return x * x.unfold(2, 24, 8).mean() if self.training else x


def test_few_pixels_are_enough() -> None:
    model, image = Convolved(), torch.randn(2, 3, 128, 128)
    taken()
    found = capture(model, (image,))
    assert max(taken()) < 128
    assert found.example[0][0] is image
    assert found.ops.example_dims == {"batch": 2, "height": 128, "width": 128}
    model.eval()
    for shape in ((2, 3, 128, 128), (3, 3, 192, 50)):
        other = torch.randn(shape)
        torch.testing.assert_close(found(other), model(other))


@pytest.mark.parametrize("cls", [Sharpened, Placed, Windowed])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_is_another_on_few_pixels(cls: type[Convolved], training: bool) -> None:
    model, image = cls().train(training), torch.randn(2, 3, 128, 128)
    found = capture(model, (image,))
    assert found.form_of(found.inputs.bind(model, (image,), {})) == 0
    model.norm.momentum = 0.0
    torch.testing.assert_close(found(image), model(image))
    small = torch.randn(2, 3, 64, 64)
    if cls is Sharpened:
        torch.testing.assert_close(found(small), model(small))
    elif cls is Placed:
        with pytest.raises(InputError, match="fixed at 128"):
            found.bind((small,))


class Asking(nn.Module):
    """Asks in a function of its own for sides that are even, as it must be."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)])

    def check(self, image: Tensor) -> None:
        height, width = image.shape[-2:]
        if height % 32 or width % 32:
            raise RuntimeError("sides must be multiples of 32")

    def forward(self, image: Tensor) -> Tensor:
        self.check(image)
        for layer in self.layers:
            image = layer(image).relu()
        return image


def test_where_the_model_itself_fails_no_function_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    def again(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("recorded again")

    monkeypatch.setattr(Session, "again", again)
    model, image = Asking(), torch.randn(2, 3, 32, 32)
    found = capture(model, (image,))
    assert [str(c.outcome) for c in found.variation.checks] == ["False", "False"]
    with pytest.raises(InputError, match="captured where"):
        found.bind((torch.randn(2, 3, 40, 32),))


class Deciding(nn.Module):
    """Goes by its sizes: whether there are many rows, and how many there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * x.shape[0]
        return self.second(x.relu() if len(x) > 3 else x)


def test_fixed_sizes_are_numbers_and_others_refused() -> None:
    model, x = Deciding().eval(), torch.randn(3, 4)
    found = capture(model, (x,), dynamic=False)
    torch.testing.assert_close(found(x), model(x))
    assert not found.ops.dims
    assert not any(op.is_size for op in found.ops.ops)
    for shape in ((2, 4), (5, 4)):
        with pytest.raises(InputError, match=r"fixed at 3 and is . now \(dynamic=False\)"):
            found(torch.randn(shape))
