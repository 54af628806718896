"""Whether rows of a batch depend on one another, and which op mixes them: rows are put in others' places.

A graph is run on rows a b, a a and b b. Where rows are alone, a is the same beside b as beside a, and a
number made from all rows (a mean loss) is the mean of what it is for each. The random numbers are the same in
each run, so noise drawn inside is no mixing. What follows for microbatches is left to ``runtime``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import Dim
from ...units import Size
from ..calls.call import Call, Recording
from ..calls.functions import tensors
from ..calls.wording import shown
from ..record.state import seed
from .rerun import replay

__all__ = ["Mixing", "batch_dim", "mixing"]

_logger = logging.getLogger("autopipe")
_ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Of the largest value; products of other sizes round otherwise."""
_ALLOWED_BELOW = 0.1
_Shapes = Mapping[int, tuple[tuple[Size, ...], ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Mixing:
    """In words, what mixes rows; empty where nothing does.

    ``always`` is what does in evaluation, ``training`` what does in training alone: batch norm, for one.
    """

    always: str = ""
    training: str = ""


def batch_dim(dims: Sequence[Dim]) -> Dim | None:
    """The dim called ``batch``, else the first that some input leads with."""
    named = [d for d in dims if d.name == "batch"] or [d for d in dims if any(a == 0 for _, a in d.where)]
    return named[0] if named else None


@torch.no_grad()
def mixing(
    model: nn.Module,
    forms: Mapping[bool, Recording],
    given: Mapping[str, Tensor],
    dims: Sequence[Dim],
    shapes: _Shapes,
    device: torch.device,
    start: Callable[[bool], None],
) -> Mixing:
    """Run the forms on the tensors ``given``, three to five times each; ``start`` sets the mode.

    Nothing is found on the meta device, nor where the graph does not run on rows in other places.
    """
    dim = batch_dim(dims)
    if dim is None or dim.packed or device.type == "meta":
        return Mixing()
    found: dict[bool, str] = {}
    for training in (False, True):
        form = forms[training]
        if training and (found[False] or not _may_mix_in_training(form, forms)):
            return Mixing(found[False])

        def run(rows: str, look: Any = None, form: Recording = form, training: bool = training) -> Any:
            start(training)
            seed(device)
            return replay(model, form, _rows(given, dim, rows), device, look=look).result

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[training] = _found(form, run, dim, shapes)
            except Exception as error:
                # any Python of the model, on rows it may not take
                _logger.debug("rows could not be told apart: %s", error)
                found[training] = ""
    return Mixing(found[False], found[True])


def _may_mix_in_training(form: Recording, forms: Mapping[bool, Recording]) -> bool:
    return forms[True] is not forms[False] or any(c.mutated for c in form.calls)


def _rows(given: Mapping[str, Tensor], dim: Dim, rows: str) -> dict[str, Tensor]:
    """The tensors with the example's first two rows, a and b, in the order of ``rows``; b made up if alike.

    The rows behind them stay: inputs may point to rows. A third of ``rows`` comes last.
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
        rest = given[name].unbind(axis)[2:]
        made = torch.stack([*chosen[:2], *rest, *chosen[2:]], axis)
        out[name] = made.requires_grad_(given[name].requires_grad)
    return out


def _other(row: Tensor) -> Tensor:
    """Another row of the same kind: numbers a little larger, tokens in another order."""
    if row.is_floating_point() or row.is_complex():
        return row * 1.25 + 0.125
    return row.roll(1, -1) if row.ndim else row


def _found(form: Recording, run: Callable[..., Any], dim: Dim, shapes: _Shapes) -> str:
    """What mixes rows in one form, in words, or nothing."""
    leaves = [c for c in form.calls[-1].args[0] if isinstance(c, Call)]
    results = {rows: _leaves_of(run(rows), form) for rows in ("ab", "aa", "bb")}
    for i, call in enumerate(leaves):
        axes = _axes(call, 0, dim, shapes)
        values = {rows: r[i] for rows, r in results.items()}
        if any(_differ(values, axis) for axis in axes):
            return _first(form, run, dim, shapes) or _said(call)
    is_longer = dim.example > 2
    singles = [i for i, c in enumerate(leaves) if _is_number(results["ab"][i]) and c.op != "placeholder"]
    if singles and (
        fault := _not_a_mean(results, singles, lambda rows: _leaves_of(run(rows), form), is_longer)
    ):
        leaf = leaves[fault[0]]
        return f"{_first(form, run, dim, shapes) or _said(leaf)}; {_said(leaf)} is {fault[1]}"
    return ""


def _said(call: Call) -> str:
    what = call.target if call.op == "call_module" else shown(call, 3)
    return f"{what} at {call.source}" if call.source else str(what)


def _leaves_of(result: Any, form: Recording) -> list[Any]:
    """The values of an output's leaves that calls made, in order."""
    return [v for c, v in zip(form.calls[-1].args[0], result, strict=True) if isinstance(c, Call)]


def _axes(call: Call, index: int, dim: Dim, shapes: _Shapes) -> list[int]:
    """The axes of a call's tensor that are the rows."""
    known = shapes.get(id(call), ())
    return [a for a, n in enumerate(known[index]) if str(n) == dim.name] if index < len(known) else []


def _differ(values: Mapping[str, Any], axis: int) -> bool:
    """Whether row a is another beside b than beside a, or b than beside b."""
    ab, aa, bb = (values[rows] for rows in ("ab", "aa", "bb"))
    if not isinstance(ab, Tensor) or not ab.shape == aa.shape == bb.shape or axis >= ab.ndim:
        return False
    return not (
        _is_close(ab.select(axis, 0), aa.select(axis, 0))
        and _is_close(ab.select(axis, 1), bb.select(axis, 1))
    )


def _is_close(x: Tensor, y: Tensor) -> bool:
    if not (x.is_floating_point() or x.is_complex()):
        return True  # ranks and places of rows, such as where an expert put them
    x, y = x.nan_to_num(), y.nan_to_num()
    scale = max(float(x.abs().max()), float(y.abs().max())) if x.numel() else 0.0
    return not scale or float((x - y).abs().max()) <= _ALLOWED.get(x.dtype, _ALLOWED_BELOW) * scale


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _not_a_mean(
    results: dict[str, list[Any]],
    singles: Sequence[int],
    run: Callable[[str], list[Any]],
    is_longer: bool,
) -> tuple[int, str] | None:
    """The first of the numbers that is no mean of the rows', evenly or weighted by what counts in each."""
    results["ba"] = run("ba")
    for i in singles:
        allowed = _ALLOWED.get(results["ab"][i].dtype, _ALLOWED_BELOW)
        ab, ba, aa, bb = figures = [float(results[rows][i]) for rows in ("ab", "ba", "aa", "bb")]
        if not all(map(math.isfinite, figures)):
            continue  # such as the mean loss of a row without labels
        scale = max(map(abs, figures))
        if abs(ab + ba - aa - bb) <= allowed * scale:
            continue
        if is_longer and min(aa, bb) <= ab <= max(aa, bb):
            continue  # how the rows weigh cannot be told with others beside them
        share = (bb - ab) / (ab - aa) if ab != aa else math.inf
        if share > 0 and math.isfinite(share) and not is_longer:
            if "abb" not in results:
                results["abb"] = run("abb")
            found = float(results["abb"][i])
            if abs(found - (share * aa + 2 * bb) / (share + 2)) <= allowed * scale:
                continue
        return i, f"{ab:.6g} for two rows that alone give {aa:.6g} and {bb:.6g}"
    return None


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
                return _said(call)
    return ""
