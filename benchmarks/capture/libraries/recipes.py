"""Models in the manner of training repositories, whose forward makes the loss, its parts and what is logged of it.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn

from .by_hand import ids, listed

__all__: list[str] = []


def labelled(b: int, n: int) -> tuple[Tensor, Tensor]:
    """Token ids, and labels of which some count."""
    x = ids(b, n)
    return x, torch.where(torch.rand(b, n) < 0.3, x, -100).index_fill(1, torch.tensor(0), 3)


@dataclass
class ModelArgs:
    """Options of Llama2C."""

    dim: int = 32
    n_layers: int = 3
    n_heads: int = 4
    n_kv_heads: int | None = 2
    vocab_size: int = 64
    norm_eps: float = 1e-5
    max_seq_len: int = 64
    dropout: float = 0.0


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x) * self.weight


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    freqs = torch.outer(torch.arange(end), freqs).float()
    return torch.cos(freqs), torch.sin(freqs)


def reshape_for_broadcast(freqs_cis: Tensor, x: Tensor) -> Tensor:
    ndim = x.ndim
    assert 0 <= 1 < ndim
    assert freqs_cis.shape == (x.shape[1], x.shape[-1])
    return freqs_cis.view([d if i in (1, ndim - 1) else 1 for i, d in enumerate(x.shape)])


def apply_rotary_emb(xq: Tensor, xk: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    xq_r, xq_i = xq.float().reshape((*xq.shape[:-1], -1, 2)).unbind(-1)
    xk_r, xk_i = xk.float().reshape((*xk.shape[:-1], -1, 2)).unbind(-1)
    cos, sin = reshape_for_broadcast(cos, xq_r), reshape_for_broadcast(sin, xq_r)
    xq_out = torch.stack([xq_r * cos - xq_i * sin, xq_r * sin + xq_i * cos], dim=-1).flatten(3)
    xk_out = torch.stack([xk_r * cos - xk_i * sin, xk_r * sin + xk_i * cos], dim=-1).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


def repeat_kv(x: Tensor, n_rep: int) -> Tensor:
    bs, slen, n_kv_heads, head_dim = x.shape
    if n_rep == 1:
        return x
    return x[:, :, :, None, :].expand(bs, slen, n_kv_heads, n_rep, head_dim).reshape(bs, slen, n_kv_heads * n_rep, head_dim)


class LlamaBlock(nn.Module):
    def __init__(self, layer_id: int, args: ModelArgs) -> None:
        super().__init__()
        self.layer_id, self.n_heads, self.n_kv = layer_id, args.n_heads, args.n_kv_heads or args.n_heads
        self.head_dim = args.dim // args.n_heads
        self.wq, self.wk = nn.Linear(args.dim, args.dim, bias=False), nn.Linear(args.dim, self.n_kv * self.head_dim, bias=False)
        self.wv, self.wo = nn.Linear(args.dim, self.n_kv * self.head_dim, bias=False), nn.Linear(args.dim, args.dim, bias=False)
        self.w1, self.w2, self.w3 = nn.Linear(args.dim, 64, bias=False), nn.Linear(64, args.dim, bias=False), nn.Linear(args.dim, 64, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(args.dim, args.norm_eps), RMSNorm(args.dim, args.norm_eps)
        self.dropout = args.dropout
        mask = torch.triu(torch.full((1, 1, args.max_seq_len, args.max_seq_len), float("-inf")), diagonal=1)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        h = self.attention_norm(x)
        xq, xk, xv = self.wq(h), self.wk(h), self.wv(h)
        xq, xk, xv = xq.view(bsz, seqlen, self.n_heads, -1), xk.view(bsz, seqlen, self.n_kv, -1), xv.view(bsz, seqlen, self.n_kv, -1)
        xq, xk = apply_rotary_emb(xq, xk, cos, sin)
        n_rep = self.n_heads // self.n_kv
        xq, xk, xv = xq.transpose(1, 2), repeat_kv(xk, n_rep).transpose(1, 2), repeat_kv(xv, n_rep).transpose(1, 2)
        scores = torch.matmul(xq, xk.transpose(2, 3)) / math.sqrt(self.head_dim)
        assert hasattr(self, "mask")
        scores = F.softmax((scores + self.mask[:, :, :seqlen, :seqlen]).float(), dim=-1).type_as(xq)
        x = x + self.wo((scores @ xv).transpose(1, 2).contiguous().view(bsz, seqlen, -1))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Llama2C(nn.Module):
    """Keeps its loss in an attribute, which the training script reads."""

    last_loss: Tensor | None

    def __init__(self, params: ModelArgs | None = None) -> None:
        super().__init__()
        self.params = params = params or ModelArgs()
        self.tok_embeddings, self.dropout = nn.Embedding(params.vocab_size, params.dim), nn.Dropout(params.dropout)
        self.layers = nn.ModuleList()
        for layer_id in range(params.n_layers):
            self.layers.append(LlamaBlock(layer_id, params))
        self.norm, self.output = RMSNorm(params.dim, params.norm_eps), nn.Linear(params.dim, params.vocab_size, bias=False)
        self.tok_embeddings.weight = self.output.weight
        cos, sin = precompute_freqs_cis(params.dim // params.n_heads, params.max_seq_len)
        self.register_buffer("freqs_cos", cos, persistent=False)
        self.register_buffer("freqs_sin", sin, persistent=False)
        self.last_loss = None

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        _, seqlen = tokens.shape
        h = self.dropout(self.tok_embeddings(tokens))
        cos, sin = self.freqs_cos[:seqlen], self.freqs_sin[:seqlen]
        for layer in self.layers:
            h = layer(h, cos, sin)
        h = self.norm(h)
        if targets is not None:
            logits = self.output(h)
            self.last_loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits = self.output(h[:, [-1], :])
            self.last_loss = None
        return logits


@listed(lambda b, n: (ids(b, n), ids(b, n)))
class Llama2CTrained(Llama2C):
    """The same with the loss returned, as forks of it do."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        logits = super().forward(tokens, targets)
        return logits, self.last_loss


listed(lambda b, n: (ids(b, n), ids(b, n)))(Llama2C)


class MoELayer(nn.Module):
    """Leaves its balance in an attribute."""

    def __init__(self, dim: int = 16, n: int = 4, k: int = 2) -> None:
        super().__init__()
        self.gate, self.k, self.n = nn.Linear(dim, n, bias=False), k, n
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)) for _ in range(n))
        self.aux_loss: Tensor | float = 0.0
        self.register_buffer("usage", torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        probs = self.gate(flat).softmax(-1)
        weight, index = probs.topk(self.k, dim=-1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            token, slot = (index == e).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            out.index_add_(0, token, expert(flat[token]) * weight[token, slot].unsqueeze(-1))
        if self.training:
            load = F.one_hot(index, self.n).float().sum(1).mean(0)
            self.aux_loss = self.n * (load * probs.mean(0)).sum()
        else:
            self.aux_loss = 0.0
        return out.view_as(x)


@listed(lambda b, n: (ids(b, n), ids(b, n)))
class MoECollected(nn.Module):
    """Its root collects what its layers left."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.layers, self.head = nn.Embedding(64, 16), nn.ModuleList(MoELayer() for _ in range(3)), nn.Linear(16, 64)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.emb(x)
        for layer in self.layers:
            h = h + layer(h)
        logits = self.head(h)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        aux = sum(m.aux_loss for m in self.modules() if isinstance(m, MoELayer))
        return {"loss": loss + 0.01 * aux, "ce": loss.detach(), "logits": logits}


@listed(labelled)
class MaskedLMMetrics(nn.Module):
    """Loss, perplexity, accuracy and the share of tokens that count, as a dict of what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.pos = nn.Embedding(64, 32), nn.Parameter(torch.randn(1, 64, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.enc, self.head = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(32, 64)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.enc(self.emb(x) + self.pos[:, : x.size(1)])
        logits = self.head(h)
        mask = y != -100
        loss = F.cross_entropy(logits.transpose(1, 2), y, ignore_index=-100)
        pred = logits.argmax(-1)
        with torch.no_grad():
            acc = ((pred == y) & mask).sum().float() / mask.sum().clamp(min=1)
        return {"loss": loss, "ppl": loss.detach().exp(), "acc": acc, "masked": mask.float().mean()}


@listed(labelled)
class MaskAny(nn.Module):
    """A head that runs where anything is masked alone, and what is masked alone goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.rnn = nn.Embedding(64, 24), nn.GRU(24, 24, 2, batch_first=True)
        self.head, self.cls = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 64)), nn.Linear(24, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, _ = self.rnn(self.emb(x))
        loss = F.binary_cross_entropy_with_logits(self.cls(h[:, -1]), F.one_hot(x[:, 0] % 2, 2).to(h.dtype))
        mask = y != -100
        if mask.any():
            loss = loss + F.cross_entropy(self.head(h[mask]), y[mask])
        return loss


@listed(labelled)
class TokenMean(nn.Module):
    """A sum over tokens that count, over their number; with z-loss."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(64, 24), nn.Linear(24, 64)
        self.mix = nn.ModuleList(nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.SiLU(), nn.Linear(48, 24)) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h = self.emb(x)
        for block in self.mix:
            h = h + block(h.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1))
        logits = self.head(h)
        mask = (y != -100).to(h.dtype)
        nll = F.cross_entropy(logits.view(-1, 64), y.clamp(min=0).view(-1), reduction="none").view_as(y)
        z = logits.logsumexp(-1).square()
        loss = ((nll + 1e-3 * z) * mask).sum() / mask.sum()
        return loss, {"nll": (nll * mask).sum() / mask.sum(), "tokens": mask.sum()}


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), torch.randint(3, (b, 16, 16))))
class DiceUNet(nn.Module):
    """Cross entropy and a Dice loss over the whole batch, with IoU by class beside."""

    def __init__(self) -> None:
        super().__init__()
        conv = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.ReLU(inplace=True))  # noqa: E731
        self.d1, self.d2, self.d3 = conv(3, 8), conv(8, 16), conv(16, 32)
        self.up2, self.u2, self.up1, self.u1 = nn.ConvTranspose2d(32, 16, 2, 2), conv(32, 16), nn.ConvTranspose2d(16, 8, 2, 2), conv(16, 8)
        self.out, self.pool = nn.Conv2d(8, 3, 1), nn.MaxPool2d(2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        c1 = self.d1(x)
        c2 = self.d2(self.pool(c1))
        c3 = self.d3(self.pool(c2))
        u = self.u2(torch.cat([self.up2(c3), c2], 1))
        logits = self.out(self.u1(torch.cat([self.up1(u), c1], 1)))
        prob, hot = logits.softmax(1), F.one_hot(y, 3).permute(0, 3, 1, 2).to(logits)
        inter, total = (prob * hot).sum((0, 2, 3)), (prob + hot).sum((0, 2, 3))
        dice = 1 - ((2 * inter + 1) / (total + 1)).mean()
        pred = logits.argmax(1)
        iou = torch.stack([((pred == c) & (y == c)).sum() / ((pred == c) | (y == c)).sum().clamp(min=1) for c in range(3)])
        return {"loss": F.cross_entropy(logits, y) + dice, "iou": iou, "dice": dice.detach()}


@listed(lambda b, n: (torch.randn(b, 12), torch.randn(b, 2), torch.randint(3, (b,))))
class Uncertainty(nn.Module):
    """Tasks weighed by learnt variances (Kendall)."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.reg, self.cls, self.log_vars = nn.Linear(32, 2), nn.Linear(32, 3), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor, target: Tensor, label: Tensor) -> tuple[Tensor, list[Tensor]]:
        h = self.trunk(x)
        losses = [F.mse_loss(self.reg(h), target), F.cross_entropy(self.cls(h), label)]
        total = sum(torch.exp(-s) * each + s for s, each in zip(self.log_vars, losses, strict=True))
        return total, [each.detach() for each in losses]


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), torch.rand(b, 2, 8, 8).lt(0.1).float(), torch.randn(b, 2, 8, 8)))
class CenterNet(nn.Module):
    """A focal loss over the number of centres in the batch, or alone where there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU())
        self.hm, self.wh = nn.Conv2d(16, 2, 1), nn.Conv2d(16, 2, 1)
        self.hm.bias.data.fill_(-2.19)

    def forward(self, x: Tensor, gt: Tensor, wh: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        h = self.body(x)
        pred = torch.clamp(self.hm(h).sigmoid_(), min=1e-4, max=1 - 1e-4)
        pos_inds, neg_inds = gt.eq(1).to(h.dtype), gt.lt(1).to(h.dtype)
        neg_weights = torch.pow(1 - gt, 4)
        pos_loss = (torch.log(pred) * torch.pow(1 - pred, 2) * pos_inds).sum()
        neg_loss = (torch.log(1 - pred) * torch.pow(pred, 2) * neg_weights * neg_inds).sum()
        num_pos = pos_inds.sum()
        loss = 0
        if num_pos == 0:
            loss = loss - neg_loss
        else:
            loss = loss - (pos_loss + neg_loss) / num_pos
        mask = pos_inds.amax(1, keepdim=True).expand_as(wh)
        wh_loss = F.l1_loss(self.wh(h) * mask, wh * mask, reduction="sum") / (mask.sum() + 1e-4)
        return loss + 0.1 * wh_loss, {"hm": loss, "wh": wh_loss}


@listed(lambda b, n: (torch.randn(b, n, 8), torch.randint(1, 12, (b, 6)), torch.full((b,), n), torch.randint(3, 7, (b,))))
class CTCTrainer(nn.Module):
    """CTC, a mean over texts of their mean over letters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(8, 24, 5, padding=2), nn.BatchNorm1d(24), nn.Hardtanh(0, 20, inplace=True))
        self.rnn, self.fc = nn.LSTM(24, 24, 2, batch_first=True, bidirectional=True), nn.Linear(48, 12)
        self.criterion = nn.CTCLoss(blank=0, zero_infinity=True)

    def forward(self, x: Tensor, y: Tensor, x_len: Tensor, y_len: Tensor) -> tuple[Tensor, Tensor]:
        h, _ = self.rnn(self.conv(x.transpose(1, 2)).transpose(1, 2))
        log_probs = self.fc(h).log_softmax(-1)
        return self.criterion(log_probs.transpose(0, 1), y, x_len, y_len), log_probs.argmax(-1)


@listed(lambda b, n: (torch.randn(b, 24), torch.randn(b, 24)))
class BarlowTwins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32, bias=False))
        self.projector, self.bn = nn.Linear(32, 16, bias=False), nn.BatchNorm1d(16, affine=False)

    def off_diagonal(self, x: Tensor) -> Tensor:
        n, m = x.shape
        assert n == m
        return x.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()

    def forward(self, y1: Tensor, y2: Tensor) -> Tensor:
        z1, z2 = self.projector(self.backbone(y1)), self.projector(self.backbone(y2))
        c = self.bn(z1).T @ self.bn(z2)
        c.div_(y1.shape[0])
        on_diag = torch.diagonal(c).add_(-1).pow_(2).sum()
        return on_diag + 0.0051 * self.off_diagonal(c).pow_(2).sum()


@listed(lambda b, n: (torch.randn(b, 24), torch.randn(b, 24)))
class VICReg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.projector = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, y = self.projector(self.backbone(x)), self.projector(self.backbone(y))
        repr_loss = F.mse_loss(x, y)
        x, y = x - x.mean(dim=0), y - y.mean(dim=0)
        std_x, std_y = torch.sqrt(x.var(dim=0) + 0.0001), torch.sqrt(y.var(dim=0) + 0.0001)
        std_loss = torch.mean(F.relu(1 - std_x)) / 2 + torch.mean(F.relu(1 - std_y)) / 2
        cov_x, cov_y = (x.T @ x) / (x.shape[0] - 1), (y.T @ y) / (y.shape[0] - 1)
        off = lambda m: m.flatten()[:-1].view(len(m) - 1, len(m) + 1)[:, 1:].flatten()  # noqa: E731
        return 25 * repr_loss + 25 * std_loss + off(cov_x).pow_(2).sum().div(16) + off(cov_y).pow_(2).sum().div(16)


@listed(lambda b, n: (torch.randn(b, 24), torch.randn(b, 24)))
class SwAV(nn.Module):
    """Prototypes, and codes by Sinkhorn over the batch; both views as one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.prototypes = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Linear(16, 6, bias=False)

    @torch.no_grad()
    def sinkhorn(self, scores: Tensor) -> Tensor:
        q = torch.exp(scores / 0.5).t()
        q /= q.sum()
        k, b = q.shape
        for _ in range(3):
            q /= torch.sum(q, dim=1, keepdim=True)
            q /= k
            q /= torch.sum(q, dim=0, keepdim=True)
            q /= b
        return (q * b).t()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        bs = a.size(0)
        scores = self.prototypes(F.normalize(self.body(torch.cat((a, b))), dim=1, p=2))
        loss = 0
        for i in range(2):
            q = self.sinkhorn(scores[bs * i: bs * (i + 1)].detach())
            x = scores[bs * (1 - i): bs * (2 - i)] / 0.1
            loss -= torch.mean(torch.sum(q * F.log_softmax(x, dim=1), dim=1))
        return loss / 2


@listed(lambda b, n: (torch.randn(b, n, 12),))
class CPC(nn.Module):
    """Predicts what comes, among the batch's others at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.ar = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16)), nn.GRU(16, 16, batch_first=True)
        self.predict = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.enc(x)
        t = x.shape[1] // 2
        _, c = self.ar(z[:, :t])
        nce, correct = 0, 0
        for i, head in enumerate(self.predict):
            total = torch.mm(z[:, t + i], head(c[-1]).t())
            correct += torch.sum(torch.eq(torch.argmax(F.softmax(total, 1), dim=0), torch.arange(0, len(x))))
            nce += torch.sum(torch.diag(F.log_softmax(total, 1)))
        nce /= -1.0 * len(x) * len(self.predict)
        return nce, 1.0 * correct / len(x)


@listed(lambda b, n: (torch.randn(b, 4 * n), torch.rand(b, n) < 0.4))
class Wav2Vec2(nn.Module):
    """Masked frames told from frames of the same sound, by what a Gumbel quantizer makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.mask_emb = nn.Sequential(nn.Conv1d(1, 16, 4, 4), nn.GELU(), nn.GroupNorm(1, 16)), nn.Parameter(torch.rand(16))
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder, self.final, self.project_q = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 8), nn.Linear(8, 8)
        self.weight_proj, self.vars = nn.Linear(16, 12), nn.Parameter(torch.rand(1, 12, 4))

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        b, t, _ = x.shape
        logits = self.weight_proj(x).view(b * t * 2, -1)
        hard = torch.zeros_like(logits).scatter_(-1, logits.max(-1)[1].view(-1, 1), 1.0)
        y = logits.softmax(-1)
        hard = hard - y.detach() + y
        avg = torch.softmax(logits.view(b * t, 2, -1).float(), dim=-1).mean(dim=0)
        perplexity = torch.exp(-torch.sum(avg * torch.log(avg + 1e-7), dim=-1)).sum()
        q = (hard.view(b * t, -1).unsqueeze(-1) * self.vars).view(b * t, 2, 6, -1).sum(-2).view(b, t, -1)
        return q, perplexity, (12 - perplexity) / 12

    def forward(self, wave: Tensor, mask: Tensor) -> dict[str, Tensor]:
        f = self.conv(wave.unsqueeze(1)).transpose(1, 2)
        q, ppl, penalty = self.quantize(f)
        x = torch.where(mask.unsqueeze(-1), self.mask_emb.to(f.dtype), f)
        x, y = self.final(self.encoder(x)), self.project_q(q)
        logits = F.cosine_similarity(x.unsqueeze(2), y.unsqueeze(1), dim=-1) / 0.1
        logits = logits.masked_fill(~mask.unsqueeze(1), -1e4)
        target = torch.arange(mask.shape[1]).expand_as(mask)
        loss = F.cross_entropy(logits[mask], target[mask], reduction="sum")
        n = mask.long().sum()
        return {"loss": loss / n + 0.1 * penalty, "ppl": ppl, "sample_size": n, "features_pen": f.float().pow(2).mean()}


@listed(lambda b, n: (torch.randn(b, 16),))
class ResidualVQ(nn.Module):
    """Codebooks by running averages, dead codes replaced by what the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.register_buffer("embed", torch.randn(3, 12, 8))
        self.register_buffer("cluster_size", torch.zeros(3, 12))
        self.register_buffer("embed_avg", self.embed.clone())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.enc(x)
        residual, out, losses, indices = z, 0.0, [], []
        for i in range(3):
            dist = -(residual.pow(2).sum(1, keepdim=True) - 2 * residual @ self.embed[i].t() + self.embed[i].t().pow(2).sum(0, keepdim=True))
            index = dist.max(dim=-1).indices
            onehot = F.one_hot(index, 12).type(x.dtype)
            q = F.embedding(index, self.embed[i])
            if self.training:
                self.cluster_size[i].mul_(0.9).add_(onehot.sum(0), alpha=0.1)
                self.embed_avg[i].mul_(0.9).add_(onehot.t() @ residual.detach(), alpha=0.1)
                n = self.cluster_size[i].sum()
                size = (self.cluster_size[i] + 1e-5) / (n + 12 * 1e-5) * n
                self.embed[i].copy_(self.embed_avg[i] / size.unsqueeze(1))
            losses.append(F.mse_loss(q.detach(), residual))
            q = residual + (q - residual).detach()
            residual, out = residual - q.detach(), out + q
            indices.append(index)
        recon = self.dec(out)
        return {"loss": F.mse_loss(recon, x) + 0.25 * torch.stack(losses).sum(), "indices": torch.stack(indices, -1), "recon": recon}


@listed(lambda b, n: (torch.randn(b, 16),))
class FSQ(nn.Module):
    """Numbers rounded to levels, with codes of them."""

    def __init__(self) -> None:
        super().__init__()
        levels = [8, 5, 5, 5]
        self.register_buffer("_levels", torch.tensor(levels, dtype=torch.int32), persistent=False)
        self.register_buffer("_basis", torch.cumprod(torch.tensor([1, *levels[:-1]]), dim=0, dtype=torch.int32), persistent=False)
        self.enc, self.dec = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 4)), nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.enc(x)
        half_l = (self._levels - 1) * (1 + 1e-3) / 2
        offset = torch.where(self._levels % 2 == 0, 0.5, 0.0)
        shift = (offset / half_l).atanh()
        bounded = (z + shift).tanh() * half_l - offset
        q = bounded + (bounded.round() - bounded).detach()
        half = self._levels // 2
        codes = q / half
        index = ((codes * half + half) * self._basis).sum(dim=-1).to(torch.int32)
        return self.dec(codes), index


Intermediates = namedtuple("Intermediates", ["attn", "kv"])


@listed(lambda b, n: (ids(b, n),))
class NamedTuples(nn.Module):
    """Blocks that hand on namedtuples, and lists of what is between."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(nn.ModuleDict({"qkv": nn.Linear(32, 96, bias=False), "o": nn.Linear(32, 32), "ff": nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))}) for _ in range(3))

    def attend(self, layer: nn.ModuleDict, x: Tensor) -> tuple[Tensor, Intermediates]:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in layer["qkv"](x).chunk(3, -1))
        sim = einsum("b h i d, b h j d -> b h i j", q, k) * 8**-0.5
        i, j = sim.shape[-2:]
        sim = sim.masked_fill(torch.ones((i, j), dtype=torch.bool).triu(j - i + 1), -torch.finfo(sim.dtype).max)
        attn = sim.softmax(-1)
        return layer["o"](einsum("b h i j, b h j d -> b h i d", attn, v).transpose(1, 2).flatten(2)), Intermediates(attn, (k, v))

    def forward(self, x: Tensor, return_intermediates: bool = True) -> Any:
        h, hiddens = self.emb(x), []
        for layer in self.layers:
            o, inter = self.attend(layer, h)
            h = h + o
            h = h + layer["ff"](h)
            hiddens.append(inter)
        logits = self.out(h)
        return (logits, hiddens) if return_intermediates else logits


@listed(lambda b, n: (torch.randn(b, 4, 8, 8), torch.randint(0, 100, (b,)), torch.randn(b, 6, 16)))
class UNetCross(nn.Module):
    """A diffusion U-Net with cross attention, its conditioning dropped by chance in training."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.inp = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32)), nn.Conv2d(4, 16, 3, padding=1)
        self.down, self.mid, self.up = nn.ModuleList(), nn.ModuleDict(), nn.ModuleList()
        for i, o in ((16, 16), (16, 32)):
            self.down.append(nn.ModuleDict({"res": ResBlock(i, o), "attn": CrossBlock(o), "down": nn.Conv2d(o, o, 3, 2, 1)}))
        self.mid = nn.ModuleDict({"res": ResBlock(32, 32), "attn": CrossBlock(32)})
        for i, o in ((64, 16), (32, 16)):
            self.up.append(nn.ModuleDict({"res": ResBlock(i, o), "attn": CrossBlock(o)}))
        self.out, self.null = nn.Sequential(nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 4, 3, padding=1)), nn.Parameter(torch.zeros(1, 1, 16))

    def forward(self, x: Tensor, t: Tensor, context: Tensor, cond_drop_prob: float = 0.0) -> Tensor:
        freqs = torch.exp(-math.log(10000) * torch.arange(0, 8, dtype=torch.float32) / 8).to(t.device)
        args = t[:, None].float() * freqs[None]
        emb = self.time(torch.cat([args.cos(), args.sin()], -1).to(x.dtype))
        if self.training and cond_drop_prob > 0:
            keep = torch.rand(x.shape[0], device=x.device) > cond_drop_prob
            context = torch.where(keep[:, None, None], context, self.null)
        h, skips = self.inp(x), []
        for d in self.down:
            h = d["attn"](d["res"](h, emb), context)
            skips.append(h)
            h = d["down"](h)
        h = self.mid["attn"](self.mid["res"](h, emb), context)
        for u in self.up:
            h = F.interpolate(h, scale_factor=2, mode="nearest")
            h = u["attn"](u["res"](torch.cat([h, skips.pop()], 1), emb), context)
        return self.out(h)


class ResBlock(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.a, self.b, self.emb = nn.Sequential(nn.GroupNorm(4, i), nn.SiLU(), nn.Conv2d(i, o, 3, padding=1)), nn.Sequential(nn.GroupNorm(4, o), nn.SiLU(), nn.Conv2d(o, o, 3, padding=1)), nn.Linear(32, 2 * o)
        self.skip = nn.Identity() if i == o else nn.Conv2d(i, o, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        scale, shift = self.emb(F.silu(emb))[:, :, None, None].chunk(2, 1)
        return self.skip(x) + self.b(self.a(x) * (1 + scale) + shift)


class CrossBlock(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.norm, self.q, self.kv, self.o = nn.LayerNorm(c), nn.Linear(c, c, bias=False), nn.Linear(16, 2 * c, bias=False), nn.Linear(c, c)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = x.reshape(b, c, h * w).permute(0, 2, 1)
        q = self.q(self.norm(y)).view(b, -1, 4, c // 4).transpose(1, 2)
        k, v = (t.view(b, -1, 4, c // 4).transpose(1, 2) for t in self.kv(context).chunk(2, -1))
        y = y + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, h * w, c))
        return y.permute(0, 2, 1).reshape(b, c, h, w)


@listed(lambda b, n: (torch.randint(0, 2, (b, 1, 6)).float(), torch.randn(b, 5, 6)))
class NoisyRainbow(nn.Module):
    """Noisy layers and a distribution of values, projected as Rainbow does."""

    def __init__(self) -> None:
        super().__init__()
        self.feature, self.value, self.advantage = nn.Sequential(nn.Linear(6, 32), nn.ReLU()), NoisyLinear(32, 11), NoisyLinear(32, 33)
        self.register_buffer("support", torch.linspace(-5, 5, 11))

    def dist(self, x: Tensor) -> Tensor:
        h = self.feature(x)
        v, a = self.value(h).view(-1, 1, 11), self.advantage(h).view(-1, 3, 11)
        return F.softmax(v + a - a.mean(1, keepdim=True), dim=-1).clamp(min=1e-3)

    def forward(self, state: Tensor, path: Tensor) -> Tensor:
        state, nxt = state.squeeze(1), path[:, -1]
        reward = path.sum((1, 2)).tanh().unsqueeze(1)
        with torch.no_grad():
            action = (self.dist(nxt) * self.support).sum(2).argmax(1)
            next_dist = self.dist(nxt)[range(len(nxt)), action]
            t_z = (reward + 0.99 * self.support).clamp(min=-5, max=5)
            b = (t_z + 5) / 1.0
            lo, up = b.floor().long(), b.ceil().long()
            offset = torch.linspace(0, (len(nxt) - 1) * 11, len(nxt)).long().unsqueeze(1).expand(len(nxt), 11)
            proj = torch.zeros(next_dist.size())
            proj.view(-1).index_add_(0, (lo + offset).view(-1), (next_dist * (up.float() - b)).view(-1).float())
            proj.view(-1).index_add_(0, (up + offset).view(-1), (next_dist * (b - lo.float())).view(-1).float())
        log_p = torch.log(self.dist(state)[range(len(nxt)), action])
        return -(proj.to(log_p) * log_p).sum(1)


class NoisyLinear(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.weight_mu, self.weight_sigma = nn.Parameter(torch.randn(o, i) * 0.1), nn.Parameter(torch.full((o, i), 0.05))
        self.bias_mu, self.bias_sigma = nn.Parameter(torch.zeros(o)), nn.Parameter(torch.full((o,), 0.05))
        self.register_buffer("weight_epsilon", torch.randn(o, i))
        self.register_buffer("bias_epsilon", torch.randn(o))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return F.linear(x, self.weight_mu + self.weight_sigma * self.weight_epsilon, self.bias_mu + self.bias_sigma * self.bias_epsilon)
        return F.linear(x, self.weight_mu, self.bias_mu)


@listed(lambda b, n: (torch.randn(b, 6, 5), torch.rand(b, 6) < 0.2, torch.randn(b, 6), torch.randint(3, (b, 6))))
class RecurrentPPO(nn.Module):
    """An actor and critic whose state is put to nought where an episode ends; returns by GAE, advantages normed."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.rnn, self.pi, self.v = nn.Sequential(nn.Linear(5, 24), nn.Tanh()), nn.LSTMCell(24, 24), nn.Linear(24, 3), nn.Linear(24, 1)
        for name, p in self.rnn.named_parameters():
            if "bias" in name:
                nn.init.constant_(p, 0)
            elif "weight" in name:
                nn.init.orthogonal_(p, 1.0)

    def forward(self, obs: Tensor, done: Tensor, reward: Tensor, action: Tensor) -> dict[str, Tensor]:
        h = c = obs.new_zeros(obs.shape[0], 24)
        outs = []
        for x, d in zip(self.enc(obs).unbind(1), done.unbind(1), strict=True):
            keep = (1.0 - d.to(x.dtype)).unsqueeze(-1)
            h, c = self.rnn(x, (keep * h, keep * c))
            outs += [h]
        h = torch.stack(outs, 1)
        logits, values = self.pi(h), self.v(h).squeeze(-1)
        with torch.no_grad():
            adv, last = torch.zeros_like(reward), 0
            for t in reversed(range(reward.shape[1] - 1)):
                nonterminal = 1.0 - done[:, t + 1].to(reward.dtype)
                delta = reward[:, t] + 0.99 * values[:, t + 1] * nonterminal - values[:, t]
                adv[:, t] = last = delta + 0.99 * 0.95 * nonterminal * last
            returns = adv + values
        dist = torch.distributions.Categorical(logits=logits)
        adv = (adv - adv.mean()) / (adv.std() + 1e-8)
        ratio = (dist.log_prob(action) - dist.log_prob(action).detach()).exp()
        pg = torch.max(-adv * ratio, -adv * torch.clamp(ratio, 0.8, 1.2)).mean()
        return {"loss": pg - 0.01 * dist.entropy().mean() + 0.5 * ((values - returns) ** 2).mean(), "value": values}


@listed(lambda b, n: (ids(b, n),))
class UniversalTransformer(nn.Module):
    """One layer as often as halting says (ACT): a loop until all have halted."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.out = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layer, self.halt = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        halting, remainders, n_updates, previous = (torch.zeros(x.shape, dtype=h.dtype) for _ in range(3)), None, None, torch.zeros_like(h)
        halting, remainders, n_updates = halting
        step = 0
        while ((halting < 0.9) & (n_updates < 4)).byte().any():
            p = torch.sigmoid(self.halt(h)).squeeze(-1)
            running = (halting < 1.0).to(h.dtype)
            new = (halting + p * running > 0.9).to(h.dtype) * running
            running = (halting + p * running <= 0.9).to(h.dtype) * running
            halting = halting + p * running
            remainders = remainders + new * (1 - halting)
            halting = halting + new * remainders
            n_updates = n_updates + running + new
            weights = (p * running + new * remainders).unsqueeze(-1)
            h = self.layer(h)
            previous = h * weights + previous * (1 - weights)
            step += 1
        return self.out(previous)


@listed(lambda b, n: (torch.randn(b, n, 16),))
class DeepEquilibrium(nn.Module):
    """A fixed point, found without gradients, then one step with."""

    def __init__(self) -> None:
        super().__init__()
        self.inject, self.f, self.norm, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        with torch.no_grad():
            self.f.weight.mul_(0.3)

    def step(self, z: Tensor, x: Tensor) -> Tensor:
        return self.norm(F.relu(self.f(z)) + x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inject(x)
        with torch.no_grad():
            z, k = torch.zeros_like(x), 0
            while k < 12:
                new = self.step(z, x)
                if (new - z).norm() / (1e-5 + new.norm()) < 1e-4:
                    break
                z, k = new, k + 1
        return self.out(self.step(z, x).mean(1))


@listed(lambda b, n: (torch.randn(b, 3, 16, 16),))
class DeiT(nn.Module):
    """A distilled head: both outputs in training, their mean in evaluation; layer scale, stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.cls, self.dist, self.pos = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.randn(1, 18, 32) * 0.02)
        self.blocks = nn.ModuleList(nn.ModuleDict({"n1": nn.LayerNorm(32), "attn": nn.MultiheadAttention(32, 4, batch_first=True), "n2": nn.LayerNorm(32), "mlp": nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))}) for _ in range(4))
        self.gamma = nn.ParameterList(nn.Parameter(0.1 * torch.ones(32)) for _ in range(8))
        self.norm, self.head, self.head_dist, self.rates = nn.LayerNorm(32), nn.Linear(32, 5), nn.Linear(32, 5), [x.item() for x in torch.linspace(0, 0.2, 4)]

    def drop_path(self, x: Tensor, p: float) -> Tensor:
        if p == 0.0 or not self.training:
            return x
        keep = 1 - p
        mask = keep + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype, device=x.device)
        return x.div(keep) * mask.floor_()

    def forward(self, x: Tensor) -> Any:
        b = x.shape[0]
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(b, -1, -1), self.dist.expand(b, -1, -1), x), dim=1) + self.pos
        for i, block in enumerate(self.blocks):
            y = block["n1"](x)
            x = x + self.drop_path(self.gamma[2 * i] * block["attn"](y, y, y, need_weights=False)[0], self.rates[i])
            x = x + self.drop_path(self.gamma[2 * i + 1] * block["mlp"](block["n2"](x)), self.rates[i])
        x = self.norm(x)
        x, x_dist = self.head(x[:, 0]), self.head_dist(x[:, 1])
        if self.training and not torch.jit.is_scripting():
            return x, x_dist
        return (x + x_dist) / 2


@listed(lambda b, n: (torch.randn(b, 3, 32, 32),))
class YOLOv5(nn.Module):
    """A detector that makes its grids anew where sizes change, and decodes in evaluation alone."""

    def __init__(self) -> None:
        super().__init__()
        conv = lambda i, o, s: nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.SiLU())  # noqa: E731
        self.stem, self.p3, self.p4 = nn.Sequential(conv(3, 8, 2), conv(8, 8, 2)), conv(8, 16, 2), conv(16, 32, 2)
        self.na, self.no, self.nl = 2, 7, 2
        self.grid, self.anchor_grid = [torch.empty(0) for _ in range(2)], [torch.empty(0) for _ in range(2)]
        self.register_buffer("anchors", torch.tensor([[1.0, 1.5, 2.0, 3.0], [3.0, 2.0, 4.0, 5.0]]).view(2, 2, 2))
        self.m, self.stride = nn.ModuleList(nn.Conv2d(c, 14, 1) for c in (16, 32)), torch.tensor([8.0, 16.0])

    def _make_grid(self, nx: int, ny: int, i: int) -> tuple[Tensor, Tensor]:
        d, t = self.anchors[i].device, self.anchors[i].dtype
        shape = 1, self.na, ny, nx, 2
        yv, xv = torch.meshgrid(torch.arange(ny, device=d, dtype=t), torch.arange(nx, device=d, dtype=t), indexing="ij")
        grid = torch.stack((xv, yv), 2).expand(shape) - 0.5
        return grid, (self.anchors[i] * self.stride[i]).view((1, self.na, 1, 1, 2)).expand(shape)

    def forward(self, x: Tensor) -> Any:
        x = self.p3(self.stem(x))
        x, z = [x, self.p4(x)], []
        for i in range(self.nl):
            x[i] = self.m[i](x[i])
            bs, _, ny, nx = x[i].shape
            x[i] = x[i].view(bs, self.na, self.no, ny, nx).permute(0, 1, 3, 4, 2).contiguous()
            if not self.training:
                if self.grid[i].shape[2:4] != x[i].shape[2:4]:
                    self.grid[i], self.anchor_grid[i] = self._make_grid(nx, ny, i)
                xy, wh, conf = x[i].sigmoid().split((2, 2, 3), 4)
                xy, wh = (xy * 2 + self.grid[i]) * self.stride[i], (wh * 2) ** 2 * self.anchor_grid[i]
                z.append(torch.cat((xy, wh, conf), 4).view(bs, self.na * nx * ny, self.no))
        return x if self.training else (torch.cat(z, 1), x)


@listed(lambda b, n: (torch.randn(b, n, 7), torch.randn(b, n // 2 + 8, 7)))
class NonStationary(nn.Module):
    """An Informer with statistics in attributes, sampled keys, and distilling between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.enc_in, self.dec_in = nn.Conv1d(7, 16, 3, padding=1, padding_mode="circular", bias=False), nn.Conv1d(7, 16, 3, padding=1, padding_mode="circular", bias=False)
        self.q, self.k, self.v, self.o = (nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) for _ in range(4))
        self.distil, self.proj = nn.Sequential(nn.Conv1d(16, 16, 3, padding=1), nn.ELU(), nn.MaxPool1d(3, 2, 1)), nn.Linear(16, 7)

    def prob_attention(self, i: int, x: Tensor, y: Tensor) -> Tensor:
        b, lq, _ = x.shape
        lk = y.shape[1]
        q, k, v = self.q[i](x), self.k[i](y), self.v[i](y)
        u = min(int(2 * math.ceil(math.log(lq))), lq)
        m = (q @ k.transpose(1, 2))
        m = m.max(-1)[0] - m.sum(-1) / lk
        top = m.topk(u, sorted=False)[1]
        q_reduce = q[torch.arange(b)[:, None], top, :]
        context = v.mean(dim=-2).unsqueeze(-2).expand(b, lq, v.shape[-1]).clone()
        context[torch.arange(b)[:, None], top, :] = torch.softmax(q_reduce @ k.transpose(1, 2) / 4, -1) @ v
        return x + self.o[i](context)

    def forward(self, x: Tensor, dec: Tensor) -> Tensor:
        self.means = x.mean(1, keepdim=True).detach()
        x = x - self.means
        self.stdev = torch.sqrt(torch.var(x, dim=1, keepdim=True, unbiased=False) + 1e-5).detach()
        h = self.enc_in((x / self.stdev).transpose(1, 2)).transpose(1, 2)
        h = self.prob_attention(0, h, h)
        h = self.distil(h.transpose(1, 2)).transpose(1, 2)
        h = self.prob_attention(1, h, h)
        d = self.prob_attention(2, self.dec_in(dec.transpose(1, 2)).transpose(1, 2), h)
        return self.proj(d)[:, -8:] * self.stdev[:, 0].unsqueeze(1) + self.means[:, 0].unsqueeze(1)


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), "d"))
class HingeGAN(nn.Module):
    """Both nets of a GAN in one, told by a word which loss it is to make."""

    def __init__(self) -> None:
        super().__init__()
        sn = nn.utils.parametrizations.spectral_norm
        self.g = nn.Sequential(nn.Linear(8, 8 * 4 * 4), nn.Unflatten(1, (8, 4, 4)), nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2), nn.Conv2d(8, 3, 3, padding=1), nn.Tanh())
        self.d = nn.Sequential(sn(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.1), sn(nn.Conv2d(8, 16, 4, 2, 1)), nn.LeakyReLU(0.1), nn.Flatten(), sn(nn.Linear(256, 1)))

    def forward(self, x: Tensor, mode: str = "d") -> Tensor:
        z = x.flatten(1)[:, :8]
        if mode == "g":
            return -self.d(self.g(z)).mean()
        if mode == "d":
            fake = self.g(z).detach()
            return F.relu(1.0 - self.d(x)).mean() + F.relu(1.0 + self.d(fake)).mean()
        raise ValueError(mode)


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), ids(b, 8), torch.ones(b, 8, dtype=torch.long)))
class ALBEF(nn.Module):
    """Contrastive loss, and matching with the hardest others of the batch, drawn row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.text, self.fusion = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.GELU(), nn.Conv2d(16, 16, 1)), nn.Embedding(64, 16), nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)])
        self.vp, self.tp, self.itm, self.temp = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 2), nn.Parameter(0.07 * torch.ones([]))

    def forward(self, image: Tensor, text: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            self.temp.clamp_(0.001, 0.5)
        v = self.body(self.visual(image).flatten(2).transpose(1, 2))
        t = self.body(self.text(text))
        vf, tf = F.normalize(self.vp(v.mean(1)), dim=-1), F.normalize(self.tp(t[:, 0]), dim=-1)
        sim = vf @ tf.t() / self.temp
        targets = torch.arange(len(sim)).to(sim.device)
        ita = (F.cross_entropy(sim, targets) + F.cross_entropy(sim.t(), targets)) / 2
        with torch.no_grad():
            weights = F.softmax(sim, dim=1)
            weights.fill_diagonal_(0)
            hardest = weights.argmax(1)
        neg = torch.stack([t[i] for i in hardest], dim=0)
        pos_out = self.fusion(t, v)[:, 0]
        neg_out = self.fusion(neg, v)[:, 0]
        logits = self.itm(torch.cat([pos_out, neg_out], dim=0))
        labels = torch.cat([torch.ones(len(v), dtype=torch.long), torch.zeros(len(v), dtype=torch.long)], dim=0)
        return ita, F.cross_entropy(logits, labels)


@listed(lambda b, n: (torch.randn(b, 6), torch.randint(3, (b, 4)), torch.randint(2, (b,)).float(), torch.randint(2, (b,)).float()))
class MMoE(nn.Module):
    """Experts shared by tasks (MMoE, ESMM), columns embedded each by its table."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({f"c{i}": nn.Embedding(3, 4) for i in range(4)})
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(22, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 8)) for _ in range(3))
        self.gates, self.towers = nn.ModuleList(nn.Linear(22, 3, bias=False) for _ in range(2)), nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2))
        self.cross_w, self.cross_b = nn.ParameterList(nn.Parameter(torch.randn(22, 1) * 0.1) for _ in range(2)), nn.ParameterList(nn.Parameter(torch.zeros(22)) for _ in range(2))

    def forward(self, dense: Tensor, sparse: Tensor, click: Tensor, convert: Tensor) -> dict[str, Tensor]:
        x0 = x = torch.cat([dense, *[self.tables[f"c{i}"](sparse[:, i]) for i in range(sparse.shape[1])]], dim=-1)
        for w, b in zip(self.cross_w, self.cross_b, strict=True):
            x = x0 * (x @ w) + b + x
        outs = torch.stack([e(x) for e in self.experts], dim=1)
        p = [t((g(x0).softmax(-1).unsqueeze(-1) * outs).sum(1)).squeeze(-1).sigmoid() for g, t in zip(self.gates, self.towers, strict=True)]
        ctcvr = p[0] * p[1]
        loss = F.binary_cross_entropy(p[0], click) + F.binary_cross_entropy(ctcvr, click * convert)
        reg = sum(torch.sum(w ** 2) for n, w in self.named_parameters() if "weight" in n)
        return {"loss": loss + 1e-5 * reg, "ctr": p[0], "ctcvr": ctcvr}


@listed(lambda b, n: (torch.randn(b, n, 3), torch.randn(b, n, 8), torch.arange(n).expand(b, n) < torch.randint(n // 2, n + 1, (b, 1))))
class EGNNDense(nn.Module):
    """Equivariant message passing on padded molecules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"edge": nn.Sequential(nn.Linear(17, 16), nn.SiLU(), nn.Linear(16, 8), nn.SiLU()), "coord": nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1, bias=False)), "node": nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 8))}) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, h: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        n = x.shape[1]
        pair = (mask[:, :, None] & mask[:, None]).unsqueeze(-1) & ~torch.eye(n, dtype=torch.bool)[None, :, :, None]
        for layer in self.layers:
            rel = x[:, :, None] - x[:, None]
            d2 = (rel ** 2).sum(-1, keepdim=True)
            m = layer["edge"](torch.cat([h[:, :, None].expand(-1, -1, n, -1), h[:, None].expand(-1, n, -1, -1), d2], -1)) * pair
            x = x + (rel / (d2.sqrt() + 1) * layer["coord"](m) * pair).sum(2) / pair.sum(2).clamp(min=1)
            h = h + layer["node"](torch.cat([h, m.sum(2)], -1)) * mask.unsqueeze(-1)
        pooled = (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return self.head(pooled).squeeze(-1), x


@listed(lambda b, n: (torch.rand(b, 32), torch.randint(1, 12, (b, 10)), torch.randint(6, 11, (b,)).sort(descending=True)[0]))
class PointerGenerator(nn.Module):
    """Packed encoder; a decoder that copies, its distribution scattered over words."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.enc, self.cell = nn.Embedding(12, 8, padding_idx=0), nn.LSTM(8, 8, batch_first=True, bidirectional=True), nn.LSTMCell(8, 16)
        self.attn, self.out, self.gen, self.init = nn.Linear(16, 16, bias=False), nn.Linear(32, 12), nn.Linear(40, 1), nn.Linear(32, 16)

    def forward(self, context: Tensor, src: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.emb(src), lengths.cpu(), batch_first=True)
        enc, _ = nn.utils.rnn.pad_packed_sequence(self.enc(packed)[0], batch_first=True)
        mask = torch.arange(enc.shape[1])[None] < lengths[:, None]
        h, c = self.init(context).tanh(), torch.zeros(len(src), 16, dtype=enc.dtype)
        token, outs, coverage = torch.ones(len(src), dtype=torch.long), [], 0.0
        for _ in range(4):
            e = self.emb(token)
            h, c = self.cell(e, (h, c))
            score = (self.attn(enc) * h[:, None]).sum(-1).masked_fill(~mask, float("-inf"))
            a = score.softmax(-1)
            ctx = (a.unsqueeze(-1) * enc).sum(1)
            p = self.gen(torch.cat([h, ctx, e], -1)).sigmoid()
            vocab = self.out(torch.cat([h, ctx], -1)).softmax(-1) * p
            dist = vocab.scatter_add(1, src[:, : enc.shape[1]], a * (1 - p))
            coverage = coverage + torch.min(a, a.detach().roll(1, -1)).sum(-1).mean()
            token = dist.argmax(-1)
            outs.append(dist.clamp(min=1e-9).log())
        return -torch.stack(outs, 1).gather(-1, src[:, :4, None]).mean() + coverage
