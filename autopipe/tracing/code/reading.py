"""What of a layer's result the code that calls it reads by its place alone, however much there is.

What a stage makes of that is left to ``stages.parts``.
"""

from __future__ import annotations

import ast
import functools
import os
import pathlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .callees import nodes
from .spans import span_at

__all__ = ["Place", "uncounted"]

Place = tuple[int | str, ...]
"""Indices and keys, outermost first."""

_CALLING = (f"{pathlib.Path(__file__).parents[1]}{os.sep}", torch.nn.modules.module.__file__)
"""Files whose code stands between a call of a module as it is written and what it runs."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SEE_ALL_NAMES = ("locals", "vars", "eval", "exec")


def uncounted(module: nn.Module, result: Any) -> frozenset[Place]:
    """The places of tuples, lists and dicts in a module's result that may as well have more items, or fewer.

    The code that calls the module now reads such a one by written indices and keys alone, or not at all.
    None where that code cannot be read, or hands the result on.
    """
    places = {place for place, _ in _containers(result)}
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_CALLING):
        frame = frame.f_back
    if not places or frame is None:
        return frozenset()
    at = span_at(frame.f_code, frame.f_lasti)
    call, function = _call_at(frame.f_code.co_filename, at)
    if call is None or function is None or _held(call.func, frame) is not module:
        return frozenset()
    reader = _Reader(function, result)
    reader.follow(call, ())
    return frozenset(
        p for p in places - reader.exact if not any(p[:n] in reader.all for n in range(len(p) + 1))
    )


def _containers(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """The tuples, lists and dicts within a value, and where they lie."""
    if type(value) in (tuple, list, dict):
        yield place, value
        pairs = value.items() if type(value) is dict else enumerate(value)
        for key, part in pairs:
            yield from _containers(part, (*place, key))


@functools.lru_cache(maxsize=1 << 12)
def _call_at(file: str, at: tuple[int | None, ...]) -> tuple[ast.Call | None, ast.stmt | None]:
    """The call that is written at a place of a file, and the innermost function around it."""
    written = nodes(file)
    call = next((n for n in written if isinstance(n, ast.Call) and _lies_at(n, at)), None)
    within = [n for n in written if isinstance(n, _FUNCTIONS) and call is not None and _is_around(n, call)]
    return call, max(within, key=lambda n: n.lineno, default=None)


def _lies_at(node: ast.expr, at: Sequence[int | None]) -> bool:
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset) == tuple(at)


def _is_around(function: ast.stmt, node: ast.expr) -> bool:
    return function.lineno <= node.lineno and (node.end_lineno or 0) <= (function.end_lineno or 0)


def _held(node: ast.expr, frame: types.FrameType) -> Any:
    """The module that names and attributes of modules stand for; None for all else."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _held(node.value, frame)
        return owner._modules.get(node.attr) if isinstance(owner, nn.Module) else None
    return None


@functools.lru_cache(maxsize=1 << 10)
def _written_in(function: ast.stmt) -> tuple[dict[ast.AST, ast.AST], list[ast.Name], frozenset[str]]:
    """What each thing written in a function lies in, its names, and those that it shares with others."""
    parents = {c: n for n in ast.walk(function) for c in ast.iter_child_nodes(n)}
    names = [n for n in parents if isinstance(n, ast.Name)]
    shared = (x for n in parents if isinstance(n, (ast.Global, ast.Nonlocal)) for x in n.names)
    return parents, names, frozenset(shared)


class _Reader:
    """Follows a value through the names of a function.

    Of the places in ``all`` something else may be done than reading by written indices and keys; those that
    are ``exact`` are unpacked.
    """

    def __init__(self, function: ast.stmt, result: Any) -> None:
        self.held = dict(_containers(result))
        self.all: set[Place] = set()
        self.exact: set[Place] = set()
        self.parents, self.names, self.shared = _written_in(function)
        self.sees_all = any(n.id in _SEE_ALL_NAMES for n in self.names)
        self.met: set[tuple[str, Place]] = set()

    def follow(self, node: ast.expr, place: Place) -> None:
        """What is done with the value of an expression, which lies at a place of the result."""
        if place not in self.held:
            return
        parent = self.parents[node]
        if isinstance(parent, ast.Subscript) and parent.value is node and isinstance(parent.ctx, ast.Load):
            key = parent.slice.value if isinstance(parent.slice, ast.Constant) else None
            held = self.held[place]
            is_there = key in held if isinstance(held, dict) else type(key) is int and key < len(held)
            if isinstance(key, (int, str)) and is_there:
                self.follow(parent, (*place, key))
                return
        elif isinstance(parent, ast.Expr):
            return
        elif isinstance(parent, ast.Assign) and parent.value is node:
            for target in parent.targets:
                self.give(target, place)
            return
        self.all.add(place)

    def give(self, target: ast.expr, place: Place) -> None:
        """What is assigned to is given what lies at a place."""
        if place not in self.held:
            return
        held, parts = self.held[place], getattr(target, "elts", ())
        if len(parts) == len(held) and not isinstance(held, dict):
            self.exact.add(place)
            for i, part in enumerate(parts):
                self.give(part, (*place, i))
        elif not isinstance(target, ast.Name) or target.id in self.shared or self.sees_all:
            self.all.add(place)
        elif (target.id, place) not in self.met:
            self.met.add((target.id, place))
            for name in self.names:
                if name.id == target.id and isinstance(self.parents[name], (ast.AugAssign, ast.Delete)):
                    self.all.add(place)
                elif name.id == target.id and isinstance(name.ctx, ast.Load):
                    self.follow(name, place)
