"""What autograd keeps comes back from the host as it was, copied once each way: gradients are the same."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe import accelerator
from autopipe.runtime.stage.offload import offloaded

HOST = torch.device("cpu")


@pytest.fixture
def copies(monkeypatch):
    """Bytes of each copy to the host and back."""
    away, back = [], []
    to_host, from_host = accelerator.to_host, accelerator.from_host
    monkeypatch.setattr(accelerator, "to_host", lambda t: away.append(t.nbytes) or to_host(t))
    monkeypatch.setattr(accelerator, "from_host", lambda t, d: back.append(t.nbytes) or from_host(t, d))
    return away, back


def gradients(run, leaves, staying=None):
    for leaf in leaves:
        leaf.grad = None
    if staying is None:
        loss = run()
    else:
        with offloaded(HOST, lambda: iter(staying)):
            loss = run()
    loss.backward()
    return loss.detach(), [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]


class Nasty(nn.Module):
    """Views of one storage, transposes, strides of zero, writes in place, indices, masks, dropout."""

    def __init__(self, d=8):
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.LayerNorm(d)
        self.table = nn.Embedding(5, d)

    def forward(self, x, index):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0]
        h = torch.relu_(self.out(x)).transpose(0, 1)
        kept = torch.sigmoid(h)
        first = kept * 2.0
        first = first * first
        first.add_(1.0)  # after it was kept for the product: a copy has the values of then
        second = first * first.exp()
        wide = h.mean(-1, keepdim=True).expand(-1, -1, x.shape[-1])
        y = second.transpose(0, 1) + self.table(index) * wide.transpose(0, 1)
        y = torch.where(y > 0, y, F.dropout(y, 0.3, self.training))
        return self.norm(y).gather(1, index.unsqueeze(-1)).pow(3).sum() + torch.complex(y, y).abs().sum()


@pytest.mark.parametrize("training", [True, False])
def test_gradients_are_those_without(training, copies):
    torch.manual_seed(0)
    model = Nasty().double().train(training)
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    index = torch.randint(0, 5, (3, 5))
    leaves = [x, *model.parameters()]

    def run():
        torch.manual_seed(1)
        return model(x, index)

    wanted = gradients(run, leaves)
    found = gradients(run, leaves, staying=[x, index, *model.parameters()])
    for a, b in zip((wanted[0], *wanted[1]), (found[0], *found[1]), strict=True):
        assert torch.equal(a, b)
    away, back = copies
    assert away
    assert len(back) <= len(away)


def test_a_value_that_several_keep_crosses_once(copies):
    x = torch.randn(64, 64, requires_grad=True)
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(3)]

    def run():
        h = x + 1.0
        return sum((h @ w).sum() for w in weights)

    gradients(run, [x, *weights], staying=weights)
    assert copies == ([64 * 64 * 4], [64 * 64 * 4])


def test_what_stays_is_not_copied(copies):
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    gradients(lambda: (x.t() @ w.t()).sum(), [x, w], staying=[x, w])
    assert copies == ([], [])


def test_a_small_part_of_a_large_memory_crosses_alone(copies):
    batch, w = torch.randn(100, 4), torch.randn(4, 4, requires_grad=True)
    gradients(lambda: (batch[7:9] @ w).sum(), [w], staying=[w])
    assert copies == ([2 * 4 * 4], [2 * 4 * 4])


def test_memory_that_is_used_again_is_another_value(copies):
    """A storage's number may come again once it is freed; what was kept of the first is the first's."""
    w = torch.randn(16, requires_grad=True)

    def run():
        total = torch.zeros(())
        for k in range(6):
            h = torch.full((16,), float(k)) + 1.0
            total = total + (h * w).sum()
            del h
        return total

    _, found = gradients(run, [w], staying=[w])
    assert torch.equal(found[0], torch.full((16,), 21.0))


def test_a_graph_may_be_walked_twice(copies):
    x = torch.randn(4, 4, requires_grad=True)
    with offloaded(HOST, lambda: iter(())):
        y = (x.exp() * x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    second = torch.autograd.grad(y, x)[0]
    assert torch.equal(first, second)
    assert torch.allclose(first, x.exp() * (1 + x))


def test_what_is_sparse_or_conjugated_stays(copies):
    dense = torch.randn(4, 4, requires_grad=True)
    sparse = torch.eye(4).to_sparse()
    phase = torch.randn(4, dtype=torch.complex64).conj()
    wanted = gradients(lambda: (sparse @ dense).sum() + (dense * phase).abs().sum(), [dense])
    found = gradients(lambda: (sparse @ dense).sum() + (dense * phase).abs().sum(), [dense], staying=[])
    assert torch.equal(wanted[1][0], found[1][0])
