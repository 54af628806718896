"""Whether code only words what people are told: an error, a warning, a log.

What tells people is known by what it is, not by its name: ``log`` may be anything. Checks of data are left to
``checks``, reading frames to ``position``.
"""

from __future__ import annotations

import ast
import builtins
import functools
import inspect
import logging
import types
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from .callees import nodes
from .spans import whole_span_at

__all__ = ["CHECKERS", "called", "error_lines", "is_said", "is_told"]

CHECKERS = ("_check", "_check_value", "_check_index", "_check_tensor_all", "torch_compilable_check")
"""Names of what raises where its first argument does not hold, with the words it is given."""
_TELLERS = frozenset(
    {"_warnings", "absl", "aim", "clearml", "comet_ml", "logging", "loguru", "mlflow", "neptune", "structlog"}
    | {"tensorboardX", "tqdm", "wandb", "warnings"}
)
"""Packages whose functions, and the methods of whose objects, do nothing but tell people."""
_OF_CHECKERS = frozenset({"torch", "transformers"})
_Span = tuple[int, int, int, int]
"""First line and column of something written, and its last."""


def is_said(frame: types.FrameType) -> bool:
    """Whether what a frame is in the middle of is part of the words that people are told, or tells them."""
    here = _place(frame)
    speaking = () if here is None else _speaking(frame.f_code.co_filename, here)
    return any(call is None or _tells(call, frame) for call, _ in speaking)


def is_told(frame: types.FrameType) -> bool:
    """Whether what a frame is in the middle of is what people are told, and goes through no other code."""
    here = _place(frame)
    speaking = () if here is None else _speaking(frame.f_code.co_filename, here)
    calls = ((call, others) for call, others in speaking if call is not None)
    return any(_tells(call, frame) and all(_only_words(n, frame) for n in others) for call, others in calls)


def _place(frame: types.FrameType) -> _Span | None:
    """Where what a frame is in the middle of is written; None where its code does not say."""
    if (at := whole_span_at(frame.f_code, frame.f_lasti)) is None:
        return None
    line, end_line, column, end_column = at
    return line, column, end_line, end_column


def _only_words(call: ast.Call, frame: types.FrameType) -> bool:
    """Whether a call makes words or numbers of what it is given: Python's own, or a value's."""
    if isinstance(call.func, ast.Attribute):
        return not isinstance(_value(call.func.value, frame), (nn.Module, types.ModuleType))
    return isinstance(_value(call.func, frame), (type, types.BuiltinFunctionType))


@functools.cache
def error_lines(file: str) -> frozenset[int]:
    """The lines of a file on which the words of an error stand."""
    spans = (span for words, call in _spoken(file) if call is None for span in words)
    return frozenset(line for first, _, last, _ in spans for line in range(first, last + 1))


def called(node: ast.Call) -> str:
    """The name of what is called, without what has it."""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


@functools.cache
def _spoken(file: str) -> tuple[tuple[tuple[_Span, ...], ast.Call | None], ...]:
    """Where words may stand: those of an error, and those that some call is given."""
    return tuple((tuple(map(_span, words)), call) for words, call in _all_spoken(file) if words)


@functools.cache
def _spoken_on(file: str) -> Mapping[int, Sequence[tuple[tuple[_Span, ...], ast.Call | None]]]:
    """By line of a file, the words that may stand there, with the call that is given them."""
    out: dict[int, list[tuple[tuple[_Span, ...], ast.Call | None]]] = defaultdict(list)
    for words, call in _spoken(file):
        spans = words if call is None else (_span(call),)
        for line in sorted({n for first, _, last, _ in spans for n in range(first, last + 1)}):
            out[line].append((words, call))
    return out


@functools.lru_cache(maxsize=1 << 12)
def _speaking(file: str, here: _Span) -> tuple[tuple[ast.Call | None, tuple[ast.Call, ...]], ...]:
    """Each call that is ``here``, or is given it among its words, with those between; None for an error."""
    out: list[tuple[ast.Call | None, tuple[ast.Call, ...]]] = []
    for words, call in _spoken_on(file).get(here[0], ()):
        if any(_lies_in(here, span) for span in words) or (call is not None and here == _span(call)):
            inner = (n for n in ast.walk(call) if isinstance(n, ast.Call)) if call is not None else ()
            others = (n for n in inner if n is not call and _lies_in(here, _span(n)) and _span(n) != here)
            out.append((call, tuple(others)))
    return tuple(out)


def _all_spoken(file: str) -> Iterator[tuple[Sequence[ast.expr | ast.stmt], ast.Call | None]]:
    for node in nodes(file):
        if isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise):
            yield node.body, None  # the words may be put together before they are raised
        elif isinstance(node, (ast.Assert, ast.Raise)):
            yield [node], None
        elif isinstance(node, ast.Call):
            yield [*node.args, *(k.value for k in node.keywords)], node


def _span(node: ast.expr | ast.stmt) -> _Span:
    end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return node.lineno, node.col_offset, *end


def _lies_in(here: _Span, there: _Span) -> bool:
    return there[:2] <= here[:2] and here[2:] <= there[2:]


def _tells(call: ast.Call, frame: types.FrameType) -> bool:
    """Whether what is called does nothing but tell people, or raise with what it tells."""
    function = _value(call.func, frame)
    holder = getattr(function, "__self__", None)
    if isinstance(call.func, ast.Attribute):
        holder = _value(call.func.value, frame)
        if isinstance(call.func.value, ast.Call):
            is_logger = _value(call.func.value.func, frame) is logging.getLogger
            holder = logging.root if is_logger else None
    if isinstance(holder, (logging.Logger, logging.LoggerAdapter)) or _package(type(holder)) in _TELLERS:
        return True
    is_checker = called(call) in CHECKERS and _package(function) in _OF_CHECKERS
    return function is print or is_checker or _package(function) in _TELLERS


def _package(value: Any) -> str:
    return str(getattr(value, "__module__", None)).partition(".")[0]


def _value(node: ast.expr, frame: types.FrameType) -> Any:
    """What names and attributes of them stand for, without running code of theirs."""
    if isinstance(node, ast.Name):
        scopes = frame.f_locals, frame.f_globals, vars(builtins)
        return next((scope[node.id] for scope in scopes if node.id in scope), None)
    if isinstance(node, ast.Attribute) and (holder := _value(node.value, frame)) is not None:
        return inspect.getattr_static(holder, node.attr, None)
    return None
