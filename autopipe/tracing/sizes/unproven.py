"""Questions about sizes that data may have a say in, though on none of the data tried they had.

Code that stays whole may pick rows by what they hold. Checking such questions at each run is left to
``guards``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...units import Size
from ..calls.call import Call, Depends, Recording, map_calls, meta
from ..calls.faults import of_models
from ..calls.kinds import Kind
from ..calls.labels import label_options
from ..calls.regions import Region, context
from ..calls.sharing import outline
from ..code.leaves import is_atomic, is_compiled
from ..inputs.structure import mapped
from ..members import OF_ALL, modules_in, submodule
from .rerun import with_guards

__all__ = ["Proofs", "behind_labels", "is_plain", "unproven"]


class Proofs:
    """Which leaves run on the meta device, where nothing can be read of the data.

    Leaves of one ``kind`` that are given the same, but for what tensors hold, are looked into once in a mode.
    """

    def __init__(self, model: nn.Module, kind: Callable[[str], Kind]) -> None:
        self._model, self._kind = model, kind
        self._known: dict[Any, bool] = {}

    def of(self, leaf: Call, modes: Mapping[int, bool] | None = None) -> bool:
        """Whether a leaf runs without data: in the ``modes`` of modules, by their ids, or as they are now."""
        key, inside = self._key(leaf, modes), self._inside(leaf)
        if key in self._known and not self._kind(leaf.target).is_hooked:
            return self._known[key]
        now = [m.training for m in inside]
        _switch(inside, _modes_of(inside, modes))
        self._known[key] = _runs_without_data(inside[0], *_given(leaf), leaf.region)
        _switch(inside, now)
        return self._known[key]

    def _key(self, leaf: Call, modes: Mapping[int, bool] | None) -> Any:
        inside = self._inside(leaf)
        held = tuple([_held(v) for m in inside for n, v in vars(m).items() if n not in OF_ALL])
        return (
            self._kind(leaf.target),
            held,
            tuple(_modes_of(inside, modes)),
            leaf.region,
            outline(_given(leaf)),
        )

    def _inside(self, leaf: Call) -> list[nn.Module]:
        return [m for _, m in modules_in(submodule(self._model, leaf.target))]


_SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})


def _held(value: Any) -> Any:
    """What layers of one kind that hold it have in common; numbers and text are part of the kind."""
    if type(value) in _SIMPLE:
        return ()
    if type(value) is functools.partial and not vars(value):
        given = (*value.args, *itertools.chain(*value.keywords.items()))
        return id(value.func), *((type(v), v) if type(v) in _SIMPLE else id(v) for v in given)
    return (type(value), *map(_held, value)) if isinstance(value, (tuple, list)) else id(value)


def _given(leaf: Call) -> tuple[Any, Any]:
    """What a leaf was given, without data."""
    return map_calls(leaf.args, lambda c: c.value), map_calls(leaf.kwargs, lambda c: c.value)


def _cut_off(given: Any) -> Any:
    """The same with tensors that take no gradients: where these begin, code may not write to a tensor."""
    made: dict[int, torch.Tensor] = {}
    return mapped(lambda v: made.setdefault(id(v), v.detach()) if isinstance(v, torch.Tensor) else v, given)


def unproven(model: nn.Module, form: Recording, proofs: Proofs) -> frozenset[int]:
    """Ids of the guards on sizes behind modules that stay whole and do not run where there are no data."""
    asked = {id(c) for guard in form.guards for c in guard.operands if isinstance(c, Call)}
    doubted = _doubted(model, form, proofs, asked)
    found = (g for g in form.guards if any(isinstance(o, Call) and id(o) in doubted for o in g.operands))
    return frozenset(map(id, found))


def behind_labels(
    model: nn.Module, form: Recording, shapes: Mapping[int, Sequence[Sequence[Size]]], proofs: Proofs
) -> dict[str, Size]:
    """By name the sizes of what the model computes that its losses count labels with, if shapes decide them.

    Data may have no say in them: neither seen, nor in modules that stay whole and were looked into.
    """
    if not shapes:
        return {}
    options = filter(None, (label_options(model, call) for call in form.calls))
    left = [v for o in options for v in o.values() if isinstance(v, Call)]
    found: set[Call] = set()
    while left:
        call = left.pop()
        if call not in found:
            found.add(call)
            left += () if _is_size(call) else call.inputs
    sizes = [c for c in found if _is_size(c) and not c.depends & Depends.DATA]
    doubted = _doubted(model, form, proofs, {*map(id, sizes)}) if sizes else set()
    told = (c for c in sizes if id(c) not in doubted and shapes.get(id(c.inputs[0])))
    return {c.name: shapes[id(c.inputs[0])][0][c.args[1]] for c in told}


def _is_size(call: Call) -> bool:
    return call.is_size and call.op == "call_method" and call.inputs[0].op != "placeholder"


def _doubted(model: nn.Module, form: Recording, proofs: Proofs, wanted: Collection[int]) -> set[int]:
    """Of the calls with the ids ``wanted`` and all behind them, those whose sizes data may have a say in."""
    calls, wanted = with_guards(form), {*wanted}
    for call in reversed(calls):
        if id(call) in wanted:
            wanted.update(map(id, call.inputs))
    doubted: set[int] = set()

    def is_proven(call: Call) -> bool:
        return is_plain(submodule(model, call.target)) or proofs.of(call)

    for call in (c for c in calls if id(c) in wanted):
        is_behind = any(id(c) in doubted for c in call.inputs)
        if is_behind or (call.op == "call_module" and not is_proven(call)):
            doubted.add(id(call))
    return doubted


def is_plain(module: nn.Module) -> bool:
    """Whether a module is a layer of torch's own that nothing changes: sizes make those of what it gives."""
    return is_atomic(module) and not (is_compiled(module) or module._forward_hooks)


def _modes_of(modules: Iterable[nn.Module], modes: Mapping[int, bool] | None) -> list[bool]:
    """The modes that are named of modules; of others, as of what a forward has made, those they are in."""
    return [(modes or {}).get(id(m), m.training) for m in modules]


def _switch(modules: Iterable[nn.Module], modes: Iterable[bool]) -> None:
    for module, mode in zip(modules, modes, strict=True):
        if module.training is not mode:
            module.training = mode


def _runs_without_data(module: nn.Module, args: Any, kwargs: Any, region: Region | None) -> bool:
    """Whether a module runs on the meta device, in the grad mode and all else in which it was recorded."""
    if is_compiled(module):
        return False
    inside = [m for _, m in modules_in(module)]
    places: list[dict[str, Any]] = [of for m in inside for of in (m._parameters, m._buffers)]
    held = [(of, name, tensor) for of in places for name, tensor in of.items()]
    metas = {id(t): None if t is None else meta(t).detach() for _, _, t in held}
    (args, kwargs), seen = _cut_off((args, kwargs)), _ByShape()
    try:
        for of, name, tensor in held:
            of[name] = metas[id(tensor)]
        with torch.enable_grad(), contextlib.nullcontext() if region is None else context(region), seen:
            module(*args, **kwargs)
    except of_models():  # whatever it is: then nothing is proven
        return False
    finally:
        for of, name, tensor in held:
            of[name] = tensor
    return not seen.has_failed  # where code goes on after that, it may do otherwise with data


def _empty(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """What ``like.new_empty(shape)`` gives, which on meta is made in Python."""
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _alike(input: Any, *_: Any, **__: Any) -> Any:
    return _empty(input, input.shape)


def _attended(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
    return _empty(query, (*query.shape[:-1], value.shape[-1]))


def _changed(input: Any, /, *others: Any, **options: Any) -> Any:
    if others or options or not input.is_floating_point():
        return NotImplemented
    return _empty(input, input.shape)


def _joined(input: Any = None, other: Any = None, /, *others: Any, **options: Any) -> Any:
    """What is made of numbers in the same places, where nothing is cast."""
    given = [v for v in (input, other) if isinstance(v, torch.Tensor)]
    is_plain = all(isinstance(v, torch.Tensor) or type(v) in (int, float) for v in (input, other))
    if others or options or not is_plain or not given:
        return NotImplemented
    first = given[0]
    if not first.is_floating_point() or any(v.dtype is not first.dtype for v in given[1:]):
        return NotImplemented
    rank = max(v.dim() for v in given)
    columns = zip(*((1,) * (rank - v.dim()) + v.shape for v in given), strict=True)
    sizes = [{*column} - {1} for column in columns]
    if any(len(found) > 1 for found in sizes):
        return NotImplemented
    return _empty(first, [next(iter(found), 1) for found in sizes])


def _reduced(input: Any, dim: Any = None, keepdim: bool = False, **options: Any) -> Any:
    if (
        options
        or type(dim) is not int
        or not input.is_floating_point()
        or not -input.dim() <= dim < input.dim()
    ):
        return NotImplemented
    shape = [*input.shape]
    shape[dim : dim + 1 or None] = [1] if keepdim else []
    return _empty(input, shape)


def _in_a_row(tensors: Any, dim: Any = 0, **options: Any) -> Any:
    rank, dtype = tensors[0].dim(), tensors[0].dtype
    if options or type(dim) is not int or not -rank <= dim < rank:
        return NotImplemented
    shapes = [[*t.shape] for t in tensors if t.dim() == rank and t.dtype is dtype]
    length = sum(shape.pop(dim) for shape in shapes)
    if len(shapes) < len(tensors) or any(shape != shapes[0] for shape in shapes):
        return NotImplemented
    shapes[0].insert(dim % rank, length)
    return _empty(tensors[0], shapes[0])


def _mapped(input: Any, weight: Any, bias: Any = None) -> Any:
    if weight.dim() != 2 or input.dtype is not weight.dtype or input.shape[-1:] != weight.shape[1:]:
        return NotImplemented
    return _empty(input, (*input.shape[:-1], weight.shape[0]))


def _normalised(
    input: Any, p: Any = 2.0, dim: Any = 1, eps: Any = 1e-12, *others: Any, **options: Any
) -> Any:
    is_plain = all(type(v) in (int, float) for v in (p, eps)) and 0 < p < math.inf and type(dim) is int
    is_there = is_plain and input.is_floating_point() and -input.dim() <= dim < input.dim()
    if others or options or not is_there:
        return NotImplemented
    return _alike(input)


_OF_ONE = ("cos", "exp", "neg", "rsqrt", "sigmoid", "sin", "sqrt", "square", "tanh")
_OF_TWO = ("add", "div", "mul", "pow", "sub")
_SYMBOLS = ("__add__", "__mul__", "__pow__", "__radd__", "__rmul__", "__sub__", "__truediv__")
_HOMES = (torch, torch.Tensor)
_GIVEN: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attended,
    functional.linear: _mapped,
    torch.cat: _in_a_row,
    functional.normalize: _normalised,
    **dict.fromkeys((torch.mean, torch.Tensor.mean, torch.sum, torch.Tensor.sum), _reduced),
    **dict.fromkeys((getattr(home, name) for home in _HOMES for name in _OF_ONE), _changed),
    **dict.fromkeys((getattr(home, name) for home in _HOMES for name in _OF_TWO), _joined),
    **dict.fromkeys((getattr(torch.Tensor, name) for name in _SYMBOLS), _joined),
    **dict.fromkeys(
        (
            functional.layer_norm,
            functional.rms_norm,
            functional.gelu,
            functional.relu,
            functional.silu,
            functional.dropout,
        ),
        _alike,
    ),
}
"""What functions of torch that read no values give, by shape alone: on meta they take as long as all else."""


class _ByShape(TorchFunctionMode):
    has_failed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_shape = _GIVEN.get(func)
        try:
            made = NotImplemented if by_shape is None else by_shape(*args, **kwargs)
            return func(*args, **kwargs) if made is NotImplemented else made
        except Exception:
            self.has_failed = True
            raise
