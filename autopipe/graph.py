"""The op graph: what a model computes, as plain data over a networkx DiGraph.

Recording a model into one is left to ``tracing``; what ops cost is left to ``costs``. Nothing here imports
torch, so a graph opens where there is no model and no GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from .errors import InputError
from .schema import Count, Name, build, differs, refuse, versioned
from .shown import Shown
from .units import Size, dtype_bytes, parse_size, size_at

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Dim", "Op", "OpGraph", "Packed", "ParameterSpec", "TensorSpec", "batch_dim", "is_matrix"]

VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: its shape in the graph's dims, dtype by short name, whether gradients flow through it."""

    shape: tuple[Size, ...]
    dtype: Name
    requires_grad: bool = False

    def shape_at(self, dims: Mapping[str, int]) -> tuple[float, ...]:
        """The tensor's sizes where the input dims have the given values.

        What is fitted to sizes that data decide may fall below 0 where there is little data: none then.
        """
        return tuple(max(0, size_at(n, dims)) for n in self.shape)

    def bytes_at(self, dims: Mapping[str, int]) -> int:
        """Bytes of the tensor where the input dims have the given values."""
        return math.ceil(math.prod(self.shape_at(dims)) * dtype_bytes(self.dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter or buffer of the model: one storage, under every name the model has for it.

    ``name`` is the first of ``names``, in the order of the model's ``named_parameters``/``named_buffers``.
    """

    name: Name
    names: tuple[Name, ...]
    shape: tuple[Count, ...]
    dtype: Name
    requires_grad: bool = True
    is_buffer: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return math.ceil(self.numel * dtype_bytes(self.dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class Packed:
    """An input op that holds the rows of all samples one after another: ``rows`` at capture.

    ``grids`` are inputs ``[pieces, 2 or 3]`` whose rows multiply to how many rows each piece has. Without any
    every sample has as many.
    """

    op: Name
    rows: Count
    grids: tuple[Name, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Dim:
    """A size of the inputs that may change between calls, such as ``batch`` or ``seq``.

    ``where`` lists the (input op, axis) places it is read from; ``example`` is its value at capture. Inputs
    that are ``packed`` grow with it: they lead with several rows to each of a batch.
    """

    name: Name
    example: Count
    where: tuple[tuple[Name, int], ...] = ()
    packed: tuple[Packed, ...] = ()

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Every (input op, axis) whose size hangs on it."""
        return (*self.where, *((p.op, 0) for p in self.packed))


def batch_dim(dims: Sequence[Dim]) -> Dim | None:
    """The dim called ``batch``, else the first that some input leads with."""
    named = [d for d in dims if d.name == "batch"] or [d for d in dims if any(a == 0 for _, a in d.where)]
    return named[0] if named else None


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One node of the graph: a call of a leaf module, a function or a tensor method; an input; the output.

    Attributes
    ----------
    name: unique; the name of the fx node that computes it.
    kind: ``input`` and ``output`` mark the model's own signature and compute nothing.
    target: what is called, dotted: ``transformer.h.0`` (kind ``module``), ``torch.nn.functional.linear``.
    module_path: the module whose forward makes the call; for kind ``module`` the called module itself.
    source: ``file:line`` of the call in the model's own code, or "".
    outputs: every tensor in the op's value, flattened in order.
    is_size: the value is a Python number made from shapes, not a tensor; never worth sending.
    parameters, buffers: first names of those the op reads, in order of first use. Parameters that take no
        gradients and that ops write to (momentum encoders) are among the buffers.
    mutated_buffers: those of ``buffers`` the op writes in place (batch-norm statistics, running means).
    is_random: the op draws from a random number generator in training.
    is_tainted: the value depends on input data, not only on shapes and constants.
    is_movable: cheap glue without parameters, randomness, mutation or gradient that may be computed again
        in another stage rather than sent there (masks, RoPE tables, position ids).
    mode: ops that only the training or only the evaluation form of the model has say so.
    signature: equal signatures cost the same: class, configuration, parameter shapes, input shapes, dtypes.
    """

    name: Name
    kind: Literal["input", "module", "function", "method", "output"]
    target: Name
    module_path: str = ""
    source: str = ""
    outputs: tuple[TensorSpec, ...] = ()
    is_size: bool = False
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    mutated_buffers: tuple[str, ...] = ()
    is_random: bool = False
    is_tainted: bool = False
    is_movable: bool = False
    mode: Literal["both", "train", "eval"] = "both"
    signature: str = ""

    def bytes_at(self, dims: Mapping[str, int]) -> int:
        """Bytes of the op's whole value where the input dims have the given values."""
        return sum(t.bytes_at(dims) for t in self.outputs)

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows back into this op's value."""
        return any(t.requires_grad for t in self.outputs)


@dataclasses.dataclass(frozen=True)
class OpGraph(Shown):
    """Ops in program order (a topological order), the values that flow between them, and what binds them.

    Attributes
    ----------
    model: the model's class name.
    ops: every op in program order; inputs first, the output last.
    edges: (producer, consumer), sorted by position; the consumer takes the producer's whole value.
    order_edges: (earlier, later) pairs that keep program order without a value: random draws.
    groups: ops that must share a stage: values that alias memory which is later mutated, users of a
        mutated buffer, pieces of one tuple.
    parameters: every parameter and buffer the model has.
    dims: the input sizes that may vary.
    tail: ops that are right on the whole batch alone, as they mix its rows, with those of sizes that they
        need; they run there once all microbatches have come so far.
    """

    model: Name
    ops: tuple[Op, ...]
    edges: tuple[tuple[Name, Name], ...]
    order_edges: tuple[tuple[Name, Name], ...] = ()
    groups: tuple[tuple[Name, ...], ...] = ()
    parameters: tuple[ParameterSpec, ...] = ()
    dims: tuple[Dim, ...] = ()
    tail: tuple[Name, ...] = ()

    @functools.cached_property
    def by_name(self) -> Mapping[str, Op]:
        return {op.name: op for op in self.ops}

    @functools.cached_property
    def position(self) -> Mapping[str, int]:
        """Each op's place in program order."""
        return {op.name: i for i, op in enumerate(self.ops)}

    @functools.cached_property
    def parameter(self) -> Mapping[str, ParameterSpec]:
        """Parameters and buffers under every name they have."""
        return {name: p for p in self.parameters for name in p.names}

    @property
    def inputs(self) -> tuple[Op, ...]:
        return tuple(op for op in self.ops if op.kind == "input")

    @property
    def compute(self) -> tuple[Op, ...]:
        """The ops that a stage holds: all but inputs and the output."""
        return tuple(op for op in self.ops if op.kind not in ("input", "output"))

    def under(self, prefix: str) -> list[Op]:
        """The ops that a stage holds and ``prefix`` means: all of the module at that path, or one's name."""

        def is_under(path: str) -> bool:
            return path == prefix or path.startswith(prefix + ".")

        return [
            op
            for op in self.compute
            if prefix
            and (
                op.name == prefix or is_under(op.module_path) or (op.kind == "module" and is_under(op.target))
            )
        ]

    @property
    def example_dims(self) -> dict[str, int]:
        """The input dims' values at capture."""
        return {d.name: d.example for d in self.dims}

    @functools.cached_property
    def consumers(self) -> Mapping[str, tuple[str, ...]]:
        """The ops that take each op's value, in program order."""
        out: dict[str, list[str]] = {op.name: [] for op in self.ops}
        for producer, consumer in self.edges:
            out[producer].append(consumer)
        return {name: tuple(sorted(set(c), key=self.position.__getitem__)) for name, c in out.items()}

    @functools.cached_property
    def takes(self) -> Mapping[str, tuple[str, ...]]:
        """The ops whose values each op takes, in program order."""
        out: dict[str, list[str]] = {op.name: [] for op in self.ops}
        for producer, consumer in self.edges:
            out[consumer].append(producer)
        return {name: tuple(p) for name, p in out.items()}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[str, ...]]:
        """The ops that read each parameter or buffer, under its first name, in program order."""
        out: dict[str, dict[str, None]] = {}
        for op in self.compute:
            for name in (*op.parameters, *op.buffers):
                out.setdefault(self.parameter[name].name, {})[op.name] = None
        return {name: tuple(ops) for name, ops in out.items()}

    @functools.cached_property
    def last(self) -> frozenset[str]:
        """The ops of the tail that lead to nothing else: the last stage computes them."""
        found: set[str] = set()
        tail = {*self.tail}
        for op in reversed(self.ops):
            takers = (c for c in self.consumers[op.name] if self.by_name[c].kind != "output")
            if op.name in tail and all(c in found for c in takers):
                found.add(op.name)
        return frozenset(found)

    @functools.cached_property
    def nx(self) -> nx.DiGraph[str]:
        """The data and order edges as a networkx DiGraph; nodes carry their :class:`Op` as ``op``."""
        import networkx as nx

        graph: nx.DiGraph[str] = nx.DiGraph()
        graph.add_nodes_from((op.name, {"op": op}) for op in self.ops)
        graph.add_edges_from(self.order_edges, order=True)
        graph.add_edges_from(self.edges, order=False)
        return graph

    @functools.cached_property
    def digest(self) -> str:
        """A hash of everything that decides what the graph computes; equal on every rank of a job."""
        payload = self.to_dict()
        for op in payload["ops"]:
            op.pop("source", None)
        return hashlib.sha256(json.dumps(payload, sort_keys=True).encode()).hexdigest()[:16]

    @functools.cached_property
    def ops_digest(self) -> str:
        """A hash of what costs hang on beside the sizes of inputs: ops, what they make, their weights.

        Equal for captures of a model on inputs of other sizes and on other devices.
        """
        held = [(p.names, p.shape, p.dtype, p.requires_grad) for p in self.parameters]
        made = [(op.name, op.target, op.parameters, [_compact(t) for t in op.outputs]) for op in self.compute]
        return hashlib.sha256(json.dumps([held, made]).encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and numbers, for JSON; fields at their default are left out."""
        ops = [_compact(op) for op in self.ops]
        return {
            "version": VERSION,
            "model": self.model,
            "ops": ops,
            "edges": [list(e) for e in self.edges],
            "order_edges": [list(e) for e in self.order_edges],
            "groups": [list(g) for g in self.groups],
            "parameters": [_compact(p) for p in self.parameters],
            "dims": [_compact(d) for d in self.dims],
            **({"tail": list(self.tail)} if self.tail else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], what: str = "the op graph") -> OpGraph:
        """The inverse of :meth:`to_dict`.

        Raises :class:`StoreError`, with the path to the fault, for anything that is not one's ``to_dict``.
        """
        read = build(cls, versioned(data, VERSION, what), what)
        graph = dataclasses.replace(read, ops=tuple(_op(op, x, what) for x, op in enumerate(read.ops)))
        differs(data, graph.to_dict(), what)
        for path, fault in _faults(graph):
            raise refuse(what, path, fault)
        return graph


def _compact(item: Any) -> dict[str, Any]:
    """A dataclass as a dict without the fields that hold their default."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if value != field.default:
            out[field.name] = _plain(value)
    return out


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _compact(value)
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return str(value)


def _op(op: Op, place: int, what: str) -> Op:
    """An op as read, its shapes as formulas."""
    try:
        outputs = (
            dataclasses.replace(t, shape=tuple(map(parse_size, t.shape)), dtype=_dtype(t.dtype))
            for t in op.outputs
        )
        return dataclasses.replace(op, outputs=tuple(outputs))
    except InputError as error:
        raise refuse(what, f"ops[{place}].outputs", str(error)) from None


def _dtype(name: str) -> str:
    dtype_bytes(name)
    return name


def _faults(graph: OpGraph) -> Iterator[tuple[str, str]]:
    """(path, fault) of parts that contradict one another."""
    place = {op.name: i for i, op in enumerate(graph.ops)}
    if len(place) < len(graph.ops):
        yield "ops", "has two of one name"
    dims, weights = {d.name for d in graph.dims}, {p.name for p in graph.parameters}
    for x, op in enumerate(graph.ops):
        free = {s.name for t in op.outputs for n in t.shape for s in getattr(n, "free_symbols", ())}
        if strange := (free - dims) or ({*op.parameters, *op.buffers} - weights):
            yield f"ops[{x}]", f"uses {min(strange)!r}, which is neither a dim nor a parameter of the graph"
    for name in ("edges", "order_edges"):
        for x, (a, b) in enumerate(getattr(graph, name)):
            if place.get(a, len(place)) >= place.get(b, -1):
                yield f"{name}[{x}]", f"is {a!r} to {b!r}, which are no two ops in order"
    for x, d in enumerate(graph.dims):
        if strange := {op for op, _ in d.places} - set(place):
            yield f"dims[{x}]", f"is read from {min(strange)!r}, which is no op"
    if strange := set(graph.tail) - set(place):
        yield "tail", f"has {min(strange)!r}, which is no op"
    for x, group in enumerate(graph.groups):
        if strange := set(group) - set(place):
            yield f"groups[{x}]", f"has {min(strange)!r}, which is no op"
    for x, p in enumerate(graph.parameters):
        if p.name not in p.names:
            yield f"parameters[{x}]", f"has the name {p.name!r}, which is not among its names"


def is_matrix(shape: Sequence[int]) -> bool:
    """Whether a parameter has several axes of more than one number: its gradient may wait for W.

    Those of others, the scales and shifts of norms, come in one pass with the gradients of inputs.
    """
    return sum(n > 1 for n in shape) > 1
