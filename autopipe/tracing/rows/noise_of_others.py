"""Whether a row is another where other noise is drawn for the rows beside it, in code that stays whole.

Noise may be normalised over the batch, as by dropblock; and what such code draws once, all rows share. Which
ops draw is told by ``noise``; what data mixes is left to ``mixing``.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import accelerator
from ...graph import Dim
from ...torch_private import HiddenMode, TorchDispatchMode
from ..calls.call import Call, Recording
from ..calls.faults import of_models
from ..calls.functions import tensors
from ..calls.streams import DRAWING
from ..code.own_code import OwnCode
from ..state.reach import saved
from ..state.state import generators
from .noise import OwnNoise, may_draw
from .results import ALLOWED, EQUAL, Results, Rows
from .row_questions import first_mixed

__all__ = ["mixed_by_noise", "shared_draws"]

_logger = logging.getLogger("autopipe")
_DRAWING = frozenset(function.__name__ for function in DRAWING) | {"np", "numpy", "random"}
"""Names that code asks for which draws otherwise than by torch's own layers."""

_Sizes = Sequence[Sequence[torch.Size]]
"""By draw and tensor, its shape."""
_Axes = Sequence[Sequence[int | None]]
"""By draw and tensor, the axis that rows of the batch lie along; None of noise that all rows share."""
_APART = {"ab": (False, False), "aa": (False, True), "bb": (True, False), "ba": (True, True)}
"""Whether row a, and all other rows, have other noise: "aa" is what a is told by, and "bb" what b is."""


def mixed_by_noise(
    code: OwnCode, form: Recording, run: Rows, n: int, dim: Dim, shapes: Any, device: torch.device
) -> str:
    """In words, the first call in which noise for one row makes another row other, or nothing.

    ``run`` runs the form on rows a and b, ``n`` with those behind them, and on one more. Of what is drawn for
    more values where there are more rows, each row's part is drawn anew in turn. Each row is to stay as it is
    where only others' is, and numbers are to be sums of what rows make.
    """
    if not any(c.is_random and code.is_own(c) for c in form.calls):
        return ""
    few, more = _Drawn(device), _Drawn(device)
    for drawn, rows in ((few, "ab"), (more, "abb")):
        with drawn:
            run(rows)
    along = _rows_in(few.sizes, more.sizes, n)
    if not any(axis is not None for each in along for axis in each):
        return ""
    words = ""
    for is_inner in (False, True):  # what is [rows, places] in one axis, and what is [places, rows]

        def apart(rows: str, look: Any = None, is_inner: bool = is_inner) -> Any:
            with _Drawn(device, along, n, _APART[rows], is_inner=is_inner):
                return run(rows="ab", look=look)

        found = Results(form, apart, False, False, (), OwnNoise(dim, shapes, device), n)
        # a number that is no sum by little is made of rows that differ by more
        where = first_mixed(form, apart, dim, shapes) if found.fault(dim, shapes, EQUAL) else ""
        if not (where := where or found.fault(dim, shapes, ALLOWED)):
            return ""
        words = words or f"{where}, where other rows are given other noise"
    return words


def shared_draws(code: OwnCode, form: Recording, run: Rows, device: torch.device) -> tuple[str, ...]:
    """Names of the calls, of code that stays whole, which draw as much for two rows as for three.

    ``run`` runs the form on so many. Of Python's and numpy's generators it is told by where they are then.
    """
    asked = {
        c for c in form.calls if c.is_random and code.is_own(c) and not _DRAWING.isdisjoint(code.names(c))
    }
    if not asked:
        return ()
    few, more = _SizesDrawn(asked, device), _SizesDrawn(asked, device)
    try:
        with few:
            run("ab", few.look)
        if not any(few.of.values()):
            return ()
        with more:
            run("abb", more.look)
    except of_models() as error:
        # any Python of the model, on rows it may not take
        _logger.debug("what code draws for rows could not be seen: %s", error)
        return ()
    pairs = ((call, zip(few.of[call], more.of[call], strict=False)) for call in few.of if call in more.of)
    return tuple(call.name for call, each in pairs if any(a == b for a, b in each))


class _SizesDrawn(HiddenMode):
    """Within it is noted how much is drawn in each of the ``asked`` calls, which it is shown by ``look``.

    Attributes
    ----------
    of: by call the shapes of what each function of torch gave that drew, and where other generators ended.
    """

    def __init__(self, asked: Collection[Call], device: torch.device) -> None:
        super().__init__()
        self._asked, self._device, self._outside = asked, device, generators()
        self._now: list[Any] = []
        self.of: dict[Call, list[Any]] = {}

    def __enter__(self) -> Any:
        self._outside = generators()
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in DRAWING:
            return func(*args, **(kwargs or {}))
        before = generators(self._device)
        result = func(*args, **(kwargs or {}))
        if generators(self._device) != before:
            self._now.append([t.shape for t in tensors(result)])
        return result

    def look(self, call: Call, value: Any) -> None:
        """Be shown a call that ran."""
        outside = generators()
        if call in self._asked:
            self.of[call] = [*self._now, *([outside] if outside != self._outside else [])]
        self._now, self._outside = [], outside


def _rows_in(few: _Sizes, more: _Sizes, n: int) -> _Axes:
    """Where rows lie in what is drawn: along the only axis that grows as they do, from ``n`` to one more.

    Raises :class:`ValueError` where code that goes by its draws has gone on to draw something else.
    """
    if [[len(shape) for shape in each] for each in few] != [[len(shape) for shape in each] for each in more]:
        raise ValueError("more rows lead to other draws")
    return [
        [_axis(a, b, n) for a, b in zip(here, there, strict=True)]
        for here, there in zip(few, more, strict=True)
    ]


def _axis(few: Sequence[int], more: Sequence[int], n: int) -> int | None:
    grown = [a for a, (p, q) in enumerate(zip(few, more, strict=True)) if p and p * (n + 1) == q * n]
    return grown[0] if len(grown) == 1 else None


class _Drawn(TorchDispatchMode):
    """Within it each op that draws does so twice; of what it then gives, each row has the one or the other.

    Attributes
    ----------
    sizes: the shapes of what each op gave.
    """

    def __init__(
        self,
        device: torch.device,
        along: _Axes = (),
        n: int = 1,
        others: tuple[bool, bool] = (False, False),
        *,
        is_inner: bool = False,
    ) -> None:
        super().__init__()
        own = accelerator.default_generator(device)
        self._device, self._generators = device, {torch.default_generator, own or torch.default_generator}
        self._along, self._n, self._others, self._is_inner = along, n, others, is_inner
        self.sizes: list[list[torch.Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not may_draw(func):
            return func(*args, **kwargs)
        before = [
            a.clone() if isinstance(a, Tensor) else a for a in args
        ]  # some draw into what they are given
        drawn = generators(self._device)
        made = func(*args, **kwargs)
        if generators(self._device) == drawn:
            return made
        self.sizes.append([t.shape for t in tensors(made)])
        other = self._again(func, before, kwargs)
        for base, there, axis in zip(tensors(made), tensors(other), self._axes(), strict=True):
            self._mix(base, there, axis)
        return made

    def _again(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op draws elsewhere in the stream, which goes on as if it had not."""
        put_back = [saved(g) for g in self._generators]
        for generator in self._generators:
            generator.manual_seed(len(self.sizes))
        other = func(*args, **kwargs)
        for put in put_back:
            put()
        return other

    def _axes(self) -> Sequence[int | None]:
        """Where rows lie in what was drawn last."""
        return self._along[len(self.sizes) - 1] if self._along else [None] * len(self.sizes[-1])

    def _mix(self, base: Tensor, other: Tensor, axis: int | None) -> None:
        """Write into a tensor what another has for row a, the first, or for all rows behind it."""
        if axis is None:
            return
        places = base.shape[axis] // self._n
        shape = (places, self._n) if self._is_inner else (self._n, places)
        into, of = (t.unflatten(axis, shape).movedim(axis + self._is_inner, 0) for t in (base, other))
        for some, is_other in zip((slice(1), slice(1, None)), self._others, strict=True):
            if is_other:
                into[some] = of[some]
