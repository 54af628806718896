"""The model as it was: mode, buffers, attributes and random state, put back after recording.

Noticing that a forward changes Python state is left to ``capture``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["preserved"]


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Whatever happens inside, leave ``model`` and the random generators as they were."""
    modules = list(dict.fromkeys(model.modules()))
    attributes = [(m, {k: _shallow(v) for k, v in vars(m).items()}) for m in modules]
    buffers = {id(b): (b, b.detach().clone()) for b in model.buffers() if b.device.type != "meta"}
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if cuda else ()):
        try:
            yield
        finally:
            for module, before in attributes:
                vars(module).clear()
                vars(module).update({k: _refill(*v) for k, v in before.items()})
            with torch.no_grad():
                for buffer, value in buffers.values():
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


def _shallow(value: Any) -> tuple[Any, Any]:
    """A container and its content now; anything else and nothing."""
    return (value, value.copy()) if isinstance(value, (dict, list, set)) else (value, None)


def _refill(value: Any, content: Any) -> Any:
    """The same container object with its content of before."""
    if content is None or content == value if _comparable(value) else False:
        return value
    if isinstance(value, list):
        value[:] = content
    elif content is not None:
        value.clear()
        value.update(content)
    return value


def _comparable(value: Any) -> bool:
    return not isinstance(value, (dict, list, set))
