"""Checks of arguments, one line each: the value as its type, or an error that says what is allowed.

Which arguments there are, and their limits, is left to the functions that take them. A name given here is the
one the user wrote, so that the error points at the call.

>>> whole("n_stages", 0)
Traceback (most recent call last):
autopipe.errors.InputError: n_stages is 0; it must be a whole number of at least 1
"""

from __future__ import annotations

import difflib
import inspect
import math
import operator
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from .errors import InputError

__all__ = [
    "Check",
    "brief",
    "called",
    "digits",
    "flag",
    "mapping",
    "names",
    "number",
    "one_of",
    "place",
    "plain",
    "sequence",
    "taking",
    "text",
    "whole",
    "word",
]

MOST = 2**31 - 1

Check = Callable[[str, Any], Any]
"""(name, value) → the value as it is kept, a number of any type as Python's own."""

Function = TypeVar("Function", bound=Callable[..., Any])


def whole(name: str, value: Any, least: int = 1, most: int = MOST, *, also: str = "") -> int:
    """A whole number within limits, of any type that :func:`plain` knows: ``2.0`` is one, a flag is none.

    ``also`` is what else the argument takes, for the error.

    >>> whole("n_stages", 2.0)
    2
    """
    wanted = f"a whole number of at least {least}{f', or {also}' if also else ''}"
    given = plain(value)
    if given is None or (isinstance(given, float) and not given.is_integer()):
        raise InputError(f"{name} is {brief(value)}; it must be {wanted}")
    found = int(given)
    if found < least:
        raise InputError(f"{name} is {brief(found)}; it must be {wanted}")
    if found > most:
        raise InputError(f"{name} is {brief(found)}; it can be at most {most}")
    return found


def number(
    name: str, value: Any, least: float = 0.0, most: float = math.inf, *, above: bool = False, unit: str = ""
) -> float:
    """A finite number of at least ``least`` (more than it, with ``above``); ``inf`` only where ``most`` is.

    >>> number("speed", 2, above=True)
    2.0
    """
    bound = f"{'above' if above else 'of at least'} {least:g}" + (
        f" and at most {most:g}" if _ends(most) else ""
    )
    wanted = f"a number{f' of {unit}' if unit else ''} {bound}"
    given = plain(value)
    try:
        found = math.nan if given is None else float(given)
    except OverflowError:
        found = math.nan
    if not (found > least if above else found >= least) or found > most:
        raise InputError(f"{name} is {brief(value)}; it must be {wanted}")
    return found


def plain(value: Any) -> float | None:
    """A number as Python's own, whatever type it has: numpy's, a tensor of one, a fraction, a decimal.

    None for what is none: a flag, text, an array of several, a tensor without data.

    >>> from fractions import Fraction
    >>> plain(Fraction(1, 2)), plain(3), plain(True), plain("3")
    (0.5, 3, None, None)
    """
    try:
        if hasattr(value, "item"):
            value = value.item()
        if isinstance(value, bool):
            return None
        if hasattr(value, "__index__"):
            return operator.index(value)
        return float(value) if hasattr(value, "__float__") else None
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def one_of(name: str, value: Any, known: Iterable[str]) -> str:
    """One of the known words.

    >>> one_of("ties", "synk", ("auto", "sync"))
    Traceback (most recent call last):
    autopipe.errors.InputError: ties is 'synk'; use one of 'auto', 'sync' (did you mean 'sync'?)
    """
    words = tuple(known)
    if isinstance(value, str) and value in words:
        return value
    near = difflib.get_close_matches(value.lower(), words, 1) if isinstance(value, str) else []
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise InputError(f"{name} is {brief(value)}; use one of {', '.join(map(repr, words))}{hint}")


def word(*known: str) -> Check:
    """The check for one of these words."""
    return lambda name, value: one_of(name, value, known)


def flag(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise InputError(f"{name} is {brief(value)}; it must be True or False")
    return value


def digits(text: str) -> int | None:
    """The whole number that up to 18 digits write; None for any other text.

    Python itself takes any script's digits, and raises an error of its own where there are thousands.

    >>> digits("12"), digits("-1"), digits("1e3"), digits("9" * 5000)
    (12, None, None, None)
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise InputError(f"{name} is {brief(value)}; it must be text")
    return value


def place(name: str, value: Any) -> pathlib.Path:
    """A path, as text or as such; ``~`` is the user's home, as for a shell."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or value == "" or "\0" in value:
        raise InputError(f"{name} is {brief(value)}; it must be the path of a file or folder")
    if "://" in value:
        raise InputError(
            f"{name} is {brief(value)}, which would be a folder of that name here: give one of this "
            "machine's, or of a file system that is mounted, and copy what is in it"
        )
    found = pathlib.Path(value)
    return found.expanduser() if found.parts[:1] == ("~",) else found


def sequence(name: str, value: Any, wanted: str) -> Sequence[Any]:
    """A list, tuple or other sequence, but no single string."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise InputError(f"{name} is {brief(value)}; it must be {wanted}")
    return value


def names(name: str, value: Any) -> tuple[str, ...]:
    """A list of names, and no single one."""
    given = sequence(name, value, "a list of names")
    return tuple(text(f"{name}[{x}]", item) for x, item in enumerate(given))


def mapping(name: str, value: Any, wanted: str) -> dict[str, Any]:
    """A mapping from names."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InputError(f"{name} is {brief(value)}; it must be {wanted}")
    return dict(value)


def called(name: str, value: Any, wanted: str) -> Callable[..., Any]:
    """Something that can be called."""
    if not callable(value):
        raise InputError(f"{name} is {brief(value)}; it must be {wanted}")
    return value  # type: ignore[no-any-return]


def _ends(most: float) -> bool:
    return most < math.inf


def brief(value: Any) -> str:
    """A value as an error shows it: its ``repr``, cut where it is long."""
    try:
        shown = repr(value)
    except Exception as error:  # a value's own repr may fail, and the fault is elsewhere
        shown = f"a {type(value).__name__} ({type(error).__name__} when shown)"
    return shown if len(shown) <= 80 else f"{shown[:77]}…"


def taking(options: type[Any]) -> Callable[[Function], Function]:
    """Decorates a function whose ``**options`` are the fields of a dataclass: ``help`` shows each by name.

    >>> class Size:
    ...     def __init__(self, *, width: int = 1) -> None: ...
    >>> @taking(Size)
    ... def made(name, **options): ...
    >>> str(inspect.signature(made))
    "(name, *, width: 'int' = 1)"
    """

    def decorated(function: Function) -> Function:
        own = inspect.signature(function)
        kept = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        fields = inspect.signature(options).parameters
        shown = [*kept, *(field for name, field in fields.items() if name not in own.parameters)]
        function.__signature__ = own.replace(parameters=shown)  # type: ignore[attr-defined]
        return function

    return decorated
