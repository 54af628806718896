"""Questions about sizes that data may have a say in, though on none of the data tried they had.

Code that stays whole may pick rows by what they hold. Checking such questions at each run is left to
``guards``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..calls.call import Call, Depends, Recording, map_calls, meta
from ..calls.functions import tensors
from ..calls.kinds import Kind
from ..code.leaves import is_atomic, is_compiled
from .labels import label_options
from .rerun import with_guards

__all__ = ["behind_labels", "runs_without_data", "unproven"]


def unproven(model: nn.Module, form: Recording, kind: Callable[[str], Kind]) -> frozenset[int]:
    """Ids of the guards on sizes behind modules that stay whole and do not run where there are no data.

    Modules of one ``kind`` that take tensors of the same sizes are looked into once.
    """
    asked = {id(c) for guard in form.guards for c in guard.operands if isinstance(c, Call)}
    doubted = _doubted(model, form, kind, asked)
    found = (g for g in form.guards if any(isinstance(o, Call) and id(o) in doubted for o in g.operands))
    return frozenset(map(id, found))


def behind_labels(model: nn.Module, form: Recording, kind: Callable[[str], Kind]) -> frozenset[str]:
    """Names of the sizes of what the model computes that its losses count labels with, if shapes decide them.

    Data may have no say in them: neither seen, nor in modules that stay whole and were looked into.
    """
    options = filter(None, (label_options(model, call) for call in form.calls))
    left = [v for o in options for v in o.values() if isinstance(v, Call)]
    found: set[Call] = set()
    while left:
        call = left.pop()
        if call not in found:
            found.add(call)
            left += () if _is_size(call) else call.inputs
    sizes = [c for c in found if _is_size(c) and not c.depends & Depends.DATA]
    doubted = _doubted(model, form, kind, {*map(id, sizes)}) if sizes else set()
    return frozenset(c.name for c in sizes if id(c) not in doubted)


def _is_size(call: Call) -> bool:
    return call.is_size and call.op == "call_method" and call.inputs[0].op != "placeholder"


def _doubted(
    model: nn.Module, form: Recording, kind: Callable[[str], Kind], wanted: Collection[int]
) -> set[int]:
    """Of the calls with the ids ``wanted`` and all behind them, those whose sizes data may have a say in."""
    calls, wanted = with_guards(form), {*wanted}
    for call in reversed(calls):
        if id(call) in wanted:
            wanted.update(map(id, call.inputs))
    known: dict[Any, bool] = {}
    doubted: set[int] = set()

    def is_proven(call: Call) -> bool:
        module = model.get_submodule(call.target)
        if is_atomic(module) and not (is_compiled(module) or module._forward_hooks):
            return True
        sizes = [[t.shape for t in tensors(c.value)] for c in call.inputs]
        key = str((kind(call.target), sizes))
        if key not in known:
            known[key] = runs_without_data(model, call)
        return known[key]

    for call in (c for c in calls if id(c) in wanted):
        is_behind = any(id(c) in doubted for c in call.inputs)
        if is_behind or (call.op == "call_module" and not is_proven(call)):
            doubted.add(id(call))
    return doubted


def runs_without_data(model: nn.Module, leaf: Call) -> bool:
    """Whether a leaf runs on the meta device, where nothing can be read of the data."""
    module = model.get_submodule(leaf.target)
    if is_compiled(module):
        return False
    held = itertools.chain(module.named_parameters(), module.named_buffers())
    args, kwargs = (map_calls(given, lambda c: c.value) for given in (leaf.args, leaf.kwargs))
    try:
        with torch.no_grad(), _Unnormalised():
            torch.func.functional_call(module, {n: meta(t) for n, t in held}, args, kwargs)
    except Exception:  # whatever it is: then nothing is proven
        return False
    return True


class _Unnormalised(TorchFunctionMode):
    """Layer norms give their input: shapes are the same, and on meta norms take as long as all the rest."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is functional.layer_norm else func(*args, **(kwargs or {}))
