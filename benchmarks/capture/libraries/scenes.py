"""Models as the repositories of papers write them: of pictures, of sounds, of points and of molecules.

How a model is listed is left to ``catalogue`` and ``by_hand``; those of language, agents, tables and graphs are
in ``papers``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from .by_hand import ids, listed
from .catalogue import fixed_image

__all__: list[str] = []


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """DiT's."""
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def timestep_embedding(t: Tensor, dim: int, max_period: int = 10000) -> Tensor:
    """Sines and cosines of a time."""
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(start=0, end=half, dtype=torch.float32) / half).to(device=t.device)
    args = t[:, None].float() * freqs[None]
    embedding = torch.cat([torch.cos(args), torch.sin(args)], dim=-1)
    if dim % 2:
        embedding = torch.cat([embedding, torch.zeros_like(embedding[:, :1])], dim=-1)
    return embedding


class DiTBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(dim, elementwise_affine=False, eps=1e-6) for _ in range(2))
        self.attn, self.mlp = nn.MultiheadAttention(dim, 4, batch_first=True), nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(approximate="tanh"), nn.Linear(2 * dim, dim))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, dim=1)
        h = modulate(self.norm1(x), shift_msa, scale_msa)
        x = x + gate_msa.unsqueeze(1) * self.attn(h, h, h, need_weights=False)[0]
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


@listed(lambda b, n: (torch.randn(b, 4, 8, 8), torch.rand(b), torch.randint(5, (b,)), torch.randn(b, 4, 8, 8), (torch.arange(b) % 3 == 0).long()))
class DiT(nn.Module):
    """A transformer of patches that predicts a flow's velocity, with labels dropped for guidance."""

    def __init__(self) -> None:
        super().__init__()
        self.out_channels, self.patch = 4, 2
        self.x_embedder, self.t_embedder, self.y_embedder = nn.Conv2d(4, 32, 2, 2), nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32)), nn.Embedding(6, 32)
        self.pos_embed = nn.Parameter(torch.randn(1, 16, 32) / 8, requires_grad=False)
        self.blocks, self.final, self.ada = nn.ModuleList([DiTBlock(32) for _ in range(3)]), nn.Linear(32, 16), nn.Sequential(nn.SiLU(), nn.Linear(32, 64))

    def unpatchify(self, x: Tensor) -> Tensor:
        c, p = self.out_channels, self.patch
        h = w = int(x.shape[1] ** 0.5)
        assert h * w == x.shape[1]
        x = x.reshape(shape=(x.shape[0], h, w, p, p, c))
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(shape=(x.shape[0], c, h * p, h * p))

    def forward(self, x1: Tensor, t: Tensor, y: Tensor, noise: Tensor, drop_ids: Tensor) -> Tensor:
        x = (1 - t.view(-1, 1, 1, 1)) * noise + t.view(-1, 1, 1, 1) * x1
        h = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        y = torch.where(drop_ids == 1, 5, y)
        c = self.t_embedder(timestep_embedding(1000 * t, 16).to(x.dtype)) + self.y_embedder(y)
        for block in self.blocks:
            h = block(h, c)
        shift, scale = self.ada(c).chunk(2, dim=1)
        v = self.unpatchify(self.final(modulate(F.layer_norm(h, (32,)), shift, scale)))
        return (v - (x1 - noise)).pow(2).mean(dim=list(range(1, len(v.size())))).mean()


class FluxStream(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mod, self.qkv, self.proj = nn.Linear(dim, 6 * dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm, self.mlp = nn.RMSNorm(8), nn.RMSNorm(8), nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(approximate="tanh"), nn.Linear(2 * dim, dim))

    def heads(self, x: Tensor) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return self.q_norm(q).to(v), self.k_norm(k).to(v), v


class FluxDouble(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.img, self.txt = FluxStream(dim), FluxStream(dim)

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
        mods = [stream.mod(F.silu(vec))[:, None].chunk(6, -1) for stream in (self.img, self.txt)]
        normed = [(1 + m[1]) * F.layer_norm(x, x.shape[-1:]) + m[0] for x, m in zip((img, txt), mods, strict=True)]
        (iq, ik, iv), (tq, tk, tv) = self.img.heads(normed[0]), self.txt.heads(normed[1])
        q, k, v = (torch.cat(pair, dim=2) for pair in ((tq, iq), (tk, ik), (tv, iv)))
        attn = attention(q, k, v, pe)
        txt_attn, img_attn = attn[:, : txt.shape[1]], attn[:, txt.shape[1] :]
        img = img + mods[0][2] * self.img.proj(img_attn)
        txt = txt + mods[1][2] * self.txt.proj(txt_attn)
        img = img + mods[0][5] * self.img.mlp((1 + mods[0][4]) * F.layer_norm(img, img.shape[-1:]) + mods[0][3])
        txt = txt + mods[1][5] * self.txt.mlp((1 + mods[1][4]) * F.layer_norm(txt, txt.shape[-1:]) + mods[1][3])
        return img, txt


def rope(pos: Tensor, dim: int, theta: int) -> Tensor:
    """Rotations of positions, as 2 by 2 matrices."""
    assert dim % 2 == 0
    omega = 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float64, device=pos.device) / dim))
    out = torch.einsum("...n,d->...nd", pos, omega)
    out = torch.stack([torch.cos(out), -torch.sin(out), torch.sin(out), torch.cos(out)], dim=-1)
    return out.unflatten(-1, (2, 2)).float()


def attention(q: Tensor, k: Tensor, v: Tensor, pe: Tensor) -> Tensor:
    """Attention with rotations."""
    q, k = apply_rope(q, k, pe)
    x = F.scaled_dot_product_attention(q, k, v)
    return x.transpose(1, 2).flatten(2)


def apply_rope(xq: Tensor, xk: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
    """Turn pairs of channels."""
    xq_, xk_ = xq.float().reshape(*xq.shape[:-1], -1, 1, 2), xk.float().reshape(*xk.shape[:-1], -1, 1, 2)
    xq_out = freqs[..., 0] * xq_[..., 0] + freqs[..., 1] * xq_[..., 1]
    xk_out = freqs[..., 0] * xk_[..., 0] + freqs[..., 1] * xk_[..., 1]
    return xq_out.reshape(*xq.shape).type_as(xq), xk_out.reshape(*xk.shape).type_as(xk)


@listed(lambda b, n: (torch.randn(b, n, 8), torch.rand(b, n, 3) * 8, torch.randn(b, 6, 16), torch.zeros(b, 6, 3), torch.rand(b), torch.randn(b, 16), torch.full((b,), 4.0)))
class Flux(nn.Module):
    """Two streams that share attention, then one."""

    def __init__(self) -> None:
        super().__init__()
        self.img_in, self.txt_in, self.time_in, self.vector_in, self.guidance_in = nn.Linear(8, 32), nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(16, 32)
        self.double_blocks = nn.ModuleList([FluxDouble(32) for _ in range(2)])
        self.single_blocks = nn.ModuleList([nn.ModuleDict({"mod": nn.Linear(32, 96), "linear1": nn.Linear(32, 96 + 64), "linear2": nn.Linear(32 + 64, 32)}) for _ in range(2)])
        self.final = nn.Linear(32, 8)

    def forward(self, img: Tensor, img_ids: Tensor, txt: Tensor, txt_ids: Tensor, timesteps: Tensor, y: Tensor, guidance: Tensor | None = None) -> Tensor:
        if img.ndim != 3 or txt.ndim != 3:
            raise ValueError("Input img and txt tensors must have 3 dimensions.")
        img, txt = self.img_in(img), self.txt_in(txt)
        vec = self.time_in(timestep_embedding(timesteps, 16).to(img)) + self.vector_in(y)
        if guidance is None:
            raise ValueError("Didn't get guidance strength for guidance distilled model.")
        vec = vec + self.guidance_in(timestep_embedding(guidance, 16).to(img))
        pos = torch.cat((txt_ids, img_ids), dim=1)
        pe = torch.cat([rope(pos[..., i], (4, 2, 2)[i], 10_000) for i in range(3)], dim=-3).unsqueeze(1)
        for block in self.double_blocks:
            img, txt = block(img=img, txt=txt, vec=vec, pe=pe)
        img = torch.cat((txt, img), 1)
        for block in self.single_blocks:
            shift, scale, gate = block["mod"](F.silu(vec))[:, None].chunk(3, -1)
            qkv, mlp = torch.split(block["linear1"]((1 + scale) * F.layer_norm(img, (32,)) + shift), [96, 64], dim=-1)
            q, k, v = qkv.unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            img = img + gate * block["linear2"](torch.cat((attention(q, k, v, pe), F.gelu(mlp)), 2))
        return self.final(img[:, txt.shape[1] :, ...])


class Codebook(nn.Module):
    """taming-transformers' quantizer, with its counts in evaluation."""

    def __init__(self, n: int, dim: int, beta: float = 0.25) -> None:
        super().__init__()
        self.n_e, self.e_dim, self.beta, self.embedding = n, dim, beta, nn.Embedding(n, dim)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        z = z.permute(0, 2, 3, 1).contiguous()
        z_flattened = z.view(-1, self.e_dim)
        d = torch.sum(z_flattened**2, dim=1, keepdim=True) + torch.sum(self.embedding.weight**2, dim=1) - 2 * torch.matmul(z_flattened, self.embedding.weight.t())
        indices = torch.argmin(d, dim=1).unsqueeze(1)
        encodings = torch.zeros(indices.shape[0], self.n_e).to(z)
        encodings.scatter_(1, indices, 1)
        z_q = torch.matmul(encodings, self.embedding.weight).view(z.shape)
        loss = torch.mean((z_q.detach() - z) ** 2) + self.beta * torch.mean((z_q - z.detach()) ** 2)
        z_q = z + (z_q - z).detach()
        e_mean = torch.mean(encodings, dim=0)
        perplexity = torch.exp(-torch.sum(e_mean * torch.log(e_mean + 1e-10)))
        return z_q.permute(0, 3, 1, 2).contiguous(), loss, (perplexity, indices)


@listed(lambda b, n: (torch.rand(b, 3, 16, 16),))
class VQGAN(nn.Module):
    """The generator's loss, whose adversarial weight comes of gradients at the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.quantize = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU(), nn.GroupNorm(4, 16), nn.Conv2d(16, 8, 3, 2, 1)), Codebook(16, 8)
        self.decoder = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(8, 16, 3, 1, 1), nn.SiLU(), nn.Upsample(scale_factor=2), nn.Conv2d(16, 3, 3, 1, 1))
        self.discriminator = nn.Sequential(spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Conv2d(8, 1, 4, 2, 1)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        quant, codebook_loss, _ = self.quantize(self.encoder(x))
        xrec = self.decoder(quant)
        rec = torch.abs(x.contiguous() - xrec.contiguous())
        nll = torch.sum(rec) / rec.shape[0]
        g_loss = -torch.mean(self.discriminator(xrec.contiguous()))
        if self.training:
            last = self.decoder[-1].weight
            nll_grads = torch.autograd.grad(nll, last, retain_graph=True)[0]
            g_grads = torch.autograd.grad(g_loss, last, retain_graph=True)[0]
            d_weight = torch.clamp(torch.norm(nll_grads) / (torch.norm(g_grads) + 1e-4), 0.0, 1e4).detach() * 0.8
        else:
            d_weight = torch.tensor(0.0)
        return nll + d_weight * g_loss + codebook_loss.mean()


@listed(lambda b, n: (torch.rand(b, 3, 32, 32), torch.rand(b, 16)))
class MAE(nn.Module):
    """Patches shuffled by noise that is given, most of them left out, and put back for the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.cls_token, self.mask_token = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.randn(1, 1, 32) / 8), nn.Parameter(torch.randn(1, 1, 16) / 8)
        self.pos_embed, self.decoder_pos_embed = nn.Parameter(torch.randn(1, 17, 32) / 8, requires_grad=False), nn.Parameter(torch.randn(1, 17, 16) / 8, requires_grad=False)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=True) for _ in range(2)])
        self.decoder_embed, self.decoder_block, self.decoder_pred = nn.Linear(32, 16), nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), nn.Linear(16, 192)

    def random_masking(self, x: Tensor, noise: Tensor, mask_ratio: float) -> tuple[Tensor, Tensor, Tensor]:
        N, L, D = x.shape
        len_keep = int(L * (1 - mask_ratio))
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        ids_keep = ids_shuffle[:, :len_keep]
        x_masked = torch.gather(x, dim=1, index=ids_keep.unsqueeze(-1).repeat(1, 1, D))
        mask = torch.ones([N, L], device=x.device)
        mask[:, :len_keep] = 0
        return x_masked, torch.gather(mask, dim=1, index=ids_restore), ids_restore

    def forward(self, imgs: Tensor, noise: Tensor, mask_ratio: float = 0.75) -> tuple[Tensor, Tensor, Tensor]:
        x = self.patch_embed(imgs).flatten(2).transpose(1, 2) + self.pos_embed[:, 1:, :]
        x, mask, ids_restore = self.random_masking(x, noise, mask_ratio)
        cls_token = self.cls_token + self.pos_embed[:, :1, :]
        x = torch.cat((cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        for blk in self.blocks:
            x = blk(x)
        x = self.decoder_embed(x)
        mask_tokens = self.mask_token.repeat(x.shape[0], ids_restore.shape[1] + 1 - x.shape[1], 1)
        x_ = torch.cat([x[:, 1:, :], mask_tokens], dim=1)
        x_ = torch.gather(x_, dim=1, index=ids_restore.unsqueeze(-1).repeat(1, 1, x.shape[2]))
        x = torch.cat([x[:, :1, :], x_], dim=1) + self.decoder_pos_embed
        pred = self.decoder_pred(self.decoder_block(x))[:, 1:, :]
        p = 8
        h = w = imgs.shape[2] // p
        target = imgs.reshape(imgs.shape[0], 3, h, p, w, p)
        target = torch.einsum("nchpwq->nhwpqc", target).reshape(imgs.shape[0], h * w, p**2 * 3)
        mean, var = target.mean(dim=-1, keepdim=True), target.var(dim=-1, keepdim=True)
        target = (target - mean) / (var + 1.0e-6) ** 0.5
        loss = ((pred - target) ** 2).mean(dim=-1)
        return (loss * mask).sum() / mask.sum(), pred, mask


@listed(lambda b, n: (torch.rand(b, 3, 32, 32), torch.rand(b, 3, 32, 32)))
class BYOL(nn.Module):
    """Two views, a copy that follows by a moving average when it is told to, and a loss of cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
        self.predictor, self.target, self.beta = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)), None, 0.99
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad = False

    @torch.no_grad()
    def update(self) -> None:
        for a, b in zip(self.online.parameters(), self.target.parameters(), strict=True):
            b.data = b.data * self.beta + (1 - self.beta) * a.data

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        images = torch.cat((x1, x2), dim=0)
        one, two = self.predictor(self.online(images)).chunk(2, dim=0)
        with torch.no_grad():
            target_one, target_two = (t.detach() for t in self.target(images).chunk(2, dim=0))
        loss = 4 - 2 * F.cosine_similarity(one, target_two, dim=-1) - 2 * F.cosine_similarity(two, target_one, dim=-1)
        return loss.mean()


def apply_masks(x: Tensor, masks: list[Tensor]) -> Tensor:
    """I-JEPA's: the tokens that each mask keeps, one mask after the other along the batch."""
    all_x = []
    for m in masks:
        mask_keep = m.unsqueeze(-1).repeat(1, 1, x.size(-1))
        all_x += [torch.gather(x, dim=1, index=mask_keep)]
    return torch.cat(all_x, dim=0)


@listed(lambda b, n: (torch.rand(b, 3, 32, 32), [torch.rand(b, 16).argsort(1)[:, :8]], [torch.rand(b, 16).argsort(1)[:, :4] for _ in range(2)]))
class IJEPA(nn.Module):
    """Tokens of one part predicted from another, in the space of an encoder that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos = nn.Conv2d(3, 32, 8, 8), nn.Parameter(torch.randn(1, 16, 32) / 8, requires_grad=False)
        self.encoder = nn.ModuleList([nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2)])
        self.target = copy.deepcopy(self.encoder).requires_grad_(False)
        self.mask_token, self.predictor, self.proj = nn.Parameter(torch.zeros(1, 1, 32)), nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), nn.Linear(32, 32)

    @staticmethod
    def repeat_interleave_batch(x: Tensor, B: int, repeat: int) -> Tensor:
        N = len(x) // B
        return torch.cat([torch.cat([x[i * B : (i + 1) * B] for _ in range(repeat)], dim=0) for i in range(N)], dim=0)

    def forward(self, imgs: Tensor, masks_enc: list[Tensor], masks_pred: list[Tensor]) -> Tensor:
        B = len(imgs)
        x = self.embed(imgs).flatten(2).transpose(1, 2) + self.pos
        with torch.no_grad():
            h = x.detach()
            for blk in self.target:
                h = blk(h)
            h = F.layer_norm(h, (h.size(-1),))
            h = self.repeat_interleave_batch(apply_masks(h, masks_pred), B, repeat=len(masks_enc))
        z = apply_masks(x, masks_enc)
        for blk in self.encoder:
            z = blk(z)
        pos = self.repeat_interleave_batch(apply_masks(self.pos.repeat(B, 1, 1), masks_pred), B, repeat=len(masks_enc))
        tokens = self.mask_token.repeat(pos.size(0), pos.size(1), 1) + pos
        n_ctxt = z.shape[1]
        z = self.predictor(torch.cat([z.repeat(len(masks_pred), 1, 1), tokens], dim=1))
        return F.smooth_l1_loss(self.proj(z[:, n_ctxt:]), h)


@listed(lambda b, n: (torch.rand(b, 3, 32, 32), ids(b, 8)))
class SigLIP(nn.Module):
    """Pictures and texts told apart pair by pair, with a temperature and a bias that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.visual, self.textual = nn.Sequential(nn.Conv2d(3, 16, 8, 8), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 16)), nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 16))
        self.logit_scale, self.logit_bias = nn.Parameter(torch.ones([]) * math.log(10)), nn.Parameter(torch.ones([]) * -10)

    def forward(self, image: Tensor, text: Tensor) -> dict[str, Tensor]:
        zi, zt = F.normalize(self.visual(image), dim=-1), F.normalize(self.textual(text).mean(1), dim=-1)
        logits = self.logit_scale.exp() * zi @ zt.T + self.logit_bias
        labels = -torch.ones((len(logits), len(logits)), dtype=logits.dtype) + 2 * torch.eye(len(logits), dtype=logits.dtype)
        return {"loss": -F.logsigmoid(labels * logits).sum() / image.shape[0]}


class MLPMask(nn.Module):
    def __init__(self, n: int, m: int, k: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip([n, m], [m, k], strict=True))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = F.relu(layer(x)) if i < len(self.layers) - 1 else layer(x)
        return x


@listed(lambda b, n: (torch.rand(b, 3, 32, 32), torch.rand(b, 2, 2) * 32, torch.randint(-1, 2, (b, 2)), True))
class SAM(nn.Module):
    """Prompts as points with labels, masks of several tokens by small networks, the best by its own score."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 32, 8, 8), nn.GELU(), nn.Conv2d(32, 16, 1))
        self.register_buffer("gaussian", torch.randn((2, 8)))
        self.point_embeddings, self.not_a_point, self.no_mask = nn.ModuleList([nn.Embedding(1, 16) for _ in range(4)]), nn.Embedding(1, 16), nn.Embedding(1, 16)
        self.iou_token, self.mask_tokens = nn.Embedding(1, 16), nn.Embedding(4, 16)
        self.self_attn, self.to_image, self.to_token = (nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2)]) for _ in range(3))
        self.norms = nn.ModuleList([nn.LayerNorm(16) for _ in range(6)])
        self.upscaling = nn.Sequential(nn.ConvTranspose2d(16, 8, 2, 2), nn.GELU(), nn.ConvTranspose2d(8, 4, 2, 2), nn.GELU())
        self.hypernets, self.iou_head = nn.ModuleList([MLPMask(16, 16, 4) for _ in range(4)]), MLPMask(16, 16, 4)

    def pe(self, coords: Tensor) -> Tensor:
        coords = 2 * coords - 1
        coords = 2 * torch.pi * (coords @ self.gaussian)
        return torch.cat([torch.sin(coords), torch.cos(coords)], dim=-1)

    def embed_points(self, points: Tensor, labels: Tensor) -> Tensor:
        points = points + 0.5
        points = torch.cat([points, torch.zeros((points.shape[0], 1, 2), dtype=points.dtype)], dim=1)
        labels = torch.cat([labels, -torch.ones((labels.shape[0], 1), dtype=labels.dtype)], dim=1)
        coords = points.clone()
        coords[:, :, 0] = coords[:, :, 0] / 32
        coords[:, :, 1] = coords[:, :, 1] / 32
        embedding = self.pe(coords)
        embedding[labels == -1] = 0.0
        embedding[labels == -1] += self.not_a_point.weight
        embedding[labels == 0] += self.point_embeddings[0].weight
        embedding[labels == 1] += self.point_embeddings[1].weight
        return embedding

    def forward(self, images: Tensor, points: Tensor, labels: Tensor, multimask_output: bool) -> tuple[Tensor, Tensor]:
        sparse = self.embed_points(points, labels)
        src = self.encoder(images)
        b, c, h, w = src.shape
        grid = torch.ones((h, w), dtype=src.dtype)
        y_embed, x_embed = (grid.cumsum(dim=0) - 0.5) / h, (grid.cumsum(dim=1) - 0.5) / w
        image_pe = self.pe(torch.stack([x_embed, y_embed], dim=-1)).permute(2, 0, 1).unsqueeze(0).flatten(2).permute(0, 2, 1)
        keys = (src + self.no_mask.weight.reshape(1, -1, 1, 1)).flatten(2).permute(0, 2, 1)
        output_tokens = torch.cat([self.iou_token.weight, self.mask_tokens.weight], dim=0)
        tokens = torch.cat((output_tokens.unsqueeze(0).expand(sparse.size(0), -1, -1), sparse), dim=1)
        queries = tokens
        for i in range(2):
            q = queries + tokens if i else queries
            queries = self.norms[3 * i](queries + self.self_attn[i](q, q, queries)[0])
            queries = self.norms[3 * i + 1](queries + self.to_image[i](queries + tokens, keys + image_pe, keys)[0])
            keys = self.norms[3 * i + 2](keys + self.to_token[i](keys + image_pe, queries + tokens, queries)[0])
        upscaled = self.upscaling(keys.transpose(1, 2).view(b, c, h, w))
        hyper_in = torch.stack([self.hypernets[i](queries[:, 1 + i, :]) for i in range(4)], dim=1)
        b, c, h, w = upscaled.shape
        masks, iou = (hyper_in @ upscaled.view(b, c, h * w)).view(b, -1, h, w), self.iou_head(queries[:, 0, :])
        mask_slice = slice(1, None) if multimask_output else slice(0, 1)
        return masks[:, mask_slice, :, :], iou[:, mask_slice]


def hungarian(cost: Tensor) -> tuple[Tensor, Tensor]:
    """The cheapest pairs, greedily, in Python."""
    cost, pairs = cost.detach().clone(), []
    for _ in range(min(cost.shape)):
        i, j = divmod(int(cost.argmin()), cost.shape[1])
        pairs.append((i, j))
        cost[i, :] = cost[:, j] = float("inf")
    return torch.tensor([i for i, _ in pairs]), torch.tensor([j for _, j in pairs])


class SetCriterion(nn.Module):
    """DETR's, over targets of two boxes a picture."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.ones(4)
        weight[-1] = 0.1
        self.register_buffer("empty_weight", weight)
        self.weight_dict = {"loss_ce": 1, "loss_bbox": 5}

    def forward(self, outputs: dict[str, Tensor], classes: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            prob = outputs["pred_logits"].softmax(-1)
            cost = torch.cdist(outputs["pred_boxes"], boxes, p=1) - torch.stack([p[:, c] for p, c in zip(prob, classes, strict=True)])
            indices = [hungarian(c) for c in cost]
        batch = torch.cat([torch.full_like(src, i) for i, (src, _) in enumerate(indices)])
        src = torch.cat([src for (src, _) in indices])
        target_o = torch.cat([t[J] for t, (_, J) in zip(classes, indices, strict=True)])
        target_classes = torch.full(outputs["pred_logits"].shape[:2], 3, dtype=torch.int64)
        target_classes[(batch, src)] = target_o
        ce = F.cross_entropy(outputs["pred_logits"].transpose(1, 2), target_classes, self.empty_weight)
        target_boxes = torch.cat([t[i] for t, (_, i) in zip(boxes, indices, strict=True)], dim=0)
        bbox = F.l1_loss(outputs["pred_boxes"][(batch, src)], target_boxes, reduction="none").sum() / boxes.shape[0] / boxes.shape[1]
        return {"loss_ce": ce, "loss_bbox": bbox}


@listed(lambda b, n: (torch.rand(b, 3, 32, 32), torch.randint(3, (b, 2)), torch.rand(b, 2, 4)))
class DETR(nn.Module):
    """The demo of DETR, with a loss at each of the decoder's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.conv = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU()), nn.Conv2d(16, 32, 2, 2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), 1, enable_nested_tensor=False)
        self.layers = nn.ModuleList([nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2)])
        self.linear_class, self.linear_bbox, self.criterion = nn.Linear(32, 4), nn.Linear(32, 4), SetCriterion()
        self.query_pos, self.row_embed, self.col_embed = nn.Parameter(torch.rand(5, 32)), nn.Parameter(torch.rand(50, 16)), nn.Parameter(torch.rand(50, 16))

    def forward(self, x: Tensor, classes: Tensor, boxes: Tensor) -> Any:
        h = self.conv(self.backbone(x))
        H, W = h.shape[-2:]
        pos = torch.cat([self.col_embed[:W].unsqueeze(0).repeat(H, 1, 1), self.row_embed[:H].unsqueeze(1).repeat(1, W, 1)], dim=-1).flatten(0, 1).unsqueeze(0)
        memory = self.encoder(pos + 0.1 * h.flatten(2).transpose(1, 2))
        out, losses = self.query_pos.unsqueeze(0).repeat(h.shape[0], 1, 1), {}
        for i, layer in enumerate(self.layers):
            out = layer(out, memory)
            outputs = {"pred_logits": self.linear_class(out), "pred_boxes": self.linear_bbox(out).sigmoid()}
            losses.update({f"{k}_{i}": v * self.criterion.weight_dict[k] for k, v in self.criterion(outputs, classes, boxes).items()})
        return sum(losses.values()), outputs


def square_distance(src: Tensor, dst: Tensor) -> Tensor:
    """Of each point to each."""
    B, N, _ = src.shape
    _, M, _ = dst.shape
    dist = -2 * torch.matmul(src, dst.permute(0, 2, 1))
    dist += torch.sum(src**2, -1).view(B, N, 1)
    dist += torch.sum(dst**2, -1).view(B, 1, M)
    return dist


def index_points(points: Tensor, idx: Tensor) -> Tensor:
    """The points with these numbers, row by row."""
    B = points.shape[0]
    view_shape = list(idx.shape)
    view_shape[1:] = [1] * (len(view_shape) - 1)
    repeat_shape = list(idx.shape)
    repeat_shape[0] = 1
    batch_indices = torch.arange(B, dtype=torch.long).to(points.device).view(view_shape).repeat(repeat_shape)
    return points[batch_indices, idx, :]


def farthest_point_sample(xyz: Tensor, npoint: int) -> Tensor:
    """Points far from one another; the first is that with number zero."""
    B, N, _ = xyz.shape
    centroids = torch.zeros(B, npoint, dtype=torch.long).to(xyz.device)
    distance = torch.ones(B, N).to(xyz) * 1e10
    farthest = torch.zeros(B, dtype=torch.long)
    batch_indices = torch.arange(B, dtype=torch.long)
    for i in range(npoint):
        centroids[:, i] = farthest
        centroid = xyz[batch_indices, farthest, :].view(B, 1, 3)
        dist = torch.sum((xyz - centroid) ** 2, -1)
        mask = dist < distance
        distance[mask] = dist[mask]
        farthest = torch.max(distance, -1)[1]
    return centroids


def query_ball_point(radius: float, nsample: int, xyz: Tensor, new_xyz: Tensor) -> Tensor:
    """The first points within a radius, the first again where they are too few."""
    B, N, _ = xyz.shape
    _, S, _ = new_xyz.shape
    group_idx = torch.arange(N, dtype=torch.long).to(xyz.device).view(1, 1, N).repeat([B, S, 1])
    group_idx[square_distance(new_xyz, xyz) > radius**2] = N
    group_idx = group_idx.sort(dim=-1)[0][:, :, :nsample]
    group_first = group_idx[:, :, 0].view(B, S, 1).repeat([1, 1, nsample])
    mask = group_idx == N
    group_idx[mask] = group_first[mask]
    return group_idx


@listed(lambda b, n: (torch.randn(b, 3, n),))
class PointNet2(nn.Module):
    """Two levels of sampled points with what is around each, and features carried back by three neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.sa1, self.sa2 = nn.ModuleList([nn.Conv2d(6, 16, 1), nn.BatchNorm2d(16)]), nn.ModuleList([nn.Conv2d(19, 32, 1), nn.BatchNorm2d(32)])
        self.fp, self.head = nn.Conv1d(48, 16, 1), nn.Conv1d(16, 4, 1)

    def abstraction(self, layers: Any, xyz: Tensor, points: Tensor, npoint: int) -> tuple[Tensor, Tensor]:
        B, _, C = xyz.shape
        new_xyz = index_points(xyz, farthest_point_sample(xyz, npoint))
        idx = query_ball_point(2.0, 4, xyz, new_xyz)
        grouped = index_points(xyz, idx) - new_xyz.view(B, npoint, 1, C)
        new_points = torch.cat([grouped, index_points(points, idx)], dim=-1).permute(0, 3, 2, 1)
        new_points = F.relu(layers[1](layers[0](new_points)))
        return new_xyz, torch.max(new_points, 2)[0].transpose(1, 2)

    def forward(self, xyz: Tensor) -> Tensor:
        xyz = xyz.permute(0, 2, 1)
        l1_xyz, l1 = self.abstraction(self.sa1, xyz, xyz, 8)
        l2_xyz, l2 = self.abstraction(self.sa2, l1_xyz, l1, 4)
        dists, idx = square_distance(l1_xyz, l2_xyz).sort(dim=-1)
        dists, idx = dists[:, :, :3], idx[:, :, :3]
        dist_recip = 1.0 / (dists + 1e-8)
        weight = dist_recip / torch.sum(dist_recip, dim=2, keepdim=True)
        back = torch.sum(index_points(l2, idx) * weight.view(*weight.shape, 1), dim=2)
        return self.head(F.relu(self.fp(torch.cat([l1, back], -1).transpose(1, 2)))).log_softmax(1)


class HashEmbedder(nn.Module):
    """instant-ngp's, in plain torch, as HashNeRF-pytorch has it."""

    def __init__(self, n_levels: int = 4, log2_size: int = 8, base: int = 4, finest: int = 32) -> None:
        super().__init__()
        self.n_levels, self.log2_size, self.base = n_levels, log2_size, torch.tensor(base)
        self.b = torch.exp((torch.log(torch.tensor(finest)) - torch.log(self.base)) / (n_levels - 1))
        self.embeddings = nn.ModuleList([nn.Embedding(2**log2_size, 2) for _ in range(n_levels)])
        self.offsets = torch.tensor([[[i, j, k] for i in [0, 1] for j in [0, 1] for k in [0, 1]]])

    def hash(self, coords: Tensor) -> Tensor:
        primes = [1, 2654435761, 805459861, 3674653429]
        xor_result = torch.zeros_like(coords)[..., 0]
        for i in range(coords.shape[-1]):
            xor_result ^= coords[..., i] * primes[i]
        return torch.tensor((1 << self.log2_size) - 1).to(xor_result.device) & xor_result

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        embedded, keep_mask = [], (x == torch.clamp(x, 0.0, 1.0))
        if not (x == torch.clamp(x, 0.0, 1.0)).all():
            x = torch.clamp(x, 0.0, 1.0)
        for i in range(self.n_levels):
            resolution = torch.floor(self.base * self.b**i)
            grid = 1.0 / resolution
            bottom = torch.floor(x / grid).int()
            voxel = bottom * grid
            indices = self.hash(bottom.unsqueeze(1) + self.offsets)
            corners = self.embeddings[i](indices.long())
            w = (x - voxel) / grid
            c = corners.view(-1, 2, 2, 2, 2)
            for axis in range(3):
                c = c[:, 0] * (1 - w[:, axis]).view(-1, *[1] * (c.dim() - 2)) + c[:, 1] * w[:, axis].view(-1, *[1] * (c.dim() - 2))
            embedded.append(c)
        return torch.cat(embedded, dim=-1), keep_mask.sum(dim=-1) == keep_mask.shape[-1]


@listed(lambda b, n: (torch.rand(b, 3) * 1.2 - 0.1, torch.randn(b, 3), torch.rand(b, 3)))
class HashNeRF(nn.Module):
    """Density and colour along rays, whose weights are composed, with a loss of entropy."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder, self.sigma, self.color = HashEmbedder(), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, rays_o: Tensor, rays_d: Tensor, target: Tensor) -> Tensor:
        viewdirs = rays_d / torch.norm(rays_d, dim=-1, keepdim=True)
        z = torch.linspace(0.0, 1.0, steps=6).expand([rays_o.shape[0], 6])
        pts = rays_o[..., None, :] + rays_d[..., None, :] * z[..., :, None]
        embedded, keep_mask = self.embedder(torch.reshape(pts, [-1, pts.shape[-1]]))
        h = self.sigma(embedded)
        dirs = torch.reshape(viewdirs[:, None].expand(pts.shape), [-1, 3])
        raw = torch.cat([self.color(torch.cat([h[..., 1:], dirs], -1)), h[..., :1]], -1)
        raw[~keep_mask, -1] = 0
        raw = torch.reshape(raw, [*pts.shape[:-1], 4])
        dists = z[..., 1:] - z[..., :-1]
        dists = torch.cat([dists, torch.Tensor([1e10]).to(dists).expand(dists[..., :1].shape)], -1) * torch.norm(rays_d[..., None, :], dim=-1)
        alpha = 1.0 - torch.exp(-F.relu(raw[..., 3]) * dists)
        weights = alpha * torch.cumprod(torch.cat([torch.ones((alpha.shape[0], 1)).to(alpha), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        rgb = torch.sum(weights[..., None] * torch.sigmoid(raw[..., :3]), -2)
        p = torch.cat([weights, 1.0 - weights.sum(-1, keepdim=True) + 1e-6], dim=-1)
        entropy = -(p * torch.log(p.clamp(min=1e-6))).sum(-1)
        return F.mse_loss(rgb, target) + 1e-3 * entropy.mean()


@listed(fixed_image(1, 16))
class EBM(nn.Module):
    """Samples drawn by Langevin steps inside the forward, from noise that is a function of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.SiLU(), nn.Flatten(), nn.Linear(256, 1))

    def langevin(self, x: Tensor, steps: int = 4, step_size: float = 0.1) -> Tensor:
        is_training = self.training
        self.energy.eval()
        for p in self.energy.parameters():
            p.requires_grad = False
        had_gradients_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(True)
        x = x.clone().requires_grad_(True)
        for _ in range(steps):
            grad = torch.autograd.grad(self.energy(x).sum(), x)[0]
            x = (x.detach() - step_size * grad.clamp(-0.03, 0.03)).clamp(min=-1.0, max=1.0).requires_grad_(True)
        for p in self.energy.parameters():
            p.requires_grad = True
        self.energy.train(is_training)
        torch.set_grad_enabled(had_gradients_enabled)
        return x.detach()

    def forward(self, x: Tensor) -> Tensor:
        fake = self.langevin(x.flip(0).tanh())
        real_out, fake_out = self.energy(torch.cat([x, fake], dim=0)).chunk(2, dim=0)
        return 0.1 * (real_out**2 + fake_out**2).mean() + fake_out.mean() - real_out.mean()


class ODEFunc(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net, self.nfe = nn.Sequential(nn.Linear(dim + 1, 16), nn.Tanh(), nn.Linear(16, dim)), 0

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        self.nfe += 1
        return self.net(torch.cat([y, t.expand(y.shape[0], 1)], -1))


@listed(lambda b, n: (torch.randn(b, 8),))
class HandODE(nn.Module):
    """A network integrated by Runge-Kutta steps that are written out, and counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.func, self.head = nn.Linear(8, 6), ODEFunc(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        y, ts = self.down(x), torch.linspace(0.0, 1.0, 4)
        for t0, t1 in itertools.pairwise(ts):
            dt = t1 - t0
            k1 = self.func(t0, y)
            k2 = self.func(t0 + dt / 2, y + dt * k1 / 2)
            k3 = self.func(t0 + dt / 2, y + dt * k2 / 2)
            k4 = self.func(t1, y + dt * k3)
            y = y + dt * (k1 + 2 * k2 + 2 * k3 + k4) / 6
        return self.head(y)


class DiscriminatorP(nn.Module):
    def __init__(self, period: int) -> None:
        super().__init__()
        self.period = period
        self.convs = nn.ModuleList([weight_norm(nn.Conv2d(a, b, (5, 1), (3, 1), padding=(2, 0))) for a, b in ((1, 8), (8, 16))])
        self.conv_post = weight_norm(nn.Conv2d(16, 1, (3, 1), 1, padding=(1, 0)))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        fmap = []
        b, c, t = x.shape
        if t % self.period != 0:
            n_pad = self.period - (t % self.period)
            x = F.pad(x, (0, n_pad), "reflect")
            t = t + n_pad
        x = x.view(b, c, t // self.period, self.period)
        for layer in self.convs:
            x = F.leaky_relu(layer(x), 0.1)
            fmap.append(x)
        x = self.conv_post(x)
        fmap.append(x)
        return torch.flatten(x, 1, -1), fmap


@listed(lambda b, n: (torch.randn(b, 4, n // 2), torch.randn(b, 1, 4 * n)))
class HiFiGAN(nn.Module):
    """A generator with branches that are averaged, discriminators of periods, losses over lists of maps."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_pre, self.num_kernels = weight_norm(nn.Conv1d(4, 16, 7, 1, padding=3)), 2
        self.ups = nn.ModuleList([weight_norm(nn.ConvTranspose1d(16, 8, 8, 4, padding=2)), weight_norm(nn.ConvTranspose1d(8, 4, 4, 2, padding=1))])
        self.resblocks = nn.ModuleList([weight_norm(nn.Conv1d(ch, ch, k, padding=k // 2)) for ch in (8, 4) for k in (3, 7)])
        self.conv_post, self.discriminators = weight_norm(nn.Conv1d(4, 1, 7, 1, padding=3)), nn.ModuleList([DiscriminatorP(2), DiscriminatorP(3)])

    def forward(self, mel: Tensor, y: Tensor) -> Any:
        x = self.conv_pre(mel)
        for i, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, 0.1))
            xs = None
            for j in range(self.num_kernels):
                if xs is None:
                    xs = self.resblocks[i * self.num_kernels + j](x)
                else:
                    xs += self.resblocks[i * self.num_kernels + j](x)
            x = xs / self.num_kernels
        y_g = torch.tanh(self.conv_post(F.leaky_relu(x)))
        loss_fm, loss_gen, y_d_gs, fmap_rs, fmap_gs = 0, 0, [], [], []
        for d in self.discriminators:
            _, fmap_r = d(y)
            y_d_g, fmap_g = d(y_g)
            fmap_rs.append(fmap_r)
            y_d_gs.append(y_d_g)
            fmap_gs.append(fmap_g)
        for dr, dg in zip(fmap_rs, fmap_gs, strict=True):
            for rl, gl in zip(dr, dg, strict=True):
                loss_fm += torch.mean(torch.abs(rl - gl))
        for dg in y_d_gs:
            loss_gen += torch.mean((1 - dg) ** 2)
        return loss_gen + 2 * loss_fm + 45 * F.l1_loss(y_g, y), y_g


class ConformerConv(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.point1, self.depth, self.bn, self.point2 = nn.LayerNorm(dim), nn.Conv1d(dim, 2 * dim, 1), nn.Conv1d(dim, dim, 7, padding=3, groups=dim), nn.BatchNorm1d(dim), nn.Conv1d(dim, dim, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(x).transpose(1, 2).masked_fill(mask.unsqueeze(1), 0.0)
        x = self.depth(F.glu(self.point1(x), dim=1))
        return self.point2(F.silu(self.bn(x))).masked_fill(mask.unsqueeze(1), 0.0).transpose(1, 2)


@listed(lambda b, n: (torch.randn(b, 2 * n, 16), 2 * n - 8 * torch.arange(b), torch.randint(1, 16, (b, 3)), torch.full((b,), 3)))
class Conformer(nn.Module):
    """Relative attention, convolutions under masks of lengths, CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.subsample, self.proj = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()), nn.Linear(32, 32)
        self.blocks = nn.ModuleList([nn.ModuleDict({"ff1": nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)), "norm": nn.LayerNorm(32), "qkv": nn.Linear(32, 96), "pos": nn.Linear(32, 32, bias=False), "out": nn.Linear(32, 32), "conv": ConformerConv(32), "ff2": nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)), "last": nn.LayerNorm(32)}) for _ in range(2)])
        self.pos_bias_u, self.pos_bias_v, self.head = nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(4, 8)), nn.Linear(32, 16)

    def relative(self, length: int, like: Tensor) -> Tensor:
        position = torch.arange(length - 1, -length, -1.0).unsqueeze(1)
        div = torch.exp(torch.arange(0, 32, 2).float() * -(math.log(10000.0) / 32))
        pe = torch.zeros(2 * length - 1, 32)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div), torch.cos(position * div)
        return pe.to(like)

    @staticmethod
    def rel_shift(x: Tensor) -> Tensor:
        b, h, t1, t2 = x.shape
        x_padded = torch.cat([torch.zeros((b, h, t1, 1), device=x.device, dtype=x.dtype), x], dim=-1)
        x = x_padded.view(b, h, t2 + 1, t1)[:, :, 1:].view_as(x)
        return x[:, :, :, : t2 // 2 + 1]

    def forward(self, feats: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> Tensor:
        x = self.subsample(feats.unsqueeze(1))
        b, c, t, f = x.shape
        x = self.proj(x.transpose(1, 2).contiguous().view(b, t, c * f))
        lengths = (((lengths - 1) // 2 + 1) - 1) // 2 + 1
        mask = torch.arange(t)[None, :] >= lengths[:, None]
        pos = self.relative(t, x)
        for m in self.blocks:
            x = x + 0.5 * m["ff1"](x)
            q, k, v = m["qkv"](m["norm"](x)).view(b, t, 3, 4, 8).unbind(2)
            p = m["pos"](pos).view(1, -1, 4, 8).transpose(1, 2)
            ac = torch.matmul((q + self.pos_bias_u).transpose(1, 2), k.permute(0, 2, 3, 1))
            bd = self.rel_shift(torch.matmul((q + self.pos_bias_v).transpose(1, 2), p.transpose(-2, -1)))
            scores = ((ac + bd) / math.sqrt(8)).masked_fill(mask[:, None, None, :], torch.finfo(x.dtype).min)
            x = x + m["out"](torch.matmul(torch.softmax(scores, -1), v.transpose(1, 2)).transpose(1, 2).reshape(b, t, 32))
            x = x + m["conv"](x, mask)
            x = m["last"](x + 0.5 * m["ff2"](x))
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, targets, lengths, target_lengths, blank=0, zero_infinity=True)


@listed(lambda b, n: (ids(b, 8), torch.randint(1, 4, (b, 8)), torch.randn(b, 24, 8)))
class FastSpeech2(nn.Module):
    """Tokens repeated as long as they last, padded to the longest."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.decoder = nn.Embedding(64, 32), nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.duration, self.mel = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1)), nn.Linear(32, 8)

    def regulate(self, x: Tensor, duration: Tensor, max_len: int | None = None) -> tuple[Tensor, Tensor]:
        output, mel_len = [], []
        for batch, expand_target in zip(x, duration, strict=True):
            out = []
            for i, vec in enumerate(batch):
                expand_size = expand_target[i].item()
                out.append(vec.expand(max(int(expand_size), 0), -1))
            expanded = torch.cat(out, 0)
            output.append(expanded)
            mel_len.append(expanded.shape[0])
        length = max_len or max(mel_len)
        padded = torch.stack([F.pad(o, (0, 0, 0, length - o.size(0))) for o in output])
        return padded, torch.LongTensor(mel_len)

    def forward(self, tokens: Tensor, durations: Tensor, mel: Tensor) -> Tensor:
        x = self.encoder(self.embed(tokens))
        log_d = self.duration(x).squeeze(-1)
        x, mel_len = self.regulate(x, durations, mel.shape[1])
        mask = torch.arange(x.size(1))[None, :] >= mel_len[:, None]
        out = self.mel(self.decoder(x, src_key_padding_mask=mask))
        mel_loss = F.l1_loss(out.masked_select(~mask.unsqueeze(-1)), mel.masked_select(~mask.unsqueeze(-1)))
        return mel_loss + F.mse_loss(log_d, torch.log(durations.float() + 1).to(log_d))


class WN(nn.Module):
    """VITS's WaveNet."""

    def __init__(self, width: int, n: int) -> None:
        super().__init__()
        self.in_layers, self.res_skip, self.n_layers, self.width = nn.ModuleList([nn.Conv1d(width, 2 * width, 3, padding=1) for _ in range(n)]), nn.ModuleList([nn.Conv1d(width, 2 * width if i < n - 1 else width, 1) for i in range(n)]), n, width

    def forward(self, x: Tensor, x_mask: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        for i in range(self.n_layers):
            x_in = self.in_layers[i](x)
            acts = torch.tanh(x_in[:, : self.width]) * torch.sigmoid(x_in[:, self.width :])
            res_skip = self.res_skip[i](acts)
            if i < self.n_layers - 1:
                x = (x + res_skip[:, : self.width, :]) * x_mask
                output = output + res_skip[:, self.width :, :]
            else:
                output = output + res_skip
        return output * x_mask


def maximum_path(value: Tensor, mask: Tensor) -> Tensor:
    """The best monotonic alignment, in numpy, as Glow-TTS's first version has it."""
    import numpy as np

    device, dtype = value.device, value.dtype
    v, m = (value * mask).cpu().detach().numpy(), mask.cpu().detach().numpy().astype(bool)
    path = np.zeros(v.shape, dtype=np.int32)
    for b in range(v.shape[0]):
        t_x, t_y = int(m[b, :, 0].sum()), int(m[b, 0, :].sum())
        q = np.full((t_x, t_y), -1e9)
        for j in range(t_y):
            for i in range(min(t_x, j + 1)):
                stay, move = (q[i, j - 1] if j else -1e9), (q[i - 1, j - 1] if i and j else (0.0 if i == 0 and j == 0 else -1e9))
                q[i, j] = v[b, i, j] + max(stay, move)
        i = t_x - 1
        for j in range(t_y - 1, -1, -1):
            path[b, i, j] = 1
            if i and (i == j or q[i, j - 1] < q[i - 1, j - 1]):
                i -= 1
    return torch.from_numpy(path).to(device=device, dtype=dtype)


@listed(lambda b, n: (ids(b, 6), 6 - torch.arange(b) % 2, torch.randn(b, 8, 16), 16 - 2 * (torch.arange(b) % 2), torch.randn(b, 8, 16)))
class VITS(nn.Module):
    """A prior of text and a posterior of sound, joined by a flow and an alignment that is searched for."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.enc_p, self.proj = nn.Embedding(64, 8), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.Conv1d(8, 16, 1)
        self.pre, self.enc_q, self.proj_q = nn.Conv1d(8, 8, 1), WN(8, 2), nn.Conv1d(8, 16, 1)
        self.flows = nn.ModuleList([nn.ModuleDict({"pre": nn.Conv1d(4, 8, 1), "enc": WN(8, 2), "post": nn.Conv1d(8, 4, 1)}) for _ in range(2)])
        self.dp, self.dec = nn.Conv1d(8, 1, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1)

    @staticmethod
    def sequence_mask(length: Tensor, max_length: int | None = None) -> Tensor:
        if max_length is None:
            max_length = int(length.max())
        x = torch.arange(max_length, dtype=length.dtype, device=length.device)
        return x.unsqueeze(0) < length.unsqueeze(1)

    def forward(self, x: Tensor, x_lengths: Tensor, y: Tensor, y_lengths: Tensor, noise: Tensor) -> Tensor:
        x_mask = self.sequence_mask(x_lengths, x.size(1)).unsqueeze(1).to(y.dtype)
        y_mask = self.sequence_mask(y_lengths, y.size(2)).unsqueeze(1).to(y.dtype)
        h = self.enc_p(self.emb(x) * math.sqrt(8)).transpose(1, 2) * x_mask
        m_p, logs_p = torch.split(self.proj(h) * x_mask, 8, dim=1)
        m_q, logs_q = torch.split(self.proj_q(self.enc_q(self.pre(y) * y_mask, y_mask)) * y_mask, 8, dim=1)
        z = (m_q + noise * torch.exp(logs_q)) * y_mask
        z_p = z
        for flow in self.flows:
            x0, x1 = torch.split(z_p, [4, 4], 1)
            x1 = (flow["post"](flow["enc"](flow["pre"](x0) * y_mask, y_mask)) + x1) * y_mask
            z_p = torch.flip(torch.cat([x0, x1], 1), [1])
        with torch.no_grad():
            s_p_sq_r = torch.exp(-2 * logs_p)
            neg_cent = torch.sum(-0.5 * math.log(2 * math.pi) - logs_p, [1], keepdim=True)
            neg_cent = neg_cent + torch.matmul(-0.5 * (z_p**2).transpose(1, 2), s_p_sq_r) + torch.matmul(z_p.transpose(1, 2), (m_p * s_p_sq_r)) + torch.sum(-0.5 * (m_p**2) * s_p_sq_r, [1], keepdim=True).expand(-1, 1, -1)[:, :, : s_p_sq_r.size(2)].mean(2, keepdim=True).transpose(1, 2)
            attn_mask = torch.unsqueeze(x_mask, 2) * torch.unsqueeze(y_mask, -1)
            attn = maximum_path(neg_cent.transpose(1, 2), attn_mask.squeeze(1).transpose(1, 2)).transpose(1, 2)
        w = attn.sum(1)
        logw_ = torch.log(w + 1e-6) * x_mask[:, 0]
        l_length = torch.sum((self.dp(h.detach()).squeeze(1) * x_mask[:, 0] - logw_) ** 2) / torch.sum(x_mask)
        m_p, logs_p = torch.matmul(attn, m_p.transpose(1, 2)).transpose(1, 2), torch.matmul(attn, logs_p.transpose(1, 2)).transpose(1, 2)
        kl = logs_p - logs_q - 0.5 + 0.5 * ((z_p - m_p) ** 2) * torch.exp(-2.0 * logs_p)
        return torch.sum(kl * y_mask) / torch.sum(y_mask) + l_length + F.l1_loss(self.dec(z) * y_mask, y)


class InvariantPointAttention(nn.Module):
    """AlphaFold's, over frames of rotations and shifts."""

    def __init__(self, dim: int = 16, pair: int = 8, heads: int = 2, points: int = 4) -> None:
        super().__init__()
        self.heads, self.points = heads, points
        self.linear_qkv, self.linear_points, self.linear_b = nn.Linear(dim, 3 * dim), nn.Linear(dim, 9 * heads * points), nn.Linear(pair, heads)
        self.head_weights, self.out = nn.Parameter(torch.zeros(heads)), nn.Linear(dim + heads * points * 4 + heads * pair, dim)

    def forward(self, s: Tensor, z: Tensor, rot: Tensor, trans: Tensor) -> Tensor:
        b, n, c = s.shape
        q, k, v = self.linear_qkv(s).view(b, n, 3, self.heads, -1).unbind(2)
        pts = self.linear_points(s).view(b, n, 3, self.heads * self.points, 3)
        pts = torch.einsum("bnij,bnpkj->bnpki", rot, pts) + trans[:, :, None, None]
        q_pts, k_pts, v_pts = (p.view(b, n, self.heads, self.points, 3) for p in pts.unbind(2))
        a = torch.einsum("bihc,bjhc->bhij", q, k) * math.sqrt(1.0 / (3 * c / self.heads))
        a += math.sqrt(1.0 / 3) * self.linear_b(z).permute(0, 3, 1, 2)
        pt_att = (q_pts.unsqueeze(2) - k_pts.unsqueeze(1)).pow(2).sum(-1)
        head_weights = F.softplus(self.head_weights).view(1, 1, 1, -1, 1) * math.sqrt(1.0 / (3 * (self.points * 9.0 / 2)))
        a = torch.softmax(a + torch.sum(pt_att * head_weights, dim=-1).mul(-0.5).permute(0, 3, 1, 2), -1)
        o = torch.einsum("bhij,bjhc->bihc", a, v).flatten(2)
        o_pt = torch.einsum("bhij,bjhpx->bihpx", a, v_pts)
        o_pt = torch.einsum("bnji,bnhpj->bnhpi", rot, o_pt - trans[:, :, None, None])
        o_norm = torch.sqrt(torch.sum(o_pt**2, dim=-1) + 1e-8).flatten(2)
        o_pair = torch.einsum("bhij,bijc->bihc", a, z).flatten(2)
        return self.out(torch.cat((o, *torch.unbind(o_pt.flatten(2, 3), dim=-1), o_norm, o_pair), dim=-1))


@listed(lambda b, n: (torch.randint(20, (b, 3, 6)), torch.randint(20, (b, 6)), torch.randn(b, 6, 3)))
class AlphaFold(nn.Module):
    """Alignments and pairs that talk to each other, recycled once without gradients, then frames and FAPE."""

    def __init__(self) -> None:
        super().__init__()
        self.msa, self.left, self.right, self.relpos = nn.Embedding(20, 16), nn.Embedding(20, 8), nn.Embedding(20, 8), nn.Embedding(9, 8)
        self.row, self.bias, self.opm, self.opm_out = nn.Linear(16, 48), nn.Linear(8, 2), nn.Linear(16, 8), nn.Linear(16, 8)
        self.tri_a, self.tri_b, self.tri_g, self.tri_out = (nn.Linear(8, 8) for _ in range(4))
        self.transition, self.recycle, self.ipa, self.update = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)), nn.LayerNorm(8), InvariantPointAttention(), nn.Linear(16, 6)

    def evoformer(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.row(m).view(*m.shape[:-1], 3, 2, 8).unbind(-3)
        a = torch.einsum("bsihc,bsjhc->bshij", q, k) / math.sqrt(8) + self.bias(z).permute(0, 3, 1, 2).unsqueeze(1)
        m = m + torch.einsum("bshij,bsjhc->bsihc", a.softmax(-1), v).flatten(-2)
        m = m + self.transition(m)
        one, two = self.opm(m).chunk(2, -1)
        outer = torch.einsum("bsic,bsjd->bijcd", one, two).flatten(-2) / m.shape[1]
        z = z + self.opm_out(outer)
        x = torch.einsum("bikc,bjkc->bijc", self.tri_a(z).sigmoid() * z, self.tri_b(z).sigmoid() * z)
        return m, z + self.tri_g(z).sigmoid() * self.tri_out(F.layer_norm(x, (8,)))

    def forward(self, msa: Tensor, aatype: Tensor, coords: Tensor) -> Tensor:
        b, n = aatype.shape
        offset = torch.arange(n)[None, :] - torch.arange(n)[:, None]
        pair = self.left(aatype)[:, :, None] + self.right(aatype)[:, None] + self.relpos(offset.clamp(-4, 4) + 4)
        prev = torch.zeros_like(pair)
        for cycle in range(2):
            is_final = cycle == 1
            with torch.set_grad_enabled(is_final and torch.is_grad_enabled()):
                m, z = self.evoformer(self.msa(msa), pair + self.recycle(prev))
                prev = z
        s = m[:, 0]
        rot, trans = torch.eye(3).to(s).expand(b, n, 3, 3), torch.zeros(b, n, 3).to(s)
        for i in range(2):
            s = s + self.ipa(s, z, rot, trans)
            vec = self.update(s)
            quat = torch.cat([torch.ones_like(vec[..., :1]), vec[..., :3]], -1)
            w, x, y, zz = (quat / quat.norm(dim=-1, keepdim=True)).unbind(-1)
            new = torch.stack([w**2 + x**2 - y**2 - zz**2, 2 * (x * y - w * zz), 2 * (x * zz + w * y), 2 * (x * y + w * zz), w**2 - x**2 + y**2 - zz**2, 2 * (y * zz - w * x), 2 * (x * zz - w * y), 2 * (y * zz + w * x), w**2 - x**2 - y**2 + zz**2], -1).view(b, n, 3, 3)
            trans = trans + torch.einsum("bnij,bnj->bni", rot, vec[..., 3:])
            rot = rot @ new
            if i < 1:
                rot = rot.detach()
        local = torch.einsum("bnji,bnmj->bnmi", rot, trans[:, None] - trans[:, :, None])
        true = coords[:, None] - coords[:, :, None]
        error = torch.sqrt(torch.sum((local - true) ** 2, dim=-1) + 1e-4)
        return torch.clamp(error, max=10.0).mean() / 10.0


@listed(lambda b, n: (torch.rand(b, 3, 32, 32), torch.rand(b, 3, 32, 32), torch.randn(b, 2, 8, 8)))
class RAFT(nn.Module):
    """Flow found step by step: lookups in pyramids of correlations, and a loss over all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.fnet, self.cnet = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.InstanceNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1)), nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1))
        self.motion, self.gru, self.flow_head, self.radius = nn.Conv2d(20, 14, 3, padding=1), nn.ModuleDict({n: nn.Conv2d(48, 16, 3, padding=1) for n in ("z", "r", "q")}), nn.Conv2d(16, 2, 3, padding=1), 1

    @staticmethod
    def coords_grid(batch: int, ht: int, wd: int, like: Tensor) -> Tensor:
        coords = torch.meshgrid(torch.arange(ht), torch.arange(wd), indexing="ij")
        return torch.stack(coords[::-1], dim=0).to(like)[None].repeat(batch, 1, 1, 1)

    def lookup(self, pyramid: list[Tensor], coords: Tensor) -> Tensor:
        r, out = self.radius, []
        coords = coords.permute(0, 2, 3, 1)
        batch, h1, w1, _ = coords.shape
        for i in range(len(pyramid)):
            corr = pyramid[i]
            dx = dy = torch.linspace(-r, r, 2 * r + 1, dtype=coords.dtype)
            delta = torch.stack(torch.meshgrid(dy, dx, indexing="ij"), axis=-1)
            lvl = coords.reshape(batch * h1 * w1, 1, 1, 2) / 2**i + delta.view(1, 2 * r + 1, 2 * r + 1, 2)
            H, W = corr.shape[-2:]
            xgrid, ygrid = lvl.split([1, 1], dim=-1)
            grid = torch.cat([2 * xgrid / (W - 1) - 1, 2 * ygrid / (H - 1) - 1], dim=-1)
            out.append(F.grid_sample(corr, grid, align_corners=True).view(batch, h1, w1, -1))
        return torch.cat(out, dim=-1).permute(0, 3, 1, 2).contiguous()

    def forward(self, image1: Tensor, image2: Tensor, flow_gt: Tensor, iters: int = 3) -> Any:
        fmap1, fmap2 = torch.chunk(self.fnet(torch.cat([image1, image2], 0)), 2, dim=0)
        batch, dim, ht, wd = fmap1.shape
        corr = torch.matmul(fmap1.view(batch, dim, ht * wd).transpose(1, 2), fmap2.view(batch, dim, ht * wd)) / torch.sqrt(torch.tensor(dim).float()).to(fmap1)
        corr = corr.reshape(batch * ht * wd, 1, ht, wd)
        pyramid = [corr]
        for _ in range(1):
            corr = F.avg_pool2d(corr, 2, stride=2)
            pyramid.append(corr)
        net, inp = torch.split(self.cnet(image1), [16, 16], dim=1)
        net, inp = torch.tanh(net), torch.relu(inp)
        coords0, coords1 = self.coords_grid(batch, ht, wd, image1), self.coords_grid(batch, ht, wd, image1)
        flow_loss, valid = 0.0, flow_gt.pow(2).sum(1, keepdim=True).sqrt() < 400
        for itr in range(iters):
            coords1 = coords1.detach()
            flow = coords1 - coords0
            motion = torch.cat([F.relu(self.motion(torch.cat([self.lookup(pyramid, coords1), flow], 1))), flow], 1)
            x = torch.cat([inp, motion], dim=1)
            hx = torch.cat([net, x], dim=1)
            z, r = torch.sigmoid(self.gru["z"](hx)), torch.sigmoid(self.gru["r"](hx))
            net = (1 - z) * net + z * torch.tanh(self.gru["q"](torch.cat([r * net, x], dim=1)))
            coords1 = coords1 + self.flow_head(net)
            flow_loss += 0.8 ** (iters - itr - 1) * (valid * (coords1 - coords0 - flow_gt).abs()).mean()
        return flow_loss, (coords1 - coords0).detach()


class WindowAttention(nn.Module):
    """Swin's, with its table of relative positions and masks made for a size of the input."""

    def __init__(self, dim: int, resolution: tuple[int, int], window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift, self.resolution = window, shift, resolution
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, 2))
        coords = torch.flatten(torch.stack(torch.meshgrid([torch.arange(window), torch.arange(window)], indexing="ij")), 1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous() + window - 1
        relative[:, :, 0] *= 2 * window - 1
        self.register_buffer("index", relative.sum(-1))
        self.norm, self.qkv, self.proj, self.drop = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), 0.2
        mask = None
        if shift > 0:
            H, W = resolution
            img_mask, cnt = torch.zeros((1, H, W, 1)), 0
            for h in (slice(0, -window), slice(-window, -shift), slice(-shift, None)):
                for w in (slice(0, -window), slice(-window, -shift), slice(-shift, None)):
                    img_mask[:, h, w, :] = cnt
                    cnt += 1
            mask_windows = self.partition(img_mask).view(-1, window * window)
            mask = mask_windows.unsqueeze(1) - mask_windows.unsqueeze(2)
            mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
        self.register_buffer("attn_mask", mask)

    def partition(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        x = x.view(B, H // self.window, self.window, W // self.window, self.window, C)
        return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, self.window, self.window, C)

    def forward(self, x: Tensor) -> Tensor:
        H, W = self.resolution
        B, L, C = x.shape
        assert L == H * W, "input feature has wrong size"
        shortcut, x = x, self.norm(x).view(B, H, W, C)
        if self.shift > 0:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        windows = self.partition(x).view(-1, self.window * self.window, C)
        B_, N, C = windows.shape
        q, k, v = self.qkv(windows).reshape(B_, N, 3, 2, C // 2).permute(2, 0, 3, 1, 4)
        attn = (q * (C // 2) ** -0.5) @ k.transpose(-2, -1)
        attn = attn + self.table[self.index.view(-1)].view(N, N, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if self.attn_mask is not None:
            nW = self.attn_mask.shape[0]
            attn = attn.view(B_ // nW, nW, 2, N, N) + self.attn_mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, 2, N, N)
        x = self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B_, N, C))
        B = int(x.shape[0] / (H * W / self.window / self.window))
        x = x.view(B, H // self.window, W // self.window, self.window, self.window, -1).permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)
        if self.shift > 0:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        return shortcut + drop_path(x.view(B, H * W, C), self.drop, self.training)


def drop_path(x: Tensor, drop_prob: float, training: bool) -> Tensor:
    """Stochastic depth, row by row."""
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = keep_prob + torch.rand(shape, dtype=x.dtype, device=x.device)
    random_tensor.floor_()
    return x.div(keep_prob) * random_tensor


@listed(fixed_image(3, 32))
class Swin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Conv2d(3, 16, 4, 4), nn.ModuleList([WindowAttention(16, (8, 8), 4, 0 if i % 2 == 0 else 2) for i in range(2)])
        self.reduction, self.norm, self.head = nn.Linear(64, 32, bias=False), nn.LayerNorm(64), nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        x = x.view(x.shape[0], 8, 8, 16)
        x = torch.cat([x[:, 0::2, 0::2, :], x[:, 1::2, 0::2, :], x[:, 0::2, 1::2, :], x[:, 1::2, 1::2, :]], -1)
        x = self.reduction(self.norm(x.view(x.shape[0], -1, 64)))
        return self.head(torch.flatten(nn.AdaptiveAvgPool1d(1)(x.transpose(1, 2)), 1))


@listed(lambda b, n: (torch.rand(3 * b, 3, 16, 16),))
class Triplet(nn.Module):
    """Anchors, positives and negatives one after another along the batch, the hardest of which count."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.PReLU(), nn.Conv2d(8, 16, 3, 2), nn.PReLU(), nn.Flatten(), nn.Linear(144, 16))

    def forward(self, x: Tensor) -> Tensor:
        a, p, n = F.normalize(self.net(x)).chunk(3)
        distance = torch.cdist(a, n)
        hardest = n[distance.argmin(1)]
        losses = F.relu((a - p).pow(2).sum(1) - (a - hardest).pow(2).sum(1) + 0.3)
        return losses.mean()


@listed(fixed_image(3, 32))
class MaskRCNN(nn.Module):
    """Proposals scored, decoded and cropped by sampling, then classes, boxes and masks of each."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.rpn_cls, self.rpn_box = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU()), nn.Conv2d(16, 2, 1), nn.Conv2d(16, 8, 1)
        self.box_head, self.cls_score, self.bbox_pred = nn.Sequential(nn.Flatten(), nn.Linear(256, 32), nn.ReLU()), nn.Linear(32, 4), nn.Linear(32, 16)
        self.mask_head = nn.Sequential(nn.Conv2d(16, 8, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(8, 4, 2, 2))

    def anchors(self, feature: Tensor) -> Tensor:
        h, w = feature.shape[-2:]
        ys, xs = torch.meshgrid((torch.arange(h) + 0.5) * 4, (torch.arange(w) + 0.5) * 4, indexing="ij")
        centers = torch.stack([xs, ys], -1).reshape(-1, 1, 2).expand(-1, 2, 2)
        sizes = torch.tensor([[8.0, 8.0], [16.0, 16.0]]).expand(h * w, 2, 2)
        return torch.cat([centers, sizes], -1).reshape(-1, 4).to(feature)

    @staticmethod
    def roi_align(feature: Tensor, boxes: Tensor, batch: Tensor, size: int) -> Tensor:
        step = (torch.arange(size, dtype=boxes.dtype) + 0.5) / size - 0.5
        xs, ys = boxes[:, 0, None] + boxes[:, 2, None] * step, boxes[:, 1, None] + boxes[:, 3, None] * step
        grid = torch.stack([(xs[:, None, :] / 16 - 1).expand(-1, size, -1), (ys[:, :, None] / 16 - 1).expand(-1, -1, size)], -1)
        return F.grid_sample(feature[batch], grid, align_corners=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        feature = self.backbone(x)
        scores, deltas = self.rpn_cls(feature).permute(0, 2, 3, 1).flatten(1), self.rpn_box(feature).permute(0, 2, 3, 1).reshape(x.shape[0], -1, 4)
        anchors = self.anchors(feature)
        proposals = torch.cat([anchors[:, :2] + deltas[..., :2] * anchors[:, 2:], anchors[:, 2:] * torch.exp(deltas[..., 2:].clamp(max=math.log(1000.0 / 16)))], -1)
        top = scores.topk(6, dim=1).indices
        boxes = torch.gather(proposals, 1, top[..., None].expand(-1, -1, 4)).detach().flatten(0, 1)
        batch = torch.arange(x.shape[0]).repeat_interleave(6)
        rois = self.roi_align(feature, boxes, batch, 4)
        h = self.box_head(rois)
        logits = self.cls_score(h)
        labels = logits[:, 1:].argmax(1)
        masks = self.mask_head(rois)[torch.arange(len(labels)), labels]
        return {"scores": scores, "logits": logits, "boxes": self.bbox_pred(h), "masks": masks.sigmoid()}
