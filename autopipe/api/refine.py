"""Opens the leaves that stand in the way of balance, plans again, and stops when that no longer helps.

Recording the opened graph is left to ``tracing``, solving to ``solve``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from torch import nn

from ..costs import CostTable
from ..errors import CaptureError, InfeasibleError, UndecidedError
from ..graph import Op
from ..plans import Plan
from ..solve.stopping import clock_s, interrupts, timed_by_work
from ..tracing import Capture
from ..tracing.code.leaves import is_torchs
from ..tracing.members import submodule

__all__ = ["Planned", "refine"]

TOLERANCE = 0.05
"""A bottleneck this far above the mean rank is balanced enough to leave blocks whole.

What blocks take that run again to fit memory is none of the mean: of finer ones less may have to.
"""

AGAIN = 0.15
"""So far above it must be for more to be opened, once something was: each time the model is recorded anew."""

MOST = 0.75
"""A part with more of a leaf's parameters is opened with it: else what is made of it is hardly finer."""

MIN_GAIN = 0.02
"""Opening leaves must shorten the bottleneck by this much to be kept, and the step be no longer.

Whole blocks are easier to read.
"""

PATIENCE = 2
"""How many times leaves may be opened in a row without such a gain."""

HURRY = 1 / 3
"""Share of the time that a graph is planned in at first: most are opened further, whatever is found."""

HURRY_S = 2.0
"""At least so long, where there is as much."""

MAX_OPENINGS = 16
"""How many times at most: each records the model again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """A capture, what its ops cost, the plan made from them, and the leaves that were opened on the way."""

    capture: Capture
    costs: CostTable
    plan: Plan
    opened: tuple[str, ...] = ()


def refine(
    capture: Capture,
    cost: Callable[[Capture], CostTable],
    solve: Callable[[Capture, CostTable, float, bool], Plan],
    usual_s: Callable[[Capture], float],
    *,
    may_open: bool,
    time_limit_s: float | None,
) -> Planned:
    """Plan ``capture``; while one leaf keeps the bottleneck high, open it and all that are like it.

    A graph with too few ops for the stages asked for is opened until it can be cut. With ``may_open``
    false (costs that a caller gave hold for this graph alone) it is planned as it is. ``solve`` is told how
    many seconds it has, of ``time_limit_s`` or else of ``usual_s``, and whether its plan is a draft: graphs
    that may be opened are drafted in a hurry, and once more with all the time: one that would be given up,
    unless its bound says that it is no better, and the one that is kept, which is then planned. Where that
    time was too short to find or prove anything, finer graphs would only be harder: none is made. Nor where
    one op that stays whole takes as long as the fullest rank.
    Past the limit, or on Ctrl-C, the best plan so far is returned. A limit that was given is on the wall's
    clock, the usual one on the processor's.

    Raises :class:`InfeasibleError` where no finer graph can help, or no leaf is left to open and there is
    still no plan; :class:`UndecidedError` where the solver found none and ruled none out, which opening
    leaves would only make harder.
    """
    search = _Refining(cost, solve, usual_s, time_limit_s)
    with timed_by_work(time_limit_s is None), interrupts() as stopped:
        try:
            while True:
                failure = search.plan(capture, is_draft=may_open)
                is_over = stopped.is_set() or search.left_s == 0 or not may_open
                if search.best is not None and is_over:
                    return search.best
                is_even = search.best is not None and (search.is_balanced or search.is_least(capture))
                following = search.opened_next(capture) if may_open and not is_even else None
                if following is None and search.best is not None:
                    return search.at_leisure(search.best)
                if following is None:
                    assert failure is not None
                    raise failure
                capture = following
        except KeyboardInterrupt:
            if search.best is None:
                raise
            return search.best


class _Refining:
    """The best plan so far, what was opened for it, and what the last one says of its graph."""

    def __init__(
        self,
        cost: Callable[[Capture], CostTable],
        solve: Callable[[Capture, CostTable, float, bool], Plan],
        usual_s: Callable[[Capture], float],
        time_limit_s: float | None,
    ) -> None:
        self.cost, self.solve, self.usual_s, self.left_s = cost, solve, usual_s, time_limit_s
        self.best: Planned | None = None
        self.draft: Planned | None = None
        self.is_cut_short = False
        self.opened: tuple[str, ...] = ()
        self.closed: set[str] = set()
        self.idle = self.n_openings = 0
        self.costs: CostTable | None = None
        self.last: Plan | None = None

    def plan(self, capture: Capture, *, is_draft: bool) -> InfeasibleError | None:
        """Plans a graph, drafts in a hurry, and keeps what is better; the error where there is no plan."""
        self.costs, self.last = self.cost(capture), None
        try:
            plan = self._solved(capture, self.costs, is_draft=is_draft, in_a_hurry=is_draft)
            if self.is_cut_short and not self._is_better(plan) and self._may_be_better(plan):
                # a graph is not given up for want of time
                plan = self._solved(capture, self.costs, is_draft=is_draft)
                is_searched = self._is_better(plan) or plan.bounds.proved
                self.idle = self.idle if is_searched else PATIENCE
            self.last = plan
        except InfeasibleError as error:
            if self.best is None and (isinstance(error, UndecidedError) or not error.finer_may_help):
                raise
            return error
        if self._is_better(plan):
            self.best, self.idle = Planned(capture, self.costs, plan, self.opened), 0
            self.draft = self.best if is_draft else None
        else:
            self.idle += 1
        return None

    def _is_better(self, plan: Plan) -> bool:
        """Whether a finer graph's plan is worth reading it, and its step is no longer."""
        is_no_longer = self.best is None or plan.step_s <= self.best.plan.step_s
        return is_no_longer and max(plan.loads_s) < self._enough_s

    def _may_be_better(self, plan: Plan) -> bool:
        """Whether more time might find one, as far as the bound says of ranks and microbatches like these."""
        return plan.bounds.bottleneck_lower_s < self._enough_s

    @property
    def _enough_s(self) -> float:
        """What a finer graph's bottleneck must be under."""
        return max(self.best.plan.loads_s) * (1 - MIN_GAIN) if self.best is not None else math.inf

    def at_leisure(self, best: Planned) -> Planned:
        """The plan that comes of a draft once all the time is for it."""
        if best is not self.draft:
            return best
        try:
            plan = self._solved(best.capture, best.costs)
        except UndecidedError:
            return best
        return dataclasses.replace(best, plan=min(plan, best.plan, key=lambda p: p.step_s))

    def _solved(
        self, capture: Capture, costs: CostTable, *, is_draft: bool = False, in_a_hurry: bool = False
    ) -> Plan:
        """A plan in all of the time, or in a part of it unless that finds none."""
        started = clock_s()
        usual_s = self.usual_s(capture) if self.left_s is None else self.left_s
        seconds = min(usual_s, max(HURRY_S, HURRY * usual_s)) if in_a_hurry else usual_s
        try:
            plan = self.solve(capture, costs, seconds, is_draft)
            is_over = plan.bounds.proved and clock_s() - started < seconds / 2
            self.is_cut_short = seconds < usual_s and not is_over
            return plan
        except UndecidedError:
            if seconds == usual_s:
                raise
        finally:
            if self.left_s is not None:
                self.left_s = max(0.0, self.left_s - (clock_s() - started))
        return self._solved(capture, costs, is_draft=is_draft)

    @property
    def is_balanced(self) -> bool:
        """Whether the last plan is even enough, or opening has ceased to help."""
        tolerance = AGAIN if self.opened else TOLERANCE
        return self.idle >= PATIENCE or (
            self.last is not None
            and self.costs is not None
            and _imbalance(self.last, self.costs) <= tolerance
        )

    def is_least(self, capture: Capture) -> bool:
        """Whether one op that cannot be opened takes too long for any finer graph's plan to be kept."""
        assert self.best is not None
        assert self.costs is not None
        graph, is_trained = capture.ops, self.best.plan.schedule != "forward-only"
        # a tail's costs are of another batch
        outside = capture.drawing_outside
        ahead = (op for op in graph.compute if op.name not in graph.tail)
        fixed = (op for op in ahead if op.name in outside or self._is_fixed(capture, op))
        costs = (self.costs[op.name] for op in fixed)
        longest_s = max((c.seconds if is_trained else c.forward_s for c in costs), default=0.0)
        return longest_s / max(d.speed for d in self.best.plan.cluster.devices) >= self._enough_s

    def _is_fixed(self, capture: Capture, op: Op) -> bool:
        is_closed = op.module_path in self.closed
        return op.kind != "module" or is_closed or _is_single(submodule(capture.model, op.module_path))

    def opened_next(self, capture: Capture) -> Capture | None:
        """The capture with the leaf opened that stands in the way most, and all that are like it."""
        assert self.costs is not None
        if self.n_openings >= MAX_OPENINGS:
            return None
        following = _open_heaviest(capture, self.costs, self.last, self.closed)
        if following is None:
            return None
        self.opened, self.n_openings = (*self.opened, *following[1]), self.n_openings + 1
        return following[0]


def _imbalance(plan: Plan, costs: CostTable) -> float:
    """How far the fullest rank is above the mean, blocks that run again left out of that."""
    loads = plan.loads_s
    again = sum(
        costs[op].forward_s / plan.cluster.devices[stage.rank].speed
        for stage in plan.stages
        for block in stage.recomputed
        for op in block
    )
    mean = (sum(loads) - again) / len(loads)
    return max(loads) / mean - 1 if mean > 0 else 0.0


def _open_heaviest(
    capture: Capture, costs: CostTable, plan: Plan | None, closed: set[str]
) -> tuple[Capture, tuple[str, ...]] | None:
    """The capture with its costliest leaf (of the fullest rank, once there is a plan) and its like opened.

    So are parts that are most of it and would be next: each time the model is recorded anew. Not where blocks
    run again to fit memory: which of them do is harder to find the more there are. A leaf that fixes sizes
    when opened stays whole, unless there is no plan and nothing else to open. So does one that draws from
    Python's or numpy's generator: its parts would have streams of their own, and numbers depend on the cut.
    """
    names, much_s = {op.name for op in capture.ops.compute}, math.inf
    if plan is not None:
        loads = plan.loads_s
        fullest = loads.index(max(loads))
        names = {op for stage in plan.stages if stage.rank == fullest for op in stage.ops}
        is_short = any(stage.recompute or stage.recomputed for stage in plan.stages)
        much_s = math.inf if is_short else AGAIN * sum(loads) / len(loads)
    outside = capture.drawing_outside
    modules = [op for op in capture.ops.compute if op.kind == "module" and op.name not in outside]
    made = {op.module_path: submodule(capture.model, op.module_path) for op in modules}
    likeness = {path: _likeness(module) for path, module in made.items()}
    narrowed = None
    for op in sorted((op for op in modules if op.name in names), key=lambda op: -costs[op.name].seconds):
        if op.module_path in closed or _is_single(made[op.module_path]):
            continue
        paths = tuple(p for p in made if p not in closed and likeness[p] == likeness[op.module_path])
        parts = _parts(made[op.module_path], costs[op.name].seconds, much_s)
        deeper = (*paths, *(f"{path}.{part}" for path in paths for part in parts))
        for some in dict.fromkeys((deeper, paths, (op.module_path,))):
            try:
                opened = capture.open(*some)
            except CaptureError:
                # one of them is a single op, or pinned closed by the caller
                continue
            if {*opened.variation.fixed} <= {*capture.variation.fixed}:
                return opened, some
            narrowed = narrowed or (opened, some)
        closed.add(op.module_path)
    return narrowed if plan is None else None


def _parts(module: nn.Module, seconds: float, much_s: float) -> list[str]:
    """Paths of the parts of a leaf that are most of it and take longer than ``much_s``.

    Its time is shared out by parameters; of a part without parts, as a bank of experts, these say too little.
    """
    sizes = {
        path: sum(p.numel() for p in part.parameters())
        for path, part in module.named_modules()
        if any(part.children())
    }
    least = max(MOST, much_s / seconds if seconds else math.inf) * sizes.get("", 0)
    return [path for path, n in sizes.items() if path and n > least]


def _likeness(module: nn.Module) -> tuple[Any, ...]:
    """What leaves that cost and open alike have in common: their classes, inside too, and their tensors."""
    classes = tuple((name, type(m)) for name, m in module.named_modules())
    tensors = (*module.named_parameters(), *module.named_buffers())
    return classes, tuple((name, t.shape, t.dtype) for name, t in tensors)


def _is_single(module: nn.Module) -> bool:
    """Whether a leaf is one of torch's own layers without parts, which opens into a single call."""
    return is_torchs(module) and not any(module.children())
