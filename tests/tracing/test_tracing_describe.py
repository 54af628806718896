"""What errors say of recorded values reads as the code that makes them."""

import operator

import pytest
from torch.nn.functional import cross_entropy

from autopipe.tracing.calls.call import Call
from autopipe.tracing.calls.describe import expression

A, B, C = (Call("placeholder", name) for name in "abc")


def of(sign: str, *given: object) -> Call:
    return Call("call_function", getattr(operator, sign), given)


def test_what_is_said_by_default_is_left_out() -> None:
    loss = Call(
        "call_function", cross_entropy, (A, B), {"weight": None, "ignore_index": 0, "reduction": "mean"}
    )
    assert expression(loss) == "cross_entropy(a, b, ignore_index=0)"
    norm = Call("call_method", "norm", (A,), {"p": "fro", "dim": 1, "keepdim": False})
    assert expression(norm) == "a.norm(dim=1)"


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
