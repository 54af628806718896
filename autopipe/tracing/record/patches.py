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
import torch._functorch.eager_transforms
import torch.utils.checkpoint
from torch import nn
from torch.autograd.function import _SingleLevelFunction
from torch.utils.checkpoint import CheckpointFunction

from ..calls.functions import CustomFunction, ExportFlags
from .contexts import ENTERED
from .kept import is_copying
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
    originals = [(owner, name, vars(owner).get(name, _INHERITED)) for owner, name, _ in _PATCHES]
    patched = [
        make(route, getattr(owner, name) if o is _INHERITED else _unwrapped(o))
        for (owner, name, make), (_, _, o) in zip(_PATCHES, originals, strict=True)
    ]

    def put_back() -> None:
        for owner, name, original in originals:
            if original is _INHERITED:
                delattr(owner, name)
            else:
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


_INHERITED = object()
"""Stands for what a class has from the one below it."""


def _unwrapped(original: Any) -> Any:
    return original.__func__ if isinstance(original, classmethod) else original


def _function_apply(route: Route, original: Any) -> Any:
    """A custom function's backward stays its own; a checkpoint's leaves are recorded and marked.

    ``Function.apply`` may be known under any name: what is patched is what it calls.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        bound = super(_SingleLevelFunction, cls).apply
        if recorder is None:
            return bound(*args, **kwargs)
        if cls is CheckpointFunction:
            function, _, *rest = args
            with recorder.checkpointed:
                return function(*rest)
        return recorder.kept.custom(CustomFunction(cls), bound, args, kwargs)

    return classmethod(apply)


def _entered(route: Route, original: Any) -> Any:
    """A context that sets a mode: noted while the model's own code is in it."""

    def __enter__(self: Any) -> Any:
        result = original(self)
        if (recorder := route.active) is not None:
            recorder.contexts.enter(self)
        return result

    return __enter__


def _left(route: Route, original: Any) -> Any:
    def __exit__(self: Any, *error: Any) -> Any:
        if route.recorder is not None:
            route.recorder.contexts.leave(self)
        return original(self, *error)

    return __exit__


def _is_grad_enabled(route: Route, original: Any) -> Any:
    def is_grad_enabled() -> bool:
        recorder = route.active
        if recorder is not None and recorder.at.is_own_code():
            recorder.reads.asks_for_grad_mode()
        return bool(original())

    return is_grad_enabled


def _cast(route: Route, original: Any) -> Any:
    """A question about autocast."""

    def ask(*args: Any) -> Any:
        recorder = route.active
        if recorder is not None and recorder.at.is_own_code():
            recorder.reads.dtypes = True
        return original(*args)

    return ask


def _run_backward(route: Route, original: Any) -> Any:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if (recorder := route.active) is not None:
            recorder.kept.refuse_backward()
        return original(*args, **kwargs)

    return run_backward


def _reduced(route: Route, original: Any) -> Any:
    """A copy of a tensor is recorded; its bytes are refused."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        recorder = route.active
        if recorder is None:
            return original(self, protocol)
        if is_copying():
            return recorder.kept.copied, (self,)
        recorder.reads.refuse_bytes(self)
        with recorder.at.hushed:
            return original(self, protocol)

    return __reduce_ex__


def _grad_of(name: str) -> Maker:
    """``torch.func.grad`` and its like, which take what is given to the function in one piece."""

    def make(route: Route, original: Any) -> Any:
        def impl(func: Any, argnums: Any, has_aux: Any, args: Any, kwargs: Any) -> Any:
            recorder = route.active
            if recorder is None:
                return original(func, argnums, has_aux, args, kwargs)
            return recorder.kept.mapped(original, func, (argnums, has_aux), (args, kwargs), {}, name)

        return impl

    return make


def _jvp(route: Route, original: Any) -> Any:
    def impl(func: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        if recorder is None:
            return original(func, *args, **kwargs)
        return recorder.kept.mapped(original, func, (), args, kwargs, "jvp")

    return impl


def _refused_function(name: str) -> Maker:
    def make(route: Route, original: Any) -> Any:
        def transform(*args: Any, **kwargs: Any) -> Any:
            if (recorder := route.active) is not None:
                recorder.kept.refuse_function(name)
            return original(*args, **kwargs)

        return transform

    return make


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
        return recorder.kept.mapped(original, func, how, args, kwargs)

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


_MATH = (
    "sqrt", "log", "log2", "log10", "log1p", "exp", "expm1", "pow", "ceil", "floor", "trunc", "gcd", "lcm",
    "comb", "perm", "factorial", "isqrt", "cbrt", "hypot", "fmod", "remainder", "copysign", "sin", "cos",
    "tan", "tanh", "atan", "atan2", "radians", "degrees", "gamma", "lgamma", "erf",
)  # fmt: skip
_CASTS = ("is_autocast_enabled", "get_autocast_dtype", "is_autocast_cpu_enabled")
_TRANSFORMS = torch._functorch.eager_transforms
_PATCHES: tuple[tuple[Any, str, Maker], ...] = (
    (_SingleLevelFunction, "apply", _function_apply),
    *((context, "__enter__", _entered) for context in ENTERED),
    *((context, "__exit__", _left) for context in ENTERED),
    (torch, "is_grad_enabled", _is_grad_enabled),
    *((torch, name, _cast) for name in _CASTS),
    (torch.autograd, "_engine_run_backward", _run_backward),
    (torch.Tensor, "__reduce_ex__", _reduced),
    (_TRANSFORMS, "grad_impl", _grad_of("grad")),
    (_TRANSFORMS, "grad_and_value_impl", _grad_of("grad_and_value")),
    (_TRANSFORMS, "_jvp_with_argnums", _jvp),
    (_TRANSFORMS, "_vjp_with_argnums", _refused_function("vjp")),
    (_TRANSFORMS, "linearize", _refused_function("linearize")),
    (torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", _checkpoint),
    (torch._functorch.apis, "vmap_impl", _vmap),
    (torch, "from_numpy", _from_numpy),
    (builtins, "len", _len),
    (builtins, "range", _range),
    *((math, name, _math) for name in _MATH),
)
