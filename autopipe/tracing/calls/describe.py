"""Says in words what a recorded value is, for errors.

Deciding that there is an error is left to ``recorder`` and ``ledger``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from .call import Call
from .named import qualified_name, unnamed

__all__ = ["call_and_place", "example_of", "expression"]

_DEPTH = 4
_PLAIN = (int, float, str, type(None))
_LEVELS = (
    {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="},
    {"or_": "|"},
    {"xor": "^"},
    {"and_": "&"},
    {"add": "+", "sub": "-"},
    {"mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "matmul": "@"},
    {"pow": "**"},
)
"""Signs that bind ever closer."""
_SIGNS = {name: (sign, level) for level, signs in enumerate(_LEVELS) for name, sign in signs.items()}


def expression(value: Any, depth: int = _DEPTH) -> str:
    """A value much as source code would write it, its own inputs only so deep: ``x.sum() > 0``."""
    if isinstance(value, (tuple, list)):
        return ", ".join(expression(v, depth) for v in value)
    if not isinstance(value, Call):
        return repr(value) if isinstance(value, (int, float, str, torch.dtype, type(None))) else "…"
    if value.op in ("placeholder", "get_attr"):
        return str(value.target)
    if depth == 0:
        return "…"
    given = [*(expression(a, depth - 1) for a in value.args)]
    usual = _defaults(value.target, value.op)
    named = ((k, v) for k, v in value.kwargs.items() if not _is_usual(usual.get(k, ...), v))
    given += [f"{k}={expression(v, depth - 1)}" for k, v in named]
    name = _name(value)
    if name in _SIGNS and len(given) == 2:
        sign, level = _SIGNS[name]
        binds = [_SIGNS[n][1] if (n := _name(a)) in _SIGNS else len(_LEVELS) for a in value.args]
        # of signs that bind alike the left ones come first, and comparisons form no chain
        least = (level + (sign in ("**", *_LEVELS[0].values())), level + (sign != "**"))
        a, b = (f"({g})" if bind < to else g for g, bind, to in zip(given, binds, least, strict=True))
        return f"{a} {sign} {b}"
    if value.op == "call_method" or name == "getitem":
        owner = f"({given[0]})" if _name(value.args[0]) in _SIGNS else given[0]
        return f"{owner}[{given[1]}]" if name == "getitem" else f"{owner}.{name}({', '.join(given[1:])})"
    return f"{name}({', '.join(given)})"


def _is_usual(usual: Any, value: Any) -> bool:
    return isinstance(value, _PLAIN) and type(value) is type(usual) and value == usual


def _defaults(target: Any, op: str) -> Mapping[str, Any]:
    """What a function takes where nothing else is said, as far as Python knows."""
    called: Any = getattr(torch.Tensor, target, None) if op == "call_method" else unnamed(target)
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # of C, or a module's path
        return {}
    return {p.name: p.default for p in parameters if isinstance(p.default, _PLAIN)}


def _name(value: Any) -> str:
    """What a call calls, without where that is from."""
    if not isinstance(value, Call):
        return ""
    return (
        qualified_name(value.target).rpartition(".")[2] if value.op == "call_function" else str(value.target)
    )


def call_and_place(call: Call) -> str:
    """What a call is and where in the model's code it stands."""
    what = call.target if call.op == "call_module" else expression(call, 3)
    return f"{what} at {call.source}" if call.source else str(what)


def example_of(tensor: Any) -> str:
    """The number that a tensor of one element holds; "" for anything else, and on meta."""
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or tensor.numel() != 1:
        return ""
    return str(tensor.detach().item())
