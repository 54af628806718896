"""Callables under names that generated code can hold, and the names of functions for people.

What torch's functions do is left to ``functions``.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ... import torch_private
from ...torch_private import is_operator
from ..inputs.structure import Spec, unflatten

if TYPE_CHECKING:
    from .call import Call

__all__ = [
    "CustomFunction", "Named", "Rebuild", "Setter", "held_by", "is_code", "is_users_operator", "nameable",
    "qualified_name", "unnamed",
]  # fmt: skip

_LIBRARIES = frozenset({"torch", "numpy", __name__.partition(".")[0]})
_OPERATORS = frozenset({"aten", "prim", "prims", "quantized", "torchvision"})
"""The namespaces of operators that do for each row the same, however many there are."""


def nameable(func: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself where generated code can find it by name, else wrapped so that it can."""
    return func if _resolves(func) else Named(func)


def qualified_name(func: Callable[..., Any]) -> str:
    """The dotted name of a function, for people."""
    if isinstance(func, Named):
        return func.shown
    try:
        return torch_private.qualified_name(func)
    except (RuntimeError, AttributeError):
        return getattr(func, "__qualname__", type(func).__qualname__)


def is_code(target: Any) -> bool:
    """Whether what a call calls is code that stays whole, of which a recording shows nothing inside."""
    if isinstance(target, types.FunctionType):
        return target.__module__.partition(".")[0] not in _LIBRARIES
    return isinstance(target, Named) or is_users_operator(target)


def is_users_operator(target: Any) -> bool:
    """Whether what is called is an operator that is not torch's: kernel and backward may be any code."""
    return is_operator(target) and target.namespace not in _OPERATORS


def unnamed(target: Any) -> Any:
    """What stands under a name, as math's functions do in a recording; else the target itself."""
    return target.function if type(target) is Named else target


def _resolves(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if getattr(builtins, name, None) is func or (getattr(func, "__module__", None) == "_operator"):
        return True
    if is_operator(func):
        return True
    root, *rest = qualified_name(func).split(".")
    found: Any = sys.modules.get(root)
    for atom in rest:
        found = getattr(found, atom, None)
    return found is func


class Named:
    """A callable under a name that generated code can hold."""

    __module__ = "autopipe.tracing.calls.named"

    def __init__(self, function: Callable[..., Any], name: str = "", shown: str = "") -> None:
        self.function = function
        plain = name or getattr(function, "__name__", type(function).__name__)
        self.__name__ = "".join(c if c.isalnum() else "_" for c in plain).strip("_") or "function"
        self.__qualname__ = self.__name__
        module = getattr(function, "__module__", None) or ""
        self.shown = shown or f"{module}.{getattr(function, '__qualname__', plain)}".lstrip(".")

    @property
    def holds(self) -> Any:
        """The plain values that it goes by beside its arguments, in a form that compares."""
        return ()

    @property
    def code(self) -> Sequence[tuple[Any, Any]]:
        """What a call runs, each with what has the attributes that it names, or nothing."""
        function = self.function
        return function.code if isinstance(function, Named) else [(function, None)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        # generated code has one name for equals: what holds more than its function is equal to itself alone
        is_function = type(self) is Named and type(other) is Named
        return self is other or (is_function and self.function is other.function)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), id(self.function)))


def held_by(target: Any) -> Any:
    """The plain values that what a call calls goes by beside its arguments, in a form that compares."""
    return target.holds if isinstance(target, Named) else ()


class Rebuild(Named):
    """Puts leaves back into a structure that fx cannot write down, such as a dataclass."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(lambda *leaves: unflatten(spec, leaves), spec.type.__name__, spec.type.__qualname__)
        self.spec = spec

    @property
    def holds(self) -> Any:
        return self.spec


class Setter(Named):
    """A function of a module, its first argument: code outside sets by it what the module goes by."""


def place_of(call: Call) -> str:
    """The path of the module that a call runs, or sets something of."""
    return str(call.args[0].target) if isinstance(call.target, Setter) else call.path


def are_nested(a: str, b: str) -> bool:
    """Whether of two modules, by their paths, one is the other or inside of it."""
    return a == b or a.startswith(f"{b}.") or b.startswith(f"{a}.")


class CustomFunction(Named):
    """``apply`` of an ``autograd.Function``, whose backward is the user's."""

    def __init__(self, cls: type) -> None:
        super().__init__(cls.apply, cls.__name__, f"{cls.__module__}.{cls.__qualname__}.apply")  # type: ignore[attr-defined]
        self.cls = cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.cls.apply(*args, **kwargs)  # type: ignore[attr-defined]
