"""Errors of a model's code, which are answers, and autopipe's own faults, which are none."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import NoReturn

from ...errors import CaptureError

__all__ = ["faults_told", "of_models", "raise_again"]

_HERE = str(pathlib.Path(__file__).parents[2])
_FAULTS = (AssertionError, AttributeError, ImportError, NameError, TypeError)
_HANDS_ON = frozenset({"__call__", "__torch_dispatch__", "__torch_function__", "_run", "raise_again"})
"""Code of autopipe's that calls a model's functions: errors of those that are not Python's end there."""


def of_models() -> tuple[type[Exception], ...]:
    """What an ``except`` is to take where any error of a model's code is an answer: not autopipe's own.

    As in ``except of_models():``, of the error that is raised then. One that autopipe's code makes itself,
    as by an attribute that is not there, would pass for what the model says.

    >>> try:
    ...     [].answer
    ... except of_models() as error:
    ...     print(error)
    'list' object has no attribute 'answer'
    """
    error = sys.exc_info()[1]
    return () if error is not None and _place_of_fault(error) else (Exception,)


@contextlib.contextmanager
def faults_told() -> Iterator[None]:
    """Within it a fault of autopipe's own, while it captures, is told as a :class:`CaptureError`."""
    try:
        yield
    except _FAULTS as error:
        if not (place := _place_of_fault(error)):
            raise
        raise CaptureError(
            f"the capture ended in a fault of autopipe's own, at {place}: {type(error).__name__}: {error}; "
            "please report it with the model; dynamic=False asks less of a model, and may go round it"
        ) from error


def _place_of_fault(error: BaseException) -> str:
    """Where autopipe's own code made an error that is no answer of a model's; else nothing."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None or not isinstance(error, _FAULTS):
        return ""
    code = step.tb_frame.f_code
    is_here = code.co_filename.startswith(_HERE) and code.co_name not in _HANDS_ON
    return f"{code.co_filename.removeprefix(_HERE).lstrip(os.sep)}:{step.tb_lineno}" if is_here else ""


def raise_again(error: Exception) -> NoReturn:
    """Raise an error of a model's that was kept, without the frames it was kept with."""
    raise error.with_traceback(None)
