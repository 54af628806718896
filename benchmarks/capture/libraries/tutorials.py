"""More models in the manner of well-known repositories: flows, detectors, recurrences, recommenders, losses.

How a model is listed is left to ``catalogue``; the first of them are in ``by_hand``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .by_hand import ids, listed
from .catalogue import fixed_image, rows, sequence

__all__: list[str] = []


class ActNorm(nn.Module):
    """Scale and shift that the first batch sets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(1, width, 1, 1)), nn.Parameter(torch.ones(1, width, 1, 1))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.initialized.item() == 0:
            with torch.no_grad():
                flat = x.permute(1, 0, 2, 3).reshape(x.shape[1], -1)
                self.loc.data.copy_(-flat.mean(1).view(1, -1, 1, 1))
                self.scale.data.copy_(1 / (flat.std(1).view(1, -1, 1, 1) + 1e-6))
            self.initialized.fill_(1)
        _, _, h, w = x.shape
        return self.scale * (x + self.loc), h * w * torch.sum(torch.log(torch.abs(self.scale)))


class Coupling(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.actnorm, self.w = ActNorm(width), nn.Parameter(torch.linalg.qr(torch.randn(width, width))[0])
        self.net = nn.Sequential(nn.Conv2d(width // 2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, width, 3, padding=1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        _, _, h, w = x.shape
        x, logdet = self.actnorm(x)
        x = F.conv2d(x, self.w[:, :, None, None])
        logdet = logdet + h * w * torch.slogdet(self.w)[1]
        a, b = x.chunk(2, 1)
        log_s, t = self.net(a).chunk(2, 1)
        s = torch.sigmoid(log_s + 2)
        return torch.cat([a, (b + t) * s], 1), logdet + torch.sum(torch.log(s).view(x.shape[0], -1), 1)


@listed(lambda b, n: (torch.rand(b, 3, 8, 8),))
class Glow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList([Coupling(12) for _ in range(3)])
        for flow in self.flows:
            flow.actnorm.initialized.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        out = x.view(b, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).contiguous().view(b, c * 4, h // 2, w // 2)
        logdet = 0
        for flow in self.flows:
            out, det = flow(out)
            logdet = logdet + det
        log_p = (-0.5 * math.log(2 * math.pi) - 0.5 * out**2).view(b, -1).sum(1)
        return (-(log_p + logdet) / (math.log(2) * c * h * w)).mean()


@listed(lambda b, n: (torch.randn(b, 1, 16, 16), torch.randn(b, 1, 16, 16), torch.rand(b, 1, 1, 1)))
class WGANGP(nn.Module):
    """A critic's loss with its gradient penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 16, 4, 2, 1), nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(256, 1))

    def gradient_penalty(self, real: Tensor, fake: Tensor, eps: Tensor) -> Tensor:
        mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
        scores = self.critic(mixed)
        gradients = torch.autograd.grad(outputs=scores, inputs=mixed, grad_outputs=torch.ones_like(scores), create_graph=True, retain_graph=True)[0]
        return ((gradients.view(len(gradients), -1).norm(2, dim=1) - 1) ** 2).mean()

    def forward(self, real: Tensor, fake: Tensor, eps: Tensor) -> Tensor:
        with torch.enable_grad():
            penalty = self.gradient_penalty(real, fake, eps)
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty


class Modulated(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.weight, self.affine, self.noise = nn.Parameter(torch.randn(1, n_out, n_in, 3, 3)), nn.Linear(16, n_in), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        b, c, h, w = x.shape
        weight = self.weight / math.sqrt(c * 9) * self.affine(style).view(b, 1, c, 1, 1)
        weight = weight * torch.rsqrt(weight.pow(2).sum([2, 3, 4]) + 1e-8).view(b, -1, 1, 1, 1)
        out = F.conv2d(x.reshape(1, b * c, h, w), weight.view(-1, c, 3, 3), padding=1, groups=b)
        return F.leaky_relu(out.view(b, -1, h, w), 0.2) * math.sqrt(2)


@listed(rows(16))
class StyleGAN2(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, 16))
        self.constant, self.convs, self.to_rgb = nn.Parameter(torch.randn(1, 16, 4, 4)), nn.ModuleList([Modulated(16, 16), Modulated(16, 8), Modulated(8, 8)]), nn.Conv2d(8, 3, 1)

    def forward(self, z: Tensor) -> Tensor:
        w = self.mapping(z * torch.rsqrt(z.pow(2).mean(1, keepdim=True) + 1e-8))
        x = self.constant.repeat(w.shape[0], 1, 1, 1)
        for i, conv in enumerate(self.convs):
            x = conv(x if i == 0 else F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False), w)
        return self.to_rgb(x)


@listed(lambda b, n: (torch.randn(b, 1, 16, 2 * n), torch.randint(1, 20, (b, 5)), torch.full((b,), 5) - torch.arange(b) % 3))
class CRNN(nn.Module):
    """Reads lines of text."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), nn.ReLU(True), nn.MaxPool2d(2, 2), nn.Conv2d(8, 16, 3, 1, 1), nn.ReLU(True), nn.MaxPool2d((8, 2), (8, 2)))
        self.rnn, self.head = nn.LSTM(16, 16, bidirectional=True), nn.Linear(32, 20)

    def forward(self, x: Tensor, text: Tensor, lengths: Tensor) -> Any:
        conv = self.cnn(x)
        b, _, h, _ = conv.size()
        if h != 1:
            raise ValueError("the height of conv must be 1")
        recurrent, _ = self.rnn(conv.squeeze(2).permute(2, 0, 1))
        T, b, h = recurrent.size()
        logits = self.head(recurrent.view(T * b, h)).view(T, b, -1)
        logp = F.log_softmax(logits, 2)
        return F.ctc_loss(logp, text, torch.full((b,), T, dtype=torch.long), lengths, zero_infinity=True), logits


@listed(lambda b, n: (ids(b, n // 2), torch.randint(5, (b, n // 2)), torch.arange(n // 2) < n // 2 - torch.arange(b)[:, None]))
class BiLSTMCRF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = nn.Embedding(64, 16), nn.LSTM(16, 8, bidirectional=True, batch_first=True), nn.Linear(16, 5)
        self.transitions, self.start, self.end = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, sentence: Tensor, tags: Tensor, mask: Tensor) -> Tensor:
        emissions = self.out(self.lstm(self.embedding(sentence))[0]).transpose(0, 1)
        tags, mask = tags.transpose(0, 1), mask.transpose(0, 1)
        score = self.start + emissions[0]
        gold = self.start[tags[0]] + emissions[0].gather(1, tags[0].unsqueeze(1)).squeeze(1)
        for i in range(1, emissions.size(0)):
            found = torch.logsumexp(score.unsqueeze(2) + self.transitions + emissions[i].unsqueeze(1), dim=1)
            score = torch.where(mask[i].unsqueeze(1), found, score)
            gold = gold + (self.transitions[tags[i - 1], tags[i]] + emissions[i].gather(1, tags[i].unsqueeze(1)).squeeze(1)) * mask[i]
        last = tags.gather(0, (mask.long().sum(0) - 1).unsqueeze(0)).squeeze(0)
        return (torch.logsumexp(score + self.end, 1) - gold - self.end[last]).mean()


@listed(lambda b, n: (ids(b, n), torch.randint(4, (b,))))
class TextCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.convs, self.fc = nn.Embedding(64, 16, padding_idx=0), nn.ModuleList([nn.Conv2d(1, 8, (k, 16)) for k in (3, 4, 5)]), nn.Linear(24, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        x = self.embed(x).unsqueeze(1)
        x = [F.relu(conv(x)).squeeze(3) for conv in self.convs]
        logits = self.fc(torch.cat([F.max_pool1d(i, i.size(2)).squeeze(2) for i in x], 1))
        return {"loss": F.cross_entropy(logits, y), "logits": logits, "accuracy": (logits.argmax(1) == y).float().mean()}


class TNet(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.conv, self.fc, self.k = nn.Conv1d(k, 16, 1), nn.Linear(16, k * k), k

    def forward(self, x: Tensor) -> Tensor:
        b = x.size(0)
        x = torch.max(F.relu(self.conv(x)), 2, keepdim=True)[0].view(-1, 16)
        iden = torch.eye(self.k, device=x.device, dtype=x.dtype).view(1, self.k**2).repeat(b, 1)
        return (self.fc(x) + iden).view(-1, self.k, self.k)


@listed(lambda b, n: (torch.randn(b, 3, n), torch.randint(4, (b,))))
class PointNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stn, self.fstn, self.conv1, self.conv2 = TNet(3), TNet(8), nn.Conv1d(3, 8, 1), nn.Conv1d(8, 32, 1)
        self.fc = nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        trans = self.stn(x)
        x = F.relu(self.conv1(torch.bmm(x.transpose(2, 1), trans).transpose(2, 1)))
        trans_feat = self.fstn(x)
        x = torch.bmm(x.transpose(2, 1), trans_feat).transpose(2, 1)
        logits = F.log_softmax(self.fc(torch.max(self.conv2(x), 2)[0]), dim=1)
        d = trans_feat.size()[1]
        eye = torch.eye(d)[None, :, :].to(trans_feat)
        reg = torch.mean(torch.norm(torch.bmm(trans_feat, trans_feat.transpose(2, 1)) - eye, dim=(1, 2)))
        return F.nll_loss(logits, y) + 0.001 * reg, logits


@listed(lambda b, n: (torch.randn(b, 3, n),))
class DGCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Sequential(nn.Conv2d(6, 16, 1, bias=False), nn.GroupNorm(4, 16), nn.LeakyReLU(0.2)), nn.Sequential(nn.Conv2d(32, 16, 1, bias=False), nn.GroupNorm(4, 16), nn.LeakyReLU(0.2))])
        self.head = nn.Linear(64, 4)

    @staticmethod
    def edges(x: Tensor, k: int = 5) -> Tensor:
        b, dims, n = x.size()
        inner = -2 * torch.matmul(x.transpose(2, 1), x)
        xx = torch.sum(x**2, dim=1, keepdim=True)
        idx = (-xx - inner - xx.transpose(2, 1)).topk(k=k, dim=-1)[1]
        idx = (idx + torch.arange(0, b, device=x.device).view(-1, 1, 1) * n).view(-1)
        x = x.transpose(2, 1).contiguous()
        feature = x.view(b * n, -1)[idx, :].view(b, n, k, dims)
        x = x.view(b, n, 1, dims).repeat(1, 1, k, 1)
        return torch.cat((feature - x, x), dim=3).permute(0, 3, 1, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for conv in self.convs:
            x = conv(self.edges(x)).max(dim=-1, keepdim=False)[0]
            found.append(x)
        x = torch.cat(found, 1)
        b = x.size(0)
        return self.head(torch.cat((F.adaptive_max_pool1d(x, 1).view(b, -1), F.adaptive_avg_pool1d(x, 1).view(b, -1)), 1))


@listed(lambda b, n: (torch.randn(b, 4, 2, 8, 8),))
class ConvLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.out = nn.ModuleList([nn.Conv2d(2 + 8, 32, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)]), nn.Conv2d(8, 1, 1)

    def init_hidden(self, b: int, size: Any) -> list[tuple[Tensor, Tensor]]:
        h, w = size
        device = self.cells[0].weight.device
        return [(torch.zeros(b, 8, h, w, device=device, dtype=self.out.weight.dtype), torch.zeros(b, 8, h, w, device=device, dtype=self.out.weight.dtype)) for _ in self.cells]

    def forward(self, x: Tensor) -> Any:
        b, t, _, h, w = x.size()
        hidden, current, last = self.init_hidden(b, (h, w)), x, []
        for cell, (hs, cs) in zip(self.cells, hidden, strict=True):
            inner = []
            for step in range(t):
                i, f, o, g = torch.split(cell(torch.cat([current[:, step], hs], dim=1)), 8, dim=1)
                cs = torch.sigmoid(f) * cs + torch.sigmoid(i) * torch.tanh(g)
                hs = torch.sigmoid(o) * torch.tanh(cs)
                inner.append(hs)
            current = torch.stack(inner, dim=1)
            last.append([hs, cs])
        return self.out(current[:, -1]), last


class Router(nn.Module):
    """Tokens go to their best experts, expert by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4, bias=False), nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(4)])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = x.shape
        x = x.view(-1, shape[-1])
        logits = self.gate(x)
        weights, selected = torch.topk(logits, 2)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(x.dtype)
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            batch_idx, nth = torch.where(selected == i)
            results[batch_idx] += weights[batch_idx, nth, None] * expert(x[batch_idx])
        probs = logits.softmax(-1)
        used = F.one_hot(selected[:, 0], 4).to(x.dtype).mean(0)
        return results.view(shape), 4 * (used * probs.mean(0)).sum()


@listed(lambda b, n: (ids(b, n), ids(b, n)))
class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers, self.head = nn.Embedding(64, 16), nn.ModuleList([Router() for _ in range(3)]), nn.Linear(16, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, balance = self.embed(x), []
        for layer in self.layers:
            more, aux = layer(h)
            h = h + more
            balance.append(aux)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten()) + 0.01 * sum(balance) / len(balance)


class Retention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.norm = nn.Linear(16, 48, bias=False), nn.Linear(16, 16, bias=False), nn.GroupNorm(2, 16)
        self.gammas = (1 - torch.exp(torch.linspace(math.log(1 / 32), math.log(1 / 512), 2))).detach().cpu().tolist()

    def decay(self, n: int, gamma: float, x: Tensor) -> Tensor:
        i, j = torch.arange(n).unsqueeze(1), torch.arange(n).unsqueeze(0)
        D = (gamma ** (i - j)) * (i >= j).float()
        D[D != D] = 0
        return D.to(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        Y = [(a @ b.transpose(1, 2) * self.decay(x.shape[1], g, x)) @ c for a, b, c, g in zip(q.chunk(2, -1), k.chunk(2, -1), v.chunk(2, -1), self.gammas, strict=True)]
        Y = torch.cat(Y, dim=2)
        return self.out(self.norm(Y.reshape(-1, 16)).reshape(Y.shape))


@listed(lambda b, n: (torch.randn(b, n, 16),))
class RetNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.ffns, self.norms = nn.ModuleList([Retention() for _ in range(2)]), nn.ModuleList([nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]), nn.ModuleList([nn.LayerNorm(16) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for i in range(2):
            y = self.layers[i](self.norms[2 * i](x)) + x
            x = self.ffns[i](self.norms[2 * i + 1](y)) + y
        return x


class MambaBlock(nn.Module):
    """A selective scan, written as a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.conv1d, self.x_proj = nn.Linear(16, 64, bias=False), nn.Conv1d(32, 32, 4, groups=32, padding=3), nn.Linear(32, 2 + 8, bias=False)
        self.dt_proj, self.out_proj = nn.Linear(2, 32), nn.Linear(32, 16, bias=False)
        self.A_log, self.D = nn.Parameter(torch.log(torch.arange(1, 5).float().repeat(32, 1))), nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        b, length, _ = x.shape
        x, res = self.in_proj(x).split(split_size=[32, 32], dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[:, :, :length].transpose(1, 2))
        delta, B, C = self.x_proj(x).split(split_size=[2, 4, 4], dim=-1)
        delta, A = F.softplus(self.dt_proj(delta)), -torch.exp(self.A_log)
        deltaA = torch.exp(torch.einsum("bld,dn->bldn", delta, A))
        deltaB_u = torch.einsum("bld,bln,bld->bldn", delta, B, x)
        state, ys = torch.zeros((b, 32, 4), device=x.device, dtype=x.dtype), []
        for i in range(length):
            state = deltaA[:, i] * state + deltaB_u[:, i]
            ys.append(torch.einsum("bdn,bn->bd", state, C[:, i]))
        return self.out_proj((torch.stack(ys, dim=1) + x * self.D) * F.silu(res))


@listed(lambda b, n: (ids(b, n // 2),))
class MambaMinimal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers, self.norms = nn.Embedding(64, 16), nn.ModuleList([MambaBlock() for _ in range(2)]), nn.ModuleList([nn.RMSNorm(16) for _ in range(2)])
        self.lm_head = nn.Linear(16, 64, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = layer(norm(x)) + x
        return self.lm_head(x)


@listed(sequence(16))
class Hyena(nn.Module):
    """Long convolutions by Fourier transforms, with filters that a network makes."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.short, self.out = nn.Linear(16, 48), nn.Conv1d(48, 48, 3, padding=2, groups=48), nn.Linear(16, 16)
        self.filter, self.bias = nn.Sequential(nn.Linear(3, 16), nn.GELU(), nn.Linear(16, 16)), nn.Parameter(torch.randn(16))

    def forward(self, u: Tensor) -> Tensor:
        L = u.size(-2)
        t = torch.linspace(0, 1, L, device=u.device, dtype=u.dtype)[:, None]
        z = torch.cat([t, torch.cos(math.pi * t), torch.sin(math.pi * t)], -1)
        k = (self.filter(z) * torch.exp(-3 * t)).transpose(0, 1)
        x0, x1, v = self.short(self.proj(u).transpose(1, 2))[..., :L].split(16, dim=1)
        v = v * x1
        y = torch.fft.irfft(torch.fft.rfft(v, n=2 * L) * torch.fft.rfft(k, n=2 * L), n=2 * L, norm="backward")[..., :L]
        return self.out(((y + v * self.bias.unsqueeze(-1)) * x0).transpose(1, 2))


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (10 * x.abs() + 1.0) ** 2


@listed(lambda b, n: (torch.rand(b, 16), torch.randint(4, (b,))))
class Spiking(nn.Module):
    """Leaky neurons over steps of time, with a surrogate gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.beta, self.fire = nn.Linear(16, 32), nn.Linear(32, 4), nn.Parameter(torch.tensor(0.9)), Spike.apply

    def forward(self, x: Tensor, y: Tensor) -> Any:
        mem1, mem2, loss, record = torch.zeros(x.size(0), 32, dtype=x.dtype), torch.zeros(x.size(0), 4, dtype=x.dtype), 0.0, []
        for _ in range(5):
            mem1 = self.beta.clamp(0, 1) * mem1 + self.fc1(x)
            spk = self.fire(mem1 - 1.0)
            mem1 = mem1 - spk.detach()
            mem2 = 0.9 * mem2 + self.fc2(spk)
            record.append(self.fire(mem2 - 1.0))
            loss += F.cross_entropy(mem2, y)
        return loss, torch.stack(record).sum(0)


@listed(lambda b, n: (torch.randint(0, 40, (b, n // 2)), torch.randint(1, 40, (b, n // 2)), torch.randint(1, 40, (b, n // 2))))
class SASRec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.item_emb, self.pos_emb = nn.Embedding(41, 16, padding_idx=0), nn.Embedding(65, 16, padding_idx=0)
        self.norms, self.attn = nn.ModuleList([nn.LayerNorm(16) for _ in range(2)]), nn.ModuleList([nn.MultiheadAttention(16, 2) for _ in range(2)])
        self.ffn, self.dev = nn.ModuleList([nn.Sequential(nn.Conv1d(16, 16, 1), nn.ReLU(), nn.Conv1d(16, 16, 1)) for _ in range(2)]), "cpu"

    def forward(self, log_seqs: Tensor, pos_seqs: Tensor, neg_seqs: Tensor) -> Tensor:
        seqs = self.item_emb(log_seqs) * self.item_emb.embedding_dim**0.5
        poss = torch.arange(1, log_seqs.shape[1] + 1).repeat(log_seqs.shape[0], 1) * (log_seqs != 0)
        seqs = seqs + self.pos_emb(poss)
        mask = ~torch.tril(torch.ones((seqs.shape[1], seqs.shape[1]), dtype=torch.bool, device=self.dev))
        for norm, attn, ffn in zip(self.norms, self.attn, self.ffn, strict=True):
            x = torch.transpose(seqs, 0, 1)
            x = norm(x + attn(x, x, x, attn_mask=mask)[0])
            seqs = torch.transpose(x, 0, 1)
            seqs = seqs + ffn(seqs.transpose(-1, -2)).transpose(-1, -2)
        pos, neg = (seqs * self.item_emb(pos_seqs)).sum(-1), (seqs * self.item_emb(neg_seqs)).sum(-1)
        where = pos_seqs != 0
        bce = nn.BCEWithLogitsLoss()
        return bce(pos[where], torch.ones_like(pos[where])) + bce(neg[where], torch.zeros_like(neg[where]))


@listed(lambda b, n: (torch.randint(50, (b,)), torch.randint(50, (b, 5)), torch.randint(30, (b,))))
class TwoTowers(nn.Module):
    """In-batch negatives, corrected by how often an item is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.history, self.item = nn.Embedding(50, 16), nn.EmbeddingBag(50, 16, mode="mean"), nn.Embedding(30, 16)
        self.query, self.candidate = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)), nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.register_buffer("frequency", torch.rand(30) + 0.1)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, user: Tensor, history: Tensor, item: Tensor) -> Tensor:
        q = F.normalize(self.query(torch.cat([self.user(user), self.history(history)], 1)), dim=-1)
        c = F.normalize(self.candidate(self.item(item)), dim=-1)
        logits = self.logit_scale.exp() * q @ c.T - torch.log(self.frequency[item])[None]
        same = item[:, None] == item[None, :]
        logits = logits.masked_fill(same & ~torch.eye(len(item), dtype=torch.bool), -1e9)
        return F.cross_entropy(logits, torch.arange(len(item)))


@listed(lambda b, n: (torch.randn(b, 3, 32, 32), torch.randint(4, (b, 80)), torch.randn(b, 80, 4)))
class SSD(nn.Module):
    """Boxes and classes at two scales, with hard negatives mined in each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.extra = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU()), nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU())
        self.loc, self.conf = nn.ModuleList([nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)]), nn.ModuleList([nn.Conv2d(8, 4, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)])

    def forward(self, x: Tensor, conf_t: Tensor, loc_t: Tensor) -> Any:
        sources = [self.base(x)]
        sources.append(self.extra(sources[0]))
        loc = torch.cat([o(s).permute(0, 2, 3, 1).contiguous().view(s.size(0), -1) for o, s in zip(self.loc, sources, strict=True)], 1).view(x.size(0), -1, 4)
        conf = torch.cat([o(s).permute(0, 2, 3, 1).contiguous().view(s.size(0), -1) for o, s in zip(self.conf, sources, strict=True)], 1).view(x.size(0), -1, 4)
        pos = conf_t > 0
        loss_l = F.smooth_l1_loss(loc[pos], loc_t[pos], reduction="sum")
        each = F.cross_entropy(conf.view(-1, 4), conf_t.view(-1), reduction="none").view(x.size(0), -1)
        mined = each.detach().clone()
        mined[pos] = 0
        _, order = mined.sort(1, descending=True)
        _, rank = order.sort(1)
        num_pos = pos.long().sum(1, keepdim=True)
        neg = rank < torch.clamp(3 * num_pos, max=pos.size(1) - 1)
        loss_c = each[pos | neg].sum()
        n = num_pos.sum().clamp(min=1)
        return {"loss": (loss_l + loss_c) / n, "loss_l": loss_l.detach(), "loss_c": loss_c.detach()}


@listed(lambda b, n: (torch.randn(b, 3, 2 * n, 2 * n),))
class YOLOHead(nn.Module):
    """Training gives raw maps, evaluation decoded boxes on a grid that is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.m = nn.ModuleList([nn.Conv2d(3, 8, 3, 8, 1), nn.Conv2d(8, 16, 3, 2, 1)]), nn.ModuleList([nn.Conv2d(8, 18, 1), nn.Conv2d(16, 18, 1)])
        self.na, self.no, self.nl = 2, 9, 2
        self.grid = [torch.empty(0) for _ in range(2)]
        self.register_buffer("anchors", torch.tensor([[[10.0, 13], [16, 30]], [[30, 61], [62, 45]]]))
        self.stride = [8, 16]

    def forward(self, x: Tensor) -> Any:
        z, found, out = [], [], []
        for layer in self.body:
            x = F.silu(layer(x))
            found.append(x)
        for i in range(self.nl):
            y = self.m[i](found[i])
            bs, _, ny, nx = y.shape
            y = y.view(bs, self.na, self.no, ny, nx).permute(0, 1, 3, 4, 2).contiguous()
            out.append(y)
            if not self.training:
                if self.grid[i].shape[2:4] != y.shape[2:4]:
                    yv, xv = torch.meshgrid([torch.arange(ny), torch.arange(nx)], indexing="ij")
                    self.grid[i] = torch.stack((xv, yv), 2).expand((1, self.na, ny, nx, 2)).to(y) - 0.5
                xy, wh, conf = y.sigmoid().split((2, 2, self.no - 4), 4)
                xy = (xy * 2 + self.grid[i]) * self.stride[i]
                wh = (wh * 2) ** 2 * self.anchors[i].view(1, self.na, 1, 1, 2)
                z.append(torch.cat((xy, wh, conf), 4).view(bs, self.na * nx * ny, self.no))
        return out if self.training else (torch.cat(z, 1), out)


@listed(lambda b, n: (torch.randn(b, 16), torch.randint(6, (b,))))
class ArcFace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.weight, self.s = nn.Sequential(nn.Linear(16, 32), nn.PReLU(), nn.Linear(32, 8)), nn.Parameter(torch.randn(6, 8)), 8.0
        self.cos_m, self.sin_m, self.th, self.mm = math.cos(0.5), math.sin(0.5), math.cos(math.pi - 0.5), math.sin(math.pi - 0.5) * 0.5
        self.register_buffer("centers", torch.randn(6, 8))

    def forward(self, x: Tensor, label: Tensor) -> Any:
        feature = self.net(x)
        cosine = F.linear(F.normalize(feature), F.normalize(self.weight)).clamp(-1 + 1e-6, 1 - 1e-6)
        sine = torch.sqrt(1.0 - torch.pow(cosine, 2))
        phi = torch.where(cosine > self.th, cosine * self.cos_m - sine * self.sin_m, cosine - self.mm)
        one_hot = torch.zeros(cosine.size(), device=x.device, dtype=cosine.dtype)
        one_hot.scatter_(1, label.view(-1, 1).long(), 1)
        logits = ((one_hot * phi) + ((1.0 - one_hot) * cosine)) * self.s
        return F.cross_entropy(logits, label) + 0.01 * (feature - self.centers[label]).pow(2).sum(1).mean(), logits


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), torch.randint(4, (b,))))
class Distilled(nn.Module):
    """A student beside a frozen teacher, which stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        make = lambda w: nn.Sequential(nn.Conv2d(3, w, 3, 2, 1), nn.BatchNorm2d(w), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(w, 4))  # noqa: E731
        self.teacher = make(16).requires_grad_(False)
        self.student = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            t = self.teacher(x)
        s = self.student(x)
        soft = F.kl_div(F.log_softmax(s / 4, 1), F.softmax(t / 4, 1), reduction="batchmean") * 16
        return 0.7 * soft + 0.3 * F.cross_entropy(s, y)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.neg() * ctx.alpha, None


@listed(lambda b, n: (torch.randn(b, 16), torch.randint(4, (b,)), torch.randint(2, (b,)).float(), 0.7))
class DANN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feature, self.classes, self.domain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, x: Tensor, y: Tensor, d: Tensor, alpha: float) -> Tensor:
        f = self.feature(x)
        domain = self.domain(Reverse.apply(f, alpha)).squeeze(1)
        source = d == 0
        per = F.cross_entropy(self.classes(f), y, reduction="none")
        return (per * source).sum() / max(len(y), 1) + F.binary_cross_entropy_with_logits(domain, d)


@listed(lambda b, n: (torch.randn(b, 5, 1), torch.randn(b, 5, 1), torch.randn(b, 6, 1), torch.randn(b, 6, 1)))
class MAML(nn.Module):
    """One inner step for each task, through which the outer loss is derived."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, xs: Tensor, ys: Tensor, xq: Tensor, yq: Tensor) -> Tensor:
        params, losses = dict(self.net.named_parameters()), []
        with torch.enable_grad():
            for i in range(xs.shape[0]):
                loss = F.mse_loss(torch.func.functional_call(self.net, params, (xs[i],)), ys[i])
                grads = torch.autograd.grad(loss, list(params.values()), create_graph=True)
                fast = {k: p - 0.1 * g for (k, p), g in zip(params.items(), grads, strict=True)}
                losses.append(F.mse_loss(torch.func.functional_call(self.net, fast, (xq[i],)), yq[i]))
        return torch.stack(losses).mean()


@listed(lambda b, n: (torch.randn(b, 6, 4),))
class NTM(nn.Module):
    """A controller that reads from and writes to a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.controller, self.read, self.write, self.out = nn.LSTMCell(4 + 8, 16), nn.Linear(16, 8 + 1 + 1 + 3), nn.Linear(16, 8 + 1 + 1 + 3 + 16), nn.Linear(24, 4)
        self.register_buffer("initial", torch.full((10, 8), 1e-2))

    def address(self, memory: Tensor, given: Tensor, last: Tensor) -> Tensor:
        k, beta, g, s = torch.split(given, [8, 1, 1, 3], 1)
        content = F.softmax(F.softplus(beta) * F.cosine_similarity(memory + 1e-16, torch.tanh(k).unsqueeze(1) + 1e-16, dim=-1), dim=1)
        w, s = torch.sigmoid(g) * content + (1 - torch.sigmoid(g)) * last, F.softmax(s, dim=1)
        result = torch.zeros_like(w)
        for b in range(w.size(0)):
            around = torch.cat([w[b][-1:], w[b], w[b][:1]])
            result[b] = F.conv1d(around.view(1, 1, -1), s[b].view(1, 1, -1)).view(-1)
        return result

    def forward(self, x: Tensor) -> Tensor:
        memory = self.initial.clone().repeat(x.size(0), 1, 1)
        wr = ww = x.new_zeros(x.size(0), 10).index_fill(1, torch.tensor([0]), 1.0)
        h, c, r, outs = x.new_zeros(x.size(0), 16), x.new_zeros(x.size(0), 16), x.new_zeros(x.size(0), 8), []
        for t in range(x.size(1)):
            h, c = self.controller(torch.cat([x[:, t], r], 1), (h, c))
            given = self.write(h)
            ww = self.address(memory, given[:, :13], ww)
            e, a = torch.sigmoid(given[:, 13:21]), torch.tanh(given[:, 21:])
            memory = memory * (1 - ww.unsqueeze(-1) * e.unsqueeze(1)) + ww.unsqueeze(-1) * a.unsqueeze(1)
            wr = self.address(memory, self.read(h), wr)
            r = torch.matmul(wr.unsqueeze(1), memory).squeeze(1)
            outs.append(self.out(torch.cat([h, r], 1)))
        return torch.stack(outs, 1)


@listed(lambda b, n: (torch.randn(b, 2, 9, 12),))
class STGCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        adj = torch.rand(9, 9)
        self.register_buffer("A", adj / adj.sum(1, keepdim=True))
        self.t1, self.theta, self.t2, self.norm, self.out = nn.Conv2d(2, 16, (1, 3)), nn.Parameter(torch.randn(8, 8) * 0.3), nn.Conv2d(8, 16, (1, 3)), nn.LayerNorm([9, 8]), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        p, q = self.t1(x).chunk(2, 1)
        x = p * torch.sigmoid(q)
        lfs = torch.einsum("ij,bcjt->bcit", [self.A, x])
        x = F.relu(torch.einsum("bcit,cd->bdit", lfs, self.theta))
        p, q = self.t2(x).chunk(2, 1)
        x = self.norm((p * torch.sigmoid(q)).permute(0, 3, 2, 1)).permute(0, 2, 3, 1)
        return self.out(x.reshape(x.shape[0], x.shape[1], -1))


@listed(fixed_image(3, 16))
class Mixed(nn.Module):
    """Pictures mixed within the batch while training, as manifold mixup does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.a(x))
        if self.training:
            lam, index = 0.7, torch.arange(x.size(0) - 1, -1, -1)
            x = lam * x + (1 - lam) * x[index, :]
        return self.head(F.relu(self.b(x)).mean((2, 3)))


@listed(lambda b, n: (ids(b, n),))
class TransformerXL(nn.Module):
    """Memories of the segment before, made anew for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.qkv, self.r, self.o = nn.Embedding(64, 16), nn.ModuleList([nn.Linear(16, 48, bias=False) for _ in range(2)]), nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(2)]), nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
        self.u, self.v, self.mem_len = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(2, 8)), 8

    def init_mems(self) -> list[Tensor]:
        param = next(self.parameters())
        return [torch.empty(0, dtype=param.dtype, device=param.device) for _ in range(3)]

    @staticmethod
    def shift(x: Tensor) -> Tensor:
        zero = torch.zeros((x.size(0), 1, *x.size()[2:]), device=x.device, dtype=x.dtype)
        return torch.cat([zero, x], dim=1).view(x.size(1) + 1, x.size(0), *x.size()[2:])[1:].view_as(x)

    def forward(self, data: Tensor, *mems: Tensor) -> Any:
        if not mems:
            mems = self.init_mems()
        h, hids = self.emb(data.t()), []
        qlen, mlen = h.size(0), mems[0].size(0)
        klen = qlen + mlen
        pos = torch.arange(klen - 1, -1, -1.0, device=h.device, dtype=h.dtype)
        inv = 1 / (10000 ** (torch.arange(0.0, 16, 2.0, dtype=h.dtype) / 16))
        p = torch.cat([torch.outer(pos, inv).sin(), torch.outer(pos, inv).cos()], -1)
        mask = torch.triu(torch.ones(qlen, klen), diagonal=1 + mlen).bool()[:, :, None, None]
        hids.append(h)
        for i in range(2):
            q, k, v = self.qkv[i](torch.cat([mems[i], h], 0) if mems[i].numel() else h).view(klen, -1, 3, 2, 8).unbind(2)
            ac = torch.einsum("ibnd,jbnd->ijbn", q[-qlen:] + self.u, k)
            bd = self.shift(torch.einsum("ibnd,jnd->ijbn", q[-qlen:] + self.v, self.r[i](p).view(klen, 2, 8)))
            prob = ((ac + bd) / math.sqrt(8)).masked_fill(mask, -float("inf")).softmax(1)
            h = h + self.o[i](torch.einsum("ijbn,jbnd->ibnd", prob, v).reshape(qlen, -1, 16))
            hids.append(h)
        with torch.no_grad():
            new = [torch.cat([m, x], 0)[-self.mem_len:].detach() if m.numel() else x[-self.mem_len:].detach() for m, x in zip(mems, hids, strict=True)]
        return h.transpose(0, 1), new


@listed(sequence(8))
class Ensemble(nn.Module):
    """Members of one form, run at once by vmap."""

    def __init__(self) -> None:
        super().__init__()
        members = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)) for _ in range(3)]
        params, _ = torch.func.stack_module_state(members)
        self.names = list(params)
        self.stacked = nn.ParameterList([nn.Parameter(p.detach()) for p in params.values()])
        self.base = [copy.deepcopy(members[0]).to("meta")]
        self.first, self.last = nn.Linear(8, 8), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        params = dict(zip(self.names, self.stacked, strict=True))
        out = torch.vmap(lambda p: torch.func.functional_call(self.base[0], p, (x,)))(params)
        return self.last(out.mean(0))


@listed(lambda b, n: (torch.randn(b, 24),))
class NBeats(nn.Module):
    """A residual in time, and forecasts that add up."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 24 + 6)) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        residuals = x.flip(dims=(1,))
        forecast = x[:, -1:]
        for block in self.blocks:
            backcast, more = block(residuals).split([24, 6], dim=1)
            residuals = residuals - backcast
            forecast = forecast + more
        return forecast
