"""What a model's code may change beside its attributes: objects in them, closures, generators, globals.

Which globals code names is left to ``global_names``; putting all back and telling what changed to ``state``.
"""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import enum
import functools
import gc
import io
import itertools
import operator
import random
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property, partial, partialmethod
from typing import Any

import numpy as np
import torch
from torch import nn

from ...torch_private import code_of_operator
from ..inputs.contents import slots
from ..members import OF_ALL, buffers_in, modules_in, parameters_in
from .cells import (
    MOST_BYTES,
    ArrayCell,
    BytesCell,
    Cell,
    SlotCell,
    StreamCell,
    VariableCell,
    attributes,
    content,
    contents,
)
from .global_names import PLAIN, Walk, codes_in, is_bare, is_foreign, is_users, methods_of, names_in
from .loads import only_adds
from .quick_check import are_same

__all__ = ["GENERATORS", "HOOKS", "Reached", "reached"]

_MOST, _DEEPEST = 20_000, 6
_OF_PYTHON = frozenset(
    {tuple, list, set, frozenset, property, staticmethod, classmethod, types.MethodType, partial}
)  # fmt: skip
"""What holds others and is nothing else, of which there are many."""
_FOREIGN = frozenset({"torch", "numpy", "builtins", "typing", "abc", "logging", "threading", "autopipe"})
_COUNTING = "torch.optim", "torch.quasirandom"
"""Where classes of torch's are whose objects go by how often they were called."""
GENERATORS = (
    random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator,
    np.random.SeedSequence, torch.Generator,
)  # fmt: skip
_BOUND = frozenset({types.BuiltinMethodType, types.MethodWrapperType})
_LOGS = frozenset({list, set, collections.deque})
"""What may be a log; one of another class may do more than add, whatever its method is called."""
_GLOBAL = random._inst, np.random.mtrand._rand, torch.default_generator
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Reached:
    """Places that hold what code may replace, by the path of the module they belong to and a name to show.

    ``holders`` are mutable containers, ``files`` the globals of source files with those of them that the
    model's code names, ``classes`` classes, ``cells`` closures, slots and what else holds one value,
    ``tensors`` those found outside of parameters and buffers, ``generators`` random ones of the model's own,
    ``exhaustible`` what can be read only once; ``sources`` the paths of the modules that anything but their
    parameters, buffers and modules was reached from, ``first`` those of them that came first. What was seen
    ``ahead`` of classes and files and is ``met`` again from there is noted by its id, and so is what may be
    a log and is ``held`` by something else than the name of a file's global.
    """

    def __init__(self) -> None:
        self.holders: list[tuple[str, str, Any]] = []
        self.files: list[tuple[str, str, dict[str, Any], frozenset[str]]] = []
        self.classes: list[tuple[str, str, type]] = []
        self.cells: list[tuple[str, str, Cell]] = []
        self.tensors: list[tuple[str, str, torch.Tensor]] = []
        self.generators: list[tuple[str, str, Any]] = []
        self.exhaustible: list[tuple[str, str, Any]] = []
        self.sources: set[str] = set()
        self.first: set[str] = set()
        self.seen: dict[int, Any] = {}
        self.ahead: Collection[int] = ()
        self.met: dict[int, Any] = {}
        self.held: dict[int, Any] = {}
        self.places: tuple[list[int], list[Any]] = [], []

    @property
    def lists(self) -> tuple[list[Any], ...]:
        """All places there are."""
        kinds = self.holders, self.files, self.classes, self.cells
        return *kinds, self.tensors, self.generators, self.exhaustible

    @property
    def own_generators(self) -> list[tuple[str, Any]]:
        """The random generators, by name, that are not those of torch, Python and numpy themselves."""
        return [(name, g) for _, name, g in self.generators if not any(g is one for one in _GLOBAL)]

    def is_still(self, is_first: Callable[[str], bool]) -> bool:
        """Whether the same would be reached in such an order, now that containers hold what they held."""
        if self.first != set(filter(is_first, self.sources)):
            return False
        lengths, held = self._places()
        return lengths == self.places[0] and are_same(held, self.places[1])

    def is_only_added_to(self, holder: Any) -> bool:
        """Whether code has a list, set or queue by a name in a file alone, and does nothing but add to it."""
        if type(holder) not in _LOGS or id(holder) in self.held:
            return False
        names = {n for _, _, known, asked in self.files for n in asked if known.get(n) is holder}
        classes = {v if isinstance(v, type) else type(v) for v in self.seen.values()}
        classes.update(cls for _, _, cls in self.classes)
        values = [v for v in self.seen.values() if isinstance(v, types.FunctionType)]
        values += [v for cls in classes if is_users(cls.__module__) for v in vars(cls).values()]
        return bool(names) and all(only_adds(code, names) for value in values for code in codes_in(value))

    def _places(self) -> tuple[list[int], list[Any]]:
        """How many names there are in files, and what classes and cells hold; arrays hold numbers alone."""
        held = [v for _, _, cls in self.classes for v in vars(cls).values()]
        held += [content(c) for _, _, c in self.cells if not isinstance(c, ArrayCell)]
        return [len(known) for _, _, known, _ in self.files], held

    def visit(self, path: str, name: str, value: Any, depth: int = 0, *, is_named: bool = False) -> None:
        """Note ``value`` and what it holds; whether it ``is_named`` so by a file."""
        cls = type(value)
        if cls in _BOUND:
            value, is_named = value.__self__, False  # ``draw = generator.normal``
            cls = type(value)
        if cls in PLAIN:
            return
        if cls in _LOGS and not is_named:
            self.held[id(value)] = value
        if id(value) in self.seen or depth > _DEEPEST or len(self.seen) > _MOST:
            if id(value) in self.ahead:
                self.met[id(value)] = value
            return
        self.seen[id(value)] = value
        if cls is types.FunctionType:
            if not is_bare(value):
                self._look_into(path, name, value, depth + 1)
        elif cls in _OF_PYTHON:
            self._look_into(path, name, value, depth + 1)
        elif isinstance(value, type):
            if is_users(value.__module__):
                self.look_into_class(path, value, depth)
        elif isinstance(value, torch.Tensor):
            self.tensors.append((path, name, value))
        elif isinstance(value, random.SystemRandom):
            return  # it has no state; what it draws is noticed
        elif isinstance(value, GENERATORS):
            self.generators.append((path, name, value))
        elif isinstance(value, np.ndarray):
            self.cells += [(path, name, ArrayCell(value))] if ArrayCell.is_for(value) else []
        elif isinstance(value, (bytearray, array.array)):
            self.cells += [(path, name, BytesCell(value))] if len(value) <= MOST_BYTES else []
        elif isinstance(value, (io.StringIO, io.BytesIO)):
            self.cells += [(path, name, StreamCell(value))] if StreamCell.is_for(value) else []
        elif isinstance(value, (nn.Module, torch.jit.ScriptFunction)) or _is_namespace(value):
            return
        else:
            self._look_into(path, name, value, depth + 1)

    def look_into_class(self, path: str, cls: type, depth: int = 0) -> None:
        """Note a class of the model's or its user's, and what it holds beside its methods' own code."""
        if is_foreign(cls.__module__) or issubclass(cls, enum.Enum):
            return
        self.seen[id(cls)] = cls
        self.classes.append((path, cls.__qualname__, cls))
        methods = methods_of(cls)
        self.seen.update(methods.bare)
        for name, value in methods.rest:
            self.visit(path, f"{cls.__qualname__}.{name}", value, depth + 1)

    def _look_into(self, path: str, name: str, value: Any, depth: int) -> None:
        if isinstance(value, (dict, list, set, collections.deque)):
            self.holders.append((path, name, value))
        elif hasattr(type(value), "__next__") and not hasattr(value, "__dict__"):
            self.exhaustible.append((path, name, value))
            return
        for shown, inner in self._inside(path, name, value):
            if type(inner) not in PLAIN:
                self.visit(path, shown, inner, depth)

    def _inside(self, path: str, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """What an object holds, each under a name."""
        if isinstance(value, types.FunctionType):
            yield from self._inside_function(path, name, value)
        elif isinstance(value, dict):
            yield from ((f"{name}[{k!r}]", v) for k, v in list(value.items()) if type(v) not in PLAIN)
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value) if type(v) not in PLAIN)
        elif isinstance(value, types.MethodType):
            yield name, (value.__self__, value.__func__)
        elif isinstance(value, (staticmethod, classmethod)):
            yield name, value.__func__
        elif isinstance(value, property):
            yield name, (value.fget, value.fset)
        elif isinstance(value, (partial, partialmethod)):
            yield name, (value.func, value.args, value.keywords)
        elif isinstance(value, cached_property):
            yield name, value.func
        elif isinstance(value, contextvars.ContextVar):
            self.cells.append((path, name, VariableCell(value)))
            yield name, content(self.cells[-1][2])
        else:
            yield from self._inside_object(path, name, value)

    def _inside_function(
        self, path: str, name: str, function: types.FunctionType
    ) -> Iterator[tuple[str, Any]]:
        if is_foreign(function.__module__):
            return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if key != "__class__":
                self.cells.append((path, f"{key} in {name}", cell))
                yield f"{key} in {name}", content(cell)
        if function.__defaults__ or function.__kwdefaults__:
            yield f"a default of {name}", (function.__defaults__, function.__kwdefaults__)
        if vars(function) or function.__name__ in names_in(function.__code__):
            self.holders.append((path, name, vars(function)))
            yield from ((f"{name}.{k}", v) for k, v in list(vars(function).items()))

    def _inside_object(self, path: str, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        cls = type(value)
        yield from ((name, each) for each in code_of_operator(value))
        is_kept = cls.__module__.startswith(_COUNTING)
        if cls.__module__.partition(".")[0] in _FOREIGN and not is_kept:
            return
        if (held := attributes(value)) is not None:
            self.holders.append((path, name, held))
            yield from ((f"{name}.{k}", v) for k, v in list(held.items()) if type(v) not in PLAIN)
        for key, slot in () if is_foreign(cls.__module__) else slots(value):
            cell = SlotCell(value, slot)
            self.cells.append((path, f"{name}.{key}", cell))
            yield f"{name}.{key}", content(cell)


def _is_namespace(value: Any) -> bool:
    """Whether a dict holds the names of a module, Python's own among them: not to be emptied, ever."""
    name = value.get("__name__") if isinstance(value, dict) else None
    return isinstance(name, str) and vars(sys.modules.get(name, types)) is value


def reached(model: nn.Module, is_first: Callable[[str], bool] = lambda path: True) -> Reached:
    """Everything that is reached from the attributes of a model's modules, their classes and their files.

    What several modules reach is said to be of the first; those whose path ``is_first`` come before others.
    """
    out = Reached()
    files: dict[str, str] = {}
    classes: dict[type, str] = {}
    for path, module in sorted(modules_in(model), key=lambda held: not is_first(held[0])):
        for name, value in vars(module).items():
            if name not in OF_ALL and type(value) not in PLAIN:
                out.sources.add(path)
                out.visit(path, f"{path}.{name}".lstrip("."), value)
        for hook in [h for kind in HOOKS for h in vars(module).get(kind, {}).values()]:
            out.sources.add(path)
            out.visit(path, f"a hook of {path or type(module).__name__}", hook)
        for cls in type(module).__mro__:
            if is_foreign(cls.__module__):
                continue
            out.sources.add(path)
            if cls not in classes:
                classes[cls] = path
                files.setdefault(cls.__module__, path)
    _follow(out, classes, files)
    out.first = set(filter(is_first, out.sources))
    out.places = out._places()
    return out


def _follow(out: Reached, classes: Mapping[type, str], files: Mapping[str, str]) -> None:
    """Note what classes and their files lead to; where all that was looked at for it is still so, as before.

    That is most of what a library's models reach, and one and the same for many of them.
    """
    key = (*map(id, classes), *classes.values())
    is_free = len(_code_in(out, classes)) == len(classes)  # nothing ahead leads further
    if is_free and (known := _followed.get(key)) is not None and known.put_into(out):
        return
    out.ahead, n_seen, lengths = frozenset(out.seen), len(out.seen), [*map(len, out.lists)]
    held_ahead, out.held = out.held, {}
    out.met.update({id(cls): cls for cls in classes if id(cls) in out.ahead})
    for cls, path in classes.items():
        if id(cls) not in out.seen:
            out.look_into_class(path, cls)
    walk, visited = Walk(frozenset(files)), dict[int, frozenset[str]]()
    while new := [each for each in _code_in(out, classes) if id(each) not in walk.seen]:
        walk.run(new)
        for known_names, names in walk.found():
            file = known_names["__name__"]
            for name in sorted(names - visited.get(id(known_names), frozenset())):
                value = known_names[name]
                if type(value) not in PLAIN:
                    out.visit(files.get(file, ""), f"{name} of {file}", value, is_named=True)
            visited[id(known_names)] = names
    for known_names, names in walk.found():
        file = known_names["__name__"]
        out.files.append((files.get(file, ""), file, known_names, names))
    held, out.held = out.held, held_ahead | out.held
    _followed.pop(key, None)
    seen = dict(itertools.islice(out.seen.items(), n_seen, None))
    looked = {**seen, **walk.seen, **{id(cls): cls for cls in classes}}
    if is_free and len(out.seen) <= _MOST and not any(map(_has_weights, looked.values())):
        if len(_followed) >= _MOST_FOLLOWED:
            _followed.clear()
        added = [each[n:] for each, n in zip(out.lists, lengths, strict=True)]
        _followed[key] = _Followed(added, seen, out.met, held, [*looked.values()], walk)


def _code_in(out: Reached, classes: Mapping[type, str]) -> list[Any]:
    """The functions that were reached, and the classes; what is of a user's own of those that objects are of.

    The modules' own come last, which are followed first: they have most of the functions.
    """
    seen = [*out.seen.values()]
    kinds = dict.fromkeys(v if isinstance(v, type) else type(v) for v in seen)
    own = (cls for cls in kinds if cls not in classes and is_users(cls.__module__))
    return [*own, *(v for v in seen if isinstance(v, types.FunctionType)), *classes]


def _has_weights(value: Any) -> bool:
    """Whether a value is a tensor or a layer with some: it may be what a user wants to be rid of."""
    if isinstance(value, nn.Module):
        return bool(parameters_in(value) or buffers_in(value))
    return isinstance(value, torch.Tensor)


class _Followed:
    """What classes and files lead to: places ``added``, and what was ``seen`` there for the first time.

    All that was ``looked`` at for it, and what files hold under names that the ``walk`` of code asked for, is
    compared by identity. What was ``met`` there had been seen before; of what is ``held`` there by more than
    names, see :class:`Reached`.
    """

    def __init__(
        self,
        added: Sequence[list[Any]],
        seen: dict[int, Any],
        met: dict[int, Any],
        held: dict[int, Any],
        looked: Sequence[Any],
        walk: Walk,
    ) -> None:
        self._added, self._seen, self._met, self._held_beside = added, seen, met, held
        functions = [f for f in looked if type(f) is types.FunctionType]
        kinds = [cls for cls in looked if isinstance(cls, type) and not is_foreign(cls.__module__)]
        others = (v for v in looked if callable(v) and not isinstance(v, (types.FunctionType, type)))
        holders, _, _, cells, *_, exhaustible = added
        taken = {id(each) for *_, each in exhaustible}
        self._bare = [f for f in functions if not f.__dict__]
        self._things = [
            # what caches and iterators hold is nothing that is followed, and nothing to hold on to
            *(v for v in looked if type(v) is not _CACHED and id(v) not in taken),
            *(holder for *_, holder in holders),
            *(cell for f in functions for cell in f.__closure__ or ()),
            *(f.__dict__ for f in functions if f.__dict__),
            *(held for cls in kinds for held in gc.get_referents(vars(cls))),
            *(held for held in map(attributes, others) if held is not None),
        ]
        self._cells = [cell for *_, cell in cells if not isinstance(cell, ArrayCell)]
        self._locals = [v for v in looked if issubclass(type(v), threading.local)]
        self._files = [
            (known, [*known], [*names], [*map(known.get, names)]) for known, names in walk.names.values()
        ]
        self._imported = [*walk.imported]
        self._held = self._holding()

    def _holding(self) -> list[Any]:
        # each thread has attributes of its own in what is local to it
        elsewhere = *map(attributes, self._locals), *map(sys.modules.get, self._imported)
        return [*gc.get_referents(*self._things), *contents(self._cells), *elsewhere]

    def put_into(self, out: Reached) -> bool:
        """Note the same, where it is still so and what has been seen has as much of it as it had then."""
        has_as_much = self._met.keys() <= out.seen.keys() and out.seen.keys().isdisjoint(self._seen)
        if not has_as_much or not self._is_still():
            return False
        out.seen.update(self._seen)
        out.held.update(self._held_beside)
        for held, more in zip(out.lists, self._added, strict=True):
            held += more
        return True

    def _is_still(self) -> bool:
        if any(map(_own_attributes, self._bare)) or not are_same(self._holding(), self._held):
            return False
        # under a name that a file has not had, code may find something there
        is_as_named = all(are_same([*file], names) for file, names, *_ in self._files)
        return is_as_named and all(
            are_same([*map(file.get, names)], held) for file, _, names, held in self._files
        )


_CACHED = type(functools.lru_cache(lambda: None))
_own_attributes = operator.attrgetter("__dict__")
_followed: dict[tuple[Any, ...], _Followed] = {}
"""By ids of classes and the paths they are reached from; the classes are kept with it."""
_MOST_FOLLOWED = 16


def saved(generator: Any) -> Callable[[], None]:
    """What puts a random generator back in the state it is in now."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return partial(
            setattr, generator.bit_generator, "state", copy.deepcopy(generator.bit_generator.state)
        )
    if isinstance(generator, np.random.BitGenerator):
        return partial(setattr, generator, "state", copy.deepcopy(generator.state))
    if isinstance(generator, np.random.SeedSequence):
        return lambda: None  # it counts what it has spawned, and cannot be put back
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state())
    return partial(generator.set_state, generator.get_state())


def state_of(generator: Any) -> Any:
    """A random generator's state; equal states compare equal."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    if isinstance(generator, (np.random.BitGenerator, np.random.SeedSequence)):
        return str(generator.state)
    if isinstance(generator, np.random.RandomState):
        return str(generator.get_state())
    return generator.get_state().numpy().tobytes()
