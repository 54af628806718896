"""Models and batches of more than one file of tests about rows."""

import torch
from runtime_models import make
from splitting import split_by_layers
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.runtime import mixing


def found(model, *args, **kwargs):
    torch.manual_seed(0)
    captured, _, stages = make(model, args, kwargs, n_stages=2)
    return mixing(captured, stages, args, kwargs, 3)


class Tokens(nn.Module):
    """A mean over the tokens that count, of which rows have unlike many."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, ids, labels):
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


def captured_mixing(model, *args):
    torch.manual_seed(0)
    return autopipe.capture(model, args).variation.mixing


class Asking(nn.Module):
    """Goes by what it asks of its whole batch."""

    def __init__(self, doubles, reduce=lambda y: y):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.doubles, self.reduce = doubles, reduce

    def forward(self, x, ids):
        y = self.b(self.a(x).relu())
        return self.reduce(y * 2 if self.doubles(x, ids) else y)


class Deciding(nn.Module):
    """A layer that goes by what it is given: stays whole."""

    def __init__(self, does):
        super().__init__()
        self.weight, self.does = nn.Parameter(torch.ones(4)), does

    def forward(self, x):
        return self.does(x) * self.weight


def decided(does, n_rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Deciding(does), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.rand(n_rows, 6, 4).double()
    pipe = split_by_layers(model, 3, (x,), n_microbatches=2)
    return model, x, pipe.runtime(loss_fn=lambda y, _: y.square().mean())


def labels(n_counted):
    return torch.where(torch.arange(5) < torch.tensor(n_counted)[:, None], 3, -100)
