"""What a recording knows of values: the call or constant behind each tensor, size and object.

Running the model and noticing its calls is left to ``recorder``.
"""

from __future__ import annotations

import cmath
import dataclasses
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ...errors import CaptureError
from ..calls import describe, functions, lifting
from ..calls.call import UNSAFE, Call, Depends, meta
from ..calls.named import Rebuild
from ..code import checks, opaque
from ..code.position import Position
from ..code.restart import KeepFunction, OpenLeaf, WatchLeaves
from ..inputs.structure import LEAF, Spec, Step, along, carries_tensors, flatten, paths, unflatten
from . import origin
from .extent import Extents
from .numbers import Numbers
from .refs import Piece, Ref
from .tracked import Expression, TrackedFloat, TrackedInt, plain, track

__all__ = ["Ledger"]

_INLINE = frozenset(
    {type(None), str, int, float, complex, bool, torch.dtype, torch.memory_format, torch.layout, type(...)}
)
_UNPACKED = 8
"""How many rows of a tensor code may take apart by name; more are a loop."""


class Ledger:
    """The calls recorded so far and what every value is to them.

    ``names`` maps ids of the model's parameters and buffers to their first names, ``known`` holds ids of
    tensors it held before; device literals equal to ``device`` follow it; ``at`` is where its code is.
    """

    def __init__(
        self, names: Mapping[int, str], known: frozenset[int], device: torch.device, at: Position
    ) -> None:
        self.names, self.known, self.device, self.at = names, known, device, at
        self.calls: list[Call] = []
        self.constants: dict[str, Any] = {}
        self.constant_names: dict[int, str] = {}
        self.bare: list[tuple[Any, str]] = []
        self.refs: dict[int, tuple[Any, Ref]] = {}
        self.attributes: dict[str, Call] = {}
        self.together: dict[int, list[int]] = {}
        self.watched: dict[int, tuple[torch.Tensor, str]] | None = None
        self.unseen: origin.Unseen | None = None
        self.extents = Extents()
        self.numbers = Numbers(self)
        self.most = sys.maxsize
        self.frozen: set[int] = set()
        """Ids of weights that the model's code has frozen for now."""

    def add(self, call: Call) -> Call:
        if len(self.calls) > self.most:
            raise CaptureError("a recording with other numbers is longer")
        self.calls.append(call)
        return call

    def iterated(self, call: Call, n_rows: int) -> None:
        """The model's Python goes through a tensor's rows: too many to be taken apart by name are a loop."""
        if call.inputs and self.extent_depends(call.inputs[0]) & Depends.DATA:
            self.at.refuse(call.depends, f"len({describe.expression(call.args[0])})", call.source)
        is_loop = call.depends & (Depends.SHAPE | Depends.INPUT) and n_rows > _UNPACKED
        if is_loop and (function := opaque.innermost(lambda module: None, self.at.holds)) is not None:
            raise KeepFunction(function, self.at.path, f"{call.source}: the model loops over {n_rows} rows")

    def expect(self, value: Any, outcome: bool, source: str) -> None:
        """Let the recording check a truth that the model's own code checks."""
        self._check(checks.expect, (value, outcome, source), source)

    def expect_nothing(self, call: Call, places: Sequence[int]) -> None:
        """Let the recording check which leaves of what a call gives are None."""
        self._check(checks.expect_nothing, (call, tuple(places), call.source), call.source)

    def _check(self, check: Callable[..., None], args: tuple[Any, ...], source: str) -> None:
        call = Call("call_function", check, args, hint=check.__name__, path=self.at.path, source=source)
        call.is_check, call.depends = True, self.depends(call)
        self.add(call)

    def knows_arrays(self, actual: Any) -> bool:
        """Whether numpy arrays among a call's arguments are results of recorded calls."""
        return any(isinstance(v, np.ndarray) and id(v) in self.refs for v in flatten(actual)[0])

    # ---------------------------------------------------------------- tensors

    def bind(self, value: Any, ref: Ref) -> None:
        """From now on ``value`` is what ``ref`` computes."""
        self.refs[id(value)] = (value, ref)
        self.numbers.sizes.pop(id(value), None)

    def find(self, tensor: torch.Tensor) -> Ref:
        """The place of a tensor in the recording: a call's result, a parameter, a buffer, a constant."""
        if id(tensor) in self.refs:
            return self.refs[id(tensor)][1]
        ref = self.twin(tensor)
        if ref is None and id(tensor) in self.names:
            ref = self.attribute(self.names[id(tensor)], tensor, Depends.STATE)
            ref = self.cut_off(ref, tensor) if id(tensor) in self.frozen else ref
        elif ref is None:
            self.check_origin(tensor)
            ref = self.attribute(self.constant(tensor), tensor, Depends.NOTHING)
        self.refs[id(tensor)] = (tensor, ref)
        return ref

    def cut_off(self, held: Call, tensor: torch.Tensor) -> Call:
        """A weight that is frozen for now, as a call that no gradient passes."""
        call = Call(
            "call_method", "detach", (held,), hint="detach", path=self.at.path, source=self.at.source()
        )
        call.depends, call.value, call.storages = held.depends, meta(tensor), held.storages
        return self.add(call)

    def twin(self, tensor: torch.Tensor) -> Call | None:
        """A tensor that code made on the memory of a known one, such as a ``Parameter`` of it, as a call."""
        if id(tensor) in self.names or id(tensor) in self.known:
            return None
        with self.at.hushed:
            twin = origin.twin_in_memory(tensor, (value for value, _ in self.refs.values()))
            if twin is None:
                return None
            given = self.materialise(self.refs[id(twin)][1]), tensor.requires_grad
            call = Call("call_function", origin.same_memory, given, hint="same_memory", path=self.at.path)
            call.source, call.depends, call.value = self.at.source(), self.depends(call), meta(tensor)
            call.storages = functions.storages(tensor)
        return self.add(call)

    def check_origin(self, tensor: torch.Tensor) -> None:
        """A constant must not be something that a leaf made: then the leaf is opened.

        Nor what the code that runs made out of torch's sight, unless that is the same for other data.
        """
        if tensor.is_nested:
            self.at.refuse_nested()
        if isinstance(tensor, torch.masked.MaskedTensor):
            self.at.refuse_masked()
        if getattr(tensor, "fake_mode", None) is not None:
            self.at.keep_whole(f"{self.at.source()}: a function is compiled by torch.compile while it runs")
        if self.watched is not None and id(tensor) in self.watched:
            path = self.watched[id(tensor)][1]
            raise OpenLeaf(path, f"a tensor made inside {path} is used outside of it")
        if id(tensor) in self.known:
            return
        if self.watched is None or self.unseen is None:
            raise WatchLeaves
        if id(tensor) not in self.unseen.before and not self.unseen.note(tensor, self.at.source()):
            self.at.keep_whole(
                f"{self.at.source()}: a tensor of shape {list(tensor.shape)} comes by a way that torch does "
                "not show (another thread, numpy, pickle, memory shared by hand) and changes with the inputs",
                self.at.running(),
            )

    def hold_together(self, call: Call, result: Any) -> None:
        """Hand on tuples and lists of a call's tensors as they are: their length may be other next time."""
        for path in paths(flatten(result)[1]):
            value, ref = result, cast(Ref, call)
            for step in path:
                if type(value) in (tuple, list) and id(value) not in self.refs:
                    self.bind(value, ref)
                    self.together[id(value)] = [*map(id, value)]
                value = value[step[1]] if step[0] == "item" else getattr(value, step[1])
                ref = Piece(ref, step, value)

    def attribute(self, target: str, value: Any, depends: int) -> Call:
        """The ``get_attr`` call of a parameter, buffer, constant or flag, made once."""
        if target not in self.attributes:
            call = Call("get_attr", target, hint=target, depends=depends, value=meta(value))
            call.storages, call.is_frozen = functions.storages(value), functions.holds_frozen(value)
            self.attributes[target] = self.add(call)
        return self.attributes[target]

    def constant(self, value: Any) -> str:
        """The name under which the recording keeps a value that fx cannot write down."""
        if id(value) not in self.constant_names:
            name = f"_constant{len(self.constants)}"
            self.constants[name], self.constant_names[id(value)] = value, name
        return self.constant_names[id(value)]

    def materialise(self, ref: Ref) -> Call:
        """The call of a ref; a piece becomes a call when it is first used."""
        if isinstance(ref, Call):
            return ref
        if ref.call is None:
            parent = self.materialise(ref.parent)
            function = operator.getitem if ref.step[0] == "item" else getattr
            call = Call("call_function", function, (parent, ref.step[1]), hint=parent.hint)
            call.path, call.depends, call.region, call.accessor = (
                parent.path,
                parent.depends,
                parent.region,
                True,
            )
            parts, spec = flatten(ref.value)
            call.value = unflatten(spec, map(meta, parts))
            call.storages = frozenset().union(*map(functions.storages, parts))
            call.is_size = isinstance(ref.value, (int, float))
            ref.call = self.add(call)
        return ref.call

    def depends(self, call: Call) -> int:
        out = Depends.NOTHING
        for given in call.inputs:
            out |= given.depends
        return out & ~Depends.NUMBER | Depends.INPUT if out & Depends.NUMBER else out

    def overwrite(self, call: Call) -> None:
        """What lies in memory that a call writes to depends on all that the call does, but for its shape."""
        gained = call.depends & ~Depends.DATA
        for known in self.calls if call.writes else ():
            if not known.storages.isdisjoint(call.writes):
                known.depends |= gained

    def depends_of(self, ref: Ref) -> int:
        while isinstance(ref, Piece):
            ref = ref.parent
        return ref.depends

    def is_computed(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was computed from inputs in this recording."""
        value, ref = self.refs.get(id(tensor), (None, None))
        return value is tensor and ref is not None and bool(self.depends_of(ref) & Depends.INPUT)

    def extent_depends(self, ref: Ref) -> int:
        """What a value's sizes depend on; data too, where data have a say in them."""
        while isinstance(ref, Piece):
            ref = ref.parent
        if not ref.depends & Depends.DATA and ref.depends & UNSAFE:
            with self.at.hushed:
                ref.depends |= Depends.DATA if self.extents.is_by_data(ref) else Depends.NOTHING
        return ref.depends

    def is_lasting(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor was there before the model was run."""
        return id(tensor) in self.known or (self.unseen is not None and id(tensor) in self.unseen.before)

    def is_held(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the model's, and no parameter: a buffer, or one in an attribute."""
        is_the_models = id(tensor) in self.names or id(tensor) in self.known
        return is_the_models and not isinstance(tensor, nn.Parameter)

    # ---------------------------------------------------------------- results

    def adopt_result(self, call: Call, result: Any, written: set[int]) -> Any:
        """Tie the tensors of a call's result to it; what was merely handed through becomes an alias."""
        if isinstance(result, torch.Tensor):
            new = self.adopt(result, call, written)
            call.value, call.storages = meta(new), functions.storages(new)
            return new
        values, spec = flatten(result)
        call.value = unflatten(spec, [meta(v) for v in values])
        pairs = zip(paths(spec), along(spec, values), strict=True)
        owned = [self.adopt_piece(call, path, row, written) for path, row in pairs]
        call.storages = frozenset().union(*(functions.storages(v) for v in owned))
        if all(a is b for a, b in zip(owned, values, strict=True)):
            return result
        return unflatten(spec, owned)

    def adopt(self, tensor: torch.Tensor, ref: Ref, written: set[int]) -> torch.Tensor:
        is_known = id(tensor) in self.refs or id(tensor) in self.names
        if is_known and id(tensor) not in written:
            tensor = _alias(tensor)
        self.bind(tensor, ref)
        return tensor

    def adopt_piece(
        self, call: Call, path: tuple[Step, ...], values: tuple[Any, ...], written: set[int]
    ) -> Any:
        value, ref = values[-1], cast(Ref, call)
        if not isinstance(value, (torch.Tensor, int, float)) or isinstance(value, bool):
            return value
        for step, within in zip(path, values[1:], strict=True):
            ref = Piece(ref, step, within)
        if isinstance(value, torch.Tensor):
            return self.adopt(value, ref, written)
        if not call.depends & Depends.SHAPE or isinstance(value, float):
            return plain(value)
        if not path:
            call.is_size = True
        return track(plain(value), Expression(None, (), plain(value), ref=ref), self.numbers)

    # ---------------------------------------------------------------- arguments

    def encode_call(self, args: Any, kwargs: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """(args, kwargs) as node arguments, and as the plain values to run the call with."""
        with self.at.hushed:
            pairs = [self.encode(a) for a in args]
            named = {k: self.encode(v) for k, v in kwargs.items()}
        encoded = tuple(p[0] for p in pairs), {k: p[0] for k, p in named.items()}
        return encoded, (tuple(p[1] for p in pairs), {k: p[1] for k, p in named.items()})

    def encode(self, value: Any) -> tuple[Any, Any]:
        """A value as a node argument, and as the plain value to run the call with."""
        cls = type(value)
        if cls in _INLINE and not (cls is complex and cmath.isinf(value)):  # which has no literal
            return value, value
        if isinstance(value, torch.Tensor):
            return self.materialise(self.find(value)), value
        if cls is np.ndarray and id(value) in self.refs:
            return self.materialise(self.refs[id(value)][1]), value
        if cls in (TrackedInt, TrackedFloat):
            return self.numbers.number(value.expression), plain(value)
        if cls in (tuple, list) and self.together.get(id(value)) == [*map(id, value)]:
            return self.materialise(self.refs[id(value)][1]), value
        if cls in (tuple, list, torch.Size):
            pairs = [self.encode(v) for v in value]
            make = list if cls is list else tuple
            is_same = all(p[1] is v for p, v in zip(pairs, value, strict=True))
            return make(p[0] for p in pairs), value if is_same else cls([p[1] for p in pairs])
        if cls is dict and all(type(k) is str for k in value):
            named = {k: self.encode(v) for k, v in value.items()}
            is_same = all(p[1] is value[k] for k, p in named.items())
            return (
                {k: p[0] for k, p in named.items()},
                value if is_same else {k: p[1] for k, p in named.items()},
            )
        if cls is slice:
            pairs = [self.encode(v) for v in (value.start, value.stop, value.step)]
            return slice(*(p[0] for p in pairs)), slice(*(p[1] for p in pairs))
        if cls is torch.device:
            follows = value.type == self.device.type and value.index in (None, self.device.index)
            return (self.attribute("_device", value, Depends.NOTHING) if follows else value), value
        if functions.is_numpy_scalar(value):
            return value.item(), value
        return self.encode_object(value), value

    def encode_object(self, value: Any) -> Any:
        """A value fx cannot write down: rebuilt from its tensors, or kept as a constant object."""
        if isinstance(value, nn.Module):
            path = self.at.modules.get(id(value))
            if path is None:
                return self.attribute(self.constant(value), value, Depends.NOTHING)
            if path in self.at.stack:
                self.at.keep_whole(
                    f"{self.at.source()}: a function of torch is given {path or 'the whole model'}, whose "
                    "forward calls it; give it the layers it uses instead"
                )
            return self.attribute(path, value, Depends.STATE)
        if callable(value) and (closure := self.closure(value)) is not None:
            return closure
        leaves, spec = flatten(value)
        if spec is LEAF or not any(isinstance(v, (torch.Tensor, TrackedInt, TrackedFloat)) for v in leaves):
            if not callable(value):
                self.bare.append((value, f"{self.at.path or type(value).__name__}"))
            return self.attribute(self.constant(value), value, Depends.NOTHING)
        call = Call("call_function", Rebuild(spec), tuple(self.encode(v)[0] for v in leaves))
        call.hint, call.path, call.accessor = spec.type.__name__, self.at.path, True
        call.depends = self.depends(call)
        call.value = unflatten(spec, [meta(plain(v)) for v in leaves])
        call.storages = frozenset().union(*(c.storages for c in call.inputs))
        return self.add(call)

    def closure(self, function: Any) -> Call | None:
        """A function around tensors, made anew at each run, or around other things; None for any other."""
        lifted, rebuild = self.lifted(function)
        if not lifted:
            if (as_now := lifting.bound(function)) is None:
                return None
            function, rebuild = as_now, lambda _: as_now
        call = Call("call_function", lifting.Closure(function, rebuild, len(lifted)))
        call.take(tuple(self.encode(v)[0] for v in lifted), {})
        call.hint, call.path, call.source = call.target.__name__, self.at.path, self.at.source()
        call.value, call.depends = function, self.depends(call)
        return self.add(call)

    def lifted(self, function: Any, with_modules: bool = False) -> tuple[list[Any], lifting.Rebuild]:
        """What of the recording a function holds, and what makes it anew around others."""

        def is_lifted(value: Any) -> bool:
            if isinstance(value, nn.Module):
                return with_modules and id(value) in self.at.modules
            return id(value) in self.refs or id(value) in self.names

        with self.at.hushed:
            found, rebuild = lifting.lift(function, is_lifted)
        if any(isinstance(v, nn.Module) and not self.at.modules[id(v)] for v in found):
            name = getattr(function, "__qualname__", type(function).__name__)
            self.at.keep_whole(
                f"{self.at.source()}: {name} reaches the whole model; give it the layers it uses instead"
            )
        return found, rebuild

    def settled(self, spec: Spec) -> Spec:
        """A structure whose keys are plain numbers, held to what they are, where they were made of sizes."""
        keys = tuple(k.settle() if isinstance(k, (TrackedInt, TrackedFloat)) else k for k in spec.keys)
        return dataclasses.replace(spec, keys=keys, children=tuple(map(self.settled, spec.children)))

    def filled(self) -> list[tuple[Any, str]]:
        """Objects without tensors when passed to a call that hold some now: state kept outside the model."""
        return [(value, path) for value, path in self.bare if carries_tensors(value)]


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same values under another object: a view, or a copy in layouts that have none with gradients."""
    if tensor.layout in (torch.strided, torch.jagged):
        return cast(torch.Tensor, torch.ops.aten.alias.default(tensor))
    return tensor.clone() if tensor.requires_grad else tensor.detach()
