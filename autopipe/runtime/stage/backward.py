"""A backward in two parts, exactly: input gradients at once (I), weight gradients later (W).

When each part runs is left to the schedule.

The autograd nodes a stage's inputs can be reached from are its spine. I runs the backward for the inputs
alone and notes the gradient that arrives at each spine node with a parameter hanging off it; W starts
again from those nodes towards their parameters; what the others saved is freed in I. That is exact for
a parameter that hangs off one spine node only: a path from there along the spine meets it nowhere else.
Parameters used at several nodes (tied or called twice), and those below a custom ``autograd.Function``,
whose backward must not run twice, get their whole gradient in I. So do those of nodes that have no matrix
to wait for (scales and shifts of norms): one pass gives them with the gradients of inputs, and for W their
nodes would keep as much as a layer with a matrix does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from ...graph import is_matrix
from ...torch_private import backward, release, saves
from ..reduce.hooks import n_hooks_after

__all__ = ["Root", "WeightWork", "backward_input", "root_of"]


Root = Tensor | GradientEdge
KEPT_BYTES = 1 << 14
"""Below this size a root is kept as the tensor it is: that is cheaper than to ask for its edge."""


def root_of(tensor: Tensor) -> Root:
    """Where a gradient enters the graph, once its tensor is needed no more: that may then be freed."""
    is_small = tensor.layout is torch.strided and tensor.nbytes < KEPT_BYTES
    return tensor if is_small else get_gradient_edge(tensor)


def _edge(root: Root) -> GradientEdge:
    return get_gradient_edge(root) if isinstance(root, Tensor) else root


@dataclasses.dataclass
class WeightWork:
    """What W has to do: from each node, with the gradients that arrived there, to its parameters.

    ``whole`` instead holds roots and their gradients where nothing was done in I.
    """

    parts: list[tuple[Node, _Note, list[Tensor]]]
    whole: tuple[Sequence[Root], Sequence[Tensor]] | None = None

    def run(self) -> None:
        """Accumulate the weight gradients, later nodes first as a whole backward would."""
        if self.whole is not None:
            backward(*self.whole)
        for node, note, parameters in self.parts:
            edges = [GradientEdge(node, i) for i, g in enumerate(note.grads) if g is not None]
            if edges:
                grads = [g for g in note.grads if g is not None]
                backward(edges, grads, [get_gradient_edge(p) for p in parameters])
        self.parts, self.whole = [], None


def backward_input(roots: Sequence[Root], grads: Sequence[Tensor], leaves: Sequence[Tensor]) -> WeightWork:
    """Accumulate gradients into ``leaves``; return the work that completes those of the parameters.

    ``leaves`` are the stage's inputs that require a gradient. Without any, all the work is left to W; where
    a parameter has a hook on its accumulation, or there is code that runs in one piece, none is.
    """
    if not leaves:
        return WeightWork([], (roots, grads))
    spine = _Spine(roots, leaves)
    parts, early = spine.split()
    late = [p for _, _, ps in parts for p in ps]
    if spine.is_in_one_piece or not late or any(map(n_hooks_after, (*early, *late))):
        backward(roots, grads)
        return WeightWork([])
    for node, note, _ in parts:
        node.register_prehook(note)
    with _freed(spine.nodes - {node for node, _, _ in parts}):
        backward(roots, grads, [*leaves, *early], keeps_graph=True)
    return WeightWork(parts)


@contextlib.contextmanager
def _freed(nodes: Iterable[Node]) -> Iterator[None]:
    """Within a backward that keeps the graph these give up what they saved as they run; at its end all."""
    left = {*filter(saves, nodes)}

    def free(node: Node, *_: object) -> None:
        left.discard(node)
        release(node)

    handles = [node.register_hook(functools.partial(free, node)) for node in left]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    for node in left:
        release(node)


class _Note:
    """Keeps the gradients that arrive at a node in I, and hands the same to it in W.

    Handing them back matters where the node's output has a hook: the engine calls it in both parts, and
    its effect must come once.
    """

    def __init__(self) -> None:
        self.grads: tuple[Any, ...] = ()

    def __call__(self, grads: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.grads:
            return self.grads
        self.grads = tuple(grads)
        return None


_IN_ONE_PIECE = ("CompiledFunctionBackward", "CheckpointFunctionBackward")
"""Of ``torch.compile``, which gives up in I what W needs, and ``checkpoint(use_reentrant=True)``."""


class _Spine:
    """The autograd graph of one microbatch in one stage, sorted into spine and what hangs off it."""

    def __init__(self, roots: Sequence[Root], leaves: Sequence[Tensor]) -> None:
        inputs = {get_gradient_edge(leaf).node for leaf in leaves}
        self._roots = {_edge(root).node for root in roots}
        self._order = _topological(self._roots)
        self._on_spine: set[Node] = set()
        for node in self._order:
            if node in inputs or any(c in self._on_spine for c, _ in node.next_functions):
                self._on_spine.add(node)

    @property
    def nodes(self) -> set[Node]:
        """Those that the inputs can be reached from."""
        return self._on_spine

    @property
    def is_in_one_piece(self) -> bool:
        """Whether part of it runs in a whole backward only: compiled functions, reentrant checkpoints."""
        custom = (type(node) for node in self._order if isinstance(node, BackwardCFunction))
        return any(kind.__name__ in _IN_ONE_PIECE for kind in custom)

    def split(self) -> tuple[list[tuple[Node, _Note, list[Tensor]]], list[Tensor]]:
        """(node, room for its gradients, its own parameters) latest first; and those to do in I."""
        below = self._parameters_below()
        users: dict[Tensor, list[Node]] = {}
        for node in reversed(self._order):
            if node in self._on_spine or node in self._roots:
                for parameter in self._hanging(node, below):
                    users.setdefault(parameter, []).append(node)
        by_node: dict[Node, list[Tensor]] = {}
        early = []
        for parameter, nodes in users.items():
            if len(nodes) == 1 and self._can_wait(nodes[0]):
                by_node.setdefault(nodes[0], []).append(parameter)
            else:
                early.append(parameter)
        late: list[tuple[Node, _Note, list[Tensor]]] = []
        for node, parameters in by_node.items():
            if any(is_matrix(p.shape) for p in parameters):
                late.append((node, _Note(), parameters))
            else:
                early += parameters
        return late, early

    def _can_wait(self, node: Node) -> bool:
        # a root off the spine gets no gradient in I that could be noted
        return node in self._on_spine and not isinstance(node, BackwardCFunction)

    def _hanging(self, node: Node, below: dict[Node, dict[Tensor, None]]) -> dict[Tensor, None]:
        """The parameters reached from ``node`` without going along the spine."""
        if node not in self._on_spine:
            return below[node]
        found: dict[Tensor, None] = {}
        for child, _ in node.next_functions:
            if child is not None and child not in self._on_spine:
                found.update(below[child])
        return found

    def _parameters_below(self) -> dict[Node, dict[Tensor, None]]:
        """For each node off the spine, the leaves that gather a gradient which it leads to."""
        below: dict[Node, dict[Tensor, None]] = {}
        for node in self._order:
            if node in self._on_spine:
                continue
            variable = getattr(node, "variable", None)
            found = {} if variable is None else {variable: None}
            for child, _ in node.next_functions:
                if child is not None:
                    found.update(below[child])
            below[node] = found
        return below


def _topological(roots: Iterable[Node]) -> list[Node]:
    """Every node below the roots, each after all it leads to."""
    order: list[Node] = []
    seen: set[Node] = set()
    for root in roots:
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                order.append(node)
            elif node not in seen:
                seen.add(node)
                stack.append((node, True))
                stack.extend((c, False) for c, _ in node.next_functions if c is not None and c not in seen)
    return order
