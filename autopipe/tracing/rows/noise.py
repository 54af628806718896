"""Noise that goes with its row: what a row was given in one place, it is given in any other.

A batch of more rows draws other noise, and what noise has changed cannot be told from what the rows have.
Of two forms that draw in other places, both are given noise that is one number. Which rows are looked at,
and what follows, is left to ``mixing`` and ``other_answers``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ...graph import Dim
from ...torch_private import HiddenMode, TorchDispatchMode
from ...units import Size
from ..calls.call import Call, Depends
from ..calls.functions import tensors
from ..inputs.contents import is_whole
from ..inputs.structure import mapped
from ..sizes.dims import axis_of
from ..state.state import generators, seed

__all__ = ["EvenNoise", "NoDropout", "OwnNoise", "even_around", "is_drawn", "may_draw"]

_Around = Callable[[str], contextlib.AbstractContextManager[Any]]
_FILLING = frozenset({
    "cauchy", "exponential", "geometric", "log_normal", "rand", "rand_like", "randn", "randn_like", "uniform",
})  # fmt: skip
"""Ops that fill a tensor with what they draw, whatever it held; in place too."""
_WHOLE = frozenset({"multinomial", "randint", "randint_like", "random", "randperm"})
"""Ops that draw whole numbers, which may be places."""
_LEAVING_OUT = frozenset({"_fused_dropout", "native_dropout"})
_EVEN: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    **dict.fromkeys(_FILLING, lambda given: 0.5),
    "_sample_dirichlet": lambda given: given["self"] / given["self"].sum(-1, keepdim=True),
    "_standard_gamma": lambda given: given["self"],
    "bernoulli": lambda given: given.get("p", given["self"]),
    "binomial": lambda given: given["count"] * given["prob"],
    "normal": lambda given: given["mean"] + given["std"] / 2,
    "poisson": lambda given: given["self"],
}
"""What ops give where all that is drawn is one number, by what they are given."""
_SHARES = frozenset({"dropout", "dropout_p"})
"""The arguments of other ops that say how much to leave out."""
_BETWEEN = frozenset({"lower", "upper"})
"""The arguments of those that draw slopes, between which these are."""

_MOST_DRAWN = 1 << 14
"""So often code draws at the most in one run, as to drop states of each step of a long sequence."""

_DROPOUT = frozenset({
    F.alpha_dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout,
    F.multi_head_attention_forward, F.scaled_dot_product_attention, torch.dropout,
})  # fmt: skip
_ARGUMENTS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys(
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d), ("input", "p", "training", "inplace")
    ),
    torch.dropout: ("input", "p", "train"),
    F.scaled_dot_product_attention: ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
}
"""The names of arguments of those that may leave nothing out instead, in order."""


class OwnNoise:
    """What the calls of a form drew for two rows, a and b: seen once, and then put in its place for others.

    Attributes
    ----------
    is_by_row: whether every draw put so far was of rows, or of none: not so where one is lost in a sum.
    """

    def __init__(
        self, dim: Dim, shapes: Mapping[int, tuple[tuple[Size, ...], ...]], device: torch.device
    ) -> None:
        self._dim, self._shapes, self._device = dim, shapes, device
        self._drawn: dict[int, Any] = {}
        self.is_by_row = True

    def is_drawn(self) -> bool:
        """Whether the run that ended drew anything at all."""
        return is_drawn(self._device)

    def see(self, call: Call, value: Any) -> None:
        """Keep what a call gives for the rows ``"ab"``."""
        if call.is_random:
            self._drawn[id(call)] = mapped(_copy, value)

    def put(self, rows: str, look: Callable[[Call, Any], Any] | None = None) -> Callable[[Call, Any], Any]:
        """What puts a call's value for other rows, such as ``"abb"``, in the place of what it drew.

        ``look`` is shown each call with the value that it then has.
        """

        def shown(call: Call, value: Any) -> Any:
            other = of_rows(call, value)
            if look is not None:
                look(call, value if other is None else other)
            return other

        def of_rows(call: Call, value: Any) -> Any:
            if not call.is_random:
                return None
            drawn = self._drawn[id(call)]
            made = {id(t): self._of(call, i, t, rows) for i, t in enumerate(tensors(drawn))}
            if not call.writes:
                return mapped(lambda leaf: made.get(id(leaf), leaf), drawn)
            for there, new in zip(tensors(value), made.values(), strict=True):
                there.copy_(new)
            return None

        return shown

    def _of(self, call: Call, i: int, drawn: Tensor, rows: str) -> Tensor:
        shapes = self._shapes.get(id(call), ())
        axis = axis_of(shapes[i], self._dim.name) if i < len(shapes) else -1
        if axis is None:
            self.is_by_row = self.is_by_row and not call.depends & Depends.INPUT
            return drawn
        if axis < 0 or drawn.shape[axis] % 2:
            self.is_by_row = False
            return drawn
        of = dict(zip("ab", drawn.chunk(2, axis), strict=True))
        return torch.cat([of[row] for row in rows], axis)


def is_drawn(device: torch.device) -> bool:
    """Whether the run that ended drew anything at all: in evaluation dropout does not.

    Before each run the generators are seeded.
    """
    left = generators(device)
    seed(device)
    return generators(device) != left


class EvenNoise(TorchDispatchMode):
    """Within it all that is drawn is one number, and dropout leaves out nothing.

    Raises :class:`ValueError` where an op draws whole numbers, as these may be places, or is not known; where
    it is of ``any_op``, that gives one number too, 0 of whole ones. And where code draws so often that it may
    wait for another number.

    Attributes
    ----------
    is_dropout: whether nothing else was drawn than what to leave out.
    is_of_rows: whether only torch's own dropout drew, of values with a gradient: it goes by no other row.
    """

    def __init__(self, device: torch.device, *, any_op: bool = False) -> None:
        super().__init__()
        self._device, self._any_op, self._dropout = device, any_op, _InDropout()
        self.is_dropout = self.is_of_rows = True
        self._n_drawn = 0

    def __enter__(self) -> Self:
        self._dropout.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._dropout.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not may_draw(func):
            return func(*args, **kwargs)
        self._n_drawn += 1
        if self._n_drawn > _MOST_DRAWN:
            raise ValueError("what goes by what it draws may draw for ever where that is one number")
        self.is_of_rows &= self._dropout.is_inside
        packet, given = func.overloadpacket.__name__, _named(func, args, kwargs)
        name = packet.removesuffix("_functional").removesuffix("_")
        if name in _LEAVING_OUT:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name in _EVEN:
            self.is_dropout &= packet == "bernoulli_" and not isinstance(given["p"], Tensor)
            even = _EVEN[name](given)  # ahead of what it writes
            made = func(*args, **kwargs)
            return made.copy_(even) if isinstance(even, Tensor) else made.fill_(even)
        if shares := _SHARES & given.keys():
            return func(**{**given, **dict.fromkeys(shares, 0.0)})
        if given.keys() >= _BETWEEN:
            middle = (given["lower"] + given["upper"]) / 2
            return func(**{**given, **dict.fromkeys(_BETWEEN, middle)})
        drawn = generators(self._device)
        made = func(*args, **kwargs)
        if generators(self._device) != drawn or given.get("generator") is not None:
            if not self._any_op:
                raise ValueError(f"{func} draws noise that may go by rows")
            for tensor in tensors(made):
                tensor.fill_(0 if name in _WHOLE or is_whole(tensor) else 0.5)
        return made


def even_around(device: torch.device, around: _Around) -> _Around:
    """What gives the context ``around`` runs of rows, within which all that they draw is one number."""

    @contextlib.contextmanager
    def even(rows: str) -> Iterator[None]:
        with EvenNoise(device, any_op=True), around(rows):
            yield

    return even


class NoDropout(HiddenMode):
    """Within it torch's dropout leaves out nothing; unlike in :class:`EvenNoise`, no op is looked at.

    Whether anything else is drawn is told by :func:`is_drawn`.

    Attributes
    ----------
    is_of_rows: see :class:`EvenNoise`, where nothing else is drawn.
    """

    is_of_rows = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = _ARGUMENTS.get(func)
        if names is None:
            return func(*args, **(kwargs or {}))
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        of, is_attention = given[names[0]], "dropout_p" in names
        share = given.get("dropout_p", 0.0) if is_attention else given.get("p", 0.5)
        if not share or not (is_attention or given.get(names[2], True)):
            return func(*args, **(kwargs or {}))
        self.is_of_rows &= of.requires_grad
        if is_attention:
            return func(**{**given, "dropout_p": 0.0})
        return of if given.get("inplace", False) else of.clone()


class _InDropout(HiddenMode):
    """Knows whether torch's own dropout of a value with a gradient is at work within it."""

    is_inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of = args[0] if args else None
        self.is_inside = func in _DROPOUT and isinstance(of, Tensor) and of.requires_grad
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.is_inside = False


@functools.cache
def may_draw(func: Any) -> bool:
    """Whether an op may draw; its tags are slow to ask for."""
    return torch.Tag.nondeterministic_seeded in func.tags


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an op by name, with those that it has of itself."""
    given = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    return {**given, **dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
