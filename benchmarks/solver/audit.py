"""Plans held to a second reading of the cost model, op by op: ``python -m benchmarks.solver.audit``.

Every way to cut a small op graph into stages is priced here from the graph, the costs and the cluster alone,
in seconds, in the words of ``autopipe.solve`` and with nothing of its code. What the solver says is held to
it: the bottleneck of its plan, its bound, its memory, and that no plan fits. Its answers are then held to one
another: a limit that a plan just meets is met, one byte less is no better, a plan whose ops are all pinned is
that plan, no time at all rules nothing out.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from autopipe.costs import CostTable, OpCost
from autopipe.errors import PlanError, UndecidedError
from autopipe.graph import Op, OpGraph, ParameterSpec, TensorSpec
from autopipe.hardware import Cluster, Device, Link
from autopipe.plans import Plan
from autopipe.schedule import Schedule, build
from autopipe.solve import solve

__all__ = ["Asked", "drawn", "faults_of", "main"]

_ROUNDED = 1e-7
"""Seconds by which a sum of costs rounded to whole nanoseconds may be off."""

_PLACED = (
    ("1f1b", 1, 1),
    ("1f1b", 2, 2),
    ("1f1b", 3, 3),
    ("1f1b", 4, 4),
    ("gpipe", 3, 3),
    ("zb-h1", 3, 3),
    ("interleaved", 2, 4),
    ("interleaved", 1, 3),
    ("interleaved", 2, 6),
    ("looped-bfs", 2, 4),
    ("zbv", 2, 4),
    ("dualpipev", 2, 4),
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A graph, what its ops cost, where it runs, and what is asked of a plan for it."""

    graph: OpGraph
    costs: CostTable
    cluster: Cluster
    schedule: str
    n_stages: int
    options: Mapping[str, Any]

    def plan(self, **changes: Any) -> Plan:
        """What the solver answers."""
        fields = {"schedule": self.schedule, "n_stages": self.n_stages} | dict(self.options) | changes
        return solve(self.graph, self.costs, fields.pop("cluster", self.cluster), **fields)


@dataclasses.dataclass(frozen=True, slots=True)
class Priced:
    """What a split of the ops costs: the fullest rank's seconds, and the bytes of each rank."""

    seconds: float
    rank_bytes: tuple[int, ...]

    def fits(self, limits: Sequence[float]) -> bool:
        """Whether each rank has room."""
        return all(held <= limit for held, limit in zip(self.rank_bytes, limits, strict=True))


class Reading:
    """The cost model read a second time, for one thing asked."""

    def __init__(self, asked: Asked) -> None:
        self.asked = a = asked
        self.built: Schedule = build(a.schedule, a.cluster.n_ranks, a.n_stages, a.options["n_microbatches"])
        hosts = [a.cluster.host(rank) for rank in range(a.cluster.n_ranks)]
        # stages go host by host
        self.order = sorted(range(a.cluster.n_ranks), key=lambda rank: (hosts.index(hosts[rank]), rank))
        self.placed = [self.order[slot] for slot in self.built.placement]
        self.ops = list(a.graph.compute)
        self.takers = {op.name: list(a.graph.consumers[op.name]) for op in self.ops}
        self.overlap = a.options.get("overlap", True)
        self.once = a.options.get("sender_pays", "once") == "once"
        self.ratio = a.options.get("optimizer_bytes_per_parameter_byte", 2.0)
        self.all_again = a.options.get("recompute") == "always"
        self.moments = [self._moments(rank) for rank in range(a.cluster.n_ranks)]

    def _moments(self, rank: int) -> list[tuple[dict[int, int], int]]:
        """Which microbatches live while each action of a rank runs: from F to B, or to W where split."""
        alive = {s: 0 for s, r in enumerate(self.placed) if r == rank}
        out = []
        for action in self.built.actions[self.order.index(rank)]:
            alive[action.stage] += action.kind == "F"
            out.append((dict(alive), action.stage))
            alive[action.stage] -= action.kind in "BW"
        return out

    def splits(self) -> Iterator[dict[str, int]]:
        """Every way to give each op a stage that order, pins and groups allow, none left empty."""
        a, k = self.asked, self.asked.n_stages
        pins = {name: stage % k for name, stage in a.options.get("pin", {}).items()}
        names = [op.name for op in self.ops if not (op.is_movable and self._is_cheap(op))]
        groups = [set(g) for g in a.options.get("together", ())]
        for value in a.options.get("uncut", ()):
            groups.append({value, *(t for t in self.takers[value] if t != "output")})
        if a.options.get("ties") == "colocate" and a.cluster.n_ranks == k:
            users: dict[str, set[str]] = {}
            for op in self.ops:
                for weight in op.parameters:
                    users.setdefault(weight, set()).add(op.name)
            groups += users.values()
        for stages in itertools.product(range(k), repeat=len(names)):
            home = dict(zip(names, stages, strict=True))
            if len(set(stages)) < k or any(home[op] != s for op, s in pins.items()):
                continue
            if any(len({home[op] for op in g}) > 1 for g in groups):
                continue
            edges = ((x, y) for x, y in a.graph.edges if x in home and y in home)
            if all(home[x] <= home[y] for x, y in edges):
                yield home

    def priced(self, home: Mapping[str, int]) -> Priced:
        """The least that fits of all ways; where none does, the least."""
        limits = self.limits()
        return min(self.ways(home), key=lambda p: (not p.fits(limits), p.seconds))

    def ways(self, home: Mapping[str, int]) -> Iterator[Priced]:
        """All that may be computed again: movable values, by stages that take them."""
        choices = []
        movable = [op for op in self.ops if op.is_movable]
        for op in movable:
            stages = sorted({self._stage(t, home) for t in self.takers[op.name]})
            own = home.get(op.name)
            some = _subsets(stages) if self._may_repeat(op) else [()]
            choices.append([(stages[0], stages)] if own is None else [(own, again) for again in some])
        for chosen in itertools.product(*choices):
            yield self._with(home, {op.name: c for op, c in zip(movable, chosen, strict=True)})

    def _is_cheap(self, op: Op) -> bool:
        """Whether making a value takes no longer than receiving it over the fastest link; then all do."""
        if "output" in self.takers[op.name]:
            return False
        links = _links(self.asked.cluster)
        fastest = Link(min(w.latency_s for w in links), max(w.bandwidth_bytes_s for w in links))
        return (1 + self.all_again) * self._make_s(op, min) <= fastest.seconds(self._bytes(op))

    def _may_repeat(self, op: Op) -> bool:
        """Whether stages may make a value again rather than receive it."""
        dear = self._make_s(op, max) > 2 * self._slowest.seconds(self._bytes(op))
        return op.is_movable and not dear and "output" not in self.takers[op.name]

    def _make_s(self, op: Op, which: Callable[[Iterable[float]], float]) -> float:
        return self.asked.costs[op.name].forward_s / which(d.speed for d in self.asked.cluster.devices)

    def _bytes(self, op: Op) -> int:
        return op.bytes_at(self.asked.costs.dims)

    @property
    def _slowest(self) -> Link:
        links = _links(self.asked.cluster)
        return Link(max(w.latency_s for w in links), min(w.bandwidth_bytes_s for w in links))

    def _stage(self, op: str, home: Mapping[str, int]) -> int:
        return self.asked.n_stages - 1 if op == "output" else home[op]

    def _with(self, home: Mapping[str, int], made: Mapping[str, tuple[int, Sequence[int]]]) -> Priced:
        a, k = self.asked, self.asked.n_stages
        forward, backward, moving, sync = ([0.0] * k for _ in range(4))
        saved, peak, received, sent = ([0] * k for _ in range(4))
        weights: list[dict[str, int]] = [{} for _ in range(k)]
        wires: dict[tuple[int, int], float] = {}
        for op in self.ops:
            cost = a.costs[op.name]
            own, extra = made[op.name] if op.name in made else (home[op.name], ())
            for s in {own, *extra}:
                forward[s] += cost.forward_s
                backward[s] += cost.backward_s
                saved[s] += cost.saved_bytes
                peak[s] = max(peak[s], cost.workspace_bytes, cost.backward_workspace_bytes)
                for weight in op.parameters:
                    spec = a.graph.parameter[weight]
                    weights[s][weight] = round(spec.bytes * (2 + self.ratio))
            there = {self._stage(t, home) for t in self.takers[op.name]} - {own, *extra}
            n_bytes = self._bytes(op)
            if self._may_repeat(op):  # whoever takes it keeps it
                saved = [x + cost.saved_bytes * (s in there) for s, x in enumerate(saved)]
            prices = [0.0]
            for s in there:
                received[s] += n_bytes
                if self.placed[s] != self.placed[own]:
                    link = a.cluster.link(self.placed[own], self.placed[s])
                    each = link.seconds(n_bytes) * (2 if op.requires_grad else 1)
                    prices.append(each)
                    moving[s] += each
                    for rank in self._far(own, s):
                        nic = a.cluster.host(rank), a.cluster.nics[rank]
                        wires[nic] = wires.get(nic, 0.0) + each
            moving[own] += max(prices) if self.once else sum(prices)
            if there and op.requires_grad:
                sent[own] += n_bytes
        for weight in a.graph.parameters:
            ranks: dict[int, int] = {}
            for s in range(k):
                if weight.name in weights[s]:
                    ranks.setdefault(self.placed[s], s)
            sums = [
                a.cluster.link(*pair).all_reduce_s(weight.bytes, len(ranks))
                for pair in itertools.permutations(ranks, 2)
            ]
            for s in ranks.values() if sums else ():
                sync[s] += max(sums) / a.options["n_microbatches"]
        if a.costs.offloaded:  # what a stage received is all that stays of a microbatch
            saved = [x + y for x, y in zip(saved, received, strict=True)]
        seconds, rank_bytes = [0.0], []
        for rank, device in enumerate(a.cluster.devices):
            own_stages = [s for s in range(k) if self.placed[s] == rank]
            total = 0.0
            for s in own_stages:
                work = (forward[s] * (1 + self.all_again) + backward[s]) / device.speed
                total += (max(work, moving[s]) if self.overlap else work + moving[s]) + sync[s]
            seconds.append(total)
            held = {w: b for s in own_stages for w, b in weights[s].items()}
            still = sum(held.values()) + sum(2 * received[s] + sent[s] for s in own_stages)
            kept = {s: received[s] if self.all_again else saved[s] for s in own_stages}
            acting = {s: peak[s] + saved[s] * self.all_again for s in own_stages}
            moments = self.moments[rank]
            rank_bytes.append(
                still + max(sum(n * kept[s] for s, n in alive.items()) + acting[x] for alive, x in moments)
            )
        return Priced(max([*seconds, *wires.values()]), tuple(rank_bytes))

    def _far(self, source: int, taker: int) -> list[int]:
        """The ranks whose network interfaces a message holds: none on one host, or where each has its own."""
        ends = [self.placed[source], self.placed[taker]]
        cluster = self.asked.cluster
        if not cluster.nics or cluster.host(ends[0]) == cluster.host(ends[1]):
            return []
        pairs = list(zip(cluster.hosts, cluster.nics, strict=True))
        return [rank for rank in ends if pairs.count(pairs[rank]) > 1]

    def limits(self) -> list[float]:
        """Per rank, the bytes that may be used."""
        asked = self.asked.options.get("memory_limit")
        each = asked if isinstance(asked, (list, tuple)) else [asked] * self.asked.cluster.n_ranks
        devices = self.asked.cluster.devices
        rows = zip(each, (d.usable_bytes for d in devices), strict=True)
        return [min((b for b in row if b is not None), default=math.inf) for row in rows]


def _subsets(stages: Sequence[int]) -> list[Sequence[int]]:
    return [c for n in range(len(stages) + 1) for c in itertools.combinations(stages, n)]


def _links(cluster: Cluster) -> list[Link]:
    pairs = itertools.permutations(range(cluster.n_ranks), 2)
    return [cluster.link(*pair) for pair in pairs] or [cluster.local]


def drawn(number: int) -> Asked:
    """What is asked in problem ``number``."""
    draw = random.Random(f"audit {number}")
    name, n_ranks, n_stages = draw.choice(_PLACED)
    n = draw.randint(n_stages, max(n_stages, 6 if n_stages < 5 else n_stages))
    graph, costs = _model(draw, n)
    cluster = _cluster(draw, n_ranks)
    options: dict[str, Any] = {"n_microbatches": draw.choice((1, 2, 3, 8))}
    if draw.random() < 0.3:
        options["overlap"] = False
    if draw.random() < 0.25:
        options["sender_pays"] = "receiver"
    if draw.random() < 0.2:
        options["recompute"] = "always"
    ops = [op.name for op in graph.compute if not op.is_movable]
    if draw.random() < 0.35:
        options["pin"] = {
            draw.choice(ops): draw.randrange(-n_stages, n_stages) for _ in range(draw.randint(1, 2))
        }
    if draw.random() < 0.15:
        options["together"] = [draw.sample(ops, min(2, len(ops)))]
    if draw.random() < 0.15:
        options["uncut"] = [draw.choice(ops)]
    if draw.random() < 0.2:
        options["ties"] = "colocate"
    if draw.random() < 0.2:
        options["optimizer_bytes_per_parameter_byte"] = draw.choice((0.0, 1.0, 6.5))
    if draw.random() < 0.15 and "recompute" not in options:
        nothing = {op: dataclasses.replace(cost, saved_bytes=0) for op, cost in costs.costs.items()}
        costs = dataclasses.replace(costs, costs=nothing, offloaded=True)
    if "mask" in costs.costs:
        held = draw.choice((0, 0, 16_384)) * (not costs.offloaded), draw.choice((0, 16_384))
        mask = dataclasses.replace(costs["mask"], saved_bytes=held[0], workspace_bytes=held[1])
        costs = dataclasses.replace(costs, costs={**costs.costs, "mask": mask})
    asked = Asked(graph, costs, cluster, name, n_stages, options)
    if draw.random() < 0.6:
        peaks = sorted(max(Reading(asked).priced(home).rank_bytes) for home in Reading(asked).splits())
        if peaks:
            at = peaks[min(len(peaks) - 1, int(len(peaks) * draw.random() ** 3))]
            limit = max(1, at + draw.choice((0, 0, -1, 1)))
            options["memory_limit"] = limit if draw.random() < 0.7 else [limit] * n_ranks
    return asked


def _model(draw: random.Random, n: int) -> tuple[OpGraph, CostTable]:
    """A line of ops with skips, branches, a tied weight, and now and then a mask that many take."""
    wide = (TensorSpec((draw.choice((4, 64, 2048)), 64), "float32", True),)
    ops = [Op("x", "input", "x", outputs=(TensorSpec((8, 64), "float32"),))]
    edges: list[tuple[str, str]] = []
    costs: dict[str, OpCost] = {}
    masked = draw.random() < 0.25
    if masked:
        ops.append(
            Op("mask", "function", "torch.tril", outputs=(TensorSpec((64, 64), "float32"),), is_movable=True)
        )
        edges.append(("x", "mask"))
        costs["mask"] = OpCost(draw.choice((1e-7, 1e-5, 4e-5, 3e-4)))
    tied = n > 2 and draw.random() < 0.4
    shape = draw.choice(("line", "skips", "branches"))
    for v in range(n):
        held = "w0" if tied and v == n - 1 else f"w{v}"
        frozen = draw.random() < 0.1
        out = (dataclasses.replace(wide[0], requires_grad=False),) if frozen and v == 0 else wide
        ops.append(Op(f"o{v}", "module", f"m.{v}", f"m.{v}", outputs=out, parameters=(held,)))
        before = {f"o{v - 1}"} if v and (shape != "branches" or draw.random() < 0.6) else set()
        if shape != "line":
            before |= {f"o{u}" for u in range(v) if draw.random() < 0.25}
        edges += [(u, f"o{v}") for u in before or {"x"}]
        if masked and draw.random() < 0.7:
            edges.append(("mask", f"o{v}"))
        costs[f"o{v}"] = _cost(draw, alike=shape == "line")
    ops.append(Op("output", "output", "output"))
    used = {a for a, _ in edges}
    edges += [(op.name, "output") for op in ops[1:-1] if op.name not in used]
    place = {op.name: i for i, op in enumerate(ops)}
    edges.sort(key=lambda e: (place[e[0]], place[e[1]]))
    weights = tuple(
        ParameterSpec(f"w{v}", (f"w{v}",), (draw.choice((1, 64, 512)), 64), "float32")
        for v in range(n - tied)
    )
    return OpGraph("Audited", tuple(ops), tuple(edges), parameters=weights), CostTable(costs)


def _cost(draw: random.Random, *, alike: bool) -> OpCost:
    forward = (
        1e-4 if alike and draw.random() < 0.7 else draw.choice((0.0, 1e-6, 1e-4, 1e-3)) * draw.randint(1, 9)
    )
    split = draw.random()
    return OpCost(
        forward,
        2 * forward,
        2 * forward * split,
        2 * forward * (1 - split),
        draw.choice((0, 10_000, 60_000)),
        draw.choice((0, 20_000)),
        draw.choice((0, 30_000)),
    )


def _cluster(draw: random.Random, n_ranks: int) -> Cluster:
    devices = tuple(
        Device(
            speed=draw.choice((1.0, 1.0, 1.0, 0.5, 1.7)),
            memory_bytes=draw.choice((None, None, None, 3_000_000)),
        )
        for _ in range(n_ranks)
    )
    if draw.random() < 0.4:
        devices = (devices[0],) * n_ranks
    hosts = tuple(draw.randint(0, 2) for _ in range(n_ranks)) if draw.random() < 0.5 else ()
    links = {}
    if n_ranks > 1 and draw.random() < 0.3:
        links[tuple(draw.sample(range(n_ranks), 2))] = Link(
            draw.choice((0.0, 1e-3)), draw.choice((1e7, 1e10))
        )
    nics = tuple(draw.randint(0, 1) for _ in hosts) if draw.random() < 0.5 else ()
    return Cluster(devices, hosts, Link(1e-5, 1e9), Link(1e-4, 1e8), links, nics)  # type: ignore[arg-type]


def faults_of(number: int) -> list[str]:
    """What is wrong with what the solver says in problem ``number``."""
    asked = drawn(number)
    reading = Reading(asked)
    limits = reading.limits()
    priced = [(reading.priced(home), home) for home in reading.splits()]
    fitting = [(p.seconds, tuple(home.items())) for p, home in priced if p.fits(limits)]
    least = min(fitting)[0] if fitting else math.inf
    try:
        plan = asked.plan()
    except UndecidedError as error:
        return [f"a small problem is left open: {error}"]
    except PlanError as error:
        return [f"a split of {least:.9f} s fits, but: {error}"] if fitting else []
    if not fitting:
        return ["a plan where nothing fits"]
    return [*_read_again(asked, reading, plan, least, limits), *_related(asked, plan)]


def _read_again(
    asked: Asked, reading: Reading, plan: Plan, least: float, limits: Sequence[float]
) -> Iterator[str]:
    """Where a plan's own figures are not what a second reading says of it."""
    bounds = plan.bounds
    home: dict[str, int] = {}
    for s in plan.stages:
        for op in s.ops:
            if not (asked.graph.by_name[op].is_movable and reading._is_cheap(asked.graph.by_name[op])):
                home.setdefault(op, s.index)
    again = reading.priced(home)
    if abs(again.seconds - bounds.bottleneck_s) > _ROUNDED:
        yield f"its bottleneck is {again.seconds:.9f}, it says {bounds.bottleneck_s:.9f}"
    if bounds.bottleneck_lower_s > least + _ROUNDED:
        yield f"its bound {bounds.bottleneck_lower_s:.9f} is over {least:.9f}"
    if bounds.proved and bounds.bottleneck_s > bounds.bottleneck_lower_s + _ROUNDED:
        yield "it is proved, and over its bound"
    if bounds.bottleneck_lower_s < least - _ROUNDED:
        yield f"its bound {bounds.bottleneck_lower_s:.9f} is under the optimum {least:.9f}: not closed"
    if bounds.step_lower_s > plan.step_s:
        yield f"its step {plan.step_s} is under its bound {bounds.step_lower_s}"
    for rank, (held, limit) in enumerate(zip(again.rank_bytes, limits, strict=True)):
        if held > limit:
            yield f"rank {rank} needs {held} bytes of {limit}"
    alike = [p for p in reading.ways(home) if p.fits(limits) and p.seconds <= again.seconds + _ROUNDED]
    ranks = [s for s in range(plan.n_stages) if plan.placement.count(plan.placement[s]) == 1]
    for s in ranks:
        said = plan.stages[s].memory_bytes
        held = {p.rank_bytes[plan.placement[s]] for p in alike}
        if said not in held:
            yield f"stage {s} has {held} bytes, it says {said}"


def _related(asked: Asked, plan: Plan) -> Iterator[str]:
    """Where answers to the same question, asked otherwise, do not agree."""
    least = plan.bounds.bottleneck_lower_s
    pins = {op: s.index for s in plan.stages for op in s.ops if op not in s.clones}
    same = asked.plan(pin=pins)
    if abs(same.bounds.bottleneck_s - plan.bounds.bottleneck_s) > _ROUNDED:
        yield f"all pinned it has {same.bounds.bottleneck_s}, not {plan.bounds.bottleneck_s}"
    with contextlib.suppress(UndecidedError):
        hurried = asked.plan(time_limit_s=0.0).bounds
        if hurried.bottleneck_lower_s > least + _ROUNDED:
            yield f"in no time its bound is {hurried.bottleneck_lower_s}, over {least}"
    fast = dataclasses.replace(
        asked.cluster,
        devices=tuple(dataclasses.replace(d, speed=2 * d.speed) for d in asked.cluster.devices),
    )
    # where a value is made may hang on speeds
    if not any(op.is_movable for op in asked.graph.ops):
        faster = asked.plan(cluster=fast).bounds.bottleneck_lower_s
        if faster > least + _ROUNDED:
            yield f"on devices twice as fast its bound is {faster}, over {least}"
    peak = max(c.memory_bytes for c in plan.candidates if c.feasible)
    if "memory_limit" not in asked.options and peak:
        roomy = asked.plan(memory_limit=peak).bounds
        if roomy.bottleneck_lower_s < least - _ROUNDED:
            yield f"with a limit its bound is {roomy.bottleneck_lower_s}, under {least}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver.audit", description=__doc__)
    parser.add_argument("--problems", type=int, default=2_000)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    started, n_faults = time.process_time(), 0
    for number in range(given.first, given.first + given.problems):
        for fault in faults_of(number):
            n_faults += 1
            print(f"{number}: {fault}", flush=True)
    print(f"{given.problems} problems, {n_faults} faults, {time.process_time() - started:.0f} CPU s")
    sys.exit(bool(n_faults))


if __name__ == "__main__":
    main()
