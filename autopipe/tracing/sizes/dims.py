"""Which input sizes may vary, and every tensor's shape as a formula of them, found by trying.

Running the recording is left to ``rerun``; refusing sizes that do not fit to ``arguments``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch

from ...graph import Dim
from ...units import Size, size_at, symbol
from ..inputs.arguments import Inputs
from ..inputs.contents import is_whole
from ..inputs.layout import lying_as
from ..inputs.packing import sample_rows

__all__ = [
    "Formulas",
    "axis_of",
    "candidates",
    "counts",
    "fit",
    "is_in_order",
    "parts",
    "resize",
    "trial_sizes",
]


_SHORT = 7
_MOST_TERMS, _MOST_CHOICES = 32, 2048


def candidates(inputs: Inputs) -> list[Dim]:
    """The input sizes that may be free to vary: the batch, and other axes grouped by equal size.

    Axes of one tensor are kept apart. An axis of size 0 is left alone.
    """
    shapes = {name: inputs.shapes[i] for i, name in enumerate(inputs.names) if name is not None}
    floating = {n: inputs.dtypes[i].is_floating_point for i, n in enumerate(inputs.names) if n is not None}
    groups: dict[tuple[Any, ...], list[tuple[str, int]]] = {}
    for name, shape in shapes.items():
        for axis, size in enumerate(shape):
            if size:
                groups.setdefault((axis > 0 and axis, size), []).append((name, axis))
    out: list[Dim] = []
    taken: set[str] = set()
    for (_, size), where in groups.items():
        (first, axis), n_dims = where[0], len(shapes[where[0][0]])
        name = _name(first, axis, n_dims, floating[first], taken)
        taken.add(name)
        out.append(Dim(name, size, tuple(where)))
    return out


def parts(dim: Dim) -> Iterator[Dim]:
    """An axis of several inputs without one of them, then of each alone: sizes may be equal by chance."""
    if dim.where[0][1] == 0 or len(dim.where) == 1:
        return
    without = [tuple(p for p in dim.where if p is not left) for left in dim.where]
    for where in dict.fromkeys((*without, *((p,) for p in dim.where))):
        name = dim.name if dim.where[0] in where else f"{where[0][0]}_{dim.name}"
        yield Dim(name, dim.example, where)


def axis_of(shape: Sequence[Size], dim: str) -> int | None:
    """The axis that holds the places along a dim; None where none does, −1 where several do."""
    axes = [a for a, n in enumerate(shape) if symbol(dim) in getattr(n, "free_symbols", ())]
    return axes[0] if len(axes) == 1 else -1 if axes else None


def counts(tensors: Mapping[str, torch.Tensor], dim: Dim) -> list[str]:
    """The inputs that hold the size of ``dim`` as a number, the largest in them: lengths of padded rows."""
    own = {name for name, _ in dim.where}
    return [
        name
        for name, t in tensors.items()
        if name not in own
        and is_whole(t)
        and not (t.is_meta or t.dtype is torch.bool)
        and t.numel()
        and int(t.max()) == dim.example
    ]


def is_in_order(tensors: Mapping[str, torch.Tensor], dim: Dim) -> bool:
    """Whether an input holds a whole number for each place along a leading dim, up or down in order.

    Such are the groups that rows are of, and lengths that packing wants in order.
    """
    told = [tensors[name] for name, axis in dim.where if axis == 0 and tensors[name].dim() == 1]
    return not dim.packed and any(
        is_whole(t)
        and not (t.is_meta or t.dtype is torch.bool)
        and bool(((t[1:] >= t[:-1]).all() or (t[1:] <= t[:-1]).all()) and t[0] != t[-1])
        for t in told
    )


def _name(placeholder: str, axis: int, n_dims: int, floating: bool, taken: set[str]) -> str:
    common = {1: "length" if floating else "seq"} if n_dims == 2 else {}
    if n_dims == 3:
        common = {1: "seq", 2: "features"}
    if n_dims == 4 and floating:
        common = {1: "channels", 2: "height", 3: "width"}
    name = "batch" if axis == 0 else common.get(axis, f"{placeholder}_{axis}")
    if name not in taken:
        return name
    return next(n for n in _alternatives(placeholder, name) if n not in taken)


def _alternatives(placeholder: str, name: str) -> Any:
    yield f"{placeholder.removesuffix('_ids')}_{name}"
    yield from (f"{placeholder}_{name}_{i}" for i in itertools.count(2))


def trial_sizes(dim: Dim) -> list[int]:
    """Other sizes to try a dim at, the most telling first: small ones are fast, odd ones show rounding.

    Of an odd size an even one does: of three that are all odd, none tells what is done to the others.
    """
    n = dim.example
    if dim.packed:
        return [s for s in (n + 1, 2 * n, 3 * n) if all(s * p.rows % n == 0 for p in dim.packed)]
    if dim.name == "batch":
        return [2 * n, n + 1]  # the fewer for the run with all dims changed, which is the longest
    more = n + n // 2
    odd = (n // 2 | 1, more + more % 2 if n % 2 else more | 1) if n > _SHORT else ()
    return list(dict.fromkeys(s for s in (*odd, more, 2 * n, n // 2) if s not in (0, n)))


def resize(
    tensors: Mapping[str, torch.Tensor],
    sizes: Mapping[Dim, int],
    drawn_out: Collection[Dim] = (),
    counted: Collection[Dim] = (),
    skipped: Mapping[Dim, int] = types.MappingProxyType({}),
) -> dict[str, torch.Tensor]:
    """Inputs at other sizes, their rows repeated or cut; of dims that are ``drawn_out`` only the last one.

    Where rows are cut, as many are ``skipped`` behind the first. Of dims that are ``counted`` other inputs
    hold the size, as numbers, which follow.
    """
    out = dict(tensors)

    def take(name: str, axis: int, rows: torch.Tensor) -> None:
        grad, tensor = out[name].requires_grad, out[name].detach()
        taken = tensor.index_select(axis, rows.to(tensor.device))
        out[name] = lying_as(taken, tensor).requires_grad_(grad)

    for dim, size in sizes.items():
        chosen = torch.arange(size, device="cpu")
        chosen[1:] += skipped.get(dim, 0)
        chosen = chosen.clamp(max=dim.example - 1) if dim in drawn_out else chosen % dim.example
        for packed in dim.packed:
            theirs = torch.arange(tensors[packed.op].shape[0], device="cpu").split(
                sample_rows(dim, packed, tensors)
            )
            take(packed.op, 0, torch.cat([theirs[i] for i in chosen]))
        for name, axis in dim.where:
            take(name, axis, chosen)
        for name in counts(tensors, dim) if dim in counted else ():
            out[name] = out[name].where(out[name] != dim.example, size).clamp(max=size)
    return out


@dataclasses.dataclass(frozen=True, slots=True)
class Formulas:
    """Fits a number seen at several sizes as a formula of the dims.

    ``points`` are the dims' values of each observation: the example first, then each dim changed alone, and
    last all changed at once.
    """

    dims: tuple[Dim, ...]
    points: tuple[Mapping[str, int], ...]
    memo: dict[tuple[Any, ...], Size] = dataclasses.field(default_factory=dict)

    def __call__(self, values: Sequence[int | float]) -> Size:
        """The formula that takes ``values`` at the points; the nearest product form where none is exact."""
        key = _key(values)
        if key not in self.memo:
            self.memo[key] = fit(self.dims, self.points, values)
        return self.memo[key]

    def prefer(self, values: Sequence[int | float], formula: Size) -> None:
        """Let ``values`` be those of a formula that takes them at the points, and all that are equal too."""
        if all(size_at(formula, p) == v for p, v in zip(self.points, values, strict=False)):
            self.memo[_key(values)] = formula

    def with_more(self, values: Sequence[int | float], more: Sequence[tuple[Mapping[str, int], Any]]) -> Size:
        """The same, where ``more`` (point, value) are known that the formula is to take as well, if any does.

        A point at which one dim alone is changed is what terms are made of, in the place of the dim's own.
        """
        found = self(values)
        missed = [(p, v) for p, v in more if size_at(found, p) != v]
        if not missed:
            return found
        example, *own = zip(self.points, values, strict=True)
        alone = [next((m for m in missed if _is_alone(d, m[0], example[0])), None) for d in self.dims]
        first = [other or mine for other, mine in zip(alone, own, strict=False)]
        seen = [example, *first, *missed, *own]
        wider = fit(self.dims, [p for p, _ in seen], [v for _, v in seen])
        return wider if all(size_at(wider, p) == v for p, v in seen) else found


def _key(values: Sequence[int | float]) -> tuple[Any, ...]:
    """Numbers, and of which kinds they are: 5.0 is made of sizes otherwise than 5, which it equals."""
    return *values, *map(type, values)


def _is_alone(dim: Dim, point: Mapping[str, int], example: Mapping[str, int]) -> bool:
    """Whether a point is the example's in all dims but this one."""
    return {n for n, size in point.items() if size != example[n]} == {dim.name}


def fit(dims: Sequence[Dim], points: Sequence[Mapping[str, int]], values: Sequence[Any]) -> Size:
    """See :class:`Formulas`. Tries products and sums of one-dim affine, floor-division and square terms."""
    base = values[0]
    if all(v == base for v in values) or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        return base
    moved = [(d, p[d.name], v) for d, p, v in zip(dims, points[1:], values[1:], strict=False) if v != base]
    if not moved:
        return base
    names = [d.name for d, _, _ in moved]
    for is_rounded, join, more in _FORMS:
        if len(moved) == 1 and join is _sum:
            continue
        terms = [
            list(itertools.islice(_terms((d.example, base - more), (m, v - more), is_rounded), _MOST_TERMS))
            for d, m, v in moved
        ]
        goals = [v - more for v in values]
        chosen = _choice(join, terms, [[p[n] for n in names] for p in points], goals)
        if chosen is not None:
            return _written(join, chosen, names, goals[0]) + more
    first = [next(_terms((d.example, base), (m, v), True)) for d, m, v in moved]
    return _written(_product, first, names, base)


def _choice(
    join: Any, terms: Sequence[Sequence[_Term]], points: Sequence[Sequence[int]], values: Sequence[int]
) -> list[_Term] | None:
    """One term per dim that together take ``values`` at the points, or None.

    Of several those with no factor to spare and equal strides: a plain product of a patch embedding's sides.
    Every choice fits where one dim changed alone, so the last point decides.
    """
    last = [[(t, t(size)) for t in ts] for ts, size in zip(terms, points[-1], strict=True)]
    best, least = None, (True, Fraction(0), 0)
    for chosen in itertools.islice(itertools.product(*last), _MOST_CHOICES):
        if join([value for _, value in chosen], values[0]) != values[-1]:
            continue
        found = [t for t, _ in chosen]
        spare = _factor(found, values[0], counted=len(found) > 1)
        strides = [t.q for t in found if t.is_floored]
        cost = spare.denominator > 1, spare, max(strides, default=0) - min(strides, default=0)
        if best is not None and cost >= least:
            continue
        at = ([t(n) for t, n in zip(found, sizes, strict=True)] for sizes in points)
        if all(join(parts, values[0]) == value for parts, value in zip(at, values, strict=True)):
            best, least = found, cost
            if join is _sum or cost == (False, Fraction(1), 0):
                break
    return best


def _factor(terms: Sequence[_Term], base: int, *, counted: bool = True) -> Fraction:
    """The number in front of the product of the terms' symbols; of multiples only where ``counted``."""
    contents = (t.content if counted or t.factor != t.q else Fraction(1) for t in terms)
    return math.prod(contents, start=Fraction(1)) / (base or 1) ** (len(terms) - 1)


def _written(join: Any, terms: Sequence[_Term], names: Sequence[str], base: int) -> Size:
    """Terms of the dims called ``names`` joined as a formula."""
    if join is _product and base:
        # factors are multiplied as numbers, so that sympy has little to simplify
        import sympy

        factor = _factor(terms, base)
        formulas = [t.formula(n, 1 / t.content) for t, n in zip(terms, names, strict=True)]
        return sympy.Mul(sympy.Rational(*factor.as_integer_ratio()), *formulas)
    return join([t.formula(n) for t, n in zip(terms, names, strict=True)], base)


@dataclasses.dataclass(frozen=True, slots=True)
class _Term:
    """``factor * (p * size**power + c) / q`` of one dim's size, rounded down before the factor on demand.

    Plain numbers, because sympy takes a hundred times as long to try a formula.
    """

    p: int
    c: int = 0
    q: int = 1
    power: int = 1
    factor: int = 1
    is_floored: bool = False

    def __call__(self, size: int) -> int | Fraction:
        above = self.p * size**self.power + self.c
        return self.factor * (above // self.q if self.is_floored else Fraction(above, self.q))

    @property
    def content(self) -> Fraction:
        """The number that can be taken out of the term."""
        if self.is_floored:
            return Fraction(self.factor)
        return Fraction(self.factor * math.gcd(self.p, self.c), self.q)

    def formula(self, name: str, scale: Fraction | int = 1) -> Any:
        import sympy

        def number(value: int | Fraction) -> Any:
            return sympy.Rational(*value.as_integer_ratio())

        d, factor = symbol(name), scale * self.factor
        if self.is_floored:
            return number(factor) * sympy.floor((self.p * d + self.c) / sympy.Integer(self.q))
        power = d if self.power == 1 else d**self.power
        slope, constant = (factor * Fraction(v, self.q) for v in (self.p, self.c))
        term = power if slope == 1 else number(slope) * power
        return term + number(constant) if constant else term


def _terms(example: tuple[int, int], other: tuple[int, int], is_rounded: bool) -> Iterator[_Term]:
    """Terms through two (size, value) points, simplest first; those with a floor only on demand.

    Of these first what is rounded down or up to a multiple.
    """
    (n, base), (m, moved) = example, other
    slope = Fraction(moved - base, m - n)
    p, q = slope.as_integer_ratio()
    if q == 1 or base == slope * n:
        yield _Term(p, base * q - p * n, q)
    if base * m * m == moved * n * n:
        yield _Term(base, q=n * n, power=2)
    if not is_rounded:
        return
    whole = math.gcd(base, moved)
    for c in (0, whole - 1) if whole > 1 else ():
        multiple = _Term(1, c, whole, factor=whole, is_floored=True)
        if (multiple(n), multiple(m)) == (base, moved):
            yield multiple
    factors = [f for f in dict.fromkeys((1, 2, 4, 8, whole)) if f and whole % f == 0]
    for factor in factors:
        yield from _strided([(n, base // factor), (m, moved // factor)], factor)
    for factor in reversed(factors):
        yield from _floored(slope / factor, [(n, base // factor), (m, moved // factor)], factor)


def _strided(seen: Sequence[tuple[int, int]], factor: int) -> Iterator[_Term]:
    """``factor * floor((d + c) / q)`` as convolutions and pooling make it; likely strides first."""
    (n, base), (m, moved) = seen
    steps, rise = abs(m - n), abs(moved - base)
    if (moved > base) == (m > n):
        strides = range(max(2, steps // (rise + 1)), (steps // (rise - 1) if rise > 1 else max(n, m)) + 1)
        for q in sorted(strides, key=lambda q: n % q):
            yield from _floored(Fraction(1, q), seen, factor)


def _floored(slope: Fraction, seen: Sequence[tuple[int, int]], factor: int) -> Iterator[_Term]:
    """``factor * floor((p*d + c) / q)`` with the constant nearest to zero that fits, if any does."""
    p, q = slope.as_integer_ratio()
    low = max(f * q - p * n for n, f in seen)
    high = min((f + 1) * q - 1 - p * n for n, f in seen)
    if q > 1 and low <= high:
        for c in dict.fromkeys((min(max(0, low), high), low, high)):
            yield _Term(p, c, q, factor=factor, is_floored=True)


def _product(parts: Sequence[Any], base: int) -> Any:
    if not base:
        return sum(parts)
    if len(parts) == 1:
        return parts[0]
    return math.prod(parts) / Fraction(base ** (len(parts) - 1))


def _sum(parts: Sequence[Any], base: int) -> Any:
    return sum(parts) - base * (len(parts) - 1)


_FORMS = (
    (False, _product, 0), (False, _sum, 0), (False, _product, 1), (False, _product, 2),
    (True, _product, 0), (True, _product, 1), (True, _product, 2), (True, _sum, 0),
)  # fmt: skip
"""How terms make a formula, the simplest first: rounded or not, joined how, how many class tokens more."""
