"""Rows whose number may seem fixed: they lie in order of their lengths, or code loops over them."""

import copy

import pytest
import torch
from runtime_models import grads, worst
from splitting import split_by_layers
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

EXACT = 1e-12


class Packed(nn.Module):
    """A recurrent layer over sequences that lie in order of their lengths, the longest first."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(20, 6), nn.LSTM(6, 6, batch_first=True)
        self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True)
        out, (last, _) = self.layer(packed)
        out, _ = pad_packed_sequence(out, batch_first=True, total_length=ids.shape[1])
        return self.head(self.middle(last[-1]).tanh() + out.mean(1)).square().mean()

    @staticmethod
    def inputs(*lengths):
        return torch.randint(20, (len(lengths), 6)), torch.tensor(lengths)


class Memory(nn.Module):
    """Steps through time in its own forward, and in a method through the rows of its memory."""

    def __init__(self):
        super().__init__()
        self.cell, self.key, self.head = nn.GRUCell(6, 6), nn.Linear(6, 4), nn.Linear(6, 3)
        self.before = nn.Linear(6, 6)

    def shifted(self, weights):
        out = torch.zeros_like(weights)
        for row in range(weights.size(0)):
            out[row] = weights[row].roll(1) + weights[row].square()
        return out

    def forward(self, x):
        x = self.before(x)
        h, read = x.new_zeros(x.size(0), 6), x.new_zeros(x.size(0), 4)
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            read = read + self.shifted(self.key(h).softmax(1))
        return self.head(h).square().mean() + read.square().mean()

    @staticmethod
    def inputs(*lengths):
        return (torch.randn(len(lengths), 5, 6).double(),)


@pytest.mark.parametrize("kind", [Packed, Memory])
def test_such_rows_train_in_microbatches(kind):
    torch.manual_seed(0)
    model = kind().double()
    plain, given = copy.deepcopy(model), model.inputs(6, 4)
    pipe = split_by_layers(model, 2, given)
    runtime = pipe.runtime()
    for lengths in ((6, 5, 4, 2), (6, 6, 5, 3, 1)):
        given = model.inputs(*lengths)
        found, wanted = runtime.step(*given, n_microbatches=2), plain(*given)
        wanted.backward()
        assert abs(found.loss - wanted) < EXACT
        assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT
        pipe.zero_grad()
        plain.zero_grad()
