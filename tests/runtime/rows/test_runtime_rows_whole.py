"""Layers that stay whole and change after the capture: how rows depend on one another is asked anew."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from splitting import split_by_layers
from torch import Tensor, nn
from torch.nn.utils import parametrize

from autopipe.errors import InputError
from autopipe.tracing import captured


class Leaf(nn.Module):
    """A layer of a user's, which stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_centred, self.n_calls = nn.Linear(4, 4), False, 0
        self.config, self.table = types.SimpleNamespace(is_centred=False), {"is_centred": False}
        self.function = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        h = self.linear(x)
        if self.is_centred or self.config.is_centred or self.table["is_centred"]:
            h = h - h.mean(0)
        return self.function(h)


class Net(nn.Module):
    def __init__(self, layer: nn.Module, loss: nn.Module | None = None) -> None:
        super().__init__()
        self.a, self.layer, self.b = nn.Linear(4, 4), layer, nn.Linear(4, 4)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        h = self.layer(self.a(x))
        h = self.b(h[0] if isinstance(h, tuple) else h)
        return h if self.loss is None else self.loss(h, labels)


class Unit(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / weight.norm()


def centred(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output - output.mean(0)


def softer(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 0.5


def stepping(layer: nn.Module) -> tuple[Net, Callable[[], Any], Callable[[], Any]]:
    """A model, a step of its pipeline in three microbatches, and one of its loss on the whole batch."""
    torch.manual_seed(0)
    model = Net(layer).double()
    x = torch.randn(6, 5, 4).double()
    pipe = split_by_layers(model, 2, (x,), closed=["layer"], n_microbatches=3)
    runtime = pipe.runtime(loss_fn=lambda output, target: output.square().mean())
    return model, lambda: runtime.step(x).loss, lambda: model(x).square().mean()


def setting(**values: Any) -> Callable[[Any], None]:
    def change(layer: Any) -> None:
        for name, value in values.items():
            setattr(layer, name, value)

    return change


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "layout of a recurrent layer": (lambda: nn.LSTM(4, 4, batch_first=True), setting(batch_first=False)),
    "axis of a layer of torch": (lambda: nn.Softmax(-1), setting(dim=0)),
    "layout of a layer in a layer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
        lambda layer: setattr(layer.self_attn, "batch_first", False),
    ),
    "attribute": (Leaf, setting(is_centred=True)),
    "attribute of settings": (Leaf, lambda layer: setattr(layer.config, "is_centred", True)),
    "entry of a dict": (Leaf, lambda layer: layer.table.update(is_centred=True)),
    "function": (Leaf, setting(function=lambda h: h.softmax(0))),
    "forward": (Leaf, setting(forward=lambda x: x.softmax(0))),
    "class": (Leaf, setting(__class__=type("Other", (Leaf,), {"forward": lambda self, x: x.softmax(0)}))),
    "hook": (Leaf, lambda layer: layer.register_forward_hook(centred)),
    "hook of a layer inside": (Leaf, lambda layer: layer.linear.register_forward_hook(centred)),
    "layer inside": (Leaf, lambda layer: setattr(layer, "linear", nn.Softmax(0))),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_rows_that_a_changed_layer_mixes_are_refused(kind: str) -> None:
    make, change = CHANGES[kind]
    model, step, whole = stepping(make())
    torch.testing.assert_close(step(), whole(), rtol=1e-9, atol=0)
    change(model.layer)
    with pytest.raises(InputError, match="rows of a batch of Net depend on one another"):
        step()


HARMLESS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "attribute of a layer of torch": (lambda: nn.LayerNorm(4), setting(eps=1.0)),
    "attribute": (Leaf, setting(function=torch.relu)),
    "hook": (Leaf, lambda layer: layer.register_forward_hook(softer)),
    "weights that are made": (
        Leaf,
        lambda layer: parametrize.register_parametrization(layer.linear, "weight", Unit()),
    ),
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_layers_that_change_without_mixing_rows_go_on(kind: str) -> None:
    make, change = HARMLESS[kind]
    model, step, whole = stepping(make())
    before = step()
    change(model.layer)
    assert step() != before
    torch.testing.assert_close(step(), whole(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("is_backward", [False, True], ids=["batch norm trains again", "backward hook"])
def test_what_mixes_rows_in_training_alone_is_told(
    is_backward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, step, _ = stepping(Leaf() if is_backward else nn.BatchNorm1d(5).eval())
    step()
    assert "depend on one another" not in caplog.text
    if is_backward:
        model.layer.register_full_backward_hook(lambda module, given, taken: (given[0] / given[0].norm(),))
    else:
        model.layer.train()
    step()
    assert "rows of a batch of Net depend on one another" in caplog.text


@pytest.mark.parametrize("steps_between", [0, 1], ids=["at once", "behind a step on the whole batch"])
@pytest.mark.parametrize("kind", [nn.CrossEntropyLoss, nn.MSELoss])
def test_a_loss_of_the_model_that_weighs_otherwise_is_refused(
    kind: type[nn.Module], steps_between: int
) -> None:
    torch.manual_seed(0)
    loss = kind()
    x = torch.randn(6, 4)
    labels = torch.randint(4, (6,)) if isinstance(loss, nn.CrossEntropyLoss) else torch.randn(6, 4)
    model = Net(nn.Tanh(), loss)
    runtime = split_by_layers(model, 2, (x, labels), n_microbatches=3).runtime()
    runtime.step(x, labels)
    loss.reduction = "sum"  # type: ignore[assignment]
    for _ in range(steps_between):
        runtime.step(x, labels, n_microbatches=1)
    with pytest.raises(InputError, match=r"loss\.reduction changed after the capture"):
        runtime.step(x, labels)


def test_what_calls_change_themselves_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    ask = captured.Capture.asked_anew
    monkeypatch.setattr(captured.Capture, "asked_anew", lambda self: asked.append(1) or ask(self))
    model, step, whole = stepping(Leaf())
    losses = [step() for _ in range(8)]
    assert not asked
    for loss in losses:
        torch.testing.assert_close(loss, whole(), rtol=1e-9, atol=0)
    model.layer.is_centred = True
    with pytest.raises(InputError, match="depend on one another"):
        step()


@pytest.mark.parametrize("n_before", [0, 1, 8])
def test_stages_that_are_wrapped_are_not_run_to_ask(
    n_before: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What wraps them sets attributes of layers and talks to other ranks; what calls count is theirs."""

    def wrapper(stage: nn.Module) -> None:
        for layer in stage.modules():
            layer.is_sharded = True  # type: ignore[assignment]

    monkeypatch.setattr(captured.Capture, "asked_anew", lambda self: pytest.fail("the model was run"))
    torch.manual_seed(0)
    model, x = Net(Leaf()).double(), torch.randn(6, 5, 4).double()
    pipe = split_by_layers(model, 2, (x,), closed=["layer"], n_microbatches=3)
    runtime = pipe.runtime(loss_fn=lambda output, target: output.square().mean())
    runtime.wrap(wrapper)
    for _ in range(n_before):
        runtime.step(x)
    assert "changed after the capture" not in caplog.text
    model.layer.is_centred = True  # type: ignore[assignment]
    runtime.step(x)
    assert "Net: layer.is_centred changed after the capture; whether rows" in caplog.text
