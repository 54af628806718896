"""What a forward keeps for people alone: it puts that into attributes which no code that calls run reads.

``self.last = loss.item()``, ``self.losses.append(float(loss))``, ``self.meter.update(loss.item())``. What
people are told at once is left to ``messages``.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import os
import pathlib
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..state.global_names import codes_in, is_foreign, names_in
from ..state.loads import attributes_loaded
from .callees import nodes
from .spans import whole_span_at

__all__ = ["NamesRead", "kept_in"]

_OWN = f"{pathlib.Path(__file__).parents[1]}{os.sep}"
"""Where code lies that only stands on the model's classes while it is recorded."""
_TORCHS = f"{pathlib.Path(torch.__file__).parent}{os.sep}"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

_BY_TEXT = frozenset({"getattr", "hasattr", "attrgetter", "__getattribute__"})
_ALL = frozenset({"vars", "__dict__", "locals", "eval", "exec", "__getstate__", "deepcopy"})
"""Names by which code may come by an attribute without its name."""
_TELLING = frozenset({"critical", "debug", "error", "exception", "info", "log", "print", "warn", "warning"})
_ASIDE = frozenset({"__init__", "__repr__", "__str__", "extra_repr", "__getstate__", "__setstate__"})
"""Methods that no call of a model runs."""


class NamesRead:
    """The names of attributes that a model's calls may read, as its modules' code and hooks are.

    What is read only to be kept where nothing reads it, or to be told, is not.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __contains__(self, name: str) -> bool:
        return self._sees_all or name in self._names

    @functools.cached_property
    def _sees_all(self) -> bool:
        return any(map(_asks_for_all, self._codes))

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        each = [*map(_read_in, self._codes)]
        found = set[str]().union(*(plainly for plainly, _ in each))
        kept = [pair for _, pairs in each for pair in pairs]
        while more := {name for name, places in kept if name not in found and not found.isdisjoint(places)}:
            found |= more
        return frozenset(found)

    @functools.cached_property
    def _codes(self) -> list[types.CodeType]:
        """The code that calls may run: ``forward``, hooks, and what these ask for by name, in turn."""
        modules = [*self._model.modules()]
        methods: dict[str, list[Any]] = defaultdict(list)
        for cls in {*map(type, modules)}:
            for each in itertools.takewhile(lambda c: c is not nn.Module, cls.__mro__):
                for name, value in vars(each).items():
                    methods[name].append(value)
        waiting = [v for n, values in methods.items() if n == "forward" or _is_special(n) for v in values]
        waiting += (h for m in modules for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values()))
        waiting += (v for m in modules for v in vars(m).values() if callable(v))
        found: dict[types.CodeType, None] = {}
        while waiting:
            value = waiting.pop()
            known = getattr(inspect.unwrap(value) if callable(value) else value, "__globals__", {})
            for code in codes_in(value):
                if code not in found and not code.co_filename.startswith(_OWN):
                    found[code] = None
                    names = names_in(code)
                    waiting += (v for n in names for v in methods.get(n, ()))
                    waiting += (v for n in names if _is_own(v := known.get(n)))
        return [*found]


def _asks_for_all(code: types.CodeType) -> bool:
    """Whether code of a user's may come by any attribute; torch's own gives what it is asked for by name."""
    if code.co_filename.startswith(_TORCHS):
        return False
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return not _ALL.isdisjoint(code.co_names) or any(map(_asks_for_all, inner))


def _is_own(value: Any) -> bool:
    """Whether a value of a file is code, and neither torch's nor Python's."""
    return callable(value) and not is_foreign(getattr(value, "__module__", None))


def _is_special(name: str) -> bool:
    return name.startswith(("__", "<")) and name not in _ASIDE


@functools.lru_cache(maxsize=1 << 12)
def _read_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[tuple[str, tuple[str, ...]]]]:
    """The attributes that code asks for; and those that it asks for to keep something, with where it does."""
    file = _file(code.co_filename)
    lines = {line for _, _, line in code.co_lines() if line is not None}
    written = [n for line in lines for n in file.attributes.get(line, ())]
    plainly = {*attributes_loaded(code)} - {n.attr for n in written}
    if not _BY_TEXT.isdisjoint(code.co_names):
        plainly.update(c for c in code.co_consts if isinstance(c, str))
    kept = set()
    for node in written:
        if not isinstance(node.ctx, ast.Load) or id(node) in file.places or file.is_told(node):
            continue
        if within := file.places_around(node):
            kept.add((node.attr, within))
        else:
            plainly.add(node.attr)
    return frozenset(plainly), frozenset(kept)


def kept_in(frame: types.FrameType, paths: Mapping[int, str], read: NamesRead) -> str:
    """The attribute, by path, into which alone goes what a frame is in the middle of computing; or ""."""
    if (at := whole_span_at(frame.f_code, frame.f_lasti)) is None:
        return ""
    line, end_line, column, end_column = at
    span = (line, column), (end_line, end_column)
    around, later = _keeping(frame.f_code.co_filename, span)
    for keeping in around:
        if shown := _shown(keeping, frame, paths, read):
            return shown
    found = [_shown(keeping, frame, paths, read) for keeping in later]
    return ", ".join(dict.fromkeys(found)) if all(found) else ""


@functools.lru_cache(maxsize=1 << 12)
def _keeping(file: str, span: _Span) -> tuple[tuple[_Keeping, ...], tuple[_Keeping, ...]]:
    """The statements that keep what is written somewhere; and those that keep alone what is named there."""
    written = _file(file)
    around = tuple(k for k in written.keeping if _lies_in(span, k.value))
    named = next(((name, value) for name, value in written.named if _lies_in(span, value)), None)
    uses = written.uses_of(*named) if named is not None else ()
    is_only = all(written.places_around(use) or written.is_told(use) for use in uses)
    within = (k for use in uses for k in written.keeping if _lies_in(_span(use), k.value))
    return around, tuple(within) if is_only else ()


def _shown(keeping: _Keeping, frame: types.FrameType, paths: Mapping[int, str], read: NamesRead) -> str:
    """The attribute, by path, that a statement of a frame keeps something in; "" where it may be read."""
    place = keeping.place
    owner = frame.f_locals.get(place.value.id) if isinstance(place.value, ast.Name) else None
    if not isinstance(owner, nn.Module) or id(owner) not in paths:
        return ""
    if place.attr in read or not _is_plain(owner, place.attr, keeping.statement):
        return ""
    return f"{paths[id(owner)]}.{place.attr}".lstrip(".")


def _is_plain(owner: nn.Module, name: str, statement: ast.stmt) -> bool:
    """Whether an attribute is no parameter, buffer or module, nor a tensor that is written to."""
    if any(name in held for held in (owner._parameters, owner._buffers, owner._modules)):
        return False
    held = vars(owner).get(name)
    return not isinstance(held, (Tensor, nn.Module)) or isinstance(statement, ast.Assign)


@dataclasses.dataclass(frozen=True, slots=True)
class _Keeping:
    """A statement that only keeps something, what it keeps, and the attribute it does in."""

    statement: ast.stmt
    value: ast.expr
    place: ast.Attribute


class _File:
    """What is written in a file: statements ``keeping`` something, values that are ``named`` by themselves,
    and the ``attributes`` by line."""

    def __init__(self, file: str) -> None:
        written = nodes(file)
        self.attributes: dict[int, list[ast.Attribute]] = defaultdict(list)
        for node in written:
            if isinstance(node, ast.Attribute):
                self.attributes[node.lineno].append(node)
        self.keeping = [k for n in written for k in _keepings(n)]
        self.named = [
            (n.targets[0].id, n.value)
            for n in written
            if isinstance(n, ast.Assign) and len(n.targets) == 1 and isinstance(n.targets[0], ast.Name)
        ]
        self.places = {id(k.place) for k in self.keeping}
        self._functions = [n for n in written if isinstance(n, _FUNCTIONS)]
        told = (n.value for n in written if isinstance(n, ast.Expr) and _tells(n.value))
        self._told = {id(n) for value in told for n in ast.walk(value)}
        self._kept: dict[int, set[str]] = defaultdict(set)
        for keeping in self.keeping:
            for node in ast.walk(keeping.value):
                self._kept[id(node)].add(keeping.place.attr)

    def is_told(self, node: ast.expr) -> bool:
        """Whether something is written as part of what people are told."""
        return id(node) in self._told

    def places_around(self, node: ast.expr) -> tuple[str, ...]:
        """The attributes in which what is computed of something is only kept."""
        return tuple(self._kept.get(id(node), ()))

    def uses_of(self, name: str, value: ast.expr) -> Sequence[ast.expr]:
        """Where a name is used in the function that gives it a value; nowhere where that is unclear."""
        around = [f for f in self._functions if _lies_in(_span(value), f)]
        if not around:
            return ()
        inner = [*ast.walk(max(around, key=lambda f: f.lineno))]
        if any(isinstance(n, (ast.Global, ast.Nonlocal)) and name in n.names for n in inner):
            return ()
        return [n for n in inner if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]


@functools.cache
def _file(name: str) -> _File:
    return _File(name)


def _keepings(node: ast.AST) -> Iterator[_Keeping]:
    if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        places = [_attribute(target) for target in targets]
        if all(places):
            yield from (_Keeping(node, node.value, place) for place in places if place is not None)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if isinstance(function, ast.Attribute) and (place := _attribute(function.value)) is not None:
            yield _Keeping(node, node.value, place)


def _tells(node: ast.expr) -> bool:
    function = node.func if isinstance(node, ast.Call) else None
    return getattr(function, "attr", getattr(function, "id", "")) in _TELLING


def _attribute(node: ast.expr) -> ast.Attribute | None:
    """The attribute of a name that an expression is, or a part of: that of ``self.losses["train"]``."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node
        node = node.func if isinstance(node, ast.Call) else node.value
    return None


_Span = tuple[tuple[int, int], tuple[int, int]]
"""The first line and column of something written, and its last."""


def _span(node: ast.expr | ast.stmt) -> _Span:
    start, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
    return start, (end[0] or node.lineno, end[1] or node.col_offset)


def _lies_in(span: _Span, node: ast.expr | ast.stmt) -> bool:
    start, end = _span(node)
    return start <= span[0] and span[1] <= end
