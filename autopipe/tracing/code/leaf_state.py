"""Whether a leaf carries state from one call to the next: a potential, a memory, a count.

What it writes to buffers is none of it, but that it has others in their place.

That its calls then belong together is left to ``opgraph``; methods by which code outside sets such things, to
``leaf_setters``.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import logging
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from ...torch_private import dict_version
from ..calls.functions import LOOKED_AT
from ..inputs.held_numbers import content_of
from ..members import OF_ALL
from ..state.global_names import codes_in
from ..state.loads import attributes_loaded, attributes_stored
from ..state.quick_check import Remembered, are_same
from .restart import WatchMethods

__all__ = [
    "Keeping",
    "LeafState",
    "attributes_left",
    "changed",
    "codes_of",
    "goes_by",
    "read_anew",
    "read_by",
    "state_of",
    "tell_left",
    "values_of_class",
]

LeafState = dict[tuple[int, str], tuple[Any, Any]]
"""(id of a module, name) → its value, and what that holds."""

_logger = logging.getLogger("autopipe")
_SIMPLE = (bool, int, float, str, type(None))
_HOLD_NOTHING = frozenset(_SIMPLE)
_UNCOUNTED = (list, dict, set, collections.deque, np.ndarray)
"""What holds others in no dict of an object's own, but for plain dicts themselves."""
_FILLED = (*_UNCOUNTED, torch.Tensor)
_HELD = (*_SIMPLE, *_FILLED)
_NONE: tuple[Any, Any] = None, ()


def state_of(inside: Sequence[nn.Module]) -> LeafState:
    """The plain attributes and buffers of some modules, and of their classes, that their own code reads."""
    out: LeafState = {}
    for module in inside:
        cls: Any = type(module)
        held, asked, number = vars(module), goes_by(cls), id(module)
        if module._buffers:
            out.update({(number, n): (b, ()) for n, b in module._buffers.items() if n in asked})
        on_module = {name: held[name] for name in asked.intersection(held)}
        both = {**values_of_class(cls), **on_module} if held_by_class(cls) else on_module
        for name, value in both.items():
            out[number, name] = value, () if type(value) in _HOLD_NOTHING else _content(value)
    return out


class _Counted(NamedTuple):
    """What counts its changes of all that the state of one module is in, and how many there were."""

    holders: list[Any]
    numbers: list[int]
    owners: list[tuple[Any, Any]]
    tensors: list[tuple[torch.Tensor, int]]

    def is_kept(self) -> bool:
        """Whether nothing has changed since, so that the state is what it was."""
        if dict_version is None or [*map(dict_version, self.holders)] != self.numbers:
            return False
        is_owned = all(content_of(owner) is held for owner, held in self.owners)
        return is_owned and all(tensor._version == number for tensor, number in self.tensors)


_Counts = dict[int, _Counted | None]
"""By id of a module; None of one whose state may change uncounted, as where it is in a list."""


def _counts_of(modules: Sequence[nn.Module], state: LeafState) -> _Counts:
    by_module: dict[int, list[tuple[Any, Any]]] = {}
    for (number, _), held in state.items():
        by_module.setdefault(number, []).append(held)
    return {id(m): _counted(m, by_module.get(id(m), ())) for m in modules}


def _counted(module: nn.Module, state: Iterable[tuple[Any, Any]]) -> _Counted | None:
    own, cls = vars(module), cast(Any, type(module))
    holders: list[Any] = [own, module._buffers]
    if dict_version is None or not held_by_class(cls) <= own.keys():
        return None
    owners: list[tuple[Any, Any]] = []
    tensors: list[tuple[torch.Tensor, int]] = []
    for value, content in state:
        if isinstance(content, int) and isinstance(value, torch.Tensor):
            tensors.append((value, content))
        elif content != ():
            held = content_of(value)
            if type(held) is not dict or (isinstance(value, _UNCOUNTED) and held is not value):
                return None
            holders.append(held)
            owners.append((value, held))
    if not all(isinstance(each, dict) for each in holders):
        return None
    return _Counted(holders, [*map(dict_version, holders)], owners, tensors)


def _are_kept(counts: _Counts, inside: Sequence[nn.Module]) -> bool:
    found = (counts.get(id(m)) for m in inside)
    return all(counted is not None and counted.is_kept() for counted in found)


def changed(before: LeafState, now: LeafState) -> Iterator[tuple[int, str]]:
    """The attributes that have another value by now."""
    for key, value in now.items():
        was = before.get(key, _NONE)
        is_one = was[0] is value[0] and was[1] == () and value[1] == ()  # as most are
        if not (is_one or _is_same(was, value)):
            yield key


class Keeping:
    """What the modules of one recording keep, by ``paths`` from their ids; those ``watched`` others may set.

    Attributes
    ----------
    opened: the modules that are no part of a leaf, by path.
    filled: in which of their attributes, by path and name, hooks of leaves put something.
    is_any: whether a leaf has kept anything.
    begun: the leaves whose first call has set something that they go by.
    on_classes: what the call of a leaf that ended last has left otherwise on classes, by name.
    """

    def __init__(self, paths: Mapping[int, str], watched: Collection[str]) -> None:
        self._paths, self._watched = paths, watched
        self._beginning: tuple[LeafState, _Counts] = {}, {}
        self._by_leaf: dict[str, tuple[LeafState, _Counts]] = {}
        self.opened: Sequence[tuple[str, nn.Module]] = ()
        self.filled: set[tuple[str, str]] = set()
        self.is_any = False
        self.begun: set[str] = set()
        self.on_classes = frozenset[str]()

    def begin(self, modules: Sequence[nn.Module], opened: Sequence[tuple[str, nn.Module]]) -> None:
        """Look at all modules as they are before the model is called."""
        state = state_of(modules)
        self.opened, self._beginning = opened, (state, _counts_of(modules, state))

    def before(self, path: str, inside: Sequence[nn.Module]) -> tuple[LeafState, _Counts]:
        """What a leaf keeps as it is called, maybe among others.

        Raises :class:`WatchMethods` where code outside has set it since its last call.
        """
        known, counts = self._by_leaf.get(path, self._beginning)
        if _are_kept(counts, inside):
            return known, counts
        now = state_of(inside)
        for module, _ in changed(known, now):
            at = self._paths.get(module)
            if at is not None and at not in self._watched:
                raise WatchMethods(at)
        return now, _counts_of(inside, now)

    def after(self, path: str, inside: Sequence[nn.Module], before: tuple[LeafState, _Counts]) -> bool:
        """Note what a leaf keeps after a call; whether, but for its first, that is other than ``before``."""
        is_first, others = path not in self._by_leaf, list[tuple[int, str]]()
        if not _are_kept(before[1], inside):
            now = state_of(inside)
            others = [*changed(before[0], now)]
            before = now, _counts_of(inside, now)
        self._by_leaf[path] = before
        by_id = {id(m): m for m in inside} if others else {}
        self.on_classes = frozenset(_of_class(by_id[number], name) for number, name in others) - {""}
        is_set = bool(others)
        self.is_any |= is_set
        if is_set and is_first:
            self.begun.add(path)
        return is_set and not is_first

    @contextlib.contextmanager
    def noting_filled(self) -> Iterator[None]:
        """Note in which attributes of open modules a leaf's hooks put something meanwhile."""
        paths, opened = {id(m): p for p, m in self.opened}, [m for _, m in self.opened]
        before = state_of(opened)
        yield
        self.filled |= {(paths[module], name) for module, name in changed(before, state_of(opened))}


def attributes_left(
    modules: Iterable[tuple[str, nn.Module]], is_computed: Callable[[torch.Tensor], bool]
) -> Iterator[str]:
    """The plain attributes, by path, that hold what a run has computed with gradients: a loss, a feature.

    Not a tensor that the module's own code reads: what goes to others is returned, or lies in a container.
    """

    def is_left(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.requires_grad and is_computed(value)

    for path, module in modules:
        cls: Any = type(module)
        for name, value in vars(module).items():
            if name in OF_ALL or type(value) in _SIMPLE:
                continue
            if isinstance(value, (list, tuple, dict)):
                is_found = any(map(is_left, value if isinstance(value, tuple) else _content(value)))
            else:
                is_found = is_left(value) and name not in read_by(cls)
            if is_found:
                yield f"{path}.{name}".lstrip(".")


def tell_left(model: nn.Module, names: Sequence[str]) -> None:
    """Warn of attributes that code outside of the model would find as an earlier call left them."""
    if names:
        _logger.warning(
            "%s's forward leaves in %s what it computes, which stages do not set: after a step it holds what "
            "an earlier call of the model left there; return it from forward instead",
            type(model).__name__,
            ", ".join(names),
        )


def _content(value: Any) -> Any:
    """What is otherwise once something was put into a value, or a tensor or array written to."""
    kind = type(value)  # an object may say at length what class it is of
    if issubclass(kind, (list, dict, collections.deque)):
        return [*(value.values() if issubclass(kind, dict) else value)]
    if issubclass(kind, set):
        return len(value)
    if issubclass(kind, torch.Tensor):
        return () if value.is_inference() else value._version
    if issubclass(kind, np.ndarray) and value.dtype.kind in "biuf":
        return value.flat[:: 1 + value.size // LOOKED_AT].tobytes()
    held = content_of(value)
    return [*held.values()] if isinstance(held, dict) else ()


def _is_same(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    if not _is_one(a[0], b[0]):
        return False
    if isinstance(a[1], list) and isinstance(b[1], list):
        return len(a[1]) == len(b[1]) and all(map(_is_one, a[1], b[1]))
    return bool(a[1] == b[1])


def _is_one(a: Any, b: Any) -> bool:
    return a is b or (isinstance(b, _SIMPLE) and type(a) is type(b) and bool(a == b))


@functools.lru_cache(maxsize=1 << 10)
def read_by(cls: Any) -> frozenset[str]:
    """The attributes that the methods of a class and of those it is made of ask for, by name or as a text."""
    names: set[str] = set()
    for code in codes_of(cls):
        names.update(attributes_loaded(code))
        names.update(c for c in code.co_consts if isinstance(c, str))
    return frozenset(names)


_MOST_CLASSES = 1 << 10
_codes: Remembered[type, tuple[types.CodeType, ...]] = Remembered(_MOST_CLASSES)
_OF_ANY_CLASS = frozenset(dir(type))
_OF_CLASSES = frozenset({"__class_getitem__", "__init_subclass__"})
"""Methods that run as classes are made, and in no forward."""


def codes_of(cls: type) -> tuple[types.CodeType, ...]:
    """The code of the methods of a class and of those it is made of, up to ``nn.Module``."""
    held = _held_by(cls)
    return _codes.of(cls, held, lambda: tuple(code for value in held for code in codes_in(value)))


def _made_of(cls: type) -> list[type]:
    """A class and those it is made of, up to ``nn.Module``."""
    return [*itertools.takewhile(lambda c: c is not nn.Module, cls.__mro__)]


def _held_by(cls: type) -> list[Any]:
    return [v for each in _made_of(cls) for name, v in vars(each).items() if name not in _OF_CLASSES]


_read: dict[type, list[Any]] = {}
"""By class, what it and those it is made of held when a capture began."""


def read_anew(classes: Iterable[type]) -> None:
    """Let what classes go by be read again where any of them holds other code or data than it did.

    To be called as a capture begins: what its own runs set is none of it.
    """
    now = {cls: _held_by(cls) for cls in classes}
    if len(_read) > _MOST_CLASSES or any(
        not are_same(_read.get(cls, held), held) for cls, held in now.items()
    ):
        _read.clear()
        for told in (read_by, goes_by, held_by_class):
            told.cache_clear()
    _read.update(now)


@functools.lru_cache(maxsize=1 << 10)
def held_by_class(cls: Any) -> frozenset[str]:
    """Of what a class asks for, what it holds itself and its code may change: sets, fills or writes to.

    And what code that comes to the class may yet put there.
    """
    codes = codes_of(cls)
    stored = {name for code in codes for name in _set_by(code)}
    held = {name: value for each in reversed(_made_of(cls)) for name, value in vars(each).items()}
    found = {n for n, v in held.items() if isinstance(v, _FILLED if n not in stored else _HELD)}
    put = {name for code in codes if _comes_to_class(code) for name in _set_by(code)}
    return goes_by(cls) & (found | (put - held.keys() - _OF_ANY_CLASS))


def _of_class(module: nn.Module, name: str) -> str:
    """An attribute by the class that holds it; nothing where the module does."""
    if name in vars(module) or name in module._buffers:
        return ""
    owner = next((c for c in type(module).__mro__ if name in vars(c)), type(module))
    return f"{owner.__module__}.{owner.__qualname__}.{name}"


def _set_by(code: types.CodeType) -> Iterator[str]:
    """The attributes that code sets, by ``setattr`` too."""
    yield from attributes_stored(code)
    if "setattr" in code.co_names:
        yield from (text for text in code.co_consts if isinstance(text, str))


def _comes_to_class(code: types.CodeType) -> bool:
    return code.co_varnames[:1] == ("cls",) or not {"__class__", "type"}.isdisjoint(code.co_names)


def values_of_class(cls: Any) -> dict[str, Any]:
    """What a class holds now of that; nothing of what it has lost since."""
    return {name: getattr(cls, name, None) for name in held_by_class(cls)}


@functools.lru_cache(maxsize=1 << 10)
def goes_by(cls: Any) -> frozenset[str]:
    """Of what a class asks for, what not every module has."""
    return read_by(cls) - OF_ALL
