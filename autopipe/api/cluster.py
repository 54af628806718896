"""What a plan is for: the ranks, the device that each has, and the links between them.

What devices can do is left to ``measure``, what ranks cost to ``op_costs``.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib

import torch
import torch.distributed as dist
from torch import nn

from .. import accelerator, measure
from ..errors import InputError
from ..hardware import Cluster, Device, Link
from ..measure.busy_cores import places
from ..solve import SEVERAL_PER_RANK
from ..tracing import device_of
from .agree import in_group

__all__ = [
    "DeviceLike",
    "busy_peers",
    "cluster_for",
    "described",
    "given_cluster",
    "is_described",
    "is_host",
    "of_the_job",
    "stages_per_rank",
]

DeviceLike = str | torch.device | Device | None
"""A torch device of this machine, or a described one, each also by its name; None for the model's own."""


def cluster_for(
    model: nn.Module,
    given: Cluster | str | pathlib.Path | None,
    n_ranks: int | None,
    n_stages: int | None,
    schedule: str,
    device: DeviceLike,
) -> Cluster:
    """The ranks to plan for: the cluster that was given, or equal devices on one host.

    How many is ``n_ranks``, else the process group's, else what ``schedule`` needs for ``n_stages``. Raises
    :class:`InputError` where numbers contradict one another, or none is said.
    """
    if given is not None:
        return given_cluster(given, n_ranks)
    if n_ranks is None:
        n_ranks = _count(n_stages, schedule)
    _check_count(n_ranks, n_stages)
    on, link = described(model, device)
    cluster = Cluster.uniform(n_ranks, on, link)
    return dataclasses.replace(cluster, cores=(places(),)) if is_host(model, device) else cluster


def given_cluster(given: Cluster | str | pathlib.Path, n_ranks: int | None) -> Cluster:
    """The cluster that was given, or its file's. Raises :class:`InputError` for another number of ranks."""
    cluster = given if isinstance(given, Cluster) else Cluster.read(given)
    if n_ranks not in (None, cluster.n_ranks):
        raise InputError(f"n_ranks is {n_ranks} but the cluster has {cluster.n_ranks} ranks; give one")
    return cluster


def _count(n_stages: int | None, schedule: str) -> int:
    if in_group():
        return dist.get_world_size()
    if n_stages is None:
        raise InputError(
            "neither n_stages nor the number of devices is given; pass n_stages=4, n_ranks=8 or a cluster"
        )
    return max(1, n_stages // stages_per_rank(schedule))


def _check_count(n_ranks: int, n_stages: int | None) -> None:
    if n_stages is None and n_ranks < 1:
        raise InputError(f"n_ranks is {n_ranks}; it must be at least 1")
    if n_stages is not None and not 1 <= n_ranks <= n_stages:
        raise InputError(
            f"{n_ranks} ranks cannot share {n_stages} stages: each rank holds at least one; "
            f"set n_stages to {n_ranks} or more, or n_ranks to {n_stages} or fewer"
        )


def stages_per_rank(schedule: str) -> int:
    """How many stages a rank holds under ``schedule`` where nothing else is said."""
    return 2 if schedule in SEVERAL_PER_RANK else 1


def described(model: nn.Module, device: DeviceLike) -> tuple[Device, Link]:
    """The description of a device, and of the link that ranks of one host most often have with it."""
    if isinstance(device, str) and is_described(device):
        device = measure.device(device)
    if not isinstance(device, Device):
        where = _where(model, device)
        device = measure.described(measure.device_name(where), accelerator.total_bytes(where))
        if where.type == "cpu":
            return dataclasses.replace(device, memory_bytes=None), measure.link("loopback")
    return device, measure.link("NVLink4" if "NVIDIA H" in device.name else "PCIe4")


def is_described(device: DeviceLike) -> bool:
    """Whether a device is known by its description alone: no torch device, and so none of this machine."""
    if not isinstance(device, str):
        return isinstance(device, Device)
    try:
        torch.device(device)
    except RuntimeError:
        return True
    return False


def is_host(model: nn.Module, device: DeviceLike) -> bool:
    """Whether ranks are to compute on this machine's own processor."""
    return not is_described(device) and _where(model, device).type == "cpu"


def of_the_job(model: nn.Module) -> torch.device | None:
    """The accelerator on which this rank will train a model that is on none; None to go by the model."""
    is_on_one = accelerator.is_async(device_of(model))
    return accelerator.of_rank() if in_group() and not is_on_one else None


def busy_peers(model: nn.Module, device: DeviceLike) -> int:
    """Ranks that will compute beside this one on its processor: they share its memory bandwidth."""
    if not in_group() or not is_host(model, device):
        return 0
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())) - 1


def _where(model: nn.Module, device: DeviceLike) -> torch.device:
    """The torch device of this machine that is meant."""
    assert not isinstance(device, Device)
    return torch.device(device) if device is not None else device_of(model)
