"""How much each microbatch's loss weighs, so that the weighted sum is the loss of the full batch.

Splitting the batch is left to ``microbatch``.

A mean over rows weighs by rows. A mean over tokens (``cross_entropy`` with ignored labels, as language
models compute it inside) weighs by the tokens that count: their number is read off the captured graph, by
running the few ops between the labels and the ``cross_entropy`` call, shift included. Several such means
(start and end positions, a masked-token and a next-sentence loss) are weighed together where their counts
are in proportion; where they are not in the example, they are made of the whole batch; where they are not in
a later batch alone, and for other means over labels, a warning says so. Microbatches that run other forms of
the model count as those do. What no weighting can mend (batch norm, auxiliary losses of a mixture of experts)
equals microbatches run one after another.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, fx, nn

from ...accelerator import is_async, upload
from ...arguments import number
from ...errors import InputError
from ...stages import own_loss
from ...tracing.calls.labels import DEFAULTS, FUNCTIONS, MODULES, weight_of_labels
from ...tracing.graphs.emit import output_leaves
from ...tracing.inputs.structure import flatten, unflatten
from ..options import LossWeight
from .label_losses import LabelLoss, Losses, find_losses
from .microbatch import Batch

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["Bound", "Measured", "Weigher", "Weights"]

_logger = logging.getLogger(__name__)

HEAVIEST = 1e100
"""Of given weights: sums of any number of these stay finite."""
Weights = tuple[Sequence[float | Tensor], float | None]
"""What each microbatch weighs, maybe on the device; and what all of them counted together."""

Measured = tuple[Literal["rows", "labels", "weights", "sums"], list[float]]
"""What batches' losses are averaged over, and how much of it each has: 1 where losses are sums."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """A batch, the arguments that it is of, and their own tensors by input."""

    batch: Batch
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    bound: Mapping[str, Any]


class Weigher:
    """Weighs microbatches by what the loss averages over.

    ``reduction`` is ``"mean"`` or ``"sum"``, or None for what ``loss_fn`` says of itself, else the mean;
    ``given`` overrules it. Without a ``loss_fn`` the model computes the loss, of which the capture tells
    whether it is a sum. Where that ``is_whole``, made of all microbatches together, labels tell what batches
    weigh and not what microbatches do: beside those of replicas where it ``is_replicated``. ``is_counted``
    says whether labels of the model's own loss are counted.
    """

    def __init__(
        self,
        capture: Capture,
        reduction: Literal["mean", "sum"] | None,
        given: LossWeight | None,
        loss_fn: Callable[..., Any] | None,
        *,
        is_whole: bool = False,
        is_replicated: bool = False,
    ) -> None:
        if reduction not in ("mean", "sum", None):
            raise InputError(f"loss_reduction is {reduction!r}; it is 'mean' or 'sum'")
        said = _said_by(loss_fn)
        if loss_fn is None and _is_summed(capture):
            said = {"reduction": "sum"}
        self.is_sum = (reduction or said.get("reduction")) == "sum"
        self._given = given
        self._labels = None if self.is_sum or "ignore_index" not in said else said
        is_counted = given is None and not self.is_sum
        self._capture, self._told = capture, set[str]()
        self._known: dict[fx.Graph, Losses] = {}
        self._by_entry: dict[bool, bool] = {}
        self._is_models_own = loss_fn is None
        self._is_whole, self._is_replicated = is_whole, is_replicated
        self.is_counted = is_counted and self._is_models_own
        self._has_beside = is_counted and not is_whole and not self._is_models_own and not said
        if self.is_counted and not is_whole:
            self._losses(capture.own[capture.model.training][0])

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
        if self.is_counted and self._is_whole:
            if not self._is_replicated:
                return by_rows
            unit, counted = self.measure([Bound(batch, args, kwargs, bound)])
            return by_rows[0], None if unit == "sums" else counted[0]
        n_sums, raw = self._counts([batch]) if self.is_counted else (0, [])
        sums: list[Weights] = [([1.0] * batch.n_microbatches, None)] * n_sums
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
        self.warn(f"{_COUNTED_DIFFERENTLY} ({_BY_EXAMPLE})")
        return by_rows

    def weigh_outputs(
        self,
        batch: Batch,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        bound: Mapping[str, Any],
        *,
        is_read: bool = True,
    ) -> Weights:
        """As :meth:`weigh`, for scalars among the outputs, where no ``loss_fn`` is asked.

        A model's own loss weighs as in a step. Beside a ``loss_fn`` scalars are means over the model's
        labels, else over rows.
        """
        if self._is_models_own:
            return self.weigh(batch, args, kwargs, bound, is_read=is_read)
        return self.beside(batch) or _normalised(batch.rows)[0], None

    def in_outputs(self, batch: Batch, weights: Sequence[float | Tensor]) -> Sequence[float | Tensor]:
        """What microbatches of these ``weights`` weigh in scalars among the outputs.

        The same, but rows where a ``loss_fn`` sums: that it does says nothing of what the model gives.
        """
        is_other = self.is_sum and not self._is_models_own and self._given is None
        return _normalised(batch.rows)[0] if is_other else weights

    def measure(self, calls: Sequence[Bound]) -> Measured:
        """What each batch's loss is averaged over: rows, counted labels or given weights."""
        batches = [call.batch for call in calls]
        if self._given is not None:
            return "weights", [sum(self._ask(b.batch, b.args, b.kwargs, b.bound)) for b in calls]
        if self.is_sum:
            return "sums", [1.0] * len(batches)
        if self._labels is not None and all(_are_labels(t) for b in batches for t in b.targets):
            told = self._labels
            return "labels", [sum(_read([weight_of_labels(t, **told) for t in b.targets])) for b in batches]
        n_sums, raw = self._counts(batches) if self.is_counted else (0, [])
        if n_sums:
            return "sums", [1.0] * len(batches)
        by_rows: Measured = "rows", [float(sum(b.rows)) for b in batches]
        if not raw:
            if self.is_counted and self._is_whole and not self._told:
                self.warn("it is made of all rows of a batch at once")
            return by_rows
        counts = [_by_batch(count, batches) for count in raw]
        shares = [_normalised(count)[0] for count in counts if sum(count)]
        if not all(_are_close(shares[0], other) for other in shares[1:]):
            self.warn(_COUNTED_DIFFERENTLY)
            return by_rows
        return "labels", next((count for count in counts if sum(count)), counts[0])

    def beside(self, batch: Batch) -> Sequence[float | Tensor] | None:
        """What microbatches weigh in the mean over labels that the model has beside a ``loss_fn``.

        None where it has none, or some microbatch's labels are not on this rank.
        """
        if not self._has_beside:
            return None
        means = [next((x for x in found or () if not x.is_sum), None) for found in self._of_each(batch)]
        counts = []
        for m, mean in enumerate(means):
            if mean is None or not mean.takes <= batch.leaves.keys():
                return None
            counts.append(mean.count(batch, m))
        read = _read(counts)
        return _normalised(read)[0] if sum(read) else None

    def _losses(self, place: int) -> Losses:
        """What a form of the model's mode averages over labels; None where that cannot be weighed."""
        form = self._capture.forms[self._capture.model.training][place]
        if form.graph not in self._known:
            self._known[form.graph], why = find_losses(self._capture, form)
            if why and self.is_counted:
                self.warn(why)
        return self._known[form.graph]

    def _of_each(self, batch: Batch) -> list[Losses]:
        """By microbatch what its form averages over labels."""
        return [self._losses(batch.form(m)) for m in range(batch.n_microbatches)]

    def _counts(self, batches: Sequence[Batch]) -> tuple[int, list[list[float | Tensor]]]:
        """How many sums over labels the loss is made of, and what each of its means counts by microbatch.

        Microbatches may be of several forms, each of which counts in its own way. One whose form has no such
        loss weighs nothing where another form would count none of its labels: the batch's form may be that.
        No sums and no means where forms differ in more.
        """
        each = [(b, m, found) for b in batches for m, found in enumerate(self._of_each(b))]
        kinds = {tuple(x.is_sum for x in found): found for _, _, found in each if found}
        if not kinds or any(found is None for *_, found in each) or self._is_by_entry():
            return 0, []
        (kind, usual), *others = kinds.items()
        rows = [self._in_form(b, m, found or (), usual) for b, m, found in each] if not others else [None]
        if any(row is None for row in rows):
            self.warn("it averages otherwise over labels of some microbatches than of others")
            return 0, []
        return sum(kind), [list(counts) for counts in zip(*filter(None, rows), strict=True)]

    def _is_by_entry(self) -> bool:
        """Whether the loss has a mean over labels for each entry of a list, of which each is a row."""
        first, training = self._capture.first or self._capture, self._capture.model.training
        if training not in self._by_entry:
            losses = find_losses(first, first.own_forms[training][0])[0] if first.listed_rows else None
            self._by_entry[training] = len(losses or ()) > 1
        return self._by_entry[training]

    def _in_form(
        self, batch: Batch, m: int, losses: Sequence[LabelLoss], usual: Sequence[LabelLoss]
    ) -> list[float | Tensor] | None:
        """What each mean counts in a microbatch; None where its form has none, and not for want of labels."""
        if losses:
            return [x.count(batch, m) for x in losses if not x.is_sum]
        inputs = {name: pieces[m] for name, pieces in batch.leaves.items()}
        if not all(x.variation.is_for(self._capture.inputs, inputs) for x in usual):
            return None
        counts = _read([x.count(batch, m) for x in usual if not x.is_sum])
        return None if any(counts) else list(counts)

    def warn(self, why: str) -> None:
        """Say once that microbatches or batches weigh by rows, and why."""
        if why not in self._told:
            self._told.add(why)
            _logger.warning(_WARNING, why)

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


def _is_summed(capture: Capture) -> bool:
    """Whether a model's own loss is a sum over rows; its other numbers may be means."""
    mixing = capture.variation.mixing
    if mixing.sums or not mixing.summed:
        return mixing.sums
    names = [getattr(n, "name", "") for n in output_leaves(capture.graphs[capture.model.training])]
    ops = capture.ops.by_name
    shapes = [ops[n].outputs[0].shape if n in ops and ops[n].outputs else (1,) for n in names]
    stand_ins = [torch.zeros([1] * len(shape), device="cpu") for shape in shapes]
    loss = own_loss(capture, stand_ins)
    return any(loss is t and name in mixing.summed for t, name in zip(stand_ins, names, strict=True))


def _are_labels(target: Any) -> bool:
    return isinstance(target, Tensor) and not target.is_floating_point()


def _normalised(weights: Sequence[float]) -> Weights:
    """Shares of a whole, and the whole."""
    total = sum(weights)
    if total <= 0 or min(weights) < 0:
        raise InputError(f"microbatch weights are {list(weights)}; they must be ≥ 0 and not all zero")
    return [w / total for w in weights], total


_WARNING = (
    "the model's loss cannot be weighed exactly by its labels, since %s: microbatches weigh by rows, as do "
    "batches of accumulate(), which differs from the full batch where their counted labels do; pass "
    "loss_weight to say otherwise"
)
_COUNTED_DIFFERENTLY = "it averages several times, over labels that are counted differently"
_BY_EXAMPLE = (
    "of an example whose first labels are, such a loss is made of the whole batch where it comes late"
)


def _are_close(a: Sequence[float | Tensor], b: Sequence[float | Tensor]) -> bool:
    return all(math.isclose(x, y, rel_tol=1e-12) for x, y in zip(a, b, strict=True))


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


def _by_batch(counts: Sequence[float | Tensor], batches: Sequence[Batch]) -> list[float]:
    """What each batch counts, of what its microbatches do."""
    left = iter(_read(counts))
    return [sum(itertools.islice(left, batch.n_microbatches)) for batch in batches]


def _is_away(count: float | Tensor) -> bool:
    return isinstance(count, Tensor) and is_async(count.device)


def _shares_there(counts: Tensor, by_rows: Sequence[float | Tensor]) -> Sequence[Tensor]:
    """Shares of a whole on the device; by rows where that is nothing."""
    counts = counts.double()
    rows = upload(torch.tensor(by_rows, dtype=torch.float64, device="cpu"), counts.device)
    total = counts.sum()
    return torch.where(total > 0, counts / total, rows).unbind()
