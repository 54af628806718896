"""Numbers that a recording makes of sizes: the call behind each, and what Python went by of them.

The numbers themselves are left to ``tracked``, tensors and all other values to ``ledger``.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..calls import describe
from ..calls.call import Call, Depends, Guard
from ..calls.named import nameable
from ..code.position import Position
from ..code.restart import FollowCasts
from . import casts
from .branches import Branches
from .keys import gathered_at, sought_among
from .refs import Piece, Ref
from .tracked import Expression, TrackedInt, pinned

__all__ = ["Numbers", "TensorMethod"]

_COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
_MOST_KEYS = 64
_OF_DATA = Depends.DATA | Depends.NUMBER


class TensorMethod:
    """A tensor method that answers a number, in a size's expression."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Book(Protocol):
    """Where calls are noted."""

    at: Position
    calls: list[Call]

    def add(self, call: Call) -> Call:
        """Note a call."""

    def expect(self, value: Any, outcome: bool, source: str) -> None:
        """Let the recording check a truth."""

    def materialise(self, ref: Ref) -> Call:
        """The call of a ref."""

    def depends(self, call: Call) -> int:
        """What a call's value can change with."""


class Numbers:
    """What tracked numbers report to, and what they are in the recording.

    Who asks for a size is noted where it ``finds_askers``, as it may stay whole for the size to vary.
    """

    def __init__(self, book: Book) -> None:
        self.book, self.at = book, book.at
        self.branches: Branches | None = None
        self.guards: dict[tuple[Any, ...], Guard] = {}
        self.sizes: dict[int, dict[int, Expression]] = {}
        self.gathered: dict[Any, list[Expression]] = {}
        self.has_data, self.finds_askers = False, True
        self.behind: set[int] = set()
        self.n_seen = 0
        self.watch: Callable[[Numbers, Expression], int] | None = None

    @property
    def recording(self) -> bool:
        """Whether arithmetic on tracked numbers is to be recorded now."""
        return self.at.is_recorded

    def size(self, tensor: torch.Tensor, ref: Ref, axis: int, value: int) -> TrackedInt:
        known = self.sizes.setdefault(id(tensor), {})
        if axis not in known:
            known[axis] = Expression(TensorMethod("size"), (ref, axis), value)
        return TrackedInt.make(value, known[axis], self)

    def hold(self, tensor: torch.Tensor, ref: Ref) -> None:
        """The sizes of a tensor are taken to be what they are.

        Where code that stays whole made it of data, which may have a say in them, the graph checks it.
        """
        call = self.book.materialise(ref)
        if call.depends & Depends.INPUT and self._is_behind_a_module(call):
            for axis, value in enumerate(tensor.shape):
                self.guard(self.size(tensor, ref, axis, value).expression, value)

    def _is_behind_a_module(self, call: Call) -> bool:
        for new in self.book.calls[self.n_seen :]:
            if new.op == "call_module" or any(id(c) in self.behind for c in new.inputs):
                self.behind.add(id(new))
        self.n_seen = len(self.book.calls)
        return id(call) in self.behind

    def made(self, expression: Expression) -> int:
        """What a number that was made is more than it is, where C reads it."""
        return 0 if self.watch is None else self.watch(self, expression)

    def number(self, expression: Any) -> Any:
        """A tracked number's expression as a call; a plain number as it is."""
        if not isinstance(expression, Expression):
            return expression
        if expression.ref is None:
            operands = tuple(
                self.book.materialise(o) if isinstance(o, (Call, Piece)) else self.number(o)
                for o in expression.operands
            )
            function = expression.function
            if isinstance(function, TensorMethod):
                call = Call("call_method", function.name, operands, hint=function.name, accessor=True)
            else:
                hint = getattr(function, "__name__", "number")
                call = Call("call_function", nameable(function), operands, hint=hint)
            call.path, call.source, call.value = self.at.path, self.at.source(), expression.value
            call.is_size = True
            call.depends = Depends.SHAPE | (self.book.depends(call) & Depends.DATA)
            if any(c.is_size and c.depends & Depends.NUMBER for c in call.inputs):
                call.depends |= Depends.NUMBER
            expression.ref = self.book.add(call)
        return self.book.materialise(expression.ref)

    def guard(self, expression: Expression, outcome: Any) -> None:
        """A size became a plain value; remember to check that it still does."""
        compares = expression.function in _COMPARISONS and expression.ref is None
        is_pin = expression.function is pinned
        function = expression.function if compares or is_pin else operator.pos
        parts = expression.operands if compares or is_pin else (expression,)
        with self.at.hushed:
            operands = tuple(self.number(p) for p in parts)
        source = self.at.source()
        from_data = [o for o in operands if isinstance(o, Call) and o.depends & _OF_DATA]
        if from_data:
            self._ask_again(function, operands, outcome, source, compares, from_data[0])
            return
        key = (function, *(id(o) if isinstance(o, Call) else o for o in operands), source)
        if key not in self.guards:
            inside = self._asker(is_pin) if self.finds_askers else None
            self.guards[key] = Guard(function, operands, outcome, self.at.path, source, inside, is_pin)

    def _asker(self, is_pin: bool) -> Any:
        """The function of the model's code, or statement, that asks for a size, or settles on it."""
        return self.at.running() if is_pin else self.at.innermost()

    def is_size(self, call: Call, axis: int, number: Call) -> Guard | None:
        """The guard that says that a number is the size of a call's tensor along an axis, if there is one."""

        def is_of_tensor(operand: Any) -> bool:
            is_asked = isinstance(operand, Call) and operand.op == "call_method" and operand.target == "size"
            return is_asked and len(operand.args) == 2 and operand.args[0] is call and operand.args[1] == axis

        for guard in self.guards.values():
            is_equal = (guard.function, guard.outcome) in ((operator.eq, True), (operator.ne, False))
            is_of_number = is_equal and any(o is number for o in guard.operands)
            if is_of_number and any(map(is_of_tensor, guard.operands)):
                return guard
        return None

    def stay(self, guard: Guard) -> None:
        """What has gone by a guard is right only where it holds."""
        key = next(key for key, held in self.guards.items() if held is guard)
        self.guards[key] = dataclasses.replace(guard, stays=True)

    def _ask_again(
        self, function: Any, operands: Any, outcome: Any, source: str, compares: bool, from_data: Call
    ) -> None:
        """A number in the data became a plain value: checked or asked for at each run, or refused."""
        if compares and self.at.is_check(source):
            call = Call("call_function", function, operands, hint="check", path=self.at.path, source=source)
            call.depends, call.value = self.book.depends(call), outcome
            self.book.expect(self.book.add(call), outcome, source)
            return
        if self.branches is not None:
            read = Call("call_function", function, operands, path=self.at.path, source=source)
            read.depends, read.reads = self.book.depends(read), frozenset()
            with self.at.hushed:
                branch = self.branches.read(read, lambda: outcome, is_forceable=False)
            if branch is not None:
                return
        self.at.refuse(Depends.INPUT, f"{describe.expression(from_data)} ({from_data.value} here)", source)

    def hold_sizes(self, call: Call) -> None:
        """What is made of sizes goes where it is not followed: they stay as they are."""
        waiting, seen = [call], {id(call)}
        while waiting:
            for given in waiting.pop().inputs:
                if id(given) in seen:
                    continue
                seen.add(id(given))
                if given.is_size:
                    known = Expression(None, (), given.value, ref=given)
                    self.guard(Expression(pinned, (known,), given.value), given.value)
                else:
                    waiting.append(given)

    def cast(self, name: str) -> None:
        """A tracked number is about to be cast: where the code that does can be followed, it is."""
        module = casts.module_casting(name)
        if module is not None:
            raise FollowCasts(module)

    def say(self, expression: Expression, outcome: Any) -> None:
        """A number becomes part of a text, which is not followed, unless it only tells people."""
        if not self.at.is_said():
            self.guard(Expression(pinned, (expression,), outcome), outcome)

    def look_up(self, expression: Expression, outcome: Any) -> None:
        """A number is a key: which is found depends on it, and that none is."""
        if self.has_data:
            with self.at.hushed:
                number = self.number(expression)
            if isinstance(number, Call) and number.depends & _OF_DATA:
                self.guard(expression, outcome)
                return
        if (place := gathered_at()) is not None:
            others = self.gathered.setdefault(place, [])
            for other in others[-_MOST_KEYS:]:
                self.guard(
                    Expression(operator.eq, (expression, other), is_one := outcome == other.value), is_one
                )
            others.append(expression)
        with self.at.hushed:  # some kinds of dict look a key up to give the one behind it
            keys = sought_among()
        if keys is None or len(keys) > _MOST_KEYS:
            self.guard(Expression(pinned, (expression,), outcome), outcome)
        elif outcome not in keys:
            for key in keys:
                self.guard(Expression(operator.eq, (expression, key), False), False)
