"""Numbers that code kept whole compares with, or cuts at: of rows it may do something else from so many on.

Sizes that a recording shows are asked for by formula; in code that stays whole, a size is a plain number.
Running a form on more rows than that is left to ``mixing``.
"""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..calls.call import Call, Depends, Recording
from ..code.own_code import OwnCode
from ..inputs.contents import is_filled
from .code_run import CodeRun

__all__ = ["CUTS", "MOST", "beside_places", "exact_numbers", "places_beyond", "rows_to_try", "thresholds"]

MOST = 256
"""A form is run on no more rows than this."""
CUTS = frozenset({
    "__getitem__", "__setitem__", "chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split"
})  # fmt: skip
"""Functions that cut a tensor."""
_GATHERED = (dict, frozenset, list, set, tuple)


def thresholds(code: OwnCode, form: Recording, least: int, ran: CodeRun) -> dict[Call, set[int]]:
    """Whole numbers above ``least`` that the model's own code in calls compares with, by call.

    Of functions that ``ran``: what others name decides nothing before some of these go another way.
    """
    found = {}
    for call in (c for c in form.calls if code.is_own(c)):
        functions = (held for held in _asking(code, call) if ran.may_run(held[0]))
        numbers = (n for function, owner in functions for n in _compared(function, owner))
        found[call] = {n for n in numbers if least < n <= MOST}
    return {call: numbers for call, numbers in found.items() if numbers}


def exact_numbers(code: OwnCode, call: Call, ran: CodeRun) -> set[int]:
    """Whole numbers above one that the model's own code in a call asks whether something is, or divides by.

    Of functions that ``ran``; keys of the dicts that these name are among them.
    """
    functions = (held for held in _asking(code, call) if ran.may_run(held[0]))
    return {n for function, owner in functions for n in _compared(function, owner, is_exact=True) if n > 1}


def beside_places(form: Recording, least: int, most: int = MOST) -> set[int]:
    """Such numbers, up to the ``most``, that calls are given which make tensors of sizes alone.

    These may be the places of rows.
    """
    of_sizes = (c for c in form.calls if c.depends & Depends.SHAPE and not c.depends & Depends.INPUT)
    makers = [c for c in of_sizes if isinstance(c.value, Tensor)]
    return {n for c in makers for n in (*c.args, *c.kwargs.values()) if type(n) is int and least < n <= most}


def places_beyond(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Each end of a slice, or length of a piece, beyond the axis that one of :data:`CUTS` cuts, and its size.

    So ``h[:20]`` of eight rows gives (20, 8).
    """
    if not (args and isinstance(args[0], Tensor)):
        return
    shape = args[0].shape
    if name in ("__getitem__", "__setitem__"):
        for size, cut in _cuts(shape, args[1]):
            ends = (end for end in (cut.start, cut.stop) if isinstance(end, int))
            yield from ((abs(end), size) for end in ends if abs(end) > size)
    elif shape:
        given = [*args[1:], *kwargs.values()]
        axis = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        if given and isinstance(given[0], int) and isinstance(axis, int) and given[0] > shape[axis]:
            yield given[0], shape[axis]


def _cuts(shape: Sequence[int], index: Any) -> Iterator[tuple[int, slice]]:
    """The slices of an index, each with the size of its axis; those behind an ellipsis from the end on."""
    items = [*index] if isinstance(index, tuple) else [index]
    rest = next((i for i, item in enumerate(items) if item is ...), None)
    ahead, behind = (items, []) if rest is None else (items[:rest], items[rest + 1 :])
    for sizes, some in ((shape, ahead), (shape[::-1], behind[::-1])):
        places = iter(sizes)
        for item in some:
            n_axes = item.ndim if isinstance(item, Tensor) and item.dtype is torch.bool else item is not None
            size = next(itertools.islice(places, max(0, n_axes - 1), None), 0) if n_axes else 0
            if isinstance(item, slice):
                yield size, item


def rows_to_try(found: Iterable[tuple[int, int]], n_rows: int, most: int = MOST) -> set[int]:
    """How many rows come to the ``found`` places, of axes that rows lie along, so many ``n_rows`` of them."""
    rows = (place * n_rows // size for place, size in found if size and size % n_rows == 0)
    return {n for n in rows if n_rows < n <= most}


def _asking(code: OwnCode, call: Call) -> list[tuple[types.FunctionType, Any]]:
    """The functions of a call that compare or look up anything, of the many that it has."""
    key, kinds = (call.op == "call_module", call.target), (_is_order, _is_equality, _is_lookup)
    if key not in code.comparing:
        held = code.functions(call)
        code.comparing[key] = [h for h in held if any(_comparing(h[0].__code__, kind)[0] for kind in kinds)]
    return code.comparing[key]


def _compared(function: types.FunctionType, owner: Any, *, is_exact: bool = False) -> Iterator[int]:
    """The whole numbers in lines of a function that compare: written there, or held by what these name.

    They compare by order, or else are ``is_exact``.
    """
    comparing, constants = _comparing(function.__code__, _is_equality if is_exact else _is_order)
    looking, more = _comparing(function.__code__, _is_lookup) if is_exact else ([], [])
    variables = _variables(function, (*constants, *more)) if comparing or looking else {}
    for step, is_asked in (*((s, True) for s in comparing), *((s, False) for s in looking)):
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            values = [_held(owner, str(step.argval))]
        elif step.opname == "LOAD_GLOBAL":
            values = [function.__globals__.get(str(step.argval))]
        elif step.opname == "LOAD_CONST":
            values = [step.argval]
        else:
            values = variables.get(step.argval, []) if step.opname.startswith("LOAD_") else []
        if is_exact:
            gathered = [v for value in values if isinstance(value, _GATHERED) for v in value]
            values = [*gathered, *(values if is_asked else ())]
        yield from (v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _held(owner: Any, name: str) -> Any:
    """What an object has under a name; None where it has nothing, or its own ``__getattr__`` fails."""
    try:
        return getattr(owner, name, None)
    except Exception:  # any Python of the model
        return None


@functools.lru_cache(maxsize=1 << 12)
def _comparing(
    code: types.CodeType, is_asking: Callable[[dis.Instruction], bool]
) -> tuple[list[dis.Instruction], list[tuple[str, Any]]]:
    """The steps of lines that compare, and the constants that variables are set to, behind their names."""
    steps = [*dis.get_instructions(code)]
    lines: dict[int, list[dis.Instruction]] = {}
    for step in steps:
        lines.setdefault((step.positions and step.positions.lineno) or 0, []).append(step)
    comparing = [step for line in lines.values() if any(map(is_asking, line)) for step in line]
    pairs = itertools.pairwise(steps) if comparing else ()
    is_set = (p for p in pairs if p[0].opname == "LOAD_CONST" and p[1].opname.startswith("STORE_"))
    return comparing, [(str(step.argval), constant.argval) for constant, step in is_set]


def _variables(function: types.FunctionType, constants: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    """What a function's variables hold, as far as it is written: defaults, ``constants``, what is around."""
    code = function.__code__
    arguments, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
    given = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    given |= (function.__kwdefaults__ or {}) | {n: c.cell_contents for n, c in cells if is_filled(c)}
    held = {name: [value] for name, value in given.items()}
    for name, value in constants:
        held.setdefault(name, []).append(value)
    return held


def _is_order(step: dis.Instruction) -> bool:
    if step.opname == "COMPARE_OP":
        return str(step.argval).startswith(("<", ">"))
    return step.opname == "LOAD_GLOBAL" and step.argval in ("min", "max")


def _is_equality(step: dis.Instruction) -> bool:
    """Whether a step asks for a number itself: what it equals, what holds it, what division leaves."""
    if step.opname == "COMPARE_OP":
        return any(sign in str(step.argval) for sign in ("==", "!="))
    return step.opname == "CONTAINS_OP" or (step.opname == "BINARY_OP" and "%" in step.argrepr)


def _is_lookup(step: dis.Instruction) -> bool:
    """Whether a step looks something up, in what may be a table by numbers."""
    return step.opname == "BINARY_SUBSCR" or step.argrepr == "[]" or step.argval == "get"
