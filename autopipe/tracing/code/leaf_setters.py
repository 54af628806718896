"""What outside code sets on leaves that their calls depend on: resets by methods, states in attributes.

Such a call is recorded in its place among the leaf's own. What a leaf keeps is left to ``leaf_state``,
recording the call to ``opaque_calls``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..members import submodule
from . import leaf_state
from .attributes import put_back
from .opaque import Recorded
from .position import Position
from .restart import TellMethod

__all__ = ["watched"]

_TOLD = (torch.Tensor, tuple, bool, int, float, str, type(None))
"""What can be set at each run anew: no object that others may have, and fill."""


@contextlib.contextmanager
def watched(
    model: nn.Module,
    chosen: Collection[str],
    told: Collection[tuple[str, str]],
    at: Position,
    on_told: Callable[..., Any],
    on_set: Callable[[nn.Module, str, Any], None],
) -> Iterator[None]:
    """Calls of methods that are ``told`` go to ``on_told(module, name, *args)`` meanwhile.

    Other methods of the modules at the paths ``chosen`` are watched: one that sets what their code reads is
    to be told as well. What is set otherwise goes to ``on_set(module, name, value)``.
    """
    modules = {path: submodule(model, path) for path in sorted(chosen)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_setting(modules, at, on_set))
        for path, module in modules.items():
            for name in _methods(module):
                if (path, name) in told:
                    found = Recorded(on_told, module, name)
                else:
                    found = Recorded(_watched(module, path, name, at))
                vars(module)[name] = found
                stack.callback(vars(module).pop, name)
        yield


@contextlib.contextmanager
def _setting(
    modules: Mapping[str, nn.Module], at: Position, on_set: Callable[[nn.Module, str, Any], None]
) -> Iterator[None]:
    """What is set on modules of leaves, and their own code reads, goes to ``on_set`` meanwhile."""
    meant = {id(m) for path, m in modules.items() if at.is_in_leaf(path)}

    def telling(original: Callable[[nn.Module, str, Any], None]) -> Callable[[nn.Module, str, Any], None]:
        def __setattr__(self: nn.Module, name: str, value: Any) -> None:
            cls: Any = type(self)
            is_told = at.is_recorded and id(self) in meant and isinstance(value, _TOLD)
            if is_told and name in leaf_state.goes_by(cls):
                on_set(self, name, value)
            else:
                original(self, name, value)

        return __setattr__

    kinds: list[Any] = [*dict.fromkeys(map(type, modules.values()))]
    with put_back((cls, "__setattr__") for cls in kinds):
        for cls in kinds:
            cls.__setattr__ = telling(cls.__setattr__)
        yield


def _methods(module: nn.Module) -> list[str]:
    """The plain methods of a module's own classes, beside its forward."""
    own = itertools.takewhile(lambda c: c is not nn.Module, type(module).__mro__)
    names = {n: None for c in own for n, v in vars(c).items() if isinstance(v, types.FunctionType)}
    return [n for n in names if n != "forward" and not n.startswith("__") and n not in vars(module)]


def _watched(module: nn.Module, path: str, name: str, at: Position) -> Callable[..., Any]:
    method = functools.partial(getattr(type(module), name), module)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not at.is_recorded:
            return method(*args, **kwargs)
        before = leaf_state.state_of([module])
        result = method(*args, **kwargs)
        if next(leaf_state.changed(before, leaf_state.state_of([module])), None) is not None:
            raise TellMethod(path, name)
        return result

    return call
