"""What code outside of a leaf sets of it: calls of its methods keep their place among its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from splitting import split_by_layers
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.errors import CaptureError
from autopipe.tracing import capture

WIDTH = 4


class Neuron(nn.Module):
    """Keeps a potential from call to call, in a dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.memory: dict[str, Any] = {"v": 0.0}
        self.state: Any = None

    def reset(self) -> None:
        for key in self.memory:
            self.memory[key] = copy.deepcopy(0.0)

    def hand(self, state: Any) -> None:
        self.state = state

    def norm(self) -> Tensor:
        return self.linear.weight.norm()

    def forward(self, x: Tensor) -> Tensor:
        self.memory["v"] = 0.5 * self.memory["v"] + torch.tanh(self.linear(x))
        return self.memory["v"] if self.state is None else self.memory["v"] * self.state


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.neurons = nn.ModuleList(Neuron() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for neuron in self.neurons:
            neuron.reset()
        out = x
        for _ in range(3):
            out = x
            for neuron in self.neurons:
                out = neuron(out)
        return out


class Handing(Spiking):
    """Hands a neuron what the one before has given, and asks another for what no call goes by."""

    def forward(self, x: Tensor) -> Tensor:
        for neuron in self.neurons:
            neuron.reset()
            neuron.hand(x.sigmoid())
            x = neuron(x) / self.neurons[0].norm()
        return x


class Setting(Spiking):
    """Sets attributes by hand."""

    def forward(self, x: Tensor) -> Tensor:
        for neuron in self.neurons:
            neuron.memory["v"] = 0.0
            x = neuron(x)
        return x


def draws(seed: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("kind", [Spiking, Handing])
def test_every_call_starts_as_the_model_does(kind: type[nn.Module], has_run: bool) -> None:
    torch.manual_seed(0)
    model = kind().double()
    if has_run:
        model(draws(9))
    pipe = split_by_layers(model, 2, (draws(0),), n_microbatches=1)
    assert not any("reset" in vars(n) or "hand" in vars(n) for n in model.neurons)
    for seed, rows in ((1, 2), (2, 2), (3, 3)):
        for run in (pipe, pipe.graph):
            torch.testing.assert_close(run(draws(seed, rows)), model(draws(seed, rows)))


def test_training_on_stages_is_that_of_the_model() -> None:
    torch.manual_seed(0)
    model = Spiking().double()
    pipe = split_by_layers(model, 2, (draws(0, 4),), n_microbatches=2)
    x = draws(1, 4)
    loss = sum(model(half).square().mean() / 2 for half in x.split(2))
    expected = torch.autograd.grad(loss, [*model.parameters()])
    rt = pipe.runtime(loss_fn=lambda out, target: (out - target).square().mean())
    model.zero_grad()
    rt.step(x, target=torch.zeros_like(x))
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_attributes_that_are_set_by_hand_are_refused() -> None:
    with pytest.raises(CaptureError, match="second call"):
        capture(Setting().double(), (draws(0),))


class Dropped(nn.Module):
    """A layer, a weight of which is a tensor that each call sets anew, as AWD-LSTMs drop weights."""

    def __init__(self, layer: nn.Module, name: str) -> None:
        super().__init__()
        self.layer, self.name = layer, name
        weight = layer._parameters.pop(name)
        assert weight is not None
        self.register_parameter(f"{name}_raw", nn.Parameter(weight.data))
        setattr(layer, name, weight.detach().clone())

    def forward(self, x: Tensor) -> Any:
        raw = getattr(self, f"{self.name}_raw")
        setattr(self.layer, self.name, F.dropout(raw, 0.5) if self.training else raw.clone())
        return self.layer(x)


class DroppedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = Dropped(nn.LSTM(4, 4, batch_first=True), "weight_hh_l0")
        self.linear, self.out = Dropped(nn.Linear(4, 4), "weight"), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.linear(self.recurrent(x)[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_each_call_sets_anew_train_what_they_are_made_of(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = DroppedWeights().to(dtype)  # which leaves the tensors set so far as they are
    x = torch.randn(2, 5, 4, dtype=dtype)
    pipe = split_by_layers(model, 2, (x,))
    for training in (False, True):
        pipe.train(training)
        pipe.verify(torch.randn(3, 5, 4, dtype=dtype))
    pipe.eval()
    runtime = pipe.runtime(lambda y, _: y.square().mean())
    runtime.step(torch.randn(4, 5, 4, dtype=dtype), n_microbatches=2)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in runtime.parameters())


class Leaky(nn.Module):
    """Keeps a potential, which takes gradients or not, from call to call until it is reset."""

    def __init__(self, takes_gradients: bool) -> None:
        super().__init__()
        self.linear, self.takes_gradients = nn.Linear(WIDTH, WIDTH), takes_gradients
        self.potential: Tensor | None = None

    def reset(self) -> None:
        self.potential = None

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if self.potential is not None:
            out = out + 0.5 * self.potential
        self.potential = out if self.takes_gradients else out.detach()
        return out


class Chain(nn.Module):
    """Holds layers that others call, and resets them; is not called itself."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def reset(self) -> None:
        for layer in self.layers:
            if isinstance(layer, Leaky):
                layer.reset()


class OfSteps(nn.Module):
    """Steps through the layers of a chain."""

    def __init__(self, takes_gradients: bool) -> None:
        super().__init__()
        leaky = (Leaky(takes_gradients) for _ in range(2))
        self.chain = Chain(nn.Linear(WIDTH, WIDTH), *leaky, nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.chain.reset()
        return self.head(torch.stack([self.chain.layers(step) for step in x.unbind(1)], 1))


@pytest.mark.parametrize("takes_gradients", [True, False])
def test_resets_by_what_holds_a_leaf_stay_with_it(takes_gradients):
    """On another stage they would reset that stage's own, and microbatches go on from one another."""
    torch.manual_seed(0)
    model, x = OfSteps(takes_gradients), torch.randn(4, 3, WIDTH)
    plain = copy.deepcopy(model)
    pipe = split_by_layers(model, 2, (x,), n_microbatches=2, closed=["chain"])
    groups = [{*group} for group in pipe.graph.ops.groups]
    steps = {op.name for op in pipe.graph.ops.ops if op.kind == "module"}
    resets = {op.name for op in pipe.graph.ops.ops if op.name.startswith("reset")}
    assert len(resets) == 2
    assert all(any(reset in group and group & steps for group in groups) for reset in resets)
    pipe.runtime(lambda out, _: out.square().mean()).step(x)
    plain(x).square().mean().backward()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None, name
        assert torch.allclose(p.grad, q.grad, atol=1e-6), name
