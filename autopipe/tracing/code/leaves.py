"""Which modules stay whole: blocks and plain layers are leaves, what merely holds them is opened.

Opening more because a plan needs it, or fewer because Python branches on data, is left to ``session``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...torch_private import COND, DYNAMO, force_eager
from ..calls.bounds import bounded
from ..members import submodule

__all__ = ["Policy", "asking", "eager", "is_compiled", "is_torchs", "lies_in_leaf"]

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
ENOUGH = 4
"""Calls with parameters that a capture should have at least, so that there is something to cut."""
_COMPOSITE_PREFIX = "torch.nn.modules.transformer"


def lies_in_leaf(path: str, is_leaf: Callable[[str], bool]) -> bool:
    """Whether the module at ``path`` is a leaf or lies in one."""
    end = path.find(".")
    while end >= 0:
        if is_leaf(path[:end]):
            return True
        end = path.find(".", end + 1)
    return is_leaf(path)


@dataclasses.dataclass(frozen=True)
class Policy:
    """Decides by path which modules are recorded whole.

    A module is opened when it is the root, a plain container, or *holds a stack*: somewhere below it, two
    or more siblings of one class that have layers of their own, which are not already inside a block.
    Everything else is a leaf: the blocks, plain ``torch.nn`` layers, embeddings, heads. ``opened`` and
    ``closed`` override by path (``closed`` wins; opening a path opens what it lies in).
    """

    model: nn.Module
    opened: frozenset[str] = frozenset()
    closed: frozenset[str] = frozenset()
    pinned: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        asked = self.opened | self.closed | self.pinned
        modules = dict(self.model.named_modules(remove_duplicate=False)) if asked else {}
        unknown = sorted(asked - set(modules))
        if unknown:
            raise InputError(
                f"{type(self.model).__name__} has no module {', '.join(map(repr, unknown))}; "
                f"open and closed take dotted paths such as {next((p for p in modules if p), '')!r}"
            )
        object.__setattr__(self, "_default", frozenset(self._wrappers()))
        object.__setattr__(self, "_inside", dict[str, bool]())

    def is_leaf(self, path: str) -> bool:
        """Whether the module at ``path`` stays whole."""
        if path in self.closed or path in self.pinned:
            return True
        if path in self.opened:
            return False
        return path not in self._default  # type: ignore[attr-defined]

    def is_inside_leaf(self, path: str) -> bool:
        """Whether the module at ``path`` is a leaf or lies in one."""
        known: dict[str, bool] = self._inside  # type: ignore[attr-defined]
        if path not in known:
            known[path] = lies_in_leaf(path, self.is_leaf)
        return known[path]

    def is_openable(self, path: str) -> bool:
        """Whether opening the module at ``path`` shows anything inside."""
        module = submodule(self.model, path)
        return path not in self.closed | self.pinned and not is_atomic(module)

    def like(self, path: str) -> list[str]:
        """The paths of the open modules of the same class as the one at ``path``."""
        cls = type(submodule(self.model, path))
        return [p for p, m in self.model.named_modules() if p and type(m) is cls and not self.is_leaf(p)]

    def to_open(self, paths: Iterable[str]) -> str | None:
        """Of the leaves called in a recording, one to open because there are too few to cut between.

        The largest that can be opened, until :data:`ENOUGH` calls hold parameters.
        """
        holding = [p for p in paths if any(True for _ in submodule(self.model, p).parameters())]
        if len(holding) >= ENOUGH:
            return None
        able = [p for p in holding if self.is_openable(p) and p not in self.opened]
        return max(able, key=lambda p: (self._size(p), p), default=None)

    def _size(self, path: str) -> int:
        return sum(q.numel() for q in submodule(self.model, path).parameters())

    def with_opened(self, paths: Iterable[str]) -> Policy:
        """The same policy with more modules open, and those they lie in."""
        paths = tuple(paths)
        if not paths:
            return self
        more = {".".join(p.split(".")[: i + 1]) for p in paths for i in range(len(p.split(".")))} | {""}
        return dataclasses.replace(self, opened=self.opened | more, closed=self.closed - more)

    def with_closed(self, paths: Iterable[str]) -> Policy:
        """The same policy with more modules kept whole."""
        return dataclasses.replace(self, closed=self.closed | set(paths))

    def _wrappers(self) -> Iterable[str]:
        """Paths of the modules that are opened by default, from the root down to the blocks."""
        queue = [("", self.model)]
        while queue:
            path, module = queue.pop()
            yield path
            children = [(f"{path}.{n}" if path else n, c) for n, c in module.named_children()]
            queue += [(p, c) for p, c in children if _is_wrapper(c)]


def is_torchs(module: nn.Module) -> bool:
    """Whether its class is torch's own, layer or container: it runs nobody else's code."""
    return type(module).__module__.startswith("torch.nn.")


def is_atomic(module: nn.Module) -> bool:
    """Whether a module has no inside to record: one of torch's own layers, or compiled code."""
    is_single = is_torchs(module) and not type(module).__module__.startswith(_COMPOSITE_PREFIX)
    return (is_single and type(module) not in _LISTS) or is_compiled(module)


def calls_otherwise(module: nn.Module) -> bool:
    """Whether the model's own class says what calling the module does beside its forward."""
    cls = type(module)
    return cls.__call__ is not nn.Module.__call__ and not cls.__module__.startswith("torch.")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is scripted or wrapped by ``torch.compile``."""
    cls: Any = type(module)
    return _is_of_compiled(cls)


@functools.lru_cache(maxsize=1 << 10)
def _is_of_compiled(cls: Any) -> bool:
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # there before any class that derives from its own
    return issubclass(
        cls, torch.jit.ScriptModule if dynamo is None else (torch.jit.ScriptModule, dynamo.OptimizedModule)
    )


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Within it nothing is compiled, whatever ``torch.compile`` has wrapped or code compiles itself.

    So data of sizes that are only tried compile nothing, count against no limit of compilations, and what
    they cannot be compiled for is no warning; what is met while somebody watches is compiled later on.

    torch's own context holds from when it is made, entered or not; this one from when it is entered. A
    ``torch.cond`` is the branch that it takes. Within another it does nothing: each run would take longer.
    """
    home, name = COND
    if DYNAMO not in sys.modules or getattr(home, name) is _branch:
        yield
        return
    compiled = getattr(home, name)
    with force_eager():
        setattr(home, name, _branch)
        try:
            yield
        finally:
            setattr(home, name, compiled)


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Within it a model runs on data that it may not take: see :func:`eager`, and :func:`bounds.bounded`."""
    with eager(), bounded():
        yield


def _branch(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Any) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _is_wrapper(module: nn.Module) -> bool:
    return not is_atomic(module) and (_is_stack(module) or any(_is_wrapper(c) for c in module.children()))


def _is_stack(module: nn.Module) -> bool:
    """Two or more children of one class with layers of their own, all in a plain container."""
    if not isinstance(module, _LISTS):
        return False
    inner = [type(c) for c in module.children() if not is_atomic(c) and any(True for _ in c.children())]
    return any(inner.count(t) >= 2 for t in inner)
