"""Ways of other libraries: packed and sparse tensors, losses and features left in attributes, resets."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autopipe
from autopipe.tracing import capture


class Tagger(nn.Module):
    """Reads sentences of their own lengths as packed sequences."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(16, 3)
        self.read = nn.LSTM(8, 8, batch_first=True, bidirectional=True)

    def forward(self, ids, lengths):
        packed = pack_padded_sequence(self.embed(ids), lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.read(packed)[0], batch_first=True)[0])


class Graph(nn.Module):
    """Multiplies by a sparse matrix of neighbours."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x, neighbours):
        for layer in self.layers:
            x = torch.sparse.mm(neighbours, layer(x)).tanh()
        return x


class Routed(nn.Module):
    """A layer that leaves a loss of its own behind."""

    def __init__(self):
        super().__init__()
        self.layer, self.gate, self.loss = nn.Linear(4, 4), nn.Linear(4, 2), None

    def forward(self, x):
        gates = self.gate(x).softmax(-1)
        self.loss = gates.square().mean()
        return x + self.layer(x) * gates[..., :1]


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Routed() for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x, sum(layer.loss for layer in self.layers)


def sentences(rows, length):
    return torch.randint(20, (rows, length)), torch.tensor([length, *range(1, rows)])


def neighbours(seed):
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(6, 6, generator=generator) > 0.6
    return torch.randn(6, 4, generator=generator), chosen.float().to_sparse()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Tagger, [sentences(3, 5), sentences(4, 5), sentences(3, 7)]),
        (Graph, [neighbours(0), neighbours(1)]),
        (Mixture, [(torch.randn(2, 5, 4),), (torch.randn(3, 4, 4),)]),
    ],
)
def test_the_ways_of_other_libraries(kind, given):
    torch.manual_seed(0)
    model = kind()
    captured = capture(model, given[0])
    pipe = autopipe.split(model, 2, given[0], costs="estimated", n_microbatches=1)
    for args in given:
        for run in (captured, pipe):
            torch.testing.assert_close(run(*args), model(*args))
