"""Files as data: JSON text into the project's own dataclasses, or an error that says where it does not fit.

Which fields there are, and what they may hold, is left to the dataclasses; what they mean together to the
rooms that own them. Nothing read here is ever run.

A dataclass is its own schema: its annotations say what each field takes, the types below within which limits.
What was read is also held against what would be written again, so that a field that is missing, unknown or
would come back changed is refused: a file means what it says or is not used.
"""

from __future__ import annotations

import functools
import json
import math
import numbers
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from .arguments import brief, place
from .errors import StoreError
from .files import read_text

__all__ = [
    "Bytes",
    "Count",
    "Index",
    "Line",
    "Name",
    "Positive",
    "Rate",
    "Real",
    "Seconds",
    "Share",
    "build",
    "differs",
    "load",
    "parse",
    "refuse",
    "versioned",
    "written",
]

T = TypeVar("T")

_PRINTABLE = r"\A[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]*\Z"

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""A time: up to thirty years."""
Real = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
"""Any finite figure, such as a residual."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
"""A ratio: relative widths, bytes per byte."""
Positive = Annotated[float, msgspec.Meta(ge=1e-24, le=1e24)]
"""A rate that something is divided by: what comes of it is finite."""
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e24)]
"""A rate that may be unknown: 0 then."""
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**60)]
"""Up to an exbibyte."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""How many of something tiny: FLOPs, elements."""
Index = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
"""A place in a row of stages, ranks or microbatches, or how many there are."""
Line = Annotated[str, msgspec.Meta(max_length=2000, pattern=_PRINTABLE)]
"""What a person reads on one line, in order: no control characters, line breaks and turns of direction among
them; may be empty."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=2000, pattern=_PRINTABLE)]
"""A :data:`Line` that says something."""

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_MOST_BYTES = 1 << 28
_DEEPEST = 12
_LONGEST = 20_000
"""Characters of one string: a formula, a note."""


def load(path: str | pathlib.Path, what: str) -> dict[str, Any]:
    """The JSON object in a file. Raises :class:`StoreError` where there is none that :func:`parse` takes."""
    return parse(read_text(place("path", path), _MOST_BYTES, what), f"{what} {path}")


def parse(text: str, what: str) -> dict[str, Any]:
    """The JSON object that a text holds, its numbers finite and its keys written once.

    Raises :class:`StoreError`, naming the place, for anything else and for what is nested too deep.
    """
    try:
        data = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise refuse(what, "", f"is nested deeper than {_DEEPEST} levels") from None
    except ValueError as error:
        raise refuse(what, "", f"is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise refuse(what, "", f"is a {type(data).__name__}, not an object")
    return data


def written(data: Any, indent: int | None = None) -> str:
    """Data as JSON text; numbers of other types, numpy's and fractions, as Python's own.

    >>> from fractions import Fraction
    >>> written({"speed": Fraction(1, 2)})
    '{"speed": 0.5}'
    """
    return json.dumps(data, indent=indent, default=_number)


def _number(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"{type(value).__name__} is no JSON")


def build(cls: type[T], data: Any, what: str) -> T:
    """``data`` as a ``cls``, checked field by field against its annotations.

    ``what`` names it in errors. Raises :class:`StoreError` with the path to what does not fit.
    """
    for path, fault in _unsound(data, "", 0):
        raise refuse(what, path, fault)
    try:
        return msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        message, path = _located(cls, data, str(error))
        raise refuse(what, path, message) from None


_KINDS = {
    "plan": {"graph_digest", "boundaries"},
    "cluster": {"devices", "hosts"},
    "cost table": {"dims", "optimizer_s_per_byte"},
}
"""What files have that others do not."""


def versioned(data: Any, version: int, what: str, kind: str = "") -> dict[str, Any]:
    """``data`` without its ``version``. Raises :class:`StoreError` where that is another, or none.

    Where the data are of another kind of file than ``kind``, that is said and not their version.
    """
    if not isinstance(data, Mapping):
        raise refuse(what, "", f"is a {type(data).__name__}, not an object")
    held = next((k for k, names in _KINDS.items() if names <= data.keys()), kind)
    if held != kind:
        raise StoreError(f"{what} holds a {held}; give another file")
    found = data.get("version")
    if found != version or isinstance(found, bool):
        has = "has no version" if found is None else f"has version {brief(found)}"
        raise StoreError(f"{what} {has}, this autopipe reads {version}; make it again")
    return {name: value for name, value in data.items() if name != "version"}


def differs(data: Any, again: Any, what: str) -> None:
    """Raise :class:`StoreError` at the first place where ``data`` is not what is written ``again``."""
    for path, fault in _differences(data, again, ""):
        raise refuse(what, path, fault)


def refuse(what: str, path: str, fault: str) -> StoreError:
    """The error for a file that is not what it should be, at a path within it."""
    where = f"{path.lstrip('.')} " if path else ""
    return StoreError(f"{what} is damaged: {where}{fault}; make it again")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is written twice")
    return out


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _unsound(value: Any, path: str, depth: int) -> Iterator[tuple[str, str]]:
    """(path, fault) of what no file of ours holds, whatever it is a file of."""
    if depth > _DEEPEST:
        yield path, f"is nested deeper than {_DEEPEST} levels"
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                yield path, f"has the name {name!r}, which is no text"
            yield from _unsound(item, f"{path}{_step(name)}", depth + 1)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            if not isinstance(item, (str, float, int)) or not _is_sound(item):
                yield from _unsound(item, f"{path}[{i}]", depth + 1)
    elif value is not None and not isinstance(value, (str, int, float)):
        yield path, f"is a {type(value).__name__}, which JSON has not"
    elif value is not None and not _is_sound(value):
        yield path, f"is {brief(value)}, which is not finite, too long or no text"


def _is_sound(value: str | float) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONGEST and (value.isascii() or not _SURROGATE.search(value))
    return abs(value) < 1 << 63 if isinstance(value, int) else math.isfinite(value)


def _located(cls: type[Any], data: Any, message: str) -> tuple[str, str]:
    """msgspec's message, and its path with the names of mappings, which it leaves out, filled in."""
    fault, _, place = message.partition(" - at `$")
    path = place.rstrip("`")
    while "[...]" in path:
        before, _, _ = path.partition("[...]")
        found = _at(data, before)
        name = _culprit(found, functools.partial(_fails, cls, data, before))
        path = path.replace("[...]", _step(name), 1)
    if "matching regex" in fault:
        fault = "it must be one line of printable text"
    value = _at(data, path)
    shown = "" if isinstance(value, (dict, list)) else f"is {brief(value)}: "
    return f"{shown}{fault[:1].lower()}{fault[1:]}", path


def _culprit(mapping: Mapping[str, Any], fails: Callable[[dict[str, Any]], bool]) -> str:
    """The first name whose value alone makes the whole fail, by halving."""
    items = list(mapping.items())
    while len(items) > 1:
        half = items[: len(items) // 2]
        items = half if fails(dict(half)) else items[len(items) // 2 :]
    return items[0][0]


def _fails(cls: type[Any], data: Any, path: str, part: Any) -> bool:
    """Whether ``data`` does not fit with ``part`` at a path."""
    try:
        msgspec.convert(_with(data, path, part), cls)
    except msgspec.ValidationError:
        return True
    return False


_PATH = re.compile(r"\.([^.\[]+)|\[(\d+)\]|\[('(?:[^'\\]|\\.)*')\]")


def _keys(path: str) -> list[str | int]:
    found = _PATH.findall(path)
    return [name or (int(i) if i else quoted[1:-1]) for name, i, quoted in found]


def _at(data: Any, path: str) -> Any:
    for key in _keys(path):
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data


def _with(data: Any, path: str, part: Any) -> Any:
    """``data`` with ``part`` at a path; what is beside the path is left as it is."""
    keys = _keys(path)
    if not keys:
        return part
    head, rest = keys[0], "".join(f"[{k}]" if isinstance(k, int) else f"[{k!r}]" for k in keys[1:])
    if isinstance(data, Mapping):
        return {**data, head: _with(data[head], rest, part)}
    return [*data[:head], _with(data[head], rest, part), *data[head + 1 :]]  # type: ignore[operator]


def _differences(data: Any, again: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(data, Mapping) and isinstance(again, Mapping):
        for name in data:
            if name not in again:
                yield f"{path}{_step(name)}", "is no field of it"
        for name in again:
            if name not in data:
                yield f"{path}{_step(name)}", "is missing"
            else:
                yield from _differences(data[name], again[name], f"{path}{_step(name)}")
    elif isinstance(data, (list, tuple)) and isinstance(again, (list, tuple)):
        if len(data) != len(again):
            yield path, f"has {len(data)} entries where {len(again)} belong"
        for i, (one, other) in enumerate(zip(data, again, strict=False)):
            if one is not other:
                yield from _differences(one, other, f"{path}[{i}]")
    elif data != again or isinstance(data, bool) is not isinstance(again, bool):
        yield path, f"is {brief(data)}, which would be written {brief(again)}"


def _step(name: str) -> str:
    return f".{name}" if str(name).isidentifier() else f"[{name!r}]"
