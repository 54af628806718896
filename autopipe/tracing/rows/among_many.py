"""From how many rows on calls give something else: code kept whole, and tensors made of sizes alone.

A limit on how many rows there are, or on their places, shows only beyond it. Such calls alone are run on many
rows, each of a few so many times over; running a form on as many as are found is left to ``row_questions``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, device

from ...graph import Dim
from ...units import Size, symbol
from ..calls.call import Call, Depends, Recording, map_calls
from ..calls.describe import call_and_place
from ..calls.functions import plain_name, tensors
from ..calls.perform import run_call
from ..code.own_code import OwnCode
from ..inputs.structure import mapped
from ..state.state import seed
from .backwards import may_be_own
from .code_run import CodeRun
from .held_back import gradient_of, may_hold_back
from .noise import NoDropout, is_drawn
from .results import ALLOWED, ROUNDED, Rows, axes, is_close, run_until
from .thresholds import MOST, exact_numbers

__all__ = ["Met", "RowsMet", "has_own_gradients"]

_logger = logging.getLogger("autopipe")
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_First = tuple[Any, Tensor | None]
"""What a call gives, and the gradients of its first row."""
_FEWER, *_STEPS = 0.25, 2, 4, 8, 16, 32
_FAR = 1 << 13
"""How often each row comes: numbers and tensors made of sizes are asked for by far more rows, too."""
_MOST_BYTES, _MOST_BYTES_NAMED = 1 << 18, 1 << 22
"""What rows given to code take at the most; where it names a number of rows, to come to that."""
_MOST_ROWS = 1 << 12
"""As many code is given at the most."""
_MOST_ELEMENTS = 1 << 18
"""As many has a tensor made of sizes alone at the most."""
_EVEN = frozenset({"add", "getitem", "mul", "neg", "size", "sub"})
"""Functions of numbers that have no limit."""
_READ = frozenset({
    "__len__", "chunk", "count_nonzero", "cumsum", "len", "nbytes", "nelement", "numel", "shape", "size",
    "split", "sum", "tensor_split", "unbind",
})  # fmt: skip
"""Names of what tells how many rows there are, counts them or goes by it."""


@dataclasses.dataclass(slots=True)
class Met:
    """How many rows there are where something first gives others than for few.

    ``near`` are such numbers, for a form to be run on. Where it takes more rows than are run, ``far`` has how
    many still give the same, with what no longer does, in words. ``exact`` has what gives others where there
    are exactly so many, in words.
    """

    near: set[int] = dataclasses.field(default_factory=set)
    far: dict[int, str] = dataclasses.field(default_factory=dict)
    exact: dict[int, str] = dataclasses.field(default_factory=dict)
    alone: list[tuple[str, str]] = dataclasses.field(default_factory=list)


class RowsMet:
    """How many rows there are where some call first gives others than for the ``n`` of a run.

    Calls that may go by their number are run alone on more: as many as code names that ``ran``, for so many
    too, or as is usual.
    """

    def __init__(
        self,
        code: OwnCode,
        form: Recording,
        n: int,
        dim: Dim,
        shapes: _Shapes,
        at: device,
        ran: CodeRun,
    ) -> None:
        self._ran, self._has_alike = ran, False
        self._code, self._form, self._n, self._dim, self._shapes, self._at = code, form, n, dim, shapes, at
        self._symbol = symbol(dim.name)
        by_rows = set[int]()
        for call in form.calls:
            if _is_of_sizes(call) and any(id(c) in by_rows or self._tells(c, call) for c in call.inputs):
                by_rows.add(id(call))
        asked = [c for c in form.calls if id(c) in by_rows or self._is_code(c) or self._names_exactly(c)]
        self._is_any = any(not c.is_size or plain_name(c) not in _EVEN for c in asked)
        self._of_sizes, self._asked = by_rows, {id(c) for c in asked}
        self._needed = self._asked.union(*({id(i) for i in c.inputs} for c in asked))
        self._few: dict[int, Any] = {}
        self._made: dict[tuple[int, float], Any] = {}
        self._most: dict[int, int] = {}
        self._known: list[tuple[int, int]] = []
        self._firsts: list[int] = []
        self._met = Met()

    def keep(self, call: Call, value: Any) -> None:
        """Be shown a call with its value, of a run of which all is asked once it is over."""
        if id(call) in self._needed:
            self._few[id(call)] = value

    @property
    def exact(self) -> list[str]:
        """What is found of exactly so many rows, in words."""
        return [*self._met.exact.values()]

    @property
    def alone(self) -> list[tuple[str, str]]:
        """See :class:`Met`."""
        return self._met.alone

    def of_exactly(self, run: Rows, calls: Collection[Call]) -> str:
        """In words, the first of some calls that gives others of exactly so many rows; of a run on a, b."""
        asked = [c for c in self._form.calls if c in calls and self._names_exactly(c)]
        self._needed = {id(i) for c in asked for i in c.inputs}

        def look(call: Call, value: Any) -> None:
            if not self.may_keep and call in asked:
                self._try(call, self._ask_exactly)
            self.keep(call, value)

        if asked:
            with self._ran:
                run_until(run, "ab", asked[-1], look)
        for call in asked if self.may_keep else ():
            self._try(call, self._ask_exactly)
        return next(iter(self.exact), "")

    @property
    def may_keep(self) -> bool:
        """Whether values are at a run's end what they were: no call writes to what others gave."""
        return not any(c.writes or c.mutated for c in self._form.calls)

    def kept(self, rows: str) -> Met:
        """What is found with the values kept of a run on these rows, each of which has its layer's own."""
        self._firsts = [*map(rows.index, rows)]
        for call in self._form.calls if self._is_any else ():
            self._ask(call, self._few.get(id(call)))
        return self._met

    def found(self, run: Rows, *, has_alike: bool) -> Met:
        """What is found in a run of the form.

        Where that ``has_alike`` layers of which one runs for all, each that is asked runs alone on the few
        rows too.
        """
        half, self._has_alike = self._n // 2, has_alike
        self._firsts = [0] * half + [half] * half

        def look(call: Call, value: Any) -> None:
            self.keep(call, value)
            self._ask(call, value)

        if self._is_any:
            run("a" * half + "b" * half, look)
        return self._met

    def _tells(self, given: Call, call: Call) -> bool:
        """Whether a tensor of the inputs' tells a call made of sizes how many rows there are."""
        sizes = [n for each in self._shapes.get(id(given), ()) for n in each]
        if plain_name(call) == "size" and len(call.args) == 2 and isinstance(call.args[1], int):
            sizes = [self._shapes[id(given)][0][call.args[1]]]
        return any(self._symbol in getattr(n, "free_symbols", ()) for n in sizes)

    def _is_code(self, call: Call) -> bool:
        """Whether a call runs code kept whole that may go by sizes, and leaves nothing behind."""
        if call.is_random or not self._is_own(call):
            return False
        return not _READ.isdisjoint(self._code.names(call)) or max(self._code.numbers(call), default=0) > MOST

    def _names_exactly(self, call: Call) -> bool:
        """Whether such code has any number that it may ask for, also where it may draw, or own gradients."""
        return self._is_own(call) and bool(self._told_numbers(call) or has_own_gradients(self._code, call))

    def _told_numbers(self, call: Call) -> set[int]:
        return exact_numbers(self._code, call, self._ran)

    def _is_own(self, call: Call) -> bool:
        leaves = call.writes or call.mutated or call.keeps or call.has_effect
        return not leaves and self._code.is_own(call)

    def _ask(self, call: Call, value: Any) -> None:
        if id(call) in self._asked:
            self._known = []
            self._try(call, functools.partial(self._ask_of_more, value=value))

    def _try(self, call: Call, ask: Callable[[Call], None]) -> None:
        try:
            ask(call)
        except Exception as error:
            # any Python of the model, on rows that it may not take, or whose axis is not known
            _logger.debug("%s was not run on more rows: %s", call.name, error)

    def _ask_of_more(self, call: Call, value: Any) -> None:
        if id(call) in self._of_sizes:
            self._most[id(call)] = self._most_times(call, value)
            self._compare_number(call, value)
        if self._names_exactly(call):
            self._ask_exactly(call)
        times, before = self._n_times(call) if id(call) in self._of_sizes or self._is_code(call) else 0, 0
        if times and self._has_alike and call.op == "call_module":
            value = self._of_many(call, 1)  # the run has that of another layer
        while times > before:
            with self._ran:
                self._compare_rows(call, value, times)
            before, times = times, self._most_named(call)

    def _ask_exactly(self, call: Call) -> None:
        """Note for how many rows, of those that code may name, the first is another than of two."""
        named = self._told_numbers(call)
        given = [t for c in call.inputs for t in tensors(self._few[id(c)])]
        has_gradients = has_own_gradients(self._code, call)
        if not self._is_new(call, (*sorted(named), has_gradients), given):
            return
        each = sum(t.nbytes for t in given) / self._n or 1
        sizes = {1, *(n for t in given for n in itertools.accumulate(t.shape[1:], operator.mul))}
        near = {n // size + off for n in named for size in sizes if n % size == 0 for off in (-1, 0, 1)}
        n_example = self._dim.example
        near |= {n for n in range(3, n_example + 1) if n_example % n == 0}
        most = min(MOST, max(2 * self._n, _MOST_BYTES_NAMED // each))
        seed(self._at)
        two = self._of_first(call, 2, has_gradients)
        if call.is_random and is_drawn(self._at):
            return

        def ask(call: Call, n: int) -> None:
            made = self._of_first(call, n, has_gradients)
            if self._is_same(call, two, made if n > 1 else (two[0], made[1])):
                return
            if self._is_same(call, two, self._of_first(call, 2, has_gradients)):  # else it draws by itself
                self._note(call, n, n)

        for n in sorted(n for n in near if 2 < n <= most):
            self._try(call, functools.partial(ask, n=n))
        if has_gradients:
            self._try(call, functools.partial(ask, n=1))

    def _is_same(self, call: Call, two: _First, made: _First) -> bool:
        """Whether the rows of what a call gives are all the first of ``two``, and the gradients are these."""
        pairs = enumerate(zip(tensors(two[0]), tensors(made[0]), strict=True))
        each = ((of, t, axis) for i, (of, t) in pairs for axis in axes(call, i, self._dim, self._shapes))
        is_same = not any(_others(t, of.narrow(axis, 0, 1).expand_as(t), axis) for of, t, axis in each)
        (a, b) = two[1], made[1]
        return is_same and (a is None or b is None or is_close(a, b, ALLOWED))

    def _of_first(self, call: Call, n: int, has_gradients: bool) -> _First:
        """What a call gives for the first row, so many times; where asked for, the gradients of that.

        These are of what it is given, and of its weights.
        """
        given: list[Tensor] = []

        def grown(of: Call) -> Any:
            if id(of) in self._of_sizes:
                return self._of_many(of, n / self._n)
            value = self._few[id(of)]
            places = {id(t): axes(of, i, self._dim, self._shapes) for i, t in enumerate(tensors(value))}

            def repeated(leaf: Any) -> Any:
                if id(leaf) not in places:
                    return leaf
                own = places[id(leaf)]
                for axis in own:
                    leaf = leaf.narrow(axis, 0, 1)
                if has_gradients and leaf.is_floating_point():
                    leaf = leaf.detach().requires_grad_()
                    given.append(leaf)
                for axis in own:
                    leaf = leaf.repeat_interleave(n, axis)
                return leaf

            return mapped(repeated, value)

        with torch.set_grad_enabled(has_gradients), NoDropout() if call.is_random else nullcontext():
            args, kwargs = map_calls(call.args, grown), map_calls(call.kwargs, grown)
            made = run_call(self._code.model, self._form.constants, call, args, kwargs, {}, self._at)
        if not has_gradients:
            return made, None
        is_module = call.op == "call_module"
        module = self._code.model.get_submodule(call.target) if is_module else None
        weights = [*given, *(p for p in module.parameters() if p.requires_grad)] if module else given
        along = [(t, axes(call, i, self._dim, self._shapes)) for i, t in enumerate(tensors(made))]
        return made, gradient_of([each for each in along if each[1]], weights, (0,))

    def _compare_number(self, call: Call, value: Any) -> None:
        """Note from where on a number is another that is the same for few and for fewer rows."""
        if (isinstance(value, Tensor) and not value.ndim) or isinstance(value, (int, float)):
            same = 1
            steps = [t for t in (*_STEPS, _FAR) if t <= self._most[id(call)]]
            for times in steps if self._of_many(call, _FEWER) == value else ():
                if self._of_many(call, times) != value:
                    self._note(call, self._n * same, self._n * times)
                    return
                same = times

    def _compare_rows(self, call: Call, value: Any, times: int) -> None:
        for i in range(len(tensors(value))):
            for axis in axes(call, i, self._dim, self._shapes):
                self._compare(call, value, i, axis, times)

    def _n_times(self, call: Call) -> int:
        """As often as rows may come for a call; 0 where what it is given is too large, or was seen alike."""
        if id(call) in self._of_sizes:
            return self._most[id(call)] if isinstance(self._few[id(call)], Tensor) else 0
        times = self._most_named(call)
        given = [t for c in call.inputs for t in tensors(self._few[id(c)])]
        return times if self._is_new(call, times, given) else 0

    def _is_new(self, call: Call, asked: Any, given: Sequence[Tensor]) -> bool:
        """Whether no call like this one was ``asked`` so yet; else what was found of that is told of it."""
        known = self._code.met
        kind = (
            frozenset(f.__code__ for f, _ in self._code.functions(call)),
            self._code.numbers(call),
            self._code.model.training,
            str(map_calls((call.args, call.kwargs), lambda c: None)),
            asked,
            *((t.shape, t.dtype) for t in given),
        )
        if kind not in known:
            self._known = known[kind] = []
            return True
        for same, other in known[kind]:
            self._tell(call, same, other)
        return False

    def _most_named(self, call: Call) -> int:
        """As often as rows may come for code to come to the numbers that it names, or as is usual.

        One that takes more rows than may be given is come to by their places: rows times other sizes.
        """
        if id(call) in self._of_sizes:
            return 0
        given = [t for c in call.inputs for t in tensors(self._few[id(c)])]
        n_bytes = sum(t.nbytes for t in given) or 1
        usual = max((times for times in _STEPS if times * n_bytes <= _MOST_BYTES), default=0)
        most = min((self._most[id(c)] for c in call.inputs if id(c) in self._of_sizes), default=_FAR)
        most_named = min(most, _MOST_ROWS // self._n + 1, _MOST_BYTES_NAMED // n_bytes)
        sizes = {self._n, *(n for t in given for n in itertools.accumulate(t.shape, operator.mul))}
        numbers = self._code.numbers(call, self._ran.may_run)
        named = (n // size + 1 for n in numbers for size in sizes if size >= self._n)
        return max(min(most, usual), max((times for times in named if times <= most_named), default=0))

    def _most_times(self, call: Call, value: Any) -> int:
        """As often as rows may come for something made of sizes, and for what that is made of."""
        made = zip(tensors(value), self._shapes.get(id(call), ()), strict=False)
        grown = [(tensor.numel(), len(self._along(sizes))) for tensor, sizes in made]
        most = min((self._most[id(c)] for c in call.inputs if id(c) in self._of_sizes), default=_FAR)
        fits = (t for t in (*_STEPS, _FAR) if all(n * t**k <= _MOST_ELEMENTS for n, k in grown))
        return min(most, max(fits, default=0))

    def _of_many(self, call: Call, times: float) -> Any:
        def grown(given: Call) -> Any:
            if id(given) in self._of_sizes:
                return self._of_many(given, times)
            value = self._few[id(given)]
            made = enumerate(tensors(value))
            each = {id(t): self._grown(given, i, t, times, call) for i, t in made}
            return mapped(lambda leaf: each.get(id(leaf), leaf), value)

        if (id(call), times) not in self._made:
            args, kwargs = map_calls(call.args, grown), map_calls(call.kwargs, grown)
            made = run_call(self._code.model, self._form.constants, call, args, kwargs, {}, self._at)
            if id(call) not in self._of_sizes:
                return made
            self._made[id(call), times] = made
        return self._made[id(call), times]

    def _along(self, sizes: Iterable[Size]) -> list[int]:
        return [a for a, n in enumerate(sizes) if self._symbol in getattr(n, "free_symbols", ())]

    def _grown(self, given: Call, i: int, tensor: Tensor, times: float, call: Call) -> Tensor:
        """A tensor with each row so many times; sizes alone of it are asked for on the meta device."""
        along = self._along(self._shapes[id(given)][i])
        if not along:
            return tensor
        if along != axes(given, i, self._dim, self._shapes) or len(along) > 1:
            raise ValueError("rows lie along no axis of their own")
        if call.is_size:
            shape = [int(n * times) if a in along else n for a, n in enumerate(tensor.shape)]
            return tensor.new_empty(shape, device="meta")
        return tensor.repeat_interleave(int(times), along[0])

    def _compare(self, call: Call, value: Any, i: int, axis: int, times: int) -> None:
        """Note the first row that is another, where the few are the same in any place."""
        few = tensors(value)[i]
        first = torch.tensor(self._firsts, device=few.device)

        def others(times: int) -> list[int]:
            many = tensors(self._of_many(call, times))[i]
            there = few.index_select(axis, first).repeat_interleave(times, axis)
            return _others(many, there, axis) if many.shape == there.shape else []

        if _others(few, few.index_select(axis, first), axis) or not (found := others(times)):
            return
        if found[0] >= self._n:
            self._note(call, found[0], found[0] + 1)
            return
        same = 1
        while times - same > 1:
            between = (same + times) // 2
            same, times = (same, between) if others(between) else (between, times)
        self._note(call, self._n * same, self._n * times)

    def _note(self, call: Call, same: int, other: int) -> None:
        """A call gives for ``other`` rows what it does not for as many as the ``same`` and fewer.

        Where both are one number, for so many alone.
        """
        self._known.append((same, other))
        self._tell(call, same, other)

    def _tell(self, call: Call, same: int, other: int) -> None:
        if other == same == 1:
            self._met.alone.append(
                (call.name, f"{call_and_place(call)}, whose gradients are others of one row")
            )
        elif other == same:
            self._met.exact.setdefault(
                other, f"{call_and_place(call)}, whose rows are others where they are {other}"
            )
        elif other <= MOST:
            self._met.near.add(other)
        else:
            self._met.far.setdefault(max(same, self._n), call_and_place(call))


def has_own_gradients(code: OwnCode, call: Call) -> bool:
    """Whether what a call gives does not tell its gradients."""
    return may_hold_back(code, call) or may_be_own(code, call)


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
