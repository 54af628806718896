"""Where what code is in the middle of is written is found once."""

import types

from autopipe.tracing.code import spans
from autopipe.tracing.code.spans import span_at


def two_calls(x):
    return max(x, len(str(x)))


def test_spans_are_those_that_python_tells(monkeypatch):
    monkeypatch.setattr(spans, "_known", {})
    code = two_calls.__code__
    told = [*code.co_positions()]
    for _ in range(2):
        assert [span_at(code, 2 * place) for place in range(len(told))] == told
    assert len(spans._known) == len(told)


def test_code_that_is_let_go_of_is_not_taken_for_other_code_in_its_place(monkeypatch):
    known = {}
    monkeypatch.setattr(spans, "_known", known)

    def made(n_lines):
        return types.FunctionType(compile("\n" * n_lines + "x = 1", "made", "exec"), {}).__code__

    assert [span_at(made(n), 2)[0] for n in range(50)] == [*range(1, 51)]
