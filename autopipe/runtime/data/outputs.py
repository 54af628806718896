"""The model's outputs and loss for the full batch, from those of its microbatches, on every rank that asks.

Rebuilding the model's own output structure is left to ``tracing``.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, fx

from ...accelerator import upload
from ...errors import InputError
from ...graph import OpGraph
from ...torch_private import pytree
from ...tracing.graphs.emit import output_leaves
from ...tracing.inputs.layout import concatenated, of_blocks
from ...units import size_at, symbol
from ..wire.announcement import Announcement, Form
from ..wire.boundary import flatten
from ..wire.peers import Peers
from .microbatch import Batch

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["NotThereError", "Outputs", "share", "weighted"]

_logger = logging.getLogger(__name__)


class Outputs:
    """Makes the full batch's outputs of those of its microbatches.

    Where the batch is in each output is read off the captured shapes.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._warned: set[str] = set()

    def check(self, batch: Batch) -> None:
        """Raise :class:`InputError` for outputs that microbatches cannot give, such as ``x @ x.T``."""
        for name, axes in self._leaves(batch) if batch.n_microbatches > 1 else ():
            if fault := self._fault(name, axes, batch):
                raise InputError(f"{fault}; pass n_microbatches=1 here, or do not ask for outputs")

    def _fault(self, name: str, axes: tuple[int, ...] | None, batch: Batch) -> str:
        """Why microbatches cannot give an output; empty where they can."""
        mixing, n = self._capture.variation.mixing, batch.n_microbatches
        steps = mixing.steps
        is_told = steps.get(name) is not None
        if axes is not None and len(axes) == 1 and not is_told and self._is_uneven(name, axes[0]):
            return (
                f"output {name} has no certain number of places for each row of the batch along axis "
                f"{axes[0]}: those of {n} microbatches do not make the whole"
            )
        if name in steps and steps[name] is None:
            return (
                f"output {name} has whole numbers that hang on the places of rows in their batch, and "
                f"those of {n} microbatches do not tell the whole's"
            )
        if not axes and mixing.made_of_rows.get(name) == "neither":
            return (
                f"output {name} has no batch axis and hangs on the rows of a batch, of which it is "
                f"neither a mean nor a sum: those of {n} microbatches do not give the whole's"
            )
        if axes is not None and len(axes) > 1:
            return (
                f"output {name} has the batch in its axes {', '.join(map(str, axes))}: {n} microbatches give "
                "its blocks, not the whole"
            )
        return ""

    def join(
        self,
        parts: Sequence[Sequence[Any]],
        batch: Batch,
        weights: Sequence[float | Tensor],
        *,
        for_loss: bool = False,
    ) -> list[Any]:
        """Flat output leaves of the full batch from those of each microbatch.

        A tensor with a batch axis is concatenated along it, numbers of rows as they are in the batch; a
        scalar is averaged by ``weights``, another mean over rows by these, a sum added up; a Python number
        made of sizes is what the full batch's make. Other floats are averaged by ``weights``, and the rest is
        taken from the first microbatch; a warning says so where another one's differs, or may. ``for_loss``
        what is joined has gradients, and in the place of what microbatches do not give is what raises
        :class:`InputError` when it is used.
        """
        if len(parts) == 1:
            return list(parts[0])
        joined, left = [], self._capture.nodes_left
        of_all = self._nodes(batch.of_all[0]) if len(batch.of_all) == 1 else [_Untold] * len(parts[0])
        for (name, axes), node, constant, leaf in zip(
            self._leaves(batch), self._nodes(), of_all, zip(*parts, strict=True), strict=True
        ):
            if isinstance(constant, _PLAIN):
                joined.append(constant)
                continue
            is_left = any(node is n for n in left)
            number = leaf[0] if is_left else self._number(node, leaf, batch)
            if number is None and for_loss and (fault := self._fault(name, axes, batch)):
                number = NotThere(fault)
            if number is None:
                number = self._join_leaf(name, axes, leaf, batch, weights, for_loss=for_loss)
            joined.append(number)
        return joined

    def _join_leaf(
        self,
        name: str,
        axes: Sequence[int] | None,
        leaf: Sequence[Any],
        batch: Batch,
        weights: Sequence[float | Tensor],
        *,
        for_loss: bool,
    ) -> Any:
        are_tensors = all(isinstance(x, Tensor) for x in leaf)
        mixing = self._capture.variation.mixing
        if are_tensors and (told := mixing.steps.get(name)) is not None:
            axis, step = told
            return torch.cat(_of_batch(leaf, axis, step, batch.rows), axis)
        if axes and are_tensors:
            self._check_rows(name, axes[0], leaf, batch)
            return (
                of_blocks(leaf, axes[0], batch.rows) if name in mixing.blocks else concatenated(leaf, axes[0])
            )
        if axes is None and are_tensors and _lead_with(batch.rows, leaf):
            return torch.cat(list(leaf))
        made = mixing.made_of_rows.get(name)
        if made == "sum":
            return torch.stack([*leaf]).sum(0, dtype=leaf[0].dtype) if are_tensors else sum(leaf)
        if made == "mean":
            return _mean(leaf, batch.rows)
        if are_tensors and all(t.numel() == 1 and t.is_floating_point() for t in leaf):
            if name in mixing.summed:
                return torch.stack([*leaf]).double().sum(0).to(leaf[0].dtype)
            shares = _shares(weights, batch.rows) if mixing.summed else weights
            return weighted(leaf, shares).to(leaf[0].dtype).reshape(leaf[0].shape)
        is_other = made is not None or not all(_are_equal(leaf[0], x) for x in leaf[1:])
        if is_other and for_loss:
            return NotThere(
                f"output {name} has no batch axis and hangs on the rows of a batch, of which each of "
                f"{batch.n_microbatches} microbatches has some"
            )
        is_float = all(type(x) is float for x in leaf)
        if is_other and name not in self._warned:
            self._warned.add(name)
            _logger.warning(
                "output %s has no batch axis and hangs on the rows of a batch, of which each microbatch has "
                "some: %s is returned; pass n_microbatches=1 for the whole batch's",
                name,
                "their mean" if is_float else "the first one's",
            )
        if not is_float or not is_other:
            return leaf[0]
        told = [torch.tensor(x, dtype=torch.float64, device="cpu") for x in leaf]
        return float(weighted(told, _shares(weights, batch.rows)))

    def _check_rows(self, name: str, axis: int, leaf: Sequence[Tensor], batch: Batch) -> None:
        """Raise :class:`InputError` where a microbatch takes another way than the batch, to other places."""
        usual = self._capture.own[self._capture.model.training][0]
        others = [m for m in range(batch.n_microbatches) if batch.form(m) != usual]
        size = self._capture.ops.by_name[name].outputs[0].shape[axis]
        dims = _dims(self._capture.ops, batch) if others else []
        for m in others:
            n, expected = leaf[m].shape[axis], size_at(size, dims[m])
            if n != expected:
                raise InputError(
                    f"output {name} has {n} places along axis {axis} for a microbatch of {batch.rows[m]} "
                    f"rows, of which the batch has {expected:g}, as so few rows take another way in the "
                    "model: microbatches do not make the whole; pass a smaller n_microbatches here, or do "
                    "not ask for outputs"
                )

    def _leaves(self, batch: Batch) -> list[tuple[str, tuple[int, ...] | None]]:
        """Name and batch axes of each output leaf in the model's present mode; None where not known."""
        ops = self._capture.ops
        split = set(batch.axes.items())
        sizes = {symbol(d.name) for d in ops.dims if split & set(d.where)}
        found: list[tuple[str, tuple[int, ...] | None]] = []
        for i, leaf in enumerate(self._nodes()):
            op = ops.by_name.get(leaf.name) if isinstance(leaf, fx.Node) else None
            is_own = isinstance(leaf, fx.Node) and leaf.op == "get_attr"
            axes: tuple[int, ...] | None = () if is_own else None
            if sizes and op is not None and len(op.outputs) == 1:
                shape = op.outputs[0].shape
                axes = tuple(a for a, n in enumerate(shape) if sizes & getattr(n, "free_symbols", set()))
            found.append((str(i) if op is None else op.name, axes))
        return found

    def _is_uneven(self, name: str, axis: int) -> bool:
        """Whether the size of an output's axis is no multiple of a size of the inputs."""
        n = self._capture.ops.by_name[name].outputs[0].shape[axis]
        return not any(n.subs(s, 0) == 0 for s in getattr(n, "free_symbols", ()))

    def _nodes(self, number: int | None = None) -> tuple[Any, ...]:
        """What gives each output leaf in the model's present mode: a node, or the constant that it is.

        Of its first form, or of the one of a ``number``.
        """
        capture, training = self._capture, self._capture.model.training
        graph = capture.graphs[training] if number is None else capture.forms[training][number].graph
        return output_leaves(graph)

    def _number(self, node: Any, leaf: Sequence[Any], batch: Batch) -> int | float | None:
        """The full batch's number whose microbatches' are ``leaf``; None where sizes do not tell it."""
        if not isinstance(node, fx.Node) or any(type(x) not in (int, float) for x in leaf):
            return None
        graph = self._capture.ops
        nodes = _leading_to(node, graph)
        *parts, whole = (_by_sizes(graph, nodes, dims) for dims in _dims(graph, batch))
        return whole if whole is not None and parts == list(leaf) else None


class NotThereError(InputError, AttributeError):
    """For code that asks what something has, it has nothing."""


class NotThere:
    """In the place of an output that microbatches do not give."""

    def __init__(self, why: str) -> None:
        self._why = why

    @staticmethod
    def _fail(why: str) -> NoReturn:
        raise NotThereError(
            f"loss_fn takes of the whole batch what microbatches do not give: {why}; pass n_microbatches=1, "
            "or loss_on='microbatches' to take each microbatch for a batch"
        )

    def __getattr__(self, name: str) -> NoReturn:
        self._fail(self._why)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        given = pytree.tree_leaves([args, kwargs or {}])
        cls._fail(next(x._why for x in given if isinstance(x, NotThere)))


_BINARY = "add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or"
_OTHERS = (
    "neg pos abs invert round trunc floor ceil int float complex index bool str format lt le eq ne gt ge len "
    "iter next reversed contains getitem setitem call enter"
)


def _fails(self: NotThere, *args: Any, **kwargs: Any) -> NoReturn:
    self._fail(self._why)


for _name in f"{_BINARY} {_OTHERS}".split():
    setattr(NotThere, f"__{_name}__", _fails)  # Python asks the class for these
for _name in _BINARY.split():
    setattr(NotThere, f"__r{_name}__", _fails)


_PLAIN = (bool, int, float, str, type(None))


def _dims(graph: OpGraph, batch: Batch) -> list[dict[str, int]]:
    """The size of each input dim in every microbatch, and at last in all of them together."""
    n = batch.n_microbatches
    found: list[dict[str, int]] = [{} for _ in range(n + 1)]
    for dim in graph.dims:
        for name, axis in dim.places[:1]:
            sizes = [leaf.shape[axis] for leaf in batch.leaves[name][:n]]
            is_cut = batch.axes.get(name) == axis or (name in batch.packed and not axis)
            for dims, size in zip(found, (*sizes, sum(sizes) if is_cut else sizes[0]), strict=True):
                dims[dim.name] = size
    return found


def _by_sizes(graph: OpGraph, nodes: Sequence[fx.Node], dims: Mapping[str, int]) -> int | float | None:
    """What the last node's number is where input dims have these sizes; None where they do not tell it."""
    values: dict[fx.Node, Any] = {}

    def made(node: fx.Node) -> Any:
        op = graph.by_name.get(node.name)
        if op is None or (op.kind == "module" if op.is_size else len(op.outputs) != 1):
            raise _Untold
        if not op.is_size:
            return torch.empty([int(n) for n in op.outputs[0].shape_at(dims)], device="meta")
        args = fx.map_arg(node.args, values.__getitem__)
        kwargs = fx.map_arg(node.kwargs, values.__getitem__)
        if node.op == "call_method":
            if node.target == "item":
                raise _Untold
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if any(isinstance(a, Tensor) for a in args) or not callable(node.target):
            raise _Untold
        return node.target(*args, **kwargs)

    try:
        for node in nodes:
            values[node] = made(node)
    except (_Untold, ArithmeticError, ValueError):
        return None  # pieces may have a number where the whole has none: 1 / (n - 22)
    found = values[nodes[-1]]
    return found if type(found) in (int, float) else None


def _leading_to(node: fx.Node, graph: OpGraph) -> list[fx.Node]:
    """The sizes that a node is made of and what they are taken of, in order, and the node."""
    found: dict[fx.Node, None] = {}
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each in found:
            continue
        found[each] = None
        op = graph.by_name.get(each.name)
        if op is not None and op.is_size:
            waiting += each.all_input_nodes
    return sorted(found)


class _Untold(Exception):
    """Sizes alone do not tell a number."""


def _lead_with(rows: Sequence[int], tensors: Sequence[Tensor]) -> bool:
    return all(t.ndim > 0 and t.shape[0] == n for t, n in zip(tensors, rows, strict=True))


def _of_batch(pieces: Sequence[Tensor], axis: int, step: Any, rows: Sequence[int]) -> list[Tensor]:
    """Pieces of whole numbers along an axis, each with ``step`` more for every row that is ahead of it."""
    out, ahead = [], 0
    for piece, n in zip(pieces, rows, strict=True):
        added = torch.tensor(step, dtype=torch.int64, device=piece.device).unsqueeze(0).movedim(0, axis)
        out.append((piece + added * ahead).to(piece.dtype) if ahead else piece)
        ahead += n
    return out


def _mean(pieces: Sequence[Any], rows: Sequence[int]) -> Any:
    """The mean over the rows of a batch of tensors, or numbers, that are means over those of pieces."""
    if not isinstance(pieces[0], Tensor):
        return sum(n * piece for n, piece in zip(rows, pieces, strict=True)) / sum(rows)
    return sum(n * t.double() for n, t in zip(rows, pieces, strict=True)).div(sum(rows)).to(pieces[0].dtype)


def _shares(weights: Sequence[float | Tensor], rows: Sequence[int]) -> Sequence[float | Tensor]:
    """What microbatches weigh in a mean beside a loss that is a sum, in which each weighs one: their rows."""
    if any(isinstance(w, Tensor) for w in weights) or math.isclose(sum(weights), 1.0):
        return weights
    return [n / sum(rows) for n in rows]


def _are_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


def weighted(losses: Sequence[Tensor | None], weights: Sequence[float | Tensor]) -> Tensor:
    """Σ weight × loss in fp64; a microbatch of weight 0 adds nothing, though its mean of nothing is NaN."""
    there = [w for w in weights if isinstance(w, Tensor)]
    if there:
        shares, found = torch.stack(there), _in_line(loss for loss in losses if loss is not None)
        shares = shares.to(found.device)
        return torch.where(shares > 0, found.double() * shares, 0.0).sum()
    terms = [(loss, w) for loss, w in zip(losses, weights, strict=True) if w and loss is not None]
    if not terms:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    each, parts = zip(*terms, strict=True)
    if each[0].is_cpu and not any(loss.requires_grad for loss in each):
        # plain numbers cost a fraction of ops on as small tensors
        total = sum(map(operator.mul, map(Tensor.item, each), parts))
        return torch.tensor(total, dtype=torch.float64, device="cpu")
    told = torch.tensor(parts, dtype=torch.float64, device="cpu")
    return (_in_line(each).double() * upload(told, each[0].device)).sum()


def _in_line(losses: Iterable[Tensor]) -> Tensor:
    """Numbers, some of which may have axes of one place, along one axis."""
    return torch.stack([loss.reshape(()) for loss in losses])


def share(leaves: list[Any] | None, peers: Peers, source: int, device: torch.device) -> list[Any]:
    """Flat output leaves of pipeline rank ``source``, on every rank."""
    tensors, frame = flatten(leaves or [])
    told = Announcement.heard(peers.share(Announcement(tuple(map(Form.of, tensors)), frame).told(), source))
    if peers.rank == source:
        laid = [form.to_wire(t) for form, t in zip(told.tensors, tensors, strict=True)]
    else:
        laid = [form.empty(device) for form in told.tensors]
    laid = [peers.broadcast(t, source) if t.numel() else t for t in laid]
    tensors = [form.from_wire(t) for form, t in zip(told.tensors, laid, strict=True)]
    return tensors if told.frame is None else told.frame.fill(tensors)
