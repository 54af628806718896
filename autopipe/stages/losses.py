"""Finds the loss in what a model gives.

What a loss averages over is left to ``runtime``.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, fx

from ..tracing.graphs.emit import output_leaves

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
    input, which then holds the labels: ``return logits, loss``; or where it compares all other outputs with
    some input: ``return rebuilt, loss``. A term that is only to be added to a loss does neither.
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
    """The outputs, by place, that are made of an input of which no other is, or of one and all others."""
    if graph not in _LABELLED:
        made = {i: node for i, node in enumerate(output_leaves(graph)) if isinstance(node, fx.Node)}
        behind = {i: _behind(node) for i, node in made.items()}
        times = collections.Counter(n for nodes in behind.values() for n in nodes if n.op == "placeholder")
        found = {i for i, nodes in behind.items() if any(times[n] == 1 for n in nodes)}
        for i, node in made.items():
            others = {other for other in made.values() if other is not node}
            beside = _behind(node, others)
            if others and others <= beside and any(n.op == "placeholder" for n in beside - others):
                found.add(i)
        _LABELLED[graph] = frozenset(found)
    return _LABELLED[graph]


def _behind(node: fx.Node, ends: Collection[fx.Node] = ()) -> set[fx.Node]:
    """What a node of a graph is made of, itself among it, up to the ``ends``."""
    seen, todo = {node}, [node]
    while todo:
        new = [n for n in todo.pop().all_input_nodes if n not in seen]
        seen.update(new)
        todo += [n for n in new if n not in ends]
    return seen
