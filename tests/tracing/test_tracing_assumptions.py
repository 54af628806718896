"""What has changed since a capture is known by where it was read and by its kind, whatever it is called."""

from __future__ import annotations

import contextvars
import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe.errors import InputError
from autopipe.tracing import preserved
from autopipe.tracing.state.readers import Kind


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
    torch.testing.assert_close(pipe(x), model(x))
    assert not torch.equal(pipe(x), wanted)
    monkeypatch.undo()
    assert torch.equal(pipe(x), wanted)


def test_other_layers_are_told_from_other_state():
    model = Gains()
    capture = autopipe.capture(model, (torch.randn(8, 4),))
    assert capture.assumptions.changed() == []
    model.what = "an attribute"
    assert [(str(c), c.kind) for c in capture.assumptions.changed()] == [
        ("the attributes of Gains", Kind.STATE)
    ]
    del model.what
    model.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    assert {c.kind for c in capture.assumptions.changed()} == {Kind.WEIGHTS}


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
        assert not found.assumptions.changed()
        found.bind((torch.randn(5, 4),))
    assert not found.assumptions.changed()
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


class Weighed(nn.Module):
    """Leaves a penalty in an attribute, while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))
        self.penalty = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.penalty = self.weight.square().sum()
        return x @ self.weight


class Penalised(nn.Module):
    """Reads the penalties, whether it trains or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Weighed() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        for layer in self.layers:
            x = layer(x)
        return x, sum(layer.penalty for layer in self.layers)


def test_evaluation_that_reads_what_training_leaves_is_refused_after_training():
    model, x = Penalised(), torch.randn(8, 4)
    pipe = autopipe.split(model.eval(), 2, (x,), costs="estimated")
    assert pipe(x)[1] == 0.0
    model.train()
    assert pipe.verify(x)
    model.eval()
    assert pipe(x)[1] == 0.0
    model.train()
    for _ in range(2):
        assert torch.equal(pipe(x)[1], torch.tensor(8.0))
    model.eval()
    with pytest.raises(InputError, match=r"a call in training leaves in layers\.0\.penalty, layers\.1\.pen"):
        pipe(x)
    copied = copy.deepcopy(pipe)
    with pytest.raises(InputError, match="a call in training leaves"):
        copied(x)
    assert autopipe.split(model, 2, (x,), costs="estimated")(x)[1] == 0.0


def test_a_step_that_reads_what_training_leaves_is_refused_in_evaluation():
    model, x = Penalised(), torch.randn(8, 4)
    pipe = autopipe.split(model.train(), 2, (x,), costs="estimated")
    runtime = pipe.runtime(loss_fn=lambda out, _: out[0].mean())
    runtime.step(x, target=x)
    model.eval()
    with pytest.raises(InputError, match="a call in training leaves"):
        runtime.evaluate(x, target=x)
    model.train()
    runtime.step(x, target=x)


class Collecting(nn.Module):
    """Installs hooks at its first call, whatever its mode, and gives what they collect."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.is_hooked = False

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        given = COLLECTED.set([])
        if not self.is_hooked:
            for layer in self.layers:
                layer.register_forward_hook(lambda _, __, output: COLLECTED.get().append(output))
            self.is_hooked = True
        for layer in self.layers:
            x = layer(x).relu()
        collected = COLLECTED.get()
        COLLECTED.reset(given)
        return x, *collected


COLLECTED: contextvars.ContextVar[list[Tensor]] = contextvars.ContextVar("COLLECTED")


def test_what_calls_in_either_mode_set_is_not_left_by_one_for_the_other():
    x = torch.randn(8, 4)
    model = Collecting()
    pipe = autopipe.split(model, 2, (x,), costs="estimated")
    for training in (True, False, True):
        wanted = copy.deepcopy(model).train(training)(x)
        given = pipe.train(training)(x)
        assert len(given) == len(wanted) == 3
        assert all(map(torch.equal, given, wanted))


class Indexed(nn.Module):
    """Evaluation makes once what it goes by of what training leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.seen, self.index = 1.0, None

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.training:
            self.seen = self.layers[0].weight.sum()
        elif self.index is None:
            self.index = self.seen
        return self.layers[1](x if self.training else x * self.index)


def test_what_evaluation_makes_once_of_what_training_leaves_is_refused_after_training():
    model, x = Indexed(), torch.randn(8, 4)
    pipe = autopipe.split(model.train(), 2, (x,), costs="estimated")
    pipe(x)
    model.eval()
    with pytest.raises(InputError, match="a call in training leaves in seen"):
        pipe(x)
