"""What a form gives for rows in other places, and whether rows alone make it: a value, a mean, a sum.

Putting rows there, and what mixes them where it is not, are left to ``mixing``.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, dtype, float32, float64

from ...graph import Dim
from ...units import Size, symbol
from ..calls.call import Call, Depends, Recording
from ..calls.describe import call_and_place
from ..calls.functions import tensors
from ..calls.labels import LabelsSeen, share_of
from ..inputs.contents import is_whole
from ..state.fills import FILL, without_fills
from .noise import OwnNoise

__all__ = [
    "ALLOWED",
    "ALLOWED_BELOW",
    "COARSE",
    "EQUAL",
    "FINER",
    "ROUNDED",
    "SLIGHT",
    "Results",
    "Rows",
    "axes",
    "differ",
    "extent",
    "is_as_recorded",
    "is_close",
    "is_floating",
    "is_number",
    "level_of",
    "other_axes",
    "run_until",
]

ALLOWED = {float64: 1e-8, float32: 1e-3}
"""Of the largest value; products of other sizes round otherwise."""
EQUAL = {float64: 1e-12, float32: 1e-5}
"""More than rounding: all else being equal, so are the products' sizes."""
SLIGHT = {float64: 1e-13, float32: 1e-6}
"""What rounding of a number alone may come to, or a small share of what mixes rows."""
ROUNDED = {float64: 1e-5, float32: 1e-3}
"""Of the largest value, where rows are more or fewer, or another form runs: fp64 may be fp32 inside."""
COARSE = {float64: 0.05, float32: 0.05}
"""Of the largest value, where code goes by data: what solves equations is as near as it is told to be."""
FINER = {float64: 0.01, float32: 0.01}
"""As :data:`COARSE`, where such code is told to be nearer."""
ALLOWED_BELOW = 0.1
"""Of the largest value of a narrower type."""
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
Rows = Callable[..., Any]
"""(rows, look) → what a form gives for the example's rows a and b in places such as ``"ab"``; ``look`` is
shown each call with its value."""


class Results:
    """What a form gives for rows in some places, its output leaves that calls made."""

    def __init__(
        self,
        form: Recording,
        run: Rows,
        is_longer: bool,
        has_others: bool,
        over_labels: Sequence[Mapping[str, Any]],
        noise: OwnNoise,
        n_rows: int,
        *,
        is_even: bool = False,
    ) -> None:
        """``is_even``: all that is drawn is one number, which goes by no row."""
        self._n_rows = n_rows
        self.form, self.run, self._is_longer, self._has_others = form, run, is_longer, has_others
        self._over_labels, self._is_counted = over_labels, bool(over_labels)
        self._noise = noise
        self._is_noisy = not is_even and any(c.is_random for c in form.calls)
        self.leaves = [c for c in form.calls[-1].args[0] if isinstance(c, Call)]
        self._values: dict[str, list[Any]] = {}
        self._labels: dict[str, LabelsSeen] = {}
        self._values_placed: dict[str, list[Any]] = {}
        self._numbers = [
            i for i, c in enumerate(self.leaves) if is_number(self.of("ab")[i]) and c.op != "placeholder"
        ]
        self.is_number = False

    def of(self, rows: str) -> list[Any]:
        """The leaves for these rows."""
        if rows not in self._values:
            seen = self._labels[rows] = LabelsSeen(self._over_labels)
            looks = [seen.look] if self._is_counted else []
            is_first = self._is_noisy and rows == "ab"
            looks += [self._noise.see] if is_first else []
            self._values[rows] = self._run(rows, functools.partial(_shown_to, looks) if looks else None)
            self._is_noisy = self._noise.is_drawn() if is_first else self._is_noisy
        return self._values[rows]

    def placed(self, rows: str) -> list[Any]:
        """The leaves for these rows, each with its own noise wherever it is."""
        if not self._is_noisy:
            return self.of(rows)
        if rows not in self._values_placed:
            self._values_placed[rows] = self._run(rows, own=True)
        return self._values_placed[rows]

    def _run(self, rows: str, look: Any = None, *, own: bool = False) -> list[Any]:
        """The leaves for these rows, each with its ``own`` noise where it is to have that anywhere."""
        if own and self._is_noisy:
            self.of("ab")  # what it draws is each row's own
            look = self._noise.put(rows, look)
        made = zip(self.form.calls[-1].args[0], self.run(rows, look), strict=True)
        return [v for c, v in made if isinstance(c, Call)]

    @property
    def is_noisy(self) -> bool:
        """Whether anything is drawn for rows a and b, once they have run; before, whether it may be."""
        return self._is_noisy

    @property
    def is_of_two(self) -> bool:
        """Whether nothing is beside rows a and b."""
        return not self._is_longer

    @property
    def is_by_row(self) -> bool:
        """Whether what was drawn so far is each row's own."""
        return self._noise.is_by_row

    @property
    def is_counted(self) -> bool:
        """Whether labels weigh rows."""
        return self._is_counted

    @property
    def are_telling(self) -> bool:
        """Whether the numbers made of inputs tell anything: no mean of nothing does, nor one that stays."""
        made = [i for i in self._numbers if self.leaves[i].depends & Depends.INPUT]
        figures = [[_figure(self.of(rows)[i]) for rows in ("ab", "aa", "bb")] for i in made]
        return all(all(map(math.isfinite, each)) and len({*each}) > 1 for each in figures)

    def fault(self, dim: Dim, shapes: _Shapes, allowed: Mapping[dtype, float]) -> str:
        """The first leaf that is not as rows alone make it, in words; ``is_number`` says which kind."""
        for i, call in enumerate(self.leaves):
            values = {rows: self.of(rows)[i] for rows in ("ab", "aa", "bb")}
            if any(differ(values, axis, allowed) for axis in axes(call, 0, dim, shapes)):
                self.is_number = False
                return call_and_place(call)
            for axis, is_even in other_axes(call, dim, shapes):
                lies = self._lies(values, axis, allowed) if is_even else None
                if lies is None and is_floating(values["ab"]):
                    self.is_number = False
                    return f"{call_and_place(call)}, whose places along axis {axis} are not of single rows"
        words = self.number_off(allowed, allowed)
        self.is_number = bool(words)
        return words

    def number_off(self, allowed: Mapping[dtype, float], level: Mapping[dtype, float] = EQUAL) -> str:
        """In words, the first number that is not as rows alone make it; or nothing."""
        for i in self._numbers:
            if words := self._no_mean(i, allowed.get(self.of("ab")[i].dtype, ALLOWED_BELOW), level):
                return f"{call_and_place(self.leaves[i])} is {words}"
        return ""

    def number_lacking(self) -> str:
        """In words, the first number that row b alone does not make, though it does beside a; or nothing."""
        found = (i for i in self._numbers if not bool(self.of("bb")[i].isfinite()))
        return next((f"{call_and_place(self.leaves[i])} leaves out rows that lack values" for i in found), "")

    def number_within(self) -> str:
        """In words, the first number made on the way that is neither mean nor sum of the rows'; or nothing.

        Not asked of longer batches, in which others weigh beside the rows.
        """
        seen: dict[str, dict[tuple[int, int], Tensor]] = {"ab": {}, "aa": {}, "bb": {}}
        for rows, kept in seen.items() if not self._is_longer else ():
            self._run(rows, functools.partial(_keep_numbers, kept))
        shares = self._shares or (0.5, 0.5)
        for call in self.form.calls:
            for i in range(len(tensors(call.value))) if call.op not in ("placeholder", "output") else ():
                each = [kept[id(call), i] for kept in seen.values() if (id(call), i) in kept]
                if len(each) < len(seen) or not all(bool(n.isfinite()) for n in each):
                    continue
                ab, aa, bb = each
                means = (aa + bb) / 2, shares[0] * aa + shares[1] * bb
                if not any(is_close(ab, mean) for mean in means):
                    words = (
                        f"{ab.item():.6g} for two rows that alone give {aa.item():.6g} and {bb.item():.6g}"
                    )
                    return f"{call_and_place(call)} is {words}"
        return ""

    def moved(self, dim: Dim, shapes: _Shapes, *, takes_more: bool) -> str:
        """In words, the first call whose rows are others in other places, or among more rows; or nothing.

        Both are asked at once, where the form ``takes_more`` rows by one; of numbers made of two rows, the
        first alone. Where what comes out differs by little, though by more than rounding, some op must differ
        by more. Not asked of longer batches that draw noise, which is not known row by row there.
        """
        if self._is_noisy and self._is_longer:
            return ""
        asked = () if self._is_longer else self._numbers
        there = "bab" if takes_more else "ba"
        order = there[:2] if self._is_longer else there  # a third row comes behind the others, if there are
        before, after = self.of("ab"), self.placed(there)
        swapped = self.placed("ba") if asked else ()
        if not self._noise.is_by_row:
            return ""
        moves = [
            (a, b, order, axis)
            for c, a, b in zip(self.leaves, before, after, strict=True)
            for axis in axes(c, 0, dim, shapes)
        ]
        numbers = [(before[i], swapped[i]) for i in asked]
        is_still = not any(_are_other(*move, EQUAL) for move in moves)
        if is_still and all(is_close(a, b, EQUAL) for a, b in numbers):
            return ""
        seen: dict[str, dict[tuple[int, int], Tensor]] = {"ab": {}, there: {}}
        for rows, kept in seen.items():
            self._run(rows, functools.partial(_keep_tensors, kept), own=True)
        for call in self.form.calls:
            # what is made of sizes alone has the rows of its places, whichever of the batch's stand there
            places = order if call.depends & Depends.INPUT else "ab"
            for i in range(len(shapes.get(id(call), ()))):
                a, b = (kept.get((id(call), i)) for kept in seen.values())
                if any(_are_other(a, b, places, axis, ROUNDED) for axis in axes(call, i, dim, shapes)):
                    return f"{call_and_place(call)}, whose rows hang on their places or on how many there are"
        if any(_are_other(*move, ROUNDED) for move in moves):
            return "an output's rows hang on their places or on how many there are"
        pairs = zip(asked, numbers, strict=True)
        at = next((i for i, (a, b) in pairs if not is_close(a, b, ROUNDED)), None)
        return "" if at is None else f"{call_and_place(self.leaves[at])} hangs on the order of the rows"

    def among(
        self, more: Sequence[Any], rows: str, dim: Dim, shapes: _Shapes, allowed: Mapping[dtype, float]
    ) -> str:
        """In words, the first leaf that is another for more ``rows``, as many of a as of b, or a alone.

        These gave ``more``. Not asked of what draws noise: more rows draw other noise.
        """
        for i, call in enumerate(self.leaves if not self._is_noisy else ()):
            here, there = self.of("ab" if "b" in rows or i not in self._numbers else "aa")[i], more[i]
            if i in self._numbers:
                is_other = not any(is_close(n, there, allowed) for n in (here, here * (len(rows) / 2)))
            else:
                is_other = any(
                    _are_other(here, there, rows, axis, allowed) for axis in axes(call, 0, dim, shapes)
                )
            if is_other:
                return f"{call_and_place(call)}, whose rows hang on how many there are"
        return ""

    def is_finite(self, *two_rows: str) -> bool:
        """Whether all that is given for such rows is numbers, as far as torch says it of such tensors."""
        made = (t for rows in two_rows for value in self.of(rows) for t in tensors(value))
        asked = (t for t in made if not t.is_nested and t.layout is torch.strided)
        return all(bool(t.isfinite().all()) for t in asked)

    def sums(self) -> dict[str, bool | None]:
        """Of each number made of rows, by name, whether it is their sum: twice as much for twice the rows.

        None where nothing tells, as where all of it is 0.
        """
        out: dict[str, bool | None] = {}
        for i in self._numbers:
            _, summed, found, allowed = self._of_three(i)
            is_told = allowed < abs(summed) / 3
            out[self.leaves[i].name] = abs(found - summed) <= allowed if is_told else None
        return out

    def blocks(self, dim: Dim, shapes: _Shapes) -> set[str]:
        """The names of leaves with several places for each row, first one of all rows, then another."""
        out = set[str]()
        for i, call in enumerate(self.leaves):
            values = {rows: self.of(rows)[i] for rows in ("ab", "aa", "bb")}
            for axis, is_even in other_axes(call, dim, shapes):
                if is_even and self._lies(values, axis, {}) == "blocks":
                    out.add(call.name)
        return out

    def _lies(self, values: Mapping[str, Any], axis: int, allowed: Mapping[dtype, float]) -> str | None:
        """How several places for each row lie along an axis: in ``rows``, ``blocks``, or neither: None."""
        given = [*values.values()]
        if not all(isinstance(t, Tensor) and t.ndim > axis for t in given):
            return None
        if len({t.shape[axis] for t in given}) > 1:
            return "rows" if self._are_in_turn(values, axis, allowed or ALLOWED) else None
        each, rest = divmod(given[0].shape[axis], self._n_rows)
        if rest:
            return None
        told = {rows: t if is_floating(t) or t.is_complex() else t.double() for rows, t in values.items()}
        for name, sizes, at in (
            ("rows", (self._n_rows, each), axis),
            ("blocks", (each, self._n_rows), axis + 1),
        ):
            if not differ(
                {rows: t.unflatten(axis, sizes) for rows, t in told.items()}, at, allowed or ALLOWED
            ):
                return name
        return None

    def _are_in_turn(self, values: Mapping[str, Any], axis: int, allowed: Mapping[dtype, float]) -> bool:
        """Whether rows that give unlike numbers of places, as where some lack values, give them in turn."""
        both, a, b = (values[rows] for rows in ("ab", "aa", "bb"))
        n_a, n_b = a.shape[axis] // 2, b.shape[axis] // 2
        turns = torch.cat([a.narrow(axis, 0, n_a), b.narrow(axis, n_b, n_b)], axis)
        return self._n_rows == 2 and turns.shape == both.shape and is_close(both, turns, allowed)

    def neither(self) -> str:
        """In words, the first number that is neither mean nor sum of what rows give, as both together.

        Not asked of longer batches, in which others weigh beside the rows.
        """
        for i in () if self._is_longer else self._numbers:
            mean, summed, found, allowed = self._of_three(i)
            if not self._noise.is_by_row:
                unknown = f"{call_and_place(self.leaves[i])} is made with noise that cannot be told by rows"
                return "" if self._is_counted else unknown
            if min(abs(found - mean), abs(found - summed)) > allowed:
                three = f"{found:.6g} for three rows, whose mean is {mean:.6g} and whose sum {summed:.6g}"
                return f"{call_and_place(self.leaves[i])} is {three}"
        return ""

    def _of_three(self, i: int) -> tuple[float, float, float, float]:
        """A number for rows b a b: if it is a mean, if it is a sum, as it is; and how much is rounding.

        A batch of three draws other noise than one of two, so each row is given its own.
        """
        aa, bb, bab = (_figure(self.placed(rows)[i]) for rows in ("aa", "bb", "bab"))
        allowed = ALLOWED.get(self.of("ab")[i].dtype, ALLOWED_BELOW) * max(map(abs, (aa, bb, bab)))
        shares = self._shares_in(_figure(self.of("ab")[i]), aa, bb)
        if shares is None:
            return bab, aa / 2 + bb, bab, allowed
        a, b = shares
        return (a * aa + 2 * b * bb) / (a + 2 * b), aa / 2 + bb, bab, allowed

    def _shares_in(self, ab: float, aa: float, bb: float) -> tuple[float, float] | None:
        """What rows a and b weigh in a mean: evenly, or by their labels; None where these do not tell."""
        if not self._is_counted:
            return 0.5, 0.5
        if self._shares is not None:
            return self._shares
        share = (bb - ab) / (ab - aa) if ab != aa else math.inf
        return (share, 1.0) if 0 < share < math.inf else None

    def _no_mean(self, i: int, allowed: float, level: Mapping[dtype, float]) -> str:
        """In words, where a number is no mean of the rows', evenly or weighted by the labels in each.

        Where labels do not tell how rows weigh, in both orders: what is clipped, as a loss of ranks is, may
        be one in one of them alone. In both orders, too, where noise is drawn: each place has its own, and
        only both together have what rows a a and b b have.
        """
        ab, aa, bb = figures = [_figure(self.of(rows)[i]) for rows in ("ab", "aa", "bb")]
        shares = self._shares if all(map(math.isfinite, figures)) else None
        if shares is not None:
            expected = shares[0] * aa + shares[1] * bb
            found = (ab + _figure(self.of("ba")[i])) / 2 if self._is_noisy else ab
            if abs(found - expected) <= allowed * max(map(abs, figures)):
                return ""
        ba = _figure(self.of("ba")[i])
        if not all(map(math.isfinite, (*figures, ba))):
            return self._no_mean_of_either(i, ab, (aa, bb), allowed)
        scale = max(map(abs, (*figures, ba)))
        if abs(ab + ba - aa - bb) <= allowed * scale:
            return ""
        words = f"{ab:.6g} for two rows that alone give {aa:.6g} and {bb:.6g}"
        if shares is not None:
            return words
        is_unknown = self._has_others or (self._is_longer and self._is_counted)
        if is_unknown and level is not EQUAL and min(aa, bb) <= ab <= max(aa, bb):
            return ""  # how the rows weigh cannot be told
        if self._is_counted and not self._is_longer:
            aa, bb, abb = (_figure(self.placed(rows)[i]) for rows in ("aa", "bb", "abb"))
            share = (bb - ab) / (ab - aa) if ab != aa else math.inf
            is_told = self._noise.is_by_row and 0 < share < math.inf
            if is_told and abs(abb - (share * aa + 2 * bb) / (share + 2)) <= allowed * scale:
                return ""
        return words

    def _no_mean_of_either(self, i: int, ab: float, each: tuple[float, float], allowed: float) -> str:
        """The same where one row alone gives no number, as one without labels: from what more of both give.

        If both together give the mean, that tells what the one would give, and so what three of them do.
        """
        a, b = ("ab", "ba")[math.isfinite(each[1])]
        if not math.isfinite(ab):
            return ""
        if not self._is_counted:
            return f"{ab:.6g} for two rows, of which one alone gives {each[0]:.6g} and one {each[1]:.6g}"
        known = _figure(self.placed(a + a)[i])
        if self._is_longer or not math.isfinite(known):
            return ""
        for rows, share in ((a + a + b, 2 / 3), (a + b + b, 1 / 3)):
            found, expected = _figure(self.placed(rows)[i]), share * known + (1 - share) * (2 * ab - known)
            is_other = abs(found - expected) > allowed * max(map(abs, (found, ab, known)))
            if is_other and self._noise.is_by_row:
                return f"{found:.6g} for three rows, where it is {known:.6g} for one and {ab:.6g} for two"
        return ""

    def known_shares(self) -> tuple[float, ...]:
        """What row a may weigh in a mean or sum: evenly, or by its labels; none where these do not tell."""
        if not self._is_counted:
            return (0.5,)
        return () if self._shares is None else (0.5, self._shares[0])

    @functools.cached_property
    def _shares(self) -> tuple[float, float] | None:
        """What rows a and b weigh by their labels; None where not all losses over labels say the same."""
        if not self._is_counted:
            return None
        for rows in ("aa", "bb"):
            self.of(rows)
        share = share_of(self._labels["aa"].weights(), self._labels["bb"].weights())
        return None if share is None else (share, 1 - share)


def _shown_to(looks: Sequence[Callable[[Call, Any], None]], call: Call, value: Any) -> None:
    for look in looks:
        look(call, value)


def _keep_tensors(kept: dict[tuple[int, int], Tensor], call: Call, value: Any) -> None:
    kept.update(((id(call), i), tensor.detach().clone()) for i, tensor in enumerate(tensors(value)))


def _keep_numbers(kept: dict[tuple[int, int], Tensor], call: Call, value: Any) -> None:
    made = enumerate(tensors(value))
    kept.update(((id(call), i), number.detach().clone()) for i, number in made if is_number(number))


def axes(call: Call, index: int, dim: Dim, shapes: _Shapes) -> list[int]:
    """The axes of a call's tensor that are the rows."""
    known, rows = shapes.get(id(call), ()), symbol(dim.name)
    found = enumerate(known[index]) if index < len(known) else ()
    return [a for a, n in found if n is rows or (type(n) is not int and n == rows)]


def other_axes(call: Call, dim: Dim, shapes: _Shapes) -> list[tuple[int, bool]]:
    """The axes of a call's first tensor that hang on how many rows there are, but are not they.

    Each with whether it has as many places for every row.
    """
    known, rows = shapes.get(id(call), ()), symbol(dim.name)
    out = []
    for axis, n in enumerate(known[0] if known else ()):
        if type(n) is not int and n != rows and rows in n.free_symbols:
            out.append((axis, n.subs(rows, 0) == 0 and rows not in n.diff(rows).free_symbols))
    return out


class _EnoughError(Exception):
    """The last call that is asked has run."""


def run_until(run: Rows, rows: str, last: Call, look: Callable[[Call, Any], Any]) -> None:
    """Run a form for ``rows`` as far as its call ``last``; ``look`` is shown each call with its value."""

    def shown(call: Call, value: Any) -> Any:
        seen = look(call, value)
        if call is last:
            raise _EnoughError
        return seen

    with contextlib.suppress(_EnoughError):
        run(rows, shown)


def is_floating(value: Any) -> bool:
    """Whether a value is a tensor of real floating point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def differ(values: Mapping[str, Any], axis: int, allowed: Mapping[dtype, float]) -> bool:
    """Whether row a is another beside b than beside a, or b than beside b."""
    ab, aa, bb = (values[rows] for rows in ("ab", "aa", "bb"))
    if not all(isinstance(t, Tensor) for t in (ab, aa, bb)):  # data may have made none of some rows
        return False
    if not ab.shape == aa.shape == bb.shape or extent(ab, axis) < 2:
        return False
    pairs = (ab.select(axis, 0), aa.select(axis, 0)), (ab.select(axis, 1), bb.select(axis, 1))
    return not all(is_close(x, y, allowed) for x, y in pairs)


def _are_other(ab: Any, there: Any, rows: str, axis: int, allowed: Mapping[dtype, float]) -> bool:
    """Whether rows a and b are others in the first places of another tensor, where ``rows`` stand."""
    if not (isinstance(ab, Tensor) and isinstance(there, Tensor)):
        return False
    if extent(ab, axis) < 2 or extent(there, axis) < len(rows):
        return False
    pairs = ((ab.select(axis, "ab".index(row)), there.select(axis, i)) for i, row in enumerate(rows))
    return any(x.shape == y.shape and not is_close(x, y, allowed) for x, y in pairs)


def _figure(value: Any) -> float:
    """What a tensor of one number holds; raises :class:`ValueError` where data have made no one of it."""
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError("rows that make one number make none of other data, or several")
    return float(value)


def extent(tensor: Tensor, axis: int) -> int:
    """How many places a tensor has along an axis; none where it lacks it, or data have left none."""
    return tensor.shape[axis] if axis < tensor.ndim else 0


def is_as_recorded(call: Call, value: Any) -> bool:
    """Whether a value is a tensor of as many axes where the one recorded is: data may make something else."""
    then = call.value
    return not isinstance(then, Tensor) or (isinstance(value, Tensor) and value.ndim == then.ndim)


def is_close(x: Tensor, y: Tensor, allowed: Mapping[dtype, float] = ALLOWED) -> bool:
    """Whether two tensors of numbers are equal up to what is allowed of the largest; whole numbers always."""
    if is_whole(x):
        return True  # ranks and places of rows, such as where an expert put them
    level = level_of(x.dtype, allowed)
    x, y = (t if t.layout in (torch.strided, torch.jagged) else t.to_dense() for t in (x, y))
    if x.layout is torch.strided and torch.equal(x, y):
        return True
    if (largest := _largest_plain(x, y)) is not None:
        return float((x - y).abs_().max()) <= level * largest
    if not torch.equal(x.isnan(), y.isnan()):
        return False
    x, y = without_fills(x.nan_to_num(), y.nan_to_num(), level)
    scale = max(float(x.abs().max()), float(y.abs().max())) if x.numel() else 0.0
    return not scale or float((x - y).abs().max()) <= level * scale


def _largest_plain(x: Tensor, y: Tensor) -> float | None:
    """The largest of two tensors of plain numbers, of which none is a fill; told in few passes."""
    if x.shape != y.shape or x.layout is not torch.strided or not x.numel():
        return None
    if x.dtype not in (float32, float64) or y.dtype != x.dtype:
        return None
    ends = [abs(float(end)) for t in (x.detach(), y.detach()) for end in t.aminmax()]
    return max(ends) if all(end < FILL for end in ends) else None


def level_of(of: dtype, allowed: Mapping[dtype, float]) -> float:
    """What is allowed of numbers of a dtype; of complex ones as of their parts."""
    return allowed.get(of.to_real() if of.is_complex else of, ALLOWED_BELOW)


def is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
