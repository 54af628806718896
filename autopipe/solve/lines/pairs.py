"""What a stage costs that starts at one downset and ends at another, for all pairs of two windows at once.

With A ⊂ B, a value still open at both is not sent by the stage, and one of whose takers both hold equally
many is not received: so costs are a sum over A, a sum over B and a matrix product of what A and B have in
common. Which downsets to pair is left to ``exact``, the definition of the costs to ``problem``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence, Set

import numpy as np
import numpy.typing as npt

from ..definition.blocks import UNDER, freed_bytes, least_again, sorts_of
from ..definition.problem import Array, Problem, Stage, memory_bytes, peak_bytes, scaled, stage_ns
from .reach import Bits
from .windows import Downsets

__all__ = ["Floats", "Layer", "Loads", "Priced"]

Floats = npt.NDArray[np.float64]

_GRADES = 8
"""Blocks are told apart by what they take for a byte given up, in so many grades at most."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Downsets with what their pairs' costs are made of, a row each.

    ``taken`` counts the takers that each live net's row holds, −1 where it is not open: no producer or all
    takers, or the other way round where takers come before it (twice the takers, + 1 with the producer,
    where nothing orders the two);
    ``touched`` the items of each share; ``blocks`` the blocks of each sort.
    """

    downsets: Downsets
    work: Array
    sums: dict[str, Array]
    taken: dict[int, Array]
    touched: dict[int, Array]
    blocks: Array

    def picked(self, rows: Array) -> Layer:
        """Some of the rows."""
        return Layer(
            self.downsets.picked(rows),
            self.work[rows],
            {name: row[rows] for name, row in self.sums.items()},
            {n: row[rows] for n, row in self.taken.items()},
            {r: row[rows] for r, row in self.touched.items()},
            self.blocks[rows],
        )


class Loads:
    """Loads of stages between downsets of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = p = problem
        self.turned = {
            n
            for n, net in enumerate(p.nets)
            if p.directions[n] == 0 or (p.directions[n] < 0 and (net.n_bytes or net.sent_bytes))
        }
        alike = all(s.speed == 1.0 and s.links == (0, 0) for s in p.stages)
        self.plain = alike and not p.has_memory and not any(n.link_ns for n in p.nets)
        names = ["forward_ns", "backward_ns"] + ["static_bytes", "saved_bytes"] * p.has_memory
        self.each = {name: _row([getattr(i, name) for i in p.items]) for name in names}
        self.grades = self._grades()
        self.sorts = sorts_of(b for i in p.items for b in i.blocks)
        column = {sort[:3]: x for x, sort in enumerate(self.sorts)}
        self.blocks = np.zeros((len(p.items), len(self.sorts)), dtype=np.int64)
        for v, i in enumerate(p.items):
            for b in i.blocks:
                self.blocks[v, column[b.forward_ns, b.freed_bytes, b.saved_bytes]] += 1
        self.smallest = min((b.saved_bytes for i in p.items for b in i.blocks), default=0)
        self.each["real"] = _row([bool(i.ops) for i in p.items])
        self.peaks = _row([peak_bytes(p, v) for v in range(len(p.items))])
        self.levels = sorted(set(self.peaks.tolist()) - {0}) if p.has_memory else []
        for level in self.levels:
            self.each[f"peak {level}"] = (self.peaks == level).astype(np.int64)

    def _grades(self) -> list[float]:
        """The least time per byte given up of each grade of blocks, rising; what items have of it is kept."""
        worth = {b.forward_ns / b.freed_bytes for i in self.problem.items for b in i.blocks}
        grades = np.array_split(sorted(worth), min(_GRADES, len(worth))) if worth else []
        for g, grade in enumerate(grades):
            among = set(grade.tolist())
            rows = (
                [b for b in i.blocks if b.forward_ns / b.freed_bytes in among] for i in self.problem.items
            )
            self.each[f"grade {g}"] = _row([freed_bytes(row) for row in rows])
        return [float(grade[0]) for grade in grades]

    def _again(self, a: Layer, b: Layer, need: Floats) -> tuple[Floats, Bits]:
        """The least forward that gives up the bytes needed, parts of blocks allowed, and where none does."""
        forward = np.zeros_like(need)
        for g, ns_per_byte in enumerate(self.grades):
            taken = np.minimum(_between(a, b, f"grade {g}"), need)
            forward, need = forward + taken * ns_per_byte, need - taken
        return np.floor(forward * UNDER), need > 0

    def least_again(self, counts: Array, in_flight: int, over_bytes: int) -> int | None:
        """What :func:`least_again` says of so many blocks of each sort."""
        sorts = tuple((*sort[:3], n) for sort, n in zip(self.sorts, counts.tolist(), strict=True) if n)
        return least_again(sorts, in_flight, over_bytes)

    def layer(self, downsets: Downsets) -> Layer:
        """The downsets with what their costs are made of, by rising work."""
        p = self.problem
        work = downsets.sums(self.each["forward_ns"] + self.each["backward_ns"])
        order = np.argsort(work, kind="stable")
        downsets, work = downsets.picked(order), work[order]
        sums = {name: downsets.sums(each) for name, each in self.each.items()}
        column = {v: x for x, v in enumerate(downsets.free.tolist())}
        taken, base = {}, downsets.base.tolist()
        for n, net in enumerate(p.nets):
            if n in self.turned:
                maker = _count(downsets, column, (net.producer,))
                taken[n] = 2 * _count(downsets, column, net.consumers) + maker
                continue
            first: tuple[int, ...] = (net.producer,)
            then = net.consumers
            if p.directions[n] < 0:
                first, then = then, first
            if all(base[v] for v in then) or not any(base[v] or v in column for v in first):
                continue
            count = _count(downsets, column, net.consumers)
            made = _count(downsets, column, (net.producer,)) > 0
            is_open = made & (count < len(net.consumers)) if p.directions[n] > 0 else ~made & (count > 0)
            if is_open.any():
                taken[n] = np.where(is_open, count, -1)
        touched = {r: _count(downsets, column, share.items) for r, share in enumerate(p.shares)}
        out = Layer(downsets, work, sums, taken, touched, downsets.sums(self.blocks))
        nets, ways = p.nets, p.directions
        for links in {stage.links for stage in p.stages}:
            for side, kind in enumerate(links):
                each = {n: nets[n].prices_ns(links)[side if ways[n] > 0 else 1 - side] for n in taken}
                sums[f"{side} {kind}"] = self._open(out, each)
        for name in ("sent_bytes", "n_bytes") if p.has_memory else ():
            sums[name] = self._open(out, {n: getattr(nets[n], name) for n in taken})
        return out

    def _open(self, layer: Layer, price: Mapping[int, int]) -> Array:
        """The price of all values open at each row."""
        out = np.zeros(len(layer.work), dtype=np.int64)
        for n in layer.taken.keys() - self.turned:
            if price[n]:
                out += (layer.taken[n] >= 0) * price[n]
        return out

    def of(self, s: int, a: Layer, b: Layer) -> Priced:
        """The load of stage ``s`` from each row of ``a`` to each of ``b``; infinite where it may not be."""
        stage = self.problem.stages[s]
        return self.on(stage, self.held(stage.links, a, b))

    def held(self, links: tuple[int, int], a: Layer, b: Layer) -> Held:
        """What a stage with such links has between each row of ``a`` and each of ``b``."""
        p, common = self.problem, _Common(self.problem, links, a, b, self.turned)
        bytes_of = tuple[Floats, ...]()
        if p.has_memory:
            static, saved = common.shared("static_bytes", a, b), common.shared("saved_bytes", a, b)
            peak = np.zeros(static.shape)
            for level in self.levels:
                peak[_between(a, b, f"peak {level}") > 0] = level
            received, sent = common.received(a, b), common.sent(a, b)
            bytes_of = static, saved + received * p.holds_received, peak, received, sent
        may_be = _contained(a.downsets, b.downsets)
        if not p.allow_empty and b.sums["real"].min() <= a.sums["real"].max():
            may_be &= _between(a, b, "real") > 0
        forward, backward = common.shared("forward_ns", a, b), common.shared("backward_ns", a, b)
        return Held(a, b, forward, backward, common.moving(a, b), common.synced(), bytes_of, may_be)

    def on(self, stage: Stage, held: Held) -> Priced:
        """What that loads a stage with."""
        p, moving, sync = self.problem, held.moving, held.sync
        forward, backward = _scaled(held.forward, stage.speed), _scaled(held.backward, stage.speed)
        again: _Again | None = None
        if p.has_memory:
            kept, whole = memory_bytes(stage.in_flight, *held.bytes_of)
            recompute = (kept > stage.limit_bytes) if p.recompute == "auto" else p.recompute == "always"
            least = np.where(recompute, forward, 0.0)
            short = np.where(recompute, whole, kept) > stage.limit_bytes
            if p.has_blocks:
                over, work = np.maximum(kept - stage.limit_bytes, 0), forward + backward
                unknown = over > 0
                blocks = held.a.blocks, held.b.blocks
                again = _Again(self, stage, blocks, forward, work, moving, sync, over, short, unknown)
                need = np.where(unknown, np.ceil((over + self.smallest) / stage.in_flight), 0.0)
                part, never = self._again(held.a, held.b, need)
                unknown &= ~never
                part = np.where(never, least, _scaled(part, stage.speed))
                least = np.where(short, part, np.minimum(least, part))
                short = short & never  # what ``again`` knows of whole stages stays
            backward = backward + least
        loads = stage_ns(forward + backward, moving, sync, p.overlap)
        if p.has_memory:
            loads[short] = np.inf
        loads[~held.may_be] = np.inf
        return Priced(loads, forward, again)


@dataclasses.dataclass(frozen=True, slots=True)
class Held:
    """What stages between pairs of rows have: times at speed 1, what moves, bytes, and which may be.

    ``bytes_of`` are static, saved, workspace, received and sent; none where memory decides nothing.
    """

    a: Layer
    b: Layer
    forward: Floats
    backward: Floats
    moving: Floats
    sync: Floats
    bytes_of: tuple[Floats, ...]
    may_be: Bits


@dataclasses.dataclass(frozen=True, slots=True)
class Priced:
    """Loads over pairs of rows, and what forwards of items take of them.

    Where ``again`` is given, some loads are only as much as they must be at least.
    """

    loads: Floats
    forward: Floats
    again: _Again | None = None

    def least(self, so_far: Floats, bound: int, tick: Callable[[], None]) -> tuple[Array, Floats]:
        """For each column the row with the least larger of load and what comes before it, and that value.

        What a row's recomputation costs is looked for only where it decides.
        """
        totals = np.maximum(self.loads, so_far)
        rows = totals.argmin(axis=0)
        columns = np.arange(totals.shape[1])
        while self.again is not None:
            open_still = np.flatnonzero(self.again.unknown[rows, columns] & (totals[rows, columns] <= bound))
            if not len(open_still):
                break
            tick()
            for c in open_still:
                totals[rows[c], c] = max(totals[rows[c], c], self.again.load(int(rows[c]), int(c)))
            rows[open_still] = totals[:, open_still].argmin(axis=0)
        return rows, totals[rows, columns]


@dataclasses.dataclass(frozen=True, slots=True)
class _Again:
    """What the loads of stages over their limit are made of, to find the cheapest blocks to compute again.

    ``blocks`` are those before the stage and up to its end, a column for each sort; ``short`` says where the
    whole stage computed again would not fit either; ``unknown`` where nobody looked.
    """

    loads: Loads
    stage: Stage
    blocks: tuple[Array, Array]
    forward: Floats
    work: Floats
    moving: Floats
    sync: Floats
    over: Floats
    short: Bits
    unknown: Bits

    def load(self, row: int, column: int) -> float:
        """The load of one pair; infinite where nothing that is computed again lets it fit."""
        self.unknown[row, column] = False
        before, upto = self.blocks
        inside = upto[column] - before[row]
        found = self.loads.least_again(inside, self.stage.in_flight, int(self.over[row, column]))
        if found is None and self.short[row, column]:
            return float("inf")
        work = float(self.work[row, column])
        if found is None:
            work += float(self.forward[row, column])
        else:
            work += scaled(found, self.stage.speed)
        moving, sync = self.moving[row, column], self.sync[row, column]
        return float(stage_ns(work, moving, sync, self.loads.problem.overlap))


class _Common:
    """Columns of what rows of two layers have in common, and the prices they take away."""

    def __init__(
        self, problem: Problem, links: tuple[int, int], a: Layer, b: Layer, turned: Set[int]
    ) -> None:
        self.problem, self.links = problem, links
        self.prices = [net.prices_ns(links) for net in problem.nets]
        self.extra = np.zeros((len(a.work), len(b.work)))
        self.extra_bytes = np.zeros((2, *self.extra.shape) if turned else (2, 1, 1))
        for n in turned:
            self._turned(n, a.taken[n][:, None], b.taken[n])
        here: list[Bits] = []
        there: list[Bits] = []
        self.open: dict[int, list[int]] = {}
        self.alike: dict[int, list[int]] = {}
        self.untouched: dict[int, list[int]] = {}
        self.whole: dict[int, int] = {}

        def column(x: Bits, y: Bits) -> list[int]:
            if not x.any() or not y.any():
                return []
            here.append(x)
            there.append(y)
            return [len(here) - 1]

        for n in (a.taken.keys() & b.taken.keys()) - turned:
            x, y = a.taken[n], b.taken[n]
            both = column(x >= 0, y >= 0)
            self.open[n] = both
            if len(problem.nets[n].consumers) == 1:
                self.alike[n] = both
            else:
                values = np.intersect1d(x, y) if both else np.zeros(0)
                self.alike[n] = [c for j in values[values >= 0] for c in column(x == j, y == j)]
        for r, share in enumerate(problem.shares):
            x, y = a.touched[r], b.touched[r]
            self.untouched[r] = [c for j in np.intersect1d(x, y) for c in column(x == j, y == j)]
            self.whole[r] = -1
            for c in column(x == 0, y == len(share.items)):
                self.whole[r] = c
        self.here = np.array(here, dtype=np.float64).reshape(len(here), len(a.work)).T
        self.there = np.array(there, dtype=np.float64).reshape(len(there), len(b.work))

    def _turned(self, n: int, here: Array, there: Array) -> None:
        """Adds a value that may be made after it is taken: twice its takers held, + 1 with its maker."""
        net = self.problem.nets[n]
        makes = (there % 2) > (here % 2)
        takes = (there // 2) > (here // 2)
        whole = (here // 2 == 0) & (there // 2 == len(net.consumers))
        received, sent = takes & ~makes, makes & ~whole
        self.extra += received * self.prices[n][1] + sent * self.prices[n][0]
        self.extra_bytes[0] += received * net.n_bytes
        self.extra_bytes[1] += sent * net.sent_bytes

    def product(self, price: Floats) -> Floats:
        """The sum of prices over the columns that two rows have in common."""
        used = np.flatnonzero(price)
        out: Floats = (self.here[:, used] * price[used]) @ self.there[used]
        return out

    def moving(self, a: Layer, b: Layer) -> Floats:
        """What each stage sends and receives."""
        price = np.zeros(len(self.there))
        for n, columns in self.alike.items():
            price[columns] += self.prices[n][1]
            price[self.open[n]] += self.prices[n][0]
        send, receive = self.links
        sums: Array = a.sums[f"1 {receive}"][:, None] + b.sums[f"0 {send}"]
        return sums + self.extra - self.product(price)

    def synced(self) -> Floats:
        """What each stage synchronises: the shares it touches, but for those it touches alone."""
        price = np.zeros(len(self.there))
        for r, share in enumerate(self.problem.shares):
            price[self.untouched[r]] += share.sync_ns
            if self.whole[r] >= 0:
                price[self.whole[r]] += share.sync_ns
        return sum(share.sync_ns for share in self.problem.shares) - self.product(price)

    def received(self, a: Layer, b: Layer) -> Floats:
        """Bytes each stage receives."""
        price = np.zeros(len(self.there))
        for n, columns in self.alike.items():
            price[columns] += self.problem.nets[n].n_bytes
        out: Floats = a.sums["n_bytes"][:, None] + self.extra_bytes[0] - self.product(price)
        return out

    def sent(self, a: Layer, b: Layer) -> Floats:
        """Bytes of the buffers of what each stage sends."""
        price = np.zeros(len(self.there))
        for n, columns in self.open.items():
            price[columns] += self.problem.nets[n].sent_bytes
        out: Floats = b.sums["sent_bytes"][None] + self.extra_bytes[1] - self.product(price)
        return out

    def shared(self, name: str, a: Layer, b: Layer) -> Floats:
        """A sum over each stage's items and the shares it touches."""
        out = _between(a, b, name).astype(np.float64)
        price, total = np.zeros(len(self.there)), 0
        for r, share in enumerate(self.problem.shares):
            total += getattr(share, name)
            price[self.untouched[r]] += getattr(share, name)
        return out + total - self.product(price) if total else out


def _between(a: Layer, b: Layer, name: str) -> Array:
    out: Array = b.sums[name] - a.sums[name][:, None]
    return out


def _contained(a: Downsets, b: Downsets) -> Bits:
    """Which rows of ``b`` hold all that each row of ``a`` holds."""
    _, here, there = np.intersect1d(a.free, b.free, assume_unique=True, return_indices=True)
    missing = a.rows[:, here].astype(np.float32) @ (~b.rows[:, there]).astype(np.float32).T
    out: Bits = missing == 0
    return out


def _count(downsets: Downsets, column: dict[int, int], items: Sequence[int]) -> Array:
    """How many of the items each row holds."""
    free = [column[v] for v in items if v in column]
    out: Array = downsets.rows[:, free].sum(axis=1, dtype=np.int64)
    out += sum(bool(downsets.base[v]) for v in items)
    return out


def _scaled(ns: Floats, speed: float) -> Floats:
    return ns if speed == 1.0 else np.rint(ns / speed)


def _row(values: Sequence[int]) -> Array:
    return np.array(values, dtype=np.int64)
