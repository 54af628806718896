"""Quantities as people write and read them: bytes, seconds and counts.

What the quantities belong to is left to the data layer, sizes as formulas to ``formula``.
"""

from __future__ import annotations

import math
import re

from .arguments import brief, plain
from .errors import InputError
from .formula import Size, parse_size, size_at, symbol

__all__ = [
    "Size",
    "dtype_bytes",
    "format_bytes",
    "format_seconds",
    "n_of",
    "parse_bytes",
    "parse_size",
    "size_at",
    "symbol",
]

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}
_MOST_BYTES = 2**60
_BYTES = re.compile(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?)\s*([kmgtp]i?)?b?\s*", re.ASCII)


def parse_bytes(text: str | float) -> int:
    """Bytes from ``"70GB"``, ``"16 GiB"``, ``"512MB"``, ``"8e10"`` or a number of any type.

    Raises :class:`InputError` for anything else.

    >>> parse_bytes("70GB"), parse_bytes("1.5 KiB"), parse_bytes("8e10"), parse_bytes(12)
    (70000000000, 1536, 80000000000, 12)
    """
    found = plain(text)
    if isinstance(text, str) and len(text) < 40 and (match := _BYTES.fullmatch(text.lower())):
        found = float(match[1]) * {**_DECIMAL, **_BINARY}[match[2] or ""]
    if found is None or not 0 <= found <= _MOST_BYTES:
        raise InputError(
            f"cannot read {brief(text)} as bytes; write it like '70GB' or 17179869184, at most 1 EiB"
        )
    return int(found)


def format_bytes(n: float, *, at_least: bool = False) -> str:
    """Bytes for people, in binary units; ``at_least`` so many where the figure is one to be asked for.

    >>> format_bytes(0), format_bytes(1536), format_bytes(17.2 * 2**30)
    ('0 B', '1.5 KiB', '17.2 GiB')
    >>> format_bytes(1537, at_least=True)
    '1.6 KiB'
    """
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            if at_least:
                size = math.ceil(size) if unit == "B" else math.ceil(size * 10) / 10
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_seconds(s: float) -> str:
    """Seconds for people.

    >>> format_seconds(2.5), format_seconds(0.0123), format_seconds(4.2e-5)
    ('2.50 s', '12.3 ms', '42.0 µs')
    """
    if abs(s) >= 1:
        return f"{s:.2f} s"
    if abs(s) >= 1e-3:
        return f"{s * 1e3:.1f} ms"
    return f"{s * 1e6:.1f} µs"


def n_of(n: int, one: str, many: str = "") -> str:
    """A count with its noun.

    >>> n_of(1, "op"), n_of(2000, "op"), n_of(2, "microbatch", "microbatches")
    ('1 op', '2,000 ops', '2 microbatches')
    """
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def dtype_bytes(dtype: str) -> float:
    """Bytes per element of a torch dtype given by its short name, such as ``"bfloat16"``.

    >>> dtype_bytes("bfloat16"), dtype_bytes("bool"), dtype_bytes("complex64"), dtype_bytes("float8_e4m3fn")
    (2.0, 1.0, 8.0, 1.0)
    """
    if dtype == "bool":
        return 1.0
    if dtype in ("bfloat16", "half"):
        return 2.0
    match = re.match(r"[a-z]+(\d{1,3})(?!\d)", dtype)
    if match is None:
        raise InputError(f"unknown dtype {dtype!r}; use torch's short names, such as 'float32' or 'int64'")
    return int(match.group(1)) / 8
