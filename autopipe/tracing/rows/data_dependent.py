"""Which code of a form depends on the data in tensors, and other data on which it may go another way.

Asking there whether rows are mixed is left to ``mixing``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...graph import Dim
from ...torch_private import HiddenMode
from ..calls.call import Call, Depends, Recording
from ..calls.faults import of_models
from ..calls.functions import classify, kind_of_name, plain_name, selects_by_mask, tensors
from ..calls.named import is_code, is_users_operator
from ..code.leaves import asking, is_atomic
from ..inputs.contents import is_whole
from ..members import submodule
from . import unseen_reads
from .alike_layers import AlikeLayers, deed
from .code_run import CodeRun
from .inner_numbers import FAR, LINEAR, Numbers, in_place_of
from .results import Rows, is_floating, is_number
from .tables import PICKS, are_alike, are_by_number, held_tables, picked
from .thresholds import CUTS, places_beyond
from .varied_data import made_of_rows

__all__ = [
    "Change",
    "Reading",
    "Turn",
    "Turned",
    "Watch",
    "alike",
    "deciding",
    "numbers_apart",
    "reading",
    "reads_noted",
    "rows_times",
    "scales",
    "turns_of",
]

Change = Callable[[str, Call, Any], Any]
"""(rows, call, value) → what takes the value's place for rows such as ``"abb"``, or None."""

_FACTORS = (64.0, -64.0, 1 / 64)
"""What floating-point values are taken times, so that code which compares them may find otherwise."""
_APART = (64.0, 1.0), (-64.0, 1.0)
_EITHER_SIDE = (64.0, 1 / 64), (4.0, 1 / 4)
"""What rows a and b are taken times, for one to be beyond a limit and the other far below it, or near."""
_RANKING = frozenset({"argsort", "bincount", "cumsum", "sort", "topk"})
"""Functions by which code finds how many there are of a kind, and which come first."""
_SIZES = frozenset({"device", "dim", "dtype", "ndim", "numel", "requires_grad", "shape", "size"})
"""What gives no tensor, and goes by none's data."""
_MISSING = frozenset({
    "isfinite", "isnan", "nan_to_num", "nan_to_num_", "nanmean", "nanmedian", "nanquantile", "nansum"
})  # fmt: skip
"""Functions by which code leaves out what is no number: values that a batch lacks."""

_OF_C = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)
"""Functions that call no code of a model's, unless they are given it."""

_Place = tuple[types.CodeType, int]
"""Code, and a line of its file."""
Turn = tuple[_Place, int]
"""Where code asks whether something is so, and how many of the first answers are turned there."""
_TRUTHS = frozenset({"__bool__", "is_nonzero", "equal", "allclose"})
_MOST_TRUTHS = 8
_TORCH = f"{pathlib.Path(torch.__file__).parent}{os.sep}"
_OWN = f"{pathlib.Path(__file__).parents[2]}{os.sep}"
_LOOKING = frozenset({__file__, unseen_reads.__file__})
"""The files of what code's own calls come through while it is looked at."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reading:
    """What a form goes by: ``given`` are ids of calls whose values code that stays whole takes, reading some,
    or making something of all rows that may have a limit.

    ``reads`` says whether it reads any, ``ranks`` whether anything counts or orders what tensors hold,
    ``skips`` whether it leaves out what is no number; ``truths`` are the places where such code asks whether
    something is so: the first time, or each where it asks more often by what rows hold, as in a loop over the
    experts that they hit.
    """

    given: frozenset[int] = frozenset()
    reads: bool = False
    ranks: bool = False
    skips: bool = False
    truths: tuple[Turn, ...] = ()


class Watch:
    """One run of a form on so many rows, a and b, that is looked at: what code reads.

    Attributes
    ----------
    noted: what its code was seen to ask of tensors; None before it has run. found: ids of calls as in
        :class:`Reading`; reads: as there. may_bend: see :class:`Numbers`; True before it has run. ran: what
        code ran. alike: which layers did the same. keep: is shown each call with its value, too.
    """

    def __init__(self, model: nn.Module, form: Recording, n_rows: int) -> None:
        self._given = {
            id(call): [*filter(_may_vary, call.inputs)] for call in form.calls if _is_code(model, call)
        }
        own = (call for call in form.calls if id(call) in self._given)
        self.takes_inputs = any(c.depends & Depends.INPUT for call in own for c in call.inputs)
        self._form, self._tables, self._n_rows = form, held_tables(model), n_rows
        self.noted: _Noted | None = None
        self.found: set[int] = set()
        self.reads, self.may_bend = False, True
        self._is_over = False
        self.ran, self.alike = CodeRun(), AlikeLayers(form)
        self.keep: Callable[[Call, Any], None] | None = None

    def first(self, run: Rows, rows: str, look: Callable[[Call, Any], Any] | None = None) -> Any:
        """What ``run`` gives; its first run on rows a and b is looked at, where it runs so."""
        if self._is_over or rows != "ab":
            return run(rows, look)
        self._is_over = True
        try:
            # what torch.compile met under such a mode it would never compile again
            with asking():
                return self.see(run, look)
        except of_models():  # whatever it is: code may not run while somebody watches
            with self.ran:
                return run(rows, look)

    def tables_alike(self) -> dict[str, Tensor]:
        """The tables of which it took places, by name, where these may hide which row took which."""
        return {n: t for n, t in self.noted.tables.items() if are_alike(t)} if self.noted else {}

    def tables_by_number(self) -> dict[str, Tensor]:
        """The tables of whole numbers, by name, of which rows took places by their number."""
        return self.noted.by_number if self.noted else {}

    def see(self, run: Rows, look: Callable[[Call, Any], Any] | None = None) -> Any:
        """What ``run`` gives for rows a and b, looked at; ``look`` is shown each call with its value."""
        found: set[int] = set()

        def shown(call: Call, value: Any) -> None:
            if (noted.has_read or noted.has_gathered) and id(call) in self._given:
                self.reads |= noted.has_read
                found.update(map(id, self._given[id(call)]))
            noted.has_read = noted.has_gathered = False
            alike.see(call, noted.done)
            for shown_to in filter(None, (self.keep, look)):
                shown_to(call, value)
            noted.done = []  # what they did is none of the next call's

        alike = AlikeLayers(self._form)
        noted = _Noted(self._tables, self._n_rows, self.ran)
        with noted.unseen, noted, self.ran:
            result = run("ab", shown)
        self.noted, self.found, self.may_bend, self.alike = noted, found, noted.may_bend, alike
        return result


def reading(form: Recording, run: Rows, watch: Watch) -> Reading:
    """What a form goes by, as ``watch`` has seen; ``run`` runs it, and shows each call once it has run.

    It does not where torch's own layers alone are given anything.
    """
    truths: tuple[Turn, ...] = ()
    names = {plain_name(c) for c in form.calls if c.op != "call_module"}
    ranks, skips = not names.isdisjoint(_RANKING), not names.isdisjoint(_MISSING)
    if watch.takes_inputs:
        if watch.noted is None:
            watch.see(run)
        assert watch.noted is not None

        def again(rows: str) -> Mapping[_Place, int]:
            with _Noted() as noted:
                run(rows)
            return noted.truths

        ranks, truths = ranks or watch.noted.ranks, turns_of(watch.noted.truths, again)
    skips |= watch.noted is not None and watch.noted.skips
    return Reading(frozenset(watch.found), watch.reads, ranks, skips, truths)


def reads_noted() -> _Noted:
    """Notes, within it, what code asks of tensors; see :class:`_Noted`."""
    return _Noted()


def turns_of(seen: Mapping[_Place, int], of: Callable[[str], Mapping[_Place, int]]) -> tuple[Turn, ...]:
    """What to turn of the truths that code asked for on rows a and b, so many times in each place.

    ``of`` gives those for other rows.
    """
    each = [seen, *(of(rows) for rows in ("aa", "bb") if seen)]
    times = {place: {truths.get(place, 0) for truths in each} for place in [*seen][:_MOST_TRUTHS]}
    return tuple((place, max(n) if len(n) > 1 else 1) for place, n in times.items())


def scales(found: Reading, axes: Mapping[int, int]) -> list[Change]:
    """What makes more or less of the values that code kept whole reads, and of one row alone.

    ``axes`` are those along which the rows of calls' values lie, by id of the call. Where code reads numbers,
    more is made of one row and less of the other, too.
    """
    if not found.given:
        return []
    evenly = (functools.partial(_scaled, found.given, f) for f in _FACTORS)
    factors = (*_APART, *_EITHER_SIDE) if found.reads else _APART
    apart = (functools.partial(rows_times, axes, each) for each in factors)
    return [*evenly, *apart]


def deciding(form: Recording, places: Collection[int]) -> frozenset[int]:
    """Ids of calls that give rows, of those with ids ``places``, of which truths, counts or masks are made.

    Whether any row passes a limit does not show where none of the example's does.
    """
    found = set[int]()
    ends = (c for c in form.calls if c.op not in ("placeholder", "output") and c.depends & Depends.INPUT)
    for end in ends:
        is_counted = not end.is_size and _is_whole_number(end.value)
        is_all = is_counted or kind_of_name(plain_name(end)) == "data shaped"
        is_picked = plain_name(end) in ("getitem", "__getitem__", "masked_select")
        ahead = [*end.inputs] if is_all else [*filter(_is_mask, end.inputs[1:])] if is_picked else []
        seen = {id(c) for c in ahead}
        while ahead:
            call = ahead.pop()
            if id(call) in places and _may_vary(call):
                found.add(id(call))
                continue
            more = [c for c in call.inputs if id(c) not in seen]
            seen |= {id(c) for c in more}
            ahead += more
    return frozenset(found)


def _is_mask(call: Call) -> bool:
    return isinstance(call.value, Tensor) and call.value.dtype is torch.bool


def _is_whole_number(value: Any) -> bool:
    return isinstance(value, Tensor) and is_whole(value) and value.numel() == 1


def numbers_apart(form: Recording, inputs: Collection[str]) -> list[Change]:
    """What puts numbers made of rows far apart for row a and b, where what is made of them may have a bend.

    A loss that is not to fall below a level is a mean of rows' until it comes near it.
    """
    made = made_of_rows(form, inputs)
    first: set[int] = set()
    fed: set[int] = set()
    is_bent = False
    for call in (c for c in form.calls if id(c) in made and c.op != "placeholder"):
        if any(id(c) in first or id(c) in fed for c in call.inputs):
            fed.add(id(call))
            is_bent |= call.op == "call_module" or plain_name(call) not in LINEAR
        elif is_number(call.value):
            first.add(id(call))
    return [functools.partial(_apart, first, {}, factors) for factors in FAR if is_bent]


def alike(given: Mapping[str, Tensor], dim: Dim) -> dict[str, Tensor]:
    """The tensors with all of a row as is its first place, so that code finds many of one kind.

    A limit on these, as of tokens for an expert, is met. Floating point stays as it is along its last axis.
    """
    out = dict(given)
    for name, axis in dim.where:
        tensor = given[name].detach()
        ends = tensor.ndim - (not is_whole(tensor))
        for other in (a for a in range(ends) if a != axis and tensor.numel()):
            tensor = tensor.narrow(other, 0, 1).expand_as(given[name])
        out[name] = tensor.contiguous().requires_grad_(given[name].requires_grad)
    return out


def _is_code(model: nn.Module, call: Call) -> bool:
    """Whether a call is of the model's own code."""
    if call.op == "call_module":
        module = submodule(model, call.target)
        return not is_atomic(module) or bool(module._forward_pre_hooks or module._forward_hooks)
    return is_code(call.target) and not call.is_size


def _may_vary(call: Call) -> bool:
    value = call.value
    return bool(call.depends & Depends.INPUT) and isinstance(value, Tensor) and value.is_floating_point()


def _scaled(calls: Collection[int], factor: float, rows: str, call: Call, value: Any) -> Any:
    """``factor`` times the value of a call, of those with such ids."""
    return value * factor if id(call) in calls else None


def _apart(
    calls: Collection[int],
    known: dict[int, Tensor],
    factors: tuple[float, float],
    rows: str,
    call: Call,
    value: Any,
) -> Any:
    """A number, of those with such ids, times a factor for row a and one for b, and their mean for both."""
    if id(call) not in calls:
        return None
    first = known.setdefault(id(call), value.detach().clone())
    return in_place_of(value, first * (sum(factors["ab".index(row)] for row in rows) / len(rows)))


def rows_times(
    axes: Mapping[int, int], factors: tuple[float, float], rows: str, call: Call, value: Any
) -> Any:
    """The value of a call with rows a and b each times its factor, of those whose rows lie along ``axes``."""
    axis = axes.get(id(call))
    if axis is None or not is_floating(value) or axis >= value.ndim or value.shape[axis] != len(rows):
        return None
    each = value.new_tensor([factors["ab".index(row)] for row in rows])
    return value * each.view(-1, *[1] * (value.ndim - axis - 1))


class _Known(NamedTuple):
    """What a function of torch is to one who looks at what code asks."""

    kind: str
    name: str
    reads: bool
    ranks: bool
    skips: bool
    selects: bool
    cuts: bool
    picks: bool
    is_size: bool

    @classmethod
    @functools.lru_cache(maxsize=1 << 12)
    def of(cls, func: Any) -> _Known:
        kind, name = classify(func)
        is_ranking = kind == "data shaped" or name in _RANKING
        reads = kind in ("read", "data shaped")
        told = name in _MISSING, name in ("where", "__getitem__"), name in CUTS, name in PICKS
        return cls(kind, name, reads, is_ranking, *told, kind == "metadata" and name in _SIZES)


class _Noted(Numbers):
    """Notes that values of a tensor are read, where as truths, that they are counted, ordered or left out,
    and where a tensor is to be cut that ends before it: ``beyond``, by that place and the size.

    It ``gathers`` where something without rows is made of all of ``n_rows``, and makes ``totals`` where that
    is a number. What is ``done`` does not go by data, or is None. Of the ``held`` tables it notes
    those of which code takes places, and of which it takes one for each of ``n_rows`` in turn, those of whole
    numbers."""

    def __init__(
        self,
        held: Mapping[int, tuple[str, Tensor]] | None = None,
        n_rows: int = 0,
        ran: CodeRun | None = None,
    ) -> None:
        super().__init__()
        self._held, self._n_rows, self._ran = held or {}, n_rows, ran or CodeRun()
        self.tables: dict[str, Tensor] = {}
        self.by_number: dict[str, Tensor] = {}
        self.has_read = self.has_gathered = False
        self.ranks = self.skips = self.gathers = self.totals = False
        self.beyond: set[tuple[int, int]] = set()
        self.truths: dict[_Place, int] = {}
        self.done: list[Any] | None = []
        self.unseen = unseen_reads.UnseenReads(self._note_read)

    def _note_read(self) -> None:
        self.has_read, self.done = True, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = _Known.of(func)
        if known.is_size:
            return func(*args, **(kwargs or {}))
        self._ran.pause()
        try:
            return self._noted(known, func, types, args, kwargs or {})
        finally:
            self._ran.go_on()

    def _noted(self, known: _Known, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = known.name
        has_read = known.reads or (known.selects and selects_by_mask(name, args))
        self.ranks = self.ranks or known.ranks
        self.skips = self.skips or known.skips
        beyond = {*places_beyond(name, args, kwargs)} if known.cuts else ()
        self.beyond.update(beyond)
        tables = dict(picked(self._held, args, kwargs)) if known.picks else {}
        self.tables.update(tables)
        if types or not isinstance(func, _OF_C) or any(map(callable, args)):
            self._ran.go_on()  # a function may call the model's code
            self.unseen.inside = is_users_operator(func)
            try:
                result = func(*args, **kwargs)
            finally:
                self.unseen.inside = False
            self._ran.pause()
        else:
            result = func(*args, **kwargs)
        result = self.with_result(result, func, args, kwargs)
        if known.kind == "read" and _is_truth(name, result) and (place := _place()) is not None:
            self.truths[place] = self.truths.get(place, 0) + 1
        made = self._gathered(args, result)
        gathered = [t for t in made if t.is_floating_point()]
        is_count = len(gathered) < len(made) or _is_whole_number(result)
        has_read |= is_count and any(map(_is_counted, tensors((args, kwargs))))
        self.has_read = self.has_read or has_read
        self.has_gathered = self.has_gathered or bool(gathered)
        if gathered:
            is_total = all(map(is_number, gathered))
            self.gathers, self.totals = self.gathers or not is_total, self.totals or is_total
        if has_read or gathered or beyond or tables or known.ranks or known.skips:
            self.done = None
        elif self.done is not None:
            self.done.append(deed(name, args, kwargs, result))
        for held, table in tables.items():
            is_whole = not table.is_floating_point()
            if is_whole and are_by_number(args, kwargs, table, result, self._n_rows):
                self.by_number[held] = table
        return result

    def _gathered(self, args: Any, result: Any) -> list[Tensor]:
        """What a function makes without rows of what has them, whole or in pieces, along its first axis.

        Places that lie otherwise than they were given are not made of all rows yet.
        """
        given = args[0] if args else None
        if not (isinstance(given, Tensor) and given.ndim and self._n_rows):
            return []
        n, rest = given.shape[0], given.shape[1:]

        def has_rows(t: Tensor) -> bool:
            return n in t.shape and t.shape not in (rest, (1, *rest))

        if not n or n % self._n_rows or (isinstance(result, Tensor) and has_rows(result)):
            return []
        made = (t for t in tensors(result) if not has_rows(t))
        return [t for t in made if t.numel() != given.numel() or t.shape[:1].numel() % self._n_rows]


class Turned(HiddenMode):
    """Within it the first truths that code asks for in a place come out as they do not."""

    def __init__(self, turn: Turn) -> None:
        super().__init__()
        self._place, self._n_left = turn

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        kind, name = classify(func)
        if not self._n_left or kind != "read" or not _is_truth(name, result) or _place() != self._place:
            return result
        self._n_left -= 1
        return not result


def _is_counted(tensor: Tensor) -> bool:
    return tensor.numel() > 1 and (tensor.is_floating_point() or tensor.dtype is torch.bool)


def _is_truth(name: str, result: Any) -> bool:
    return isinstance(result, bool) and (name in _TRUTHS or name == "item")


def _place() -> _Place | None:
    """Where the code outside of torch is that now asks, where it is a model's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in _LOOKING:
        frame = frame.f_back
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    is_own = frame is None or frame.f_code.co_filename.startswith(_OWN)
    return None if frame is None or is_own else (frame.f_code, frame.f_lineno)
