"""Rows are cut where they are used: once a microbatch's are asked for, and told of before."""

import pytest
import torch
from splitting import split_by_layers
from torch import nn

from autopipe.errors import InputError
from autopipe.runtime.data import microbatch
from autopipe.runtime.data.microbatch import Pieces, Splitter


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        return self.b(self.a(x).tanh() + y)


@pytest.mark.parametrize(
    "whole", [torch.randn(7, 4), torch.randn(4, 7).T, torch.randn(2, 7, 4).to(torch.float64)]
)
def test_pieces_are_told_of_as_they_come_out(whole):
    axis = whole.shape.index(7)
    pieces = Pieces(whole, (3, 2, 2), axis)
    told = [pieces.kind(m) for m in range(len(pieces))]
    assert told == [(tuple(piece.shape), piece.dtype) for piece in pieces]
    assert torch.equal(torch.cat(list(pieces), axis), whole)
    assert pieces[1] is pieces[1]


def test_a_rank_cuts_what_its_stages_use_alone(monkeypatch):
    """What tells batches and shapes apart goes by the whole."""
    cut = []
    monkeypatch.setattr(
        microbatch, "lying_like", lambda whole, piece: cut.append(tuple(whole.shape)) or piece
    )
    x, y = torch.randn(4, 6).T, torch.randn(4, 6).T  # not dense: each piece is laid
    pipe = split_by_layers(Two(), 2, (x, y), n_microbatches=3)
    batch = Splitter(pipe.graph).split(pipe.graph.bind((x, y)), torch.randn(4, 6).T, 3)
    batch.signature(0), list(batch.sizes()), batch.checksum()
    assert batch.on(torch.device("cpu"), {"x"}, takes_target=True) is batch
    assert not cut
    assert len(tuple(batch.leaves["x"])) == len(cut) == 3


def test_targets_that_cannot_be_cut_are_refused_on_every_rank():
    pipe = split_by_layers(Two(), 2, tuple(torch.randn(2, 6, 4)), n_microbatches=3)
    rt = pipe.runtime(loss_fn=lambda out, target: (out - target).square().mean())
    with pytest.raises(InputError, match=r"target is sparse_coo.*batch_dims={'target': None}"):
        rt.step(*torch.randn(2, 6, 4), target=torch.randn(6, 4).to_sparse())
    assert rt.step(*torch.randn(2, 6, 4), target=torch.randn(6, 4)).loss.isfinite()


def test_a_tensor_in_the_target_that_has_a_batchs_size_by_chance_is_given_whole():
    model, draw = nn.Linear(4, 5), torch.Generator().manual_seed(0)
    model, prior = nn.Sequential(nn.Linear(4, 4), model), torch.rand(5, generator=draw)

    def loss(output, target):
        return nn.functional.cross_entropy(output - target["prior"].log(), target["labels"])

    rt = split_by_layers(model, 2, (torch.randn(8, 4),), n_microbatches=5).runtime(loss)
    for n in (8, 5):  # five microbatches of one row each would take a class each
        x, target = torch.randn(n, 4, generator=draw), {"labels": torch.arange(n) % 5, "prior": prior}
        found = rt.step(x, target=target).loss.as_subclass(torch.Tensor)
        torch.testing.assert_close(found, loss(model(x), target))
