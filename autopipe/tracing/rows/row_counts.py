"""How many rows there are, as code is told it, followed to where that asks more of it than to hand it on.

Code that makes tensors of as many rows, or of some for each, does the same for any number of them. What other
code does is left to ``among_many``, which runs it on each.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...torch_private import HiddenMode, TorchDispatchMode
from ..calls.functions import classify, tensors
from ..calls.named import is_users_operator
from .thresholds import CUTS, places_beyond

__all__ = ["RowCounts", "RowsLost", "is_looked_into", "without_counts"]

_GIVING = frozenset({
    "broadcast_shapes", "broadcast_to", "empty", "expand", "full", "new_empty", "new_full", "new_ones",
    "new_zeros", "ones", "rand", "randn", "repeat", "reshape", "unflatten", "view", "zeros",
})  # fmt: skip
"""Functions that are given sizes, of what they make."""
_COUNTING = frozenset({"cumprod", "cumsum", "logcumsumexp"})
"""Functions that tell rows how many are ahead of them, where they go along these."""
_SHARING = frozenset({"log_softmax", "softmax", "softmin"})
"""Functions that share out one among rows, where they go along these."""
_HISTOGRAMS = frozenset({"bincount", "histc"})
"""Functions that count rows by kind; of places as well, it shows on many rows what is made of these."""
_OF_ANY_NUMBER = frozenset({"all", "any"})
"""Functions over rows that do the same for any number of them."""
_DERIVING = frozenset({torch.Tensor.backward, torch.autograd.grad})
"""Functions that run backwards, any code among them."""
_PLAIN = frozenset({Tensor, nn.Parameter})
_TEXTS = frozenset({"__format__", "__hash__", "__repr__", "__str__"})


class _AskedError(Exception):
    """Code asks for a number."""


class RowCounts(HiddenMode):
    """Within it code is told a :class:`_Count` wherever a size is a multiple of ``n``, which few others are.

    Attributes
    ----------
    asks: whether code has asked for more than to hand it on, or may have counted rows. places: whether it has
        made places of rows. reads: whether it has read what tensors hold.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.asks = self.places = self.reads = False

    def counted(self, value: Any) -> Any:
        """A number, or sizes, with such for those that hang on rows."""
        if type(value) is int:
            return _Count(self, value // self.n) if value and value % self.n == 0 else value
        if isinstance(value, tuple) and any(type(n) is int and self._is_of_rows(n) for n in value):
            return _Sizes(map(self.counted, value))
        return value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, name = _classified(func)
        kwargs = kwargs or {}
        if is_told := _holds_count((args, kwargs)):
            filled = (args[-1:], kwargs.get("fill_value")) if name.endswith("full") else ()
            if (name not in _GIVING and name != "arange") or _holds_count(filled):
                self.ask()
            self.places |= name == "arange"
            args, kwargs = without_counts(args), without_counts(kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.asks = True  # code may go by that
            raise
        self.asks |= self.places and kind == "read"
        self.asks |= is_told and isinstance(result, Tensor) and not self.has_rows(result)
        self.asks |= name == "__getitem__" and self._is_of_place(*args)
        self.reads |= kind in ("read", "data shaped")
        self.asks |= not is_looked_into(func, types, args, kwargs)
        self.places |= name in _COUNTING and self._is_along_rows(*args, **kwargs)
        self.asks |= name in _SHARING and self._is_along_rows(*args, **kwargs)
        beyond = places_beyond(name, args, kwargs) if name in CUTS else ()
        self.places |= any(self._is_of_rows(size) for _, size in beyond)
        return self._told(kind, name, (args, kwargs), result)

    def _told(self, kind: str, name: str, given: Any, result: Any) -> Any:
        if isinstance(result, (bool, type(None), torch.dtype, torch.device, torch.layout)):
            shapes = {t.shape for t in tensors(given)} if isinstance(result, bool) else ()
            self.asks |= len(shapes) > 1 and any(self._is_of_rows(n) for shape in shapes for n in shape)
            return result
        if isinstance(result, Tensor):
            if kind in ("op", "data shaped") and name not in _OF_ANY_NUMBER and not self.has_rows(result):
                is_of_rows = any(map(self.has_rows, tensors(given)))
                self.places |= is_of_rows and name in _HISTOGRAMS
                self.asks |= is_of_rows
            return result
        if name == "__len__" and not self._is_of_rows(result):
            return result
        if isinstance(result, int) or (isinstance(result, tuple) and all(type(n) is int for n in result)):
            return self.counted(result)
        pieces = tensors(result)
        is_told = not (pieces and all(map(self.has_rows, pieces)))
        self.asks |= (
            self._is_of_rows(result)
            if isinstance(result, float)
            else (is_told and any(map(self.has_rows, tensors(given))))
        )
        return result

    def _is_of_place(self, tensor: Tensor, index: Any) -> bool:
        """Whether a row is taken that is not there among a few."""
        first = index[0] if isinstance(index, tuple) and index else index
        return type(first) is int and not -3 < first < 2 and self._is_of_rows(tensor.shape[0])

    def _is_along_rows(self, tensor: Tensor, dim: Any, *_: Any, **__: Any) -> bool:
        return type(dim) is not int or self._is_of_rows(tensor.shape[dim])

    def has_rows(self, tensor: Tensor) -> bool:
        """Whether some axis is of a multiple of ``n`` places."""
        return any(map(self._is_of_rows, tensor.shape))

    def _is_of_rows(self, number: float) -> bool:
        return bool(number) and number % self.n == 0

    def ask(self) -> Any:
        """Note that code asks."""
        self.asks = True
        raise _AskedError


def is_looked_into(func: Any, types: Any, args: Any, kwargs: Any) -> bool:
    """Whether all that a function does is seen.

    It is not in functions that are given to others, those of tensors of other classes, operators that are not
    torch's and backwards that code runs.
    """
    is_given = any(map(callable, (*args, *kwargs.values())))
    return not (is_given or not _PLAIN.issuperset(types) or func in _DERIVING or is_users_operator(func))


class RowsLost(TorchDispatchMode):
    """Within it ``counts`` are told of ops that make something without rows of what has them.

    For scripted code, of which no other mode sees anything.
    """

    def __init__(self, counts: RowCounts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        has_rows = self._counts.has_rows
        is_given = any(map(has_rows, tensors((args, kwargs))))
        self._counts.asks |= is_given and not all(map(has_rows, tensors(result)))
        return result


class _Count(torch.SymInt):
    """A number that hangs on how many rows there are: so many ``times`` these, and ``more``.

    It passes for a whole number; torch takes it for a size, and what else is written in C has to ask for one.
    """

    __class__ = property(lambda count: int)

    def __init__(self, counts: RowCounts, times: int, more: int = 0) -> None:
        self.counts, self.times, self.more = counts, times, more

    @property
    def value(self) -> int:
        return self.counts.n * self.times + self.more

    def _made(self, times: int, more: int) -> Any:
        return _Count(self.counts, times, more) if times else more

    def __add__(self, other: Any) -> Any:
        if type(other) is _Count:
            return self._made(self.times + other.times, self.more + other.more)
        return self._made(self.times, self.more + other) if type(other) is int else self.counts.ask()

    def __mul__(self, other: Any) -> Any:
        return self._made(self.times * other, self.more * other) if type(other) is int else self.counts.ask()

    def __neg__(self) -> Any:
        return self._made(-self.times, -self.more)

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __floordiv__(self, other: Any) -> Any:
        is_whole = type(other) is int and other and self.times % other == self.more % other == 0
        return self._made(self.times // other, self.more // other) if is_whole else self.counts.ask()

    def __mod__(self, other: Any) -> Any:
        is_same = type(other) is int and other and self.times % other == 0
        return self.more % other if is_same else self.counts.ask()

    def __bool__(self) -> bool:
        return self != 0

    __radd__, __rmul__ = __add__, __mul__


def _comparing(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """What compares counts, where the answer is one for any two rows or more."""

    def compared(count: Any, other: Any) -> bool:
        if other is None or type(other) is str:
            return NotImplemented
        off = count - other if type(other) in (int, bool, _Count) else count.counts.ask()
        if type(off) is int:
            return compare(off, 0)
        ends = 2 * off.times + off.more
        return compare(ends, 0) if ends * off.times > 0 else count.counts.ask()

    return compared


for _compare in (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge):
    setattr(_Count, f"__{_compare.__name__}__", _comparing(_compare))
for _name in {*dir(int)} - {*dir(object)} - {*vars(_Count)} | _TEXTS:
    _asked: Any = lambda count, *_: count.counts.ask()  # noqa: E731
    setattr(_Count, _name, _asked if _name.startswith("__") else property(_asked))


class _Sizes(tuple[Any, ...]):
    """Sizes of a tensor, of which some are counts; it passes for those of torch's."""

    __class__ = property(lambda sizes: torch.Size)

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        return _Sizes(found) if isinstance(place, slice) else found

    def numel(self) -> Any:
        return functools.reduce(operator.mul, self, 1)


def _holds_count(value: Any) -> bool:
    cls = type(value)
    if cls is _Count:
        return True
    if cls in (tuple, list, _Sizes):
        return any(map(_holds_count, value))
    if cls is dict:
        return any(map(_holds_count, value.values()))
    return cls is slice and _holds_count((value.start, value.stop, value.step))


def without_counts(value: Any) -> Any:
    """A value with whole numbers for the counts in it."""
    cls = type(value)
    if cls is _Count:
        return value.value
    if cls in (tuple, list, _Sizes):
        plain = map(without_counts, value)
        return torch.Size(plain) if cls is _Sizes else cls(plain)
    if cls is dict:
        return {key: without_counts(each) for key, each in value.items()}
    return value


@functools.lru_cache(maxsize=1 << 12)
def _classified(func: Callable[..., Any]) -> tuple[str, str]:
    return classify(func)
