"""Losses that average over labels: which calls are such, with which options, and how much labels weigh.

Whether a model's loss is one is left to ``rows``, weighing microbatches by it to ``runtime``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["DEFAULTS", "FUNCTIONS", "MODULES", "label_options", "weight_of_labels"]

MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
FUNCTIONS = (nn.functional.cross_entropy, nn.functional.nll_loss)
_PLACES = {"target": 1, "weight": 2, "ignore_index": 4, "reduction": 6}
DEFAULTS = {"target": None, "weight": None, "ignore_index": -100, "reduction": "mean"}


def label_options(model: nn.Module, call: Any) -> dict[str, Any] | None:
    """What a call, of a recording or a graph, averages over labels with; None for one that does not.

    That is its ``target`` and ``weight``, the ``ignore_index`` and the ``reduction``.
    """
    if call.op == "call_module":
        module = model.get_submodule(str(call.target))
        if not isinstance(module, MODULES):
            return None
        own = {name: getattr(module, name) for name in _PLACES if name != "target"}
        return {"target": _argument(call, "target"), **own}
    if call.op == "call_function" and call.target in FUNCTIONS:
        return {name: _argument(call, name) for name in _PLACES}
    return None


def weight_of_labels(target: Any, ignore_index: int, weight: Tensor | None, **_: Any) -> float | Tensor:
    """What a mean over labels divides by; 0 where the target is not labels."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        return 0.0
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return (weight.detach().to(target.device)[torch.where(counts, target, 0)] * counts).sum()


def _argument(call: Any, name: str) -> Any:
    if name in call.kwargs:
        return call.kwargs[name]
    return call.args[_PLACES[name]] if _PLACES[name] < len(call.args) else DEFAULTS[name]
