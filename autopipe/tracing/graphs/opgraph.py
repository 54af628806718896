"""The op graph of a capture: ops, edges, what must keep order or stay together, parameters.

Recording is left to ``recorder``; the sizes that may vary and symbolic shapes to ``dims``.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...graph import Dim, Op, OpGraph, ParameterSpec, TensorSpec
from ...units import Size
from ..calls.call import Call, Depends, Recording
from ..calls.derivatives import derived
from ..calls.functions import storages, tensors
from ..calls.kinds import Kind, describe, dtype_name
from ..calls.lifting import Closure
from ..calls.memory import written
from ..calls.module_modes import in_modes
from ..calls.named import Setter, are_nested, place_of, qualified_name
from ..members import buffers_in, parameters_in, submodule

__all__ = ["build", "parameter_specs"]

Shape = Callable[[Call, int, torch.Tensor], tuple[Size, ...]]
"""(call, index among its tensors, example) → the symbolic shape."""


def build(
    model: nn.Module,
    calls: Sequence[Call],
    by_mode: Mapping[bool, Sequence[Recording]],
    shape: Shape,
    dims: Sequence[Dim],
    kind: Callable[[str], Kind],
    tail: Sequence[str] = (),
) -> OpGraph:
    """An op graph of ``calls``, the union of all forms in both modes; ``kind`` tells a leaf's by its path."""
    forms = list({id(f): f for forms in by_mode.values() for f in forms}.values())
    held = [c for f in forms for c in f.calls if c.op == "get_attr"]
    calls = [c for c in calls if c.op != "get_attr"]
    modes = _modes(by_mode)
    specs = parameter_specs(model)
    first = {n: p.name for p in specs for n in p.names}
    moved = {first[n] for f in forms for n in f.moved}  # which are to ops as buffers are
    is_buffer = {p.name for p in specs if p.is_buffer} | moved
    owned = _Owned(model, first, is_buffer, held)
    names = {c.name for c in calls}
    ops = tuple(_op(c, modes[c.name], owned, shape, kind) for c in calls)
    edges = _edges(forms, names)
    order, groups = _constraints(forms, {op.name: op for op in ops}, _overlapping(model))
    position = {c.name: i for i, c in enumerate(calls)}
    return OpGraph(
        model=type(model).__name__,
        ops=ops,
        edges=tuple(sorted(edges, key=lambda e: (position[e[0]], position[e[1]]))),
        order_edges=tuple(sorted(order - edges, key=lambda e: (position[e[0]], position[e[1]]))),
        groups=tuple(
            sorted((tuple(sorted(g, key=position.__getitem__)) for g in groups), key=lambda g: position[g[0]])
        ),
        parameters=specs,
        dims=tuple(dims),
        tail=tuple(tail),
    )


def _modes(by_mode: Mapping[bool, Sequence[Recording]]) -> dict[str, Any]:
    """The mode that each call belongs to, by name."""
    train, evaluation = ({c.name for f in by_mode[flag] for c in f.calls} for flag in (True, False))
    only: dict[str, Any] = dict.fromkeys(train, "train") | dict.fromkeys(evaluation, "eval")
    return only | dict.fromkeys(train & evaluation, "both")


def parameter_specs(model: nn.Module) -> tuple[ParameterSpec, ...]:
    """Every parameter and buffer once, under all its names."""
    found: dict[int, tuple[torch.Tensor, list[str], bool]] = {}
    kinds: tuple[tuple[bool, Sequence[tuple[str, torch.Tensor]]], ...] = (
        (False, parameters_in(model, is_once=False)),
        (True, buffers_in(model, is_once=False)),
    )
    for is_buffer, named in kinds:
        for name, tensor in named:
            found.setdefault(id(tensor), (tensor, [], is_buffer))[1].append(name)
    return tuple(
        ParameterSpec(names[0], tuple(names), tuple(t.shape), dtype_name(t.dtype), t.requires_grad, is_buffer)
        for t, names, is_buffer in found.values()
    )


class _Owned:
    """Which parameters and buffers a call uses, by first name."""

    def __init__(
        self, model: nn.Module, first: Mapping[str, str], is_buffer: set[str], held: Sequence[Call]
    ) -> None:
        self.model, self.first, self.is_buffer = model, first, is_buffer
        self.inside: dict[str, tuple[str, ...]] = {}
        self._buffers = [(c.storages, n) for c in held if (n := first.get(c.target)) in is_buffer]

    def written(self, call: Call) -> tuple[str, ...]:
        """The buffers that a call writes to: those of a layer, or what a function was given of one."""
        given = (name for places, name in self._buffers if call.writes and not places.isdisjoint(call.writes))
        return tuple(dict.fromkeys((*(self.first.get(n, n) for n in call.mutated), *given)))

    def names(self, call: Call) -> tuple[str, ...]:
        read = [c for c in call.inputs if c.op == "get_attr"]
        used = [self.first[c.target] for c in read if c.target in self.first]
        used += [name for c in read if isinstance(c.value, nn.Module) for name in self.module(c.target)]
        if call.op == "call_module":
            used += self.module(call.target)
        return tuple(dict.fromkeys(used))

    def module(self, path: str) -> tuple[str, ...]:
        if path not in self.inside:
            module = submodule(self.model, path)
            named = (*parameters_in(module, path), *buffers_in(module, path))
            self.inside[path] = tuple(self.first[n] for n, _ in named)
        return self.inside[path]


_KINDS: dict[str, Any] = {
    "placeholder": "input",
    "output": "output",
    "call_module": "module",
    "call_function": "function",
    "call_method": "method",
}


def _op(call: Call, mode: Any, owned: _Owned, shape: Shape, kind: Callable[[str], Kind]) -> Op:
    names = owned.names(call)
    buffers = tuple(n for n in names if n in owned.is_buffer)
    parameters = tuple(n for n in names if n not in owned.is_buffer)
    mutated = owned.written(call)
    outputs = tuple(
        TensorSpec(shape(call, i, t), dtype_name(t.dtype), t.requires_grad)
        for i, t in enumerate(tensors(call.value))
    )
    target = call.target if isinstance(call.target, str) else qualified_name(call.target)
    target = target if call.op != "call_method" else f"torch.Tensor.{target}"
    return Op(
        name=call.name,
        kind=_KINDS[call.op],
        target=target,
        module_path=call.path,
        source=call.source,
        outputs=outputs,
        is_size=call.is_size,
        parameters=parameters,
        buffers=tuple(dict.fromkeys((*buffers, *mutated))),
        mutated_buffers=mutated,
        is_random=call.is_random,
        is_tainted=bool(call.depends & Depends.INPUT),
        is_movable=_is_movable(call, outputs, parameters),
        mode=mode,
        signature=_signature(call, target, kind),
    )


def _is_movable(call: Call, outputs: Sequence[TensorSpec], parameters: Sequence[str]) -> bool:
    if call.op not in ("call_function", "call_method", "call_module") or parameters:
        return False
    has_effect = call.is_random or call.is_check or call.has_effect or call.writes or call.mutated
    if has_effect or any(t.requires_grad for t in outputs):
        return False
    is_size = call.is_size and not call.depends & Depends.DATA
    return is_size or not call.depends & Depends.STATE


def _signature(call: Call, target: str, kind: Callable[[str], Kind]) -> str:
    """A hash of what decides an op's cost."""
    given = [describe(a) for a in (*call.args, *call.kwargs.items())]
    parts = [_KINDS[call.op], target, str(given), str(call.region)]
    if call.op == "call_module":
        parts[1] = kind(call.target).configuration
        parts.append(kind(call.target).weights)
    for held in call.inputs:
        if held.op == "get_attr" and held.target and isinstance(held.value, nn.Module):
            parts += [kind(held.target).configuration, kind(held.target).weights]
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def _edges(forms: Sequence[Recording], names: set[str]) -> set[tuple[str, str]]:
    return {
        (given.name, call.name)
        for recording in forms
        for call in recording.calls
        if call.name in names
        for given in call.inputs
        if given.op != "get_attr"
    }


def _constraints(
    forms: Sequence[Recording], ops: Mapping[str, Op], overlapping: Sequence[set[str]]
) -> tuple[set[tuple[str, str]], list[set[str]]]:
    """Order edges between random draws and around writes, and groups of ops that must share a stage.

    Those are also the users of tensors that lie in the same memory, where training writes to it.
    """
    order: set[tuple[str, str]] = set()
    groups: list[set[str]] = []
    for recording in forms:
        calls = [c for c in recording.calls if c.op != "get_attr"]
        draws = [c.name for c in calls if c.is_random]
        order |= set(itertools.pairwise(draws))
        groups += [
            {c.name, *(g.name for g in c.inputs)}
            for c in calls
            if c.accessor and not c.is_size and all(g.op not in ("get_attr", "placeholder") for g in c.inputs)
        ]
        for x, freeing in ((x, c) for x, c in enumerate(calls) if c.frees):
            users = [
                (y, c.name) for y, c in enumerate(calls) if c.op != "output" and _takes(c, freeing.frees)
            ]
            order |= {(name, freeing.name) for y, name in users if y < x}  # a stage hands on what it has left
            groups.append({freeing.name, *(name for y, name in users if y > x)})
        # a hook on a tensor's gradient sees all of it where the tensor is made
        groups += [{c.name, *_made(c)} for c in calls if c.accessor and c.has_effect]
        groups += _aliases(recording, order)
        groups += [derived(c) for c in calls if c.target is torch.autograd.grad]
        groups += [{c.name, *(g.name for g in c.inputs if isinstance(g.target, Closure))} for c in calls]
        for path in sorted({place_of(c) for c in calls if c.keeps}):
            of_leaf = [c.name for c in calls if _is_leaf(c) and are_nested(place_of(c), path)]
            order |= set(itertools.pairwise(of_leaf))
            groups.append(set(of_leaf))
        for shared in sorted({name for c in calls for name in c.shares}):
            changing = [c.name for c in calls if shared in c.shares]
            order |= set(itertools.pairwise(changing))
            groups.append(set(changing))
        mutated = {n for c in calls for n in c.mutated}
        groups += [{c.name for c in calls if name in ops[c.name].buffers} for name in mutated]
        groups += [
            {c.name for c in calls if not names.isdisjoint(_held(ops[c.name]))} for names in overlapping
        ]
    return order, _joined([g for g in groups if len(g) > 1])


def _made(call: Call) -> Iterator[str]:
    """The names of what a call takes that calls make."""
    return (given.name for given in call.inputs if given.op not in ("get_attr", "placeholder"))


def _takes(call: Call, memory: frozenset[int]) -> bool:
    return any(given.storages & memory for given in call.inputs)


def _is_leaf(call: Call) -> bool:
    return call.op == "call_module" or call.target is in_modes or isinstance(call.target, Setter)


def _held(op: Op) -> tuple[str, ...]:
    return (*op.parameters, *op.buffers)


def _overlapping(model: nn.Module) -> list[set[str]]:
    """Names of parameters and buffers that share memory without being one tensor, where one is trained."""
    at: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in (*parameters_in(model), *buffers_in(model)):
        if not nn.parameter.is_lazy(tensor) and tensor.numel():
            for storage in storages(tensor):
                at.setdefault(storage, []).append((name, tensor))
    out: list[set[str]] = []
    for held in (held for held in at.values() if len(held) > 1):
        reached, names, is_trained = -1, set[str](), False
        for start, end, name, trained in sorted(_span(name, tensor) for name, tensor in held):
            if start >= reached:
                out += [names] if is_trained else []
                names, is_trained = set(), False
            names.add(name)
            reached, is_trained = max(reached, end), is_trained or trained
        out += [names] if is_trained else []
    return [names for names in out if len(names) > 1]


def _span(name: str, tensor: torch.Tensor) -> tuple[int, int, str, bool]:
    """The bytes of its memory between which a tensor lies, its name and whether it is trained."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    end = first + sum((int(size) - 1) * int(step) for size, step in steps) + 1
    return first * tensor.itemsize, end * tensor.itemsize, name, tensor.requires_grad


def _aliases(recording: Recording, order: set[tuple[str, str]]) -> list[set[str]]:
    """Per memory that is written: its users up to the last write, kept in order and together."""
    out = []
    for memory in written(recording.calls):
        out.append({c.name for c in memory.together})
        users, writes = memory.users, memory.writes
        order.update(
            (a.name, b.name)
            for i, a in enumerate(users)
            for b in users[i + 1 :]
            if (a in writes or b in writes) and a.op not in ("placeholder", "get_attr") and b.op != "get_attr"
        )
    return out


def _joined(groups: list[set[str]]) -> list[set[str]]:
    """Groups that share a member as one."""
    out: list[set[str]] = []
    for group in groups:
        touching = [g for g in out if g & group]
        out = [g for g in out if not g & group] + [group.union(*touching)]
    return out
