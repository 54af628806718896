"""What another run has shown is not run for again, and what it has not shown is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.tracing import capture
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
