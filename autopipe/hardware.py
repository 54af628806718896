"""The machines a plan is for: devices, the links between them, and the cluster of ranks they form.

Measuring links and devices is left to ``measure``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from .errors import StoreError

__all__ = ["Cluster", "Device", "Link"]

VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A connection from one rank to another: a transfer takes ``latency_s + bytes / bandwidth_bytes_s``."""

    latency_s: float = 0.0
    bandwidth_bytes_s: float = float("inf")
    source: str = ""

    def seconds(self, n_bytes: float) -> float:
        """Seconds to move ``n_bytes``; 0 for nothing."""
        return self.latency_s + n_bytes / self.bandwidth_bytes_s if n_bytes else 0.0

    def all_reduce_s(self, n_bytes: float, n_ranks: int) -> float:
        """Seconds for ``n_ranks`` to sum ``n_bytes`` round a ring of such links: 2 (n − 1) pieces of 1/n."""
        return 2 * (n_ranks - 1) * self.seconds(n_bytes / n_ranks) if n_ranks > 1 else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """What one rank computes on.

    Attributes
    ----------
    name: as the driver reports it, such as ``"NVIDIA H200"``.
    memory_bytes: usable memory; None when unknown (no limit).
    flops_s: peak FLOP/s by dtype.
    bandwidth_bytes_s: memory bandwidth.
    launch_s: the least time any op takes.
    speed: relative to the device the costs were measured on; 2.0 halves every time.
    source: where the figures come from.
    attention: whose fused kernels ``scaled_dot_product_attention`` runs: ``"cuda"`` (flash and
        memory-efficient; ROCm's too), ``"cpu"``, or ``""`` for none: the matrix of all pairs is then made.
    """

    name: str = "device"
    memory_bytes: int | None = None
    flops_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bandwidth_bytes_s: float = 0.0
    launch_s: float = 0.0
    speed: float = 1.0
    source: str = ""
    attention: str = ""


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The ranks of a pipeline in order: a device each, the host each is on, and the link of each pair.

    ``links`` maps (from, to) rank pairs; a missing pair uses ``local`` on one host and ``remote`` across.
    """

    devices: tuple[Device, ...]
    hosts: tuple[int, ...] = ()
    local: Link = Link()
    remote: Link = Link()
    links: Mapping[tuple[int, int], Link] = dataclasses.field(default_factory=dict)

    @classmethod
    def uniform(cls, n_ranks: int, device: Device | None = None, link: Link | None = None) -> Cluster:
        """``n_ranks`` equal devices on one host."""
        return cls((device or Device(),) * n_ranks, local=link or Link())

    @property
    def n_ranks(self) -> int:
        return len(self.devices)

    def host(self, rank: int) -> int:
        return self.hosts[rank] if self.hosts else 0

    def link(self, source: int, destination: int) -> Link:
        """The link between two ranks; free within a rank."""
        if source == destination:
            return _SAME_RANK
        if (source, destination) in self.links:
            return self.links[source, destination]
        return self.local if self.host(source) == self.host(destination) else self.remote

    def picked(self, ranks: Sequence[int]) -> Cluster:
        """The cluster of some of the ranks, numbered anew in the order given."""
        place = {rank: x for x, rank in enumerate(ranks)}
        links = {(place[a], place[b]): k for (a, b), k in self.links.items() if a in place and b in place}
        return dataclasses.replace(
            self,
            devices=tuple(self.devices[r] for r in ranks),
            hosts=tuple(self.hosts[r] for r in ranks) if self.hosts else (),
            links=links,
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
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cluster:
        """The inverse of :meth:`to_dict`. Raises :class:`StoreError` on another version or missing fields."""
        if data.get("version") != VERSION:
            raise StoreError(f"cluster has version {data.get('version')!r}, this autopipe reads {VERSION}")
        try:
            return cls(
                devices=tuple(Device(**d) for d in data["devices"]),
                hosts=tuple(data["hosts"]),
                local=_link_from_dict(data["local"]),
                remote=_link_from_dict(data["remote"]),
                links={(a, b): _link_from_dict(link) for a, b, link in data["links"]},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"cluster is damaged: {error!r}") from error


def _link_to_dict(link: Link) -> dict[str, Any]:
    out = dataclasses.asdict(link)
    if link.bandwidth_bytes_s == float("inf"):
        out["bandwidth_bytes_s"] = None
    return out


def _link_from_dict(data: Mapping[str, Any]) -> Link:
    bandwidth = data["bandwidth_bytes_s"]
    return Link(**{**data, "bandwidth_bytes_s": float("inf") if bandwidth is None else bandwidth})


_SAME_RANK = Link(source="same rank")
