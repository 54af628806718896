"""Quantities as people write and read them: bytes, seconds, and symbolic sizes as text.

What the quantities belong to is left to the data layer.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    import sympy

__all__ = [
    "Size",
    "dtype_bytes",
    "format_bytes",
    "format_seconds",
    "parse_bytes",
    "parse_size",
    "size_at",
    "symbol",
]

Size = Any
"""An ``int`` or a sympy expression in the graph's dims (``batch``, ``seq``, …)."""

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40, "pi": 2**50}


def parse_bytes(text: str | float) -> int:
    """Bytes from ``"70GB"``, ``"16 GiB"``, ``"512MB"`` or a plain number.

    Raises :class:`InputError` for anything else.

    >>> parse_bytes("70GB"), parse_bytes("1.5 KiB"), parse_bytes(12)
    (70000000000, 1536, 12)
    """
    if isinstance(text, (int, float)):
        return int(text)
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgtp]i?)?b?\s*", text.lower())
    if match is None:
        raise InputError(f"cannot read {text!r} as bytes; write it like '70GB', '16GiB' or 17179869184")
    unit = match.group(2) or ""
    return int(float(match.group(1)) * {**_DECIMAL, **_BINARY}[unit])


def format_bytes(n: float) -> str:
    """Bytes for people, in binary units.

    >>> format_bytes(0), format_bytes(1536), format_bytes(17.2 * 2**30)
    ('0 B', '1.5 KiB', '17.2 GiB')
    """
    size = float(n)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
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


def dtype_bytes(dtype: str) -> float:
    """Bytes per element of a torch dtype given by its short name, such as ``"bfloat16"``.

    >>> dtype_bytes("bfloat16"), dtype_bytes("bool"), dtype_bytes("complex64"), dtype_bytes("float8_e4m3fn")
    (2.0, 1.0, 8.0, 1.0)
    """
    if dtype == "bool":
        return 1.0
    if dtype in ("bfloat16", "half"):
        return 2.0
    match = re.match(r"[a-z]+(\d+)", dtype)
    if match is None:
        raise InputError(f"unknown dtype {dtype!r}; use torch's short names, such as 'float32' or 'int64'")
    return int(match.group(1)) / 8


@functools.cache
def symbol(name: str) -> sympy.Symbol:
    """The sympy symbol of an input dim: a positive integer."""
    import sympy

    return sympy.Symbol(name, integer=True, positive=True)


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: _rational(a, b),
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def _rational(a: Any, b: Any) -> Any:
    import sympy

    return sympy.sympify(a) / b


def parse_size(text: int | float | str) -> Size:
    """A size from its text form, the inverse of ``str`` on a sympy expression in the dims.

    Only arithmetic, ``floor``, ``ceiling``, ``Mod``, ``Max`` and ``Min`` are read: nothing is evaluated
    as Python, so a plan file from elsewhere is safe to open. Raises :class:`InputError` otherwise.

    >>> parse_size("2*batch + 1").subs({symbol("batch"): 4})
    9
    >>> parse_size(7)
    7
    """
    if isinstance(text, (int, float)):
        return text
    try:
        return _evaluate(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as error:
        raise InputError(f"cannot read {text!r} as a size in the input dims") from error


def _evaluate(node: ast.expr) -> Size:
    import sympy

    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.Name):
        return symbol(node.id)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        functions = {f: getattr(sympy, f) for f in ("floor", "ceiling", "Mod", "Max", "Min")}
        if node.func.id in functions:
            return functions[node.func.id](*map(_evaluate, node.args))
    raise ValueError(f"{ast.dump(node)} is not arithmetic")


def size_at(size: Size, dims: Mapping[str, int]) -> float:
    """The value of a size where the input dims have the given values.

    >>> size_at(parse_size("batch*seq"), {"batch": 2, "seq": 8})
    16.0
    """
    if isinstance(size, (int, float)):
        return size
    return float(size.subs({symbol(name): value for name, value in dims.items()}))
