"""Losses that average over labels: which calls are such, with which options, and how much labels weigh.

Whether a model's loss is one is left to ``mixing``, weighing microbatches by it to ``runtime``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..members import submodule
from .call import Call, Depends, behind

__all__ = [
    "DEFAULTS",
    "FUNCTIONS",
    "MODULES",
    "LabelsSeen",
    "can_be_counted",
    "counted_apart",
    "label_options",
    "several_counts",
    "share_of",
    "shares_are_unlike",
    "weight_of_labels",
]

MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)
FUNCTIONS = (nn.functional.cross_entropy, nn.functional.nll_loss)
_PLACES = {"target": 1, "weight": 2, "ignore_index": 4, "reduction": 6}
DEFAULTS = {"target": None, "weight": None, "ignore_index": -100, "reduction": "mean"}


def label_options(model: nn.Module, call: Any) -> dict[str, Any] | None:
    """What a call, of a recording or a graph, averages over labels with; None for one that does not.

    That is its ``target`` and ``weight``, the ``ignore_index`` and the ``reduction``.
    """
    if call.op == "call_module":
        module = submodule(model, str(call.target))
        if not isinstance(module, MODULES):
            return None
        own = {name: getattr(module, name) for name in _PLACES if name != "target"}
        return {"target": _argument(call, "target"), **own}
    if call.op == "call_function" and call.target in FUNCTIONS:
        return {name: _argument(call, name) for name in _PLACES}
    return None


def can_be_counted(model: nn.Module, options: Mapping[str, Any]) -> bool:
    """Whether a batch's labels tell what a loss averages over, wherever the model is.

    Not where the weights of the classes are of the model: the rank that has the labels may not have them, and
    a checkpoint may change them.
    """
    if options["reduction"] != "mean":
        return False
    weight = options["weight"]
    if not isinstance(weight, Call):
        return weight is None
    held = {name for found in (model.named_parameters, model.named_buffers) for name, _ in found()}
    made = behind(weight)
    return not any(c.op == "call_module" or (c.op == "get_attr" and c.target in held) for c in made)


def counted_apart(model: nn.Module, calls: Iterable[Call], shapes: Mapping[int, Any]) -> tuple[str, ...]:
    """Names of the means over labels of which a batch does not tell what share of them a microbatch has.

    Labels that a forward draws, as where it masks words by chance; and those of several kinds, words and
    rows, as in a masked-token and a next-sentence loss: of other ``shapes``, by call, that are made of other
    inputs.
    """
    kinds: dict[Any, set[Call]] = {}
    names, are_drawn = [], False
    for call in calls:
        options = label_options(model, call)
        target = options and options["target"]
        if options is None or options["reduction"] != "mean" or not isinstance(target, Call):
            continue
        names.append(call.name)
        are_drawn |= bool(target.depends & Depends.RANDOM)
        kinds.setdefault(shapes.get(id(target)), set()).update(
            c for c in behind(target) if c.op == "placeholder"
        )
    given = [inputs for inputs in kinds.values() if inputs]
    is_apart = any(a.isdisjoint(b) for a, b in itertools.combinations(given, 2))
    return tuple(names) if is_apart or are_drawn else ()


def several_counts(model: nn.Module, calls: Iterable[Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Names and options of a form's means over labels, where there are several that may count other labels.

    Of its calls, or of the nodes of its graph.
    """
    each = ((call.name, label_options(model, call)) for call in calls)
    means: list[tuple[str, Mapping[str, Any]]] = []
    means += ((name, options) for name, options in each if options and options["reduction"] == "mean")
    kinds = {(id(o["target"]), o["ignore_index"], id(o["weight"])) for _, o in means}
    return means if len(kinds) > 1 else []


def shares_are_unlike(counts: Sequence[Sequence[float | None]]) -> bool:
    """Whether rows have other shares of one mean than of another, by what each mean counts of each row.

    Not so where that is not known of all.
    """
    known = [[count for count in row if count is not None] for row in counts]
    if [*map(len, known)] != [*map(len, counts)]:
        return False
    totals = [sum(column) for column in zip(*known, strict=True)]
    shares = ([count / total for count, total in zip(row, totals, strict=True) if total] for row in known)
    return any(not math.isclose(share, row[0], rel_tol=1e-9) for row in shares for share in row)


def weight_of_labels(target: Any, ignore_index: int, weight: Tensor | None, **_: Any) -> float | Tensor:
    """What a mean over labels divides by; 0 where the target is not labels."""
    if not isinstance(target, Tensor) or target.is_floating_point():
        return 0.0
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    return (weight.detach().to(target.device)[torch.where(counts, target, 0)] * counts).sum()


class LabelsSeen:
    """What a form averages over labels with, seen while it runs; ``options`` are those of its means."""

    def __init__(self, options: Iterable[Mapping[str, Any]]) -> None:
        self._options = [o for o in options if o["reduction"] == "mean"]
        self._wanted = {id(v) for o in self._options for v in o.values() if isinstance(v, Call)}
        self._values: dict[int, Any] = {}

    def look(self, call: Call, value: Any) -> None:
        """Keep the value of a call that makes labels or options; shown each call with its value."""
        if id(call) in self._wanted:
            self._values[id(call)] = value

    def weights(self) -> list[float | None]:
        """What each mean divides by; None where that is not known, or nothing."""
        return [count or None for count in self.counts()]

    def counts(self) -> list[float | None]:
        """What each mean divides by; None where that is not known."""
        return [self._count(options) for options in self._options]

    def _count(self, options: Mapping[str, Any]) -> float | None:
        if any(isinstance(v, Call) and id(v) not in self._values for v in options.values()):
            return None
        known = {n: self._values[id(v)] if isinstance(v, Call) else v for n, v in options.items()}
        return float(weight_of_labels(**known))


def share_of(a: Sequence[float | None], b: Sequence[float | None]) -> float | None:
    """What row a weighs by its labels in a mean of a and b; None where losses do not all say the same."""
    if len(a) != len(b) or not all((*a, *b)):
        return None
    shares = {x / (x + y) for x, y in zip(a, b, strict=True) if x and y} or {0.5}
    return shares.pop() if len(shares) == 1 else None


def _argument(call: Any, name: str) -> Any:
    if name in call.kwargs:
        return call.kwargs[name]
    return call.args[_PLACES[name]] if _PLACES[name] < len(call.args) else DEFAULTS[name]
