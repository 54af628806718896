"""Hand-written models in the styles that people bring, each with its inputs, under a name.

Importing this module registers all of them. What is checked on them is left to ``test_zoo`` and to
``benchmarks.capture``.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

__all__ = ["CASES", "Case", "register"]

Inputs = Callable[[int, int], tuple[tuple[Any, ...], dict[str, Any]]]
Build = TypeVar("Build", bound=Callable[[], nn.Module])


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """A model and how to call it.

    Attributes
    ----------
    build: makes the model; seeded by the caller.
    inputs: (batch, length) to (args, kwargs); equal arguments give equal tensors. ``length`` is a sequence
        length, or sizes an image or a signal, or is ignored.
    has_lengths: the model runs at several lengths.
    has_batches: the model runs at several batch sizes.
    n_stages: how many stages it can be cut into at least, up to 4.
    refused: what the error says of a model whose own forward (not a submodule's) branches on data, which no
        graph can hold; "" for all others.
    """

    build: Callable[[], nn.Module]
    inputs: Inputs
    has_lengths: bool = True
    has_batches: bool = True
    n_stages: int = 4
    refused: str = ""


CASES: dict[str, Case] = {}


def register(inputs: Inputs, **flags: Any) -> Callable[[Build], Build]:
    """Decorates a model class (or a function that builds a model): adds it to :data:`CASES` by its name."""

    def add(build: Build) -> Build:
        CASES[build.__name__] = Case(build, inputs, **flags)
        return build

    return add


for _room in ("vision", "text", "multimodal", "speech", "graphs", "structure", "glue"):
    importlib.import_module(f".models_{_room}", __package__)
