"""torch's global module hooks: those that only look, such as counters of operations or memory, and others.

Hooks of one module are left to ``readers``.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import logging
import types
from collections.abc import Iterator
from typing import Any

from ...torch_private import GLOBAL_HOOKS

__all__ = ["others", "tell", "unseen"]

_logger = logging.getLogger("autopipe.tracing")

_STORES = frozenset({"STORE_ATTR", "STORE_SUBSCR", "STORE_SLICE", "STORE_GLOBAL", "STORE_DEREF"})
_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"})
_WRITING = frozenset({"data", "set", "setattr", "update", "exec", "eval"})
"""Names by which code writes to what it has, besides those that end in an underscore as torch's do."""


def others() -> tuple[Any, ...]:
    """The hooks on all modules that may change what modules compute: all but those that only look.

    In a pipeline they run for the stages and for what these keep whole, which no hook that acts on what it is
    given is meant for. One that only looks is a hook of the forward whose own code returns nothing and writes
    to nothing; what is called from there is not looked into.
    """
    forward = [h for hooks in GLOBAL_HOOKS[:2] for h in hooks.values() if not _only_looks(h)]
    return (*forward, *(h for hooks in GLOBAL_HOOKS[2:] for h in hooks.values()))


@contextlib.contextmanager
def unseen() -> Iterator[None]:
    """Within it hooks that only look are not called: what runs in order to be recorded is not theirs."""
    aside = [{k: h for k, h in hooks.items() if _only_looks(h)} for hooks in GLOBAL_HOOKS[:2]]
    for hooks, held in zip(GLOBAL_HOOKS, aside, strict=False):
        for key in held:
            del hooks[key]
    try:
        yield
    finally:
        for hooks, held in zip(GLOBAL_HOOKS, aside, strict=False):
            for key, hook in sorted({**held, **hooks}.items()):  # keys count up, in the order of calls
                hooks.pop(key, None)
                hooks[key] = hook


def tell() -> None:
    """Say, once in a process, what hooks that only look see of a pipeline."""
    if any(GLOBAL_HOOKS):
        _say_once(
            "hooks on all modules (register_module_forward_hook and its like, which FLOP counters and memory "
            "trackers use) are called for this rank's stages and the layers that these keep whole, not for "
            "the other modules of the model: what they tell by module, they tell by stage"
        )


def _only_looks(hook: Any) -> bool:
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    return isinstance(code, types.CodeType) and _returns_nothing(code) and not _writes(code)


def _returns_nothing(code: types.CodeType) -> bool:
    """Whether a function ends with None wherever it ends, and is no generator or coroutine."""
    before: dis.Instruction | None = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "RETURN_CONST" and instruction.argval is not None:
            return False
        if instruction.opname == "RETURN_VALUE":
            is_none = before is not None and before.opname == "LOAD_CONST" and before.argval is None
            if instruction.is_jump_target or not is_none:
                return False
        before = instruction
    return not code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR)


def _writes(code: types.CodeType) -> bool:
    """Whether code, or code within it, may write to anything but its own variables."""
    for it in dis.get_instructions(code):
        is_in_place = it.opname.startswith("INPLACE_") or (it.opname == "BINARY_OP" and it.argrepr[-1] == "=")
        if it.opname in _STORES or is_in_place or (it.opname in _LOADS and _is_writing(str(it.argval))):
            return True
    return any(_writes(const) for const in code.co_consts if isinstance(const, types.CodeType))


def _is_writing(name: str) -> bool:
    return name in _WRITING or (name.endswith("_") and not name.endswith("__") and name != "_")


@functools.cache
def _say_once(message: str) -> None:
    _logger.warning(message)
