"""Measures the links between the ranks of a job and gives them as a cluster.

Named descriptions of links are left to ``devices``; carrying a pipeline's messages to ``runtime``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .. import accelerator
from ..arguments import whole
from ..errors import CostError
from ..hardware import Cluster, Device, Link
from .busy_cores import places
from .devices import described, reserved
from .message_times import exchange
from .timers import device_name

__all__ = ["MOST_RANKS", "among", "job_group", "probe"]

_SMALL, _LARGE = 1 << 16, 1 << 24
_ROUNDS = 7
_LIMIT_S = 240.0
MOST_RANKS = 256
"""Processes that are started on one machine to measure between them."""


def probe(n_ranks: int = 2) -> Cluster:
    """The cluster of the job's ranks: their devices, the hosts they are on, the link of every pair.

    In a job started by ``torchrun`` (or where a default process group is up) every rank calls it and gets
    the same cluster; elsewhere it starts ``n_ranks`` processes on this machine and measures between them.

    A link's latency is half the round trip of 4 bytes, its bandwidth the slope between 64 KiB and 16 MiB
    (medians of 7 round trips, one pair at a time); of an accelerator also the copies to and from the host's
    memory. Over NCCL where every rank has a GPU of its own, else
    gloo; there both ranks compute meanwhile, as in a pipeline, where messages take longer and take from it,
    and messages between ranks of a host go as a pipeline's do, past the communicator.
    Takes under a second per pair, and two more for the first of each pair of hosts.

    Raises :class:`CostError` when the processes it starts fail.
    """
    n_ranks = whole("n_ranks", n_ranks, most=MOST_RANKS)
    if dist.is_initialized():
        return _measure(_device())
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        with job_group("env://", int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])):
            return _measure(_device())
    return among(n_ranks, __name__)


def among(n_ranks: int, module: str) -> Cluster:
    """What ``n_ranks`` processes on this machine that run ``module`` measure among themselves.

    They are given where to meet, how many they are, the file in which rank 0 leaves the cluster, and their
    rank. Raises :class:`CostError` when one fails, or they take too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "cluster.json"
        command = [sys.executable, "-m", module, f"file://{folder}/store", str(n_ranks), str(out)]
        threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        processes = [
            subprocess.Popen(
                [*command, str(rank)], env={**os.environ, **threads}, stderr=subprocess.PIPE, text=True
            )
            for rank in range(n_ranks)
        ]
        try:
            errors = [p.communicate(timeout=_LIMIT_S)[1] for p in processes]
        except subprocess.TimeoutExpired as error:
            raise CostError(f"probing {n_ranks} ranks took over {_LIMIT_S:.0f} s; try fewer") from error
        finally:
            for p in processes:
                p.kill()
                p.wait()
        for rank, (p, text) in enumerate(zip(processes, errors, strict=True)):
            if p.returncode:
                last = text.strip().rpartition("\n")[2]
                raise CostError(f"probing rank {rank} of {n_ranks} failed: {last}")
        return Cluster.read(out)


@contextlib.contextmanager
def job_group(init_method: str, rank: int, n_ranks: int) -> Iterator[None]:
    """Within it the ranks are a process group: on accelerators where each has one, else over gloo."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", n_ranks))
    has_own = torch.accelerator.is_available() and torch.accelerator.device_count() >= local
    if has_own:
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", rank)))
    backend = accelerator.backend(accelerator.current()) if has_own else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=n_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _device() -> torch.device:
    """Where the default process group carries messages: this rank's accelerator, or the host."""
    return accelerator.of_rank() or _CPU


_CPU = torch.device("cpu")


def _measure(device: torch.device) -> Cluster:
    n_ranks, me = dist.get_world_size(), dist.get_rank()
    rows: list[Any] = [None] * n_ranks
    cores = 0 if accelerator.is_async(device) else places()
    mine = _described(device_name(device), _memory(device), _host_bytes_s(device))
    dist.all_gather_object(rows, (socket.gethostname(), mine, cores))
    names = list(dict.fromkeys(host for host, *_ in rows))
    hosts = tuple(names.index(host) for host, *_ in rows)
    found: dict[tuple[int, int], Link] = {}
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for a, b in itertools.combinations(range(n_ranks), 2):
        dist.barrier()
        stands = first.setdefault((hosts[a], hosts[b]), (a, b)) == (a, b)
        if me in (a, b):
            found[a, b] = _pair(a, b, me, device, works=stands and not accelerator.is_async(device))
    each: list[Any] = [None] * n_ranks
    dist.all_gather_object(each, {(a, b): link for (a, b), link in found.items() if a == me})
    measured: dict[tuple[int, int], Link] = {pair: link for part in each for pair, link in part.items()}
    links: dict[tuple[int, int], Link] = {}
    for (a, b), link in measured.items():
        links[a, b] = links[b, a] = _at_work(link, measured[first[hosts[a], hosts[b]]])
    return Cluster(
        devices=tuple(described for _, described, _ in rows),
        hosts=hosts,
        local=_typical(links, hosts, True),
        remote=_typical(links, hosts, False),
        links=links,
        cores=_cores({names.index(host): n for host, _, n in rows}),
    )


def _cores(by_host: Mapping[int, int]) -> tuple[int, ...]:
    """Of each host; none where ranks have accelerators, which are theirs alone."""
    return tuple(by_host[host] for host in sorted(by_host)) if all(by_host.values()) else ()


def _at_work(link: Link, like: Link) -> Link:
    """A link with what was measured between ranks at work on one of the same hosts."""
    if not like.host_s:
        return link
    return dataclasses.replace(
        like,
        source=link.source,
        latency_s=max(link.latency_s, like.latency_s),
        bandwidth_bytes_s=min(link.bandwidth_bytes_s, like.bandwidth_bytes_s),
    )


def _pair(a: int, b: int, me: int, device: torch.device, *, works: bool) -> Link:
    """The link of two ranks; both measure, ``a``'s figures count. ``works``: also while both compute."""
    peer = b if me == a else a
    source = f"probed over {accelerator.backend(device)}"
    tiny, small, large = (_round_trip_s(n, me == a, peer, device) / 2 for n in (4, _SMALL, _LARGE))
    # noise may make the small one the slower; no link moves the bytes in a quarter of the whole trip's time
    bandwidth = (_LARGE - _SMALL) / max(large - small, large / 4)
    if not works:
        return Link(tiny, bandwidth, source)
    found = exchange(peer)
    # noise may make a message between busy ranks the faster; it is not
    bandwidth = min(bandwidth, 1 / found.s_per_byte if found.s_per_byte else bandwidth)
    latency_s = max(tiny, found.latency_s)
    return Link(
        latency_s=latency_s,
        bandwidth_bytes_s=bandwidth,
        source=f"{source}, ranks at work",
        host_s=found.host_s,
        host_s_per_byte=found.host_s_per_byte,
        # what goes past the communicator is no slower than what it carries
        direct_s=min(found.direct_s, latency_s),
        direct_host_s=min(found.direct_host_s, found.host_s),
        direct_s_per_byte=found.direct_s_per_byte,
        direct_host_s_per_byte=found.direct_host_s_per_byte,
        direct_below_bytes=found.direct_below_bytes,
    )


def _round_trip_s(n_bytes: int, leads: bool, peer: int, device: torch.device) -> float:
    buffer = torch.zeros(n_bytes // 4, dtype=torch.float32, device=device)
    seconds = []
    for _ in range(_ROUNDS + 2):
        start = time.perf_counter()
        if leads:
            dist.send(buffer, peer)
            dist.recv(buffer, peer)
        else:
            dist.recv(buffer, peer)
            dist.send(buffer, peer)
        accelerator.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


def _typical(links: Mapping[tuple[int, int], Link], hosts: tuple[int, ...], same: bool) -> Link:
    """The median of the links within hosts, or across them, for pairs that a later job may add."""
    chosen = [link for (a, b), link in links.items() if (hosts[a] == hosts[b]) is same]
    if not chosen:
        return Link()
    figures = [f.name for f in dataclasses.fields(Link) if f.name != "source"]
    medians: dict[str, Any] = {n: statistics.median_low(getattr(x, n) for x in chosen) for n in figures}
    return Link(source=f"median of {len(chosen)} probed", **medians)


def _memory(device: torch.device) -> int | None:
    return accelerator.total_bytes(device)


def _host_bytes_s(device: torch.device) -> float:
    """Bytes per second between the device's memory and the host's, the slower way; 0 on the host."""
    if not accelerator.is_async(device):
        return 0.0
    tensor, seconds = torch.zeros(_LARGE, dtype=torch.uint8, device=device), []
    for _ in range(_ROUNDS + 2):
        accelerator.synchronize(device)
        start = time.perf_counter()
        values = accelerator.to_host(tensor)
        accelerator.synchronize(device)
        middle = time.perf_counter()
        accelerator.from_host(values, device)
        accelerator.synchronize(device)
        seconds.append(max(middle - start, time.perf_counter() - middle))
    return _LARGE / statistics.median(seconds[2:])


def _described(name: str, memory: int | None, host_bytes_s: float) -> Device:
    """What is known of a device by name, and what the rank found of it."""
    return dataclasses.replace(
        described(name),
        name=name,
        memory_bytes=memory,
        reserved_bytes=0 if memory is None else reserved(memory),
        host_bandwidth_bytes_s=host_bytes_s,
    )


def _main(init_method: str, n_ranks: str, out: str, rank: str) -> None:
    with job_group(init_method, int(rank), int(n_ranks)):
        cluster = _measure(_device())
    if int(rank) == 0:
        pathlib.Path(out).write_text(json.dumps(cluster.to_dict()))


if __name__ == "__main__":
    _main(*sys.argv[1:])
