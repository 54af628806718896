"""Models of papers on rankings, survival, sequences, memories and games, whose forward makes the loss where a trainer's would.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from .by_hand import ids, listed

__all__: list[str] = []


def mlp(*widths: int, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(a, b)] + ([act()] if i < len(widths) - 2 else [])
    return nn.Sequential(*layers)


def block(width: int = 32, heads: int = 4) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)


# rankings and recommendations
@listed(lambda b, n: (ids(b, n), torch.randint(1, n, (b,)), torch.randint(64, (b,))))
class SRGNN(nn.Module):
    """Sessions as graphs: the items of each row made unique, padded to the most of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.cell, self.edge = nn.Embedding(64, 24, padding_idx=0), nn.GRUCell(48, 24), nn.Linear(24, 48)
        self.q, self.k, self.v, self.out = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 1, bias=False), nn.Linear(48, 24)

    def forward(self, items: Tensor, lengths: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        b, n = items.shape
        mask = torch.arange(n, device=items.device)[None] < lengths[:, None]
        items = items * mask
        adjacency = torch.zeros(b, n, n, device=items.device)
        same = (items[:, :, None] == items[:, None, :]).float()
        adjacency[:, torch.arange(n - 1), torch.arange(1, n)] = mask[:, 1:].float()
        adjacency = same @ adjacency @ same
        adjacency = adjacency / adjacency.sum(-1, keepdim=True).clamp(min=1)
        h = self.emb(items)
        for _ in range(2):
            a, c = self.edge(h).chunk(2, -1)
            m = torch.cat([adjacency @ a, adjacency.transpose(1, 2) @ c], -1)
            h = self.cell(m.reshape(-1, 48), h.reshape(-1, 24)).view(b, n, 24)
        last = h[torch.arange(b), lengths - 1]
        alpha = self.v(torch.sigmoid(self.q(last)[:, None] + self.k(h)))
        pooled = (alpha * h * mask[..., None]).sum(1)
        scores = self.out(torch.cat([pooled, last], 1)) @ self.emb.weight[1:].T
        return F.cross_entropy(scores, target.clamp(max=62)), scores


@listed(lambda b, n: (ids(b, n), torch.zeros(2, b, 24)))
class GRU4Rec(nn.Module):
    """Session-parallel steps with TOP1-max over the others of the batch as negatives, and its state handed back."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.gru, self.out = nn.Embedding(64, 24), nn.GRU(24, 24, 2), nn.Embedding(64, 25)

    def forward(self, items: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        x, target = items[:, :-1].t(), items[:, 1:].t()
        y, hidden = self.gru(self.emb(x), hidden)
        w = self.out(target)
        logits = torch.einsum("tbd,tcd->tbc", y, w[..., :-1]) + w[..., -1].unsqueeze(1)
        soft = logits.softmax(-1)
        positive = logits.diagonal(dim1=1, dim2=2).unsqueeze(-1)
        loss = (soft * ((logits - positive).sigmoid() + (logits ** 2).sigmoid())).sum(-1).mean()
        return loss, hidden.detach()


@listed(lambda b, n: (ids(b, n), ids(b, n), ids(b, 1)[:, 0], torch.randint(2, (b,)).float()))
class DIEN(nn.Module):
    """Interest evolution: an auxiliary loss on the next clicks, then a GRU whose update gates attend to the target."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.gru, self.aux, self.att = nn.Embedding(64, 16), nn.GRU(16, 16, batch_first=True), mlp(32, 16, 1), nn.Linear(16, 16, bias=False)
        self.gates, self.candidate, self.top = nn.Linear(32, 32), nn.Linear(32, 16), mlp(48, 32, 16, 1, act=nn.PReLU)

    def forward(self, clicks: Tensor, skipped: Tensor, target: Tensor, label: Tensor) -> dict[str, Tensor]:
        x, t = self.emb(clicks), self.emb(target)
        h, _ = self.gru(x)
        pos = self.aux(torch.cat([h[:, :-1], x[:, 1:]], -1)).squeeze(-1)
        neg = self.aux(torch.cat([h[:, :-1], self.emb(skipped)[:, 1:]], -1)).squeeze(-1)
        aux = -(F.logsigmoid(pos) + F.logsigmoid(-neg)).mean()
        score = torch.bmm(self.att(h), t.unsqueeze(-1)).softmax(1)
        state = torch.zeros_like(t)
        for step in range(h.shape[1]):
            both = torch.cat([h[:, step], state], -1)
            update, reset = torch.sigmoid(self.gates(both)).chunk(2, -1)
            update = update * score[:, step]
            new = torch.tanh(self.candidate(torch.cat([h[:, step], reset * state], -1)))
            state = (1 - update) * state + update * new
        logit = self.top(torch.cat([state, t, x.sum(1) * t], -1)).squeeze(1)
        main = F.binary_cross_entropy_with_logits(logit, label)
        return {"loss": main + 0.5 * aux, "aux": aux.detach(), "logit": logit}


@listed(lambda b, n: ({"dense": torch.randn(b, 4), "cat": torch.randint(0, 10, (b, 5))}, torch.randint(2, (b,)).float()))
class DCNv2(nn.Module):
    """Low-rank cross layers with experts, beside a deep tower; features by name in a dict."""

    def __init__(self, n: int = 3) -> None:
        super().__init__()
        self.emb = nn.ModuleDict({f"c{i}": nn.Embedding(10, 4) for i in range(5)})
        self.u, self.v, self.c = (nn.ParameterList(nn.Parameter(torch.randn(4, *s) * 0.2) for _ in range(n)) for s in ((24, 6), (24, 6), (6, 6)))
        self.gate, self.bias = nn.ModuleList(nn.Linear(24, 4) for _ in range(n)), nn.ParameterList(nn.Parameter(torch.zeros(24)) for _ in range(n))
        self.deep, self.top = mlp(24, 32, 16), nn.Linear(40, 1)

    def forward(self, features: dict[str, Tensor], label: Tensor) -> Tensor:
        parts = [emb(features["cat"][:, int(name[1:])]) for name, emb in self.emb.items()]
        x = x0 = torch.cat([features["dense"], *parts], 1)
        for u, v, c, gate, bias in zip(self.u, self.v, self.c, self.gate, self.bias, strict=True):
            low = torch.tanh(torch.einsum("bi,eir->ber", x, v))
            low = torch.tanh(torch.einsum("ber,ers->bes", low, c))
            out = x0.unsqueeze(1) * (torch.einsum("ber,eir->bei", low, u) + bias)
            x = (out * gate(x).softmax(-1).unsqueeze(-1)).sum(1) + x
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, self.deep(x0)], 1)).squeeze(-1), label)


@listed(lambda b, n: (torch.randn(b, 20), torch.randint(2, (b,)).float(), torch.randint(2, (b,)).float()))
class PLE(nn.Module):
    """Progressive layered extraction, with the whole space's losses of ESMM on top: click, and click and buy."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList()
        for width in (20, 16):
            level = nn.ModuleDict({"shared": nn.ModuleList(mlp(width, 16) for _ in range(2))})
            for task in ("click", "buy"):
                level[task] = nn.ModuleList(mlp(width, 16) for _ in range(2))
                level[f"gate_{task}"] = nn.Linear(width, 4)
            level["gate_shared"] = nn.Linear(width, 6)
            self.levels.append(level)
        self.towers = nn.ModuleDict({"click": mlp(16, 8, 1), "buy": mlp(16, 8, 1)})

    def forward(self, x: Tensor, click: Tensor, buy: Tensor) -> dict[str, Tensor]:
        state = {"shared": x, "click": x, "buy": x}
        for level in self.levels:
            out = {k: torch.stack([F.relu(e(state[k])) for e in level[k]], 1) for k in ("shared", "click", "buy")}
            mixed = {k: torch.cat([out[k], out["shared"]], 1) for k in ("click", "buy")}
            mixed["shared"] = torch.cat(list(out.values()), 1)
            state = {k: torch.einsum("be,bew->bw", level[f"gate_{k}"](state[k]).softmax(-1), v) for k, v in mixed.items()}
        ctr = self.towers["click"](state["click"]).sigmoid().squeeze(-1)
        cvr = self.towers["buy"](state["buy"]).sigmoid().squeeze(-1)
        loss = F.binary_cross_entropy(ctr, click) + F.binary_cross_entropy(ctr * cvr, click * buy)
        return {"loss": loss, "ctr": ctr, "cvr": cvr}


@listed(lambda b, n: (torch.randint(0, 20, (b,)), torch.randint(0, 30, (b,)), torch.randint(0, 30, (b,))))
class LightGCN(nn.Module):
    """Propagation over a sparse adjacency of all users and items, a BPR loss, and the norm of what a batch used."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(20, 16), nn.Embedding(30, 16)
        g = torch.Generator().manual_seed(3)
        seen = torch.rand(20, 30, generator=g) < 0.2
        full = torch.zeros(50, 50)
        full[:20, 20:] = seen.float()
        full[20:, :20] = seen.float().T
        degree = full.sum(1).clamp(min=1) ** -0.5
        graph = (degree[:, None] * full * degree[None]).to_sparse().coalesce()
        self.register_buffer("places", graph.indices())
        self.register_buffer("values", graph.values())

    def forward(self, users: Tensor, pos: Tensor, neg: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([self.user.weight, self.item.weight])
        layers, graph = [x], torch.sparse_coo_tensor(self.places, self.values, (50, 50))
        for _ in range(3):
            layers.append(torch.sparse.mm(graph, layers[-1]))
        users_out, items_out = torch.split(torch.stack(layers, 1).mean(1), [20, 30])
        u, p, q = users_out[users], items_out[pos], items_out[neg]
        reg = 0.5 * (self.user(users).norm(2).pow(2) + self.item(pos).norm(2).pow(2) + self.item(neg).norm(2).pow(2)) / float(len(users))
        loss = F.softplus((u * q).sum(1) - (u * p).sum(1)).mean()
        return loss + 1e-4 * reg, reg


@listed(lambda b, n: (ids(b, 8), ids(b, n), torch.ones(b, 8, dtype=torch.bool), torch.rand(b, n) < 0.8))
class ColBERT(nn.Module):
    """Late interaction of every query with every document of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos, self.enc, self.proj = nn.Embedding(64, 32), nn.Embedding(64, 32), nn.ModuleList(block() for _ in range(3)), nn.Linear(32, 8, bias=False)

    def encode(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.emb(x) + self.pos.weight[: x.size(1)]
        for layer in self.enc:
            h = layer(h, src_key_padding_mask=~mask)
        return F.normalize(self.proj(h), dim=-1) * mask.unsqueeze(-1)

    def forward(self, query: Tensor, document: Tensor, query_mask: Tensor, document_mask: Tensor) -> tuple[Tensor, Tensor]:
        document_mask = document_mask | (torch.arange(document.size(1)) == 0)
        q, d = self.encode(query, query_mask), self.encode(document, document_mask)
        scores = torch.einsum("qid,pjd->qpij", q, d).masked_fill(~document_mask[None, :, None], -1e4).amax(-1)
        scores = scores.masked_fill(~query_mask[:, None], 0).sum(-1)
        return F.cross_entropy(scores / 0.05, torch.arange(len(scores), device=scores.device)), scores


@listed(lambda b, n: (ids(b, 8), ids(b, n), ids(b, n)))
class SPLADE(nn.Module):
    """Sparse lexical vectors with FLOPS regularisers, whose weight grows with the number of calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.enc = nn.Embedding(64, 32), nn.ModuleList(block() for _ in range(3))
        self.transform, self.bias = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32)), nn.Parameter(torch.zeros(64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def encode(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for layer in self.enc:
            h = layer(h)
        logits = self.transform(h) @ self.emb.weight.t() + self.bias
        return torch.log1p(logits.relu()).amax(1)

    def forward(self, query: Tensor, positive: Tensor, negative: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.calls += 1
        q, p, n = self.encode(query), self.encode(positive), self.encode(negative)
        scores = torch.cat([q @ p.t(), (q * n).sum(-1, keepdim=True)], 1)
        rank = F.cross_entropy(scores, torch.arange(q.shape[0]))
        weight = 1e-2 * (self.calls.clamp(max=100) / 100) ** 2
        flops = sum((v.abs().mean(0) ** 2).sum() for v in (q, torch.cat([p, n])))
        return {"loss": rank + weight * flops, "flops": flops}


@listed(lambda b, n: (ids(b, n), ids(b, n)))
class Matryoshka(nn.Module):
    """One contrastive loss at each of several prefixes of the embedding, weighed; pairs in the batch."""

    dims = (4, 8, 16, 32)

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.enc, self.scale = nn.Embedding(64, 32), nn.Sequential(*[block() for _ in range(4)]), nn.Parameter(torch.tensor(2.0))

    def embed(self, x: Tensor) -> Tensor:
        mask = (x % 7 != 0).unsqueeze(-1).float()
        return (self.enc(self.emb(x)) * mask).sum(1) / mask.sum(1).clamp(min=1e-9)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, list[Tensor]]:
        u, v = self.embed(a), self.embed(b)
        target = torch.arange(u.size(0))
        losses = []
        for d in self.dims:
            logits = F.normalize(u[:, :d], dim=-1) @ F.normalize(v[:, :d], dim=-1).mT * self.scale.exp()
            losses.append((F.cross_entropy(logits, target) + F.cross_entropy(logits.mT, target)) / 2)
        return sum(w * each for w, each in zip((0.4, 0.3, 0.2, 0.1), losses, strict=True)), [each.detach() for each in losses]


@listed(lambda b, n: (torch.randn(b, 10, 12), torch.randint(0, 5, (b, 10)).float(), torch.randint(3, 11, (b,))))
class ListwiseRanker(nn.Module):
    """LambdaRank over the pairs of each list, by the order that the scores give; lists are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.enc, self.out = nn.Linear(12, 32), nn.ModuleList(block() for _ in range(3)), nn.Linear(32, 1)

    def forward(self, x: Tensor, relevance: Tensor, n_docs: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.arange(x.size(1))[None] < n_docs[:, None]
        h = self.inp(x)
        for layer in self.enc:
            h = layer(h, src_key_padding_mask=~mask)
        scores = self.out(h).squeeze(-1).masked_fill(~mask, float("-inf"))
        order = scores.detach().argsort(dim=1, descending=True)
        ranks = torch.argsort(order, dim=1) + 1
        discount = 1 / torch.log2(1.0 + ranks)
        gain = torch.where(mask, 2 ** relevance - 1, torch.zeros_like(relevance))
        ideal = (gain.sort(1, descending=True).values / torch.log2(torch.arange(x.size(1)) + 2.0)).sum(1).clamp(min=1)
        delta = ((gain[:, :, None] - gain[:, None]) * (discount[:, :, None] - discount[:, None])).abs() / ideal[:, None, None]
        valid = (relevance[:, :, None] > relevance[:, None]) & mask[:, :, None] & mask[:, None]
        safe = scores.masked_fill(~mask, 0.0)
        pairs = F.softplus(safe[:, None] - safe[:, :, None]) * delta
        return pairs[valid].sum() / valid.sum().clamp(min=1), scores


@listed(lambda b, n: (torch.randint(0, 20, (b,)), torch.randint(0, 30, (b,)), torch.randint(0, 30, (b, 6)), torch.rand(b)))
class BucketedTwoTower(nn.Module):
    """In-batch softmax with a correction for how often items are sampled, kept in a buffer as a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.bag = nn.Embedding(20, 16), nn.Embedding(30, 16), nn.EmbeddingBag(30, 16, mode="mean", padding_idx=0)
        self.tower_u, self.tower_i = mlp(32, 32, 16), mlp(16, 32, 16)
        self.register_buffer("frequency", torch.full((30,), 1 / 30))

    def forward(self, user: Tensor, item: Tensor, history: Tensor, reward: Tensor) -> Tensor:
        u = F.normalize(self.tower_u(torch.cat([self.user(user), self.bag(history)], -1)), dim=-1)
        v = F.normalize(self.tower_i(self.item(item)), dim=-1)
        if self.training:
            seen = torch.bincount(item, minlength=30).float() / item.numel()
            self.frequency.mul_(0.9).add_(seen, alpha=0.1)
        logits = u @ v.T / 0.1 - self.frequency[item].clamp(min=1e-3).log()
        logits = logits.masked_fill((item[:, None] == item[None]) & ~torch.eye(len(item), dtype=torch.bool), -1e9)
        return (F.cross_entropy(logits, torch.arange(len(item)), reduction="none") * reward).mean()


# survival, quantiles, densities
@listed(lambda b, n: (torch.randn(b, 12), torch.rand(b) + 0.1, (torch.rand(b) < 0.7).float().index_fill(0, torch.tensor(0), 1.0)))
class DeepSurv(nn.Module):
    """Cox's partial likelihood over the risk sets of the batch, by a cumulative logsumexp over sorted times."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(12, 12), nn.LayerNorm(12), nn.SELU())], nn.Linear(12, 1, bias=False))

    def forward(self, x: Tensor, time: Tensor, event: Tensor) -> tuple[Tensor, Tensor]:
        risk = self.net(x).flatten()
        order = time.argsort(descending=True)
        log_cum = torch.logcumsumexp(risk[order], 0)
        loss = -((risk[order] - log_cum) * event[order]).sum() / event.sum()
        concordant = ((time[:, None] < time[None]) & (risk[:, None] > risk[None]) & event[:, None].bool()).sum()
        return loss, concordant


@listed(lambda b, n: (torch.randn(b, 12), torch.randint(0, 10, (b,)), torch.randint(0, 3, (b,))))
class DeepHit(nn.Module):
    """Competing risks over discrete times; a likelihood, and a ranking loss over pairs of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.causes = mlp(12, 32, 16), nn.ModuleList(mlp(28, 16, 10) for _ in range(2))

    def forward(self, x: Tensor, time: Tensor, event: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.cat([x, self.shared(x)], 1)
        pmf = torch.stack([c(h) for c in self.causes], 1).flatten(1).softmax(1).view(-1, 2, 10)
        cif = pmf.cumsum(-1)
        at = time.view(-1, 1, 1).expand(-1, 2, 1)
        died = pmf.gather(2, at).squeeze(-1).gather(1, (event - 1).clamp(min=0)[:, None]).squeeze(1)
        alive = 1 - cif.gather(2, at).squeeze(-1).sum(1)
        nll = -torch.where(event > 0, died.clamp(min=1e-6).log(), alive.clamp(min=1e-6).log()).mean()
        rank = x.new_zeros(())
        for cause in range(2):
            r = cif[:, cause][:, time].transpose(0, 1)
            diff = r.diagonal()[:, None] - r.T
            pairs = (time[:, None] < time[None]).float() * (event == cause + 1).float()[:, None]
            rank = rank + (pairs * torch.exp(-diff / 0.1)).mean()
        return nll + 0.2 * rank, cif


@listed(lambda b, n: (torch.randn(b, n, 6), torch.randn(b, n)))
class QuantileForecaster(nn.Module):
    """Dilated convolutions, quantiles that cannot cross by cumulated softplus, the pinball loss over them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(6 if i == 0 else 16, 16, 2, dilation=2 ** i) for i in range(4))
        self.head = nn.Linear(16, 5)
        self.register_buffer("q", torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95]))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = x.mT
        for conv in self.convs:
            new = torch.tanh(conv(F.pad(h, (conv.dilation[0], 0))))
            h = new if h.shape != new.shape else h + new
        raw = self.head(h.mT)
        quantiles = torch.cat([raw[..., :1], raw[..., :1] + F.softplus(raw[..., 1:]).cumsum(-1)], -1)
        err = y.unsqueeze(-1) - quantiles
        loss = torch.max(self.q * err, (self.q - 1) * err).sum(-1).mean()
        coverage = ((y >= quantiles[..., 0]) & (y <= quantiles[..., -1])).float().mean()
        return loss, coverage, quantiles


@listed(lambda b, n: (torch.randn(b, 2), torch.randn(b, 3)))
class ConditionalRealNVP(nn.Module):
    """Affine couplings in turn, ActNorm that a first call in training sets from its batch, log-likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.nets = nn.ModuleList(mlp(4, 24, 24, 2, act=nn.Tanh) for _ in range(4))
        self.log_scale, self.shift = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
        self.register_buffer("is_set", torch.tensor(False))
        self.base = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), torch.ones(2)), 1)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        z = (x + self.shift) * self.log_scale.exp()
        log_det = self.log_scale.sum().expand(len(x))
        for i, net in enumerate(self.nets):
            a, c = z[:, i % 2 : i % 2 + 1], z[:, 1 - i % 2 : 2 - i % 2]
            s, t = net(torch.cat([a, context], 1)).unbind(-1)
            s = 2 * torch.tanh(s / 2)
            c = c * s.exp()[:, None] + t[:, None]
            z = torch.cat([a, c] if i % 2 == 0 else [c, a], 1)
            log_det = log_det + s
        return -(self.base.log_prob(z) + log_det).mean(), z


@listed(lambda b, n: (torch.randn(b, 6, 2), torch.randn(b, 6, 1), torch.randn(b, n, 2), torch.randn(b, n, 1)))
class AttentiveNP(nn.Module):
    """An attentive neural process; a prior and a posterior, drawn in training alone, and their divergence."""

    def __init__(self) -> None:
        super().__init__()
        self.det, self.lat, self.mu, self.sigma = mlp(3, 32, 32), mlp(3, 32, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.q, self.k, self.att, self.dec = mlp(2, 32), mlp(2, 32), nn.MultiheadAttention(32, 4, batch_first=True), mlp(42, 32, 32, 2)

    def latent(self, x: Tensor, y: Tensor) -> torch.distributions.Normal:
        h = self.lat(torch.cat([x, y], -1)).mean(1)
        return torch.distributions.Normal(self.mu(h), 0.1 + 0.9 * torch.sigmoid(self.sigma(h)))

    def forward(self, xc: Tensor, yc: Tensor, xt: Tensor, yt: Tensor) -> dict[str, Tensor]:
        prior, post = self.latent(xc, yc), self.latent(torch.cat([xc, xt], 1), torch.cat([yc, yt], 1))
        z = post.rsample() if self.training else prior.mean
        r, _ = self.att(self.q(xt), self.k(xc), self.det(torch.cat([xc, yc], -1)))
        mean, log = self.dec(torch.cat([r, z.unsqueeze(1).expand(-1, xt.size(1), -1), xt], -1)).chunk(2, -1)
        out = torch.distributions.Normal(mean, 0.1 + 0.9 * F.softplus(log))
        kl = torch.distributions.kl_divergence(post, prior).sum(-1)
        ll = out.log_prob(yt).sum((1, 2))
        return {"loss": (kl - ll).mean(), "mean": mean, "sigma": out.stddev}


@listed(lambda b, n: (torch.randn(b, n, 4),))
class MixtureVAE(nn.Module):
    """A recurrent VAE over a learnt mixture as prior (VampPrior), its terms as an object of a class."""

    class Terms(NamedTuple):
        loss: Tensor
        kl: Tensor
        recon: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.stats, self.dec, self.out = nn.GRU(4, 16, batch_first=True), nn.Linear(16, 8), nn.GRU(8, 16, batch_first=True), nn.Linear(16, 4)
        self.pseudo, self.start = nn.Parameter(torch.randn(5, 8, 4)), nn.Linear(4, 16)

    def posterior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mu, log = self.stats(self.enc(x)[1][-1]).chunk(2, -1)
        return mu, log.clamp(-6, 3)

    def forward(self, x: Tensor) -> MixtureVAE.Terms:
        mu, log = self.posterior(x)
        z = mu + (0.5 * log).exp() * torch.randn_like(mu) if self.training else mu
        pm, pl = self.posterior(self.pseudo)
        log_q = (-0.5 * (log + (z - mu) ** 2 / log.exp())).sum(-1)
        log_p = torch.logsumexp((-0.5 * (pl + (z[:, None] - pm) ** 2 / pl.exp())).sum(-1), 1) - math.log(len(pm))
        shifted = F.pad(x, (0, 0, 1, 0))[:, :-1]
        h, _ = self.dec(torch.cat([shifted, z[:, None].expand(-1, x.shape[1], -1)], -1), self.start(z)[None].contiguous())
        recon = F.mse_loss(self.out(h), x, reduction="none").sum((1, 2))
        kl = log_q - log_p
        return self.Terms((recon + kl).mean(), kl.mean(), recon.mean())


# states, memories, trees
@listed(lambda b, n: (torch.randn(b, n, 3), torch.rand(b, n) < 0.8))
class KalmanVAE(nn.Module):
    """A filter over time with learnt dynamics, gains by a Cholesky solve, and steps that are missing."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = mlp(3, 16, 2), mlp(2, 16, 3)
        self.a, self.c, self.q, self.r = nn.Parameter(torch.eye(4) * 0.9), nn.Parameter(torch.randn(2, 4) * 0.5), nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        y = self.enc(x)
        b, n, _ = y.shape
        mean, cov = x.new_zeros(b, 4), torch.eye(4).repeat(b, 1, 1)
        q, r = torch.diag(F.softplus(self.q)), torch.diag(F.softplus(self.r) + 1e-2)
        nll, means = [], []
        for t in range(n):
            mean, cov = mean @ self.a.T, self.a @ cov @ self.a.T + q
            s = self.c @ cov @ self.c.T + r
            err = y[:, t] - mean @ self.c.T
            chol = torch.linalg.cholesky(s)
            gain = torch.cholesky_solve(self.c @ cov, chol).mT
            known = seen[:, t].float()[:, None]
            mean = mean + known * (gain @ err.unsqueeze(-1)).squeeze(-1)
            cov = cov - known[..., None] * gain @ self.c @ cov
            white = torch.linalg.solve_triangular(chol, err.unsqueeze(-1), upper=False).squeeze(-1)
            nll.append(known[:, 0] * (0.5 * white.square().sum(-1) + chol.diagonal(dim1=-2, dim2=-1).log().sum(-1)))
            means.append(mean)
        recon = F.mse_loss(self.dec(torch.stack(means, 1) @ self.c.T), x)
        return torch.stack(nll, 1).sum(1).mean() / n + recon, torch.stack(means, 1)


@listed(lambda b, n: (ids(b, n), torch.randint(4, n, (b,))))
class NeuralHMM(nn.Module):
    """The forward algorithm in logarithms over states that networks make, with lengths."""

    def __init__(self, states: int = 6) -> None:
        super().__init__()
        self.states = nn.Parameter(torch.randn(states, 16))
        self.start, self.move, self.emit, self.words = nn.Linear(16, 1), mlp(16, 16, states), mlp(16, 32, 16), nn.Embedding(64, 16)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        start = self.start(self.states).squeeze(-1).log_softmax(0)
        move, emit = self.move(self.states).log_softmax(-1), (self.emit(self.states) @ self.words.weight.T).log_softmax(-1)
        alpha = start + emit.T[x[:, 0]]
        trace = [alpha]
        for t in range(1, x.shape[1]):
            alpha = torch.logsumexp(alpha.unsqueeze(-1) + move, 1) + emit[:, x[:, t]].t()
            trace.append(alpha)
        ends = torch.stack(trace, 1).gather(1, (lengths - 1).view(-1, 1, 1).expand(-1, 1, alpha.shape[-1])).squeeze(1)
        log_z = ends.logsumexp(-1)
        return -(log_z / lengths).mean(), log_z


@listed(lambda b, n: (torch.randn(b, 10, 2), torch.stack([torch.randperm(10) for _ in range(b)])))
class PointerNet(nn.Module):
    """Points at its inputs step by step, masking what was taken; teacher forcing in training, greedy in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.cell, self.first = nn.LSTM(2, 24, batch_first=True), nn.LSTMCell(2, 24), nn.Parameter(torch.randn(2))
        self.w1, self.w2, self.v = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 1)

    def forward(self, x: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
        enc, (h, c) = self.enc(x)
        h, c = h.squeeze(0), c.squeeze(0)
        taken = torch.zeros(x.shape[:2], dtype=torch.bool)
        step, loss, chosen = self.first.expand(len(x), -1), 0.0, []
        for t in range(x.shape[1]):
            h, c = self.cell(step, (h, c))
            score = self.v(torch.tanh(self.w1(enc) + self.w2(h).unsqueeze(1))).squeeze(-1).masked_fill(taken, -1e9)
            loss = loss + F.cross_entropy(score, order[:, t])
            pick = order[:, t] if self.training else score.argmax(-1)
            taken = taken.scatter(1, pick[:, None], True)
            step = x.gather(1, pick.view(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)
            chosen.append(pick)
        return loss / x.shape[1], torch.stack(chosen, 1)


@listed(lambda b, n: (ids(b, 8), torch.randint(2, (b,))))
class TreeLSTM(nn.Module):
    """A child-sum Tree-LSTM over a balanced tree, level by level, recursively."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.iou, self.u_iou, self.f, self.u_f = nn.Embedding(64, 16), nn.Linear(16, 48), nn.Linear(16, 48, bias=False), nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.out = nn.Linear(16, 2)

    def node(self, x: Tensor, children: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        total = sum(h for h, _ in children) if children else torch.zeros_like(x)
        i, o, u = (self.iou(x) + self.u_iou(total)).chunk(3, -1)
        c = torch.sigmoid(i) * torch.tanh(u)
        for h, cell in children:
            c = c + torch.sigmoid(self.f(x) + self.u_f(h)) * cell
        return torch.sigmoid(o) * torch.tanh(c), c

    def build(self, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
        if len(leaves) == 1:
            return self.node(leaves[0], [])
        half = len(leaves) // 2
        return self.node(sum(leaves) / len(leaves), [self.build(leaves[:half]), self.build(leaves[half:])])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h, _ = self.build(list(self.emb(x).unbind(1)))
        logits = self.out(h)
        return F.cross_entropy(logits, y), logits


@listed(lambda b, n: (torch.randn(b, 12, 6),))
class DNC(nn.Module):
    """A differentiable neural computer: usage sorted and cumulated, temporal links, content and links to read."""

    def __init__(self, cells: int = 8, width: int = 6) -> None:
        super().__init__()
        self.cells, self.width = cells, width
        self.ctrl, self.face, self.out = nn.LSTMCell(6 + width, 24), nn.Linear(24, 3 * width + 2 * width + 8), nn.Linear(24 + width, 6)

    def content(self, memory: Tensor, key: Tensor, beta: Tensor) -> Tensor:
        return (F.cosine_similarity(memory, key.unsqueeze(1), dim=-1, eps=1e-4) * (1 + F.softplus(beta))).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        b, w = x.shape[0], self.width
        memory, usage, write = x.new_full((b, self.cells, w), 1e-3), x.new_zeros(b, self.cells), x.new_zeros(b, self.cells)
        link, precedence, read_w, read = x.new_zeros(b, self.cells, self.cells), x.new_zeros(b, self.cells), x.new_zeros(b, self.cells), x.new_zeros(b, w)
        state: tuple[Tensor, Tensor] | None = None
        outs = []
        for t in range(x.size(1)):
            state = self.ctrl(torch.cat([x[:, t], read], 1), state)
            rk, wk, erase, value, _, gates = self.face(state[0]).split([w, w, w, w, w, 8], -1)
            free, alloc_g, write_g, rb, wb = gates[:, :5].unbind(-1)
            usage = (usage + write - usage * write) * (1 - free.sigmoid()[:, None] * read_w)
            sorted_usage, free_list = usage.sort(-1)
            alloc = (1 - sorted_usage) * F.pad(sorted_usage, (1, 0), value=1.0)[:, :-1].cumprod(-1)
            alloc = torch.zeros_like(alloc).scatter(1, free_list, alloc)
            a = alloc_g.sigmoid()[:, None]
            write = write_g.sigmoid()[:, None] * (a * alloc + (1 - a) * self.content(memory, wk, wb[:, None]))
            memory = memory * (1 - write.unsqueeze(-1) * erase.sigmoid().unsqueeze(1)) + write.unsqueeze(-1) * value.unsqueeze(1)
            link = (1 - write.unsqueeze(-1) - write.unsqueeze(1)) * link + write.unsqueeze(-1) * precedence.unsqueeze(1)
            link = link * (1 - torch.eye(self.cells))
            precedence = (1 - write.sum(-1, keepdim=True)) * precedence + write
            mode = gates[:, 5:].softmax(-1)
            fwd, bwd = torch.bmm(link, read_w.unsqueeze(-1)).squeeze(-1), torch.bmm(link.mT, read_w.unsqueeze(-1)).squeeze(-1)
            read_w = mode[:, :1] * bwd + mode[:, 1:2] * self.content(memory, rk, rb[:, None]) + mode[:, 2:] * fwd
            read = torch.bmm(read_w.unsqueeze(1), memory).squeeze(1)
            outs.append(self.out(torch.cat([state[0], read], 1)))
        return torch.stack(outs, dim=1)


@listed(lambda b, n: (ids(b, n), torch.randint(3, n + 1, (b,)), torch.randint(5, (b,))))
class PackedAttention(nn.Module):
    """Sentences packed by length and unpacked again, with self-attentive pooling and its penalty (Lin)."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rnn = nn.Embedding(64, 16), nn.LSTM(16, 16, 2, bidirectional=True, batch_first=True)
        self.w1, self.w2, self.out = nn.Linear(32, 16, bias=False), nn.Linear(16, 4, bias=False), mlp(128, 32, 5)

    def forward(self, x: Tensor, lengths: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        packed = pack_padded_sequence(self.emb(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.size(1))
        mask = torch.arange(x.size(1))[None] >= lengths[:, None]
        a = self.w2(torch.tanh(self.w1(h))).masked_fill(mask[..., None], -1e9).softmax(1).mT
        penalty = (a @ a.mT - torch.eye(4)).pow(2).sum((1, 2)).mean()
        return F.cross_entropy(self.out((a @ h).flatten(1)), y) + 0.1 * penalty, a


@listed(lambda b, n: (ids(b, n), torch.randint(1, n // 2, (b, 3))))
class Segments(nn.Module):
    """Rows cut in segments by lists of lengths, padded together and pooled, one Python loop over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.net, self.out = nn.Embedding(64, 24), nn.Sequential(*[block(24) for _ in range(3)]), nn.Linear(24, 4)

    def forward(self, x: Tensor, cuts: Tensor) -> Tensor:
        h = self.net(self.emb(x))
        pooled = []
        for i in range(h.shape[0]):
            parts = [h[i, : c.item()].mean(0) for c in cuts[i]]
            pooled.append(torch.stack(parts))
        return self.out(pad_sequence(pooled, batch_first=True))


# language models with what is new
@dataclass
class Rope:
    """Options of a rotary base that grows with the length (NTK)."""

    dim: int = 8
    base: float = 10000.0
    trained: int = 16


def rotate(x: Tensor, rope: Rope) -> Tensor:
    n = x.shape[-2]
    base = rope.base * (n / rope.trained) ** (rope.dim / (rope.dim - 2)) if n > rope.trained else rope.base
    inv = base ** (-torch.arange(0, rope.dim, 2, device=x.device).float() / rope.dim)
    angle = torch.arange(n, device=x.device).float()[:, None] * inv
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class SlidingLayer(nn.Module):
    """Sliding-window or global attention, with keys and values of its own or of another layer."""

    def __init__(self, window: int | None, has_kv: bool = True, width: int = 32) -> None:
        super().__init__()
        self.window, self.q, self.o = window, nn.Linear(width, width), nn.Linear(width, width)
        self.kv = nn.Linear(width, 16) if has_kv else None
        self.n1, self.n2, self.ff, self.rope = nn.RMSNorm(width), nn.RMSNorm(width), mlp(width, 64, width, act=nn.SiLU), Rope()

    def forward(self, x: Tensor, kv: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        b, n, w = x.shape
        y = self.n1(x)
        q = rotate(self.q(y).view(b, n, 4, 8).transpose(1, 2), self.rope)
        if self.kv is not None:
            k, v = self.kv(y).view(b, n, 2, 8).unbind(2)
            kv = rotate(k.unsqueeze(1), self.rope), v.unsqueeze(1)
        assert kv is not None
        i = torch.arange(n, device=x.device)
        allowed = i[:, None] >= i[None]
        if self.window is not None:
            allowed &= i[:, None] - i[None] < self.window
        a = F.scaled_dot_product_attention(q, kv[0].expand(-1, 4, -1, -1), kv[1].expand(-1, 4, -1, -1), attn_mask=allowed)
        x = x + self.o(a.transpose(1, 2).reshape(b, n, w))
        return x + self.ff(self.n2(x)), kv


@listed(lambda b, n: (ids(b, n), ids(b, n)))
class YOCO(nn.Module):
    """Self-decoders with windows, and cross-decoders that all read the keys and values of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(64, 32), nn.RMSNorm(32)
        self.first, self.shared = nn.ModuleList(SlidingLayer(8) for _ in range(2)), SlidingLayer(None)
        self.second = nn.ModuleList(SlidingLayer(None, has_kv=False) for _ in range(3))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.emb(x) * 32 ** 0.5
        for layer in self.first:
            h, _ = layer(h)
        h, kv = self.shared(h)
        for layer in self.second:
            h, _ = layer(h, kv)
        logits = self.norm(h) @ self.emb.weight.T
        logits = 30 * torch.tanh(logits / 30)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), logits


@listed(lambda b, n: (ids(b, n), ids(b, n)))
class Medusa(nn.Module):
    """A frozen body with heads that guess ahead, each with the loss of its own shift and a decaying weight."""

    def __init__(self, n_heads: int = 3) -> None:
        super().__init__()
        self.emb, self.body, self.lm = nn.Embedding(64, 32), nn.Sequential(*[block() for _ in range(3)]), nn.Linear(32, 64, bias=False)
        self.heads = nn.ModuleList(nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 64, bias=False)]) for _ in range(n_heads))
        for p in [*self.emb.parameters(), *self.body.parameters(), *self.lm.parameters()]:
            p.requires_grad_(False)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, list[Tensor]]:
        with torch.no_grad():
            h = self.body(self.emb(x))
        total, each = h.new_zeros(()), []
        for k, (res, out) in enumerate(self.heads, start=2):
            logits = out(h + F.silu(res(h)))[:, :-k]
            loss = F.cross_entropy(logits.reshape(-1, 64), labels[:, k:].reshape(-1), ignore_index=5)
            total = total + loss * 0.8 ** (k - 2)
            each.append(loss.detach())
        return total, each


@listed(lambda b, n: (ids(b, n), ids(b, n)))
class MultiTokenPrediction(nn.Module):
    """DeepSeek's extra depths: what was seen and the next embedding, joined, through a block each, one head for all."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.main, self.head = nn.Embedding(64, 32), nn.ModuleList(block() for _ in range(3)), nn.Linear(32, 64, bias=False)
        self.norms, self.joins, self.extra = nn.ModuleList(nn.ModuleList([nn.RMSNorm(32), nn.RMSNorm(32)]) for _ in range(2)), nn.ModuleList(nn.Linear(64, 32) for _ in range(2)), nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        n = x.shape[1]
        causal = partial(nn.Transformer.generate_square_subsequent_mask, device=x.device)
        h = self.emb(x)
        for layer in self.main:
            h = layer(h, src_mask=causal(n), is_causal=True)
        logits = self.head(h)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        extra = []
        for depth, (norm, join, layer) in enumerate(zip(self.norms, self.joins, self.extra, strict=True), start=1):
            h = join(torch.cat([norm[0](h[:, : n - depth]), norm[1](self.emb(x[:, depth:]))], -1))
            h = layer(h, src_mask=causal(h.size(1)), is_causal=True)
            extra.append(F.cross_entropy(self.head(h)[:, :-1].flatten(0, 1), labels[:, depth + 1 :].flatten()))
        return {"loss": loss + 0.3 * torch.stack(extra).mean(), "main": loss, "extra": extra, "logits": logits}


@listed(lambda b, n: (ids(b, n), ids(b, n)))
class CapacityMoE(nn.Module):
    """Switch experts with a capacity by the tokens of the batch, whose overflow passes by; balance and z losses."""

    def __init__(self, n_experts: int = 4, factor: float = 1.25) -> None:
        super().__init__()
        self.n, self.factor, self.emb, self.head = n_experts, factor, nn.Embedding(64, 32), nn.Linear(32, 64)
        self.gates, self.w1, self.w2 = nn.ModuleList(nn.Linear(32, n_experts, bias=False) for _ in range(2)), nn.ParameterList(nn.Parameter(torch.randn(n_experts, 32, 64) * 0.1) for _ in range(2)), nn.ParameterList(nn.Parameter(torch.randn(n_experts, 64, 32) * 0.1) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, aux, z = self.emb(x), 0.0, 0.0
        for gate, w1, w2 in zip(self.gates, self.w1, self.w2, strict=True):
            flat = h.flatten(0, 1)
            capacity = math.ceil(flat.shape[0] * self.factor / self.n)
            logits = gate(flat)
            probs = logits.softmax(-1)
            top, index = probs.max(-1)
            hot = F.one_hot(index, self.n)
            place = (hot.cumsum(0) - 1) * hot
            keep = (place < capacity) & hot.bool()
            slot = F.one_hot(place.clamp(max=capacity - 1), capacity).to(h.dtype) * keep.unsqueeze(-1)
            expert_in = torch.einsum("tec,td->ecd", slot, flat)
            expert_out = torch.einsum("ecf,efd->ecd", F.gelu(torch.einsum("ecd,edf->ecf", expert_in, w1)), w2)
            h = h + torch.einsum("tec,ecd->td", slot * top[:, None, None], expert_out).view_as(h)
            aux = aux + self.n * (hot.float().mean(0) * probs.mean(0)).sum()
            z = z + logits.logsumexp(-1).square().mean()
        loss = F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
        return loss + 0.01 * aux + 0.001 * z, aux, z


@listed(lambda b, n: (ids(b, n), ids(b, n)))
class DeltaNet(nn.Module):
    """The delta rule in a loop over time, short convolutions in front, gates behind."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.layers, self.head = nn.Embedding(64, 32), nn.ModuleList(), nn.Linear(32, 64)
        for _ in range(2):
            self.layers.append(nn.ModuleDict({"qkv": nn.Linear(32, 96), "beta": nn.Linear(32, 4), "conv": nn.Conv1d(96, 96, 4, groups=96, padding=3), "gate": nn.Linear(32, 32), "out": nn.Linear(32, 32), "norm": nn.RMSNorm(8)}))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x)
        b, n, _ = h.shape
        for layer in self.layers:
            q, k, v = F.silu(layer["conv"](layer["qkv"](h).mT)[..., :n]).mT.view(b, n, 3, 4, 8).unbind(2)
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            beta, state, out = layer["beta"](h).sigmoid(), h.new_zeros(b, 4, 8, 8), torch.empty_like(v)
            for t in range(n):
                old = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
                state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * (v[:, t] - old))
                out[:, t] = torch.einsum("bhkv,bhk->bhv", state, q[:, t])
            h = h + layer["out"](layer["norm"](out).flatten(2) * F.silu(layer["gate"](h)))
        return F.cross_entropy(self.head(h).mT, y)


@listed(lambda b, n: (ids(b, n), ids(b, n)))
class GriffinLM(nn.Module):
    """Gated linear recurrences by a scan in logarithms, and local attention with ALiBi between them."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.rec = nn.ModuleList(nn.ModuleDict({"x": nn.Linear(32, 32), "g": nn.Linear(32, 32), "i": nn.Linear(32, 32), "r": nn.Linear(32, 32), "o": nn.Linear(32, 32), "n": nn.RMSNorm(32)}) for _ in range(2))
        self.a, self.att, self.norm = nn.Parameter(torch.linspace(0.5, 3, 32)), nn.Linear(32, 96), nn.RMSNorm(32)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, 5).float(), persistent=False)
        self._alibi: Tensor | None = None

    def alibi(self, n: int) -> Tensor:
        if self._alibi is None or self._alibi.shape[-1] < n:
            i = torch.arange(n)
            gap = i[:, None] - i[None]
            self._alibi = (-self.slopes[:, None, None] * gap).masked_fill((gap < 0) | (gap >= 8), float("-inf"))
        return self._alibi[:, :n, :n]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.emb(x)
        b, n, _ = h.shape
        for m in self.rec:
            u = m["n"](h)
            log_a = -8 * F.softplus(self.a) * m["r"](u).sigmoid() * 0.1
            v = m["x"](u) * m["i"](u).sigmoid() * (1 - (2 * log_a).exp()).clamp(min=1e-6).sqrt()
            acc = log_a.cumsum(1)
            decay = (acc[:, :, None] - acc[:, None]).masked_fill(torch.ones(n, n).triu(1).bool()[None, :, :, None], float("-inf")).exp()
            h = h + m["o"](torch.einsum("btsd,bsd->btd", decay, v) * F.gelu(m["g"](u)))
            q, k, w = self.att(self.norm(h)).view(b, n, 3, 4, 8).permute(2, 0, 3, 1, 4)
            h = h + F.scaled_dot_product_attention(q, k, w, attn_mask=self.alibi(n)).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@listed(lambda b, n: (ids(b, n), ids(b, 12), ids(b, 12)))
class T5Biased(nn.Module):
    """Buckets of relative positions, made once by the first layer and shared; an encoder and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rel_e, self.rel_d = nn.Embedding(64, 32), nn.Embedding(16, 4), nn.Embedding(16, 4)
        make = lambda kinds: nn.ModuleList(nn.ModuleDict({k: nn.Linear(32, 32, bias=False) for k in kinds}) for _ in range(2))  # noqa: E731
        self.enc, self.dec = make("qkvoiu"), make("qkvoiuQKVO")

    @staticmethod
    def buckets(n: int, m: int, two_sided: bool) -> Tensor:
        rel = torch.arange(m)[None] - torch.arange(n)[:, None]
        out = torch.zeros_like(rel)
        size = 16
        if two_sided:
            size //= 2
            out += (rel > 0).long() * size
            rel = rel.abs()
        else:
            rel = -torch.min(rel, torch.zeros_like(rel))
        exact = size // 2
        far = exact + (torch.log(rel.float().clamp(min=1) / exact) / math.log(64 / exact) * (size - exact)).long()
        return out + torch.where(rel < exact, rel, far.clamp(max=size - 1))

    def attend(self, m: nn.ModuleDict, names: str, x: Tensor, y: Tensor, bias: Tensor | None) -> Tensor:
        q, k, v = (m[c](t).unflatten(-1, (4, 8)).transpose(1, 2) for c, t in zip(names, (x, y, y), strict=False))
        score = q @ k.mT
        if bias is not None:
            score += bias
        return m[names[-1]]((score.float().softmax(-1).type_as(score) @ v).transpose(1, 2).flatten(-2))

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x, y = self.emb(source), self.emb(target)
        bias = self.rel_e(self.buckets(x.size(1), x.size(1), True)).permute(2, 0, 1).unsqueeze(0)
        for m in self.enc:
            x = x + self.attend(m, "qkvo", F.layer_norm(x, (32,)), F.layer_norm(x, (32,)), bias)
            x = x + m["u"](F.relu(m["i"](F.layer_norm(x, (32,)))))
        n = y.size(1)
        bias = self.rel_d(self.buckets(n, n, False)).permute(2, 0, 1)[None] + torch.full((n, n), -1e9).triu(1)
        for m in self.dec:
            z = F.layer_norm(y, (32,))
            y = y + self.attend(m, "qkvo", z, z, bias)
            y = y + self.attend(m, "QKVO", F.layer_norm(y, (32,)), x, None)
            y = y + m["u"](F.relu(m["i"](F.layer_norm(y, (32,)))))
        logits = (y * 32 ** -0.5) @ self.emb.weight.t()
        return F.cross_entropy(logits.view(-1, 64), labels.view(-1), label_smoothing=0.1), logits


@listed(lambda b, n: (ids(b, n), torch.randint(2, (b,)).float()))
class RewardPairs(nn.Module):
    """A reward model: the first half of the batch was preferred to the second, as trainers of TRL lay it out."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.body, self.score = nn.Embedding(64, 32), nn.Sequential(*[block() for _ in range(4)]), nn.Linear(32, 1)

    def forward(self, x: Tensor, margin: Tensor) -> dict[str, Tensor]:
        rewards = self.score(self.body(self.emb(torch.cat([x, x.flip(1)]))))[:, -1, 0]
        chosen, rejected = rewards.chunk(2)
        return {"loss": -F.logsigmoid(chosen - rejected - margin).mean(), "accuracy": (chosen > rejected).float().mean(), "rewards": rewards.detach()}


@listed(lambda b, n: (ids(b, n), ids(b, n)))
class DPOPair(nn.Module):
    """A policy and its frozen copy, and DPO's loss over pairs, with implicit rewards logged."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Embedding(64, 32), *[block() for _ in range(3)], nn.Linear(32, 64))
        self.reference = nn.Sequential(nn.Embedding(64, 32), *[block() for _ in range(3)], nn.Linear(32, 64)).requires_grad_(False)

    @staticmethod
    def logps(logits: Tensor, ids: Tensor) -> Tensor:
        mask = ids[:, 1:] != 3
        return (logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1) * mask).sum(-1)

    def forward(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        both = torch.cat([chosen, rejected], dim=0)
        ours = self.logps(self.policy(both), both)
        with torch.no_grad():
            theirs = self.logps(self.reference(both), both)
        n = chosen.shape[0]
        gap = (ours[:n] - theirs[:n]) - (ours[n:] - theirs[n:])
        rewards = 0.1 * (ours - theirs).detach()
        return -F.logsigmoid(0.1 * gap).mean(), {"chosen": rewards[:n].mean(), "rejected": rewards[n:].mean()}


# games and control
@listed(lambda b, n: (torch.randn(b, n, 6), torch.randint(4, (b, n)), torch.randn(b, n), torch.rand(b, n) < 0.1, torch.randn(b, n, 4)))
class Impala(nn.Module):
    """V-trace: a walk backwards over time under no_grad, importance weights clipped, losses by policy and baseline."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.core, self.pi, self.v = mlp(6, 32, 32), nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, obs: Tensor, actions: Tensor, rewards: Tensor, dones: Tensor, behaviour: Tensor) -> dict[str, Tensor]:
        h, _ = self.core(F.relu(self.body(obs)))
        logits, values = self.pi(h), self.v(h).squeeze(-1)
        logp = -F.cross_entropy(logits.flatten(0, 1), actions.flatten(), reduction="none").view_as(rewards)
        with torch.no_grad():
            old = behaviour.log_softmax(-1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
            rho = (logp - old).exp()
            clipped, cs = rho.clamp(max=1.0), rho.clamp(max=1.0)
            discount = (~dones).float() * 0.99
            nxt = torch.cat([values[:, 1:], values[:, -1:]], 1)
            deltas = clipped * (rewards.clamp(-1, 1) + discount * nxt - values)
            acc, out = torch.zeros_like(values[:, 0]), []
            for t in reversed(range(values.shape[1])):
                acc = deltas[:, t] + discount[:, t] * cs[:, t] * acc
                out.append(acc)
            vs = torch.stack(out[::-1], 1) + values
            adv = clipped * (rewards + discount * torch.cat([vs[:, 1:], values[:, -1:]], 1) - values)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1).mean()
        pg, base = -(logp * adv).mean(), 0.5 * (vs - values).square().mean()
        return {"loss": pg + 0.5 * base - 0.01 * entropy, "pg": pg.detach(), "baseline": base.detach(), "entropy": entropy.detach()}


@listed(lambda b, n: (torch.randn(b, 8), torch.randint(3, (b,)), torch.randn(b), torch.randn(b, 8), torch.rand(b) < 0.2))
class C51(nn.Module):
    """A categorical critic: the target's support projected onto its own with index_add over flat places."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = mlp(8, 32, 32, 3 * 11), mlp(8, 32, 32, 3 * 11).requires_grad_(False)
        self.register_buffer("support", torch.linspace(-5, 5, 11))

    def forward(self, s: Tensor, a: Tensor, r: Tensor, s2: Tensor, done: Tensor) -> tuple[Tensor, Tensor]:
        b, dz = s.shape[0], 1.0
        with torch.no_grad():
            best = (self.net(s2).view(b, 3, 11).softmax(-1) * self.support).sum(-1).argmax(-1)
            p = self.target(s2).view(b, 3, 11).softmax(-1)[torch.arange(b), best]
            tz = (r[:, None] + 0.99 * (~done).float()[:, None] * self.support).clamp(-5, 5)
            pos = (tz + 5) / dz
            lo, hi = pos.floor().long(), pos.ceil().long()
            lo[(hi > 0) & (lo == hi)] -= 1
            hi[(lo < 10) & (lo == hi)] += 1
            m = torch.zeros_like(p)
            offset = (torch.arange(b) * 11)[:, None].expand(b, 11)
            m.view(-1).index_add_(0, (lo + offset).view(-1), (p * (hi.float() - pos)).view(-1))
            m.view(-1).index_add_(0, (hi + offset).view(-1), (p * (pos - lo.float())).view(-1))
        logp = self.net(s).view(b, 3, 11).log_softmax(-1)[torch.arange(b), a]
        td = -(m * logp).sum(-1)
        return td.mean(), td.detach()


@listed(lambda b, n: (torch.randn(b, 5, 6), torch.randn(b, 5, 2), torch.randn(b, 5)))
class TDMPC(nn.Module):
    """A latent unroll with consistency, reward and value losses discounted by step, two-hot targets, an EMA encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dyn, self.rew, self.qs, self.pi = mlp(6, 24, 16), mlp(18, 24, 16), mlp(18, 24, 9), nn.ModuleList(mlp(18, 24, 9) for _ in range(2)), mlp(16, 24, 2)
        self.slow = mlp(6, 24, 16).requires_grad_(False)
        self.register_buffer("bins", torch.linspace(-4, 4, 9))

    @staticmethod
    def simplex(z: Tensor) -> Tensor:
        return z.view(*z.shape[:-1], 4, 4).softmax(-1).flatten(-2)

    def two_hot(self, x: Tensor) -> Tensor:
        x = (torch.sign(x) * torch.log1p(x.abs())).clamp(-4, 4)
        low = (x + 4).floor().clamp(max=7).long()
        part = (x + 4 - low).unsqueeze(-1)
        return F.one_hot(low, 9) * (1 - part) + F.one_hot(low + 1, 9) * part

    def forward(self, obs: Tensor, actions: Tensor, rewards: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            for a, b in zip(self.slow.parameters(), self.enc.parameters(), strict=True):
                if self.training:
                    a.lerp_(b, 0.05)
            targets = self.simplex(self.slow(obs))
        z = self.simplex(self.enc(obs[:, 0]))
        losses = dict.fromkeys(("consistency", "reward", "value"), 0.0)
        for t in range(obs.size(1) - 1):
            za = torch.cat([z, actions[:, t]], -1)
            z = self.simplex(self.dyn(za))
            weight = 0.5 ** t
            losses["consistency"] = losses["consistency"] + weight * F.mse_loss(z, targets[:, t + 1])
            losses["reward"] = losses["reward"] - weight * (self.two_hot(rewards[:, t]) * self.rew(za).log_softmax(-1)).sum(-1).mean()
            target = self.two_hot(rewards[:, t] + 0.9 * targets[:, t + 1].mean(-1))
            for q in self.qs:
                losses["value"] = losses["value"] - weight * (target * q(za).log_softmax(-1)).sum(-1).mean() / 2
        return {"loss": 20 * losses["consistency"] + 0.1 * losses["reward"] + 0.1 * losses["value"], **losses}


@listed(lambda b, n: (torch.randn(b, 6), torch.randint(3, (b,)), torch.randn(b, 6), torch.randn(b)))
class CuriousAgent(nn.Module):
    """ICM and RND: prediction errors as rewards, normalised by running statistics, and forward and inverse losses."""

    def __init__(self) -> None:
        super().__init__()
        self.phi, self.inverse, self.ahead = mlp(6, 24, 16), mlp(32, 24, 3), mlp(19, 24, 16)
        self.fixed, self.chase, self.actor = mlp(6, 24, 8).requires_grad_(False), mlp(6, 24, 8), mlp(6, 24, 3)
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("var", torch.ones(1))
        self.register_buffer("count", torch.tensor(1e-4))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        total = self.count + x.numel()
        delta = x.mean() - self.mean
        var = self.var * self.count + x.var(unbiased=False) * x.numel() + delta ** 2 * self.count * x.numel() / total
        self.mean, self.var, self.count = self.mean + delta * x.numel() / total, var / total, total

    def forward(self, s: Tensor, a: Tensor, s2: Tensor, adv: Tensor) -> tuple[Tensor, Tensor]:
        f, f2, hot = self.phi(s), self.phi(s2), F.one_hot(a, 3).float()
        inv = F.cross_entropy(self.inverse(torch.cat([f, f2], 1)), a)
        err = 0.5 * (self.ahead(torch.cat([f, hot], 1)) - f2.detach()).pow(2).mean(1)
        novelty = (self.chase(s2) - self.fixed(s2)).pow(2).mean(1)
        bonus = (novelty / (self.var + 1e-6).sqrt()).detach()
        if self.training:
            self.update(novelty.detach())
        pg = -(self.actor(s).log_softmax(-1).gather(1, a[:, None]).squeeze(1) * (adv + bonus)).mean()
        return pg + 0.8 * inv + 0.2 * err.mean() + novelty.mean(), bonus


@listed(lambda b, n: (torch.randn(b, 3, 6), torch.randint(4, (b, 3)), torch.randn(b, 1), torch.randn(b, 10)))
class COMA(nn.Module):
    """Agents with one actor told apart by an id, a central critic, and counterfactual advantages."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.GRUCell(9, 24), mlp(10 + 12 + 3, 32, 4)
        self.pi = nn.Linear(24, 4)

    def forward(self, obs: Tensor, actions: Tensor, returns: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        b, n, _ = obs.shape
        who = torch.eye(n).expand(b, -1, -1)
        pi = self.pi(self.actor(torch.cat([obs, who], -1).reshape(b * n, -1))).view(b, n, 4).softmax(-1)
        hot = F.one_hot(actions, 4).float().view(b, 1, -1).repeat(1, n, 1)
        others = hot * (1 - torch.eye(n)).repeat_interleave(4, dim=1)
        q = self.critic(torch.cat([state.unsqueeze(1).expand(-1, n, -1), others, who], -1))
        taken = q.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        adv = (taken - (pi * q).sum(-1)).detach()
        logp = pi.gather(-1, actions.unsqueeze(-1)).squeeze(-1).clamp(min=1e-8).log()
        return F.mse_loss(taken, returns.expand_as(taken)) - (adv * logp).mean(), adv
