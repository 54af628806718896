"""Which names code can come to ask for, where it branches on attributes of its own module that are False.

A layer that checkpoints its activations as soon as it is told to names the mode behind such a branch. Finding
the functions is left to ``own_code``.
"""

from __future__ import annotations

import bisect
import dis
import functools
import inspect
import types
from collections.abc import Callable, Collection, Sequence
from typing import Any

__all__ = ["is_method", "names_in", "names_reached"]

_ENDS = frozenset({"RAISE_VARARGS", "RERAISE", "RETURN_CONST", "RETURN_VALUE"})
_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_CHECK"})
_BESIDE = frozenset({"CACHE", "EXTENDED_ARG", "NOT_TAKEN", "TO_BOOL"})
"""Steps that change nothing in what is asked."""


def names_reached(
    function: types.FunctionType, owners: Sequence[Any], stored: Collection[str]
) -> frozenset[str]:
    """The names of globals and attributes that steps of a function ask for which may be reached.

    ``owners`` are all objects that it may be a method of; attributes that are ``stored`` by any code are not
    known. All steps are reached of one that is no method of these, catches errors or changes its first
    variable; of functions within it all are.
    """
    code = function.__code__
    steps = _steps(code)
    own = code.co_varnames[0] if code.co_argcount else ""
    is_plain = not code.co_exceptiontable and not any(_is_written(step, own) for step in steps)
    if not (own and owners and is_plain and all(is_method(function, cls) for cls in {*map(type, owners)})):
        return names_in(code)

    def is_false(name: str) -> bool:
        return name not in stored and all(_held(each, name) is False for each in owners)

    inner = (names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    reached = (steps[i] for i in _reached(steps, own, is_false))
    return frozenset(str(step.argval) for step in reached if step.opcode in dis.hasname).union(*inner)


@functools.lru_cache(maxsize=1 << 10)
def _steps(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """What code does, step by step."""
    return tuple(step for step in dis.get_instructions(code) if not _is_beside(step))


def is_method(function: types.FunctionType, cls: type) -> bool:
    """Whether a class or one that it is derived from has this function under some name."""
    return any(function is held for base in cls.__mro__ for held in vars(base).values())


def _reached(steps: Sequence[dis.Instruction], own: str, is_false: Callable[[str], bool]) -> set[int]:
    """The places of the steps that may be reached where such attributes of the variable ``own`` are False."""
    offsets = [step.offset for step in steps]
    leads = {i: bisect.bisect_left(offsets, step.argval) for i, step in enumerate(steps) if _jumps(step)}
    targets = {*leads.values()}

    def is_known(i: int) -> bool:
        if i < 2 or not targets.isdisjoint((i, i - 1)):  # what is asked may come from elsewhere
            return False
        of, asked = steps[i - 2], steps[i - 1]
        is_own = of.opname in _LOADS and of.argval == own
        return is_own and asked.opname == "LOAD_ATTR" and is_false(str(asked.argval))

    found, todo = set[int](), [0]
    while todo:
        i = todo.pop()
        if i in found or i == len(steps):
            continue
        found.add(i)
        name = steps[i].opname
        is_asked = "_IF_FALSE" in name or "_IF_TRUE" in name
        ways = [i + 1] if name not in _ENDS and (is_asked or not name.startswith("JUMP")) else []
        if is_asked and is_known(i):
            ways = [leads[i] if "_IF_FALSE" in name else i + 1]
        elif i in leads:
            ways.append(leads[i])
        todo += ways
    return found


@functools.lru_cache(maxsize=1 << 12)
def names_in(code: types.CodeType) -> frozenset[str]:
    """The names that code asks for, that within it as well."""
    inner = (names_in(each) for each in code.co_consts if isinstance(each, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _jumps(step: dis.Instruction) -> bool:
    return step.opcode in dis.hasjrel or step.opcode in dis.hasjabs


def _is_beside(step: dis.Instruction) -> bool:
    return step.opname in _BESIDE or (step.opname == "COPY" and step.arg == 1)


def _is_written(step: dis.Instruction, variable: str) -> bool:
    """Whether a step changes a variable: from Python 3.13 on one may change two, or look at another, too."""
    variables = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    is_writing = step.opname.startswith(("STORE_", "DELETE_"))
    return is_writing and variable in variables[: step.opname.count("STORE_") or 1]


def _held(owner: Any, name: str) -> Any:
    """What an object has under a name, if none of its code is asked for that."""
    if getattr(type(owner), "__getattribute__", None) is not object.__getattribute__:
        return None
    return vars(owner).get(name, inspect.getattr_static(type(owner), name, None))
