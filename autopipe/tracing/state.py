"""The model as it was: mode, buffers, attributes and random state, put back after recording.

What follows from a forward that changes Python state is left to ``session``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["Snapshot", "preserved", "switch"]

_INTERNAL = frozenset(vars(nn.Module())) - {"_buffers"}
_SIMPLE = (int, float, str, bool, type(None))


class Snapshot:
    """A model's attributes and buffers at one moment; parameters too with ``parameters=True``."""

    def __init__(self, model: nn.Module, *, parameters: bool = False) -> None:
        self.modules = list(model.named_modules())
        self.attributes = [{k: _shallow(v) for k, v in vars(m).items()} for _, m in self.modules]
        held = [*model.buffers(), *(model.parameters() if parameters else ())]
        self.tensors = [(t, t.detach().clone()) for t in held if not t.is_meta]
        self.devices = [d for d in {t.device for t in model.parameters()} if d.type == "cuda"]

    def restore(self) -> None:
        """Put everything back, the same objects with the same content."""
        for (_, module), before in zip(self.modules, self.attributes, strict=True):
            if vars(module).keys() != before.keys():
                vars(module).clear()
            vars(module).update({k: _refill(*v) for k, v in before.items()})
        with torch.no_grad():
            for tensor, value in self.tensors:
                if not _equal(tensor, value):
                    tensor.copy_(value)

    def changes(self) -> list[tuple[str, str]]:
        """(module path, name) of each attribute or registered buffer replaced, added or removed since."""
        out = []
        for (path, module), before in zip(self.modules, self.attributes, strict=True):
            now = vars(module)
            names = [k for k in {**before, **now} if k not in _INTERNAL]
            out += [
                (path, k) for k in names if k not in now or k not in before or _changed(*before[k], now[k])
            ]
        return out


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


def _shallow(value: Any) -> tuple[Any, Any]:
    """A container and its content now; anything else and nothing."""
    return (value, value.copy()) if isinstance(value, (dict, list, set)) else (value, None)


def _refill(value: Any, content: Any) -> Any:
    """The same container object with its content of before."""
    if content is None or not _changed(value, content, value):
        return value
    if isinstance(value, list):
        value[:] = content
    else:
        value.clear()
        value.update(content)
    return value


def _changed(before: Any, content: Any, now: Any) -> bool:
    if content is None or now is not before:
        return not (
            now is before or (isinstance(now, _SIMPLE) and type(before) is not bool and now == before)
        )
    if isinstance(content, dict):
        return content.keys() != now.keys() or any(now[k] is not v for k, v in content.items())
    if isinstance(content, list):
        return len(content) != len(now) or any(a is not b for a, b in zip(content, now, strict=True))
    return bool(content != now)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit, so that a not-a-number is no change."""
    return bool(torch.equal(a, b)) or bool(((a == b) | ((a != a) & (b != b))).all())
