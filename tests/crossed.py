"""Parameters of which every combination is a test, and a part of these always runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["crossed"]


def crossed(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """A test for each combination, of which those always run whose places add up to a multiple of n.

    n is the number of values of the shortest axis. Each value is among them, and of three axes each pair of
    values; the others run on demand, ``pytest -m slow``.
    """
    values = [[*axis] for axis in axes.values()]
    n = min(map(len, values))
    return pytest.mark.parametrize(
        tuple(axes),
        [
            pytest.param(
                *(axis[i] for axis, i in zip(values, places, strict=True)),
                marks=pytest.mark.slow if sum(places) % n else [],
            )
            for places in itertools.product(*(range(len(axis)) for axis in values))
        ],
    )
