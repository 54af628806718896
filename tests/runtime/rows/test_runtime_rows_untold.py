"""Where rows cannot be told apart that is said, and what can be is told of the data that steps cut."""

import logging

import pytest
import torch
from splitting import split_by_layers
from torch import nn

from autopipe.errors import InputError
from autopipe.tracing.rows import mixing


class Read(nn.Module):
    """Takes sparse rows and dense ones; ``centres`` them by the batch's mean."""

    def __init__(self, centres):
        super().__init__()
        self.a, self.b, self.centres = nn.Linear(6, 6), nn.Linear(6, 6), centres

    def forward(self, x):
        h = self.a(x.to_dense() if x.is_sparse else x)
        if self.centres:
            h = h - h.mean(0)
        return self.b(h).square().mean()


def split(model, x):
    return split_by_layers(model, 2, (x,), n_microbatches=4)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.strided])
def test_rows_are_asked_of_dense_tensors_whatever_the_example_is(layout):
    torch.manual_seed(0)
    rows = torch.randn(8, 6)
    example = rows if layout is torch.strided else rows.to_sparse(layout=layout)
    runtime = split(Read(True), example).runtime(mixed_rows="refuse")
    with pytest.raises(InputError, match=r"mean\(0\)"):
        runtime.step(rows)
    apart = Read(False)
    loss = split(apart, example).runtime(mixed_rows="refuse").step(rows).loss
    assert torch.allclose(loss, apart(rows))


def test_rows_that_cannot_be_told_apart_are_named_by_capture_and_step(monkeypatch, caplog):
    def fails(*args, **kwargs):
        raise ValueError("rows must be sorted")

    monkeypatch.setattr(mixing, "_results", fails)
    model, rows = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)), torch.randn(8, 6)
    pipe = split(model, rows)
    assert [
        note for note in pipe.graph.notes if "could not be told" in note and "rows must be sorted" in note
    ]
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        pipe.runtime(loss_fn=lambda output, _: output.square().mean()).step(rows)
    assert "could not be told" in caplog.text
    assert "verify()" in caplog.text
