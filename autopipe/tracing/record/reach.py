"""What a model's code may change beside its attributes: objects in them, closures, generators, globals.

Putting it back and telling what changed is left to ``state``.
"""

from __future__ import annotations

import collections
import copy
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["HOOKS", "Reached", "reached"]

_MOST, _DEEPEST = 20_000, 6
_PLAIN = frozenset(
    {int, float, str, bool, type(None), complex, bytes, torch.dtype, torch.device, torch.Size, type,
     types.BuiltinFunctionType, types.ModuleType, types.MethodWrapperType, slice, range, np.ndarray}
)  # fmt: skip
_FOREIGN = ("torch", "numpy", "builtins", "typing", "collections", "abc", "logging", "threading")
_ASKS_FOR_ALL = frozenset({"globals", "eval", "exec", "vars", "locals"})
_REGISTRIES = frozenset(vars(nn.Module()))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Reached:
    """Places that hold what code may replace, by the path of the module they belong to and a name to show.

    ``holders`` are mutable containers, ``files`` the globals of source files with those of them that the
    model's code names, ``classes`` classes, ``cells`` closures, ``tensors`` those found
    outside of parameters and buffers, ``generators`` random ones of the model's own, ``exhaustible`` what
    can be read only once.
    """

    def __init__(self) -> None:
        self.holders: list[tuple[str, str, Any]] = []
        self.files: list[tuple[str, str, dict[str, Any], frozenset[str]]] = []
        self.classes: list[tuple[str, str, type]] = []
        self.cells: list[tuple[str, str, types.CellType]] = []
        self.tensors: list[tuple[str, str, torch.Tensor]] = []
        self.generators: list[tuple[str, str, Any]] = []
        self.exhaustible: list[tuple[str, str, Any]] = []
        self.seen: dict[int, Any] = {}

    def visit(self, path: str, name: str, value: Any, depth: int = 0) -> None:
        """Note ``value`` and what it holds."""
        cls = type(value)
        if cls in _PLAIN or id(value) in self.seen or depth > _DEEPEST or len(self.seen) > _MOST:
            return
        self.seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            self.tensors.append((path, name, value))
        elif isinstance(value, (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)):
            self.generators.append((path, name, value))
        elif isinstance(value, (nn.Module, type, torch.jit.ScriptFunction)) or _is_namespace(value):
            return
        else:
            self._look_into(path, name, value, depth + 1)

    def _look_into(self, path: str, name: str, value: Any, depth: int) -> None:
        if isinstance(value, (dict, list, set, collections.deque)):
            self.holders.append((path, name, value))
        elif hasattr(type(value), "__next__") and not hasattr(value, "__dict__"):
            self.exhaustible.append((path, name, value))
            return
        for shown, inner in self._inside(path, name, value):
            if type(inner) not in _PLAIN:
                self.visit(path, shown, inner, depth)

    def _inside(self, path: str, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """What an object holds, each under a name."""
        if isinstance(value, dict):
            yield from ((f"{name}[{k!r}]", v) for k, v in list(value.items()))
        elif isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            yield from ((f"{name}[{i}]", v) for i, v in enumerate(value))
        elif isinstance(value, types.FunctionType):
            for key, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                self.cells.append((path, f"{key} in {name}", cell))
                yield f"{key} in {name}", _content(cell)
        elif isinstance(value, types.MethodType):
            yield name, value.__self__
        elif isinstance(value, partial):
            yield name, (value.func, value.args, value.keywords)
        elif not type(value).__module__.startswith(_FOREIGN) and hasattr(value, "__dict__"):
            self.holders.append((path, name, vars(value)))
            yield from ((f"{name}.{k}", v) for k, v in list(vars(value).items()))


def _is_namespace(value: Any) -> bool:
    """Whether a dict holds the names of a module, Python's own among them: not to be emptied, ever."""
    name = value.get("__name__") if isinstance(value, dict) else None
    return isinstance(name, str) and vars(sys.modules.get(name, types)) is value


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def reached(model: nn.Module) -> Reached:
    """Everything that is reached from the attributes of a model's modules, their classes and their files."""
    out = Reached()
    files: dict[str, str] = {}
    classes: dict[type, str] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if type(value) not in _PLAIN and name not in _REGISTRIES:
                out.visit(path, f"{path}.{name}".lstrip("."), value)
        for hook in (h for kind in HOOKS for h in vars(module).get(kind, {}).values()):
            out.visit(path, f"a hook of {path or type(module).__name__}", hook)
        for cls in type(module).__mro__:
            if cls not in classes and not cls.__module__.startswith(_FOREIGN):
                classes[cls] = path
                files.setdefault(cls.__module__, path)
    for cls, path in classes.items():
        out.classes.append((path, cls.__qualname__, cls))
        for name, value in vars(cls).items():
            if not name.startswith("__") and not callable(value):
                out.visit(path, f"{cls.__qualname__}.{name}", value)
    for file, path in files.items():
        known = vars(sys.modules[file]) if file in sys.modules else {}
        own = [c for c in classes if c.__module__ == file]
        names = _named([*own, *(f for f in out.seen.values() if isinstance(f, types.FunctionType))], known)
        out.files.append((path, file, known, names))
        for name in sorted(names):
            if not callable(known[name]):
                out.visit(path, f"{name} of {file}", known[name])
    return out


def _named(start: Iterable[Any], known: dict[str, Any]) -> frozenset[str]:
    """The globals in ``known`` that the code of these classes and functions names, or what it calls there.

    What else a file has, such as the losses that a training script gathers, is none of the model's.
    """
    names: set[str] = set()
    seen: set[int] = set()
    waiting = list(start)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, types.CodeType):
            asked = _names_in(thing)
            new = (known.keys() if _ASKS_FOR_ALL & asked else known.keys() & asked) - names
            names |= new
            waiting += [known[n] for n in new]
        else:
            waiting += _code_of(thing, known)
    return frozenset(n for n in names if not n.startswith("__"))


@lru_cache(maxsize=1 << 14)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """The names that code asks for, functions within it included."""
    inner = (_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return frozenset(n for n in code.co_names if not n.startswith("__")).union(*inner)


def _code_of(thing: Any, known: dict[str, Any]) -> list[Any]:
    """What holds the code of something callable, as far as it may be of the file with these globals."""
    if isinstance(thing, types.FunctionType):
        inner = [_content(cell) for cell in thing.__closure__ or ()]
        return [*inner, thing.__code__] if thing.__globals__ is known else inner
    if isinstance(thing, type):
        is_of_file = thing.__module__ == known.get("__name__")
        return [*vars(thing).values(), *thing.__bases__] if is_of_file else []
    if isinstance(thing, (staticmethod, classmethod, types.MethodType)):
        return [thing.__func__]
    if isinstance(thing, property):
        return [thing.fget, thing.fset, thing.fdel]
    if isinstance(thing, (partial, cached_property)):
        return [thing.func]
    return [getattr(thing, "__wrapped__", None)] if callable(thing) else []


def saved(generator: Any) -> Callable[[], None]:
    """What puts a random generator back in the state it is in now."""
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    if isinstance(generator, np.random.Generator):
        return partial(
            setattr, generator.bit_generator, "state", copy.deepcopy(generator.bit_generator.state)
        )
    if isinstance(generator, np.random.RandomState):
        return partial(generator.set_state, generator.get_state())
    return partial(generator.set_state, generator.get_state())


def state_of(generator: Any) -> Any:
    """A random generator's state; equal states compare equal."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return str(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return str(generator.get_state())
    return generator.get_state().numpy().tobytes()
