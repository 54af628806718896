"""Whether rows of a batch depend on one another, and which op mixes them: rows are put in others' places.

A graph is run on rows a b, a a and b b. Where rows are alone, a is the same beside b as beside a, and a
number made from all rows (a mean loss) is the mean of what it is for each: an even one, or one over labels,
which can be counted. On rows b a b both are what they were, wherever they are and how many there are. The
random numbers are the same in each run, so noise drawn inside is no mixing. What follows for microbatches is
left to ``runtime``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...arguments import brief
from ...graph import Dim, batch_dim
from ...units import Size
from ..calls.call import Call, Recording
from ..calls.describe import call_and_place
from ..calls.faults import of_models
from ..calls.labels import can_be_counted, label_options
from ..code.leaves import asking
from ..code.own_code import OwnCode
from ..code.scripted import ScriptsGiven
from ..inputs.contents import is_whole
from ..sizes.rerun import replay
from ..sizes.trials import first_line
from ..sizes.variation import Mixing
from ..state.state import seed
from .affordable import Affordable
from .alike_layers import AlikeLayers
from .among_many import RowsMet
from .backwards import OwnBackwards
from .by_mode import Evaluated, InTraining, in_training
from .class_weights import by_class_weights
from .code_run import CodeRun
from .data_dependent import Change, Watch
from .form_on_rows import FormOnRows
from .inner_numbers import Around
from .joining import joining
from .lifted import lifted
from .noise import OwnNoise, even_around
from .noise_of_others import mixed_by_noise
from .order import by_order
from .pieces import fault_in_pieces
from .results import Results, Rows, axes, is_as_recorded, is_close
from .row_questions import Answer, Asked, first_found, if_told, mixed_in, of_other_signs
from .varied_data import of_other_sign

__all__ = ["mixing", "pairs_of_rows", "rows_of"]

_logger = logging.getLogger("autopipe")
_MOST_PAIRS = 4
"""So many pairs of the example's rows are looked through for one of which a model gives numbers."""
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_Look = Callable[[Call, Any], Any]
_Told = tuple[nn.Module, Recording, Mapping[str, Tensor], Dim, torch.device, Callable[[], None]]


@torch.no_grad()
@asking()
def mixing(
    code: OwnCode,
    forms: Mapping[bool, Recording],
    given: Mapping[str, Tensor],
    dims: Sequence[Dim],
    shapes: _Shapes,
    device: torch.device,
    start: Callable[[bool], None],
    own: OwnBackwards | None = None,
    *,
    takes: Callable[[int], bool],
    n_rows: int = 0,
) -> Mixing:
    """Run the forms on the tensors ``given``, and on others like them; ``start`` sets the mode.

    A form that is asked alone, whatever mode it is of, is given as that of evaluation. ``own`` is shown the
    calls of a run with gradients where there is one.

    Where the forms are right for two rows (``takes`` tells for how many), on two alone, as only these tell
    how rows weigh. Where the graph does not run on rows in other places, it is run on pieces of the batch.
    Of more than two, on ``n_rows`` at the most, or a few more: what is to be asked of further ones is told.
    Nothing is found on the meta device.
    """
    dim = batch_dim(dims)
    if dim is None or dim.packed or device.type == "meta":
        return Mixing()
    found, own = _Found(), own or OwnBackwards(code, dim, shapes)
    evaluated = Evaluated(code, forms[False]) if forms.get(True) is forms[False] else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for training in sorted(forms):
            told = found.given or given, dim, shapes, device, partial(start, training), takes
            form = _Form(code, forms[training], *told, n_rows)
            if not training:
                found.always = _asked_of(form, found, evaluated, may_point=True)
            elif not found.always:
                anew, by_number = _in_training(form, start, own, evaluated)
                if anew.is_other:
                    found.training = _asked_of(form, found, None, may_point=False)
                else:
                    found.training = (_by_noise(form) if anew.is_noisy else "") or by_number
                # unlike batch norm it is another thing for a microbatch of so many rows
                found.always = form.code.exact_gradients.get((form.form.calls[-1], training), "")
    return found.mixing()


@dataclasses.dataclass(frozen=True, slots=True)
class _Form(FormOnRows):
    """The same, what runs it, and how many rows the batch has that it may run on."""

    n_rows: int

    @property
    def of(self) -> dict[str, Any]:
        """What :class:`FormOnRows` has of it, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(FormOnRows)}

    @property
    def told(self) -> _Told:
        return self.code.model, self.form, self.given, self.dim, self.device, self.begin

    @property
    def results(self) -> Callable[..., Results]:
        """See :func:`_results`."""
        return partial(_results, self.code.model, self.form, self.dim, self.shapes, self.device, self.begin)


@dataclasses.dataclass(slots=True)
class _Found:
    """What is known of the forms so far; see :class:`Mixing`. ``given`` are other tensors to go on with."""

    given: Mapping[str, Tensor] | None = None
    always: str = ""
    training: str = ""
    points: bool = False
    sums: list[bool] = dataclasses.field(default_factory=list)
    summed: set[str] = dataclasses.field(default_factory=set)
    blocks: set[str] = dataclasses.field(default_factory=set)
    steps: dict[str, Any] = dataclasses.field(default_factory=dict)
    made_of_rows: dict[str, str] = dataclasses.field(default_factory=dict)
    elsewhere: bool = False
    beyond: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    untold: str = ""
    unasked: set[int] = dataclasses.field(default_factory=set)
    nearly: str = ""
    affords: Affordable | None = None

    def answered(self, answer: Answer) -> str:
        """In words, what an answer says to mix rows; the rest of it is noted."""
        self.elsewhere = answer.elsewhere
        self.nearly = self.nearly or answer.nearly
        self.unasked.update(answer.unasked)
        self.beyond += [answer.beyond] if answer.beyond else []
        return answer.said

    def mixing(self) -> Mixing:
        if self.points:
            return Mixing(self.always, points=True)
        found = Mixing(
            self.always,
            self.training,
            is_asked=bool(self.sums),
            elsewhere=self.elsewhere,
            beyond=min(self.beyond, default=None),
        )
        if self.always:
            return found
        return dataclasses.replace(
            found,
            sums=bool(self.sums) and all(self.sums),
            summed=tuple(sorted(self.summed)),
            blocks=tuple(sorted(self.blocks)),
            steps=self.steps,
            made_of_rows=self.made_of_rows,
            untold=self.untold,
            unasked=tuple(sorted(self.unasked)),
            nearly=self.nearly,
        )


def _asked_of(form: _Form, found: _Found, evaluated: Evaluated | None, *, may_point: bool) -> str:
    """In words, what mixes rows of a form, asked until something is ``found``; nothing where none does.

    Where rows ``may_point`` to others by number, they are asked in pieces if they cannot be in other places.
    """
    said, seen, failed = _in_places(form, found, evaluated)
    form = dataclasses.replace(form, given=found.given or form.given)
    is_sure = seen is not None and seen.is_of_two
    if may_point and not (is_sure or said) and any(map(_may_point, form.given.values())):
        are_rows = partial(axes, dim=form.dim, shapes=form.shapes)
        fault = fault_in_pieces(*form.told, takes=form.takes, rows_of=are_rows, is_close=is_close)
        if fault:
            found.points = True
            return fault
        failed = failed if fault is None else ""
    found.untold = found.untold or (failed if seen is None else "")
    if not (is_sure or said):
        said = if_told(
            by_order, form.code.model, form.form, form.given, form.dim, form.shapes, form.device, form.begin
        )
    said = said or if_told(by_class_weights, *form.told)
    if not said and (said := _by_scripted(form)):
        found.elsewhere = True
    if seen is None:
        return said or _by_noise(form)
    run = partial(rows_of, *form.told)
    # rows of the other mode make about as much
    found.affords = found.affords or Affordable(max(form.n_rows, form.dim.example), run(alone=is_sure))
    asked = Asked(**form.of, results=form.results, run=run, seen=seen, affords=found.affords, is_sure=is_sure)
    said = said or found.answered(first_found(asked))
    if seen.is_noisy and not said:
        said = _by_noise(form)
        if not said and (even := asked.drawn_evenly()) is not None:
            said = found.answered(first_found(even))
    return said


def _by_scripted(form: _Form) -> str:
    """In words, the first call whose scripted code goes by values, which nobody sees it read; or nothing."""
    calls = [c for c in form.form.calls if form.code.is_own(c) and form.code.reads_unseen(c)]
    seen = _given_to_scripts(form) if calls else {}
    found = next((c for c in calls if form.code.reads_unseen(c, seen)), None)
    return (
        "" if found is None else f"{call_and_place(found)} is scripted and goes by values of all rows at once"
    )


def _given_to_scripts(form: _Form) -> dict[int, list[bool]]:
    """Which arguments scripted functions are given of calls, as a run shows; nothing where it fails."""
    try:
        with ScriptsGiven(form.code.model) as seen:

            def begin() -> None:
                form.begin()
                seen.begin()

            rows_of(*form.told[:5], begin, alone=form.takes(2))("ab")
    except of_models():  # whatever it is: rows in others' places are another's to ask about
        return {}
    return seen.are_of_calls


def _in_places(form: _Form, found: _Found, evaluated: Evaluated | None) -> tuple[str, Results | None, str]:
    """In words, what mixes rows in others' places; what came of these, and why nothing did, if so.

    On two rows alone if the form takes them, else with the others behind them.
    """
    dim, shapes, takes, failed = form.dim, form.shapes, form.takes, ""
    for alone in (True, False) if takes(2) and dim.example > 2 else (False,):
        try:
            both = form.results(form.given, alone, watch=evaluated)
            if not both.is_finite("ab"):
                both, given = _finite(form, alone) or (both, form.given)
                if given is not form.given:
                    found.given, form = given, dataclasses.replace(form, given=given)
            more = takes(3 if alone else dim.example + 1)
            said = (
                mixed_in(both, dim, shapes)
                or of_other_signs(form.results, form.form, form.given, alone, dim, shapes)
                or both.moved(dim, shapes, takes_more=more)
                or both.neither()
            )
            if not said:
                _note(form, found, both, more, alone)
            if not both.is_noisy:
                key = form.form.calls[-1], form.code.model.training
                first = both.of("aa") if both.is_of_two else []
                form.code.gave[key] = _rows(form.given, dim, "ab", alone), both.of("ab"), first
            return said, both, ""
        except of_models() as error:
            # any Python of the model, on rows it may not take: inputs may point to rows
            failed = brief(first_line(error))
            _logger.debug("rows could not be told apart: %s", failed)
    return "", None, failed


def _finite(form: _Form, alone: bool) -> tuple[Results, Mapping[str, Tensor]] | None:
    """What comes of rows of which all is numbers, and the tensors these are from; None where there are none.

    Further rows of the example, where the first two lack what the model asks, such as labels of each kind, or
    rows that are drawn.
    """
    further = _of_further(form.results, form.given, form.dim) if alone else iter(())
    finite = next(filter(_is_finite, further), None)
    if finite is not None:
        return finite, form.given
    drawn = _drawn(form.given)
    other = form.results(drawn, alone)
    return (other, drawn) if _is_finite(other) else None


def _note(form: _Form, found: _Found, both: Results, takes_more: bool, alone: bool) -> None:
    """Note what rows that nothing mixes make of numbers, and where they lie."""
    dim, shapes, given = form.dim, form.shapes, form.given
    if both.is_of_two:
        are_sums = both.sums()
        if None in are_sums.values():
            at_zero = _of_lifted(form.results, form.code.model, form.form, given, alone, dim, shapes)
            are_sums = {n: at_zero.get(n) if s is None else s for n, s in are_sums.items()}
        found.sums += map(bool, are_sums.values())
        found.summed |= {name for name, is_sum in are_sums.items() if is_sum}
    found.blocks |= both.blocks(dim, shapes)
    if both.is_of_two:
        samples = itertools.chain([both], _of_others(form.results, given, dim))
        steps, made_of_rows = joining(samples, dim, shapes, takes_more=takes_more)
        found.steps |= steps
        found.made_of_rows |= made_of_rows


def _of_further(results: Callable[..., Results], given: Mapping[str, Tensor], dim: Dim) -> Iterator[Results]:
    """What comes of the example's further rows, two alone at a time; see :data:`_MOST_PAIRS`."""
    for pair in itertools.islice(pairs_of_rows(given, dim), 1, None):
        yield results(pair, True)


def pairs_of_rows(given: Mapping[str, Tensor], dim: Dim) -> Iterator[dict[str, Tensor]]:
    """The example's tensors with two rows after another at their head; see :data:`_MOST_PAIRS`."""
    for first in range(0, min(dim.example, 2 * _MOST_PAIRS), 2):
        yield _from_row(given, dim, first)


def _drawn(given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with other numbers, as for an example that is of memory nobody has written to."""
    drawing, out = torch.Generator().manual_seed(0), dict(given)
    for name, tensor in given.items():
        if tensor.is_floating_point():
            numbers = torch.randn(tensor.shape, generator=drawing, device="cpu")
            out[name] = numbers.to(tensor).requires_grad_(tensor.requires_grad)
    return out


def _is_finite(both: Results) -> bool:
    return both.is_finite("ab")


def _from_row(given: Mapping[str, Tensor], dim: Dim, first: int) -> dict[str, Tensor]:
    """The example's tensors with the rows ahead of the first one at their end."""
    turned = dict(given)
    for name, axis in dim.where:
        turned[name] = given[name].detach().roll(-first, axis).requires_grad_(given[name].requires_grad)
    return turned


def _of_others(results: Callable[..., Results], given: Mapping[str, Tensor], dim: Dim) -> Iterator[Results]:
    """What comes of other two rows alone: the example's next ones, of which then one has the other sign."""
    turned = _from_row(given, dim, 2)
    floats = {n for n, axis in dim.where if given[n].is_floating_point() and given[n].shape[axis] > 1}
    for rows in (turned, of_other_sign(turned, dim, floats)):
        try:
            yield results(rows, True)
        except of_models() as error:
            # any Python of the model, on data that it may not take
            _logger.debug("outputs of other rows could not be told: %s", error)


def _of_lifted(
    results: Callable[..., Results],
    model: nn.Module,
    form: Recording,
    given: Mapping[str, Tensor],
    alone: bool,
    dim: Dim,
    shapes: _Shapes,
) -> dict[str, bool]:
    """Which numbers are sums of rows' other values, or by what a loss over labels says of itself."""
    said = {c.name: o["reduction"] for c in form.calls if (o := label_options(model, c)) is not None}
    try:
        found = results(given, alone, changes=lifted(model, form, dim, shapes)).sums()
    except of_models() as error:
        # any Python of the model, on values that it may not take
        _logger.debug("sums could not be told from means: %s", error)
        found = dict.fromkeys(said)
    return {n: said.get(n) == "sum" if is_sum is None else is_sum for n, is_sum in found.items()}


def _by_noise(form: _Form) -> str:
    """See :func:`mixed_by_noise`; nothing where the form is not right for one row more."""
    alone = form.takes(2)
    n = 2 if alone else max(2, form.dim.example)
    if not form.takes(n + 1):
        return ""
    run = rows_of(*form.told, alone=alone)
    return if_told(mixed_by_noise, form.code, form.form, run, n, form.dim, form.shapes, form.device)


def _results(
    model: nn.Module,
    form: Recording,
    dim: Dim,
    shapes: _Shapes,
    device: torch.device,
    begin: Callable[[], None],
    rows: Mapping[str, Tensor],
    alone: bool,
    times: int = 1,
    changes: Change | None = None,
    around: Around = contextlib.nullcontext,
    watch: Watch | Evaluated | None = None,
    alike: AlikeLayers | None = None,
    *,
    evenly: bool = False,
) -> Results:
    """What a form gives for two ``rows``, so many ``times`` behind one another.

    Labels are counted where all can be: of others the model may make means. ``changes`` may put other values
    in the place of calls'; a run is in the context ``around`` it; ``watch`` looks at one. Of layers that are
    ``alike`` one runs for all. All that is drawn is one number where it is drawn ``evenly``.
    """
    around = even_around(device, around) if evenly else around
    over_labels = [*filter(None, (label_options(model, call) for call in form.calls))]
    counted = over_labels if all(can_be_counted(model, options) for options in over_labels) else []
    told = (model, form, rows, dim, device, begin)
    run = rows_of(*told, alone=alone, times=times, changes=changes, around=around, alike=alike)
    run = run if watch is None else partial(watch.first, run)
    has_others = dim.example > 2 and not alone
    n_rows = 2 * times + (max(dim.example - 2, 0) if has_others else 0)
    noise = OwnNoise(dim, shapes, device)
    is_longer = times > 1 or has_others
    return Results(form, run, is_longer, has_others, counted, noise, n_rows, is_even=evenly)


def rows_of(
    model: nn.Module,
    form: Recording,
    given: Mapping[str, Tensor],
    dim: Dim,
    device: torch.device,
    start: Callable[[], None],
    *,
    alone: bool = False,
    times: int = 1,
    changes: Change | None = None,
    around: Around = contextlib.nullcontext,
    alike: AlikeLayers | None = None,
) -> Rows:
    """What runs a form on the example's first two rows in any order, the others behind them or left out.

    The order comes so many ``times``; ``start`` sets mode and state. What ``changes`` gives for a call takes
    the place of its value; each run is in the context that ``around`` gives for its rows. Of layers that are
    ``alike`` one runs for all.
    """

    def run(rows: str, look: _Look | None = None) -> Any:
        start()
        seed(device)
        shown = look if changes is None else partial(_changed, changes, rows * times, look)
        batch, shared = _rows(given, dim, rows * times, alone), alike.sharing() if alike else None
        with around(rows * times):
            return replay(model, form, batch, device, shared, look=shown, notes=False).result

    return run


def _changed(changes: Change, rows: str, look: _Look | None, call: Call, value: Any) -> Any:
    other = changes(rows, call, value) if is_as_recorded(call, value) else None
    seen = None if look is None else look(call, value if other is None else other)
    return other if seen is None else seen


def _may_point(tensor: Tensor) -> bool:
    return is_whole(tensor) and tensor.dtype is not torch.bool


def _in_training(
    form: _Form, start: Callable[[bool], None], own: OwnBackwards, evaluated: Evaluated | None
) -> tuple[InTraining, str]:
    """See :func:`in_training`; and in words, what gives others there of more rows than two."""
    if evaluated is None or any(c.mutated for c in form.form.calls):
        return InTraining(True, True), ""
    alone = form.takes(2)

    def run_in(training: bool) -> Rows:
        return rows_of(*form.told[:5], partial(start, training), alone=alone)

    def look(call: Call, value: Any) -> None:
        own.look(call, value)
        met.keep(call, value)

    ran = CodeRun()
    by_mode = [c for c in form.form.calls if form.code.is_own(c) and form.code.may_go_by_mode(c, form.form)]
    met = RowsMet(form, 2, ran, by_mode if alone else [])
    with ran if by_mode else contextlib.nullcontext(), own.hooks:
        found = in_training(evaluated, form.form, run_in, form.device, look)
    own.is_whole &= not found.is_other
    own.end()
    if found.is_other:
        return found, ""
    return found, if_told(_by_number, form, met)


def _by_number(form: _Form, met: RowsMet) -> str:
    """In words, the first call that is seen to give others of another number of rows."""
    form.begin()
    found = met.kept("ab")
    form.code.keep_met(form.form, found.alone, found.gradients.values())
    return next(iter((found.exact | found.near).values()), "")


def _rows(given: Mapping[str, Tensor], dim: Dim, rows: str, alone: bool) -> dict[str, Tensor]:
    """The tensors with the example's first two rows, a and b, in the order of ``rows``; made up if alike.

    The rows behind them stay, unless these are to be ``alone``. A third of ``rows`` comes last.
    """
    picked: dict[str, tuple[Tensor, Tensor, int]] = {}
    for name, axis in dim.where:
        tensor = given[name]
        a = tensor.select(axis, 0)
        picked[name] = a, tensor.select(axis, 1) if tensor.shape[axis] > 1 else a, axis
    if all(torch.equal(a, b) for a, b, _ in picked.values()):
        picked = {n: (_uneven(a), _other(_uneven(a)), axis) for n, (a, _, axis) in picked.items()}
    out = dict(given)
    for name, (a, b, axis) in picked.items():
        chosen = [a if row == "a" else b for row in rows]
        rest = () if alone else given[name].unbind(axis)[2:]
        made = torch.stack([*chosen[:2], *rest, *chosen[2:]], axis)
        out[name] = made.requires_grad_(given[name].requires_grad)
    return out


def _uneven(row: Tensor) -> Tensor:
    """The row; where all in it is one number, as in an example of zeros or ones, with others added."""
    if not row.is_floating_point() or row.numel() < 2 or row.min() != row.max():
        return row
    return row + torch.linspace(0.25, 0.75, row.numel(), device=row.device).view(row.shape).to(row.dtype)


def _other(row: Tensor) -> Tensor:
    """Another row of the same kind: numbers a little larger, tokens in another order."""
    if is_whole(row):
        return row.roll(1, -1) if row.ndim else row
    return row * 1.25 + 0.125
