"""Whether a model treats the rows of a batch one by one, as cutting it into microbatches takes for granted.

Comparing the pipeline with the model on a whole batch is left to ``stages.verify``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...stages import Stage, relative_error, run_values
from .microbatch import Splitter
from .outputs import Outputs
from .weights import Weigher

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = ["mixing"]

ALLOWED = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Relative; products of other sizes round otherwise."""
ALLOWED_BELOW = 0.1


@torch.no_grad()
def mixing(
    capture: Capture,
    stages: Sequence[Stage],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    n_microbatches: int,
) -> str:
    """In words, which output of the whole batch the microbatches do not give; empty where they give all.

    In evaluation mode, where batch norm and dropout leave rows alone.
    """
    with _evaluating(capture.model):
        values = capture.bind(*capture.arguments(args, dict(kwargs)))
        batch = Splitter(capture).split(values, None, n_microbatches)
        outputs = Outputs(capture)
        try:
            outputs.check(batch)
        except InputError as refusal:
            return str(refusal)
        weights, _ = Weigher(capture, None, None, None).weigh(batch, args, kwargs, values)
        parts = [
            run_values(stages, {name: column[m] for name, column in batch.leaves.items()})
            for m in range(batch.n_microbatches)
        ]
        joined = outputs.join(parts, batch, weights)
        for i, (whole, found) in enumerate(zip(run_values(stages, values), joined, strict=True)):
            if not isinstance(whole, Tensor):
                continue
            error = relative_error(whole, found)
            if whole.is_floating_point() and error > ALLOWED.get(whole.dtype, ALLOWED_BELOW):
                return f"output {i} differs by {error:.1e} of its largest value"
    return ""


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
