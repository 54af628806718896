"""What a capture is right for: input sizes that may vary, those that may not, and what must hold of them.

Finding it out is left to ``explore``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import InputError
from ...graph import Dim, batch_dim
from ...units import Size
from ..inputs.arguments import Inputs
from ..inputs.packing import packed_fault
from .guards import SIGNS

__all__ = ["Check", "Fixed", "InEvaluation", "Mixing", "Tail", "Variation", "said_nearly"]


@dataclasses.dataclass(frozen=True, slots=True)
class InEvaluation:
    """What each call does in evaluation: see :class:`Mixing`, which has as much of training."""

    by_call: tuple[str, ...] = ()
    carried: str = ""
    shared_draws: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Mixing:
    """In words, what mixes rows; empty where nothing does.

    ``always`` is what does in evaluation, ``training`` what does in training alone: batch norm, for one.
    ``backward`` is what does in the backward alone, ahead of the tail; ``gathered``: the tail has what does.
    ``elsewhere``: found where the example's values were other ones, so that it does not tell what follows.
    ``points``: inputs point to rows by number, so that no order of them tells what follows from a mixing.
    ``sums``: the numbers that are made of all rows are sums over them, not means. ``is_asked`` says whether
    that was looked at: means are then even ones, or over labels. ``summed`` are the numbers, by name, that
    are sums, whatever others are; ``blocks`` the outputs with several places for each row, of which one of
    all rows comes ahead of the next, as in ``cat([h, -h])``. ``steps``: the axis of rows of whole
    numbers and what each row ahead adds to them, by output; None where no number tells. ``made_of_rows``:
    whether an output without rows that hangs on them is a ``"sum"``, an even ``"mean"`` or ``"neither"``,
    where that is not ``"unknown"``, means that are single numbers apart. ``by_call`` are buffers
    and attributes that a training forward leaves otherwise when it is called on the rows in two batches,
    where nothing else is to be said of them; ``left`` are those where there is. ``carried`` says what it
    leaves for the next call, which goes by it. ``one_row`` says what drops the axis of rows where there is
    one, or fails there: microbatches then have two or more. ``beyond``: how many rows nothing mixes, where
    something mixes more of them, and what. ``untold`` says why it could not be told whether rows depend on
    one another; ``unasked`` are the numbers of rows from which on that is yet to be asked, as the form was to
    run on no more. ``nearly`` is what mixes rows by less than is allowed of code that goes by data, as of
    solvers, though by more than rounding. ``shared_draws``: names of the ops, of code that stays whole, which
    draw numbers that are of no row. ``evaluation`` has as much of that.
    """

    always: str = ""
    training: str = ""
    backward: str = ""
    gathered: bool = False
    sums: bool = False
    summed: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    blocks: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    steps: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    made_of_rows: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    is_asked: bool = dataclasses.field(default=False, compare=False)
    points: bool = False
    by_call: tuple[str, ...] = ()
    left: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    carried: str = ""
    elsewhere: bool = False
    one_row: str = ""
    beyond: tuple[int, str] | None = None
    untold: str = ""
    unasked: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    nearly: str = dataclasses.field(default="", compare=False)
    shared_draws: tuple[str, ...] = dataclasses.field(default=(), compare=False)
    evaluation: InEvaluation = dataclasses.field(default_factory=InEvaluation, compare=False)

    @property
    def said_untold(self) -> str:
        """What ``untold`` means for a step, in words; empty where rows were told apart."""
        if not self.untold:
            return ""
        return (
            "whether the rows of a batch depend on one another could not be told, as the model fails on "
            f"others ({self.untold}); where they do, microbatches do not give what the batch gives: "
            "pipe.verify() compares them, and n_microbatches=1 takes the batch whole"
        )

    @property
    def said_by_call(self) -> str:
        """What ``by_call`` means for a step, in words; empty where there is none."""
        return _said_by_call(self.by_call, "training", "a step")

    @property
    def said_in_evaluation(self) -> str:
        """What that of ``evaluation`` means there, in words; empty where there is none."""
        return _said_by_call(self.evaluation.by_call, "evaluation", "the runtime")


def said_nearly(nearly: str) -> str:
    """What :attr:`Mixing.nearly` means for a step, in words; empty where there is nothing."""
    if not nearly:
        return ""
    return (
        f"what a row gives hangs on the rows beside it, though little comes of it ({nearly}), as where the "
        "turns of a loop end once all rows are near enough: each microbatch goes by its own rows there; "
        "n_microbatches=1 takes the batch whole, and turns that end for each row, or after so many, are the "
        "same in microbatches"
    )


def _said_by_call(names: tuple[str, ...], mode: str, what: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (
        f"a forward in {mode} changes {', '.join(names[:3])}{more} at each call, and {what} calls it once "
        "for each microbatch, so that these end otherwise than after one call on the whole batch; "
        "n_microbatches=1 makes them the same"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Tail:
    """Names of the ops that run on the whole batch.

    ``ops`` are all that follow from a mixing of rows; ``again`` those before them, of sizes alone, that they
    need at the batch's sizes. Without any, ``obstacle`` says why there is none. ``before`` says what mixes
    rows ahead of it, in training alone. ``blocks``: what they take that has several places for each row, of
    which one of all rows comes ahead of the next, as behind ``cat([view, other_view])``. ``unasked`` and
    ``nearly``: as in :class:`Mixing`, ahead of them.
    """

    ops: tuple[str, ...] = ()
    again: tuple[str, ...] = ()
    obstacle: str = ""
    before: str = ""
    blocks: tuple[str, ...] = ()
    unasked: tuple[int, ...] = dataclasses.field(default=(), compare=False)
    nearly: str = dataclasses.field(default="", compare=False)


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
        return tuple(eval(f"{head}{o}", {**vars(math), **vars(operator)}) for o in self.operands)

    def __reduce__(self) -> tuple[Any, ...]:
        # what is compiled stays here
        return Check, (self.function, self.operands, self.outcome, self.source)

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether the answer is still the same at these sizes of the input dims."""
        try:
            return bool(self.function(*self.values(sizes)) == self.outcome)
        except (ArithmeticError, ValueError):  # of a logarithm, say
            return False

    def values(self, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        """The operands at these sizes of the input dims."""
        given = [sizes[s] for s in self.symbols]
        return tuple(f(*given) for f in self._compiled)

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
    whose formulas may be off, which the graph itself must check; ``mixing`` what makes rows depend on others,
    ``tail`` the ops from there on, where they come late; ``behind_labels`` holds, by name, formulas of
    sizes of what the model computes that its losses count labels with, and that data have no say in.
    """

    dims: tuple[Dim, ...] = ()
    fixed: Mapping[tuple[str, int], Fixed] = dataclasses.field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    shapes: Mapping[int, tuple[tuple[Size, ...], ...]] = dataclasses.field(default_factory=dict)
    unsure: frozenset[int] = frozenset()
    mixing: Mixing = dataclasses.field(default_factory=Mixing)
    tail: Tail = dataclasses.field(default_factory=Tail)
    behind_labels: Mapping[str, Size] = dataclasses.field(default_factory=dict)

    def takes_rows(self, n: int) -> bool:
        """Whether so many rows alter nothing that the model asks of its sizes."""
        batch = batch_dim(self.dims)
        sizes = {d.name: n if d is batch else d.example for d in self.dims}
        return all(check.holds(sizes) for check in self.checks)

    def is_for(self, inputs: Inputs, values: Mapping[str, Any]) -> bool:
        """Whether :meth:`check` finds nothing."""
        try:
            self.check(inputs, values)
        except InputError:
            return False
        return True

    def check(self, inputs: Inputs, values: Mapping[str, Any]) -> None:
        """Raise :class:`InputError` where a size that is fixed has changed, or alters what the model does."""
        shown = {n: said for n, said in zip(inputs.names, inputs.shown, strict=True) if n is not None}
        faults = [
            f"dim {axis} of {shown[name]} is fixed at {fixed.size} and is {values[name].shape[axis]} now "
            f"({fixed.reason}); capture again at this size"
            for (name, axis), fixed in self.fixed.items()
            if values[name].shape[axis] != fixed.size
        ]
        packed = [packed_fault(d, p, values, shown) for d in self.dims for p in d.packed if not p.grids]
        faults += filter(None, packed)
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
