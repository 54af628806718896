"""Tries a recording at other input sizes: which may vary, which are fixed and why, what must hold of them.

Proposing sizes and fitting formulas is left to ``dims``, running to ``replay``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import CaptureError, InputError
from ..graph import Dim
from ..units import Size, size_at
from . import dims as sizing
from .calls import Call, Guard, Recording
from .functions import ExportFlags, tensors
from .guards import SIGNS, computed, is_stepped
from .inputs import Inputs
from .replay import Observation, replay, with_guards
from .session import close_to
from .state import seed
from .structure import flatten

__all__ = ["Check", "Fixed", "Variation", "confirm", "explore"]


_DIFFERS = "the captured graph's outputs differ from the model's"


@dataclasses.dataclass(frozen=True, slots=True)
class Fixed:
    """An input size that must stay as captured, and why."""

    size: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Check:
    """What the model's Python asked about sizes when captured: ``function(*operands)`` was ``outcome``."""

    function: Callable[..., Any]
    operands: tuple[Size, ...]
    outcome: Any
    source: str

    @functools.cached_property
    def symbols(self) -> tuple[str, ...]:
        return tuple(sorted({str(s) for o in self.operands for s in getattr(o, "free_symbols", ())}))

    @functools.cached_property
    def _compiled(self) -> tuple[Callable[..., Any], ...]:
        # sympy's lambdify does the same, and takes a hundred times as long
        head = f"lambda {', '.join(self.symbols)}: "
        return tuple(eval(f"{head}{o}", {"floor": math.floor}) for o in self.operands)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the answer is still the same at these sizes of the input dims."""
        given = [sizes[s] for s in self.symbols]
        return bool(self.function(*(f(*given) for f in self._compiled)) == self.outcome)

    def __str__(self) -> str:
        if self.function not in SIGNS:
            return f"{self.operands[0]} == {self.outcome}"
        left, right = self.operands
        text = f"{left} {SIGNS[self.function]} {right}"
        return text if self.outcome else f"not {text}"


@dataclasses.dataclass(frozen=True)
class Variation:
    """The dims that may vary, the (placeholder, axis) places that may not, checks, and every shape.

    ``shapes`` holds, by id of a call, formulas of its tensors' shapes; ``unsure`` ids of guards on numbers
    whose formulas may be off, which the graph itself must check.
    """

    dims: tuple[Dim, ...] = ()
    fixed: Mapping[tuple[str, int], Fixed] = dataclasses.field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    shapes: Mapping[int, tuple[tuple[Size, ...], ...]] = dataclasses.field(default_factory=dict)
    unsure: frozenset[int] = frozenset()

    def check(self, inputs: Inputs, values: Mapping[str, Any]) -> None:
        """Raise :class:`InputError` where a size that is fixed has changed, or alters what the model does."""
        shown = dict(zip(inputs.names, inputs.shown, strict=True))
        faults = [
            f"dim {axis} of {shown[name]} is fixed at {fixed.size} and is {values[name].shape[axis]} now "
            f"({fixed.reason}); capture again at this size"
            for (name, axis), fixed in self.fixed.items()
            if values[name].shape[axis] != fixed.size
        ]
        given = {d.name: {values[n].shape[a]: None for n, a in d.where} for d in self.dims}
        for check in self.checks:
            # inputs that were of one size at capture and are not now: the check may be about any of them
            choices = itertools.product(*(given[s] for s in check.symbols))
            sizes = (dict(zip(check.symbols, chosen, strict=True)) for chosen in choices)
            broken = next((at for at in sizes if not check.holds(at)), None)
            if broken is not None:
                faults.append(
                    f"captured where {check} held, which it does not at "
                    f"{', '.join(f'{s} = {n}' for s, n in broken.items())} ({check.source}); "
                    "capture again at this size"
                )
        if faults:
            raise InputError(f"{inputs.model}: " + "; ".join(faults))


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    sizes: Mapping[Dim, int]
    seen: tuple[Observation, ...]


class _Explorer:
    """The runs of one search: the forms at other sizes, and the model itself to compare with."""

    def __init__(
        self,
        model: nn.Module,
        forms: Sequence[Recording],
        inputs: Inputs,
        call: Callable[[Mapping[str, torch.Tensor]], Any],
        given: Mapping[str, torch.Tensor],
        device: torch.device,
        start: Callable[[bool], None],
    ) -> None:
        self.model, self.forms, self.inputs = model, forms, inputs
        self.call, self.given, self.device, self.start = call, given, device, start
        self.harmless: set[int] = set()

    def prepare(self, form: Recording) -> None:
        """Put the model and the generators in the same state every time, and the model in the form's mode."""
        self.start(form.training and len(self.forms) > 1)
        seed(self.device)

    def run(self, sizes: Mapping[Dim, int]) -> _Trial:
        """Replay every form; raises what the model raises.

        A guard that fails is harmless where the result is the model's all the same; else raises
        :class:`_Changed`.
        """
        given = sizing.resize(self.given, sizes)
        seen = []
        for form in self.forms:
            self.prepare(form)
            with torch.no_grad():
                seen.append(replay(self.model, form, given, self.device))
        trial = _Trial(sizes, tuple(seen))
        failed = [
            (g, said)
            for form, shown in zip(self.forms, seen, strict=True)
            for g in form.guards
            if id(g) not in self.harmless and (said := _broken(g, shown))
        ]
        if failed and self.differs(trial):
            raise _Changed(failed[0][1])
        self.harmless.update(id(g) for g, _ in failed)
        return trial

    def differs(self, trial: _Trial) -> str:
        """How the last form's result differs from the model's own at the trial's sizes; "" if it does not."""
        try:
            expected = self._answer(trial.sizes)
        except Exception as error:
            return f"the model itself fails: {_first_line(error)}"
        found = trial.seen[-1].result
        if len(expected) != len(found):
            return f"the model returns {len(expected)} values there, the captured graph {len(found)}"
        for a, b in zip(expected, found, strict=True):
            if not close_to(a, b):
                return f"{_DIFFERS} there"
        return ""

    def _answer(self, sizes: Mapping[Dim, int]) -> list[Any]:
        """The output leaves of the model itself, in the last form's mode; raises what it raises."""
        self.prepare(self.forms[-1])
        flags = ExportFlags.read()
        if self.device.type == "meta":  # there is no data that the model could look at
            ExportFlags(True, True).write()
        try:
            with torch.no_grad():
                return flatten(self.call(sizing.resize(self.given, sizes)))[0]
        finally:
            flags.write()

    def check_example(self) -> None:
        """Raise :class:`CaptureError` where the captured graph is not the model on the example itself.

        A model that answers twice differently, as one that draws from other generators than torch's, is not
        held to it.
        """
        trial = _first(self, [{}])
        said = self.differs(trial) if isinstance(trial, _Trial) else ""
        if said.startswith(_DIFFERS) and all(map(close_to, self._answer({}), self._answer({}))):
            raise CaptureError(
                f"{self.inputs.model}: {_DIFFERS} on the example itself: code of the model computes "
                "something else while it is traced; pass an example that takes no shortcut (a mask that "
                "masks something), another implementation of the layer (attn_implementation='eager' in "
                "transformers), or closed=[path] of the module"
            )


class _Changed(Exception):
    """A guard came out differently."""


def _broken(guard: Guard, seen: Observation) -> str:
    """How a guard came out differently; "" where it did not."""
    values = [seen.numbers[id(o)] if isinstance(o, Call) else o for o in guard.operands]
    if guard.function(*values) == guard.outcome:
        return ""
    sign = SIGNS.get(guard.function)
    text = f"{values[0]} {sign} {values[1]}" if sign else f"{values[0]} == {guard.outcome}"
    return f"{guard.source} decides by it ({text})"


def explore(
    model: nn.Module,
    forms: Sequence[Recording],
    inputs: Inputs,
    call: Callable[[Mapping[str, torch.Tensor]], Any],
    given: Mapping[str, torch.Tensor],
    device: torch.device,
    start: Callable[[bool], None],
    known: Variation | None = None,
) -> Variation:
    """Try each input size at another value, alone and then all together, and fit what is seen.

    ``call`` runs the model itself on tensors by placeholder name; ``start`` puts it back as it was given, in
    training mode or not: a run at one size may leave attributes that do not fit another. One run of the
    recording per dim, one more and one of the model for all of them together. ``known`` is what was found
    with other leaves open: sizes that could not vary then are not tried again.
    """
    explorer = _Explorer(model, forms, inputs, call, given, device, start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model said what it had to say when it was recorded
        return _explore(explorer, forms, inputs, known)


def confirm(
    model: nn.Module,
    form: Recording,
    variation: Variation,
    given: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:
    """Replay one form at other sizes; :class:`CaptureError` where a shape is not what its formula says."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            seen = replay(model, form, given, device)
        except Exception as error:
            raise CaptureError(f"the captured graph fails at other sizes: {_first_line(error)}") from error
    sizes = {d.name: given[d.where[0][0]].shape[d.where[0][1]] for d in variation.dims}
    value = functools.cache(lambda formula: size_at(formula, sizes))
    for call, shapes in seen.shapes.items():
        said = tuple(tuple(map(value, shape)) for shape in variation.shapes.get(call, shapes))
        if said != shapes:
            raise CaptureError(f"a shape at {sizes} is {shapes}, not {said} as its formula says")


def _explore(
    explorer: _Explorer, forms: Sequence[Recording], inputs: Inputs, known: Variation | None
) -> Variation:
    trials, fixed = _remembered(explorer, inputs, known) or _searched(explorer, inputs)
    joint = _together(explorer, trials, fixed)
    found = _fitted(forms, trials, joint, fixed, explorer.harmless)
    n_harmless = len(explorer.harmless)
    for dim in trials:
        if dim.example != 1 and any(not c.holds({**_sizes(trials), dim.name: 1}) for c in found.checks):
            _first(explorer, [{dim: 1}])
    if len(explorer.harmless) == n_harmless:
        return found
    return _fitted(forms, trials, joint, fixed, explorer.harmless)


_Found = tuple[dict[Dim, _Trial], dict[tuple[str, int], Fixed]]


def _searched(explorer: _Explorer, inputs: Inputs) -> _Found:
    """A trial of each size that may vary alone; why the others may not."""
    fixed: dict[tuple[str, int], Fixed] = {}
    trials: dict[Dim, _Trial] = {}
    pending = sizing.candidates(inputs)
    for dim in pending:
        trial = _first(explorer, [{dim: s} for s in sizing.trial_sizes(dim)])
        if isinstance(trial, _Trial):
            trials[dim] = trial
        else:
            fixed.update(dict.fromkeys(dim.where, Fixed(dim.example, trial)))
    for dim in _unions([d for d in pending if d not in trials]):
        trial = _first(explorer, [{dim: s} for s in sizing.trial_sizes(dim)])
        if isinstance(trial, _Trial):
            trials[dim] = trial
            for place in dim.where:
                fixed.pop(place)
    return trials, fixed


def _remembered(explorer: _Explorer, inputs: Inputs, known: Variation | None) -> _Found | None:
    """The same for what is known; None where it is not, or no longer so."""
    shapes = {name: inputs.shapes[i] for i, name in enumerate(inputs.names) if name is not None}
    if known is None or any(shapes[n][a] != d.example for d in known.dims for n, a in d.where):
        return None
    trials: dict[Dim, _Trial] = {}
    for dim in known.dims:
        trial = _first(explorer, [{dim: s} for s in sizing.trial_sizes(dim)])
        if not isinstance(trial, _Trial):
            return None
        trials[dim] = trial
    return trials, dict(known.fixed)


def _sizes(dims: Iterable[Dim]) -> dict[str, int]:
    return {d.name: d.example for d in dims}


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _first(explorer: _Explorer, choices: Sequence[Mapping[Dim, int]]) -> _Trial | str:
    """The first choice of sizes that runs, else why the last one does not."""
    reason = "nothing else to try"
    for sizes in choices:
        at = ", ".join(map(str, sizes.values()))
        try:
            return explorer.run(sizes)
        except _Changed as error:
            reason = f"at {at}, {error}"
        except Exception as error:
            reason = f"at {at} it fails: {_first_line(error)}"
    return reason


def _unions(refused: Sequence[Dim]) -> list[Dim]:
    """Dims of equal sizes as one dim, for models that want them equal (square images, edges of a graph)."""
    out = []
    for i, a in enumerate(refused):
        for b in refused[i + 1 :]:
            if a.example == b.example and "batch" not in (a.name, b.name):
                out.append(Dim("side" if "height" in a.name else a.name, a.example, a.where + b.where))
    return out


def _together(
    explorer: _Explorer, trials: dict[Dim, _Trial], fixed: dict[tuple[str, int], Fixed]
) -> _Trial | None:
    """All dims changed at once, its result compared with the model's; dims that do not stand it are fixed."""
    while trials:
        other = {d: _next(sizing.trial_sizes(d), t.sizes[d]) for d, t in trials.items()}
        joint = _first(explorer, [other, {d: t.sizes[d] for d, t in trials.items()}])
        reason = explorer.differs(joint) if isinstance(joint, _Trial) else joint
        if not reason:
            assert isinstance(joint, _Trial)
            return joint
        culprits = {d: why for d, t in trials.items() if (why := explorer.differs(t))}
        if not culprits:
            culprits = {list(trials)[-1]: reason}
        for dim, why in culprits.items():
            said = f"at {trials.pop(dim).sizes[dim]}, {why}"
            fixed.update(dict.fromkeys(dim.where, Fixed(dim.example, said)))
    explorer.check_example()
    return None


def _next(sizes: Sequence[int], size: int) -> int:
    """The size to try behind ``size``, which is the last one's own."""
    return (*sizes, size)[sizes.index(size) + 1]


def _fitted(
    forms: Sequence[Recording],
    trials: Mapping[Dim, _Trial],
    joint: _Trial | None,
    fixed: Mapping[Any, Fixed],
    harmless: set[int],
) -> Variation:
    dims = tuple(trials)
    runs = [*trials.values(), *([joint] if joint else [])]
    base = _sizes(dims)
    points = (base, *(base | {d.name: s for d, s in run.sizes.items()} for run in runs))
    formulas = sizing.Formulas(dims, points)
    shapes: dict[int, tuple[tuple[Size, ...], ...]] = {}
    checks: dict[Any, Check] = {}
    unsure: set[int] = set()
    for i, form in enumerate(forms):
        seen = [run.seen[i] for run in runs]
        numbers: dict[int, Size] = {}
        guessed: set[int] = set()
        for call in with_guards(form):
            if call.op == "output":
                continue
            if isinstance(call.value, (int, float)):
                values: list[Any] = [call.value, *(s.numbers.get(id(call)) for s in seen)]
                exact = computed(call, numbers)
                numbers[id(call)] = formulas(values) if exact is None else exact
                if any(id(c) in guessed for c in call.inputs) or (
                    exact is None and is_stepped(numbers[id(call)])
                ):
                    guessed.add(id(call))
            shapes[id(call)] = _shapes(call, [s.shapes[id(call)] for s in seen], formulas)
        for guard in (g for g in form.guards if id(g) not in harmless):
            if any(isinstance(o, Call) and id(o) in guessed for o in guard.operands):
                unsure.add(id(guard))
                continue
            operands = tuple(numbers[id(o)] if isinstance(o, Call) else o for o in guard.operands)
            check = Check(guard.function, operands, guard.outcome, guard.source)
            if check.symbols:
                checks.setdefault((guard.function, operands, guard.outcome), check)
    return Variation(dims, fixed, tuple(checks.values()), shapes, frozenset(unsure))


def _shapes(call: Call, seen: Sequence[Any], formulas: sizing.Formulas) -> tuple[tuple[Size, ...], ...]:
    out = []
    for i, tensor in enumerate(tensors(call.value)):
        others = [s[i] if i < len(s) and len(s[i]) == tensor.dim() else tuple(tensor.shape) for s in seen]
        out.append(tuple(formulas(values) for values in zip(tensor.shape, *others, strict=True)))
    return tuple(out)
