"""The list of models of other libraries, and the inputs they take.

The models themselves are listed by this package's other modules, by kind; what is done with them is left to
``walk``.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

__all__ = [
    "CASES",
    "Case",
    "Inputs",
    "add",
    "by_class",
    "chosen",
    "fixed_image",
    "image",
    "rows",
    "sequence",
    "sound",
    "tokens",
]

Inputs = Callable[[int, int], tuple[Any, ...] | dict[str, Any]]
"""From a batch size and a length to a model's arguments, or those by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model that ``build`` makes of the module called ``module``, once that is imported."""

    name: str
    module: str
    build: Callable[[Any], nn.Module]
    inputs: Inputs

    def model(self) -> nn.Module:
        """The model; raises whatever the library raises, where it is there at all."""
        return self.build(importlib.import_module(self.module))


CASES: dict[str, Case] = {}


def chosen(prefixes: tuple[str, ...], every: int, done: Collection[str]) -> list[Case]:
    """Every Nth by name of those with one of the prefixes, without those that are done.

    So a walk that goes on tries what it was begun with, however much of it is done.
    """
    names = sorted(n for n in CASES if n.startswith(prefixes))
    return [CASES[n] for n in names[::every] if n not in done]


def add(name: str, module: str, build: Callable[[Any], nn.Module], inputs: Inputs, package: str = "") -> None:
    """List a model as ``package/name``, by default the module's package."""
    case = Case(f"{package or module.partition('.')[0]}/{name}", module, build, inputs)
    if case.name in CASES:
        raise ValueError(f"{case.name} is listed twice")
    CASES[case.name] = case


def by_class(module: str, inputs: Inputs, **classes: dict[str, Any]) -> None:
    """List classes of a module by their names, each with its options."""
    for name, options in classes.items():
        add(name, module, lambda m, n=name, o=options: getattr(m, n)(**o), inputs)


def image(channels: int = 3, side: int = 64) -> Inputs:
    """Images that grow with the length."""
    return lambda b, n: (torch.randn(b, channels, side * n // 32, side * n // 32),)


def fixed_image(channels: int = 3, side: int = 64) -> Inputs:
    """Images of one size."""
    return lambda b, n: (torch.randn(b, channels, side, side),)


def tokens(vocabulary: int = 64) -> Inputs:
    """Token ids ``[batch, length]``."""
    return lambda b, n: (torch.randint(1, vocabulary, (b, n)),)


def sequence(width: int = 32) -> Inputs:
    """Features ``[batch, length, width]``."""
    return lambda b, n: (torch.randn(b, n, width),)


def rows(width: int) -> Inputs:
    """Features ``[batch, width]``."""
    return lambda b, n: (torch.randn(b, width),)


def sound(factor: int = 320) -> Inputs:
    """Waves ``[batch, 1, factor * length]``."""
    return lambda b, n: (torch.randn(b, 1, factor * n),)
