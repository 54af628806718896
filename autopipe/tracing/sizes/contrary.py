"""Other data for two rows of a batch, where their own may hide that rows are mixed or weighed.

A mask of ones leaves no row lighter than another, and of two rows that are as long each, or have each a token
that is asked for, neither changes what all rows come to. Running them is left to ``rows``.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim
from ...torch_private import Unread, unread
from ...units import Size
from ..calls.call import Call, Depends, Recording, map_calls
from ..calls.functions import tensors
from ..calls.perform import run_call
from ..code.leaves import uncompiled
from ..inputs.structure import mapped
from .dims import axis_of
from .labels import label_options
from .results import is_number
from .witness import LEFT_OUT

__all__ = ["made_of_rows", "of_other_signs", "unlike"]

_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]


def of_other_signs(given: Mapping[str, Tensor], dim: Dim, form: Recording) -> Iterator[dict[str, Tensor]]:
    """The tensors with a second row of the other sign: one expert may take all the example's rows.

    Of no use where no number is made of rows, or all of them are whole numbers.
    """
    out = dict(given)
    if not any(isinstance(c, Call) and is_number(c.value) for c in form.calls[-1].args[0]):
        return
    for name, axis in dim.where:
        if given[name].is_floating_point() and given[name].shape[axis] > 1:
            changed = given[name].detach().clone()
            changed.select(axis, 1).neg_()
            out[name] = changed.requires_grad_(given[name].requires_grad)
    if any(out[name] is not given[name] for name in given):
        yield out


def unlike(
    model: nn.Module, form: Recording, given: Mapping[str, Tensor], dim: Dim, shapes: _Shapes
) -> Iterator[dict[str, Tensor]]:
    """The tensors with whole numbers of the first two rows less like one another than they are, one each.

    Nothing where the form makes nothing of all rows together but means over labels, which can be counted. On
    an accelerator none that may point out of a table: what fails so there ends all work of the process.
    """
    if not _gathers(model, form, given, dim, shapes):
        return
    for name, axis in dim.where:
        tensor = given[name]
        if tensor.is_floating_point() or tensor.is_complex() or min(tensor.numel(), tensor.shape[axis]) < 2:
            continue
        a_row, b_row = (tensor.detach().select(axis, place) for place in (0, 1))
        for a, b in _pairs(a_row, b_row, tensor):
            other = tensor.detach().clone()
            other.select(axis, 0).copy_(a)
            other.select(axis, 1).copy_(b)
            if not torch.equal(other, tensor):
                yield {**given, name: other}


def _pairs(a: Tensor, b: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    least, most = tensor.min(), tensor.max()
    if least != most:
        yield least.expand_as(a), most.expand_as(b)
    if not a.dim():
        if tensor.dtype is not torch.bool:
            yield a, b // 2 if b > 0 else b
        return
    for left_out in (0, LEFT_OUT) if tensor.dtype is torch.int64 else (0,):
        if tensor.device.type == "cpu" or left_out >= least:
            holed = b.clone()
            holed[..., holed.shape[-1] // 2 :] = left_out
            yield a, holed


def _gathers(
    model: nn.Module, form: Recording, given: Mapping[str, Tensor], dim: Dim, shapes: _Shapes
) -> bool:
    """Whether a call gives what has no rows any more of what has: not so of sums of means over labels."""
    inputs, device = {name for name, _ in dim.where}, given[dim.where[0][0]].device
    made = made_of_rows(form, inputs)
    apart = {id(c) for c in form.calls if _reads_none(model, form, c, made, dim, shapes, device)}
    made = made_of_rows(form, inputs, apart) if apart else made
    means = _means(model, form, made)
    ends = {id(call) for call in form.calls if call.op == "output"} | means
    used = {id(c) for call in form.calls if id(call) not in ends for c in call.inputs}
    for call in form.calls:
        if id(call) not in made or call.op in ("placeholder", "output"):
            continue
        known = shapes.get(id(call), ())
        is_of_rows = bool(known) and all(axis_of(shape, dim.name) is not None for shape in known)
        if not is_of_rows and (id(call) in used or id(call) not in means):
            return bool(known or isinstance(call.value, (int, float)) or [*tensors(call.value)])
    return False


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


def _reads_none(
    model: nn.Module,
    form: Recording,
    call: Call,
    made: Collection[int],
    dim: Dim,
    shapes: _Shapes,
    device: torch.device,
) -> bool:
    """Whether a module that gives no rows reads no tensor ``made`` of rows: their type alone, as angles do.

    What else it is given holds zeros here.
    """
    known = shapes.get(id(call), ())
    if call.op != "call_module" or id(call) not in made or call.is_random or call.mutated or not known:
        return False
    if any(axis_of(shape, dim.name) is not None for shape in known):
        return False

    def instead(given: Call) -> Any:
        if id(given) in made:
            return mapped(
                lambda leaf: unread(leaf, device) if isinstance(leaf, Tensor) else leaf, given.value
            )
        zeros = functools.partial(torch.zeros_like, device=device)
        return mapped(lambda leaf: zeros(leaf) if isinstance(leaf, Tensor) else leaf, given.value)

    args, kwargs = map_calls(call.args, instead), map_calls(call.kwargs, instead)
    try:
        with uncompiled(model):
            found = run_call(model, form.constants, call, args, kwargs, {}, device)
    except Exception:  # whatever it is: then nothing is proven
        return False
    return not any(isinstance(t, Unread) for t in tensors(found))


def made_of_rows(form: Recording, inputs: Collection[str], apart: Collection[int] = ()) -> set[int]:
    """The calls whose values hang on the data of a batch's rows: of ``inputs``, beyond their sizes.

    Those ``apart``, by id, are known not to.
    """
    found, written = set[int](), set[int]()
    for call in form.calls:
        is_row = call.op == "placeholder" and call.target in inputs
        is_fed = any(id(c) in found for c in call.inputs) or (call.storages | call.reads) & written
        if is_row or (is_fed and call.depends & Depends.INPUT and id(call) not in apart):
            found.add(id(call))
            written |= call.writes
    return found
