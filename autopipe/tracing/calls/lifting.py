"""Functions that hold tensors in their closures, as functions that take those tensors as arguments.

When a call must be lifted is left to ``recorder``.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .functions import Named

__all__ = ["Mapped", "lift"]

Rebuild = Callable[[Sequence[torch.Tensor]], Any]


def lift(func: Any, wanted: Callable[[torch.Tensor], bool]) -> tuple[list[torch.Tensor], Rebuild]:
    """The wanted tensors in a function's closure, and what makes the function anew from others.

    Closures of closures and ``functools.partial`` are looked into.
    """
    found: list[torch.Tensor] = []
    place = _lift(func, wanted, found)
    return found, place


def _lift(value: Any, wanted: Callable[[torch.Tensor], bool], found: list[torch.Tensor]) -> Rebuild:
    """A function from the lifted tensors to the value made anew; it ignores them where nothing was lifted."""
    if isinstance(value, torch.Tensor) and wanted(value):
        index = len(found)
        found.append(value)
        return lambda tensors: tensors[index]
    if isinstance(value, functools.partial):
        func = _lift(value.func, wanted, found)
        args = [_lift(a, wanted, found) for a in value.args]
        named = {k: _lift(v, wanted, found) for k, v in value.keywords.items()}
        return lambda ts: functools.partial(
            func(ts), *(a(ts) for a in args), **{k: v(ts) for k, v in named.items()}
        )
    if isinstance(value, (tuple, list)):
        items = [_lift(v, wanted, found) for v in value]
        return lambda ts: type(value)(i(ts) for i in items)
    if isinstance(value, types.FunctionType) and value.__closure__:
        return _lift_function(value, wanted, found)
    return lambda ts: value


def _lift_function(
    func: types.FunctionType, wanted: Callable[[torch.Tensor], bool], found: list[torch.Tensor]
) -> Rebuild:
    before = len(found)
    cells = [_lift(c.cell_contents, wanted, found) for c in func.__closure__ or () if _is_filled(c)]
    if len(found) == before or len(cells) != len(func.__closure__ or ()):
        return lambda ts: func

    def make(tensors: Sequence[torch.Tensor]) -> Callable[..., Any]:
        closure = tuple(types.CellType(c(tensors)) for c in cells)
        new = types.FunctionType(func.__code__, func.__globals__, func.__name__, func.__defaults__, closure)
        new.__kwdefaults__ = func.__kwdefaults__
        return new

    return make


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


class Mapped(Named):
    """``vmap`` of a function: takes the tensors lifted from its closure, then the mapped arguments.

    ``how`` is (in_dims, out_dims, randomness, chunk_size).
    """

    def __init__(
        self, vmap: Callable[..., Any], rebuild: Rebuild, n_lifted: int, how: tuple[Any, ...]
    ) -> None:
        super().__init__(vmap, "vmap", "torch.vmap")
        self.rebuild, self.n_lifted, self.how = rebuild, n_lifted, how

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        func = self.rebuild(args[: self.n_lifted])
        return self.function(func, *self.how, *args[self.n_lifted :], **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapped) and (self.n_lifted, self.how) == (other.n_lifted, other.how)

    def __hash__(self) -> int:
        return hash((self.n_lifted, type(self)))
