"""Grad mode, autocast, default dtype, attention's kernels and hooks on what autograd saves at each recorded
call, and code that restores them, and the model's own checkpoints.

Noticing the state of a call is left to ``recorder``; ``insert`` serves every graph that code is made from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ...accelerator import kinds

__all__ = ["Ambient", "Region", "SavedHooks", "ambient", "context", "difference", "enter", "insert", "leave"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SavedHooks:
    """What a model does with each tensor that autograd saves, and to have it back."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]

    def __eq__(self, other: object) -> bool:
        is_alike = isinstance(other, SavedHooks) and _is_alike(self.pack, other.pack)
        return is_alike and _is_alike(self.unpack, other.unpack)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash(type(self))


def _is_alike(a: Any, b: Any) -> bool:
    """Whether two functions are one, or were made by the same code around the same things."""
    if a is b or not (isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType)):
        return bool(a == b)
    held = [[c.cell_contents for c in f.__closure__ or ()] for f in (a, b)]
    return a.__code__ is b.__code__ and all(x is y for x, y in zip(*held, strict=True))


@dataclasses.dataclass(frozen=True, slots=True)
class Region:
    """What the model's own code sets around a call: grad mode, autocast, saved tensors' hooks, default dtype.

    ``autocast`` is a (device type, enabled, dtype, weight cache) tuple per device type that it sets;
    ``kernels`` says which of :data:`KERNELS` attention may run.
    """

    grad: bool | None = None
    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...] = ()
    saved: SavedHooks | None = None
    kernels: tuple[bool, ...] | None = None
    dtype: torch.dtype | None = None

    def __str__(self) -> str:
        grad = [] if self.grad is None else [f"grad={self.grad}"]
        cast = [f"autocast({d}, {e}, {t})" for d, e, t, _ in self.autocast]
        return ", ".join(grad + cast + ["saved_tensors_hooks"] * (self.saved is not None) + self._rest())

    def _rest(self) -> list[str]:
        dtype = [f"default dtype {self.dtype}"] if self.dtype else []
        if self.kernels is None:
            return dtype
        allowed = ", ".join(n for n, on in zip(KERNELS, self.kernels, strict=True) if on)
        return [f"attention by {allowed}", *dtype]


KERNELS = ("flash", "mem_efficient", "math", "cudnn")
"""What attention may run, by torch's names."""

Ambient = tuple[bool, tuple[tuple[str, bool, torch.dtype, bool], ...], tuple[bool, ...], torch.dtype]


_is_cast, _cast_to, _derives = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.is_grad_enabled
_dtype = torch.get_default_dtype
_runs = tuple(getattr(torch.backends.cuda, f"{name}_sdp_enabled") for name in KERNELS)
"""Torch's own, which others stand for while a model is recorded: they note who asks."""


def ambient(devices: Collection[str] = ()) -> Ambient:
    """The grad mode, autocast state, kernels of attention and default dtype in force now.

    Of all kinds of ``devices`` where none are named.
    """
    cache = torch.is_autocast_cache_enabled()
    devices = devices or kinds()
    casts = tuple(zip(devices, map(_is_cast, devices), map(_cast_to, devices), itertools.repeat(cache)))
    return _derives(), casts, tuple([runs() for runs in _runs]), _dtype()


def difference(
    base: Ambient,
    now: Ambient,
    sets_grad: bool = False,
    sets_casts: Collection[str] = (),
    saved: SavedHooks | None = None,
) -> Region | None:
    """The region that leads from ``base`` to ``now``, and says what is set anew; None where nothing is."""
    region = Region(
        now[0] if sets_grad or base[0] != now[0] else None,
        tuple(n for b, n in zip(base[1], now[1], strict=True) if b != n or n[0] in sets_casts),
        saved,
        now[2] if base[2] != now[2] else None,
        now[3] if base[3] != now[3] else None,
    )
    return None if region == Region() else region


def context(region: Region) -> contextlib.AbstractContextManager[Any]:
    """What a region sets, as a context: torch's own where it is one, which compilers know."""
    contexts: list[Any] = []
    if region.grad is not None:
        contexts.append(torch.set_grad_enabled(region.grad))
    for device, enabled, dtype, cache in region.autocast:
        contexts.append(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
    if region.saved is not None:
        contexts.append(saved_tensors_hooks(region.saved.pack, region.saved.unpack))
    if region.kernels is not None:
        contexts.append(_Kernels(region.kernels))
    if region.dtype is not None:
        contexts.append(_DefaultDtype(region.dtype))
    return contexts[0] if len(contexts) == 1 else _Together(contexts)


def enter(region: Region) -> contextlib.AbstractContextManager[Any]:
    """Put what a region sets in force; returns what :func:`leave` needs."""
    entered = context(region)
    entered.__enter__()
    return entered


class _Together:
    """Several contexts as one."""

    def __init__(self, contexts: list[Any]) -> None:
        self.contexts = contexts

    def __enter__(self) -> None:
        for each in self.contexts:
            each.__enter__()

    def __exit__(self, *error: object) -> None:
        for each in reversed(self.contexts):
            each.__exit__(*error)


class _DefaultDtype:
    """A context in which tensors of numbers are made of a dtype where none is said."""

    def __init__(self, chosen: torch.dtype) -> None:
        self.chosen, self.before = chosen, _dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.chosen)

    def __exit__(self, *error: object) -> None:
        torch.set_default_dtype(self.before)


class _Kernels:
    """A context in which attention runs some kernels."""

    def __init__(self, chosen: tuple[bool, ...]) -> None:
        self.chosen, self.before = chosen, tuple([runs() for runs in _runs])

    def __enter__(self) -> None:
        _allow(self.chosen)

    def __exit__(self, *error: object) -> None:
        _allow(self.before)


def _allow(kernels: tuple[bool, ...]) -> None:
    for name, is_on in zip(KERNELS, kernels, strict=True):
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(is_on)


def leave(entered: contextlib.AbstractContextManager[Any]) -> None:
    """Undo :func:`enter`."""
    entered.__exit__(None, None, None)


def recomputed(module: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A module's result, its inside to be computed again in backward."""
    return checkpoint(module, *args, use_reentrant=False, **kwargs)


def insert(graph: fx.Graph) -> fx.Graph:
    """Put calls of :func:`enter` and :func:`leave` around each run of nodes whose ``meta["region"]`` is set.

    Code has a ``with`` in their place: an op that raises leaves no region in force. Calls of modules that the
    model checkpoints go through :func:`recomputed`. To be called once on a graph that code is to be made
    from; a graph with neither is left as it is.
    """
    for node in list(graph.nodes):
        if node.meta.get("recompute"):
            with graph.inserting_before(node):
                module = graph.get_attr(node.target)
                again = graph.call_function(recomputed, (module, *node.args), node.kwargs)
            again.meta = node.meta
            node.replace_all_uses_with(again)
            graph.erase_node(node)
    current: Region | None = None
    token: fx.Node | None = None
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            continue
        region = node.meta.get("region") if node.op != "output" else None
        if region == current:
            continue
        with graph.inserting_before(node):
            if token is not None:
                graph.call_function(leave, (token,))
            token = None if region is None else graph.call_function(_Enter(region))
        current = region
    graph.on_generate_code(lambda _: _with_statements)
    return graph


_ENTERS = re.compile(r"\w+ = (autopipe_tracing_calls_regions_enter\w*)\(\)")
_LEAVES = re.compile(r"\w+ = autopipe_tracing_calls_regions_leave\w*\(")


def _with_statements(body: list[str]) -> list[str]:
    """A body of generated code, with a ``with`` from each call of :func:`enter` to that of :func:`leave`."""
    return ["\n".join(_indented("".join(body).split("\n")))]


def _indented(lines: list[str]) -> Iterator[str]:
    indent = ""
    for line in lines:
        if entered := _ENTERS.match(line):
            yield f"with {entered[1]}.context():"
            indent = "    "
        elif _LEAVES.match(line):
            indent = ""
        else:
            yield indent + line


class _Enter:
    """A region's :func:`enter` as a function of no arguments, so that generated code can name it."""

    __module__ = "autopipe.tracing.calls.regions"

    def __init__(self, region: Region) -> None:
        self.region = region
        grad = {None: [], True: ["grad"], False: ["no_grad"]}[region.grad]
        cast = ["autocast"] if region.autocast else []
        more = ["hooks"] * (region.saved is not None) + ["kernels"] * (region.kernels is not None)
        more += ["dtype"] * (region.dtype is not None)
        self.__name__ = "_".join(["enter", *grad, *cast, *more])
        self.__qualname__ = self.__name__

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        return enter(self.region)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """For a ``with``."""
        return context(self.region)
