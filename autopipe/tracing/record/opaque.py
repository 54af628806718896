"""Functions of a model's code that must stay whole: they draw from numpy or ``random``, or read data.

Such a function, or such a method of a module that would be a pity to keep whole itself, becomes one call in
the recording, as a leaf module does. Recording the call is left to ``recorder``; noticing that a function
needs it, to whoever raises :class:`~.restart.KeepFunction`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import pathlib
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ...torch_private import CALL_HOOK
from ..calls.functions import Named, tensors
from .restart import Function, Method

__all__ = ["KeptMethod", "drawing", "innermost", "replaced"]

_OTHERS = (
    f"{pathlib.Path(__file__).parents[1]}{os.sep}",
    *(f"{pathlib.Path(str(m.__file__)).parent}{os.sep}" for m in (torch, np)),
)
"""Where functions are not the model's own."""

_DRAWS = {
    np.random: ("choice", "normal", "permutation", "rand", "randint", "randn", "random", "uniform"),
    random: ("choice", "choices", "gauss", "randint", "random", "randrange", "sample", "shuffle", "uniform"),
}


def innermost(divisible: Callable[[nn.Module], str | None]) -> Function | Method | None:
    """The plain function that runs now, called from the method of a module, or else that method.

    A method only of a module that ``divisible`` has a path for; None in a forward.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            path, name = divisible(owner), frame.f_code.co_name
            return Method(path, name) if path is not None and _is_method(owner, name, frame) else None
        caller, name = frame.f_back.f_globals, frame.f_code.co_name
        value = caller.get(name)
        is_own = not frame.f_code.co_filename.startswith(_OTHERS)
        if is_own and isinstance(value, types.FunctionType) and value.__code__ is frame.f_code:
            return Function(caller["__name__"], name)
        frame = frame.f_back
    return None


def _is_method(owner: nn.Module, name: str, frame: types.FrameType) -> bool:
    """Whether ``frame`` runs the method called ``name``, and not a forward."""
    found = inspect.getattr_static(type(owner), name, None)
    is_own = isinstance(found, types.FunctionType) and not name.startswith("__")
    return is_own and name != "forward" and inspect.unwrap(found).__code__ is frame.f_code


class KeptMethod(Named):
    """A method on a stand-in for its module, which has only the submodules and tensors that its code names.

    A call takes the module's mode, then those, then the method's own arguments. Raises :class:`ValueError`
    for a method that does more.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        cls = type(module)
        super().__init__(self.run, name, f"{cls.__module__}.{cls.__qualname__}.{name}")
        self.cls, self.name = cls, name
        self.held: tuple[tuple[str, str], ...] = ()
        self.attributes = {
            k: v
            for k, v in vars(module).items()
            if k not in _OF_ALL and not isinstance(v, _Recorded) and next(tensors(v), None) is None
        }

    def first(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """The result of a call, and the submodules and tensors that it and later calls take."""
        noted = {kind: _Noted(vars(module)[kind]) for kind in _HELD}
        result = self._run(module.training, noted, args, kwargs)
        named = sorted(_names(self.cls, self.name, set()))
        wanted = {kind: (*noted[kind].names, *(n for n in named if n in noted[kind])) for kind in _HELD}
        self.held = tuple((kind, n) for kind in _HELD for n in dict.fromkeys(wanted[kind]))
        return result, [vars(module)[kind][n] for kind, n in self.held]

    def run(self, training: bool, *args: Any, **kwargs: Any) -> Any:
        n = len(self.held)
        given: dict[str, dict[str, Any]] = {kind: {} for kind in _HELD}
        for (kind, name), value in zip(self.held, args[:n], strict=True):
            given[kind][name] = value
        return self._run(training, given, args[n:], kwargs)

    def _run(self, training: bool, held: Mapping[str, dict[str, Any]], args: Any, kwargs: Any) -> Any:
        stand_in = self.cls.__new__(self.cls)
        given = {**self.attributes, **held, "training": training}
        before = [(kind, dict(dict.items(names))) for kind, names in held.items()]
        vars(stand_in).update(given)
        result = getattr(stand_in, self.name)(*args, **kwargs)
        changed = [k for k, v in vars(stand_in).items() if k not in given or v is not given[k]]
        for kind, names in before:
            changed += [k for k, v in dict.items(held[kind]) if v is not names.get(k)]
        if changed:
            raise ValueError(f"it sets the attribute {changed[0]}")
        return result


def _names(cls: type, name: str, seen: set[str]) -> set[str]:
    """The names in the code of a method, and of those that it names in turn: another call may go there."""
    seen.add(name)
    found = inspect.getattr_static(cls, name, None)
    function = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", found))
    codes = [function.__code__] if isinstance(function, types.FunctionType) else []
    out: set[str] = set()
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        out.update(code.co_names)
    for other in sorted(out - seen):
        out |= _names(cls, other, seen)
    return out


class _Noted(dict[str, Any]):
    """Notes which keys are read one by one; reading all is refused."""

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.names: list[str] = []

    def __getitem__(self, name: str) -> Any:
        self.names.append(name)
        return super().__getitem__(name)

    def _all(self) -> Any:
        raise ValueError("it goes through all submodules")

    __iter__ = items = values = keys = _all


_OF_ALL = frozenset({*vars(nn.Module()), CALL_HOOK})
_HELD = ("_modules", "_parameters", "_buffers")


class _Recorded(functools.partial[Any]):
    """What stands in the place of a function that stays whole."""


@contextlib.contextmanager
def replaced(
    functions: Iterable[Function | Method],
    model: nn.Module,
    on_function: Callable[..., Any],
    on_method: Callable[..., Any],
) -> Iterator[None]:
    """Calls go to ``on_function(function, *args)`` or ``on_method(module, method, *args)`` meanwhile."""
    with contextlib.ExitStack() as stack:
        for function in functions:
            if isinstance(function, Method):
                module = model.get_submodule(function.path)
                vars(module)[function.name] = _Recorded(on_method, module, function.name)
                stack.callback(vars(module).pop, function.name)
                continue
            namespace = vars(sys.modules[function.module])
            original = namespace[function.name]
            namespace[function.name] = _Recorded(on_function, original)
            stack.callback(namespace.__setitem__, function.name, original)
        yield


@contextlib.contextmanager
def drawing(notice: Callable[[str], None], model: nn.Module) -> Iterator[None]:
    """Calls ``notice(name)`` before each draw from numpy's or Python's global generator meanwhile.

    By whatever name the files of the model's classes have the function.
    """
    originals = {(m.__name__, n): getattr(m, n) for m, names in _DRAWS.items() for n in names}
    noticed = {id(o): _noticed(o, ".".join(at), notice) for at, o in originals.items()}
    places = [(vars(sys.modules[m]), n, o) for (m, n), o in originals.items()]
    for file in {cls.__module__ for m in model.modules() for cls in type(m).__mro__}:
        namespace = vars(sys.modules.get(file, types))
        if not file.startswith("torch."):
            places += [(namespace, n, v) for n, v in namespace.items() if id(v) in noticed]
    try:
        for namespace, name, original in places:
            namespace[name] = noticed[id(original)]
        yield
    finally:
        for namespace, name, original in places:
            namespace[name] = original


def _noticed(original: Callable[..., Any], name: str, notice: Callable[[str], None]) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        notice(name)
        return original(*args, **kwargs)

    return draw
