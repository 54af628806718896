"""Sizes as formulas: read back as they were written, and nothing but arithmetic is read, at once."""

import random
import time

import pytest
import sympy

from autopipe.errors import InputError
from autopipe.formula import parse_size, size_at, symbol

B, S = symbol("batch"), symbol("seq")


@pytest.mark.parametrize(
    "size",
    [
        B, 2 * B + 1, B * S**2 / 3 - 7, sympy.floor(S / 2) + 1, sympy.ceiling(B * S / 7), sympy.Mod(S, 3),
        sympy.Max(B, S - 4, 1), sympy.Min(B, 2 * S), 1.25e-9 * B * S**2 + 3e-6, -B + 5, 1 / B,
        sympy.floor((sympy.floor((S - 1) / 2) + 1) / 2), (B + 1) * (S - 2) ** 2, S // 2 % 3,
    ],
    ids=str,
)  # fmt: skip
def test_a_size_is_read_back_as_it_was_written(size):
    read = parse_size(str(size))
    for dims in ({"batch": 3, "seq": 10}, {"batch": 8, "seq": 129}):
        assert size_at(read, dims) == pytest.approx(size_at(size, dims), rel=1e-12)
    assert str(read) == str(size)


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "batch +", "(batch", "batch)", "__import__('os')", "batch.real", "batch[0]", "lambda: 1",
        "9**9**9**9", "2**999", "batch**batch", "(batch**9)**9", "1/0", "batch/(seq - seq)", "5 % 0",
        "Mod(batch, 0)", "Max()", "floor(1, 2)", "exp(batch)", "sqrt(batch)", "batch batch", "1e999",
        "99999999999999999999", "(" * 5000, "-" * 5000, "Max(" * 20 + "1" + ")" * 20, "ba\ntch?", "é",
        "x" * 65, None, [], {"a": 1}, True, float("nan"), float("inf"), b"batch",
    ],
    ids=lambda t: repr(t)[:30],
)  # fmt: skip
def test_anything_else_is_refused(text):
    with pytest.raises(InputError):
        parse_size(text)


def test_no_formula_takes_long():
    draw = random.Random(0)
    parts = [
        "batch",
        "seq",
        "7",
        "0",
        "1.5",
        "+",
        "-",
        "*",
        "/",
        "//",
        "%",
        "**",
        "(",
        ")",
        "floor(",
        "Mod(",
        "Max(",
        ",",
    ]
    slowest = 0.0
    for n in range(1500):
        text = " ".join(draw.choices(parts, k=draw.randrange(1, 25)))
        if n % 3 == 0:
            text = _grown(draw, 4)
        start = time.process_time()
        try:
            size_at(parse_size(text), {"batch": 3, "seq": 5})
        except InputError:
            pass
        except (ZeroDivisionError, TypeError):  # a formula may divide by what is zero at these dims
            assert "/" in text or "%" in text or "Mod" in text
        slowest = max(slowest, time.process_time() - start)
    assert slowest < 3


def _grown(draw: random.Random, depth: int) -> str:
    """A formula that the grammar has."""
    if not depth or draw.random() < 0.2:
        return draw.choice(("batch", "seq", "3", "64", "0.5"))
    left, right = _grown(draw, depth - 1), _grown(draw, depth - 1)
    forms = (
        "({0} + {1})",
        "({0} - {1})",
        "{0}*{1}",
        "({0})/({1})",
        "floor({0}/2)",
        "Mod({0}, 5)",
        "Max({0}, {1})",
        "({0})**2",
    )
    return draw.choice(forms).format(left, right)


def test_a_formula_of_many_layers_is_evaluated_once(monkeypatch):
    asked = []
    once = type(symbol("batch") * 2).subs
    monkeypatch.setattr(sympy.Mul, "subs", lambda self, *given: asked.append(self) or once(self, *given))
    dims = {"batch": 12_345, "seq": 7}
    assert [size_at(parse_size("3*batch*seq"), dims) for _ in range(80)] == [3 * 12_345 * 7] * 80
    assert len(asked) == 1
    assert size_at(parse_size("3*batch*seq"), {**dims, "seq": 8}) == 3 * 12_345 * 8
