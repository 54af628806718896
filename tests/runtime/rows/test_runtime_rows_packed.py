"""Lengths that packing wants in order: whether rows meet is asked of rows that stay in it."""

import copy

import pytest
import torch
from splitting import split_by_layers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import autopipe


class Reader(nn.Module):
    """Attends to what an encoder makes of packed rows, by a query or by the whole width of the batch."""

    def __init__(self, how):
        super().__init__()
        self.embed, self.encoder, self.how = nn.Embedding(20, 8), nn.LSTM(8, 8, batch_first=True), how
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 3)

    def forward(self, ids, lengths, labels):
        packed = pack_padded_sequence(self.embed(ids), lengths.cpu(), batch_first=True)
        h, _ = pad_packed_sequence(self.encoder(packed)[0], batch_first=True)
        mask = torch.arange(h.shape[1])[None] < lengths[:, None]
        weights = self.body(h).sum(-1).masked_fill(~mask, float("-inf")).softmax(-1)
        if self.how == "wraps":  # the last place of the longest row is beside its first, others have padding
            weights = weights + weights.roll(1, -1)
        read = (weights.unsqueeze(-1) * h).sum(1)
        return cross_entropy(self.head(self.body(read)), labels)


def batch(n, longest=9):
    return torch.randint(1, 20, (n, longest)), torch.arange(longest, longest - n, -1), torch.arange(n) % 3


@pytest.mark.parametrize("n", [2, 4])
def test_rows_of_packed_batches_that_do_not_meet_are_cut(n, caplog):
    torch.manual_seed(0)
    model = Reader("masks").double()
    runtime = split_by_layers(model, 2, batch(n), n_microbatches=2).runtime()
    for args in (batch(n), batch(4), batch(5, 12)):
        twin = copy.deepcopy(model)
        expected = twin(*args)
        expected.backward()
        assert abs(runtime.step(*args).loss.item() - expected.item()) < 1e-12
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=1e-12)
        model.zero_grad()
    assert "depend on one another" not in caplog.text


@pytest.mark.parametrize("n", [2, 4])
def test_rows_that_meet_in_the_width_of_a_packed_batch_are_refused(n):
    torch.manual_seed(0)
    model = Reader("wraps").double()
    runtime = split_by_layers(model, 2, batch(n), n_microbatches=2).runtime()
    with pytest.raises(autopipe.InputError, match="gives other rows for a piece of the batch"):
        runtime.step(*batch(4))
