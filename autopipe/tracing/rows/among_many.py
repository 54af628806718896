"""From how many rows on calls give something else: code kept whole, and tensors made of sizes alone.

A limit on how many rows there are, or on their places, shows only beyond it. Such calls alone are run on many
rows, each of a few so many times over; running a form on as many as are found is left to ``row_questions``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, device

from ...graph import Dim
from ...units import Size, symbol
from ..calls.call import Call, Depends, Recording, map_calls
from ..calls.functions import plain_name, tensors
from ..calls.perform import run_call
from ..code.own_code import OwnCode
from ..inputs.structure import mapped
from .results import ROUNDED, Rows, axes

__all__ = ["rows_met"]

_logger = logging.getLogger("autopipe")
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_FEWER, *_STEPS = 0.25, 2, 4, 8, 16, 32
"""How often each row comes; a call gets as many as take no more than the bytes below."""
_MOST_BYTES = 1 << 18
_EVEN = frozenset({"add", "getitem", "mul", "neg", "size", "sub"})
"""Functions of numbers that have no limit."""
_READ = frozenset({"len", "shape", "size", "numel", "__len__"})
"""Names of what tells how many rows there are."""


def rows_met(
    code: OwnCode, form: Recording, run: Rows, n: int, dim: Dim, shapes: _Shapes, at: device
) -> set[int]:
    """How many rows there are where such a call first gives others than for ``n``; ``run`` runs the form."""
    look = _Look(code, form, n, dim, shapes, at)
    if look.is_any:
        run("a" * (n // 2) + "b" * (n // 2), look)
    return look.found


class _Look:
    """Shown each call of a run on ``n`` rows, runs those that may go by their number on more."""

    def __init__(self, code: OwnCode, form: Recording, n: int, dim: Dim, shapes: _Shapes, at: device) -> None:
        self._code, self._form, self._n, self._dim, self._shapes, self._at = code, form, n, dim, shapes, at
        self._symbol = symbol(dim.name)
        by_rows = set[int]()
        for call in form.calls:
            if _is_of_sizes(call) and any(id(c) in by_rows or self._tells(c, call) for c in call.inputs):
                by_rows.add(id(call))
        asked = [c for c in form.calls if id(c) in by_rows or self._is_code(c)]
        self.is_any = any(not c.is_size or plain_name(c) not in _EVEN for c in asked)
        self._of_sizes, self._asked = by_rows, {id(c) for c in asked}
        self._needed = self._asked.union(*({id(i) for i in c.inputs} for c in asked))
        self._few: dict[int, Any] = {}
        self._made: dict[float, dict[int, Any]] = {times: {} for times in (_FEWER, *_STEPS)}
        self.found: set[int] = set()

    def _tells(self, given: Call, call: Call) -> bool:
        """Whether a tensor of the inputs' tells a call made of sizes how many rows there are."""
        sizes = [n for each in self._shapes.get(id(given), ()) for n in each]
        if plain_name(call) == "size" and len(call.args) == 2 and isinstance(call.args[1], int):
            sizes = [self._shapes[id(given)][0][call.args[1]]]
        return any(self._symbol in getattr(n, "free_symbols", ()) for n in sizes)

    def _is_code(self, call: Call) -> bool:
        """Whether a call runs code kept whole that asks for sizes, and leaves nothing behind."""
        leaves = call.is_random or call.writes or call.mutated or call.keeps or call.has_effect
        return self._code.is_own(call) and not leaves and not _READ.isdisjoint(self._code.names(call))

    def __call__(self, call: Call, value: Any) -> None:
        if id(call) in self._needed:
            self._few[id(call)] = value
        if id(call) not in self._asked:
            return
        try:
            if id(call) in self._of_sizes:
                for times, made in self._made.items():
                    made[id(call)] = self._of_many(call, times)
                self._compare_number(call, value)
            if times := self._n_times(call):
                self._compare_rows(call, value, times)
        except Exception as error:
            # any Python of the model, on rows that it may not take, or whose axis is not known
            _logger.debug("%s was not run on more rows: %s", call.name, error)

    def _compare_number(self, call: Call, value: Any) -> None:
        """Note from where on a number is another that is the same for few and for fewer rows."""
        if (isinstance(value, Tensor) and not value.ndim) or isinstance(value, (int, float)):
            fewer, *more = (made[id(call)] for made in self._made.values())
            if fewer == value and (others := [t for t, n in zip(_STEPS, more, strict=True) if n != value]):
                self.found.add(self._n * others[0])

    def _compare_rows(self, call: Call, value: Any, times: int) -> None:
        pairs = zip(tensors(value), tensors(self._of_many(call, times)), strict=True)
        for i, (few, many) in enumerate(pairs):
            for axis in axes(call, i, self._dim, self._shapes):
                self._compare(few, many, axis, times)

    def _n_times(self, call: Call) -> int:
        """As often as rows may come for a call; 0 where what it is given is too large."""
        if id(call) in self._of_sizes:
            return _STEPS[-1]
        n_bytes = sum(t.nbytes for c in call.inputs for t in tensors(self._few[id(c)]))
        return max((times for times in _STEPS if times * n_bytes <= _MOST_BYTES), default=0)

    def _of_many(self, call: Call, times: float) -> Any:
        def grown(given: Call) -> Any:
            if id(given) in self._of_sizes:
                return self._made[times][id(given)]
            value = self._few[id(given)]
            made = enumerate(tensors(value))
            each = {id(t): self._grown(given, i, t, times, call) for i, t in made}
            return mapped(lambda leaf: each.get(id(leaf), leaf), value)

        args, kwargs = map_calls(call.args, grown), map_calls(call.kwargs, grown)
        return run_call(self._code.model, self._form.constants, call, args, kwargs, {}, self._at)

    def _grown(self, given: Call, i: int, tensor: Tensor, times: float, call: Call) -> Tensor:
        """A tensor with each row so many times; sizes alone of it are asked for on the meta device."""
        sizes = self._shapes[id(given)][i]
        along = [a for a, n in enumerate(sizes) if self._symbol in getattr(n, "free_symbols", ())]
        if not along:
            return tensor
        if along != axes(given, i, self._dim, self._shapes) or len(along) > 1:
            raise ValueError("rows lie along no axis of their own")
        if call.is_size:
            shape = [int(n * times) if a in along else n for a, n in enumerate(tensor.shape)]
            return tensor.new_empty(shape, device="meta")
        return tensor.repeat_interleave(int(times), along[0])

    def _compare(self, few: Tensor, many: Tensor, axis: int, times: int) -> None:
        """Note the first row that is another, where the few are the same in any place."""
        half = self._n // 2
        first = torch.tensor([0] * half + [half] * half, device=few.device)
        there = few.index_select(axis, first).repeat_interleave(times, axis)
        if many.shape != there.shape or _others(few, few.index_select(axis, first), axis):
            return
        if others := _others(many, there, axis):
            self.found.add(others[0] + 1 if others[0] >= self._n else self._n * times)


def _is_of_sizes(call: Call) -> bool:
    """Whether a call makes something of sizes alone."""
    is_made = call.op in ("call_function", "call_method") and not call.writes
    unknown = Depends.INPUT | Depends.RANDOM | Depends.DATA
    return is_made and bool(call.depends & Depends.SHAPE) and not call.depends & unknown


def _others(x: Tensor, y: Tensor, axis: int) -> list[int]:
    """The places along an axis at which tensors differ, by more than rounding."""
    if not x.numel() or torch.equal(x, y):
        return []
    x, y = (t.to(torch.complex128 if t.is_complex() else torch.float64).nan_to_num() for t in (x, y))
    apart = (x - y).abs() > ROUNDED[torch.float32] * y.abs().max()
    return apart.movedim(axis, 0).reshape(apart.shape[axis], -1).any(1).nonzero().flatten().tolist()
