"""Errors of a model's code are told from autopipe's own, which are no answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.errors import CaptureError
from autopipe.tracing import capture
from autopipe.tracing.calls.faults import of_models, raise_again
from autopipe.tracing.calls.named import Named
from autopipe.tracing.rows.among_many import RowsMet


def asked(call: Callable[[], Any]) -> str:
    """What a call ends in where its errors are answers; raises those that are none."""
    try:
        call()
    except of_models() as error:
        return type(error).__name__
    return "nothing"


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


def test_what_autopipes_code_lacks_is_no_answer() -> None:
    with pytest.raises(AttributeError, match="_firsts"):
        asked(lambda: RowsMet.kept(object(), "ab"))  # type: ignore[arg-type]


def test_a_fault_of_a_question_about_rows_ends_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert len(x) > 0
            return x.tanh()

    def wrong(self: Any, call: Any) -> None:
        raise AttributeError("of the model")

    model, x = nn.Sequential(nn.Linear(4, 4), Own(), nn.Linear(4, 4)), torch.randn(4, 4)
    monkeypatch.setattr(RowsMet, "_most_named", wrong)
    capture(model, (x,))
    monkeypatch.setattr(RowsMet, "_most_named", None)
    with pytest.raises(
        CaptureError, match=r"fault of autopipe's own, at tracing.*among_many\.py:\d+: TypeError"
    ):
        capture(model, (x,))
