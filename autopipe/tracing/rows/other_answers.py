"""Whether rows come out otherwise where their whole batch asks for another form of a model than they do.

A microbatch answers for itself what a model asks of the values of rows, of their number and of labels; its
batch may answer otherwise. Forms are looked at in pairs, on rows that ask for one of the two: a mask may be
asked row by row whether it masks anything, since without one a row that is whole stays what it is; a sum may
not be asked so whether it is positive. Rows under one form are looked at in ``mixing``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim, batch_dim
from ..calls.call import Call, Depends, Recording, map_calls
from ..calls.describe import expression
from ..calls.faults import of_models
from ..calls.labels import label_options
from ..calls.likeness import is_equal
from ..code.own_code import OwnCode
from ..inputs.contents import is_whole
from ..sizes.other_masks import witnesses
from ..sizes.rerun import replay
from ..sizes.variation import Variation
from ..state.state import seed
from .held_back import gradient_of, holds_back
from .noise import EvenNoise, is_drawn
from .results import ROUNDED, axes, is_close, is_number

__all__ = ["FormPairs", "parting", "two_rows"]

_logger = logging.getLogger("autopipe")
_MOST_ROWS = 8
_Batch = Mapping[str, Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class _AskedFor:
    """A form, and ``batches`` that ask for it, or are of its sizes where none is known that does."""

    form: Recording
    variation: Variation
    batches: tuple[_Batch, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Made:
    """The ``values`` that a form gives, each with its call; if asked, gradients of rows and of numbers.

    The tail has those ``taken``, and the output, of them.
    """

    values: Mapping[int | str, tuple[Any, Any]]
    taken: frozenset[int | str]
    of_rows: Tensor | None = None
    of_numbers: Tensor | None = None


class FormPairs:
    """What forms make of rows that ask for another of them.

    Attributes
    ----------
    said: by ids of two forms, in words, what is asked of all rows at once where the second makes something
        else than the first of rows that ask for the first; empty where it does not.
    """

    def __init__(self, code: OwnCode, device: torch.device) -> None:
        self._code, self._model, self._device = code, code.model, device
        self._known: dict[int, _AskedFor] = {}
        self.said: dict[tuple[int, int], str] = {}

    def know(
        self,
        form: Recording,
        variation: Variation,
        given: _Batch,
        is_asked: Callable[[_Batch], bool],
        *,
        most: int,
    ) -> None:
        """Be told of a form; ``most`` batches of the sizes ``given`` that ask for it are kept."""
        dim = batch_dim(variation.dims)
        is_told = dim is not None and not dim.packed and self._device.type != "meta"
        likely = _others_like(given, dim, self._device) if dim is not None and is_told else ()
        asking = [*itertools.islice(filter(is_asked, likely), most)] or [given]
        # without floats the contrary of a batch is the batch
        batches = tuple({tuple(map(id, batch.values())): batch for batch in asking}.values())
        self._known[id(form)] = _AskedFor(form, variation, batches)

    def look(
        self,
        form: Recording,
        beside: Sequence[Recording],
        tail: Collection[str],
        start: Callable[[bool], None],
        training: bool,
    ) -> None:
        """Compare a form with those ``beside`` it in a mode, on rows of both; ``start`` sets mode and state.

        Of the ops that run on the whole batch, by name the ``tail``, what they are given is compared; where
        code holds gradients back, those as well.
        """
        new, others = self._known[id(form)], [self._known[id(other)] for other in beside]
        has_gradients = any(holds_back(self._code, each) for each in (form, *beside))
        held = {id(batch) for each in (new, *others) for batch in each.batches}
        entering = frozenset[str]().union(*(_entering(each.form, tail) for each in (new, *others)))
        kept: dict[tuple[int, int], _Made] = {}
        begin = functools.partial(start, training)

        def give(form: Recording, batch: _Batch) -> _Made:
            key = id(form), id(batch)
            made = kept.get(key) or (None if tail or has_gradients else self._gave(form, batch, training))
            made = made or self._given_by(form, batch, entering, tail, begin, has_gradients)
            return kept.setdefault(key, made) if id(batch) in held else made

        for other in others:
            for here, there in ((other, new), (new, other)):
                pair = id(here.form), id(there.form)
                if pair not in self.said:
                    self.said[pair] = self._found(here, there, tail, give)
            for key in [key for key in kept if key[0] != id(new.form)]:
                del kept[key]

    def counts_alike(self, one: Recording, other: Recording, tail: Collection[str]) -> bool:
        """Whether the losses of two forms ahead of a ``tail`` leave out the same labels, where both do.

        Nothing is made of a form without such a loss: one for rows none of whose labels count may have none.
        """
        found = [_left_out(self._model, form, tail) for form in (one, other)]
        return found[0] == found[1] or not all(found)

    @torch.no_grad()
    def _found(
        self, here: _AskedFor, there: _AskedFor, tail: Collection[str], give: Callable[..., _Made]
    ) -> str:
        dim = batch_dim(here.variation.dims)
        asked = "" if dim is None or dim.packed else _asked_otherwise(here, there, dim)
        if dim is None or self._device.type == "meta" or not asked:
            return ""
        if not self.counts_alike(here.form, there.form, tail):
            return asked
        for own, its, of_sum in _for_both(here, there, dim):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    made, other = give(here.form, own), give(there.form, its)
            except of_models() as error:
                # any Python of the model, on rows it may not take; or noise that is not known
                _logger.debug("rows could not be answered otherwise: %s", error)
                continue
            if not other.taken <= made.values.keys():
                return asked  # one gives the tail nothing there
            per_row = of_sum if here.variation.mixing.sums else 1.0
            pairs = ((*made.values[k], other.values[k][1]) for k in other.taken)
            if any(_is_other(*pair, dim, here.variation, per_row) for pair in pairs):
                return asked
            if made.of_rows is not None and not _is_alike(made.of_rows, other.of_rows, 1.0):
                return f"{asked}, which changes gradients"
            if made.of_numbers is not None and not _is_alike(made.of_numbers, other.of_numbers, per_row):
                return f"{asked}, which changes gradients"
        return ""

    def _gave(self, form: Recording, batch: _Batch, training: bool) -> _Made | None:
        """What a form gave for such a batch in a mode, if it was run on one."""
        output = form.calls[-1]
        known, values, _ = self._code.gave.get((output, training), ({}, [], []))
        if not (known.keys() == batch.keys() and all(is_equal(known[n], batch[n]) for n in batch)):
            return None
        each = iter(values)
        leaves = ((c, next(each) if isinstance(c, Call) else c) for c in output.args[0])
        made = dict[int | str, tuple[Any, Any]](enumerate(leaves))
        return _Made(made, frozenset(made))

    def _given_by(
        self,
        form: Recording,
        batch: _Batch,
        entering: Collection[str],
        tail: Collection[str],
        start: Callable[[], None],
        has_gradients: bool,
    ) -> _Made:
        """What a form gives ahead of a tail, and of what is ``entering`` one, each with its call.

        Noise is one number.
        """
        made: dict[int | str, tuple[Any, Any]] = {}

        def look(call: Call, value: Any) -> None:
            if call.name in entering and call.depends & Depends.INPUT and call.op != "placeholder":
                made[call.name] = call, value.clone() if isinstance(value, Tensor) else value

        def run(noise: contextlib.AbstractContextManager[Any]) -> Any:
            start()
            seed(self._device)
            with noise, torch.set_grad_enabled(has_gradients):
                return replay(self._model, form, batch, self._device, look=look, notes=False).result

        result = run(contextlib.nullcontext())
        if any(c.is_random for c in form.calls) and is_drawn(self._device):
            result = run(EvenNoise(self._device))
        leaves = enumerate(zip(form.calls[-1].args[0], result, strict=True))
        given_out = {i: leaf for i, leaf in leaves if getattr(leaf[0], "name", None) not in tail}
        taken = frozenset[int | str]((*given_out, *(_entering(form, tail) & made.keys())))
        values = made | given_out
        if not has_gradients:
            return _Made(values, taken)
        variation = self._known[id(form)].variation
        dim, weights = batch_dim(variation.dims), [p for p in self._model.parameters() if p.requires_grad]
        placed = [
            (value, axes(call, 0, dim, variation.shapes) if dim and isinstance(call, Call) else [])
            for call, value in values.values()
            if isinstance(value, Tensor)
        ]
        of_rows, of_numbers = (
            gradient_of([(v, rows) for v, rows in placed if bool(rows) is has_rows], weights)
            for has_rows in (True, False)
        )
        return _Made({k: (c, _detached(v)) for k, (c, v) in values.items()}, taken, of_rows, of_numbers)


def _entering(form: Recording, tail: Collection[str]) -> frozenset[str]:
    """The names of what a form's ops of a ``tail`` take of others."""
    return frozenset(c.name for call in form.calls if call.name in tail for c in call.inputs) - {*tail}


def parting(forms: Sequence[Recording]) -> tuple[frozenset[str], frozenset[str]]:
    """The calls, by name, of the first of some forms that not all others have so, and of others alone."""
    first, *others = ({c.name: _said(c) for c in f.calls if c.op != "output"} for f in forms)
    own = {n for other in others for n, given in first.items() if other.get(n) != given}
    return frozenset(own), frozenset(n for other in others for n in other.keys() - first.keys())


def _said(call: Call) -> str:
    """What a call does to others by their names."""
    return f"{call.target} {map_calls((call.args, call.kwargs), lambda given: given.name)}"


def two_rows(given: _Batch, dim: Dim, device: torch.device) -> Iterator[Callable[[str], _Batch]]:
    """Two rows a and b of the example and other data, as what makes batches of them, such as ``"ab"``."""
    for other, row in ((given, -1), *((o, 0) for o in _of_other_data(given, device))):
        each = {n: (given[n].select(a, 0), other[n].select(a, row)) for n, a in dim.where}
        yield functools.partial(_batch_of, given, dim, each)


def _batch_of(given: _Batch, dim: Dim, each: Mapping[str, tuple[Tensor, Tensor]], rows: str) -> _Batch:
    return {**given, **{n: torch.stack([each[n]["ab".index(row)] for row in rows], a) for n, a in dim.where}}


def _others_like(given: _Batch, dim: Dim, device: torch.device) -> Iterator[_Batch]:
    """A batch, others of its sizes, and its rows each in copies of its own."""
    yield given
    yield from _of_other_data(given, device)
    n = given[dim.where[0][0]].shape[dim.where[0][1]]
    yield from (_copies(given, dim, row, n) for row in range(min(n, _MOST_ROWS)))


def _of_other_data(given: _Batch, device: torch.device) -> Iterator[_Batch]:
    """Batches of the same sizes with other data.

    On an accelerator none that may point out of a table: what fails so there ends all work of the process.
    """
    contrary = {n: t.neg() if t.is_floating_point() else t for n, t in given.items()}
    for other in (contrary, *witnesses(given)):
        if device.type == "cpu" or not any(_is_lower(t, given[n]) for n, t in other.items()):
            yield other


def _is_lower(other: Tensor, given: Tensor) -> bool:
    """Whether whole numbers are negative that were not."""
    may_be = is_whole(other) and other.dtype.is_signed and other.numel() > 0
    return may_be and int(other.min()) < min(0, int(given.min()))


def _copies(given: _Batch, dim: Dim, row: int, n_rows: int) -> dict[str, Tensor]:
    """The tensors with so many copies of one of their rows."""
    picked = {name: torch.stack([given[name].select(a, row)] * n_rows, a) for name, a in dim.where}
    return {**given, **picked}


def _for_both(here: _AskedFor, there: _AskedFor, dim: Dim) -> Iterator[tuple[_Batch, _Batch, float]]:
    """Batches of the first form's, each as the second takes it, and how many rows more that has.

    Where it takes another number of rows, these are copies of one; nothing where it takes none of them.
    """
    for batch in here.batches:
        sizes = {d.name: batch[d.where[0][0]].shape[d.where[0][1]] for d in here.variation.dims}
        n, example = sizes[dim.name], batch_dim(there.variation.dims)
        numbers = dict.fromkeys((n, *((example.example,) if example else ()), *range(1, _MOST_ROWS + 1)))
        other = next((m for m in numbers if _takes(there.variation, {**sizes, dim.name: m})), None)
        if other == n:
            yield batch, batch, 1.0
        elif other is not None:
            for row in (0, -1):
                yield _copies(batch, dim, row, n), _copies(batch, dim, row, other), other / n


def _takes(variation: Variation, sizes: Mapping[str, int]) -> bool:
    """Whether a form is right for these sizes."""
    return {d.name for d in variation.dims} <= sizes.keys() and all(c.holds(sizes) for c in variation.checks)


def _asked_otherwise(here: _AskedFor, there: _AskedFor, dim: Dim) -> str:
    """In words, what two forms ask of rows and answer otherwise; nothing where no batch has rows for both."""
    rows = {name for name, _ in dim.where}
    for one, other in zip(there.form.branches, here.form.branches, strict=False):
        if one.source == other.source and one.outcome != other.outcome:
            is_of_rows = any(c.op == "placeholder" and c.target in rows for c in one.calls)
            is_any = is_of_rows and not one.of_setting
            return f"{one.source} asks {expression(one.read.args)} of all rows at once" if is_any else ""
    for known, at in ((here.variation, there.variation), (there.variation, here.variation)):
        sizes = {d.name: d.example for d in (*known.dims, *at.dims)}  # one may be fixed in the other form
        for check in known.checks:
            if dim.name in check.symbols and not check.holds(sizes):
                return f"{check.source} asks how many rows there are ({check})"
    return ""


def _left_out(model: nn.Module, form: Recording, tail: Collection[str]) -> set[int]:
    """The labels that a form's losses ahead of a ``tail`` leave out."""
    found = [label_options(model, call) for call in form.calls if call.name not in tail]
    return {o["ignore_index"] for o in found if o is not None and isinstance(o["ignore_index"], int)}


def _is_other(call: Any, here: Any, there: Any, dim: Dim, variation: Variation, per_row: float) -> bool:
    """Whether a row, or a number made of rows, is not the same in two forms."""
    if not (isinstance(here, Tensor) and isinstance(there, Tensor)):
        return isinstance(here, Tensor) or isinstance(there, Tensor)
    if is_number(here) and is_number(there):
        # a mean over no labels is no number, where another form may give none
        return not is_close((here * per_row).nan_to_num(), there.nan_to_num(), ROUNDED)
    rows = axes(call, 0, dim, variation.shapes) if isinstance(call, Call) else []
    return any(a >= there.ndim or not _is_same(here, there, a) for a in rows)


def _is_alike(here: Tensor, there: Tensor | None, per_row: float) -> bool:
    """Whether two gradients are the same; a mean over no labels has none, where another form may."""
    return there is None or is_close((here * per_row).nan_to_num(), there.nan_to_num(), ROUNDED)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _is_same(here: Tensor, there: Tensor, axis: int) -> bool:
    """Whether two values have the same rows; where one has more of them, they are copies of the first."""
    if here.shape[axis] != there.shape[axis]:
        if not here.shape[axis] or not there.shape[axis]:
            return False
        here, there = here.select(axis, 0), there.select(axis, 0)
    return here.shape == there.shape and is_close(here, there, ROUNDED)
