"""Values that cross between stages as flat tensors, and the edges that carry them and their gradients.

Moving them between ranks is left to ``channel``; when, to ``program``.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from ...errors import StepError
from ...stages import Section
from ...torch_private import pytree
from .plain_values import Unfit, dumps, loads

__all__ = ["REQUIRES_GRAD", "Edge", "Frame", "edges_between", "flatten"]

GRAD, REQUIRES_GRAD = operator.attrgetter("grad"), operator.attrgetter("requires_grad")


class _Slot:
    """Marks a tensor's place in a :class:`Frame`."""

    def __repr__(self) -> str:
        return "*"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Slot)

    def __hash__(self) -> int:
        return 0


SLOT = _Slot()


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """What remains of values when their tensors are taken out: structure, sizes, None and the like."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Frame:
        """The frame of values whose tensors are slots."""
        leaves, structure = pytree.tree_flatten(list(values))
        return cls(structure, tuple(leaves))

    def fill(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The values again, with these tensors in place."""
        rest = iter(tensors)
        return pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, _Slot) else leaf for leaf in self.leaves], self.structure
        )

    def to_text(self) -> str:
        """As JSON. Raises :class:`StepError` for objects that only this process can make."""
        places = [isinstance(leaf, _Slot) for leaf in self.leaves]
        rest = [None if is_slot else leaf for leaf, is_slot in zip(self.leaves, places, strict=True)]
        try:
            return dumps([pytree.treespec_dumps(self.structure), places, rest])
        except (Unfit, NotImplementedError) as error:
            raise StepError(
                f"a value that crosses between ranks is made of more than tensors and plain values: {error}; "
                "keep what makes it and what takes it in one stage"
            ) from error

    @classmethod
    def from_text(cls, text: str) -> Frame:
        """Of :meth:`to_text`."""
        structure, places, rest = loads(text)
        leaves = tuple(SLOT if is_slot else leaf for is_slot, leaf in zip(places, rest, strict=True))
        return cls(pytree.treespec_loads(structure), leaves)


def flatten(values: Sequence[Any]) -> tuple[Sequence[Tensor], Frame | None]:
    """The tensors of some values in order, and their frame; None when every value is a tensor."""
    for value in values:
        if not isinstance(value, Tensor):
            break
    else:
        return values, None
    leaves, structure = pytree.tree_flatten(list(values))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, Frame(structure, tuple(SLOT if isinstance(x, Tensor) else x for x in leaves))


SETTLED_AFTER = 8
"""How many messages must equal an earlier one for the same input shapes before an edge counts as settled."""


class Book:
    """What messages of one kind along one edge were announced to hold, by signature of the inputs.

    Both ends keep one and write the same in it. ``settled`` has what may be relied on: nothing at first, as
    shapes may depend on data (tokens routed to an expert), and so nothing ever once two messages with the
    same signature differed.

    Attributes
    ----------
    last: by signature, the latest announcement. varies: whether two with one signature differed.
    """

    def __init__(self) -> None:
        self.last: dict[int, Any] = {}
        self.settled: dict[int, Any] = {}
        self._n_equal = 0
        self.varies = False

    def note(self, signature: int, found: Any) -> None:
        """Enter the announcement of one more message."""
        known = self.last.get(signature)
        self.last[signature] = found
        self._n_equal += known == found
        self.varies = self.varies or known not in (None, found)
        if not self.varies and self._n_equal >= SETTLED_AFTER:
            self.settled = self.last

    def unsettle(self) -> None:
        """Rely on nothing any more."""
        self.varies, self.settled = True, {}


class Edge:
    """All values one stage hands another, and the gradients that come back, per microbatch.

    Attributes
    ----------
    source, destination: the stages.
    outputs, inputs: the values' places in the outputs of the one and the inputs of the other; ``~i`` in
        ``outputs`` for what the source took as its own input ``i`` and only passes on.
    outbox: what the source gave and has not been sent yet, when the destination is on another rank.
    roots: where gradients enter the source's graph, of its own outputs that require one; they leave the
        outputs' memory free.
    leaves: what the destination's graph grows from: the same values, detached.
    grads: the gradients of ``leaves`` that require one, on their way back.
    values, gradients: what messages of either kind were announced to hold.
    """

    def __init__(self, source: Section, destination: Section, names: Sequence[str]) -> None:
        self.source, self.destination = source.index, destination.index
        self.names = tuple(names)
        self.outputs = tuple(
            source.outputs.index(n) if n in source.outputs else ~source.inputs.index(n) for n in names
        )
        self.inputs = tuple(destination.inputs.index(n) for n in names)
        self._is_of_outputs = min(self.outputs) >= 0
        self.values, self.gradients = Book(), Book()
        self.begin(0)

    def begin(self, n_microbatches: int) -> None:
        """Forget what the last step left."""
        self.outbox: list[tuple[list[Tensor], Frame | None, tuple[bool, ...]] | None] = [
            None
        ] * n_microbatches
        self.roots: list[Sequence[Tensor | GradientEdge] | None] = [None] * n_microbatches
        self.leaves: list[list[Tensor] | None] = [None] * n_microbatches
        self.grads: list[Sequence[Tensor | None] | None] = [None] * n_microbatches

    def pick(self, outputs: Sequence[Any], values: Sequence[Any]) -> tuple[Sequence[Tensor], Frame | None]:
        """What goes along it, flat, of what its source gave and took."""
        given = outputs if self._is_of_outputs else (*outputs, *reversed(values))
        return flatten(list(map(given.__getitem__, self.outputs)))

    def keep_leaves(self, m: int, tensors: Sequence[Tensor], flags: Sequence[bool]) -> None:
        """Let the destination's own tensors require a gradient where flagged."""
        self.leaves[m] = list(map(Tensor.requires_grad_, itertools.compress(tensors, flags)))

    def harvest(self, m: int) -> None:
        """Take the gradients of microbatch ``m`` off its leaves, once its backward is through."""
        leaves = self.leaves[m]
        if leaves is not None:
            self.grads[m] = list(map(GRAD, leaves))
            self.leaves[m] = None

    def take(self, m: int, roots: list[Tensor | GradientEdge], grads: list[Tensor]) -> None:
        """Append the roots of microbatch ``m`` that a gradient came back for, and those gradients."""
        for root, grad in zip(self.roots[m] or (), self.grads[m] or (), strict=True):
            if grad is not None:
                roots.append(root)
                grads.append(grad)
        self.roots[m] = self.grads[m] = None


def edges_between(stages: Sequence[Section]) -> tuple[Edge, ...]:
    """One edge for each pair of stages (or what is run of them) where one hands the other a value.

    A value goes to each other rank once: to the first of the rank's stages that needs it, which hands it on
    to the others there, and gathers their gradients.
    """
    producer = {name: stage for stage in stages for name in stage.outputs}
    names: dict[tuple[int, int], list[str]] = {}
    holder: dict[tuple[str, int], Section] = {(n, stage.rank): stage for n, stage in producer.items()}
    for stage in stages:
        for name in stage.inputs:
            if name in producer:
                source = holder.setdefault((name, stage.rank), producer[name])
                if source.rank != stage.rank:
                    holder[name, stage.rank] = stage
                names.setdefault((source.index, stage.index), []).append(name)
    return tuple(Edge(stages[a], stages[b], found) for (a, b), found in names.items())
