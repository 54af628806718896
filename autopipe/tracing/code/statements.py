"""Statements of a forward that stay whole: each becomes a function, which the forward then calls.

The root cannot stay whole itself, as other modules can, nor can one that others use the inside of. Recording
the calls is left to ``opaque_calls``; noticing that a statement needs it, to whoever raises
:class:`~.restart.KeepFunction`.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ..calls.named import Named
from ..inputs.contents import is_filled
from ..inputs.structure import flatten
from .callees import nodes
from .restart import Statement

__all__ = ["KeptStatement", "around", "definition", "rewritten", "running"]

_BODIES = ("body", "orelse", "finalbody")
_LOOPS = (ast.For, ast.While)
_BARRED = (
    ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Global, ast.Nonlocal,
    ast.Delete, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Match,
)  # fmt: skip
"""What a statement cannot do from within another function, or what makes its names hard to follow."""
_OF_FRAME = frozenset({"super", "locals", "vars", "dir", "eval", "exec", "__class__"})
_UNSET = object()
_CONTAINERS = (list, dict)


def running(is_sought: Callable[[nn.Module], bool], path: str) -> Statement | None:
    """The innermost statement that runs now of the forward of a module, the one at ``path``.

    None where it cannot be taken out of that forward.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        is_forward = code.co_argcount > 0 and code.co_name == "forward"
        owner = frame.f_locals.get(code.co_varnames[0]) if is_forward else None
        if isinstance(owner, nn.Module) and is_sought(owner):
            function, definition = _written(owner)
            if definition is not None and _is_of(code, definition, function):
                found = _innermost(definition, frame.f_lineno)
                return None if found is None else Statement(path, found.lineno, found.col_offset)
        frame = frame.f_back
    return None


def around(module: nn.Module, inner: Statement) -> Statement | None:
    """The innermost statement that one of a module's forward lies in, and that can be taken out too."""
    _, definition = _written(module)
    for node in ast.walk(definition) if definition is not None else ():
        if isinstance(node, ast.stmt) and (node.lineno, node.col_offset) == (inner.line, inner.column):
            assert definition is not None
            outer = next(filter(_can_be_taken, reversed(_around(definition.body, node))), None)
            return None if outer is None else Statement(inner.path, outer.lineno, outer.col_offset)
    return None


def rewritten(
    module: nn.Module, chosen: Sequence[Statement], on_statement: Callable[..., Any]
) -> Callable[..., Any]:
    """The forward of a module's class, in which each chosen statement is a call of ``on_statement``.

    That is given the statement as :class:`KeptStatement` and the values it reads, and gives those it leaves,
    by name. Decorators are around it as they were.
    """
    function, definition = _written(module)
    assert function is not None
    assert definition is not None
    places = {(s.line, s.column) for s in chosen}
    whole = copy.deepcopy(definition)
    whole.decorator_list = []
    taking = _Taking(whole, places, frozenset(function.__code__.co_varnames + function.__code__.co_cellvars))
    whole = taking.visit(whole)
    enter = [f"__keep_{i}" for i in range(len(taking.found))]
    around = ast.parse(f"def around({', '.join([*function.__code__.co_freevars, '__unset', *enter])}): pass")
    inner: list[Any] = [*(p.definition for p in taking.found), whole]
    around.body[0].body = inner  # type: ignore[attr-defined]
    file = function.__code__.co_filename
    compiled = compile(ast.fix_missing_locations(around), file, "exec", dont_inherit=True)
    codes = {c.co_name: c for c in _codes(next(_codes(compiled)))}
    known = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    known["__unset"] = types.CellType(_UNSET)

    def made(name: str, defaults: Any) -> types.FunctionType:
        cells = tuple(known[n] for n in codes[name].co_freevars)
        new = types.FunctionType(codes[name], function.__globals__, function.__name__, defaults, cells)
        new.__qualname__ = function.__qualname__
        return new

    for name, part in zip(enter, taking.found, strict=True):
        run = made(part.definition.name, (_UNSET,) * len(part.reads))
        known[name] = types.CellType(functools.partial(_enter, run, part, on_statement))
    out = made(whole.name, function.__defaults__)
    out.__kwdefaults__ = function.__kwdefaults__
    for within, wrapper in itertools.pairwise(reversed(_layers(module))):
        out = _around_another(wrapper, within, out)
    return out


class KeptStatement(Named):
    """A statement as a function of the values that it reads: gives, by name, what it sets and what it fills.

    Raises :class:`InputError` where it sets other names than it did when it was first called.
    """

    def __init__(self, function: types.FunctionType, part: _Part, given: tuple[str, ...]) -> None:
        shown = f"{function.__module__}.{function.__qualname__}, line {part.line}"
        super().__init__(function, f"line_{part.line}", shown)
        self.part, self.given = part, given
        self.left: tuple[str, ...] | None = None

    @property
    def hands_on(self) -> bool:
        """Whether the statement gives the module itself to other code."""
        return self.part.hands_on

    def __call__(self, *values: Any) -> dict[str, Any]:
        known = dict(zip(self.given, values, strict=True))
        held = [n for n, v in known.items() if n in self.part.used and isinstance(v, _CONTAINERS)]
        before = {n: _content(known[n]) for n in held if n not in self.part.sets}
        found = self.function(**known)
        filled = [n for n, content in before.items() if _content(found[n]) != content]
        left = {n: found[n] for n in (*self.part.sets, *filled) if n in found}
        said = tuple(f"{n} ({_kind(v)})" for n, v in left.items())
        self.left = said if self.left is None else self.left
        if said != self.left:
            raise InputError(
                f"{self.shown}: this statement leaves {', '.join(said) or 'nothing'} behind, and left "
                f"{', '.join(self.left) or 'nothing'} on the example; capture with an example on which it "
                "does the same"
            )
        return left


def _kind(value: Any) -> str:
    return "a tensor" if isinstance(value, torch.Tensor) else type(value).__name__


def _content(container: Any) -> list[int]:
    return [len(container), *map(id, flatten(container)[0])]


def _enter(
    run: types.FunctionType, part: _Part, on_statement: Callable[..., Any], known: dict[str, Any]
) -> Any:
    given = tuple(n for n in part.reads if n in known)
    return on_statement(KeptStatement(run, part, given), *(known[n] for n in given))


# -------------------------------------------------------------------- source


def _layers(module: nn.Module) -> tuple[types.FunctionType, ...]:
    """The forward of a module's class, outermost first: its decorators' functions, then what is written.

    Nothing where it is none that is written, or a decorator's function has the one inside elsewhere than in
    its closure.
    """
    found: Any = inspect.getattr_static(type(module), "forward", None)
    out: list[types.FunctionType] = []
    while isinstance(found, types.FunctionType) and found not in out:
        out.append(found)
        found = getattr(found, "__wrapped__", None)
        if found is None:
            return tuple(out)
        if not any(c.cell_contents is found for c in out[-1].__closure__ or () if is_filled(c)):
            return ()
    return ()


def _around_another(
    wrapper: types.FunctionType, inner: types.FunctionType, other: types.FunctionType
) -> types.FunctionType:
    """A decorator's function around another one than the one inside it."""
    cells = (
        types.CellType(other) if is_filled(c) and c.cell_contents is inner else c
        for c in wrapper.__closure__ or ()
    )
    code, named = wrapper.__code__, wrapper.__globals__
    new = types.FunctionType(code, named, wrapper.__name__, wrapper.__defaults__, tuple(cells))
    new.__kwdefaults__ = wrapper.__kwdefaults__
    vars(new).update({**vars(wrapper), "__wrapped__": other})
    new.__qualname__ = wrapper.__qualname__
    return new


def _written(module: nn.Module) -> tuple[types.FunctionType | None, ast.FunctionDef | None]:
    """The forward of a module's class within its decorators, and what it was made of, where that is there."""
    function = next(reversed(_layers(module)), None)
    return function, None if function is None else definition(function.__code__)


def _is_of(code: types.CodeType, definition: ast.FunctionDef, function: Any) -> bool:
    """Whether code is that of a function, or of it with statements taken out."""
    is_there = code.co_filename == function.__code__.co_filename
    return code is function.__code__ or (is_there and code.co_firstlineno == definition.lineno)


@functools.lru_cache(maxsize=1 << 8)
def definition(code: types.CodeType) -> ast.FunctionDef | None:
    """What the code of a function was made of, where that is there to read."""
    for node in nodes(code.co_filename):
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            if first == code.co_firstlineno:
                is_private = any(_is_private(n) for n in ast.walk(node))
                return None if is_private else node
    return None


def _is_private(node: ast.AST) -> bool:
    """Whether a name is one that Python writes otherwise within a class."""
    name = getattr(node, "attr", getattr(node, "id", getattr(node, "arg", None)))
    return isinstance(name, str) and name.startswith("__") and not name.endswith("__")


def _innermost(definition: ast.FunctionDef, line: int) -> ast.stmt | None:
    """The innermost statement at a line that can be taken out."""
    chain = list(_chain(definition.body, line))
    return next((s for s in reversed(chain) if _can_be_taken(s)), None)


def _chain(body: Sequence[ast.stmt], line: int) -> Iterator[ast.stmt]:
    """The statements at a line, the outermost first."""
    for statement in body:
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            yield statement
            for inner in _bodies(statement):
                yield from _chain(inner, line)


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    yield from (getattr(statement, name, []) for name in _BODIES)
    yield from (handler.body for handler in getattr(statement, "handlers", ()))


def _can_be_taken(statement: ast.stmt) -> bool:
    names = (n.id for n in ast.walk(statement) if isinstance(n, ast.Name))
    is_barred = any(isinstance(n, _BARRED) for n in ast.walk(statement)) or not _OF_FRAME.isdisjoint(names)
    return not is_barred and not _leaves_a_loop(statement, False)


def _leaves_a_loop(statement: ast.stmt, is_in_loop: bool) -> bool:
    """Whether a ``break`` or ``continue`` is about a loop that lies around the statement."""
    if isinstance(statement, (ast.Break, ast.Continue)):
        return not is_in_loop
    inside = is_in_loop or isinstance(statement, _LOOPS)
    return any(_leaves_a_loop(s, inside) for body in _bodies(statement) for s in body)


class _Names(ast.NodeVisitor):
    """How often code reads names and which it sets; ``bare`` are those it reads otherwise than for a part."""

    def __init__(self, *parts: ast.AST) -> None:
        self.read: Counter[str] = Counter()
        self.bare: set[str] = set()
        self.sets: dict[str, None] = {}
        for part in parts:
            self.visit(part)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self.read[node.id] += 1
            self.bare.add(node.id)
        else:
            self.sets[node.id] = None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.value, ast.Name):
            self.read[node.value.id] += 1
        else:
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self.read[node.target.id] += 1

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self.visit(node.iter)
        for condition in node.ifs:
            self.visit(condition)

    def visit_alias(self, node: ast.alias) -> None:
        self.sets[(node.asname or node.name).partition(".")[0]] = None


class _Part:
    """A statement taken out: the names it reads, those it sets, and those that other code uses afterwards."""

    def __init__(
        self, statement: ast.stmt, whole: ast.FunctionDef, names: frozenset[str], number: int
    ) -> None:
        own, everything = _Names(statement), _Names(*whole.body)
        is_again = any(isinstance(s, _LOOPS) for s in _around(whole.body, statement))
        outside = {n for n, times in everything.read.items() if is_again or times > own.read[n]}
        self.statement = statement
        self.line, self.column, self.used = statement.lineno, statement.col_offset, outside & names
        self.sets = tuple(n for n in own.sets if n in self.used)
        self.reads = tuple(sorted(names & {*own.read, *self.sets}))
        arguments = [*whole.args.posonlyargs, *whole.args.args]
        self.hands_on = bool(arguments) and arguments[0].arg in own.bare
        given = ", ".join(f"{n}=None" for n in self.reads)
        freed = "".join(f"\n    if {n} is __unset:\n        del {n}" for n in self.reads)
        source = f"def __line_{number}({given}):{freed}\n    return locals()"
        made = _at(ast.parse(source).body[0], statement)
        assert isinstance(made, ast.FunctionDef)
        made.body.insert(-1, statement)
        self.definition = made
        kept = f"__kept_{number}"
        back = "".join(f"\nif {n!r} in {kept}:\n    {n} = {kept}[{n!r}]" for n in sorted(self.used))
        call = ast.parse(f"{kept} = __keep_{number}(locals()){back}")
        self.call = [_at(s, statement) for s in call.body]


def _at(made: ast.stmt, statement: ast.stmt) -> ast.stmt:
    """Code that stands in the place of a statement."""
    for node in ast.walk(made):
        ast.copy_location(node, statement)
    return made


def _around(body: Sequence[ast.stmt], statement: ast.stmt) -> list[ast.stmt]:
    """The statements that a statement lies in."""
    for each in body:
        if each is statement:
            return []
        for inner in _bodies(each):
            if any(n is statement for s in inner for n in ast.walk(s)):
                return [each, *_around(inner, statement)]
    return []


class _Taking(ast.NodeTransformer):
    """Puts calls in the place of statements, which are kept in ``found``."""

    def __init__(self, whole: ast.FunctionDef, places: set[tuple[int, int]], names: frozenset[str]) -> None:
        self.whole, self.places, self.names = copy.deepcopy(whole), places, names
        self.found: list[_Part] = []

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.stmt) and (node.lineno, node.col_offset) in self.places:
            inside = ast.walk(self.whole)
            own = next(n for n in inside if isinstance(n, ast.stmt) and _is_at(n, node))
            self.found.append(_Part(own, self.whole, self.names, len(self.found)))
            return self.found[-1].call
        return self.generic_visit(node)


def _is_at(a: ast.stmt, b: ast.stmt) -> bool:
    return type(a) is type(b) and (a.lineno, a.col_offset) == (b.lineno, b.col_offset)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    return (c for c in code.co_consts if isinstance(c, types.CodeType))
