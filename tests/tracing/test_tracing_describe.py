"""What errors say of recorded values reads as the code that makes them."""

import operator

import pytest

from autopipe.tracing.calls.call import Call
from autopipe.tracing.calls.describe import expression

A, B, C = (Call("placeholder", name) for name in "abc")


def of(sign: str, *given: object) -> Call:
    return Call("call_function", getattr(operator, sign), given)


@pytest.mark.parametrize(
    "text",
    [
        "(1 - a) * b",
        "1 - a * b",
        "a - (b - c)",
        "a - b - c",
        "a / (b * c)",
        "a * b / c",
        "(a + b) ** 2",
        "(a ** b) ** c",
        "a ** b ** c",
        "(a > b) == c",
        "(a > b) & (c > 0)",
        "a + b > c",
        "a @ (b + c)",
        "((a + b) * c).sum(1)",
        "(a + b)[0]",
    ],
)
def test_brackets_stand_where_they_are_needed(text: str) -> None:
    class Value:
        """Makes a call of each sign that it meets."""

        def __init__(self, call: Call) -> None:
            self.call = call

    def made(name: str, swapped: bool = False):
        def method(self: Value, other: object) -> Value:
            given = self.call, other.call if isinstance(other, Value) else other
            return Value(of(name, *(given[::-1] if swapped else given)))

        return method

    for name in ("add", "sub", "mul", "truediv", "pow", "matmul", "gt", "eq", "and", "getitem"):
        setattr(Value, f"__{name}__", made("and_" if name == "and" else name))
    Value.__rsub__ = made("sub", swapped=True)
    Value.sum = lambda self, axis: Value(Call("call_method", "sum", (self.call, axis)))
    value = eval(text, {"a": Value(A), "b": Value(B), "c": Value(C)})
    assert expression(value.call) == text
