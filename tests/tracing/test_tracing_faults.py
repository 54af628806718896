"""Errors of a model's code are told from autopipe's own, which are no answers."""

from __future__ import annotations

import operator
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.errors import CaptureError, InputError
from autopipe.tracing import capture
from autopipe.tracing.calls import faults
from autopipe.tracing.calls.faults import faults_told, of_models, raise_again
from autopipe.tracing.calls.named import Named
from autopipe.tracing.rows.among_many import RowsMet
from autopipe.tracing.rows.tail import join


def asked(call: Callable[[], Any]) -> str:
    """What a call ends in where its errors are answers; raises those that are none."""
    try:
        call()
    except of_models() as error:
        return type(error).__name__
    return "nothing"


def own(source: str) -> Any:
    """A function ``run`` as if it were autopipe's."""
    place, space = pathlib.Path(faults.__file__).with_name("made.py"), {"__name__": "autopipe.made"}
    exec(compile(f"import json, statistics, torch\n{source}", str(place), "exec"), space)
    return space["run"]


class Unready(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.no_such_attribute


def test_what_a_models_code_raises_is_an_answer() -> None:
    assert asked(lambda: Unready()(torch.ones(2))) == "AttributeError"
    assert asked(lambda: torch.ones(2) + "x") == "TypeError"
    assert asked(lambda: Named(torch.add)(None)) == "TypeError"
    assert asked(lambda: Named(lambda: torch.ones(2) @ torch.ones(3))()) == "RuntimeError"


def test_what_a_models_code_raised_is_one_when_it_is_raised_again() -> None:
    with pytest.raises(AttributeError) as caught:
        Unready()(torch.ones(2))
    assert asked(lambda: raise_again(caught.value)) == "AttributeError"
    assert asked(lambda: raise_again(AssertionError("of a model"))) == "AssertionError"


def test_what_autopipes_code_lacks_is_no_answer() -> None:
    with pytest.raises(AttributeError, match="_firsts"):
        asked(lambda: RowsMet.kept(object(), "ab"))  # type: ignore[arg-type]


FAULTS = {
    "KeyError": "def run(): return {}['a']",
    "IndexError": "def run(): return [][0]",
    "ValueError": "def run(): a, b = [1]",
    "ZeroDivisionError": "def run(): return 1 // 0",
    "OverflowError": "def run(): return int(float('inf'))",
    "UnboundLocalError": "def run():\n    if False: a = 1\n    return a",
    "RecursionError": "def run(): return run()",
    "StopIteration": "def run(): return next(iter([]))",
    "RuntimeError": "def run(): return [*(next(iter([])) for _ in range(2))]",  # a generator's StopIteration
    "StatisticsError": "def run(): return statistics.mean([])",
    "JSONDecodeError": "def run(): return json.loads('x')",
    "AssertionError": "def run(): assert not run",
    "TypeError": "def run(): return torch.nn.functional.linear(None, None)",
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_every_kind_are_autopipes_own(name: str) -> None:
    """Also where a library has made them of what autopipe's code gave it."""
    run = own(FAULTS[name])
    with pytest.raises((Exception,)) as raised:
        asked(run)
    assert type(raised.value).__name__ == name
    with (
        pytest.raises(CaptureError, match=r"fault of autopipe's own, at tracing/calls/made\.py:\d+"),
        faults_told(),
    ):
        run()


def nested(n: int) -> int:
    return nested(n + 1)


ANSWERS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "KeyError": ("def run(): raise KeyError('a')", ()),
    "ValueError": (
        "def run(a):\n    try: a()\n    except IndexError: raise ValueError from None",
        (lambda: [][0],),
    ),
    "IndexError": ("def run(function, *args): return function(*args)", (operator.getitem, [], 0)),
    "ZeroDivisionError": ("def run(function): return function(1)", (lambda n: n / 0,)),
    "RecursionError": ("def run(function): return function(1)", (nested,)),
    "StatisticsError": (
        "def run(function, *args): return function(*args)",
        (__import__("statistics").mean, []),
    ),
    "JSONDecodeError": ("def run(function): return function('x')", (lambda x: __import__("json").loads(x),)),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_raised_on_purpose_or_by_what_is_given_is_an_answer(name: str) -> None:
    source, args = ANSWERS[name]
    run = own(source)
    assert asked(lambda: run(*args)) == name


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert len(x) > 0
        return x.tanh()


@pytest.mark.parametrize(
    "fault", ["def run(self, call): return {}[call]", "def run(self, call): return [][0]", None]
)
def test_a_fault_of_a_question_about_rows_ends_the_capture(
    monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
    def wrong(self: Any, call: Any) -> None:
        raise AttributeError("of the model")

    model, x = nn.Sequential(nn.Linear(4, 4), Own(), nn.Linear(4, 4)), torch.randn(4, 4)
    monkeypatch.setattr(RowsMet, "_most_named", wrong)
    capture(model, (x,))
    monkeypatch.setattr(RowsMet, "_most_named", fault and own(fault))
    with pytest.raises(CaptureError, match=r"fault of autopipe's own, at tracing.*\.py:\d+: \w+Error"):
        capture(model, (x,))


class Unalike(nn.Module):
    """Gives something ``other`` than rows where ``is_so``, as by how many there are, or what they hold."""

    def __init__(self, is_so: Callable[[Tensor], bool], other: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.is_so, self.other = is_so, other

    def forward(self, x: Tensor) -> Any:
        is_so = bool((x > 100).any()) or self.is_so(x)
        return self.other(x) if is_so else x


class Taking(nn.Module):
    def forward(self, x: Tensor, given: Any) -> Tensor:
        is_far = bool((x > 100).any())
        held = given if isinstance(given, (list, tuple)) else [given]
        for each in (g for g in held if isinstance(g, Tensor)):
            x = x + (each if each.shape == x.shape else each.mean())
        return x * 2 if is_far else x


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.end = nn.Linear(4, 4), inner, Taking(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.end(self.last(x, self.inner(x)))


WHERE: dict[str, Callable[[Tensor], bool]] = {
    "one row": lambda x: len(x) == 1,
    "two rows": lambda x: len(x) == 2,
    "many rows": lambda x: len(x) > 8,
    "a first number": lambda x: bool(x[0, 0] > 0),
    "rows alike": lambda x: len(x) > 1 and bool((x[0] == x[1]).all()),
}
OTHER: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "no tensors": lambda x: [],
    "rows and a size": lambda x: (x, len(x)),
    "a number": lambda x: x.mean(),
    "no rows": lambda x: x[:0],
    "some rows": lambda x: x[x[:, 0] > 0],
}


@pytest.mark.parametrize("other", OTHER)
@pytest.mark.parametrize("where", WHERE)
def test_a_layer_may_give_something_else_of_some_rows(where: str, other: str) -> None:
    """Whoever asks about rows then finds no rows, or no tensor, where the example has them."""
    torch.manual_seed(0)
    model, x = Around(Unalike(WHERE[where], OTHER[other])), torch.randn(8, 4)
    assert torch.equal(capture(model, (x,))(x), model(x))


@pytest.mark.parametrize("other", [None, [], (torch.ones(2, 4), 2), torch.ones(())])
def test_parts_of_a_batch_that_give_other_things_are_not_joined(other: Any) -> None:
    with pytest.raises(InputError, match="parts of the batch give other tensors than others"):
        join([torch.ones(2, 4), other], [0])
