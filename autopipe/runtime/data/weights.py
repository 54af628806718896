"""How much each microbatch's loss weighs, so that the weighted sum is the loss of the full batch.

Splitting the batch is left to ``microbatch``.

A mean over rows weighs by rows. A mean over tokens (``cross_entropy`` with ignored labels, as language
models compute it inside) weighs by the tokens that count: their number is read off the captured graph, by
running the few ops between the labels and the ``cross_entropy`` call, shift included. Several such means
(start and end positions, a masked-token and a next-sentence loss) are weighed together where their counts
are in proportion; where they are not, and for other means over labels, a warning says so. What no weighting
can mend (batch norm, auxiliary losses of a mixture of experts) equals microbatches run one after another.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, fx, nn

from ...accelerator import is_async, upload
from ...arguments import number
from ...errors import InputError
from ...graph import Dim
from ...tracing.inputs.structure import flatten, unflatten
from ...tracing.sizes.labels import DEFAULTS, FUNCTIONS, MODULES, label_options, weight_of_labels
from ...units import Size, size_at
from ..options import LossWeight
from .microbatch import Batch

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["Weigher", "Weights"]

_logger = logging.getLogger(__name__)

HEAVIEST = 1e100
"""Of given weights: sums of any number of these stay finite."""
Weights = tuple[Sequence[float | Tensor], float | None]
"""What each microbatch weighs, maybe on the device; and what all of them counted together."""


class Weigher:
    """Weighs microbatches by what the loss averages over.

    ``reduction`` is ``"mean"`` or ``"sum"``, or None for what ``loss_fn`` says of itself, else the mean;
    ``given`` overrules it. Without a ``loss_fn`` the model computes the loss, of which the capture tells
    whether it is a sum. Where that ``is_whole``,
    made of all microbatches together, labels need not be counted.
    """

    def __init__(
        self,
        capture: Capture,
        reduction: Literal["mean", "sum"] | None,
        given: LossWeight | None,
        loss_fn: Callable[..., Any] | None,
        *,
        is_whole: bool = False,
    ) -> None:
        if reduction not in ("mean", "sum", None):
            raise InputError(f"loss_reduction is {reduction!r}; it is 'mean' or 'sum'")
        said = _said_by(loss_fn)
        if loss_fn is None and capture.variation.mixing.sums:
            said = {"reduction": "sum"}
        self.is_sum = (reduction or said.get("reduction")) == "sum"
        self._given = given
        self._labels = None if self.is_sum or "ignore_index" not in said else said
        is_counted = given is None and not self.is_sum and not is_whole
        self._counted = _find(capture) if is_counted and loss_fn is None else ()
        self._beside = _find(capture, warns=False) if is_counted and loss_fn is not None and not said else ()
        self._has_warned = False

    def weigh(
        self,
        batch: Batch,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        bound: Mapping[str, Any],
        *,
        is_read: bool = True,
    ) -> Weights:
        """The weight of each microbatch, and what all of them counted; for means they sum to 1.

        What was counted says how much the batch weighs beside those of data-parallel replicas: None for a
        sum, 0 where no label counts. ``bound`` are the arguments' own tensors by input: those in ``batch``
        may be elsewhere. Where they need not be ``is_read``, weights of labels that are on an accelerator
        stay there: the host would wait for them; what was counted is not told then.
        Raises :class:`InputError` when a given weight is negative, or all are zero.
        """
        if self._given is not None:
            return _normalised(self._ask(batch, args, kwargs, bound))
        if self.is_sum:
            return [1.0] * batch.n_microbatches, None
        by_rows = _normalised(batch.rows)
        sums: list[Weights] = [([1.0] * batch.n_microbatches, None) for loss in self._counted if loss.is_sum]
        raw = [loss.counts(batch) for loss in self._counted if not loss.is_sum]
        if self._labels is not None and all(map(_are_labels, batch.targets)):
            raw = [[weight_of_labels(target, **self._labels) for target in batch.targets]]
        if len(raw) == 1 and not sums and not is_read and all(map(_is_away, raw[0])):
            return _shares_there(torch.stack(raw[0]), by_rows[0]), None  # type: ignore[arg-type]
        counts = [_read(found) for found in raw]
        found = sums + [_normalised(count) for count in counts if sum(count)]
        if not found:
            return by_rows[0], 0.0 if counts else by_rows[1]
        if all(_are_close(found[0][0], other) for other, _ in found[1:]):
            return found[0]
        if not self._has_warned:
            _logger.warning(_WARNING, "it averages several times, over labels that are counted differently")
            self._has_warned = True
        return by_rows

    def measure(
        self, batch: Batch, args: Sequence[Any], kwargs: Mapping[str, Any], bound: Mapping[str, Any]
    ) -> float | None:
        """What a batch's loss is averaged over: rows, counted labels or given weights; None for a sum."""
        if self._given is not None:
            return sum(self._ask(batch, args, kwargs, bound))
        if self.is_sum:
            return None
        if self._labels is not None and all(map(_are_labels, batch.targets)):
            return sum(_read([weight_of_labels(target, **self._labels) for target in batch.targets]))
        if self._counted:
            return None if self._counted[0].is_sum else sum(_read(self._counted[0].counts(batch)))
        return float(sum(batch.rows))

    def beside(self, batch: Batch) -> Sequence[float | Tensor] | None:
        """What microbatches weigh in the mean over labels that the model has beside a ``loss_fn``.

        None where it has none, or some microbatch's labels are not on this rank.
        """
        mean = next((loss for loss in self._beside if not loss.is_sum), None)
        if mean is None or not all(n.name in batch.leaves for n in mean.nodes if n.op == "placeholder"):
            return None
        counts = _read(mean.counts(batch))
        return _normalised(counts)[0] if sum(counts) else None

    def _ask(
        self, batch: Batch, args: Sequence[Any], kwargs: Mapping[str, Any], bound: Mapping[str, Any]
    ) -> list[float]:
        assert self._given is not None
        leaves, spec = flatten((tuple(args), dict(kwargs)))
        weights = []
        for m in range(batch.n_microbatches):
            pieces = {id(bound[name]): batch.leaves[name][m] for name in (*batch.axes, *batch.packed)}
            part = unflatten(spec, [pieces.get(id(leaf), leaf) for leaf in leaves])
            own_args, own_kwargs = part
            given = self._given(own_args, own_kwargs, batch.targets[m])
            weights.append(number("what loss_weight gave for a microbatch", given, most=HEAVIEST))
        return weights


def _are_labels(target: Any) -> bool:
    return isinstance(target, Tensor) and not target.is_floating_point()


def _normalised(weights: Sequence[float]) -> Weights:
    """Shares of a whole, and the whole."""
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise InputError(f"microbatch weights are {list(weights)}; they must be ≥ 0 and not all zero")
    return [w / total for w in weights], total


_WARNING = (
    "the model's loss cannot be weighed exactly by its labels, since %s: microbatches weigh by rows, which "
    "differs from the full batch where their counted labels do; pass loss_weight to say otherwise"
)


def _are_close(a: Sequence[float | Tensor], b: Sequence[float | Tensor]) -> bool:
    return all(math.isclose(x, y, rel_tol=1e-12) for x, y in zip(a, b, strict=True))


@dataclasses.dataclass(frozen=True)
class _LabelLoss:
    """One ``cross_entropy`` call of a captured graph: what it averages over labels with, and how it is made.

    ``nodes`` lead from the inputs to what of its ``options`` the graph makes; ``fixed`` are values
    of attributes they read, ``sizes`` formulas of those that are sizes of what the model computes.
    """

    options: Mapping[str, Any]
    nodes: Sequence[fx.Node]
    fixed: Mapping[str, Any]
    sizes: Mapping[fx.Node, Size]
    dims: Sequence[Dim]

    @property
    def is_sum(self) -> bool:
        return bool(self.options["reduction"] == "sum")

    def counts(self, batch: Batch) -> list[float | Tensor]:
        """What the labels of each microbatch weigh: how many count, or the weights of their classes."""
        return [self._count(batch, m) for m in range(batch.n_microbatches)]

    def _count(self, batch: Batch, m: int) -> float | Tensor:
        values: dict[fx.Node, Any] = {}
        here = next(v.device for v in batch.whole.values() if isinstance(v, Tensor))
        asked = {str(symbol) for size in self.sizes.values() for symbol in getattr(size, "free_symbols", ())}
        dims = {d.name: _length(d, batch, m) for d in self.dims if d.name in asked}
        for node in self.nodes:
            if node in self.sizes:
                values[node] = int(size_at(self.sizes[node], dims))
                continue
            if node.op == "placeholder":
                values[node] = batch.leaves[node.name][m]
                continue
            if node.op == "get_attr":
                values[node] = _at(self.fixed[str(node.target)], here)
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


def _find(capture: Capture, *, warns: bool = True) -> tuple[_LabelLoss, ...]:
    """The calls a model's loss is made of; none where one cannot be weighed.

    Where it ``warns`` a warning says so, but where the capture has found that rows weigh evenly.
    """
    graph = capture.graphs[True]
    is_meta = capture.device.type == "meta"  # labels never are
    fixed = {**capture.constants, "_device": torch.device("cpu") if is_meta else capture.device}
    found, output = [], next(iter(reversed(graph.nodes)))
    results = output.all_input_nodes
    sizes = {n: size for n in graph.nodes if (size := _size_of_computed(capture, n)) is not None}
    for node in _ancestors(output):
        options = label_options(capture.model, node)
        if options is None:
            continue
        behind = {n: _ancestors(v, sizes) for n, v in options.items() if isinstance(v, fx.Node)}
        told = {n: all(x in sizes or _can_run(x, fixed) for x in nodes) for n, nodes in behind.items()}
        why = ""
        if "target" not in behind:
            why = "they are constant"
        elif isinstance(options["weight"], Tensor) or not told.get("weight", True):
            why = "the weights of its classes are the model's, which another rank may have"
        elif not all(told.values()):
            why = "they are made inside the model"
        if options["reduction"] != "mean" and capture.variation.mixing.is_asked:
            return ()
        if options["reduction"] != "mean" and not (options["reduction"] == "sum" and node in results):
            why = "the model's own code reduces it"
        if why:
            if warns:
                _logger.warning(_WARNING, why)
            return ()
        needed = {node for nodes in behind.values() for node in nodes}
        read = {n: sizes[n] for n in needed & sizes.keys()}
        nodes = [n for n in graph.nodes if n in needed]
        found.append(_LabelLoss(options, nodes, fixed, read, capture.ops.dims))
    return tuple(found)


def _size_of_computed(capture: Capture, node: fx.Node) -> Size | None:
    """The formula of a size that is read off what the model computes; None for other nodes."""
    if node.name not in capture.variation.behind_labels:
        return None
    source, axis = node.args
    return capture.ops.by_name[source.name].outputs[0].shape[axis]  # type: ignore[union-attr, index]


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


def _said_by(loss_fn: Callable[..., Any] | None) -> dict[str, Any]:
    """What a torch loss says of itself: ``reduction``, and over labels ``ignore_index`` and ``weight``."""
    if isinstance(loss_fn, nn.Module):
        names = ("reduction", *(("ignore_index", "weight") if isinstance(loss_fn, MODULES) else ()))
        return {name: getattr(loss_fn, name) for name in names if hasattr(loss_fn, name)}
    said = dict(loss_fn.keywords) if isinstance(loss_fn, functools.partial) else {}
    if (loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn) not in FUNCTIONS:
        return {name: said[name] for name in ("reduction",) if name in said}
    return {name: said.get(name, DEFAULTS[name]) for name in ("reduction", "ignore_index", "weight")}


def _read(counts: Sequence[float | Tensor]) -> list[float]:
    """Counts as plain numbers, all at once: on an accelerator each reading waits."""
    tensors = [count for count in counts if isinstance(count, Tensor)]
    found = iter(torch.stack(tensors).tolist() if tensors else ())
    return [next(found) if isinstance(count, Tensor) else count for count in counts]


def _is_away(count: float | Tensor) -> bool:
    return isinstance(count, Tensor) and is_async(count.device)


def _shares_there(counts: Tensor, by_rows: Sequence[float | Tensor]) -> Sequence[Tensor]:
    """Shares of a whole on the device; by rows where that is nothing."""
    counts = counts.double()
    rows = upload(torch.tensor(by_rows, dtype=torch.float64, device="cpu"), counts.device)
    total = counts.sum()
    return torch.where(total > 0, counts / total, rows).unbind()


def _at(value: Any, device: torch.device) -> Any:
    """What the graph holds for the model's device, for one that is elsewhere."""
    if isinstance(value, torch.device):
        return device
    return value.to(device) if isinstance(value, Tensor) and not value.is_meta else value


def _ancestors(node: fx.Node, known: Collection[fx.Node] = ()) -> dict[fx.Node, None]:
    """A node and all behind it, but for what only ``known`` ones are made of."""
    found, todo = {node: None}, [node]
    while todo:
        last = todo.pop()
        for parent in () if last in known else last.all_input_nodes:
            if parent not in found:
                found[parent] = None
                todo.append(parent)
    return found
