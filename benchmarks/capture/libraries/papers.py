"""Models as the repositories of papers write them: of language, of agents, of tables and of graphs.

How a model is listed is left to ``catalogue`` and ``by_hand``; pictures, sounds, points and molecules are in
``scenes``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from collections import OrderedDict, namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import (
    Categorical,
    Independent,
    Normal,
    OneHotCategorical,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)

from .by_hand import ids, listed
from .catalogue import rows, sequence

__all__: list[str] = []


@dataclasses.dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = 64
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 32
    dropout: float = 0.0


def norm(x: Tensor) -> Tensor:
    """RMS norm without weights."""
    return F.rms_norm(x, (x.size(-1),))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    d = x.shape[3] // 2
    x1, x2 = x[..., :d], x[..., d:]
    return torch.cat([x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos], 3).to(x.dtype)


class NanochatAttention(nn.Module):
    def __init__(self, config: GPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.n_head, self.n_kv_head = layer_idx, config.n_head, config.n_head // 2
        self.head_dim = config.n_embd // config.n_head
        assert config.n_embd % config.n_head == 0
        self.c_q = nn.Linear(config.n_embd, self.n_head * self.head_dim, bias=False)
        self.c_k = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=False)
        self.c_v = nn.Linear(config.n_embd, self.n_kv_head * self.head_dim, bias=False)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=False)
        self.ve_gate = nn.Linear(8, self.n_kv_head, bias=False) if layer_idx % 2 else None

    def forward(self, x: Tensor, ve: Tensor | None, cos_sin: tuple[Tensor, Tensor], window: int) -> Tensor:
        B, T, _ = x.size()
        q = self.c_q(x).view(B, T, self.n_head, self.head_dim)
        k = self.c_k(x).view(B, T, self.n_kv_head, self.head_dim)
        v = self.c_v(x).view(B, T, self.n_kv_head, self.head_dim)
        if ve is not None and self.ve_gate is not None:
            ve = ve.view(B, T, self.n_kv_head, self.head_dim)
            v = v + 2 * torch.sigmoid(self.ve_gate(x[..., :8])).unsqueeze(-1) * ve
        cos, sin = cos_sin
        q, k = norm(apply_rotary(q, cos, sin)), norm(apply_rotary(k, cos, sin))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if window < 0 or window >= T:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.n_head != self.n_kv_head)
        else:
            row, col = torch.arange(T, device=x.device).unsqueeze(1), torch.arange(T, device=x.device).unsqueeze(0)
            mask = (col <= row) & ((row - col) <= window)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, -1))


class NanochatBlock(nn.Module):
    def __init__(self, config: GPTConfig, layer_idx: int) -> None:
        super().__init__()
        self.attn = NanochatAttention(config, layer_idx)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(config.n_embd, 4 * config.n_embd, bias=False), "c_proj": nn.Linear(4 * config.n_embd, config.n_embd, bias=False)})

    def forward(self, x: Tensor, ve: Tensor | None, cos_sin: tuple[Tensor, Tensor], window: int) -> Tensor:
        x = x + self.attn(norm(x), ve, cos_sin, window)
        return x + self.mlp.c_proj(F.relu(self.mlp.c_fc(norm(x))).square())


@listed(lambda b, n: (ids(b, n), ids(b, n).masked_fill(torch.rand(b, n) < 0.2, -1)))
class Nanochat(nn.Module):
    """Value embeddings of every second layer, scalars of each layer, windows by a pattern, capped logits."""

    def __init__(self) -> None:
        super().__init__()
        self.config = config = GPTConfig()
        self.window_sizes = [(-1, 8)["SSL"[i % 3] == "S"] for i in range(config.n_layer)]
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(config.vocab_size, config.n_embd), "h": nn.ModuleList([NanochatBlock(config, i) for i in range(config.n_layer)])})
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.resid_lambdas, self.x0_lambdas = nn.Parameter(torch.ones(config.n_layer)), nn.Parameter(torch.full((config.n_layer,), 0.1))
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(config.vocab_size, config.n_embd // 2) for i in range(config.n_layer) if i % 2})
        t = torch.arange(10 * 64, dtype=torch.float32)
        freqs = torch.outer(t, 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8)))
        self.register_buffer("cos", freqs.cos()[None, :, None, :], persistent=False)
        self.register_buffer("sin", freqs.sin()[None, :, None, :], persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None, loss_reduction: str = "mean") -> Tensor:
        _B, T = idx.size()
        assert self.cos.size(1) >= T, f"Sequence length grew beyond the rotary embeddings cache: {T} > {self.cos.size(1)}"
        assert idx.device == self.cos.device
        cos_sin = self.cos[:, :T], self.sin[:, :T]
        x = norm(self.transformer.wte(idx))
        x0 = x
        for i, block in enumerate(self.transformer.h):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            ve = self.value_embeds[str(i)](idx) if str(i) in self.value_embeds else None
            x = block(x, ve, cos_sin, self.window_sizes[i])
        logits = self.lm_head(norm(x))[..., : self.config.vocab_size].float()
        logits = 15 * torch.tanh(logits / 15)
        if targets is not None:
            return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1, reduction=loss_reduction)
        return logits


class TimeMix(nn.Module):
    """RWKV's fourth, with its recurrence in plain torch."""

    def __init__(self, dim: int, layer: int, n_layer: int) -> None:
        super().__init__()
        ratio = layer / (n_layer - 1)
        self.time_decay = nn.Parameter(-5 + 8 * (torch.arange(dim) / (dim - 1)) ** (0.7 + 1.3 * ratio))
        self.time_first = nn.Parameter(torch.ones(dim) * math.log(0.3))
        self.time_mix_k, self.time_mix_v, self.time_mix_r = (nn.Parameter(torch.rand(1, 1, dim)) for _ in range(3))
        self.time_shift = nn.ZeroPad2d((0, 0, 1, -1))
        self.key, self.value, self.receptance, self.output = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def wkv(self, k: Tensor, v: Tensor) -> Tensor:
        w, u = -torch.exp(self.time_decay), self.time_first
        B, T, C = k.shape
        aa, bb = torch.zeros(B, C, dtype=k.dtype), torch.zeros(B, C, dtype=k.dtype)
        pp = torch.full((B, C), -1e38, dtype=k.dtype)
        out = torch.empty_like(v)
        for t in range(T):
            ww = u + k[:, t]
            p = torch.maximum(pp, ww)
            e1, e2 = torch.exp(pp - p), torch.exp(ww - p)
            out[:, t] = (e1 * aa + e2 * v[:, t]) / (e1 * bb + e2)
            ww = pp + w
            p = torch.maximum(ww, k[:, t])
            e1, e2 = torch.exp(ww - p), torch.exp(k[:, t] - p)
            aa, bb, pp = e1 * aa + e2 * v[:, t], e1 * bb + e2, p
        return out

    def forward(self, x: Tensor) -> Tensor:
        xx = self.time_shift(x)
        k = self.key(x * self.time_mix_k + xx * (1 - self.time_mix_k))
        v = self.value(x * self.time_mix_v + xx * (1 - self.time_mix_v))
        r = torch.sigmoid(self.receptance(x * self.time_mix_r + xx * (1 - self.time_mix_r)))
        return self.output(r * self.wkv(k, v))


@listed(lambda b, n: (ids(b, n // 2), ids(b, n // 2)))
class RWKV(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.blocks = nn.Embedding(64, 32), nn.ModuleList()
        for i in range(3):
            self.blocks.append(nn.ModuleDict({"ln1": nn.LayerNorm(32), "ln2": nn.LayerNorm(32), "att": TimeMix(32, i, 3), "ffn": nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))}))
        self.ln_out, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        x = self.emb(idx)
        for block in self.blocks:
            x = x + block["att"](block["ln1"](x))
            x = x + block["ffn"](block["ln2"](x))
        x = self.head(self.ln_out(x))
        if targets is None:
            return x
        loss = F.cross_entropy(x.view(-1, x.size(-1)), targets.view(-1))
        return L2Wrap.apply(loss, x)


class L2Wrap(torch.autograd.Function):
    """A penalty that is there in the backward alone."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        y = ctx.saved_tensors[0]
        factor = 1e-4 / (y.shape[0] * y.shape[1])
        maxx, index = torch.max(y, -1, keepdim=True)
        gy = torch.zeros_like(y)
        gy.scatter_(-1, index, maxx * factor)
        return grad_output, gy


class MLSTM(nn.Module):
    """xLSTM's matrix memory, in its parallel form."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.up, self.down = heads, nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.igate, self.fgate = nn.Linear(3 * dim, heads), nn.Linear(3 * dim, heads)
        self.conv, self.skip, self.norm = nn.Conv1d(dim, dim, 4, groups=dim, padding=3), nn.Parameter(torch.ones(dim)), nn.GroupNorm(heads, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, S, D = x.shape
        x, z = self.up(x).chunk(2, -1)
        c = F.silu(self.conv(x.transpose(1, 2))[..., :S].transpose(1, 2))
        q, k, v = self.q(c), self.k(c), self.v(x)
        gates = torch.cat([q, k, v], -1)
        q, k, v = (t.view(B, S, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        i, f = self.igate(gates).transpose(1, 2)[..., None], F.logsigmoid(self.fgate(gates)).transpose(1, 2)[..., None]
        cum = torch.cat([torch.zeros((B, self.heads, 1, 1), dtype=x.dtype), torch.cumsum(f, -2)], -2)
        rep = cum.repeat(1, 1, 1, S + 1)
        log_d = rep - rep.transpose(-2, -1)
        ltr = torch.tril(torch.ones((S, S), dtype=torch.bool))
        log_d = torch.where(ltr, log_d[:, :, 1:, 1:], torch.tensor(-float("inf"), dtype=x.dtype)) + i.transpose(-2, -1)
        top = torch.max(log_d, -1, keepdim=True).values
        c = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]) * torch.exp(log_d - top)
        h = (c / (torch.maximum(c.sum(-1, keepdim=True).abs(), torch.exp(-top)) + 1e-6)) @ v
        h = self.norm(h.transpose(1, 2).reshape(B * S, D)).view(B, S, D) + self.skip * F.silu(x)
        return self.down(h * F.silu(z))


class SLSTM(nn.Module):
    """xLSTM's scalar memory, step by step."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w, self.r, self.norm = nn.Linear(dim, 4 * dim), nn.Linear(dim, 4 * dim, bias=False), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros_like(x[:, 0]) for _ in range(4)]
        outputs = []
        for wx in self.w(x).unbind(dim=1):
            h, c, n, m = states
            i, f, z, o = (wx + self.r(h)).chunk(4, -1)
            m_new = torch.maximum(F.logsigmoid(f) + m, i)
            i, f = torch.exp(i - m_new), torch.exp(F.logsigmoid(f) + m - m_new)
            c, n = f * c + i * torch.tanh(z), f * n + i
            states = [torch.sigmoid(o) * c / n.clamp(min=1e-6), c, n, m_new]
            outputs.append(states[0])
        return self.norm(torch.stack(outputs, 1))


@listed(lambda b, n: (ids(b, n // 2), ids(b, n // 2)))
class XLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([SLSTM(32) if i in (1,) else MLSTM(32, 4) for i in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in self.blocks])
        self.head = nn.Linear(32, 64)

    def forward(self, idx: Tensor, targets: Tensor) -> dict[str, Tensor]:
        x = self.embed(idx)
        for layer, ln in zip(self.blocks, self.norms, strict=True):
            x = x + layer(ln(x))
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), targets.flatten()), "logits": logits}


class MLA(nn.Module):
    """DeepSeek's latent attention, with rotations in complex numbers."""

    def __init__(self, dim: int = 32, heads: int = 4, rank: int = 8, nope: int = 8, rope: int = 4) -> None:
        super().__init__()
        self.n_heads, self.nope, self.rope, self.rank = heads, nope, rope, rank
        self.wq, self.wkv_a, self.kv_norm = nn.Linear(dim, heads * (nope + rope), bias=False), nn.Linear(dim, rank + rope, bias=False), nn.RMSNorm(rank)
        self.wkv_b, self.wo = nn.Linear(rank, heads * (nope + nope), bias=False), nn.Linear(heads * nope, dim, bias=False)
        self.softmax_scale = (nope + rope) ** -0.5

    @staticmethod
    def rotary(x: Tensor, freqs_cis: Tensor) -> Tensor:
        dtype = x.dtype
        x = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        freqs_cis = freqs_cis.view(1, x.size(1), 1, x.size(-1))
        return torch.view_as_real(x * freqs_cis).flatten(3).to(dtype)

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        bsz, seqlen, _ = x.size()
        q = self.wq(x).view(bsz, seqlen, self.n_heads, -1)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        q_pe = self.rotary(q_pe, freqs_cis)
        kv, k_pe = torch.split(self.wkv_a(x), [self.rank, self.rope], dim=-1)
        k_pe = self.rotary(k_pe.unsqueeze(2), freqs_cis)
        kv = self.wkv_b(self.kv_norm(kv)).view(bsz, seqlen, self.n_heads, -1)
        k_nope, v = torch.split(kv, [self.nope, self.nope], dim=-1)
        q, k = torch.cat([q_nope, q_pe], -1), torch.cat([k_nope, k_pe.expand(-1, -1, self.n_heads, -1)], -1)
        scores = torch.einsum("bshd,bthd->bsht", q, k) * self.softmax_scale
        if mask is not None:
            scores += mask.unsqueeze(1)
        scores = scores.softmax(dim=-1, dtype=torch.float32).type_as(x)
        return self.wo(torch.einsum("bsht,bthd->bshd", scores, v).flatten(2))


class DeepGate(nn.Module):
    def __init__(self, dim: int, n: int, topk: int) -> None:
        super().__init__()
        self.topk, self.weight, self.bias = topk, nn.Parameter(torch.randn(n, dim) / 8), nn.Parameter(torch.zeros(n), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).sigmoid()
        original_scores = scores
        scores = scores + self.bias
        group = scores.view(x.size(0), 2, -1)
        top = group.topk(2, dim=-1)[0].sum(dim=-1).topk(1, dim=-1)[1]
        mask = group.new_ones(x.size(0), 2, dtype=bool).scatter_(1, top, False)
        scores = group.masked_fill_(mask.unsqueeze(-1), float("-inf")).flatten(1)
        indices = torch.topk(scores, self.topk, dim=-1)[1]
        weights = original_scores.gather(1, indices)
        weights /= weights.sum(dim=-1, keepdim=True)
        return weights.type_as(x), indices


class DeepMoE(nn.Module):
    def __init__(self, dim: int = 32, n: int = 4) -> None:
        super().__init__()
        self.dim, self.n_routed_experts, self.gate = dim, n, DeepGate(dim, n, 2)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(dim, 16), nn.SiLU(), nn.Linear(16, dim)) if i < n else None for i in range(n)])
        self.shared_experts = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()
        x = x.view(-1, self.dim)
        weights, indices = self.gate(x)
        y = torch.zeros_like(x)
        counts = torch.bincount(indices.flatten(), minlength=self.n_routed_experts).tolist()
        for i in range(self.n_routed_experts):
            if counts[i] == 0:
                continue
            expert = self.experts[i]
            idx, top = torch.where(indices == i)
            y[idx] += expert(x[idx]) * weights[idx, top, None]
        return (y + self.shared_experts(x)).view(shape)


@listed(lambda b, n: (ids(b, n),))
class DeepSeek(nn.Module):
    """Two blocks of experts, and a head for the token after the next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(64, 32), nn.ModuleList()
        for i in range(3):
            layer = nn.Module()
            layer.attn, layer.ffn, layer.attn_norm, layer.ffn_norm = MLA(), DeepMoE() if i else nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)), nn.RMSNorm(32), nn.RMSNorm(32)
            self.layers.append(layer)
        self.norm, self.head, self.mtp = nn.RMSNorm(32), nn.Linear(32, 64, bias=False), nn.Linear(64, 32)
        freqs = torch.outer(torch.arange(64).float(), 1.0 / (10000 ** (torch.arange(0, 4, 2).float() / 4)))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(freqs), freqs), persistent=False)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        seqlen = tokens.size(1)
        h = self.embed(tokens)
        freqs_cis = self.freqs_cis[start_pos : start_pos + seqlen]
        mask = None
        if seqlen > 1:
            mask = torch.full((seqlen, seqlen), float("-inf")).triu_(1)
        for layer in self.layers:
            h = h + layer.attn(layer.attn_norm(h), start_pos, freqs_cis, mask)
            h = h + layer.ffn(layer.ffn_norm(h))
        first = self.head(self.norm(h))[:, :-1]
        second = self.head(self.mtp(torch.cat([self.norm(h[:, :-2]), self.embed(tokens[:, 1:-1])], -1)))
        loss = F.cross_entropy(first.flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 0.3 * F.cross_entropy(second.flatten(0, 1), tokens[:, 2:].flatten())


@listed(lambda b, n: (torch.randint(1, 64, (b, n)), torch.randint(3, (b,))))
class EarlyExit(nn.Module):
    """Classifiers at every layer, whose losses are weighed; in evaluation the first that is sure of all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(3)])
        self.exits = nn.ModuleList([nn.Linear(32, 3) for _ in range(3)])

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        h, all_logits = self.embed(x), []
        for layer, head in zip(self.layers, self.exits, strict=True):
            h = layer(h)
            all_logits.append(head(h.mean(1)))
            if not self.training and labels is None:
                p = all_logits[-1].softmax(-1)
                if (-(p * p.log()).sum(-1) < 0.5).all():
                    return all_logits[-1]
        total, weight = 0.0, 0
        for i, logits in enumerate(all_logits):
            total += F.cross_entropy(logits, labels) * (i + 1)
            weight += i + 1
        return total / weight, all_logits[-1]


class LoRALinear(nn.Linear):
    """loralib's: merged in evaluation, by what ``train`` does."""

    def __init__(self, n: int, m: int, r: int = 4, alpha: int = 8) -> None:
        super().__init__(n, m)
        self.r, self.scaling, self.merged = r, alpha / r, False
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(r, n) / 8), nn.Parameter(torch.randn(m, r) / 8)
        self.weight.requires_grad = False

    def train(self, mode: bool = True) -> nn.Module:
        nn.Linear.train(self, mode)
        if mode and self.merged:
            self.weight.data -= self.lora_B @ self.lora_A * self.scaling
            self.merged = False
        elif not mode and not self.merged:
            self.weight.data += self.lora_B @ self.lora_A * self.scaling
            self.merged = True
        return self

    def forward(self, x: Tensor) -> Tensor:
        if self.r > 0 and not self.merged:
            return F.linear(x, self.weight, self.bias) + (F.dropout(x, 0.0) @ self.lora_A.T @ self.lora_B.T) * self.scaling
        return F.linear(x, self.weight, self.bias)


@listed(sequence(16))
class Wrapped(nn.Module):
    """A network whose layers are exchanged for ones with adapters, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(OrderedDict([("a", nn.Linear(16, 32)), ("act", nn.GELU()), ("b", nn.Linear(32, 32)), ("act2", nn.GELU()), ("c", nn.Linear(32, 4))]))
        for name, module in list(self.net.named_modules()):
            if isinstance(module, nn.Linear) and name != "c":
                setattr(self.net, name, LoRALinear(module.in_features, module.out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


# ------------------------------------------------------------------------------------------------ agents


@listed(lambda b, n: (torch.randn(b, 8, 5), torch.randn(b, 8, 2), torch.randn(b, 8, 1), torch.arange(8).expand(b, 8), (torch.arange(8) >= torch.arange(b)[:, None] % 4).float()))
class DecisionTransformer(nn.Module):
    """min-decision-transformer: three tokens a step, and a loss over the steps that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.h_dim = 32
        self.blocks = nn.Sequential(*[nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(2)])
        self.embed_ln, self.embed_timestep = nn.LayerNorm(32), nn.Embedding(64, 32)
        self.embed_rtg, self.embed_state, self.embed_action = nn.Linear(1, 32), nn.Linear(5, 32), nn.Linear(2, 32)
        self.predict_rtg, self.predict_state = nn.Linear(32, 1), nn.Linear(32, 5)
        self.predict_action = nn.Sequential(nn.Linear(32, 2), nn.Tanh())

    def forward(self, states: Tensor, actions: Tensor, rtg: Tensor, timesteps: Tensor, mask: Tensor) -> Tensor:
        B, T, _ = states.shape
        time = self.embed_timestep(timesteps)
        h = torch.stack((self.embed_rtg(rtg) + time, self.embed_state(states) + time, self.embed_action(actions) + time), dim=1)
        h = self.embed_ln(h.permute(0, 2, 1, 3).reshape(B, 3 * T, self.h_dim))
        h = self.blocks(h).reshape(B, T, 3, self.h_dim).permute(0, 2, 1, 3)
        preds = self.predict_action(h[:, 1])
        preds = preds.view(-1, 2)[mask.view(-1) > 0]
        target = torch.clone(actions).detach().view(-1, 2)[mask.view(-1) > 0]
        return F.mse_loss(preds, target, reduction="mean")


RSSMState = namedtuple("RSSMState", ["logit", "stoch", "deter"])


@listed(lambda b, n: (torch.randn(b, 6, 8), torch.randn(b, 6, 2), (torch.rand(b, 6, 1) > 0.1).float()))
class RSSM(nn.Module):
    """DreamerV2's world model: discrete states drawn with straight-through gradients, balanced KL, free nats."""

    def __init__(self) -> None:
        super().__init__()
        self.category, self.classes = 4, 4
        self.encoder, self.rnn = nn.Linear(8, 16), nn.GRUCell(16, 16)
        self.mix, self.prior, self.post = nn.Linear(18, 16), nn.Linear(16, 16), nn.Linear(32, 16)
        self.decoder, self.reward = nn.Sequential(nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 8)), nn.Linear(32, 1)

    def dist(self, logit: Tensor) -> Any:
        shape = logit.shape
        return Independent(OneHotCategorical(logits=torch.reshape(logit, (*shape[:-1], self.category, self.classes))), 1)

    def sample(self, logit: Tensor) -> Tensor:
        d = self.dist(logit)
        s = d.sample()
        s = s + d.base_dist.probs - d.base_dist.probs.detach()
        return torch.flatten(s, start_dim=-2)

    def step(self, embed: Tensor, action: Tensor, nonterm: Tensor, prev: RSSMState) -> tuple[RSSMState, RSSMState]:
        x = F.elu(self.mix(torch.cat([prev.stoch * nonterm, action], -1)))
        deter = self.rnn(x, prev.deter * nonterm)
        prior, post = self.prior(deter), self.post(torch.cat([deter, embed], -1))
        return RSSMState(prior, self.sample(prior), deter), RSSMState(post, self.sample(post), deter)

    def forward(self, obs: Tensor, actions: Tensor, nonterms: Tensor) -> dict[str, Tensor]:
        b, t, _ = obs.shape
        embed = self.encoder(obs)
        state = RSSMState(*(torch.zeros(b, 16, dtype=obs.dtype) for _ in range(3)))
        priors, posts = [], []
        for i in range(t):
            prior, state = self.step(embed[:, i], actions[:, i] * nonterms[:, i], nonterms[:, i], state)
            priors.append(prior)
            posts.append(state)
        prior, post = (RSSMState(*(torch.stack([getattr(s, n) for s in states], 1) for n in RSSMState._fields)) for states in (priors, posts))
        feat = torch.cat([post.deter, post.stoch], -1)
        lhs = kl_divergence(self.dist(post.logit.detach()), self.dist(prior.logit)).mean()
        rhs = kl_divergence(self.dist(post.logit), self.dist(prior.logit.detach())).mean()
        kl = 0.8 * torch.max(lhs, lhs.new_full(lhs.size(), 0.1)) + 0.2 * torch.max(rhs, rhs.new_full(rhs.size(), 0.1))
        image = -Independent(Normal(self.decoder(feat), 1), 1).log_prob(obs).mean()
        reward = -Independent(Normal(self.reward(feat), 1), 1).log_prob(nonterms).mean()
        return {"loss": image + reward + 0.1 * kl, "kl": kl.detach()}


@listed(lambda b, n: (torch.randn(b, 8), torch.rand(b, 2) * 1.8 - 0.9, torch.randn(b, 1), torch.randn(b, 8), (torch.rand(b, 1) > 0.8).float()))
class SAC(nn.Module):
    """Both losses of soft actor-critic, with a frozen copy of the critics and a temperature that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        self.q1, self.q2 = (nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(2))
        self.target1, self.target2 = copy.deepcopy(self.q1).requires_grad_(False), copy.deepcopy(self.q2).requires_grad_(False)
        self.log_alpha, self.gamma, self.target_entropy = nn.Parameter(torch.zeros(1)), 0.99, -2.0

    def pi(self, obs: Tensor) -> Any:
        mean, log_std = self.actor(obs).chunk(2, -1)
        base = Independent(Normal(mean, log_std.clamp(-5, 2).exp()), 1)
        return TransformedDistribution(base, [TanhTransform(cache_size=1)])

    def forward(self, obs: Tensor, action: Tensor, reward: Tensor, following: Tensor, done: Tensor) -> Tensor:
        alpha = self.log_alpha.exp()
        with torch.no_grad():
            dist = self.pi(following)
            a = dist.rsample()
            x = torch.cat([following, a], -1)
            q = torch.min(self.target1(x), self.target2(x)) - alpha * dist.log_prob(a).unsqueeze(-1)
            target = reward + (1 - done) * self.gamma * q
        given = torch.cat([obs, action], -1)
        critic = F.mse_loss(self.q1(given), target) + F.mse_loss(self.q2(given), target)
        dist = self.pi(obs)
        a = dist.rsample()
        log_p = dist.log_prob(a).unsqueeze(-1)
        for p in (*self.q1.parameters(), *self.q2.parameters()):
            p.requires_grad = False
        x = torch.cat([obs, a], -1)
        actor = (alpha.detach() * log_p - torch.min(self.q1(x), self.q2(x))).mean()
        for p in (*self.q1.parameters(), *self.q2.parameters()):
            p.requires_grad = True
        return critic + actor - (self.log_alpha * (log_p.detach() + self.target_entropy)).mean()


@listed(lambda b, n: (torch.randn(b, 8), torch.randint(3, (b, 4)), torch.rand(b, 5), torch.rand(b, 5)))
class MuZero(nn.Module):
    """An unrolled model of the world, of whose gradients a hook leaves half at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.representation = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.dynamics = nn.Sequential(nn.Linear(19, 16), nn.ReLU(), nn.Linear(16, 16))
        self.value, self.reward, self.policy = nn.Linear(16, 11), nn.Linear(16, 11), nn.Linear(16, 3)

    @staticmethod
    def scalar_to_support(x: Tensor, size: int = 5) -> Tensor:
        x = torch.sign(x) * (torch.sqrt(torch.abs(x) + 1) - 1) + 0.001 * x
        x = torch.clamp(x, -size, size)
        floor = x.floor()
        prob = x - floor
        logits = torch.zeros(x.shape[0], x.shape[1], 2 * size + 1, dtype=x.dtype)
        logits.scatter_(2, (floor + size).long().unsqueeze(-1), (1 - prob).unsqueeze(-1))
        indexes = floor + size + 1
        prob = prob.masked_fill_(2 * size < indexes, 0.0)
        indexes = indexes.masked_fill_(2 * size < indexes, 0.0)
        logits.scatter_(2, indexes.long().unsqueeze(-1), prob.unsqueeze(-1))
        return logits

    def forward(self, obs: Tensor, actions: Tensor, values: Tensor, rewards: Tensor) -> Tensor:
        values, rewards = self.scalar_to_support(values), self.scalar_to_support(rewards)
        state = self.representation(obs)
        low, high = state.min(1, keepdim=True)[0], state.max(1, keepdim=True)[0]
        scale = high - low
        scale[scale < 1e-5] += 1e-5
        state = (state - low) / scale
        loss = (-values[:, 0] * F.log_softmax(self.value(state), 1)).sum(1)
        for i in range(1, actions.shape[1] + 1):
            one_hot = F.one_hot(actions[:, i - 1], 3).to(state.dtype)
            state = self.dynamics(torch.cat([state, one_hot], 1))
            if state.requires_grad:
                state.register_hook(lambda grad: grad * 0.5)
            step = (-values[:, i] * F.log_softmax(self.value(state), 1)).sum(1)
            step = step + (-rewards[:, i] * F.log_softmax(self.reward(state), 1)).sum(1)
            if step.requires_grad:
                step.register_hook(lambda grad: grad / 4)
            loss = loss + step
        return loss.mean()


@listed(lambda b, n: (torch.randn(b, 3, 8), torch.randint(4, (b, 3)), torch.randn(b, 12), torch.randn(b)))
class QMIX(nn.Module):
    """Agents whose values a network mixes that is itself made of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.agent = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        self.hyper_w_1, self.hyper_w_final = nn.Linear(12, 3 * 8), nn.Linear(12, 8)
        self.hyper_b_1, self.V = nn.Linear(12, 8), nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, obs: Tensor, actions: Tensor, states: Tensor, targets: Tensor) -> Tensor:
        bs = obs.size(0)
        q = torch.gather(self.agent(obs.reshape(-1, 8)).view(bs, 3, -1), dim=2, index=actions.unsqueeze(-1)).squeeze(-1)
        q = q.view(-1, 1, 3)
        w1, b1 = torch.abs(self.hyper_w_1(states)).view(-1, 3, 8), self.hyper_b_1(states).view(-1, 1, 8)
        hidden = F.elu(torch.bmm(q, w1) + b1)
        w_final = torch.abs(self.hyper_w_final(states)).view(-1, 8, 1)
        y = (torch.bmm(hidden, w_final) + self.V(states).view(-1, 1, 1)).view(bs, -1)
        td = y.squeeze(-1) - targets.detach()
        mask = torch.ones_like(td)
        return ((td * mask) ** 2).sum() / mask.sum()


@listed(lambda b, n: (torch.randn(b, 8), torch.randint(3, (b,)), torch.randn(b)))
class Reinforce(nn.Module):
    """Policy gradient whose returns are normed over the batch, as tutorials do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.0), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, obs: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        dist = Categorical(logits=self.net(obs))
        returns = (returns - returns.mean()) / (returns.std() + 1e-8)
        policy_loss = []
        for log_prob, r in zip(dist.log_prob(actions), returns, strict=True):
            policy_loss.append(-log_prob * r)
        return torch.stack(policy_loss).sum() - 0.01 * dist.entropy().mean()


# ------------------------------------------------------------------------------------------------ tables


@listed(lambda b, n: (torch.randint(8, (b, 5)), torch.randn(b, 3), torch.rand(b).round()))
class DeepFM(nn.Module):
    """Sparse and dense columns, first and second order, and a deep part, with its own L2 penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fm = nn.ModuleDict({f"c{i}": nn.Embedding(8, 1) for i in range(5)}), nn.ModuleDict({f"c{i}": nn.Embedding(8, 4) for i in range(5)})
        self.dense, self.out = nn.Parameter(torch.randn(3, 1) / 8), nn.Parameter(torch.zeros((1,)))
        self.dnn = nn.Sequential(nn.Linear(23, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1, bias=False))
        self.regularization_weight = [(list(self.fm.parameters()), 1e-3), (list(self.dnn.parameters()), 1e-4)]

    def get_regularization_loss(self) -> Tensor:
        total = torch.zeros((1,), dtype=self.out.dtype)
        for weights, l2 in self.regularization_weight:
            for w in weights:
                total += torch.sum(l2 * torch.square(w))
        return total

    def forward(self, sparse: Tensor, dense: Tensor, y: Tensor) -> Tensor:
        logit = sum(self.linear[f"c{i}"](sparse[:, i]) for i in range(5)) + dense.matmul(self.dense)
        fields = torch.stack([self.fm[f"c{i}"](sparse[:, i]) for i in range(5)], 1)
        square, each = torch.pow(torch.sum(fields, dim=1, keepdim=True), 2), torch.sum(fields * fields, dim=1, keepdim=True)
        logit = logit + 0.5 * torch.sum(square - each, dim=2, keepdim=False)
        logit += self.dnn(torch.cat([fields.flatten(1), dense], 1))
        p = torch.sigmoid(logit + self.out).squeeze(-1)
        return F.binary_cross_entropy(p, y) + self.get_regularization_loss().squeeze()


@listed(lambda b, n: (torch.randint(1, 16, (b,)), torch.randint(1, 16, (b, n)) * (torch.arange(n) < n - 3 * torch.arange(b)[:, None]), torch.rand(b).round()))
class DIN(nn.Module):
    """Interest in a candidate by attention over what was clicked, with Dice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, padding_idx=0)
        self.attention = nn.Sequential(nn.Linear(32, 16), nn.Sigmoid(), nn.Linear(16, 1))
        self.fc1, self.fc2, self.bn, self.alpha = nn.Linear(16, 16), nn.Linear(16, 1), nn.BatchNorm1d(16, affine=False, eps=1e-9), nn.Parameter(torch.zeros(16))

    def dice(self, x: Tensor) -> Tensor:
        p = torch.sigmoid(self.bn(x))
        return self.alpha * (1 - p) * x + p * x

    def forward(self, item: Tensor, history: Tensor, label: Tensor) -> Any:
        q, keys = self.embed(item), self.embed(history)
        lengths = (history > 0).sum(1, keepdim=True)
        queries = q.unsqueeze(1).expand(-1, keys.size(1), -1)
        score = self.attention(torch.cat([queries, keys, queries - keys, queries * keys], -1)).transpose(1, 2)
        mask = (torch.arange(keys.size(1), device=keys.device)[None, :] < lengths).unsqueeze(1)
        score = torch.where(mask, score, torch.full_like(score, -(2.0**32) + 1)) / keys.size(-1) ** 0.5
        interest = torch.matmul(F.softmax(score, -1), keys).squeeze(1)
        logit = self.fc2(self.dice(self.fc1(torch.cat([q, interest], -1)))).squeeze(-1)
        return F.binary_cross_entropy_with_logits(logit, label), torch.sigmoid(logit)


@listed(lambda b, n: (torch.randn(b, 4), torch.arange(0, 2 * b, 2).repeat(3, 1), torch.randint(8, (3, 2 * b)), torch.rand(b, 1).round()))
class DLRM(nn.Module):
    """Bags of embeddings with offsets, and the lower triangle of how features interact."""

    def __init__(self) -> None:
        super().__init__()
        self.emb_l = nn.ModuleList([nn.EmbeddingBag(8, 8, mode="sum", sparse=False) for _ in range(3)])
        self.bot_l, self.top_l = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU()), nn.Sequential(nn.Linear(14, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def apply_emb(self, offsets: Tensor, indices: Tensor) -> list[Tensor]:
        ly = []
        for k, index in enumerate(indices):
            ly.append(self.emb_l[k](index, offsets[k], per_sample_weights=None))
        return ly

    def interact(self, x: Tensor, ly: list[Tensor]) -> Tensor:
        (batch_size, d) = x.shape
        T = torch.cat([x, *ly], dim=1).view((batch_size, -1, d))
        Z = torch.bmm(T, torch.transpose(T, 1, 2))
        _, ni, nj = Z.shape
        li = torch.tensor([i for i in range(ni) for j in range(i)])
        lj = torch.tensor([j for i in range(nj) for j in range(i)])
        return torch.cat([x, Z[:, li, lj]], dim=1)

    def forward(self, dense: Tensor, offsets: Tensor, indices: Tensor, y: Tensor) -> Tensor:
        p = self.top_l(self.interact(self.bot_l(dense), self.apply_emb(offsets, indices)))
        return F.binary_cross_entropy(torch.clamp(p, min=1e-6, max=1 - 1e-6), y)


class GhostNorm(nn.Module):
    def __init__(self, width: int, virtual: int = 2) -> None:
        super().__init__()
        self.bn, self.virtual = nn.BatchNorm1d(width, momentum=0.01), virtual

    def forward(self, x: Tensor) -> Tensor:
        chunks = x.chunk(math.ceil(x.shape[0] / self.virtual), 0)
        return torch.cat([self.bn(part) for part in chunks], dim=0) if x.shape[0] % self.virtual == 0 else self.bn(x)


@listed(lambda b, n: (torch.randn(2 * b, 8),))
class TabNet(nn.Module):
    """Masks step by step by sparsemax, with priors, and a loss of how sparse they are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gamma, self.n_steps = nn.BatchNorm1d(8), 1.3, 3
        self.feat = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), GhostNorm(16), nn.GLU()) for _ in range(4)])
        self.att = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), GhostNorm(8)) for _ in range(3)])
        self.head = nn.Linear(4, 2)

    @staticmethod
    def sparsemax(z: Tensor) -> Tensor:
        z = z - z.max(-1, keepdim=True)[0]
        sorted_z, _ = torch.sort(z, dim=-1, descending=True)
        k = torch.arange(1, z.size(-1) + 1, dtype=z.dtype)
        cumsum = sorted_z.cumsum(-1) - 1
        support = (k * sorted_z > cumsum).sum(-1, keepdim=True)
        tau = cumsum.gather(-1, support - 1) / support.to(z.dtype)
        return torch.clamp(z - tau, min=0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        prior, m_loss, steps = torch.ones_like(x), 0, []
        att = self.feat[0](x)[:, 4:]
        for step in range(self.n_steps):
            M = self.sparsemax(self.att[step](att) * prior)
            m_loss += torch.mean(torch.sum(torch.mul(M, torch.log(M + 1e-15)), dim=1))
            prior = torch.mul(self.gamma - M, prior)
            out = self.feat[step + 1](torch.mul(M, x))
            steps.append(F.relu(out[:, :4]))
            att = out[:, 4:]
        return self.head(torch.sum(torch.stack(steps, dim=0), dim=0)), m_loss / self.n_steps


@listed(lambda b, n: (1 + torch.rand(b, n, 3), 1 + torch.rand(b, 8, 3)))
class RevInDLinear(nn.Module):
    """A series normed by what it itself is, split in trend and season, and put back; Gaussian likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.affine_weight, self.affine_bias = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.avg, self.seasonal, self.trend, self.sigma = nn.AvgPool1d(5, 1), nn.LazyLinear(8), nn.LazyLinear(8), nn.Linear(3, 3)
        self(torch.rand(2, 32, 3), None)

    def norm(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            dim2reduce = tuple(range(1, x.ndim - 1))
            self.mean = torch.mean(x, dim=dim2reduce, keepdim=True).detach()
            self.stdev = torch.sqrt(torch.var(x, dim=dim2reduce, keepdim=True, unbiased=False) + 1e-5).detach()
            return (x - self.mean) / self.stdev * self.affine_weight + self.affine_bias
        x = (x - self.affine_bias) / (self.affine_weight + 1e-10)
        return x * self.stdev + self.mean

    def forward(self, x: Tensor, target: Tensor | None) -> Any:
        x = self.norm(x, "norm")
        front, end = x[:, 0:1, :].repeat(1, 2, 1), x[:, -1:, :].repeat(1, 2, 1)
        trend = self.avg(torch.cat([front, x, end], dim=1).permute(0, 2, 1)).permute(0, 2, 1)
        season = x - trend
        y = (self.seasonal(season.permute(0, 2, 1)) + self.trend(trend.permute(0, 2, 1))).permute(0, 2, 1)
        y = self.norm(y, "denorm")
        return y if target is None else -Normal(y, F.softplus(self.sigma(y)) + 1e-3).log_prob(target).mean()


# ------------------------------------------------------------------------------------------------ graphs


def scatter(src: Tensor, index: Tensor, size: int, reduce: str = "sum") -> Tensor:
    """What torch_scatter does, in plain torch."""
    out = torch.zeros(size, src.shape[-1], dtype=src.dtype)
    index = index[:, None].expand_as(src)
    return out.scatter_reduce(0, index, src, reduce=reduce, include_self=False) if reduce != "sum" else out.scatter_add_(0, index, src)


@listed(lambda b, n: (torch.randn(6 * b, 8), torch.cat([torch.randint(6, (2, 10)) + 6 * i for i in range(b)], 1), torch.randn(10 * b, 4), torch.arange(b).repeat_interleave(6), torch.randn(b)))
class MPNN(nn.Module):
    """Messages along edges by scatter, GRU updates, Set2Set-like readout; graphs told by a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.nn, self.gru = nn.Linear(8, 16), nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 256)), nn.GRU(16, 16)
        self.lstm, self.out = nn.LSTMCell(32, 16), nn.Linear(32, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor, y: Tensor) -> Tensor:
        out = F.relu(self.lin(x))
        h = out.unsqueeze(0)
        src, dst = edge_index
        weight = self.nn(edge_attr).view(-1, 16, 16)
        for _ in range(3):
            m = torch.matmul(out[src].unsqueeze(1), weight).squeeze(1)
            m = F.relu(scatter(m, dst, x.size(0), "mean"))
            out, h = self.gru(m.unsqueeze(0), h)
            out = out.squeeze(0)
        n = int(batch.max()) + 1
        q_star = out.new_zeros(n, 32)
        hc = (out.new_zeros(n, 16), out.new_zeros(n, 16))
        for _ in range(2):
            hc = self.lstm(q_star, hc)
            e = (out * hc[0][batch]).sum(-1, keepdim=True)
            a = torch.exp(e - scatter(e, batch, n, "amax")[batch])
            a = a / scatter(a, batch, n)[batch]
            q_star = torch.cat([hc[0], scatter(a * out, batch, n)], -1)
        return F.mse_loss(self.out(q_star).view(-1), y)


@listed(lambda b, n: (torch.randint(1, 16, (b, 8, 3)) * (torch.arange(8) < 8 - torch.arange(b)[:, None] % 4)[..., None], torch.randint(6, (b, 8, 8)), torch.randint(6, (b, 8)), torch.randn(b, 9, 9)))
class Graphormer(nn.Module):
    """Attention biased by degrees and distances, with a node for the whole graph."""

    def __init__(self) -> None:
        super().__init__()
        self.atom, self.degree, self.spatial = nn.Embedding(17, 32, padding_idx=0), nn.Embedding(6, 32, padding_idx=0), nn.Embedding(6, 4, padding_idx=0)
        self.graph_token, self.virtual = nn.Embedding(1, 32), nn.Embedding(1, 4)
        self.layers = nn.ModuleList([nn.ModuleDict({"norm": nn.LayerNorm(32), "qkv": nn.Linear(32, 96), "out": nn.Linear(32, 32), "ffn": nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))}) for _ in range(3)])
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor, spatial_pos: Tensor, degree: Tensor, attn_bias: Tensor) -> Tensor:
        n_graph, n_node = x.size()[:2]
        graph_attn_bias = attn_bias.clone().unsqueeze(1).repeat(1, 4, 1, 1)
        graph_attn_bias[:, :, 1:, 1:] = graph_attn_bias[:, :, 1:, 1:] + self.spatial(spatial_pos).permute(0, 3, 1, 2)
        t = self.virtual.weight.view(1, 4, 1)
        graph_attn_bias[:, :, 1:, 0] = graph_attn_bias[:, :, 1:, 0] + t
        graph_attn_bias[:, :, 0, :] = graph_attn_bias[:, :, 0, :] + t
        graph_attn_bias = graph_attn_bias + attn_bias.unsqueeze(1)
        padding_mask = torch.cat([torch.zeros(n_graph, 1, dtype=torch.bool), x[:, :, 0].eq(0)], 1)
        node = self.atom(x).sum(dim=-2) + self.degree(degree)
        h = torch.cat([self.graph_token.weight.unsqueeze(0).repeat(n_graph, 1, 1), node], dim=1)
        if padding_mask.any():
            h *= 1 - padding_mask.unsqueeze(-1).type_as(h)
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](h)).view(n_graph, n_node + 1, 3, 4, 8).permute(2, 0, 3, 1, 4)
            a = q @ k.transpose(-2, -1) / 8**0.5 + graph_attn_bias
            a = a.masked_fill(padding_mask[:, None, None, :], float("-inf")).softmax(-1)
            h = h + layer["out"]((a @ v).transpose(1, 2).flatten(2))
            h = h + layer["ffn"](h)
        return self.head(h)[:, 0, :]


@listed(rows(8))
class HyperNetwork(nn.Module):
    """A network of functions whose weights another one gives, by the parameter's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.primary = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).requires_grad_(False)
        self.shapes = OrderedDict((n, p.shape) for n, p in self.primary.named_parameters())
        total = sum(p.numel() for p in self.primary.parameters())
        self.context, self.heads = nn.Embedding(len(self.shapes), 8), nn.ModuleList([nn.Linear(8, s.numel()) for s in self.shapes.values()])
        self.total, self.signature = total, inspect.signature(self.primary.forward)

    def forward(self, x: Tensor) -> Tensor:
        generated = {}
        for i, (name, shape) in enumerate(self.shapes.items()):
            generated[name] = self.heads[i](self.context.weight[i]).view(shape)
        assert sum(p.numel() for p in generated.values()) == self.total
        return torch.func.functional_call(self.primary, generated, (x,))
