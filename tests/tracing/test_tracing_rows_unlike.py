"""Which forms are asked about rows that are all unlike, and which calls only ask of what kind rows are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.tracing import capture
from autopipe.tracing.rows import row_questions

N_ROWS, N_PLACES = 4, 6


class Angles(nn.Module):
    """What it gives has no rows: of the type of what it is given, or of that itself."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("each", torch.linspace(0.5, 1.5, N_PLACES)[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.each, x)


class Layer(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return self.function(self.linear(x) * angles)


class Tokens(nn.Module):
    """A model of tokens: angles, a layer, and a loss over labels where there are any."""

    def __init__(
        self,
        angles: Callable[[Tensor, Tensor], Tensor],
        layer: Callable[[Tensor], Tensor],
        then: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.embed, self.angles, self.layer = nn.Embedding(16, 8), Angles(angles), Layer(layer)
        self.head, self.then = nn.Linear(8, 16), then

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x = self.embed(tokens)
        out = self.head(self.layer(x, self.angles(x)))
        if labels is None:
            return out
        return self.then(nn.functional.cross_entropy(out.view(-1, 16), labels.view(-1))), out


def of_type(each: Tensor, x: Tensor) -> Tensor:
    return each.cos().to(x.dtype).to(x.device)


def tanh(x: Tensor) -> Tensor:
    return x.tanh()


def asked(model: Tokens, monkeypatch: pytest.MonkeyPatch, *, has_labels: bool) -> tuple[str, int]:
    """What is said to mix rows, and how often rows all unlike were asked about."""
    found: list[bool] = []
    ask = row_questions.fault_among_unlike

    def noting(*told: Any, **how: Any) -> str:
        found.append(True)
        return ask(*told, **how)

    monkeypatch.setattr(row_questions, "fault_among_unlike", noting)
    torch.manual_seed(0)
    tokens = torch.randint(16, (N_ROWS, N_PLACES))
    given = (tokens, tokens.roll(1, 1)) if has_labels else (tokens,)
    said = capture(model, given, closed=["layer", "angles"]).variation.mixing.always
    return said, len(found)


GATHER: dict[str, tuple[Any, Any, Any, bool]] = {
    "angles go by the mean": (lambda each, x: each * x.mean().sign(), tanh, tanh, False),
    "angles go by whether any is far": (lambda each, x: each * (1 + (x.max() > 99)), tanh, tanh, False),
    "a layer makes something of all rows": (of_type, lambda x: x + x.mean(0).sign().detach(), tanh, True),
    "a layer makes it of all places": (
        of_type,
        lambda x: x + x.view(-1, 8).mean(0).sign().detach(),
        tanh,
        True,
    ),
    "a number of all rows bends": (of_type, lambda x: x + x.mean().sign().detach(), tanh, True),
}


@pytest.mark.parametrize("kind", GATHER)
def test_rows_all_unlike_are_asked_about_where_something_is_made_of_all(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    *functions, has_labels = GATHER[kind]
    torch.manual_seed(0)
    said, n_asked = asked(Tokens(*functions), monkeypatch, has_labels=has_labels)
    assert said or n_asked


@pytest.mark.parametrize("has_labels", [True, False])
def test_what_asks_of_what_kind_rows_are_makes_nothing_of_them(
    has_labels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Tokens(of_type, tanh, lambda loss: loss / 2)
    assert asked(model, monkeypatch, has_labels=has_labels) == ("", 0)
