"""The optimum by integer program (HiGHS), where so few items may move that its search is quick.

Monotone variables z[v, s] = [stage(v) ≤ s]; those that the first and last stages of an item leave no choice
are constants. Which problems are that small is said by ``exact``.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..definition.problem import Array, Problem

__all__ = ["Program"]

_TOLERANCE = 1e-6
"""By this part of all that loads may sum up to HiGHS may be off: its rows and whole numbers are by less."""

Form = tuple[dict[int, float], float]
"""A linear form: a factor for each column, and a constant."""


class Program:
    """A problem whose loads are plain sums, or the larger of two: one device speed, no limits, no shares."""

    def __init__(self, problem: Problem, first: Array, last: Array) -> None:
        self.problem, self.first, self.last = problem, first, last
        self.column: dict[tuple[int, int], int] = {}
        for v in range(len(problem.items)):
            for s in range(first[v], last[v]):
                self.column[v, s] = len(self.column) + 1
        self.n_moves = len(self.column)
        self.n_columns = self.n_moves + 1
        self.rows: list[Form] = []

    def best(self, seconds: float) -> tuple[tuple[int, ...] | None, int]:
        """The best assignment within the stages given, and a bound that no such assignment beats."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        self._state()
        entries = [(r, c, x) for r, (form, _) in enumerate(self.rows) for c, x in form.items()]
        at, columns, factors = zip(*entries, strict=True)
        matrix = coo_array((factors, (at, columns)), shape=(len(self.rows), self.n_columns)).tocsr()
        whole = np.zeros(self.n_columns, dtype=np.int64)
        whole[1 : self.n_moves + 1] = 1
        highest = np.ones(self.n_columns)
        highest[0] = np.inf
        goal = np.zeros(self.n_columns)
        goal[0] = 1
        found = milp(
            goal,
            integrality=whole,
            bounds=Bounds(0, highest),
            constraints=LinearConstraint(matrix, -np.inf, [-constant for _, constant in self.rows]),
            options={"time_limit": max(0.1, seconds), "mip_rel_gap": 0.0},
        )
        bound = found.mip_dual_bound
        most = sum(abs(x) for form, _ in self.rows for x in form.values())
        lower = 0 if bound is None else math.ceil(bound - _TOLERANCE * most)
        return (None if found.x is None else self._stages(found.x)), lower

    def _state(self) -> None:
        p = self.problem
        for v in range(len(p.items)):
            for s in range(self.first[v], self.last[v] - 1):
                self._at_most(_sum((1, self._by(v, s)), (-1, self._by(v, s + 1))))
        for a, b in p.edges:
            for s in range(p.n_stages):
                self._at_most(_sum((1, self._by(b, s)), (-1, self._by(a, s))))
        for s in range(p.n_stages):
            most: list[tuple[float, Form]] = [(-1.0, ({0: 1.0}, 0.0))]
            work = [(float(i.work_ns), self._inside(v, s)) for v, i in enumerate(p.items)]
            moving: list[tuple[float, Form]] = []
            for net in p.nets:
                made = self._inside(net.producer, s)
                later = [_sum((1, made), (-1, self._by(v, s))) for v in net.consumers]
                here = [_sum((1, self._inside(v, s)), (-1, made)) for v in net.consumers]
                moving += [(net.send_ns, self._any(later)), (net.receive_ns, self._any(here))]
            for load in (work, moving) if p.overlap else ([*work, *moving],):
                self._at_most(_sum(*most, *load))

    def _by(self, v: int, s: int) -> Form:
        """[stage(v) ≤ s]."""
        if s < self.first[v] or s >= self.last[v]:
            return {}, float(s >= self.last[v])
        return {self.column[v, s]: 1.0}, 0.0

    def _inside(self, v: int, s: int) -> Form:
        return _sum((1, self._by(v, s)), (-1, self._by(v, s - 1)))

    def _any(self, forms: list[Form]) -> Form:
        """The least value from 0 that is at least each form."""
        if not any(form for form, _ in forms):
            return {}, max(0.0, *(constant for _, constant in forms))
        self.n_columns += 1
        new: Form = {self.n_columns - 1: 1.0}, 0.0
        for form in forms:
            self._at_most(_sum((1, form), (-1, new)))
        return new

    def _at_most(self, form: Form) -> None:
        """States that a form is at most zero."""
        if form[0]:
            self.rows.append(form)

    def _stages(self, x: Any) -> tuple[int, ...]:
        out = self.last.copy()
        for (v, _), c in self.column.items():
            out[v] -= round(x[c])
        return tuple(out.tolist())


def _sum(*parts: tuple[float, Form]) -> Form:
    out: dict[int, float] = {}
    total = 0.0
    for factor, (form, constant) in parts:
        total += factor * constant
        for c, x in form.items():
            out[c] = out.get(c, 0.0) + factor * x
    return {c: x for c, x in out.items() if x}, total
