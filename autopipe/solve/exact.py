"""The optimum over every chain of downsets, with proof: guess a bound, look at all that fits under it.

Merging under a bound and the room left are ``bounds``; first answers are left to ``intervals``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from .bounds import Room, at_bound, lower_bound
from .mincut import dearest_item
from .problem import HUGE, Problem, memory_bytes, peak_bytes, scaled

__all__ = ["Answer", "prove"]

_PATIENCE = 1 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """The best assignment known, its bottleneck, and a bottleneck that no assignment beats."""

    stage_of: tuple[int, ...] | None
    bottleneck_ns: int
    lower_ns: int

    @property
    def proved(self) -> bool:
        return self.bottleneck_ns <= self.lower_ns


class OutOfTime(Exception):
    """The deadline passed."""


def prove(problem: Problem, known: Answer, deadline: float) -> Answer:
    """The best assignment of a separable problem, starting from one that is known.

    Bounds between the lower bound and the best known bottleneck are tried in turn: a bound that no chain
    meets is a certificate, the first that one meets gives the optimum. Stops at ``deadline``
    (``time.perf_counter``) or Ctrl-C with the best so far and the last certified bound. Worst case
    exponential in the width of the graph; near linear on chains.
    """
    lower = max(known.lower_ns, lower_bound(problem))
    best = known
    if not problem.is_separable:
        return known
    if best.bottleneck_ns > lower and best.stage_of is not None:
        under = at_bound(problem, best.bottleneck_ns - 1).problem
        lower = max(lower, min(dearest_item(under, best.bottleneck_ns, deadline), best.bottleneck_ns))
    for part in (8, 3, 1):
        if best.bottleneck_ns <= lower:
            break
        bound = lower + (best.bottleneck_ns - 1 - lower) // part
        try:
            found = Chains(problem, bound, deadline).best()
        except (OutOfTime, KeyboardInterrupt):
            break
        if found is None:
            lower = bound + 1
        else:
            value, stage_of = found
            best, lower = Answer(stage_of, value, value), value
    return dataclasses.replace(best, lower_ns=min(lower, best.bottleneck_ns))


@dataclasses.dataclass(slots=True)
class _Node:
    """A stage under construction: what it holds beside the downset before it, and what that costs."""

    inside: int
    held: int
    ready: tuple[int, ...]
    barred: int
    forward: int
    backward: int
    receive: int
    received: int
    send: int
    cross_send: int
    cross_receive: int
    touched: int
    static: int
    saved: int
    workspace: int
    received_bytes: int
    sent_bytes: int


class Chains:
    """All chains of downsets whose every load is at most ``bound``, layer by layer."""

    def __init__(self, problem: Problem, bound: int, deadline: float) -> None:
        self.contraction = at_bound(problem, bound)
        self.problem = p = self.contraction.problem
        self.bound, self.deadline = bound, deadline
        self.n, self.k = len(p.items), p.n_stages
        self.full = (1 << self.n) - 1
        self.needs = [_mask(p.before[v]) for v in range(self.n)]
        self.takers = [_mask(net.consumers) for net in p.nets]
        self.makes: list[list[int]] = [[] for _ in p.items]
        self.takes: list[list[int]] = [[] for _ in p.items]
        for n, net in enumerate(p.nets):
            self.makes[net.producer].append(n)
            for v in net.consumers:
                self.takes[v].append(n)
        self.members = [_mask(s.items) for s in p.shares]
        self.real = _mask([v for v, i in enumerate(p.items) if i.ops])
        self.peaks = [peak_bytes(p, v) for v in range(self.n)]
        self.has_memory = p.recompute != "never" or any(s.limit_bytes < HUGE for s in p.stages)
        self.room = Room.of(self.problem)
        self.after = self._descendants()
        self.steps = 0
        self._set_windows()

    def _descendants(self) -> list[int]:
        out = [0] * self.n
        for v in range(self.n - 1, -1, -1):
            mask = 1 << v
            for w in self.problem.after[v]:
                mask |= out[w]
            out[v] = mask
        return out

    def _set_windows(self) -> None:
        """For i stages done: the most work before the cut, and the least, with what transfers take of it."""
        p, room, k = self.problem, self.room, self.k
        self.most, self.least = [], []
        for i in range(k + 1):
            tight = not p.allow_empty or self.bound >= room.send_ns + room.receive_ns
            first, last = (room.first(i), room.last(k - i)) if tight else ((0, 0), (0, 0))
            self.most.append((room.work(range(i), self.bound), *first))
            self.least.append((room.total_ns - room.work(range(i, k), self.bound), *last))
        self.must = [_mask([v for v in range(self.n) if p.last_of(v) < s]) for s in range(k + 1)]
        self.may = [_mask([v for v in range(self.n) if p.items[v].first <= s]) for s in range(k)]
        self.plain = [i.work_ns for i in p.items]

    def best(self) -> tuple[int, tuple[int, ...]] | None:
        """The least bottleneck of the chains and its assignment in the original items, if there is one."""
        layers: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
        for s in range(self.k):
            layer: dict[int, tuple[int, int]] = {}
            for inside, (value, _) in sorted(layers[-1].items(), key=lambda e: e[1][0]):
                if s == self.k - 1:
                    ends = self._rest(inside, s)
                else:
                    ends = self._ends(inside, s)
                for end, load in ends:
                    worst = max(value, load)
                    old = layer.get(end)
                    if old is None or worst < old[0]:
                        layer[end] = (worst, inside)
            layers.append(layer)
            if not layer:
                return None
        if self.full not in layers[-1]:
            return None
        stage_of = [0] * self.n
        end = self.full
        for s in range(self.k - 1, -1, -1):
            start = layers[s + 1][end][1]
            for v in _bits(end & ~start):
                stage_of[v] = s
            end = start
        return layers[-1][self.full][0], self.contraction.expand(stage_of)

    def _start(self, inside: int, s: int) -> _Node:
        cross_send = cross_receive = 0
        for n, net in enumerate(self.problem.nets):
            if inside >> net.producer & 1 and self.takers[n] & ~inside:
                cross_send += net.send_ns
                cross_receive += net.receive_ns
        ready = tuple(v for v in _bits(self.may[s] & ~inside) if not self.needs[v] & ~inside)
        return _Node(inside, 0, ready, 0, 0, 0, 0, 0, 0, cross_send, cross_receive, 0, 0, 0, 0, 0, 0)

    def _rest(self, inside: int, s: int) -> list[tuple[int, int]]:
        """The last stage takes all that is left, if it can."""
        left = list(_bits(self.full & ~inside))
        if any(not self.may[s] >> v & 1 for v in left):
            return []
        node = self._start(inside, s)
        for v in left:
            node = self._with(node, inside, v, (), 0, s)
        load = self._load(node, s)
        is_real = self.problem.allow_empty or node.held & self.real
        return [(self.full, load)] if load <= self.bound and is_real else []

    def _ends(self, inside: int, s: int) -> list[tuple[int, int]]:
        """Every downset that stage ``s`` may end at, given where it starts, with its load."""
        found = []
        done = sum(self.plain[v] for v in _bits(inside))
        if self.problem.allow_empty and self._fits(inside, done, self._start(inside, s), s + 1):
            found.append((inside, 0))
        stack = [(self._start(inside, s), done)]
        most, send, receive = self.most[s + 1]
        while stack:
            node, done = stack.pop()
            self._tick()
            barred = node.barred
            for t, v in enumerate(node.ready):
                after = done + self.plain[v]
                if after + send + receive <= most:
                    child = self._with(node, inside, v, node.ready[t + 1 :], barred, s)
                    load = self._load(child, s)
                    if load <= self.bound or self._may_fit(child, s):
                        stack.append((child, after))
                        is_real = self.problem.allow_empty or child.held & self.real
                        if load <= self.bound and is_real and self._fits(child.inside, after, child, s + 1):
                            found.append((child.inside, load))
                barred |= self.after[v]
                if self.must[s + 1] & barred:
                    break
        return found

    def _fits(self, inside: int, done: int, node: _Node, i: int) -> bool:
        """Whether the first ``i`` and the other stages can still stay within the bound."""
        if self.must[i] & ~inside:
            return False
        hidden = self.problem.overlap
        most, send, receive = self.most[i]
        if done + (0 if hidden else max(send, self.room.as_work(node.cross_send))) + receive > most:
            return False
        least, send, receive = self.least[i]
        return done >= least + send + (0 if hidden else max(receive, self.room.as_work(node.cross_receive)))

    def _with(self, node: _Node, start: int, v: int, ready: tuple[int, ...], barred: int, s: int) -> _Node:
        """The stage with one more item."""
        p, item = self.problem, self.problem.items[v]
        inside = node.inside | 1 << v
        forward, backward = item.forward_ns, item.backward_ns
        sent_bytes = node.sent_bytes
        receive, received, send = node.receive, node.received, node.send
        cross_send, cross_receive, received_bytes = node.cross_send, node.cross_receive, node.received_bytes
        for n in self.takes[v]:
            net = p.nets[n]
            old = start >> net.producer & 1
            if old and not received >> n & 1:
                received |= 1 << n
                receive += net.receive_ns
                received_bytes += net.n_bytes
            if not self.takers[n] & ~inside:
                cross_send -= net.send_ns
                cross_receive -= net.receive_ns
                if not old:
                    send -= net.send_ns
                    sent_bytes -= net.sent_bytes
        for n in self.makes[v]:
            net = p.nets[n]
            send += net.send_ns
            sent_bytes += net.sent_bytes
            cross_send += net.send_ns
            cross_receive += net.receive_ns
        touched, static, saved = node.touched, node.static + item.static_bytes, node.saved + item.saved_bytes
        for r in p.shares_of[v]:
            if not touched >> r & 1:
                share = p.shares[r]
                touched |= 1 << r
                forward += share.forward_ns
                backward += share.backward_ns
                static += share.static_bytes
                saved += share.saved_bytes
        if ready or inside != self.full:
            more = [w for w in p.after[v] if not self.needs[w] & ~inside and self.may[s] >> w & 1]
            ready = (*ready, *more)
        return _Node(
            inside,
            node.held | 1 << v,
            ready,
            barred,
            node.forward + forward,
            node.backward + backward,
            receive,
            received,
            send,
            cross_send,
            cross_receive,
            touched,
            static,
            saved,
            max(node.workspace, self.peaks[v]),
            received_bytes,
            sent_bytes,
        )

    def _load(self, node: _Node, s: int) -> int:
        sync = 0
        for r in _bits(node.touched):
            if self.members[r] & ~node.held:
                sync += self.problem.shares[r].sync_ns
        return self._combined(node, node.receive + node.send + sync, node.sent_bytes, s)

    def _may_fit(self, node: _Node, s: int) -> bool:
        """Whether a larger stage may come within the bound again: closed values are no longer sent."""
        sure, sent_bytes = node.receive, 0
        for v in _bits(node.held) if node.send or node.sent_bytes else ():
            for n in self.makes[v]:
                if self.takers[n] & node.barred:
                    sure += self.problem.nets[n].send_ns
                    sent_bytes += self.problem.nets[n].sent_bytes
        for r in _bits(node.touched):
            if self.members[r] & (node.barred | node.inside & ~node.held):
                sure += self.problem.shares[r].sync_ns
        return self._combined(node, sure, sent_bytes, s) <= self.bound

    def _combined(self, node: _Node, transfers: int, sent_bytes: int, s: int) -> int:
        p, stage = self.problem, self.problem.stages[s]
        forward = scaled(node.forward, stage.speed)
        work = forward + scaled(node.backward, stage.speed)
        if self.has_memory:
            bytes_of = node.static, node.saved, node.workspace, node.received_bytes, sent_bytes
            kept, again = memory_bytes(stage, *bytes_of)
            if p.recompute == "always" or (p.recompute == "auto" and kept > stage.limit_bytes):
                kept, work = again, work + forward
            if kept > stage.limit_bytes:
                return HUGE
        return max(work, transfers) if p.overlap else work + transfers

    def _tick(self) -> None:
        self.steps += 1
        if self.steps % _PATIENCE == 0 and time.perf_counter() > self.deadline:
            raise OutOfTime


def _mask(items: Sequence[int]) -> int:
    mask = 0
    for v in items:
        mask |= 1 << v
    return mask


def _bits(mask: int):  # type: ignore[no-untyped-def]
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
