"""What objects keep of weights, such as averages: each rank's own again, whichever ranks saved it.

Files, and objects that know nothing of weights, are left to ``training``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from .stored import Stored

__all__ = ["NOTHING", "Holding", "by_position", "fitting"]

WRAPPED = "module."
"""What ``AveragedModel`` and its like put before the names of what they wrap."""


@dataclasses.dataclass(frozen=True)
class Holding:
    """What a rank holds of a model.

    ``shapes`` are those of all the model's weights, by every name of each. ``weights`` are this rank's, by
    every name; ``parameters`` and ``trained``, those with gradients, are in the order of ``rt.parameters()``.
    """

    shapes: Mapping[str, Sequence[int]]
    weights: frozenset[str] = frozenset()
    parameters: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()

    def told(self) -> dict[str, list[str]]:
        """As it is saved."""
        return {
            "weights": sorted(self.weights),
            "parameters": [*self.parameters],
            "trained": [*self.trained],
        }

    def of(self, state: Mapping[str, Any]) -> Holding | None:
        """What the rank held that saved ``state``; None where it does not say."""
        told = state.get("holding", {})
        if not {"weights", "parameters", "trained"} <= set(told):
            return None
        return Holding(
            self.shapes, frozenset(told["weights"]), tuple(told["parameters"]), tuple(told["trained"])
        )


NOTHING = Holding({})


def fitting(
    trees: Sequence[Any], savers: Sequence[Holding | None], here: Holding, now: Callable[[], Any]
) -> Any:
    """An object's state for this rank, of what ranks saved of it, the best for all else first.

    What it keeps by weights' names comes from whichever rank had it: for the weights that are here, and for
    those that the object has ``now()``. Ranks that kept others' weights too kept a whole model: that stays.
    """
    kept = [set(_names(tree, here.shapes)) for tree in trees]
    if not any(kept) or any(s is None or k - s.weights for k, s in zip(kept, savers, strict=True)):
        return trees[0]
    return _joined(trees, here.shapes, here.weights | set(_names(now(), here.shapes)))


def by_position(tree: Any, saver: Holding | None, here: Holding) -> bool:
    """Whether a state keeps a tensor for each parameter, in their order, and this rank has others."""
    if saver is None:
        return False
    orders = [(saver.parameters, here.parameters), (saver.trained, here.trained)]
    for sizes in _lists(tree):
        fits = [names == own for names, own in orders if names and sizes == _shapes(names, here)]
        if fits and not any(fits):
            return True
    return False


def _shapes(names: Sequence[str], here: Holding) -> list[tuple[int, ...]]:
    return [tuple(here.shapes.get(name, ())) for name in names]


def _joined(trees: Sequence[Any], shapes: Mapping[str, Sequence[int]], wanted: Collection[str]) -> Any:
    first, mappings = trees[0], [tree for tree in trees if isinstance(tree, dict)]
    if not isinstance(first, dict):
        return first
    kept: dict[str, Any] = {}
    for tree in mappings:
        kept = {key: value for key, value in tree.items() if _weight(key, value, shapes)} | kept
    made = copy.copy(first)
    made.clear()
    for key, value in first.items():
        if key not in kept:
            inner = [tree[key] for tree in mappings if key in tree]
            made[key] = _joined(inner, shapes, wanted) if isinstance(value, dict) else value
    made.update({key: value for key, value in kept.items() if _weight(key, value, shapes) in wanted})
    return made


def _names(tree: Any, shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """The weights that a state keeps something of by name."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        name = _weight(key, value, shapes)
        if name:
            yield name
        else:
            yield from _names(value, shapes)


def _weight(key: Any, value: Any, shapes: Mapping[str, Sequence[int]]) -> str:
    """The weight that ``value`` is of, by its name and shape; empty where it is of none."""
    size = _size(value)
    names = (key, key.removeprefix(WRAPPED)) if isinstance(key, str) and size is not None else ()
    return next((name for name in names if name in shapes and tuple(shapes[name]) == size), "")


def _size(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Stored):
        return value.spec.shape
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _lists(tree: Any) -> Iterator[list[tuple[int, ...]]]:
    """The shapes in each list of nothing but tensors."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _lists(value)
    elif isinstance(tree, (list, tuple)):
        sizes = [_size(value) for value in tree]
        if sizes and all(size is not None for size in sizes):
            yield [size for size in sizes if size is not None]
        for value in tree:
            yield from _lists(value)
