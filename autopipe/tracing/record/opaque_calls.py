"""Code that becomes one call in a recording: functions and methods that stay whole, transforms of functions.

Torch's own functions and leaf modules are left to ``recorder``.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch
from torch import nn

from ...torch_private import HiddenMode
from ..calls import describe, functions, lifting, named
from ..calls.call import UNSAFE, Call, Depends
from ..calls.faults import of_models
from ..calls.named import Setter
from ..calls.streams import Stream
from ..code import checks, opaque, standins
from ..code.may_write import may_write
from ..code.position import Position
from ..code.restart import CloseModule, KeepFunction, OpenLeaf, Statement
from ..code.statements import KeptStatement
from ..inputs.structure import flatten
from ..state.state import generators
from ..values.ledger import Ledger
from .foreign import Foreign, Used

__all__ = ["OpaqueCalls"]


class Performer(Protocol):
    """What runs calls and notes what they do."""

    def perform(self, call: Call, run: Callable[..., Any], actual: Any) -> Any:
        """Run a call for real and tie its results to it."""

    def inside_leaf(self, path: str, compiled: bool) -> contextlib.AbstractContextManager[None]:
        """The surroundings in which what is not recorded runs."""

    def changed(self, before: functions.Versions, module: nn.Module, path: str) -> tuple[str, ...]:
        """The buffers of ``module`` that are not as they were."""


class OpaqueCalls:
    """Records calls of code that stays whole; ``here`` gives the stream of draws at this place.

    ``n_anew`` is how often numbers were drawn that nobody can have again: of the system, or from a generator
    that code has made.
    """

    def __init__(
        self, at: Position, ledger: Ledger, performer: Performer, here: Callable[[], Stream], foreign: Foreign
    ) -> None:
        self.at, self.ledger, self.performer, self.here, self.foreign = at, ledger, performer, here, foreign
        self._n_drawn = self.n_anew = 0

    def drawn_outside(self) -> tuple[Any, ...]:
        """What is another once something draws from Python's or numpy's generator.

        Of two normal numbers numpy may keep the second, which leaves its generator as it was: so draws count.
        """
        return self._n_drawn, *generators()

    def note_outside(self, call: Call, before: tuple[Any, ...]) -> bool:
        """Say of a call that it draws from Python's or numpy's generator, if it has since ``before``."""
        if self.drawn_outside() == before:
            return False
        call.is_random, call.depends = True, call.depends | Depends.RANDOM
        call.stream = dataclasses.replace(call.stream or self.here(), is_outside=True)
        return True

    def custom(self, function: named.Named, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call that the function mode does not see as one: ``autograd.Function.apply``, ``vmap``."""
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        called = {place: value for place, value in given if _is_function(value)}
        held: list[Any] = []
        if called:
            held, rebuild = self._reached(function, called)
            if any(isinstance(value, nn.Module) for value in held):
                return self._reaching(function, called, held, rebuild, args, kwargs)
        with self.at.hushed:
            encoded, actual = self.ledger.encode_call(args, kwargs)
        call = Call("call_function", function, *encoded, hint=function.__name__)
        call.path, call.source = self.at.path, self.at.source()
        call.depends, call.stream = self.ledger.depends(call), self.here()
        before = self.drawn_outside()
        with self.foreign.to(_parameters((actual, held)), actual) as foreign:
            result = self.performer.perform(call, run, actual)
        self._check_foreign(call, foreign)
        self.note_outside(call, before)
        return result

    def function(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A plain function that stays whole is being called."""
        if not self.at.is_recorded:
            return run(*args, **kwargs)
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        reaching = {place: v for place, v in given if self._is_cut(v) or _is_function(v)}
        held, rebuild = self._reached(run, reaching, dict(given))
        if held:
            return self._reaching(run, reaching, held, rebuild, args, kwargs)
        encoded, actual = self.ledger.encode_call(args, kwargs)
        call = Call("call_function", run, *encoded, path=self.at.path)
        call.hint = functions.plain_name(call)
        call.source, call.depends = self.at.source(), self.ledger.depends(call)
        call.writes = self._may_write(run, actual)
        with self.foreign.to(_parameters((actual, held)), actual) as foreign:
            result = self._perform(call, run, actual)
        self._check_foreign(call, foreign)
        return result

    def _check_foreign(self, call: Call, foreign: Used) -> None:
        """A call must not use what it is not given of others: a stage would not have it."""
        call.derives = foreign.takes_derivatives
        if foreign.derives:
            raise CloseModule(
                call.path,
                f"{call.source}: {describe.expression(call)} takes a derivative through what other "
                "code has made of what it is given, which a stage that holds it alone does not reach",
            )
        if foreign.names:
            raise CloseModule(
                call.path,
                f"{call.source}: {describe.expression(call)} uses {', '.join(foreign.names)} by a global or "
                "an object, so that a stage with it would go by old values; hand it over as an argument",
            )

    def _reached(
        self, run: Any, reaching: dict[int | str, Any], given: dict[int | str, Any] | None = None
    ) -> tuple[list[Any], lifting.Rebuild]:
        """The modules and tensors that values lead to; refused where one of those ``given`` hides modules."""
        with self.at.hushed:
            if any(standins.hides(value, self.at.holds) for value in (given or reaching).values()):
                self.at.keep_whole(
                    f"{self.at.source()}: {getattr(run, '__name__', run)} reaches layers through an object "
                    "that it is given"
                )
            return lifting.lift(reaching, self._is_reached)

    def check_functions(self, name: str, given: Iterable[Any]) -> None:
        """Functions that torch is given, as hooks are, must not reach layers, which may be elsewhere then."""
        for function in filter(_is_function, given):
            if reached := self._layers_of(function):
                self.at.keep_whole(
                    f"{self.at.source()}: the function that {name} is given reaches {', '.join(reached)}; "
                    "compute with that in the forward, and let the function have what comes out"
                )

    def check_leaf(self, path: str, inside: Collection[nn.Module], given: Any) -> None:
        """A leaf must not be given functions that reach layers outside of it: opened, its code calls them."""
        for function in filter(_is_function, flatten(given)[0]):
            own = {self.at.modules[id(m)] for m in inside if id(m) in self.at.modules}
            if reached := [name for name in self._layers_of(function) if name not in own]:
                why = f"{self.at.source()}: {path} is given a function that reaches {', '.join(reached)}"
                raise OpenLeaf(path, why)

    def _layers_of(self, function: Any) -> list[str]:
        """The paths of what a function reaches of the model's modules, by what its code names."""
        with self.at.hushed:
            found, _ = lifting.lift(function, lambda value: id(value) in self.at.modules)
            if standins.hides(function, self.at.holds):
                return ["layers through an object"]
        out: dict[str, None] = {}
        for module in found:
            path = self.at.modules[id(module)]
            names = standins.parts_named(function, module) if self._is_cut(module) else [""]
            out.update(dict.fromkeys(f"{path}.{name}".strip(".") for name in names))
        return [*out]

    def _is_cut(self, value: Any) -> bool:
        """Whether a value is a module whose forward runs now, so that it cannot be given whole."""
        return isinstance(value, nn.Module) and self.at.modules.get(id(value)) in self.at.stack

    def _is_reached(self, value: Any) -> bool:
        known = self.at.modules if isinstance(value, nn.Module) else self.ledger.names
        return id(value) in known or id(value) in self.ledger.refs

    def _reaching(
        self,
        run: Callable[..., Any],
        reaching: dict[int | str, Any],
        held: Sequence[Any],
        rebuild: Callable[[Sequence[Any]], Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """A function that stays whole reaches modules and tensors by what it is given: it takes those too."""
        path, function = self.at.path, standins.KeptFunction(run, reaching, held, rebuild, self._is_cut)
        args = tuple(None if i in reaching else a for i, a in enumerate(args))
        kwargs = {k: None if k in reaching else v for k, v in kwargs.items()}
        encoded, actual = self.ledger.encode_call(args, kwargs)
        call = Call("call_function", function, *encoded, hint=function.__name__, path=path)
        call.source = self.at.source()
        both = [reaching.get(i, a) for i, a in enumerate(actual[0])]
        call.writes = self._may_write(run, (both, {k: reaching.get(k, v) for k, v in actual[1].items()}))

        def first(*args: Any, **kwargs: Any) -> Any:
            with self.performer.inside_leaf(path, False):
                result, used = function.first(held, args, kwargs)
            given: list[Any] = []
            for value, inside in used:
                is_cut = self._is_cut(value)
                given += [value.training, *map(self._held, inside)] if is_cut else [self._held(value)]
            call.take((*given, *call.args), call.kwargs)
            return result

        modules = [(self.at.modules[id(v)], v) for v in held if isinstance(v, nn.Module)]
        with self.at.hushed:
            buffers = [
                (p, m, functions.Versions.of_buffers(dict(m.named_buffers(prefix=p)))) for p, m in modules
            ]
        call.depends = self.ledger.depends(call) | Depends.STATE
        call.depends |= self._depend(held)
        with self.foreign.to(self.foreign.names, (actual, held)) as foreign:
            try:
                result = self._perform(call, first, actual)
            except ValueError as error:
                shown = getattr(run, "shown", function.__name__)
                raise CloseModule(path, f"{shown} cannot stay whole alone: {error}") from error
        self._check_foreign(call, foreign)
        call.mutated = tuple(n for p, m, b in buffers for n in self.performer.changed(b, m, p))
        return result

    def _may_write(self, run: Any, actual: Any) -> frozenset[int]:
        """The memory of arguments that code may write to, whether or not it does so on the example."""
        return frozenset[int]().union(*map(functions.storages, may_write(run, *actual)))

    def _depend(self, held: Sequence[Any]) -> int:
        """What the tensors among what is held depend on."""
        out = Depends.NOTHING
        for value in held:
            if isinstance(value, torch.Tensor):
                out |= self.ledger.depends_of(self.ledger.find(value))
        return out

    def _perform(self, call: Call, run: Callable[..., Any], actual: Any) -> Any:
        """Perform a call of code that may draw outside torch and give what is no tensor."""
        before, call.stream = self.drawn_outside(), self.here()
        looking = _Looking()

        def watched(*args: Any, **kwargs: Any) -> Any:
            with looking:
                return run(*args, **kwargs)

        result = self.performer.perform(call, watched, actual)
        is_drawn = self.note_outside(call, before)
        looking.is_met |= is_drawn
        for value in flatten(result)[0]:
            if isinstance(value, np.ndarray):
                self.ledger.bind(value, call)
            elif isinstance(value, (bool, int, float, str)):
                self.at.refuse(call.depends, f"{describe.expression(call)} ({value!r} here)", call.source)
            elif is_drawn and _is_other(value):
                what = f"the {type(value).__name__} that {describe.expression(call)} gives"
                self.at.refuse(call.depends, what, call.source)
        if looking.is_met and _may_be_nothing(call) and (places := checks.nothings(result)):
            self.ledger.expect_nothing(call, places)
        return result

    def statement(self, run: KeptStatement, *values: Any) -> Any:
        """A statement of an open module's forward that stays whole is being reached."""
        if not self.at.is_recorded:
            return run(*values)
        kept = [id(v) for v in values if isinstance(v, (list, dict))]
        if any(map(_is_spent, values)) or len(kept) > len({*kept}):
            raise CloseModule(
                self.at.path, f"{run.shown}: goes by an iterator, a set or one list under two names"
            )
        result = self.function(run, *values)
        for value in flatten(result)[0]:
            if not (value is None or isinstance(value, torch.Tensor)):
                why = f"{run.shown}: leaves a {type(value).__name__} behind"
                raise KeepFunction(Statement(self.at.path, run.part.line, run.part.column), self.at.path, why)
        self.ledger.hold_together(self.ledger.calls[-1], result)
        return result

    def told(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method is being called by which code outside of a leaf sets what the leaf goes by."""
        cls = type(module)
        told = Setter(getattr(cls, name), name, f"{cls.__module__}.{cls.__qualname__}.{name}")
        return self._told(module, told, args, kwargs)

    def set(self, module: nn.Module, name: str, value: Any) -> None:
        """Code outside of a leaf sets an attribute that the leaf goes by."""
        self._told(module, Setter(setattr, f"set_{name}"), (name, value), {})

    def _told(self, module: nn.Module, told: Setter, args: Any, kwargs: Any) -> Any:
        path = self.at.modules[id(module)]
        parts = path.split(".")
        above = (".".join(parts[: i + 1]) for i in range(len(parts)))
        leaf = next(filter(self.at.is_leaf, above), None)
        if not self.at.is_recorded or leaf is None:
            return told(module, *args, **kwargs)
        self.foreign.hand(leaf, (args, kwargs))
        encoded, actual = self.ledger.encode_call(args, kwargs)
        call = Call("call_function", told, hint=told.__name__, path=leaf, source=self.at.source())
        call.take((self.ledger.attribute(path, module, Depends.STATE), *encoded[0]), encoded[1])
        call.depends = self.ledger.depends(call) | Depends.STATE
        call.has_effect = call.keeps = True

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.performer.inside_leaf(leaf, False):
                return told(module, *args, **kwargs)

        return self._perform(call, run, actual)

    def method(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method that stays whole is being called; the module is closed where that cannot be."""
        path = self.at.modules[id(module)]
        if not self.at.is_recorded:
            return getattr(type(module), name)(module, *args, **kwargs)
        encoded, actual = self.ledger.encode_call(args, kwargs)
        with self.at.hushed:
            buffers = functions.Versions.of_buffers(dict(module.named_buffers(prefix=path)))
        try:
            method = standins.KeptMethod(module, name)
            call = Call(
                "call_function", method, *encoded, hint=name, path=self.at.path, source=self.at.source()
            )
            call.depends = self.ledger.depends(call)
            first = functools.partial(self._first_run, call, method, module)
            with self.foreign.to(self.foreign.names, actual) as foreign:  # of names those used are given
                result = self._perform(call, first, actual)
        except of_models() as error:
            raise CloseModule(
                path, f"{name} of {path or 'the model'} cannot stay whole alone: {error}"
            ) from error
        self._check_foreign(call, foreign)
        call.mutated = self.performer.changed(buffers, module, path)
        self.ledger.hold_together(call, result)
        return result

    def _first_run(
        self, call: Call, method: standins.KeptMethod, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        with self.performer.inside_leaf(self.at.modules[id(module)], False):
            result, used = method.first(module, args, kwargs)
        inside = [self._held(value) for value in used]
        call.take((module.training, *inside, *call.args), call.kwargs)
        call.depends |= Depends.STATE if inside else Depends.NOTHING
        return result

    def _held(self, value: Any) -> Any:
        """A submodule, parameter or buffer that a method takes, as a call."""
        if isinstance(value, nn.Module):
            path = self.at.modules[id(value)]
            if any(id(p) in self.ledger.frozen for p in value.parameters()):
                raise CloseModule(
                    self.at.path,
                    f"{self.at.source()}: what stays whole uses {path}, whose weights are frozen",
                )
            return self.ledger.attribute(path, value, Depends.STATE)
        return value if value is None else self.ledger.materialise(self.ledger.find(value))

    def mapped(
        self,
        transform: Callable[..., Any],
        func: Any,
        how: tuple[Any, ...],
        args: Any,
        kwargs: Any,
        name: str = "vmap",
    ) -> Any:
        """A transform of functions over arguments; what lies in their closures is among them.

        Of the whole model they take the layers that they name.
        """
        named_transform = lifting.Transform(transform, how, name)
        with self.at.hushed:
            reached, remake = lifting.lift({0: func}, self._is_reached)
        if any(isinstance(v, nn.Module) and self.at.modules.get(id(v)) == "" for v in reached):
            return self._reaching(named_transform, {0: func}, reached, remake, (func, *args), kwargs)
        held, rebuild = self.ledger.lifted(func, with_modules=True)
        function = lifting.Mapped(named_transform, func, rebuild, len(held))
        return self.custom(function, function, (*held, *args), kwargs)

    def copied(self, tensor: torch.Tensor) -> Any:
        """What ``copy.copy`` makes of a tensor."""
        if not self.at.is_recorded:
            return copy.copy(tensor)
        return self.custom(named.Named(copy.copy), copy.copy, (tensor,), {})

    def outside_draw(self, name: str) -> None:
        """Code outside torch is about to draw a random number; tools may draw of the system."""
        if name == opaque.SYSTEM and self.at.is_of_tools():
            return
        if self.at.is_recorded:
            self.at.keep_whole(f"{self.at.source()}: {name} draws a random number", self.at.running())
        self._n_drawn += 1
        self.n_anew += name == opaque.SYSTEM

    def refuse_backward(self) -> NoReturn:
        """The model's own code runs a backward, whose gradients land where no graph shows them."""
        self.at.keep_whole(
            f"{self.at.source()}: backward() inside a forward; torch.autograd.grad gives the gradients"
        )

    def refuse_function(self, name: str, said: str = "") -> NoReturn:
        """A transform gives back a function, which no graph holds."""
        self.at.keep_whole(
            f"{self.at.source()}: torch.func.{name}{said} gives back a function of what was computed, which "
            "a graph cannot hold; torch.autograd.grad or torch.func.grad gives the derivative itself"
        )

    def refuse_named(self, name: str) -> NoReturn:
        """A loop is given its functions by name."""
        self.at.keep_whole(f"{self.at.source()}: {name} is given its functions by name; give them first")


def _parameters(given: Any) -> frozenset[int]:
    """The ids of tensors among values, and of the parameters of modules there."""
    leaves = flatten(given)[0]
    inside = (p for v in leaves if isinstance(v, nn.Module) for p in v.parameters())
    return frozenset(map(id, (*functions.tensors(leaves), *inside)))


def _is_function(value: Any) -> bool:
    """Whether a value is something to call, but no module and no class."""
    return callable(value) and not isinstance(value, (nn.Module, type))


def _may_be_nothing(call: Call) -> bool:
    """Whether data may have decided that a call gives nothing."""
    return bool(call.depends & UNSAFE) and not (call.writes or call.has_effect)


def _is_other(value: Any) -> bool:
    """Whether a value is an object that no recording follows, which may go by what was drawn."""
    return not (value is None or isinstance(value, (torch.Tensor, torch.dtype, torch.device)))


def _is_spent(value: Any) -> bool:
    """Whether code may use a value up, or fill it where no call shows that."""
    return hasattr(value, "__next__") or isinstance(value, (set, bytearray, collections.deque))


class _Looking(HiddenMode):
    """Notes whether code asks tensors for values, or makes of them what is as large as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.is_met = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kind, name = functions.classify(func)
        self.is_met |= kind in ("read", "data shaped") or functions.selects_by_mask(name, args)
        return func(*args, **(kwargs or {}))


def is_copying() -> bool:
    """Whether the caller's caller is ``copy.copy``."""
    frame = sys._getframe(2)
    return frame.f_code is copy.copy.__code__
