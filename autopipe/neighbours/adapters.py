"""peft's adapters of a split model: saved alone, from the ranks that train them.

Splitting and training a wrapped model is as for any other; files are peft's own.
"""

from __future__ import annotations

import pathlib
from typing import Any

from torch import nn

from ..errors import InputError
from ..runtime import Runtime
from .collectives import gather_trained, meet

__all__ = ["has_adapters", "has_prompts", "save_adapters"]

PROMPTS = frozenset(("PROMPT_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING"))
"""Of peft's types, those that put learned positions before each row, with labels that do not count."""


def has_adapters(model: nn.Module) -> bool:
    """Whether peft wrapped it."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def has_prompts(model: nn.Module) -> bool:
    """Whether peft puts learned positions before each row, which logits and labels then have too."""
    config: Any = getattr(model, "active_peft_config", None) if has_adapters(model) else None
    return str(getattr(getattr(config, "peft_type", None), "value", "")) in PROMPTS


def save_adapters(runtime: Runtime, path: str | pathlib.Path) -> None:
    """Write what ``PeftModel.from_pretrained(base, path)`` reads; every rank calls it, rank 0 writes.

    Only what is trained comes to rank 0, not the base model. Raises :class:`InputError` for a model that peft
    did not wrap.
    """
    engine = runtime.engine
    model: Any = engine.capture.model
    if not has_adapters(model):
        raise InputError(
            f"{type(model).__name__} has no adapters of peft; rt.save(folder) saves a whole model"
        )
    if engine.peers is None:
        model.save_pretrained(path)
        return
    trained = gather_trained(engine)
    if engine.rank == 0:
        model.save_pretrained(path, state_dict=trained)
    meet(engine, "saving adapters")
