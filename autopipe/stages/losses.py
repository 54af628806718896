"""Finds the loss in what a model gives.

What a loss averages over is left to ``runtime``.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

if TYPE_CHECKING:
    from ..tracing import Capture

__all__ = ["find_loss", "own_loss"]


def find_loss(output: Any) -> Tensor | None:
    """The loss inside a model's output: its ``loss``, a scalar, or the scalar that comes first; else None."""
    if isinstance(output, Tensor):
        return output if _is_scalar(output) else None
    if isinstance(output, Mapping):
        return find_loss(output.get("loss"))
    if hasattr(output, "loss"):
        return find_loss(output.loss)
    if isinstance(output, (tuple, list)) and output:
        return find_loss(output[0])
    return None


def own_loss(capture: Capture, leaves: Sequence[Any]) -> Tensor | None:
    """The loss among a captured model's flat outputs in its present mode; None where there is none.

    Beside what :func:`find_loss` finds it is the lone scalar of the outputs, where it alone is made of some
    input, which then holds the labels: ``return logits, loss``. A term that is only to be added to a loss is
    made of what the other outputs are.
    """
    output = capture.assemble(leaves)
    found = find_loss(output)
    if found is not None or not isinstance(output, (tuple, list)):
        return found
    scalars = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and _is_scalar(leaf)]
    if len(scalars) != 1 or scalars[0] not in _labelled(capture.graphs[capture.model.training]):
        return None
    return next((leaf for leaf in output if leaf is leaves[scalars[0]]), None)


def _is_scalar(value: Tensor) -> bool:
    return value.ndim == 0 and value.is_floating_point()


_LABELLED: weakref.WeakKeyDictionary[fx.Graph, frozenset[int]] = weakref.WeakKeyDictionary()


def _labelled(graph: fx.Graph) -> frozenset[int]:
    """The outputs, by place, that are made of an input of which no other is."""
    if graph not in _LABELLED:
        results: Any = next(n for n in reversed(graph.nodes) if n.op == "output").args[0]
        behind = [_inputs_behind(node) if isinstance(node, fx.Node) else set() for node in results]
        times = collections.Counter(x for inputs in behind for x in inputs)
        _LABELLED[graph] = frozenset(i for i, own in enumerate(behind) if any(times[x] == 1 for x in own))
    return _LABELLED[graph]


def _inputs_behind(node: fx.Node) -> set[fx.Node]:
    """The inputs of a graph that a node is made of."""
    seen, todo = {node}, [node]
    while todo:
        new = [n for n in todo.pop().all_input_nodes if n not in seen]
        seen.update(new)
        todo += new
    return {n for n in seen if n.op == "placeholder"}
