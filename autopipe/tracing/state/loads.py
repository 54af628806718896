"""The names that code loads, told apart by where from: read of its bytes.

``dis.get_instructions`` takes a hundred times as long.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Collection, Iterator, Mapping

__all__ = ["attributes_loaded", "attributes_stored", "globals_loaded", "only_adds"]

_EXTENDED = dis.opmap["EXTENDED_ARG"]


def _shifts(shift: int, *names: str) -> dict[int, int]:
    return {dis.opmap[name]: shift for name in names if name in dis.opmap}


_ATTRIBUTES = _shifts(int(sys.version_info >= (3, 12)), "LOAD_ATTR", "LOAD_METHOD")
"""By how much an instruction shifts the number of its name: the bit below tells how it is loaded."""
_STORED = _shifts(0, "STORE_ATTR")
_GLOBALS = _shifts(1, "LOAD_GLOBAL") | _shifts(
    0, "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL", "IMPORT_NAME"
)

_NAMING = frozenset(dis.hasname)
_ADDING = frozenset({"add", "append", "appendleft", "extend"})


def attributes_loaded(code: types.CodeType) -> Iterator[str]:
    """The attributes that code loads, in its order."""
    return _loaded(code, _ATTRIBUTES)


def attributes_stored(code: types.CodeType) -> Iterator[str]:
    """The attributes that code sets, in its order."""
    return _loaded(code, _STORED)


def globals_loaded(code: types.CodeType) -> Iterator[str]:
    """The names that code has of its own file, or puts there, and those of the modules that it imports."""
    return _loaded(code, _GLOBALS)


def only_adds(code: types.CodeType, names: Collection[str]) -> bool:
    """Whether code does nothing with what it has under some names but add to it: ``losses.append(x)``.

    That of functions within it included.
    """
    if not {*code.co_consts}.isdisjoint(names):  # by which it may ask for them
        return False
    if not {*code.co_names}.isdisjoint(names):
        steps = [*dis.get_instructions(code)]
        for step, then in zip(steps, [*steps[1:], None], strict=True):
            is_added = then is not None and then.opcode in _ATTRIBUTES and then.argval in _ADDING
            if step.opcode in _NAMING and step.argval in names and not is_added:
                return False
    return all(only_adds(inner, names) for inner in code.co_consts if isinstance(inner, types.CodeType))


def _loaded(code: types.CodeType, shifts: Mapping[int, int]) -> Iterator[str]:
    number = 0
    for op, part in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        number = number << 8 | part
        if (shift := shifts.get(op)) is not None:
            yield code.co_names[number >> shift]
        if op != _EXTENDED:
            number = 0
