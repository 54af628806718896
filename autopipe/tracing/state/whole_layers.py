"""What layers that stay whole go by beside their weights, and what of it is not as it was.

A graph calls them as they are, so that it need not be recorded again; what was found of rows may be
otherwise: a batch norm trains again, a loss sums where it took the mean, a hook centres features. Asking
about rows anew is left to whoever cuts a batch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..members import OF_COMPILED, modules_in
from .global_names import is_foreign, names_in_class
from .reach import HOOKS, Reached, reached
from .readers import Reader, are_same, is_same, read_beside

__all__ = ["MODE_OF", "WholeLayers"]

MODE_OF = "the mode of "
"""What the name of a change of mode begins with."""

_INSIDE = (*HOOKS, "_modules", "_buffers")
_ENVIRONMENT = frozenset({"environ", "getenv"})
_MOST_ASKED = 3
"""How often something may change without consequence, as calls do it; then it is looked at no more."""


class WholeLayers:
    """The layers of a model that are not open, with all that lies in them: looked at cheaply at each step.

    Their classes, attributes, hooks, modes, the layers and buffers in them, and what their code reaches
    beside that, as ``found`` before; not what tensors hold. What they are when this is made they are to be,
    in the mode that the model is not in as ``model.train()`` or ``model.eval()`` leaves them.
    """

    def __init__(self, model: nn.Module, is_open: Callable[[str], bool], found: Reached) -> None:
        self._model = model
        held = ((path, m) for path, m in modules_in(model) if not is_open(path))
        self._layers = [(path, m) for path, m in held if not isinstance(m, torch.jit.ScriptModule)]
        self._held = [vars(m) for _, m in self._layers]
        # what open code reaches, code of these layers may reach as well
        self._beside = [Reader(name, read) for _, name, read in read_beside(found, ())]
        classes = {cls for _, m in self._layers for cls in type(m).__mro__ if not is_foreign(cls.__module__)}
        if not all(map(_ENVIRONMENT.isdisjoint, map(names_in_class, classes))):
            self._beside.append(Reader("the environment", _environment))
        training = model.training
        others = dict.fromkeys((path for path, _ in self._layers), not training)
        self._modes = {training: self._modes_now(), not training: others}
        self._asked: Counter[str] = Counter()
        self._take()

    def __reduce__(self) -> tuple[Any, ...]:
        """Those of a copy are to be as they are then."""
        return _copied, (self._model, frozenset(path for path, _ in self._layers))

    def changed(self) -> dict[str, str]:
        """By name what is not as it was, with the path of its layer, if it is of one; empty as a rule."""
        differing: dict[str, str] = {}
        if not (is_as_held := self._are_as_held()):
            for (path, m), (cls, before) in zip(self._layers, self._before(), strict=True):
                then, now = dict(_named(cls, before)), dict(_named(type(m), vars(m)))
                differing.update(dict.fromkeys(_differing(path, then, now), path))
        modes, known = self._modes_now(), self._modes[self._model.training]
        if modes != known:
            differing.update((f"{MODE_OF}{path}", path) for path in known if known[path] != modes[path])
        found = self._read_beside()
        if not _are_plainly_equal(found, self._read):
            for reader, read, held in zip(self._beside, found, self._read, strict=True):
                if not are_same(read, held):
                    differing[str(reader.change(read, held))] = ""
        if not is_as_held and not differing:  # tensors were put in the place of others
            self._take()
        return {name: path for name, path in differing.items() if self._asked[name] < _MOST_ASKED}

    def again(self) -> WholeLayers:
        """The same layers with what they are to be, for who asks and accepts on its own account."""
        made = object.__new__(WholeLayers)
        vars(made).update(vars(self), _modes=dict(self._modes), _asked=Counter())
        return made

    def accept(self, names: Iterable[str]) -> None:
        """What differs by these names makes no difference: from now on all is to be as it is."""
        self._asked.update([*names])
        self._modes[self._model.training] = self._modes_now()
        self._take()

    def _take(self) -> None:
        inside = [held[name] for held in self._held for name in _INSIDE]
        self._empty, self._filled = [d for d in inside if not d], [d for d in inside if d]
        self._copies = [*map(dict, self._held), *map(dict, self._filled)]
        self._kinds = self._kinds_now()
        self._read = self._read_beside()

    def _are_as_held(self) -> bool:
        """Whether all layers hold what they held, told in one go; False where only a closer look tells."""
        is_as_full = not any(self._empty) and self._kinds_now() == self._kinds
        return is_as_full and _are_plainly_equal([*self._held, *map(dict, self._filled)], self._copies)

    def _kinds_now(self) -> list[type]:
        return [type(m) for _, m in self._layers]

    def _read_beside(self) -> list[tuple[Any, ...]]:
        return [reader.read() for reader in self._beside]

    def _modes_now(self) -> dict[str, bool]:
        return {path: m.training for path, m in self._layers}

    def _before(self) -> Iterator[tuple[type, dict[str, Any]]]:
        """The class that each layer is to have, and its attributes with what is to be inside them."""
        n_layers = len(self._held)
        inside = {id(d): copy for d, copy in zip(self._filled, self._copies[n_layers:], strict=True)}
        for cls, held in zip(self._kinds, self._copies[:n_layers], strict=True):
            yield cls, {**held, **{name: inside.get(id(held[name]), {}) for name in _INSIDE}}


def _are_plainly_equal(now: Sequence[Any], then: Sequence[Any]) -> bool:
    """Whether all is the same or equal; False also of what has no plain equality, as tensors have not."""
    try:
        return now == then
    except Exception:
        return False


def _environment() -> tuple[str, ...]:
    return tuple([part for pair in os.environ.items() for part in pair])


def _named(cls: type, held: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a layer of a class holds, each under its name."""
    yield "its class", cls
    yield "its hooks", tuple([hook for kind in HOOKS for hook in held[kind].values()])
    for name, value in (*held["_modules"].items(), *held["_buffers"].items(), *held.items()):
        if name not in OF_COMPILED:
            yield name, value


def _differing(path: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """The names of what a layer held ``then`` and does not ``now``."""
    for name in dict.fromkeys((*then, *now)):
        if name in then and name in now and _is_as_it_was(name, now[name], then[name]):
            continue
        yield f"{name.removeprefix('its ')} of {path}" if name.startswith("its ") else f"{path}.{name}"


def _is_as_it_was(name: str, now: Any, then: Any) -> bool:
    return _are_tensors(then, now) or is_same(now, then) or (name == "its hooks" and are_same(now, then))


def _are_tensors(*values: Any) -> bool:
    """Whether all are tensors, or hold nothing else: what a call leaves there for others, or weights."""
    return all(
        isinstance(v, torch.Tensor) or (isinstance(v, (list, tuple)) and bool(v) and _are_tensors(*v))
        for v in values
    )


def _copied(model: nn.Module, paths: frozenset[str]) -> WholeLayers:
    def is_open(path: str) -> bool:
        return path not in paths

    return WholeLayers(model, is_open, reached(model, is_open))
