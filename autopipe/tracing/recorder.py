"""Runs a model once and records it: leaf modules whole, every other torch call one by one.

Which modules are leaves is left to ``leaves``; what ties two recordings together to ``modes``.
"""

from __future__ import annotations

import enum
import operator
import pathlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from . import checks, functions, regions
from .calls import UNSAFE, Call, Depends, Guard, Recording, meta
from .sizes import Expression, TrackedFloat, TrackedInt, plain, track
from .structure import LEAF, Spec, Step, flatten, paths, unflatten

__all__ = ["Open", "Recorder", "Restart"]

_HERE = str(pathlib.Path(__file__).parent)
_TORCH = str(pathlib.Path(torch.__file__).parent)
_INLINE = (
    type(None), str, int, float, complex, bool, torch.dtype, torch.memory_format, torch.layout, type(...)
)  # fmt: skip


class Restart(BaseException):
    """Recording must start again with ``path`` kept whole; ``why`` says what stood in the way.

    Not an :class:`Exception`, so that the model's own handlers let it pass.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path, self.why = path, why


class Open(BaseException):
    """Recording must start again with the leaf at ``path`` opened: a tensor leaked out of it."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Piece:
    """A piece of an earlier value, made a node when first used."""

    __slots__ = ("call", "parent", "step", "value")

    def __init__(self, parent: Any, step: Step, value: Any) -> None:
        self.parent, self.step, self.value = parent, step, value
        self.call: Call | None = None


Ref = Call | Piece
_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)


class Recorder(TorchFunctionMode):
    """One run of a model being recorded.

    ``names`` maps ids of the model's parameters and buffers to their first names, ``modules`` ids of modules
    to paths; ``is_leaf`` decides by path; ``device`` is where the model is, and what device literals equal
    to it follow.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        modules: Mapping[int, str],
        is_leaf: Callable[[str], bool],
        device: torch.device,
        training: bool,
    ) -> None:
        super().__init__()
        self.names, self.modules, self.is_leaf, self.device = names, modules, is_leaf, device
        self.training = training
        self.calls: list[Call] = []
        self.guards: dict[tuple[Any, ...], Guard] = {}
        self.constants: dict[str, Any] = {}
        self.refs: dict[int, tuple[Any, Ref]] = {}
        self.attributes: dict[str, Call] = {}
        self.sizes: dict[tuple[int, int], Expression] = {}
        self.stack: list[str] = []
        self.quiet = 0
        self.thread = threading.get_ident()
        self.base = regions.ambient()
        self.alive: list[Any] = []

    # ---------------------------------------------------------------- running

    @property
    def recording(self) -> bool:
        return self.quiet == 0 and threading.get_ident() == self.thread

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Mapping[str, Any]) -> Recording:
        """Record one call of ``model``; ``leaves`` names the tensors among its arguments."""
        for name, tensor in leaves.items():
            call = self.add(Call("placeholder", name, hint=name, depends=Depends.INPUT | Depends.SHAPE))
            call.value, call.storages = meta(tensor), functions.storages(tensor)
            self.bind(tensor, call)
        with self:
            result = model(*args, **kwargs)
        return self.finish(result)

    def finish(self, result: Any) -> Recording:
        values, spec = flatten(result)
        self.stack = [""]
        out = self.add(Call("output", "output", hint="output"))
        encoded = tuple(self.encode(v)[0] for v in values)
        self.calls.remove(out)
        self.calls.append(out)
        out.args = (encoded,)
        self.quiet = 1
        return Recording(self.training, self.calls, spec, list(self.guards.values()), self.constants)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.recording:
            return func(*args, **kwargs)
        return self.function(func, args, kwargs)

    # ---------------------------------------------------------------- modules

    def module(self, module: nn.Module, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module is being called: as a leaf, or with its forward recorded in turn."""
        path = self.modules.get(id(module))
        if path is None:
            return original(module, *args, **kwargs)
        if self.stack and path and self.is_leaf(path):
            return self.leaf(module, path, original, args, kwargs)
        self.stack.append(path)
        try:
            return original(module, *args, **kwargs)
        finally:
            self.stack.pop()

    def leaf(self, module: nn.Module, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        encoded, actual = self.encode_call(args, kwargs)
        call = Call("call_module", path, *encoded, hint=path, path=path, source=self.source())
        state = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
        call.depends = self.depends(call) | (Depends.STATE if state else Depends.NOTHING)
        buffers = functions.Versions.of(dict(module.named_buffers(prefix=path)))
        result = self.perform(call, lambda: original(module, *actual[0], **actual[1]), actual)
        call.mutated = tuple(
            dict.fromkeys(self.names.get(id(b), n) for n, b in buffers.changed(module, path, self.training))
        )
        return result

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
        return self.perform(call, lambda: func(*actual[0], **actual[1]), actual)

    def metadata(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A question about a tensor's shape, type or place."""
        result = func(*map(plain, args), **kwargs)
        tensor = args[0]
        ref = self.find(tensor) if isinstance(tensor, torch.Tensor) else None
        if ref is None or not self.depends_of(ref) & Depends.SHAPE:
            return result
        if name in ("shape", "size"):
            if isinstance(result, torch.Size):
                return torch.Size([self.size(tensor, ref, i, n) for i, n in enumerate(result)])
            axis = plain(args[1] if len(args) > 1 else kwargs["dim"])
            return self.size(tensor, ref, axis % tensor.dim(), result)
        if name in ("numel", "nelement"):
            return track(result, Expression(_Method("numel"), (ref,), result), self)
        if name == "__len__":
            size = self.size(tensor, ref, 0, result)
            return size.settle() if isinstance(size, TrackedInt) else size
        if name == "stride" and isinstance(result, int):
            return track(result, Expression(_Method("stride"), (ref, *args[1:]), result), self)
        return result

    def size(self, tensor: torch.Tensor, ref: Ref, axis: int, value: int) -> Any:
        key = (id(tensor), axis)
        if key not in self.sizes:
            self.sizes[key] = Expression(_Method("size"), (ref, axis), value)
        return TrackedInt.make(value, self.sizes[key], self)

    def read(self, call: Call, name: str, func: Callable[..., Any], actual: Any) -> Any:
        """The model's Python wants a tensor's value."""
        is_unsafe = bool(call.depends & UNSAFE) and not functions.is_settled(call)
        is_check = is_unsafe and name == "__bool__" and checks.is_check(call.source)
        if is_unsafe and not is_check:
            self.refuse(call, name)
        self.quiet += 1
        try:
            result = func(*actual[0], **actual[1])
        finally:
            self.quiet -= 1
        if is_check:
            call.target, call.args, call.hint = checks.expect, (call.args[0], result, call.source), "expect"
            call.op, call.is_check = "call_function", True
            self.add(call)
            return result
        if not call.depends & Depends.SHAPE or not isinstance(result, (bool, int, float)):
            return result
        call.is_size = True
        call.value = result
        return track(result, Expression(None, (), result, ref=self.add(call)), self)

    def refuse(self, call: Call, name: str) -> None:
        """Stop recording: Python branches on a value that can differ next time."""
        causes = [d.name.lower() for d in (Depends.INPUT, Depends.RANDOM, Depends.STATE) if call.depends & d]
        what = {"input": "input data", "random": "a random draw", "state": "a parameter or buffer"}
        cause = " and ".join(what[c] for c in causes if c)
        where = f"{call.source or 'unknown place'} (in {self.here or 'the model itself'})"
        raise Restart(self.here, f"{where}: {name} reads a value that depends on {cause}")

    def perform(self, call: Call, run: Callable[[], Any], actual: Any) -> Any:
        """Run a call for real, note what it did, and tie its results to it."""
        now = regions.ambient()
        call.region = regions.difference(self.base, now)
        before = functions.Versions.of(dict(enumerate(functions.tensors(actual))))
        generator = functions.generator_state(self.device)
        self.quiet += 1
        try:
            result = run()
        finally:
            self.quiet -= 1
        call.is_random = generator is not None and generator != functions.generator_state(self.device)
        if call.is_random:
            call.depends |= Depends.RANDOM
        written = before.written()
        call.reads = before.storages
        call.writes = frozenset().union(*(functions.storages(t) for t in written))
        return self.result(self.add(call), result, {id(t) for t in written}, before)

    def result(self, call: Call, result: Any, written: set[int], given: Any) -> Any:
        """Tie the tensors of a call's result to it; what was merely handed through becomes an alias."""
        if isinstance(result, torch.Tensor):
            new = self.own(result, call, written)
            call.value, call.storages = meta(new), functions.storages(new)
            return new
        values, spec = flatten(result)
        call.value = unflatten(spec, [meta(v) for v in values])
        new = [self.piece(call, path, v, written) for path, v in zip(paths(spec), values, strict=True)]
        call.storages = frozenset().union(*(functions.storages(v) for v in new))
        if all(a is b for a, b in zip(new, values, strict=True)):
            return result
        return unflatten(spec, new)

    def own(self, tensor: torch.Tensor, ref: Ref, written: set[int]) -> torch.Tensor:
        known = id(tensor) in self.refs or id(tensor) in self.names
        if known and id(tensor) not in written:
            tensor = torch.ops.aten.alias.default(tensor)
        self.bind(tensor, ref)
        return tensor

    def piece(self, call: Call, path: tuple[Step, ...], value: Any, written: set[int]) -> Any:
        if not path or not isinstance(value, (torch.Tensor, int, float)) or isinstance(value, bool):
            return value
        ref: Ref = call
        for step in path:
            ref = Piece(ref, step, value)
        if isinstance(value, torch.Tensor):
            return self.own(value, ref, written)
        if not call.depends & Depends.SHAPE:
            return plain(value)
        return track(plain(value), Expression(None, (), plain(value), ref=ref), self)

    # ---------------------------------------------------------------- values

    def bind(self, value: Any, ref: Ref) -> None:
        self.refs[id(value)] = (value, ref)
        for axis in range(8):
            if self.sizes.pop((id(value), axis), None) is None:
                break

    def find(self, tensor: torch.Tensor) -> Ref:
        """The place of a tensor in the recording: a call's result, a parameter, a buffer, a constant."""
        if id(tensor) in self.refs:
            return self.refs[id(tensor)][1]
        if id(tensor) in self.names:
            ref = self.attribute(self.names[id(tensor)], tensor, Depends.STATE)
        else:
            ref = self.attribute(self.constant(tensor), tensor, Depends.NOTHING)
        self.refs[id(tensor)] = (tensor, ref)
        return ref

    def attribute(self, target: str, value: Any, depends: Depends) -> Call:
        """The ``get_attr`` call of a parameter, buffer, constant or flag, made once."""
        if target not in self.attributes:
            call = Call("get_attr", target, hint=target, depends=depends, value=meta(value))
            if isinstance(value, torch.Tensor):
                call.storages = functions.storages(value)
            self.attributes[target] = self.add(call)
        return self.attributes[target]

    def constant(self, value: Any) -> str:
        for name, known in self.constants.items():
            if known is value:
                return name
        name = f"_constant{len(self.constants)}"
        self.constants[name] = value
        return name

    def materialise(self, ref: Ref) -> Call:
        """The call of a ref; a piece becomes a call when it is first used."""
        if isinstance(ref, Call):
            return ref
        if ref.call is None:
            parent = self.materialise(ref.parent)
            function = operator.getitem if ref.step[0] == "item" else getattr
            call = Call("call_function", function, (parent, ref.step[1]), hint=parent.hint)
            call.path, call.depends, call.accessor = parent.path, parent.depends, True
            call.value, call.storages = meta(ref.value), functions.storages(ref.value)
            call.is_size = isinstance(ref.value, (int, float))
            ref.call = self.add(call)
        return ref.call

    def number(self, expression: Any) -> Any:
        """A tracked number's expression as a call."""
        if not isinstance(expression, Expression):
            return expression
        if expression.ref is None:
            operands = [
                self.materialise(o) if isinstance(o, (Call, Piece)) else self.number(o)
                for o in expression.operands
            ]
            function = expression.function
            if isinstance(function, _Method):
                call = Call("call_method", function.name, tuple(operands), hint=function.name, accessor=True)
            else:
                name = getattr(function, "__name__", "number")
                call = Call("call_function", function, tuple(operands), hint=name)
            call.path, call.source, call.value = self.here, self.source(), expression.value
            call.is_size, call.depends = True, Depends.SHAPE
            call.depends |= self.depends(call) & Depends.DATA
            expression.ref = self.add(call)
        return self.materialise(expression.ref)

    def guard(self, expression: Expression, outcome: Any) -> None:
        """A size became a plain value; remember to check that it still does."""
        compares = expression.function in _COMPARISONS and expression.ref is None
        function = expression.function if compares else operator.pos
        parts = expression.operands if compares else (expression,)
        operands = tuple(self.number(p) for p in parts)
        for operand in operands:
            if isinstance(operand, Call) and operand.depends & Depends.DATA:
                self.refuse(operand, "a size")
        source = self.source()
        key = (function, *(id(o) if isinstance(o, Call) else o for o in operands), source)
        self.guards.setdefault(key, Guard(function, operands, outcome, self.here, source))

    # ---------------------------------------------------------------- arguments

    def encode_call(self, args: Any, kwargs: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        pairs = [self.encode(a) for a in args]
        named = {k: self.encode(v) for k, v in kwargs.items()}
        encoded = tuple(p[0] for p in pairs), {k: p[0] for k, p in named.items()}
        return encoded, (tuple(p[1] for p in pairs), {k: p[1] for k, p in named.items()})

    def encode(self, value: Any) -> tuple[Any, Any]:
        """A value as a node argument, and as the plain value to run the call with."""
        cls = type(value)
        if cls in _INLINE:
            return value, value
        if isinstance(value, torch.Tensor):
            return self.materialise(self.find(value)), value
        if cls in (TrackedInt, TrackedFloat):
            return self.number(value.expression), plain(value)
        if cls in (tuple, list, torch.Size):
            pairs = [self.encode(v) for v in value]
            make = list if cls is list else tuple
            return make(p[0] for p in pairs), cls([p[1] for p in pairs])
        if cls is dict and all(type(k) is str for k in value):
            named = {k: self.encode(v) for k, v in value.items()}
            return {k: p[0] for k, p in named.items()}, {k: p[1] for k, p in named.items()}
        if cls is slice:
            pairs = [self.encode(v) for v in (value.start, value.stop, value.step)]
            return slice(*(p[0] for p in pairs)), slice(*(p[1] for p in pairs))
        if cls is torch.device:
            same = value.type == self.device.type and value.index in (None, self.device.index)
            return (self.attribute("_device", value, Depends.NOTHING) if same else value), value
        return self.encode_object(value), value

    def encode_object(self, value: Any) -> Any:
        """A value fx cannot write down: rebuilt from its tensors, or kept as a constant object."""
        if isinstance(value, nn.Module):
            if id(value) in self.modules:
                return self.attribute(self.modules[id(value)], value, Depends.STATE)
            return self.attribute(self.constant(value), value, Depends.NOTHING)
        leaves, spec = flatten(value)
        if spec is LEAF or not any(isinstance(v, (torch.Tensor, TrackedInt, TrackedFloat)) for v in leaves):
            return self.attribute(self.constant(value), value, Depends.NOTHING)
        call = Call("call_function", functions.Rebuild(spec), tuple(self.encode(v)[0] for v in leaves))
        call.hint, call.path, call.depends, call.accessor = spec.type.__name__, self.here, self.depends(call), True
        call.value = unflatten(spec, [meta(plain(v)) for v in leaves])
        call.storages = frozenset().union(*(c.storages for c in call.inputs))
        return self.add(call)

    # ---------------------------------------------------------------- small things

    @property
    def here(self) -> str:
        return self.stack[-1] if self.stack else ""

    def add(self, call: Call) -> Call:
        self.calls.append(call)
        return call

    def depends(self, call: Call) -> Depends:
        out = Depends.NOTHING
        for given in call.inputs:
            out |= given.depends
        return out

    def depends_of(self, ref: Ref) -> Depends:
        while isinstance(ref, Piece):
            ref = ref.parent
        return ref.depends

    def source(self) -> str:
        """``file:line`` of the innermost frame that is neither torch's nor ours."""
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith((_HERE, _TORCH)):
                return f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        return ""


class _Method:
    """A tensor method that answers a number, in an expression."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name
