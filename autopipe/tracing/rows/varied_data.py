"""Other data for two rows of a batch, where their own may hide that rows are mixed or weighted.

A mask of ones leaves no row lighter than another, and of two rows that are as long each, or have each a token
that is asked for, neither changes what all rows come to. Running them is left to ``mixing``.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...graph import Dim
from ...torch_private import Unread, unread
from ...units import Size
from ..calls.call import Call, Depends, Recording, map_calls
from ..calls.faults import of_models
from ..calls.functions import classify, plain_name, tensors
from ..calls.kinds import kind_of
from ..calls.labels import label_options
from ..calls.perform import run_call
from ..code.leaves import asking
from ..inputs.contents import is_whole
from ..inputs.structure import flatten, mapped, unflatten
from ..members import OF_ALL, submodule
from ..sizes.dims import axis_of
from ..sizes.other_masks import LEFT_OUT
from ..state.state import generators
from .results import is_number

__all__ = [
    "layer_kind",
    "made_of_contents",
    "made_of_rows",
    "of_other_sign",
    "of_other_weights",
    "signed",
    "told_otherwise",
    "unlike",
    "with_missing",
]

_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_COMPARING = {"eq": (0, 0), "ge": (0, -1), "gt": (1, 0), "le": (0, 1), "lt": (-1, 0), "ne": (0, 0)}
"""Functions that compare, with how far above the other number one is that tells, and one that does not.

The same twice where any other does not.
"""
_NOWHERE = contextlib.nullcontext()
_PLAIN = frozenset({bool, int, float, str, type(None)})
_MOST_ASKED = 4
"""So many numbers are looked at that code compares whole ones with."""


def signed(given: Mapping[str, Tensor], dim: Dim, form: Recording) -> list[str]:
    """The inputs whose second row may be of the other sign: one expert may take all the example's rows.

    Of no use where no number is made of rows.
    """
    if not any(isinstance(c, Call) and is_number(c.value) for c in form.calls[-1].args[0]):
        return []
    return [n for n, axis in dim.where if given[n].is_floating_point() and given[n].shape[axis] > 1]


def of_other_sign(given: Mapping[str, Tensor], dim: Dim, names: Collection[str]) -> dict[str, Tensor]:
    """The tensors with a second row of the other sign in these inputs."""
    out = dict(given)
    for name, axis in dim.where:
        if name in names:
            changed = given[name].detach().clone()
            changed.select(axis, 1).neg_()
            out[name] = changed.requires_grad_(given[name].requires_grad)
    return out


def of_other_weights(given: Mapping[str, Tensor], dim: Dim) -> Iterator[dict[str, Tensor]]:
    """The tensors with half as much in the second row of those whose first two are alike, as weights of ones.

    Weights that are all 0 are taken for ones.
    What divides by all weights is then no mean of what it gives for each row.
    """
    out = dict(given)
    for name, axis in dim.where:
        tensor = given[name].detach()
        if not (tensor.is_floating_point() and tensor.shape[axis] > 1):
            continue
        if torch.equal(tensor.select(axis, 0), tensor.select(axis, 1)):
            changed = tensor.clone() if tensor.any() else torch.ones_like(tensor)
            changed.select(axis, 1).div_(2)
            out[name] = changed.requires_grad_(given[name].requires_grad)
    if any(out[name] is not given[name] for name in given):
        yield out


def with_missing(given: Mapping[str, Tensor], dim: Dim) -> Iterator[dict[str, Tensor]]:
    """The tensors with no numbers in the second row, or in half of it; one input each."""
    for name, axis in dim.where:
        tensor = given[name]
        if not tensor.is_floating_point() or tensor.shape[axis] < 2:
            continue
        width = tensor.select(axis, 1).shape[-1] if tensor.dim() > 1 else 1
        for first in {0, width // 2}:
            holed = tensor.detach().clone()
            row = holed.select(axis, 1)
            row[..., first:].fill_(torch.nan) if row.dim() else row.fill_(torch.nan)
            yield {**given, name: holed.requires_grad_(tensor.requires_grad)}


def told_otherwise(given: Mapping[str, Tensor], dim: Dim) -> Iterator[dict[str, Tensor]]:
    """The tensors with a number beside the rows other than it is, one each: code kept whole may go by it.

    On an accelerator whole numbers get no larger, as in :func:`unlike`.
    """
    with_rows = {name for name, _ in dim.where}
    for name, tensor in given.items():
        if name in with_rows or tensor.numel() != 1 or tensor.is_complex():
            continue
        number = tensor.detach()
        if tensor.dtype is torch.bool:
            others = [~number]
        else:
            others = [-number, number + number + 1] if tensor.is_floating_point() else _near(number)
        for other in others:
            yield {**given, name: other.requires_grad_(tensor.requires_grad)}


def _near(number: Tensor) -> list[Tensor]:
    if number.device.type == "cpu":
        return [number + 1]
    return [number - 1] if number.item() > 0 else []


def unlike(
    model: nn.Module,
    form: Recording,
    given: Mapping[str, Tensor],
    dim: Dim,
    shapes: _Shapes,
    *,
    reads: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """The tensors with whole numbers of the first two rows less like one another than they are, one each.

    Nothing where the form makes nothing of all rows together but means over labels, which can be counted; or
    else, of a form whose code ``reads`` values, only there: what it makes of them is not seen. On an
    accelerator none that may point out of a table: what fails so there ends all work of the process.
    """
    if gathers(model, form, given, dim, shapes) is reads:
        return
    for name, axis in dim.where:
        tensor = given[name]
        if not is_whole(tensor) or min(tensor.numel(), tensor.shape[axis]) < 2:
            continue
        a_row, b_row = (tensor.detach().select(axis, place) for place in (0, 1))
        for a, b in itertools.chain(_pairs(a_row, b_row, tensor), _asked_for(form, a_row, tensor)):
            other = tensor.detach().clone()
            other.select(axis, 0).copy_(a)
            other.select(axis, 1).copy_(b)
            if not torch.equal(other, tensor):
                yield {**given, name: other}


def _pairs(a: Tensor, b: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    least, most = tensor.min(), tensor.max()
    if least != most:
        yield least.expand_as(a), most.expand_as(b)
    elif tensor.device.type == "cpu":
        yield a, ~b if tensor.dtype is torch.bool else b + 1
    if not a.dim():
        if tensor.dtype is not torch.bool:
            near = a - 1 if a > 0 else a + 1 if tensor.device.type == "cpu" else a
            known = {int(a), int(b)}
            for other in (b // 2 if b > 0 else b, torch.zeros_like(b), near):
                if int(other) not in known:
                    known.add(int(other))
                    yield a, other
        return
    for left_out in (0, LEFT_OUT) if tensor.dtype is torch.int64 else (0,):
        if tensor.device.type == "cpu" or left_out >= least:
            holed = b.clone()
            holed[..., holed.shape[-1] // 2 :] = left_out
            yield a, holed


def _asked_for(form: Recording, a: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of which the second row is what code compares whole numbers with, and the first is not."""
    if tensor.dtype is torch.bool:
        return
    least, most = int(tensor.min()), int(tensor.max())
    compared = (c for c in form.calls if plain_name(c).strip("_") in _COMPARING and len(c.args) == 2)
    others = (
        (_COMPARING[plain_name(c).strip("_")], c.args[1]) for c in compared if c.depends & Depends.INPUT
    )
    asked = {n + above: n + beside for (above, beside), n in others if type(n) is int}
    known = {LEFT_OUT, *((0,) if a.dim() else ())}
    for number, beside in [pair for pair in asked.items() if pair[0] not in known][:_MOST_ASKED]:
        away = next(n for n in (least, most, number + 1) if n != number)
        other = away if beside == number or (away > number) == (beside > number) else beside
        if tensor.device.type == "cpu" or (least <= number <= most and least <= other <= most):
            yield torch.full_like(a, other), torch.full_like(a, number)


def gathers(
    model: nn.Module, form: Recording, given: Mapping[str, Tensor], dim: Dim, shapes: _Shapes
) -> bool:
    """Whether a call gives what has no rows any more of what has: not so of sums of means over labels."""
    parts = _Parts(model, form, given, dim, shapes)
    made = made_of_rows(form, {name for name, _ in dim.where}, parts.hold)
    means = _means(model, form, made)
    ends = {id(call) for call in form.calls if call.op == "output"} | means
    used = {id(c) for call in form.calls if id(call) not in ends for c in call.inputs}
    for call in form.calls:
        if id(call) not in made or call.op in ("placeholder", "output"):
            continue
        if parts.are_without(call) and (id(call) in used or id(call) not in means):
            return bool(shapes.get(id(call)) or isinstance(call.value, (int, float)) or tensors(call.value))
    return False


def made_of_contents(
    model: nn.Module, form: Recording, given: Mapping[str, Tensor], dim: Dim, shapes: _Shapes
) -> set[int]:
    """As :func:`made_of_rows`, without what modules make of the sizes or types of rows alone."""
    parts = _Parts(model, form, given, dim, shapes)
    return made_of_rows(form, {name for name, _ in dim.where}, parts.hold)


def _means(model: nn.Module, form: Recording, made: Collection[int]) -> set[int]:
    """The calls that give means over labels, sums of such, or multiples by what rows do not make."""
    found = set[int]()
    for call in form.calls:
        options = label_options(model, call)
        terms = [c for c in call.inputs if id(c) in made]
        if options is not None:
            is_mean = options["reduction"] == "mean"
        else:
            is_multiple = call.target in ("mul", "div") and len(terms) == 1 and call.args[0] is terms[0]
            is_linear = call.op == "call_method" and (call.target == "add" or is_multiple)
            is_mean = is_linear and bool(terms) and found.issuperset(map(id, terms))
        if is_mean:
            found.add(id(call))
    return found


class _Parts:
    """Which tensors of a form's calls hang on rows, where a module gives some that have none."""

    def __init__(
        self, model: nn.Module, form: Recording, given: Mapping[str, Tensor], dim: Dim, shapes: _Shapes
    ) -> None:
        self._model, self._form, self._given, self._dim, self._shapes = model, form, given, dim, shapes
        self._device = given[dim.where[0][0]].device
        self._written = frozenset[int]().union(*(c.writes for c in form.calls))
        self._values: dict[int, Any] = {}
        self._held: dict[int, bool] = {}
        self._known: dict[Any, list[Any]] = {}

    def are_without(self, call: Call) -> bool:
        """Whether a call that holds rows gives such a tensor without rows, or no tensor."""
        known = self._shapes.get(id(call), ())
        found = tensors(self._values[id(call)]) if id(call) in self._held else []
        if len(found) != len(known):
            return not known or any(axis_of(shape, self._dim.name) is None for shape in known)
        pairs = zip(known, found, strict=True)
        return any(axis_of(s, self._dim.name) is None and isinstance(t, Unread) for s, t in pairs)

    def hold(self, call: Call, made: Collection[int]) -> bool:
        """Whether a call that is given what is ``made`` of rows, by id, gives a tensor that hangs on them.

        It is run on tensors without content in their place. A module may read their type alone, as angles
        do, or give beside its rows what hangs on places alone, as biases do.
        """
        known = self._shapes.get(id(call), ())
        is_mixed = call.op == "call_module" and any(axis_of(s, self._dim.name) is None for s in known)
        if not (is_mixed or (call.accessor and id(call.inputs[0]) in self._held)):
            return True
        try:
            with asking():
                self._values[id(call)] = found = self._of_alike(call, made)
        except of_models():  # whatever it is: then nothing is proven
            return True
        self._held[id(call)] = any(isinstance(t, Unread) for t in tensors(found))
        return self._held[id(call)]

    def _value(self, call: Call, made: Collection[int]) -> Any:
        """What a call gives, without content where it is made of rows."""
        if id(call) not in self._values:
            if id(call) in made:
                self._values[id(call)] = mapped(self._unread, call.value)
            else:
                is_tensor = bool(tensors(call.value))
                self._values[id(call)] = self._run(call, made) if is_tensor else call.value
        return self._values[id(call)]

    def _of_alike(self, call: Call, made: Collection[int]) -> Any:
        """What a call gives; of a layer, what one like it gave: no content, what it is given, plain values.

        Not where that one read what tensors hold, as its weights.
        """
        if call.op != "call_module":
            return self._run(call, made)
        leaves, spec = flatten(self._given_to(call, made))
        kind = layer_kind(self._model, call.target), call.path == call.target
        key = kind, spec, *map(_outline, leaves)
        like, made_spec = flatten(call.value)
        known = self._known.get(key, ())
        if known and len(known) == len(like):
            pairs = zip(known, like, strict=True)
            return unflatten(made_spec, [give(leaves, self._unread(of)) for give, of in pairs])
        reads = _Reads()
        value = self._run(call, made, reads)
        given = {id(v): i for i, v in enumerate(leaves) if isinstance(v, Tensor)}
        gives = [_given_by(v, given) for v in flatten(value)[0]]
        if not reads.any and all(gives):
            self._known[key] = gives
        return value

    def _given_to(self, call: Call, made: Collection[int]) -> tuple[Any, Any]:
        args, kwargs = (map_calls(x, lambda c: self._value(c, made)) for x in (call.args, call.kwargs))
        return args, kwargs

    def _run(
        self, call: Call, made: Collection[int], within: contextlib.AbstractContextManager[Any] = _NOWHERE
    ) -> Any:
        args, kwargs = self._given_to(call, made)
        drawn, told = generators(self._device), (self._given, self._device)
        with within:
            found = run_call(self._model, self._form.constants, call, args, kwargs, *told)
        if call.mutated or call.storages & self._written or generators(self._device) != drawn:
            raise ValueError(f"{call.name} is other at other times")
        return found

    def _unread(self, leaf: Any) -> Any:
        return unread(leaf, self._device) if isinstance(leaf, Tensor) else leaf


class _Reads(TorchFunctionMode):
    """Notes whether ``any`` function within it tells code what a tensor holds."""

    any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.any = self.any or classify(func)[0] in ("read", "data shaped")
        return func(*args, **(kwargs or {}))


def _given_by(value: Any, given: Mapping[int, int]) -> Callable[[Sequence[Any], Any], Any] | None:
    """What gives a value like this of what a layer is given and a tensor without content; or None."""
    if isinstance(value, Unread):
        return lambda leaves, of: of
    if isinstance(value, Tensor):
        place = given.get(id(value))
        return None if place is None else lambda leaves, of: leaves[place]
    return (lambda leaves, of: value) if type(value) in _PLAIN else None


def _outline(value: Any) -> Any:
    """A value without content; whether that is not to be read."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.requires_grad, isinstance(value, Unread)
    return value if type(value) in _PLAIN else id(value)


def layer_kind(model: nn.Module, path: str) -> Any:
    """What a layer is, with the code and all else that its modules hold beside weights and plain values."""
    modules = [*submodule(model, path).modules()]
    held = [
        (name, _code_of(value))
        for module in modules
        for name, value in vars(module).items()
        if name not in OF_ALL and not isinstance(value, (bool, int, float, str, Tensor))
    ]
    return kind_of(model, path), *(id(type(module)) for module in modules), *held


def _code_of(value: Any) -> Any:
    """What a function does, if it is written in it alone; else what is none but the value itself."""
    is_alone = isinstance(value, types.FunctionType) and not (
        value.__closure__ or value.__defaults__ or value.__kwdefaults__ or vars(value)
    )
    return value.__code__ if is_alone else id(value)


def made_of_rows(
    form: Recording,
    inputs: Collection[str],
    hold: Callable[[Call, Collection[int]], bool] = lambda call, made: True,
) -> set[int]:
    """The calls whose values hang on the data of a batch's rows: of ``inputs``, beyond their sizes.

    ``hold`` tells of one that is given what is so made, by id, whether it is.
    """
    found, written = set[int](), set[int]()
    for call in form.calls:
        is_row = call.op == "placeholder" and call.target in inputs
        is_touched = bool((call.storages | call.reads) & written)
        is_fed = is_touched or any(id(c) in found for c in call.inputs)
        if is_row or (is_fed and call.depends & Depends.INPUT and (is_touched or hold(call, found))):
            found.add(id(call))
            written |= call.writes
    return found
