"""Lightning for a pipeline: strategies of Fabric and of the Trainer that make one replica of all ranks.

The loop is the library's, around a ``module.PipelineModule``. Where both packages are there, the one imported
as ``lightning`` counts.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import torch
import torchmetrics
from lightning.fabric.strategies import DDPStrategy as _FabricDDP
from lightning.pytorch import callbacks
from lightning.pytorch.strategies import DDPStrategy as _TrainerDDP
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import InputError, StoreError
from ..runtime import Runtime
from ..runtime.files.torch_save import unpickled
from ..runtime.wire.plain_values import Unfit, dumps
from .collectives import meet
from .module import PipelineModule

__all__ = ["FabricPipelineStrategy", "PipelineStrategy"]

REST = "lightning.pt"
"""What of a checkpoint is neither weights nor optimizers."""
OF_RANKS = "of ranks"
"""What of a checkpoint each rank keeps for itself: names of objects in the runtime's save."""
_NAMES = ("StochasticWeightAveraging", "WeightAveraging")
AVERAGING = tuple(getattr(callbacks, name) for name in _NAMES if hasattr(callbacks, name))
"""Callbacks that copy the module when a run begins."""


class _OneReplica:
    """What both strategies share: every rank gets every batch, and nothing is reduced."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": 1, "rank": 0}

    def all_reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Every rank has it."""
        return tensor

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Every rank has it."""
        return tensor


class FabricPipelineStrategy(_OneReplica, _FabricDDP):
    """``Fabric(strategy=FabricPipelineStrategy(), devices=2)``, for a :class:`PipelineModule`.

    ``fabric.launch()``, then split the model, make the module and ``fabric.setup(module, optimizer)``.
    ``fabric.clip_gradients(max_norm=…)`` clips over all ranks. ``fabric.save`` and ``load`` make and read a
    folder: the state of the module, of optimizers, and of what else has some, which may be each rank's own,
    as :meth:`autopipe.runtime.Runtime.save` keeps it, the rest beside it. A torchmetrics metric of the loop's
    own sees every batch on every rank: give it ``distributed_available_fn=lambda: False``. Precision:
    ``"32-true"``, ``"bf16-mixed"``, ``"64-true"`` of a model in fp64.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._backward_sync_control = None

    def setup_module(self, module: nn.Module) -> nn.Module:
        """As it is."""
        return _checked(module)

    def module_to_device(self, module: nn.Module) -> None:
        """The runtime has put it there."""

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: Any,
        norm_type: Any = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Over all ranks."""
        return _runtime_of(module).clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """A folder; see the class."""
        if storage_options or filter:
            raise InputError("a pipeline's checkpoint takes no storage_options and no filter; leave them out")
        runtime, optimizers, rest = _sorted(state)
        own = {name: thing for name, thing in rest.items() if _takes_state(thing)}
        rest = self._convert_stateful_objects_in_state(rest, filter={})
        _save(runtime, pathlib.Path(path), optimizers, rest, own)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """What :meth:`save_checkpoint` made; what ``state`` does not name is returned."""
        if not isinstance(state, Mapping):
            state = {"module": state} if isinstance(state, nn.Module) else {}
        runtime, optimizers, rest = _sorted(state)
        found, own = _load(
            runtime,
            pathlib.Path(path),
            optimizers,
            {name: thing for name, thing in rest.items() if _takes_state(thing)},
        )
        for name in rest:
            if name in own:
                found.pop(name, None)
                continue
            if name not in found and strict:
                raise StoreError(
                    f"{path} has no {name!r}; it has {', '.join(sorted(found)) or 'weights only'}"
                )
            value = found.pop(name, None)
            if hasattr(rest[name], "load_state_dict"):
                rest[name].load_state_dict(value)
            else:
                state[name] = value
        return found


class PipelineStrategy(_OneReplica, _TrainerDDP):
    """``Trainer(strategy=PipelineStrategy(), devices=2)``, for a module whose step calls a PipelineModule.

    The LightningModule makes its :class:`PipelineModule` in ``configure_model`` (ranks are there by then) and
    keeps it as an attribute, the model itself nowhere else; ``configure_optimizers`` takes
    ``self.parameters()``. As with Lightning's own strategies for several processes, training data is shuffled
    unless the Trainer has ``use_distributed_sampler=False``. Clipping by norm is over all ranks. A checkpoint
    is a folder: weights, optimizers, and each rank's schedules and callbacks as
    :meth:`autopipe.runtime.Runtime.save` keeps them, and loops.
    """

    def setup_environment(self) -> None:
        """Raises :class:`InputError` for a callback that copies the module before it has weights."""
        assert self.lightning_module is not None
        for callback in self.lightning_module.trainer.callbacks:
            if isinstance(callback, AVERAGING):
                raise InputError(
                    f"{type(callback).__name__} averages a copy of the module that it takes before the "
                    "pipeline is there, and would average nothing; keep one of this rank's own weights, "
                    "module.runtime.named_parameters(), in a callback of your own"
                )
        super().setup_environment()

    def configure_ddp(self) -> None:
        """Nothing is wrapped."""
        runtime = self._runtime

        def clip(optimizer: Optimizer, clip_val: Any) -> None:
            runtime.clip_grad_norm_(clip_val)

        self.precision_plugin.clip_grad_by_norm = clip

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing is wrapped."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing is wrapped."""

    def model_to_device(self) -> None:
        """The runtime has put the pipeline there; metrics go too, each rank's with every batch in it."""
        assert self.lightning_module is not None
        for metric in self.lightning_module.modules():
            if isinstance(metric, torchmetrics.Metric):
                metric.to(self.root_device)
                metric.distributed_available_fn = _alone

    @property
    def _runtime(self) -> Runtime:
        assert self.lightning_module is not None
        return _runtime_of(self.lightning_module)

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn == "fit":
            super().setup(trainer)
            return
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        self.setup_precision_plugin()

    # -- checkpoints --------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Kept by the runtime, in the same folder."""
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Kept by the runtime, in the same folder."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """A folder; see the class."""
        optimizers = self.optimizers if checkpoint.get("optimizer_states") else []
        own = self._own_states(checkpoint) if optimizers else {}
        _save(self._runtime, pathlib.Path(filepath), optimizers, checkpoint, own)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """What :meth:`save_checkpoint` made."""
        if self.lightning_module is None or self.lightning_module.trainer.state.fn != "fit":
            return _load(self._runtime, pathlib.Path(checkpoint_path), [], {})[0]
        callbacks = self.lightning_module.trainer.callbacks
        now = {
            "lr_schedulers": [config.scheduler.state_dict() for config in self.lr_scheduler_configs],
            "callbacks": {callback.state_key: callback.state_dict() for callback in callbacks},
        }
        given = self._own_states(now)
        found, own = _load(self._runtime, pathlib.Path(checkpoint_path), self.optimizers, given)
        for held in own.values():
            found[held.kind][held.at] = held.state
        return found

    def _own_states(self, checkpoint: Mapping[str, Any]) -> dict[str, _OwnState]:
        """What each rank has its own of: its groups' rates, and averages of its weights in callbacks."""
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        states = checkpoint.get("lr_schedulers") or []
        own = {
            f"lr_schedulers {i}": _OwnState("lr_schedulers", i, state, scheduler.optimizer)
            for i, (state, scheduler) in enumerate(zip(states, schedulers, strict=True))
        }
        for key, state in (checkpoint.get("callbacks") or {}).items():
            if state and _is_plain(state):
                own[f"callbacks {key}"] = _OwnState("callbacks", key, state)
        return own

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Loaded with the checkpoint."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Loaded with the checkpoint."""


class _OwnState:
    """A state on its way to who takes it later, and the optimizer whose groups it goes by."""

    def __init__(self, kind: str, at: Any, state: Any, optimizer: Optimizer | None = None) -> None:
        self.kind, self.at, self.state, self.optimizer = kind, at, state, optimizer

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _takes_state(thing: Any) -> bool:
    return callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None))


def _is_plain(state: Any) -> bool:
    """Whether a save of the runtime can hold it; a callback may keep anything."""
    try:
        dumps(state, lambda tensor, where: where)
    except Unfit:
        return False
    return True


def _alone() -> bool:
    """Whether a metric has parts elsewhere: it has not."""
    return False


def _checked(module: nn.Module) -> nn.Module:
    _runtime_of(module)
    return module


def _runtime_of(module: nn.Module) -> Runtime:
    """Of the one pipeline in a module."""
    found = [m for m in module.modules() if isinstance(m, PipelineModule)]
    if len(found) != 1:
        raise InputError(
            f"{type(module).__name__} has {len(found)} PipelineModules; give it one, "
            "PipelineModule(autopipe.split(model, n_stages, ...).runtime())"
        )
    others = {id(p) for p in module.parameters()} - {id(p) for p in found[0].parameters()}
    if others:
        raise InputError(
            f"{type(module).__name__} has parameters beside its pipeline's ({len(others)} of them), which "
            "each rank would train for itself; make them part of the model that is split, and keep no "
            "attribute that holds the model itself"
        )
    return found[0].runtime


def _sorted(state: Mapping[str, Any]) -> tuple[Runtime, list[Optimizer], dict[str, Any]]:
    """The pipeline, optimizers and everything else of a Fabric state."""
    modules = [v for v in state.values() if isinstance(v, nn.Module)]
    if len(modules) != 1:
        raise InputError(f"the state has {len(modules)} modules; a pipeline's checkpoint is of one")
    optimizers = [getattr(v, "optimizer", v) for v in state.values() if isinstance(v, Optimizer)]
    rest = {k: v for k, v in state.items() if not isinstance(v, (nn.Module, Optimizer))}
    return _runtime_of(modules[0]), optimizers, rest


def _named(optimizers: list[Any]) -> dict[str, Any]:
    return {f"optimizer{i or ''}": getattr(o, "_optimizer", o) for i, o in enumerate(optimizers)}


def _save(
    runtime: Runtime,
    path: pathlib.Path,
    optimizers: list[Any],
    rest: Mapping[str, Any],
    own: Mapping[str, Any],
) -> None:
    """``own`` are objects whose state each rank keeps; ``rest`` is the first rank's."""
    runtime.save(path / "model", **_named(optimizers), **{f"{OF_RANKS}: {name}": own[name] for name in own})
    if runtime.rank == 0:
        torch.save({**rest, OF_RANKS: sorted(own)}, path / REST)
    meet(runtime.engine, "saving a checkpoint")


def _load(
    runtime: Runtime, path: pathlib.Path, optimizers: list[Any], own: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first rank's, and those of ``own`` whose state the checkpoint had of each."""
    if not (path / REST).exists():
        raise StoreError(
            f"{path} is no checkpoint of a pipeline: it has no {REST}; give a folder that one saved"
        )
    found: dict[str, Any] = unpickled(path / REST)
    kept = {name: own[name] for name in found.pop(OF_RANKS, ()) if name in own}
    runtime.load(path / "model", **_named(optimizers), **{f"{OF_RANKS}: {name}": kept[name] for name in kept})
    return found, kept
