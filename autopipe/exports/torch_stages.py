"""A split as ``torch.distributed.pipelining`` stages, for torch's own schedules and what builds on them.

The modules they wrap are left to ``tensor_chain``, torchtitan's hook for such stages to ``torchtitan``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import InputError
from ..plans import Plan
from ..runtime.data.microbatch import Splitter
from ..runtime.weights.stale import absent, mark, unmark
from ..stages import Stage
from ..tracing import Capture
from .tensor_chain import relays

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

__all__ = ["gather", "to_torch_stages"]


def to_torch_stages(
    capture: Capture,
    plan: Plan,
    stages: Sequence[Stage],
    *,
    n_microbatches: int | None = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> list[PipelineStage]:
    """This rank's stages of the split as torch's, with shapes of one of ``n_microbatches`` of the example.

    ``group`` (by default the world) has as many ranks as the plan. See :meth:`autopipe.Pipe.to_torch_stages`.
    """
    from torch.distributed.pipelining import PipelineStage  # seconds to import: only for who uses it

    if not dist.is_initialized():
        raise InputError(
            "torch's stages belong to a process group and there is none; start the ranks with torchrun and "
            "call torch.distributed.init_process_group() first"
        )
    n_ranks = dist.get_world_size(group)
    if n_ranks != plan.n_ranks:
        raise InputError(f"the plan is for {plan.n_ranks} ranks and the group has {n_ranks}; plan again")
    rank = dist.get_rank(group)
    here = torch.device(device) if device is not None else stages[0]._device
    n = plan.n_microbatches if n_microbatches is None else n_microbatches
    if n > 1 and (mixing := capture.variation.mixing.always):
        raise InputError(
            f"rows of a batch of {capture.ops.model} depend on one another ({mixing}), and torch's schedules "
            f"run each of {n} microbatches for itself; pass n_microbatches=1, or train with pipe.runtime(), "
            "which runs what compares rows at a model's end on the whole batch"
        )
    chain = relays(capture, stages, *_microbatch(capture, n))
    own = [s for s in stages if s.rank == rank]
    for stage in own:
        if not any(p.is_meta for p in stage.parameters()):  # else whoever makes its memory says where
            stage.to(here)
    others = absent(capture, own, stages)
    out = []
    for stage in own:
        takes, gives = chain.examples[stage.index]
        module = chain.relays[stage.index]
        module.register_forward_pre_hook(lambda *_: mark(others) if torch.is_grad_enabled() else None)
        made = PipelineStage(module, stage.index, len(stages), here, takes, gives, group=group)
        out.append(made)
    return out


def _microbatch(capture: Capture, n: int) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The example's arguments cut to the rows of one microbatch, as torch cuts them."""
    args, kwargs = capture.example
    batch = Splitter(capture).split(capture.bind(args, kwargs), None, n)
    if len(batch.rows) != n or len(set(batch.rows)) > 1:
        raise InputError(
            f"the example's {sum(batch.rows)} rows do not make {n} equal microbatches, which torch's stages "
            "need; pass n_microbatches, or split with such an example"
        )
    rows, whole = batch.rows[0], sum(batch.rows)

    def cut(value: Any) -> Any:
        is_batched = isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == whole
        return value[:rows] if is_batched else value

    return tuple(map(cut, args)), {name: cut(value) for name, value in kwargs.items()}


@torch.no_grad()
def gather(capture: Capture, stages: Sequence[Stage], group: dist.ProcessGroup | None) -> None:
    """Bring every weight, and every buffer that steps write, from the rank that trains it to all others."""
    for home in absent(capture, (), stages):
        unmark([home.tensor])
        dist.broadcast(home.tensor, group_src=home.rank, group=group)
