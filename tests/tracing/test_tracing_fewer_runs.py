"""What another run has shown is not run for again, and what it has not shown is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.tracing import capture
from autopipe.tracing.rows import mixing
from autopipe.tracing.runs import runs


class Whole(nn.Module):
    """A layer that stays whole and does something to what its weights give, in evaluation alone."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4), does

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x).tanh()
        return made if self.training else self.does(made)


class Asks(nn.Module):
    """Has two forms, and asks for one of them by what it is given."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.head = Whole(does), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.layer(x)
        if not mask.all():
            h = h * mask.unsqueeze(1)
        return self.head(h)


@pytest.mark.parametrize(
    ("does", "is_shared"),
    [
        (lambda x: x, True),
        (lambda x: x.detach(), False),
        (lambda x: x.t().contiguous().t(), False),
        (lambda x: x + torch.rand(()), False),
    ],
)
def test_a_form_recorded_in_both_modes_runs_in_evaluation_no_more(
    does: Any, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    evaluated = runs.evaluated

    def noting(model: Any, weights: Any, recording: Any, *told: Any) -> Any:
        ran.append(recording)
        return evaluated(model, weights, recording, *told)

    monkeypatch.setattr(runs, "evaluated", noting)
    given = torch.randn(2, 4), torch.ones(2, dtype=torch.bool)
    made = capture(Asks(does), given, closed=["layer"]).new_forms
    assert made is not None
    forms = made.made.forms
    assert len(forms[False]) == 2
    assert (forms[True][0] is forms[False][0] and made.made.is_shared) is is_shared
    assert len(ran) == (len(forms[False]) - 1 if is_shared else 1)


class Ahead(nn.Module):
    """A mean over labels, and by how much the loss of one row is more than that of another one, if it is."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.head, self.places = nn.Linear(4, 3), (first, second)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x)
        first, second = (logits.square().sum(1)[place] for place in self.places)
        return F.cross_entropy(logits, labels) + (second - first).relu()


@pytest.mark.parametrize("places", [(0, 1), (0, -1), (-2, -1)])
def test_a_number_that_goes_by_the_order_of_two_rows_is_found_whichever_they_are(
    places: tuple[int, int],
) -> None:
    torch.manual_seed(0)
    given = torch.tensor([[4.0] * 4, [0.25] * 4]), torch.tensor([0, 1])
    assert capture(Ahead(*places), given).variation.mixing.always


class Does(nn.Module):
    """Does something to rows in a layer that stays whole."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.layer = nn.Linear(4, 4), Whole(does)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.head(x) + self.layer(x)


LIMIT = 4.0
"""What eight times the second row below comes to is more than this, and four times both rows is less."""


def clamped(x: Tensor) -> Tensor:
    return x * (LIMIT / x.norm()).clamp(max=1)


def limited(x: Tensor) -> Tensor:
    return x if x.norm() < LIMIT else x * (LIMIT / x.norm())


def kept_below(x: Tensor) -> Tensor:
    return x.where(x.square().sum(0) < LIMIT, x - x.mean(0))


def by_number(x: Tensor) -> Tensor:
    return x.where((x > 0.5) & (x.roll(1, 0) > 0.5), x / 2) if len(x) > 3 else x


def turned(x: Tensor) -> Tensor:
    return x * (LIMIT / x.t().square().sum(1)).clamp(max=1)


def in_sums(x: Tensor) -> Tensor:
    return x * (LIMIT / torch.einsum("nd,nd->d", x, x)).clamp(max=1)


def in_products(x: Tensor) -> Tensor:
    return x * (LIMIT / (x.t().square() @ torch.ones(len(x), len(x)))).clamp(max=1).t()


def ahead(x: Tensor) -> Tensor:
    return x * (LIMIT / (x.square().logcumsumexp(0).exp() - 7)).clamp(0, 1)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * (4.0 / x.norm()).clamp(max=1.0)


@pytest.mark.parametrize(
    ("does", "is_asked"),
    [
        (lambda x: x.relu(), False),
        (lambda x: x.softmax(1), False),
        (lambda x: x.where(x < LIMIT, x / 2), False),
        (lambda x: torch.cat([x.relu().chunk(2, 1)[0], x * torch.ones(4)], 1)[:, :4], False),
        (lambda x: x[:20], True),
        (lambda x: x * x.isfinite(), True),
        (lambda x: x.cumsum(1), True),
        (lambda x: x if x.max() < 1e6 else x - 1, True),
        (lambda x: x * (1 + x.norm().clamp(min=1e6)) / 1e6, True),
        (lambda x: x + (x.mean(0) - x.mean(0)), True),
        (lambda x: x + 1e-4 * (len(x) > 4), True),
        (clamped, True),
        (limited, True),
        (kept_below, True),
        (by_number, True),
        (turned, True),
        (in_sums, True),
        (in_products, True),
        (ahead, True),
        (lambda x: x.t().relu().t(), False),
        (lambda x: torch.cat([x.repeat(1, 2)[:, :4], x.repeat(1, 2)[:, 4:]], 1)[:, :4], False),
        (lambda x: scripted(x), True),
        (lambda x: scripted(x).relu() - scripted(x).neg().relu(), True),
    ],
)
def test_more_of_each_row_alone_are_asked_where_data_or_their_number_may_tell(
    does: Any, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    rows_of = mixing._rows

    def noting(given: Any, dim: Any, rows: str, alone: bool) -> Any:
        seen.append(rows)
        return rows_of(given, dim, rows, alone)

    monkeypatch.setattr(mixing, "_rows", noting)
    model = Does(does)
    model.layer.linear = nn.Identity()
    found = capture(model, (torch.tensor([[0.1] * 4, [1.0] * 4]),), closed=["layer"]).variation.mixing
    assert "ab" * 4 in seen
    assert ("b" * 8 in seen) is is_asked
    assert not (found.always and not is_asked)
    assert found.always or does not in (clamped, limited, kept_below, by_number, turned, in_sums, in_products)
