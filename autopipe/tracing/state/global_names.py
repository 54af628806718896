"""The globals that the code of a model names, in its own files and in those of its user that it calls into.

What they hold is left to ``reach``.
"""

from __future__ import annotations

import itertools
import operator
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache, partial, partialmethod, singledispatchmethod
from typing import Any

import torch

from ...torch_private import code_of_operator, operators_named
from ..inputs.contents import is_filled
from .cells import attributes, content
from .loads import globals_loaded
from .quick_check import Remembered, are_same

__all__ = [
    "PLAIN",
    "Walk",
    "codes_in",
    "come_to",
    "globals_in",
    "is_bare",
    "is_foreign",
    "is_users",
    "methods_of",
    "names_in",
    "names_in_class",
]

PLAIN = frozenset(
    {int, float, str, bool, type(None), complex, bytes, torch.dtype, torch.device, torch.Size,
     types.ModuleType, slice, range}
)  # fmt: skip
"""Classes of values that hold nothing which code may change."""
_FOREIGN = frozenset({"torch", "numpy", "builtins", "typing", "collections", "abc", "logging", "threading"})
_STDLIB = sysconfig.get_path("stdlib")
_INSTALLED = ("site-packages", "dist-packages")
_AROUND_FUNC = (partial, partialmethod, cached_property, singledispatchmethod)
_CALLED_BY_PYTHON = frozenset({
    "forward", "__call__", "__getattr__", "__getattribute__", "__setattr__", "__iter__", "__len__",
    "__getitem__", "__contains__", "__bool__", "__enter__", "__exit__",
})  # fmt: skip
_ASKS_FOR_ALL = frozenset({"globals", "eval", "exec", "vars", "locals"})
_REACHES_FILES = frozenset({"modules", "import_module", "getmodule"})
"""Code with these names may ask its own file for an attribute, as it asks others."""


@lru_cache(maxsize=1 << 12)
def is_foreign(module: str | None) -> bool:
    """Whether a module, by name, is none of a model's: torch's, numpy's, or Python's own."""
    root = (module or "builtins").partition(".")[0]
    return root in _FOREIGN or (root in sys.stdlib_module_names and root != "__main__")


def is_users(module: str | None) -> bool:
    """Whether a module, by name, is neither installed nor Python's own nor this package's."""
    if is_foreign(module) or (module or "").partition(".")[0] == __name__.partition(".")[0]:
        return False
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is None or not _is_installed(file)


@lru_cache(maxsize=1 << 12)
def _is_installed(file: str) -> bool:
    return file.startswith(_STDLIB) or any(place in file for place in _INSTALLED)


class Walk:
    """Finds the globals of files that code names, or what it calls: of the ``files``, and of a user's others.

    ``names`` are the globals of files with those of them that code names, by their ids; ``seen`` are all
    classes, functions and others that were followed; ``imported`` what there is under names that code has of
    its file, and that file has not: modules which it imports as it runs, once they are there.
    """

    def __init__(self, files: frozenset[str]) -> None:
        self.files = files
        self.names: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self.followed: dict[Any, bool] = {}
        self.seen: dict[int, Any] = {}
        self.imported: dict[str, types.ModuleType | None] = {}
        self.waiting: list[Any] = []

    def found(self) -> list[tuple[dict[str, Any], frozenset[str]]]:
        """The globals of files, with those of them that code names.

        What else a file has, such as the losses that a training script gathers, is none of the model's.
        Globals are told apart by identity: two files have one name where one was loaded twice, or a package
        took over all that a module within it has.
        """
        each = (
            (g, frozenset(n for n in names if not n.startswith("__"))) for g, names in self.names.values()
        )
        return [(known, names) for known, names in each if names]

    def run(self, start: Iterable[Any]) -> None:
        self.waiting = list(start)
        while self.waiting:
            thing = self.waiting.pop()
            if id(thing) not in self.seen:
                self.seen[id(thing)] = thing
                self.waiting += self.inside(thing)

    def is_followed(self, module: Any) -> bool:
        if not isinstance(module, str):
            return False
        if module not in self.followed:
            self.followed[module] = module in self.files or is_users(module)
        return self.followed[module]

    def inside(self, thing: Any) -> Iterable[Any]:
        """What a callable is made of; the names that its code asks for are noted."""
        if isinstance(thing, types.FunctionType):
            known = thing.__globals__
            if self.is_followed(known.get("__name__")):
                self.ask(thing.__code__, known)
            return [*map(content, thing.__closure__ or ()), getattr(thing, "__wrapped__", None)]
        if isinstance(thing, type):
            return self.inside_class(thing) if self.is_followed(thing.__module__) else []
        if isinstance(thing, (staticmethod, classmethod, types.MethodType)):
            return [thing.__func__]
        if isinstance(thing, property):
            return [thing.fget, thing.fset, thing.fdel]
        if isinstance(thing, _AROUND_FUNC):
            return [thing.func]
        if made := code_of_operator(thing):
            return made
        return [(attributes(thing) or {}).get("__wrapped__"), type(thing)] if callable(thing) else []

    def inside_class(self, cls: type) -> Iterable[Any]:
        """What a class holds beside bare functions, whose names are noted all at once."""
        methods = methods_of(cls)
        self.seen.update(methods.bare)
        for known, codes, asked, own in methods.asking:
            if self.is_followed(known.get("__name__")):
                self.ask_together(codes, asked, own, known)
        return [*methods.others, *cls.__bases__]

    def ask_together(
        self,
        codes: Iterable[types.CodeType],
        asked: frozenset[str],
        own: frozenset[str],
        known: dict[str, Any],
    ) -> None:
        """What :meth:`ask` does of each of some code, which asks for these names in all."""
        found = known.keys() & own
        is_plain = _REACHES_FILES.isdisjoint(asked) and _ASKS_FOR_ALL.isdisjoint(asked)
        is_plain &= "ops" not in asked
        if not is_plain or any(map(_is_users_module, map(known.get, found))) or self.imports(own, known):
            for code in codes:
                self.ask(code, known)
            return
        _, names = self.names.setdefault(id(known), (known, set()))
        new = found - names
        names |= new
        self.waiting += map(known.get, new)

    def ask(self, code: types.CodeType, known: dict[str, Any]) -> None:
        """Code with the globals ``known`` asks for names of them, and for others of modules found there.

        What it loads as an attribute is none of its file's, though that may have one of the same name.
        """
        _, names = self.names.setdefault(id(known), (known, set()))
        asked, own = _names(code)
        found = known.keys() & (own if _REACHES_FILES.isdisjoint(asked) else asked)
        new = (found if _ASKS_FOR_ALL.isdisjoint(asked) else known.keys()) - names
        names |= new
        for name in found:
            value = known[name]
            if _is_users_module(value):
                self.ask_module(asked, value)
            elif name in new:
                self.waiting.append(value)
        for module in self.imports(own, known):
            self.ask_module(asked, module)
        if "ops" in asked:
            self.waiting += operators_named(asked)

    def imports(self, own: frozenset[str], known: Mapping[str, Any]) -> list[types.ModuleType]:
        """The user's modules that code imports as it runs, of the names that it has of its own file."""
        there = {name: sys.modules.get(name) for name in own - known.keys()}
        self.imported |= there
        return [module for module in there.values() if module is not None and _is_users_module(module)]

    def ask_module(self, asked: frozenset[str], module: types.ModuleType) -> None:
        """Code that names a module may ask it for what it names beside."""
        known = vars(module)
        _, names = self.names.setdefault(id(known), (known, set()))
        new = (known.keys() & asked) - names
        names |= new
        self.waiting += [known[n] for n in new]


class Methods:
    """What a class holds, its functions told apart: most hold nothing beside their code, and there are many.

    Attributes
    ----------
    bare: the functions that hold nothing, by id. others: all else that it holds.
    rest: those of them, by name, that code may change or that may hold what it may.
    asking: the globals of bare ones, with their code and the names that it asks for, and has of their file.
    """

    def __init__(self, cls: type) -> None:
        held = vars(cls)
        self._keys, self._values = [*held], [*held.values()]
        functions = (v for v in self._values if type(v) is types.FunctionType)
        self.bare = {id(f): f for f in functions if is_bare(f)}
        self._parts = self._parts_now()
        self.others = [v for v in self._values if id(v) not in self.bare]
        named = ((n, v) for n, v in held.items() if id(v) not in self.bare and type(v) not in PLAIN)
        self.rest = [(n, v) for n, v in named if isinstance(v, types.FunctionType) or not n.startswith("__")]
        self.asking: list[tuple[dict[str, Any], list[types.CodeType], frozenset[str], frozenset[str]]] = []
        for known in {id(f.__globals__): f.__globals__ for f in self.bare.values()}.values():
            codes = [f.__code__ for f in self.bare.values() if f.__globals__ is known]
            asked, own = (frozenset[str]().union(*each) for each in zip(*map(_names, codes), strict=True))
            self.asking.append((known, codes, asked, own))

    def is_still_of(self, cls: type) -> bool:
        """Whether the class holds the same, and its bare functions nothing still."""
        held = vars(cls)
        if not are_same([*held.values()], self._values) or [*held] != self._keys:
            return False
        return are_same(self._parts_now(), self._parts) and not any(map(_own_attributes, self.bare.values()))

    def _parts_now(self) -> list[Any]:
        return [*itertools.chain.from_iterable(map(_parts, self.bare.values()))]


_parts = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__", "__name__")
_own_attributes = operator.attrgetter("__dict__")
_methods: dict[type, Methods] = {}
_MOST_CLASSES = 1 << 10


def methods_of(cls: type) -> Methods:
    """What a class holds, looked at anew where that is other than it was."""
    known = _methods.get(cls)
    if known is None or not known.is_still_of(cls):
        if len(_methods) > _MOST_CLASSES:
            _methods.clear()
        known = _methods[cls] = Methods(cls)
    return known


def is_bare(function: types.FunctionType) -> bool:
    """Whether a function holds nothing beside its code."""
    if function.__closure__ or function.__kwdefaults__ or function.__dict__:
        return False
    is_plain = not function.__defaults__ or PLAIN.issuperset(map(type, function.__defaults__))
    return is_plain and function.__name__ not in names_in(function.__code__)


def _is_users_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and is_users(value.__name__)


_come_to: list[tuple[list[types.CodeType], list[str], list[Any], frozenset[str]]] = []
"""Of the last question from where it was asked, the names and values that classes held, and the answer."""


def come_to(codes: Sequence[types.CodeType], classes: Sequence[type]) -> frozenset[str]:
    """The names in classes that code may come to from methods that Python calls, and from ``codes``."""
    keys = [name for cls in classes for name in vars(cls)]
    values = [value for cls in classes for value in vars(cls).values()]
    for known, *held, names in _come_to:
        if are_same(known, codes) and held[0] == keys and are_same(held[1], values):
            return names
    found = _come_to_from(_CALLED_BY_PYTHON.union(*map(names_in, codes)), keys, values)
    _come_to[:] = [([*codes], keys, values, found)]
    return found


def _come_to_from(start: frozenset[str], keys: Sequence[str], values: Sequence[Any]) -> frozenset[str]:
    held: dict[str, list[Any]] = {}
    for name, value in zip(keys, values, strict=True):
        held.setdefault(name, []).append(value)
    names = set(start)
    waiting = list(names)
    while waiting:
        for value in held.get(waiting.pop(), ()):
            new = {n for code in codes_in(value) for n in names_in(code)} - names
            names |= new
            waiting += new
    return frozenset(names)


def codes_in(value: Any) -> Iterator[types.CodeType]:
    """The code of a method or property, of what it wraps or is made around, and of functions within it."""
    waiting: list[Any] = [value]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, types.CodeType):
            yield part
            waiting += [c for c in part.co_consts if isinstance(c, types.CodeType)]
        elif isinstance(part, property):
            waiting += part.fget, part.fset
        elif isinstance(part, types.FunctionType):
            around = (c.cell_contents for c in part.__closure__ or () if is_filled(c))
            waiting += part.__code__, vars(part).get("__wrapped__"), *filter(_has_code, around)
        elif isinstance(part, (staticmethod, classmethod, types.MethodType)):
            waiting.append(part.__func__)
        elif isinstance(part, _AROUND_FUNC):
            waiting.append(part.func)
        else:
            waiting += getattr(part, "__code__", None), getattr(part, "__wrapped__", None)


_of_classes: Remembered[type, frozenset[str]] = Remembered(_MOST_CLASSES)


def names_in_class(cls: type) -> frozenset[str]:
    """The names that the code of what a class itself holds asks for; looked for anew once it holds others."""
    held = [*vars(cls).values()]
    codes = (code for value in held for code in codes_in(value))
    return _of_classes.of(cls, held, lambda: frozenset[str]().union(*map(names_in, codes)))


def _has_code(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType, partial))


_asked: dict[int, tuple[types.CodeType, frozenset[str], frozenset[str]]] = {}
"""By id of the code, which is kept with it: to compare code takes longer than to read its names."""
_MOST_ASKED = 1 << 14


def names_in(code: types.CodeType) -> frozenset[str]:
    """The names that code asks for, functions within it included."""
    return _names(code)[0]


def globals_in(code: types.CodeType) -> frozenset[str]:
    """Those of them that it has of its own file."""
    return _names(code)[1]


def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The names that code asks for, and those of them that it has of its own file."""
    if (known := _asked.get(id(code))) is not None:
        return known[1:]
    if len(_asked) > _MOST_ASKED:
        _asked.clear()
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    names = frozenset([n for n in code.co_names if not n.startswith("__")]).union(*(n for n, _ in inner))
    own = frozenset(globals_loaded(code)).union(*(n for _, n in inner)) & names
    _asked[id(code)] = code, names, own
    return names, own
