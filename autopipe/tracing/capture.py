"""``capture``: from a model and example arguments to graphs that do what the model does.

The parts are left to the other modules of this room; cutting the graphs into stages to ``stages``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from ..errors import AutopipeError, CaptureError, InputError, ModelError
from ..graph import Dim, OpGraph
from .calls.call import Call
from .calls.lifting import plainly
from .calls.named import held_by
from .calls.perform import run_call
from .graphs import emit, modes, opgraph
from .graphs.questions import Question, choose
from .held import held_against_the_model, held_from_elsewhere
from .inputs.arguments import Inputs
from .inputs.caches import switched_off, without_cache
from .inputs.contents import are_equal_tensors
from .inputs.examples import infer
from .inputs.structure import Spec, flatten, unflatten
from .inputs.written import Written, write_back
from .later import Later
from .making import Form
from .notes import notes_on
from .record.bysize import follow_sizes, sizes_of
from .record.given import all_on, check_values, device_of, fresh
from .record.keeping import tell_left
from .record.leaves import Policy
from .record.session import Session
from .record.standing import Change, Kind, Standing, standing_of
from .record.state import preserved
from .sizes import dims
from .sizes.explore import confirm
from .sizes.few import are_free, few_pixels, few_rows, few_tokens
from .sizes.harmless import uneven_sizes
from .sizes.variation import Variation

__all__ = ["Capture", "capture"]

_logger = logging.getLogger("autopipe")
_MOST_IN_A_ROW = 8
"""After how many calls in a row that each found another state of the model one more is refused."""


@dataclasses.dataclass(frozen=True, eq=False)
class Capture:
    """A model as graphs that compute what it computes, in training and in evaluation.

    Attributes
    ----------
    model: the model itself, untouched.
    example: the (args, kwargs) it was captured with.
    ops: the op graph, the union of both forms.
    graphs: the fx graph of each form by training flag; one object twice where one serves both.
    constants: values glue code brought itself, by ``get_attr`` target.
    inputs: the structure of the arguments; ``outputs`` that of the result, by training flag.
    device: where the model was when captured; ``get_attr`` target ``_device`` stands for it.
    policy: which modules are leaves.
    variation: the input sizes that may vary, those that may not, and why.
    forms: by training flag, the form the example takes and those that other values of the inputs ask for.
    questions: by training flag, what of the inputs tells which form that is, or its number.
    notes: what a user should know of how the model was recorded.
    left: attributes in which the model's own code leaves what it computes with gradients; stages do not.
    at: sizes that it was recorded at, where they are not the example's for a reason.
    later: what records forms for inputs of later calls that none is for; None in a copy.
    standing: the state that the model's own code may have read; a change that matters is refused.
    """

    model: nn.Module
    example: tuple[tuple[Any, ...], dict[str, Any]]
    ops: OpGraph
    graphs: dict[bool, fx.Graph]
    constants: dict[str, Any]
    inputs: Inputs
    outputs: dict[bool, Spec]
    device: torch.device
    policy: Policy
    variation: Variation
    standing: Standing
    dynamic: Any = "auto"
    forms: dict[bool, tuple[Form, ...]] = dataclasses.field(default_factory=dict)
    questions: dict[bool, Question | int] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    at: Mapping[Dim, int] = dataclasses.field(default_factory=dict)
    later: Later | None = dataclasses.field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # a copy has forms, and no recordings to add to
        return {**self.__dict__, "later": None}

    @functools.cached_property
    def modules(self) -> dict[bool, fx.GraphModule]:
        """A graph module of each form, holding the model's own submodules."""
        train = emit.module(self.model, self.graphs[True], self.constants, self.device)
        if self.graphs[True] is self.graphs[False]:
            return {True: train, False: train}
        return {True: train, False: emit.module(self.model, self.graphs[False], self.constants, self.device)}

    @functools.cached_property
    def _others(self) -> dict[tuple[bool, int], fx.GraphModule]:
        return {
            (training, number): emit.module(self.model, form.graph, self.constants, self.device)
            for training, forms in self.forms.items()
            for number, form in enumerate(forms)
            if number
        }

    @property
    def module(self) -> fx.GraphModule:
        """The training form as a linted graph module from flat tensor inputs to flat outputs."""
        return self.modules[True]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Placeholder name → tensor for a call's arguments.

        Raises :class:`InputError` naming the argument that differs from what was captured, the input dim
        whose size the capture is not right for, or what changed about the model so that it acts otherwise.
        """
        return self.bound(args, kwargs or {})[0]

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """What :meth:`bind` gives, and the number of the form that it asks for in the model's mode."""
        values = self.values(args, kwargs)
        return values, self.form_of(values)

    def meet(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """:meth:`bound`; where no form is for the inputs, with one that is recorded on them now."""
        values = self.values(args, kwargs)
        return values, self.form_met(values)

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What :meth:`bind` gives, also where no form is for it: there may be some for its rows."""
        args, kwargs = self.arguments(args, kwargs)
        if self.device.type != "meta" and (changed := self.standing.changed()):
            self._hold_changed(changed, args, kwargs)
        return self.inputs.bind(self.model, args, kwargs)

    def is_met(self, values: Mapping[str, Any]) -> bool:
        """Whether there is a form for bound inputs in the model's mode."""
        try:
            self.form_of(values)
        except InputError:
            return False
        return True

    @property
    def has_questions(self) -> bool:
        """Whether values or sizes of the inputs tell which form runs, in any mode."""
        is_asked = any(isinstance(q, Question) for q in self.questions.values())
        return is_asked or any(form.for_sizes for forms in self.forms.values() for form in forms)

    def form_met(self, values: Mapping[str, Any]) -> int:
        """:meth:`form_of` in the model's mode; where no form is for these inputs, that of one recorded now.

        Raises :class:`InputError`, with what the model decides otherwise and where, if none can be recorded.
        """
        try:
            return self.form_of(values)
        except InputError as refusal:
            if self.later is None:
                raise
            try:
                found = self.later.record(self.inputs, values)
            except AutopipeError as error:
                raise InputError(f"{refusal}. It was tried to record it now: {error}") from error
        for flag, form in found.items():
            self.forms[flag] = (*self.forms[flag], form)
        made = self.later.made
        self.constants.update(made.constants)
        self.standing.asks_too(made.dtypes, made.flags)
        vars(self).pop("_others", None)
        return self.form_of(values)

    def form_of(self, values: Mapping[str, Any], training: bool | None = None) -> int:
        """The number of the form that bound inputs ask for, in the model's mode or the given one.

        Raises :class:`InputError` where they are of a kind or size that has not been recorded.
        """
        training = self.model.training if training is None else training
        forms = self.forms[training]
        try:
            number = self._answered(self.questions[training], forms[0], values)
            forms[number].variation.check(self.inputs, values)
            return number
        except InputError as error:
            refusal = error
        for other, form in enumerate(forms):
            if form.for_sizes and form.variation.is_for(self.inputs, values):
                try:
                    self._answered(form.question, form, values)
                except InputError as error:
                    refusal = error
                else:
                    return other
        raise refusal

    def _answered(self, question: Question | int, form: Form, values: Mapping[str, Any]) -> int:
        """What the answers of inputs to a question lead to; ``form`` is for their sizes."""
        held = next((v for v in values.values() if isinstance(v, torch.Tensor)), None)
        device = self.device if held is None else held.device

        def run(call: Call, args: Any, kwargs: Any) -> Any:
            return run_call(self.model, self.constants, call, args, kwargs, values, device)

        try:
            return choose(question, run)
        except InputError:
            raise
        except Exception as error:  # most likely inputs of sizes that the question is not for
            form.variation.check(self.inputs, values)
            raise InputError(
                f"{self.inputs.model}: what the model asks of its inputs cannot be asked of these: {error}"
            ) from error

    def _hold_changed(self, changed: Sequence[Change], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record again as the model stands: a change that leaves the graph as it was is of no account.

        Nor are attributes that follow from the sizes of a call's inputs alone.
        """
        if attributes := self.standing.changed_attributes(len(changed)):
            at = self.model.training, sizes_of(args, kwargs)
            if self.standing.is_known_at(at):
                return
            with all_on(self.device, self.model):
                is_by_size = follow_sizes(self.model, attributes, args, kwargs)
            if is_by_size:
                self.standing.tolerate_at(at)
                return
        if self.standing.n_in_a_row >= _MOST_IN_A_ROW:
            shown = ", ".join(map(str, changed))
            raise InputError(
                f"{self.inputs.model}: {shown} changes before every call, and the model was recorded again "
                f"{_MOST_IN_A_ROW} times in a row, to the same graph each time; keep what changes in a "
                "buffer, or read it in a submodule that stays whole: closed=[path]"
            )
        training = self.model.training
        # a model is recorded outside of inference mode, whatever it is called in
        is_same = not any(c.kind in (Kind.WEIGHTS, Kind.INFERENCE) for c in changed)
        try:
            with all_on(self.device, self.model):  # its stages may have been put elsewhere
                again = _capture(
                    self.model, *self.example, self.policy, self.dynamic, self.variation, self.at
                )
            is_same = is_same and _is_same(self, again, training)
        except (CaptureError, ModelError, InputError):
            is_same = False
        if not is_same:
            is_cast = any(c.kind is Kind.CAST for c in changed)
            shown = ", ".join(map(str, changed))
            remedy = "within the same torch.autocast" if is_cast else "as the model is now, or put it back"
            raise InputError(
                f"{self.inputs.model}: {shown} changed after the capture, and the model's own code acts on "
                f"it; capture again {remedy}"
            )
        self.standing.tolerate()

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A call's arguments as the captured model gets them: a transformers model without its cache."""
        is_added = self.example[1].get("use_cache") is False and "use_cache" not in kwargs
        return args, {**kwargs, "use_cache": False} if is_added else kwargs

    def assemble(self, leaves: Sequence[Any], training: bool | None = None) -> Any:
        """The model's output structure from the flat tuple that the output node returns."""
        made = unflatten(self.outputs[self.model.training if training is None else training], leaves)
        return made.result if isinstance(made, Written) else made

    def answer(self, leaves: Sequence[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What :meth:`assemble` gives in the model's mode, for a call with these arguments.

        Where the model writes into them, they have then what it would have left there.
        """
        made = unflatten(self.outputs[self.model.training], leaves)
        if not isinstance(made, Written):
            return made
        write_back(self.model, *self.arguments(args, kwargs), made)
        return made.result

    def open(self, *paths: str) -> Capture:
        """The same capture with the leaves at ``paths`` opened.

        The model is recorded once more in each mode; which of its sizes may vary is not asked again.
        Raises :class:`CaptureError` for what the caller pinned closed.
        """
        shut = [p for p in sorted(self.policy.pinned) if any(f"{q}.".startswith(f"{p}.") for q in paths)]
        if shut:
            raise CaptureError(
                f"{', '.join(shut)} is pinned closed; capture again without it in closed to open "
                f"{', '.join(paths)}"
            )
        policy = self.policy.with_opened(paths)
        return _capture(self.model, *self.example, policy, self.dynamic, self.variation, self.at)

    def with_example(self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[Dim]) -> Capture:
        """The same capture, said to be made on other arguments, which have ``sizes``."""
        inputs = dataclasses.replace(Inputs.of(self.model, args, kwargs)[0], is_apart=self.inputs.is_apart)
        other = {place: d.example for d in sizes for place in d.where}
        named = tuple(
            dataclasses.replace(d, example=other.get(d.places[0], d.example)) for d in self.ops.dims
        )
        ops = dataclasses.replace(self.ops, dims=named)
        return dataclasses.replace(self, example=(args, kwargs), inputs=inputs, ops=ops)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured graph as the model would run."""
        values, number = self.meet(args, kwargs)
        training = self.model.training
        module = self._others[training, number] if number else self.modules[training]
        module.training = training
        return self.answer(module(*values.values()), args, kwargs)


def _is_same(a: Capture, b: Capture, training: bool) -> bool:
    """Whether two captures of one model hold the same graph for a mode, and give it in the same structure."""

    def outline(of: Capture) -> list[Any]:
        graph = modes.settled(of.graphs[training], of.model)
        code = graph.python_code("self").src
        held = [held_by(n.target) for n in graph.nodes]
        return [
            code,
            held,
            of.outputs[training],
            [(n.meta.get("region"), n.meta.get("recompute")) for n in graph.nodes],
        ]

    def is_equal(x: Any, y: Any) -> bool:
        if isinstance(x, torch.Tensor):
            return isinstance(y, torch.Tensor) and are_equal_tensors(x, y)
        return x is y or (type(x) is type(y) and bool(plainly(x) == plainly(y)))

    names = {str(n.target) for n in a.graphs[training].nodes if n.op == "get_attr"} & {*a.constants}
    return outline(a) == outline(b) and all(
        n in b.constants and is_equal(a.constants[n], b.constants[n]) for n in names
    )


def capture(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    open: Iterable[str] = (),
    closed: Iterable[str] = (),
    dynamic: Literal["auto"] | bool = "auto",
) -> Capture:
    """Record ``model`` by running it on example arguments, once in training and once in evaluation mode.

    Parameters
    ----------
    args, kwargs: what the model is called with; inferred where the model tells (see ``examples``).
    open, closed: dotted paths of modules to record the inside of, or to keep whole.
    dynamic: ``"auto"`` lets every input size vary that the model lets vary; False fixes them all.

    Raises :class:`ModelError` when the model itself fails on the arguments, :class:`CaptureError` when it
    cannot be recorded, :class:`InputError` for arguments or paths that do not fit. The model is left as it
    was in every case.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is {type(model).__name__}; capture takes a torch.nn.Module")
    if not args and not kwargs:
        args, kwargs = infer(model)
    check_values(model, args, kwargs)
    policy = Policy(model, pinned=frozenset(closed)).with_opened(open)
    leaves, spec = flatten((tuple(args), dict(kwargs or {})))
    args, kwargs = unflatten(spec, leaves)  # calls may write into the caller's containers
    found = _capture(model, args, kwargs or {}, policy, dynamic)
    tell_left(model, found.left)
    return found


def _capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy,
    dynamic: Any,
    known: Variation | None = None,
    at: Mapping[Dim, int] | None = None,
) -> Capture:
    """A capture on few rows and positions of the example, which is fast and, unlike one row, hides nothing.

    On all of them where the model runs on few, or is captured there, only in a way that does not fit them.
    ``at`` are sizes that an earlier capture was recorded at.
    """
    kwargs = without_cache(model, kwargs)
    inputs, tensors = Inputs.of(model, args, kwargs)
    device = device_of(model, args, kwargs)
    rows = few_rows(inputs, device) if dynamic else {}
    few = (few_tokens(inputs, device) or few_pixels(inputs, device)) if dynamic else {}
    told = (model, args, kwargs, policy, dynamic)
    if at:
        with contextlib.suppress(CaptureError, ModelError, InputError):
            if (found := _captured_at(at, *told, tensors, known)) is not None:
                return found
    for cut in filter(None, (rows | few, rows) if few else (rows,)):
        confirm_at = dims.resize(tensors, rows) if len(cut) > len(rows) else None
        with contextlib.suppress(CaptureError, ModelError, InputError):
            found = _captured_at(cut, *told, confirm_at, known)
            if found is not None:
                return found if known else _elsewhere(found, cut)
    found = _captured(*told, None, known)
    return found if known else _elsewhere(found, {})


def _captured_at(
    cut: Mapping[Dim, int],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy,
    dynamic: Any,
    confirm_at: Mapping[str, torch.Tensor] | None,
    known: Variation | None,
    below: int | None = None,
) -> Capture | None:
    """A capture on the example at other sizes; None where it does not fit the example itself."""
    inputs, tensors = Inputs.of(model, args, kwargs)
    given = inputs.rebuild(model, dims.resize(tensors, cut))
    found = _captured(model, *given, policy, dynamic, confirm_at, known, below)
    if not are_free({place for d in cut for place in d.where}, found.ops.dims):
        return None
    found = found.with_example(args, kwargs, tuple(cut))
    values = found.inputs.bind(model, *found.arguments(args, kwargs))
    return found if found.form_of(values) == 0 else None


def _elsewhere(found: Capture, cut: Mapping[Dim, int]) -> Capture:
    """The same recorded where a size is no multiple, if that is right for more sizes: padding is recorded."""
    uneven = () if found.device.type == "meta" else uneven_sizes(found.variation)
    args, kwargs = found.example
    tensors = Inputs.of(found.model, args, kwargs)[1]
    told = found.model, args, kwargs, found.policy, found.dynamic
    n_checks = len(found.variation.checks)
    for dim, size in uneven:
        at = {**cut, next(d for d in found.ops.dims if d.name == dim.name): size}
        with contextlib.suppress(CaptureError, ModelError, InputError):
            other = _captured_at(at, *told, tensors, None, below=n_checks)
            if other is not None and len(other.variation.checks) < n_checks:
                return dataclasses.replace(other, at=at)
    return found


def _captured(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    policy: Policy,
    dynamic: Any,
    confirm_at: Mapping[str, torch.Tensor] | None = None,
    known: Variation | None = None,
    below: int | None = None,
) -> Capture:
    """A capture on the example; where ``confirm_at`` is given, its shapes are held against a run on it.

    One that no fewer than ``below`` checks limit to some sizes is given up.
    """
    lazy = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]
    if lazy:
        raise InputError(
            f"{type(model).__name__} has layers that take their sizes from the first data "
            f"({', '.join(lazy[:3])}); run it once on an example before it is captured"
        )

    def is_open(path: str) -> bool:
        return not policy.is_inside_leaf(path)

    with (
        torch.inference_mode(False),
        switched_off(model),
        preserved(model, is_open, holds_back=True) as snapshot,
    ):
        session = Session(model, args, kwargs, policy, snapshot, sizes_vary=bool(dynamic))
        args, kwargs = session.args, session.kwargs
        inputs, tensors = Inputs.of(model, *fresh((args, kwargs), session.device))
        made = held_against_the_model(session, inputs, tensors, dynamic, known, below)
        session, made = held_from_elsewhere(session, made, is_open)
        inputs = dataclasses.replace(inputs, is_apart=session.runs.is_apart)
        if confirm_at is not None:
            if session.refused is not None:
                raise session.refused  # on all of the example it may train
            session.start(training=False)
            confirm(model, made.forms[False][0], made.variation, confirm_at, session.device)
    if session.refused is not None:
        _logger.warning("%s; its training form is taken to be its evaluation form", session.refused)
    graphs = made.graphs()
    shapes = made.shapes
    ops = opgraph.build(
        model,
        made.calls,
        made.forms,
        lambda c, i, t: shapes[id(c)][i] if id(c) in shapes else tuple(t.shape),
        made.variation.dims,
        made.kind,
        made.tail,
    )
    return Capture(
        model=model,
        example=(args, kwargs),
        ops=ops,
        graphs={flag: forms[0].graph for flag, forms in graphs.items()},
        constants=made.constants,
        inputs=inputs,
        outputs={flag: forms[0].output for flag, forms in made.forms.items()},
        device=session.device,
        policy=session.policy,
        variation=made.variation,
        standing=standing_of(model, made.forms, made.constants, made.dtypes, made.flags, snapshot.reached),
        dynamic=dynamic,
        forms=graphs,
        questions=made.questions,
        notes=(*session.notes, *notes_on(made)),
        left=made.forms[True][0].left,
        later=Later(session, made),
    )
