"""Runs a model once and records it: leaf modules whole, every other torch call one by one.

What each value is to the recording is left to ``ledger``, which modules are leaves to ``leaves``, what ties
two recordings together to ``modes``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn, overrides
from torch.overrides import TorchFunctionMode

from ...errors import CaptureError
from ..calls import functions, lifting, regions, wording
from ..calls.call import UNSAFE, Call, Depends, Recording, meta
from ..inputs.structure import Step, flatten, paths, unflatten
from . import checks, opaque
from .draws import Draws
from .leaves import is_compiled
from .ledger import Depth, Ledger, Method, Piece, Ref, Restart
from .tracked import Expression, plain, track

__all__ = ["Recorder"]


class Recorder(Ledger, TorchFunctionMode):
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
    ) -> None:
        Ledger.__init__(self, names, modules, known, device, is_leaf)
        TorchFunctionMode.__init__(self)
        self.training = training
        self.watched = {} if watch else None
        self.base = regions.ambient()
        self.draws = Draws(device)
        self.leaf_path = ""
        self.checkpointed = Depth()
        self.failed: str | None = None
        self.suspended: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.saved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    # ---------------------------------------------------------------- running

    def run(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Mapping[str, Any]
    ) -> Recording:
        """Record one call of ``model``; ``given`` names the tensors among its arguments."""
        for name, tensor in given.items():
            call = Call("placeholder", name, hint=name, depends=Depends.INPUT | Depends.SHAPE)
            call.value, call.storages = meta(tensor), functions.storages(tensor)
            self.bind(tensor, self.add(call))
        with self.draws, self:
            result = model(*args, **kwargs)
        return self.finish(result)

    def finish(self, result: Any) -> Recording:
        for value, path in self.filled():
            raise CaptureError(
                f"a {type(value).__name__} passed around in {path or 'the model'} collects tensors while the "
                f"model runs, so what one call does depends on earlier ones; call the model without it"
            )
        values, spec = flatten(result)
        for value in values:
            _check_output(value)
        self.stack = [""]
        encoded = tuple(self.encode(v)[0] for v in values)
        self.add(Call("output", "output", (encoded,), hint="output"))
        self.hushed.count = 1
        return Recording(self.training, self.calls, spec, list(self.guards.values()), self.constants)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.recording:
            return self.function(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.watched is not None and self.leaf_path:
            self.watched.update({id(t): (t, self.leaf_path) for t in functions.tensors(result)})
        return result

    # ---------------------------------------------------------------- modules

    def module(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module is being called: as a leaf, or with its forward recorded in turn."""
        path = self.modules.get(id(module))
        if path is None:
            return original(*args, **kwargs)
        if self.stack and path and self.is_leaf(path):
            inside = list(module.modules())
            if not self.is_swapped(inside):
                with self.hushed, self.aside():
                    return self.leaf(module, inside, path, original, args, kwargs)
        self.stack.append(path)
        try:
            return original(*args, **kwargs)
        except Exception:
            self.failed = path if self.failed is None else self.failed
            raise
        finally:
            self.stack.pop()

    def is_swapped(self, inside: list[nn.Module]) -> bool:
        """Whether modules run with other parameters than their own (``torch.func.functional_call``)."""
        held = (p for m in inside for p in m._parameters.values() if p is not None)
        return any(id(p) not in self.names for p in held)

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
        encoded, actual = self.encode_call(args, kwargs)
        call = Call("call_module", path, *encoded, hint=path, path=path, source=self.source())
        call.recompute = self.checkpointed.count > 0
        state = (t for m in inside for t in (*m._parameters.values(), *m._buffers.values()))
        has_state = any(t is not None for t in state)
        call.depends = self.depends(call) | (Depends.STATE if has_state else Depends.NOTHING)
        has_buffers = any(m._buffers for m in inside)
        buffers = functions.Versions.of(dict(module.named_buffers(prefix=path)) if has_buffers else {})
        compiled = any(map(is_compiled, inside))
        run = functools.partial(type(module).__call__, module) if compiled else original

        def alone(*args: Any, **kwargs: Any) -> Any:
            with self.inside_leaf(path, compiled), self.suspended() if compiled else contextlib.nullcontext():
                return run(*args, **kwargs)

        result = self.perform(call, alone, actual)
        call.mutated = self.changed(buffers, module, path)
        return result

    def changed(self, before: functions.Versions, module: nn.Module, path: str) -> tuple[str, ...]:
        """The buffers of ``module`` that are not as they were."""
        found = before.changed(module, path, self.training)
        return tuple(dict.fromkeys(self.names.get(id(b), n) for n, b in found))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
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
        """A leaf runs as it will run later: no export flags, and outside of this mode unless watched."""
        self.leaf_path = path
        flags = functions.ExportFlags.read()
        functions.ExportFlags(False, False).write()
        comes_by = self in overrides._get_current_function_mode_stack()
        watches = self.watched is not None and not compiled
        try:
            with self if watches and not comes_by else contextlib.nullcontext():
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
        encoded, actual = self.encode_call(args, kwargs)
        call = functions.as_call(func, *encoded)
        call.path, call.source = self.here, self.source()
        call.depends = self.depends(call)
        if kind == "shape only":
            call.depends &= ~(Depends.INPUT | Depends.RANDOM | Depends.STATE)
        elif kind == "data shaped" or functions.selects_by_mask(name, actual[0]):
            call.depends |= Depends.DATA if call.depends & UNSAFE else Depends.NOTHING
        if kind == "read":
            return self.read(call, name, func, actual)
        if name == "unbind":  # what iterating over a tensor comes down to
            self.iterated(call, len(actual[0][0]))
        if functions.takes_numpy(actual) and not self.knows_arrays(actual):
            return self.outside_numbers(func, actual)
        if functions.writes_in_place(name, actual):
            self.save_parameters(actual, name, call.source)
        return self.perform(call, func, actual)

    def custom(self, function: functions.Named, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call that the function mode does not see as one: ``autograd.Function.apply``, ``vmap``."""
        with self.hushed:
            encoded, actual = self.encode_call(args, kwargs)
        call = Call("call_function", function, *encoded, hint=function.__name__)
        call.path, call.source = self.here, self.source()
        call.depends = self.depends(call)
        return self.perform(call, run, actual)

    def whole(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A plain function that stays whole is being called."""
        if not self.recording:
            return run(*args, **kwargs)
        encoded, actual = self.encode_call(args, kwargs)
        call = Call("call_function", run, *encoded, hint=run.__name__, path=self.here, source=self.source())
        call.depends = self.depends(call)
        return self.perform_whole(call, run, actual)

    def perform_whole(self, call: Call, run: Callable[..., Any], actual: Any) -> Any:
        """Perform a call of code that may draw outside torch and give what is no tensor."""
        before = opaque.generators()
        result = self.perform(call, run, actual)
        if opaque.generators() != before:
            call.is_random, call.depends = True, call.depends | Depends.RANDOM
        for value in flatten(result)[0]:
            if isinstance(value, np.ndarray):
                self.bind(value, call)
            elif isinstance(value, (bool, int, float, str)):
                self.refuse(call.depends, f"{wording.shown(call)} ({value!r} here)", call.source)
        return result

    def part(self, module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method that stays whole is being called; the module is closed where that cannot be."""
        path = self.modules[id(module)]
        if not self.recording:
            return getattr(type(module), name)(module, *args, **kwargs)
        encoded, actual = self.encode_call(args, kwargs)
        buffers = functions.Versions.of(dict(module.named_buffers(prefix=path)))
        try:
            part = opaque.Part(module, name)
            call = Call("call_function", part, *encoded, hint=name, path=self.here, source=self.source())
            call.depends = self.depends(call)
            result = self.perform_whole(call, functools.partial(self.apart, call, part, module), actual)
        except Exception as error:
            raise Restart(
                path, f"{name} of {path or 'the model'} cannot stay whole alone: {error}"
            ) from error
        call.mutated = self.changed(buffers, module, path)
        self.hold_together(call, result)
        return result

    def apart(self, call: Call, part: opaque.Part, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with self.inside_leaf(self.modules[id(module)], False):
            result, used = part.first(module, args, kwargs)
        inside = [self.attribute(self.modules[id(m)], m, Depends.STATE) for m in used]
        call.take((*inside, *call.args), call.kwargs)
        call.depends |= Depends.STATE if inside else Depends.NOTHING
        return result

    def drawn(self, name: str) -> None:
        """Code outside torch is about to draw a random number."""
        if self.recording:
            self.keep_whole(f"{self.source()}: {name} draws a random number")

    def mapped(
        self, vmap: Callable[..., Any], func: Callable[..., Any], how: Any, args: Any, kwargs: Any
    ) -> Any:
        """``vmap`` of a function over arguments, the tensors in its closure among them."""
        with self.hushed:
            tensors, rebuild = lifting.lift(func, lambda t: id(t) in self.refs)
        function = lifting.Mapped(vmap, rebuild, len(tensors), how)
        return self.custom(function, function, (*tensors, *args), kwargs)

    def metadata(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A question about a tensor's shape, type or place."""
        result = func(*map(plain, args), **kwargs)
        tensor = args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or name not in functions.SIZES:
            return result
        ref = self.find(tensor)
        if not self.depends_of(ref) & Depends.SHAPE:
            return result
        if name in ("shape", "size"):
            if isinstance(result, torch.Size):
                return torch.Size([self.size(tensor, ref, i, n) for i, n in enumerate(result)])
            axis = plain(args[1] if len(args) > 1 else kwargs["dim"])
            return self.size(tensor, ref, axis % tensor.dim(), result)
        if name == "__len__":
            return self.size(tensor, ref, 0, result).settle()
        if name == "stride":
            return result if isinstance(result, tuple) else self.asked("stride", ref, args[1:], result)
        return self.asked("numel", ref, (), result)

    def asked(self, method: str, ref: Ref, rest: Any, result: int) -> Any:
        return track(result, Expression(Method(method), (ref, *rest), result), self)

    def read(self, call: Call, name: str, func: Callable[..., Any], actual: Any) -> Any:
        """The model's Python wants a tensor's value."""
        is_unsafe = bool(call.depends & UNSAFE) and not functions.is_settled(call)
        is_check = is_unsafe and name == "__bool__" and checks.is_check(call.source)
        is_message = name == "__format__" and checks.is_message(call.source)
        if is_unsafe and not is_check and not is_message:
            self.refuse(call.depends, self.wanted(call, actual), call.source)
        with self.hushed:
            result = func(*actual[0], **actual[1])
        if is_check:
            self.expect(call.args[0], result, call.source)
            return result
        if not call.depends & Depends.SHAPE or not isinstance(result, (bool, int, float)):
            return result
        call.is_size, call.value = True, result
        return track(result, Expression(None, (), result, ref=self.add(call)), self)

    def wanted(self, call: Call, actual: Any) -> str:
        """The value that Python wants, in words: how it is made and, where it is one number, which."""
        with self.hushed:
            number = wording.example_of(actual[0][0] if actual[0] else None)
        what = wording.shown(call.args if len(call.args) == 1 else call)
        return what + (f" ({number} here)" if number else "")

    def outside_numbers(self, func: Callable[..., Any], actual: Any) -> torch.Tensor:
        """A tensor made from a numpy array becomes a constant, copied at each run."""
        with self.hushed:
            value = func(*actual[0], **actual[1])
        return self.own_constant(value)

    def own_constant(self, value: torch.Tensor) -> torch.Tensor:
        with self.hushed:
            constant = self.attribute(self.constant(value), value, Depends.NOTHING)
        call = Call("call_method", "clone", (constant,), hint="clone", path=self.here, source=self.source())
        return self.perform(call, value.clone, ((), {}))

    def save_parameters(self, actual: Any, name: str, source: str) -> None:
        """Glue code writes to a parameter: keep a copy to put back, and keep the module whole."""
        tensor = next(functions.tensors(actual), None)
        base = tensor if tensor is None or tensor._base is None else tensor._base
        if isinstance(base, nn.Parameter) and id(base) in self.names:
            raise Restart(self.here, f"{source}: {name} writes to parameter {self.names[id(base)]}")

    # ---------------------------------------------------------------- performing

    def perform(self, call: Call, run: Callable[..., Any], actual: Any) -> Any:
        """Run a call for real, note what it did, and tie its results to it."""
        with self.hushed:
            return self._perform(call, run, actual)

    def _perform(self, call: Call, run: Callable[..., Any], actual: Any) -> Any:
        call.region = regions.difference(self.base, regions.ambient())
        before = functions.Versions.of(dict(enumerate(functions.tensors(actual))))
        args, kwargs = functions.on_one_device(actual) if self.device.type == "meta" else actual
        result = run(*args, **kwargs)
        call.is_random = self.draws.drawn()
        if call.is_random:
            call.depends |= Depends.RANDOM
        written = before.written()
        call.reads = before.storages
        call.writes = frozenset().union(*(functions.storages(t) for t in written))
        return self.result(self.add(call), result, {id(t) for t in written})

    def result(self, call: Call, result: Any, written: set[int]) -> Any:
        """Tie the tensors of a call's result to it; what was merely handed through becomes an alias."""
        if isinstance(result, torch.Tensor):
            new = self.own(result, call, written)
            call.value, call.storages = meta(new), functions.storages(new)
            return new
        values, spec = flatten(result)
        call.value = unflatten(spec, [meta(v) for v in values])
        owned = [self.piece(call, path, v, written) for path, v in zip(paths(spec), values, strict=True)]
        call.storages = frozenset().union(*(functions.storages(v) for v in owned))
        if all(a is b for a, b in zip(owned, values, strict=True)):
            return result
        return unflatten(spec, owned)

    def own(self, tensor: torch.Tensor, ref: Ref, written: set[int]) -> torch.Tensor:
        is_known = id(tensor) in self.refs or id(tensor) in self.names
        if is_known and id(tensor) not in written:
            tensor = torch.ops.aten.alias.default(tensor)
        self.bind(tensor, ref)
        return tensor

    def piece(self, call: Call, path: tuple[Step, ...], value: Any, written: set[int]) -> Any:
        if not isinstance(value, (torch.Tensor, int, float)) or isinstance(value, bool):
            return value
        ref: Ref = call
        for step in path:
            ref = Piece(ref, step, value)
        if isinstance(value, torch.Tensor):
            return self.own(value, ref, written)
        if not call.depends & Depends.SHAPE or isinstance(value, float):
            return plain(value)
        if not path:
            call.is_size = True
        return track(plain(value), Expression(None, (), plain(value), ref=ref), self)


def _check_output(value: Any) -> None:
    if (callable(value) and hasattr(value, "gi_frame")) or hasattr(value, "__next__"):
        raise CaptureError(
            f"the model returns a {type(value).__name__}, which can be read only once; return a tuple or list"
        )
