"""Functions made anew at every call and handed to layers: around other layers, masks, numbers each time."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .registry import WIDTH, trap


class Residual(nn.Module):
    """Adds to its input what a function makes of its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, inner: Callable[[Tensor], Tensor]) -> Tensor:
        return x + inner(self.norm(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a residual that is handed it as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.widen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = Residual(), Residual()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.first(x, lambda h: self.mix(h) * mask)
        return self.second(x, self.widen)


class Blocks(nn.Module):
    """Alike blocks, whose functions differ by the block alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def mask(self, x: Tensor) -> Tensor:
        """Which positions count."""
        return (x > 0).to(x.dtype).mean(-1, keepdim=True)


@trap()
class ResidualsAroundBlocks(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        for block in self.blocks:
            x = block(x, mask)
        return x


@trap()
class ResidualsAroundBlocksByForward(Blocks):
    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        for block in self.blocks:
            x = block.forward(x, mask)
        return x


class Chosen(Blocks):
    """Residuals around one of two layers, which is chosen in a loop."""

    def layers(self, is_first: Any) -> Iterator[tuple[Residual, nn.Module]]:
        """Each residual, and the layer that it is to go around."""
        for block in self.blocks:
            yield block.first, block.mix if is_first else block.widen


@trap()
class AroundWhatTheModeChooses(Chosen):
    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        for residual, layer in self.layers(self.training):
            x = residual(x, lambda h: layer(h) * mask)  # noqa: B023
        return x


@trap()
class AroundWhatDataChoose(Chosen):
    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        for residual, layer in self.layers(x.std() > 2):
            x = residual(x, lambda h: layer(h) * mask)  # noqa: B023
        return x


@trap()
class AroundALayerOfALoop(Chosen):
    def forward(self, x: Tensor) -> Tensor:
        for residual, layer in self.layers(x.std() > 2):
            x = residual(x, lambda h: layer(h))  # noqa: B023
        return x


class ByKind(nn.Module):
    """A layer that goes by the kinds of what it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.inner = Kinds()


class Kinds(nn.Module):
    """Weighs its input by the class of a dict's key, or by what a function gives beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any, x: Tensor) -> Tensor:
        if callable(given):
            x, key = given(x)
        else:
            key = next(iter(given))
            x = given[key] + given["missing"] if isinstance(given, collections.defaultdict) else given[key]
        return self.layer(x) * {int: 1, bool: 2, float: 3, str: 1}[type(key)]


@trap()
class KeysThatAreEqualAndOfOtherKinds(ByKind):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.other(self.inner({1: x}, x) + self.inner({True: x}, x) + self.inner({1.0: x}, x))


@trap()
class FunctionsAroundNumbersOfOtherKinds(ByKind):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        scale = x.mean(-1, keepdim=True)
        found = [self.inner(lambda h, k=k: (h * scale, k), x) for k in (1, True, 1.0)]
        return self.other(torch.stack(found).sum(0))


@trap("safe")
class DictsThatMakeOtherDefaults(ByKind):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        first = collections.defaultdict(lambda: 1.0, x=x)
        second = collections.defaultdict(lambda: 3.0, x=x)
        return self.other(self.inner(first, x) + self.inner(second, x))
