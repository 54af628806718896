"""Records a model in both modes under one leaf policy, which it adjusts to what the model's Python does.

One run is left to ``recorder``, tying the two recordings together to ``modes``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from ...errors import AutopipeError, CaptureError, ModelError
from ..calls.call import Recording, Setting
from ..calls.kinds import kind_of
from ..calls.likeness import is_same, prune
from ..calls.sharing import Twins
from ..inputs.arguments import Inputs
from ..inputs.structure import flatten
from . import casts, memos, opaque, patches
from .given import are_close, device_of, fresh, other_data
from .leaves import Policy
from .origin import Unseen, alive
from .recorder import Recorder
from .restart import (
    CloseModule,
    FollowCasts,
    Function,
    KeepFunction,
    KeepReads,
    Method,
    OpenLeaf,
    Restart,
    WatchLeaves,
)
from .route import Route
from .settings import settings, under
from .state import Snapshot, seed, switch

__all__ = ["Refused", "Session"]

_MOST_TRIES = 100
_MOST_FORMS = 8
_AS_GIVEN = Setting()
_logger = logging.getLogger("autopipe")


class Refused(ModelError):
    """The model itself fails on the example in one mode; the other mode may still work."""


@dataclasses.dataclass(slots=True)
class Attempt:
    """One way of recording a model, and what was found out about it.

    ``exporting``: libraries are told that they are exported; ``numbers``: whole numbers in the data stay in
    the graph as long as only torch takes them; ``by_value``: numbers made of inputs may be read.
    ``functions`` stay whole, and those that read data at the lines ``kept``; ``met_number``: a whole number
    in the data was asked for. Forward hooks of the leaves ``hooked`` keep what others then use.
    """

    policy: Policy
    exporting: bool = False
    numbers: bool = False
    by_value: bool = False
    tried: set[tuple[str, bool]] = dataclasses.field(default_factory=set)
    functions: dict[Function | Method, None] = dataclasses.field(default_factory=dict)
    kept: set[str] = dataclasses.field(default_factory=set)
    hooked: set[str] = dataclasses.field(default_factory=set)
    obstacles: list[str] = dataclasses.field(default_factory=list)
    met_number: bool = False


class Session:
    """The runs that one capture takes. The model is left to ``snapshot`` to put back."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policy: Policy,
        snapshot: Snapshot,
    ) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        self.first_policy, self.snapshot = policy, snapshot
        self.attempt = Attempt(policy)
        self.notes: list[str] = []
        self.casting: set[str] = set()
        self.names = {id(t): n for n, t in reversed([*model.named_parameters(), *model.named_buffers()])}
        self.paths = {id(m): n for n, m in model.named_modules()}
        self.device = device_of(model, args, kwargs)
        self.known = frozenset(map(id, snapshot.tensors_held()))
        self.kind = functools.cache(functools.partial(kind_of, model))
        self.route = Route()

    @property
    def policy(self) -> Policy:
        """Which modules are leaves, as far as that is known."""
        return self.attempt.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.attempt.policy = policy

    @property
    def obstacles(self) -> list[str]:
        """Why modules had to be closed."""
        return self.attempt.obstacles

    def forms(self) -> dict[bool, list[Recording]]:
        """Recordings in each mode: of what the example does, then of how else reads of inputs may come out.

        What must stay whole or be opened is found by trying. The model runs as it runs untraced; only where
        that cannot be recorded, or leaves less to cut, ``torch.compiler.is_exporting()`` answers yes
        meanwhile, so that libraries avoid shortcuts that depend on data; :attr:`notes` then says so.

        Raises :class:`CaptureError` where it cannot be recorded, :class:`ModelError` where it cannot be run.
        """
        with patches.applied(self.model.modules()) as self.route:
            try:
                found = self.found()
                if not self.obstacles:
                    return found
                error: CaptureError | Refused | None = None
            except (CaptureError, Refused) as refusal:
                # on the meta device a model may fail only because it looks at data
                if isinstance(refusal, Refused) and self.device.type != "meta":
                    raise
                found, error = None, refusal
            return self.fallen_back(found, error)

    def again(self, functions: Mapping[Function | Method, None]) -> dict[bool, list[Recording]] | None:
        """Other recordings, in which functions stay whole; None where that cannot be."""
        before = self.attempt
        kept = dict.fromkeys((*before.functions, *functions))
        self.attempt = dataclasses.replace(before, functions=kept, tried=set(before.tried))
        try:
            with patches.applied(self.model.modules()) as self.route:
                return self.found()
        except (CaptureError, ModelError):
            self.attempt = before
            return None

    def fallen_back(
        self, found: dict[bool, list[Recording]] | None, error: CaptureError | Refused | None
    ) -> dict[bool, list[Recording]]:
        """What is best where recording the model's own path meets obstacles: it, or a way around."""
        kept, why = self.attempt, self.obstacles[0] if self.obstacles else str(error)
        for way in (*("numbers",) * kept.met_number, "exporting", "by_value"):
            if way == "by_value" and found is not None:
                break  # numbers asked for each time are worse than a module kept whole
            self.attempt = Attempt(self.first_policy, way == "exporting", way == "numbers", way == "by_value")
            try:
                other = self.found()
            except (CaptureError, ModelError):
                continue
            if found is None or len(self.obstacles) < len(kept.obstacles):
                if self.attempt.exporting:
                    self.notes.append(
                        f"recorded with torch.compiler.is_exporting() answering yes, since the model's own "
                        f"path cannot be: {why}"
                    )
                return other
        self.attempt = kept
        if found is None:
            assert error is not None
            raise error
        return found

    def found(self) -> dict[bool, list[Recording]]:
        """See :meth:`forms`; in one way."""
        for _ in range(_MOST_TRIES):
            try:
                evaluation = self.record(training=False)
                training = self.training_form(evaluation)
                leaf = self.policy.to_open([c.target for c in training.calls if c.op == "call_module"])
                if leaf is None or (leaf, False) in self.attempt.tried:
                    return self.with_others(training, evaluation)
            except (CloseModule, OpenLeaf) as restart:
                self.adjust(restart)
                continue
            except KeepFunction as found:
                self.attempt.functions[found.function] = None
                continue
            except KeepReads as found:
                self.attempt.kept.add(found.source)
                continue
            except FollowCasts as found:
                self.casting.add(found.module)
                continue
            self.attempt.tried.add((leaf, False))
            self.policy = self.policy.with_opened([leaf])
        raise CaptureError(f"{type(self.model).__name__}: no set of leaves found in {_MOST_TRIES} recordings")

    def training_form(self, evaluation: Recording) -> Recording:
        """The recording in training mode; that of evaluation where the model refuses to train so."""
        try:
            return self.record(training=True)
        except Refused as error:
            _logger.warning("%s; its training form is taken to be its evaluation form", error)
            return evaluation

    def with_others(self, training: Recording, evaluation: Recording) -> dict[bool, list[Recording]]:
        forms = {False: self.in_all_settings(evaluation)}
        forms[True] = forms[False] if training is evaluation else self.in_all_settings(training)
        return forms

    def in_all_settings(self, natural: Recording) -> list[Recording]:
        """A recording and its outcomes, and those in other surroundings where the code asks for them."""
        if not natural.asked:
            return self.outcomes(natural)
        asked, (_, tensors) = natural.asked, Inputs.of(self.model, self.args, self.kwargs)
        names = sorted(n for n, t in tensors.items() if t.is_floating_point())
        out: list[Recording] = []
        for setting in settings(asked, tensors):
            try:
                found = self.record(natural.training, (), setting) if out else natural
            except FollowCasts:
                raise
            except (CaptureError, ModelError, Restart):
                continue  # called so, the model is refused
            out += [under(r, asked, setting, names) for r in self.outcomes(found, setting)]
        return out

    def outcomes(self, natural: Recording, setting: Setting = _AS_GIVEN) -> list[Recording]:
        """A recording, and others in which reads of inputs that give a truth come out the other way.

        The model's Python is made to believe so; where it then cannot be recorded, that outcome is left out.
        """
        out, queue, harmless = [natural], [(natural, 0)], set[str]()
        while queue and len(out) < _MOST_FORMS:
            known, start = queue.pop(0)
            for place, branch in enumerate(known.branches[start:], start):
                is_open = isinstance(branch.outcome, bool) and branch.is_forceable
                if not is_open or branch.source in harmless:
                    continue
                other = self.forced(known, place, setting)
                if other is None:
                    continue
                out.append(other)
                asks_more = [b.source for b in other.branches] != [b.source for b in known.branches]
                if not asks_more and is_same(prune(other), prune(known)):
                    harmless.add(branch.source)
                else:
                    queue.append((other, place + 1))
        return out

    def forced(self, known: Recording, place: int, setting: Setting) -> Recording | None:
        """The recording in which the read at ``place`` comes out the other way; None where there is none."""
        branch = known.branches[place]
        script = (*(b.outcome for b in known.branches[:place]), not branch.outcome)
        try:
            return self.record(known.training, script, setting)
        except (CaptureError, ModelError):
            return None
        except FollowCasts:
            raise
        except Restart:
            if branch.in_function:
                raise KeepReads(branch.source) from None
            return None

    def adjust(self, restart: CloseModule | OpenLeaf) -> None:
        """Keep a module whole, or open a leaf, because Python did what a graph cannot."""
        path, name = restart.path, type(self.model).__name__
        if not path:
            raise CaptureError(
                f"{name} cannot be captured: {restart.why}; move that code into a submodule, which is then "
                f"kept whole, or out of the model"
            ) from None
        close = isinstance(restart, CloseModule)
        if close:
            self.attempt.obstacles.append(restart.why)
        if not close and not self.policy.is_openable(path) and path not in self.attempt.hooked:
            self.attempt.hooked.add(path)
            return
        if (path, close) in self.attempt.tried or (not close and not self.policy.is_openable(path)):
            parent = path.rpartition(".")[0]
            self.adjust(CloseModule(parent, restart.why))
            return
        self.attempt.tried.add((path, close))
        if close:
            self.policy = self.policy.with_closed({path, *self.policy.like(path)})
        else:
            self.policy = self.policy.with_opened([path])

    def close(self, path: str, why: str) -> None:
        """Keep a module whole in every further attempt, because the graph of it is not the module.

        Raises :class:`CaptureError` for the model itself, and for a module that is whole already.
        """
        self.adjust(CloseModule("" if path in self.first_policy.closed else path, why))
        self.attempt.obstacles.pop()
        self.first_policy = self.first_policy.with_closed(self.policy.closed)

    # ---------------------------------------------------------------- one run

    def record(self, training: bool, outcomes: Sequence[Any] = (), setting: Setting = _AS_GIVEN) -> Recording:
        """One recording; the model starts in the state it was given in.

        ``outcomes`` are what the first reads of inputs are to come out as.
        """
        for unseen in _passes():
            is_probe = unseen is not None and unseen.is_probe
            with torch.set_grad_enabled(setting.grad):
                try:
                    recording = self.run_recorded(training, outcomes, setting, unseen)
                except WatchLeaves:
                    continue
                except (Restart, AutopipeError):
                    if is_probe:
                        continue
                    raise
            if is_probe:
                continue
            self.check_state(training)
            return recording
        raise AssertionError("a watched recording suspects nothing")

    def run_recorded(
        self,
        training: bool,
        outcomes: Sequence[Any],
        setting: Setting,
        unseen: Unseen | None,
        shares: bool = True,
    ) -> Recording:
        """One run; on the meta device leaves that are alike run once, where each ``shares`` what it gives."""
        self.start(training)
        given = self.inputs_of(setting)
        is_probe = unseen is not None and unseen.is_probe
        args, kwargs = fresh(other_data(given) if is_probe else given, self.device)
        recorder = Recorder(
            self.names,
            self.paths,
            self.known,
            self.device,
            self.policy.is_leaf,
            training,
            unseen,
            outcomes,
            self.attempt.kept,
            self.attempt.by_value,
            self.attempt.numbers,
            self.attempt.hooked,
            Twins(self.kind) if shares and self.device.type == "meta" and unseen is None else None,
        )
        kept = recorder.kept
        try:
            with (
                self.route.to(recorder, self.attempt.exporting),
                opaque.replaced(self.attempt.functions, self.model, kept.function, kept.method),
                opaque.drawing(kept.outside_draw, self.model),
                memos.bypassed(recorder.at),
                casts.followed(self.casting, recorder.at),
            ):
                return recorder.run(self.model, args, kwargs, Inputs.of(self.model, args, kwargs)[1])
        except (CaptureError, ModelError):
            raise
        except Exception as error:
            if recorder.twins is not None and recorder.twins.is_used:
                return self.run_recorded(training, outcomes, setting, unseen, shares=False)
            if outcomes or setting != _AS_GIVEN or is_probe:
                raise CaptureError(f"no data leads there: {_short(error)}") from error
            self.explain(error, recorder.failed, training)
        finally:
            self.attempt.met_number |= recorder.reads.met_number

    def inputs_of(self, setting: Setting) -> tuple[Any, Any]:
        """The example with gradients asked for as the setting has it."""
        if setting.requiring is None:
            return self.args, self.kwargs
        inputs, tensors = Inputs.of(self.model, self.args, self.kwargs)
        return inputs.rebuild(self.model, setting.apply(tensors))

    def start(self, training: bool) -> None:
        self.snapshot.restore()
        if self.model.training != training:
            switch(self.model, training)

    def run(self, training: bool, change: Callable[[Any], Any] | None = None) -> Any:
        """The model's own result, not recorded, from the state it is in; on changed data where asked."""
        given = (self.args, self.kwargs)
        args, kwargs = fresh(given if change is None else change(given), self.device)
        seed(self.device)
        with self.route.suspended():
            return self.model(*args, **kwargs)

    def explain(self, error: Exception, failed: str | None, training: bool) -> NoReturn:
        """A run raised: is it the model's own error, or something that recording brought about?"""
        name = type(self.model).__name__
        self.start(training)
        try:
            self.run(training)
        except Exception as own:
            mode = "training" if training else "evaluation"
            said = f"{name}'s own forward fails in {mode} mode on the example arguments: {_short(own)}"
            raise Refused(f"{said}; pass args and kwargs it can run on") from own
        if failed:
            raise CloseModule(failed, f"recording inside {failed} fails: {_short(error)}") from error
        raise CaptureError(
            f"{name} runs, but cannot be recorded: {_short(error)} (at {_place(error)}); move that code "
            f"into a submodule, which is then kept whole"
        ) from error

    def check_state(self, training: bool) -> None:
        """Python state that an open module changes must not matter to the next call."""
        changed = [(p, a) for p, a in self.snapshot.changes() if p == "" or not self.inside_leaf(p)]
        beside = [(p, a) for p, a in self.snapshot.changed_beside() if p == "" or not self.inside_leaf(p)]
        if not changed and not beside:
            return
        path, attribute = next(((p, a) for p, a in changed if a == "_buffers"), (changed + beside)[0])
        name = type(self.model).__name__
        shown = f"{path or name}.{attribute}" if changed else attribute
        if attribute == "_buffers":
            raise CloseModule(path, f"a forward replaces a buffer of {path or 'the model itself'}")
        self.start(training)
        before = self.snapshot.numbers()
        first = flatten(self.run(training))[0]
        between = self.snapshot.numbers()
        second = flatten(self.run(training))[0]
        after = self.snapshot.numbers()
        if not are_close(first, second) or not self.forgets(training):
            raise CloseModule(path, f"a forward changes {shown}, and the next call's result depends on it")
        for (at, counted), value in after.items():
            seen = before.get((at, counted)), between.get((at, counted)), value
            if seen[0] != seen[1] != seen[2] and (at == "" or not self.inside_leaf(at)):
                said = f"{seen[0]!r}, {seen[1]!r}, {seen[2]!r} in calls one after another"
                raise CloseModule(at, f"{counted} of {at or name} is {said}; a later call may act on it")

    def forgets(self, training: bool) -> bool:
        """Whether what the model gives for other data is the same after a call as it is without one."""
        self.start(training)
        try:
            self.run(training)
            after = flatten(self.run(training, other_data))[0]
            self.start(training)
            return are_close(after, flatten(self.run(training, other_data))[0])
        except Exception:  # whatever it is: then the model does not take these data
            return True

    def inside_leaf(self, path: str) -> bool:
        names = path.split(".")
        return any(self.policy.is_leaf(".".join(names[: i + 1])) for i in range(len(names)))


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
    trace = error.__traceback__
    place = "unknown place"
    while trace is not None:
        place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
