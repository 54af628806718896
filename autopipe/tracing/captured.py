"""``Capture``: a model as graphs that compute what it computes, and what it takes to call them.

Making one is left to ``capture``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from ..errors import AutopipeError, CaptureError, InputError, ModelError
from ..graph import Dim, OpGraph
from .calls.call import Call
from .calls.faults import of_models
from .calls.named import held_by
from .calls.perform import run_call
from .code.leaves import Policy
from .forms import Form
from .graphs import emit, modes
from .graphs.left_numbers import left_in, numbers_left_by
from .graphs.questions import Question, choose
from .inputs.arguments import Inputs, ListedRows
from .inputs.contents import are_equal_tensors, plainly
from .inputs.free_numbers import as_tensor
from .inputs.held_numbers import HELD, divided, leave, numbers_of
from .inputs.structure import Spec, unflatten
from .inputs.writes import Written, write_back
from .new_forms import NewForms
from .new_kinds import recorded_beside
from .runs.assumptions import Assumptions
from .runs.size_attributes import follow_sizes, sizes_of
from .sizes.dims import axis_of
from .sizes.variation import Mixing, Tail, Variation
from .state.example_data import all_on
from .state.readers import Change, Kind
from .state.state import note_written
from .state.turns import in_turn
from .state.whole_layers import WholeLayers

__all__ = ["Capture"]

_MOST_NUMBERS = 2
"""How often in a row numbers in attributes may change without effect before they are made inputs."""
_MOST_IN_A_ROW = 8
"""After how many calls in a row that each found another state of the model one more is refused."""


class _ActsOtherwise(InputError):
    """The model's own code acts on state that has changed since it was recorded."""


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
    numbers: by path and name, what attributes held beside it whose numbers are inputs.
    inputs: the structure of the arguments; ``outputs`` that of the result, by training flag.
    device: where the model was when captured; ``get_attr`` target ``_device`` stands for it.
    policy: which modules are leaves.
    variation: the input sizes that may vary, those that may not, and why.
    first: the capture that this one is beside, of calls with other arguments; None where it is that itself.
    kinds: of the first, all captures of calls with other arguments, or of the model in another state, itself
        at the head.
    forms: by training flag, every form there is: those the examples of all kinds take, and those that other
        values of their inputs ask for. own: by training flag, the numbers among them of this kind's, that of
        its example at the head.
    questions: by training flag, what of the inputs tells which of its own forms that is, or its place there.
    answers: of two forms, in words, what is asked of all rows of a batch where the second makes something
        else than the first of rows that ask for the first.
    notes: what a user should know of how the model was recorded.
    left: attributes in which the model's own code leaves what it computes; stages do not.
    written: the parameters, by name, that its graphs write to.
    at: sizes that it was recorded at, where they are not the example's for a reason.
    new_forms: what records forms for inputs of later calls that none covers; None in a copy.
    assumptions: the state that the model's own code may have read; a change that matters is refused.
    whole: the layers that stay whole, whose changes matter to rows alone.
    again: records the model once more on the example, by a policy; which sizes may vary and how rows depend
        on one another is not asked again, unless it ``asks_anew``.
    beside: records the model on other arguments, under the names that ops have here.
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
    assumptions: Assumptions
    whole: WholeLayers = dataclasses.field(repr=False)
    again: Callable[..., Capture] = dataclasses.field(repr=False)
    beside: Callable[[Capture, tuple[Any, ...], dict[str, Any]], Capture] = dataclasses.field(repr=False)
    first: Capture | None = dataclasses.field(default=None, repr=False)
    others: list[Capture] = dataclasses.field(default_factory=list, repr=False)
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    dynamic: Any = "auto"
    forms: dict[bool, tuple[Form, ...]] = dataclasses.field(default_factory=dict)
    own: dict[bool, list[int]] = dataclasses.field(default_factory=dict)
    questions: dict[bool, Question | int] = dataclasses.field(default_factory=dict)
    answers: dict[tuple[Form, Form], str] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    at: Mapping[Dim, int] = dataclasses.field(default_factory=dict)
    new_forms: NewForms | None = dataclasses.field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # a copy has forms, no recordings to add to, and makes its modules anew; it is of the present state
        made = ("modules", "_modules_of_others")
        kept = {k: v for k, v in vars(self).items() if k not in made}
        return {**kept, "new_forms": None, "others": [kind for kind in self.others if not kind.n_changes]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        note_written(self.model, self.written)

    @functools.cached_property
    def modules(self) -> dict[bool, fx.GraphModule]:
        """A graph module of each form, holding the model's own submodules."""
        train = emit.module(self.model, self.graphs[True], self.constants, self.device)
        if self.graphs[True] is self.graphs[False]:
            return {True: train, False: train}
        return {True: train, False: emit.module(self.model, self.graphs[False], self.constants, self.device)}

    @functools.cached_property
    def _modules_of_others(self) -> dict[tuple[bool, int], fx.GraphModule]:
        return {
            (training, n): emit.module(self.model, self.forms[training][n].graph, self.constants, self.device)
            for training, numbers in self.own.items()
            for n in numbers[1:]
        }

    @property
    def module(self) -> fx.GraphModule:
        """The training form as a linted graph module from flat tensor inputs to flat outputs."""
        return self.modules[True]

    @property
    def kinds(self) -> tuple[Capture, ...]:
        """The captures of all kinds of calls, the first at the head."""
        first = self.first or self
        return (first, *first.others)

    def kind_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Capture, dict[str, Any] | None]:
        """Of all kinds the capture for calls like this one; where there is none, one that says why not.

        With the inputs by name where there are several kinds, as binding them tells the kind.
        """
        first = self.first or self
        if not first.others:
            return first, None
        fitting: list[tuple[int, Capture, dict[str, Any]]] = []
        for kind in self.kinds:
            with contextlib.suppress(InputError):
                bound = kind.inputs.bind(self.model, *kind.arguments(args, kwargs))
                if not (n_changes := kind.n_changes):
                    return kind, bound
                fitting.append((n_changes, kind, bound))
        if fitting:
            return min(reversed(fitting), key=lambda one: one[0])[1:]
        return next((kind for kind in self.kinds if not kind.is_unlike(args, kwargs)), first), None

    @property
    def n_changes(self) -> int:
        """How much of the model's state is other than it was recorded in, and may make a difference."""
        return 0 if self.device.type == "meta" else len(self.assumptions.changed())

    def kind_met(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Capture, dict[str, Any]]:
        """The capture for calls like this one, which is recorded now where there is none, and inputs by name.

        Raises :class:`InputError` as :meth:`values` does, and where such a call cannot be recorded, or not so
        that a plan for the first fits it.
        """
        kind, bound = self.kind_of(args, kwargs)
        try:
            return kind, kind.values(args, kwargs, bound)
        except InputError as refusal:
            if kind.new_forms is None or not kind.is_new(refusal, args, kwargs):
                raise
            try:
                kind = recorded_beside(self.first or self, kind, args, kwargs)
            except AutopipeError as error:
                raise InputError(f"{refusal}. It was tried to record it now: {error}") from error
        return kind, kind.values(args, kwargs)

    def is_new(self, refusal: InputError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether what was refused is a call of another kind, or of the model in another state."""
        return isinstance(refusal, _ActsOtherwise) or self.is_unlike(args, kwargs)

    def is_unlike(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call is of another kind, in its plain values or structure."""
        return self.inputs.is_unlike(self.model, *self.arguments(args, kwargs))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> dict[str, Any]:
        """Placeholder name → tensor for a call's arguments.

        Raises :class:`InputError` naming the argument that differs from what was captured, the input dim
        whose size the capture is not right for, or what changed about the model so that it acts otherwise.
        """
        return self.bound(args, kwargs or {})[0]

    def bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """What :meth:`bind` gives, and the number of its own form that it asks for in the model's mode."""
        values = self.values(args, kwargs)
        return values, self.form_of(values)

    def values(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], bound: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """What :meth:`bind` gives, also where no form is for it: there may be some for its rows.

        That is ``bound`` where the inputs are known by name.
        """
        if self.device.type != "meta" and (changed := self.assumptions.changed()):
            self._hold_changed(changed, args, kwargs)
        return self.inputs.bind(self.model, *self.arguments(args, kwargs)) if bound is None else bound

    def is_met(self, values: Mapping[str, Any]) -> bool:
        """Whether there is a form for bound inputs in the model's mode."""
        try:
            self.form_of(values)
        except InputError:
            return False
        return True

    def is_for_sizes(self, number: int, values: Mapping[str, Any]) -> bool:
        """Whether a form of the model's mode is for bound inputs of these sizes."""
        return self.forms[self.model.training][number].variation.is_for(self.inputs, values)

    @property
    def own_forms(self) -> dict[bool, tuple[Form, ...]]:
        """Its own forms, by training flag, that of the example first."""
        return {flag: tuple([self.forms[flag][n] for n in numbers]) for flag, numbers in self.own.items()}

    @property
    def has_questions(self) -> bool:
        """Whether values or sizes of the inputs tell which form runs, in any mode."""
        is_asked = any(isinstance(q, Question) for q in self.questions.values())
        return is_asked or any(form.for_sizes for forms in self.own_forms.values() for form in forms)

    @property
    def _nodes(self) -> Iterator[fx.Node]:
        """Those of all forms."""
        return (n for forms in self.forms.values() for form in forms for n in form.graph.nodes)

    @property
    def drawing_outside(self) -> frozenset[str]:
        """The ops that draw from Python's or numpy's generator, in any form."""
        streams = ((n.name, n.meta.get("stream")) for n in self._nodes)
        return frozenset(name for name, stream in streams if stream is not None and stream.is_outside)

    @property
    def deriving(self) -> frozenset[str]:
        """The ops that take derivatives, in any form."""
        return frozenset(n.name for n in self._nodes if n.meta.get("derives"))

    @property
    def one_row(self) -> str:
        """In words, what makes of a single row something else than it is among others; or ""."""
        return next((v.mixing.one_row for v in self._variations if v.mixing.one_row), "")

    @property
    def _variations(self) -> tuple[Variation, ...]:
        return (self.variation, *(f.variation for forms in self.own_forms.values() for f in forms))

    def leaves_more(self, names: Collection[str]) -> bool:
        """Whether ops of these ``names`` leave something else when they run again, as counts in attributes.

        Of layers that stay whole; of any, what others may share, as a random generator that they draw from.
        Or draw other numbers then, as the system has none twice. What open code leaves in tensors is taken to
        be that of any ops; the numbers there are set for each call, and buffers are put back by who runs ops
        again.
        """
        if any(n.name in names for n in self._nodes if n.meta.get("runs_once")):
            return True
        left = {
            n
            for v in self._variations
            for n in (*v.mixing.by_call, *v.mixing.left)
            if n not in self.ops.parameter
        }
        whole = {op.name: f"{op.target}." for op in self.ops.compute if op.kind == "module"} if left else {}
        modules = dict(self.model.named_modules()) if left else {}

        def is_in_memory(name: str) -> bool:
            owner, _, attribute = name.rpartition(".")
            held = getattr(modules.get(owner), attribute, None)
            return isinstance(held, (np.ndarray, torch.Tensor))

        return any(
            any(name.startswith(whole[op]) for op in whole.keys() & names)
            or (is_in_memory(name) and not any(map(name.startswith, whole.values())))
            for name in left
        )

    @property
    def listed_rows(self) -> tuple[ListedRows, ...]:
        """Each list that may have an entry for every row: it is not cut.

        It has where no input outside of it has rows, nor have all entries, or where all that the model gives
        has a place for each entry, and none for rows within one. What has in the first kind of calls has in
        all, of a single entry as well.
        """
        known = {listed.shown for listed in self.first.listed_rows} if self.first else frozenset[str]()
        where = {name for dim in self.ops.dims if dim.name == "batch" for name, _ in dim.where}
        found = []
        for shown, entries in self.inputs.lists:
            own, n = frozenset(itertools.chain(*entries)), len(entries)
            is_by_entry = n > 1 and (not all(map(where.intersection, entries)) or self._gives_by_entry(n))
            if shown in known or (where <= own and is_by_entry):
                found.append(ListedRows(shown, n, own))
        return tuple(found)

    def _gives_by_entry(self, n_entries: int) -> bool:
        """Whether what the model gives has as many places, whatever the batch, and rows along no axis."""
        consumers, by_name = self.ops.consumers, self.ops.by_name
        ends = [a for a, takers in consumers.items() if any(by_name[b].kind == "output" for b in takers)]
        shapes = [tensor.shape for name in ends for tensor in by_name[name].outputs if tensor.shape]
        return bool(shapes) and all(s[0] == n_entries and axis_of(s, "batch") is None for s in shapes)

    def most_microbatches(self, n_rows: int) -> int:
        """Into how many microbatches rows may be cut: none is a single row where that is something else."""
        return max(1, n_rows // 2) if self.one_row else n_rows

    @property
    def goes_by_answers(self) -> bool:
        """Whether a form of the model's mode makes other rows of those that ask for another one."""
        forms = {*self.own_forms[self.model.training]}
        return any(forms.issuperset(pair) for pair in self.answers)

    def answered_otherwise(self, each: Iterable[int], whole: Iterable[int]) -> str:
        """What is asked of all rows where a form of the ``whole`` batch makes others of those of ``each``.

        Both are numbers of forms in the model's mode; empty where nothing is.
        """
        forms = self.forms[self.model.training]
        pairs = itertools.product(sorted({*each}), sorted({*whole}))
        return next(filter(None, (self.answers.get((forms[j], forms[k])) for j, k in pairs)), "")

    def form_met(self, values: Mapping[str, Any]) -> int:
        """:meth:`form_of` in the model's mode; where no form is for these inputs, that of one recorded now.

        Raises :class:`InputError`, with what the model decides otherwise and where, if none can be recorded.
        """
        try:
            return self.form_of(values)
        except InputError as refusal:
            if self.new_forms is None:
                raise
            with in_turn():
                return self._form_recorded(values, self.new_forms, refusal)

    def _form_recorded(self, values: Mapping[str, Any], new_forms: NewForms, refusal: InputError) -> int:
        """The form for inputs that none was for, unless another thread has recorded it meanwhile."""
        with contextlib.suppress(InputError):
            return self.form_of(values)
        try:
            found = new_forms.record(self.inputs, values)
        except AutopipeError as error:
            raise InputError(f"{refusal}. It was tried to record it now: {error}") from error
        for flag, form in found.items():
            self.own[flag].append(len(self.forms[flag]))
            self.forms[flag] = (*self.forms[flag], form)
        made = new_forms.made
        self.answers.update(made.answers())
        self.constants.update(made.constants)
        self.assumptions.asks_too(made.dtypes, made.flags, made.all_forms)
        vars(self).pop("_modules_of_others", None)
        return self.form_of(values)

    def form_of(self, values: Mapping[str, Any], training: bool | None = None) -> int:
        """The number of the form of its own that bound inputs ask for, in the model's mode or the given one.

        Raises :class:`InputError` where they are of a kind or size that has not been recorded.
        """
        training = self.model.training if training is None else training
        own, forms = self.own[training], self.own_forms[training]
        try:
            place = self._answered(self.questions[training], forms[0], values)
            self._check(forms[place], values)
            return own[place]
        except InputError as error:
            refusal = error
        for number, form in zip(own, forms, strict=True):
            if form.for_sizes and form.variation.is_for(self.inputs, values):
                try:
                    form.expected.check(self.model, values)
                    self._answered(form.question, form, values)
                except InputError as error:
                    refusal = error
                else:
                    return number
        raise refusal

    def _check(self, form: Form, values: Mapping[str, Any]) -> None:
        """Raise :class:`InputError` where a form is not for inputs of these sizes."""
        form.variation.check(self.inputs, values)
        form.expected.check(self.model, values)

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
        except of_models() as error:  # most likely inputs of sizes that the question is not for
            form.variation.check(self.inputs, values)
            raise InputError(
                f"{self.inputs.model}: what the model asks of its inputs cannot be asked of these: {error}"
            ) from error

    def _hold_changed(self, changed: Sequence[Change], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record again as the model stands: a change that leaves the graph as it was is of no account.

        Nor are attributes that follow from the sizes of a call's inputs alone. Raises :class:`InputError`,
        which is :class:`_ActsOtherwise` where the model may be recorded in this state beside the others.
        """
        acts_otherwise = _ActsOtherwise(
            f"{self.inputs.model}: {', '.join(map(str, changed))} changed after the capture, and the model's "
            "own code acts on it; capture again as the model is now, or put it back"
        )
        if self.assumptions.is_otherwise:
            raise acts_otherwise
        if attributes := self.assumptions.changed_attributes(len(changed)):
            at = self.model.training, sizes_of(args, kwargs)
            if self.assumptions.is_known_at(at):
                return
            with all_on(self.device, self.model):
                is_by_size = follow_sizes(self.model, attributes, args, kwargs)
            if is_by_size:
                self.assumptions.tolerate_at(at)
                return
        if self.assumptions.n_in_a_row >= _MOST_NUMBERS and self.assumptions.changed_numbers():
            raise acts_otherwise  # as an input, a number is not looked at
        if self.assumptions.n_in_a_row >= _MOST_IN_A_ROW:
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
                found = self.again(self, self.policy)
            is_same = is_same and _is_same(self, found, training)
            in_both_modes = is_same and _is_same(self, found, not training)
        except ModelError as error:
            shown = ", ".join(map(str, changed))
            raise InputError(
                f"{self.inputs.model}: {shown} changed after the capture, and now the model fails on the "
                f"example it was captured with, so that what it does otherwise is not known ({error}); "
                "capture again with an example that it takes as it is now, or put it back"
            ) from error
        except (CaptureError, InputError) as error:
            shown = ", ".join(map(str, changed))
            raise InputError(
                f"{self.inputs.model}: {shown} changed after the capture, and as it is now the model cannot "
                f"be captured ({error}); put it back, or capture again once that is mended"
            ) from error
        if not is_same:
            is_resized = [p.shape for p in found.ops.parameters] != [p.shape for p in self.ops.parameters]
            if is_resized or any(c.kind in (Kind.WEIGHTS, Kind.INFERENCE) for c in changed):
                raise InputError(str(acts_otherwise))
            self.assumptions.know_otherwise()
            raise acts_otherwise
        self.assumptions.tolerate(in_both_modes=in_both_modes)

    def holding(self) -> Callable[[], None]:
        """What is to be called once something that is no change of the model was done to its state.

        Kinds of calls that are for the state that it is in now are for that which it is in then.
        """
        standing = [kind for kind in self.kinds if not kind.n_changes]
        as_they_were = [kind.whole for kind in self.kinds if not kind.whole.changed()]

        def accept() -> None:
            for kind in standing:
                kind.assumptions.accept()
            for layers in as_they_were:
                layers.accept(())

        return accept

    def asked_anew(self) -> Variation:
        """Which sizes may vary, and how rows depend on one another, as the model is now.

        Raises :class:`AutopipeError` where it cannot be captured so.
        """
        with all_on(self.device, self.model):  # its stages may have been put elsewhere
            return self.again(self, self.policy, asks_anew=True).variation

    def asked_of_more(self, number: int, values: Mapping[str, Any], n_rows: int, tail: Tail) -> Mixing:
        """How rows depend on one another in a form of its own of the model's mode, asked of ``n_rows`` too.

        So it is ahead of a ``tail`` that has the whole batch. ``values`` are a batch that asks for the form.
        Raises :class:`AutopipeError` where that cannot be asked.
        """
        if self.new_forms is None:
            raise CaptureError("a copy of a capture asks no more of the model")
        training = self.model.training
        place = self.own[training].index(number)
        return self.new_forms.asked_of_more(training, place, self.inputs, values, n_rows, tail)

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A call's arguments as the captured model gets them: a transformers model without its cache.

        And with numbers that attributes hold, where those are inputs.
        """
        is_added = self.example[1].get("use_cache") is False and "use_cache" not in kwargs
        kwargs = {**kwargs, "use_cache": False} if is_added else kwargs
        held = self.inputs.held
        return args, {**kwargs, HELD: numbers_of(self.model, held)} if held else kwargs

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
        return self.again(self, self.policy.with_opened(paths))

    def with_example(self, args: tuple[Any, ...], kwargs: dict[str, Any], sizes: Sequence[Dim]) -> Capture:
        """The same capture, said to be made on other arguments, which have ``sizes``."""
        known = self.inputs
        inputs = Inputs.of(self.model, args, kwargs)[0]
        inputs = dataclasses.replace(inputs, names=known.names, is_apart=known.is_apart)
        other = {place: d.example for d in sizes for place in d.where}
        named = tuple(
            dataclasses.replace(d, example=other.get(d.places[0], d.example)) for d in self.ops.dims
        )
        ops = dataclasses.replace(self.ops, dims=named)
        return dataclasses.replace(self, example=(args, divided(kwargs)[0]), inputs=inputs, ops=ops)

    @property
    def recorded_with(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The example, and beside its keyword arguments the numbers that attributes held."""
        args, kwargs = self.example
        return args, {**kwargs, HELD: {**self.numbers}} if self.numbers else kwargs

    @property
    def nodes_left(self) -> list[Any]:
        """Of what the graph of the model's mode gives, the numbers that calls leave in attributes."""
        training = self.model.training
        return [*left_in(self.graphs[training], self.outputs[training]).values()]

    def leave(self, number: int, values: Mapping[str, Any]) -> None:
        """Set the numbers that a call with inputs ``values`` leaves in attributes; a form's ``number``."""
        if counts := self.inputs.counts:
            training = self.model.training
            now = {counts[n]: as_tensor(v) for n, v in numbers_of(self.model, counts).items()}
            graph = self.forms[training][number].graph
            leave(self.model, numbers_left_by(graph, self.outputs[training], {**values, **now}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the captured graph as the model would run."""
        kind, values = self.kind_met(args, kwargs)
        number = kind.form_met(values)
        kind.assumptions.begin()
        module = kind._module_of(number)
        module.training = self.model.training
        return kind.answer(module(*values.values()), args, kwargs)

    def _module_of(self, number: int) -> fx.GraphModule:
        """The graph module of a form of its own in the model's mode."""
        training = self.model.training
        is_first = number == self.own[training][0]
        return self.modules[training] if is_first else self._modules_of_others[training, number]


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
