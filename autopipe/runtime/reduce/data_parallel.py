"""Data parallelism beside the pipeline: a stage wrapped in DDP or sharded by ``fully_shard``.

Wrapping is left to the user, through ``Runtime.wrap``. Here gradients of all microbatches are gathered
first and reduced over the replicas once per step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ...errors import InputError, StepError
from .buckets import Buckets
from .diverged import Diverged

__all__ = ["ReplicaDims", "Replicas", "largest", "replicas_of"]

_logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


class Replicas:
    """How a wrapped stage's replicas are kept together: by nobody, DDP, or FSDP2."""

    def __init__(self, module: nn.Module) -> None:
        wrapped = _outermost(module, nn.parallel.DistributedDataParallel)
        if len(wrapped) > 1:
            raise InputError(
                f"a stage has {len(wrapped)} parts in DistributedDataParallel of their own; wrap the stage "
                "whole, in one"
            )
        self.ddp = wrapped[0] if wrapped else None
        if self.ddp is not None and self.ddp.static_graph:
            raise InputError(
                "a stage is wrapped in DistributedDataParallel(static_graph=True), which counts on one "
                "backward for each reduction, and a step has one for each microbatch; leave static_graph out"
            )
        if self.ddp is not None:
            # buffers were made alike when it was made; replicas may run their first forward at unlike times
            self.ddp.require_forward_param_sync = False
        fsdp = getattr(dist, "fsdp", None)
        self._fsdp: list[Any] = [] if fsdp is None else _outermost(module, fsdp.FSDPModule)
        self._buckets: Buckets | None = None
        self._has_run = False
        self._diverged = Diverged()

    def compare(self, stage: int) -> None:
        """Raise :class:`StepError` where DDP's replicas of a stage have different values of a parameter.

        Every replica calls it. On an accelerator a step or so after they were compared.
        """
        if self.ddp is None:
            return
        group = self.ddp.process_group
        named = [(n, p) for n, p in self.ddp.module.named_parameters() if p.requires_grad]
        where = ", ".join(map(str, dist.get_process_group_ranks(group)))
        largest = functools.partial(dist.all_reduce, op=dist.ReduceOp.MAX, group=group)
        self._diverged.look(where, [n for n, _ in named], [p for _, p in named], largest)
        found = self._diverged.told()
        if found is not None:
            more = f" and {len(found[1]) - 3} more" if len(found[1]) > 3 else ""
            raise StepError(
                f"stage {stage}: {', '.join(found[1][:3])}{more} have different values on its replicas, "
                f"ranks {found[0]}, whose gradients are averaged; load the same weights on all, and give "
                "their optimizers the same options"
            )

    @property
    def is_plain(self) -> bool:
        """No wrapper."""
        return self.ddp is None and not self._fsdp

    @property
    def is_sharded(self) -> bool:
        """Whether the weights have to be gathered before the stage runs."""
        return bool(self._fsdp)

    def hold(self) -> None:
        """From now on :meth:`let_go` says when weights go, not each module's end of its forward."""
        for module in self._fsdp:
            module.set_reshard_after_forward(False)

    def gather(self) -> None:
        """Begin to bring the weights of the whole stage together."""
        if self._has_run:  # the first forward finds out which of the modules is the root
            for module in self._shards():
                module.unshard(async_op=True)
        self._has_run = True

    def let_go(self) -> None:
        """Keep this process's shards alone."""
        for module in self._shards():
            module.reshard()

    def _shards(self) -> Iterator[Any]:
        return (m for root in self._fsdp for m in root.modules() if isinstance(m, dist.fsdp.FSDPModule))

    def begin(self) -> None:
        """A step begins."""
        if self._buckets is not None:
            self._buckets.begin()

    def around_forward(self) -> contextlib.AbstractContextManager[Any]:
        """A context that keeps DDP from reducing after each microbatch."""
        return contextlib.nullcontext() if self.ddp is None else self.ddp.no_sync()

    def before_backward(self, is_last: bool) -> None:
        """Say whether this is the backward after which gradients are to be reduced."""
        for module in self._fsdp:
            module.set_is_last_backward(is_last)
            module.set_reshard_after_backward(is_last)
            module.set_requires_gradient_sync(is_last)
        if self._buckets is not None and is_last:
            self._buckets.watch(self)

    def after_backward(self) -> None:
        """Say that a backward is through."""
        if self._buckets is not None:
            self._buckets.look_away()

    def after_step(self) -> None:
        """Average what DDP held back, as far as that is not done."""
        if self._buckets is not None:
            self._buckets.finish()

    @staticmethod
    def join(of_rank: Sequence[Replicas]) -> None:
        """Let the stages of a rank that have the same replicas reduce in one order."""
        by_group: dict[Any, list[Replicas]] = {}
        for one in of_rank:
            if one.ddp is not None:
                by_group.setdefault(one.ddp.process_group, []).append(one)
        for group, same in by_group.items():
            buckets = Buckets(group, {one: one.ddp for one in same if one.ddp is not None})
            for one in same:
                one._buckets = buckets


def _outermost(module: nn.Module, kind: type[M]) -> list[M]:
    """The modules of a kind in no other of it: what wraps a stage may be wrapped, or compiled."""
    if isinstance(module, kind):
        return [module]
    return list(dict.fromkeys(m for child in module.children() for m in _outermost(child, kind)))


class ReplicaDims:
    """The dims of a mesh whose ranks have batches of their own: all but ``pp`` and what is in ``ONE_BATCH``.

    ``index`` tells this process's batch from theirs, 0 for the first; ``n`` is how many there are.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = cast(Any, mesh)
        names: tuple[str, ...] = getattr(mesh, "mesh_dim_names", None) or ()
        self._names = [name for name in names if name != "pp" and name not in ONE_BATCH]
        self.index, self.n = 0, 1
        self._has_noticed = self._has_warned = False
        for name in self._names:
            size = self._mesh.size(names.index(name))
            self.n *= size
            self.index = self.index * size + self._mesh.get_local_rank(name)

    def notice_equal(self, checksum: int, device: torch.device) -> None:
        """Say so, once, where replicas were given the same batch: they would train as one of them does.

        Every replica's process of one rank calls it, and waits for the others.
        """
        for name in self._names:
            group = self._mesh.get_group(name)
            at = device if self._mesh.device_type == device.type else "cpu"
            seen = torch.tensor([checksum, -checksum], device=at)
            dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
            high, low = seen.tolist()
            n = dist.get_world_size(group)
            if n > 1 and high == -low and not self._has_noticed:
                self._has_noticed = True
                _logger.warning(
                    "the %d replicas along mesh dim %r were given equal batches, so together they train as "
                    "one of them would; give each its share: DistributedSampler(dataset, num_replicas=%d, "
                    "rank=mesh.get_local_rank(%r))",
                    n,
                    name,
                    n,
                    name,
                )

    def notice_unwrapped(self) -> None:
        """Say so, once, where replicas train and no stage was wrapped."""
        if self.n > 1 and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "the mesh has %d replicas of the pipeline (%s) and no stage was wrapped, so that each trains "
                "a model of its own: rt.wrap(lambda s: DistributedDataParallel(s, process_group="
                "mesh.get_group(%r))) averages their gradients, unless you do",
                self.n,
                " × ".join(self._names),
                self._names[0],
            )

    def any(self, mine: bool, device: torch.device) -> bool:
        """Whether it is so on any replica; every replica's process of one rank calls it, and waits."""
        return bool(self._largest([int(mine)], device)[0])

    def are_unlike(self, mine: int, device: torch.device) -> bool:
        """Whether replicas have other numbers; every replica's process of one rank calls it, and waits."""
        most, least = self._largest([mine, -mine], device)
        return most != -least

    def _largest(self, numbers: Sequence[int], device: torch.device) -> list[int]:
        return largest(self._mesh, self._names, numbers, device)

    def share(self, counted: float, device: torch.device) -> Tensor:
        """What an even average over the replicas has to be multiplied by to weigh each by what it counted.

        Every replica's process of one rank calls it. On an accelerator only its stream waits.
        """
        at = device if self._mesh is not None and self._mesh.device_type == device.type else "cpu"
        total, n = torch.full((), counted, dtype=torch.float64, device=at), 1
        for name in self._names:
            group = self._mesh.get_group(name)
            dist.all_reduce(total, group=group)
            n *= dist.get_world_size(group)
        # all may have counted nothing
        return (counted * n / total.clamp(min=torch.finfo(total.dtype).tiny)).to(device)


def largest(
    mesh: DeviceMesh | None, dims: Sequence[str], numbers: Sequence[int], device: torch.device
) -> list[int]:
    """The largest of each number along dims of a mesh; each of their ranks calls it, and waits."""
    if mesh is None or not dims:
        return list(numbers)
    found = torch.tensor(numbers, device=device if mesh.device_type == device.type else "cpu")
    for name in dims:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.get_group(name))
    return found.tolist()


def replicas_of(mesh: DeviceMesh | None, ranks: tuple[int, ...]) -> tuple[list[tuple[int, ...]], list[Any]]:
    """The ranks of the pipelines of a mesh beside that of ``ranks``, and its groups of ranks of several."""
    names: tuple[str, ...] = getattr(mesh, "mesh_dim_names", None) or ()
    if mesh is None or mesh.ndim == 1 or "pp" not in names:
        return [], []
    rows = mesh.mesh.movedim(names.index("pp"), -1).flatten(0, -2).tolist()
    # groups have their ranks in this order, however the mesh lays them out
    others = [row for row in (tuple(sorted(row)) for row in rows) if row != ranks]
    return others, [mesh.get_group(name) for name in names if name != "pp"]


ONE_BATCH = frozenset(("tp", "sp", "ep", "etp", "tensor", "expert", "model"))
"""Names of dims whose ranks work on one batch together, and so draw the same random numbers."""
