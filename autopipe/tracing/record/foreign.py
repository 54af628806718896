"""What a leaf's code uses of other layers: parameters, what they have made, what a derivative leads through.

The first two come by a list, a function, a hook or a global, and a stage that has the leaf would not have
them; nor would it have what a derivative leads through. What is done about it is left to ``recorder``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...torch_private import is_cached_weight, newest, sequence_number
from ..calls.functions import tensors
from ..inputs.structure import flatten

__all__ = ["Foreign", "Used"]

_DERIVING = frozenset({torch.autograd.grad, torch.Tensor.backward})


@dataclasses.dataclass(slots=True)
class Used:
    """The ``names`` of others' parameters, and whether the code ``derives`` through what others have done.

    ``takes_derivatives``: whether it does so at all. ``taken`` is a tensor that others have made and that it
    is not given.
    """

    names: dict[str, None] = dataclasses.field(default_factory=dict)
    derives: bool = False
    takes_derivatives: bool = False
    taken: torch.Tensor | None = None


class Foreign:
    """Notes that while a leaf runs; ``names`` maps ids of the model's parameters to their names.

    What the recording ``is_computed`` of inputs is made by others where no call of the leaf was given it, as
    are tensors whose graph the recording has made before the call that runs, and no other call of the leaf.
    """

    def __init__(self, names: Mapping[int, str], is_computed: Callable[[torch.Tensor], bool]) -> None:
        self.names, self.is_computed = names, is_computed
        self.began = self.since = newest()
        self.runs: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self.leaf = ""
        self.handed: defaultdict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        self.own: Collection[int] | None = None
        self.given: Sequence[torch.Tensor] = ()
        self.used = Used()

    @contextlib.contextmanager
    def to(self, own: Collection[int], given: Any) -> Iterator[Used]:
        """Within it what is used of others is noted: of parameters those whose ids are none of ``own``."""
        before, self.own, self.given, self.used = (
            (self.own, self.given, self.used),
            own,
            tensors(given),
            Used(),
        )
        try:
            yield self.used
        finally:
            self.own, self.given, self.used = before

    @contextlib.contextmanager
    def running(self, leaf: str) -> Iterator[None]:
        """Within it the code of the leaf at a path runs: its forward, or what code outside sets on it."""
        before, self.leaf, self.since = (self.leaf, self.since), leaf, newest()
        begun = self.since
        try:
            yield
        finally:
            self.runs[leaf].append((begun, newest()))
            self.leaf, self.since = before

    def hand(self, leaf: str, values: Any) -> None:
        """The leaf at a path is given something, or code outside sets it there."""
        given = (v for v in flatten(values)[0] if isinstance(v, torch.Tensor))
        self.handed[leaf].update({id(t): t for t in given})

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A function of torch is called with these arguments."""
        if self.own is None:
            return
        if func in _DERIVING:
            # inputs of the one come second
            by = kwargs.get("inputs") if func is torch.Tensor.backward else (*args, *kwargs.values())[1:2]
            self.used.derives |= _are_made_of(tensors(by), self.given)
            self.used.takes_derivatives = True
        self._note_tensors((*args, *kwargs.values()) if kwargs else args, self.own)

    def _note_tensors(self, values: Iterable[Any], own: Collection[int]) -> None:
        for value in values:
            kind = type(value)
            if kind is nn.Parameter:
                if id(value) not in own and id(value) in self.names:
                    self.used.names[self.names[id(value)]] = None
            elif kind is torch.Tensor:
                if self.leaf and self.used.taken is None and self._is_taken(value):
                    self.used.taken = value
            elif kind in (tuple, list):
                self._note_tensors(value, own)

    def _is_taken(self, tensor: torch.Tensor) -> bool:
        """Whether others have made a tensor in this recording, and the leaf that runs is not given it.

        Not so a weight that torch keeps for whoever asks: without that the leaf makes it itself.
        """
        if (node := tensor.grad_fn) is None:
            is_of_others = self.is_computed(tensor)
        else:
            number = sequence_number(node)
            is_of_others = self.began <= number < self.since
            is_of_others = is_of_others and not any(a <= number < b for a, b in self.runs[self.leaf])
        is_taken = is_of_others and id(tensor) not in self.handed[self.leaf]
        return is_taken and not is_cached_weight(tensor)


def _are_made_of(by: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> bool:
    """Whether any of the tensors ``given`` was made of one of those ``by`` which a derivative is taken."""
    leaves, nodes = {id(t) for t in by if t.grad_fn is None}, {t.grad_fn for t in by}
    waiting = [node for t in given if t.grad_fn is not None for node, _ in t.grad_fn.next_functions]
    seen = set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node in nodes or id(getattr(node, "variable", None)) in leaves:
            return True
        seen.add(node)
        waiting += (n for n, _ in node.next_functions)
    return False
