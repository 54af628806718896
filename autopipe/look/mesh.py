"""A plan over a device mesh: which stages each process has, on which host, and what crosses between hosts.

The plan is of one replica's ranks; the mesh's other dims, such as replicas, are the user's. Drawing pages is
left to ``report``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import html as escape_
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..arguments import brief, digits, whole
from ..errors import InputError
from ..plans import Plan, rank_bytes
from ..shown import Shown
from .colours import colour
from .table import Column, Table, count, nbytes, runs, seconds
from .tables import headline, tables

__all__ = ["Mesh", "drawing"]

MOST_PROCESSES = 1 << 16
WIDE, TALL, GAP, LEFT, TOP = 116, 64, 46, 110, 34


class Process(NamedTuple):
    """One process of the job: its global rank, its rank in its pipeline, its replica, its host."""

    rank: int
    pipeline_rank: int
    replica: int
    host: int


@dataclasses.dataclass(frozen=True)
class Mesh(Shown):
    """A plan laid over a mesh of processes, numbered as ``init_device_mesh`` numbers them: last dim fastest.

    ``dims``: name → size in the mesh's order; ``pp`` is the plan's ranks, and comes last where it is left
    out. ``per_host``: processes of each host; by default as many as the plan's cluster has on its largest.

    Raises :class:`InputError` where ``pp`` is not the plan's number of ranks.
    """

    plan: Plan
    dims: Mapping[str, int]
    per_host: int | None = None

    def __post_init__(self) -> None:
        dims = {
            name: whole(f"mesh dim {name}", size, most=MOST_PROCESSES) for name, size in self.dims.items()
        }
        dims.setdefault("pp", self.plan.n_ranks)
        if dims["pp"] != self.plan.n_ranks:
            raise InputError(
                f"the mesh has pp={dims['pp']} and the plan {self.plan.n_ranks} ranks; write "
                f"pp={self.plan.n_ranks}, or plan again"
            )
        whole("the mesh's size", math.prod(dims.values()), most=MOST_PROCESSES)
        if self.per_host is not None:
            object.__setattr__(self, "per_host", whole("per_host", self.per_host, most=MOST_PROCESSES))
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "processes", tuple(self._processes()))

    processes: tuple[Process, ...] = dataclasses.field(init=False)

    @classmethod
    def parse(cls, plan: Plan, text: str, per_host: int | None = None) -> Mesh:
        """Of dims written like ``dp=2,pp=4``. Raises :class:`InputError` for anything else."""
        dims: dict[str, int] = {}
        for part in text.split(","):
            name, _, size = part.strip().partition("=")
            if name in dims:
                raise InputError(f"the mesh has two dims {name!r}; give each a name of its own")
            n = digits(size)
            if not name.isidentifier() or n is None:
                raise InputError(
                    f"{brief(part.strip())} is no dim of a mesh; write them like dp=2,pp={plan.n_ranks}"
                )
            dims[name] = n
        return cls(plan, dims, per_host)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        processes = [p._asdict() for p in self.processes]
        sent = [[a, b, n] for (a, b), n in sorted(self.step_bytes.items())]
        return {"dims": dict(self.dims), "processes": processes, "step_bytes": sent}

    @property
    def n_replicas(self) -> int:
        return math.prod(self.dims.values()) // self.plan.n_ranks

    def _processes(self) -> Iterator[Process]:
        names, cluster = list(self.dims), self.plan.cluster
        is_cluster = self.n_replicas == 1 and self.per_host is None
        per_host = self.per_host or max(cluster.host_sizes.values())
        seen: collections.Counter[int] = collections.Counter()
        for rank, place in enumerate(itertools.product(*map(range, self.dims.values()))):
            own = place[names.index("pp")]
            yield Process(rank, own, seen[own], cluster.host(own) if is_cluster else rank // per_host)
            seen[own] += 1

    def replica(self, number: int) -> tuple[Process, ...]:
        """The processes of one replica, in the order of its pipeline's ranks."""
        own = (p for p in self.processes if p.replica == number)
        return tuple(sorted(own, key=lambda p: p.pipeline_rank))

    @property
    def step_bytes(self) -> dict[tuple[int, int], int]:
        """(sender, receiver) among a pipeline's ranks → bytes of values and gradients in a step."""
        return {ends: sum(sizes) * self.plan.n_microbatches for ends, sizes in self.messages.items()}

    @functools.cached_property
    def messages(self) -> dict[tuple[int, int], list[int]]:
        """(sender, receiver) among a pipeline's ranks → bytes of each message that a microbatch sends.

        One from stage to stage, and one of the gradients back.
        """
        plan, sizes = self.plan, collections.Counter[tuple[int, int]]()
        for source, destination, b in plan.handed:
            sizes[source, destination] += b.n_bytes
            sizes[destination, source] += b.n_bytes * b.differentiable
        out = collections.defaultdict[tuple[int, int], list[int]](list)
        for (source, destination), n_bytes in sizes.items():
            ends = plan.placement[source], plan.placement[destination]
            if n_bytes and ends[0] != ends[1]:
                out[ends].append(n_bytes)
        return dict(out)


@headline.register
def _(mesh: Mesh) -> str:
    shape = " × ".join(f"{name} {size}" for name, size in mesh.dims.items())
    hosts = len({p.host for p in mesh.processes})
    return f"{mesh.plan.model}: {shape}, {len(mesh.processes)} processes on {hosts} host{'s' * (hosts > 1)}"


@tables.register
def _(mesh: Mesh) -> tuple[Table, ...]:
    every = (_process_table(mesh), _message_table(mesh), _sum_table(mesh))
    return tuple(t for t in every if t.rows)


def _process_table(mesh: Mesh) -> Table:
    columns = (
        Column("host", "host", count),
        Column("rank", "rank", count),
        Column("replica", "replica", count),
        Column("pipeline_rank", "pp", count),
        Column("stages", "stages", runs),
        Column("parameter_bytes", "weights", nbytes),
        Column("memory_bytes", "memory", nbytes),
    )
    plan, held = mesh.plan, []
    for rank, again in enumerate(plan.repeated_bytes()):
        own = [s for s in plan.stages if s.rank == rank]
        weights = sum(s.parameter_bytes for s in own) - again
        held.append((tuple(s.index for s in own), weights, rank_bytes(plan, rank)))
    rows = tuple((p.host, p.rank, p.replica, p.pipeline_rank, *held[p.pipeline_rank]) for p in mesh.processes)
    return Table("Processes", columns, rows)


def _message_table(mesh: Mesh) -> Table:
    """What the ranks of a pipeline send one another in a step; replicas with the same ways in one row."""
    columns = (
        Column("source", "from pp", count),
        Column("destination", "to pp", count),
        Column("n_bytes", "per step", nbytes),
        Column("way", "way"),
        Column("replicas", "replicas", runs),
        Column("planned", "planned as"),
        Column("seconds", "takes as planned", seconds),
    )
    cluster, rows = mesh.plan.cluster, []
    for (a, b), n_bytes in sorted(mesh.step_bytes.items()):
        ways = collections.defaultdict(list)
        for replica in range(mesh.n_replicas):
            ranks = mesh.replica(replica)
            ways[ranks[a].host == ranks[b].host].append(replica)
        planned = _way(cluster.host(a) == cluster.host(b))
        for is_near, replicas in sorted(ways.items()):
            took = sum(map(cluster.link(a, b).seconds, mesh.messages[a, b])) * mesh.plan.n_microbatches
            rows.append((a, b, n_bytes, _way(is_near), tuple(replicas), planned, took))
    wrong = any(row[3] != row[5] for row in rows)
    note = "Some ways are not as planned: plan on a cluster of these hosts." if wrong else ""
    return Table("Messages within a pipeline", tuple(columns), tuple(rows), note)


def _sum_table(mesh: Mesh) -> Table:
    """The gradients that replicas sum: who with whom, how much, over which way."""
    columns = (
        Column("pipeline_rank", "pp", count),
        Column("ranks", "ranks that sum", runs),
        Column("n_bytes", "gradients", nbytes),
        Column("way", "way"),
    )
    rows, again = [], mesh.plan.repeated_bytes()
    for own in range(mesh.plan.n_ranks if mesh.n_replicas > 1 else 0):
        members = [p for p in mesh.processes if p.pipeline_rank == own]
        n_bytes = sum(s.gradient_bytes for s in mesh.plan.stages if s.rank == own)
        is_near = len({p.host for p in members}) == 1
        if n_bytes:
            rows.append((own, tuple(p.rank for p in members), n_bytes - again[own], _way(is_near)))
    return Table(
        "Gradients summed over replicas", columns, tuple(rows), "As large as the weights that are trained."
    )


def _way(is_near: bool) -> str:
    return "within a host" if is_near else "between hosts"


def drawing(mesh: Mesh) -> str:
    """The mesh as inline SVG: a column for each rank of the pipeline, a row for each replica.

    Colours are the stages'; a heavy line parts hosts; sizes are what neighbours send each other in a step.
    """
    n_rows, n_columns = min(mesh.n_replicas, 32), min(mesh.plan.n_ranks, 64)
    parts = []
    for row in range(n_rows):
        ranks = mesh.replica(row)[:n_columns]
        top = TOP + row * (TALL + 14)
        parts.append(
            f'<text x="2" y="{top + TALL / 2 + 4:.0f}" font-size="12" opacity=".7">replica {row}</text>'
        )
        for p in ranks:
            parts.append(_box(mesh, p, LEFT + p.pipeline_rank * (WIDE + GAP), top))
        for p, after in itertools.pairwise(ranks):
            parts.append(_arrow(mesh, p, after, LEFT + p.pipeline_rank * (WIDE + GAP) + WIDE, top + TALL / 2))
    names = "".join(
        f'<text x="{LEFT + i * (WIDE + GAP) + WIDE / 2:.0f}" y="20" text-anchor="middle" font-size="12" '
        f'opacity=".7">pp {i}</text>'
        for i in range(n_columns)
    )
    wide, tall = LEFT + n_columns * (WIDE + GAP), TOP + n_rows * (TALL + 14)
    more = "" if n_rows == mesh.n_replicas and n_columns == mesh.plan.n_ranks else " (the first of them)"
    name = escape_.escape(f"{headline(mesh)}{more}")
    return (
        f'<svg role="img" aria-label="{name}" viewBox="0 0 {wide} {tall}" width="{wide}" '
        f'style="font-family:system-ui,sans-serif" fill="currentColor">{names}{"".join(parts)}</svg>'
    )


def _box(mesh: Mesh, p: Process, left: float, top: float) -> str:
    stages = [s for s in mesh.plan.stages if s.rank == p.pipeline_rank]
    shades = "".join(
        f'<rect x="{left + i * WIDE / len(stages):.1f}" y="{top}" width="{WIDE / len(stages):.1f}" '
        f'height="{TALL}" fill="{colour(s.index)}" fill-opacity=".3"/>'
        for i, s in enumerate(stages)
    )
    words = (
        f"rank {p.rank}, host {p.host}",
        f"stage{'s' * (len(stages) > 1)} {runs([s.index for s in stages])}",
        nbytes(rank_bytes(mesh.plan, p.pipeline_rank)),
    )
    lines = "".join(
        f'<text x="{left + WIDE / 2:.0f}" y="{top + 18 + 18 * i:.0f}" text-anchor="middle" font-size="12">'
        f"{escape_.escape(line)}</text>"
        for i, line in enumerate(words)
    )
    frame = f'<rect x="{left}" y="{top}" width="{WIDE}" height="{TALL}" fill="none" stroke="currentColor" '
    return f'{shades}{frame}stroke-opacity=".5"/>{lines}'


def _arrow(mesh: Mesh, p: Process, after: Process, left: float, middle: float) -> str:
    """What two neighbours send each other, and a heavy line where hosts part."""
    a, b = p.pipeline_rank, after.pipeline_rank
    n_bytes = mesh.step_bytes.get((a, b), 0) + mesh.step_bytes.get((b, a), 0)
    is_near = p.host == after.host
    dash = "" if is_near else ' stroke-dasharray="4 3"'
    line = f'<line x1="{left}" x2="{left + GAP}" y1="{middle}" y2="{middle}" stroke="currentColor"{dash}/>'
    border = (
        ""
        if is_near
        else f'<line x1="{left + GAP / 2}" x2="{left + GAP / 2}" '
        f'y1="{middle - TALL / 2}" '
        f'y2="{middle + TALL / 2}" stroke="currentColor" stroke-width="3"/>'
    )
    size = f'<text x="{left + GAP / 2}" y="{middle - 5}" text-anchor="middle" font-size="9">'
    return f"{line}{border}{f'{size}{nbytes(n_bytes)}</text>' if n_bytes else ''}"
