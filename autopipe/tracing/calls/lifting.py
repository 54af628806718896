"""Functions that hold tensors or modules in their closures, as functions that take those as arguments.

When a call must be lifted is left to ``recorder``.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from ..inputs.contents import is_filled, plainly
from .named import Named, held_by

__all__ = ["Closure", "Mapped", "Transform", "bound", "lift"]

Rebuild = Callable[[Sequence[Any]], Any]


def lift(func: Any, wanted: Callable[[Any], bool]) -> tuple[list[Any], Rebuild]:
    """The wanted tensors and modules in a function's closure, and what makes the function anew from others.

    Closures of closures, bound methods, defaults and ``functools.partial`` are looked into.
    """
    found: list[Any] = []
    return found, _lift(func, wanted, found, frozenset())


def bound(func: Any) -> types.FunctionType | None:
    """A function around what the variables of its closure hold now, whatever a loop sets them to later.

    None for what has no closure, or one that is not filled yet, and for code that sets those variables.

    >>> made = [bound(lambda: n) for n in range(2)]
    >>> [function() for function in made]
    [0, 1]
    """
    if not isinstance(func, types.FunctionType) or not func.__closure__:
        return None
    if not all(map(is_filled, func.__closure__)) or _sets(func.__code__, func.__code__.co_freevars):
        return None
    new = types.FunctionType(
        func.__code__,
        func.__globals__,
        func.__name__,
        func.__defaults__,
        tuple(types.CellType(c.cell_contents) for c in func.__closure__),
    )
    new.__kwdefaults__ = func.__kwdefaults__
    return new


def _sets(code: types.CodeType, names: Collection[str]) -> bool:
    """Whether code, or code within it, sets one of these variables of the code around it."""
    inside = (c for c in code.co_consts if isinstance(c, types.CodeType))
    stores = (i for i in dis.get_instructions(code) if i.opname in ("STORE_DEREF", "DELETE_DEREF"))
    return any(i.argval in names for i in stores) or any(_sets(c, names) for c in inside)


def _lift(value: Any, wanted: Callable[[Any], bool], found: list[Any], within: frozenset[int]) -> Rebuild:
    """A function from what was lifted to the value made anew, or the value itself where nothing was.

    ``within`` are ids of the functions it lies in, which may refer to themselves.
    """
    if isinstance(value, (torch.Tensor, nn.Module)):
        if not wanted(value):
            return lambda given: value
        index = len(found)
        found.append(value)
        return lambda given: given[index]
    before = len(found)
    make = _maker(value, wanted, found, within)
    return make if make is not None and len(found) > before else lambda given: value


def _maker(
    value: Any, wanted: Callable[[Any], bool], found: list[Any], within: frozenset[int]
) -> Rebuild | None:
    """What makes a container or function of its parts; None for anything else."""

    def lifted(part: Any) -> Rebuild:
        return _lift(part, wanted, found, within)

    if isinstance(value, functools.partial):
        func, args, named = lifted(value.func), lifted(value.args), lifted(value.keywords)
        return lambda given: functools.partial(func(given), *args(given), **named(given))
    if type(value) in (tuple, list):
        items = [lifted(v) for v in value]
        return lambda given: type(value)(i(given) for i in items)
    if type(value) is dict:
        entries = {k: lifted(v) for k, v in value.items()}
        return lambda given: {k: v(given) for k, v in entries.items()}
    if isinstance(value, types.MethodType):
        owner = lifted(value.__self__)
        return lambda given: types.MethodType(value.__func__, owner(given))
    if isinstance(value, types.FunctionType) and id(value) not in within:
        return _function_maker(value, wanted, found, within | {id(value)})
    return None


def _function_maker(
    func: types.FunctionType, wanted: Callable[[Any], bool], found: list[Any], within: frozenset[int]
) -> Rebuild | None:
    held = func.__closure__ or ()
    if not all(map(is_filled, held)):
        return None
    cells = [_lift(c.cell_contents, wanted, found, within) for c in held]
    defaults = [_lift(d, wanted, found, within) for d in func.__defaults__ or ()]

    def make(given: Sequence[Any]) -> Callable[..., Any]:
        closure = tuple(types.CellType(c(given)) for c in cells)
        default = tuple(d(given) for d in defaults) or None
        new = types.FunctionType(func.__code__, func.__globals__, func.__name__, default, closure)
        new.__kwdefaults__ = func.__kwdefaults__
        return new

    return make


class Closure(Named):
    """Makes a function anew around other tensors and modules than those it was made around."""

    def __init__(self, function: Callable[..., Any], rebuild: Rebuild, n_lifted: int) -> None:
        name = getattr(function, "__name__", type(function).__name__)
        super().__init__(function, f"around_{name}")
        self.rebuild, self.n_lifted = rebuild, n_lifted

    def __call__(self, *lifted: Any) -> Any:
        return self.rebuild(lifted)

    @property
    def holds(self) -> Any:
        return plainly(self.function)


class Transform(Named):
    """A transform of a function, such as ``vmap``: takes the function, then arguments.

    ``how`` is what the transform takes between the two, as vmap's (in_dims, out_dims, randomness,
    chunk_size).
    """

    def __init__(self, transform: Callable[..., Any], how: tuple[Any, ...], name: str) -> None:
        home = "torch." if name == "vmap" else "torch.func." * hasattr(torch.func, name)
        super().__init__(transform, name, f"{home}{name}")
        self.how = how

    @property
    def holds(self) -> Any:
        return plainly(self.how)

    def __call__(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.function(func, *self.how, *args, **kwargs)


class Mapped(Named):
    """A transform of a function around what was lifted from its closure: takes that, then arguments."""

    def __init__(
        self, transform: Transform, inner: Callable[..., Any], rebuild: Rebuild, n_lifted: int
    ) -> None:
        super().__init__(transform, transform.__name__, transform.shown)
        self.inner, self.rebuild, self.n_lifted = inner, rebuild, n_lifted

    @property
    def holds(self) -> Any:
        return held_by(self.function), plainly(self.inner)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.rebuild(args[: self.n_lifted]), *args[self.n_lifted :], **kwargs)
