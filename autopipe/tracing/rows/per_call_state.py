"""What a training forward writes in its model as often as it is called: counts, averages, power iterations.

Cut into microbatches a batch is several calls, which leave such things otherwise than one does, or go by what
the one before has left, as by a queue of keys. That rows of one call depend on one another is left to
``mixing``, telling people to ``capture`` and ``runtime``.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ...graph import Dim, batch_dim
from ..calls.call import Call, Recording
from ..calls.describe import call_and_place
from ..calls.faults import of_models
from ..calls.functions import tensors
from ..calls.likeness import is_equal
from ..code.leaf_state import values_of_class
from ..code.leaves import is_atomic
from ..code.own_code import OwnCode
from ..inputs.held_numbers import names_inside, numbers_of
from ..members import registered, submodule
from ..sizes.guards import broken
from ..sizes.rerun import buffers_written, replay
from ..sizes.variation import Variation
from ..state.example_data import close_to, projected
from ..state.reach import state_of
from ..state.state import seed
from .results import EQUAL, SLIGHT, is_close, run_until

__all__ = [
    "CallsInTurn", "by_backward", "by_call", "by_gradients", "carried_by", "carriers", "movers",
]  # fmt: skip

_logger = logging.getLogger("autopipe")
_AWAY = 1.25
_FURTHER = 15
"""So many times more calls like one are taken to have moved what it has moved."""
_WRITES_NOTHING = frozenset({"requires_grad_"})
"""Methods whose names end as those do that write in place."""
_WRITING = frozenset({"data", "numpy", "step"})
"""Names of what writes to weights behind torch's back, or may: an optimizer's step among it."""
_OF_GRADIENTS = frozenset({"grad", "zero_grad"})
_T = TypeVar("_T")
_Look = Callable[["CallsInTurn"], _T]


class CallsInTurn:
    """A ``form`` called on batches one after another, in ``training`` or not; ``start`` sets mode and state.

    ``is_unchanged`` tells whether all is as it set it but for large weights: False where that is not known;
    ``is_moved`` whether runs in this mode were seen to leave anything otherwise, likewise.
    ``generators``, by name, are random ones of the model's own, which draw in code that stays whole.

    Attributes
    ----------
    writing: the calls that may write to weights behind torch's back. carrying: see :func:`carriers`.
    asking: those that stay whole and name gradients, of weights or others, as a text too.
    """

    def __init__(
        self,
        code: OwnCode,
        form: Recording,
        given: Mapping[str, Tensor],
        variation: Variation,
        device: torch.device,
        start: Callable[[bool], None],
        is_unchanged: Callable[[], bool] = lambda: False,
        generators: Sequence[tuple[str, Any]] = (),
        *,
        training: bool = True,
        is_moved: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_unchanged, self._is_moved, self.generators = is_unchanged, is_moved, generators
        self.model, self.form, self.given, self._device = code.model, form, given, device
        self._start, self._training = functools.partial(start, training), training
        self.dim, self.variation = batch_dim(variation.dims), variation
        self.written = buffers_written(code.model, [form])
        self.writing = [c for c in form.calls if _may_write(code, c)]
        self.carrying = carriers(code, form)
        self._has_own = any(map(code.is_own, form.calls))
        self.asking = [
            c
            for c in form.calls
            if code.is_own(c) and not _OF_GRADIENTS.isdisjoint(code.names(c) | code.texts(c))
        ]
        self._weights = [*_weights_of(code.model, self.writing)]

    def after(self, *batches: Mapping[str, Tensor]) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """What some batches leave, by name, and what the last of them gives.

        Averages that have come where they lead, as one of weights begins as these, are put off that.
        """
        self._begin()
        result = self.run(*batches)
        return self.held(self._weights), result

    def _begin(self) -> None:
        self._start()
        for buffer in (b for n, b in self.model.named_buffers() if n in self.written):
            if buffer.is_floating_point():
                buffer.mul_(_AWAY)

    def held(self, weights: Sequence[str]) -> dict[str, Any]:
        """A copy of every buffer, of some ``weights`` and of what attributes hold; where generators are."""
        return {**dict(_held(self.model, weights)), **{n: str(state_of(g)) for n, g in self.generators}}

    def run(self, *batches: Mapping[str, Tensor]) -> tuple[Any, ...]:
        """What the last of some batches gives."""
        result: tuple[Any, ...] = ()
        for batch in batches:
            seed(self._device)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seen = replay(self.model, self.form, batch, self._device)
            if any(broken(g, seen.numbers) for g in self.form.guards if id(g) in self.variation.unsure):
                raise _Otherwise
            result = seen.result
        return result

    def with_gradients(
        self, weights: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """What the batch given gives where weights have these gradients, and by what those would grow."""
        self._start()
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        with torch.enable_grad():
            made = tensors(self.run(self.given))
            return [*made, *projected(made, weights)]

    @functools.cached_property
    def other(self) -> Mapping[str, Tensor]:
        """Other rows than those given, as many."""
        assert self.dim is not None
        return _other_rows(self.given, self.dim)

    def after_much(self) -> tuple[Any, ...]:
        """What other rows give behind the rows given, as if these had moved every buffer by far more.

        A limit that hangs on counts or averages of calls may be passed then.
        """
        self._begin()
        before = {n: b.detach().clone() for n, b in self.model.named_buffers() if n in self.written}
        self.run(self.given)
        for name, buffer in self.model.named_buffers():
            if name in before and buffer.is_floating_point() and buffer.shape == before[name].shape:
                buffer.add_(buffer - before[name], alpha=_FURTHER)
        return self.run(self.other)

    @functools.cached_property
    def in_turn(self) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """See :meth:`after`: of the rows given, and then of others."""
        return self.after(self.given, self.other)

    @functools.cached_property
    def is_moved(self) -> bool:
        """Whether calls were seen to leave anything otherwise, as code in layers that stay whole may."""
        return self._has_own and self._is_moved()

    @functools.cached_property
    def may_leave(self) -> bool:
        """Whether a call may leave anything: not where it only names what writes, and two leave nothing.

        Nothing can be told on the meta device.
        """
        if self.dim is None or self.dim.packed or self._device.type == "meta":
            return False
        if not self._training:
            return self.is_moved
        if (
            self.form.keeps
            or self.written
            or self.generators
            or not self.carrying <= {c.name for c in self.writing}
        ):
            return True
        if not self.writing:
            return self.is_moved
        try:
            if self._leaves_all():
                return False
            before, left = self.after()[0], self.in_turn[0]
        except of_models() as error:  # any Python of the model, on rows it may not take
            _logger.debug("what a forward leaves could not be looked at: %s", error)
            return True
        return before.keys() != left.keys() or not all(is_equal(before[n], left[n]) for n in left)

    def _leaves_all(self) -> bool:
        """Whether two batches are seen to leave everything as it was, once all that may write has run."""
        weights = [registered(self.model, name) for name in self._weights]
        self._start()
        before = [weight.detach().clone() for weight in weights]
        for batch in (self.given, self.other):
            self._run_writing(batch)
        return self._is_unchanged() and all(map(is_equal, before, weights))

    def _run_writing(self, batch: Mapping[str, Tensor]) -> None:
        """Run the form on a batch until the last call has run that may write."""
        numbers: dict[int, Any] = {}

        def look(call: Call, value: Any) -> None:
            if isinstance(value, (int, float)):
                numbers[id(call)] = value

        def run(_: str, look: Callable[[Call, Any], Any]) -> None:
            replay(self.model, self.form, batch, self._device, look=look)

        seed(self._device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_until(run, "", self.writing[-1], look)
        for guard in self.form.guards:
            is_met = all(id(o) in numbers for o in guard.operands if isinstance(o, Call))
            if is_met and id(guard) in self.variation.unsure and broken(guard, numbers):
                raise _Otherwise


def _looked_at(what: str, otherwise: _T) -> Callable[[_Look[_T]], _Look[_T]]:
    """Makes a look at a model answer ``otherwise`` where rows take another way, or its code fails."""

    def decorated(look: _Look[_T]) -> _Look[_T]:
        @torch.no_grad()
        @functools.wraps(look)
        def run(calls: CallsInTurn) -> _T:
            try:
                return look(calls)
            except _Otherwise:
                return otherwise
            except of_models() as error:  # any Python of the model, on rows it may not take
                _logger.debug("%s could not be looked at: %s", what, error)
                return otherwise

        return run

    return decorated


@_looked_at("what a forward writes", tuple[str, ...]())
def by_call(calls: CallsInTurn) -> tuple[str, ...]:
    """The buffers and numbers, by name, that two batches leave otherwise than one of all their rows does.

    Weights that are written behind torch's back are among them. Nothing is found where the form is not right
    for twice the rows of the batch.
    """
    dim, given = calls.dim, calls.given
    # what a layer that stays whole keeps for its next call is written, too
    may_write = calls.form.keeps or calls.writing or calls.written or calls.generators or calls.is_moved
    is_asked = calls.may_leave and may_write
    if dim is None or not is_asked or not calls.variation.takes_rows(2 * dim.example):
        return ()
    found = _left_otherwise(calls, given, calls.in_turn[0])
    if {*calls.written} <= {*found}:
        return found
    # signs and other steps of two unlike batches may come to one of both, those of the same twice do not
    twice = _left_otherwise(calls, calls.other, calls.after(calls.other, calls.other)[0])
    return tuple(dict.fromkeys((*found, *twice)))


def _left_otherwise(
    calls: CallsInTurn, first: Mapping[str, Tensor], apart: Mapping[str, Any]
) -> tuple[str, ...]:
    """What a ``first`` batch and the other rows leave in one call otherwise than ``apart``, by name."""
    assert calls.dim is not None
    both = dict(first)
    where = calls.dim.where
    both.update({n: torch.cat([first[n].detach(), calls.other[n]], axis) for n, axis in where})
    at_once = calls.after(both)[0]
    close = [n for n, value in at_once.items() if _is_same(value, apart.get(n), EQUAL)]
    is_off = {n for n in close if not _is_same(at_once[n], apart[n], SLIGHT)}
    one = calls.after(first)[0] if is_off else {}
    # what is the same to the last digit after any one call goes by their number, not by how rows add up
    alike = {n for n in close if n not in is_off or not is_equal(at_once[n], one.get(n))}
    found = [name for name in at_once if name not in alike]
    # what the same call leaves otherwise each time, as how long it took, goes by no number of calls
    again = calls.after(both)[0] if found else {}
    return tuple(name for name in found if _is_same(at_once[name], again.get(name), EQUAL))


@torch.no_grad()
def carried_by(calls: CallsInTurn) -> str:
    """In words, what a second call goes by that the first one has left; or nothing.

    Where anything may carry it: what a batch gives is to be the same behind another.
    """
    if not ((calls.carrying or calls.is_moved) and calls.may_leave):
        return ""
    try:
        if _gives_same(calls.in_turn[1], calls.after(calls.other)[1]) and not _goes_by_much(calls):
            return ""
    except _Otherwise:
        _logger.debug("a second call goes another way than the first")
    except of_models() as error:  # any Python of the model, on rows it may not take
        _logger.debug("what a second call goes by could not be looked at: %s", error)
        return ""
    paths = sorted({c.path for c in calls.form.calls if c.name in calls.carrying})
    names = [*calls.written] or paths or ["something"]
    return f"one call leaves {', '.join(names[:3])} for the next, which goes by it"


def _gives_same(behind: Any, alone: Any) -> bool:
    pairs = zip(tensors(behind), tensors(alone), strict=True)
    return bool(behind or alone) and all(a.shape == b.shape and is_close(a, b, EQUAL) for a, b in pairs)


@_looked_at("what many calls leave", False)
def _goes_by_much(calls: CallsInTurn) -> bool:
    """Whether a call gives something else once what calls write has moved far; not if that is no number."""
    if not (calls.carrying and calls.written):
        return False
    behind, alone = calls.after_much(), calls.after(calls.other)[1]
    return all(bool(t.isfinite().all()) for t in tensors(behind)) and not _gives_same(behind, alone)


@_looked_at("whether a forward goes by gradients", "")
def by_gradients(calls: CallsInTurn) -> str:
    """In words, what goes by the gradients that weights have when a forward begins, or takes them away.

    So may its backward, by hooks. A microbatch has those of others. Nothing on the meta device.
    """
    if calls.dim is None or not calls.asking:
        return ""
    weights = [p for p in calls.model.parameters() if p.requires_grad and not p.is_meta]
    kept, words = [p.grad for p in weights], f"{call_and_place(calls.asking[0])} goes by gradients of weights"
    try:
        without = calls.with_gradients(weights, [None] * len(weights))
        given = [torch.ones_like(p) for p in weights]
        behind = calls.with_gradients(weights, given)
        left = all(p.grad is g and bool((g == 1).all()) for p, g in zip(weights, given, strict=True))
        pairs = zip(behind, without, strict=True)
        is_alike = all(
            a is b or (a is not None and b is not None and _is_same(a, b, EQUAL)) for a, b in pairs
        )
        return "" if left and is_alike else words
    except _Otherwise:
        return words
    finally:
        for weight, gradient in zip(weights, kept, strict=True):
            weight.grad = gradient


@_looked_at("what a backward leaves", (tuple[str, ...](), ""))
def by_backward(calls: CallsInTurn) -> tuple[tuple[str, ...], str]:
    """What a backward leaves in buffers and attributes, by name; in words, that a forward goes by it, or "".

    As a hook on gradients does that counts. Microbatches leave it each, some before others have begun.
    """
    weights = [p for p in calls.model.parameters() if p.requires_grad]
    _, plain = calls.after(calls.given), calls.run(calls.given)
    calls.after()
    with torch.enable_grad():
        made = calls.run(calls.given)
        before = calls.held(())
        projected(tensors(made), weights)
    left = calls.held(())
    names = tuple(n for n, value in left.items() if not _is_same(value, before.get(n), SLIGHT))
    pairs = zip(tensors(calls.run(calls.given)), tensors(plain), strict=True) if names else ()
    is_read = any(a.shape != b.shape or not is_close(a, b, EQUAL) for a, b in pairs)
    words = f"a forward goes by {', '.join(names[:3])}, as the backward before left it"
    return names, words if is_read else ""


def movers(form: Recording) -> list[Call]:
    """The calls that write to parameters which are otherwise after each call of a form."""
    held = (c.storages for c in form.calls if c.op == "get_attr" and c.target in form.moved)
    places = frozenset[int]().union(*held)
    return [c for c in form.calls if c.op not in ("get_attr", "output") and c.writes & places]


def carriers(code: OwnCode, form: Recording) -> frozenset[str]:
    """The calls, by name, that may carry something from one run of a form to the next.

    These touch a buffer or tensor of the model's that the form writes, or are of code kept whole that writes
    to one, keeps something or may write to its weights. Torch's own layers without hooks are none: what they
    write in training, as batch norm does, they do not read.
    """
    own = [
        c
        for c in form.calls
        if c.op != "call_module" or c.path in form.begun or not _is_plain(submodule(code.model, c.target))
    ]
    written = frozenset[int]().union(*(c.writes for c in own))
    held = {str(c.target): c.storages for c in form.calls if c.op == "get_attr"}
    state = written & frozenset[int]().union(*held.values())
    state = state.union(*(held.get(name, ()) for c in own for name in c.mutated))

    def may_carry(call: Call) -> bool:
        keeps = call.op == "call_module" and (call.keeps or call.path in form.begun)
        touches = bool((call.storages | call.reads | call.writes) & state)
        return bool(call.mutated) or keeps or touches or _may_write(code, call)

    return frozenset(c.name for c in own if c.op not in ("get_attr", "output") and may_carry(c))


def _weights_of(model: nn.Module, calls: Sequence[Call]) -> Iterator[str]:
    """The weights, by name, of the layers that are called."""
    for path in {str(c.target): None for c in calls}:
        yield from (f"{path}.{n}".lstrip(".") for n, _ in submodule(model, path).named_parameters())


def _may_write(code: OwnCode, call: Call) -> bool:
    """Whether code of a layer that stays whole, or its hooks', names what writes, as in place or ``out=``."""
    if call.op != "call_module":
        return False
    names = code.names(call) - _WRITES_NOTHING
    is_named = any(n in _WRITING or (n.endswith("_") and not n.startswith("_")) for n in names)
    return is_named or "out" in code.texts(call)


def _is_plain(module: nn.Module) -> bool:
    return is_atomic(module) and not (module._forward_pre_hooks or module._forward_hooks)


def _other_rows(given: Mapping[str, Tensor], dim: Dim) -> dict[str, Tensor]:
    """The tensors with each of their first rows twice, floats less each time: they come to another mean."""
    out = dict(given)
    for name, axis in dim.where:
        n = given[name].shape[axis]
        places = torch.arange(n - 1, -1, -1, device=given[name].device) // 2
        chosen = given[name].detach().index_select(axis, places)
        if chosen.is_floating_point():
            shares = torch.linspace(1, 0.5, n, device="cpu").to(chosen)
            chosen = chosen * shares.view(-1, *[1] * (chosen.ndim - axis - 1))
        out[name] = chosen
    return out


def _is_same(a: Any, b: Any, allowed: Mapping[torch.dtype, float]) -> bool:
    """Equal up to rounding, which in fp64 is far less than a step of a power iteration that has converged."""
    return close_to(a, b) and (not isinstance(a, Tensor) or is_close(a, b, allowed))


class _Otherwise(Exception):
    """The model goes another way on these rows."""


def _held(model: nn.Module, weights: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """A copy of every buffer and of some ``weights``, and the numbers, tensors and arrays in attributes."""
    yield from ((name, buffer.detach().clone()) for name, buffer in model.named_buffers())
    own = dict(model.named_parameters())
    yield from ((name, own[name].detach().clone()) for name in weights if name in own)
    for path, module in model.named_modules():
        for name, value in {**values_of_class(type(module)), **vars(module)}.items():
            shown = f"{path}.{name}".lstrip(".")
            if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
                yield shown, torch.from_numpy(value.copy())
            elif isinstance(value, (int, float, Tensor)) and name != "training":
                yield shown, value.detach().clone() if isinstance(value, Tensor) else value
            elif not name.startswith("_"):
                yield from numbers_of(model, names_inside(shown, value)).items()
