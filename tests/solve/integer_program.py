"""An integer program under HiGHS that knows nothing of the solver, and problems too wide to look through."""

import itertools
import random

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from autopipe.solve import Item, Net, Problem, Share, Stage
from autopipe.solve.definition.problem import HUGE


class Program:
    """Monotone variables z[v, s] = [stage(v) ≤ s], one indicator per net and share and stage, one load."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.n_columns = problem, 0
        self.rows: list[tuple[dict[int, float], float]] = []
        self.whole: set[int] = set()
        self.load = self.column()
        self.z = [[self.column() for _ in problem.stages] for _ in problem.items]
        self.whole |= {c for row in self.z for c in row}
        for row in self.z:
            for earlier, later in itertools.pairwise(row):
                self.at_most({earlier: 1, later: -1}, 0)
            self.at_most({row[-1]: -1}, -1)
        for a, b in problem.edges:
            for s in range(problem.n_stages):
                self.at_most({self.z[b][s]: 1, self.z[a][s]: -1}, 0)
        for s in range(problem.n_stages):
            self.stage(s)

    def column(self) -> int:
        self.n_columns += 1
        return self.n_columns - 1

    def at_most(self, row: dict[int, float], limit: float) -> None:
        self.rows.append((row, limit))

    def inside(self, v: int, s: int) -> dict[int, float]:
        """[stage(v) = s] as a linear form."""
        return {self.z[v][s]: 1.0} | ({self.z[v][s - 1]: -1.0} if s else {})

    def indicator(self, *forms: tuple[dict[int, float], ...]) -> int:
        """A column at least every first form minus every second one."""
        new = self.column()
        for form, minus in forms:
            self.at_most(added((form, 1), (minus, -1), ({new: 1}, -1)), 0)
        return new

    def stage(self, s: int) -> None:
        p = self.problem
        work = [(self.inside(v, s), i.work_ns) for v, i in enumerate(p.items)]
        held = [(self.inside(v, s), i.static_bytes) for v, i in enumerate(p.items)]
        traffic, sync = [], []
        for net in p.nets:
            here = self.inside(net.producer, s)
            there = [self.inside(v, s) for v in net.consumers]
            traffic.append(({self.indicator(*((here, t) for t in there)): 1}, net.send_ns))
            traffic.append(({self.indicator(*((t, here) for t in there)): 1}, net.receive_ns))
        for share in p.shares:
            users = [self.inside(v, s) for v in share.items]
            touched = self.indicator(*((u, {}) for u in users))
            apart = self.indicator(*((a, b) for a in users for b in users if a is not b))
            work.append(({touched: 1}, share.forward_ns + share.backward_ns))
            held.append(({touched: 1}, share.static_bytes))
            sync.append(({apart: 1}, share.sync_ns))
        load = ({self.load: 1}, -1)
        for parts in (work, traffic) if p.overlap else ([*work, *traffic],):
            self.at_most(added(*parts, *sync, load), 0)
        self.at_most(added(*held), p.stages[s].limit_bytes)
        if not p.allow_empty:
            self.at_most(added(*((self.inside(v, s), -1) for v in range(len(p.items)))), -1)

    def optimum(self) -> int | None:
        matrix = np.zeros((len(self.rows), self.n_columns))
        for r, (row, _) in enumerate(self.rows):
            for column, factor in row.items():
                matrix[r, column] = factor
        upper = np.array([limit for _, limit in self.rows], float)
        integral = np.array([c in self.whole for c in range(self.n_columns)], int)
        ends = np.ones(self.n_columns)
        ends[self.load] = np.inf
        goal = np.zeros(self.n_columns)
        goal[self.load] = 1
        limits = LinearConstraint(matrix, -np.inf, upper)
        found = milp(goal, integrality=integral, bounds=Bounds(0, ends), constraints=limits)
        return None if found.x is None else round(found.fun)


def added(*parts: tuple[dict[int, float], float]) -> dict[int, float]:
    """The sum of linear forms times factors."""
    out: dict[int, float] = {}
    for form, factor in parts:
        for column, value in form.items():
            out[column] = out.get(column, 0) + value * factor
    return out


def random_problem(seed: int) -> Problem:
    """Nine to fourteen items, wider than exhaustive search could look through."""
    r = random.Random(seed)
    n, k = r.randint(9, 14), r.randint(2, 4)
    items = [Item((f"o{v}",), r.randint(0, 9), r.randint(0, 9), r.randint(0, 5)) for v in range(n)]
    nets = []
    for v in range(n - 1):
        takers = sorted(r.sample(range(v + 1, n), min(r.randint(0, 3), n - 1 - v)))
        if takers:
            nets.append(Net(v, tuple(takers), r.randint(0, 5), r.randint(0, 5), f"v{v}"))
    shares = [
        Share(tuple(sorted(r.sample(range(n), 3))), f"w{i}", r.randint(0, 3), 0, r.randint(0, 4), 0, 0, i)
        for i in range(r.randint(0, 2))
    ]
    limit = r.choice((HUGE, 2 + sum(i.static_bytes for i in items) // k))
    return Problem(
        tuple(items),
        tuple(sorted({(m.producer, c) for m in nets for c in m.consumers})),
        tuple(nets),
        tuple(shares),
        tuple(Stage(s, limit_bytes=limit) for s in range(k)),
        overlap=r.random() < 0.3,
        allow_empty=r.random() < 0.5,
    )
