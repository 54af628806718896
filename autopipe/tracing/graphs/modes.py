"""The training and the evaluation form of a model under common names, as one graph where they agree.

Recording each form is left to ``recorder``, making graphs of them to ``emit``.
"""

from __future__ import annotations

import builtins
import dataclasses
import difflib
import keyword
import re
from collections.abc import Iterator
from typing import Any

from ..calls.call import Call, Recording, calls_in
from ..calls.functions import qualified_name, tensors

__all__ = ["merge", "prune", "select"]


def select(flag: bool, training: Any, evaluation: Any) -> Any:
    """The constant of the form that ``flag`` (a module's ``training``) asks for."""
    return training if flag else evaluation


def prune(recording: Recording) -> Recording:
    """The recording without pure calls that nothing uses, pieces and sizes next to what they come from."""
    used = {id(recording.calls[-1])}
    kept: list[Call] = []
    for call in reversed(recording.calls):
        if call.op != "placeholder" and id(call) not in used and call.is_pure:
            continue
        kept.append(call)
        used.update(id(c) for c in call.inputs)
    calls = _hoist(_in_demand_order(kept[::-1]))
    targets = {c.target for c in calls if c.op == "get_attr"}
    constants = {k: v for k, v in recording.constants.items() if k in targets}
    guards = sorted(recording.guards, key=lambda g: g.source)
    return dataclasses.replace(recording, calls=calls, constants=constants, guards=guards)


def _in_demand_order(calls: list[Call]) -> list[Call]:
    """What moves no gradient and has no effect right before the first call that takes it, the rest in order.

    Masks and tables that code makes in a loop over a ``set`` then come alike in every process.
    """
    written = frozenset().union(*(c.writes for c in calls))
    waiting = {id(c): c for c in calls if _waits(c, written)}
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


def merge(train: Recording, evaluation: Recording) -> dict[bool, Recording]:
    """Both forms with calls named: equal names are the same op. One object twice where one form serves both.

    Calls are matched by what they call and where; constants that differ follow the module's ``training``
    flag.
    """
    pairs = _match(train.calls, evaluation.calls)
    twins = {id(e): t for t, e in pairs}
    whole = len(pairs) == len(train.calls) == len(evaluation.calls) and train.output == evaluation.output
    namer = _Namer()
    if whole and all(_agrees(t, e, twins) for t, e in pairs):
        return dict.fromkeys((True, False), _name(_follow_mode(train, pairs), namer))
    _name(train, namer)
    for t, e in pairs:
        e.name = t.name
    _name(evaluation, namer)
    return {True: train, False: evaluation}


def _key(call: Call) -> tuple[Any, ...]:
    target = call.target if isinstance(call.target, str) else qualified_name(call.target)
    return call.op, target, call.path, call.source if call.op != "get_attr" else ""


def _match(train: list[Call], evaluation: list[Call]) -> list[tuple[Call, Call]]:
    keys = [_key(c) for c in train], [_key(c) for c in evaluation]
    if keys[0] == keys[1]:
        return list(zip(train, evaluation, strict=True))
    blocks = difflib.SequenceMatcher(None, *keys, autojunk=False).get_matching_blocks()
    return [(train[b.a + i], evaluation[b.b + i]) for b in blocks for i in range(b.size)]


def _agrees(train: Call, evaluation: Call, twins: dict[int, Call]) -> bool:
    """Whether two matched calls take matching values, whatever their constants are."""
    if train.region != evaluation.region:
        return False
    return _same_shape((train.args, train.kwargs), (evaluation.args, evaluation.kwargs), twins)


def _same_shape(a: Any, b: Any, twins: dict[int, Call]) -> bool:
    if isinstance(a, Call) or isinstance(b, Call):
        return isinstance(a, Call) and isinstance(b, Call) and twins.get(id(b)) is a
    if isinstance(a, (tuple, list)):
        return isinstance(b, type(a)) and len(a) == len(b) and all(map(_same_shape, a, b, [twins] * len(a)))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same_shape(a[k], b[k], twins) for k in a)
    if isinstance(a, slice):
        return isinstance(b, slice) and _same_shape(
            (a.start, a.stop, a.step), (b.start, b.stop, b.step), twins
        )
    return not isinstance(b, (tuple, list, dict, slice))


def _follow_mode(train: Recording, pairs: list[tuple[Call, Call]]) -> Recording:
    """The training form with constants that differ in evaluation replaced by ones that follow the flag."""
    calls: list[Call] = []
    flags: dict[str, Call] = {}
    for t, e in pairs:
        made: list[Call] = []
        args = _blend(t.args, e.args, t, flags, made)
        t.take(args, _blend(t.kwargs, e.kwargs, t, flags, made))
        calls += [*made, t]
    return dataclasses.replace(train, calls=calls)


def _blend(a: Any, b: Any, call: Call, flags: dict[str, Call], made: list[Call]) -> Any:
    if isinstance(a, Call):
        return a
    if isinstance(a, (tuple, list)):
        return type(a)(_blend(x, y, call, flags, made) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return {k: _blend(a[k], b[k], call, flags, made) for k in a}
    if isinstance(a, slice) or (type(a) is type(b) and (a == b or a != a)):
        return a
    target = f"{call.path}.training".lstrip(".")
    if target not in flags:
        flags[target] = Call("get_attr", target, hint=target, value=True)
        made.append(flags[target])
    if (a, b) == (True, False):
        return flags[target]
    chosen = Call("call_function", select, (flags[target], a, b), hint="select", path=call.path)
    chosen.source, chosen.value, chosen.is_size = call.source, a, True
    made.append(chosen)
    return chosen


_RESERVED = {*keyword.kwlist, *dir(builtins), "self", "torch", "device", "inf", "nan", "NoneType"}
_RESERVED |= {"fx_pytree", "pytree", "math", "operator", "typing"}


class _Namer:
    """Unique identifiers from hints, in the way of fx, but the same for both forms."""

    def __init__(self) -> None:
        self.taken: dict[str, int] = {}

    def __call__(self, hint: str) -> str:
        base = re.sub(r"\W", "_", hint).strip("_") or "value"
        if base[0].isdigit():
            base = f"_{base}"
        name = base
        while name in self.taken or name in _RESERVED:
            self.taken[base] = self.taken.get(base, 0) + 1
            name = f"{base}_{self.taken[base]}"
        self.taken.setdefault(name, 0)
        return name


def _name(recording: Recording, namer: _Namer) -> Recording:
    for call in recording.calls:
        if not call.name:
            call.name = namer(call.hint)
    return recording
