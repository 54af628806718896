"""Errors of a model's code, which are answers, and autopipe's own faults, which are none."""

from __future__ import annotations

import contextlib
import dis
import os
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import NoReturn

from ...errors import CaptureError

__all__ = ["faults_told", "of_models", "raise_again"]

_HERE = str(pathlib.Path(__file__).parents[2])
_LIBRARIES = frozenset({*sys.stdlib_module_names, "mpmath", "networkx", "numpy", "scipy", "sympy", "torch"})
"""What fails for whoever called it, a model or autopipe."""
_FAULTS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, RecursionError,
    StopIteration, TypeError, ValueError,
)  # fmt: skip
_ON_PURPOSE, _HANDING_ON = dis.opmap["RAISE_VARARGS"], dis.opmap["CALL_FUNCTION_EX"]
_RUNS_CALLS = "perform.py", "_run"
"""The file and name of what asks the values of a recording for their methods."""
_CYCLE = 200
"""So many frames at the end of a recursion show whose it is."""


def of_models() -> tuple[type[Exception], ...]:
    """What an ``except`` is to take where any error of a model's code is an answer: not autopipe's own.

    As in ``except of_models():``, of the error that is raised then. One that autopipe's code makes itself,
    as by an attribute that is not there, would pass for what the model says. Whose it is tells the innermost
    code that is no library's: autopipe's has not made it where it raises it on purpose, nor where it calls
    what it was given with arguments that it was given (``function(*args)``).

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
    except (*_FAULTS, RuntimeError) as error:
        if not (place := _place_of_fault(error)):
            raise
        raise CaptureError(
            f"the capture ended in a fault of autopipe's own, at {place}: {type(error).__name__}: {error}; "
            "please report it with the model; dynamic=False asks less of a model, and may go round it"
        ) from error


def _place_of_fault(error: BaseException) -> str:
    """Where autopipe's own code made an error that is no answer of a model's; else nothing."""
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # which a generator ended in
    if not isinstance(error, _FAULTS):
        return ""
    steps = [step for step in _steps(error) if not _is_of_library(step)]
    if not steps or not all(
        map(_is_ours, steps[-_CYCLE:] if isinstance(error, RecursionError) else steps[-1:])
    ):
        return ""
    code, line = steps[-1].tb_frame.f_code, steps[-1].tb_lineno
    does = code.co_code[steps[-1].tb_lasti]
    is_raised = code is raise_again.__code__ or (
        does == _ON_PURPOSE and not isinstance(error, AssertionError)
    )
    if is_raised or does == _HANDING_ON or (pathlib.Path(code.co_filename).name, code.co_name) == _RUNS_CALLS:
        return ""
    return f"{code.co_filename.removeprefix(_HERE).lstrip(os.sep)}:{line}"


def _steps(error: BaseException) -> Iterator[types.TracebackType]:
    step = error.__traceback__
    while step is not None:
        yield step
        step = step.tb_next


def _is_ours(step: types.TracebackType) -> bool:
    return step.tb_frame.f_code.co_filename.startswith(_HERE)


def _is_of_library(step: types.TracebackType) -> bool:
    return str(step.tb_frame.f_globals.get("__name__")).partition(".")[0] in _LIBRARIES


def raise_again(error: Exception) -> NoReturn:
    """Raise an error of a model's that was kept, without the frames it was kept with."""
    raise error.with_traceback(None)
