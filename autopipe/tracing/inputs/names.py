"""Names for arguments and for what is computed of them, which fx and generated code keep as they are.

Which names that are is left to ``arguments`` and ``modes``.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

__all__ = ["Namer"]

_RESERVED = {*keyword.kwlist, *dir(builtins), "self", "torch", "device", "inf", "nan", "NoneType"}
_RESERVED |= {"fx_pytree", "pytree", "math", "operator", "typing"}


class Namer:
    """Unique identifiers from hints, in the way of fx: another gives the same names for them."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self.taken = dict.fromkeys(taken, 0)

    def __call__(self, hint: str) -> str:
        base = re.sub(r"\W", "_", hint, flags=re.ASCII).strip("_") or "value"
        if base[0].isdecimal():
            base = f"_{base}"
        name = base
        while name in self.taken or name in _RESERVED:
            self.taken[base] = self.taken.get(base, 0) + 1
            name = f"{base}_{self.taken[base]}"
        self.taken.setdefault(name, 0)
        return name
