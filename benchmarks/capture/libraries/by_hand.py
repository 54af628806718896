"""Models in the manner of well-known repositories and tutorials that have a whole model in one file.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .catalogue import Inputs, add, fixed_image, rows, sequence

__all__: list[str] = []


def listed(inputs: Inputs) -> Any:
    """List a class under its own name."""
    def kept(cls: type[nn.Module]) -> type[nn.Module]:
        add(cls.__name__, cls.__module__, lambda m: cls(), inputs, package="by_hand")
        return cls
    return kept


def ids(b: int, n: int) -> Tensor:
    """Token ids."""
    return torch.randint(1, 64, (b, n))


class Attention(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.n_head = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.flash = hasattr(F, "scaled_dot_product_attention")
        self.register_buffer("bias", torch.tril(torch.ones(64, 64)).view(1, 1, 64, 64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf")).softmax(-1)
            y = att @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, width: int = 32, flash: bool = True) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(width), Attention(width), nn.LayerNorm(width)
        self.attn.flash = flash
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width), "act": nn.GELU()})
        m = self.mlp
        self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlpf(self.ln_2(x))


@listed(lambda b, n: {"idx": ids(b, n), "targets": ids(b, n)})
class NanoGPT(nn.Module):
    def __init__(self, flash: bool = True) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(64, 32), "wpe": nn.Embedding(64, 32), "h": nn.ModuleList([Block(flash=flash) for _ in range(3)]), "ln_f": nn.LayerNorm(32)})
        self.lm_head = nn.Linear(32, 64, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        t = idx.size(1)
        if t > 64:
            raise ValueError(f"cannot forward sequence of length {t}")
        x = self.transformer.wte(idx) + self.transformer.wpe(torch.arange(t, device=idx.device))
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


@listed(lambda b, n: {"idx": ids(b, n), "targets": ids(b, n).masked_fill(torch.rand(b, n) < 0.3, -1)})
class MinGPT(NanoGPT):
    def __init__(self) -> None:
        super().__init__(flash=False)


def subsequent_mask(size: int) -> Tensor:
    """What may be looked at."""
    return torch.triu(torch.ones(1, size, size), diagonal=1).type(torch.uint8) == 0


class Sublayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a_2, self.b_2 = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor, sublayer: Any) -> Tensor:
        mean, std = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return x + sublayer(self.a_2 * (x - mean) / (std + 1e-6) + self.b_2)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linears, self.attn = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)]), None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = None if mask is None else mask.unsqueeze(1)
        q, k, v = [lin(x).view(query.size(0), -1, 4, 8).transpose(1, 2) for lin, x in zip(self.linears, (query, key, value), strict=False)]
        scores = q @ k.transpose(-2, -1) / math.sqrt(8)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        self.attn = scores.softmax(-1)
        return self.linears[-1]((self.attn @ v).transpose(1, 2).contiguous().view(query.size(0), -1, 32))


class Layer(nn.Module):
    def __init__(self, crosses: bool) -> None:
        super().__init__()
        self.self_attn, self.src_attn = Heads(), Heads() if crosses else None
        self.feed_forward = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.sublayer = nn.ModuleList([Sublayer() for _ in range(3 if crosses else 2)])

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None, src_mask: Tensor | None = None) -> Tensor:
        x = self.sublayer[0](x, lambda x: self.self_attn(x, x, x, mask))
        if self.src_attn is not None:
            x = self.sublayer[1](x, lambda x: self.src_attn(x, memory, memory, src_mask))
        return self.sublayer[-1](x, self.feed_forward)


@listed(lambda b, n: (ids(b, n) * (torch.arange(n) < n - torch.arange(b)[:, None]), ids(b, n // 2 + 1)))
class AnnotatedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(64, 32), nn.Embedding(64, 32)
        self.encoder, self.decoder = nn.ModuleList([Layer(False) for _ in range(2)]), nn.ModuleList([Layer(True) for _ in range(2)])
        self.proj = nn.Linear(32, 64)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_uniform_(p)
        pe, position = torch.zeros(64, 32), torch.arange(64).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, 32, 2) * -(math.log(10000.0) / 32))
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0))

    def embed(self, table: nn.Embedding, x: Tensor) -> Tensor:
        return table(x) * math.sqrt(32) + self.pe[:, : x.size(1)].requires_grad_(False)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        src_mask, tgt, tgt_y = (src != 0).unsqueeze(-2), tgt[:, :-1], tgt[:, 1:]
        tgt_mask = (tgt != 0).unsqueeze(-2) & subsequent_mask(tgt.size(-1)).type_as((tgt != 0).data)
        memory, y = self.embed(self.src_embed, src), self.embed(self.tgt_embed, tgt)
        for layer in self.encoder:
            memory = layer(memory, src_mask)
        for layer in self.decoder:
            y = layer(y, tgt_mask, memory, src_mask)
        logp = F.log_softmax(self.proj(y), -1)
        true_dist = logp.data.clone().fill_(0.1 / 62)
        true_dist.scatter_(-1, tgt_y.data.unsqueeze(-1), 0.9)
        true_dist[..., 0] = 0
        return F.kl_div(logp, true_dist.masked_fill((tgt_y == 0).unsqueeze(-1), 0.0), reduction="sum") / tgt_y.numel()


def extract(a: Tensor, t: Tensor, shape: Any) -> Tensor:
    """One number a row."""
    return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(shape) - 1)))


@listed(lambda b, n: (torch.rand(b, 3, 16, 16), torch.randint(10, (b,)), torch.randn(b, 3, 16, 16)))
class DDPM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        betas = torch.linspace(1e-4, 0.02, 10, dtype=torch.float64)
        alphas = torch.cumprod(1.0 - betas, dim=0)
        keep = lambda name, value: self.register_buffer(name, value.to(torch.float32))  # noqa: E731
        keep("sqrt_alphas", alphas.sqrt())
        keep("sqrt_one_minus", (1 - alphas).sqrt())
        keep("loss_weight", alphas / (1 - alphas) / (alphas / (1 - alphas)).max())
        self.time = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))
        self.down, self.up, self.out = nn.Conv2d(3, 16, 4, 2, 1), nn.ConvTranspose2d(16, 16, 4, 2, 1), nn.Conv2d(19, 3, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)

    def unet(self, x: Tensor, t: Tensor) -> Tensor:
        half = torch.exp(torch.arange(8, device=t.device) * -(math.log(10000) / 7))
        emb = t[:, None] * half[None, :]
        scale, shift = self.time(torch.cat((emb.sin(), emb.cos()), dim=-1).to(x.dtype)).view(len(t), 16, 1, 1).chunk(2, dim=1)
        h = F.silu(self.norm(self.down(x)))
        h = torch.cat([h[:, :8] * (scale + 1) + shift, h[:, 8:]], 1)
        return self.out(torch.cat([self.up(h), x], 1))

    def forward(self, img: Tensor, t: Tensor, noise: Tensor | None = None) -> Tensor:
        _, _, h, w = img.shape
        if not (h == 16 and w == 16):
            raise ValueError("height and width of image must be 16")
        x_start = img * 2 - 1
        noise = noise if noise is not None else torch.randn_like(x_start)
        x = extract(self.sqrt_alphas, t, x_start.shape) * x_start + extract(self.sqrt_one_minus, t, x_start.shape) * noise
        loss = F.mse_loss(self.unet(x, t), noise, reduction="none").flatten(1).mean(1)
        return (loss * extract(self.loss_weight, t, loss.shape)).mean()


@listed(rows(16))
class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22, self.fc3, self.fc4 = nn.Linear(16, 32), nn.Linear(32, 4), nn.Linear(32, 4), nn.Linear(4, 32), nn.Linear(32, 16)

    def reparameterize(self, mu: Tensor, logvar: Tensor) -> Tensor:
        if self.training:
            std = torch.exp(0.5 * logvar)
            return mu + torch.randn_like(std) * std
        return mu

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.relu(self.fc1(x.view(-1, 16)))
        mu, logvar = self.fc21(h), self.fc22(h)
        recon = torch.sigmoid(self.fc4(F.relu(self.fc3(self.reparameterize(mu, logvar)))))
        kld = torch.mean(-0.5 * torch.sum(1 + logvar - mu**2 - logvar.exp(), dim=1), dim=0)
        recons_loss = F.mse_loss(recon, x)
        return {"loss": recons_loss + 0.1 * kld, "Reconstruction_Loss": recons_loss.detach(), "KLD": -kld.detach()}


@listed(fixed_image(3, 16))
class VQVAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 8, 4, 4), nn.ConvTranspose2d(8, 3, 4, 4)
        self.embedding = nn.Embedding(16, 8)
        self.embedding.weight.data.uniform_(-1 / 16, 1 / 16)

    def forward(self, x: Tensor) -> Any:
        z = self.encoder(x).permute(0, 2, 3, 1).contiguous()
        flat = z.view(-1, 8)
        d = flat.pow(2).sum(1, keepdim=True) + self.embedding.weight.pow(2).sum(1) - 2 * flat @ self.embedding.weight.t()
        index = torch.argmin(d, dim=1).unsqueeze(1)
        one_hot = torch.zeros(index.shape[0], 16, device=x.device, dtype=x.dtype).scatter_(1, index, 1)
        quantized = (one_hot @ self.embedding.weight).view(z.shape)
        loss = 0.25 * F.mse_loss(quantized.detach(), z) + F.mse_loss(quantized, z.detach())
        quantized = z + (quantized - z).detach()
        avg = one_hot.mean(0)
        perplexity = torch.exp(-torch.sum(avg * torch.log(avg + 1e-10)))
        recon = self.decoder(quantized.permute(0, 3, 1, 2).contiguous())
        return loss + F.mse_loss(recon, x), recon, perplexity


class MaskedConv2d(nn.Conv2d):
    def __init__(self, mask_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("mask", self.weight.data.clone())
        _, _, h, w = self.weight.size()
        self.mask.fill_(1)
        self.mask[:, :, h // 2, w // 2 + (mask_type == "B"):] = 0
        self.mask[:, :, h // 2 + 1:] = 0

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


@listed(lambda b, n: (torch.rand(b, 1, 12, 12),))
class PixelCNN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(MaskedConv2d("A", 1, 8, 7, 1, 3, bias=False), nn.ReLU(True), *[MaskedConv2d("B", 8, 8, 7, 1, 3, bias=False) for _ in range(2)], nn.ReLU(True), nn.Conv2d(8, 16, 1))

    def forward(self, x: Tensor) -> Tensor:
        target = (x.data[:, 0] * 15).long()
        return F.cross_entropy(self.net(x), target)


@listed(lambda b, n: (torch.randn(b, 8, 2 * n), torch.randn(b, 4, 2 * n)))
class WaveNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dilations = [2**i for i in range(3)]
        self.start = nn.Conv1d(8, 16, 1)
        norm = torch.nn.utils.parametrizations.weight_norm
        self.filter_convs = nn.ModuleList([norm(nn.Conv1d(16, 32, 2, dilation=d)) for d in self.dilations])
        self.cond_convs, self.skip_convs = nn.ModuleList([nn.Conv1d(4, 32, 1) for _ in self.dilations]), nn.ModuleList([nn.Conv1d(16, 24, 1) for _ in self.dilations])
        self.res_convs = nn.ModuleList([nn.Conv1d(16, 16, 1) for _ in self.dilations])
        self.end = nn.Sequential(nn.ReLU(), nn.Conv1d(24, 8, 1))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        x, skips = self.start(x), 0
        for i, d in enumerate(self.dilations):
            residual = x
            a, b = (self.filter_convs[i](F.pad(x, (d, 0))) + self.cond_convs[i](c)).chunk(2, 1)
            x = torch.tanh(a) * torch.sigmoid(b)
            s = self.skip_convs[i](x)
            try:
                skips = skips[:, :, -s.size(2):]
            except TypeError:
                skips = 0
            skips = s + skips
            x = (self.res_convs[i](x) + residual[:, :, -x.size(2):]) * math.sqrt(0.5)
        return self.end(skips)


@listed(lambda b, n: (ids(b, n), torch.full((b,), n) - torch.arange(b), torch.randn(b, 8, 10)))
class Tacotron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.encoder = nn.Embedding(64, 16), nn.LSTM(16, 8, batch_first=True, bidirectional=True)
        self.prenet, self.attention_rnn, self.decoder_rnn = nn.Linear(8, 16), nn.LSTMCell(32, 24), nn.LSTMCell(40, 24)
        self.query, self.memory, self.location, self.v = nn.Linear(24, 12, bias=False), nn.Linear(16, 12, bias=False), nn.Conv1d(2, 12, 3, padding=1), nn.Linear(12, 1, bias=False)
        self.mel, self.gate = nn.Linear(40, 8), nn.Linear(40, 1)

    def forward(self, text: Tensor, lengths: Tensor, mels: Tensor) -> Any:
        x = nn.utils.rnn.pack_padded_sequence(self.embedding(text), lengths.cpu().numpy(), batch_first=True, enforce_sorted=False)
        memory, _ = nn.utils.rnn.pad_packed_sequence(self.encoder(x)[0], batch_first=True)
        b, t, _ = memory.shape
        mask = torch.arange(int(lengths.max()), device=text.device)[None] >= lengths[:, None]
        processed = self.memory(memory)
        frames = torch.cat((memory.new_zeros(1, b, 8), mels.permute(2, 0, 1)))
        h, c = memory.new_zeros(b, 24), memory.new_zeros(b, 24)
        dh, dc = torch.zeros_like(h), torch.zeros_like(h)
        weights = cumulative = memory.new_zeros(b, t)
        context, outputs, gates, alignments = memory.new_zeros(b, 16), [], [], []
        while len(outputs) < frames.size(0) - 1:
            step = F.relu(self.prenet(frames[len(outputs)]))
            h, c = self.attention_rnn(torch.cat((step, context), -1), (h, c))
            energies = self.v(torch.tanh(self.query(h.unsqueeze(1)) + processed + self.location(torch.stack((weights, cumulative), 1)).transpose(1, 2))).squeeze(-1)
            weights = F.softmax(energies.masked_fill(mask, -float("inf")), 1)
            cumulative = cumulative + weights
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            dh, dc = self.decoder_rnn(torch.cat((h, context), -1), (dh, dc))
            out = torch.cat((dh, context), 1)
            outputs += [self.mel(out).squeeze(1)]
            gates += [self.gate(out).squeeze()]
            alignments += [weights]
        return torch.stack(outputs).permute(1, 2, 0), torch.stack(gates).transpose(0, 1), torch.stack(alignments).transpose(0, 1)


@listed(lambda b, n: (ids(b, n // 4), ids(b, 6)))
class Seq2Seq(nn.Module):
    """Attention over a source; the teacher is followed half of the time while training."""

    def __init__(self) -> None:
        super().__init__()
        self.src, self.tgt = nn.Embedding(64, 16), nn.Embedding(64, 16)
        self.encoder, self.fc = nn.GRU(16, 16, bidirectional=True, batch_first=True), nn.Linear(32, 16)
        self.attn, self.v, self.rnn, self.out = nn.Linear(48, 16), nn.Linear(16, 1, bias=False), nn.GRU(48, 16), nn.Linear(64, 64)

    def forward(self, src: Tensor, trg: Tensor, teacher_forcing_ratio: float = 0.5) -> Tensor:
        enc, hidden = self.encoder(self.src(src))
        hidden = torch.tanh(self.fc(torch.cat((hidden[-2], hidden[-1]), 1)))
        outputs = torch.zeros(trg.shape[1], trg.shape[0], 64, device=src.device, dtype=enc.dtype)
        token = trg[:, 0]
        for t in range(1, trg.shape[1]):
            emb = self.tgt(token.unsqueeze(0))
            repeated = hidden.unsqueeze(1).repeat(1, src.shape[1], 1)
            a = F.softmax(self.v(torch.tanh(self.attn(torch.cat((repeated, enc), 2)))).squeeze(2), 1).unsqueeze(1)
            weighted = torch.bmm(a, enc).permute(1, 0, 2)
            output, hidden = self.rnn(torch.cat((emb, weighted), 2), hidden.unsqueeze(0))
            hidden = hidden.squeeze(0)
            outputs[t] = self.out(torch.cat((output, weighted, emb), 2).squeeze(0))
            teacher = random.random() < (teacher_forcing_ratio if self.training else 0.0)
            token = trg[:, t] if teacher else outputs[t].argmax(1)
        return outputs[1:].permute(1, 2, 0)


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), torch.randn(b, 3, 16, 16)))
class SimCLR(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 16))
        self.n_views = 2

    def forward(self, a: Tensor, b: Tensor) -> Any:
        images = torch.cat([a, b], dim=0)
        features = F.normalize(self.backbone(images), dim=1)
        labels = torch.cat([torch.arange(len(a)) for _ in range(self.n_views)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).to(features)
        sim = features @ features.T
        mask = torch.eye(labels.shape[0], dtype=torch.bool).to(a.device)
        labels, sim = labels[~mask].view(labels.shape[0], -1), sim[~mask].view(sim.shape[0], -1)
        positives = sim[labels.bool()].view(labels.shape[0], -1)
        negatives = sim[~labels.bool()].view(sim.shape[0], -1)
        logits = torch.cat([positives, negatives], dim=1) / 0.07
        return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long).to(a.device)), logits


@listed(lambda b, n: (torch.randn(b, 16), torch.randn(b, 16)))
class MoCo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))  # noqa: E731
        self.encoder_q, self.encoder_k, self.K, self.m, self.T = make(), make(), 60, 0.99, 0.07
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(8, self.K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update_key_encoder(self) -> None:
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys: Tensor) -> None:
        n, ptr = keys.shape[0], int(self.queue_ptr)
        self.queue[:, ptr:ptr + n] = keys.T
        self.queue_ptr[0] = (ptr + n) % self.K

    def forward(self, im_q: Tensor, im_k: Tensor) -> Any:
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        self._dequeue_and_enqueue(k)
        return logits, torch.zeros(logits.shape[0], dtype=torch.long)


@listed(rows(8))
class DuelingDQN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feature, self.advantage, self.value = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)), nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.feature(x)
        advantage = self.advantage(x)
        return self.value(x) + advantage - advantage.mean(1, keepdim=True)


@listed(lambda b, n: (torch.randn(b, 8), torch.randn(b, 3), torch.randn(b), torch.randn(b), torch.randn(b)))
class PPO(nn.Module):
    """A continuous agent, and the loss of its update."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        self.actor_mean, self.actor_logstd = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)), nn.Parameter(torch.zeros(1, 3))

    def get_action_and_value(self, x: Tensor, action: Tensor | None = None) -> Any:
        mean = self.actor_mean(x)
        probs = torch.distributions.Normal(mean, torch.exp(self.actor_logstd.expand_as(mean)))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action).sum(1), probs.entropy().sum(1), self.critic(x)

    def forward(self, obs: Tensor, actions: Tensor, old_logprob: Tensor, advantages: Tensor, returns: Tensor) -> Tensor:
        _, newlogprob, entropy, newvalue = self.get_action_and_value(obs, actions)
        logratio = newlogprob - old_logprob
        ratio = logratio.exp()
        with torch.no_grad():
            self.approx_kl = ((ratio - 1) - logratio).mean()
        pg_loss = torch.max(-advantages * ratio, -advantages * torch.clamp(ratio, 0.8, 1.2)).mean()
        v_loss = 0.5 * ((newvalue.view(-1) - returns) ** 2).mean()
        return pg_loss - 0.01 * entropy.mean() + v_loss * 0.5


@listed(lambda b, n: (torch.randn(b, 8), torch.randint(4, (b,))))
class Discrete(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.pi, self.v = nn.Sequential(nn.Linear(8, 32), nn.ReLU()), nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, obs: Tensor, action: Tensor) -> Any:
        h = self.trunk(obs)
        dist = torch.distributions.Categorical(logits=self.pi(h))
        return dist.log_prob(action), dist.entropy(), self.v(h).squeeze(-1)


@listed(lambda b, n: (torch.randn(b, 6), torch.randn(b, 2)))
class SquashedActor(nn.Module):
    """SAC's, with a log probability of what it samples."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.mean, self.logstd, self.q = nn.Linear(6, 32), nn.Linear(32, 2), nn.Linear(32, 2), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("action_scale", torch.tensor([2.0, 1.0]))

    def forward(self, x: Tensor, noise: Tensor) -> Any:
        h = F.relu(self.fc(x))
        mean, log_std = self.mean(h), torch.tanh(self.logstd(h))
        log_std = -5 + 0.5 * (2 + 5) * (log_std + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x_t = normal.rsample() if self.training else mean + noise * log_std.exp()
        y_t = torch.tanh(x_t)
        log_prob = normal.log_prob(x_t) - torch.log(self.action_scale * (1 - y_t.pow(2)) + 1e-6)
        return self.q(torch.cat([x, y_t * self.action_scale], 1)), log_prob.sum(1, keepdim=True)


def _adjacency(b: int, n: int) -> tuple[Any, ...]:
    near = (torch.rand(n, n) > 0.7).float() + torch.eye(n)
    return torch.randn(n, 8), near / near.sum(1, keepdim=True)


@listed(_adjacency)
class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 16) * 0.3), nn.Parameter(torch.randn(16, 4) * 0.3)])
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        x = F.relu(torch.mm(adj, torch.mm(x, self.weights[0])))
        return F.log_softmax(torch.spmm(adj, torch.mm(x, self.weights[1])) + self.bias, dim=1)


@listed(_adjacency)
class GAT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.W, self.a = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)]), nn.ParameterList([nn.Parameter(torch.randn(16, 1)) for _ in range(3)])
        self.out = nn.Linear(24, 4)

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        heads = []
        for linear, a in zip(self.W, self.a, strict=True):
            h = linear(x)
            e = F.leaky_relu(torch.matmul(h, a[:8]) + torch.matmul(h, a[8:]).T, 0.2)
            attention = torch.where(adj > 0, e, -9e15 * torch.ones_like(e)).softmax(1)
            heads.append(F.elu(attention @ h))
        return F.log_softmax(self.out(torch.cat(heads, dim=1)), dim=1)


@listed(lambda b, n: (torch.rand(b, 1, 20, 20), torch.randint(5, (b,))))
class CapsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.primary = nn.Conv2d(1, 16, 9), nn.ModuleList([nn.Conv2d(16, 4, 5, 2) for _ in range(4)])
        self.W = nn.Parameter(torch.randn(1, 64, 5, 6, 4) * 0.1)
        self.decoder = nn.Sequential(nn.Linear(30, 32), nn.ReLU(inplace=True), nn.Linear(32, 400), nn.Sigmoid())

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        norm = (x**2).sum(-1, keepdim=True)
        return norm * x / ((1.0 + norm) * torch.sqrt(norm + 1e-8))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        u = torch.stack([c(F.relu(self.conv(x))) for c in self.primary], dim=1)
        u = self.squash(u.view(x.size(0), 64, -1))
        u_hat = torch.matmul(self.W, torch.stack([u] * 5, dim=2).unsqueeze(4)).squeeze(-1)
        b_ij = torch.zeros(1, 64, 5, 1, device=x.device, dtype=x.dtype)
        for i in range(3):
            c_ij = F.softmax(b_ij, dim=2)
            c_ij = torch.cat([c_ij] * x.size(0), dim=0)
            v = self.squash((c_ij * u_hat).sum(1, keepdim=True))
            if i < 2:
                b_ij = b_ij + (u_hat * v).sum(-1, keepdim=True).mean(0, keepdim=True)
        v = v.squeeze(1)
        classes = v.norm(dim=-1)
        target = torch.eye(5, device=x.device, dtype=x.dtype).index_select(0, y)
        left, right = F.relu(0.9 - classes) ** 2, F.relu(classes - 0.1) ** 2
        recon = self.decoder((v * target[:, :, None]).view(x.size(0), -1))
        return (target * left + 0.5 * (1 - target) * right).sum(1).mean() + 0.0005 * F.mse_loss(recon, x.view(x.size(0), -1)), classes


@listed(lambda b, n: (torch.randn(b, n, 3), F.normalize(torch.randn(b, n, 3), dim=-1), torch.rand(b, n).sort(-1).values))
class NeRF(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.freqs = [2.0**i for i in range(4)]
        self.pts = nn.ModuleList([nn.Linear(27, 32)] + [nn.Linear(32 + 27 * (i == 1), 32) for i in range(3)])
        self.alpha, self.feature, self.views, self.rgb = nn.Linear(32, 1), nn.Linear(32, 32), nn.Linear(59, 16), nn.Linear(16, 3)

    def embed(self, x: Tensor) -> Tensor:
        return torch.cat([x] + [fn(x * f) for f in self.freqs for fn in (torch.sin, torch.cos)], -1)

    def forward(self, pts: Tensor, dirs: Tensor, z_vals: Tensor) -> Any:
        x, d = self.embed(pts), self.embed(dirs)
        h = x
        for i, layer in enumerate(self.pts):
            h = F.relu(layer(h))
            if i == 1:
                h = torch.cat([x, h], -1)
        sigma, rgb = self.alpha(h)[..., 0], torch.sigmoid(self.rgb(F.relu(self.views(torch.cat([self.feature(h), d], -1)))))
        dists = z_vals[..., 1:] - z_vals[..., :-1]
        dists = torch.cat([dists, torch.tensor([1e10], dtype=dists.dtype).expand(dists[..., :1].shape)], -1)
        alpha = 1.0 - torch.exp(-F.relu(sigma) * dists)
        weights = alpha * torch.cumprod(torch.cat([torch.ones_like(alpha[..., :1]), 1.0 - alpha + 1e-10], -1), -1)[..., :-1]
        return torch.sum(weights[..., None] * rgb, -2), torch.sum(weights * z_vals, -1)


@listed(lambda b, n: (torch.rand(8 * b, 1), torch.rand(8 * b, 1)))
class PINN(nn.Module):
    """Burgers' equation, by its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.lambda_1 = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x, t = x.clone().requires_grad_(True), t.clone().requires_grad_(True)
        with torch.enable_grad():
            u = self.net(torch.cat([x, t], 1))
            u_t = torch.autograd.grad(u, t, torch.ones_like(u), create_graph=True)[0]
            u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
            u_xx = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)[0]
        return (u_t + self.lambda_1 * u * u_x - 0.01 * u_xx).pow(2).mean()


class KANLinear(nn.Module):
    def __init__(self, n_in: int, n_out: int, grid: int = 5, order: int = 3) -> None:
        super().__init__()
        h = 2 / grid
        self.register_buffer("grid", (torch.arange(-order, grid + order + 1) * h - 1).expand(n_in, -1).contiguous())
        self.base_weight, self.spline_weight, self.order = nn.Parameter(torch.randn(n_out, n_in) * 0.3), nn.Parameter(torch.randn(n_out, n_in, grid + order) * 0.1), order

    def b_splines(self, x: Tensor) -> Tensor:
        grid, x = self.grid, x.unsqueeze(-1)
        bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            bases = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * bases[:, :, :-1] + (grid[:, k + 1:] - x) / (grid[:, k + 1:] - grid[:, 1:(-k)]) * bases[:, :, 1:]
        return bases.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        out = F.linear(F.silu(x), self.base_weight) + F.linear(self.b_splines(x).view(x.size(0), -1), self.spline_weight.view(self.spline_weight.size(0), -1))
        return out.reshape(*shape[:-1], -1)


@listed(sequence(4))
class EfficientKAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([KANLinear(4, 8), KANLinear(8, 8), KANLinear(8, 2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class SpectralConv2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Parameter(torch.rand(8, 8, 4, 4, dtype=torch.cfloat) / 64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x_ft = torch.fft.rfft2(x)
        out = torch.zeros(x.shape[0], 8, x.size(-2), x.size(-1) // 2 + 1, dtype=x_ft.dtype, device=x.device)
        out[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, :4, :4], self.w1)
        out[:, :, -4:, :4] = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, -4:, :4], self.w2)
        return torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))


@listed(lambda b, n: (torch.randn(b, n, n, 1),))
class FNO2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.padding, self.p = 3, nn.Linear(3, 8)
        self.convs, self.ws, self.q = nn.ModuleList([SpectralConv2d() for _ in range(3)]), nn.ModuleList([nn.Conv2d(8, 8, 1) for _ in range(3)]), nn.Linear(8, 1)

    def get_grid(self, shape: Any, device: Any) -> Tensor:
        batchsize, size_x, size_y = shape[0], shape[1], shape[2]
        gridx = torch.linspace(0, 1, size_x).reshape(1, size_x, 1, 1).repeat([batchsize, 1, size_y, 1])
        gridy = torch.linspace(0, 1, size_y).reshape(1, 1, size_y, 1).repeat([batchsize, size_x, 1, 1])
        return torch.cat((gridx, gridy), dim=-1).to(device)

    def forward(self, x: Tensor) -> Tensor:
        x = self.p(torch.cat((x, self.get_grid(x.shape, x.device).to(x.dtype)), dim=-1)).permute(0, 3, 1, 2)
        x = F.pad(x, [0, self.padding, 0, self.padding])
        for conv, w in zip(self.convs, self.ws, strict=True):
            x = F.gelu(conv(x) + w(x))
        return self.q(x[..., : -self.padding, : -self.padding].permute(0, 2, 3, 1))
