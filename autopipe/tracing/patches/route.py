"""Where calls of a model's modules, and of what is patched, go while it is being recorded.

What is patched beside the modules is left to ``patches``.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from ...torch_private import CALL_HOOK
from ..calls.functions import ExportFlags
from ..code.leaves import calls_otherwise
from ..record.recorder import Recorder

__all__ = ["INHERITED", "Patch", "Route"]

INHERITED = object()
"""Stands for what a class has from the one below it."""


class Patch(NamedTuple):
    """What an owner, or a namespace, has under a name, and what it has there while a model is recorded."""

    owner: Any
    name: str
    original: Any
    replacement: Any

    def put_on(self) -> None:
        self._put(self.replacement)

    def put_back(self) -> None:
        if self.original is INHERITED:
            delattr(self.owner, self.name)
        else:
            self._put(self.original)

    def _put(self, value: Any) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            setattr(self.owner, self.name, value)


class Route:
    """Where patched calls go: to ``recorder`` while one is set and records, else to the originals.

    ``imported`` are patches where the code that is recorded may have names of its own for what is patched:
    they are there for each recording alone, as what such names stand for is part of the model's state.
    """

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.hooks = _Hooks(self, ())
        self.imported: Sequence[Patch] = ()
        self.suspended: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    @property
    def active(self) -> Recorder | None:
        """The recorder, if calls are to be recorded now."""
        return self.recorder if self.recorder is not None and self.recorder.at.is_recorded else None

    def begin(self, modules: Iterable[nn.Module]) -> None:
        """From now on calls of these modules are routed too."""
        self.hooks = _Hooks(self, modules)

    def end(self) -> None:
        """Let go of the modules: from now on calls go where they go without it."""
        self.hooks, self.imported, self.suspended = _Hooks(self, ()), (), contextlib.nullcontext

    @contextlib.contextmanager
    def to(self, recorder: Recorder, exporting: bool) -> Iterator[None]:
        """Route calls, those of the modules among them, to ``recorder``.

        With ``exporting``, ``torch.compiler.is_exporting()`` and ``is_compiling()`` answer yes meanwhile, so
        that libraries avoid shortcuts that depend on the data.
        """
        recorder.suspended, self.recorder = self._without_hooks, recorder
        flags = ExportFlags.read()
        ExportFlags(exporting or flags.exporting, exporting or flags.compiling).write()
        self._put_on()
        try:
            yield
        finally:
            self._put_back()
            flags.write()
            self.recorder = None

    @contextlib.contextmanager
    def _without_hooks(self) -> Iterator[None]:
        self._put_back()
        try:
            with self.suspended():
                yield
        finally:
            self._put_on()

    def _put_on(self) -> None:
        self.hooks.put_on()
        for patch in self.imported:
            patch.put_on()

    def _put_back(self) -> None:
        self.hooks.put_back()
        for patch in self.imported:
            patch.put_back()


class _Hooks:
    """Lets each module's calls take the route, by an attribute of its own.

    To patch ``nn.Module`` itself would make Python forget what it knows of every class below it. A class that
    says itself what a call does is patched beside, as that is more than the attribute sees.
    """

    def __init__(self, route: Route, modules: Iterable[nn.Module]) -> None:
        modules = [*modules]
        self.places = [
            (vars(m), {CALL_HOOK: vars(m)[CALL_HOOK]} if CALL_HOOK in vars(m) else {}, _routed(route, m))
            for m in modules
        ]
        callers = {_caller(type(m)): None for m in modules if calls_otherwise(m)}
        calls = {c: vars(c)["__call__"] for c in callers}
        self.callers = [
            Patch(c, "__call__", call, _routed_call(route, c, call))
            for c, call in calls.items()
            if inspect.isfunction(call)
        ]

    def put_on(self) -> None:
        for attributes, _, hook in self.places:
            attributes[CALL_HOOK] = hook
        for patch in self.callers:
            patch.put_on()

    def put_back(self) -> None:
        for attributes, own, _ in self.places:
            attributes.pop(CALL_HOOK, None)
            attributes.update(own)
        for patch in self.callers:
            patch.put_back()


def _caller(cls: type) -> type:
    """The class, of those below ``cls``, whose ``__call__`` its instances have."""
    return next(c for c in cls.__mro__ if "__call__" in vars(c))


def _routed_call(route: Route, cls: type, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        if recorder is None or _caller(type(self)) is not cls:  # a call of super(): within the other's
            return original(self, *args, **kwargs)
        return recorder.module(self, functools.partial(original, self), args, kwargs, outermost=True)

    return __call__


def _routed(route: Route, module: nn.Module) -> Callable[..., Any]:
    original = getattr(module, CALL_HOOK) or module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        if recorder is None:
            return original(*args, **kwargs)
        return recorder.module(module, original, args, kwargs)

    return call
