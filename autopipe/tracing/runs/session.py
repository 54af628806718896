"""Records a model in both modes under one leaf policy, which it adjusts to what the model's Python does.

Single runs are left to ``runs``, tying the two recordings together to ``modes``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ...errors import CaptureError, ModelError
from ...torch_private import DYNAMO
from ..calls.call import Call, Recording, Setting
from ..calls.likeness import is_same, may_be_same, prune
from ..calls.sharing import quiet
from ..code import statements
from ..code.checks import expecting_nothing
from ..code.leaves import Policy
from ..code.own_code import OwnCode
from ..code.restart import (
    CloseModule,
    FollowCasts,
    Function,
    HoldNumbers,
    KeepFunction,
    KeepMode,
    KeepReads,
    Method,
    OpenLeaf,
    PutBack,
    Restart,
    Statement,
    TellMethod,
    WatchMethods,
)
from ..inputs.arguments import Inputs
from ..members import modules_in, submodule
from ..patches import patches
from ..state.state import Snapshot
from .hidden_sizes import NumberSource, Shift, Tried, is_alike, longest_of, misread
from .other_numbers import otherwise
from .runs import AS_GIVEN, Attempt, Refused, Runs
from .settings import settings, under

__all__ = ["Session"]

_MOST_TRIES = 100
_MOST_FORMS = 8


class Session:
    """The runs that one capture takes. The model is left to ``snapshot`` to put back.

    Sizes of the inputs are followed where they may vary; else they are numbers like others. Where the model
    ``refused`` to train on the example, its training form is its evaluation form. The example is of a batch
    of ``n_rows`` rows where it has fewer itself.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policy: Policy,
        snapshot: Snapshot,
        *,
        sizes_vary: bool = True,
        n_rows: int = 0,
    ) -> None:
        self.model, self.args, self.kwargs, self.sizes_vary = model, args, kwargs, sizes_vary
        self.n_rows = n_rows
        self.runs = Runs(model, args, kwargs, snapshot, sizes_vary=sizes_vary)
        self.device, self.start, self.kind = self.runs.device, self.runs.start, self.runs.kind
        self.code = OwnCode(model)
        self.first_policy = policy
        self.attempt = Attempt(policy)
        self.notes: list[str] = []
        self.refused: Refused | None = None
        self.takes_short_cuts, self.has_taken = True, False
        self._is_judged = False

    def distrust_short_cuts(self) -> bool:
        """Record each mode, without shifted numbers, in every further attempt; whether one so far was not."""
        had, self.takes_short_cuts, self.has_taken = self.has_taken, False, False
        return had

    @property
    def policy(self) -> Policy:
        """Which modules are leaves, as far as that is known."""
        return self.attempt.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.attempt.policy = policy

    @property
    def obstacles(self) -> list[str]:
        """Why modules had to be closed, or statements kept whole, or data are refused that do otherwise."""
        return self.attempt.obstacles

    def forms(self, *, is_judged: bool = False) -> dict[bool, list[Recording]]:
        """Recordings in each mode: of what the example does, then of how else reads of inputs may come out.

        Where each ``is_judged`` by whoever asks, one may be left ``yet_to_evaluate``: see
        :meth:`is_evaluated`.

        What must stay whole or be opened is found by trying. The model runs as it runs untraced; only where
        that cannot be recorded, or leaves less to cut, ``torch.compiler.is_exporting()`` answers yes
        meanwhile, so that libraries avoid shortcuts that depend on data; :attr:`notes` then says so.

        Raises :class:`CaptureError` where it cannot be recorded, :class:`ModelError` where it cannot be run.
        """
        self.runs.check_hooks()
        self._is_judged = is_judged
        try:
            found = self.best()
        finally:
            self._is_judged = False
        self.runs.check_given()
        return found

    def best(self) -> dict[bool, list[Recording]]:
        """See :meth:`forms`; in the way that leaves most to cut."""
        with patches.applied(m for _, m in modules_in(self.model)) as self.runs.route:
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

    @contextlib.contextmanager
    def on(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Within it the example is another."""
        runs = self.runs
        before, answers = (self.args, self.kwargs, self.refused), runs.answers
        self.args, self.kwargs = runs.args, runs.kwargs = args, kwargs
        runs.answers = {}
        runs.repeats.forget()
        try:
            yield
        finally:
            self.args, self.kwargs, self.refused = before
            runs.args, runs.kwargs = before[:2]
            runs.answers = answers
            runs.repeats.forget()

    def again(
        self,
        functions: Iterable[Function | Method | Statement] = (),
        closed: Iterable[str] = (),
        *,
        divides: bool = True,
    ) -> dict[bool, list[Recording]] | None:
        """Other recordings, in which functions or modules stay whole; None where that cannot be.

        No further leaf is opened for more to cut where nothing ``divides``.
        """
        before = self.attempt
        self.attempt = dataclasses.replace(
            before,
            policy=before.policy.with_closed(closed),
            functions=dict.fromkeys((*before.functions, *functions)),
            tried=set(before.tried),
            settled=set(before.settled),
            divides=divides,
        )
        try:
            with patches.applied(m for _, m in modules_in(self.model)) as self.runs.route:
                return self.found()
        except (CaptureError, ModelError, HoldNumbers):
            self.attempt = before
            return None

    def fallen_back(
        self, found: dict[bool, list[Recording]] | None, error: CaptureError | Refused | None
    ) -> dict[bool, list[Recording]]:
        """What is best where recording the model's own path meets obstacles: it, or a way around."""
        kept, why = self.attempt, self.obstacles[0] if self.obstacles else str(error)
        eager = ("eager",) * (found is None and DYNAMO in sys.modules)
        for way in (*eager, *("numbers",) * kept.met_number, "exporting", "by_value", "coarse"):
            if way in ("by_value", "coarse") and found is not None:
                break  # numbers asked for each time are worse than a module kept whole
            self.attempt = Attempt(self.first_policy)
            setattr(self.attempt, way, True)
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
                elif self.attempt.eager:
                    self.notes.append(
                        f"recorded as if torch.compile had wrapped nothing, since {why}; "
                        "rt.wrap(torch.compile) compiles the stages"
                    )
                return other
        self.attempt = kept
        if found is None:
            assert error is not None
            raise error
        if any(isinstance(f, Statement) for f in kept.functions):
            self.notes.append(f"a statement of the model's own forward is kept whole: {why}")
        return found

    def found(self) -> dict[bool, list[Recording]]:
        """See :meth:`forms`; in one way."""
        try:
            made = self.tried_out()
        finally:
            self.runs.look_anew()  # whatever others run from here on
        whys = [f"{place}: whether this code gives None hangs on data" for place in expecting_nothing(made)]
        self.attempt.obstacles += [why for why in whys if why not in self.obstacles]
        return made

    def tried_out(self) -> dict[bool, list[Recording]]:
        """See :meth:`forms`; with what must stay whole or be opened found by trying."""
        for _ in range(_MOST_TRIES):
            try:
                evaluation, training, tried = self.in_both_modes()
                called = [c.target for c in training.calls if c.op == "call_module"]
                leaf = self.policy.to_open(called) if self.attempt.divides else None
                if leaf is None or (leaf, False) in self.attempt.tried:
                    if tried is None or not (read := self.misread(training, evaluation, tried)):
                        return self.with_others(training, evaluation)
                    self.attempt.settled |= read
                    continue
            except (CloseModule, OpenLeaf) as restart:
                self.adjust(restart)
                continue
            except KeepFunction as found:
                self.keep(found)
                continue
            except KeepReads as found:
                self.attempt.kept.add(found.source)
                continue
            except WatchMethods as found:
                self.attempt.watched.update(self.alike(found.path))
                continue
            except TellMethod as found:
                self.attempt.told.update((path, found.name) for path in self.alike(found.path))
                continue
            except KeepMode as found:
                self.attempt.moded.add(found.path)
                continue
            except FollowCasts as found:
                self.runs.casting.add(found.module)
                continue
            except PutBack as found:
                self.runs.snapshot.include(found.names)
                continue
            self.attempt.tried.add((leaf, False))
            self.attempt.divided.append(leaf)
            self.policy = self.policy.with_opened([leaf])
        raise CaptureError(f"{type(self.model).__name__}: no set of leaves found in {_MOST_TRIES} recordings")

    def in_both_modes(self) -> tuple[Recording, Recording, Tried | None]:
        """The recordings in evaluation and in training, and a run in training with shifted numbers.

        One recording for both, where sizes are fixed, of code that cannot have gone by the mode.
        """
        training = None
        if self.takes_short_cuts and not self.sizes_vary:
            with contextlib.suppress(Refused):
                training = self.runs.record(self.attempt, training=True)
                if self._is_judged and self.runs.may_be_for_both(self.attempt, training):
                    self.has_taken = training.yet_to_evaluate = True
                if training.yet_to_evaluate or self.is_for_both(training):
                    return training, training, None
        evaluation = self.runs.record(self.attempt, training=False)
        tried = self.tried(evaluation)
        training = training or self.training_form(evaluation, None if tried is None else tried.found)
        return evaluation, training, tried

    def is_for_both(self, training: Recording, sharing: Mapping[str, bool] | None = None) -> bool:
        """Whether a recording in training is taken to be that in evaluation too."""
        is_taken = self.takes_short_cuts and self.runs.is_for_both(self.attempt, training, sharing)
        self.has_taken |= is_taken
        return is_taken

    def did_alike(self, training: Recording, evaluation: Recording) -> bool:
        """Whether recordings of both modes that compute the same tell what :meth:`is_for_both` runs for."""
        is_taken = self.takes_short_cuts and self.runs.did_alike(self.attempt, training, evaluation)
        self.has_taken |= is_taken
        return is_taken

    def is_evaluated(
        self, form: Recording, is_told: Callable[[Call], bool], *, did_as_recorded: bool
    ) -> bool:
        """Whether a form of both modes does in evaluation what was recorded in training.

        That is asked on the example where no run on other data ``did_as_recorded``, or where that of a call
        ``is_told`` by none, as code that stays whole may do otherwise in evaluation on the example alone.
        """
        if not form.yet_to_evaluate or (did_as_recorded and all(map(is_told, form.calls))):
            return True
        return self.runs.is_for_both(self.attempt, form)

    def tried(self, evaluation: Recording) -> Tried | None:
        """The run in training with shifted numbers; None where none are made of sizes."""
        if not self.sizes_vary:
            return None
        shift = Shift(self.attempt.settled, longest_of(evaluation))
        return Tried(shift, self.runs.shifted(self.attempt, True, shift))

    def misread(self, training: Recording, evaluation: Recording, tried: Tried) -> set[NumberSource]:
        """Where numbers are made of sizes which C reads out of sight; ``tried`` is a run in training."""
        distinct = [training] if is_same(prune(training), prune(evaluation)) else [training, evaluation]
        found: set[NumberSource] = set()
        for form in distinct:
            run = functools.partial(self.runs.shifted, self.attempt, form.training)
            found |= misread(run, form, self.attempt.settled, tried if form.training else None)
        return found

    def alike(self, path: str) -> list[str]:
        """The paths of the modules of one class with that at ``path``."""
        cls = type(submodule(self.model, path))
        return [p for p, m in self.model.named_modules() if type(m) is cls]

    def training_form(self, evaluation: Recording, shifted: Recording | None) -> Recording:
        """The recording in training mode; that of evaluation where the model refuses to train so.

        That with ``shifted`` numbers is as good where it is the one in evaluation call by call, guards and
        branches with it: then nothing in it went by what was shifted. Only code that goes by such a number in
        training alone could have been led that way by the shift, which shows beside the model in training.
        """
        is_trusted = self.takes_short_cuts and self.device.type != "meta" and not self.attempt.settled
        if is_trusted and shifted is not None and is_alike(shifted, evaluation):
            self.has_taken = True
            return self.runs.take(shifted, self.attempt)
        try:
            return self.runs.record(self.attempt, training=True)
        except Refused as error:
            self.refused = error
            return evaluation

    def with_others(self, training: Recording, evaluation: Recording) -> dict[bool, list[Recording]]:
        """By mode, the recordings and those of how else what they ask may come out."""
        found = self.in_all_settings(training)
        if training is not evaluation and len(found) > 1:
            is_one = not evaluation.goes_by_mode and is_same(prune(training), prune(evaluation))
            is_one = is_one and (self.did_alike(training, evaluation) or self.is_for_both(training))
            evaluation = training if is_one else evaluation
        if training is evaluation and not self.refused and not self.are_for_both(found):
            training.yet_to_evaluate = False
            evaluation = self.runs.record(self.attempt, training=False)
        return {False: found if training is evaluation else self.in_all_settings(evaluation), True: found}

    def are_for_both(self, found: Sequence[Recording]) -> bool:
        """Whether all recordings are for both modes, as the first is; those of one form are asked once."""
        sharing = quiet(found[0].calls)
        for place, other in enumerate(found[1:], 1):
            alike = (f for f in found[:place] if f.setting == other.setting and may_be_same(f, other))
            is_known = any(is_same(prune(f), prune(other)) for f in alike)
            if other.goes_by_mode or not (is_known or self.is_for_both(other, sharing)):
                return False
        return True

    def in_all_settings(self, natural: Recording) -> list[Recording]:
        """A recording and its outcomes, and those in other surroundings where the code asks for them."""
        if not natural.asked:
            return self.outcomes(natural)
        asked, (_, tensors) = natural.asked, Inputs.of(self.model, self.args, self.kwargs)
        out: list[Recording] = []
        for setting in settings(asked, tensors):
            try:
                found = self.runs.record(self.attempt, natural.training, (), setting) if out else natural
            except (FollowCasts, HoldNumbers):
                raise
            except (CaptureError, ModelError, Restart):
                continue  # called so, the model is refused
            out += [under(r, asked, setting, tensors) for r in self.outcomes(found, setting)]
        return out

    def outcomes(self, natural: Recording, setting: Setting = AS_GIVEN) -> list[Recording]:
        """A recording, and others in which reads of inputs come out otherwise.

        Of one that gives a truth the model's Python is made to believe the other; where it then cannot be
        recorded, that outcome is left out. What goes by a number is recorded on inputs with another.
        """
        out, queue = [natural], [(natural, 0)]
        while queue and len(out) < _MOST_FORMS:
            known, start = queue.pop(0)
            for place, branch in enumerate(known.branches[start:], start):
                is_forced = isinstance(branch.outcome, bool) and branch.is_forceable
                other_way = self.forced if is_forced else self.with_other_numbers
                for other in other_way(known, place, setting):
                    if not isinstance(branch.outcome, bool) and not _holds_more(other, out):
                        break  # a length or a count, of which there are many
                    out.append(other)
                    queue.append((other, place + 1))
                    if len(out) >= _MOST_FORMS:
                        break
        return out

    def with_other_numbers(self, known: Recording, place: int, setting: Setting) -> Iterator[Recording]:
        """Recordings on inputs with other numbers, by which the read at ``place`` comes out otherwise."""
        branch = known.branches[place]
        if branch.of_setting or not isinstance(branch.outcome, (int, str)) or self.device.type == "meta":
            return
        inputs, tensors = Inputs.of(self.model, self.args, self.kwargs)
        for given in otherwise(self.model, known, place, known.given or tensors, self.device):
            try:
                with self.on(*inputs.rebuild(self.model, given)):
                    other = self.runs.record(self.attempt, known.training, (), setting)
            except (FollowCasts, HoldNumbers):
                raise
            except (CaptureError, ModelError, Restart):
                continue
            other.given = given
            if other.modes == known.modes:
                yield other

    def forced(self, known: Recording, place: int, setting: Setting) -> Iterator[Recording]:
        """The recording in which the read at ``place`` comes out the other way, where there is one."""
        branch = known.branches[place]
        script = (*(b.outcome for b in known.branches[:place]), not branch.outcome)
        try:
            other = self.runs.record(self.attempt, known.training, script, setting, quiet(known.calls))
        except (CaptureError, ModelError):
            return
        except (FollowCasts, HoldNumbers):
            raise
        except Restart:
            if branch.in_function:
                raise KeepReads(branch.source) from None
            return
        if other.modes == known.modes:
            yield other

    def keep(self, found: KeepFunction) -> None:
        """Keep a function whole; a statement that is so already, with those around it."""
        function, kept = found.function, self.attempt.functions
        if isinstance(function, Statement):
            self.obstacles.append(found.why)
        while function in kept:
            outer = None
            if isinstance(function, Statement) and self.attempt.coarse:
                outer = statements.around(submodule(self.model, function.path), function)
            if outer is None:  # it was no help: the same is met where it is kept
                self.adjust(CloseModule(found.path, found.why))
                return
            del kept[function]
            function = outer
        kept[function] = None

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
        if path not in self.attempt.taken_apart and self.is_torn(path, close):
            self.attempt.taken_apart.add(path)
            self.policy = self.policy.with_opened([path])
            return
        if (path, close) in self.attempt.tried or (not close and not self.policy.is_openable(path)):
            parent = path.rpartition(".")[0]
            self.adjust(CloseModule(parent, restart.why))
            return
        self.attempt.tried.add((path, close))
        if close:
            self.policy = self.policy.with_closed({path, *self.policy.like(path)})
        else:
            alike = self.alike(path) if isinstance(restart, OpenLeaf) and restart.with_alike else ()
            self.policy = self.policy.with_opened([path, *filter(self.policy.is_openable, alike)])

    def is_torn(self, path: str, close: bool) -> bool:
        """Whether a module that is to stay whole must be open, as others use its inside; or the reverse."""
        if close:
            return (path, False) in self.attempt.tried and path not in self.attempt.divided
        return path in self.policy.closed and path not in self.policy.pinned

    def close(self, path: str, why: str) -> None:
        """Keep a module whole in every further attempt, because the graph of it is not the module.

        Where that is whole already, the one around it. Raises :class:`CaptureError` for the model itself.
        """
        while path and path in self.first_policy.closed:
            path = path.rpartition(".")[0]
        self.adjust(CloseModule(path, why))
        self.attempt.obstacles.pop()
        self.first_policy = self.first_policy.with_closed(self.policy.closed)


def _holds_more(recording: Recording, known: Iterable[Recording]) -> bool:
    """Whether a recording calls weights or other state of the model that none of the known does."""

    def state(of: Recording) -> set[str]:
        return {c.target for c in of.calls if c.op == "call_module" or (c.op == "get_attr" and c.depends)}

    return bool(state(recording).difference(*map(state, known)))
