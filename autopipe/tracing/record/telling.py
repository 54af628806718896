"""Methods of leaves by which code outside sets what their calls go by: resets, states handed in.

Such a call is recorded in its place among the leaf's own. What a leaf keeps is left to ``keeping``, recording
the call to ``kept``.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn

from . import keeping
from .opaque import Recorded
from .position import Position
from .restart import TellMethod

__all__ = ["watched"]


@contextlib.contextmanager
def watched(
    model: nn.Module,
    chosen: Collection[str],
    told: Collection[tuple[str, str]],
    at: Position,
    on_told: Callable[..., Any],
) -> Iterator[None]:
    """Calls of methods that are ``told`` go to ``on_told(module, name, *args)`` meanwhile.

    Other methods of the modules at the paths ``chosen`` are watched: one that sets what their code reads is
    to be told as well.
    """
    with contextlib.ExitStack() as stack:
        for path in sorted(chosen):
            module = model.get_submodule(path)
            for name in _methods(module):
                if (path, name) in told:
                    found = Recorded(on_told, module, name)
                else:
                    found = Recorded(_watched(module, path, name, at))
                vars(module)[name] = found
                stack.callback(vars(module).pop, name)
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
        before = keeping.kept([module])
        result = method(*args, **kwargs)
        if next(keeping.differing(before, keeping.kept([module])), None) is not None:
            raise TellMethod(path, name)
        return result

    return call
