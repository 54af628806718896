"""The names that code loads, told apart by where from: read of its bytes.

``dis.get_instructions`` takes a hundred times as long.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterator, Mapping

__all__ = ["attributes_loaded", "attributes_stored", "globals_loaded"]

_EXTENDED = dis.opmap["EXTENDED_ARG"]


def _shifts(shift: int, *names: str) -> dict[int, int]:
    return {dis.opmap[name]: shift for name in names if name in dis.opmap}


_ATTRIBUTES = _shifts(int(sys.version_info >= (3, 12)), "LOAD_ATTR", "LOAD_METHOD")
"""By how much an instruction shifts the number of its name: the bit below tells how it is loaded."""
_STORED = _shifts(0, "STORE_ATTR")
_GLOBALS = _shifts(1, "LOAD_GLOBAL") | _shifts(
    0, "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"
)


def attributes_loaded(code: types.CodeType) -> Iterator[str]:
    """The attributes that code loads, in its order."""
    return _loaded(code, _ATTRIBUTES)


def attributes_stored(code: types.CodeType) -> Iterator[str]:
    """The attributes that code sets, in its order."""
    return _loaded(code, _STORED)


def globals_loaded(code: types.CodeType) -> Iterator[str]:
    """The names that code has of its own file, or puts there, and those of the modules that it imports."""
    return _loaded(code, _GLOBALS)


def _loaded(code: types.CodeType, shifts: Mapping[int, int]) -> Iterator[str]:
    number = 0
    for op, part in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        number = number << 8 | part
        if (shift := shifts.get(op)) is not None:
            yield code.co_names[number >> shift]
        if op != _EXTENDED:
            number = 0
