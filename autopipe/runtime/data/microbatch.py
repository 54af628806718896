"""Splits a batch into microbatches: which leaves have a batch axis, and how many rows each piece gets.

How much each microbatch weighs in the loss is left to ``weights``, running them to ``worker``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ... import accelerator
from ...errors import InputError
from ...graph import batch_dim
from ...tracing.inputs.layout import lying_like
from ...tracing.inputs.packing import sample_rows
from ...tracing.inputs.structure import carries_tensors, flatten, hides_tensors, mapped, pieces, unflatten

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["AT_A_GLANCE", "LOOKED_AT", "Batch", "Splitter", "content", "with_forms"]

LOOKED_AT = 1024
"""How many values of an input a checksum looks at; ``AT_A_GLANCE`` where it is taken at every step."""
AT_A_GLANCE = 64
WHOLE_BYTES = 1 << 18
"""Inputs of up to so many bytes, as ids and masks have, are looked at in full: a fifth of a millisecond."""


class Pieces(Sequence[Tensor]):
    """The rows of a tensor that each microbatch gets, lying in memory as the whole does.

    They are cut once one is asked for: a rank may use none.
    """

    def __init__(self, whole: Tensor, sizes: Sequence[int], axis: int) -> None:
        self._whole, self._sizes, self._axis = whole, sizes, axis

    @functools.cached_property
    def _cut(self) -> Sequence[Tensor]:
        whole, axis = self._whole, self._axis
        # none is a view of the batch: what a model writes to one would undo what others keep for a backward
        pieces: Sequence[Tensor] = torch.unsafe_split_with_sizes(whole, list(self._sizes), axis)
        are_dense = axis == 0 and whole.is_contiguous()  # as they are, then, in the batch's own order
        return pieces if are_dense else [lying_like(whole, piece) for piece in pieces]

    def kind(self, m: int) -> tuple[Any, torch.dtype]:
        """The shape and dtype of a piece."""
        shape = list(self._whole.shape)
        shape[self._axis] = self._sizes[m]
        return tuple(shape), self._whole.dtype

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, m: Any) -> Any:
        return self._cut[m]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._cut)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch cut into microbatches.

    Attributes
    ----------
    rows: how many rows each microbatch has.
    leaves: input name → its value in each microbatch; a value without a batch axis is the same in all.
    targets: the target of each microbatch; None throughout when there is none.
    axes: the batch axis of every input that has one and was split.
    whole: input name → its value in the whole batch.
    given: ``whole`` as it was given, where it was given.
    packed: rows in each microbatch of every input that leads with several for each of the batch.
    forms: the form of the model that each microbatch asks for by its values, and at last that of the whole
        batch where its tail takes that; none where there is but one.
    of_all: the form that all rows together ask for, where they may be others under it; those of all
        microbatches where none can be had.
    is_new: whether no step has run some of these forms yet.
    target: that of the whole batch, as it was given.
    requiring: the inputs that were given as requiring a gradient; here none does.
    cut: how it was cut. kind: the number of the kind of call that it is of.
    """

    rows: tuple[int, ...]
    leaves: Mapping[str, Sequence[Any]]
    targets: Sequence[Any]
    axes: Mapping[str, int]
    whole: Mapping[str, Any]
    packed: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    forms: tuple[int, ...] = ()
    of_all: tuple[int, ...] = ()
    is_new: bool = False
    target: Any = None
    requiring: frozenset[str] = frozenset()
    cut: Cut | None = None
    kind: int = 0

    @property
    def n_microbatches(self) -> int:
        return len(self.rows)

    def as_given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Inputs of this batch, of which those require a gradient that did: a model may ask which do."""
        return {n: v.detach().requires_grad_() if n in self.requiring else v for n, v in values.items()}

    def form(self, m: int) -> int:
        """The number of the form that microbatch ``m`` asks for."""
        return self.forms[m] if self.forms else 0

    def part(self, start: int, stop: int) -> Batch:
        """The microbatches from ``start`` to before ``stop``; the whole batch's values stay as they are."""
        return dataclasses.replace(
            self,
            rows=self.rows[start:stop],
            leaves={name: pieces[start:stop] for name, pieces in self.leaves.items()},
            targets=self.targets[start:stop],
            packed={name: sizes[start:stop] for name, sizes in self.packed.items()},
            forms=self.forms[start:stop],
        )

    def as_one(self, device: torch.device) -> Batch:
        """The batch in one piece, its target on ``device``."""
        move = functools.partial(_moved, device)
        return dataclasses.replace(
            self,
            rows=(sum(self.rows),),
            leaves={name: (value,) for name, value in self.whole.items()},
            targets=[mapped(move, self.target)],
            packed={name: (sum(rows),) for name, rows in self.packed.items()},
            forms=self.forms[-1:],
        )

    def sizes(self) -> Iterator[tuple[int, ...]]:
        """What tells the shapes of each microbatch from those of the others."""
        forms = self.forms[: self.n_microbatches] or (0,) * self.n_microbatches
        return zip(self.rows, forms, *self.packed.values(), strict=True)

    @property
    def is_on_host(self) -> bool:
        """Whether the batch was given in the host's memory."""
        return all(v.device.type == "cpu" for v in self.given.values() if isinstance(v, Tensor))

    def on(self, device: torch.device, names: Collection[str], takes_target: bool) -> Batch:
        """The same batch with the inputs ``names``, and the target where it is taken, on ``device``."""
        to = functools.partial(_moved, device)
        moved = {name: to(self.whole[name]) for name in names & self.whole.keys()}
        moved = {name: there for name, there in moved.items() if there is not self.whole[name]}
        aims = flatten(self.target)[0] if takes_target else ()
        is_target_moved = any(_is_elsewhere(aim, device) for aim in aims)
        if not moved and not is_target_moved:
            return self
        cut = {name: _pieces(name, v, self.rows, self.axes, self.packed) for name, v in moved.items()}
        targets = [mapped(to, target) for target in self.targets] if is_target_moved else self.targets
        return dataclasses.replace(
            self, leaves={**self.leaves, **cut}, targets=targets, whole={**self.whole, **moved}
        )

    def checksum(self, most: int = LOOKED_AT, first: int = 0) -> int:
        """Of every input on the host of up to ``WHOLE_BYTES``, and about ``most`` values of any other.

        It tells batches apart, and costs little. With another ``first`` it looks at other values.
        """
        found = 0
        for value in self.given.values():
            if isinstance(value, Tensor):
                found = content(value, found, most, first)
        return found

    def signature(self, m: int) -> tuple[Any, ...]:
        """What decides every shape microbatch ``m`` leads to: form, leaves' shapes, dtypes, values."""
        return (self.form(m), *(_kind(column, m) for column in self.leaves.values()))


def content(tensor: Tensor, found: int = 0, most: int = LOOKED_AT, first: int = 0) -> int:
    """The checksum that ``found`` becomes by a tensor: see :meth:`Batch.checksum`."""
    if tensor.layout is not torch.strided or hasattr(tensor, "to_local"):
        return found
    some = tensor.detach()
    if tensor.nbytes > WHOLE_BYTES or not tensor.is_cpu:
        some = _sample(some, most, first).cpu()
    some = some.resolve_conj().resolve_neg().contiguous()  # outlives what is looked at
    return zlib.crc32(accelerator.memory(some), found)


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """How a batch is cut, and every other one whose tensors have the same sizes, unless some are packed.

    Attributes
    ----------
    sizes: how many rows each microbatch has. n_rows: all of them.
    axes: the batch axis of every input that is cut. packed: rows of each packed input by microbatch.
    target_axis: that of tensors in the target that have as many rows; None where each gets them whole.
    whole: the places of those tensors in the target that each gets whole, though they have as many.
    """

    sizes: tuple[int, ...]
    axes: Mapping[str, int]
    packed: Mapping[str, Sequence[int]]
    n_rows: int
    target_axis: int | None
    whole: frozenset[int] = frozenset()

    def of(self, leaves: Mapping[str, Any], target: Any) -> Batch:
        """The batch with these values."""
        sizes, axes, packed = self.sizes, self.axes, self.packed
        columns = {name: _pieces(name, value, sizes, axes, packed) for name, value in leaves.items()}
        return Batch(
            rows=sizes,
            leaves=columns,
            targets=self._targets(target),
            axes=axes,
            whole=leaves,
            packed=packed,
            given=leaves,
            target=target,
            cut=self,
        )

    def _targets(self, target: Any) -> Sequence[Any]:
        if len(self.sizes) == 1:
            return [target]
        if isinstance(target, Tensor):
            return self._of_target(target)
        leaves, spec = flatten(target)
        columns = [
            (v,) * len(self.sizes) if i in self.whole else self._of_target(v) for i, v in enumerate(leaves)
        ]
        return [unflatten(spec, [c[m] for c in columns]) for m in range(len(self.sizes))]

    def _of_target(self, leaf: Any) -> Sequence[Any]:
        axis, n_rows = self.target_axis, self.n_rows
        if not isinstance(leaf, Tensor) or axis is None or leaf.ndim <= axis or leaf.shape[axis] != n_rows:
            return (leaf,) * len(self.sizes)
        return _cut("target", leaf, self.sizes, axis)


class Splitter:
    """Knows which of a model's inputs have a batch axis.

    The capture's dims say it where sizes were found to vary together; inputs whose rows are packed are cut
    where their samples are. Elsewhere a tensor whose leading size equals that of the first tensor argument
    is taken as batched; anything else (0-d, another leading size, not a tensor) goes to every microbatch
    whole. ``batch_dims`` overrules both: input name → axis, or None for whole; the name of an argument that
    holds several speaks of all of them but those that have a name there, ``target`` of every tensor in the
    target. One among others there that had its size beside another number of rows
    before is not cut where a batch has as many rows by chance.
    """

    def __init__(self, capture: Capture, batch_dims: Mapping[str, int | None] | None = None) -> None:
        self._given = _by_input(capture, batch_dims or {})
        self._batch = batch_dim(capture.ops.dims)
        self._known = dict(self._batch.where) if self._batch else {}
        self._fixed = capture.variation.fixed
        self._capture, self._lists = capture, capture.listed_rows
        self._of_no_rows: set[tuple[int, int, int]] = set()

    def split(
        self, leaves: Mapping[str, Any], target: Any, n_microbatches: int, *, is_weighed: bool = False
    ) -> Batch:
        """Cut into at most ``n_microbatches`` pieces whose rows differ by at most one, larger ones first.

        A batch with fewer rows than ``n_microbatches`` makes fewer microbatches, and so does one of a model
        to which a single row is something else: each then has two or more. Inputs of one microbatch may
        disagree on the number of rows, unless the batch ``is_weighed`` by its rows beside others. Raises
        :class:`InputError` when others disagree on it, or on whose they are, or there are none, or the
        capture is right for as many only.
        """
        if n_microbatches < 1:
            raise InputError(f"n_microbatches is {n_microbatches}; a step has at least 1")
        n_listed = self._listed(n_microbatches)
        axes = {} if n_listed else self._axes(leaves)
        found = {n: leaves[n].shape[a] for n, a in axes.items()}
        if len(set(found.values())) > 1:
            if n_microbatches > 1 or is_weighed:
                rows = ", ".join(f"{n} has {size}" for n, size in found.items())
                raise InputError(
                    f"inputs disagree on the number of rows: {rows}; see batch_dims, or give step() "
                    "n_microbatches=1"
                )
            axes = {}
        n_rows = next(iter(found.values()), 1) if axes else n_listed or 1
        if n_rows == 0:
            raise InputError("the batch is empty; give step() at least one row")
        most = self._capture.most_microbatches(n_rows)
        sizes = _sizes(n_rows, min(most, n_microbatches)) if axes else (n_rows,)
        for name, fixed in ((n, self._fixed[n, a]) for n, a in axes.items() if (n, a) in self._fixed):
            if len(sizes) > 1:
                raise InputError(
                    f"{name} cannot be cut into {len(sizes)} microbatches: its {fixed.size} rows are fixed "
                    f"({fixed.reason}); capture with the rows of one microbatch, or pass n_microbatches=1"
                )
        packed = self._packed(leaves, sizes) if len(sizes) > 1 else {}
        if len(sizes) > 1:
            self._check_target(target, n_rows)
        whole = self._whole_in(target, n_rows)
        return Cut(
            sizes=sizes,
            axes=axes,
            packed=packed,
            n_rows=n_rows,
            target_axis=self._given.get("target", 0),
            whole=whole,
        ).of(leaves, target)

    def _listed(self, n_microbatches: int) -> int:
        """How many rows a batch has whose lists have an entry for each; 0 where that is not told by lists.

        Raises :class:`InputError` for several microbatches of such: each entry is an input, and whole.
        """
        listed = [rows for rows in self._lists if self._given.keys().isdisjoint(rows.names)]
        if listed and n_microbatches > 1:
            raise InputError(
                f"{listed[0]}; give rt.accumulate() some of the entries at a time, pass n_microbatches=1, or "
                "name it in batch_dims, with None where every microbatch gets all of it"
            )
        counts = {rows.n_rows for rows in listed}
        return counts.pop() if len(counts) == 1 else 0

    def _whole_in(self, target: Any, n_rows: int) -> frozenset[int]:
        """The places in a target of tensors whose size was the same beside another number of rows."""
        axis = self._given.get("target", 0)
        if axis is None or isinstance(target, Tensor):
            return frozenset()
        leaves = flatten(target)[0]
        tensors = ((i, v) for i, v in enumerate(leaves) if isinstance(v, Tensor) and v.ndim > axis)
        found = {(len(leaves), i, v.shape[axis]) for i, v in tensors}
        self._of_no_rows |= {told for told in found if told[2] != n_rows}
        return frozenset(i for _, i, _ in found & self._of_no_rows)

    def _packed(self, leaves: Mapping[str, Any], sizes: Sequence[int]) -> dict[str, list[int]]:
        """How many rows of each packed input belong to each microbatch."""
        out = {}
        if self._batch is not None:
            for packed in (p for p in self._batch.packed if p.op not in self._given):
                rows = iter(sample_rows(self._batch, packed, leaves))
                out[packed.op] = [sum(itertools.islice(rows, n)) for n in sizes]
        return out

    @property
    def read(self) -> frozenset[str]:
        """The inputs whose values, not only their sizes, decide how a batch is cut."""
        return frozenset(grid for p in (self._batch.packed if self._batch else ()) for grid in p.grids)

    def _axes(self, leaves: Mapping[str, Any]) -> dict[str, int]:
        """The batch axis of every input that has one."""
        tensors = {n: v for n, v in leaves.items() if isinstance(v, Tensor) and v.ndim > 0}
        known = {n: a for n, a in self._known.items() if n in tensors}
        if not known:
            free = [v for n, v in tensors.items() if n not in self._given]
            known = {n: 0 for n, v in tensors.items() if free and v.shape[0] == free[0].shape[0]}
        chosen = {**known, **{n: a for n, a in self._given.items() if n in tensors}}
        axes = {n: a for n, a in chosen.items() if a is not None}
        for name, axis in axes.items():
            if not -tensors[name].ndim <= axis < tensors[name].ndim:
                raise InputError(
                    f"batch_dims says that the rows of {name} lie along axis {axis}, but its shape is "
                    f"{list(tensors[name].shape)}; give an axis that it has, or None where every microbatch "
                    "gets it whole"
                )
        return axes

    def _check_target(self, target: Any, n_rows: int) -> None:
        """A target that is one tensor has the batch's rows; among several some may be for all rows."""
        axis = self._given.get("target", 0)
        if axis is not None and (what := _rows_of_no_tensor(target, n_rows)):
            raise InputError(
                f"the target holds {what}, one for each row of the batch: only tensors are given to "
                "microbatches row by row; make it a tensor, or pass batch_dims={'target': None} where every "
                "microbatch gets it whole"
            )
        hidden = next((leaf for leaf in flatten(target)[0] if hides_tensors(leaf)), None)
        if axis is not None and hidden is not None:
            raise InputError(
                f"the target holds tensors in a {type(hidden).__name__}, where they are not found; give them "
                "in lists, dicts, dataclasses or attributes of objects, or pass batch_dims={'target': None} "
                "where every microbatch gets it whole"
            )
        if not isinstance(target, Tensor) or axis is None or target.ndim <= axis:
            return
        if target.shape[axis] != n_rows:
            raise InputError(
                f"target has {target.shape[axis]} rows (axis {axis} of {list(target.shape)}), the batch has "
                f"{n_rows}; give one for each row, name its axis in batch_dims={{'target': …}}, or None "
                "there for a target that every microbatch gets whole"
            )


def _by_input(capture: Capture, given: Mapping[str, int | None]) -> dict[str, int | None]:
    """``batch_dims`` by the names of tensors. Raises :class:`InputError` for names of no argument."""
    inside: dict[str, list[str]] = {}
    for kind in capture.kinds:
        for name, shown in zip(kind.inputs.names, kind.inputs.shown, strict=True):
            if name is not None:
                inside.setdefault(re.split(r"[.\[]", shown, maxsplit=1)[0], []).append(name)
    names = {op.name for kind in capture.kinds for op in kind.ops.inputs}
    if unknown := sorted({*given} - names - inside.keys() - {"target"}):
        raise InputError(
            f"batch_dims names {', '.join(unknown)}, but the model's inputs are {', '.join(sorted(names))} "
            "(and 'target')"
        )
    spread = {name: axis for of, axis in given.items() if of not in names for name in inside.get(of, ())}
    return {**spread, **{name: axis for name, axis in given.items() if name in names or name == "target"}}


def _pieces(
    name: str, value: Any, sizes: Sequence[int], axes: Mapping[str, int], packed: Mapping[str, Sequence[int]]
) -> Sequence[Any]:
    """What each microbatch gets of an input: its rows where they are cut, else all of it."""
    if len(sizes) == 1 or not (name in axes or name in packed):
        return (value,) * len(sizes)
    return _cut(name, value, packed.get(name, sizes), axes.get(name, 0))


def _cut(name: str, value: Tensor, sizes: Sequence[int], axis: int) -> Pieces:
    if value.layout is not torch.strided:
        kind = str(value.layout).removeprefix("torch.")
        raise InputError(
            f"{name} is {kind}, and such tensors are not cut into rows; pass batch_dims={{{name!r}: None}} "
            "for one that every microbatch gets whole, n_microbatches=1, or a dense one"
        )
    return Pieces(value, sizes, axis)


def _kind(column: Sequence[Any], m: int) -> Any:
    """What decides the shapes that a microbatch leads to, of an input: shape and dtype, or its value."""
    if isinstance(column, Pieces):
        return column.kind(m)
    value = column[m]
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value


def _sample(value: Tensor, most: int, first: int) -> Tensor:
    """Some of its values, wherever they lie: an odd step, since the first ones of rows may all be alike."""
    step = max(1, value.numel() // most) | 1
    if value.is_contiguous():
        return value.view(-1)[first % step :: step]
    places = torch.arange(first % step, value.numel(), step, device=value.device)
    return value[torch.unravel_index(places, value.shape)]


def _rows_of_no_tensor(value: Any, n_rows: int) -> str:
    """What in a target has as many entries as the batch has rows and no tensor that is cut, or ""."""
    if isinstance(value, Tensor):
        return ""
    if shape := tuple(getattr(value, "shape", ())):  # numpy's, say
        return f"a {type(value).__name__} of shape {list(shape)}" if shape[0] == n_rows else ""
    if isinstance(value, Mapping):
        return next(filter(None, (_rows_of_no_tensor(v, n_rows) for v in value.values())), "")
    if dataclasses.is_dataclass(value) or carries_tensors(value):
        return _rows_of_no_tensor({str(step): piece for step, piece in pieces(value)}, n_rows)
    if not isinstance(value, (list, tuple)):
        return ""
    tensors = [leaf for leaf in flatten(value)[0] if isinstance(leaf, Tensor)]
    if len(value) == n_rows and not any(leaf.ndim and leaf.shape[0] == n_rows for leaf in tensors):
        return f"a {type(value).__name__} of {n_rows} {'values' if not tensors else 'entries'}"
    return next(filter(None, (_rows_of_no_tensor(v, n_rows) for v in value)), "")


def _is_elsewhere(value: Any, device: torch.device) -> bool:
    return isinstance(value, Tensor) and value.device != device


def _moved(device: torch.device, value: Any) -> Any:
    return accelerator.upload(value, device) if isinstance(value, Tensor) else value


def _sizes(n_rows: int, n: int) -> tuple[int, ...]:
    small, extra = divmod(n_rows, n)
    return (small + 1,) * extra + (small,) * (n - extra)


def with_forms(
    batch: Batch,
    capture: Capture,
    form_of: Callable[[Mapping[str, Any]], int] | None = None,
    form_of_all: Callable[[Mapping[str, Any]], int | None] | None = None,
) -> Batch:
    """The batch with the forms that its microbatches and all of it ask for.

    ``form_of`` tells the number of a form from inputs; by default it is that of ``capture``. ``form_of_all``
    tells it of the whole batch where the forms of microbatches are not for so many rows; by default nothing.
    """
    is_usual = capture.first is None and not capture.has_questions
    if is_usual and capture.is_met(batch.whole):
        return batch
    microbatches = [
        batch.as_given({n: c[m] for n, c in batch.leaves.items()}) for m in range(batch.n_microbatches)
    ]
    of_whole = batch.as_given(batch.whole)
    whole = [of_whole] if capture.kinds[0].ops.tail else []
    form_of = form_of or capture.form_of
    forms = tuple(map(form_of, [*microbatches, *whole]))
    of_all = forms[batch.n_microbatches :]
    is_for_all = all(capture.is_for_sizes(number, batch.whole) for number in {*forms})
    if not of_all and form_of_all and (not is_for_all or capture.goes_by_answers):
        found = form_of_all(of_whole)
        of_all = forms if found is None else (found,)
    return dataclasses.replace(batch, forms=forms, of_all=of_all)
