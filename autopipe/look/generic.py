"""The two questions that every data type answers, its tables and its headline, and the words they share.

The answers are left to ``plan_tables``, ``graph_tables`` and ``run_tables``; how a table prints to ``table``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from .table import Table

__all__ = ["dims_text", "headline", "over", "ratio", "tables"]


@functools.singledispatch
def headline(item: Any) -> str:
    """One line: what it is and its most telling figures."""
    raise TypeError(f"nothing here knows how to show a {type(item).__name__}")


@functools.singledispatch
def tables(item: Any) -> tuple[Table, ...]:
    """Every table of an object, the main one first."""
    raise TypeError(f"nothing here knows how to show a {type(item).__name__}")


def over(measured: float, predicted: float) -> float | None:
    """Measured by predicted; None where nothing was predicted."""
    return measured / predicted if predicted else None


def ratio(x: float | None) -> str:
    """A ratio as people read it; a dash where there is none."""
    return "–" if x is None else f"{x:.2f}"


def dims_text(dims: Mapping[str, int]) -> str:
    """Sizes by name: ``batch=4, seq=96``."""
    return ", ".join(f"{k}={v}" for k, v in dims.items())
