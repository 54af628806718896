"""The model as it was: mode, buffers, attributes and random state, put back after recording.

What follows from a forward that changes Python state is left to ``session``.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["Snapshot", "preserved", "seed", "switch"]

_INTERNAL = frozenset(vars(nn.Module())) - {"_buffers"}
_SIMPLE = (int, float, str, bool, type(None))


class Snapshot:
    """A model's attributes and buffers at one moment; parameters too with ``parameters=True``."""

    def __init__(self, model: nn.Module, *, parameters: bool = False) -> None:
        self.modules = [(path, m, _Held(vars(m))) for path, m in model.named_modules()]
        # a scripted module keeps its mode where its attributes do not show it
        self.scripted = [(m, m.training) for _, m, _ in self.modules if isinstance(m, torch.jit.ScriptModule)]
        held = [*model.buffers(), *(model.parameters() if parameters else ())]
        self.tensors = [(t, t.detach().clone()) for t in held if not t.is_meta]
        self.devices = [d for d in {t.device for t in model.parameters()} if d.type == "cuda"]

    def restore(self) -> None:
        """Put everything back, the same objects with the same content."""
        for _, module, before in self.modules:
            before.restore(vars(module))
        for module, training in self.scripted:
            module.training = training
        with torch.no_grad():
            for tensor, value in self.tensors:
                if not _equal(tensor, value):
                    tensor.copy_(value)

    def tensors_held(self) -> Iterator[torch.Tensor]:
        """Every tensor in an attribute of a module or in a container there."""
        for _, _, held in self.modules:
            inner = (i for _, _, c in held.contents if c for i in (c.values() if isinstance(c, dict) else c))
            yield from (v for v in (*held.values.values(), *inner) if isinstance(v, torch.Tensor))

    def changes(self) -> list[tuple[str, str]]:
        """(module path, name) of each attribute or registered buffer replaced, added or removed since."""
        out = []
        for path, module, before in self.modules:
            out += [(path, k) for k in before.differing(vars(module)) if k not in _INTERNAL]
        return out


class _Held:
    """An object's attributes at one moment, and what the containers among them held."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        self.values = dict(attributes)
        self.contents = [(k, v, v.copy()) for k, v in attributes.items() if isinstance(v, (dict, list, set))]

    def restore(self, now: dict[str, Any]) -> None:
        for _, value, content in self.contents:
            if (value or content) and not _same(value, content):
                value.clear()
                (value.extend if isinstance(value, list) else value.update)(content)
        if not _same(now, self.values):
            now.clear()
            now.update(self.values)

    def differing(self, now: dict[str, Any]) -> list[str]:
        """The attributes that have come, gone or changed; plain numbers and text by value."""
        out = [
            k
            for k, value, content in self.contents
            if (value or content) and value is now.get(k) and not _same(value, content)
        ]
        if _same(now, self.values):
            return out
        out += [k for k, v in self.values.items() if k not in now or not (now[k] is v or _equals(v, now[k]))]
        return out + [k for k in now if k not in self.values]


def _equals(before: Any, after: Any) -> bool:
    return isinstance(after, _SIMPLE) and type(before) is not bool and bool(after == before)


def _same(a: Any, b: Any) -> bool:
    """Whether two containers of one kind hold the same objects."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(map(operator.is_, a.values(), b.values()))
    if isinstance(a, list):
        return len(a) == len(b) and all(map(operator.is_, a, b))
    return bool(a == b)


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[Snapshot]:
    """Whatever happens inside, leave ``model`` and the random generators as they were."""
    snapshot = Snapshot(model)
    with torch.random.fork_rng(devices=snapshot.devices):
        try:
            yield snapshot
        finally:
            snapshot.restore()


def switch(model: nn.Module, training: bool) -> None:
    """Put a model in a mode, where it has modes at all: an exported program has not."""
    with contextlib.suppress(NotImplementedError):
        model.train(training)


def seed(device: torch.device) -> None:
    """Put the generators that a model on ``device`` draws from in one fixed state.

    ``torch.manual_seed`` would do, but formats a traceback each time where CUDA is not in use.
    """
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(0)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, so that a not-a-number is no change."""
    return bool(torch.equal(a, b)) or bool(((a == b) | ((a != a) & (b != b))).all())
