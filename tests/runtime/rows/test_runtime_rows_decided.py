"""What all rows together decide, where none of the example does: a limit passed, a label it lacks."""

import pytest
import torch
from rows_models import captured_mixing
from torch import nn
from torch.nn import functional as F


class Deciding(nn.Module):
    """Two layers whose result goes by what ``decide`` says of rows."""

    def __init__(self, decide):
        super().__init__()
        self.a, self.b, self.decide = nn.Linear(4, 4), nn.Linear(4, 4), decide

    def forward(self, x):
        h = self.a(x).tanh()
        return self.decide(self.b(h), h)


def over_limit(y, h):
    return y * (h.max() > 1.5)


def any_over_limit(y, h):
    return torch.where((h > 1.5).any(), y, 2 * y)


def by_how_many(y, h):
    return y / (h > 1.5).sum().clamp(min=1)


def by_how_many_kinds(y, h):
    return y * len(h.detach().round().unique())


def by_least_kind(y, h):
    return y + h.detach().round().unique()[0]


def by_mean_over_limit(y, h):
    picked = h[h > 1.5]
    return y - (picked.mean() if picked.numel() else 0)


def over_limit_by_row(y, h):
    return y * (h.amax(-1, keepdim=True) > 1.5)


def how_many_by_row(y, h):
    return y / (h > 1.5).sum(-1, keepdim=True).clamp(min=1)


def rows_over_limit(y, h):
    picked = h[:, 0] > 0
    return y.masked_scatter(picked[:, None].expand_as(y), 2 * y[picked])


OF_ALL = [over_limit, any_over_limit, by_how_many, by_how_many_kinds, by_least_kind, by_mean_over_limit]


@pytest.mark.parametrize("decide", [*OF_ALL, over_limit_by_row, how_many_by_row, rows_over_limit])
def test_a_limit_that_no_row_of_the_example_passes(decide):
    torch.manual_seed(0)
    found = captured_mixing(Deciding(decide).double(), torch.randn(6, 4, dtype=torch.float64))
    assert bool(found.always) == (decide in OF_ALL), found


class Judged(nn.Module):
    """A loss whose second part is a mean over rows of some labels."""

    def __init__(self, is_counted):
        super().__init__()
        self.a, self.b, self.is_counted = nn.Linear(4, 4), nn.Linear(4, 9), is_counted

    def forward(self, x, labels):
        losses = F.cross_entropy(self.b(self.a(x).tanh()), labels, reduction="none")
        counted = self.is_counted(labels)
        return losses.mean() + (losses * counted).sum() / counted.sum().clamp(min=1)


@pytest.mark.parametrize("is_counted", [lambda y: y == 7, lambda y: y > 3, lambda y: y.ge(4)])
def test_a_mean_over_labels_that_the_example_lacks(is_counted):
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    assert captured_mixing(Judged(is_counted).double(), x, torch.arange(6) % 3).always
