"""Runs a model for a capture: recorded in one way, or plainly; from the state it was given in each time.

One recorded run is left to ``recorder``, what it leaves behind to ``repeats``, what is to be done about what
it meets to ``session``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from ...errors import AutopipeError, CaptureError, InputError, ModelError
from ..calls.call import Depends, Recording, Setting
from ..calls.faults import of_models
from ..calls.kinds import kind_of
from ..calls.module_modes import in_modes
from ..calls.sharing import Twins
from ..code import attributes, leaf_setters, opaque
from ..code.kept import NamesRead
from ..code.leaves import Policy, asking, eager
from ..code.restart import (
    CloseModule,
    Function,
    Method,
    OpenLeaf,
    Restart,
    Statement,
    TellMethod,
    WatchLeaves,
    WatchMethods,
)
from ..code.set_first import reads_before_sets
from ..inputs.arguments import Inputs
from ..inputs.held_numbers import divided
from ..inputs.structure import flatten
from ..inputs.writes import called
from ..members import buffers_in, modules_in, parameters_in
from ..patches.memos import Memos
from ..patches.route import Route
from ..record.draws import OwnGenerators
from ..record.identity import compares
from ..record.passed_on import PassedOn
from ..record.recorder import Recorder
from ..state import global_hooks
from ..state.example_data import are_close, device_of, fresh, other_data, united
from ..state.quick_check import Seen
from ..state.state import Snapshot, seed
from ..values import casts
from ..values.origin import Unseen, alive
from .hidden_sizes import NumberSource, Settling, Shift
from .repeats import Repeats
from .same_in_eval import Evaluation, are_recorded_alike, evaluated

__all__ = ["AS_GIVEN", "Attempt", "Refused", "Runs"]

AS_GIVEN = Setting()
_LIBRARIES = str(pathlib.Path(torch.__file__).parent), str(pathlib.Path(__file__).parents[2])


class Refused(ModelError):
    """The model itself fails on the example in one mode; the other mode may still work."""


@dataclasses.dataclass(slots=True)
class Attempt:
    """One way of recording a model, and what was found out about it.

    ``exporting``: libraries are told that they are exported; ``numbers``: numbers in the data stay in the
    graph as long as only torch takes them; ``by_value``: numbers made of inputs may be read; ``coarse``:
    functions that something holds stay whole too, and statements around those that leave what no graph can;
    ``eager``: what ``torch.compile`` has wrapped runs as it is written.
    ``functions`` stay whole, and those that read data at the lines ``kept``; ``met_number``: a number in the
    data was asked for. Forward hooks of the leaves ``hooked`` keep what others then use; the code
    around those ``moded`` sets their modes. Statements of the modules ``taken_apart`` may stay whole, as
    those of the root, since others use what is made inside. The leaves ``divided`` were opened only for more
    to cut, which none is where nothing ``divides``. Methods ``told``, by (path, name), set what leaves go by;
    those of modules at the paths ``watched`` may. Numbers ``settled`` where they are made of sizes are read
    in C and stay as they are.
    """

    policy: Policy
    exporting: bool = False
    numbers: bool = False
    by_value: bool = False
    coarse: bool = False
    eager: bool = False
    tried: set[tuple[str, bool]] = dataclasses.field(default_factory=set)
    functions: dict[Function | Method | Statement, None] = dataclasses.field(default_factory=dict)
    kept: set[str] = dataclasses.field(default_factory=set)
    hooked: set[str] = dataclasses.field(default_factory=set)
    moded: set[str] = dataclasses.field(default_factory=set)
    taken_apart: set[str] = dataclasses.field(default_factory=set)
    watched: set[str] = dataclasses.field(default_factory=set)
    told: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    divided: list[str] = dataclasses.field(default_factory=list)
    divides: bool = True
    settled: set[NumberSource] = dataclasses.field(default_factory=set)
    obstacles: list[str] = dataclasses.field(default_factory=list)
    met_number: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether only modules are kept whole, and none is told or watched from outside."""
        return not (
            self.functions or self.hooked or self.moded or self.watched or self.told or self.exporting
        )


class Runs:
    """The runs that one capture takes. The model is left to ``snapshot`` to put back.

    Calls are routed by ``route``, which patches put on; casts are followed in the files ``casting``; open
    code reads the attributes ``of_leaves``, by path and name; arguments must be told apart where it
    ``is_apart``; the sizes of what the leaves ``by_data`` give follow from data; ``of_inputs`` is what can
    be other in inputs at another call; ``first_set`` are the attributes that its last recording in each mode
    on the example sets before it reads them; ``answers`` are what the model gave for the example when it was
    last recorded in each mode.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        snapshot: Snapshot,
        *,
        sizes_vary: bool,
    ) -> None:
        self.model, self.args, self.kwargs, self.snapshot = model, args, kwargs, snapshot
        self.of_inputs = Depends.INPUT | (Depends.SHAPE if sizes_vary else Depends.NOTHING)
        self.casting: set[str] = set()
        self.of_leaves: set[tuple[str, str]] = set()
        self.by_data: set[str] = set()
        held = [*parameters_in(model), *buffers_in(model)]
        self.held, self.modules = [t for _, t in held], [(path, m) for path, m, _ in snapshot.modules]
        self.names = {id(t): n for n, t in reversed(held)}
        self.paths = {id(m): n for n, m in self.modules}
        self.device = device_of(model, args, kwargs)
        self.known = frozenset(map(id, snapshot.tensors_held()))
        self.kind = functools.cache(functools.partial(kind_of, model))
        self.classes_of_open = functools.cache(functools.partial(_classes_of_open, self.modules))
        self.names_of_open = functools.cache(attributes.names_of_open)
        self.spells_mode = functools.cache(attributes.spells_mode)
        self.names_read = NamesRead(model)
        self.memos = Memos(model, [cls for _, _, cls in snapshot.reached.classes])
        self.repeats = Repeats(model, snapshot, self.run, self.of_leaves, self.names_read, divided(kwargs)[1])
        self.route = Route()
        self.is_apart = False
        self.first_set: dict[bool, frozenset[tuple[str, str]]] = {}
        self.answers: dict[bool, Sequence[Any]] = {}
        self._seen: Seen | None = None

    def record(
        self,
        attempt: Attempt,
        training: bool,
        outcomes: Sequence[Any] = (),
        setting: Setting = AS_GIVEN,
        sharing: Mapping[str, bool] | None = None,
    ) -> Recording:
        """One recording; the model starts in the state it was given in.

        ``outcomes`` are what the first reads of inputs are to come out as; what no data lead to then are
        results of leaves too, of which those at the paths ``sharing`` that are alike run once.
        """
        for unseen in _passes():
            is_probe = unseen is not None and unseen.is_probe
            with torch.set_grad_enabled(setting.grad):
                try:
                    recording = self.run_recorded(attempt, training, outcomes, setting, unseen, sharing)
                except WatchLeaves:
                    continue
                except (Restart, AutopipeError):
                    if is_probe:
                        continue
                    raise
            if is_probe:
                continue
            is_natural = not outcomes and setting == AS_GIVEN
            answer = self.answers[training] if is_natural else None
            is_as_begun = self.is_as_begun()
            sees_no_mode = self.sees_no_mode(attempt, recording)
            around = self.repeats.apart() if setting != AS_GIVEN else contextlib.nullcontext()
            with around, torch.set_grad_enabled(setting.grad):
                is_changed = self.repeats.check_state(
                    attempt.policy, recording, is_as_begun, answer, sees_no_mode=sees_no_mode
                )
            recording.goes_by_mode |= is_changed
            if is_natural and not is_as_begun:
                self.note_carrying(attempt, recording)
            return self.looked_at(recording, attempt, is_changed) if is_natural else recording
        raise AssertionError("a watched recording suspects nothing")

    def note_carrying(self, attempt: Attempt, recording: Recording) -> None:
        """Note the leaves that go by what calls before have left in them; the model has just been called.

        Those that go by what others leave within a call are together. Raises :class:`OpenLeaf` for one that
        counts its calls: once a step, then.
        """
        if self.device.type == "meta" or not (found := self.repeats.changed_in_leaves(attempt.policy)):
            return
        training, is_beside = recording.training, bool(self.snapshot.changed_beside())
        goes_by_calls = not self.repeats.is_repeated(training, None)[0]
        for path in (path for path, counts in found.items() if counts and goes_by_calls):
            if attempt.policy.is_openable(path) and (path, False) not in attempt.tried:
                raise OpenLeaf(path, f"{path} counts its calls, and goes by it")
        if not (goes_by_calls or is_beside):
            return
        calls = [c for c in recording.calls if c.op == "call_module" or c.target is in_modes]
        left = self.repeats.left_in({c.path for c in calls}, training)
        if goes_by_calls:
            recording.begun |= left.keys()
        times = Counter(place for c in calls for place in left.get(c.path, ()))
        shared = {p: undo for places in left.values() for p, undo in places.items() if times[p] > 1}
        if shared and self.repeats.hangs_on(shared.values(), left, training):
            for call in calls:
                call.shares |= frozenset(str(place) for place in left.get(call.path, ()) if place in shared)
        self.snapshot.start(training)
        self.run(training)  # others look at where a call leaves the model

    def take(self, shifted: Recording, attempt: Attempt) -> Recording:
        """A recording just made with shifted numbers that is as it would be without, looked at as others."""
        is_as_begun, sees_no_mode = self.is_as_begun(), self.sees_no_mode(attempt, shifted)
        is_changed = self.repeats.check_state(attempt.policy, shifted, is_as_begun, sees_no_mode=sees_no_mode)
        shifted.goes_by_mode |= is_changed
        if not is_as_begun:
            self.note_carrying(attempt, shifted)
        return self.looked_at(shifted, attempt, is_changed)

    def looked_at(self, recording: Recording, attempt: Attempt, is_changed: bool) -> Recording:
        """A recording with what is found out where its run has left the model, which ``is_changed`` by it."""
        if recording.keeps:
            self.look_again(attempt, recording)
        if is_changed:
            taken = {c.target for call in recording.calls for c in call.inputs if c.op == "get_attr"}
            rebuilt = {(p, n) for p, _, n in (b.rpartition(".") for b in recording.rebuilt - taken)}
            recording.set_first = self.repeats.set_first(attempt.policy, recording.training) | rebuilt
            names = self.repeats.carried(attempt.policy, recording.training)
            recording.carried = frozenset((recording.training, name) for name in names)
        self.first_set[recording.training] = recording.set_first
        recording.filled |= self.repeats.unread
        return recording

    def run_recorded(
        self,
        attempt: Attempt,
        training: bool,
        outcomes: Sequence[Any],
        setting: Setting,
        unseen: Unseen | None,
        sharing: Mapping[str, bool] | None = None,
        shares: bool = True,
        restores: bool = True,
        shift: Shift | None = None,
    ) -> Recording:
        """One run; leaves that are alike run once where each ``shares`` what it gives.

        That is all of them on the meta device, elsewhere those at the paths ``sharing``.

        Numbers made of sizes are others where C reads them, by ``shift``.
        """
        if restores:
            self.start(training)
        self.look_anew()
        given = self.inputs_of(setting)
        is_probe = unseen is not None and unseen.is_probe
        args, kwargs = fresh(other_data(given) if is_probe else given, self.device)
        recorder = Recorder(
            self.names,
            self.paths,
            self.known,
            self.device,
            attempt.policy,
            training,
            unseen,
            outcomes,
            attempt.kept,
            attempt.by_value,
            attempt.numbers,
            attempt.hooked,
            self.twins(sharing) if shares and unseen is None else None,
            attempt.moded,
            attempt.watched,
        )
        recorder.by_data, recorder.at.is_coarse = self.by_data, attempt.coarse
        recorder.at.taken_apart = {"", *attempt.taken_apart}
        recorder.reads.names_read = self.names_read
        recorder.bounded.put_back = self.snapshot.tensors.keys()
        recorder.before_writes = self.snapshot.before_writes
        recorder.generators = OwnGenerators(self.snapshot.reached.own_generators)
        recorder.passed_on = PassedOn([holder for *_, holder in self.snapshot.reached.holders])
        kept = recorder.opaque
        modules = self.modules if restores else modules_in(self.model)
        # of what is led elsewhere than the example leads, no run of the model tells
        is_led = bool(outcomes) or setting != AS_GIVEN
        first = self.first_set.get(training, frozenset()) if is_led else frozenset()
        recorder.ledger.numbers.watch = shift or (Settling(attempt.settled) if attempt.settled else None)
        recorder.ledger.most = sys.maxsize if shift is None else shift.most
        try:
            with (
                eager() if attempt.eager else contextlib.nullcontext(),
                self.route.to(recorder, attempt.exporting),
                opaque.replaced(attempt.functions, self.model, kept.function, kept.method, kept.statement),
                leaf_setters.watched(
                    self.model, attempt.watched, attempt.told, recorder.at, kept.told, kept.set
                ),
                opaque.drawing(kept.outside_draw, {type(m) for _, m in modules}),
                self.memos.bypassed(recorder.at),
                casts.followed(self.casting, recorder.at, of_tensors=attempt.numbers),
                attributes.noted(
                    self.model,
                    modules,
                    recorder.at.is_in_leaf,
                    recorder.reads.asks_a_leaf,
                    self.names_of_open,
                    recorder.reads.asks_for_mode,
                    recorder.modes.note,
                ),
                reads_before_sets(self.model, first) as read,
            ):
                inputs, named = Inputs.of(self.model, args, kwargs)
                numbers = [str(inputs.names[i]) for i in inputs.numbers]
                recording = recorder.run(self.model, modules, args, kwargs, named, self.of_inputs, numbers)
            recording.set_first = first - read
            if not (is_probe or outcomes or shift) and setting == AS_GIVEN:
                self.answers[training] = recorder.answer
            return recording
        except (CaptureError, ModelError):
            raise
        except Exception as error:
            if recorder.twins is not None and recorder.twins.is_used:
                return self.run_recorded(
                    attempt, training, outcomes, setting, unseen, shares=False, restores=restores, shift=shift
                )
            if outcomes or setting != AS_GIVEN or is_probe or shift is not None:
                raise CaptureError(f"no data leads there: {_short(error)}") from error
            self.explain(error, recorder.failed, training)
        finally:
            attempt.met_number |= recorder.reads.met_number
            self.of_leaves |= recorder.reads.of_leaves
            recorder.end()

    def may_be_for_both(self, attempt: Attempt, recording: Recording) -> bool:
        """Whether nothing in the model's own code can have gone by the mode in a recording."""
        is_told = not recording.goes_by_mode and self.device.type != "meta"
        return is_told and self.sees_no_mode(attempt, recording)

    def sees_no_mode(self, attempt: Attempt, recording: Recording) -> bool:
        """Whether the model's own code, but for that in leaves, can know of no mode in a recording."""
        is_told = attempt.is_plain and not recording.reads_mode
        return is_told and not self.spells_mode(self.classes_of_open(attempt.policy))

    def evaluation(self) -> Evaluation:
        """What is shown a run of a recording in evaluation that others begin now."""
        return Evaluation(self.held, self.device)

    def did_as_recorded(self, seen: Evaluation) -> bool:
        """Whether such a run, just made, did what was recorded in training, and nothing else."""
        is_so = seen.is_as_recorded and self.snapshot.switches_flags_alone and self.is_as_begun()
        self.look_anew()  # whatever others run from here on
        return is_so

    def did_alike(self, attempt: Attempt, training: Recording, evaluation: Recording) -> bool:
        """Whether what was recorded in evaluation did what was recorded in training, and nothing else.

        They compute the same, and the one in evaluation has left all as it was.
        """
        is_told = self.may_be_for_both(attempt, training) and self.snapshot.switches_flags_alone
        return is_told and are_recorded_alike(training, evaluation)

    def is_for_both(
        self, attempt: Attempt, recording: Recording, sharing: Mapping[str, bool] | None = None
    ) -> bool:
        """Whether a recording made in training is the one in evaluation too.

        Nothing in the model's own code may have gone by the mode, and what is called whole must give in
        evaluation, on the example, what it is recorded to give, and do nothing else. Of the leaves at the
        paths ``sharing`` those that are alike run once.
        """
        if not self.may_be_for_both(attempt, recording):
            return False
        self.start(training=False)
        if not self.snapshot.switches_flags_alone:
            return False
        given = Inputs.of(self.model, *fresh(self.inputs_of(recording.setting), self.device))[1]
        seed(self.device)
        with torch.set_grad_enabled(recording.setting.grad):  # what is patched stays, as when it was recorded
            twins = self.twins(sharing)
            answer = evaluated(self.model, self.held, recording, given, self.device, twins)
        if answer is None or not self.is_as_begun():
            return False
        if recording.setting == AS_GIVEN:
            self.answers.setdefault(False, answer)
        return True

    def twins(self, sharing: Mapping[str, bool] | None) -> Twins | None:
        """What leaves share in a run, if any do."""
        is_meta = self.device.type == "meta"
        return Twins(self.kind, None if is_meta else sharing) if is_meta or sharing else None

    def shifted(self, attempt: Attempt, training: bool, shift: Shift) -> Recording | None:
        """The recording with numbers shifted where C reads them; None where that cannot be."""
        try:
            with torch.set_grad_enabled(AS_GIVEN.grad):
                return self.run_recorded(attempt, training, (), AS_GIVEN, None, shift=shift)
        except (Restart, AutopipeError):
            return None

    def look_again(self, attempt: Attempt, recording: Recording) -> None:
        """Record once more from where a run has left the leaves: does code outside set what they go by?

        Raises :class:`WatchMethods` or :class:`TellMethod` where it does, and :class:`OpenLeaf` for a leaf
        that its first call sets anew for those after it, as no table is that is made once: what it hands on
        is then a value like others. One that stays whole has its calls together.
        """
        try:
            again = self.run_recorded(attempt, recording.training, (), AS_GIVEN, None, restores=False)
        except (WatchMethods, TellMethod):
            raise
        except (Restart, AutopipeError):
            return  # what it is, the run from the start has not met
        for path in sorted(again.begun):
            calls = [c for c in recording.calls if c.path == path and c.op != "get_attr"]
            if len(calls) < 2 or any(c.keeps for c in calls):
                continue
            if attempt.policy.is_openable(path) and (path, False) not in attempt.tried:
                raise OpenLeaf(path, f"a call of {path} sets what the next one goes by")
            calls[-1].keeps = True

    def inputs_of(self, setting: Setting) -> tuple[Any, Any]:
        """The example with gradients asked for as the setting has it."""
        if setting.requiring is None:
            return self.args, self.kwargs
        inputs, tensors = Inputs.of(self.model, self.args, self.kwargs)
        return inputs.rebuild(self.model, setting.apply(tensors))

    def start(self, training: bool) -> None:
        """Put everything back, and the model in a mode; where it was just seen to be so, without a look."""
        seen, self._seen = self._seen, None
        self.snapshot.start(training, seen)

    def is_as_begun(self) -> bool:
        """Whether the last run has left everything as it was."""
        self._seen = self.snapshot.seen_unchanged()
        return self._seen is not None

    def look_anew(self) -> None:
        """Something runs that may change what was seen."""
        self._seen = None

    def run(self, training: bool, change: Callable[[Any], Any] | None = None, *, is_one: bool = False) -> Any:
        """The model's own result, not recorded, from the state it is in; on changed data where asked."""
        self.look_anew()
        given = (self.args, self.kwargs)
        args, kwargs = fresh(given if change is None else change(given), self.device, is_one=is_one)
        seed(self.device)
        with self.route.suspended(), asking():
            return called(self.model, args, kwargs)

    def explain(self, error: Exception, failed: str | None, training: bool) -> NoReturn:
        """A run raised: is it the model's own error, or something that recording brought about?"""
        name = type(self.model).__name__
        self.start(training)
        try:
            self.run(training)
        except Exception as own:
            mode = "training" if training else "evaluation"
            if self.device.type == "meta":  # where its own run may fail earlier, by what a recording answers
                raise Refused(
                    f"{name} cannot be run in {mode} mode on the meta device: {_short(error)} (at "
                    f"{_place(error)}); where sizes are in the data, give the model weights and inputs"
                ) from error
            said = f"{name}'s own forward fails in {mode} mode on the example arguments: {_short(own)}"
            raise Refused(f"{said}; pass args and kwargs it can run on") from own
        if failed:
            raise CloseModule(failed, f"recording inside {failed} fails: {_short(error)}") from error
        raise CaptureError(
            f"{name} runs, but cannot be recorded: {_short(error)} (at {_place(error)}); move that code "
            f"into a submodule, which is then kept whole"
        ) from error

    def check_hooks(self) -> None:
        """Hooks on all modules would run for stages too, which are modules: none may do more than look."""
        if global_hooks.others():
            raise CaptureError(
                f"{type(self.model).__name__} cannot be captured while global module hooks are registered "
                "that may change what they are given (register_module_forward_hook and its like): they would "
                "run for stages too; remove them, or register them on the modules that they are for"
            )

    def check_given(self) -> None:
        """A tensor that is given twice is two to a recording, which the model must not tell from one.

        Where it would, two that could be one at a later call are to be held apart.
        """
        held = [v for v in flatten((self.args, self.kwargs))[0] if isinstance(v, torch.Tensor)]
        is_twice = len({*map(id, held)}) < len(held)
        is_alike = len({(t.shape, t.dtype) for t in held}) < len(held)
        if self.device.type == "meta" or not (is_twice or (is_alike and compares(self.model))):
            return
        if not is_twice:
            self.is_apart = not self.takes_one_for_two(united)
        elif not self.takes_one_for_two():
            raise InputError(
                f"{type(self.model).__name__} behaves differently where two arguments are the same tensor, "
                "which stages cannot tell; give it a copy for each: x.clone()"
            )

    def takes_one_for_two(self, change: Callable[[Any], Any] | None = None) -> bool:
        """Whether the model gives the same for one tensor in two places as for two that are equal."""

        def given(*, is_one: bool) -> Sequence[Any]:
            self.start(training=False)
            return flatten(self.run(False, change, is_one=is_one))[0]

        try:
            one = given(is_one=True)
            if change is None and are_close(self.answers.get(False, ()), one):
                return True  # else it may draw: both are asked for with equal seeds
            return are_close(given(is_one=False), one)
        except of_models():  # whatever it is: then the model does not take these data
            return True


def _classes_of_open(modules: Sequence[tuple[str, nn.Module]], policy: Policy) -> frozenset[type]:
    return frozenset([type(m) for path, m in modules if not policy.is_inside_leaf(path)])


def _passes() -> Iterator[Unseen | None]:
    """How to run a model until no tensor is of unknown origin: as it is; on other data; watched."""
    yield None
    before = alive()
    probe = Unseen(True, before)
    yield probe
    yield Unseen(False, before, expected=probe.by_line)


def _short(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _place(error: BaseException) -> str:
    """The last line that is neither torch's nor of this package, where there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}" if own else "unknown place"
