"""Models whose own forward does something that is easily recorded wrong, each under a name.

Importing this module registers all of them. What is checked of them is left to ``verdict``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["TRAPS", "WIDTH", "Net", "Trap", "images", "sequences", "tokens", "trap"]

WIDTH = 8
Outcome = Literal["right", "refused", "safe"]
Inputs = Callable[[int, int, int], tuple[Any, ...] | dict[str, Any]]
Context = Callable[[], contextlib.AbstractContextManager[Any]]
ROOMS = (
    "tensors", "derivatives", "hooks", "draws", "state", "numbers", "structures", "writes", "sizes", "values",
    "layers", "surroundings", "remembered", "outside", "layouts", "idioms", "kernels", "parts", "handed",
    "closures", "odd", "reads", "later", "patterns", "styles", "written", "imported",
    "modes", "casts", "given",
)  # fmt: skip


def sequences(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """One tensor [batch, length, 8] with ten times the spread in every other draw."""
    generator = torch.Generator().manual_seed(seed)
    return ((1 + 2 * (seed % 2)) * torch.randn(batch, length, WIDTH, generator=generator),)


def tokens(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Token ids [batch, length] below 8."""
    return (torch.randint(0, WIDTH, (batch, length), generator=torch.Generator().manual_seed(seed)),)


def images(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """Images [batch, 8, length, length]."""
    return (torch.randn(batch, WIDTH, length, length, generator=torch.Generator().manual_seed(seed)),)


class Net(nn.Module):
    """Four linear layers and an embedding; each trap is a subclass with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])

    def run(self, x: Tensor) -> Tensor:
        """The layers in turn."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@dataclasses.dataclass(frozen=True, slots=True)
class Trap:
    """A model, and what should come of it.

    Attributes
    ----------
    build: makes the model; seeded by the caller.
    outcome: ``right``: captured and equal on every call; ``refused``: an error of ours, at the capture or at
        a call; ``safe``: either.
    inputs: (batch, length, seed) to arguments, a tuple, or to keywords, a dict.
    later: what is done to the model after it was captured and called.
    around: the context that later calls run in; ``within`` the one that it is captured in.
    room: the module here that holds it.
    """

    build: Callable[[], nn.Module]
    outcome: Outcome
    inputs: Inputs
    later: Callable[[Any], Any] | None
    around: Context
    within: Context
    room: str


TRAPS: dict[str, Trap] = {}


def trap(
    outcome: Outcome = "right",
    *,
    inputs: Inputs = sequences,
    later: Callable[[Any], Any] | None = None,
    around: Context = contextlib.nullcontext,
    within: Context = contextlib.nullcontext,
    prepare: Callable[[Any], Any] | None = None,
    **held: Callable[[], Any],
) -> Callable[[Any], Any]:
    """Register a forward or a model class; ``held`` makes attributes, ``prepare`` does the rest."""

    def add(made: Any) -> Any:
        name = made.__name__
        cls = made if isinstance(made, type) else type(name, (Net,), {"forward": made})
        cls.__module__ = made.__module__

        def build() -> nn.Module:
            model = cls()
            for key, make in held.items():
                setattr(model, key, make())
            if prepare is not None:
                prepare(model)
            return model

        assert name not in TRAPS, name
        TRAPS[name] = Trap(build, outcome, inputs, later, around, within, made.__module__.rpartition(".")[2])
        return made

    return add


class Normed(nn.Module):
    """A norm with statistics and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(self.layer(x).transpose(1, 2)).transpose(1, 2))


def buffers(model: nn.Module, **named: Tensor) -> None:
    """Register buffers."""
    for name, value in named.items():
        model.register_buffer(name, value)


for _room in ROOMS:
    # code that asks for all that its file has would come to every trap by it; a room being imported has none
    vars(importlib.import_module(f".{_room}", __package__)).pop("trap", None)
