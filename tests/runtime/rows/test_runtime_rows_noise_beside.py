"""What code that draws noise makes of all rows is found as it is of code that draws none."""

import pytest
import torch
from rows_models import captured_mixing
from torch import nn
from torch.nn import functional as F


def shrunk_by_the_largest(x):
    return x / x.abs().max() if x.abs().max() > 40 else x


def halved_until_short(x):
    while x.norm() > 40:
        x = x * 0.9
    return x


def halved_by_how_many(x):
    return x * 0.5 if int((x.abs() > 9).sum()) > 6 else x


def as_it_is_if_spread(x):
    return x if x.detach().std() > 9 else x * 2


def slopes_until_bounded(x):
    slopes = 1 - x.tanh().square()
    while slopes.max() > 0.1:
        slopes = slopes / 2
    return x * slopes


def shortened_by_a_bend(x):
    return x * (40 / x.norm()).clamp(max=1)


def less_its_mean_from_many_on(x):
    return x - x.mean(0) if len(x) > 20 else x


def shortened_by_row(x):
    long = x.flatten(1).norm(dim=-1) > 9
    return torch.where(long.view(-1, *[1] * (x.ndim - 1)), x * 0.5, x) if long.any() else x


def rounded(x):
    return x + ((x * 8).round() / 8 - x).detach()


class Noisy(nn.Module):
    """Draws, in a layer that stays whole, and does something else beside it."""

    def __init__(self, does, draws):
        super().__init__()
        self.does, self.draws, self.weight = does, draws, nn.Parameter(torch.ones(4))

    def forward(self, x):
        assert len(x.tolist()) == len(x)
        return self.does(x + 0.1 * self.draws(x)) * self.weight


OF_ALL = [
    shrunk_by_the_largest, halved_until_short, halved_by_how_many, as_it_is_if_spread, slopes_until_bounded,
    shortened_by_a_bend, less_its_mean_from_many_on,
]  # fmt: skip
DRAWS = [torch.randn_like, lambda x: F.gumbel_softmax(x, hard=True), lambda x: torch.bernoulli(x.sigmoid())]


@pytest.mark.parametrize("draws", DRAWS, ids=["normal", "gumbel", "truths"])
@pytest.mark.parametrize("does", [*OF_ALL, shortened_by_row, rounded])
def test_numbers_of_all_rows_are_found_beside_noise(does, draws):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Noisy(does, draws), nn.Linear(4, 4))
    found = captured_mixing(model, torch.rand(4, 6, 4))
    assert bool(found.always or found.nearly) == (does in OF_ALL), found


class Variational(nn.Module):
    """A loss with a share that is bent at a level where no example comes."""

    def __init__(self, bend):
        super().__init__()
        self.mean, self.spread, self.head, self.bend = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3), bend

    def forward(self, x, labels):
        mean, spread = self.mean(x), self.spread(x)
        drawn = mean + torch.randn_like(mean) * spread.exp()
        apart = 0.5 * (mean.square() + spread.exp().square() - 2 * spread - 1).sum(-1).mean()
        return F.cross_entropy(self.head(drawn), labels) + self.bend(apart)


@pytest.mark.parametrize(
    ("bend", "is_told"), [(lambda n: n.clamp(min=50), True), (lambda n: n * 0.1, False), (torch.relu, False)]
)
def test_a_loss_that_is_bent_beside_noise_is_told_of(bend, is_told):
    torch.manual_seed(0)
    found = captured_mixing(Variational(bend).double(), torch.randn(8, 4).double(), torch.arange(8) % 3)
    assert bool(found.always) == is_told, found
