"""Plain functions of a model's code that must stay whole: they draw from numpy or ``random``, or read data.

Such a function becomes one call in the recording, as a leaf module does. Recording the call is left to
``recorder``; noticing that a function needs it, to whoever raises :class:`Opaque`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["Function", "Opaque", "drawing", "generators", "innermost", "replaced"]

_OTHERS = (
    str(pathlib.Path(__file__).parent),
    *(str(pathlib.Path(str(m.__file__)).parent) for m in (torch, np)),
)
"""Where functions are not the model's own."""

_DRAWS = {
    np.random: ("choice", "normal", "permutation", "rand", "randint", "randn", "random", "uniform"),
    random: ("choice", "choices", "gauss", "randint", "random", "randrange", "sample", "shuffle", "uniform"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function by the module-level name under which glue code calls it."""

    module: str
    name: str

    @property
    def namespace(self) -> dict[str, Any]:
        return vars(sys.modules[self.module])


class Opaque(BaseException):
    """Recording must start again with ``function`` kept whole.

    Not an :class:`Exception`, so that the model's own handlers let it pass.
    """

    def __init__(self, function: Function) -> None:
        super().__init__(f"{function.module}.{function.name}")
        self.function = function


def innermost() -> Function | None:
    """The plain function that runs now, called from the method of a module; None in the method itself."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        if isinstance(frame.f_locals.get("self"), nn.Module):
            return None
        caller, name = frame.f_back.f_globals, frame.f_code.co_name
        value = caller.get(name)
        is_own = not frame.f_code.co_filename.startswith(_OTHERS)
        if is_own and isinstance(value, types.FunctionType) and value.__code__ is frame.f_code:
            return Function(caller["__name__"], name)
        frame = frame.f_back
    return None


def generators() -> tuple[Any, ...]:
    """The state of Python's and numpy's global generators; equal states compare equal."""
    state: Any = np.random.get_state()
    _, keys, position, *_ = state
    return random.getstate(), keys.tobytes(), position


@contextlib.contextmanager
def replaced(
    functions: Iterable[Function], record: Callable[[Callable[..., Any], Any, Any], Any]
) -> Iterator[None]:
    """Calls of ``functions`` go to ``record(function, args, kwargs)`` meanwhile."""
    with contextlib.ExitStack() as stack:
        for function in functions:
            original = function.namespace[function.name]
            function.namespace[function.name] = _recorded(original, record)
            stack.callback(function.namespace.__setitem__, function.name, original)
        yield


def _recorded(original: Callable[..., Any], record: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return record(original, args, kwargs)

    return call


@contextlib.contextmanager
def drawing(notice: Callable[[str], None]) -> Iterator[None]:
    """Calls ``notice(name)`` before each draw from numpy's or Python's global generator meanwhile."""
    with contextlib.ExitStack() as stack:
        for module, names in _DRAWS.items():
            for name in names:
                original = getattr(module, name)
                setattr(module, name, _noticed(original, f"{module.__name__}.{name}", notice))
                stack.callback(setattr, module, name, original)
        yield


def _noticed(original: Callable[..., Any], name: str, notice: Callable[[str], None]) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        notice(name)
        return original(*args, **kwargs)

    return draw
