"""Functions of a model's code that must stay whole: they draw from numpy or ``random``, or read data.

Such a function, or such a method of a module that had better be opened itself, becomes one call in the
recording, as a leaf module does. Recording the call is left to ``opaque_calls``, what it takes to
``standins``; noticing that a function needs it, to whoever raises :class:`~.restart.KeepFunction`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import os
import pathlib
import random
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from ..members import submodule
from ..state.quick_check import are_same
from .callees import callee
from .restart import Function, Method, Statement
from .statements import rewritten

__all__ = ["SYSTEM", "Recorded", "drawing", "innermost", "outermost", "replaced"]

_OTHERS = (
    f"{pathlib.Path(__file__).parents[1]}{os.sep}",
    *(f"{pathlib.Path(str(m.__file__)).parent}{os.sep}" for m in (torch, np)),
)
"""Where functions are not the model's own."""

_GENERATORS = (np.random, np.random.mtrand._rand), (random, random._inst)
"""Modules whose functions are methods of one global generator, with it."""

_OF_STATE = frozenset({"seed", "get_state", "set_state", "getstate", "setstate"})
_OF_SYSTEM = (os, "urandom"), (random, "_urandom"), (random.Random, "seed")
"""What draws of the system: for ``SystemRandom``, ``secrets`` and generators without a seed, numpy's too."""
SYSTEM = "the system"
"""What is said to draw then."""


_Draws = list[tuple[Any, str, Callable[..., Any]]]
_known_draws: list[tuple[list[Any], _Draws]] = []
"""What modules and classes held when it was last looked for functions that draw, and these."""


def _draws() -> _Draws:
    """Every function that draws from a global generator or the system: its owner, name and itself."""
    of_system = [(owner, name, vars(owner)[name]) for owner, name in _OF_SYSTEM]
    held = [value for module, _ in _GENERATORS for pair in vars(module).items() for value in pair]
    held += [value for *_, value in of_system]
    for known, draws in _known_draws:
        if are_same(held, known):
            return draws
    found: _Draws = [
        (module, name, value)
        for module, generator in _GENERATORS
        for name, value in vars(module).items()
        if getattr(value, "__self__", None) is generator and name not in _OF_STATE
    ]
    found += of_system
    _known_draws[:] = [(held, found)]
    return found


def innermost(
    divisible: Callable[[nn.Module], str | None],
    holds: Callable[[nn.Module], bool],
    *,
    is_held: bool = False,
) -> Function | Method | None:
    """The plain function that runs now, called from the method of a module, or else that method.

    A method only of a module that ``divisible`` has a path for; None in a forward. Modules that the model
    does not hold are a library's own and passed over. A function may be one that ``is_held`` by something.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        owner = _owner(frame)
        if owner is not None and holds(owner):
            path, name = divisible(owner), frame.f_code.co_name
            return Method(path, name) if path is not None and _is_method(owner, name, frame) else None
        if (function := _plain(frame.f_back, frame, is_held=is_held)) is not None:
            return function
        frame = frame.f_back
    return None


def outermost(holds: Callable[[nn.Module], bool]) -> Function | None:
    """The plain function that a module's method calls, and that runs now; None where there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_back is not None:
        owner = _owner(frame.f_back)
        if owner is not None and holds(owner):
            return _plain(frame.f_back, frame)
        frame = frame.f_back
    return None


def _plain(caller: types.FrameType, called: types.FrameType, *, is_held: bool = False) -> Function | None:
    """The function that a frame runs, by the name its caller has for it; None of torch's, numpy's, ours."""
    found = callee(caller, called, is_held=is_held)
    if found is None:
        return None
    function, value = found
    code = getattr(inspect.unwrap(value), "__code__", called.f_code)
    return None if code.co_filename.startswith(_OTHERS) else function


def _owner(frame: types.FrameType) -> nn.Module | None:
    """The module whose method ``frame`` runs, or runs within; whatever its first parameter is called."""
    owner = frame.f_locals.get("self")
    if isinstance(owner, nn.Module):
        return owner
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if not isinstance(owner, nn.Module):
        return None
    taken_apart = vars(owner).get(code.co_name)  # a forward of which statements stay whole
    function = taken_apart.func if isinstance(taken_apart, Recorded) else None
    runs = (function, inspect.getattr_static(type(owner), code.co_name, None))
    return owner if any(_runs(frame, each) for each in runs) else None


def _runs(frame: types.FrameType, function: Any) -> bool:
    return isinstance(function, types.FunctionType) and inspect.unwrap(function).__code__ is frame.f_code


def _is_method(owner: nn.Module, name: str, frame: types.FrameType) -> bool:
    """Whether ``frame`` runs the method called ``name``, and neither a forward nor what all modules have."""
    is_named = name != "forward" and not name.startswith("__") and not hasattr(nn.Module, name)
    return is_named and _runs(frame, inspect.getattr_static(type(owner), name, None))


class Recorded(functools.partial[Any]):
    """What stands in the place of a function that stays whole."""


@contextlib.contextmanager
def replaced(
    functions: Iterable[Function | Method | Statement],
    model: nn.Module,
    on_function: Callable[..., Any],
    on_method: Callable[..., Any],
    on_statement: Callable[..., Any],
) -> Iterator[None]:
    """Calls go to ``on_function(function, *args)`` or ``on_method(module, method, *args)`` meanwhile.

    What statements do goes to ``on_statement(statement, *values)``.
    """
    chosen = tuple(functions)
    with contextlib.ExitStack() as stack:
        for path in {s.path: None for s in chosen if isinstance(s, Statement)}:
            module = submodule(model, path)
            inside = [s for s in chosen if isinstance(s, Statement) and s.path == path]
            vars(module)["forward"] = Recorded(rewritten(module, inside, on_statement), module)
            stack.callback(vars(module).pop, "forward")
        for function in (f for f in chosen if not isinstance(f, Statement)):
            if isinstance(function, Method):
                module = submodule(model, function.path)
                vars(module)[function.name] = Recorded(on_method, module, function.name)
                stack.callback(vars(module).pop, function.name)
                continue
            namespace = vars(sys.modules[function.module])
            original = namespace[function.name]
            if function.is_held:
                stack.enter_context(_rerouted(original, on_function))
                continue
            namespace[function.name] = Recorded(on_function, original)
            stack.callback(namespace.__setitem__, function.name, original)
        yield


@contextlib.contextmanager
def _rerouted(function: types.FunctionType, on_function: Callable[..., Any]) -> Iterator[None]:
    """Calls of a function go to ``on_function(function, *args)`` meanwhile, whatever holds it.

    Its code is what is replaced: those that ``on_function`` makes of it run the code that it had.
    """
    before = function.__code__, function.__defaults__, function.__kwdefaults__
    code, defaults, named = before
    own = types.FunctionType(code, function.__globals__, function.__name__, defaults)
    own.__kwdefaults__ = named
    inside: set[int] = set()

    def on_call(args: Any, kwargs: Any) -> Any:
        thread = threading.get_ident()
        if thread in inside:
            return own(*args, **kwargs)
        inside.add(thread)
        try:
            return on_function(function, *args, **kwargs)
        finally:
            inside.remove(thread)

    def entered(*args: Any, __on_call: Any, **kwargs: Any) -> Any:
        return __on_call(args, kwargs)

    function.__code__, function.__defaults__ = entered.__code__, None
    function.__kwdefaults__ = {"__on_call": on_call}
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = before


@contextlib.contextmanager
def drawing(notice: Callable[[str], None], kinds: Collection[type]) -> Iterator[None]:
    """Calls ``notice(name)`` before each draw from numpy's or Python's generator, or the system, meanwhile.

    By whatever name the files of the model's classes, the ``kinds`` of its modules, have the function.
    """
    originals = _draws()
    noticed = {id(o): _noticed(o, m, n) for m, n, o in originals}
    places = [*originals]
    classes = {cls for kind in kinds for cls in kind.__mro__}
    for file in {cls.__module__ for cls in classes}:
        namespace = vars(sys.modules.get(file, types))
        if not file.startswith("torch."):
            is_drawn = [*map(noticed.__contains__, map(id, namespace.values()))]  # of thousands few are
            places += [(namespace, n, namespace[n]) for n in itertools.compress([*namespace], is_drawn)]
    _noticing.append(notice)
    try:
        for owner, name, original in places:
            _put(owner, name, noticed[id(original)])
        yield
    finally:
        for owner, name, original in places:
            _put(owner, name, original)
        _noticing.remove(notice)


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


_noticing: list[Callable[[str], None]] = []
"""Who is told of draws, the latest last."""


@functools.cache
def _noticed(original: Callable[..., Any], owner: Any, name: str) -> Callable[..., Any]:
    """What stands in the place of a function that draws: made once, as there are many."""
    shown = SYSTEM if (owner, name) in _OF_SYSTEM else f"{owner.__name__}.{name}"
    is_seeding = owner is random.Random

    def draw(*args: Any, **kwargs: Any) -> Any:
        if _noticing and not (is_seeding and _is_seeded(*args[1:], **kwargs)):
            _noticing[-1](shown)
        return original(*args, **kwargs)

    return draw


def _is_seeded(a: Any = None, *_: Any, **__: Any) -> bool:
    """Whether a generator of Python is given a seed, and does not ask the system for one."""
    return a is not None
