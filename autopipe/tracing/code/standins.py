"""Calls of code that stays whole, in which modules that are open have stand-ins: with only what code names.

So the code takes what it uses of a module that is cut, and no more. Recording its calls is left to
``opaque_calls``.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ..calls.functions import tensors
from ..calls.named import Named, held_by
from ..inputs.contents import is_filled, plainly
from ..inputs.structure import flatten
from ..members import OF_COMPILED
from ..state.global_names import is_foreign
from .opaque import Recorded
from .statements import KeptStatement

__all__ = ["KeptFunction", "KeptMethod", "hides", "parts_named"]

_OF_ALL = OF_COMPILED - {"_non_persistent_buffers_set"}
"""What a stand-in has of its own. Which buffers are saved is the layer's to say: code may ask its state."""
_HELD = ("_modules", "_parameters", "_buffers")


class _Double:
    """A module as code that stays whole sees it, with the submodules and tensors that were ``held``."""

    def __init__(self, module: nn.Module) -> None:
        self.cls, self.telling = type(module), _telling(type(module))
        self.held: tuple[tuple[str, str], ...] = ()
        self.attributes = {
            k: v
            for k, v in vars(module).items()
            if k not in _OF_ALL and not isinstance(v, Recorded) and not tensors(v)
        }
        self.lacks = frozenset(name for kind in _HELD for name in vars(module)[kind])
        self.named: frozenset[str] = frozenset()

    @property
    def holds(self) -> Any:
        """The attributes that code names, in a form that compares."""
        return {k: plainly(v) for k, v in self.attributes.items() if k in self.named}

    def hold(self, module: nn.Module, noted: Mapping[str, _Noted], named: Sequence[str]) -> list[Any]:
        """Settle on what was noted in a call and on what the code names besides; gives their values."""
        self.named = frozenset(named)
        wanted = {kind: (*noted[kind].names, *(n for n in named if n in noted[kind])) for kind in _HELD}
        self.held = tuple((kind, n) for kind in _HELD for n in dict.fromkeys(wanted[kind]))
        return [vars(module)[kind][n] for kind, n in self.held]

    def around(self, values: Sequence[Any]) -> dict[str, dict[str, Any]]:
        """What is held, by kind and name."""
        given: dict[str, dict[str, Any]] = {kind: {} for kind in _HELD}
        for (kind, name), value in zip(self.held, values, strict=True):
            given[kind][name] = value
        return given

    def made(self, training: bool, held: Mapping[str, dict[str, Any]]) -> nn.Module:
        """A stand-in with what is held."""
        new: nn.Module = self.telling.__new__(self.telling)
        vars(new).update({**self.attributes, **held, "training": training, "_lacks": self.lacks})
        return new

    def check(self, made: nn.Module, before: Mapping[str, Mapping[str, Any]], training: bool) -> None:
        """Raise :class:`ValueError` where code has set what the module itself should keep."""
        known = {**self.attributes, "training": training, "_lacks": self.lacks}
        own = [(k, v) for k, v in vars(made).items() if k not in _HELD]
        changed = [k for k, v in own if k not in known or v is not known[k]]
        for kind, names in before.items():
            changed += [k for k, v in dict.items(vars(made)[kind]) if v is not names.get(k)]
        if changed:
            raise ValueError(
                f"it sets the attribute {changed[0]}; keep what it sets there in a buffer, as a tensor"
            )


class _Telling:
    """Says so where code asks a stand-in for what it was not given, instead of being without it."""

    def __init_subclass__(cls) -> None:
        """Not for the model's class to know of: it may keep a list of those below it."""

    def __getattr__(self, name: str) -> Any:
        own = vars(self)
        if name in own.get("_lacks", ()) and not any(name in own[kind] for kind in _HELD):
            raise InputError(
                f"code of {type(self).__name__} that is kept whole reaches its {name}, which it did not on "
                "the example; capture with an example on which it does"
            )
        return super().__getattr__(name)  # type: ignore[misc]


def _telling(cls: Any) -> Any:
    """The class, with :class:`_Telling` ahead of it."""
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return types.new_class(cls.__name__, (_Telling, cls), exec_body=lambda names: names.update(body))


class KeptMethod(Named):
    """A method on a stand-in for its module, which has only the submodules and tensors that its code names.

    A call takes the module's mode, then those, then the method's own arguments. Raises :class:`ValueError`
    for a method that does more.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        cls = type(module)
        super().__init__(self.run, name, f"{cls.__module__}.{cls.__qualname__}.{name}")
        self.name, self.double = name, _Double(module)

    @property
    def holds(self) -> Any:
        return self.double.holds

    @property
    def code(self) -> Sequence[tuple[Any, Any]]:
        cls, owner = self.double.cls, types.SimpleNamespace(**self.double.attributes)
        methods = (_function(cls, name) for name in sorted({self.name, *_names(cls, self.name, set())}))
        return [(f, owner) for f in methods if f is not None and not is_foreign(f.__module__)]

    def first(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        """The result of a call, and the submodules and tensors that it and later calls take."""
        noted = {kind: _Noted(vars(module)[kind]) for kind in _HELD}
        result = self._run(module.training, noted, args, kwargs)
        named = sorted(_names(self.double.cls, self.name, set()))
        return result, self.double.hold(module, noted, named)

    def run(self, training: bool, *args: Any, **kwargs: Any) -> Any:
        n = len(self.double.held)
        return self._run(training, self.double.around(args[:n]), args[n:], kwargs)

    def _run(self, training: bool, held: Mapping[str, dict[str, Any]], args: Any, kwargs: Any) -> Any:
        before = {kind: dict(dict.items(names)) for kind, names in held.items()}
        made = self.double.made(training, held)
        result = getattr(made, self.name)(*args, **kwargs)
        self.double.check(made, before, training)
        return result


class KeptFunction(Named):
    """A function whose arguments reach modules that are cut: those have stand-ins.

    Functions, methods and modules among its arguments were taken apart into ``held``, of which ``rebuild``
    makes them anew, by place. A call takes each of those, in the place of a cut module its mode and what its
    stand-in holds; then the other arguments. Raises :class:`ValueError` for code that sets attributes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        reaching: Mapping[int | str, Any],
        held: Sequence[Any],
        rebuild: Callable[[Sequence[Any]], dict[int | str, Any]],
        is_cut: Callable[[Any], bool],
    ) -> None:
        super().__init__(function, shown=function.shown if isinstance(function, Named) else "")
        self.reaching, self.rebuild = reaching, rebuild
        self.doubles = [_Double(v) if is_cut(v) else None for v in held]

    @property
    def holds(self) -> Any:
        doubles = [d and d.holds for d in self.doubles]
        reaching = {k: plainly(v) for k, v in self.reaching.items()}
        return held_by(self.function), reaching, doubles

    @property
    def code(self) -> Sequence[tuple[Any, Any]]:
        given = flatten([*self.reaching.values()])[0]
        return [*super().code, *((each, None) for each in given if callable(each))]

    def first(self, held: Sequence[Any], args: Any, kwargs: Any) -> tuple[Any, list[tuple[Any, list[Any]]]]:
        """The result of a call, and each of the held with what its stand-in and later calls take."""
        pairs = list(zip(held, self.doubles, strict=True))
        noted = [{k: _Noted(vars(v)[k]) for k in _HELD} if d else None for v, d in pairs]
        result = self._run([v.training if d else v for v, d in pairs], noted, args, kwargs)
        given = list(self.rebuild(held).values())
        taken = self.function if isinstance(self.function, KeptStatement) else None
        codes = list(_codes(given if taken is None else [taken.function, *given]))
        is_handed_on = taken is None or taken.hands_on
        out = []
        for (value, double), names in zip(pairs, noted, strict=True):
            methods = _methods(value) if is_handed_on and any(v is value for v in given) else []
            named = sorted(_named_in([*codes, *methods], double.cls, set())) if double else ()
            out.append((value, double.hold(value, names, named) if double and names else []))
        return result, out

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rest = iter(args)
        given, held = [], []
        for double in self.doubles:
            given.append(next(rest))
            held.append(double.around([next(rest) for _ in double.held]) if double else None)
        return self._run(given, held, tuple(rest), kwargs)

    def _run(self, given: Sequence[Any], held: Sequence[Any], args: Any, kwargs: Any) -> Any:
        triples = list(zip(given, self.doubles, held, strict=True))
        before = [{kind: dict(dict.items(n)) for kind, n in h.items()} if h else {} for h in held]
        made = [d.made(g, h) if d else g for g, d, h in triples]
        places = self.rebuild(made)
        args = tuple(places.get(i, a) for i, a in enumerate(args))
        result = self.function(*args, **{k: places.get(k, v) for k, v in kwargs.items()})
        for (training, double, _), module, was in zip(triples, made, before, strict=True):
            if double:
                double.check(module, was, training)
        return result


def parts_named(function: Any, module: nn.Module) -> list[str]:
    """The submodules, parameters and buffers of a module that a function's code names, or may go through."""
    named = _named_in(_codes([function]), type(module), set())
    goes_through = not named.isdisjoint(_HELD)
    return [n for kind in _HELD for n in vars(module)[kind] if goes_through or n in named]


def _codes(values: Iterable[Any]) -> Iterator[types.CodeType]:
    """The code of functions and methods, however they are nested in partial ones."""
    for value in values:
        function = getattr(value, "func", getattr(value, "__func__", value))
        if isinstance(function, functools.partial):
            yield from _codes([function])
        elif isinstance(function, types.FunctionType):
            yield function.__code__


def _methods(module: nn.Module) -> list[types.CodeType]:
    """The code of what may be called of a module that is handed on as it is: all but its forward."""
    classes = itertools.takewhile(lambda cls: cls is not nn.Module, type(module).__mro__)
    own = (v for cls in classes for n, v in vars(cls).items() if n != "forward" and not n.startswith("__"))
    return [inspect.unwrap(v).__code__ for v in own if isinstance(v, types.FunctionType)]


def _names(cls: type, name: str, seen: set[str]) -> set[str]:
    """The names in the code of a method, and of those that it names in turn: another call may go there."""
    seen.add(name)
    function = _function(cls, name)
    return _named_in([] if function is None else [function.__code__], cls, seen)


def _function(cls: type, name: str) -> types.FunctionType | None:
    """The function of a method or property, if a class has one of that name."""
    found = inspect.getattr_static(cls, name, None)
    function = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", found))
    return function if isinstance(function, types.FunctionType) else None


def _named_in(codes: Iterable[types.CodeType], cls: type, seen: set[str]) -> set[str]:
    """The names in code, and in the methods of a class that it names."""
    out: set[str] = set()
    waiting = list(codes)
    for code in waiting:
        waiting += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        out.update(code.co_names)
    for other in sorted(out - seen):
        out |= _names(cls, other, seen)
    return out


_DEPTH = 4
_CLOSED = (type, types.ModuleType, str, bytes, int, float, complex, torch.Tensor)


def hides(value: Any, is_the_models: Callable[[nn.Module], bool], depth: int = _DEPTH) -> bool:
    """Whether an object leads to modules of the model by its attributes, where no stand-in can be put.

    Containers and functions are no such objects: what they hold is taken out of them.
    """
    if depth == 0 or value is None or isinstance(value, _CLOSED):
        return False

    def is_hidden(part: Any) -> bool:
        return (isinstance(part, nn.Module) and is_the_models(part)) or hides(part, is_the_models, depth - 1)

    if isinstance(value, nn.Module):
        return not is_the_models(value) and (
            any(map(is_the_models, value.modules())) or any(map(is_hidden, vars(value).values()))
        )
    if isinstance(value, (tuple, list, dict)):
        inner = value.values() if isinstance(value, dict) else value
        return any(hides(part, is_the_models, depth - 1) for part in inner)
    if isinstance(value, functools.partial):
        return hides((value.func, value.args, value.keywords), is_the_models, depth)
    if isinstance(value, types.MethodType):
        return hides(value.__self__, is_the_models, depth - 1)
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or () if is_filled(c)]
        return hides((*cells, *(value.__defaults__ or ())), is_the_models, depth)
    return any(map(is_hidden, getattr(value, "__dict__", {}).values()))


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
