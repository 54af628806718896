"""What is patched in torch and Python while a model is being recorded, and put back afterwards.

Every patch asks the recorder first and does what the original does when it is not recording.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import torch.autograd.forward_ad
import torch.utils.checkpoint
from torch import nn
from torch.utils.checkpoint import CheckpointFunction

from ...torch_private import APPLY_IS_C, BACKWARD, CHECKPOINT, CUSTOM_FUNCTION, DYNAMO, grad_mode
from ..calls.named import CustomFunction, Named
from ..record.contexts import ENTERED
from ..record.opaque_calls import is_copying
from ..state.namespaces import Spaces
from ..values.tracked import TrackedFloat, TrackedInt, call, counted, pin
from .importing import imported_outside
from .queries import ASKED, Maker
from .route import INHERITED, Patch, Route
from .seeding import SEEDING
from .transforms import TRANSFORMS

__all__ = ["applied"]


@contextlib.contextmanager
def applied(modules: Iterable[nn.Module]) -> Iterator[Route]:
    """A route for calls of ``modules``, and of what the function mode does not see, which is patched."""
    route, of_torch = _taken()
    route.begin(modules)
    patches = [*of_torch, *_forwards(route)]
    route.imported = [*_imported(patches)]
    is_on = False

    def put_back() -> None:
        nonlocal is_on
        is_on = False
        for patch in patches:
            patch.put_back()

    def put_on() -> None:
        nonlocal is_on
        is_on = True
        for patch in patches:
            patch.put_on()

    @contextlib.contextmanager
    def suspended() -> Iterator[None]:
        if not is_on:
            yield
            return
        put_back()
        try:
            yield
        finally:
            put_on()

    route.suspended = suspended
    try:
        put_on()
        with imported_outside(suspended, DYNAMO):
            yield route
    finally:
        put_back()
        route.end()
        _free[:] = [(route, of_torch)]


_free: list[tuple[Route, list[Patch]]] = []
"""A route that no recording takes now, with what was patched for it: the next one takes it."""


def _taken() -> tuple[Route, list[Patch]]:
    """A route, and what is patched for it: made anew where others have put theirs in some places."""
    route, patches = _free.pop() if _free else (Route(), [])
    is_as_it_was = patches and all(vars(p.owner).get(p.name, INHERITED) is p.original for p in patches)
    return route, patches if is_as_it_was else [*_patched(route)]


def _unwrapped(original: Any) -> Any:
    return original.__func__ if isinstance(original, classmethod) else original


def _function_apply(route: Route, original: Any) -> Any:
    """A custom function's backward stays its own; a checkpoint's leaves are recorded and marked.

    ``Function.apply`` may be known under any name: what is patched is what it calls.
    """

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        bound = super(CUSTOM_FUNCTION, cls).apply
        if recorder is None:
            return bound(*args, **kwargs)
        if cls is CheckpointFunction:
            function, _, *rest = args
            with recorder.checkpointed:
                return function(*rest)
        return recorder.opaque.custom(CustomFunction(cls), bound, args, kwargs)

    return classmethod(apply)


def _patched(route: Route) -> Iterator[Patch]:
    """What the function mode does not see."""
    for owner, name, make in _PATCHES:
        original = vars(owner).get(name, INHERITED)
        given = getattr(owner, name) if original is INHERITED else _unwrapped(original)
        yield Patch(owner, name, original, make(route, given))


def _imported(patches: Iterable[Patch]) -> Iterator[Patch]:
    """The same functions where other modules have imported them, under whatever name."""
    replaced = {id(p.original): p.replacement for p in patches if isinstance(p.owner, types.ModuleType)}
    for namespace, name, value in _SPACES.found():
        if id(value) in replaced:
            yield Patch(namespace, name, value, replaced[id(value)])


def _forwards(route: Route) -> Iterator[Patch]:
    """Custom functions whose ``apply`` was bound to another name before, where only ``forward`` is seen.

    They are applied once more, by a name that is seen; the call around it gives its result on.
    """
    for cls in _functions() if APPLY_IS_C else ():
        original = vars(cls)["forward"]
        again = _applied_again(route, cls, original.__get__(None, cls))
        yield Patch(cls, "forward", original, staticmethod(again))


def _functions() -> Iterator[Any]:
    """The custom functions there are."""
    classes = [torch.autograd.Function]
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if cls is not torch.autograd.Function and "forward" in vars(cls):
            yield cls


def _applied_again(route: Route, cls: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(*args: Any) -> Any:
        if route.active is None:
            return original(*args)
        inputs, needing = args, args
        if cls.setup_context is torch.autograd.Function.setup_context:
            inputs, needing = args[1:], args[0].needs_input_grad
        grad = any(a.requires_grad if isinstance(a, torch.Tensor) else a is True for a in needing)
        with grad_mode(grad):
            return cls.apply(*inputs)

    return forward


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


def _run_backward(route: Route, original: Any) -> Any:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if (recorder := route.active) is not None:
            recorder.opaque.refuse_backward()
        return original(*args, **kwargs)

    return run_backward


def _reduced(route: Route, original: Any) -> Any:
    """A copy of a tensor is recorded; its bytes are refused."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        recorder = route.active
        if recorder is None:
            return original(self, protocol)
        if is_copying():
            return recorder.opaque.copied, (self,)
        recorder.reads.refuse_bytes(self)
        with recorder.at.hushed:
            return original(self, protocol)

    return __reduce_ex__


def _scripted(route: Route, original: Any) -> Any:
    """A call of a scripted function, of which no mode sees anything."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        if recorder is None:
            return original(self, *args, **kwargs)
        run = functools.partial(original, self)
        return recorder.opaque.custom(Named(self, self.name), run, args, kwargs)

    return __call__


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


def _made(route: Route, original: Any) -> Any:
    """A tensor that its class makes of sizes, which no mode sees."""

    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args
        is_sized = cls is torch.Tensor and sizes and not kwargs and all(isinstance(n, int) for n in sizes)
        if is_sized and route.active is not None:
            return torch.empty(tuple(sizes), device="cpu")
        return original(cls, *args, **kwargs)

    return __new__


def _set(route: Route, original: Any) -> Any:
    """A tensor laid into the memory of another, which no mode sees."""

    def set_(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        given = (*args, *kwargs.values())
        if recorder is None or not any(isinstance(v, torch.Tensor) for v in given):
            return original(self, *args, **kwargs)
        return recorder.opaque.custom(Named(original), original, (self, *args), kwargs)

    return set_


class _Part:
    """A complex tensor's part. No mode sees that it is set: a write into a view of it, which modes do see."""

    def __init__(self, route: Route, original: Any) -> None:
        self.route = route
        self.original = original

    def __get__(self, tensor: torch.Tensor | None, cls: type | None = None) -> Any:
        return self.original if tensor is None else self.original.__get__(tensor, cls)

    def __set__(self, tensor: torch.Tensor, value: Any) -> None:
        if self.route.active is None:
            self.original.__set__(tensor, value)
            return
        part = self.original.__get__(tensor)
        part.copy_(value) if isinstance(value, torch.Tensor) else part.fill_(value)


def _as_subclass(route: Route, original: Any) -> Any:
    """A tensor as one of another class, which no mode sees: what that class does ends where a stage does."""

    def as_subclass(self: Any, cls: Any) -> Any:
        recorder = route.active
        if recorder is None:
            return original(self, cls)
        if cls is torch.Tensor:
            return recorder.opaque.custom(Named(original), original, (self, cls), {})
        return recorder.at.keep_whole(
            f"{recorder.at.source()}: as_subclass makes a tensor a {cls.__name__}, which it is no longer "
            "where a stage hands it on"
        )

    return as_subclass


def _dual(route: Route, original: Any) -> Any:
    """A tensor with a tangent, which is known to the level that it was made in alone."""

    def make_dual(*args: Any, **kwargs: Any) -> Any:
        if (recorder := route.active) is not None:
            recorder.at.keep_whole(
                f"{recorder.at.source()}: make_dual gives a tensor a tangent, which a graph cannot hold; "
                "torch.func.jvp gives the derivative itself"
            )
        return original(*args, **kwargs)

    return make_dual


def _nested(route: Route, original: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        if (recorder := route.active) is not None:
            recorder.at.refuse_nested()
        return original(*args, **kwargs)

    return make


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
        if not route.active:
            return original(*args)
        args = tuple(a.item() if isinstance(a, torch.Tensor) and a.numel() == 1 else a for a in args)
        return (call if any(type(a) in _TRACKED for a in args) else _called)(original, *args)

    return function


def _called(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _numpy(route: Route, original: Any) -> Any:
    """Reads numbers where nobody sees it, as numpy does: those made from sizes stay as they are from then.

    But where it asks a number itself what it gives. What one of its functions by element makes of a tensor is
    a tensor: that is a call like others.
    """
    is_by_element = isinstance(original, np.ufunc)
    asked = _TRACKED if is_by_element else ()

    def function(*args: Any, **kwargs: Any) -> Any:
        recorder = route.active
        if recorder is not None:
            if is_by_element and any(isinstance(a, torch.Tensor) for a in args):
                shown = f"numpy.{original.__name__}"
                return recorder.opaque.custom(Named(original, shown=shown), original, args, kwargs)
            args = tuple(a if type(a) in asked else _pinned(a) for a in args)
            kwargs = _pinned(kwargs)
        return original(*args, **kwargs)

    if is_by_element:  # code may ask it for reduce, accumulate and outer
        vars(function).update(_shown(original))
    return function


@functools.cache
def _shown(original: Any) -> dict[str, Any]:
    """What code may ask one of numpy's functions for, by name."""
    return {n: getattr(original, n) for n in dir(original) if not n.startswith("_")}


def _pinned(value: Any) -> Any:
    if type(value) in (tuple, list, torch.Size):
        return type(value)([_pinned(v) for v in value])
    if type(value) is dict:
        return {k: _pinned(v) for k, v in value.items()}
    return pin(value)


_TRACKED = (TrackedInt, TrackedFloat)
_NUMPY = (
    "abs", "arange", "array", "asarray", "ceil", "cos", "cumsum", "exp", "expm1", "floor", "full", "linspace",
    "log", "log10", "log1p", "log2", "max", "maximum", "mean", "min", "minimum", "ones", "power", "prod",
    "round", "sin", "sqrt", "square", "sum", "tanh", "zeros",
)  # fmt: skip
_MATH = (
    "sqrt", "log", "log2", "log10", "log1p", "exp", "expm1", "pow", "ceil", "floor", "trunc", "gcd", "lcm",
    "comb", "perm", "factorial", "isqrt", "cbrt", "hypot", "fmod", "remainder", "copysign", "sin", "cos",
    "tan", "tanh", "atan", "atan2", "radians", "degrees", "gamma", "lgamma", "erf",
)  # fmt: skip
_NESTED = ("nested_tensor", "as_nested_tensor", "nested_tensor_from_jagged", "narrow", "masked_select")
_PATCHES: tuple[tuple[Any, str, Maker], ...] = (
    (CUSTOM_FUNCTION, "apply", _function_apply),
    *((context, "__enter__", _entered) for context in ENTERED),
    *((context, "__exit__", _left) for context in ENTERED),
    *ASKED,
    (*BACKWARD, _run_backward),
    (torch.Tensor, "__new__", _made),
    (torch.Tensor, "__reduce_ex__", _reduced),
    (torch.Tensor, "as_subclass", _as_subclass),
    (torch.Tensor, "set_", _set),
    *((torch.Tensor, part, _Part) for part in ("real", "imag")),
    (torch.autograd.forward_ad, "make_dual", _dual),
    *((torch.nested, name, _nested) for name in _NESTED),
    *TRANSFORMS,
    *SEEDING,
    (torch.jit.ScriptFunction, "__call__", _scripted),
    (*CHECKPOINT, _checkpoint),
    (torch, "from_numpy", _from_numpy),
    (builtins, "len", _len),
    (builtins, "range", _range),
    *((math, name, _math) for name in _MATH),
    *((np, name, _numpy) for name in _NUMPY),
    *((builtins, name, _numpy) for name in ("bin", "chr", "hex", "oct")),
)
_FUNCTIONS = {id(getattr(owner, name)) for owner, name, _ in _PATCHES if isinstance(owner, types.ModuleType)}
_SPACES = Spaces(lambda value: id(value) in _FUNCTIONS)
