"""Tensors that code has set on others as attributes: results have them too, wherever the model is cut."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe


class Softmax(nn.Module):
    """Keeps the logits on what it makes of them."""

    def forward(self, logits):
        made = F.softmax(logits, -1)
        made.logits = logits
        return made


class Marking(nn.Module):
    """Returns a tensor with its logits, by code of its own or a layer's."""

    def __init__(self, of_layer, reads):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.softmax, self.of_layer, self.reads = Softmax(), of_layer, reads

    def forward(self, x):
        x = self.layers(x)
        if self.of_layer:
            made = self.softmax(x)
        else:
            made = F.softmax(x, -1)
            made.logits = x
        return {"made": made, "log": made.logits.logsumexp(-1)} if self.reads else made


@pytest.mark.parametrize("of_layer", [False, True])
@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("n_microbatches", [1, 3])
def test_what_is_set_on_a_result_is_there(of_layer, reads, n_microbatches):
    torch.manual_seed(0)
    model = Marking(of_layer, reads).double()
    twin = copy.deepcopy(model)
    x = torch.randn(6, 4, dtype=torch.float64)

    def loss(out, _=None):
        made = out["made"] if reads else out
        return made.logits.square().mean() + made[:, 0].mean()

    pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=n_microbatches)
    out, wanted = pipe(x + 1), twin(x + 1)
    if reads:
        out, wanted = out["made"], wanted["made"]
    torch.testing.assert_close(out.logits, wanted.logits)
    expected = loss(twin(x + 1))
    expected.backward()
    assert abs(pipe.runtime(loss_fn=loss).step(x + 1).loss.item() - expected.item()) < 1e-12
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
