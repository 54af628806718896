"""Models whose rows depend on one another are found out; those whose rows do not are not."""

import torch
from runtime_models import Adversary, adversary_batch, make
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.runtime import mixing


class Contrast(nn.Module):
    """Every row is told from all others in the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        return F.cross_entropy(self.a(x) @ self.b(y).T, torch.arange(len(x)))


class TimeFirst(nn.Module):
    """Reads its sequences along the axis that others have the batch in."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.body(x)[0])


def found(model, *args, **kwargs):
    torch.manual_seed(0)
    captured, _, stages = make(model, args, kwargs, n_stages=2)
    return mixing(captured, stages, args, kwargs, 3)


def test_rows_that_depend_on_one_another():
    assert "output 0 differs" in found(Contrast(), torch.randn(6, 4), torch.randn(6, 4))
    assert "output 0 differs" in found(TimeFirst(), torch.randn(5, 6, 4))


def test_rows_that_do_not():
    args, kwargs, _ = adversary_batch(5, 4)
    assert not found(Adversary().double(), *args, **kwargs)
    assert not found(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)), torch.randn(7, 4)
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert not found(model, torch.randn(1, 4))
    assert model.training


def test_verify_warns(caplog):
    args = torch.randn(6, 4), torch.randn(6, 4)
    pipe = autopipe.split(Contrast(), 2, args, costs="estimated", n_microbatches=2)
    pipe.verify()
    assert "microbatches do not give what the whole batch does" in caplog.text
    assert "n_microbatches=1" in caplog.text
