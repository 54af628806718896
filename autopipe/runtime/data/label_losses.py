"""What losses that a model computes itself average over labels, read off the graph of each of its forms.

Weighing microbatches by it is left to ``weights``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ...errors import InputError
from ...graph import Dim
from ...tracing.calls.labels import label_options, weight_of_labels
from ...units import Size, size_at
from .microbatch import Batch

if TYPE_CHECKING:
    from ...tracing import Capture
    from ...tracing.forms import Form
    from ...tracing.sizes.variation import Variation

__all__ = ["LabelLoss", "Losses", "find_losses"]


@dataclasses.dataclass(frozen=True)
class LabelLoss:
    """One ``cross_entropy`` call of a form's graph: what it averages over labels with, and how it is made.

    ``nodes`` lead from the inputs to what of its ``options`` the graph makes, and write into what they are
    given where that ``is_written``; ``fixed`` are values of attributes they read, ``sizes`` formulas of those
    that are sizes of what the model computes, in the dims of the form's ``variation``.
    """

    options: Mapping[str, Any]
    nodes: Sequence[fx.Node]
    fixed: Mapping[str, Any]
    sizes: Mapping[fx.Node, Size]
    variation: Variation
    is_written: bool

    @property
    def is_sum(self) -> bool:
        return bool(self.options["reduction"] == "sum")

    @property
    def takes(self) -> set[str]:
        """Names of the inputs that the labels are made of."""
        return {node.name for node in self.nodes if node.op == "placeholder"}

    def count(self, batch: Batch, m: int) -> float | Tensor:
        """What the labels of a microbatch weigh: how many count, or the weights of their classes."""
        values: dict[fx.Node, Any] = {}
        here = next(v.device for v in batch.whole.values() if isinstance(v, Tensor))
        asked = {str(symbol) for size in self.sizes.values() for symbol in getattr(size, "free_symbols", ())}
        dims = {d.name: _length(d, batch, m) for d in self.variation.dims if d.name in asked}
        for node in self.nodes:
            if node in self.sizes:
                values[node] = int(size_at(self.sizes[node], dims))
                continue
            if node.op == "placeholder":
                values[node] = self._own(batch.leaves[node.name][m])
                continue
            if node.op == "get_attr":
                values[node] = self._own(_at(self.fixed[str(node.target)], here))
                continue
            args = fx.map_arg(node.args, values.__getitem__)
            kwargs = fx.map_arg(node.kwargs, values.__getitem__)
            if node.op == "call_function":
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            else:
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        known = {n: values[v] if isinstance(v, fx.Node) else v for n, v in self.options.items()}
        labels: Tensor = known["target"]
        if labels.is_floating_point():
            return labels.shape[0] if labels.ndim else 1
        return weight_of_labels(**known)

    def _own(self, value: Any) -> Any:
        """What nodes are given, as a copy where they write into it."""
        return value.clone() if self.is_written and isinstance(value, Tensor) else value


Losses = tuple[LabelLoss, ...] | None
"""The calls that a form's loss is made of; none where it has none, None where one cannot be weighed."""


def find_losses(capture: Capture, form: Form) -> tuple[Losses, str]:
    """The calls a form's loss is made of; None where one cannot be weighed, and why.

    That is empty where the capture has found that rows weigh evenly.
    """
    graph = form.graph
    is_meta = capture.device.type == "meta"  # labels never are
    fixed = {**capture.constants, "_device": torch.device("cpu") if is_meta else capture.device}
    found, output = [], next(iter(reversed(graph.nodes)))
    results = output.all_input_nodes
    formulas = form.variation.behind_labels
    sizes = {n: formulas[n.name] for n in graph.nodes if n.name in formulas}
    drawing = {op.name for op in capture.ops.compute if op.is_random}
    for node in _ancestors(output):
        options = label_options(capture.model, node)
        if options is None:
            continue
        nodes_ahead = itertools.takewhile(functools.partial(operator.is_not, node), graph.nodes)
        ahead = {n.name: n for n in nodes_ahead}
        behind = {n: _ancestors(v, sizes, ahead) for n, v in options.items() if isinstance(v, fx.Node)}
        told = {n: all(x in sizes or _can_run(x, fixed) for x in nodes) for n, nodes in behind.items()}
        why = ""
        if "target" not in behind:
            why = "they are constant"
        elif isinstance(options["weight"], Tensor) or not told.get("weight", True):
            why = "the weights of its classes are the model's, which another rank may have"
        elif not all(told.values()):
            why = "they are made inside the model"
        elif any(x.name in drawing for nodes in behind.values() for x in nodes):
            why = "they are drawn inside the model"
        if options["reduction"] != "mean" and capture.variation.mixing.is_asked:
            return None, ""
        if options["reduction"] != "mean" and not (options["reduction"] == "sum" and node in results):
            why = "the model's own code reduces it"
        if why:
            return None, why
        needed = {node for nodes in behind.values() for node in nodes}
        read = {n: sizes[n] for n in needed & sizes.keys()}
        nodes = [n for n in graph.nodes if n in needed]
        is_written = any(n.meta.get("writers") for n in nodes)
        found.append(LabelLoss(options, nodes, fixed, read, form.variation, is_written))
    return tuple(found), ""


def _length(dim: Dim, batch: Batch, m: int) -> int:
    """How large a size of the inputs is in a microbatch."""
    found = {int(batch.leaves[name][m].shape[axis]) for name, axis in dim.where}
    if len(found) > 1:
        names = ", ".join(dict.fromkeys(name for name, _ in dim.where))
        raise InputError(
            f"{names} were of one size at capture and are of {sorted(found)} now, so that it cannot be told "
            "which labels the model's loss counts; pass loss_weight, or make them of one size"
        )
    return found.pop()


def _can_run(node: fx.Node, fixed: Mapping[str, Any]) -> bool:
    if node.op == "get_attr":
        return str(node.target) in fixed
    return node.op in ("placeholder", "call_function", "call_method")


def _at(value: Any, device: torch.device) -> Any:
    """What the graph holds for the model's device, for one that is elsewhere."""
    if isinstance(value, torch.device):
        return device
    return value.to(device) if isinstance(value, Tensor) and not value.is_meta else value


def _ancestors(
    node: fx.Node, known: Collection[fx.Node] = (), ahead: Mapping[str, fx.Node] = MappingProxyType({})
) -> dict[fx.Node, None]:
    """A node and all behind it, but for what only ``known`` ones are made of.

    Of those ``ahead``, by name, what writes into the memory of any is among them.
    """
    found, todo = {node: None}, [node]
    while todo:
        last = todo.pop()
        writers = (ahead[name] for name in last.meta.get("writers", ()) if name in ahead)
        for parent in () if last in known else (*last.all_input_nodes, *writers):
            if parent not in found:
                found[parent] = None
                todo.append(parent)
    return found
