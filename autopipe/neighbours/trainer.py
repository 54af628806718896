"""transformers' ``Trainer`` for a split model: its own loop on every rank, each batch through the pipeline.

Running batches and keeping weights are left to ``runtime``. All ranks together are one replica: each runs the
loop over the same batches, so that the number of ranks changes no result.
"""

from __future__ import annotations

import contextlib
import copy
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from accelerate.utils import DistributedType
from torch import Tensor, nn

from ..errors import InputError
from ..runtime import Runtime
from ..torch_private import pytree
from .acceleration import PipelineAccelerator
from .adapters import has_adapters, save_adapters
from .collectives import meet
from .generation_caches import cache_name
from .losses import first_compared, n_compared, smoothed, takes_count
from .training_arguments import CHECKPOINTING, check

__all__ = ["PipelineTrainer"]

KEPT = "pipeline"
"""The folder in a checkpoint that ``Runtime.save`` made, to resume from."""


class PipelineTrainer(transformers.Trainer):
    """``transformers.Trainer`` that trains a :class:`autopipe.Pipe` on one rank or many.

    ``model`` is the pipe that :func:`autopipe.split` made; ``loss_fn(output, target)`` is for models that
    give no loss, ``target`` then being the batch's labels. ``runtime_options`` are those of
    ``pipe.runtime``. All else is the Trainer's: arguments, data, collator, metrics, callbacks, schedules,
    ``optimizers``.

    Every rank makes it and calls its methods alike. Batch sizes are of the whole pipeline, as in one process.
    ``bf16`` runs stages under autocast. Pieces of an accumulated batch weigh as in the plain Trainer: by the
    labels that count where the model's loss is divided by their number, else alike; with a ``loss_fn`` they
    are one batch. ``activation_checkpointing`` is taken of a model that has it on when split. Only rank 0
    logs and writes, and checkpoints are :meth:`Runtime.save`'s: any number of ranks resumes them,
    ``from_pretrained`` reads them; of models with adapters, ``save_model`` writes these alone.
    Raises :class:`InputError` for arguments it does not take, saying what to do instead.

    Attributes
    ----------
    runtime: this rank's part of the pipeline.
    """

    def __init__(
        self,
        model: Any,
        args: transformers.TrainingArguments | None = None,
        *positional: Any,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        runtime_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        if not (hasattr(model, "plan") and hasattr(model, "runtime")):
            raise InputError(
                f"model is a {type(model).__name__}; PipelineTrainer trains what autopipe.split(model, ...) "
                "made"
            )
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args
        check(args, options, model.model, loss_fn)
        if type(self).compute_loss is not PipelineTrainer.compute_loss:
            raise InputError(
                f"{type(self).__name__}.compute_loss would not be called: the loss is computed by the rank "
                "that has the outputs; give loss_fn(output, target) instead"
            )
        mesh = (runtime_options or {}).get("mesh")
        if mesh is not None and mesh.size() != model.plan.n_ranks:
            raise InputError(
                f"the mesh has {mesh.size()} ranks and the pipe {model.plan.n_ranks}: PipelineTrainer gives "
                "all ranks the same batches, so replicas would train alike; plan for all ranks, or write "
                "the loop"
            )
        self.pipe, self._given_args = model, args
        own = copy.copy(args)
        own.distributed_state = _OneReplica(args.distributed_state)
        own._n_gpu = min(args.n_gpu, 1)
        for name in CHECKPOINTING:
            if getattr(args, name, None):
                setattr(own, name, False)  # it is on
        self._smoothed = smoothed(model.model, args)
        self._takes_target = loss_fn is not None or self._smoothed is not None
        self._first = first_compared(model.model) if loss_fn is None else None
        is_counted = args.gradient_accumulation_steps > 1 or self._first is not None
        asks = is_counted and not self._takes_target
        self._takes_count = not asks or takes_count(model.model, model.graph.example)
        options_of_runtime: dict[str, Any] = {"autocast": torch.bfloat16} if args.bf16 else {}
        if self._smoothed is not None:
            loss_fn, options_of_runtime["loss_weight"] = self._smoothed, self._smoothed.weight
        self.runtime: Runtime = model.runtime(loss_fn, **{**options_of_runtime, **(runtime_options or {})})
        self._group: list[dict[str, Any]] = []
        config = getattr(model.model, "config", None)
        uses_cache = getattr(config, "use_cache", None)
        super().__init__(model.model, own, *positional, **options)
        if uses_cache is not None and config is not None:
            config.use_cache = uses_cache  # as captured
        self._check_optimizer()

    # -- one replica --------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.__class__ = PipelineAccelerator
        self.gather_function = self.accelerator.gather_for_metrics

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        # workers draw alike on every rank
        state = self.args.distributed_state
        state.process_index, rank = 0, state.process_index
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            state.process_index = rank

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The runtime has put this rank's part there."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return self.pipe

    # -- training -----------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Of this rank's own parameters, in the Trainer's groups."""
        if self.optimizer is None:
            whole: Any = self.model
            decayed = set(self.get_decay_parameter_names(whole))
            kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(
                self.args, whole
            )
            is_plain = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
            if {"params", "model", "optimizer_dict"} & set(options) or not is_plain:
                raise InputError(
                    f"optim={self.args.optim} takes the whole model, of which this rank has a part; pass an "
                    "optimizer over trainer.runtime.parameters() as optimizers=, or choose another"
                )
            trained = [(n, p) for n, p in self.runtime.named_parameters() if p.requires_grad]
            groups = [
                {"params": [p for n, p in trained if (n in decayed) == decays], "weight_decay": decay}
                for decays, decay in ((True, self.args.weight_decay), (False, 0.0))
            ]
            self.optimizer = kind(groups, **options)
            if "bitsandbytes" in str(kind) and options.get("optim_bits") == 8:
                _keep_embeddings_whole(whole)
        return self.optimizer

    def _check_optimizer(self) -> None:
        own = {id(p) for p in self.runtime.parameters()}
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        if any(id(p) not in own for group in groups for p in group["params"]):
            raise InputError(
                "optimizers= holds parameters that this rank does not train; leave it out, or make an "
                "optimizer in a subclass's create_optimizer(), over self.runtime.parameters()"
            )

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Keeps a piece of an accumulated batch; the last one brings the gradients, and the loss, of all."""
        self.pipe.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        self._group.append(self._routed(self._prepare_inputs(inputs)))
        if len(self._group) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        group, self._group = self._group, []
        share = self._share_of_pieces(len(group), num_items_in_batch)
        counted = self._counted_share(group, num_items_in_batch)
        # pieces that end a stream of data are followed by those of another epoch before the optimizer steps
        syncs = contextlib.nullcontext() if self.accelerator.sync_gradients else self.runtime.no_sync()
        with syncs, self.runtime.scaled(counted):
            made = self._add_up(group, share) if share else counted * self.runtime.accumulate(group).loss
        return made.to(self.args.device)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """The pieces of a batch, which begins anew."""
        self._group = []
        return super().get_batch_samples(*args, **kwargs)

    def _share_of_pieces(self, n: int, n_items: Any) -> float:
        """What the Trainer multiplies the loss of each of ``n`` pieces by; 0 where they are one batch."""
        counts_items = n_items is not None and self.model_accepts_loss_kwargs
        if n == 1 or (counts_items and self._takes_count) or (self._takes_target and self._smoothed is None):
            return 0.0
        return 1.0 if counts_items else 1.0 / n

    def _counted_share(self, pieces: Sequence[Mapping[str, Any]], n_items: Any) -> float:
        """The labels that a loss compares by ``n_items``, which the Trainer counts and divides its loss by.

        It may take the first label of each row for one that counts where none is compared, or leave it out
        where one is.
        """
        divides = n_items is not None and self.model_accepts_loss_kwargs and self._takes_count
        first = self._first if divides else None
        if first is None or any("shift_labels" in piece for piece in pieces):
            return 1.0
        name = "target" if self._takes_target else "labels"
        return sum(n_compared(piece[name], first) for piece in pieces) / max(int(n_items), 1)

    def _add_up(self, group: list[dict[str, Any]], share: float) -> Tensor:
        """Gradients of the sum of the losses of pieces, each times ``share``; returns that sum."""
        parts: list[Tensor] = []
        for i, piece in enumerate(group):
            syncs = contextlib.nullcontext() if i + 1 == len(group) else self.runtime.no_sync()
            with syncs, self.runtime.scaled(share):
                loss = self.runtime.step(**piece).loss
            parts.append(share * loss.double())
        return torch.stack(parts).sum().to(loss.dtype)

    def _routed(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """As the runtime takes them: labels are the target where there is a loss_fn.

        They also go where they went when the model was captured.
        """
        given = dict(inputs)
        if self._takes_target and self.label_names:
            labels = [given[name] for name in self.label_names if name in given]
            captured = self.pipe.graph.example[1]
            given = {k: v for k, v in given.items() if k not in self.label_names or k in captured}
            if labels:
                given["target"] = labels[0] if len(labels) == 1 else tuple(labels)
        return given

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.runtime.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.runtime.clip_grad_norm_(float("inf")) if grad_norm is None else grad_norm

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError(
            "PipelineTrainer does not compute the loss in one place; give it loss_fn(output, target) instead "
            "of calling or overriding compute_loss"
        )

    # -- evaluation ---------------------------------------------------------------------------------

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """The Trainer's, by way of the pipeline; outputs are on every rank, so that all decide alike."""
        inputs = self._prepare_inputs(inputs)
        has_labels = bool(self.label_names) and all(inputs.get(n) is not None for n in self.label_names)
        labels: Any = tuple(inputs[n] for n in self.label_names) if has_labels else None
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", [cache_name()])
        loss = None
        given = self._routed(inputs) if has_labels else dict(inputs)
        if has_labels:
            done = self.runtime.evaluate(**given, return_outputs=False if prediction_loss_only else "all")
            n_items = self._get_num_items_in_batch([inputs], self.args.device)
            loss, outputs = self._counted_share([given], n_items) * done.loss, done.outputs
        else:
            outputs = self.runtime.forward(**given)
        if prediction_loss_only:
            return loss, None, None
        logits = _logits(
            outputs,
            (*ignore_keys, "loss"),
            has_loss=any(given.get(name) is not None for name in self.label_names),
        )
        if self.args.bf16:
            logits = pytree.tree_map(_to_fp32, logits)
        return loss, logits, labels[0] if labels is not None and len(labels) == 1 else labels

    # -- keeping ------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Every rank calls it. What ``from_pretrained`` reads; of a model with adapters, these alone.

        The Trainer's own calls, for checkpoints, also keep what resuming needs.
        """
        path = pathlib.Path(str(output_dir or self.args.output_dir))
        only_adapters = has_adapters(self.pipe.model)
        if _internal_call or not only_adapters:
            is_resumed = _internal_call and not self.args.save_only_model
            self.runtime.save(path / KEPT, **(self._training_state() if is_resumed else {}))
        if only_adapters:
            save_adapters(self.runtime, path)
        if self.args.should_save:
            if not only_adapters:
                _link_weights(path / KEPT, path)
            if not _internal_call and (path / KEPT).exists():
                shutil.rmtree(path / KEPT)
            self._save_beside(path)
        meet(self.runtime.engine, "saving a model")

    def _training_state(self) -> dict[str, Any]:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return {"optimizer": optimizer, "scheduler": self.lr_scheduler}

    def _save_beside(self, path: pathlib.Path) -> None:
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(path)
        torch.save(self._given_args, path / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """With the model: see :meth:`save_model`."""

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all ranks draw alike
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        path = pathlib.Path(resume_from_checkpoint)
        self.runtime.load(path / KEPT if (path / KEPT).exists() else path)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        assert best is not None
        self._load_from_checkpoint(best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not (pathlib.Path(checkpoint) / KEPT).exists():
            raise InputError(
                f"{checkpoint} is a checkpoint of a plain Trainer, whose optimizer state is by position; "
                "begin a new run from its weights (from_pretrained), or resume what a PipelineTrainer saved"
            )
        self.runtime.load(pathlib.Path(checkpoint) / KEPT, **self._training_state())


def _link_weights(source: pathlib.Path, path: pathlib.Path) -> None:
    """Have a save's weights and their configuration in ``path`` too, in the place of earlier ones."""
    files = [f for f in source.iterdir() if f.name.startswith("model") or f.name.endswith("config.json")]
    for old in (*path.glob("model*.safetensors"), path / "model.safetensors.index.json"):
        old.unlink(missing_ok=True)
    for file in files:
        there = path / file.name
        there.unlink(missing_ok=True)
        try:
            there.hardlink_to(file)
        except OSError:  # a file system without
            shutil.copy2(file, there)


class _OneReplica:
    """What a job's state is to the Trainer: one replica of the model, this being one of its processes."""

    num_processes = 1
    distributed_type = DistributedType.NO

    def __init__(self, state: Any) -> None:
        self._state = state
        self.process_index = 0 if state is None else state.process_index
        self.local_process_index = 0 if state is None else state.local_process_index

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_state"], name)


def _keep_embeddings_whole(model: nn.Module) -> None:
    """Have the states of embeddings in 32 bits under an 8-bit optimizer, as the Trainer has them."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def _logits(outputs: Any, ignored: tuple[str, ...], *, has_loss: bool) -> Any:
    """What the Trainer hands to metrics of a model's outputs."""
    if isinstance(outputs, Mapping):
        logits: Any = tuple(v for k, v in outputs.items() if k not in ignored)
    elif isinstance(outputs, (tuple, list)):
        logits = tuple(outputs[1:] if has_loss else outputs)
    else:
        return outputs
    return logits[0] if len(logits) == 1 else logits


def _to_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value
