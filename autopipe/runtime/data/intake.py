"""Takes in what a call brings: binds arguments, cuts the batch, weighs its pieces, or gets it from the feed.

Cutting is left to ``microbatch``, weighing to ``weights``, what goes between ranks to ``feed``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import torch
from torch import Tensor

from ...errors import InputError
from ...stages import Section, Stage
from ...tracing.inputs.held_numbers import divided, placed
from ...tracing.inputs.structure import flatten
from ..options import Options, Request
from ..wire.peers import Peers
from .call_kinds import Kind, Kinds
from .feed import Feed
from .input_gradients import tracked
from .microbatch import Batch, Cut, content, with_forms
from .weights import Bound

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["BATCHES", "Forms", "Intake", "WeightedBatch", "drawn", "is_torchs"]

BATCHES = (
    "give a list of batches, each a mapping of step()'s keyword arguments, such as {'x': x, 'target': y}, or "
    "a tuple of its positional ones"
)


@dataclasses.dataclass(frozen=True, slots=True)
class WeightedBatch:
    """A batch in microbatches.

    ``weights`` says what each weighs, ``counted`` what they counted together. ``inputs`` are those of the
    caller's tensors that require a gradient.
    """

    batch: Batch
    weights: Sequence[float | Tensor]
    counted: float | None
    inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


Calls = Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
"""(positional, keyword arguments) of each of several batches."""


class Counted(msgspec.Struct, frozen=True):
    """How many batches a rank was given, or why one does not fit; of the one that feeds, what each counts."""

    n: int
    counts: list[float | None] = []
    fault: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """A form of calls: where each input is among what is given, in the model's order, and how it is cut."""

    form: tuple[Any, ...]
    places: Mapping[str, int]
    cut: Cut


def _known(form: tuple[Any, ...], given: Sequence[Any], batch: Batch) -> _Known | None:
    """What is known of calls of this form; None where values decide how they are cut, or one is left out."""
    name_of = {id(value): name for name, value in batch.given.items()}
    names = [name_of.get(id(value), "") for value in given]
    is_whole = len(name_of) == len(batch.given) and sorted(names) == sorted(batch.given)
    if batch.cut is None or batch.packed or batch.forms or not is_whole:
        return None
    return _Known(form, {name: names.index(name) for name in batch.given}, batch.cut)


class Forms(Protocol):
    """Which kind of call is made, and which forms of the model it asks for: what there is not it records."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
        """A call's kind, and its inputs by name."""

    def binds_alike(self) -> bool:
        """Begin a call as :meth:`bind` does; whether that would name its inputs as in the last alike call."""

    def meet(self, batch: Batch) -> Batch:
        """The batch with the forms that it asks for."""

    def meet_form(self, kind: int, inputs: Mapping[str, Any]) -> int:
        """The number of the form that inputs of a kind ask for."""

    def renew(self) -> None:
        """Have stages run forms that are new, once every rank has the batch: it may be refused on one."""

    def check_rows(self, batch: Batch, has_backward: bool) -> None:
        """Raise :class:`InputError` where a batch's microbatches are not what it is."""


class Intake:
    """Where batches come in, on the rank that has them and on those that are fed.

    Attributes
    ----------
    is_fed: whether one rank has the batch, and gives the others theirs.
    """

    def __init__(
        self,
        capture: Capture,
        options: Options,
        kinds: Kinds,
        forms: Forms,
        feed: Feed | None,
        peers: Peers | None,
        stages: Sequence[Stage | Section],
        device: torch.device,
    ) -> None:
        self._forms = forms
        self._last: _Known | None = None
        self._capture, self._options, self._device = capture, options, device
        self._kinds, self._feed, self._peers = kinds, feed, peers
        self._takes_target = stages[-1].is_last
        self.is_fed = feed is not None
        self._is_weighed = options.has_replicas  # a batch, beside those of replicas
        self._rank = peers.rank if peers else 0
        self._is_source = feed is None or feed.source == self._rank

    def follow(self, own: Sequence[Stage | Section], stages: Sequence[Stage | Section]) -> None:
        """From now on take in what these use: the stages of this process, and all."""
        self._used = {name for stage in own for name in stage.inputs}
        self._last = None
        if self._feed is not None:
            self._feed.follow(stages)

    def take(self, request: Request) -> WeightedBatch:
        """The batch of this rank's arguments, or as it is fed."""
        if self._feed is not None and not self._is_source:
            fed = self._fed(self._feed, request)
            self._forms.check_rows(fed.batch, request.grad)
            return fed
        try:
            return self._own(request)
        except Exception as error:  # loss_weight is any Python
            if self._feed is not None:
                self._feed.refuse(str(error) if isinstance(error, InputError) else repr(error))
            raise

    def _own(self, request: Request) -> WeightedBatch:
        """The batch of this rank's arguments, which it gives to the others where it feeds them."""
        kwargs, target = self._route(request.kwargs, request.target)
        args, given = request.args, (*request.args, *kwargs.values())
        form = self._form(request, kwargs, given, target)
        last, inputs, kind = self._last, dict[str, Tensor](), self._kinds[0]
        if last is not None and last.form == form and self._forms.binds_alike():
            bound = {name: given[i] for name, i in last.places.items()}
            batch = last.cut.of(bound, target)
        else:
            kind, bound = self._forms.bind(args, kwargs)
            inputs, batch = self._cut(request, kind, bound, target)
            self._last = None if form is None else _known(form, given, batch)
        self._forms.check_rows(batch, request.grad)  # before labels are counted, which may lie in other rows
        # counted where the batch is; on a device, without a wait for it where it stays there
        told = self._feed is not None or self._options.mesh is not None
        weigh = kind.weigher.weigh if request.loss else kind.weigher.weigh_outputs
        weights, counted = weigh(batch, args, kwargs, bound, is_read=told)
        if self._feed is not None:
            self._feed.give(batch, target, len(batch.rows), (weights, counted))
        if batch.is_new:
            self._forms.renew()
        moved = self._used - kind.capture.inputs.names_of_numbers  # which the host reads
        batch = batch.on(self._device, moved, self._takes_target)
        return WeightedBatch(batch, weights, counted, inputs if request.grad else {})

    def _form(
        self, request: Request, kwargs: Mapping[str, Any], given: Sequence[Any], target: Any
    ) -> tuple[Any, ...] | None:
        """All that a call's binding and cut follow from: the kinds of its tensors.

        None where more decides: values, what is no plain tensor, which of them are one. And under feed,
        where the others are told what each batch asks for.
        """
        if self._feed is not None or self._capture.has_questions or self._capture.inputs.is_apart:
            return None
        kinds = []
        for value in given if target is None else (*given, target):
            if type(value) is not Tensor or value.is_nested or value.requires_grad or value.is_inference():
                return None
            kinds.append((value.shape, value.dtype, value.device, value.layout))
        asked = request.n_microbatches, request.grad, request.loss, target is None
        return (asked, self._capture.model.training, len(request.args), (*kwargs,), kinds)

    def _cut(
        self, request: Request, kind: Kind, bound: Mapping[str, Any], target: Any
    ) -> tuple[dict[str, Tensor], Batch]:
        """A call's batch in microbatches, and those of its tensors that require a gradient."""
        makes_loss = self._takes_target or self._feed is not None
        if request.loss and target is None and makes_loss and is_torchs(self._options.loss_fn):
            raise InputError(
                "the step was given no target, and loss_fn, one of torch's losses, compares outputs with it; "
                "pass one, as in rt.step(x, target=y)"
            )
        self._check(bound, target, request.grad)
        inputs = tracked(bound)
        if inputs and self._feed is not None:
            raise InputError(
                f"{', '.join(inputs)} require a gradient, which what rank {self._feed.source} feeds the "
                "others cannot get; make the runtime without feed and pass every rank the batch, or detach "
                "them"
            )
        n = int(request.n_microbatches or self._options.n_microbatches)
        free = {name: v.detach() if name in inputs else v for name, v in bound.items()}
        batch = self._split(kind, free, target, n, is_weighed=self._is_weighed)
        return inputs, self._forms.meet(dataclasses.replace(batch, requiring=frozenset(inputs)))

    def _split(
        self, kind: Kind, values: Mapping[str, Any], target: Any, n: int, *, is_weighed: bool = False
    ) -> Batch:
        """A batch of a kind, cut."""
        batch = kind.splitter.split(values, target, n, is_weighed=is_weighed)
        return dataclasses.replace(batch, kind=kind.number) if kind.number else batch

    def _check(self, bound: Mapping[str, Any], target: Any, grad: bool) -> None:
        """Raise :class:`InputError` for tensors that cannot be computed with, or not for a backward."""
        aims = [target] if isinstance(target, Tensor) else flatten(target)[0]
        for name, value in (*bound.items(), *(("the target", aim) for aim in aims)):
            if not isinstance(value, Tensor):
                continue
            if value.is_meta:
                raise InputError(f"{name} is on the meta device, and so without values; pass a real tensor")
            if grad and value.is_inference():
                raise InputError(
                    f"{name} was made in inference_mode, and autograd keeps no such tensor for a backward; "
                    "make it under no_grad, or pass its clone()"
                )
        if grad and any(self._loses_gradient(aim) for aim in aims):
            raise InputError(
                "the target requires a gradient, which the last stage alone would give it, and once for each "
                "microbatch; detach() it, or make it an input of the model"
            )

    def _loses_gradient(self, aim: Any) -> bool:
        is_tracked = isinstance(aim, Tensor) and aim.requires_grad
        return is_tracked and (self._peers is not None or not aim.is_leaf)

    def _fed(self, feed: Feed, request: Request) -> WeightedBatch:
        # heard also where it is refused, or what is heard next would be this
        leaves, target, n, (weights, counted), (forms, of_all, is_new), (number, met) = feed.take()
        if request.args or request.kwargs or request.target is not None:
            raise InputError(
                f"rank {self._rank} was given inputs, but only rank {feed.source} feeds this pipeline; call "
                "step() without any here, or make the runtime without feed"
            )
        for what, there, given in met:
            if what == "form":
                self._forms.meet_form(there, given)
            else:
                args, kwargs = given
                called, numbers = divided(kwargs)
                with placed(self._capture.model, numbers):
                    here = self._forms.bind(tuple(args), called)[0].number
                self._check_alike(feed, "kind", here, there)
        batch = self._split(self._kinds[number], leaves, target, n, is_weighed=self._is_weighed)
        if is_new:
            self._check_alike(feed, "forms", [*self._forms.meet(batch).forms], [*forms])
            self._forms.renew()
        return WeightedBatch(dataclasses.replace(batch, forms=forms, of_all=of_all), weights, counted)

    def _check_alike(self, feed: Feed, what: str, here: Any, there: Any) -> None:
        if here != there:
            raise InputError(
                f"rank {self._rank} has {what} {here} of the model for this batch, and rank {feed.source} "
                f"{there}: some were recorded on one of them alone; call pipe(...) on every rank alike, or "
                "only rt.step, rt.evaluate and rt.forward"
            )

    def shares(
        self, batches: Sequence[Any], n_microbatches: int | None
    ) -> tuple[Calls, list[float], float | None]:
        """The calls that batches stand for, what each one's loss weighs in that of all, and what all counted.

        Weights are alike on every rank; what was counted is None for sums. Raises :class:`InputError`, under
        feed on every rank alike, for a batch that does not fit, and where ranks were given unlike numbers of
        them.
        """
        if self._feed is None or self._peers is None:
            calls = _calls(batches)
            found = self._measured(calls, n_microbatches)
        else:
            calls, found = self._agreed(batches, n_microbatches, self._feed.source, self._peers)
        counts = [1.0 if n is None else n for n in found]
        total = 1.0 if None in found else sum(counts)
        if total == 0:
            raise InputError("none of the batches has a label that counts; leave such batches out")
        return calls, [n / total for n in counts], None if None in found else total

    def _measured(self, calls: Calls, n_microbatches: int | None) -> list[float | None]:
        """What each batch's loss averages over; None for sums."""
        if not calls:
            raise InputError("accumulate() got no batches; give it at least one")
        each = []
        for args, given in calls:
            own = {name: value for name, value in given.items() if name != "target"}
            kwargs, target = self._route(own, given.get("target"))
            kind, bound = self._forms.bind(args, kwargs)
            batch = self._split(kind, bound, target, 1, is_weighed=True)
            if kind.weigher.is_counted:
                batch = self._in_forms(kind, batch, int(n_microbatches or self._options.n_microbatches))
            each.append(Bound(batch, args, kwargs, bound))
        return self._measured_by_kind(each)

    def _measured_by_kind(self, each: Sequence[Bound]) -> list[float | None]:
        """What each batch's loss averages over, as its own kind says: by rows where kinds differ in that."""
        calls = {n: [b for b in each if b.batch.kind == n] for n in dict.fromkeys(b.batch.kind for b in each)}
        found = {n: self._kinds[n].weigher.measure(own) for n, own in calls.items()}
        units = {unit for unit, _ in found.values()}
        if units == {"rows", "labels"}:
            self._kinds[0].weigher.warn("it averages over labels of some batches and over rows of others")
            return [float(sum(b.batch.rows)) for b in each]
        if len(units) > 1:
            raise InputError(
                "the losses of some of these batches are sums and those of others are means, so that none of "
                "all of them can be told; accumulate() batches of one kind, or pass loss_weight to runtime()"
            )
        left = {n: iter(counts) for n, (_, counts) in found.items()}
        return [None if "sums" in units else next(left[b.batch.kind]) for b in each]

    def _in_forms(self, kind: Kind, batch: Batch, n: int) -> Batch:
        """A batch with the form it asks for; where there is none for all of it, its microbatches with theirs.

        Under feed those must be there: the other ranks take part in recording one in a step alone.
        """
        if kind.capture.is_met(batch.whole):
            return with_forms(batch, kind.capture)
        batch = self._split(kind, batch.whole, batch.target, n)
        if self._feed is None:
            return self._forms.meet(batch)
        try:
            return with_forms(batch, kind.capture)
        except InputError as refusal:
            raise InputError(
                f"the labels that count in a batch cannot be told: {refusal}; give step() such a batch first"
            ) from refusal

    def _agreed(
        self, batches: Sequence[Any], n_microbatches: int | None, source: int, peers: Peers
    ) -> tuple[Calls, list[float | None]]:
        """The calls, and what the rank that feeds measured of them, where every rank has as many."""
        own: Exception | None = None
        calls: Calls = ()
        try:
            calls = _calls(batches)
            mine = Counted(len(batches), self._measured(calls, n_microbatches) if self._is_source else [])
        except Exception as error:  # loss_weight is any Python; the others wait to be told
            own = error
            mine = Counted(len(batches), fault=str(error) if isinstance(error, InputError) else repr(error))
        with peers.together("weighing batches", waits=False):
            everyone = peers.gather(mine)
        given = everyone[source]
        fault = next((each.fault for each in (given, *everyone) if each.fault), "")
        if fault:
            raise own or InputError(fault)
        odd = next((rank for rank, each in enumerate(everyone) if each.n != given.n), None)
        if odd is not None:
            raise InputError(
                f"accumulate() got {given.n} batches on rank {source}, which feeds the others, and "
                f"{everyone[odd].n} on rank {odd}: give the others as many empty ones, [{{}}] * {given.n}"
            )
        return calls, given.counts

    def _route(self, kwargs: dict[str, Any], target: Any) -> tuple[dict[str, Any], Any]:
        """The target's way: to ``loss_fn``, or without one to the model's own argument of that name."""
        if target is None or self._options.loss_fn is not None:
            return kwargs, target
        if "target" in inspect.signature(self._capture.model.forward).parameters:
            return {**kwargs, "target": target}, None
        raise InputError(
            "step got a target, but nothing takes it: there is no loss_fn, and the model has no argument "
            "'target'; pass loss_fn to runtime(), or the labels under the model's own name for them"
        )


def is_torchs(loss_fn: Callable[..., Any] | None) -> bool:
    """Whether a loss is one of torch's, all of which compare with a target."""
    inner = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    kind = inner if inspect.isfunction(inner) else type(inner)
    return kind.__module__ in ("torch.nn.functional", "torch.nn.modules.loss")


def drawn(batches: Iterable[Any]) -> list[Any]:
    """All that an iterable gives, before any of it is used, in one mapping or list for all or in several.

    Raises :class:`InputError` where tensors of a batch are no longer what they were once the last one came.
    """
    if isinstance(batches, (list, tuple)):
        return [*batches]
    found, marks = [], []
    for batch in batches:
        is_mapping = isinstance(batch, Mapping)
        found.append(dict(batch) if is_mapping else [*batch] if isinstance(batch, list) else batch)
        marks.append(_mark(found[-1]))
    changed = next((i for i, batch in enumerate(found) if _mark(batch) != marks[i]), None)
    if changed is not None:
        raise InputError(
            f"batch {changed} of accumulate() was overwritten while the {len(found)} batches were drawn, as "
            "by a loader that puts all of them in one buffer: have it give clones, or step on each as it "
            f"comes, within rt.scaled(1 / {len(found)}), and all but the last within rt.no_sync()"
        )
    return found


def _mark(batch: Any) -> tuple[int, ...]:
    """What tells that tensors were overwritten: values on the host; on a device, which nobody waits for, how
    often their memory was written to."""
    given = [*batch.values()] if isinstance(batch, Mapping) else [batch]
    tensors = [x for x in flatten(given)[0] if isinstance(x, Tensor) and not x.is_meta]
    return tuple(content(x) if x.is_cpu else -1 if x.is_inference() else x._version for x in tensors)


def _calls(batches: Sequence[Any]) -> Calls:
    """The arguments of ``step`` that each of several batches stands for."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    for i, batch in enumerate(batches):
        if isinstance(batch, Mapping):
            found.append(((), dict(batch)))
        elif isinstance(batch, (tuple, list)):
            found.append((tuple(batch), {}))
        else:
            raise InputError(f"batch {i} of accumulate() is a {type(batch).__name__}; {BATCHES}")
    return found
