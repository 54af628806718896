"""I then W gives exactly what B gives, and what cannot wait is not split."""

import copy
import weakref

import pytest
import torch
from runtime_models import Custom, Twice, grads, worst
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from autopipe.runtime.stage.backward import backward_input


class Branches(nn.Module):
    """Reused, viewed, fused and side-path weights around a spine."""

    def __init__(self, d=5):
        super().__init__()
        self.twice, self.custom = Twice(d), Custom(d)
        self.shared = nn.Parameter(torch.randn(d, d))
        self.side = nn.Parameter(torch.randn(d))
        self.frozen = nn.Linear(d, d).requires_grad_(False)
        self.lstm = nn.LSTM(d, d, batch_first=True)
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        w = self.shared.t()
        x = torch.tanh(x @ w) @ w + (self.side * 2).exp()
        a, b = self.custom(self.twice(x)).chunk(2, 0)
        x = self.frozen(torch.cat([b, a]))
        return self.norm(self.lstm(x)[0]), self.side.sum()


def split(roots, seeds, leaves):
    """With the roots as they are, or what stands for them."""
    return backward_input([*roots[1:], *map(get_gradient_edge, roots[:1])], [*seeds[1:], *seeds[:1]], leaves)


def run(model, is_split, xs):
    model.zero_grad()
    for x in xs:
        out, alone = model(x)
        roots, seeds = [out, alone], [torch.ones_like(out).cumsum(1), torch.ones_like(alone)]
        if is_split:
            leaves = [x] if x.requires_grad else []
            work = split(roots, seeds, leaves)
            if leaves:
                assert x.grad is not None
            early = grads(model.named_parameters())
            work.run()
        else:
            torch.autograd.backward(roots, seeds)
            early = {}
    return grads(model.named_parameters()), early


def inputs(requires_grad):
    torch.manual_seed(1)
    return [torch.randn(4, 3, 5, dtype=torch.float64).requires_grad_(requires_grad) for _ in range(2)]


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parts_sum_to_the_whole(requires_grad):
    torch.manual_seed(0)
    model = Branches().double()
    whole_inputs, split_inputs = inputs(requires_grad), inputs(requires_grad)
    whole, _ = run(model, False, whole_inputs)
    found, _ = run(model, True, split_inputs)
    assert worst(found, whole) < 1e-12
    if requires_grad:
        for a, b in zip(whole_inputs, split_inputs, strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-13)


def test_only_what_cannot_wait_is_early():
    torch.manual_seed(0)
    model = Branches().double()
    x = inputs(True)[0]
    out, alone = model(x)
    work = split([out, alone], [torch.ones_like(out), torch.ones_like(alone)], [x])
    early = {name for name, g in grads(model.named_parameters()).items() if g is not None}
    # used at several nodes (an LSTM on the CPU runs its cell's ops one by one), below a custom function,
    # beside the spine, or at nodes without a matrix
    several = {"shared", "twice.lin.weight", "twice.lin.bias", "lstm.weight_hh_l0", "lstm.bias_hh_l0"}
    no_matrix = {"norm.weight", "norm.bias", "lstm.bias_ih_l0"}
    assert early == several | no_matrix | {"side", "custom.w"}
    work.run()
    missing = {name for name, g in grads(model.named_parameters()).items() if g is None}
    assert missing == {"frozen.weight", "frozen.bias"}


def test_a_hook_on_a_value_counts_once():
    torch.manual_seed(0)
    lin = nn.Linear(3, 3).double()
    plain = copy.deepcopy(lin)

    def build(module):
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        y = module(x)
        y.register_hook(lambda g: 2 * g)
        return x, y.sin().sum()

    x, loss = build(plain)
    loss.backward()
    leaf, loss = build(lin)
    split([loss], [torch.ones_like(loss)], [leaf]).run()
    torch.testing.assert_close(lin.weight.grad, plain.weight.grad)
    torch.testing.assert_close(leaf.grad, x.grad)


def test_hooks_on_accumulation_forbid_the_split():
    lin = nn.Linear(3, 3)
    calls = []
    lin.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))
    x = torch.ones(2, 3, requires_grad=True)
    split([lin(x).sum()], [torch.ones(())], [x]).run()
    assert calls == [True]


class Reentrant(nn.Sequential):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=True)


@pytest.mark.parametrize(
    "wrap",
    [lambda m: torch.compile(m, backend="aot_eager"), lambda m: Reentrant(*m)],
    ids=("compiled", "again"),
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_parts_in_one_piece_run_once(wrap):
    """What ``torch.compile`` made gives up in a backward what it saved, and a reentrant checkpoint refuses
    to be asked for some gradients: only a whole backward is right.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).double()
    plain = copy.deepcopy(model)
    model = nn.Sequential(model[0], wrap(model[1:4]), model[4])
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    split([model(x).sin().sum()], [torch.ones((), dtype=torch.float64)], [x]).run()
    plain(x.detach()).sin().sum().backward()
    found = [p.grad for p in model.parameters()]
    assert all(torch.allclose(a, p.grad) for a, p in zip(found, plain.parameters(), strict=True))


class Kept(nn.Module):
    """Values between its two weights that only gradients of inputs go by; ``seen`` are their memories."""

    def __init__(self, d=8):
        super().__init__()
        self.first, self.last = nn.Linear(d, d), nn.Linear(d, d)
        self.norm, self.scale = nn.LayerNorm(d), nn.Parameter(torch.randn(d))
        self.seen = []

    def note(self, x):
        self.seen.append(weakref.ref(x.untyped_storage()))
        return x

    def forward(self, x):
        h = self.note(self.first(x)).cos().exp()
        q = self.note(h).view(1, 2, -1, 8)
        h = self.note(nn.functional.scaled_dot_product_attention(q, q * 2, q * 3)).view(-1, 8).cos()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            h = h.sin()
        h = h[torch.arange(h.shape[0]).flip(0)] * self.note(h.sigmoid())
        h = self.note(self.norm(self.note(h.exp()))) * self.scale
        return self.last(h.tanh())


def test_from_i_to_w_only_what_w_needs_is_kept():
    torch.manual_seed(0)
    model, x = Kept().double(), torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    model(x).sum().backward()
    wanted, gradient = grads(model.named_parameters()), x.grad
    model.zero_grad()
    x.grad = None
    model.seen.clear()
    seed = torch.ones(4, 8, dtype=torch.float64)
    out = model(x)
    assert all(seen() is not None for seen in model.seen)
    work = backward_input([get_gradient_edge(out)], [seed], [x])
    assert not any(seen() is not None for seen in model.seen)
    work.run()
    assert worst(grads(model.named_parameters()), wanted) == 0
    torch.testing.assert_close(x.grad, gradient, rtol=0, atol=0)
