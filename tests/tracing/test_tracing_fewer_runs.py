"""What another run has shown is not run for again, and what it has not shown is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopipe.tracing import capture
from autopipe.tracing.referee import referee
from autopipe.tracing.rows import among_many, analysis
from autopipe.tracing.runs import runs
from autopipe.tracing.runs.repeats import Repeats


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


class Limited(nn.Module):
    """Has a layer that stays whole and does something to rows."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.layer = nn.Linear(4, 4), nn.Sequential(nn.Identity())
        self.layer.forward = does  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Any:
        return x + 0 * self.head(x) + self.layer(x)


LIMIT = 5.0
"""Of eight times the second row below squares come to more than this, and of four times both rows to less."""


def clamped(x: Tensor) -> Tensor:
    return x * (4 * LIMIT / x.square().sum()).clamp(max=1)


@torch.library.custom_op("test_tracing_fewer_runs::limited", mutates_args=())
def of_a_library(x: Tensor) -> Tensor:
    return clamped(x)


@of_a_library.register_fake
def of_shape(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x.mul_((20.0 / x.square().sum()).clamp(max=1.0))


@pytest.mark.parametrize(
    "does",
    [
        clamped,
        lambda x: x if x.square().sum() < 4 * LIMIT else x * (4 * LIMIT / x.square().sum()),
        lambda x: x.where(x.square().sum(0) < LIMIT, x - x.mean(0)),
        lambda x: x * (LIMIT / x.t().square().sum(1)).clamp(max=1),
        lambda x: x * (LIMIT / torch.einsum("nd,nd->d", x, x)).clamp(max=1),
        lambda x: x / x.gt(0.5).sum(0).sub(4).clamp(min=1),
        lambda x: torch.renorm(x, 2, 1, LIMIT**0.5),
        lambda x: F.normalize(x, dim=0, eps=LIMIT**0.5),
        of_a_library,
        lambda x: scripted(x.clone()),
    ],
)
def test_a_limit_that_many_of_one_row_come_to_is_found_however_it_is_written(does: Any) -> None:
    given = torch.tensor([[0.1] * 4, [1.0] * 4])
    assert capture(Limited(does), (given,), closed=["layer"]).variation.mixing.always


class Settling(nn.Module):
    """Leaves something in an attribute that it reads, and says once what its labels are."""

    def __init__(self, leaves: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)
        self.leaves, self.kind = leaves, None

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if self.kind is None or not isinstance(self.kind, str):
            self.kind = self.leaves(self, h)
        return self.head(h)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The modes, as they come, in which it is asked what other data give behind a call."""
    modes: list[bool] = []
    forgets = Repeats.forgets

    def noting(repeats: Repeats, mode: bool, is_called: bool) -> bool:
        modes.append(mode)
        return forgets(repeats, mode, is_called)

    monkeypatch.setattr(Repeats, "forgets", noting)
    return modes


@pytest.mark.parametrize(
    ("leaves", "modes"),
    [
        (lambda model, h: "one of many", [True]),
        (lambda model, h: h.detach(), [False, True]),
        (lambda model, h: "one" if model.training else "many", [False, True]),
    ],
)
def test_what_calls_leave_alike_in_both_modes_is_asked_about_in_one_of_them(
    leaves: Any, modes: list[bool], asked: list[bool]
) -> None:
    capture(Settling(leaves), (torch.randn(6, 4),), open=["body"], dynamic=False)
    assert sorted(asked) == modes


class Writing(nn.Module):
    """Writes in training, to a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mean = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean += 0.1
        return self.linear(x) + 0 * self.mean


def test_what_one_mode_leaves_beside_is_asked_about_in_that_mode(asked: list[bool]) -> None:
    model = Settling(lambda model, h: "one of many")
    model.body = nn.Sequential(nn.Linear(4, 4), Writing())
    capture(model, (torch.randn(6, 4),), closed=["body"])
    assert True in asked


class Counting(nn.Module):
    """Goes by how many rows are above nought, and may hold gradients back in code that does not run."""

    def __init__(self, is_held: bool) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4), self.held if is_held else self.made

    def made(self, x: Tensor) -> Tensor:
        return x * 2

    def held(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            factor = x.relu()
        return x * factor

    def forward(self, x: Tensor) -> Tensor:
        n_above = (self.linear(x) > 0).sum()
        return self.does(x) if n_above >= 0 else self.held(x)


@pytest.mark.parametrize("is_held", [False, True])
def test_gradients_are_asked_by_number_where_code_that_runs_holds_some_back(
    is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    gradient_of = among_many.gradient_of

    def noting(*told: Any) -> Any:
        asked.append(told)
        return gradient_of(*told)

    monkeypatch.setattr(among_many, "gradient_of", noting)
    found = capture(nn.Sequential(nn.Linear(4, 4), Counting(is_held), nn.Linear(4, 4)), (torch.randn(4, 4),))
    assert not found.variation.mixing.always
    assert bool(asked) is is_held


def of_any_data(x: Tensor) -> Tensor:
    return x.tanh()


def rows_above(x: Tensor) -> Tensor:
    return torch.cat([x, x[x.sum(-1) > 0]])


def rows_above_if_any(x: Tensor) -> Tensor:
    try:
        return x[: 1 + int(x.sum() > 0)]
    except RuntimeError:  # as where there are no data
        return x[:1]


def where_there_are_data(x: Tensor) -> Tensor:
    return x[x.sum(-1) > 0] if x.device.type != "meta" else x


class Does(nn.Module):
    """A layer that stays whole and does something to what its weights give."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.does = nn.Linear(4, 4), does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self.linear(x))


class InTheMiddle(nn.Module):
    """Calls such a layer between plain ones, of which there are enough to cut between."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.ahead = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.layer = Does(does)
        self.behind = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.ahead:
            x = layer(x)
        x = self.layer(x)
        for layer in self.behind:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("does", "runs_on_others"),
    [(of_any_data, False), (rows_above, True), (rows_above_if_any, True), (where_there_are_data, True)],
)
def test_layers_that_run_without_data_are_not_run_to_see_of_what_sizes_they_give(
    does: Any, runs_on_others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    turned = referee._turned
    monkeypatch.setattr(referee, "_turned", lambda tensor: ran.append(tensor) or turned(tensor))
    model, x = InTheMiddle(does), torch.randn(3, 4)
    found = capture(model, (x,), dynamic=False)
    assert bool(ran) is runs_on_others
    for given in (x, -x, torch.randn(3, 4)):
        torch.testing.assert_close(found(given), model(given))


class Drawing(nn.Module):
    """Draws in training, as in evaluation if it ``always`` does."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.linear, self.always = nn.Linear(4, 4), always

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x)
        return made * torch.rand(()) if self.training or self.always else made


@pytest.mark.parametrize("always", [False, True])
def test_what_all_rows_share_of_draws_is_asked_in_modes_that_draw(
    always: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    shared_draws = analysis.shared_draws

    def noting(*told: Any) -> Any:
        asked.append(told)
        return shared_draws(*told)

    monkeypatch.setattr(analysis, "shared_draws", noting)
    model = nn.Sequential(Drawing(always), nn.Linear(4, 4))
    found = capture(model, (torch.randn(4, 4),), closed=["0"]).variation.mixing
    assert found.shared_draws
    assert bool(found.evaluation.shared_draws) is always
    assert len(asked) == 1 + always
