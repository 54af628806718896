"""Which recordings are alike: without what nothing uses, call by call.

Giving the calls of several recordings common names is left to ``modes``.
"""

from __future__ import annotations

import dataclasses
import operator
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..inputs.contents import are_equal_tensors, is_whole
from .call import Call, Recording, calls_in, map_calls
from .functions import is_cut_off, tensors
from .named import held_by, qualified_name
from .perform import is_size_of_made

__all__ = [
    "distinct", "is_equal", "is_same", "is_same_program", "is_twin", "key", "may_be_same", "prune",
    "without_whole_slices",
]  # fmt: skip


def key(call: Call) -> tuple[Any, ...]:
    """What a call calls, and where: equal for the same op of two recordings.

    A module is where it is, whoever calls it.
    """
    target = call.target if isinstance(call.target, str) else qualified_name(call.target)
    return call.op, target, call.path, "" if call.op in ("get_attr", "call_module") else call.source


def is_same(a: Recording, b: Recording) -> bool:
    """Whether two recordings of one model compute the same, constants and all."""
    if len(a.calls) != len(b.calls) or a.output != b.output:
        return False
    twins = {id(y): x for x, y in zip(a.calls, b.calls, strict=True)}
    return all(
        key(x) == key(y)
        and x.region == y.region
        and held_by(x.target) == held_by(y.target)
        and _is_same((x.args, x.kwargs), (y.args, y.kwargs), twins)
        and (x.op != "get_attr" or _is_same(a.constants.get(x.target), b.constants.get(y.target), twins))
        for x, y in zip(a.calls, b.calls, strict=True)
    )


def may_be_same(a: Recording, b: Recording) -> bool:
    """Whether :func:`prune` may leave the same of two recordings: it leaves all that they call of modules."""
    return _calls_of_modules(a) == _calls_of_modules(b)


def _calls_of_modules(recording: Recording) -> dict[str, list[Any]]:
    """By path, what modules are given beside values of other calls, which may come in another order."""
    out: dict[str, list[Any]] = {}
    for call in recording.calls:
        if call.op == "call_module":
            given = str(map_calls((call.args, call.kwargs), lambda _: ...))
            out.setdefault(call.target, []).append(given)
    return out


def distinct(records: Sequence[Recording]) -> tuple[list[Recording], list[int]]:
    """Recordings without what nothing uses, each once, and which of these each is.

    Two that compute the same are two where they ask otherwise of sizes: at other sizes they may part.
    """
    out: list[Recording] = []
    numbers = []
    for form in map(prune, records):
        alike = (i for i, o in enumerate(out) if is_same(o, form) and _asked(o) == _asked(form))
        number = next(alike, len(out))
        numbers.append(number)
        if number == len(out):
            out.append(form)
    return out, numbers


def _asked(form: Recording) -> frozenset[Any]:
    """What a recording asks of sizes, where, and what comes out."""
    return frozenset((g.function, g.outcome, g.source) for g in form.guards)


def is_same_program(a: Sequence[Call], b: Sequence[Call]) -> bool:
    """Whether calls of one recording compute the same as others of it, wherever they stand."""
    if len(a) != len(b):
        return False
    twins: dict[int, Call] = {}
    for x, y in zip(a, b, strict=True):
        is_size = is_size_of_made(x) and is_size_of_made(y) and (x.value, x.args[1]) == (y.value, y.args[1])
        given = (x.args, x.kwargs), (y.args, y.kwargs)
        is_alike = (x.op, x.target, x.region) == (y.op, y.target, y.region) and _is_same(*given, twins)
        if x is not y and not is_size and not is_alike:
            return False
        twins[id(y)] = x
    return True


def without_whole_slices(calls: Sequence[Call], is_all: Callable[[Call, int, Any], bool]) -> Sequence[Call]:
    """A program in which slices that take all of a tensor are that tensor; one that writes is as it is.

    ``is_all(call, axis, stop)`` tells whether a slice up to ``stop`` takes all of a value in every run.
    """
    made: dict[int, Call] = {}
    for call in () if any(c.writes for c in calls) else calls:
        if _takes_all(call, is_all):
            made[id(call)] = made.get(id(call.inputs[0]), call.inputs[0])
        elif any(id(c) in made for c in call.inputs):
            args, kwargs = (map_calls(x, lambda c: made.get(id(c), c)) for x in (call.args, call.kwargs))
            made[id(call)] = dataclasses.replace(call, args=args, kwargs=kwargs, _inputs=None)
    if not made:
        return calls
    kept = [*dict.fromkeys(made.get(id(c), c) for c in calls)]
    needed = {id(made.get(id(calls[-1]), calls[-1]))}
    for call in reversed(kept):
        needed.update(id(c) for c in call.inputs if id(call) in needed)
    return [c for c in kept if id(c) in needed]  # what slices alone were made with is no part of it


def _takes_all(call: Call, is_all: Callable[[Call, int, Any], bool]) -> bool:
    """Whether a call is a slice along some axes, or several, that leaves nothing out of a tensor."""
    if call.target is not operator.getitem or not isinstance(call.args[0], Call):
        return False
    given, index = call.args[0].value, call.args[1]
    items = index if isinstance(index, tuple) else (index,)
    if not isinstance(given, torch.Tensor) or len(items) > given.dim():
        return False
    return all(
        isinstance(i, slice)
        and (i.start, i.step) in ((None, None), (0, None))
        and (i.stop is None or is_all(call.args[0], axis, i.stop))
        for axis, i in enumerate(items)
    )


def is_twin(a: Call, b: Call) -> bool:
    """Whether two calls of a recording that writes nothing give the same: one op of the same values."""
    if a is b:
        return True
    is_alike = (a.op, a.target, a.region) == (b.op, b.target, b.region) and len(a.inputs) == len(b.inputs)
    is_plain = a.op.startswith("call") and not (a.is_random or a.mutated or a.has_effect or a.is_check)
    if not is_alike or not is_plain or not all(map(is_twin, a.inputs, b.inputs)):
        return False
    twins = {id(y): x for x, y in zip(a.inputs, b.inputs, strict=True)}
    return _is_same((a.args, a.kwargs), (b.args, b.kwargs), twins)


def is_equal(a: Any, b: Any) -> bool:
    """Whether two constants are the same value: tensors bit for bit, other objects where they say so."""
    return _is_same(a, b, {})


def _is_same(a: Any, b: Any, twins: dict[int, Call]) -> bool:
    if isinstance(a, Call) or isinstance(b, Call):
        return isinstance(b, Call) and twins.get(id(b)) is a
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and are_equal_tensors(a, b)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_is_same, a, b, [twins] * len(a)))
    if isinstance(a, (dict, UserDict)):
        return type(a) is type(b) and list(a) == list(b) and all(_is_same(a[k], b[k], twins) for k in a)
    if isinstance(a, slice):
        return isinstance(b, slice) and _is_same((a.start, a.stop, a.step), (b.start, b.stop, b.step), twins)
    if isinstance(a, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    return a is b or (type(a) is type(b) and _says_equal(a, b))


def _says_equal(a: Any, b: Any) -> bool:
    """What an object of whatever class says of another; one that cannot compare itself is not equal."""
    try:
        return (a == b) is True
    except Exception:
        return False


def prune(recording: Recording) -> Recording:
    """The recording without pure calls that nothing uses, pieces and sizes next to what they come from."""
    used = {id(recording.calls[-1])}
    kept: list[Call] = []
    for call in reversed(recording.calls):
        if call.op != "placeholder" and id(call) not in used and call.is_pure:
            continue
        kept.append(call)
        used.update(id(c) for c in call.inputs)
    calls = _hoist(_in_demand_order(kept[::-1], recording.setting.grad))
    targets = {c.target for c in calls if c.op == "get_attr"}
    constants = {k: v for k, v in recording.constants.items() if k in targets}
    guards = sorted(recording.guards, key=lambda g: g.source)
    return dataclasses.replace(recording, calls=calls, constants=constants, guards=guards)


def _in_demand_order(calls: list[Call], derives: bool) -> list[Call]:
    """What moves no gradient and has no effect right before the first call that takes it, the rest in order.

    Masks and tables that code makes in a loop over a ``set`` then come alike in every process. What is made
    of weights stays where it is, frozen or not, in a recording that ``derives``: one with gradients enabled.
    """
    written = frozenset().union(*(c.writes for c in calls))
    frozen = _made_of_frozen(calls) if derives else frozenset()
    waiting = {id(c): c for c in calls if id(c) not in frozen and _waits(c, written)}
    moved = frozenset(waiting)
    out: list[Call] = []

    def bring(call: Call) -> None:
        for given in _inputs_by_key((call.args, call.kwargs)):
            if id(given) in waiting:
                bring(waiting.pop(id(given)))
        out.append(call)

    for call in calls:
        if id(call) not in moved:
            bring(call)
    return out


def _made_of_frozen(calls: Sequence[Call]) -> frozenset[int]:
    """The ids of the calls that would move gradients, were the weights trained that are frozen."""
    out: set[int] = set()
    for call in calls:
        is_made = call.is_frozen or any(id(c) in out for c in call.inputs)
        takes = (not is_whole(t) for t in tensors(call.value))
        in_mode = call.region is None or call.region.grad is not False
        if is_made and in_mode and not is_cut_off(call) and (call.op == "get_attr" or any(takes)):
            out.add(id(call))
    return frozenset(out)


def _waits(call: Call, written: frozenset[int]) -> bool:
    has_effect = call.is_random or call.is_check or call.has_effect or call.mutated
    if call.op in ("placeholder", "output") or has_effect or written & (call.storages | call.reads):
        return False
    return not any(t.requires_grad for t in tensors(call.value))


def _inputs_by_key(value: Any) -> Iterator[Call]:
    """The calls nested in an argument; those in a dict by its keys, whatever their order."""
    if isinstance(value, dict):
        value = [value[k] for k in sorted(value, key=str)]
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _inputs_by_key(item)
    else:
        yield from calls_in(value)


def _hoist(calls: list[Call]) -> list[Call]:
    """Accessors right behind the latest of their inputs, the rest in order."""
    rank: dict[int, tuple[int, ...]] = {}
    for i, call in enumerate(calls):
        rank[id(call)] = (-2, i) if call.op == "placeholder" else (i,)
        if call.accessor and call.inputs:
            behind = max(rank[id(c)] for c in call.inputs)
            rank[id(call)] = ((-1,) if behind[0] == -2 else behind) + (i,)
    return sorted(calls, key=lambda c: rank[id(c)])
