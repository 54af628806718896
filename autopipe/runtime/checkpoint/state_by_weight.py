"""State that objects keep for each weight, such as averages: goes where the weight goes, whoever saved it.

Files, and objects that know nothing of weights, are left to ``training_state``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...graph import ParameterSpec
from ..files.stored_tensor import Stored

__all__ = ["NOTHING", "Holding", "by_position", "fitting"]

WRAPPED = "module."
"""What ``AveragedModel`` and its like put before the names of what they wrap."""
Specs = Mapping[str, ParameterSpec]


@dataclasses.dataclass(frozen=True)
class Holding:
    """What a rank holds of a model.

    ``specs`` are of all the model's weights, under every name of each. ``weights`` are this rank's,
    ``parameters`` and ``trained``, those with gradients, in the order of ``rt.parameters()``: by first names.
    """

    specs: Specs
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
            self.specs, frozenset(told["weights"]), tuple(told["parameters"]), tuple(told["trained"])
        )


NOTHING = Holding({})


def fitting(
    trees: Sequence[Any], savers: Sequence[Holding | None], here: Holding, now: Callable[[], Any]
) -> Any:
    """An object's state for this rank, of what ranks saved of it, the best for all else first.

    What it keeps by weights' names comes from whichever rank had it: for those names that the object has
    ``now()``, or where it has none for the weights that are here. Where a rank kept others' weights too, it
    kept a whole model: that stays as it is.
    """
    kept = [set(_names(tree, here.specs)) for tree in trees]
    if not any(kept) or any(s is None or k - s.weights for k, s in zip(kept, savers, strict=True)):
        return trees[0]
    return _joined(trees, here, now())


def by_position(tree: Any, saver: Holding | None, here: Holding) -> bool:
    """Whether a state keeps a tensor for each parameter, in their order, and this rank has others."""
    if saver is None:
        return False
    orders = [(saver.parameters, here.parameters), (saver.trained, here.trained)]
    for sizes in _lists(tree):
        fits = [names == own for names, own in orders if names and sizes == _shapes(names, here.specs)]
        if fits and not any(fits):
            return True
    return False


def _shapes(names: Sequence[str], specs: Specs) -> list[tuple[int, ...] | None]:
    return [tuple(specs[name].shape) if name in specs else None for name in names]


def _joined(trees: Sequence[Any], here: Holding, now: Any) -> Any:
    first, specs = trees[0], here.specs
    if not isinstance(first, dict):
        return first
    mappings = [tree for tree in trees if isinstance(tree, dict)]
    held = now if isinstance(now, dict) else {}
    kept: dict[str, tuple[str, Any]] = {}
    for tree in mappings:
        found = {key: _weight(key, value, specs) for key, value in tree.items()}
        kept = {name: (key, tree[key]) for key, name in found.items() if name} | kept
    made = copy.copy(first)
    made.clear()
    for key, value in first.items():
        if not _weight(key, value, specs):
            inner = [tree[key] for tree in mappings if key in tree]
            made[key] = _joined(inner, here, held.get(key)) if isinstance(value, dict) else value
    names = {key: name for key, value in held.items() if (name := _weight(key, value, specs))}
    if not names:
        names = {key: name for name, (key, _) in kept.items() if name in here.weights}
    made.update({key: kept[name][1] for key, name in names.items() if name in kept})
    return made


def _names(tree: Any, specs: Specs) -> Iterator[str]:
    """The weights that a state keeps something of by name."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        name = _weight(key, value, specs)
        if name:
            yield name
        else:
            yield from _names(value, specs)


def _weight(key: Any, value: Any, specs: Specs) -> str:
    """The first name of the weight that ``value`` is of, by its name and shape; empty where it is of none."""
    size = _size(value)
    if isinstance(key, str) and size is not None:
        for name in (key, key.removeprefix(WRAPPED)):
            if name in specs and tuple(specs[name].shape) == size:
                return specs[name].name
    return ""


def _size(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, Stored):
        return value.spec.shape
    return tuple(value.shape) if isinstance(value, Tensor) else None


def _lists(tree: Any) -> Iterator[list[tuple[int, ...] | None]]:
    """The shapes in each list of nothing but tensors."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _lists(value)
    elif isinstance(tree, (list, tuple)):
        sizes = [_size(value) for value in tree]
        if sizes and None not in sizes:
            yield sizes
        for value in tree:
            yield from _lists(value)
