"""What has changed since a capture is known by where it was read and by its kind, whatever it is called."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe.errors import InputError
from autopipe.tracing import preserved
from autopipe.tracing.record.readers import Kind


def gain(factor: float) -> type:
    class Gain:
        """One of several classes of this name."""

        value = factor

    return Gain


class Gains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.first, self.second = gain(2.0), gain(3.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * self.first.value
        return self.layers[1](x) * self.second.value


@pytest.mark.parametrize("which", ["first", "second"])
def test_of_two_classes_of_one_name_either_is_noticed(monkeypatch, which):
    model, x = Gains(), torch.randn(8, 4)
    pipe = autopipe.split(model, 2, (x,), costs="estimated")
    wanted = pipe(x)
    monkeypatch.setattr(getattr(model, which), "value", 7.0)
    with pytest.raises(InputError, match=r"an attribute of class gain\.<locals>\.Gain changed after"):
        pipe(x)
    monkeypatch.undo()
    assert torch.equal(pipe(x), wanted)


def test_other_layers_are_told_from_other_state():
    model = Gains()
    capture = autopipe.capture(model, (torch.randn(8, 4),))
    assert capture.standing.changed() == []
    model.what = "an attribute"
    assert [(str(c), c.kind) for c in capture.standing.changed()] == [("the attributes of Gains", Kind.STATE)]
    del model.what
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    assert {c.kind for c in capture.standing.changed()} == {Kind.WEIGHTS}


class Numbered(nn.Module):
    """Has its number from an iterator, of which its forward takes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(9))
        self.number = next(self.numbers)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x)) + self.number


def test_a_model_that_is_preserved_is_as_it_was_captured():
    model, x = Numbered(), torch.randn(2, 4)
    found = autopipe.capture(model, (x,))
    with preserved(model):
        assert not found.standing.changed()
        found.bind((torch.randn(5, 4),))
    assert not found.standing.changed()
    assert next(model.numbers) == 1


class Gaps(nn.Module):
    """Makes its own constant in each call, in which an element is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.title = "one"

    def forward(self, x: Tensor) -> Tensor:
        gaps = torch.from_numpy(np.array([0.0, 1.0, np.nan, 3.0], dtype=np.float32))
        return self.layers[1](self.layers[0](x) + gaps.nan_to_num())


def test_a_constant_that_holds_not_a_number_is_the_same_when_it_is_made_again():
    model, x = Gaps(), torch.randn(8, 4)
    capture = autopipe.capture(model, (x,))
    model.title = "another"
    assert torch.equal(capture(x), model(x))
