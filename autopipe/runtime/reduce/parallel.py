"""Data parallelism beside the pipeline: a stage wrapped in DDP or sharded by ``fully_shard``.

Wrapping is left to the user, through ``Runtime.wrap``. Here gradients of all microbatches are gathered
first and reduced over the replicas once per step.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ReplicaDims", "Replicas", "sum_gradients"]

_logger = logging.getLogger(__name__)


class Replicas:
    """How a wrapped stage's replicas are kept together: by nobody, DDP, or FSDP2."""

    def __init__(self, module: nn.Module) -> None:
        self._ddp = module if isinstance(module, nn.parallel.DistributedDataParallel) else None
        fsdp = getattr(dist, "fsdp", None)
        self._fsdp: Any = module if fsdp is not None and isinstance(module, fsdp.FSDPModule) else None

    @property
    def is_plain(self) -> bool:
        """No wrapper: the backward may be split."""
        return self._ddp is None and self._fsdp is None

    def around_forward(self) -> contextlib.AbstractContextManager[Any]:
        """A context that keeps DDP from reducing after each microbatch."""
        return contextlib.nullcontext() if self._ddp is None else self._ddp.no_sync()

    def before_backward(self, is_last: bool) -> None:
        """Tell FSDP whether this is the backward after which gradients are to be reduced."""
        if self._fsdp is not None:
            self._fsdp.set_is_last_backward(is_last)
            self._fsdp.set_reshard_after_backward(is_last)
            self._fsdp.set_requires_gradient_sync(is_last)

    def after_step(self) -> None:
        """Average what DDP held back."""
        if self._ddp is None:
            return
        group = self._ddp.process_group
        parameters = [p for p in self._ddp.parameters() if p.requires_grad]
        sum_gradients(
            parameters, lambda flat: dist.all_reduce(flat, group=group), 1 / dist.get_world_size(group)
        )


class ReplicaDims:
    """The dims of a mesh whose ranks have batches of their own: all but ``pp`` and what is in ``ONE_BATCH``.

    ``index`` tells this process's batch from theirs; 0 for the first.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self._mesh = cast(Any, mesh)
        names: tuple[str, ...] = getattr(mesh, "mesh_dim_names", None) or ()
        self._names = [name for name in names if name != "pp" and name not in ONE_BATCH]
        self.index = 0
        self._has_noticed = False
        for name in self._names:
            size = self._mesh.size(names.index(name))
            self.index = self.index * size + self._mesh.get_local_rank(name)

    def notice_equal(self, checksum: int, device: torch.device) -> None:
        """Say so, once, where replicas were given the same batch: they would train as one of them does.

        Every replica's process of one rank calls it, and waits for the others.
        """
        for name in self._names:
            group = self._mesh.get_group(name)
            at = device if self._mesh.device_type == device.type else None
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

    def share(self, counted: float, device: torch.device) -> Tensor:
        """What an even average over the replicas has to be multiplied by to weigh each by what it counted.

        Every replica's process of one rank calls it. On an accelerator only its stream waits.
        """
        at = device if self._mesh is not None and self._mesh.device_type == device.type else None
        total, n = torch.full((), counted, dtype=torch.float64, device=at), 1
        for name in self._names:
            group = self._mesh.get_group(name)
            dist.all_reduce(total, group=group)
            n *= dist.get_world_size(group)
        return (counted * n / total).to(device)


ONE_BATCH = frozenset(("tp", "sp", "ep", "etp", "tensor", "expert", "model"))
"""Names of dims whose ranks work on one batch together, and so draw the same random numbers."""


def sum_gradients(
    parameters: Sequence[nn.Parameter], all_reduce: Callable[[Tensor], object], scale: float = 1.0
) -> None:
    """Sum gradients over all callers, times ``scale``; one with no gradient anywhere keeps none.

    One message per dtype.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for dtype, same in by_dtype.items():
        has = torch.tensor([p.grad is not None for p in same], dtype=dtype)
        has = has.to(same[0].device, non_blocking=True)
        parts = [local(p.grad if p.grad is not None else torch.zeros_like(p)) for p in same]
        flat = torch.cat([has, *(part.reshape(-1) for part in parts)])
        all_reduce(flat)
        missing = any(p.grad is None for p in same)
        anywhere = (flat[: len(same)] > 0).tolist() if missing else [True] * len(same)
        pieces = flat[len(same) :].split([part.numel() for part in parts])
        for parameter, part, piece, some in zip(same, parts, pieces, anywhere, strict=True):
            if some:
                _put(parameter, part, piece * scale if scale != 1.0 else piece)


def _put(parameter: nn.Parameter, part: Tensor, total: Tensor) -> None:
    part.copy_(total.view_as(part))
    if parameter.grad is None or parameter.grad.layout is not torch.strided:
        parameter.grad = _like(parameter, part)


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor itself, dense."""
    if hasattr(tensor, "to_local"):
        return tensor.to_local()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _like(parameter: Tensor, part: Tensor) -> Tensor:
    if not hasattr(parameter, "to_local"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(part, parameter.device_mesh, parameter.placements, run_check=False)  # type: ignore[attr-defined]
