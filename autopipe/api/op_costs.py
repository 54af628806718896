"""What the ops of a captured model cost: measured here, estimated, or given; of one microbatch.

Measuring and estimating are left to ``measure``, what training adds to ``training``.
"""

from __future__ import annotations

import logging
import math
import pathlib
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

import torch

from .. import measure
from ..arguments import one_of
from ..costs import CostTable
from ..errors import InputError
from ..hardware import Device
from ..runtime.data.step_start import beginning
from ..tracing import Capture, device_of
from ..tracing.sizes.variation import Check
from .cluster import DeviceLike, busy_peers, described, is_described

__all__ = ["costs_of", "counts_to_try", "microbatch_dims", "profiled", "read"]

_logger = logging.getLogger(__name__)

Costs = str | CostTable
"""``"measured"``, ``"estimated"``, or a table."""

MICROBATCHES_PER_STAGE = 4
"""Default microbatches per stage: a uniform 1F1B then idles at most a fifth of the time."""


def count_microbatches(captured: Capture, asked: int | str | None, n_stages: int) -> int:
    """How many there are of a batch like the example: those asked for, or the default, at most its rows.

    The default has no microbatch of a size that the model was not captured for; of those asked for, a warning
    says so.
    """
    batch = captured.ops.example_dims.get("batch", 1)
    most = 1 if captured.listed_rows else captured.most_microbatches(batch)
    if not isinstance(asked, int):
        return _most_taken(captured, min(most, MICROBATCHES_PER_STAGE * n_stages))
    n = asked
    if n > 1 and (captured.listed_rows or "batch" not in captured.ops.example_dims):
        reasons = [f" ({listed})" for listed in captured.listed_rows]
        reasons += [
            f" ({fixed.reason})" for (_, axis), fixed in captured.variation.fixed.items() if axis == 0
        ]
        _logger.warning(
            "%s microbatches were asked for, but the batch's size is fixed in this capture%s: planned for 1",
            asked,
            "".join(reasons[:1]),
        )
        return 1
    if n > batch:
        _logger.warning(
            "%s microbatches were asked for, but the example batch has %s rows: planned for %s; give a batch "
            "with at least as many rows as microbatches",
            asked,
            batch,
            batch,
        )
        n = batch
    if n > most:
        _logger.warning(
            "%s microbatches of the example's %s rows are of single rows, and %s: planned for %s, as a step "
            "keeps two rows or more to each; give larger batches for more",
            n,
            batch,
            captured.one_row,
            most,
        )
        n = most
    if (broken := _broken(captured, n)) is not None:
        check, rows = broken
        _logger.warning(
            "%s microbatches of the example's %s rows have %s each, and the model was captured where %s held "
            "(%s), so no step takes them: planned at the times of larger ones; take n_microbatches=%s, or "
            "larger batches",
            n,
            batch,
            rows,
            check,
            check.source,
            _most_taken(captured, n),
        )
    return n


def read(costs: str | CostTable | pathlib.Path) -> Costs:
    """The table that ``costs`` is or is the path of; else the word that says how to find the costs.

    Raises :class:`StoreError` for a file that is no cost table.
    """
    if isinstance(costs, CostTable) or costs in ("measured", "estimated"):
        return costs
    if isinstance(costs, str) and costs.isidentifier() and not pathlib.Path(costs).exists():
        one_of("costs", costs, ("measured", "estimated", "the path of a cost table"))
    return CostTable.read(costs)


def counts_to_try(captured: Capture, asked: int | str | None, costs: Costs, n_stages: int) -> list[int]:
    """The counts of microbatches among which a batch like the example is planned, the default first.

    With ``"auto"`` they are the default and its halves, as long as there is one for each stage: the fewer,
    the larger each. A given cost table holds for one size of microbatch, which says how many there are.
    """
    first = count_microbatches(captured, asked, n_stages)
    if asked != "auto":
        return [first]
    if isinstance(costs, CostTable):
        batch = captured.ops.example_dims.get("batch", 1)
        n = math.ceil(batch / max(1, costs.dims.get("batch", math.ceil(batch / first))))
        return [count_microbatches(captured, n, n_stages)]
    halves = takewhile(lambda n: n >= n_stages, (first >> i for i in range(1, first.bit_length())))
    return list(dict.fromkeys([first, *(_most_taken(captured, n) for n in halves)]))


def microbatch_dims(captured: Capture, n_microbatches: int) -> dict[str, int]:
    """The example's dims with the batch cut into ``n_microbatches``; the largest piece counts.

    Into fewer, where the model was not captured for such pieces.
    """
    dims = captured.ops.example_dims
    if "batch" in dims:
        dims["batch"] = math.ceil(dims["batch"] / _most_taken(captured, n_microbatches))
    return dims


def _most_taken(captured: Capture, most: int) -> int:
    """The largest number of microbatches up to ``most`` whose sizes the model was captured for."""
    return next((n for n in range(most, 1, -1) if _broken(captured, n) is None), 1)


def _broken(captured: Capture, n: int) -> tuple[Check, int] | None:
    """What does not hold of one of ``n`` microbatches, and its rows; None where some form takes each."""
    dims = captured.ops.example_dims
    batch = dims.get("batch", 1)
    n = min(n, batch)
    of_sizes = [f.variation for forms in captured.forms.values() for f in forms if f.for_sizes]
    for rows in {batch // n, math.ceil(batch / n)} - {batch}:
        sizes = {**dims, "batch": rows}
        variations = (captured.variation, *of_sizes)
        broken = [next((c for c in v.checks if not c.holds(sizes)), None) for v in variations]
        if (first := broken[0]) is not None and None not in broken:
            return first, rows
    return None


def costs_of(
    captured: Capture,
    costs: Costs,
    device: DeviceLike,
    dims: Mapping[str, int],
    store: str | pathlib.Path | None,
    autocast: torch.dtype | None,
) -> CostTable:
    """What each op costs at ``dims``.

    Raises :class:`InputError` for what cannot be measured here, or estimated without a device.
    """
    if isinstance(costs, CostTable):
        return _told(costs, dims)
    if costs == "estimated":
        if device is None and device_of(captured.model).type == "meta":
            raise InputError(
                "the model is on the meta device; name the device to estimate for, such as device='H200'"
            )
        return measure.estimate(captured, described(captured.model, device)[0], dims=dims, dtype=autocast)
    if any(p.is_meta for p in captured.model.parameters()):
        raise InputError(
            "the model is on the meta device, which cannot be measured; pass costs='estimated' and the "
            "device to estimate for, or a saved cost table"
        )
    if isinstance(device, Device) or is_described(device):
        named = device.name if isinstance(device, Device) else device
        raise InputError(
            f"costs='measured' runs on this machine, but device describes another, {named}; pass "
            "costs='estimated', or a torch device"
        )
    return profiled(
        captured,
        device=device,
        dims=dims,
        autocast=autocast,
        n_peers=busy_peers(captured.model, device),
        store=store,
    )


def profiled(captured: Capture, *, dims: Mapping[str, int], **options: Any) -> CostTable:
    """What each op costs at a microbatch's ``dims``, and what a step takes beside its actions, measured.

    Options are those of :func:`autopipe.measure.profile`.
    """
    n_rows = captured.ops.example_dims.get("batch", 1)
    pieces = max(1, math.ceil(n_rows / max(1, dims.get("batch", n_rows))))
    return measure.profile(captured, dims=dims, **{"begin": beginning(captured, pieces), **options})


def _told(table: CostTable, dims: Mapping[str, int]) -> CostTable:
    """The table; warns where a microbatch of the example has other ``dims`` than it holds for."""
    others = {name: table.dims[name] for name, size in dims.items() if table.dims.get(name, size) != size}
    if others:
        _logger.warning(
            "the cost table holds for a microbatch of %s, and one of the example has %s: the plan's times "
            "and bytes are those of the table's; profile the model with n_microbatches as the plan's",
            _shown(others),
            _shown({name: dims[name] for name in others}),
        )
    return table


def _shown(dims: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in dims.items())
