"""A hook that a forward puts on a value sees its gradient wherever the model is cut."""

import pytest
import torch
from crossed import crossed
from splitting import split_by_layers
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


@crossed(schedule=["gpipe", "1f1b", "zb-h1"], n_stages=[2, 3, 4], is_used_late=[False, True])
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


class Kept(nn.Module):
    """Code that stays whole and puts a hook on what it computes."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        out = self.inner(x) * float(x.detach().numpy().shape[1])
        out.register_hook(lambda g: 2 * g)
        return out


@pytest.mark.parametrize("is_of_layer", [False, True], ids=["in code kept whole", "by a layer's hook"])
def test_a_hook_on_a_value_of_a_layer_is_put_where_the_stage_computes_again(is_of_layer):
    torch.manual_seed(0)
    middle = nn.Linear(4, 4) if is_of_layer else Kept()
    if is_of_layer:
        middle.register_forward_hook(lambda m, inputs, out: (out.register_hook(lambda g: 2 * g), out)[1])
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), middle, nn.Tanh(), nn.Linear(4, 4)).double()
    x = torch.randn(6, 4, dtype=torch.float64)
    pipe = split_by_layers(model, 3, (x,), n_microbatches=1, recompute="always")
    runtime = pipe.runtime(loss_fn=lambda out, _: out.square().mean())
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
        expected = [p.grad for p in model.parameters()]
        model.zero_grad()
        runtime.step(x)
        torch.testing.assert_close([p.grad for p in model.parameters()], expected)


class Unasked(nn.Module):
    """Puts a hook on a value without asking whether it takes a gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        h.register_hook(lambda g: 2 * g)
        return self.last(h.tanh())


def test_a_hook_that_needs_a_gradient_leaves_sizes_free():
    torch.manual_seed(0)
    model = Unasked().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    pipe = split_by_layers(model, 2, (x,), n_microbatches=3)
    assert ("x", 0) not in pipe.graph.variation.fixed
    model(x).square().mean().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    pipe.runtime(loss_fn=lambda out, _: out.square().mean()).step(x)
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


def test_hooks_on_a_weights_gradient_are_not_called_where_a_step_records_the_model_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x, called = torch.randn(6, 4, dtype=torch.float64), []
    pipe = split_by_layers(model, 2, (x,), n_microbatches=2)
    rt = pipe.runtime(loss_fn=lambda out, target: (out - target).square().mean())
    model[0].weight.register_hook(lambda grad: called.append(grad.clone()))
    model[2].weight.requires_grad_(False)
    rt.step(x, target=x)
    assert len(called) == 1
    assert torch.equal(called[0], model[0].weight.grad)
