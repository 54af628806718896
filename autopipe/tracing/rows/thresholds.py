"""Numbers that code kept whole compares with, or cuts at: of rows it may do something else from so many on.

Sizes that a recording shows are asked for by formula; in code that stays whole, a size is a plain number.
Running a form on more rows than that is left to ``mixing``.
"""

from __future__ import annotations

import dis
import functools
import itertools
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor, nn

from ..calls.call import Call, Depends, Recording
from ..calls.functions import plain_name
from ..calls.kinds import is_own_number, own_numbers
from ..code.own_code import OwnCode
from ..code.told_numbers import told_numbers
from ..inputs.contents import is_filled
from .code_run import CodeRun

__all__ = [
    "CUTS", "MOST", "beside_counts", "beside_places", "exact_numbers", "places_beyond", "rows_to_try",
    "thresholds",
]  # fmt: skip

MOST = 256
"""A form is run on no more rows than this."""
CUTS = frozenset({
    "__getitem__", "__setitem__", "chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split"
})  # fmt: skip
"""Functions that cut a tensor."""
_BACKWARDS = frozenset({"backward", "vjp"})
"""Names of methods that a Function's backward runs, and no forward."""
_TRUTHS = frozenset({"TO_BOOL", "UNARY_NOT"})
_WHOLE = frozenset({"%", "//", "<<", ">>", "&", "^", "|"})
_ASKING = frozenset({
    "__eq__", "__ne__", "bisect", "bisect_left", "bisect_right", "bool", "count", "divmod", "endswith", "eq",
    "equal", "fmod", "format", "gcd", "hash", "index", "isclose", "lcm", "mod", "ne", "not_", "not_equal",
    "range", "remainder", "repr", "round", "startswith", "str",
})  # fmt: skip
"""Names of functions of numbers, or of texts of such, that give something else for some."""
_MOST_LINES = 8
"""Longer expressions are bodies of statements."""
_NAMING = frozenset({"LOAD_ATTR", "LOAD_GLOBAL", "LOAD_METHOD"})
_TABLES = (dict, list, tuple, Tensor, ndarray)
_LOOKING = frozenset({
    "__getitem__", "get", "getitem", "index_select", "itemgetter", "pop", "select", "setdefault", "take",
})  # fmt: skip
_STAYING = frozenset(
    {"cumsum", "double", "expand", "float", "getitem", "mul", "sum", "to", "type_as", "view"}
)
"""Functions that give whole numbers of such."""


def thresholds(code: OwnCode, form: Recording, least: int, ran: CodeRun) -> dict[Call, set[int]]:
    """Whole numbers above ``least`` that the model's own code in calls compares with, by call.

    Of functions that ``ran``: what others name decides nothing before some of these go another way.
    """
    found = {}
    for call in (c for c in form.calls if code.is_own(c)):
        functions = (held for held in _comparing(code, call) if ran.may_run(held[0]))
        numbers = (n for function, owner in functions for n in _compared(function, owner))
        found[call] = {n for n in numbers if least < n <= MOST}
    return {call: numbers for call, numbers in found.items() if numbers}


def exact_numbers(code: OwnCode, call: Call, ran: CodeRun) -> set[int]:
    """Whole numbers above one that the model's own code in a call may ask a size to be, in whatever words.

    Of functions that ``ran``, and backwards; numbers that what these name tells are among them, as keys.
    """
    is_module = call.op == "call_module"
    if (key := (is_module, call.target)) not in code.exact:
        own = own_numbers(str(call.target)) if is_module else frozenset()
        functions = code.functions(call)
        asking = _names_asking([f for f, _ in functions])
        told = ((f, _asked_for(f, owner, own, asking)) for f, owner in functions)
        code.exact[key] = [(f, {n for n in numbers if n > 1}) for f, numbers in told]
    each = (numbers for f, numbers in code.exact[key] if f.__name__ in _BACKWARDS or ran.may_run(f))
    return set[int]().union(*each)


def beside_places(form: Recording, least: int, most: int = MOST) -> set[int]:
    """Such numbers, up to the ``most``, that calls are given which make tensors of sizes alone.

    These may be the places of rows.
    """
    of_sizes = (c for c in form.calls if c.depends & Depends.SHAPE and not c.depends & Depends.INPUT)
    makers = [c for c in of_sizes if isinstance(c.value, Tensor)]
    return {n for c in makers for n in (*c.args, *c.kwargs.values()) if type(n) is int and least < n <= most}


def beside_counts(
    form: Recording, has_rows: Callable[[Call], bool], least: int, most: int = MOST
) -> set[int]:
    """Twice the whole parts of numbers that calls are given beside counts of rows, if up to the ``most``.

    A count is a whole number without rows, made of what has these; half of the rows may be counted in it.
    """
    whole, counts = set[Call](), set[Call]()
    found = set[float]()
    for call in (
        c for c in form.calls if c.depends & Depends.INPUT and c.op not in ("placeholder", "output")
    ):
        of = [c for c in call.inputs if c.depends & Depends.INPUT]
        is_whole = _is_whole(call.value) or (
            plain_name(call) in _STAYING and bool(of) and whole.issuperset(of)
        )
        whole |= {call} if is_whole else set()
        is_beside = not counts.isdisjoint(of)
        if is_beside:
            given = (*call.args, *call.kwargs.values())
            found |= {n for n in given if isinstance(n, (int, float)) and not isinstance(n, bool)}
        if not call.is_size and not has_rows(call) and (is_beside or (is_whole and any(map(has_rows, of)))):
            counts.add(call)
    return {n for n in (2 * int(n) for n in found if math.isfinite(n)) if least < n <= most}


def _is_whole(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, int)


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


def _comparing(code: OwnCode, call: Call) -> list[tuple[types.FunctionType, Any]]:
    """The functions of a call that compare by order, of the many that it has."""
    key = call.op == "call_module", call.target
    if key not in code.comparing:
        held = code.functions(call)
        code.comparing[key] = [h for h in held if _lines(h[0].__code__, _is_order)[0]]
    return code.comparing[key]


def _compared(function: types.FunctionType, owner: Any) -> Iterator[int]:
    """The whole numbers in lines of a function that compare by order, or held by what these name."""
    comparing, constants = _lines(function.__code__, _is_order)
    variables = _variables(function, constants) if comparing else {}
    values = _values(comparing, function, owner, variables)
    yield from (v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _names_asking(functions: Sequence[types.FunctionType]) -> frozenset[str]:
    """The names of functions that may ask for a number themselves, or name one that does."""
    names, n_before = frozenset[str](), -1
    while len(names) > n_before:
        n_before = len(names)
        asking = (
            f.__name__
            for f in functions
            if any(_lines(c, _is_exact, names)[0] for c in _codes_within(f.__code__))
        )
        names = names.union(asking)
    return names


def _asked_for(
    function: types.FunctionType, owner: Any, own: frozenset[int], asking_by_name: frozenset[str]
) -> Iterator[int]:
    """The whole numbers that are told in lines of a function, or of one within it, which may ask for them.

    Lines that name another function that asks may tell it what for. Those that look something up tell what
    tables do alone. A layer's ``own`` number is none.
    """
    asking: list[dis.Instruction] = []
    looking: list[dis.Instruction] = []
    constants: list[tuple[str, Any]] = []
    for code in _codes_within(function.__code__):
        for steps, *asked in ((asking, _is_exact, asking_by_name), (looking, _is_lookup)):
            found, are_set = _lines(code, *asked)
            steps += found
            constants += are_set
    variables = _variables(function, constants) if asking or looking else {}
    tables = (v for v in _values(looking, function, owner, variables, own) if isinstance(v, _TABLES))
    for value in (*_values(asking, function, owner, variables, own), *tables):
        yield from told_numbers(value)


def _values(
    steps: Iterable[dis.Instruction],
    function: types.FunctionType,
    owner: Any,
    variables: Mapping[str, list[Any]],
    own: frozenset[int] = frozenset(),
) -> Iterator[Any]:
    """What the steps load of a function, as far as that is known, but for a layer's ``own`` numbers."""
    last = None
    for step in steps:
        name, found = str(step.argval), list[Any]()
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            held = _held(owner, name)
            found = [None if is_own_number(name, held, own) else held]
            found += [_of_object(last, name)]
        elif step.opname == "LOAD_GLOBAL":
            found = [function.__globals__.get(name)]
        elif step.opname == "LOAD_CONST":
            found = [step.argval]
        elif step.opname.startswith("LOAD_"):
            found = variables.get(name, [])
        yield from found
        last = next((value for value in reversed(found) if value is not None), None)


def _codes_within(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and that of functions written in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes_within(inner)


def _held(owner: Any, name: str) -> Any:
    """What an object has under a name; None where it has nothing, or its own ``__getattr__`` fails."""
    try:
        return getattr(owner, name, None)
    except Exception:  # any Python of the model
        return None


def _of_object(holder: Any, name: str) -> Any:
    """What an object that code names has under a name; of modules what is registered, which runs no code."""
    if isinstance(holder, nn.Module):
        return next((h[name] for h in (vars(holder), holder._modules, holder._buffers) if name in h), None)
    if isinstance(holder, types.ModuleType):
        return vars(holder).get(name)
    return None if holder is None or isinstance(holder, Tensor) else _held(holder, name)


@functools.lru_cache(maxsize=1 << 12)
def _lines(
    code: types.CodeType,
    is_asking: Callable[[Sequence[dis.Instruction]], bool],
    names: frozenset[str] | None = None,
) -> tuple[list[dis.Instruction], list[tuple[str, Any]]]:
    """The steps of lines that ask, and the constants that variables are set to, behind their names.

    Lines that name one of the ``names`` are among them, if any are given, and those that set a variable that
    such a line loads.
    """
    steps = [*dis.get_instructions(code)]
    lines = _lines_together(steps)
    asked = [is_asking(line) or _names_any(line, names or ()) for line in lines]
    if names is not None and any(asked):
        stored = [_variables_in(line, "STORE_") for line in lines]
        loaded, before = set[str](), -1
        while sum(asked) > before:
            before = sum(asked)
            loaded = loaded.union(
                *(_variables_in(line, "LOAD_") for line in itertools.compress(lines, asked))
            )
            asked = [a or not loaded.isdisjoint(s) for a, s in zip(asked, stored, strict=True)]
    asking = [step for line in itertools.compress(lines, asked) for step in line]
    pairs = itertools.pairwise(steps) if asking else ()
    is_set = (p for p in pairs if p[0].opname == "LOAD_CONST" and p[1].opname.startswith("STORE_"))
    return asking, [(str(step.argval), constant.argval) for constant, step in is_set]


def _lines_together(steps: Sequence[dis.Instruction]) -> list[list[dis.Instruction]]:
    """The steps of each line; of lines that hold one expression together."""
    spans = [((at and at.lineno) or 0, (at and at.end_lineno) or 0) for at in (s.positions for s in steps)]
    ends: dict[int, int] = {}
    for first, last in spans:
        ends[first] = max(ends.get(first, first), last if last - first <= _MOST_LINES else first)
    lines: list[list[dis.Instruction]] = []
    line_of: dict[int, list[dis.Instruction]] = {}
    end = -1
    for first in sorted(ends):
        if first > end:
            lines.append([])
        line_of[first] = lines[-1]
        end = max(end, ends[first])
    for step, (first, _) in zip(steps, spans, strict=True):
        line_of[first].append(step)
    return lines


def _names_any(line: Sequence[dis.Instruction], names: Collection[str]) -> bool:
    return bool(names) and any(step.opname in _NAMING and step.argval in names for step in line)


def _variables_in(line: Sequence[dis.Instruction], kind: str) -> set[str]:
    """The variables that steps of a kind, which load or store, have in a line."""
    kinds = {kind + where for where in ("FAST", "DEREF", "NAME", "CLOSURE")}
    return {str(step.argval) for step in line if step.opname in kinds}


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


def _is_order(line: Sequence[dis.Instruction]) -> bool:
    """Whether a line compares by order."""
    return any(
        str(step.argval).startswith(("<", ">"))
        if step.opname == "COMPARE_OP"
        else step.opname == "LOAD_GLOBAL" and step.argval in ("min", "max")
        for step in line
    )


def _is_exact(line: Sequence[dis.Instruction]) -> bool:
    """Whether a line may ask for a number itself: what it equals, holds, is written as, or leaves."""
    is_table = any(step.opname in ("BUILD_CONST_KEY_MAP", "BUILD_MAP") for step in line)  # written there
    if is_table and _is_lookup(line):
        return True
    sums = (s for s in line if s.opname == "BINARY_OP" and s.argrepr in ("+", "-"))
    behind = {id(step): then.opname for step, then in itertools.pairwise(line)}
    is_asked = any("_IF_" in (name := behind.get(id(s), "")) or name in _TRUTHS for s in sums)
    return is_asked or any(map(_may_be_exact, line))


def _may_be_exact(step: dis.Instruction) -> bool:
    if step.opname == "COMPARE_OP":
        return str(step.argval).startswith(("==", "!="))
    if step.opname == "BINARY_OP":
        return step.argrepr.removesuffix("=") in _WHOLE
    if step.opname in _NAMING:
        return step.argval in _ASKING
    return step.opname in ("CONTAINS_OP", "FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC")


def _is_lookup(line: Sequence[dis.Instruction]) -> bool:
    """Whether a line looks something up, in what may be a table by numbers."""
    named = (s.argval for s in line if s.opname in _NAMING)
    is_part = any(s.opname == "BINARY_SUBSCR" or s.argrepr == "[]" for s in line)
    return is_part or not _LOOKING.isdisjoint(named)
