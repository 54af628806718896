"""What is patched in torch and Python while a model is being recorded, and put back afterwards.

Every patch asks the recorder first and does what the original does when it is not recording.
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .recorder import Recorder

__all__ = ["applied"]


@contextlib.contextmanager
def applied(recorder: Recorder) -> Iterator[None]:
    """Route module calls, and what the function mode does not see, to ``recorder``."""
    with contextlib.ExitStack() as stack:
        for owner, name, make in _PATCHES:
            original = getattr(owner, name)
            setattr(owner, name, make(recorder, original))
            stack.callback(setattr, owner, name, original)
        stack.enter_context(exporting(True))
        yield


@contextlib.contextmanager
def exporting(value: bool) -> Iterator[None]:
    """Set or clear what ``torch.compiler.is_exporting()`` and ``is_compiling()`` answer.

    Libraries then avoid shortcuts that depend on the data.
    """
    flags = ("_is_exporting_flag", "_is_compiling_flag")
    before = [getattr(torch.compiler, f) for f in flags]
    for flag in flags:
        setattr(torch.compiler, flag, value)
    try:
        yield
    finally:
        for flag, old in zip(flags, before, strict=True):
            setattr(torch.compiler, flag, old)


def _module_call(recorder: Recorder, original: Any) -> Any:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not recorder.recording:
            return original(self, *args, **kwargs)
        return recorder.module(self, original, args, kwargs)

    return __call__


def _len(recorder: Recorder, original: Any) -> Any:
    def len(value: Any) -> Any:
        if type(value) is torch.Tensor and recorder.recording:
            return value.size(0)
        return original(value)

    return len


_PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (nn.Module, "__call__", _module_call),
    (builtins, "len", _len),
)
