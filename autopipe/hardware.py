"""The machines a plan is for: devices, the links between them, and the cluster of ranks they form.

Measuring links and devices is left to ``measure``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from .arguments import brief, flag, mapping, number, one_of, sequence, text, whole
from .errors import InputError
from .schema import (
    Bytes,
    Index,
    Line,
    Name,
    Positive,
    Rate,
    Seconds,
    build,
    differs,
    load,
    refuse,
    versioned,
)

__all__ = ["DIRECT_BYTES", "Cluster", "Device", "Link"]

VERSION = 5
MOST_RANKS = 2**20
_LONGEST_S, _SLOWEST, _FASTEST = 1e9, 1e-24, 1e24
DIRECT_BYTES = 1 << 15
"""Messages below this size go past the communicator where two ranks can reach one another directly."""


_LINK_SECONDS = (
    "direct_s",
    "direct_host_s",
    "direct_s_per_byte",
    "direct_host_s_per_byte",
    "latency_s",
    "host_s",
    "host_s_per_byte",
)


def _take(of: Any, name: str, value: Any) -> None:
    """Sets an attribute of something frozen that is being made to what was found in it."""
    object.__setattr__(of, name, value)


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A connection from one rank to another: a transfer takes ``latency_s + bytes / bandwidth_bytes_s``.

    ``host_s`` and ``host_s_per_byte`` are of a host's core that a transfer keeps busy at each end, if any: of
    each message, and of each byte beside that. Where messages below ``direct_below_bytes`` go directly, past
    the communicator, ``direct_s`` is what one takes and ``direct_host_s`` its part of a core at each end,
    beside ``direct_s_per_byte`` and ``direct_host_s_per_byte``.
    """

    latency_s: Seconds = 0.0
    bandwidth_bytes_s: float = float("inf")
    source: Line = ""
    host_s: Seconds = 0.0
    host_s_per_byte: Seconds = 0.0
    direct_s: Seconds = 0.0
    direct_host_s: Seconds = 0.0
    direct_s_per_byte: Seconds = 0.0
    direct_host_s_per_byte: Seconds = 0.0
    direct_below_bytes: Bytes = DIRECT_BYTES

    def __post_init__(self) -> None:
        for name in _LINK_SECONDS:
            _take(self, name, number(name, getattr(self, name), unit="seconds", most=_LONGEST_S))
        whole("direct_below_bytes", self.direct_below_bytes, 0)
        rate = number("bandwidth_bytes_s", self.bandwidth_bytes_s, _SLOWEST, unit="bytes per second")
        _take(self, "bandwidth_bytes_s", rate)
        text("source", self.source)

    def seconds(self, n_bytes: float) -> float:
        """Seconds to move ``n_bytes``; 0 for nothing."""
        return sum(self.parts(n_bytes))

    def parts(self, n_bytes: float) -> tuple[float, float]:
        """Seconds that ``n_bytes`` hold the link, and those until they are there beside that."""
        if self._is_direct(n_bytes):
            return 0.0, self.direct_s + n_bytes * self.direct_s_per_byte
        return (n_bytes / self.bandwidth_bytes_s, self.latency_s) if n_bytes else (0.0, 0.0)

    @property
    def figures(self) -> Link:
        """What messages take on it, wherever that is known from."""
        return dataclasses.replace(self, source="")

    def _is_direct(self, n_bytes: float) -> bool:
        return 0 < n_bytes < self.direct_below_bytes and self.direct_s > 0

    def working_s(self, n_bytes: float) -> float:
        """Seconds that a core is busy with ``n_bytes`` at each end; 0 for nothing."""
        if self._is_direct(n_bytes):
            return self.direct_host_s + n_bytes * self.direct_host_s_per_byte
        return self.host_s + n_bytes * self.host_s_per_byte if n_bytes else 0.0

    def all_reduce_s(self, n_bytes: float, n_ranks: int) -> float:
        """Seconds for ``n_ranks`` to sum ``n_bytes`` round a ring of such links: 2 (n − 1) pieces of 1/n.

        Where messages are a core's work, a rank that waits for the sum sends each piece and receives one, and
        it lays its bytes in a row and takes them from there. Known error: those two copies count as much as
        an end's work with the bytes of a message, which is such a copy and the network's part. No piece goes
        directly, however small.
        """
        if n_ranks < 2 or not n_bytes:
            return 0.0
        piece = n_bytes / n_ranks
        passed_s = self.latency_s + piece / self.bandwidth_bytes_s
        worked_s = self.host_s + piece * self.host_s_per_byte
        return 2 * (n_ranks - 1) * (passed_s + 2 * worked_s) + 2 * n_bytes * self.host_s_per_byte


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """What one rank computes on.

    Attributes
    ----------
    name: as the driver reports it, such as ``"NVIDIA H200"``.
    memory_bytes: its memory; None when unknown (no limit).
    flops_s: peak FLOP/s by dtype.
    bandwidth_bytes_s: memory bandwidth.
    launch_s: the least time any op takes.
    speed: relative to the device the costs were measured on; 2.0 halves every time.
    source: where the figures come from.
    attention: whose fused kernels ``scaled_dot_product_attention`` runs: ``"cuda"`` (flash and
        memory-efficient; ROCm's too), ``"cpu"``, or ``""`` for none: the matrix of all pairs is then made.
    reserved_bytes: what of its memory no tensor gets: the driver's context, communicators' buffers,
        libraries' workspaces, and what fragmentation leaves unused.
    launches_ahead: kernels are queued while earlier ones run, so that the longer of launching and working
        counts; False where the host does both in turn.
    host_bandwidth_bytes_s: each way between its memory and the host's; 0 where it is not known.
    action_s: what its rank has to do between two actions, messages apart.
    step_s: what it has to do beside a step's actions, the binding of a batch apart.
    """

    name: Name = "device"
    memory_bytes: Bytes | None = None
    flops_s: Mapping[Name, Positive] = dataclasses.field(default_factory=dict)
    bandwidth_bytes_s: Rate = 0.0
    launch_s: Seconds = 0.0
    speed: Positive = 1.0
    source: Line = ""
    attention: Literal["", "cpu", "cuda"] = ""
    reserved_bytes: Bytes = 0
    launches_ahead: bool = False
    host_bandwidth_bytes_s: Rate = 0.0
    action_s: Seconds = 0.0
    step_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if self.memory_bytes is not None:
            limit = whole("memory_bytes", self.memory_bytes, 0, 2**60, also="None for no limit")
            _take(self, "memory_bytes", limit)
        _take(self, "reserved_bytes", whole("reserved_bytes", self.reserved_bytes, 0, 2**60))
        text("name", self.name)
        text("source", self.source)
        one_of("attention", self.attention, ("", "cpu", "cuda"))
        flag("launches_ahead", self.launches_ahead)
        rates = mapping("flops_s", self.flops_s, "a dict of dtype to FLOP/s").items()
        told = {d: number(f"flops_s[{d!r}]", r, _SLOWEST, _FASTEST, unit="FLOP/s") for d, r in rates}
        _take(self, "flops_s", told)
        for name in ("bandwidth_bytes_s", "host_bandwidth_bytes_s"):
            _take(self, name, number(name, getattr(self, name), most=_FASTEST, unit="bytes per second"))
        for name in ("launch_s", "action_s", "step_s"):
            _take(self, name, number(name, getattr(self, name), unit="seconds", most=_LONGEST_S))
        _take(self, "speed", number("speed", self.speed, _SLOWEST, _FASTEST))

    @property
    def usable_bytes(self) -> int | None:
        """What tensors may take; None when unknown (no limit)."""
        return None if self.memory_bytes is None else max(0, self.memory_bytes - self.reserved_bytes)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The ranks of a pipeline in order: a device each, the host each is on, and the link of each pair.

    ``links`` maps (from, to) rank pairs; a missing pair uses ``local`` on one host and ``remote`` across.
    ``nics`` is the network interface of its host that each rank uses to reach other hosts: messages of ranks
    of one host with the same number go one after another, each way. Without it every rank has its own.
    ``cores`` has, for each host, how many of its ranks can compute at the same time; without it every rank
    has a processor of its own.
    """

    devices: tuple[Device, ...]
    hosts: tuple[int, ...] = ()
    local: Link = Link()
    remote: Link = Link()
    links: Mapping[tuple[int, int], Link] = dataclasses.field(default_factory=dict)
    nics: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._check_kinds()
        n = len(self.devices)
        if not n:
            raise InputError("a cluster has no devices; it has one for each rank, at least 1")
        for what, given in (("hosts", self.hosts), ("nics", self.nics)):
            if given and len(given) != n:
                raise InputError(f"{what} has {len(given)} entries for {n} ranks; give none, or one per rank")
        if self.cores and len(self.cores) <= max(self.hosts, default=0):
            raise InputError(
                f"cores has {len(self.cores)} entries for {1 + max(self.hosts, default=0)} hosts"
            )
        for pair in self.links:
            if not (0 <= pair[0] < n and 0 <= pair[1] < n) or pair[0] == pair[1]:
                raise InputError(f"links has {pair}, which are no two of the ranks 0 to {n - 1}")

    def _check_kinds(self) -> None:
        """Raise :class:`InputError` for what is made of other things than a cluster is."""
        for device in sequence("devices", self.devices, "a tuple of a Device for each rank"):
            if not isinstance(device, Device):
                raise InputError(f"devices has {brief(device)}; it must be a Device for each rank")
        for what, given in (("hosts", self.hosts), ("nics", self.nics)):
            places = sequence(what, given, "a tuple of a number for each rank")
            _take(self, what, tuple(whole(f"a number in {what}", place, 0) for place in places))
        counts = sequence("cores", self.cores, "a tuple of a number for each host")
        _take(self, "cores", tuple(whole("cores", n, most=MOST_RANKS) for n in counts))
        if not isinstance(self.links, Mapping):
            raise InputError(f"links is {brief(self.links)}; it must be a dict of (from, to) ranks to a Link")
        links = {}
        for pair, link in self.links.items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise InputError(f"links has {brief(pair)}; it must be a dict of (from, to) ranks to a Link")
            if not isinstance(link, Link):
                raise InputError(f"links[{pair}] is {brief(link)}; it must be a Link")
            links[whole("a rank in links", pair[0], 0), whole("a rank in links", pair[1], 0)] = link
        _take(self, "links", links)
        for name, link in (("local", self.local), ("remote", self.remote)):
            if not isinstance(link, Link):
                raise InputError(f"{name} is {brief(link)}; it must be a Link")

    @classmethod
    def uniform(cls, n_ranks: int, device: Device | None = None, link: Link | None = None) -> Cluster:
        """``n_ranks`` equal devices on one host."""
        return cls((device or Device(),) * whole("n_ranks", n_ranks, most=MOST_RANKS), local=link or Link())

    @classmethod
    def of_hosts(
        cls,
        n_hosts: int,
        ranks_per_host: int,
        device: Device | None = None,
        local: Link | None = None,
        remote: Link | None = None,
        *,
        nics_per_host: int | None = None,
    ) -> Cluster:
        """Equal hosts of equal devices, numbered host by host, with so many network interfaces each.

        Neighbouring ranks share an interface where there are fewer than ranks; None: one for each rank.

        >>> Cluster.of_hosts(2, 4, nics_per_host=2).nics
        (0, 0, 1, 1, 0, 0, 1, 1)
        """
        n = whole("ranks_per_host", ranks_per_host, most=MOST_RANKS)
        n_ranks = whole("n_hosts times ranks_per_host", whole("n_hosts", n_hosts) * n, most=MOST_RANKS)
        hosts = tuple(r // n for r in range(n_ranks))
        made = cls((device or Device(),) * n_ranks, hosts, local or Link(), remote or Link())
        return made if nics_per_host is None else made.with_nics(nics_per_host)

    def with_nics(self, nics_per_host: int) -> Cluster:
        """The cluster with so many network interfaces on each host, shared by neighbouring ranks."""
        n_nics = whole("nics_per_host", nics_per_host, most=max(self.host_sizes.values()))
        seen: collections.Counter[int] = collections.Counter()
        nics = []
        for host in map(self.host, range(self.n_ranks)):
            size = self.host_sizes[host]
            nics.append(seen[host] * min(n_nics, size) // size)
            seen[host] += 1
        return dataclasses.replace(self, nics=tuple(nics))

    @property
    def n_ranks(self) -> int:
        return len(self.devices)

    @functools.cached_property
    def shared_nics(self) -> Mapping[int, int]:
        """For each rank that shares its way to other hosts with another, the number of that interface."""
        if not self.nics or len(set(self.hosts)) < 2:
            return {}
        pairs = list(zip(self.hosts, self.nics, strict=True))
        count = collections.Counter(pairs)
        number = {pair: x for x, pair in enumerate(pair for pair, n in count.items() if n > 1)}
        return {rank: number[pair] for rank, pair in enumerate(pairs) if pair in number}

    @functools.cached_property
    def by_host(self) -> tuple[int, ...]:
        """The ranks host by host, hosts in the order of their first: their own where launched so."""
        first: dict[int, int] = {}
        for rank in range(self.n_ranks):
            first.setdefault(self.host(rank), rank)
        return tuple(sorted(range(self.n_ranks), key=lambda rank: (first[self.host(rank)], rank)))

    @functools.cached_property
    def host_sizes(self) -> Mapping[int, int]:
        """How many ranks each host has."""
        return collections.Counter(map(self.host, range(self.n_ranks)))

    @functools.cached_property
    def kinds(self) -> tuple[Link, ...]:
        """A link for all the figures that some two ranks have one of; none where there is one rank.

        O(ranks + links).
        """
        n_local = sum(n * (n - 1) for n in self.host_sizes.values())
        n_given = sum(self.host(a) == self.host(b) for a, b in self.links)
        found = list(self.links.values())
        found += [self.local] * (n_given < n_local)
        found += [self.remote] * (len(self.links) - n_given < self.n_ranks * (self.n_ranks - 1) - n_local)
        return tuple({link.figures: link for link in found}.values())

    def wires(self, source: int, destination: int) -> tuple[int, ...]:
        """The shared interfaces that a message between two ranks holds: its sender's, then its receiver's."""
        if not self.shared_nics or self.host(source) == self.host(destination):
            return ()
        shared = self.shared_nics
        return tuple(2 * shared[r] + way for way, r in enumerate((source, destination)) if r in shared)

    def host(self, rank: int) -> int:
        return self.hosts[rank] if self.hosts else 0

    def link(self, source: int, destination: int) -> Link:
        """The link between two ranks; free within a rank."""
        if source == destination:
            return _SAME_RANK
        if (source, destination) in self.links:
            return self.links[source, destination]
        return self.local if self.host(source) == self.host(destination) else self.remote

    def all_reduce_s(self, n_bytes: float, ranks: Collection[int]) -> float:
        """Seconds for some ranks to sum ``n_bytes`` round a ring, whichever way it goes through them.

        Known error: the slowest link between any two of them counts, which a ring may be able to avoid.
        """
        links = {self.link(*pair) for pair in itertools.permutations({*ranks}, 2)}
        return max((link.all_reduce_s(n_bytes, len({*ranks})) for link in links), default=0.0)

    @property
    def crowd(self) -> tuple[int, int] | None:
        """Ranks and cores of the host where ranks most outnumber cores; None where every rank has one."""
        hosts = [self.host(rank) for rank in range(self.n_ranks)]
        pairs = [(hosts.count(h), self.cores[h]) for h in sorted(set(hosts))] if self.cores else []
        crowded = [(ranks, cores) for ranks, cores in pairs if ranks > cores]
        return max(crowded, key=lambda pair: pair[0] / pair[1], default=None)

    def picked(self, ranks: Sequence[int]) -> Cluster:
        """The cluster of some of the ranks, numbered anew in the order given."""
        ranks = sequence("ranks", ranks, "a list of ranks of the cluster")
        ranks = [whole("a rank to pick", rank, 0, self.n_ranks - 1) for rank in ranks]
        place = {rank: x for x, rank in enumerate(ranks)}
        links = {(place[a], place[b]): k for (a, b), k in self.links.items() if a in place and b in place}
        return dataclasses.replace(
            self,
            devices=tuple(self.devices[r] for r in ranks),
            hosts=tuple(self.hosts[r] for r in ranks) if self.hosts else (),
            links=links,
            nics=tuple(self.nics[r] for r in ranks) if self.nics else (),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers, for JSON."""
        return {
            "version": VERSION,
            "devices": [{**dataclasses.asdict(d), "flops_s": dict(d.flops_s)} for d in self.devices],
            "hosts": list(self.hosts),
            "local": _link_to_dict(self.local),
            "remote": _link_to_dict(self.remote),
            "links": [[a, b, _link_to_dict(link)] for (a, b), link in sorted(self.links.items())],
            "nics": list(self.nics),
            "cores": list(self.cores),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], what: str = "the cluster") -> Cluster:
        """The inverse of :meth:`to_dict`.

        Raises :class:`StoreError`, with the path to the fault, for anything that is not one's ``to_dict``.
        """
        file = build(_ClusterFile, versioned(data, VERSION, what, "cluster"), what)
        links = {(a, b): link.link for a, b, link in file.links}
        try:
            cluster = cls(
                file.devices, file.hosts, file.local.link, file.remote.link, links, file.nics, file.cores
            )
        except InputError as error:
            raise refuse(what, "", str(error)) from None
        differs(data, cluster.to_dict(), what)
        return cluster

    @classmethod
    def read(cls, path: str | pathlib.Path) -> Cluster:
        """A cluster from its file. Raises :class:`StoreError` for one that holds none."""
        return cls.from_dict(load(path, "the cluster"), f"the cluster {path}")


@dataclasses.dataclass(frozen=True, slots=True)
class _LinkFile:
    latency_s: Seconds
    bandwidth_bytes_s: Positive | None
    source: Line
    host_s: Seconds
    host_s_per_byte: Seconds
    direct_s: Seconds
    direct_host_s: Seconds
    direct_s_per_byte: Seconds
    direct_host_s_per_byte: Seconds
    direct_below_bytes: Bytes

    @property
    def link(self) -> Link:
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.bandwidth_bytes_s is None:
            given["bandwidth_bytes_s"] = float("inf")
        return Link(**given)


@dataclasses.dataclass(frozen=True, slots=True)
class _ClusterFile:
    devices: tuple[Device, ...]
    hosts: tuple[Index, ...]
    local: _LinkFile
    remote: _LinkFile
    links: tuple[tuple[Index, Index, _LinkFile], ...]
    nics: tuple[Index, ...]
    cores: tuple[Index, ...]


def _link_to_dict(link: Link) -> dict[str, Any]:
    out = dataclasses.asdict(link)
    if link.bandwidth_bytes_s == float("inf"):
        out["bandwidth_bytes_s"] = None
    return out


_SAME_RANK = Link(source="same rank")
