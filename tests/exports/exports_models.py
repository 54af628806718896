"""Models whose splits need what plain chains lack: values that skip stages, numbers, masks, branches."""

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["MODELS"]


class Skips(nn.Module):
    """The first layer's value and an input are used by every later one."""

    def __init__(self, n=6, width=8):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(n))
        self.head = nn.Linear(width, 3)

    def forward(self, x, scale):
        start = h = self.first(x)
        for layer in self.layers:
            h = torch.tanh(layer(torch.cat([h, start], -1))) * scale
        return self.head(h), h.mean(-1)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, n=4, width=8, vocab=11):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(n))
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        h = self.embedding(ids)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.head(h)


class Padded(nn.Module):
    """Asks its mask a question, and uses ids and mask at its end."""

    def __init__(self, n=6, width=8, vocab=11):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(n))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids, mask):
        h = self.embedding(ids)
        keeps_all = bool(mask.all())
        for layer in self.layers:
            h = h + torch.tanh(layer(h if keeps_all else h * mask.unsqueeze(-1)))
        return {"logits": self.head(h) + ids.unsqueeze(-1) * 0.01, "n": h.shape[1]}


class Contrastive(nn.Module):
    """Its loss compares each row with all others."""

    def __init__(self, n=4, width=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = F.normalize(x, dim=-1)
        return F.cross_entropy(x @ x.t(), torch.arange(x.shape[0], device=x.device))


def skips():
    model = Skips().double()
    x, scale = torch.randn(8, 5, 8).double(), torch.rand(8, 1, 1).double() + 0.5
    target = torch.randn(8, 5, 3).double()

    def loss(output, target):
        return F.mse_loss(output[0], target) + output[1].square().mean()

    return model, (x, scale), {}, loss, target


def padded():
    model = Padded().double()
    ids = torch.randint(0, 11, (8, 6))
    mask = torch.ones(8, 6)
    mask[3:6, 4:] = 0  # the second and third microbatch of two rows go the other way
    target = torch.randint(0, 11, (8, 6))

    def loss(output, target):
        logits = output["logits"] if isinstance(output, dict) else output
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())

    return model, (ids, mask.double()), {}, loss, target


def tied():
    return Tied().double(), (torch.randint(0, 11, (8, 6)),), {}, None, None


def contrastive():
    return Contrastive().double(), (torch.randn(8, 8).double(),), {}, None, None


MODELS = {"skips": skips, "padded": padded, "tied": tied, "contrastive": contrastive}
