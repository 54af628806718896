"""Whether rows of a batch depend on one another, and which op mixes them: rows are put in others' places.

A graph is run on rows a b, a a and b b. Where rows are alone, a is the same beside b as beside a, and a
number made from all rows (a mean loss) is the mean of what it is for each: an even one, or one over labels,
which can be counted. The random numbers are the same in each run, so noise drawn inside is no mixing. What
follows for microbatches is left to ``runtime``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim, batch_dim
from ...units import Size
from ..calls.call import Call, Depends, Recording
from ..calls.functions import tensors
from ..calls.wording import said
from ..record.state import seed
from .noise import OwnNoise
from .pieces import fault_in_pieces
from .rerun import replay

__all__ = ["LABEL_MODULES", "MEANS_OVER_LABELS", "Mixing", "Rows", "is_close", "mixing", "rows_of"]

MEANS_OVER_LABELS = (nn.functional.cross_entropy, nn.functional.nll_loss)
LABEL_MODULES = (nn.CrossEntropyLoss, nn.NLLLoss)

_logger = logging.getLogger("autopipe")
_ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Of the largest value; products of other sizes round otherwise."""
_EQUAL = {torch.float64: 1e-12, torch.float32: 1e-5}
"""More than rounding: all else being equal, so are the products' sizes."""
_ALLOWED_BELOW = 0.1
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]
Rows = Callable[..., Any]
"""(rows, look) → what a form gives for the example's rows a and b in places such as ``"ab"``; ``look`` is
shown each call with its value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mixing:
    """In words, what mixes rows; empty where nothing does.

    ``always`` is what does in evaluation, ``training`` what does in training alone: batch norm, for one.
    ``points``: inputs point to rows by number, so that no order of them tells what follows from a mixing.
    ``sums``: the numbers that are made of all rows are sums over them, not means. ``by_call`` are buffers and
    attributes that a training forward leaves otherwise when it is called on the rows in two batches, where
    nothing else is to be said of them.
    """

    always: str = ""
    training: str = ""
    sums: bool = False
    points: bool = False
    by_call: tuple[str, ...] = ()

    @property
    def said_by_call(self) -> str:
        """What ``by_call`` means for a step, in words; empty where there is none."""
        if not self.by_call:
            return ""
        more = f" and {len(self.by_call) - 3} more" if len(self.by_call) > 3 else ""
        return (
            f"a forward in training changes {', '.join(self.by_call[:3])}{more} at each call, and a step "
            "calls it once for each microbatch, so that these end otherwise than after one call on the whole "
            "batch; n_microbatches=1 makes them the same"
        )


@torch.no_grad()
def mixing(
    model: nn.Module,
    forms: Mapping[bool, Recording],
    given: Mapping[str, Tensor],
    dims: Sequence[Dim],
    shapes: _Shapes,
    device: torch.device,
    start: Callable[[bool], None],
    *,
    takes: Callable[[int], bool],
) -> Mixing:
    """Run the forms on the tensors ``given``, three to ten times each; ``start`` sets the mode.

    Where the forms are right for two rows (``takes`` tells for how many), on two alone, as only these tell
    how rows weigh. Where the graph does not run on rows in other places, it is run on pieces of the batch.
    Nothing is found on the meta device.
    """
    dim = batch_dim(dims)
    if dim is None or dim.packed or device.type == "meta":
        return Mixing()
    found: dict[bool, str] = {}
    sums: list[bool] = []
    for training in (False, True):
        form = forms[training]
        if training and (found[False] or not _may_mix_in_training(form, forms)):
            break
        begin, found[training] = functools.partial(start, training), ""
        is_counted = any(_is_over_labels(model, call) for call in form.calls)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            is_sure = False
            for alone in (True, False) if takes(2) and dim.example > 2 else (False,):
                is_longer = dim.example > 2 and not alone
                seen: list[_Results] = []
                try:
                    for rows in (given, *_contrary(given, dim, form)):
                        run = rows_of(model, form, rows, dim, device, begin, alone=alone)
                        seen.append(_Results(form, run, is_longer, is_counted, OwnNoise(dim, shapes)))
                        found[training] = found[training] or _found(seen[-1], dim, shapes)
                    if not (is_longer or found[training]):
                        found[training] = seen[0].neither()
                        sums += seen[0].sums()
                    is_sure = not is_longer
                    break
                except Exception as error:
                    # any Python of the model, on rows it may not take: inputs may point to rows
                    _logger.debug("rows could not be told apart: %s", error)
            if not (training or is_sure or found[False]) and any(map(_may_point, given.values())):
                axes = functools.partial(_axes, dim=dim, shapes=shapes)
                told = (model, form, given, dim, device, begin)
                fault = fault_in_pieces(*told, takes=takes, rows_of=axes, is_close=is_close)
                if fault:
                    return Mixing(fault, points=True)
    return Mixing(found[False], found.get(True, ""), bool(sums) and all(sums))


def _contrary(given: Mapping[str, Tensor], dim: Dim, form: Recording) -> Iterator[dict[str, Tensor]]:
    """The tensors with a second row of the other sign: one expert may take all the example's rows.

    Of no use where no number is made of rows, or all of them are whole numbers.
    """
    out = dict(given)
    if not any(isinstance(c, Call) and _is_number(c.value) for c in form.calls[-1].args[0]):
        return
    for name, axis in dim.where:
        if given[name].is_floating_point() and given[name].shape[axis] > 1:
            changed = given[name].detach().clone()
            changed.select(axis, 1).neg_()
            out[name] = changed.requires_grad_(given[name].requires_grad)
    if any(out[name] is not given[name] for name in given):
        yield out


def rows_of(
    model: nn.Module,
    form: Recording,
    given: Mapping[str, Tensor],
    dim: Dim,
    device: torch.device,
    start: Callable[[], None],
    *,
    alone: bool = False,
) -> Rows:
    """What runs a form on the example's first two rows in any order, the others behind them or left out.

    ``start`` sets mode and state.
    """

    def run(rows: str, look: Any = None) -> Any:
        start()
        seed(device)
        return replay(model, form, _rows(given, dim, rows, alone), device, look=look).result

    return run


def _may_point(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _may_mix_in_training(form: Recording, forms: Mapping[bool, Recording]) -> bool:
    return forms[True] is not forms[False] or any(c.mutated for c in form.calls)


def _rows(given: Mapping[str, Tensor], dim: Dim, rows: str, alone: bool) -> dict[str, Tensor]:
    """The tensors with the example's first two rows, a and b, in the order of ``rows``; b made up if alike.

    The rows behind them stay, unless these are to be ``alone``. A third of ``rows`` comes last.
    """
    picked: dict[str, tuple[Tensor, Tensor, int]] = {}
    for name, axis in dim.where:
        tensor = given[name]
        a = tensor.select(axis, 0)
        picked[name] = a, tensor.select(axis, 1) if tensor.shape[axis] > 1 else a, axis
    if all(torch.equal(a, b) for a, b, _ in picked.values()):
        picked = {n: (a, _other(a), axis) for n, (a, _, axis) in picked.items()}
    out = dict(given)
    for name, (a, b, axis) in picked.items():
        chosen = [a if row == "a" else b for row in rows]
        rest = () if alone else given[name].unbind(axis)[2:]
        made = torch.stack([*chosen[:2], *rest, *chosen[2:]], axis)
        out[name] = made.requires_grad_(given[name].requires_grad)
    return out


def _other(row: Tensor) -> Tensor:
    """Another row of the same kind: numbers a little larger, tokens in another order."""
    if row.is_floating_point() or row.is_complex():
        return row * 1.25 + 0.125
    return row.roll(1, -1) if row.ndim else row


def _is_over_labels(model: nn.Module, call: Call) -> bool:
    """Whether a call is a loss whose labels the runtime counts, or warns of."""
    if call.op == "call_module":
        return isinstance(model.get_submodule(call.target), LABEL_MODULES)
    return call.target in MEANS_OVER_LABELS


def _found(results: _Results, dim: Dim, shapes: _Shapes) -> str:
    """What mixes rows in one form, in words, or nothing.

    Where results differ by little, though by more than rounding, some op must differ by more. Where a number
    is the same whatever the rows, as a loss that is clipped, it tells nothing, and the ops are asked too.
    """
    fault = results.fault(dim, shapes, _ALLOWED)
    if fault:
        where = _first(results.form, results.run, dim, shapes)
        return "; ".join(filter(None, (where, fault if results.is_number or not where else "")))
    little = results.fault(dim, shapes, _EQUAL) or not results.are_telling
    return _first(results.form, results.run, dim, shapes) if little else ""


class _Results:
    """What a form gives for rows in some places, its output leaves that calls made."""

    def __init__(
        self, form: Recording, run: Rows, is_longer: bool, is_counted: bool, noise: OwnNoise
    ) -> None:
        self.form, self.run, self._is_longer, self._is_counted = form, run, is_longer, is_counted
        self._noise, self._is_noisy = noise, any(c.is_random for c in form.calls)
        self._leaves = [c for c in form.calls[-1].args[0] if isinstance(c, Call)]
        self._values: dict[str, list[Any]] = {}
        self._values_of_three: dict[str, list[Any]] = {}
        self._numbers = [
            i for i, c in enumerate(self._leaves) if _is_number(self.of("ab")[i]) and c.op != "placeholder"
        ]
        self.is_number = False

    def of(self, rows: str) -> list[Any]:
        """The leaves for these rows."""
        if rows not in self._values:
            self._values[rows] = self._run(rows)
        return self._values[rows]

    def _run(self, rows: str, look: Any = None) -> list[Any]:
        made = zip(self.form.calls[-1].args[0], self.run(rows, look), strict=True)
        return [v for c, v in made if isinstance(c, Call)]

    @property
    def are_telling(self) -> bool:
        """Whether the numbers made of inputs tell anything: no mean of nothing does, nor one that stays."""
        made = [i for i in self._numbers if self._leaves[i].depends & Depends.INPUT]
        figures = [[float(self.of(rows)[i]) for rows in ("ab", "aa", "bb")] for i in made]
        return all(all(map(math.isfinite, each)) and len({*each}) > 1 for each in figures)

    def fault(self, dim: Dim, shapes: _Shapes, allowed: Mapping[torch.dtype, float]) -> str:
        """The first leaf that is not as rows alone make it, in words; ``is_number`` says which kind."""
        for i, call in enumerate(self._leaves):
            values = {rows: self.of(rows)[i] for rows in ("ab", "aa", "bb")}
            if any(_differ(values, axis, allowed) for axis in _axes(call, 0, dim, shapes)):
                self.is_number = False
                return said(call)
        for i in self._numbers:
            if words := self._no_mean(i, allowed.get(self.of("ab")[i].dtype, _ALLOWED_BELOW), allowed):
                self.is_number = True
                return f"{said(self._leaves[i])} is {words}"
        return ""

    def sums(self) -> list[bool]:
        """Of each number made of rows, whether it is their sum: twice as much for twice the rows."""
        out = []
        for i in self._numbers:
            _, summed, found, allowed = self._of_three(i)
            out.append(abs(found - summed) <= allowed < abs(summed) / 3)
        return out

    def neither(self) -> str:
        """In words, the first number that is neither mean nor sum of what rows give, as a sum and a penalty.

        Not asked where labels weigh rows.
        """
        if self._is_counted:
            return ""
        for i in self._numbers:
            mean, summed, found, allowed = self._of_three(i)
            if not self._noise.is_by_row:
                return f"{said(self._leaves[i])} is made with noise that cannot be told by rows"
            if min(abs(found - mean), abs(found - summed)) > allowed:
                three = f"{found:.6g} for three rows, whose mean is {mean:.6g} and whose sum {summed:.6g}"
                return f"{said(self._leaves[i])} is {three}"
        return ""

    def _of_three(self, i: int) -> tuple[float, float, float, float]:
        """A number for rows a b b: if it is a mean, if it is a sum, as it is; and how much is rounding.

        A batch of three draws other noise than one of two, so each row is given its own.
        """
        values = self._values_of_three or self._each_with_its_noise()
        aa, bb, abb = (float(values[rows][i]) for rows in ("aa", "bb", "abb"))
        allowed = _ALLOWED.get(self.of("ab")[i].dtype, _ALLOWED_BELOW) * max(map(abs, (aa, bb, abb)))
        return (aa + 2 * bb) / 3, aa / 2 + bb, abb, allowed

    def _each_with_its_noise(self) -> dict[str, list[Any]]:
        """The leaves for rows of which each draws the same wherever it is."""
        if self._is_noisy:
            self._run("ab", self._noise.see)
        for rows in ("aa", "bb", "abb"):
            known = not self._is_noisy
            self._values_of_three[rows] = self.of(rows) if known else self._run(rows, self._noise.put(rows))
        return self._values_of_three

    def _no_mean(self, i: int, allowed: float, level: Mapping[torch.dtype, float]) -> str:
        """In words, where a number is no mean of the rows', evenly or weighted by the labels in each.

        In both orders: what is clipped, as a loss of ranks is, may be one in one of them alone.
        """
        ab, ba, aa, bb = figures = [float(self.of(rows)[i]) for rows in ("ab", "ba", "aa", "bb")]
        if not all(map(math.isfinite, figures)):
            return ""  # such as the mean loss of a row without labels
        scale = max(map(abs, figures))
        if abs(ab + ba - aa - bb) <= allowed * scale:
            return ""
        if self._is_longer and level is _ALLOWED and min(aa, bb) <= ab <= max(aa, bb):
            return ""  # how the rows weigh cannot be told with others beside them
        share = (bb - ab) / (ab - aa) if ab != aa else math.inf
        if self._is_counted and share > 0 and math.isfinite(share) and not self._is_longer:
            found = float(self.of("abb")[i])
            if abs(found - (share * aa + 2 * bb) / (share + 2)) <= allowed * scale:
                return ""
        return f"{ab:.6g} for two rows that alone give {aa:.6g} and {bb:.6g}"


def _axes(call: Call, index: int, dim: Dim, shapes: _Shapes) -> list[int]:
    """The axes of a call's tensor that are the rows."""
    known = shapes.get(id(call), ())
    return [a for a, n in enumerate(known[index]) if str(n) == dim.name] if index < len(known) else []


def _differ(values: Mapping[str, Any], axis: int, allowed: Mapping[torch.dtype, float] = _ALLOWED) -> bool:
    """Whether row a is another beside b than beside a, or b than beside b."""
    ab, aa, bb = (values[rows] for rows in ("ab", "aa", "bb"))
    if not isinstance(ab, Tensor) or not ab.shape == aa.shape == bb.shape or axis >= ab.ndim:
        return False
    pairs = (ab.select(axis, 0), aa.select(axis, 0)), (ab.select(axis, 1), bb.select(axis, 1))
    return not all(is_close(x, y, allowed) for x, y in pairs)


def is_close(x: Tensor, y: Tensor, allowed: Mapping[torch.dtype, float] = _ALLOWED) -> bool:
    """Whether two tensors of numbers are equal up to what is allowed of the largest; whole numbers always."""
    if not (x.is_floating_point() or x.is_complex()):
        return True  # ranks and places of rows, such as where an expert put them
    x, y = x.nan_to_num(), y.nan_to_num()
    scale = max(float(x.abs().max()), float(y.abs().max())) if x.numel() else 0.0
    return not scale or float((x - y).abs().max()) <= allowed.get(x.dtype, _ALLOWED_BELOW) * scale


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _first(form: Recording, run: Callable[..., Any], dim: Dim, shapes: _Shapes) -> str:
    """The first call in one of whose tensors rows are mixed."""
    seen: dict[str, dict[tuple[int, int], Tensor]] = {}
    for rows in ("ab", "aa", "bb"):
        kept = seen[rows] = {}

        def look(call: Call, value: Any, kept: dict[tuple[int, int], Tensor] = kept) -> None:
            for i, tensor in enumerate(tensors(value)):
                if _axes(call, i, dim, shapes):
                    kept[id(call), i] = tensor.detach().clone()

        run(rows, look)
    for call in form.calls:
        for i in range(len(shapes.get(id(call), ()))):
            values = {rows: kept.get((id(call), i)) for rows, kept in seen.items()}
            if call.op != "output" and any(_differ(values, a) for a in _axes(call, i, dim, shapes)):
                return said(call)
    return ""
