"""Writes captured nodes into a stage's graph, and blocks that run again in backward into graphs of theirs.

Which nodes those are, and what the stage takes and gives, is left to ``build``.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from ..errors import InputError, PlanError
from ..graph import OpGraph
from ..torch_private import fx_graph, pytree
from . import rng
from .stage import HIDDEN, RECOMPUTED

__all__ = ["Part", "runs"]

Step = tuple[str, int | str, Any]
"""("item", index or key, of how many or of which keys) or ("attribute", name, None).

None too of how many items where the model reads them by their places alone, however many there are.
"""


class Part:
    """A graph under way, with the copy in it of each captured node, and the graphs of its blocks."""

    def __init__(self, ops: OpGraph, form: tuple[str, bool, int]) -> None:
        """``form`` says whose part this is: of a section, in a mode, of the form with a number."""
        self.ops, self.form = ops, form
        self.graph = fx_graph(HIDDEN)
        self.copies: dict[fx.Node, fx.Node] = {}
        self.blocks: list[fx.Graph] = []

    def take(self, name: str, node: fx.Node | None) -> None:
        """A value that comes from outside; ``node`` None where this form does not compute it."""
        placeholder = self.graph.placeholder(name)
        if node is not None:
            self.copies[node] = placeholder

    def keep(self, node: fx.Node) -> None:
        """Leave a value that comes from outside as it is: what is done here is done to a copy."""
        self.copies[node] = self.graph.call_function(in_own_memory, (self.copies[node],))

    def bring(self, node: fx.Node) -> None:
        """The parameters, buffers and flags that a node reads."""
        for value in node.all_input_nodes:
            if value.op == "get_attr" and value not in self.copies:
                self.copies[value] = self.graph.node_copy(value)

    def add(self, node: fx.Node) -> None:
        """A call, with a seed of its own where it draws random numbers."""
        self.bring(node)
        stream = node.meta.get("stream")
        op = self.ops.by_name.get(node.name)
        if stream is not None and (op is None or op.is_random):
            rest = (stream.start, dict(stream.counts)) if stream.start or stream.counts else ()
            draws = rng.reseed_all if stream.is_outside else rng.reseed
            self.graph.call_function(draws, (stream.owner, *rest))
        copied = self.graph.node_copy(node, self.copies.__getitem__)
        if node.op == "call_module" and (places := tuple(_parts_taken(node))):
            found = self.graph.call_function(with_parts, (copied, str(node.target), places))
            found.meta["region"], copied = node.meta.get("region"), found
        self.copies[node] = copied

    def add_block(self, nodes: Sequence[fx.Node]) -> None:
        """Calls that run again together, as a graph of their own that this one calls."""
        inner, own = Part(self.ops, self.form), set(nodes)
        taken = dict.fromkeys(
            v for n in nodes for v in n.all_input_nodes if v.op != "get_attr" and v not in own
        )
        for value in taken:
            inner.take(value.name, value)
        for node in nodes:
            inner.add(node)
        given = [node for node in nodes if not own.issuperset(node.users)]
        inner.graph.output(tuple(inner.copies[node] for node in given))
        args: list[Any] = [*self.form, len(self.blocks), *(self.copies[value] for value in taken)]
        called = self.graph.call_module(RECOMPUTED, tuple(args))
        for i, node in enumerate(given):
            self.copies[node] = self.graph.call_function(operator.getitem, (called, i))
        self.blocks.append(inner.graph)


def in_own_memory(given: Any) -> Any:
    """A value with tensors in memory of their own."""
    return pytree.tree_map_only(Tensor, Tensor.clone, given)


def with_parts(given: Any, path: str, places: Sequence[Sequence[Step]]) -> Any:
    """What the layer at ``path`` gave, with a part at each of the ``places``, of as many as it says there.

    Raises :class:`InputError` where it has not: then the layer is not as it was when it was captured.
    """
    for place in places:
        part = given
        try:
            for step in place:
                part = _part(part, *step)
        except (IndexError, KeyError, TypeError, AttributeError) as error:
            shown = "".join(f"[{key!r}]" if kind == "item" else f".{key}" for kind, key, _ in place)
            raise InputError(
                f"{path} gave a {_kind(given)}, of which the model as captured takes {shown}"
                f"{_said_of(place)}: the layer has changed since, or this depends on its inputs; capture "
                "again as the model is now, put it back, or return them in one tensor"
            ) from error
    return given


def _part(value: Any, kind: str, key: Any, of: Any) -> Any:
    if isinstance(value, Tensor):
        raise TypeError("a tensor's rows are no parts")
    if of is not None and _extent(value) != of:
        raise IndexError("more parts, or fewer")
    return value[key] if kind == "item" else getattr(value, key)


def _extent(value: Any) -> Any:
    """How many items a sequence has; the keys of a mapping."""
    return tuple(value) if isinstance(value, Mapping) else len(value) if hasattr(value, "__len__") else None


def _said_of(place: Sequence[Step]) -> str:
    """Of how many items, innermost, the part is."""
    counts = [of if isinstance(of, int) else len(of) for _, _, of in place if of is not None]
    return f" of {counts[-1]}" if counts else ""


def _kind(value: Any) -> str:
    """What a value is, and how many parts it has where that is all there is to tell."""
    name = "tensor" if isinstance(value, Tensor) else type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, (tuple, list, dict)) else name


def _parts_taken(node: fx.Node) -> Iterator[tuple[Step, ...]]:
    """Where the parts lie that are taken of what a node gives, innermost."""
    return _parts_below(node, (), node.meta.get("uncounted", ()))


def _parts_below(
    node: fx.Node, at: tuple[int | str, ...], uncounted: Collection[tuple[int | str, ...]]
) -> Iterator[tuple[Step, ...]]:
    """Those of what a node gives that itself lies ``at`` a place of what a layer gave."""
    if isinstance(node.meta.get("val"), Tensor):
        return
    for user in node.users:
        if user.target in (operator.getitem, getattr) and user.args[0] is node:
            key: Any = user.args[1]
            if isinstance(key, (int, str)):
                is_item = user.target is operator.getitem
                of = _extent(node.meta["val"]) if is_item and at not in uncounted else None
                step = ("item" if is_item else "attribute", key, of)
                yield from ((step, *rest) for rest in [*_parts_below(user, (*at, key), uncounted)] or [()])


def runs(
    nodes: Sequence[fx.Node], blocks: Sequence[Collection[str]], order_edges: Iterable[tuple[str, str]]
) -> Iterator[tuple[fx.Node, ...]]:
    """The nodes in program order, each alone or all of a block at once, what a block needs before it.

    A block must be convex: no path leaves it and comes back, along values or ``order_edges``. Linear in the
    nodes and edges, times log. Raises :class:`PlanError` where one is not.
    """
    if not blocks:
        yield from ((node,) for node in nodes)
        return
    unit = {name: -1 - x for x, ops in enumerate(blocks) for name in ops}
    unit = {node.name: unit.get(node.name, x) for x, node in enumerate(nodes)}
    members: dict[int, list[fx.Node]] = {}
    for node in nodes:
        members.setdefault(unit[node.name], []).append(node)
    edges = [(v.name, node.name) for node in nodes for v in node.all_input_nodes]
    pairs = {
        (unit[a], unit[b])
        for a, b in (*edges, *order_edges)
        if a in unit and b in unit and unit[a] != unit[b]
    }
    after: dict[int, list[int]] = {u: [] for u in members}
    waiting = dict.fromkeys(members, 0)
    for a, b in pairs:
        after[a].append(b)
        waiting[b] += 1
    place = {u: x for x, u in enumerate(members)}
    ready = [(place[u], u) for u in members if waiting[u] == 0]
    heapq.heapify(ready)
    left = len(members)
    while ready:
        left -= 1
        _, u = heapq.heappop(ready)
        yield tuple(members[u])
        for b in after[u]:
            waiting[b] -= 1
            if waiting[b] == 0:
                heapq.heappush(ready, (place[b], b))
    if left:
        raise PlanError("values leave a block that runs again in backward and come back to it")
