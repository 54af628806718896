"""Layers that were seen to do the same: what many rows or other data do in one of them, they do in all.

A stack of layers is run whole on few rows and once on many. Where nothing in such a layer goes by data, the
questions that come behind need but one of each kind to run. Seeing what layers do is left to
``data_dependent``, asking to ``row_questions``.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..calls.call import Call, Recording
from ..calls.functions import tensors
from ..calls.kinds import Kind
from ..calls.sharing import Sharing

__all__ = ["AlikeLayers", "deed"]

_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype})
_WORTH = 3
"""So many layers less to run are worth that another question runs others."""
_ALONE = Kind("", "", True)


def deed(name: str, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> tuple[Any, ...]:
    """What a function of torch did, but for the data: its name, plain arguments, sizes of its result."""
    plain = [value for value in args if type(value) in _PLAIN]
    made = (result.shape,) if isinstance(result, Tensor) else (*(t.shape for t in tensors(result)),)
    named = [(n, v) for n, v in kwargs.items() if type(v) in _PLAIN] if kwargs else ()
    return name, *plain, *named, made


class AlikeLayers:
    """The layers of a form that did the same as others, as they were ``seen`` to run.

    Those alone that are called once, take and give tensors and plain values, and leave nothing behind.
    """

    def __init__(self, form: Recording) -> None:
        n_calls = collections.Counter(c.target for c in form.calls if c.op == "call_module")
        self._asked = {id(c) for c in form.calls if n_calls[c.target] == 1 and _only_gives(form, c)}
        self._firsts: dict[Any, Kind] = {}
        self._kinds: dict[str, Kind] = {}

    def see(self, call: Call, done: Sequence[Any] | None) -> None:
        """Be shown a call that ran, with what was ``done`` inside; None where that went by data."""
        if done and call.op == "call_module" and id(call) in self._asked:
            first = self._firsts.setdefault((*done,), Kind(call.target, "", False))
            self._kinds[call.target] = first

    @property
    def is_worth_it(self) -> bool:
        """Whether many layers need not run."""
        return len(self._kinds) - len(self._firsts) >= _WORTH

    def of_kind(self, kind: Callable[[str], Any]) -> AlikeLayers:
        """The same, but that layers which are alike must be of one kind by their paths, too."""
        other = copy.copy(self)
        told = {
            path: dataclasses.replace(first, weights=str(kind(path))) for path, first in self._kinds.items()
        }
        other._kinds, other._firsts = told, {each: each for each in told.values()}
        return other

    def sharing(self) -> Sharing:
        """What lets the first of each kind run for all in one run."""
        return Sharing(lambda path: self._kinds.get(path, _ALONE))


def _only_gives(form: Recording, call: Call) -> bool:
    """Whether a layer makes new tensors of tensors and plain values, and does nothing beside."""
    return not form.leaves_anything(call) and all(
        map(_is_plain, (*call.args, *call.kwargs.values(), call.value))
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is nothing that code may change but a tensor, or tuples of such."""
    if isinstance(value, Call):
        return _is_plain(value.value)
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, Tensor)
