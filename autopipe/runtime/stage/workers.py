"""The workers of one process: one for each of its stages, and what wrapping the stages does to them.

What a worker does is left to ``worker``, ``last`` and ``tail``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ... import accelerator
from ...arguments import brief
from ...errors import InputError
from ...memory import whole_at_once
from ...plans import Plan
from ...schedule import Schedule
from ...stages import Section, Stage
from ...tracing.code.own_code import OwnCode
from ..options import Autocast
from ..reduce.precision import autocast_context
from ..reduce.sums import local
from ..wire.boundary import Edge
from .last import LastWorker
from .loss import Loss
from .setup import written_buffers
from .tail import TailWorker
from .worker import Manner, Worker

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = [
    "check_replicas",
    "gathered",
    "make_workers",
    "notice_whole_backwards",
    "sharded_stages",
    "wrap_all",
]

_logger = logging.getLogger(__name__)


def make_workers(
    capture: Capture,
    plan: Plan,
    stages: Sequence[Stage],
    sections: Sequence[Section],
    edges: Sequence[Edge],
    loss: Loss,
    autocast: Autocast,
    device: torch.device,
) -> dict[int, Worker]:
    """By the index of their section, workers for what is run of the ``stages`` of this process."""
    own, workers = {stage.index: stage for stage in stages}, dict[int, Worker]()
    # on the host all is in its memory already
    offloads = accelerator.is_async(device) and plan.settings.get("offload") in ("activations", "all")
    code = OwnCode(capture.model)
    for section in sections:
        is_tail = section.name == "tail"
        stage = own.get(section.index - is_tail)
        if stage is None:
            continue
        planned, by_name = plan.stages[stage.index], capture.ops.by_name
        ops = [by_name[name] for name in planned.ops if name in by_name]
        # parameters that a forward moves would be moved again, and what it counts counted
        moves = capture.leaves_more({op.name for op in ops}) or any(
            not capture.ops.parameter[n].is_buffer for op in ops for n in op.mutated_buffers
        )
        manner = Manner(
            loss=loss,
            forward_context=autocast_context(autocast, device),
            recompute=planned.recompute and not (is_tail or moves),
            mutated=() if is_tail else written_buffers(stage, ops),
            is_random=any(op.is_random for op in ops),
            derives=any(
                op.name in capture.deriving or (op.kind == "module" and code.may_hook(op.target))
                for op in ops
            ),
            transforms=any(
                op.target.startswith("torch.func.") or (op.kind == "module" and code.may_transform(op.target))
                for op in ops
            ),
            offloads=offloads,
        )
        if is_tail:
            workers[section.index] = tail = TailWorker(stage, section, edges, manner)
            tail.join_by(capture.kinds)
        elif section.is_last:
            workers[section.index] = LastWorker(stage, section, edges, manner, loss)
        else:
            workers[section.index] = Worker(stage, section, edges, manner)
    for worker in workers.values():
        worker.receivers = workers
    return workers


def wrap_all(
    workers: Mapping[int, Worker], wrapper: Callable[[Stage], nn.Module | None], rank: int
) -> dict[int, nn.Parameter]:
    """Put every stage's workers behind what ``wrapper`` makes of it: by id of the old, each new parameter.

    Raises :class:`InputError` where stages of this rank share a parameter and no longer do.
    """
    replaced: dict[int, nn.Parameter] = {}
    for worker in workers.values():
        if isinstance(worker, TailWorker):
            ahead = workers[worker.stage.index]
            worker.wrap(ahead.module)
            worker.replicas = ahead.replicas
            continue
        before = dict(worker.stage.named_parameters(remove_duplicate=False))
        made = _made(wrapper, worker.stage)
        if not isinstance(made, (nn.Module, type(None))):
            raise InputError(
                f"the wrapper made {brief(made)} of stage {worker.stage.index}; it must give a module that "
                "calls the stage, or None where it changed the stage in place"
            )
        worker.wrap(worker.stage if made is None else made)
        after = dict(worker.stage.named_parameters(remove_duplicate=False))
        for name, old in before.items():
            new = after.get(name, old)
            if replaced.setdefault(id(old), new) is not new:
                raise InputError(
                    f"{name} is shared by several stages of rank {rank}, and the wrapper gave stage "
                    f"{worker.stage.index} a copy of its own; plan with ties='colocate', or with one "
                    "stage per rank"
                )
    return replaced


_OF_REPLICAS = (
    "for replicas of a stage make a mesh with a 'pp' dim, pipe.runtime(mesh=mesh), and wrap with "
    "process_group=mesh.get_group('dp'); without replicas leave DistributedDataParallel out"
)


def _made(wrapper: Callable[[Stage], nn.Module | None], stage: Stage) -> nn.Module | None:
    """What a wrapper makes of a stage; its errors say which, and are :class:`InputError` if none trains."""
    try:
        return wrapper(stage)
    except Exception as error:
        if any(p.requires_grad for p in stage.parameters()):
            error.add_note(f"so the wrapper failed on stage {stage.index}; {_OF_REPLICAS}")
            raise
        raise InputError(
            f"the wrapper failed on stage {stage.index}, in which nothing trains ({type(error).__name__}: "
            f"{error}); let it give None for such stages: lambda s: DistributedDataParallel(s, ...) if "
            "any(p.requires_grad for p in s.parameters()) else None"
        ) from error


def check_replicas(workers: Mapping[int, Worker], ranks: Sequence[int]) -> None:
    """Raise :class:`InputError` where a stage is averaged with other stages of its own pipeline."""
    for worker in workers.values():
        ddp = worker.replicas.ddp
        group = [] if ddp is None else dist.get_process_group_ranks(ddp.process_group)
        if len(set(group) & set(ranks)) > 1:
            raise InputError(
                f"stage {worker.stage.index} is wrapped in DistributedDataParallel over ranks {group}, but "
                f"the pipeline's, {list(ranks)}, hold other stages and not replicas of it: {_OF_REPLICAS}"
            )


def sharded_stages(workers: Mapping[int, Worker]) -> frozenset[int]:
    """The stages that replicas hold in shards: their gradients leave in the backward that has them all."""
    return frozenset(w.stage.index for w in workers.values() if w.replicas.is_sharded)


def notice_whole_backwards(workers: Mapping[int, Worker], schedule: Schedule) -> None:
    """Say so where a schedule splits the backward of stages whose cannot be."""
    split = {a.stage for row in schedule.actions for a in row if a.kind == "I"}
    whole = sorted(split & sharded_stages(workers))
    if whole:
        _logger.warning(
            "schedule %r splits the backward of stages %s, which fully_shard keeps whole: it runs where "
            "their I stands, and nothing is left for W to fill waits with, so steps take longer than was "
            "predicted; use DistributedDataParallel, whose backward is split, or a schedule of whole "
            "backwards, such as '1f1b' or 'interleaved'",
            schedule.name,
            ", ".join(map(str, whole)),
        )


def gathered(
    workers: Mapping[int, Worker], plan: Plan, schedule: Schedule, rank: int | None
) -> tuple[tuple[int, ...], int | None]:
    """The stages of a rank (None: of all) that replicas hold in shards, as far as they are gathered whole.

    And how many may be whole at a time, None for all. None of them is gathered so where memory has no room
    for the largest: then each module that was sharded gathers its own weights whenever it runs.
    """
    own = {w.stage.index: w for w in workers.values() if w.replicas.is_sharded}
    whole_bytes, kept_bytes = [], 0.0
    for worker in own.values():
        parameters = list(worker.stage.parameters())
        trained = [p for p in parameters if p.requires_grad]
        whole_bytes.append(sum(p.numel() * p.itemsize for p in parameters))
        kept_bytes += sum(local(p).nbytes for p in parameters) + sum(p.numel() * p.itemsize for p in trained)
        kept_bytes += plan.optimizer_ratio * sum(local(p).nbytes for p in trained)
    most = None
    if own and rank is not None:
        most = whole_at_once(plan, schedule, rank, whole_bytes, round(kept_bytes))
    if most == 0:
        return (), None
    for worker in own.values():
        worker.replicas.hold()
    return tuple(own), most
