"""What a leaf's code uses of other layers: their parameters, and what they have made of what it is given.

The former come by a list, a function, a hook or a global, and a stage that has the leaf would not have them;
nor would it have what a derivative leads through. What is done about it is left to ``recorder``.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..calls.functions import tensors

__all__ = ["Foreign", "Used"]


@dataclasses.dataclass(slots=True)
class Used:
    """The ``names`` of others' parameters, and whether the code ``derives`` through what others have done.

    ``takes_derivatives``: whether it does so at all.
    """

    names: dict[str, None] = dataclasses.field(default_factory=dict)
    derives: bool = False
    takes_derivatives: bool = False


class Foreign:
    """Notes that while a leaf runs; ``names`` maps ids of the model's parameters to their names."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.names = names
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

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A function of torch is called with these arguments."""
        if self.own is None:
            return
        if func is torch.autograd.grad or func is torch.Tensor.backward:
            # inputs of the one come second
            by = kwargs.get("inputs") if func is torch.Tensor.backward else (*args, *kwargs.values())[1:2]
            self.used.derives |= _are_made_of(tensors(by), self.given)
            self.used.takes_derivatives = True
        self._note_parameters((*args, *kwargs.values()) if kwargs else args, self.own)

    def _note_parameters(self, values: Iterable[Any], own: Collection[int]) -> None:
        for value in values:
            if type(value) is nn.Parameter:
                if id(value) not in own and id(value) in self.names:
                    self.used.names[self.names[id(value)]] = None
            elif type(value) in (tuple, list):
                self._note_parameters(value, own)


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
