"""A mean over rows that pass a limit is found where all of the example's are on one side of it."""

import pytest
import torch
from splitting import split_by_layers
from torch import nn

import autopipe

LIMITS = {
    "above": lambda x: x[:, 0] > 3,
    "below": lambda x: x[:, 0] < -20,
    "long": lambda x: x.norm(dim=1) > 100,
    "any of it": lambda x: (x > 4).any(1),
    "all of it": lambda x: (x > -9).all(1),
    "missing": lambda x: x.isnan().any(1),
    "between": lambda x: (x[:, 0] > 5) & (x[:, 0] < 6),
}
MEANS = {
    "weighted": lambda each, chosen: (each * (chosen + 0.1)).sum() / (chosen + 0.1).sum(),
    "chosen": lambda each, chosen: each[chosen].mean(),
    "counted": lambda each, chosen: (each * chosen).sum() / chosen.sum().clamp(min=1),
}
BY_ROW = {
    "of all rows": lambda each, chosen: torch.where(chosen, each, 2 * each).mean(),
    "added up": lambda each, chosen: (each * chosen).sum(),
    "chosen, added up": lambda each, chosen: each[chosen].sum(),
    "no number": lambda each, chosen: (each / chosen).mean(),
}


class Chosen(nn.Module):
    def __init__(self, limit, mean):
        super().__init__()
        self.first, self.last, self.limit, self.mean = nn.Linear(6, 6), nn.Linear(6, 6), limit, mean

    def forward(self, x):
        each = self.last(self.first(x.nan_to_num()).tanh()).square().mean(1)
        return self.mean(each, self.limit(x))


def mixing(limit, mean):
    torch.manual_seed(0)
    x = torch.randn(8, 6, dtype=torch.float64)
    return autopipe.capture(Chosen(LIMITS[limit], mean).double(), (x,)).variation.mixing.always


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("mean", MEANS)
def test_a_mean_of_the_rows_beyond_a_limit_is_found(limit, mean):
    assert mixing(limit, MEANS[mean])


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("mean", BY_ROW)
def test_what_a_limit_makes_of_each_row_alone_is_not(limit, mean):
    assert not mixing(limit, BY_ROW[mean])


@pytest.mark.parametrize("mean", MEANS)
def test_it_runs_on_the_whole_batch(mean):
    torch.manual_seed(0)
    model, x = Chosen(LIMITS["above"], MEANS[mean]).double(), torch.randn(8, 6, dtype=torch.float64)
    pipe = split_by_layers(model, 2, (x,), n_microbatches=4)
    x[::3, 0] = 4
    found = pipe.runtime().step(x).loss.as_subclass(torch.Tensor)
    torch.testing.assert_close(found, model(x).detach())


class Trimmed(nn.Module):
    """Rows up to the longest, and what is made of those within each length."""

    def __init__(self, make):
        super().__init__()
        self.first, self.last, self.make = nn.Linear(6, 6), nn.Linear(6, 6), make

    def forward(self, x, lengths):
        x = self.first(x[:, : lengths.max()]).tanh()
        return self.make(self.last(x), torch.arange(x.shape[1]) < lengths[:, None])


@pytest.mark.parametrize(
    ("make", "is_mixed"),
    [
        (lambda each, inside: (each * inside[..., None]).sum(1), False),
        (lambda each, inside: each.masked_fill(~inside[..., None], -1e9).amax(1), False),
        (lambda each, inside: (each * inside[..., None]).sum() / inside.sum(), True),
        (lambda each, inside: each[inside].mean(), True),
        (lambda each, inside: each.mean(1), True),
    ],
    ids=["summed", "largest", "mean", "chosen", "of padding"],
)
def test_a_mask_is_true_of_no_place_that_lengths_leave_out(make, is_mixed):
    torch.manual_seed(0)
    model, x = Trimmed(make).double(), torch.randn(6, 9, 6, dtype=torch.float64)
    lengths = torch.tensor([7, 5, 4, 7, 3, 2])
    found = autopipe.capture(model, (x, lengths)).variation.mixing
    assert bool(found.always) == is_mixed
    if not is_mixed:
        run = split_by_layers(model, 2, (x, lengths), n_microbatches=3).runtime()
        torch.testing.assert_close(run.forward(x, lengths).as_subclass(torch.Tensor), model(x, lengths))
