"""What is patched in torch and Python while a model is being recorded, and put back afterwards.

Every patch asks the recorder first and does what the original does when it is not recording.
"""

from __future__ import annotations

import builtins
import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch._functorch.apis
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from ..calls.functions import CustomFunction, ExportFlags
from .recorder import Recorder
from .tracked import TrackedFloat, TrackedInt, call, counted

__all__ = ["Route", "applied"]


class Route:
    """Where patched calls go: to ``recorder`` while one is set and records, else to the originals."""

    def __init__(self, modules: Iterable[nn.Module] = ()) -> None:
        self.recorder: Recorder | None = None
        self.hooks = _Hooks(self, modules)
        self.suspended: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def active(self) -> Recorder | None:
        """The recorder, if calls are to be recorded now."""
        return self.recorder if self.recorder is not None and self.recorder.at.is_recorded else None

    @contextlib.contextmanager
    def to(self, recorder: Recorder, exporting: bool) -> Iterator[None]:
        """Route calls, those of the modules among them, to ``recorder``.

        With ``exporting``, ``torch.compiler.is_exporting()`` and ``is_compiling()`` answer yes meanwhile, so
        that libraries avoid shortcuts that depend on the data.
        """
        recorder.suspended, self.recorder = self._without_hooks, recorder
        flags = ExportFlags.read()
        ExportFlags(exporting or flags.exporting, exporting or flags.compiling).write()
        self.hooks.put_on()
        try:
            yield
        finally:
            self.hooks.put_back()
            flags.write()
            self.recorder = None

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        self.hooks.put_back()
        try:
            with self.suspended():
                yield
        finally:
            self.hooks.put_on()


_HOOK = "_compiled_call_impl"
"""What ``nn.Module.__call__`` calls where a module has it: the code that ``Module.compile`` makes."""


class _Hooks:
    """Lets each module's calls take the route, by an attribute of its own.

    To patch ``nn.Module`` itself would make Python forget what it knows of every class below it.
    """

    def __init__(self, route: Route, modules: Iterable[nn.Module]) -> None:
        self.places = [
            (vars(m), {_HOOK: vars(m)[_HOOK]} if _HOOK in vars(m) else {}, _routed(route, m)) for m in modules
        ]

    def put_on(self) -> None:
        for attributes, _, hook in self.places:
            attributes[_HOOK] = hook

    def put_back(self) -> None:
        for attributes, own, _ in self.places:
            attributes.pop(_HOOK, None)
            attributes.update(own)


def _routed(route: Route, module: nn.Module) -> Callable[..., Any]:
    original = module._compiled_call_impl or module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        if recorder is None:
            return original(*args, **kwargs)
        return recorder.module(module, original, args, kwargs)

    return call


Maker = Callable[[Route, Any], Any]


@contextlib.contextmanager
def applied(modules: Iterable[nn.Module]) -> Iterator[Route]:
    """A route for calls of ``modules``, and of what the function mode does not see, which is patched."""
    route = Route(modules)
    originals = [(owner, name, vars(owner)[name]) for owner, name, _ in _PATCHES]
    patched = [
        make(route, _unwrapped(o)) for (_, _, make), (_, _, o) in zip(_PATCHES, originals, strict=True)
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

    route.suspended = suspended
    try:
        put_on()
        yield route
    finally:
        route.suspended = contextlib.nullcontext
        put_back()


def _unwrapped(original: Any) -> Any:
    return original.__func__ if isinstance(original, classmethod) else original


def _function_apply(route: Route, original: Any) -> Any:
    """A custom function's backward stays its own; a checkpoint's leaves are recorded and marked."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        if recorder is None:
            return original(cls, *args, **kwargs)
        if cls is CheckpointFunction:
            function, _, *rest = args
            with recorder.checkpointed:
                return function(*rest)
        return recorder.custom_function(
            CustomFunction(cls), lambda *a, **k: original(cls, *a, **k), args, kwargs
        )

    return classmethod(apply)


def _checkpoint(route: Route, original: Any) -> Any:
    """The generator that surrounds a checkpointed call."""

    def generator(*args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        if recorder is None:
            yield from original(*args, **kwargs)
            return
        with recorder.checkpointed:
            yield

    return generator


def _vmap(route: Route, original: Any) -> Any:
    def vmap_impl(
        func: Any, in_dims: Any, out_dims: Any, randomness: Any, chunk_size: Any, *args: Any, **kwargs: Any
    ) -> Any:
        how = (in_dims, out_dims, randomness, chunk_size)
        recorder = route.active
        if recorder is None:
            return original(func, *how, *args, **kwargs)
        return recorder.mapped(original, func, how, args, kwargs)

    return vmap_impl


def _from_numpy(route: Route, original: Any) -> Any:
    def from_numpy(array: Any) -> Any:
        recorder = route.active
        return original(array) if recorder is None else recorder.own_constant(original(array))

    return from_numpy


def _len(route: Route, original: Any) -> Any:
    def len(value: Any) -> Any:
        if type(value) is torch.Tensor and value.dim() and route.active:
            return value.size(0)
        return original(value)

    return len


def _range(route: Route, original: Any) -> Any:
    class Counting(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, original)

    class range(metaclass=Counting):
        def __new__(cls, *args: Any) -> Any:
            if not route.active or not any(type(a) is TrackedInt for a in args):
                return original(*args)
            return counted(*((0, *args, 1) if len(args) == 1 else (*args, 1)[:3]))

    return range


def _math(route: Route, original: Any) -> Any:
    def function(*args: Any) -> Any:
        if route.active and any(type(a) in (TrackedInt, TrackedFloat) for a in args):
            return call(original, *args)
        return original(*args)

    return function


_MATH = ("sqrt", "log", "log2", "log10", "exp", "pow", "ceil", "floor")
_PATCHES: tuple[tuple[Any, str, Maker], ...] = (
    (torch.autograd.Function, "apply", _function_apply),
    (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _checkpoint),
    (torch._functorch.apis, "vmap_impl", _vmap),
    (torch, "from_numpy", _from_numpy),
    (builtins, "len", _len),
    (builtins, "range", _range),
    *((math, name, _math) for name in _MATH),
)
