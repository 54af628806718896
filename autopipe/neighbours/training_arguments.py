"""Which of transformers' ``TrainingArguments`` a pipeline supports, and what to do instead of the others.

What the supported ones do is left to ``trainer``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import transformers

from ..errors import InputError

__all__ = ["CHECKPOINTING", "check"]

NOT_TAKEN: Mapping[str, str] = {
    "fp16": "train with bf16=True, or in fp32",
    "fsdp": "the pipeline has its own placement; leave it out",
    "deepspeed": "the pipeline has its own placement; leave it out",
    "neftune_noise_alpha": "add the noise in the model before split()",
    "use_liger_kernel": "apply the kernels to the model before split()",
    "torch_compile": "compile stages with trainer.runtime.wrap(torch.compile)",
    "auto_find_batch_size": "plan with memory_limit=... instead",
    "push_to_hub": "push the folder that save_model() writes",
    "fp16_full_eval": "evaluate as you train",
    "bf16_full_eval": "evaluate as you train",
    "save_on_each_node": "give a folder that every rank reaches",
}
"""Arguments that change the model or its placement behind the pipeline's back, and what to do instead."""
CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""One argument, under its names in releases of transformers."""


def check(args: transformers.TrainingArguments, options: Mapping[str, Any], model: Any, loss_fn: Any) -> None:
    """Raise :class:`InputError` for all that is not taken of a Trainer's arguments and options."""
    faults = [f"{name}: {instead}" for name, instead in NOT_TAKEN.items() if getattr(args, name, None)]
    faults += [f"{name}: {instead}" for name, instead in _unmet(args, model, loss_fn)]
    if options.get("compute_loss_func") is not None:
        faults.append("compute_loss_func: give loss_fn(output, target)")
    if options.get("model_init") is not None:
        faults.append("model_init: split the model and pass the pipe")
    if faults:
        raise InputError(f"PipelineTrainer does not take {'; '.join(faults)}")


def _unmet(args: transformers.TrainingArguments, model: Any, loss_fn: Any) -> Iterator[tuple[str, str]]:
    """Arguments that are taken of a model that is as they say, where it is not."""
    asked = next((name for name in CHECKPOINTING if getattr(args, name, None)), "")
    state = next((f"is_{name}" for name in CHECKPOINTING if hasattr(type(model), f"is_{name}")), "")
    if asked and not getattr(model, state or "is_activation_checkpointing", False):
        yield asked, f"call model.{asked}_enable() before split(), or plan with recompute='auto'"
    if args.label_smoothing_factor and loss_fn is not None:
        yield "label_smoothing_factor", "smooth in the loss_fn that was given, or leave that out"
