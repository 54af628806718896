"""How much each microbatch's loss weighs, so that the weighted sum is the loss of the full batch.

Splitting the batch is left to ``microbatch``.

A mean over rows weighs by rows. A mean over tokens (``cross_entropy`` with ignored labels, as language
models compute it inside) weighs by the tokens that count: their number is read off the captured graph, by
running the few ops between the labels and the ``cross_entropy`` call, shift included. What no weighting can
mend (batch norm, auxiliary losses of a mixture of experts) equals microbatches run one after another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from ..errors import InputError
from .microbatch import Batch

if TYPE_CHECKING:
    from ..tracing import Capture

__all__ = ["LossWeight", "Weigher"]

_logger = logging.getLogger(__name__)

LossWeight = Callable[[tuple[Any, ...], dict[str, Any], Any], float]
"""``loss_weight(args, kwargs, target)`` of one microbatch; only ratios matter."""


class Weigher:
    """Weighs microbatches by what the loss averages over.

    ``reduction`` is ``"mean"`` or ``"sum"``; ``given`` overrules it; ``is_internal`` says that the model
    computes the loss.
    """

    def __init__(
        self,
        capture: Capture,
        reduction: Literal["mean", "sum"],
        given: LossWeight | None,
        is_internal: bool,
    ) -> None:
        if reduction not in ("mean", "sum"):
            raise InputError(f"loss_reduction is {reduction!r}; it is 'mean' or 'sum'")
        self._reduction, self._given = reduction, given
        self._labels = _LabelGraph.find(capture) if is_internal and given is None else None

    def weigh(self, batch: Batch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[float]:
        """The weight of each microbatch; for means they sum to 1.

        Raises :class:`InputError` when a given weight is negative, or all are zero.
        """
        if self._given is not None:
            return _normalised(self._ask(batch, args, kwargs))
        if self._reduction == "sum":
            return [1.0] * batch.n_microbatches
        if self._labels is not None:
            if self._labels.is_sum:
                return [1.0] * batch.n_microbatches
            counts = [self._labels.count(batch, m) for m in range(batch.n_microbatches)]
            if sum(counts):
                return _normalised(counts)
        return _normalised(batch.rows)

    def _ask(self, batch: Batch, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[float]:
        assert self._given is not None
        leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        weights = []
        for m in range(batch.n_microbatches):
            pieces = {id(batch.whole[name]): batch.leaves[name][m] for name in batch.batched}
            part = pytree.tree_unflatten([pieces.get(id(leaf), leaf) for leaf in leaves], spec)
            own_args, own_kwargs = part
            weights.append(float(self._given(own_args, own_kwargs, batch.targets[m])))
        return weights


def _normalised(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise InputError(f"microbatch weights are {list(weights)}; they must be ≥ 0 and not all zero")
    return [w / total for w in weights]


class _LabelGraph:
    """The part of a captured graph from the inputs to the labels its ``cross_entropy`` averages over."""

    def __init__(
        self,
        nodes: list[fx.Node],
        labels: fx.Node,
        ignore_index: int,
        is_sum: bool,
        constants: dict[str, Any],
    ) -> None:
        self._nodes, self._target, self._ignore = nodes, labels, ignore_index
        self.is_sum, self._constants = is_sum, constants

    @classmethod
    def find(cls, capture: Capture) -> _LabelGraph | None:
        """None when the loss is not a ``cross_entropy``; one that cannot be weighed exactly is warned of."""
        graph = capture.graphs[True]
        calls = [n for n in graph.nodes if n.op == "call_function" and n.target in _MEANS_OVER_LABELS]
        calls = [n for n in calls if _reaches_output(n)]
        if not calls:
            return None
        call, fixed = calls[-1], {**capture.constants, "_device": capture.device}
        labels = _argument(call, 1, "target", None)
        why = _why_not(calls, fixed)
        if why or not isinstance(labels, fx.Node):
            _logger.warning(
                "the model's loss cannot be weighed exactly by its labels, since %s: microbatches weigh by "
                "rows, which differs from the full batch where their counted labels do; pass loss_weight to "
                "say otherwise",
                why or "they are constant",
            )
            return None
        needed = _ancestors(labels)
        nodes = [n for n in graph.nodes if n in needed]
        ignored = int(_argument(call, 4, "ignore_index", -100))
        return cls(nodes, labels, ignored, _argument(call, 6, "reduction", "mean") == "sum", fixed)

    def count(self, batch: Batch, m: int) -> int:
        """How many labels of microbatch ``m`` count."""
        values: dict[fx.Node, Any] = {}
        for node in self._nodes:
            if node.op == "placeholder":
                values[node] = batch.leaves[node.name][m]
                continue
            if node.op == "get_attr":
                values[node] = self._constants[str(node.target)]
                continue
            args = fx.map_arg(node.args, values.__getitem__)
            kwargs = fx.map_arg(node.kwargs, values.__getitem__)
            if node.op == "call_function":
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
            else:
                values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        labels: Tensor = values[self._target]
        if labels.is_floating_point():
            return labels.shape[0] if labels.ndim else 1
        return int((labels != self._ignore).sum())


def _can_run(node: fx.Node, fixed: Mapping[str, Any]) -> bool:
    if node.op == "get_attr":
        return str(node.target) in fixed
    return node.op in ("placeholder", "call_function", "call_method")


def _why_not(calls: Sequence[fx.Node], fixed: Mapping[str, Any]) -> str:
    """Why no single count of labels weighs the loss; empty where one does."""
    targets = {_argument(call, 1, "target", None) for call in calls}
    if len(targets) > 1:
        return "it averages several times over different labels"
    labels = targets.pop()
    if isinstance(labels, fx.Node) and not all(_can_run(n, fixed) for n in _ancestors(labels)):
        return "they are made inside the model"
    return "" if _argument(calls[-1], 2, "weight", None) is None else "its classes are weighted"


_MEANS_OVER_LABELS = (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss)


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if position < len(node.args) else default


def _ancestors(node: fx.Node) -> set[fx.Node]:
    found, todo = {node}, [node]
    while todo:
        for parent in todo.pop().all_input_nodes:
            if parent not in found:
                found.add(parent)
                todo.append(parent)
    return found


def _reaches_output(node: fx.Node) -> bool:
    output = next(iter(reversed(node.graph.nodes)))
    return node in _ancestors(output)
