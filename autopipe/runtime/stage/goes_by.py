"""What a ``loss_fn`` goes by that its user may set between steps: an epoch, a weight, a flag, a function.

When it is asked again for that is left to ``choice``.
"""

from __future__ import annotations

import bisect
import enum
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...tracing.members import OF_ALL
from ...tracing.state.cells import ArrayCell, content
from ...tracing.state.global_names import codes_in, is_foreign, names_in
from ...tracing.state.state import Snapshot

__all__ = ["GoesBy"]

_MOST_PLACES = 1 << 12
"""So many places are looked at in each step."""
_MOST_LISTED = 8
"""Longer lists are not looked into: they keep what was."""
_MOST_ELEMENTS = 64
"""Of larger tensors, as queues and centres, the values are not looked at."""
_OWN = "autopipe."
_NUMBERS = (int, float)
_WORDS = (bool, str, bytes, type(None), torch.dtype, torch.device)
Read = Callable[[], Any]


class _Itself:
    """What is equal to nothing else; it is kept, so that nothing else can come to its place in memory."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


class _Length(int):
    """How many a container holds, which lies among the numbers in code alone."""


class GoesBy:
    """The plain values in places that a loss's code names, read in one go.

    Numbers count by how they lie among those in the code and among each other, as code compares them:
    ``epoch >= 5``, ``step < self.warmup``, a weight that is no longer 0.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        codes = [*_codes(snapshot)]
        names = frozenset().union(*map(names_in, codes), *(_texts(code) for code in codes))
        held = [n for code in codes for n in _numbers(code)]
        whole = (n for n in held if type(n) is int)
        among: list[float] = sorted({0, *whole})
        self._known: dict[type, list[float]] = {int: among, float: sorted({0, *held}), _Length: among}
        self._reads = [*_reads(snapshot, names)][:_MOST_PLACES]

    def state(self) -> tuple[Any, ...]:
        """What is in these places now; equal where it takes code no other way, as far as that is told."""
        out: list[Any] = []
        numbers: dict[type, list[Any]] = {kind: [] for kind in self._known}
        for read in self._reads:
            value = _told(read)
            if type(value) in numbers:
                if value == value:
                    numbers[type(value)].append(value)
                value = type(value), value == value
            out.append(value)
        for kind, found in numbers.items():
            known, marks = self._known[kind], [] if kind is _Length else sorted(set(found))
            for n in found:
                among = bisect.bisect_left(known, n)
                is_one = among < len(known) and known[among] == n
                out.append((among, is_one, bisect.bisect_left(marks, n)))
        return tuple(out)


def _told(read: Read) -> Any:
    """What a place tells; of what cannot be read or compared, as sparse tensors, which error that ends in."""
    try:
        value = _plain(read())
        hash(value)
    except Exception as error:  # whatever a user's own kinds of dicts and values do
        return type(error)
    return value


def _plain(value: Any) -> Any:
    """What a value is told apart from others by: of plain ones they, of code which it is, else its kind."""
    if isinstance(value, torch.Tensor):
        if type(value) is not torch.Tensor:  # as weights, which other ranks may train
            return type(value)
        is_told = value.is_cpu and 0 < value.numel() <= _MOST_ELEMENTS and not value.requires_grad
        return _of_tensor(value) if is_told else torch.Tensor
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, enum.Enum):
        return _Itself(value)
    if type(value) in (*_NUMBERS, _Length) or isinstance(value, _WORDS):
        return value
    if isinstance(value, tuple):
        return (tuple, *map(_plain, value)) if len(value) <= _MOST_LISTED else tuple
    return _Itself(value) if callable(value) else type(value)


def _of_tensor(value: torch.Tensor) -> Any:
    """The number that it is; of several, which are 0, and whether all are alike, as weights of classes."""
    if value.numel() == 1:
        return value.item()
    flat = value.flatten()
    return torch.Tensor, bool((flat == flat[0]).all()), tuple(flat.bool().tolist())


def _codes(snapshot: Snapshot) -> Iterator[types.CodeType]:
    """The code that a loss reaches, but for torch's and Python's own."""
    for value in snapshot.reached.seen.values():
        is_users = isinstance(value, types.FunctionType) and not is_foreign(value.__module__)
        if is_users and not value.__module__.startswith(_OWN):
            yield from codes_in(value)


def _inner(code: types.CodeType) -> Iterator[Any]:
    for value in code.co_consts:
        yield from value if isinstance(value, (tuple, frozenset)) else (value,)


def _texts(code: types.CodeType) -> Iterator[str]:
    """By which it may ask dicts, or is given what they hold."""
    yield from code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    yield from (v for v in _inner(code) if type(v) is str)


def _numbers(code: types.CodeType) -> Iterator[float]:
    yield from (v for v in _inner(code) if type(v) in _NUMBERS)


def _reads(snapshot: Snapshot, names: frozenset[str]) -> Iterator[Read]:
    """What reads each place that holds something by one of these names, or may come to."""
    found = snapshot.reached
    for _, module, _ in snapshot.modules:
        if module is not snapshot.model:
            is_torchs = is_foreign(type(module).__module__)  # whose code is not read
            yield from _in_namespace(vars(module), vars(module).keys() - OF_ALL if is_torchs else names)
            yield from _in_namespace(module._buffers, module._buffers.keys() if is_torchs else names)
            yield _value(vars(module), "training")
    for _, _, holder in found.holders:
        if isinstance(holder, dict):
            yield from _in_namespace(holder, names)
        else:
            yield _length(holder)
            if isinstance(holder, list) and len(holder) <= _MOST_LISTED:
                yield from (_item(holder, i) for i in range(len(holder)))
    for _, file, known, asked in found.files:
        if file.startswith(_OWN):
            continue
        yield from (_value(known, name) for name in asked)
    for _, _, cls in found.classes:
        if not cls.__module__.startswith(_OWN):
            yield from (_value(vars(cls), name) for name in names & vars(cls).keys())
    yield from (_content(cell) for _, _, cell in found.cells if not isinstance(cell, ArrayCell))


def _in_namespace(held: Mapping[Any, Any], names: Iterable[str]) -> Iterator[Read]:
    if all(isinstance(key, str) and key.isidentifier() for key in held):
        yield lambda: (len(held),)  # one more attribute, which code may ask for by its name
    else:
        yield _length(held)
    yield from (_value(held, name) for name in names if name in held)


def _length(held: Collection[Any]) -> Read:
    return lambda: _Length(len(held))


def _value(held: Mapping[Any, Any], name: Any) -> Read:
    return lambda: held.get(name)


def _item(held: Sequence[Any], i: int) -> Read:
    return lambda: held[i] if i < len(held) else None


def _content(cell: Any) -> Read:
    return lambda: content(cell)
