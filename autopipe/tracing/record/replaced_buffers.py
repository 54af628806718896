"""Buffers that a model's own code replaces, ``self.mean = 0.9 * self.mean + …``: recorded as written to.

What else a forward leaves in attributes is left to ``runs.repeats``, noticing that the model itself was
called to ``runs.assumptions``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from ..calls import functions
from ..calls.call import UNSAFE, Call, Depends, map_calls, meta
from ..code.leaves import lies_in_leaf
from ..values.ledger import Ledger

__all__ = ["HeldBuffer", "ReplacedBuffers"]


class ReplacedBuffers:
    """The buffers that modules had when the model was called; none that is called whole may have one too.

    Attributes
    ----------
    names: those that were replaced, once they are written to.
    tables: those that are others now, made without data, and that no ``state_dict`` has.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._had: list[tuple[str, nn.Module, str, torch.Tensor]] = []
        self.names: set[str] = set()
        self.tables: set[str] = set()

    def begin(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        """The model, whose modules these are, is about to be called."""
        own = [(p, m) for p, m in named if not isinstance(m, torch.jit.ScriptModule)]  # run whole
        self._own = own
        self._had = [(p, m, n, t) for p, m in own for n, t in m._buffers.items() if t is not None]

    def write(self, model: nn.Module, perform: Callable[..., Any]) -> None:
        """Put back buffers replaced by others like them, and record that those are copied there."""
        found = [(p, m, n, t, m._buffers.get(n)) for p, m, n, t in self._had if m._buffers.get(n) is not t]
        if not found:
            return
        whole = self._called_whole()
        written = {name for c in self._ledger.calls for name in c.mutated}
        for path, module, name, old, new in found:
            if lies_in_leaf(path, whole.__contains__) or self._ledger.names[id(old)] in written:
                continue
            if new is not None and _is_like(old, new) and not _is_in_a_leaf(model, old, whole):
                module._buffers[name] = old
                self.names.add(self._ledger.names[id(old)])
                perform(torch.Tensor.copy_, (old, new), {})
                self._read_before(old, self._ledger.calls[-1])

    def see_tables(self) -> None:
        """Look for tables among what buffers are by now."""
        had = {(path, name): tensor for path, _, name, tensor in self._had}
        for path, module in self._own:
            for name in module._non_persistent_buffers_set & module._buffers.keys():
                new = module._buffers[name]
                if new is not None and new is not had.get((path, name)) and self._is_table(new):
                    self.tables.add(f"{path}.{name}".lstrip("."))

    def _is_table(self, tensor: torch.Tensor) -> bool:
        held, ref = self._ledger.refs.get(id(tensor), (None, None))
        return held is tensor and ref is not None and not self._ledger.depends_of(ref) & UNSAFE

    def _called_whole(self) -> frozenset[str]:
        """The modules that are called whole, or handed whole to a function."""
        calls = self._ledger.calls
        return frozenset(
            str(c.target) for c in calls if c.op == "call_module" or isinstance(c.value, nn.Module)
        )

    def _read_before(self, buffer: torch.Tensor, written: Call) -> None:
        """What was read of a buffer is read of a copy, which a backward finds as it was."""
        ledger = self._ledger
        with ledger.at.hushed:
            held = ledger.attribute(ledger.names[id(buffer)], buffer, Depends.STATE)
            copied = buffer.clone()
            copy = Call("call_method", "clone", (held,), hint="clone", source=written.source)
            copy.depends, copy.reads = Depends.STATE, functions.storages(buffer)
            copy.value, copy.storages = meta(copied), functions.storages(copied)
        for call in ledger.calls:
            if call is not written and any(given is held for given in call.inputs):
                take = (
                    map_calls(given, lambda c: copy if c is held else c) for given in (call.args, call.kwargs)
                )
                call.take(*take)
        ledger.calls.insert(next(i for i, c in enumerate(ledger.calls) if c is held) + 1, copy)
        ledger.bind(copied, copy)
        ledger.bind(buffer, copy)


def _is_in_a_leaf(model: nn.Module, buffer: torch.Tensor, leaves: Collection[str]) -> bool:
    others = (m for p, m in model.named_modules() if lies_in_leaf(p, leaves.__contains__))
    return any(b is buffer for m in others for b in m._buffers.values())


@dataclasses.dataclass(frozen=True, slots=True)
class HeldBuffer:
    """A buffer of a module that the module's own code replaces, and that stages write to."""

    module: nn.Module
    name: str
    tensor: torch.Tensor

    def take_in(self) -> None:
        """Write to the buffer what the model itself has put in its place since, and put it back."""
        new = self.module._buffers.get(self.name)
        if new is not self.tensor and new is not None and _is_like(self.tensor, new):
            with torch.no_grad():
                self.tensor.copy_(new)
            self.module._buffers[self.name] = self.tensor


def _is_like(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether a tensor can be copied into a buffer as if it took its place."""
    is_same = (old.shape, old.dtype, old.device, old.layout) == (new.shape, new.dtype, new.device, new.layout)
    return is_same and not new.requires_grad
