"""What torch would read beyond the end of a table, refused while a model is asked on other data.

Most of torch's functions refuse a number that their table has no place for. One that does not gives what lies
behind it in memory, which is other each time, or ends the process; labels that a model may not take, as -100
where nothing is left out, are among the data that it is asked on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...torch_private import Unwatched, is_transformed

__all__ = ["bounded", "within_bounds"]

_CTC_LOSS = torch.ctc_loss


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Within it ``torch.ctc_loss``, which looks at no label, raises IndexError for one that is no class."""
    given = torch.ctc_loss
    if given is _ctc_loss:
        yield
        return
    torch.ctc_loss = _ctc_loss
    try:
        yield
    finally:
        torch.ctc_loss = given


def within_bounds(function: Callable[..., Any]) -> Callable[..., Any]:
    """A recorded function, or what asks it within its bounds only; torch has several objects of one."""
    return _ctc_loss if function == _CTC_LOSS else function


def _ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *rest: Any, **named: Any
) -> Any:
    with Unwatched():
        _check_labels(log_probs, targets, target_lengths)
    return _CTC_LOSS(log_probs, targets, input_lengths, target_lengths, *rest, **named)


def _check_labels(log_probs: Any, targets: Any, lengths: Any) -> None:
    """Raise IndexError where a label within the ``lengths`` is no class; padding may be anything."""
    given = [value for value in (log_probs, targets, lengths) if not isinstance(value, (list, tuple))]
    if not all(type(value) is Tensor and value.device.type != "meta" for value in given):
        return
    if any(map(is_transformed, given)):
        return
    counts = lengths.flatten().tolist() if isinstance(lengths, Tensor) else lengths
    labels = targets.tolist()
    if targets.dim() == 2:
        read = [label for row, n in zip(labels, counts, strict=False) for label in row[:n]]
    else:
        read = labels[: sum(counts)]
    n_classes = log_probs.shape[-1]
    for label in read:
        if not 0 <= label < n_classes:
            raise IndexError(f"label {label} of a CTC loss is none of its {n_classes} classes")
