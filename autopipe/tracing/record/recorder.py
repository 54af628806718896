"""Runs a model once and records it: leaf modules whole, every other torch call one by one.

What each value is to the recording is left to ``ledger``, what Python asks of values to ``reads``, code that
stays whole to ``opaque_calls``, which modules are leaves to ``leaves``.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ...errors import CaptureError
from ...torch_private import function_modes, pop_function_mode, push_function_mode, weights_forgotten
from ..calls import describe, functions
from ..calls.call import UNSAFE, Call, Depends, Recording, calls_in, meta
from ..calls.module_modes import in_modes
from ..calls.perform import run_call
from ..calls.sharing import Twins
from ..calls.streams import DRAWING
from ..code.leaf_state import Keeping, attributes_left, read_by
from ..code.leaves import Policy, calls_otherwise, eager, is_compiled, is_torchs
from ..code.position import Depth, Position
from ..code.reading import uncounted
from ..code.restart import CloseModule, KeepMode, OpenLeaf
from ..inputs.free_numbers import FreeNumber, is_number, plainly_given
from ..inputs.held_numbers import names_set
from ..inputs.structure import flatten, hides_tensors, marks
from ..inputs.writes import called, numbers_left
from ..members import buffers_in, modules_in
from ..values.branches import Branches
from ..values.ledger import Ledger
from ..values.origin import Unseen
from ..values.reads import Reads
from ..values.tracked import plain
from . import dict_arguments, split_guards
from .bounded import Bounded
from .contexts import Contexts
from .draws import Draws, OwnGenerators, Streams
from .exported_memory import HandedOut
from .foreign import Foreign, Used
from .frozen import Frozen
from .mode_switches import Switched
from .opaque_calls import OpaqueCalls
from .passed_on import PassedOn
from .replaced_buffers import ReplacedBuffers

__all__ = ["Recorder"]

_MADE = "<string>"
"""Where code lies that other code has put together."""
_USUAL = frozenset(
    {
        torch.Tensor,
        nn.Parameter,
        bool,
        int,
        float,
        str,
        type(None),
        tuple,
        list,
        slice,
        torch.dtype,
        torch.device,
    }
)
"""What most arguments of torch's functions are: neither generators nor functions."""


class Recorder(TorchFunctionMode):
    """One run of a model being recorded. ``policy`` decides by path which modules are recorded whole."""

    def __init__(
        self,
        names: Mapping[int, str],
        modules: Mapping[int, str],
        known: frozenset[int],
        device: torch.device,
        policy: Policy,
        training: bool,
        unseen: Unseen | None = None,
        outcomes: Sequence[Any] = (),
        kept: Collection[str] = (),
        by_value: bool = False,
        keeps_numbers: bool = False,
        hooked: Collection[str] = (),
        twins: Twins | None = None,
        moded: Collection[str] = (),
        watched: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.at = Position(modules, policy)
        self.ledger = Ledger(names, known, device, self.at)
        self.branches = Branches(
            self.ledger.calls,
            self.ledger.extent_depends,
            self.ledger.numbers.is_size,
            self.ledger.numbers.stay,
            self.at,
            outcomes,
            kept,
            by_value,
        )
        self.ledger.numbers.branches = self.branches
        self.ledger.watched, self.ledger.unseen = None if unseen is None else {}, unseen
        self.training = training
        self.contexts = Contexts()
        self.draws, self.generators = Draws(device), OwnGenerators()
        self.handed, self.handed_inside = HandedOut(), HandedOut()
        self.foreign, self.passed_on = Foreign(names, self.ledger.is_computed), PassedOn()
        self.streams = Streams(modules, self.look_inside)
        self.reads = Reads(
            self.at, self.ledger, self.branches, self.perform_aside, lambda: self.contexts.sets_grad
        )
        self.reads.keeps_numbers = keeps_numbers
        self.opaque = OpaqueCalls(self.at, self.ledger, self, self.streams.here, self.foreign)
        self.hooked, self.twins, self.moded = hooked, twins, moded
        self.modes, self.frozen = Switched(self.at), Frozen(self.ledger)
        self.buffers, self.bounded = ReplacedBuffers(self.ledger), Bounded(self.ledger)
        self.swapped: set[str] = set()
        self.own: dict[int, tuple[nn.Parameter | None, ...]] = {}
        self.by_data: Collection[str] = ()
        self.leaf_path, self.keeping = "", Keeping(modules, watched)
        self.checkpointed = Depth()
        self.failed: str | None = None
        self.answer: list[Any] = []
        self.before_writes: Callable[[Iterable[nn.Module]], contextlib.AbstractContextManager[Any]]
        self.suspended: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext

    # ---------------------------------------------------------------- running

    def run(
        self,
        model: nn.Module,
        named: Sequence[tuple[str, nn.Module]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        given: Mapping[str, Any],
        depends: int,
        numbers: Collection[str] = (),
    ) -> Recording:
        """Record one call of ``model``, of the modules ``named``; ``given`` names its arguments' tensors.

        ``depends`` is what of them can be other in another call. Those named ``numbers`` stand for the free
        numbers among the arguments, in their order.
        """
        for name, tensor in given.items():
            call = Call("placeholder", name, hint=name, depends=depends)
            call.value, call.storages = meta(tensor), functions.storages(tensor)
            self.ledger.bind(tensor, self.ledger.add(call))
        self.model = model
        self.ledger.numbers.finds_askers = bool(depends & Depends.SHAPE)
        modules = [m for _, m in named]
        self.own = {id(m): tuple(m._parameters.values()) for m in modules}
        self.modes.begin(modules)
        self.frozen.begin(modules)
        opened = [(p, m) for p, m in named if not self.at.is_in_leaf(p)]
        self.keeping.begin(modules, opened)
        self.buffers.begin(named)
        self.bounded.begin(model)
        self.perform_one = lambda call, args, kwargs: run_call(
            model, self.ledger.constants, call, args, kwargs, given, torch.device("cpu")
        )
        sets = names_set(kwargs)
        free = [v for v in flatten((args, kwargs))[0] if isinstance(v, FreeNumber)]
        pairs = zip(free, numbers, strict=True)
        read = iter([self.reads.free_number(given[n], as_float=f.stands_for_float) for f, n in pairs])
        args, kwargs = plainly_given((args, kwargs), lambda _: next(read))
        with self.draws, self:
            result = called(model, args, kwargs, sets)
            self.check_drawn()
        return self.finish(result)

    def finish(self, result: Any) -> Recording:
        for value, path in self.ledger.filled():
            raise CaptureError(
                f"a {type(value).__name__} passed around in {path or 'the model'} collects tensors while the "
                f"model runs, so what one call does depends on earlier ones; call the model without it"
            )
        if (leaf := self.passed_on.leaf()) is not None:
            raise OpenLeaf(
                leaf,
                f"{leaf} and other code put things into a list or dict and take them out again, which stages "
                "on other ranks do not have; hand them over as arguments",
                with_alike=True,
            )
        self.buffers.write(self.model, self.function)
        self.buffers.see_tables()
        self.bounded.end()
        values, spec = flatten(result)
        for value in values:
            _check_output(value)
        with self.at.hushed:
            self.answer = [v.detach() if isinstance(v, torch.Tensor) else plain(v) for v in values]
        self.at.stack = [""]
        spec = self.ledger.settled(spec)
        encoded = tuple(self.ledger.encode(v)[0] for v in values)
        _check_left(numbers_left(spec, values), numbers_left(spec, encoded))
        self.ledger.add(Call("output", "output", (encoded,), hint="output"))
        self.reads.check_numbers()
        self.frozen.check_left()
        self.at.hushed.count = 1
        return Recording(
            self.training,
            self.ledger.calls,
            spec,
            list(self.ledger.numbers.guards.values()),
            self.ledger.constants,
            tuple(self.branches.found),
            self.reads.asked,
            dtypes=self.reads.dtypes,
            flags=self.reads.flags,
            keeps=self.keeping.is_any,
            begun=frozenset(self.keeping.begun),
            swapped=frozenset(self.swapped),
            filled=frozenset(self.keeping.filled),
            goes_by_mode=self.reads.mode or any(c.writes for c in self.ledger.calls),
            reads_mode=self.reads.mode,
            left=(*attributes_left(self.keeping.opened, self.ledger.is_computed), *sorted(self.reads.kept)),
            modes=frozenset((self.training, *each) for each in self.modes.left()),
            replaced=frozenset(self.buffers.names),
            rebuilt=frozenset(self.buffers.tables),
            moved=frozenset(self.bounded.moved),
        )

    def end(self) -> None:
        """Let go of all that was noted: its parts hold one another, and the tensors of the run."""
        self.ledger.refs.clear()
        vars(self).clear()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.at.is_recorded:
            return self.function(func, args, kwargs)
        if func in DRAWING:
            self.streams.note()
        self.look_inside(func, args, kwargs)
        result = func(*args, **kwargs)
        if self.ledger.watched is not None and self.leaf_path:
            self.ledger.watched.update({id(t): (t, self.leaf_path) for t in functions.tensors(result)})
        return result

    def look_inside(self, func: Any, args: Any, kwargs: Any) -> None:
        """A function of torch is called by code that is not recorded."""
        given = kwargs.get("generator") if kwargs else None
        is_given = given is not None and isinstance(given, torch.Generator)
        if is_given and given not in (torch.default_generator, self.draws.own):
            self.opaque.n_anew += 1
        self.handed_inside.note(func, args)
        self.foreign.note(func, args, kwargs)

    # ---------------------------------------------------------------- modules

    def module(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        outermost: bool = False,
    ) -> Any:
        """A module is being called: as a leaf, or with its forward recorded in turn.

        Where its class says itself what a call does, that is the ``outermost`` call, and nn.Module's own one
        within is no leaf.
        """
        path = self.at.modules.get(id(module))
        if path is None:
            return original(*args, **kwargs)
        self.check_drawn()
        is_all = outermost or not calls_otherwise(module)
        if self.at.stack and path and is_all and self.at.is_leaf(path):
            inside = [m for _, m in modules_in(module)]
            if not self.is_swapped(inside):
                with self.keeping.noting_filled() if _hooks_of(inside) else contextlib.nullcontext():
                    with self.at.hushed, self.stepped_aside(), weights_forgotten():
                        result = self.leaf(module, inside, path, original, args, kwargs)
                    if path in self.hooked:
                        self.run_hooks(module, path, args, kwargs, result)
                return result
            if self.at.is_recorded:
                self.swapped.add(path)
        if module._backward_hooks or module._backward_pre_hooks:
            raise CloseModule(
                path, f"{path or type(module).__name__} has backward hooks, which need it whole"
            )
        self.at.stack.append(path)
        try:
            result = original(*args, **kwargs)
            self.check_drawn()
            return result
        except Exception:
            self.failed = path if self.failed is None else self.failed
            raise
        finally:
            self.at.stack.pop()

    def check_drawn(self) -> None:
        """Open code must not draw from generators of the model's own: a graph would keep what it drew first.

        Or the way that this led it. Other calls of it tell little, as few draws may well lead them alike.
        """
        if self.at.is_recorded and (drawn := self.generators.drawn()):
            self.at.keep_whole(
                f"the code of {self.at.path or 'the model itself'} draws from {min(drawn)}, a random "
                "generator of its own, and a graph would keep what it drew first"
            )

    def run_hooks(self, module: nn.Module, path: str, args: Any, kwargs: Any, result: Any) -> None:
        """What forward hooks keep of a leaf's result is kept of the recorded one."""
        for key, hook in list(module._forward_hooks.items()):
            takes_kwargs = key in module._forward_hooks_with_kwargs
            given = (module, args, kwargs, result) if takes_kwargs else (module, args, result)
            if hook(*given) is not None:
                raise CloseModule(
                    path.rpartition(".")[0], f"a hook of {path} both keeps and changes its result"
                )

    def is_swapped(self, inside: list[nn.Module]) -> bool:
        """Whether modules run with other parameters than their own (``torch.func.functional_call``)."""
        own, none = self.own, itertools.repeat(None)  # for those that were not there
        held = ((m._parameters.values(), own.get(id(m)) or none) for m in inside if m._parameters)
        return any(p is not q for now, before in held for p, q in zip(now, before, strict=False))

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
        modes, frozen = self.modes.of(inside), self.frozen.inside(module)
        if (modes is not None or frozen) and path not in self.moded:
            raise KeepMode(path)
        self.opaque.check_leaf(path, inside, (args, kwargs))
        encoded, actual = self.ledger.encode_call(args, kwargs)
        call = Call("call_module", path, *encoded, hint=path, path=path, source=self.at.source())
        if path in self.moded:
            call.op, call.target = "call_function", in_modes
            held = self.ledger.attribute(path, module, Depends.STATE)
            call.take((held, modes, frozen, *call.args), call.kwargs)
        weights = [p for m in inside for p in m._parameters.values() if p is not None]
        self._note_state(call, weights, inside)
        has_buffers = any(m._buffers for m in inside)
        with self.at.hushed:
            buffers = functions.Versions.of_buffers(dict(buffers_in(module, path)) if has_buffers else {})
        compiled = any(map(is_compiled, inside))
        run = functools.partial(type(module).__call__, module) if compiled else original
        gave: list[Any] = []

        def run_leaf(*args: Any, **kwargs: Any) -> Any:
            around = self.suspended() if compiled else self.before_writes(own_code)
            with self.inside_leaf(path, compiled), around:
                gave.append(run(*args, **kwargs))
            return gave[0]

        own_code = [] if all(map(is_torchs, inside)) else inside
        call.stream = self.streams.of_module(path, inside)
        given = dict_arguments.dicts(args, kwargs, actual, first=3 if path in self.moded else 0)
        twins = None if compiled else self.twins
        key = copied = None
        if twins is not None:
            surroundings = self.contexts.region(), torch.is_grad_enabled(), frozen
            key = twins.key(path, inside, surroundings, actual)
            copied = twins.copy(key)
        counts = self.streams.counts.copy()
        before, hooks = self.keeping.before(path, inside), _hooks_of(inside)
        self.passed_on.note("")
        own = {id(t) for t in (*weights, *functions.tensors((args, kwargs)))}
        outside = self.opaque.drawn_outside()
        self.foreign.hand(path, actual)
        with self.foreign.to(own, actual) as foreign:
            result = self.perform(call, copied or run_leaf, actual)
        call.derives = foreign.takes_derivatives
        is_outside = self.opaque.note_outside(call, outside)
        if twins is not None and copied is not None and key in twins.drawn:
            self.streams.count(inside, twins.drawn[key])
            call.is_random, call.depends = True, call.depends | Depends.RANDOM
        has_filled = self.passed_on.note("" if path in self.hooked else path)
        _check_alone(call, inside, foreign, actual, result)
        call.keeps = self.keeping.after(path, inside, before)
        call.shares |= self.keeping.on_classes
        if hooks != _hooks_of(inside):  # as one does that takes itself away
            self.keeping.begun.add(path)
        dict_arguments.refilled(self.ledger, call, given)
        call.mutated = self.changed(buffers, module, path)
        if not (isinstance(result, torch.Tensor) or module._forward_hooks):
            call.uncounted = uncounted(module, call.value)
        is_own = is_outside or call.shares or call.draws_anew or call.derives or has_filled
        if twins is not None and key is not None and copied is None and not is_own:
            draws = self.streams.since(counts, inside)
            if draws is not None:
                twins.keep(key, call, result, actual, draws if call.is_random else None)
        return dict_arguments.handed_back(gave[0], result, given) if gave and given else result

    def _note_state(self, call: Call, weights: list[nn.Parameter], inside: list[nn.Module]) -> None:
        """Note what the call of a leaf with these weights hangs on, and how it runs."""
        call.recompute = self.checkpointed.count > 0
        has_state = bool(weights) or any(b is not None for m in inside for b in m._buffers.values())
        call.depends = self.ledger.depends(call) | (Depends.STATE if has_state else Depends.NOTHING)
        call.depends |= Depends.DATA if call.path in self.by_data else Depends.NOTHING
        call.is_frozen = functions.is_any_frozen(weights)

    def changed(self, before: functions.Versions, module: nn.Module, path: str) -> tuple[str, ...]:
        """The buffers of ``module`` that are not as they were."""
        if not before.entries:
            return ()
        with self.at.hushed:
            found = [*before.changed(module, path, self.training)]
        return tuple(dict.fromkeys(self.ledger.names.get(id(b), n) for n, b in found))

    @contextlib.contextmanager
    def stepped_aside(self) -> Iterator[None]:
        """What is done meanwhile does not come by this mode, unless another one was entered since."""
        is_top = function_modes()[-1:] == [self]
        if is_top:
            pop_function_mode()
        try:
            yield
        finally:
            if is_top:
                push_function_mode(self)

    @contextlib.contextmanager
    def inside_leaf(self, path: str, compiled: bool) -> Iterator[None]:
        """A leaf runs as it will run later, without export flags; its draws are counted, or it is watched."""
        self.leaf_path = path
        flags = functions.ExportFlags.read()
        functions.ExportFlags(False, False).write()
        comes_by = self in function_modes()
        mode = self if self.ledger.watched is not None else self.streams
        nothing = contextlib.nullcontext()
        try:
            with (
                self.foreign.running(path),
                nothing if compiled else eager(),
                nothing if compiled or comes_by else mode,
            ):
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
            return self.reads.metadata(name, func, args, kwargs)
        if self.frozen.is_set(func, args):
            return self.frozen.set(func, args, kwargs)
        if func is torch.Tensor.backward:
            self.opaque.refuse_backward()
        if func is torch.Tensor.__deepcopy__:
            func, args = copy.deepcopy, args[:1]  # what it was told of other copies is not for a graph
        if func is torch.Tensor.new and len(args) == 2 and isinstance(args[1], torch.Size):
            args = args[0], *args[1]  # a graph has tuples for sizes, which are data here
        unusual = [v for v in (*args, *kwargs.values()) if type(v) not in _USUAL]
        for value in unusual:
            if isinstance(value, torch.Generator) and value is not torch.default_generator:
                self.at.keep_whole(
                    f"{self.at.source()}: {name} draws from a generator of the model's own, which a graph "
                    "does not seed anew"
                )
        if any(map(callable, unusual)):
            self.opaque.check_functions(name, unusual)
        encoded, actual = self.ledger.encode_call(args, kwargs)
        call = functions.as_call(func, *encoded)
        call.path, call.source = self.at.path, self.at.source()
        if call.source.startswith(_MADE):
            self.at.keep_maker()
        call.depends, call.derives = self.ledger.depends(call), func is torch.autograd.grad
        if kind == "shape only":  # but what it is filled with may be data
            given = calls_in((call.args[1:], call.kwargs))
            call.depends &= ~(Depends.INPUT | Depends.RANDOM | Depends.STATE)
            call.depends |= functools.reduce(operator.or_, (c.depends for c in given), Depends.NOTHING)
        elif kind == "data shaped" or functions.selects_by_mask(name, actual[0]):
            call.depends |= Depends.DATA if call.depends & UNSAFE else Depends.NOTHING
        self.handed.note(func, args)
        if kind == "read":
            return self.reads.read(call, name, func, actual)
        if name == "unbind":  # what iterating over a tensor comes down to
            self.ledger.iterated(call, len(actual[0][0]))
        split_guards.hold(self.ledger, name, args, kwargs)
        if functions.takes_numpy(actual) and not self.ledger.knows_arrays(actual):
            return self.outside_numbers(func, actual)
        self.reads.tried(call, name, actual[0])
        if self.bounded.writes(name, actual):
            return self.bounded.write(func, name, (args, kwargs), self.function)
        return self.perform(call, func, actual)

    def perform_aside(self, call: Call, args: Any, kwargs: Any) -> Any:
        """What a recorded call gives, performed once more outside of the recording."""
        with self.stepped_aside():
            result = self.perform_one(call, args, kwargs)
        self.generators.drawn()
        return result

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

    # ---------------------------------------------------------------- performing

    def perform(self, call: Call, run: Callable[..., Any], actual: Any) -> Any:
        """Run a call for real, note what it did, and tie its results to it."""
        self.check_drawn()
        with self.at.hushed:
            return self._perform(call, run, actual)

    def _perform(self, call: Call, run: Callable[..., Any], actual: Any) -> Any:
        call.region = self.contexts.region()
        before = functions.Versions.of(dict(enumerate(functions.tensors(actual))), self.ledger.is_held)
        if run in DRAWING:
            call.stream = self.streams.here()
            self.streams.note()
        args, kwargs = functions.on_one_device(actual) if self.ledger.device.type == "meta" else actual
        self.handed_inside.forget()
        unsaid_before, n_anew = self.handed.written(), self.opaque.n_anew
        result = run(*args, **kwargs)
        call.shares, call.draws_anew = self.generators.drawn(), self.opaque.n_anew != n_anew
        if isinstance(result, torch.Tensor) and result.is_nested:
            self.at.refuse_nested()
        call.is_random = self.draws.drawn()
        if call.is_random:
            call.depends |= Depends.RANDOM
            call.stream = call.stream or self.streams.here()
        written, call.frees = before.written(), before.freed
        if call.frees:
            self._check_freed(call)
        if functions.changes_itself(call) and isinstance(result, torch.Tensor):
            written.append(result)
        if self.handed.written() - unsaid_before:
            self.at.keep_whole(f"{call.source}: writes to a tensor that it is not given, by numpy")
        if unsaid := self.handed_inside.written():
            written += (t for t in functions.tensors(actual) if unsaid & functions.storages(t))
        call.reads = before.storages
        call.writes = call.writes.union(before.left, *(functions.storages(t) for t in written))
        self.ledger.overwrite(call)
        return self.ledger.adopt_result(self.ledger.add(call), result, {id(t) for t in written})

    def _check_freed(self, call: Call) -> None:
        """Raise :class:`CaptureError` where a call gives back memory of the caller's, who has it still."""
        given = (c for c in self.ledger.calls if c.op == "placeholder" and c.storages & call.frees)
        for name in (c.target for c in given):
            raise CaptureError(
                f"{call.source}: {describe.expression(call)} gives back the memory of the input {name}, "
                f"which calls, microbatches and the caller read again; hand on a copy of it: {name}.clone()"
            )


def _check_alone(call: Call, inside: Sequence[nn.Module], foreign: Used, actual: Any, result: Any) -> None:
    """Raise :class:`OpenLeaf` for a leaf that has or gives what no stage could that holds it alone.

    ``foreign`` is what it used of others, ``actual`` its arguments.
    """
    path = call.path
    if foreign.derives:
        raise OpenLeaf(
            path,
            f"{call.source}: {path} takes a derivative through what other code has made of what it is given, "
            "which a stage that holds it alone does not reach; make all of that inside of it",
        )
    if foreign.taken is not None:
        raise OpenLeaf(
            path,
            f"{call.source}: {path} takes a tensor of shape {list(foreign.taken.shape)} that other code has "
            "made, by a list, an attribute or a global, which another stage would not have; hand it over as "
            "an argument",
            with_alike=True,
        )
    if foreign.names:
        raise OpenLeaf(
            path,
            f"{call.source}: {path} uses {', '.join(foreign.names)}, which another layer has, by a list, a "
            "function or a hook; a stage with the one alone would go by old values of the other: hand it "
            "over as an argument, or register the layer that has it in both",
        )
    taken = [name for t in functions.tensors(actual) for name in marks(t)]
    if taken:
        read = frozenset().union(*(read_by(cls) for cls in {*map(type, inside)}))
        taken = [name for name in taken if name in read]
    for name in (*taken, *(name for t in functions.tensors(result) for name in marks(t))):
        raise OpenLeaf(
            path,
            f"{call.source}: {path} takes or gives a tensor with another as its attribute {name!r}, "
            "which is lost where a stage hands it on; return it beside",
        )


def _hooks_of(inside: Sequence[nn.Module]) -> list[tuple[int, ...]]:
    """The forward hooks of those modules that have any, by their numbers, behind the module's id."""
    hooked = (m for m in inside if m._forward_hooks or m._forward_pre_hooks)
    return [(id(m), *m._forward_pre_hooks, *m._forward_hooks) for m in hooked]


def _check_left(values: Mapping[str, Any], encoded: Mapping[str, Any]) -> None:
    """Raise :class:`CaptureError` where what a forward leaves in an attribute that counts is of data."""
    for name, value in values.items():
        made = encoded[name]
        if not is_number(plain(value)) or (isinstance(made, Call) and _is_of_data(made)):
            raise CaptureError(
                f"a forward goes by what the call before has left in self.{name}, and leaves there what is "
                "made of data; keep it in a buffer, as a tensor that it writes to"
            )


def _is_of_data(call: Call) -> bool:
    """Whether a number is made of more than numbers among the inputs and sizes of these."""
    waiting, seen = [call], {id(call)}
    while waiting:
        each = waiting.pop()
        if each.op == "call_method" and each.is_size and each.inputs[0].op == "placeholder":
            continue
        if each.op not in ("call_method", "call_function") or not each.is_size:
            return True
        waiting += [c for c in each.inputs if id(c) not in seen]
        seen.update(map(id, each.inputs))
    return False


def _check_output(value: Any) -> None:
    if (callable(value) and hasattr(value, "gi_frame")) or hasattr(value, "__next__"):
        raise CaptureError(
            f"the model returns a {type(value).__name__}, which can be read only once; return a tuple or list"
        )
    if hides_tensors(value):
        raise CaptureError(
            f"the model returns a {type(value).__name__}, whose tensors cannot be followed; return a tuple, "
            "a list, a dict or a dataclass"
        )
