"""Losses that average over labels: which calls are such, with which options, and how much labels weigh.

Whether a model's loss is one is left to ``rows``, weighing microbatches by it to ``runtime``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..calls.call import Call, Recording

__all__ = ["DEFAULTS", "FUNCTIONS", "MODULES", "LabelsSeen", "label_options", "weight_of_labels"]

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


class LabelsSeen:
    """The labels that a form averages over, seen while it runs."""

    def __init__(self, model: nn.Module, form: Recording) -> None:
        found = filter(None, (label_options(model, call) for call in form.calls))
        self._options = [o for o in found if o["reduction"] == "mean"]
        self._wanted = {id(o["target"]) for o in self._options}
        self._values: dict[int, Any] = {}

    def look(self, call: Call, value: Any) -> None:
        """Keep the value of a call that makes labels; shown each call with its value."""
        if id(call) in self._wanted:
            self._values[id(call)] = value

    def weights(self) -> list[float | None]:
        """What each mean divides by; None where that is not known, or nothing."""
        return [self._weight(**options) for options in self._options]

    def _weight(self, target: Any, weight: Any, **options: Any) -> float | None:
        if isinstance(weight, Call):
            return None
        return float(weight_of_labels(self._values.get(id(target)), weight=weight, **options)) or None


def _argument(call: Any, name: str) -> Any:
    if name in call.kwargs:
        return call.kwargs[name]
    return call.args[_PLACES[name]] if _PLACES[name] < len(call.args) else DEFAULTS[name]
