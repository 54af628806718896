"""Whether everything in a snapshot is unchanged, told in one go: after most runs nothing has changed.

What did change, and putting it back, is left to ``state``.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import gc
import itertools
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from ...torch_private import dict_version
from ..inputs.structure import flatten
from .cells import ArrayCell, Cell, content, contents

__all__ = [
    "SIMPLE",
    "Glance",
    "Remembered",
    "Seen",
    "addresses",
    "are_same",
    "is_data",
    "put_on",
    "tells_equality",
    "told_apart",
]

_Key = TypeVar("_Key", bound=Hashable)
_Told = TypeVar("_Told")

SIMPLE = (int, float, str, bytes, bool, type(None))
_MANY = torch.Tensor, np.ndarray
_ROWS: tuple[Any, ...] = (list, collections.deque)
_PLAIN = frozenset({dict, collections.OrderedDict, set, *_ROWS})
_ADDRESS_BYTES = ctypes.sizeof(ctypes.c_void_p)
_MOST_BYTES = 1 << 18
"""Tensors of at most so many bytes are compared as bytes, which need to be copied for it."""


class Seen(NamedTuple):
    """How long containers were, what dicts held, and what all else did.

    Of dicts there are all values, then all keys, then what files have under names.
    """

    lengths: list[int]
    in_dicts: tuple[Any, ...]
    elsewhere: tuple[Any, ...]

    def is_same(self, other: Seen) -> bool:
        """Whether the same objects were seen in the same places."""
        is_same_elsewhere = self.lengths == other.lengths and are_same(self.elsewhere, other.elsewhere)
        return is_same_elsewhere and are_same(self.in_dicts, other.in_dicts)


_Namespace = tuple[Any, tuple[str, ...], frozenset[str] | None]
"""What holds names, those that are compared, and all that it may hold data under; None where any."""


class Glance:
    """Containers, names in namespaces, cells and tensors; what they hold is compared by identity.

    Sets, arrays and tensors are compared with what they held at first, tensors with their ``copies``. Of
    namespaces that are to have no other data than under names known, such are held, too.
    """

    _last: tuple[list[int], list[int], tuple[Any, ...]] | None
    _in_files: list[tuple[Any, ...]]
    _counts_in_files: Sequence[int]
    _starts: list[tuple[Any, ...]]
    _ways: dict[tuple[int, int], list[tuple[dict[Any, Any], Any, Any]]]

    def __init__(
        self,
        containers: Iterable[Any],
        named: Iterable[tuple[Mapping[str, Any], Iterable[str], frozenset[str] | None]],
        cells: Sequence[Cell],
        copies: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        once = list({id(c): c for c in containers}.values())
        self.empty = [c for c in once if type(c) in _PLAIN and not c]
        filled = [c for c in once if type(c) not in _PLAIN or c]
        self.dicts = [c for c in filled if isinstance(c, dict)]
        self.rows = [(kind, [c for c in filled if isinstance(c, kind)]) for kind in _ROWS]
        self.sets = [(c, set.copy(c)) for c in filled if isinstance(c, set)]
        each = [(_in_its_dict(held), tuple(names), known) for held, names, known in named]
        self.files: list[_Namespace] = [(h, names, known) for h, names, known in each if type(h) is dict]
        self.classes: list[_Namespace] = [
            (held, names, known) for held, names, known in each if type(held) is not dict
        ]
        self.cells = [c for c in cells if not isinstance(c, ArrayCell)]
        self.arrays = [(c, content(c)) for c in cells if isinstance(c, ArrayCell)]
        self.tensors = _Copies([_Copied(tensor, copy) for tensor, copy in copies])
        self._counting = [*self.dicts, *(held for held, *_ in self.files)]
        self.forget()

    def include(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """Compare one more tensor with a copy of what it held at first."""
        self.tensors.add(_Copied(tensor, copy))

    def know(self, shown: Mapping[str, Any], names: frozenset[str]) -> None:
        """Let it be known that a namespace holds data under these names, too."""
        namespace = _in_its_dict(shown)
        for group in (self.files, self.classes):
            group[:] = [
                (held, its, known | names if held is namespace and known is not None else known)
                for held, its, known in group
            ]
        self.forget()

    def seen(self) -> Seen:
        """What is held now in all that is compared by identity."""
        lengths, in_dicts = self._in_dicts()
        lengths, elsewhere = [*lengths], list[Any]()
        for kind, rows in self.rows:
            lengths += map(kind.__len__, rows)
            elsewhere += itertools.chain.from_iterable(map(kind.__iter__, rows))
        for held in self.classes:
            elsewhere += _under_names(*held)
        elsewhere += contents(self.cells)
        return Seen(lengths, in_dicts, tuple(elsewhere))

    def _in_dicts(self) -> tuple[list[int], tuple[Any, ...]]:
        """How long the dicts are and what they hold: as was last seen, where none counts a change since.

        To touch all that is held takes longer than most looks may, and most runs leave all dicts alone.
        """
        counted = self._counted()
        if self._last is None or not counted or counted != self._last[0]:
            chained = itertools.chain.from_iterable
            values, keys = chained(map(dict.values, self.dicts)), chained(map(dict.keys, self.dicts))
            held: tuple[Any, ...] = tuple(itertools.chain(values, keys, self._named(counted)))
            self._last = counted, [*map(dict.__len__, self.dicts)], held
        return self._last[1:]

    def _counted(self) -> list[int]:
        """How many changes each dict counts, and each file behind them; empty where none counts any."""
        return [*map(dict_version, self._counting)] if dict_version is not None else []

    def _named(self, counted: Sequence[int]) -> Iterator[Any]:
        """What files have under names, looked up again in those that have ``counted`` a change since."""
        before, self._counts_in_files = self._counts_in_files, counted[len(self.dicts) :]
        if not (before and self._counts_in_files):
            self._in_files = [_under_names(*held) for held in self.files]
        elif before != self._counts_in_files:
            for place, (count, then) in enumerate(zip(self._counts_in_files, before, strict=True)):
                if count != then:
                    self._in_files[place] = _under_names(*self.files[place])
        return itertools.chain.from_iterable(self._in_files)

    def forget(self) -> None:
        """Let go of what was last seen, which may be about to be no more."""
        self._last = None
        self._in_files, self._counts_in_files = [], ()
        self._starts, self._ways = [], {}

    def is_kept(self) -> bool:
        """Whether all that is not compared by identity is as it was at first."""
        return self.is_kept_but_tensors() and not self.tensors.written()

    def is_kept_but_tensors(self) -> bool:
        """Whether that is so of all but tensors."""
        if any(self.empty) or any(now != then for now, then in self.sets):
            return False
        return all(content(cell) == value for cell, value in self.arrays)

    def written(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that hold something else than at first, with their copies."""
        return [(held.tensor, held.copy) for held in self.tensors.written()]

    def keys_apart(self, a: Seen, b: Seen) -> set[Any]:
        """The keys under which other values were seen; None stands for what is apart otherwise."""
        is_as_long = a.lengths == b.lengths and len(a.in_dicts) == len(b.in_dicts)
        if not is_as_long or not are_same(a.elsewhere, b.elsewhere):
            return {None}
        n_values = sum(a.lengths[: len(self.dicts)])
        apart = _apart(a.in_dicts, b.in_dicts)
        return {a.in_dicts[n_values + i] if i < n_values else None for i in apart}

    def put(self, now: Seen, then: Seen) -> bool:
        """Lead from what is seen ``now`` to what was ``then``, if only values under the same keys differ."""
        is_as_long = now.lengths == then.lengths and len(now.in_dicts) == len(then.in_dicts)
        if not is_as_long or not are_same(now.elsewhere, then.elsewhere):
            return False
        last = self._last if self._last is not None and self._last[2] is now.in_dicts else None
        if are_same(now.in_dicts, then.in_dicts):
            self._last = last and (*last[:2], then.in_dicts)  # one row is told from another faster than two
            return True
        if last is not None and last[0] != self._counted():
            last = None  # something has changed since
        steps = self._steps_to(then, now)
        if steps is None:
            return False
        for holder, key, value in steps:
            dict.__setitem__(holder, key, value)
        self._last = last and (self._counted(), last[1], then.in_dicts)
        return True

    def _steps_to(self, then: Seen, now: Seen) -> list[tuple[dict[Any, Any], Any, Any]] | None:
        """What to put under which keys of which dicts; None where other keys were seen.

        From where runs start in one mode to where they do in the other that is told once.
        """
        rows = now.in_dicts, then.in_dicts
        way = id(rows[0]), id(rows[1])
        if way in self._ways:
            return self._ways[way]
        lengths, apart = now.lengths[: len(self.dicts)], _apart(*rows)
        n_values = sum(lengths)
        if apart[-1] >= n_values:
            return None
        ends = [*itertools.accumulate(lengths)]
        keys, values = then.in_dicts[n_values:], then.in_dicts
        steps = [(self.dicts[bisect.bisect_right(ends, i)], keys[i], values[i]) for i in apart]
        if all(any(row is start for start in self._starts) for row in rows):
            self._ways[way] = steps
        elif not any(rows[1] is start for start in self._starts):  # nothing but starts is held for it
            self._starts.append(rows[1])
        return steps


def tells_equality(value: Any) -> bool:
    """Whether ``==`` gives a truth for a value: a number, text, or a tuple without tensors and arrays."""
    if isinstance(value, tuple):
        return not any(isinstance(v, _MANY) for v in flatten(value)[0])
    return isinstance(value, SIMPLE)


def told_apart(value: Any) -> Any:
    """A value as ``==`` may tell it from others: of tensors and arrays in it the class alone."""
    if tells_equality(value):
        return value
    return tuple(type(v) if isinstance(v, _MANY) else v for v in flatten(value)[0])


def are_same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects; told by their addresses, in one go."""
    return a is b or (len(a) == len(b) and addresses(a) == addresses(b))


class Remembered(Generic[_Key, _Told]):
    """What is told of keys such as classes, as long as what was looked at for it holds the same objects."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[_Key, tuple[list[Any], _Told]] = {}

    def of(self, key: _Key, held: list[Any], tell: Callable[[], _Told]) -> _Told:
        """What was told of a key when what is ``held`` was looked at; told anew where that was other."""
        known = self._known.get(key)
        if known is None or not are_same(known[0], held):
            if len(self._known) >= self._most:
                self._known.clear()
            known = self._known[key] = held, tell()
        return known[1]


def is_data(value: Any) -> bool:
    """Whether a value is data that code may count in, or keep for later calls: no code and no module."""
    return not (callable(value) or isinstance(value, types.ModuleType) or hasattr(type(value), "__get__"))


def put_on(held: Mapping[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """The data that a namespace holds under other names than were ``known``."""
    new = () if len(held) <= len(known) else [name for name in held if name not in known]
    return {name: held[name] for name in new if is_data(held[name]) and not name.startswith("__")}


def _under_names(
    held: Mapping[str, Any], names: tuple[str, ...], known: frozenset[str] | None
) -> tuple[Any, ...]:
    new = () if known is None else put_on(held, known).values()
    return *map(held.get, names), *new


def _in_its_dict(shown: Mapping[str, Any]) -> Mapping[str, Any]:
    """A namespace; that of a class as the dict behind what is shown, which counts changes."""
    held = gc.get_referents(shown) if type(shown) is types.MappingProxyType else []
    return held[0] if len(held) == 1 and type(held[0]) is dict else shown


def _apart(a: tuple[Any, ...], b: tuple[Any, ...]) -> list[int]:
    """Where two rows of objects differ."""
    return [*itertools.compress(itertools.count(), map(operator.is_not, a, b))]


def addresses(held: Sequence[Any]) -> bytes:
    """Where the objects lie that a sequence holds: what a tuple of CPython's has behind its head."""
    row = tuple(held)
    return ctypes.string_at(id(row) + tuple.__basicsize__, len(row) * _ADDRESS_BYTES)


class _Copied:
    """A tensor and a copy of what it held at first: in bytes where it is small, which are compared faster.

    They are looked at in their place in memory: ``numpy()`` would leave a tensor that cannot be resized.
    """

    __slots__ = ("copy", "held", "memory", "place", "shape", "tensor")

    def __init__(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        self.tensor, self.copy, self.shape = tensor, copy, tensor.shape
        is_small = 0 < tensor.nbytes <= _MOST_BYTES and tensor.device.type == "cpu"
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_complex()
        is_dense = is_small and is_plain and tensor.is_contiguous() and not tensor.is_neg()
        self.place = tensor.data_ptr() if is_dense else 0
        self.memory: Any = (ctypes.c_char * tensor.nbytes).from_address(self.place) if self.place else b""
        self.held = bytearray(self.memory)

    def is_kept(self) -> bool:
        """Whether the tensor holds what it held."""
        tensor = self.tensor
        if tensor.dtype is not self.copy.dtype:
            return False
        is_there = self.place and tensor.data_ptr() == self.place and tensor.shape == self.shape
        if is_there and tensor.is_contiguous() and self.held == self.memory:
            return True
        return torch.equal(tensor, self.copy)


class _Copies:
    """Tensors with copies of what they held at first; those in bytes are looked at in one go, as most are."""

    def __init__(self, held: Iterable[_Copied]) -> None:
        self.all: list[_Copied] = []
        self._others: list[_Copied] = []
        self._tensors: list[torch.Tensor] = []
        self._held: list[bytearray] = []
        self._memory: list[Any] = []
        self._laid: list[Any] = []
        for each in held:
            self.add(each)

    def add(self, held: _Copied) -> None:
        """Look at one more; how the others lay at first stays known."""
        self.all.append(held)
        if not held.place:
            self._others.append(held)
            return
        self._tensors.append(held.tensor)
        self._held.append(held.held)
        self._memory.append(held.memory)
        self._laid += _lay([held.tensor])

    def written(self) -> list[_Copied]:
        """Those that hold something else than at first."""
        is_kept = _lay(self._tensors) == self._laid and all(map(operator.eq, self._held, self._memory))
        return [held for held in (self._others if is_kept else self.all) if not held.is_kept()]


def _lay(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Where and how tensors lie."""
    asked = torch.Tensor.data_ptr, torch.Tensor.size, torch.Tensor.stride, operator.attrgetter("dtype")
    return [*zip(*(map(ask, tensors) for ask in asked), strict=True)]
