"""Tries a recording at other input sizes: which may vary, which are fixed and why, what must hold of them.

Proposing sizes and fitting formulas is left to ``dims``, running to ``trials`` and ``rerun``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import CaptureError
from ...graph import Dim
from ...units import Size, size_at
from ..calls.call import Call, Guard, Recording
from ..calls.faults import of_models
from ..calls.functions import SIZES, tensors
from ..code.leaves import asking
from ..inputs.arguments import Inputs
from ..inputs.packing import packings
from . import dims as sizing
from .guards import broken, computed, inferred, is_fitted, is_stepped
from .harmless import find_harmless
from .rerun import replay, with_guards
from .trials import Elsewhere, Explorer, Trial, first, first_line
from .variation import Check, Fixed, Variation

__all__ = ["confirm", "explore", "is_narrowed", "taken_against_checks", "taken_beside"]

_LITTLE_BYTES = 1 << 24
"""What the calls of a form may make where all dims have other sizes, whatever the batch takes."""


@asking()
def explore(explorer: Explorer, known: Variation | None) -> Variation:
    """Try each input size at another value, alone and then all together, and fit what is seen.

    One run of the recording per dim, in which alike leaves run once, one more and one of the model for all of
    them together. ``known`` is what was found with other leaves open: sizes that could not vary then are not
    tried again.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model said what it had to say when it was recorded
        return _explore(explorer, known)


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
        except of_models() as error:
            raise CaptureError(f"the captured graph fails at other sizes: {first_line(error)}") from error
    sizes = {d.name: given[d.where[0][0]].shape[d.where[0][1]] for d in variation.dims}
    value = functools.cache(lambda formula: size_at(formula, sizes))
    for call, shapes in seen.shapes.items():
        said = tuple(tuple(map(value, shape)) for shape in variation.shapes.get(call, shapes))
        if said != shapes:
            raise CaptureError(f"a shape at {sizes} is {shapes}, not {said} as its formula says")


def is_narrowed(explorer: Explorer, found: Variation) -> bool:
    """Whether the model itself takes another size where its forms do not."""
    return next(taken_beside(explorer, found), None) is not None


def taken_beside(explorer: Explorer, found: Variation) -> Iterator[dict[Dim, int]]:
    """Sizes that the model itself takes where its forms do not, each alone."""
    held = [d for d in sizing.candidates(explorer.inputs) if any(place in found.fixed for place in d.where)]
    for sizes in ({d: size} for d in held for size in sizing.trial_sizes(d)[:2]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            is_taken = explorer.is_taken(sizes)
        if is_taken:
            yield sizes


def taken_against_checks(explorer: Explorer, known: Sequence[Variation]) -> Iterator[dict[Dim, int]]:
    """Sizes that the model takes and none of the ``known`` variations is right for, a few for each check.

    The checks are those of the first; others may be added meanwhile.
    """
    first = known[0]
    dims = [d for d in first.dims if not d.packed]
    base = {d.name: d.example for d in first.dims}
    tried: list[dict[str, int]] = []
    for check in first.checks:
        asked = [d for d in dims if d.name in check.symbols]
        for chosen in (*([d] for d in asked), *([asked] if len(asked) > 1 else [])):
            for size in _near(chosen[0]):
                sizes = {**base, **{d.name: size for d in chosen}}
                is_known = any(all(c.holds(sizes) for c in v.checks) for v in known)
                if check.holds(sizes) or is_known or sizes in tried:
                    continue
                tried.append(sizes)
                if explorer.is_taken(dict.fromkeys(chosen, size)):
                    yield dict.fromkeys(chosen, size)
                    break


def _near(dim: Dim) -> list[int]:
    """Sizes to try, which lie around the example's and are multiples of other numbers."""
    n = dim.example
    others = (*sizing.trial_sizes(dim), n - n // 4, n + n // 4, n // 4, n + 1, n - 1)
    return list(dict.fromkeys(s for s in others if s > 0 and s != n))


def _explore(explorer: Explorer, known: Variation | None) -> Variation:
    forms, inputs = explorer.forms, explorer.inputs
    trials, fixed = _remembered(explorer, inputs, known) or _searched(explorer, inputs)
    joint = _together(explorer, trials, fixed, is_new=known is None)
    told = forms, trials, joint, fixed, explorer.elsewhere
    found = _fitted(*told, explorer.harmless)
    n_harmless = len(explorer.harmless)
    for dim in trials:
        if dim.example != 1 and any(not c.holds({**_sizes(trials), dim.name: 1}) for c in found.checks):
            first(explorer.run, [{dim: 1}])
    if not explorer.is_meta and (found.checks or found.unsure):
        explorer.harmless |= find_harmless(explorer, tuple(trials), found)
    if len(explorer.harmless) == n_harmless:
        return found
    return _fitted(*told, explorer.harmless)


_Found = tuple[dict[Dim, Trial], dict[tuple[str, int], Fixed]]


def _searched(explorer: Explorer, inputs: Inputs) -> _Found:
    """A trial of each size that may vary alone; why the others may not."""
    fixed: dict[tuple[str, int], Fixed] = {}
    trials: dict[Dim, Trial] = {}
    pending = sizing.candidates(inputs)

    def attempt(dim: Dim) -> None:
        if any(place in d.where for d in trials for place in dim.where):
            return
        trial = _alone(explorer, dim)
        if isinstance(trial, Trial):
            trials[dim] = trial
        for place in dim.where:
            if isinstance(trial, Trial):
                fixed.pop(place, None)
            else:
                fixed.setdefault(place, Fixed(dim.example, trial))

    for dim in pending:
        attempt(dim)
    refused = [d for d in pending if d not in trials]
    apart = [part for dim in refused for part in sizing.parts(dim)]
    for dim in apart:
        attempt(dim)
    for dim in [other for leading in refused for other in _along_second_axes(leading, explorer.given)]:
        attempt(dim)
    for dim in _unions([d for d in (*refused, *apart) if d not in trials]):
        attempt(dim)
    for dim, trial in _packed(explorer, pending, trials).items():
        trials = {d: t for d, t in trials.items() if not {*d.where} & {*dim.places}} | {dim: trial}
        fixed = {place: why for place, why in fixed.items() if place not in dim.places}
    return trials, fixed


def _packed(explorer: Explorer, pending: Sequence[Dim], trials: Mapping[Dim, Trial]) -> dict[Dim, Trial]:
    """A batch with the fewest inputs that must grow with it; nothing where it rightly grows alone, or cannot.

    Right is what leaves the samples that were there as they were: a model may take two rows for each of
    three samples where three for each of two were meant.
    """

    def tried(dim: Dim) -> Trial | None:
        trial = _alone(explorer, dim)
        is_right = isinstance(trial, Trial) and explorer.keeps_rows(trial)
        return trial if isinstance(trial, Trial) and is_right else None

    free = {d.where: t for d, t in trials.items()}
    for dim in packings([d for d in pending if d not in trials or d.where[0][1] == 0], explorer.given):
        if dim.where in free and explorer.keeps_rows(free[dim.where]):
            return {}
        trial = tried(dim)
        if trial is None:
            continue
        for packed in dim.packed if len(dim.packed) > 1 else ():
            fewer = dataclasses.replace(dim, packed=tuple(p for p in dim.packed if p != packed))
            less = tried(fewer)
            if less is not None and not explorer.differs(less):
                dim, trial = fewer, less
        return {dim: trial}
    return {}


def _remembered(explorer: Explorer, inputs: Inputs, known: Variation | None) -> _Found | None:
    """The same for what is known; None where it is not, or no longer so."""
    shapes = {name: inputs.shapes[i] for i, name in enumerate(inputs.names) if name is not None}
    if known is None or any(shapes[n][a] != d.example for d in known.dims for n, a in d.where):
        return None
    trials: dict[Dim, Trial] = {}
    for dim in known.dims:
        trial = _alone(explorer, dim)
        if not isinstance(trial, Trial):
            return None
        trials[dim] = trial
    return trials, dict(known.fixed)


def _sizes(dims: Iterable[Dim]) -> dict[str, int]:
    return {d.name: d.example for d in dims}


def _alone(explorer: Explorer, dim: Dim) -> Trial | str:
    """The first other size of one dim that runs, else why none does.

    A text that holds a token for each piece of its image can be neither cut nor repeated, only drawn out;
    so can rows that are told by number which graph they are of, or that lie in order of their lengths. Where
    other inputs count along the dim, they must follow.
    """
    sizes = [{dim: s} for s in _tried(explorer, dim)]
    trial = first(explorer.sketch, sizes)
    is_leading = dim.where[0][1] == 0
    if isinstance(trial, Trial) or (is_leading and not sizing.is_in_order(explorer.given, dim)):
        return trial
    longer = [next(at for at in sizes if at[dim] > dim.example)]
    for way, at in ((explorer.drawn_out, longer), (explorer.counted, sizes)):
        if way is explorer.counted and not sizing.counts(explorer.given, dim):
            continue
        way.add(dim)
        other = first(explorer.sketch, at)
        if isinstance(other, Trial):
            return other
        way.remove(dim)
    return trial


def _along_second_axes(leading: Dim, given: Mapping[str, torch.Tensor]) -> Iterator[Dim]:
    """A leading dim with inputs that have it along their second axis, as states of recurrent layers do.

    All such inputs, then each alone: their first axes, or their second, may be as long by chance.
    """
    if leading.where[0][1] != 0:
        return
    second = [(n, 1) for n, t in given.items() if t.dim() > 2 and t.shape[1] == leading.example]
    for chosen in dict.fromkeys((tuple(second), *((place,) for place in second))):
        first_axes = tuple(p for p in leading.where if p[0] not in dict(chosen))
        if chosen and first_axes:
            yield dataclasses.replace(leading, where=first_axes + chosen)


def _unions(refused: Sequence[Dim]) -> list[Dim]:
    """Dims of equal sizes as one dim, for models that want them equal (square images, edges of a graph)."""
    out = []
    for i, a in enumerate(refused):
        for b in refused[i + 1 :]:
            is_apart = a.where[0][1] != b.where[0][1] and a.example == b.example
            if is_apart and "batch" not in (a.name, b.name):
                out.append(Dim("side" if "height" in a.name else a.name, a.example, a.where + b.where))
    return out


def _together(
    explorer: Explorer, trials: dict[Dim, Trial], fixed: dict[tuple[str, int], Fixed], *, is_new: bool
) -> Trial | None:
    """All dims changed at once, its result compared with the model's; dims that do not stand it are fixed.

    A model that ``is_new`` is run with each of its leaves, on whatever device.
    """
    while trials:
        own = {d: t.sizes[d] for d, t in trials.items()}
        others = _within_means(explorer, own, {d: _next(_tried(explorer, d), n) for d, n in own.items()})
        for sizes in (others, own):
            joint = first(explorer.run, [sizes])
            reason = explorer.differs(joint, is_shared=not is_new) if isinstance(joint, Trial) else joint
            if isinstance(joint, Trial) and not reason:
                return joint
            if sizes is others and any(form.guards for form in explorer.forms):
                for dim, size in others.items():  # what is asked of one hides what is asked of the next
                    first(explorer.sketch, [{dim: size}])
        culprits = {d: why for d, t in trials.items() if (why := explorer.differs(t))}
        if not culprits:
            culprits = {list(trials)[-1]: reason}
        for dim, why in culprits.items():
            said = f"at {trials.pop(dim).sizes[dim]}, {why}"
            fixed.update({(n, a): Fixed(explorer.given[n].shape[a], said) for n, a in dim.places})
    explorer.check_example()
    return None


def _tried(explorer: Explorer, dim: Dim) -> list[int]:
    """The other sizes of a dim to try, in turn; for a form of sizes of a kind, some that are most alike."""
    near = (dim.example + 1, dim.example - 1) if explorer.is_of_a_kind else ()
    return list(dict.fromkeys((*sizing.trial_sizes(dim), *(n for n in near if n > 1))))


def _within_means(explorer: Explorer, own: Mapping[Dim, int], others: Mapping[Dim, int]) -> dict[Dim, int]:
    """Other sizes than their ``own`` for all dims, of which some are small where ``others`` take too much.

    That is more than the batch takes that the example is of, and not little.
    """
    n_bytes = sum(t.nbytes for call in explorer.forms[-1].calls for t in tensors(call.value) if t.is_meta)
    rows = [explorer.n_rows / d.example for d in own if d.name == "batch"]
    most, found = max(1.0, *rows, _LITTLE_BYTES / max(n_bytes, 1)), dict(others)
    for dim in sorted(others, key=lambda d: d.name == "batch"):
        if _times_larger(found) <= most:
            break
        found[dim] = min([found[dim], *(n for n in _tried(explorer, dim) if n != own[dim])])
    return found


def _times_larger(sizes: Mapping[Dim, int]) -> float:
    """How often as many numbers as in the example there are in the input of which there are then the most."""
    places = [(name, size / d.example) for d, size in sizes.items() for name, _ in d.where]
    return max(math.prod(times for n, times in places if n == name) for name, _ in places)


def _next(sizes: Sequence[int], size: int) -> int:
    """The size to try behind ``size``, which is the last one's own."""
    return (*sizes, size)[sizes.index(size) + 1]


def _fitted(
    forms: Sequence[Recording],
    trials: Mapping[Dim, Trial],
    joint: Trial | None,
    fixed: Mapping[Any, Fixed],
    elsewhere: Sequence[Elsewhere],
    harmless: set[int],
) -> Variation:
    dims = tuple(trials)
    runs = [*trials.values(), *([joint] if joint else [])]
    base = _sizes(dims)
    points = (base, *(base | {d.name: s for d, s in run.sizes.items()} for run in runs))
    formulas = sizing.Formulas(dims, points)
    of_each = sizing.Formulas(dims, points[: len(dims) + 1])
    shapes: dict[int, tuple[tuple[Size, ...], ...]] = {}
    checks: dict[Any, Check] = {}
    unsure: set[int] = set()
    for i, form in enumerate(forms):
        seen = [run.seen[i] for run in runs]
        numbers: dict[int, Size] = {}
        guessed: set[int] = set()
        others = [e for e in elsewhere if e.form is form and {*e.sizes} <= {*dims}]
        ragged = _behind(form, {p.op for d in dims for p in d.packed if p.grids})
        for call in with_guards(form):
            if call.op == "output":
                continue
            if isinstance(call.value, (int, float)):
                values: list[Any] = [call.value, *(s.numbers.get(id(call)) for s in seen)]
                exact = computed(call, numbers)
                formula = formulas.with_more(values, _numbers(call, others, base)) if exact is None else exact
                numbers[id(call)] = formula
                is_guess = is_stepped(formula) or is_fitted(call, numbers)
                is_off = exact is None and (is_guess or _is_lost(call, values, formula))
                if is_off or any(id(c) in guessed for c in call.inputs):
                    guessed.add(id(call))
            missed = [(_at(e, base), e.shapes[id(call)]) for e in others if id(call) in e.shapes]
            left = inferred(call, shapes, numbers)
            shapes[id(call)] = _shapes(
                call, [s.shapes[id(call)] for s in seen], missed, formulas, of_each, left
            )
        for guard in (g for g in form.guards if id(g) not in harmless):
            if any(isinstance(o, Call) and (id(o) in guessed or id(o) in ragged) for o in guard.operands):
                unsure.add(id(guard))
                continue
            operands = tuple(numbers[id(o)] if isinstance(o, Call) else o for o in guard.operands)
            check = Check(guard.function, operands, guard.outcome, guard.source)
            if any(_is_otherwise(check, guard, other, base) for other in others):
                unsure.add(id(guard))
                continue
            if check.symbols:
                checks.setdefault((guard.function, operands, guard.outcome), check)
    return Variation(dims, fixed, tuple(checks.values()), shapes, frozenset(unsure))


def _numbers(
    call: Call, others: Sequence[Elsewhere], base: Mapping[str, int]
) -> list[tuple[Mapping[str, int], Any]]:
    """What a call gave at sizes that its form is not right for."""
    return [(_at(e, base), e.numbers[id(call)]) for e in others if id(call) in e.numbers]


def _at(other: Elsewhere, base: Mapping[str, int]) -> dict[str, int]:
    return {**base, **{d.name: s for d, s in other.sizes.items()}}


def _is_otherwise(check: Check, guard: Guard, other: Elsewhere, base: Mapping[str, int]) -> bool:
    """Whether a question came out otherwise, at sizes that the form is not right for, than its check says."""
    known = all(not isinstance(o, Call) or id(o) in other.numbers for o in guard.operands)
    return known and check.holds(_at(other, base)) is bool(broken(guard, other.numbers))


def _is_lost(call: Call, values: Sequence[Any], formula: Size) -> bool:
    """Whether a number changes with sizes in a way that no formula tells: a root, say.

    What a tensor holds may: that ``arange(n).max() > 8`` is false at two lengths says nothing of a third.
    """
    if getattr(formula, "free_symbols", ()):
        return False
    is_held = call.target not in SIZES and any(isinstance(c.value, torch.Tensor) for c in call.inputs)
    return is_held or any(v is not None and v != values[0] for v in values)


def _behind(form: Recording, inputs: Collection[str]) -> set[int]:
    """Ids of all that is made from the given inputs."""
    reached: set[int] = set()
    for call in with_guards(form) if inputs else ():
        if call.target in inputs or any(id(c) in reached for c in call.inputs):
            reached.add(id(call))
    return reached


def _shapes(
    call: Call,
    seen: Sequence[Any],
    missed: Sequence[tuple[Mapping[str, int], Any]],
    formulas: sizing.Formulas,
    of_each: sizing.Formulas,
    left: tuple[int, Size] | None,
) -> tuple[tuple[Size, ...], ...]:
    """The shapes of a call's tensors as formulas, through what was seen at the points of ``formulas``.

    That of an axis whose size is ``left`` to torch is what it says, where the one that was fitted rounds.

    A tensor that has other axes where one dim is changed counts as unchanged there. Where it has others with
    all changed at once, that says nothing of its sizes, and they are those ``of_each`` dim changed alone.
    """
    out = []
    for i, tensor in enumerate(tensors(call.value)):
        known = [i < len(s) and len(s[i]) == tensor.dim() for s in seen]
        at_all = known[len(of_each.dims) :]
        fitted, n_points = (formulas, len(seen)) if all(at_all) else (of_each, len(of_each.dims))
        told = zip(seen[:n_points], known, strict=False)
        others = [s[i] if is_known else tuple(tensor.shape) for s, is_known in told]
        more = [(p, s[i]) for p, s in missed if i < len(s) and len(s[i]) == tensor.dim()]
        sizes = [*zip(tensor.shape, *others, strict=True)]
        if left is not None and is_stepped(fitted(sizes[left[0]])):
            fitted.prefer(sizes[left[0]], left[1])
        out.append(
            tuple(fitted.with_more(v, [(p, s[axis]) for p, s in more]) for axis, v in enumerate(sizes))
        )
    return tuple(out)
