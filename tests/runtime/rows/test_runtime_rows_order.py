"""Rows that have parts by their places, and rows beside inputs that only some values suit, are told apart."""

from __future__ import annotations

import pytest
import torch
from splitting import split_by_layers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autopipe
from autopipe.errors import InputError


class Thirds(nn.Module):
    """Anchors, positives and negatives one after another along the batch."""

    def __init__(self, weigh: bool = False) -> None:
        super().__init__()
        self.layers, self.weigh = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), weigh

    def forward(self, x: Tensor) -> Tensor:
        a, p, n = F.normalize(self.layers(x)).chunk(3)
        return F.relu((a - p).square().sum(1) - (a - n).square().sum(1) + 0.3).mean()


class OfOrder(nn.Module):
    """A mean over rows that lie anyhow, of batches that are no shorter than three."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < 3:
            raise ValueError("too few rows")
        return self.layers(x).square().mean()


class Judged(nn.Module):
    """Rows about their mean, judged beside targets that are no less than zero and no more than one."""

    def __init__(self, centres: bool) -> None:
        super().__init__()
        self.layers, self.head, self.centres = (
            nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
            nn.Linear(4, 1),
            centres,
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.layers(x)
        x = x - x.mean(0) if self.centres else x
        return F.binary_cross_entropy(self.head(x).sigmoid().squeeze(-1), y)


def off(model: nn.Module, example: tuple[Tensor, ...], batch: tuple[Tensor, ...]) -> tuple[str, float]:
    """What is found to mix rows, and how far a step in two microbatches is from the plain model's."""
    pipe = split_by_layers(model, 2, example, n_microbatches=1)
    expected = model(*batch)
    wanted = torch.autograd.grad(expected, [*model.parameters()])
    got = pipe.runtime(n_microbatches=2).step(*batch).loss
    gradients = [p.grad for p in model.parameters()]
    pairs = zip([expected.detach(), *wanted], [got, *gradients], strict=True)
    return pipe.graph.variation.mixing.always, max(float((a - b).abs().max()) for a, b in pairs)


def test_rows_with_parts_by_their_places_meet_whole_in_the_tail() -> None:
    torch.manual_seed(0)
    found, error = off(Thirds(), (torch.randn(6, 4),), (torch.randn(12, 4),))
    assert "hangs on the order" in found
    assert error < 1e-6


def test_rows_that_lie_anyhow_are_no_mixing() -> None:
    torch.manual_seed(0)
    found, error = off(OfOrder(), (torch.randn(6, 4),), (torch.randn(12, 4),))
    assert not found
    assert error < 1e-6


@pytest.mark.parametrize("centres", [True, False])
def test_targets_that_take_no_other_sign_hide_no_mixing(centres: bool) -> None:
    torch.manual_seed(0)
    example, batch = ((torch.randn(n, 4), torch.rand(n).round()) for n in (2, 8))
    found, error = off(Judged(centres), example, batch)
    assert bool(found) == centres
    assert error < 1e-6


def as_long_as_the_longest(x: Tensor, kinds: Tensor) -> Tensor:
    """Goes by a number that all rows come to; called by its name and as an attribute."""
    return x[:, : int((kinds > 0).sum(1).max())].sum(1, keepdim=True) + x


class AtRisk(nn.Module):
    """Cox's loss: what is cumulated, and which rows count, are taken by an order of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor, time: Tensor, event: Tensor) -> Tensor:
        risk, order = self.layers(x).flatten(), time.argsort(descending=True)
        return -((risk[order] - risk[order].logcumsumexp(0)) * event[order]).sum() / event.sum()


def test_an_order_of_rows_that_is_that_of_places_in_the_example_is_made_of_the_batch() -> None:
    torch.manual_seed(0)
    example = torch.randn(2, 4), torch.tensor([2.0, 1.0]), torch.ones(2)
    batch = torch.randn(6, 4), torch.arange(6.0), torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 0.0])
    assert off(AtRisk(), example, batch)[1] < 1e-6


class PackedByLength(nn.Module):
    """Rows that an LSTM takes in the order of their lengths, and that are in their places behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.rnn, self.head = nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.layers(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(h).square().mean()


def test_rows_that_are_packed_by_their_lengths_are_stepped_as_the_model_does() -> None:
    torch.manual_seed(0)
    example = torch.randn(2, 6, 4), torch.tensor([4, 6])
    batch = torch.randn(5, 6, 4), torch.tensor([3, 6, 2, 5, 4])
    assert off(PackedByLength(), example, batch)[1] < 1e-6


class Carried(nn.Module):
    """A recurrent layer whose state is given, by layers first and by rows then."""

    def __init__(self, n_layers: int) -> None:
        super().__init__()
        self.first, self.rnn, self.head = (
            nn.Linear(4, 4),
            nn.GRU(4, 4, n_layers, batch_first=True),
            nn.Linear(4, 1),
        )

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.head(self.rnn(self.first(x), state)[0]).square().mean()


@pytest.mark.parametrize("n_layers", [1, 2])
def test_states_of_recurrent_layers_are_cut_along_their_second_axis(n_layers: int) -> None:
    """Of two layers the first axis is as long as the example's batch."""
    torch.manual_seed(0)
    example, batch = ((torch.randn(n, 3, 4), torch.randn(n_layers, n, 4)) for n in (2, 5))
    found, error = off(Carried(n_layers), example, batch)
    assert not found
    assert error < 1e-6


class ByNumber(nn.Module):
    def __init__(self, is_held: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.held = as_long_as_the_longest if is_held else None

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        x = self.a(x)
        x = as_long_as_the_longest(x, kinds) if self.held is None else self.held(x, kinds)
        return F.cross_entropy(self.b(x), kinds[:, 0])


@pytest.mark.parametrize("is_held", [False, True])
def test_numbers_that_functions_kept_whole_read_of_all_rows_are_found(is_held: bool) -> None:
    torch.manual_seed(0)
    kinds = torch.tensor([[1, 0, 3], [2, 3, 0], [0, 1, 3], [1, 1, 0], [0, 0, 0], [2, 2, 2]])
    example = torch.randn(6, 4), torch.where(torch.arange(6)[:, None] < 2, kinds[:1], kinds)
    found = autopipe.capture(ByNumber(is_held), example).variation.mixing
    assert found.always


class Between(nn.Module):
    """Adds what ``take`` gives of a table for the rows of a batch."""

    def __init__(self, take, table) -> None:
        super().__init__()
        self.take, self.table = take, table

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.take(self.table, x, ids)


class Tabled(nn.Module):
    """Such a layer between others, kept whole, or in the model's own forward."""

    def __init__(self, take, table, *, is_whole: bool) -> None:
        super().__init__()
        self.a, self.b, self.is_whole = nn.Linear(4, 4), nn.Linear(4, 4), is_whole
        self.between = Between(take, table)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        run = self.between if self.is_whole else self.between.forward
        return self.b(run(self.a(x), ids)).square().mean()


TAKEN_BY_ROW = {
    "slice": lambda table, x, ids: table[: len(x)],
    "narrow": lambda table, x, ids: table.narrow(0, 0, x.shape[0]),
    "places": lambda table, x, ids: table[torch.arange(len(x))],
    "index_select": lambda table, x, ids: table.index_select(0, torch.arange(len(x))),
    "embedding": lambda table, x, ids: F.embedding(torch.arange(len(x)), table),
    "split": lambda table, x, ids: table.split([len(x), len(table) - len(x)])[0],
}
TABLES = {
    "bias": lambda: nn.Parameter(torch.zeros(64, 4)),
    "ones": lambda: torch.cat([torch.ones(20, 4), torch.zeros(44, 4)]),
}


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("take", TAKEN_BY_ROW)
def test_a_table_by_row_that_is_alike_for_its_first_rows_is_refused(take, table, is_whole):
    x, ids = torch.randn(8, 4), torch.randint(0, 9, (8,))
    model = Tabled(TAKEN_BY_ROW[take], TABLES[table](), is_whole=is_whole)
    pipe = split_by_layers(model, 2, (x, ids), n_microbatches=2)
    with pytest.raises(InputError, match=r"as soon as \S*table holds other values|others where they are 21"):
        pipe.runtime().step(x, ids)


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_table_of_noughts_that_rows_take_what_they_ask_for_of_is_no_mixing(is_whole):
    x, ids = torch.randn(8, 4), torch.randint(0, 9, (8,))
    model = Tabled(lambda table, x, ids: table[ids] + table[:4].mean(0), TABLES["bias"](), is_whole=is_whole)
    before = model.between.table.detach().clone()
    pipe = split_by_layers(model, 2, (x, ids), n_microbatches=2)
    assert not pipe.graph.variation.mixing.always
    assert torch.equal(model.between.table, before)


def first_20(n: int) -> Tensor:
    return torch.arange(n) < 20


def up_to_20(n: int) -> Tensor:
    return 1 + torch.arange(n).sub(20).clamp(min=0)


@pytest.mark.parametrize("limit", [first_20, up_to_20])
def test_a_limit_on_places_of_rows_is_tried(limit):
    x, ids = torch.randn(8, 4), torch.randint(0, 9, (8,))
    model = Tabled(lambda table, x, ids: x * limit(len(x))[:, None], None, is_whole=False)
    pipe = split_by_layers(model, 2, (x, ids), n_microbatches=2)
    with pytest.raises(InputError, match="depend on one another"):
        pipe.runtime().step(x, ids)


class Survival(nn.Module):
    """Each row beside those that were followed for longer, in the order of their times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 1)

    def forward(self, x: Tensor, times: Tensor, ended: Tensor) -> Tensor:
        risk, order = self.head(self.layers(x)).squeeze(-1), times.argsort(descending=True)
        risk, ended = risk[order], ended[order].to(risk)
        return -((risk - risk.logcumsumexp(0)) * ended).sum() / (ended.sum() + 1e-8)


def test_an_order_of_rows_is_made_of_all_of_them_though_those_tried_lie_in_it():
    torch.manual_seed(0)
    model, times = Survival().double(), torch.tensor([1.4, 0.2, 0.3, 0.5, 0.7, 0.25])
    x, ended = torch.randn(6, 4).double(), torch.tensor([1, 0, 1, 0, 1, 0])
    pipe = split_by_layers(model, 2, (x, times, ended), n_microbatches=3)
    batch = x.flip(0), times.roll(2), ended
    wanted = torch.autograd.grad(model(*batch), [*model.parameters()])
    pipe.runtime().step(*batch)
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
