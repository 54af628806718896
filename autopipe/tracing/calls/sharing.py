"""Leaves that are alike run once where only the shapes of what they give count: the others get as much.

Who may share is decided by those who run them: the search for sizes, recordings on the meta device, and those
of what other values of the inputs would lead to.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...torch_private import CALL_HOOK
from ..inputs.structure import flatten, unflatten
from ..members import submodule
from . import functions
from .call import Call, Depends
from .kinds import Kind

__all__ = ["Sharing", "Twins", "outline", "quiet"]

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_SHARED = frozenset({*_PLAIN, torch.Tensor, nn.Parameter})


class Sharing:
    """Lets leaves that give equal shapes share the value of the first of them in one run.

    What is seen is then right, and the data in the result are not, where the sharing ``is_used``. ``kind``
    tells a leaf's kind by its path.
    """

    def __init__(self, kind: Callable[[str], Kind]) -> None:
        self.kind = kind
        self.values: dict[Any, Any] = {}
        self.is_used = False

    def value(
        self, path: str, surroundings: Any, args: Any, kwargs: Any, like: Any, run: Callable[[], Any]
    ) -> Any:
        """What ``run`` gives, or a leaf of its kind has given for the same, as it did on the example."""
        kind = self.kind(path)
        if kind.is_hooked:
            return run()
        key = kind, surroundings, outline((args, kwargs)), like
        if key not in self.values or any(map(functions.is_freed, flatten(self.values[key])[0])):
            self.values[key] = run()
            return self.values[key]
        self.is_used = True
        return _alias(self.values[key])

    @contextlib.contextmanager
    def among(self, model: nn.Module, calls: Sequence[Call]) -> Iterator[None]:
        """Within it the leaves that these calls are of share their values when the model calls them."""
        likes: dict[str, tuple[Any, ...]] = {}
        for call in calls:
            if call.op == "call_module":
                likes[call.target] = (*likes.get(call.target, ()), outline(call.value))
        hooked = [(vars(submodule(model, path)), path) for path in likes]
        before = [(attributes, attributes.get(CALL_HOOK)) for attributes, _ in hooked]
        for attributes, path in hooked:
            attributes[CALL_HOOK] = self._shared(submodule(model, path), path, likes[path])
        try:
            yield
        finally:
            for attributes, own in before:
                del attributes[CALL_HOOK]
                if own is not None:
                    attributes[CALL_HOOK] = own

    def _shared(self, module: nn.Module, path: str, like: Any) -> Callable[..., Any]:
        original = getattr(module, CALL_HOOK) or module._call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            is_grad = torch.is_grad_enabled()
            return self.value(path, is_grad, args, kwargs, like, lambda: original(*args, **kwargs))

        return call


class Twins:
    """What leaves have given in one recording, for those that are alike and come later.

    Of all leaves, or of those at the paths ``among`` alone, which tell whether each has drawn. ``drawn`` are
    the calls of functions that draw which those made that did, by the places of the modules inside.
    """

    def __init__(self, kind: Callable[[str], Kind], among: Mapping[str, bool] | None = None) -> None:
        self.kind, self.among = kind, among
        if among is not None:
            counts = collections.Counter(map(kind, among))
            self.among = {path: draws for path, draws in among.items() if counts[kind(path)] > 1}
        self.results: dict[Any, Any] = {}
        self.drawn: dict[Any, Sequence[int]] = {}
        self.is_used = False

    def key(self, path: str, inside: Sequence[nn.Module], surroundings: Any, actual: Any) -> Any:
        """What leaves that give as much have in common; None for one that must run itself.

        That is one with code put on it from outside, and one that is given what it may change or keep.
        """
        if self.among is not None and path not in self.among:
            return None
        leaves, spec = flatten(actual)
        is_plain = _SHARED.issuperset(map(type, leaves))
        is_own = not any("forward" in vars(m) for m in inside)
        if not is_plain or not is_own or _may_change(actual) or self.kind(path).is_hooked:
            return None
        flags = tuple(v.requires_grad for v in leaves if isinstance(v, torch.Tensor))
        # a tensor that is given twice is not two that are alike
        places = tuple(next(i for i, w in enumerate(leaves) if w is v) for v in leaves)
        draws = self.among is not None and self.among[path]
        return self.kind(path), surroundings, spec, outline(actual), flags, places, draws

    def keep(
        self, key: Any, call: Call, result: Any, actual: Any, draws: Sequence[int] | None = None
    ) -> None:
        """Remember what a leaf gave, if another can give as much: new tensors, and nothing written beside.

        Of one that drew just now, ``draws`` are the calls that did, by the places of the modules inside.
        """
        leaves, _ = flatten(result)
        if call.writes or call.mutated:
            return
        if not all(v is None or type(v) is torch.Tensor for v in leaves):
            return
        given = {s for v in flatten(actual)[0] for s in functions.storages(v)}
        made = [s for v in leaves if v is not None for s in functions.storages(v)]
        if len(made) == len({*made} - given) == sum(v is not None for v in leaves):
            self.results[key] = result
            if draws is not None:
                self.drawn[key] = draws

    def copy(self, key: Any) -> Callable[..., Any] | None:
        """What gives as much as the leaf that was run, in memory of its own; None where none was."""
        if key is None or key not in self.results:
            return None
        leaves, spec = flatten(self.results[key])
        if any(map(functions.is_freed, leaves)):
            return None
        copies = [None if v is None else v.clone() for v in leaves]
        if outline(copies) != outline(leaves):  # clones of expanded tensors are not
            return None
        self.is_used = True
        return lambda *args, **kwargs: unflatten(spec, copies)


def quiet(calls: Sequence[Call]) -> dict[str, bool]:
    """The leaves with weights that are called once and do nothing but give what they give, and may draw.

    Whether they do, by their paths.
    """
    counts = collections.Counter(c.target for c in calls if c.op == "call_module")
    leaves = (c for c in calls if c.op == "call_module" and counts[c.target] == 1)
    return {c.target: c.is_random for c in leaves if c.depends & Depends.STATE and not c.leaves_more}


def outline(value: Any) -> tuple[Any, ...]:
    """A value without the data in its tensors."""
    leaves, spec = flatten(value)
    return spec, *((t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else str(t) for t in leaves)


def _alias(value: Any) -> Any:
    """A value with other tensors on the same memory, whose shapes may be changed in place."""
    leaves, spec = flatten(value)
    return unflatten(spec, [v.detach() if isinstance(v, torch.Tensor) else v for v in leaves])


def _may_change(actual: Any) -> bool:
    """Whether lists, dicts or objects are among a call's arguments: a leaf may put things into them."""
    args, kwargs = actual
    values = [*args, *kwargs.values()]
    while values:
        value = values.pop()
        if type(value) in (tuple, torch.Size):
            values += value
        elif not isinstance(value, (*_PLAIN, torch.Tensor)):
            return True
    return False
