"""What the programs of users train, and how they are held against the plain model."""

import torch
from accelerated_checks import DEVICE, WORLD
from torch import nn
from torch.nn import functional as F

import autopipe

CLOSE = 1e-6


class Net(nn.Module):
    """A small language model: tied embedding, attention, dropout."""

    def __init__(self, d=16, vocab=32, p=0.0, n=2):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(d, 2, 2 * d, p, batch_first=True) for _ in range(n)
        )
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        h = self.emb(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


class Mlp(nn.Module):
    def __init__(self, d=8, p=0.0):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(4))
        self.drop = nn.Dropout(p)

    def forward(self, x):
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(x)))
        return x


class Writes(nn.Module):
    """Writes to its input, and to what it makes of it."""

    def __init__(self, d=8):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        x = x.clone()
        x[:, 0] = 0
        h = self.a(x)
        h.mul_(2).add_(x).relu_()
        return self.b(h)


class Labelled(nn.Module):
    """Averages over the labels that count, as language models do."""

    def __init__(self):
        super().__init__()
        self.net = Net()

    def forward(self, ids, labels):
        return F.cross_entropy(self.net(ids).flatten(0, 1), labels.flatten())


def loss_fn(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())


def ids(rows=8, seed=0):
    return torch.randint(0, 32, (rows, 6), generator=torch.Generator().manual_seed(seed))


def numbers(rows=8, seed=0, dtype=torch.float32):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def seeded(model_type, *args, **options):
    torch.manual_seed(0)
    return model_type(*args, **options)


def split(model, example, n_stages=WORLD, *, loss=loss_fn, device=DEVICE, runtime=None, **options):
    options = {"n_microbatches": 4, "costs": "estimated", **options}
    pipe = autopipe.split(model, n_stages, (example,), **options)
    return pipe, pipe.runtime(loss, device=device, **(runtime or {}))


def alike(runtime, plain, tolerance=CLOSE):
    """This rank's parameters and buffers are those of the plain model, on this rank's device."""
    named = dict(plain.named_parameters(remove_duplicate=False)) | dict(plain.named_buffers())
    for stage in runtime.stages:
        for name, value in (*stage.named_parameters(), *stage.named_buffers()):
            if name == "_anchor":
                continue
            assert value.device == runtime.device, name
            wanted = named[name].detach().cpu()
            error = (value.detach().cpu().double() - wanted.double()).abs().max().item()
            assert error <= tolerance, (name, error)


def near(a, b, tolerance=CLOSE):
    assert abs(float(a) - float(b)) <= tolerance, (float(a), float(b))


def follow(runtime, plain, loss, batches, tolerance=CLOSE, optimizer=torch.optim.SGD):
    """Train both on the batches."""
    optimizers = [optimizer(list(m.parameters()), 0.05) for m in (runtime, plain)]
    for batch in batches:
        found = runtime.step(batch, target=batch).loss
        there = batch.to(DEVICE)
        wanted = loss(plain(there), there)
        wanted.backward()
        near(found, wanted, 10 * tolerance)
        for o in optimizers:
            o.step()
            o.zero_grad()
    alike(runtime, plain, 10 * tolerance)


def same_gradients(runtime, plain, tolerance=1e-5):
    named = dict(plain.named_parameters())
    for name, p in runtime.named_parameters():
        torch.testing.assert_close(p.grad.cpu(), named[name].grad.cpu(), atol=tolerance, rtol=0)
