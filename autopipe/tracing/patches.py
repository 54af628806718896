"""What is patched in torch and Python while a model is being recorded, and put back afterwards.

Every patch asks the recorder first and does what the original does when it is not recording.
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.apis
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from .functions import CustomFunction, ExportFlags
from .recorder import Recorder
from .sizes import TrackedFloat, TrackedInt, call

__all__ = ["applied"]

Maker = Callable[[Recorder, Any], Any]


@contextlib.contextmanager
def applied(recorder: Recorder) -> Iterator[None]:
    """Route module calls, and what the function mode does not see, to ``recorder``.

    ``torch.compiler.is_exporting()`` and ``is_compiling()`` answer yes meanwhile, so that libraries avoid
    shortcuts that depend on the data.
    """
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in _PATCHES]
    patched = [
        make(recorder, _unwrapped(o)) for (_, _, make), (_, _, o) in zip(_PATCHES, originals, strict=True)
    ]

    def put_back() -> None:
        for owner, name, original in originals:
            setattr(owner, name, original)

    def put_on() -> None:
        for (owner, name, _), replacement in zip(originals, patched, strict=True):
            setattr(owner, name, replacement)

    @contextlib.contextmanager
    def suspended() -> Iterator[None]:
        put_back()
        try:
            yield
        finally:
            put_on()

    recorder.suspended = suspended
    flags = ExportFlags.read()
    try:
        put_on()
        ExportFlags(True, True).write()
        yield
    finally:
        put_back()
        flags.write()


def _unwrapped(original: Any) -> Any:
    return original.__func__ if isinstance(original, classmethod) else original


def _module_call(recorder: Recorder, original: Any) -> Any:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not recorder.recording:
            return original(self, *args, **kwargs)
        return recorder.module(self, original, args, kwargs)

    return __call__


def _function_apply(recorder: Recorder, original: Any) -> Any:
    """A custom function's backward stays its own; a checkpoint is recorded through."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.recording:
            return original(cls, *args, **kwargs)
        if cls is CheckpointFunction:
            function, _, *rest = args
            return function(*rest)
        return recorder.custom(CustomFunction(cls), lambda *a, **k: original(cls, *a, **k), args, kwargs)

    return classmethod(apply)


def _vmap(recorder: Recorder, original: Any) -> Any:
    def vmap_impl(
        func: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk_size: Any, *args: Any, **kwargs: Any
    ) -> Any:
        how = (in_dims, out_dims, randomness, chunk_size)
        if not recorder.recording:
            return original(func, *how, *args, **kwargs)
        return recorder.mapped(original, func, how, args, kwargs)

    return vmap_impl


def _from_numpy(recorder: Recorder, original: Any) -> Any:
    def from_numpy(array: Any) -> Any:
        return recorder.own_constant(original(array)) if recorder.recording else original(array)

    return from_numpy


def _len(recorder: Recorder, original: Any) -> Any:
    def len(value: Any) -> Any:
        if type(value) is torch.Tensor and value.dim() and recorder.recording:
            return value.size(0)
        return original(value)

    return len


def _math(recorder: Recorder, original: Any) -> Any:
    def function(*args: Any) -> Any:
        if recorder.recording and any(type(a) in (TrackedInt, TrackedFloat) for a in args):
            return call(original, *args)
        return original(*args)

    return function


_MATH = ("sqrt", "log", "log2", "log10", "exp", "pow", "ceil", "floor")
_PATCHES: tuple[tuple[Any, str, Maker], ...] = (
    (nn.Module, "__call__", _module_call),
    (torch.autograd.Function, "apply", _function_apply),
    (torch._functorch.apis, "vmap_impl", _vmap),
    (torch, "from_numpy", _from_numpy),
    (builtins, "len", _len),
    *((math, name, _math) for name in _MATH),
)
