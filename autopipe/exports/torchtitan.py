"""A split for torchtitan's trainer: what its models' ``pipelining_fn`` is called for.

The stages are left to ``torch_stages``; torchtitan itself is not needed. Source: torchtitan/trainer.py and
torchtitan/distributed/pipeline_parallel.py, release 0.3.0.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import InputError
from ..stages import Stage
from ..tracing.members import submodule
from .torch_stages import to_torch_stages

__all__ = ["torchtitan_pipelining"]

_logger = logging.getLogger(__name__)

PLACED_AS = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "loopedbfs": "looped-bfs",
    "interleavedzerobubble": "interleaved",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipev",
}
"""Of torch's schedules, in small letters, the one here that lies on the ranks alike."""

Hooked = tuple[Any, list[nn.Module], bool, bool]
"""The schedule, this rank's parts, and whether the first and the last are here."""


def torchtitan_pipelining(
    split: Callable[..., Any], *, example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
) -> Callable[..., Hooked]:
    """A ``pipelining_fn`` for a torchtitan ``ModelSpec``: ``torchtitan_pipelining(autopipe.split)``.

    ``split`` is called as :func:`autopipe.split` with the model, which is on the meta device, the number of
    stages, an example batch, ``n_microbatches`` and ``schedule``, as the job's configuration says; options of
    one's own go in by ``functools.partial(autopipe.split, device="H200")``. ``example`` is the arguments and
    keywords of a whole batch; by default ``local_batch_size`` rows of ``seq_len`` tokens, and ``positions``
    where the model takes them, as torchtitan's own loaders give.

    The parts that the hook returns are the stages, with parameters under the model's names, so that
    torchtitan makes them with ``to_empty`` and ``init_weights``, optimizes and saves them as its own. The
    schedule is torch's of the configured name. Nothing is done by ``parallelize_fn``: the hook raises
    :class:`InputError` for ranks beyond the pipeline's, for a loss that wants the model's head, and for a
    schedule file.
    """

    def pipelined(
        model: nn.Module,
        *,
        parallel_dims: Any,
        training: Any,
        parallelism: Any,
        device: torch.device,
        loss_fn: Any,
        compile_config: Any = None,
        ac_config: Any = None,
        **unused: Any,
    ) -> Hooked:
        from torch.distributed.pipelining import schedules

        name = _checked(parallel_dims, parallelism, loss_fn)
        if getattr(compile_config, "enable", False) or ac_config is not None:
            _logger.warning(
                "torchtitan's compile and activation checkpointing are not applied to stages of a split; "
                "split(..., recompute='auto') runs blocks again where memory asks for it"
            )
        made = schedules.get_schedule_class(name)
        is_alone = issubclass(made, schedules.PipelineScheduleSingle)
        n = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size
        args, kwargs = _example(model, training) if example is None else example
        pipe = split(
            model,
            parallel_dims.pp * (1 if is_alone else 2),
            args,
            kwargs,
            n_microbatches=n,
            schedule=PLACED_AS[name.lower()],
        )
        group = parallel_dims.get_mesh("pp").get_group()
        stages = to_torch_stages(
            pipe.graph, pipe.plan, pipe.stages, n_microbatches=n, device=device, group=group
        )
        run: Any = stages[0] if is_alone else stages
        schedule = made(run, n, loss_fn=_scalar(loss_fn), scale_grads=False)
        own = {stage.stage_index for stage in stages}
        parts = [_part(pipe.graph, stage) for stage in pipe.stages if stage.index in own]
        return schedule, parts, any(s.is_first for s in stages), any(s.is_last for s in stages)

    return pipelined


def _checked(parallel_dims: Any, parallelism: Any, loss_fn: Any) -> str:
    """The schedule's name; raises :class:`InputError` for what the parts would not do."""
    name: str = parallelism.pipeline_parallel_schedule
    if parallel_dims.world_size != parallel_dims.pp:
        raise InputError(
            f"the job has {parallel_dims.world_size} ranks and its pipeline {parallel_dims.pp}: parts of a "
            "split are not sharded, replicated or cut in other ways by torchtitan; set other degrees to 1, "
            "or train with pipe.runtime(mesh=...) and rt.wrap"
        )
    if getattr(parallelism, "pipeline_parallel_schedule_csv", ""):
        raise InputError("a schedule file is not taken here; give pipeline_parallel_schedule one of torch's")
    if name.lower() not in PLACED_AS:
        raise InputError(f"the schedule {name} is not known; give one of {', '.join(PLACED_AS)}")
    if hasattr(loss_fn, "set_lm_head"):
        raise InputError(
            f"{type(loss_fn).__name__} runs the model's head itself; configure the loss it wraps, such as "
            "CrossEntropyLoss.Config(...)"
        )
    return name


def _example(model: nn.Module, training: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as torchtitan's loaders give it, of shapes alone."""
    shape = (training.local_batch_size, training.seq_len)
    here = next(model.parameters()).device
    tokens = torch.zeros(shape, dtype=torch.int64, device=here)
    takes = "positions" in inspect.signature(model.forward).parameters
    return (tokens,), {"positions": torch.zeros_like(tokens)} if takes else {}


def _scalar(loss_fn: Any) -> Callable[..., torch.Tensor]:
    """The loss alone: torchtitan's give metrics beside it."""

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = loss_fn(*args, **kwargs)
        return made[0] if isinstance(made, tuple) else made  # type: ignore[no-any-return]

    return loss


def _part(capture: Any, stage: Stage) -> nn.Module:
    """The stage, with the ``init_weights`` that torchtitan calls once its tensors have memory."""

    def init_weights(**options: Any) -> None:
        model: Any = capture.model
        for name, tensor in stage.named_parameters(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            submodule(model, owner)._parameters[leaf] = tensor
        model.init_weights(**options)  # of other stages' parameters it has shapes alone
        for name, _ in list(stage.named_buffers(remove_duplicate=False)):
            owner, _, leaf = name.rpartition(".")
            made = name != "_anchor" and submodule(model, owner)._buffers[leaf]
            if isinstance(made, torch.Tensor):
                submodule(stage, owner)._buffers[leaf] = made.to(stage._device)
        capture.assumptions.accept()

    stage.init_weights = init_weights  # type: ignore[assignment]
    return stage
