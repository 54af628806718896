"""Questions to a form about its rows, one after another until one finds what mixes them.

Putting rows in others' places, and what a form gives for them there, are left to ``mixing`` and ``results``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, dtype

from ...graph import Dim
from ...units import Size
from ..calls.call import Call, Depends, Recording
from ..calls.describe import call_and_place
from ..calls.faults import of_models
from ..calls.functions import tensors
from .affordable import Affordable
from .alike_layers import AlikeLayers
from .among_many import Met, RowsMet
from .class_weights import by_class_weights
from .code_run import CodeRun
from .data_dependent import Reading, Turn, Turned, Watch, alike, deciding, numbers_apart, reading, scales
from .form_on_rows import FormOnRows
from .held_back import RowGradients, holds_back
from .inner_numbers import Around, numbers_elsewhere
from .lifted import truths_apart
from .noise import EvenNoise, even_around
from .results import ALLOWED, COARSE, EQUAL, FINER, ROUNDED, SLIGHT, Results, Rows, axes, differ
from .tables import noughts, uneven
from .thresholds import MOST, beside_counts, beside_places, rows_to_try
from .unlike_rows import fault_among_unlike, gathered, that_stay, width
from .varied_data import of_other_sign, of_other_weights, signed, told_otherwise, unlike, with_missing

__all__ = ["Answer", "Asked", "first_found", "first_mixed", "if_told", "mixed_in", "of_other_signs"]

_logger = logging.getLogger("autopipe")
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
_MANY = 4
_MOST_BYTES = 1 << 26
"""What may be made of rows for so many to be looked for among sizes in the graph."""
_PAIRS = "ab", "aa", "bb"


@dataclasses.dataclass(frozen=True, slots=True)
class Asked(FormOnRows):
    """A form that runs on rows in others' places; it ``is_sure`` where on two rows alone.

    Attributes
    ----------
    results: (rows, alone, times, changes, around, watch) → what the form gives for them.
    run: (alone, times) → what runs it on the rows ``given``. seen: what it gives for those.
    is_even: whether all that it draws is one number.
    affords: whether it may be run on so many rows.
    """

    results: Callable[..., Results]
    run: Callable[..., Rows]
    seen: Results
    affords: Affordable
    is_sure: bool
    is_even: bool = False

    def drawn_evenly(self) -> Asked | None:
        """The same, where all that it draws is one number; None where it does not run so."""
        try:
            results = functools.partial(self.results, evenly=True)
            seen = results(self.given, self.is_sure)
            if not seen.is_finite(*_PAIRS):
                return None
        except of_models() as error:
            # any Python of the model, which may wait for another number
            _logger.debug("rows could not be asked about without noise: %s", error)
            return None
        run = functools.partial(self.run, around=even_around(self.device, contextlib.nullcontext))
        return dataclasses.replace(self, results=results, run=run, seen=seen, is_even=True)

    def within(self) -> contextlib.AbstractContextManager[Any]:
        """What is around runs of it that nothing else is around."""
        return EvenNoise(self.device, any_op=True) if self.is_even else contextlib.nullcontext()

    @property
    def times(self) -> int:
        """How often each of two rows comes where they are to be many; once where it may run on no more."""
        return next((n for n in range(_MANY, 1, -1) if self.affords(2 * n)), 1)


class Answer(NamedTuple):
    """What is found of a form's rows.

    Attributes
    ----------
    said: in words, what mixes them, or nothing. elsewhere: whether the example's values had to be other ones
        for it. beyond: how many rows nothing mixes, where something does more of them, and what. unasked: the
        numbers of rows from which on something is yet to be asked, as the form may not be run on so many.
        nearly: what mixes them by less than is allowed of code that goes by data, though by more than
        rounding.
    """

    said: str = ""
    elsewhere: bool = False
    beyond: tuple[int, str] | None = None
    unasked: tuple[int, ...] = ()
    nearly: str = ""


def first_found(asked: Asked) -> Answer:
    """What mixes rows, asked until something does."""
    far: dict[int, str] = {}
    unasked = set[int]()
    nearly: list[str] = []
    for question, is_elsewhere in _questions(asked, far, unasked, nearly):
        if found := if_told(question):
            return Answer(found, is_elsewhere)
    return Answer("", False, min(far.items(), default=None), tuple(sorted(unasked)), "".join(nearly[:1]))


def _questions(
    asked: Asked, far: dict[int, str], unasked: set[int], nearly: list[str]
) -> Iterator[tuple[Callable[[], str], bool]]:
    """What to ask, each with whether it is of other values than the example's; ``far``: see :class:`Met`.

    Numbers of rows from which on something is yet to be asked are ``unasked``; for ``nearly`` see
    :class:`Answer`.
    """
    given, dim, shapes, results, is_sure = asked.given, asked.dim, asked.shapes, asked.results, asked.is_sure
    form, model = asked.form, asked.code.model
    mixed_among = functools.partial(_of_others, results, alone=is_sure, dim=dim, shapes=shapes)
    few = None if is_sure else next((n for n in range(2, _MANY + 1) if asked.takes(2 * n)), None)
    if few is not None:
        # others beside two rows may hide what these make together, as which are the largest
        yield (
            functools.partial(_of_others, results, given, alone=True, dim=dim, shapes=shapes, times=few),
            False,
        )
    many = asked.times if is_sure else _MANY
    unasked.update(2 * n - 1 for n in range(many + 1, _MANY + 1))
    is_more = is_sure and many > 1 and asked.takes(2 * many)
    watch = Watch(model, form, 2 * many if is_more else 2 if is_sure else dim.example)
    asks_of_many = is_more and not asked.seen.is_noisy
    met = RowsMet(asked, 2 * many, watch.ran) if is_more else None
    watch.keep = met.keep if met is not None else None
    in_gradients = _row_gradients(asked)
    if in_gradients is not None:
        held_back = functools.partial(in_gradients.fault, [many] if is_more else ())
        yield functools.partial(_looked_at, watch.ran, held_back), False
    others = of_other_weights(given, dim), told_otherwise(given, dim), unlike(model, form, given, dim, shapes)
    for rows in itertools.chain(*others):
        yield functools.partial(mixed_among, rows), False
        yield functools.partial(by_class_weights, model, form, rows, dim, asked.device, asked.begin), False
    for apart in numbers_apart(form, {name for name, _ in dim.where}) if is_sure else ():
        yield functools.partial(_of_numbers, results, given, changes=apart), False
    if is_more:
        # what two rows do not come near to, as a largest norm, more of them may pass
        yield functools.partial(_of_more, asked, many, watch), False
    if asks_of_many:
        spread = _gathered(asked)
        for n in _of_unlike_rows(asked, watch, spread):
            if not asked.affords(n):
                unasked.add(n - 1)
                continue
            yield functools.partial(_among_unlike, asked, n, {}, watch, nearly), True
            if spread:
                yield functools.partial(_among_unlike, asked, n, spread, watch, nearly), True
    found = _met(asked, watch, met, many) if met is not None else Met()
    asked.code.keep_met(form, found.alone, found.gradients.values())
    for words in found.exact.values():
        yield functools.partial(str, words), True
    for n in _numbers_of_rows(asked, watch, found, far, unasked) if asks_of_many else ():
        yield functools.partial(_among_more, asked.seen, n // 2 + 1, dim, shapes), True
        if in_gradients is not None:
            yield functools.partial(in_gradients.fault, [n // 2 + 1]), True
    exactly = found.exactly | _untold(asked, found)
    for n in sorted(n for n in exactly if asks_of_many and asked.takes(n)):
        if not asked.affords(n):
            unasked.add(n)
            continue
        yield functools.partial(_among_exactly, asked.seen, n, dim, shapes), True
    own = [c for c in form.calls if asked.code.is_own(c)] if watch.reads else []
    evenly, apart_inside, of_each = _numbers_elsewhere(asked) if is_sure and watch.may_bend else ([], [], [])
    for around in apart_inside:
        yield functools.partial(_of_numbers, results, given, around=around), False
    for around in of_each if watch.reads and not asked.seen.is_noisy else ():
        otherwise = functools.partial(results, given, is_sure, around=around)
        yield functools.partial(_by_data, otherwise, 1, dim, shapes, nearly, own, FINER), True
    for around in evenly:
        otherwise = functools.partial(results, given, is_sure, around=around)
        by_data = functools.partial(_by_data, otherwise, many if is_more else 1, dim, shapes, nearly, own)
        yield by_data if watch.reads else functools.partial(_by_numbers, otherwise, dim, shapes), True
    read = _read(asked, watch, many if is_more else 1)
    if tables := watch.tables_alike() | noughts(model):
        yield functools.partial(_of_tables, asked, tables), True
    for rows in unlike(model, form, given, dim, shapes, reads=True) if read.reads else ():
        yield functools.partial(mixed_among, rows), False
    if read.ranks:
        yield functools.partial(_of_alike, results, given, is_sure, dim, shapes), False
    for rows in with_missing(given, dim) if read.skips else ():
        yield functools.partial(_of_missing, functools.partial(results, rows, is_sure), dim, shapes), False
    for on_other_data in _by_other_data(asked, read):
        yield (
            functools.partial(_by_data, on_other_data, many if is_more else 1, dim, shapes, nearly, own),
            True,
        )
    places = _places(asked, form.calls)
    for scale in scales(Reading(deciding(form, places)), places):
        yield (
            functools.partial(
                _by_numbers, functools.partial(results, given, is_sure, changes=scale), dim, shapes
            ),
            True,
        )
    for turned in truths_apart(model, form, given, dim, shapes) if is_sure else ():
        yield (
            functools.partial(
                _of_others, functools.partial(results, changes=turned), given, True, dim, shapes
            ),
            True,
        )
    asked.code.tables_by_row.update(watch.tables_by_number())
    asked.code.alike[form.calls[-1]] = watch.alike


def _row_gradients(asked: Asked) -> RowGradients | None:
    """What tells rows apart in the gradients of outputs; None where code holds none back or draws noise."""
    if asked.seen.is_noisy or not holds_back(asked.code, asked.form):
        return None
    made = [c for c in asked.form.calls[-1].args[0] if isinstance(c, Call)]
    run = asked.run(alone=asked.is_sure)
    return RowGradients(asked.code.model, run, made, asked.seen.known_shares, asked.dim, asked.shapes)


def _numbers_of_rows(
    asked: Asked, watch: Watch, met: Met, far: dict[int, str], unasked: set[int]
) -> list[int]:
    """How many rows to run a form on, more than many, from small to large, as something may go by so many.

    Those on which it may not be run are ``unasked``.
    """
    form, dim, shapes, least = asked.form, asked.dim, asked.shapes, 2 * asked.times
    most = max(MOST, _most_rows(asked, form.calls, _MOST_BYTES))
    far.update({n: words for n, words in met.far.items() if asked.takes(n + 2)})
    cuts = rows_to_try(watch.noted.beyond if watch.noted else (), least, most)
    counted = beside_counts(form, lambda call: bool(_places(asked, [call])), least)
    found = beside_places(form, least, most).union(counted, cuts, met.near, _untold(asked, met))
    found = {n for n in found if asked.takes(n + 2)}
    unasked |= {n for n in found if not asked.affords(n)}
    found -= unasked
    for n in sorted(n for n in found if MOST < n < min(far, default=n + 1)):
        if words := if_told(_among_more, asked.seen, n // 2 + 1, dim, shapes):
            far[n] = words
            break
    return sorted(n for n in found if n <= MOST)


def _untold(asked: Asked, met: Met) -> set[int]:
    """Numbers of rows, more than many, that code names, and that no call by itself could be told of."""
    return {n for n in met.untold if 2 * asked.times < n <= MOST}


def _looked_at(ran: CodeRun, question: Callable[[], str]) -> str:
    """What a question finds, whose code is noted."""
    with ran:
        return question()


def _most_rows(asked: Asked, calls: Iterable[Call], n_bytes: int) -> int:
    """How many rows the calls may be run on for what they make of these to take so many bytes at most."""
    of_rows = (call for call in calls if call.depends & (Depends.INPUT | Depends.SHAPE))
    made = sum(t.nbytes for call in of_rows for t in tensors(call.value) if not t.is_nested)
    return n_bytes * max(asked.dim.example, 1) // max(made, 1)


def _met(asked: Asked, watch: Watch, in_turn: RowsMet, times: int) -> Met:
    """What :class:`RowsMet` finds in the run that was watched, or in one of its own where none was kept.

    Nothing where the form does not run so.
    """
    rows = "ab" * times
    try:
        if watch.noted is None:
            return in_turn.found(asked.run(alone=True, times=times), rows)
        asked.begin()
        return in_turn.kept(rows)
    except of_models() as error:
        # any Python of the model, on rows it may not take
        _logger.debug("what goes by how many rows there are could not be seen: %s", error)
        return Met()


def _by_other_data(asked: Asked, read: Reading) -> Iterator[Callable[..., Results]]:
    """What gives results on other data than code has read, or with what it asked of that turned round."""
    places = _places(asked, (c for c in asked.form.calls if id(c) in read.given))
    other = functools.partial(asked.results, asked.given, asked.is_sure)
    yield from (functools.partial(other, changes=scale) for scale in scales(read, places))
    yield from (functools.partial(other, around=functools.partial(_turned, turn)) for turn in read.truths)


def _of_unlike_rows(asked: Asked, watch: Watch, spread: Mapping[int, int] | None) -> list[int]:
    """How many rows to ask for that are all unlike: many, and more than they are wide where that matters."""
    if spread is None and not _gathers(asked, watch):
        return []
    wide = width(asked.form)
    many = 2 * asked.times
    numbers = [many, *([wide + 2 + wide % 2] if many < wide + 2 <= MOST else [])]
    return [n for n in numbers if asked.takes(n) and asked.takes(n // 2)]


def _gathers(asked: Asked, watch: Watch) -> bool:
    """Whether anything without rows was made of all of them that is told by other rows, or tells of them.

    What code reads of them may be. Numbers are not where labels weigh them, and they go nowhere but into
    other numbers, evenly.
    """
    noted = watch.noted
    if noted is None:
        return False
    return noted.gathers or watch.reads or (noted.totals and (noted.may_bend or not asked.seen.is_counted))


def _gathered(asked: Asked) -> dict[int, int] | None:
    """See :func:`gathered`, but for calls that only ask of what kind rows are."""
    told = asked.dim, asked.shapes
    if not (found := gathered(asked.form, *told)):
        return found
    try:
        stays = that_stay(asked.code.model, asked.form, asked.run(alone=True), *told, asked.device)
    except of_models() as error:
        # any Python of the model, on rows it may not take
        _logger.debug("what goes by rows was not told: %s", error)
        return found
    return gathered(asked.form, *told, stays)


def _among_unlike(asked: Asked, n: int, spread: Mapping[int, int], watch: Watch, nearly: list[str]) -> str:
    """See :func:`fault_among_unlike`; code that goes by data is right within its tolerance."""
    told = asked.code.model, asked.form, asked.given, asked.dim, asked.shapes, asked.begin
    own = [c for c in asked.form.calls if asked.code.is_own(c)] if watch.reads else []
    options: dict[str, Any] = {"is_counted": asked.seen.is_counted, "own": own}
    for allowed in (COARSE, ROUNDED) if watch.reads else (ALLOWED,):
        ask = functools.partial(fault_among_unlike, *told, n, spread, allowed, **options)
        if allowed is ROUNDED and nearly:
            break
        with asked.within():
            found = _of_alike_layers(ask, watch)
        if found:
            if allowed is not ROUNDED:
                return found
            nearly.append(found)
    return ""


def _places(asked: Asked, calls: Iterable[Call]) -> dict[int, int]:
    """The axis along which the rows of each call's value lie, by id of the call."""
    return {id(c): axis for c in calls for axis in axes(c, 0, asked.dim, asked.shapes)}


def _turned(turn: Turn, rows: str) -> Turned:
    """What turns the same truths whatever the rows."""
    return Turned(turn)


def if_told(find: Callable[..., str], *told: Any) -> str:
    """What mixes other rows, in words; nothing where the form does not take them."""
    try:
        return find(*told)
    except of_models() as error:
        # any Python of the model, on data that it may not take
        _logger.debug("other rows could not be told apart: %s", error)
        return ""


def _of_others(
    results: Callable[..., Results],
    rows: Mapping[str, Tensor],
    alone: bool,
    dim: Dim,
    shapes: _Shapes,
    times: int = 1,
) -> str:
    """What mixes other ``rows``."""
    return mixed_in(results(rows, alone, times=times), dim, shapes)


def _of_numbers(results: Callable[..., Results], given: Mapping[str, Tensor], **apart: Any) -> str:
    """What is no mean of rows' numbers that are far ``apart``: only they differ, so that rounding is all."""
    return results(given, True, **apart).number_off(EQUAL)


def of_other_signs(
    results: Callable[..., Results],
    form: Recording,
    given: Mapping[str, Tensor],
    alone: bool,
    dim: Dim,
    shapes: _Shapes,
) -> str:
    """What mixes rows of which the second has the other sign; one input after another, if not in all at once.

    A loss may take no target below zero.
    """
    names = signed(given, dim, form)
    try:
        return _of_others(results, of_other_sign(given, dim, names), alone, dim, shapes) if names else ""
    except of_models() as error:
        # any Python of the model, on data that it may not take
        _logger.debug("not all inputs take the other sign: %s", error)
    one_each = (of_other_sign(given, dim, {name}) for name in names if len(names) > 1)
    return next(filter(None, (if_told(_of_others, results, r, alone, dim, shapes) for r in one_each)), "")


def _of_more(asked: Asked, times: int, watch: Watch) -> str:
    """What mixes rows that come so many ``times``, or gives others than for two; ``watch`` looks at a run."""
    results, few, given, dim, shapes = asked.results, asked.seen, asked.given, asked.dim, asked.shapes
    many = results(given, True, times=times, watch=watch)

    def ask(alike: AlikeLayers | None = None) -> str:
        made = many if alike is None else results(given, True, times=times, alike=alike)
        return mixed_in(made, dim, shapes)

    mixed = ask() if few.is_noisy else _of_alike_layers(ask, watch)
    return mixed or few.among(many.of("ab"), "ab" * times, dim, shapes, ROUNDED)


def _of_alike_layers(ask: Callable[..., str], watch: Watch) -> str:
    """What ``ask`` finds, also with one of alike layers run for all where that is worth it and goes well.

    Those that are given as many of the batch's rows get the rows of the first of them, which may be others.
    """
    if watch.alike.is_worth_it:
        try:
            if not ask(alike=watch.alike):
                return ""
        except of_models() as error:
            # any Python of the model, in a layer that is given what another one made
            _logger.debug("alike layers could not be asked for one another: %s", error)
    return ask()


def _among_more(few: Results, times: int, dim: Dim, shapes: _Shapes) -> str:
    """What gives others than for a ``few`` rows where each comes so many ``times``, one behind the other."""
    rows = "a" * times + "b" * times
    return few.among(few.of(rows), rows, dim, shapes, ROUNDED)


def _among_exactly(few: Results, n: int, dim: Dim, shapes: _Shapes) -> str:
    """What gives others than for two rows where there are exactly so many, all of them row a."""
    words = few.among(few.of("a" * n), "a" * n, dim, shapes, ROUNDED)
    return words and f"{words}, others where they are {n}"


def _of_alike(
    results: Callable[..., Results], given: Mapping[str, Tensor], alone: bool, dim: Dim, shapes: _Shapes
) -> str:
    """What mixes rows each of which is alike throughout, or makes others of them in other places."""
    found = results(alike(given, dim), alone)
    return mixed_in(found, dim, shapes) or found.moved(dim, shapes, takes_more=False)


def _by_data(
    results: Callable[..., Results],
    times: int,
    dim: Dim,
    shapes: _Shapes,
    nearly: list[str],
    own: Collection[Call],
    level: Mapping[dtype, float] = COARSE,
) -> str:
    """What mixes rows, or goes by how many they are, on data that code is to go by otherwise.

    By much: a solver that adapts its steps to a batch may differ within its tolerance; what does by less is
    put down as ``nearly``, unless something is, or rows of the model's ``own`` calls differ by more. Rows
    come so many ``times`` as well.
    """
    once = results()
    every = (once, results(times=times)) if times > 1 else (once,)
    if not all(each.is_finite(*_PAIRS) for each in every):
        return _lost(once, dim, shapes)

    def found(level: Mapping[dtype, float], of_more: Mapping[dtype, float]) -> str:
        for each in every:
            if fault := each.fault(dim, shapes, level):
                where = first_mixed(each.form, each.run, dim, shapes, level)
                if where or level is of_more or each.fault(dim, shapes, of_more):  # a number alone is rounded
                    return "; ".join(filter(None, (where, fault if each.is_number or not where else "")))
        return once.among(every[-1].of("ab"), "ab" * times, dim, shapes, of_more) if times > 1 else ""

    said = found(level, level)
    if not said and own and any(each.fault(dim, shapes, EQUAL) for each in every):
        said = first_mixed(once.form, once.run, dim, shapes, level, among=own)
    if not (said or nearly) and (by_less := found(EQUAL, ROUNDED)):
        nearly.append(by_less)
    return said


def _lost(found: Results, dim: Dim, shapes: _Shapes) -> str:
    """What gives numbers for rows a and b together, and none for one of them beside itself; or nothing."""
    if not found.is_finite("ab") or found.is_finite("aa", "bb"):
        return ""
    return first_mixed(found.form, found.run, dim, shapes, COARSE)


def _of_missing(results: Callable[..., Results], dim: Dim, shapes: _Shapes) -> str:
    """What mixes rows of which the second lacks values; nothing where those make others be no numbers."""
    found = results()
    if not found.is_finite("ab", "aa"):
        return ""
    return mixed_in(found, dim, shapes) or found.number_lacking()


def _of_tables(asked: Asked, tables: Mapping[str, Tensor]) -> str:
    """What mixes rows, or makes others of them in other places, where tables hold other values."""
    dim, shapes = asked.dim, asked.shapes
    found = asked.results(asked.given, asked.is_sure, around=lambda rows: uneven(tables.values()))
    takes_more = asked.takes(3 if asked.is_sure else dim.example + 1)
    if not found.is_finite(*_PAIRS):
        return ""
    words = mixed_in(found, dim, shapes) or found.moved(dim, shapes, takes_more=takes_more)
    return words and f"{words}, as soon as {' or '.join(tables)} holds other values"


def _by_numbers(results: Callable[..., Results], dim: Dim, shapes: _Shapes) -> str:
    """What mixes rows where numbers on the way are others; nothing where these lead out of all numbers."""
    found = results()
    return mixed_in(found, dim, shapes) if found.is_finite(*_PAIRS) else _lost(found, dim, shapes)


def _numbers_elsewhere(asked: Asked) -> tuple[list[Around], list[Around], list[Around]]:
    """See :func:`numbers_elsewhere`; nothing where the form does not run so."""
    try:
        return numbers_elsewhere(asked.run(alone=True))
    except of_models() as error:
        # any Python of the model: it may not run while somebody watches what torch is asked
        _logger.debug("numbers could not be seen: %s", error)
        return [], [], []


def _read(asked: Asked, watch: Watch, times: int) -> Reading:
    """What a form goes by, which may go another way on other data."""
    try:
        return reading(asked.form, asked.run(alone=asked.is_sure, times=times), watch)
    except of_models() as error:
        # any Python of the model: it may not run while somebody watches what torch is asked
        _logger.debug("what code reads could not be seen: %s", error)
        return Reading()


def mixed_in(results: Results, dim: Dim, shapes: _Shapes) -> str:
    """What mixes rows in one form, in words, or nothing.

    Where results differ by little, though by more than rounding, some op must differ by more, or some number
    that a small share of goes into a loss. Where a number is the same whatever the rows, as a loss that is
    clipped, it tells nothing, and the ops are asked too.
    """
    fault = results.fault(dim, shapes, ALLOWED)
    if fault:
        where = first_mixed(results.form, results.run, dim, shapes)
        return "; ".join(filter(None, (where, fault if results.is_number or not where else "")))
    little = results.fault(dim, shapes, EQUAL) or not results.are_telling
    where = first_mixed(results.form, results.run, dim, shapes) if little else ""
    return where or (results.number_within() if results.number_off(SLIGHT) else "")


def first_mixed(
    form: Recording,
    run: Callable[..., Any],
    dim: Dim,
    shapes: _Shapes,
    allowed: Mapping[dtype, float] = ALLOWED,
    among: Collection[Call] | None = None,
) -> str:
    """The first call, of all or ``among`` some, in one of whose tensors rows are mixed."""
    seen: dict[str, dict[tuple[int, int], Tensor]] = {}
    for rows in ("ab", "aa", "bb"):
        kept = seen[rows] = {}

        def look(call: Call, value: Any, kept: dict[tuple[int, int], Tensor] = kept) -> None:
            for i, tensor in enumerate(tensors(value)):
                if axes(call, i, dim, shapes):
                    kept[id(call), i] = tensor.detach().clone()

        run(rows, look)
    for call in form.calls if among is None else among:
        for i in range(len(shapes.get(id(call), ()))):
            values = {rows: kept.get((id(call), i)) for rows, kept in seen.items()}
            if call.op != "output" and any(differ(values, a, allowed) for a in axes(call, i, dim, shapes)):
                return call_and_place(call)
    return ""
