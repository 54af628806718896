"""Attributes of leaves that the code around them reads, as in ``F.dropout(x, self.drop.p)``, noted.

Descriptors tell, which stand meanwhile on the leaves' classes for the names that open code has in it. Holding
the answers against later ones is left to ``assumptions``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..members import OF_COMPILED
from ..state.global_names import codes_in, names_in
from ..state.quick_check import Remembered
from .leaf_state import codes_of, read_by
from .leaves import is_compiled

__all__ = ["NOTHING", "Names", "Note", "inherited", "names_of_open", "noted", "put_back", "spells_mode"]

Note = Callable[[nn.Module, str, Callable[[], Any]], None]
"""(module, name of its attribute, how to ask for it again) → None."""

Names = Callable[[frozenset[type]], frozenset[str]]

_OF_ALL = OF_COMPILED - {"training"}
_SIMPLE = (int, float, str, bool, type(None), torch.dtype)
_REGISTRIES = ("_parameters", "_buffers", "_modules")
NOTHING = object()
_ASIDE = tuple(
    f"{path.parent}{os.sep}" for path in (pathlib.Path(__file__).parent, pathlib.Path(torch.__file__))
)
"""Where code is not the model's own."""


@contextlib.contextmanager
def noted(
    model: nn.Module,
    modules: Sequence[tuple[str, nn.Module]],
    is_inside_leaf: Callable[[str], bool],
    note: Note,
    names_of: Names,
    on_mode: Callable[[], None],
    on_set: Callable[[nn.Module, bool], None],
) -> Iterator[None]:
    """``note`` is called meanwhile where an attribute of one of the ``modules`` within a leaf is read.

    ``on_mode`` is where the mode of a module is read, or set anew, ``on_set`` where it is set, to what.
    ``names_of`` is :func:`names_of_open`, or what remembers its answers.
    """
    seen_into = [(m, is_inside_leaf(path)) for path, m in modules if not is_compiled(m)]
    names = names_of(frozenset([type(m) for m, is_inside in seen_into if not is_inside]))
    asked: dict[type, set[str]] = {}
    for module in [m for m, is_inside in seen_into if is_inside]:
        asked.setdefault(type(module), set()).update(names.intersection(vars(module)))
    mode = functools.partial(getattr, model, "training")
    pairs = [(cls, name) for cls, found in asked.items() for name in found - {"training"}]
    places: list[tuple[type, str, _Attribute]] = [
        (cls, name, _Attribute(name, held, mode, note))
        for cls, name in pairs
        if not hasattr(type(held := inherited(cls, name)), "__get__")
    ]
    for cls in {type(m) for _, m in modules}:
        held = inherited(cls, "training")
        if hasattr(type(held), "__get__") or issubclass(cls, torch.jit.ScriptModule):
            on_mode()  # its own way to have a mode is not seen into
        else:
            places.append((cls, "training", _Mode(held, mode, note, on_mode, on_set)))
    watched = [(cls, "__getattr__", _asking) for cls in asked]
    if "__dict__" in names:
        # a compiler that follows attributes would follow such a method without end
        compiled = {type(m) for _, outer in modules if is_compiled(outer) for m in outer.modules()}
        seen = (cls for cls in asked if not any(issubclass(each, cls) for each in compiled))
        watched += [(cls, "__getattribute__", _showing) for cls in seen]
    with put_back((cls, name) for cls, name, _ in (*places, *watched)):
        for cls, name, attribute in places:
            setattr(cls, name, attribute)
        for cls, name, watching in watched:
            setattr(cls, name, watching(getattr(cls, name), note))
        yield


@contextlib.contextmanager
def put_back(places: Iterable[tuple[Any, str]]) -> Iterator[None]:
    """Leaves what classes hold by some names themselves, or that they hold none, as it was."""
    owns = [(cls, name, vars(cls).get(name, NOTHING)) for cls, name in places]
    try:
        yield
    finally:
        for cls, name, own in owns:
            if own is not NOTHING:
                setattr(cls, name, own)
            elif name in vars(cls):
                delattr(cls, name)


def names_of_open(classes: frozenset[type]) -> frozenset[str]:
    """The names that the code of classes, and of plain functions beside them, asks for.

    ``__dict__`` is among them where it may ask for all that a module has.
    """
    return _named.of(classes, _code_for(classes), lambda: _names_of_open(classes))


def _names_of_open(classes: frozenset[type]) -> frozenset[str]:
    beside = (names_in(f.__code__) for f in _functions_beside(classes))
    names = frozenset().union(*map(read_by, classes), *beside) - _OF_ALL
    own = (code.co_names for cls in classes for code in codes_of(cls))
    return names | {"__dict__"} if "vars" in names or any("vars" in each for each in own) else names


def spells_mode(classes: frozenset[type]) -> bool:
    """Whether the code of classes, or of functions beside them, has the name of the mode as a text.

    So it may come by it unseen: ``vars(self)["training"]``.
    """
    return _spelling.of(classes, _code_for(classes), lambda: _spells_mode(classes))


def _spells_mode(classes: frozenset[type]) -> bool:
    own = (code for cls in classes for code in codes_of(cls))
    beside = (code for function in _functions_beside(classes) for code in codes_in(function))
    return any("training" in code.co_consts for code in (*own, *beside))


_MOST_OPEN = 1 << 6
_named: Remembered[frozenset[type], frozenset[str]] = Remembered(_MOST_OPEN)
_spelling: Remembered[frozenset[type], bool] = Remembered(_MOST_OPEN)


def _code_for(classes: frozenset[type]) -> list[Any]:
    """What is looked at to tell something of the code of classes, and of plain functions beside them."""
    beside = [*_functions_beside(classes)]
    return [*itertools.chain(*map(codes_of, classes)), *beside, *(f.__code__ for f in beside)]


def _functions_beside(classes: Iterable[type]) -> Iterator[types.FunctionType]:
    for file in {c.__module__ for c in classes}:
        known = vars(sys.modules.get(file, types))
        functions = [f for f in list(known.values()) if type(f) is types.FunctionType]
        yield from (f for f in functions if f.__globals__ is known)


def inherited(cls: type, name: str) -> Any:
    """What a class has for an attribute that an instance has not."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return NOTHING


class _Attribute:
    """Stands on a class for an attribute of its instances; what these hold stays where it is."""

    def __init__(self, name: str, inherited: Any, root_mode: Callable[[], bool], note: Note) -> None:
        self.name, self.inherited, self.root_mode, self.note = name, inherited, root_mode, note

    def __get__(self, owner: nn.Module | None, cls: type) -> Any:
        held = {} if owner is None else vars(owner)
        value = held.get(self.name, self.inherited)
        if value is NOTHING:
            raise AttributeError(f"{cls.__name__!r} object has no attribute {self.name!r}")
        if owner is not None:
            mode = self.root_mode if self.name == "training" else None
            self.note(owner, self.name, functools.partial(_answer, owner, self.name, mode))
        return value

    def __set__(self, owner: nn.Module, value: Any) -> None:
        vars(owner)[self.name] = value

    def __delete__(self, owner: nn.Module) -> None:
        if vars(owner).pop(self.name, NOTHING) is NOTHING:
            raise AttributeError(self.name)


class _Mode(_Attribute):
    """Stands for the mode of modules, be they open or not."""

    def __init__(
        self,
        inherited: Any,
        root_mode: Callable[[], bool],
        note: Note,
        on_mode: Callable[[], None],
        on_set: Callable[[nn.Module, bool], None],
    ) -> None:
        super().__init__("training", inherited, root_mode, note)
        self.on_mode, self.on_set = on_mode, on_set

    def __get__(self, owner: nn.Module | None, cls: type) -> Any:
        if owner is not None:
            self.on_mode()
        return super().__get__(owner, cls)

    def __set__(self, owner: nn.Module, value: Any) -> None:
        if "training" in vars(owner):  # else it is just being made
            self.on_mode()
            self.on_set(owner, value)
        super().__set__(owner, value)


def _asking(original: Callable[[Any, str], Any], note: Note) -> Callable[[Any, str], Any]:
    """What Python calls for an attribute that an instance lacks: noted, since it may get one."""

    def __getattr__(self: nn.Module, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if not name.startswith("__"):
                note(self, name, functools.partial(_answer_of_any, self, name))
            raise

    return __getattr__


def _showing(original: Callable[[Any, str], Any], note: Note) -> Callable[[Any, str], Any]:
    """What Python calls for any attribute; each is noted where the model asks for all that it has."""

    def __getattribute__(self: nn.Module, name: str) -> Any:
        found = original(self, name)
        if name == "__dict__" and not sys._getframe(1).f_code.co_filename.startswith(_ASIDE):
            for each in [held for held in found if held not in _OF_ALL and held != "training"]:
                note(self, each, functools.partial(_answer, self, each, None))
        return found

    return __getattribute__


def _answer_of_any(owner: nn.Module, name: str) -> Any:
    """What a module has under a name, wherever, to be compared."""
    held = (vars(owner)[kind] for kind in _REGISTRIES)
    if (found := next((h[name] for h in held if name in h), NOTHING)) is not NOTHING:
        return id(found)
    return _answer(owner, name, None) if name in vars(owner) else id(inherited(type(owner), name))


def _answer(owner: nn.Module, name: str, root_mode: Callable[[], bool] | None) -> Any:
    """What an attribute is, to be compared: of a mode, whether it is the model's; of an object, which."""
    value = vars(owner).get(name, NOTHING)
    if root_mode is not None:
        return value is root_mode()
    parts = value if isinstance(value, tuple) else (value,)
    is_simple = all(isinstance(v, _SIMPLE) for v in parts)
    return value if is_simple else id(value)
