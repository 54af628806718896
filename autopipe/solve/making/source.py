"""What problems are made from: a graph, its costs, a cluster and what is asked, with what follows from them.

The integer problem of one case is left to ``formulate``.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ...costs import TIMES, CostTable, OpCost
from ...errors import CostError, InputError, PlanError
from ...graph import Op, OpGraph
from ...hardware import Cluster, Link
from ...units import parse_bytes
from ..proof.step import Work
from .clones import clones_of, copies_of
from .options import Limit, Settings
from .tails import with_outputs_kept, with_tail
from .work import work_of

__all__ = ["Source", "cheapest_link", "limits_of", "named_near", "slowest_link"]

_INT_BYTES = 8
_MOST_S, _LEAST_S = 1e6, 1e-12
"""More seconds than any op takes."""
_MOST_SUM_S = 1e8
"""More than a microbatch takes; its nanoseconds are well below ``HUGE``."""
_MOST_BYTES = 1 << 50
_LOST = 0.1
"""The part of all costs that may be lost where each is rounded to whole nanoseconds."""
_SHOWN = 12
"""So many names are listed where none is near."""
_BYTES = "saved_bytes", "workspace_bytes", "backward_workspace_bytes"

Cost = TypeVar("Cost", OpCost, CostTable)


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """What the ops of a stage cost, and the bytes of what they use: parameters and buffers, each once."""

    cost: OpCost
    held_bytes: int
    trained_bytes: int
    n_trained: int


@dataclasses.dataclass(frozen=True)
class Source:
    """What a problem is made from. ``sizes`` are the bytes of each op's value for one microbatch.

    ``limits`` are the bytes asked for per rank, none where nothing is.
    """

    graph: OpGraph
    costs: CostTable
    cluster: Cluster
    settings: Settings
    sizes: Mapping[str, int]
    limits: tuple[int, ...]

    @classmethod
    def of(cls, graph: OpGraph, costs: CostTable, cluster: Cluster, settings: Settings) -> Source:
        """The source with its sizes; a number counts as eight bytes.

        Raises :class:`CostError` for costs that are none or of another graph, and :class:`InputError` for
        absurd sums, or as many limits as there are no ranks.
        """
        _check_whole(graph, costs)
        costs = _checked(graph, costs)
        sizes = {op.name: op.bytes_at(costs.dims) or _INT_BYTES for op in graph.ops}
        _check_sums(graph, sizes, costs, cluster)
        limits = limits_of(settings.memory_limit, cluster.n_ranks)
        return cls(graph, costs, cluster, settings, sizes, limits)

    @functools.cached_property
    def totals(self) -> Callable[[tuple[str, ...]], Totals]:
        """What a stage's ops cost and hold; remembered, as plans that are looked at share most stages."""

        def made(ops: tuple[str, ...]) -> Totals:
            graph = self.graph
            users = [graph.by_name[op] for op in ops]
            names = {graph.parameter[n].name for op in users for n in (*op.parameters, *op.buffers)}
            held = [graph.parameter[n] for n in names]
            trained = [p.bytes for p in held if p.requires_grad and self.settings.training]
            return Totals(self.costs.total(ops), sum(p.bytes for p in held), sum(trained), len(trained))

        return functools.cache(made)

    def on(self, ranks: Sequence[int]) -> Source:
        """The same for some of the cluster's ranks."""
        if len(ranks) == self.cluster.n_ranks:
            return self
        limits = tuple(self.limits[r] for r in ranks) if self.limits else ()
        return dataclasses.replace(self, cluster=self.cluster.picked(ranks), limits=limits)

    def filling(self, n_stages: int) -> Source:
        """The same, with nothing cloned that need not be where other ops are too few to fill the stages."""
        n_placed = sum(op.name not in self.clones for op in self.graph.compute)
        if self.settings.clone != "auto" or n_placed >= n_stages:
            return self
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, clone="never"))

    def bound_together(self, n_stages: int) -> str:
        """What keeps ops in one stage, and all between them, where there are enough to fill all stages."""
        if sum(op.name not in self.clones for op in self.graph.compute) < n_stages:
            return ""
        asked = [name for name in ("together", "uncut") if getattr(self.settings, name)]
        asked += ["ties='colocate'"] * (self.settings.ties == "colocate")
        return f": {' and '.join(asked) or 'the graph'} keeps ops, and all between them, in one stage"

    def cut_into(self, n_microbatches: int) -> Source:
        """The same for a batch in so many microbatches, which a tail or the loss takes all at once."""
        costs = with_tail(self.graph, self.costs, n_microbatches)
        waits = self.settings.loss_on == "batch" and self.settings.training and n_microbatches > 1
        if waits and not self.graph.tail:
            costs = with_outputs_kept(self.graph, costs)
        return self if costs is self.costs else dataclasses.replace(self, costs=costs)

    def matching(self, prefix: str, what: str) -> list[Op]:
        """The ops that a path or name given for ``what`` means. Raises :class:`PlanError` for none."""
        if not (found := self.graph.under(prefix)):
            raise PlanError(f"{what} {prefix!r} matches no op; {named_near(self.graph, prefix)}")
        return found

    @functools.cached_property
    def asked(self) -> frozenset[str]:
        """The ops that pins, groups and uncut values name: each is computed once, where it is put."""
        s = self.settings
        prefixes = [("pin", p) for p in s.pin] + [("together", p) for group in s.together for p in group]
        return frozenset(op.name for what, p in prefixes for op in self.matching(p, what)) | {*s.uncut}

    @functools.cached_property
    def clones(self) -> frozenset[str]:
        """The ops that every stage which needs them computes for itself."""
        link, runs = cheapest_link(self.cluster), 2 if self.settings.recompute == "always" else 1
        slower = runs / min(d.speed for d in self.cluster.devices)
        return clones_of(self.graph, self.costs, self.sizes, link, self.settings.clone, self.asked, slower)

    @functools.cached_property
    def copies(self) -> Mapping[str, tuple[str, ...]]:
        """By value, the ops that make it again, where each stage that takes it may choose to."""
        if self.settings.clone != "auto":
            return {}
        slowest, speed = slowest_link(self.cluster), max(d.speed for d in self.cluster.devices)
        return copies_of(self.graph, self.costs, self.sizes, slowest, self.clones, self.asked, 1 / speed)

    @functools.cached_property
    def work(self) -> Work:
        """What every plan must do for a microbatch: cloned ops left out, values made again off all paths."""
        return work_of(
            self.graph,
            self.costs,
            self.clones,
            {name for ops in self.copies.values() for name in ops} - self.clones,
            self.sizes,
            training=self.settings.training,
            may_recompute=self.settings.recompute != "never",
        )


def named_near(graph: OpGraph, name: str) -> str:
    """What to give in place of a name that nothing has, in words: paths of modules, and names of ops."""
    paths = {op.target if op.kind == "module" else op.module_path for op in graph.compute} - {""}
    if inside := max((p for p in paths if name.startswith(f"{p}.")), key=len, default=""):
        return f"{inside!r} is one op here: name that, or open it with open=[{inside!r}]"
    steps = [path.split(".") for path in sorted(paths)]
    above = (".".join(of[:n]) for of in steps for n in range(1, len(of) + 1))
    known = [*dict.fromkeys((*above, *(op.name for op in graph.compute)))]
    near = difflib.get_close_matches(name, known, 3)
    more = f" and {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
    there = ", ".join(map(repr, known[:_SHOWN]))
    which = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there are {there}{more}."
    return (
        f"give the path of a module that the graph calls or the name of an op: {which} Names of ops in a "
        "plan that opened modules are those of the model captured with open=plan.settings['opened']"
    )


def limits_of(given: Limit, n_ranks: int) -> tuple[int, ...]:
    """Bytes per rank, none where nothing is asked."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Sequence):
        return (parse_bytes(given),) * n_ranks
    if len(given) != n_ranks:
        raise InputError(
            f"memory_limit has {len(given)} entries for {n_ranks} ranks; give one for all, or one per rank"
        )
    return tuple(map(parse_bytes, given))


def cheapest_link(cluster: Cluster) -> Link:
    """A link at least as fast as any between two ranks, for prices that bound the true ones."""
    links = cluster.kinds or (cluster.local,)
    latency_s = min(link.latency_s for link in links)
    bandwidth_bytes_s = max(link.bandwidth_bytes_s for link in links)
    direct = [link for link in links if link.direct_s]
    return Link(
        latency_s,
        bandwidth_bytes_s,
        direct_s=max(min(latency_s, *(x.direct_s for x in direct)), _LEAST_S) if direct else 0.0,
        direct_s_per_byte=min([1 / bandwidth_bytes_s, *(x.direct_s_per_byte for x in direct)]),
        direct_below_bytes=max((x.direct_below_bytes for x in direct), default=0),
    )


def slowest_link(cluster: Cluster) -> Link:
    """A link at least as slow as any between two ranks."""
    links = cluster.kinds or (cluster.local,)
    direct_s = max(link.direct_s for link in links)
    per_byte = max(link.direct_s_per_byte for link in links)
    host_s = max(max(link.host_s, link.direct_host_s) for link in links)
    host_s_per_byte = max(max(link.host_s_per_byte, link.direct_host_s_per_byte) for link in links)
    return Link(
        max(*(link.latency_s for link in links), direct_s),
        min(min(link.bandwidth_bytes_s for link in links), 1 / per_byte if per_byte else math.inf),
        host_s=host_s,
        host_s_per_byte=host_s_per_byte,
        direct_s=direct_s if all(link.direct_s for link in links) else 0.0,
        direct_host_s=host_s,
        direct_s_per_byte=per_byte,
        direct_host_s_per_byte=host_s_per_byte,
        direct_below_bytes=min(link.direct_below_bytes for link in links),
    )


def _check_whole(graph: OpGraph, costs: CostTable) -> None:
    """Raises :class:`CostError` where the table lacks an op that makes a tensor, or a size of the inputs.

    Numbers and parts of values are free. Nor may it be one of another graph's ops.
    """
    made = [op.name for op in graph.compute if op.outputs and op.target != "_operator.getitem"]
    if missing := [name for name in made if name not in costs.costs]:
        raise CostError(
            f"the cost table has no cost for {len(missing)} of the {len(made)} ops that the graph of "
            f"{graph.model} computes ({', '.join(missing[:3])}), which would count as free; profile the "
            "model as it is captured here, the same modules open, or give what is free an OpCost()"
        )
    if costs.ops not in ("", graph.ops_digest):
        raise CostError(
            f"the cost table is of other ops ({costs.ops}) than the graph of {graph.model} has "
            f"({graph.ops_digest}), though they may be called the same: of another model or size of it, of "
            "other modules open or other weights frozen; profile the model as it is captured here"
        )
    if unsaid := {d.name: d.example for d in graph.dims if d.name not in costs.dims}:
        raise CostError(
            f"the cost table does not say at which {', '.join(unsaid)} its costs hold; give it the dims of a "
            f"microbatch, such as dims={unsaid}"
        )


def _checked(graph: OpGraph, costs: CostTable) -> CostTable:
    """The table in Python's own numbers, as plans are written; numpy's and fractions are read.

    Raises :class:`CostError` for what is no number, and none that a cost can be.
    """
    of_op = dict.fromkeys(TIMES, _MOST_S) | dict.fromkeys(_BYTES, _MOST_BYTES)
    beside = ("optimizer_s_per_byte", "optimizer_s_per_tensor", "start_s", "jitter_s", "alone")
    of_all = dict.fromkeys(beside, _MOST_S) | {"optimizer_workspace_bytes": _MOST_BYTES}
    made = {op.name: _as_python(costs[op.name], f" of op {op.name!r}", of_op) for op in graph.ops}
    changed = {name: cost for name, cost in made.items() if cost is not costs[name]}
    table = dataclasses.replace(costs, costs={**costs.costs, **changed}) if changed else costs
    return _as_python(table, "", of_all)


def _as_python(cost: Cost, where: str, most_of: Mapping[str, float]) -> Cost:
    """A row with its numbers as ``int`` and ``float``: itself where they are."""
    others: dict[str, Any] = {}
    for name, most in most_of.items():
        value = getattr(cost, name)
        kind, read = (numbers.Integral, int) if name.endswith("_bytes") else (numbers.Real, float)
        is_number = type(value) in (int, read) or (isinstance(value, kind) and not isinstance(value, bool))
        if not is_number or not 0 <= value <= most:
            whole = "whole numbers " * (read is int)
            raise CostError(
                f"{name}{where} is {value!r}; costs are {whole}from 0 to {most:g}: measure again, or give a "
                "cost table without it"
            )
        if type(value) not in (int, float):
            others[name] = read(value)
    return dataclasses.replace(cost, **others) if others else cost


def _check_sums(graph: OpGraph, sizes: Mapping[str, int], costs: CostTable, cluster: Cluster) -> None:
    """Raises :class:`InputError` where sums of nanoseconds would not fit the solver's integers.

    And :class:`CostError` where costs are too small to be told apart in them.
    """
    parts = [s for op in graph.compute for s in (costs[op.name].forward_s, costs[op.name].backward_s)]
    lost = sum(abs(s - round(s * 1e9) / 1e9) for s in parts)
    if lost > _LOST * sum(parts):
        raise CostError(
            f"the ops cost {sum(parts):.3g} s a microbatch in all, of which {lost / sum(parts):.0%} is lost "
            "in whole nanoseconds, which plans are made in; costs are in seconds: give larger ones, or a "
            "device with the launch_s that each op takes"
        )
    work = sum(c.seconds + c.host_s for c in costs.costs.values()) / min(d.speed for d in cluster.devices)
    slow, largest = slowest_link(cluster), max((p.bytes for p in graph.parameters), default=0)
    moved = 4 * len(sizes) * slow.seconds(max(sizes.values(), default=0))
    moved += len(graph.parameters) * slow.all_reduce_s(largest, cluster.n_ranks)
    if max(work, moved) > _MOST_SUM_S:
        raise InputError(
            f"a microbatch takes {work:.3g} s of work on the slowest device and up to {moved:.3g} s of "
            f"transfers over the slowest link, more than {_MOST_SUM_S:g} s; check the costs, the devices' "
            "speeds and the links"
        )
