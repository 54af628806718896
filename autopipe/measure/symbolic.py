"""Costs as formulas of the input dims: fitted at a few sizes, evaluated at any other.

Measuring at those sizes is left to ``profiler``, counting FLOPs and bytes to ``estimate``.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..costs import CostTable, OpCost
from ..errors import CostError, InputError
from ..schema import Count, Name, Share, build, differs, refuse, versioned
from ..units import Size, parse_size, size_at, symbol
from .devices import described
from .estimate import accounts
from .kernel_counts import Kernels
from .survey import Account

if TYPE_CHECKING:
    from ..tracing import Capture

__all__ = ["SymbolicCosts", "fit_costs"]

VERSION = 1
_SECONDS = ("forward_s", "backward_s", "backward_input_s", "backward_weight_s")
_BYTES = ("saved_bytes", "workspace_bytes", "backward_workspace_bytes", "flops")
_Field = Literal[
    "forward_s",
    "backward_s",
    "backward_input_s",
    "backward_weight_s",
    "saved_bytes",
    "workspace_bytes",
    "backward_workspace_bytes",
    "flops",
]


@dataclasses.dataclass(frozen=True)
class SymbolicCosts:
    """The cost of every op as sympy expressions in the graph's dims.

    Attributes
    ----------
    formulas: op name → field of :class:`OpCost` → expression.
    base: the measured table nearest the middle, for what does not vary with the dims.
    fitted_at: the dims the fit knows.
    error: mean relative error of forward plus backward seconds of the whole model at those dims, each
        predicted from the others where there are more than three, else the fit's own residual.
    """

    formulas: Mapping[str, Mapping[str, Size]]
    base: CostTable
    fitted_at: tuple[Mapping[str, int], ...]
    error: float

    def at(self, dims: Mapping[str, int]) -> CostTable:
        """The cost table at other dims; those not named stay as in ``base``."""
        dims = {**self.base.dims, **dims}
        return dataclasses.replace(
            self.base, dims=dims, costs={op: self._cost(op, dims) for op in self.base.costs}
        )

    def _cost(self, op: str, dims: Mapping[str, int]) -> OpCost:
        values: dict[str, Any] = {}
        for name, formula in self.formulas.get(op, {}).items():
            value = max(0.0, float(size_at(formula, dims)))
            values[name] = value if name in _SECONDS else round(value)
        known = self.base.costs[op]
        return dataclasses.replace(known, **values, spread=max(known.spread, self.error))

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, numbers and formulas as text, for JSON."""
        return {
            "version": VERSION,
            "formulas": {op: {f: str(e) for f, e in row.items()} for op, row in self.formulas.items()},
            "base": self.base.to_dict(),
            "fitted_at": [dict(d) for d in self.fitted_at],
            "error": self.error,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SymbolicCosts:
        """The inverse of :meth:`to_dict`.

        Raises :class:`StoreError`, with the path to the fault, for anything that is not one's ``to_dict``.
        """
        what = "the formulas"
        read = build(_FormulasFile, versioned(data, VERSION, what), what)
        base = CostTable.from_dict(read.base, f"{what}, base:")
        if any(set(dims) != set(base.dims) for dims in read.fitted_at):
            raise refuse(what, "fitted_at", f"has other dims than {sorted(base.dims)}")
        formulas: dict[str, dict[str, Size]] = {
            op: {str(name): _formula(text, base, f"formulas[{op!r}].{name}") for name, text in row.items()}
            for op, row in read.formulas.items()
        }
        if strange := set(formulas) - set(base.costs):
            raise refuse(what, "formulas", f"has {min(strange)!r}, which is no op of its base")
        costs = cls(formulas, base, read.fitted_at, read.error)
        differs(data, costs.to_dict(), what)
        return costs


@dataclasses.dataclass(frozen=True, slots=True)
class _FormulasFile:
    formulas: dict[Name, dict[_Field, str]]
    base: dict[str, Any]
    fitted_at: tuple[dict[Name, Count], ...]
    error: Share


def _formula(text: str, base: CostTable, path: str) -> Size:
    try:
        formula = parse_size(text)
    except InputError as error:
        raise refuse("the formulas", path, str(error)) from None
    free = {s.name for s in getattr(formula, "free_symbols", ())}
    if strange := free - set(base.dims):
        raise refuse("the formulas", path, f"uses {min(strange)!r}, which is no dim")
    return formula


def fit_costs(capture: Capture, tables: Sequence[CostTable], **options: Any) -> SymbolicCosts:
    """Formulas through cost tables measured at different dims.

    What an op asks for (kernels, FLOPs, bytes) is a polynomial of the dims, found exactly by surveying it on
    the meta device over a small grid: degree one in the first dim, two in the others (attention). Its
    seconds are then ``a + b·flops + c·bytes`` with non-negative coefficients fitted to the tables in
    relative terms (least squares, Lawson and Hanson). Three sizes determine that; more average noise out.

    ``options`` are those of :func:`estimate.accounts`; attention is by default as on the tables' device.
    Raises :class:`CostError` for fewer than two tables or tables at equal dims.
    """
    points = [dict(t.dims) for t in tables]
    if len({tuple(sorted(p.items())) for p in points}) < max(2, len(points)):
        raise CostError(f"formulas need tables at two or more different dims, got {points}")
    varied = [name for name in points[0] if len({p[name] for p in points}) > 1]
    basis = _Basis(varied, points)
    options.setdefault("attention", described(tables[0].device).attention)
    surveyed = [accounts(capture, dims=p, **options).accounts for p in basis.grid(points[0])]
    ordered = sorted(tables, key=lambda t: t.total(t.costs).seconds)
    formulas = {}
    for op in tables[0].costs:
        if all(op in s for s in surveyed):
            formulas[op] = _formulas(op, tables, basis, [s[op] for s in surveyed])
        else:
            formulas[op] = _direct(op, tables, basis)
    out = SymbolicCosts(formulas, ordered[len(ordered) // 2], tuple(points), 0.0)
    errors = [abs(_seconds(out.at(p)) / _seconds(t) - 1) for p, t in zip(points, tables, strict=True)]
    return dataclasses.replace(out, error=statistics.fmean(errors))


class _Basis:
    """Monomials of the dims that vary: the first up to degree one, the others up to two."""

    def __init__(self, names: Sequence[str], points: Sequence[Mapping[str, int]]):
        self.names = names
        self.points = points
        degrees = [range(2 if name == "batch" else 3) for name in names]
        self.powers = list(itertools.product(*degrees))

    def row(self, dims: Mapping[str, int]) -> list[float]:
        return [
            float(np.prod([float(dims[n]) ** p for n, p in zip(self.names, powers, strict=True)]))
            for powers in self.powers
        ]

    def grid(self, base: Mapping[str, int]) -> list[dict[str, int]]:
        """As many dims as there are monomials, that tell them apart: the points' own span, evenly."""
        axes = []
        for i, name in enumerate(self.names):
            n = 1 + max(p[i] for p in self.powers)
            low, high = (pick(p[name] for p in self.points) for pick in (min, max))
            high = max(high, low + n - 1)
            axes.append([low + (high - low) * k // (n - 1) for k in range(n)])
        return [{**base, **dict(zip(self.names, at, strict=True))} for at in itertools.product(*axes)]

    def polynomial(self, dims: Sequence[Mapping[str, int]], values: Sequence[float]) -> Size:
        """The polynomial through values at dims, small coefficients dropped as rounding."""
        table = np.array([self.row(d) for d in dims])
        scale = np.abs(table).max(axis=0)
        found = np.linalg.lstsq(table / scale, np.array(values, dtype=float), rcond=None)[0]
        most = np.abs(found).max()
        kept = np.where(np.abs(found) > 1e-9 * most, found, 0.0) / scale
        return self.expression(kept)

    def expression(self, coefficients: Sequence[float]) -> Size:
        out: Size = 0
        for c, powers in zip(coefficients, self.powers, strict=True):
            if c:
                term: Size = float(c)
                for name, power in zip(self.names, powers, strict=True):
                    term = term * symbol(name) ** power
                out = out + term
        return out


def _formulas(
    op: str, tables: Sequence[CostTable], basis: _Basis, surveyed: Sequence[Account]
) -> dict[str, Size]:
    grid = basis.grid(tables[0].dims)

    def through(read: Callable[[Account], float]) -> Size:
        return basis.polynomial(grid, [read(a) for a in surveyed])

    out: dict[str, Size] = {
        "saved_bytes": through(lambda a: a.saved_bytes),
        "workspace_bytes": through(lambda a: a.workspace_bytes),
        "backward_workspace_bytes": through(lambda a: a.backward_workspace_bytes),
        "flops": through(lambda a: a.forward.flops),
    }
    for direction, fields in (("forward", _SECONDS[:1]), ("backward", _SECONDS[1:])):
        kernels: list[Kernels] = [getattr(a, direction) for a in surveyed]
        flops = basis.polynomial(grid, [k.flops for k in kernels])
        n_bytes = basis.polynomial(grid, [k.bytes for k in kernels])
        for field in fields:
            out[field] = _through_work(field, op, tables, (flops, n_bytes))
    return out


def _through_work(field: str, op: str, tables: Sequence[CostTable], work: tuple[Size, Size]) -> Size:
    """``a + b·flops + c·bytes`` nearest to the tables' seconds, relatively."""
    from scipy.optimize import nnls  # takes long to import

    seconds = np.array([getattr(t[op], field) for t in tables])
    if not seconds.all():
        return float(seconds.mean())
    columns = np.array([[1.0, *(float(size_at(w, t.dims)) for w in work)] for t in tables])
    scale = np.maximum(columns.max(axis=0), 1e-30)
    found = nnls(columns / scale / seconds[:, None], np.ones(len(seconds)))[0] / scale
    return float(found[0]) + float(found[1]) * work[0] + float(found[2]) * work[1]


def _direct(op: str, tables: Sequence[CostTable], basis: _Basis) -> dict[str, Size]:
    """Non-negative polynomials through the tables themselves, for an op that meta tensors cannot run."""
    from scipy.optimize import nnls  # takes long to import

    rows = np.array([basis.row(t.dims) for t in tables])
    scale = rows.max(axis=0)
    out: dict[str, Size] = {}
    for field in (*_SECONDS, *_BYTES):
        values = np.array([float(getattr(t[op], field)) for t in tables])
        weights = np.where(values > 0, values, 1.0)[:, None]
        found = nnls(rows / scale / weights, values / weights[:, 0])[0]
        out[field] = basis.expression(found / scale)
    return out


def _seconds(table: CostTable) -> float:
    return table.total(table.costs).seconds
