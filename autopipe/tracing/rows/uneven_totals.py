"""Numbers that are no even mean or sum of what rows give, told by what is done and not by any data.

A loss over the weights of all rows is an even mean where they all weigh the same, as rows of an example may:
one class weighs more, and no row is of it. So what is made of all rows is followed, to where something else
is made of it than sums and multiples. Seeing rows mixed is left to ``mixing``; what follows to ``tail``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph import Dim
from ...torch_private import HiddenMode, TorchDispatchMode
from ...units import Size, symbol
from ..calls.call import Call, Depends, Recording, map_calls
from ..calls.describe import call_and_place
from ..calls.faults import of_models
from ..calls.functions import classify, plain_name, storages, tensors
from ..calls.labels import can_be_counted, label_options
from ..calls.perform import run_call
from ..code.leaves import asking
from ..code.own_code import OwnCode
from ..inputs.contents import is_whole
from ..members import submodule
from .inner_numbers import LINEAR
from .results import Rows, axes, run_until
from .tail import is_late
from .unlike_rows import that_stay
from .varied_data import made_of_contents, made_of_rows

__all__ = ["uneven_totals"]

_logger = logging.getLogger("autopipe")
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_PRODUCTS = frozenset({"imul", "mul", "multiply", "rmul"})
_QUOTIENTS = frozenset({"div", "divide", "itruediv", "truediv"})
_EVEN = LINEAR | frozenset({
    "_to_copy", "_unsafe_view", "alias", "copy", "getattr", "item", "lift_fresh", "permute", "rsub", "select",
    "slice", "split", "t", "tensor", "transpose", "unbind",
})  # fmt: skip
"""Functions that give of sums of what rows give, and of multiples of it, such again."""
_OF_SIZES = frozenset({
    "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
    "ones_like", "rand_like", "randn_like", "zeros_like",
})  # fmt: skip
"""Operators whose results no data have a say in."""
_ALONG = {
    "cumprod": 1, "cumsum": 1, "log_softmax": 1, "logcumsumexp": 1, "normalize": 2, "softmax": 1,
    "softmin": 1,
}  # fmt: skip
"""Functions that make of each place what others along a ``dim`` have a say in, and its place."""
_PICKS = frozenset({"masked_select", "nonzero"})
_PUTS = frozenset({"index_add", "index_copy", "index_put", "masked_scatter", "scatter", "scatter_add"})
_SUM = 2
"""What operators of torch take for the ``reduction`` to a sum."""
_USUAL = -100
"""Labels that losses leave out unless they are told; these are tried on rows."""


def uneven_totals(
    code: OwnCode,
    form: Recording,
    given: Mapping[str, Tensor],
    run: Rows,
    dim: Dim,
    shapes: _Shapes,
    device: torch.device,
    *,
    takes_three: bool,
) -> dict[str, str]:
    """The calls that make something else of what all rows come to than sums and multiples, each in words.

    Those behind which are most parameters are left out. ``run`` runs the form on rows of those ``given``:
    code that stays whole, without weights, is looked at as it runs on two rows and, if the form
    ``takes_three``, on three, which tells what has rows inside. What gives numbers counts where that fails.
    """

    @functools.cache
    def may_begin(call: Call) -> bool:
        return is_late(code.model, form, {call.name})

    made = made_of_rows(form, {name for name, _ in dim.where})
    found, asked, totals = _bent(code, form, dim, shapes, made)
    if not any(map(may_begin, (*found, *asked))):
        return {}
    try:
        made = made_of_contents(code.model, form, given, dim, shapes)
        made = _beside(form, made, that_stay(code.model, form, run, dim, shapes, device))
        found, asked, totals = _bent(code, form, dim, shapes, made)
    except of_models() as error:
        # any Python of the model, on rows it may not take
        _logger.debug("what stays whatever rows hold could not be seen: %s", error)
    late, asked = [*filter(may_begin, (*found, *asked))], [*filter(may_begin, asked)]
    even = {c for c in asked if id(c) not in totals}
    if asked and takes_three:
        even = _even_inside(code, form, run, asked, made, totals, device)
    words = "makes no even mean or sum of what rows give"
    return {c.name: f"{call_and_place(c)} {words}" for c in late if c not in even}


def _beside(form: Recording, made: Collection[int], stays: Collection[int]) -> set[int]:
    """The calls, by id, that are ``made`` of rows, and not of those alone that stay whatever rows hold."""
    found = set[int]()
    for call in (c for c in form.calls if id(c) in made and id(c) not in stays):
        of = [id(c) for c in call.inputs if id(c) in made]
        if not of or not found.isdisjoint(of):
            found.add(id(call))
    return found


def _bent(
    code: OwnCode, form: Recording, dim: Dim, shapes: _Shapes, made: Collection[int]
) -> tuple[list[Call], list[Call], set[int]]:
    """The calls that bend totals of what is ``made`` of rows, those to look into, and all totals by id."""
    rows = symbol(dim.name)
    totals: set[int] = set()
    asked: list[Call] = []
    found: list[Call] = []

    def has_rows(call: Call) -> bool:
        is_long = bool(call.depends & Depends.DATA) and any(t.ndim for t in tensors(call.value))
        sizes = (n for shape in shapes.get(id(call), ()) for n in shape)
        return is_long or any(rows in getattr(n, "free_symbols", ()) for n in sizes)

    for call in (c for c in form.calls if id(c) in made and c.op not in ("placeholder", "output")):
        of = [c for c in call.inputs if id(c) in made]
        of_totals = [c for c in of if id(c) in totals]
        if has_rows(call):
            if _is_float(call) and (any(map(_is_float, of_totals)) or _is_along(call, dim, shapes)):
                found.append(call)
            elif _is_float(call) and _is_of_rows_alone(code, call):
                asked.append(call)
            continue
        totals.add(id(call))
        if not _is_float(call):
            continue
        if code.is_own(call) and not call.accessor:
            asked.append(call)
        elif not (call.accessor or _is_even(call, made) if of_totals else _is_even_total(code, call, of)):
            found.append(call)
    return found, asked, totals


def _is_of_rows_alone(code: OwnCode, call: Call) -> bool:
    """Whether a call runs code that stays whole and has no weights: it may weigh rows, or shorten them."""
    if not code.is_own(call) or call.accessor:
        return False
    return call.op != "call_module" or next(submodule(code.model, call.target).parameters(), None) is None


def _is_float(call: Call) -> bool:
    values = [v for v in (call.value, *tensors(call.value)) if isinstance(v, (float, Tensor))]
    return not all(map(is_whole, values))


def _is_along(call: Call, dim: Dim, shapes: _Shapes) -> bool:
    """Whether a function of torch goes along the axis of rows."""
    place, value = _ALONG.get(plain_name(call)), call.value
    if place is None or call.op == "call_module" or not isinstance(value, Tensor) or not value.ndim:
        return False
    along = call.kwargs.get("dim", call.args[place] if len(call.args) > place else None)
    return isinstance(along, int) and along % value.ndim in axes(call, 0, dim, shapes)


def _is_even(call: Call, made: Collection[int]) -> bool:
    if call.op == "call_module":
        return False
    of = [isinstance(a, Call) and id(a) in made for a in (*call.args, *call.kwargs.values())]
    return _is_linear(plain_name(call), of)


def _is_linear(name: str, of: Sequence[bool]) -> bool:
    """Whether a function gives sums of what rows give, of several; ``of`` says which arguments are such.

    What may be a bend of one number is told by other numbers in its place.
    """
    name = name if name in _EVEN else name.strip("_")
    return sum(of) < 2 or (name in _EVEN and name not in _PRODUCTS and name not in _QUOTIENTS)


def _is_even_total(code: OwnCode, call: Call, of: Sequence[Call]) -> bool:
    """Whether a call, of rows, is no mean over as many as data say but one over labels, if these count."""
    options = label_options(code.model, call)
    if options is not None and options["reduction"] == "mean":
        return can_be_counted(code.model, options)
    if options is not None or not any(c.depends & Depends.DATA for c in of):
        return True
    if call.op == "call_module":
        return getattr(submodule(code.model, str(call.target)), "reduction", "sum") == "sum"
    return plain_name(call) == "sum" or call.kwargs.get("reduction") == "sum"


def _even_inside(
    code: OwnCode,
    form: Recording,
    run: Rows,
    asked: Sequence[Call],
    made: Collection[int],
    totals: Collection[int],
    device: torch.device,
) -> set[Call]:
    """Those of the ``asked`` calls, of code that stays whole, that bend no total; numbers are seen not to."""
    run_again = [c for c in asked if not form.leaves_anything(c)]
    taken = {c for call in run_again for c in call.inputs}
    values: dict[Call, Any] = {}
    longer: dict[Call, _Inside] = {}
    bent, told = set[Call](), set[Call]()

    def look(call: Call, value: Any) -> None:
        if call in taken:
            values[call] = value
        if call not in run_again:
            return
        inside = _Inside(longer[call].made if call in longer else None)
        for given in (c for c in call.inputs if id(c) in made):
            kind = _RAGGED if given.depends & Depends.DATA else _ROWS
            inside.mark(values[given], _TOTAL if id(given) in totals else kind)
        args, kwargs = (map_calls(given, values.__getitem__) for given in (call.args, call.kwargs))
        with asking(), inside.reads, inside:
            run_call(code.model, form.constants, call, args, kwargs, {}, device)
        if call in longer and inside.is_bent:
            bent.add(call)
        if call in longer and inside.is_told:
            told.add(call)
        longer[call] = inside

    try:
        for rows in ("abb", "ab") if run_again else ():
            run_until(run, rows, run_again[-1], look)
    except of_models() as error:
        # any Python of the model, which may not run while somebody watches
        _logger.debug("numbers that code makes could not be followed: %s", error)
    return {c for c in asked if c not in bent and (c in told or id(c) not in totals)}


_ROWS, _RAGGED, _TOTAL = "rows", "as many rows as data say", "total"


class _Inside(TorchDispatchMode):
    """Follows what code makes of rows and of totals of them, beside what was ``made`` of more rows.

    Attributes
    ----------
    made: the shapes of what each operator gave. is_bent: whether something was seen to be made of totals, or
        of rows, that is no sum or multiple. is_told: whether all was seen, and nothing read. reads: the
        context in which code is seen to read tensors.
    """

    def __init__(self, longer: Sequence[Sequence[torch.Size]] | None) -> None:
        super().__init__()
        self.made: list[list[torch.Size]] = []
        self.is_bent, self.is_told, self.reads = False, True, _Reads(self)
        self._longer, self._kinds = longer, dict[int, str]()
        self._held: list[Tensor] = []  # else other tensors would come to lie where they did

    def mark(self, value: Any, kind: str) -> None:
        """Let the tensors in a value be of a kind."""
        self._kinds.update((place, kind) for t in tensors(value) for place in storages(t))

    def kinds(self, value: Any) -> list[str | None]:
        """Of what kind each tensor in a value is; None where rows have no say in it."""
        return [next(map(self._kinds.get, storages(t)), None) for t in tensors(value)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        of = [next(iter(self.kinds([a] if isinstance(a, Tensor) else a)), None) for a in args]
        given = {*self.kinds((args, kwargs))} - {None}
        result = func(*args, **kwargs)
        place, name = len(self.made), func.overloadpacket.__name__
        self._held += tensors(result)
        self.made.append([t.shape for t in tensors(result)])
        if given and self._longer is not None and name.strip("_") not in _OF_SIZES:
            longer = self._longer[place] if place < len(self._longer) else None
            self._follow(name, func, given, of, args, kwargs, result, longer)
        return result

    def _follow(
        self,
        name: str,
        func: Any,
        given: set[str | None],
        of: list[str | None],
        args: Any,
        kwargs: Any,
        result: Any,
        longer: Sequence[torch.Size] | None,
    ) -> None:
        """Tell of what kind a ``result`` of what is ``given`` is, and whether it is even."""
        made = tensors(result)
        if longer is None or len(longer) != len(made):
            self.is_told = False  # other operators ran on more rows
            return
        is_ragged = name in _PICKS or (
            name == "index" and any(t.dtype is torch.bool for t in tensors(args[1]))
        )
        for tensor, size in zip(made, longer, strict=True):
            if is_ragged or tensor.shape != size:
                is_bent = _TOTAL in given or _runs_along(name, func, args, kwargs, tensor.shape, size)
                stays = _RAGGED in given and name.strip("_") not in _PUTS
                kind = _RAGGED if is_ragged or stays else _ROWS
            elif _TOTAL in given:
                is_bent, kind = not _is_linear(name, [k is not None for k in of]), _TOTAL
            else:
                is_ragged_mean = _RAGGED in given and not _sums(name, func, args, kwargs)
                is_bent, kind = is_ragged_mean or _weighs(name, func, args, kwargs), _TOTAL
            self.mark(tensor, kind)
            self.is_bent |= is_bent and not is_whole(tensor)


class _Reads(HiddenMode):
    """Within it code that reads what is made of rows leaves ``inside`` untold."""

    def __init__(self, inside: _Inside) -> None:
        super().__init__()
        self._inside = inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if classify(func)[0] == "read" and any(self._inside.kinds((args, kwargs))):
            self._inside.is_told = False
        return func(*args, **(kwargs or {}))


def _argument(func: Any, args: Any, kwargs: Any, name: str) -> Any:
    """What an operator is given under a name, or by default; None where it takes no such thing."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[place] if place < len(args) else kwargs.get(name, argument.default_value)
    return None


def _runs_along(name: str, func: Any, args: Any, kwargs: Any, few: torch.Size, more: torch.Size) -> bool:
    """Whether an operator goes along the axis that is longer where there are more rows."""
    if name.strip("_") not in _ALONG or len(few) != len(more) or not few:
        return False
    along = _argument(func, args, kwargs, "dim")
    return isinstance(along, int) and few[along] != more[along]


def _sums(name: str, func: Any, args: Any, kwargs: Any) -> bool:
    return name == "sum" or _argument(func, args, kwargs, "reduction") == _SUM


def _weighs(name: str, func: Any, args: Any, kwargs: Any) -> bool:
    """Whether labels of a mean over these weigh otherwise, or are left out by a number of its own."""
    if not name.startswith("nll_loss") or _sums(name, func, args, kwargs):
        return False
    told = (_argument(func, args, kwargs, n) for n in ("weight", "ignore_index"))
    return any(value is not None and not (type(value) is int and value == _USUAL) for value in told)
