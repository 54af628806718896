"""Where what a frame is in the middle of is written, which Python tells of a code from its first line on.

What is written there is left to those who ask.
"""

from __future__ import annotations

import itertools
import types

__all__ = ["Span", "span_at", "whole_span_at"]

Span = tuple[int | None, int | None, int | None, int | None]
"""The first line and the last, the first column and the last; None where the code does not say."""

_known: dict[tuple[int, int], tuple[types.CodeType, Span]] = {}
"""By id of the code, which is kept with it, and place: to compare code takes longer."""
_MOST = 1 << 12


def span_at(code: types.CodeType, at: int) -> Span:
    """Where the instruction at a place of ``code``, as frames have it in ``f_lasti``, is written."""
    if (known := _known.get((id(code), at))) is not None:
        return known[1]
    if len(_known) >= _MOST:
        _known.clear()
    span = next(itertools.islice(code.co_positions(), at // 2, None))
    _known[id(code), at] = code, span
    return span


def whole_span_at(code: types.CodeType, at: int) -> tuple[int, int, int, int] | None:
    """The same; None where the code does not say all of it."""
    line, end_line, column, end_column = span_at(code, at)
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return line, end_line, column, end_column
