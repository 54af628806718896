"""A hook that a forward puts on a value sees its gradient wherever the model is cut."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe


class Hooked(nn.Module):
    """Doubles the gradient of a value, and uses it early and late."""

    def __init__(self, is_used_late):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.is_used_late = is_used_late

    def forward(self, x, y):
        h = self.layers[0](x)
        if h.requires_grad:
            h.register_hook(lambda g: 2 * g)
        out = h
        for layer in self.layers[1:]:
            out = layer(out).tanh()
        return F.cross_entropy(out + h if self.is_used_late else out, y)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("n_stages", [2, 3, 4])
@pytest.mark.parametrize("is_used_late", [False, True])
def test_a_hook_on_a_value_sees_its_whole_gradient(is_used_late, n_stages, schedule):
    torch.manual_seed(0)
    model = Hooked(is_used_late).double()
    x, y = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 4
    model(x, y).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    pipe = autopipe.split(model, n_stages, (x, y), costs="estimated", n_microbatches=2, schedule=schedule)
    pipe.runtime().step(x, y)
    for p, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-10, atol=1e-12)
