"""Accelerate for a pipeline: one replica over all ranks, nothing wrapped, gathered or sharded.

The loop is the user's own, around a ``module.PipelineModule``.
"""

from __future__ import annotations

import pathlib
from typing import Any

import accelerate
import torch
from accelerate.scheduler import AcceleratedScheduler
from torch import nn

from ..errors import InputError
from .module import PipelineModule

__all__ = ["PipelineAccelerator"]


class PipelineAccelerator(accelerate.Accelerator):
    """An ``Accelerator`` whose ``prepare`` takes a :class:`PipelineModule` as it is.

    Every rank reads every batch from its data loader; optimizers, schedulers, ``accumulate``, ``backward``,
    trackers and ``is_main_process`` are Accelerate's own. ``clip_grad_norm_`` clips over all ranks;
    ``save_state`` and ``load_state`` keep the whole model, optimizers, schedulers and what was registered for
    checkpointing, for any number of ranks.
    ``bf16`` runs stages under autocast; ``fp16`` is refused.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.mixed_precision not in ("no", "bf16"):
            raise InputError(
                f"PipelineAccelerator does not take mixed_precision={self.mixed_precision!r}; take 'bf16'"
            )
        if self.dataloader_config.dispatch_batches:
            raise InputError(
                "PipelineAccelerator does not take dispatch_batches=True, which deals out what one rank "
                "reads; leave it out, since every rank needs all of it"
            )

    @property
    def num_processes(self) -> int:
        """Replicas of the model: one."""
        return 1

    @property
    def process_index(self) -> int:
        """Of the replica."""
        return 0

    @property
    def dispatch_batches(self) -> bool:
        """Never: each rank reads, an ``IterableDataset`` too."""
        return False

    def gather(self, tensor: Any) -> Any:
        """Every rank has all."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Every rank has all; a last batch that is not full gives what it holds."""
        return super().gather_for_metrics(input_data, use_gather_object=False)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Every rank has all."""
        return tensor

    def pad_across_processes(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Every rank has all."""
        return tensor

    def prepare_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Raises :class:`InputError` for what is no :class:`PipelineModule`."""
        if not isinstance(model, PipelineModule):
            raise InputError(
                f"PipelineAccelerator prepares a PipelineModule, not a {type(model).__name__}; give it "
                "PipelineModule(pipe.runtime())"
            )
        if self.mixed_precision == "bf16" and model.runtime.engine.options.autocast is None:
            raise InputError(
                "mixed_precision is 'bf16', and the runtime has no autocast; make it with "
                "pipe.runtime(autocast=torch.bfloat16)"
            )
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Steps once for each of the optimizer's."""
        made = AcceleratedScheduler(
            scheduler,
            self._optimizers,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=True,
        )
        self._schedulers.append(made)
        return made

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> torch.Tensor:
        """Over all ranks, whatever parameters are given."""
        return self._module.runtime.clip_grad_norm_(max_norm, norm_type)

    def save_state(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> str:
        """As :meth:`autopipe.runtime.Runtime.save`: optimizers, schedulers and what was registered too."""
        self._module.runtime.save(self._folder(output_dir), **self._states())
        return str(output_dir)

    def load_state(self, input_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """What :meth:`save_state` kept."""
        self._module.runtime.load(self._folder(input_dir), **self._states())

    @property
    def _module(self) -> PipelineModule:
        if len(self._models) != 1:
            raise InputError(
                f"{len(self._models)} PipelineModules were prepared; use module.runtime of each for what is "
                "of one"
            )
        module: PipelineModule = self._models[0]
        return module

    def _folder(self, given: str | None) -> pathlib.Path:
        if given is None:
            raise InputError("say where: save_state(folder), load_state(folder)")
        return pathlib.Path(given) / "pipeline"

    def _states(self) -> dict[str, Any]:
        optimizers = {_numbered("optimizer", i): o.optimizer for i, o in enumerate(self._optimizers)}
        schedulers = {_numbered("scheduler", i): s.scheduler for i, s in enumerate(self._schedulers)}
        registered = {_numbered("registered", i): o for i, o in enumerate(self._custom_objects)}
        return {**optimizers, **schedulers, **registered}


def _numbered(name: str, i: int) -> str:
    return f"{name}{i}" if i else name
