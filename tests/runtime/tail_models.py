"""Models that mix the rows of a batch at their end, each with a batch of so many rows."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 6


def layers(n, out=WIDTH):
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, out))


def features(n):
    return (torch.randn(n, WIDTH),)


class TwoTowers(nn.Module):
    """In-batch negatives, symmetric, with a learnt temperature."""

    def __init__(self):
        super().__init__()
        self.a, self.b = layers(2), layers(2)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x, y):
        u, v = F.normalize(self.a(x), dim=-1), F.normalize(self.b(y), dim=-1)
        scores = u @ v.T * self.scale.exp()
        labels = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


class Views(nn.Module):
    """SimCLR: two views of each row in one batch, each told from all others."""

    def __init__(self):
        super().__init__()
        self.a, self.b = layers(2), layers(2)

    def forward(self, x):
        z = F.normalize(torch.cat([self.a(x), self.b(x)]), dim=-1)
        itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
        other = (torch.arange(len(z), device=z.device) + len(z) // 2) % len(z)
        return F.cross_entropy((z @ z.T / 0.5).masked_fill(itself, -1e9), other)


class OneBody(nn.Module):
    """SimCLR as mostly written: both views go through one body as one batch; masks cut labels and scores."""

    def __init__(self):
        super().__init__()
        self.body = layers(3)

    def forward(self, x, y):
        z = F.normalize(self.body(torch.cat([x, y])), dim=1)
        of = torch.cat([torch.arange(len(x)) for _ in range(2)])
        same, scores = of[None] == of[:, None], z @ z.T
        itself = torch.eye(len(of), dtype=torch.bool)
        same, scores = same[~itself].view(len(of), -1), scores[~itself].view(len(of), -1)
        positives, negatives = (scores[kind].view(len(of), -1) for kind in (same, ~same))
        logits = torch.cat([positives, negatives], 1) / 0.1
        return F.cross_entropy(logits, torch.zeros(len(of), dtype=torch.int64)), logits


class Mined(nn.Module):
    """Triplets with the hardest positive and negative of the batch."""

    def __init__(self):
        super().__init__()
        self.body = layers(3)

    def forward(self, x, labels):
        z = self.body(x)
        distance = (z[:, None] - z[None]).square().sum(-1)
        same = labels[:, None] == labels[None]
        farthest = distance.masked_fill(~same, -1e9).amax(1)
        nearest = distance.masked_fill(same, 1e9).amin(1)
        return {"loss": F.relu(farthest - nearest + 1.0).mean(), "features": z}


class Supervised(nn.Module):
    """Supervised contrastive: rows of a label attract one another."""

    def __init__(self):
        super().__init__()
        self.body = layers(3)

    def forward(self, x, labels):
        z = F.normalize(self.body(x), dim=-1)
        others = ~torch.eye(len(z), dtype=torch.bool)
        same = (labels[:, None] == labels[None]) & others
        scores = (z @ z.T / 0.3).masked_fill(~others, -1e9).log_softmax(1)
        counts = same.sum(1)
        return -((scores * same).sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum()


class Experts(nn.Module):
    """A mixture of experts: task loss, and balance of the load over the batch."""

    def __init__(self):
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))
        self.experts = nn.ModuleList(nn.ModuleList(layers(0) for _ in range(3)) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x, labels):
        shares = []
        for router, experts in zip(self.routers, self.experts, strict=True):
            shares.append(router(x).softmax(-1))
            x = x + sum(shares[-1][:, i : i + 1] * expert(x) for i, expert in enumerate(experts))
        logits = self.head(x)
        probability = torch.cat(shares)
        chosen = F.one_hot(probability.argmax(-1), 3).to(x.dtype)
        balance = 3 * (chosen.mean(0) * probability.mean(0)).sum()
        return F.cross_entropy(logits, labels) + 0.1 * balance, logits


class Routed(Experts):
    """Experts that are given the rows which chose them, each layer with a balance of the load of its own."""

    def forward(self, x, labels):
        balance = 0.0
        for router, experts in zip(self.routers, self.experts, strict=True):
            share = router(x).softmax(-1)
            weights, chosen = share.topk(2)
            out = torch.zeros_like(x)
            for i, expert in enumerate(experts):
                rows, nth = torch.where(chosen == i)
                out[rows] += weights[rows, nth, None] * expert(x[rows])
            x = x + out
            balance = balance + (F.one_hot(chosen[:, 0], 3).to(x.dtype).mean(0) * share.mean(0)).sum()
        return F.cross_entropy(self.head(x), labels) + 0.1 * balance


class Balanced(nn.Module):
    """Balance of experts that are chosen by their features alone."""

    def __init__(self):
        super().__init__()
        self.body, self.router = layers(3), nn.Linear(WIDTH, 3)

    def forward(self, x):
        share = self.router(x).softmax(-1)
        chosen = F.one_hot(share.argmax(-1), 3).to(x.dtype)
        return self.body(x).square().mean() + (chosen.mean(0) * share.mean(0)).sum()


class Counted(nn.Module):
    """Balance of experts counted in place, over rows that a mask of ones in the example counts."""

    def __init__(self):
        super().__init__()
        self.body, self.router = layers(3), nn.Linear(WIDTH, 3)

    def forward(self, x, mask):
        share = self.router(x + self.body(x)).softmax(-1)
        load = torch.zeros(3, dtype=x.dtype).scatter_add_(0, share.argmax(-1), mask.to(x.dtype))
        n = mask.sum()
        return (load / n * ((share * mask[:, None]).sum(0) / n)).sum()


class Normalised(nn.Module):
    """A squared error over the variance in the batch."""

    def __init__(self):
        super().__init__()
        self.body = layers(3, 1)

    def forward(self, x, y):
        out = self.body(x)[:, 0]
        return (out - y).square().mean() / (y.var() + out.var().detach() + 1e-3)


class Ranked(nn.Module):
    """Every pair of rows in its order, through layers that look at pairs."""

    def __init__(self):
        super().__init__()
        self.body, self.pair = layers(4), nn.Linear(2 * WIDTH, 1)

    def forward(self, x, y):
        z = self.body(x)
        n = len(z)
        pairs = torch.cat([z[:, None].expand(n, n, -1), z[None].expand(n, n, -1)], -1)
        return F.binary_cross_entropy_with_logits(
            self.pair(pairs)[..., 0], (y[:, None] > y[None]).to(z.dtype)
        )


class Regular(nn.Module):
    """VICReg: invariance, variance over the batch, covariance of features."""

    def __init__(self):
        super().__init__()
        self.body = layers(3)

    def forward(self, x, y):
        u, v = self.body(x), self.body(y)
        loss = F.mse_loss(u, v)
        for z in (u, v):
            z = z - z.mean(0)
            spread = (z.var(0) + 1e-4).sqrt()
            covariance = z.T @ z / (len(z) - 1)
            off = covariance - torch.diag(covariance.diagonal())
            loss = loss + F.relu(1 - spread).mean() + off.square().sum() / WIDTH
        return loss


class Twins(nn.Module):
    """Barlow twins: the correlation of two views' features, normalised over the batch."""

    def __init__(self):
        super().__init__()
        self.body = layers(3)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x, y):
        c = self.norm(self.body(x)).T @ self.norm(self.body(y)) / x.shape[0]
        on, off = (c.diagonal() - 1).square().sum(), c.square().sum() - c.diagonal().square().sum()
        return on + 0.05 * off


class Picked(nn.Module):
    """Each row against another that an input names."""

    def __init__(self):
        super().__init__()
        self.body = layers(3)

    def forward(self, x, partner):
        z = self.body(x)
        return (1 - F.cosine_similarity(z, z[partner])).mean()


class Similar(nn.Module):
    """The matrix of cosine similarities is its output; the loss is made of it elsewhere."""

    def __init__(self):
        super().__init__()
        self.body, self.drop = layers(3), nn.Dropout(0.3)

    def forward(self, x):
        z = F.normalize(self.drop(self.body(x)), dim=-1)
        return z @ z.T


class Sequences(nn.Module):
    """Tokens flattened over batch and time, told from all others of the batch."""

    def __init__(self):
        super().__init__()
        self.embed, self.body = nn.Embedding(11, WIDTH), layers(3)

    def forward(self, ids):
        z = self.body(self.embed(ids)).reshape(-1, WIDTH)
        scores = z @ z.T / WIDTH
        return scores.logsumexp(-1).mean() - scores.diagonal().mean()


class Early(nn.Module):
    """Rows attend to one another in the middle: no tail."""

    def __init__(self):
        super().__init__()
        self.a, self.b = layers(1), layers(4)

    def forward(self, x, y):
        z = self.a(x)
        z = (z @ z.T).softmax(-1) @ z
        return F.mse_loss(z + self.b(z), y)


def labels(n):
    return torch.arange(n) % 3


MODELS = {
    TwoTowers: lambda n: (*features(n), *features(n)),
    Views: features,
    OneBody: lambda n: (*features(n), *features(n)),
    Mined: lambda n: (*features(n), labels(n)),
    Supervised: lambda n: (*features(n), labels(n)),
    Experts: lambda n: (*features(n), labels(n)),
    Routed: lambda n: (*features(n), labels(n)),
    Counted: lambda n: (*features(n), torch.ones(n, dtype=torch.int64)),
    Normalised: lambda n: (*features(n), torch.randn(n)),
    Ranked: lambda n: (*features(n), torch.randn(n)),
    Regular: lambda n: (*features(n), *features(n)),
    Twins: lambda n: (*features(n), *features(n)),
    Picked: lambda n: (*features(n), (torch.arange(n) ^ 1) % n),
    Similar: features,
    Sequences: lambda n: (torch.randint(11, (n, 3)),),
}
