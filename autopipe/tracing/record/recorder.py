"""Runs a model once and records it: leaf modules whole, every other torch call one by one.

What each value is to the recording is left to ``ledger``, which modules are leaves to ``leaves``, what ties
two recordings together to ``modes``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn, overrides
from torch.overrides import TorchFunctionMode

from ...errors import CaptureError
from ..calls import functions, lifting, regions, wording
from ..calls.call import UNSAFE, Call, Depends, Recording, meta
from ..calls.perform import ask, run_call
from ..calls.streams import DRAWING
from ..inputs.structure import flatten
from . import checks, opaque, pieces
from .branches import Branches, program
from .draws import Draws, Streams
from .leaves import is_compiled
from .ledger import Ledger, Ref, TensorMethod
from .position import Depth, Position
from .restart import CloseModule
from .state import generators
from .tracked import Expression, plain, track

__all__ = ["Recorder"]


class Recorder(TorchFunctionMode):
    """One run of a model being recorded. ``is_leaf`` decides by path which modules are recorded whole."""

    def __init__(
        self,
        names: Mapping[int, str],
        modules: Mapping[int, str],
        known: frozenset[int],
        device: torch.device,
        is_leaf: Callable[[str], bool],
        training: bool,
        watch: bool = False,
        outcomes: Sequence[Any] = (),
        kept: Collection[str] = (),
        by_value: bool = False,
    ) -> None:
        super().__init__()
        self.at = Position(modules, is_leaf)
        self.ledger = Ledger(names, known, device, self.at)
        self.branches = Branches(self.ledger.calls, self.at, outcomes, kept, by_value)
        self.ledger.branches = self.branches
        self.ledger.watched = {} if watch else None
        self.training = training
        self.base = regions.ambient()
        self.draws = Draws(device)
        self.streams = Streams(modules)
        self.leaf_path = ""
        self.checkpointed = Depth()
        self.failed: str | None = None
        self.suspended: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    # ---------------------------------------------------------------- running

    def run(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Mapping[str, Any]
    ) -> Recording:
        """Record one call of ``model``; ``given`` names the tensors among its arguments."""
        for name, tensor in given.items():
            call = Call("placeholder", name, hint=name, depends=Depends.INPUT | Depends.SHAPE)
            call.value, call.storages = meta(tensor), functions.storages(tensor)
            self.ledger.bind(tensor, self.ledger.add(call))
        self.perform_one = lambda call, args, kwargs: run_call(
            model, self.ledger.constants, call, args, kwargs, given, torch.device("cpu")
        )
        with self.draws, self:
            result = model(*args, **kwargs)
        return self.finish(result)

    def finish(self, result: Any) -> Recording:
        for value, path in self.ledger.filled():
            raise CaptureError(
                f"a {type(value).__name__} passed around in {path or 'the model'} collects tensors while the "
                f"model runs, so what one call does depends on earlier ones; call the model without it"
            )
        values, spec = flatten(result)
        for value in values:
            _check_output(value)
        self.at.stack = [""]
        encoded = tuple(self.ledger.encode(v)[0] for v in values)
        self.ledger.add(Call("output", "output", (encoded,), hint="output"))
        self.at.hushed.count = 1
        return Recording(
            self.training,
            self.ledger.calls,
            spec,
            list(self.ledger.guards.values()),
            self.ledger.constants,
            tuple(self.branches.found),
        )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.at.is_recorded:
            return self.function(func, args, kwargs)
        if func in DRAWING:
            self.streams.note()
        result = func(*args, **kwargs)
        if self.ledger.watched is not None and self.leaf_path:
            self.ledger.watched.update({id(t): (t, self.leaf_path) for t in functions.tensors(result)})
        return result

    # ---------------------------------------------------------------- modules

    def module(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module is being called: as a leaf, or with its forward recorded in turn."""
        path = self.at.modules.get(id(module))
        if path is None:
            return original(*args, **kwargs)
        if self.at.stack and path and self.at.is_leaf(path):
            inside = list(module.modules())
            if not self.is_swapped(inside):
                with self.at.hushed, self.stepped_aside():
                    return self.leaf(module, inside, path, original, args, kwargs)
        if module._backward_hooks or module._backward_pre_hooks:
            raise CloseModule(
                path, f"{path or type(module).__name__} has backward hooks, which need it whole"
            )
        self.at.stack.append(path)
        try:
            return original(*args, **kwargs)
        except Exception:
            self.failed = path if self.failed is None else self.failed
            raise
        finally:
            self.at.stack.pop()

    def is_swapped(self, inside: list[nn.Module]) -> bool:
        """Whether modules run with other parameters than their own (``torch.func.functional_call``)."""
        held = (p for m in inside for p in m._parameters.values() if p is not None)
        return any(id(p) not in self.ledger.names for p in held)

    def leaf(
        self,
        module: nn.Module,
        inside: list[nn.Module],
        path: str,
        original: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Record ``module``, with all the modules ``inside`` it, as one call."""
        encoded, actual = self.ledger.encode_call(args, kwargs)
        call = Call("call_module", path, *encoded, hint=path, path=path, source=self.at.source())
        call.recompute = self.checkpointed.count > 0
        state = (t for m in inside for t in (*m._parameters.values(), *m._buffers.values()))
        has_state = any(t is not None for t in state)
        call.depends = self.ledger.depends(call) | (Depends.STATE if has_state else Depends.NOTHING)
        has_buffers = any(m._buffers for m in inside)
        buffers = functions.Versions.of(dict(module.named_buffers(prefix=path)) if has_buffers else {})
        compiled = any(map(is_compiled, inside))
        run = functools.partial(type(module).__call__, module) if compiled else original

        def run_leaf(*args: Any, **kwargs: Any) -> Any:
            with self.inside_leaf(path, compiled), self.suspended() if compiled else contextlib.nullcontext():
                return run(*args, **kwargs)

        call.stream = self.streams.of_module(path, inside)
        result = self.perform(call, run_leaf, actual)
        call.mutated = self.changed(buffers, module, path)
        return result

    def changed(self, before: functions.Versions, module: nn.Module, path: str) -> tuple[str, ...]:
        """The buffers of ``module`` that are not as they were."""
        found = before.changed(module, path, self.training)
        return tuple(dict.fromkeys(self.ledger.names.get(id(b), n) for n, b in found))

    @contextlib.contextmanager
    def stepped_aside(self) -> Iterator[None]:
        """What is done meanwhile does not come by this mode, unless another one was entered since."""
        is_top = overrides._get_current_function_mode() is self
        if is_top:
            overrides._pop_mode()
        try:
            yield
        finally:
            if is_top:
                overrides._push_mode(self)

    @contextlib.contextmanager
    def inside_leaf(self, path: str, compiled: bool) -> Iterator[None]:
        """A leaf runs as it will run later, without export flags; its draws are counted, or it is watched."""
        self.leaf_path = path
        flags = functions.ExportFlags.read()
        functions.ExportFlags(False, False).write()
        comes_by = self in overrides._get_current_function_mode_stack()
        mode = self if self.ledger.watched is not None else self.streams
        try:
            with contextlib.nullcontext() if compiled or comes_by else mode:
                yield
        finally:
            flags.write()
            self.leaf_path = ""

    # ---------------------------------------------------------------- functions

    def function(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A torch function or tensor method is being called by glue code."""
        kind, name = functions.classify(func)
        if kind == "state":
            return func(*args, **kwargs)
        if kind == "metadata":
            return self.metadata(name, func, args, kwargs)
        encoded, actual = self.ledger.encode_call(args, kwargs)
        call = functions.as_call(func, *encoded)
        call.path, call.source = self.at.path, self.at.source()
        call.depends = self.ledger.depends(call)
        if kind == "shape only":
            call.depends &= ~(Depends.INPUT | Depends.RANDOM | Depends.STATE)
        elif kind == "data shaped" or functions.selects_by_mask(name, actual[0]):
            call.depends |= Depends.DATA if call.depends & UNSAFE else Depends.NOTHING
        if kind == "read":
            return self.read(call, name, func, actual)
        if name == "unbind":  # what iterating over a tensor comes down to
            self.ledger.iterated(call, len(actual[0][0]))
        pieces.hold(self.ledger, name, args, kwargs)
        if functions.takes_numpy(actual) and not self.ledger.knows_arrays(actual):
            return self.outside_numbers(func, actual)
        if functions.writes_in_place(name, actual):
            self.check_parameters(actual, name, call.source)
        return self.perform(call, func, actual)

    def custom_function(
        self, function: functions.Named, run: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """A call that the function mode does not see as one: ``autograd.Function.apply``, ``vmap``."""
        with self.at.hushed:
            encoded, actual = self.ledger.encode_call(args, kwargs)
        call = Call("call_function", function, *encoded, hint=function.__name__)
        call.path, call.source = self.at.path, self.at.source()
        call.depends, call.stream = self.ledger.depends(call), self.streams.here()
        return self.perform(call, run, actual)

    def kept_function(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A plain function that stays whole is being called."""
        if not self.at.is_recorded:
            return run(*args, **kwargs)
        encoded, actual = self.ledger.encode_call(args, kwargs)
        call = Call(
            "call_function", run, *encoded, hint=run.__name__, path=self.at.path, source=self.at.source()
        )
        call.depends = self.ledger.depends(call)
        return self.perform_kept(call, run, actual)

    def perform_kept(self, call: Call, run: Callable[..., Any], actual: Any) -> Any:
        """Perform a call of code that may draw outside torch and give what is no tensor."""
        before, call.stream = generators(), self.streams.here()
        result = self.perform(call, run, actual)
        if generators() != before:
            call.is_random, call.depends = True, call.depends | Depends.RANDOM
        for value in flatten(result)[0]:
            if isinstance(value, np.ndarray):
                self.ledger.bind(value, call)
            elif isinstance(value, (bool, int, float, str)):
                self.at.refuse(call.depends, f"{wording.shown(call)} ({value!r} here)", call.source)
            elif value is None and call.depends & UNSAFE and not call.writes:
                self.at.refuse(call.depends, f"{wording.shown(call)} (None here)", call.source)
        return result

    def kept_method(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method that stays whole is being called; the module is closed where that cannot be."""
        path = self.at.modules[id(module)]
        if not self.at.is_recorded:
            return getattr(type(module), name)(module, *args, **kwargs)
        encoded, actual = self.ledger.encode_call(args, kwargs)
        buffers = functions.Versions.of(dict(module.named_buffers(prefix=path)))
        try:
            method = opaque.KeptMethod(module, name)
            call = Call(
                "call_function", method, *encoded, hint=name, path=self.at.path, source=self.at.source()
            )
            call.depends = self.ledger.depends(call)
            result = self.perform_kept(call, functools.partial(self.first_run, call, method, module), actual)
        except Exception as error:
            raise CloseModule(
                path, f"{name} of {path or 'the model'} cannot stay whole alone: {error}"
            ) from error
        call.mutated = self.changed(buffers, module, path)
        self.ledger.hold_together(call, result)
        return result

    def first_run(
        self, call: Call, method: opaque.KeptMethod, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Any:
        with self.inside_leaf(self.at.modules[id(module)], False):
            result, used = method.first(module, args, kwargs)
        inside = [self.ledger.attribute(self.at.modules[id(m)], m, Depends.STATE) for m in used]
        call.take((*inside, *call.args), call.kwargs)
        call.depends |= Depends.STATE if inside else Depends.NOTHING
        return result

    def outside_draw(self, name: str) -> None:
        """Code outside torch is about to draw a random number."""
        if self.at.is_recorded:
            self.at.keep_whole(f"{self.at.source()}: {name} draws a random number")

    def mapped(
        self, vmap: Callable[..., Any], func: Callable[..., Any], how: Any, args: Any, kwargs: Any
    ) -> Any:
        """``vmap`` of a function over arguments, the tensors in its closure among them."""
        with self.at.hushed:
            tensors, rebuild = lifting.lift(func, lambda t: id(t) in self.ledger.refs)
        function = lifting.Mapped(vmap, rebuild, len(tensors), how)
        return self.custom_function(function, function, (*tensors, *args), kwargs)

    def metadata(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A question about a tensor's shape, type or place."""
        result = func(*map(plain, args), **kwargs)
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or name not in functions.SIZES:
            return result
        ref = self.ledger.find(tensor)
        if not self.ledger.depends_of(ref) & Depends.SHAPE:
            return result
        if name in ("shape", "size"):
            if isinstance(result, torch.Size):
                return torch.Size([self.ledger.size(tensor, ref, i, n) for i, n in enumerate(result)])
            axis = plain(args[1] if len(args) > 1 else kwargs["dim"])
            return self.ledger.size(tensor, ref, axis % tensor.dim(), result)
        if name == "__len__":
            return self.ledger.size(tensor, ref, 0, result).settle()
        if name == "stride":
            return (
                result if isinstance(result, tuple) else self.tracked_answer("stride", ref, args[1:], result)
            )
        return self.tracked_answer("numel", ref, (), result)

    def tracked_answer(self, method: str, ref: Ref, rest: Any, result: int) -> Any:
        return track(result, Expression(TensorMethod(method), (ref, *rest), result), self.ledger)

    def read(self, call: Call, name: str, func: Callable[..., Any], actual: Any) -> Any:
        """The model's Python wants a tensor's value."""
        is_unsafe = bool(call.depends & UNSAFE) and not functions.is_settled(call)
        is_check = is_unsafe and name == "__bool__" and checks.is_check(call.source)
        is_message = name == "__format__" and checks.is_message(call.source)
        if is_unsafe and not is_check and not is_message:
            call.reads = frozenset().union(*map(functions.storages, functions.tensors(actual)))
            with self.at.hushed:
                is_meta = self.ledger.device.type == "meta"
                branch = self.branches.read(call, lambda: func(*actual[0], **actual[1]), is_meta)
            if branch is not None:
                return branch.outcome
            self.at.refuse(call.depends, self.describe_read(call, actual), call.source)
        with self.at.hushed:
            result = self.answer(call, func, actual)
        if is_check:
            self.ledger.expect(call.args[0], result, call.source)
            return result
        if not call.depends & Depends.SHAPE or not isinstance(result, (bool, int, float)):
            return result
        call.is_size, call.value = True, result
        return track(result, Expression(None, (), result, ref=self.ledger.add(call)), self.ledger)

    def answer(self, call: Call, func: Callable[..., Any], actual: Any) -> Any:
        """What a read gives; of a meta model by computing what it reads, which sizes alone may decide."""
        calls = program(self.ledger.calls, call) if self.ledger.device.type == "meta" else None
        if calls is None or call.depends & UNSAFE:
            return func(*actual[0], **actual[1])
        with self.stepped_aside():
            return ask(calls, self.perform_one)

    def describe_read(self, call: Call, actual: Any) -> str:
        """The value that Python wants, in words: how it is made and, where it is one number, which."""
        with self.at.hushed:
            number = wording.example_of(actual[0][0] if actual[0] else None)
        what = wording.shown(call.args if len(call.args) == 1 else call)
        return what + (f" ({number} here)" if number else "")

    def outside_numbers(self, func: Callable[..., Any], actual: Any) -> torch.Tensor:
        """A tensor made from a numpy array becomes a constant, copied at each run."""
        with self.at.hushed:
            value = func(*actual[0], **actual[1])
        return self.own_constant(value)

    def own_constant(self, value: torch.Tensor) -> torch.Tensor:
        with self.at.hushed:
            constant = self.ledger.attribute(self.ledger.constant(value), value, Depends.NOTHING)
        call = Call(
            "call_method", "clone", (constant,), hint="clone", path=self.at.path, source=self.at.source()
        )
        return self.perform(call, value.clone, ((), {}))

    def check_parameters(self, actual: Any, name: str, source: str) -> None:
        """A module whose glue code writes to a parameter stays whole."""
        tensor = next(functions.tensors(actual), None)
        base = tensor if tensor is None or tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) and id(base) in self.ledger.names:
            raise CloseModule(
                self.at.path, f"{source}: {name} writes to parameter {self.ledger.names[id(base)]}"
            )

    # ---------------------------------------------------------------- performing

    def perform(self, call: Call, run: Callable[..., Any], actual: Any) -> Any:
        """Run a call for real, note what it did, and tie its results to it."""
        with self.at.hushed:
            return self._perform(call, run, actual)

    def _perform(self, call: Call, run: Callable[..., Any], actual: Any) -> Any:
        call.region = regions.difference(self.base, regions.ambient())
        before = functions.Versions.of(dict(enumerate(functions.tensors(actual))))
        if run in DRAWING:
            call.stream = self.streams.here()
            self.streams.note()
        args, kwargs = functions.on_one_device(actual) if self.ledger.device.type == "meta" else actual
        result = run(*args, **kwargs)
        call.is_random = self.draws.drawn()
        if call.is_random:
            call.depends |= Depends.RANDOM
            call.stream = call.stream or self.streams.here()
        written = before.written()
        call.reads = before.storages
        call.writes = frozenset().union(*(functions.storages(t) for t in written))
        return self.ledger.adopt_result(self.ledger.add(call), result, {id(t) for t in written})


def _check_output(value: Any) -> None:
    if (callable(value) and hasattr(value, "gi_frame")) or hasattr(value, "__next__"):
        raise CaptureError(
            f"the model returns a {type(value).__name__}, which can be read only once; return a tuple or list"
        )
