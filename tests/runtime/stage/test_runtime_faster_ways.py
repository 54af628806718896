"""Torch's own layers in evaluation, where they take faster ways than with gradients, as padding lets them."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe


class Encoding(nn.Module):
    """An encoder of padded rows; without ``masks``, its outputs at what is padded count, too."""

    def __init__(self, *, nested=True, masks=False):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.embed, self.drop, self.masks = nn.Embedding(9, 8, padding_idx=0), nn.Dropout(0.1), masks
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(8, 9)

    def forward(self, ids):
        padded = ids == 0
        found = self.head(self.drop(self.encoder(self.embed(ids), src_key_padding_mask=padded)))
        return found.masked_fill(padded[..., None], 0.0) if self.masks else found


def ids(n_rows):
    lengths = torch.arange(n_rows)[:, None] % 4 + 2
    return torch.where(torch.arange(6) < lengths, torch.arange(6) % 5 + lengths % 3 + 1, 0)


def evaluated(example, closed=(), **options):
    torch.manual_seed(0)
    model = Encoding(**options).double()
    twin = copy.deepcopy(model).eval()
    pipe = autopipe.split(model, 2, (example,), n_microbatches=3, costs="estimated", closed=closed)
    found = pipe.eval().runtime(lambda out, _: out.sum()).forward(ids(7))
    with torch.no_grad():
        return (found - twin(ids(7))).abs().max().item()


@pytest.mark.parametrize(
    "options", [{"closed": ["encoder"]}, {"nested": False}, {"masks": True}, {"masks": True, "nested": False}]
)
def test_evaluation_in_microbatches_gives_what_the_model_does(options, caplog):
    assert evaluated(ids(6), **options) < 1e-12
    assert "faster way" not in caplog.text


@pytest.mark.parametrize("example", [ids(6), ids(6).clamp(min=1)], ids=["padded", "whole"])
def test_where_a_faster_way_gives_something_else_capture_says_so(example, caplog):
    assert evaluated(example) > 1e-3
    told = [r for r in caplog.records if "faster way" in r.message]
    assert len(told) == 1
    assert told[0].levelno == logging.WARNING
    assert "torch's encoder takes a faster way" in told[0].message


def test_rows_are_asked_about_in_one_way_only():
    class Translating(nn.Module):
        """Attends to what an encoder makes of padded rows, padding included."""

        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 8, padding_idx=0), nn.Linear(8, 9)
            self.layers = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

        def forward(self, ids, to):
            states = self.layers(self.embed(ids), self.embed(to[:, :-1]), src_key_padding_mask=ids == 0)
            return F.cross_entropy(self.head(states).flatten(0, 1), to[:, 1:].flatten(), ignore_index=0)

    torch.manual_seed(0)
    model, both = Translating().double(), (ids(8), ids(8).flip(0))
    assert not autopipe.capture(model, both).variation.mixing.always
