"""Models of papers on pictures, sound, graphs, physics and learning to learn, whose forward makes the loss where a trainer's would.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from .by_hand import ids, listed
from .workshop import block, mlp

__all__: list[str] = []


def pictures(side: int = 16) -> Any:
    return lambda b, n: (torch.randn(b, 3, side, side), torch.randint(4, (b,)))


class ConvBlock(nn.Sequential):
    def __init__(self, i: int, o: int, stride: int = 1) -> None:
        super().__init__(nn.Conv2d(i, o, 3, stride, 1), nn.GroupNorm(4, o), nn.SiLU(inplace=True))


# views and targets
@listed(pictures())
class SimSiam(nn.Module):
    """Two views by crops in the forward, predictors, stopped gradients, the spread of outputs logged."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(ConvBlock(3, 16, 2), ConvBlock(16, 32, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.proj, self.pred = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 16)), mlp(16, 8, 16)

    def forward(self, x: Tensor, label: Tensor) -> dict[str, Tensor]:
        views = [x[..., :12, :12], x[..., 4:, 4:].flip(-1)]
        z = [self.proj(self.body(v)) for v in views]
        p = [self.pred(each) for each in z]
        loss = -0.5 * sum(F.cosine_similarity(a, b.detach(), dim=-1).mean() for a, b in zip(p, reversed(z), strict=True))
        spread = F.normalize(z[0].detach(), dim=1).std(0).mean()
        return {"loss": loss, "spread": spread}


@listed(pictures())
class SupCon(nn.Module):
    """Supervised contrast over all views of the batch, masked by labels, with the temperature learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(ConvBlock(3, 16, 2), ConvBlock(16, 32, 2), nn.Flatten(), nn.Linear(512, 32)), mlp(32, 32, 16)
        self.log_t = nn.Parameter(torch.tensor(math.log(0.1)))

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        f = torch.stack([F.normalize(self.head(self.body(v)), dim=1) for v in (x, x.flip(-1))], 1)
        contrast = torch.cat(torch.unbind(f, dim=1), dim=0)
        logits = contrast @ contrast.T / self.log_t.exp()
        logits = logits - logits.max(dim=1, keepdim=True).values.detach()
        mask = torch.eq(label.view(-1, 1), label.view(1, -1)).float().repeat(2, 2)
        not_self = torch.scatter(torch.ones_like(mask), 1, torch.arange(len(mask)).view(-1, 1), 0)
        mask = mask * not_self
        log_prob = logits - (logits.exp() * not_self).sum(1, keepdim=True).log()
        return -((mask * log_prob).sum(1) / mask.sum(1)).view(2, -1).mean()


@listed(lambda b, n: (torch.randn(b, 3, 16, 16),))
class SimMIM(nn.Module):
    """Masks that a generator of its own draws by the shapes of the batch, token by token, and a loss on what is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token, self.pos = nn.Conv2d(3, 32, 4, 4), nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.randn(1, 16, 32) * 0.02)
        self.body, self.dec = nn.Sequential(*[block() for _ in range(3)]), nn.Sequential(nn.Conv2d(32, 48, 1), nn.PixelShuffle(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.patch(x).flatten(2).mT
        b, n, _ = h.shape
        place = torch.arange(n)
        mask = ((place * 7 + 3) % 5 < 3).float().expand(b, -1).unsqueeze(-1)
        h = self.body(h * (1 - mask) + self.token.expand(b, n, -1) * mask + self.pos)
        rec = self.dec(h.mT.reshape(b, 32, 4, 4))
        m = mask.view(b, 4, 4).repeat_interleave(4, 1).repeat_interleave(4, 2).unsqueeze(1)
        return (F.l1_loss(x, rec, reduction="none") * m).sum() / (m.sum() + 1e-5) / 3, rec


@listed(pictures())
class MeanTeacher(nn.Module):
    """A student and a teacher by moving averages in the forward, consistency ramped up by a count of steps."""

    def __init__(self) -> None:
        super().__init__()
        make = lambda: nn.Sequential(ConvBlock(3, 16, 2), ConvBlock(16, 32, 2), nn.Flatten(), nn.Linear(512, 4))  # noqa: E731
        self.student, self.teacher = make(), make()
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("step", torch.tensor(0.0))

    def forward(self, x: Tensor, label: Tensor) -> dict[str, Tensor]:
        if self.training:
            self.step += 1
            with torch.no_grad():
                for t, s in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                    t.mul_(0.99).add_(s.detach(), alpha=0.01)
        logits = self.student(x)
        with torch.no_grad():
            target = self.teacher(x.flip(-1)).softmax(-1)
        weight = torch.exp(-5 * (1 - self.step.clamp(max=50) / 50) ** 2)
        return {"loss": F.cross_entropy(logits, label) + weight * F.mse_loss(logits.softmax(-1), target), "logits": logits}


@listed(lambda b, n: (torch.randn(b, 3, 32, 32), torch.rand(b, 5, 4) * 0.5 + 0.2, torch.randint(3, (b, 5))))
class FCOS(nn.Module):
    """Points of several levels assigned to the smallest box that holds them; focal, GIoU and centre losses over positives."""

    def __init__(self) -> None:
        super().__init__()
        self.c3, self.c4 = nn.Sequential(ConvBlock(3, 16, 2), ConvBlock(16, 16, 2)), ConvBlock(16, 32, 2)
        self.l3, self.l4, self.tower = nn.Conv2d(16, 16, 1), nn.Conv2d(32, 16, 1), nn.Sequential(ConvBlock(16, 16), ConvBlock(16, 16))
        self.cls, self.reg, self.ctr, self.scales = nn.Conv2d(16, 3, 3, 1, 1), nn.Conv2d(16, 4, 3, 1, 1), nn.Conv2d(16, 1, 3, 1, 1), nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(2))

    def forward(self, x: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
        c3 = self.c3(x)
        p4 = self.l4(self.c4(c3))
        p3 = self.l3(c3) + F.interpolate(p4, scale_factor=2.0, mode="nearest")
        side = x.shape[-1]
        xyxy = torch.cat([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], -1) * side
        logits, regs, ctrs, points = [], [], [], []
        for i, (feature, stride) in enumerate(((p3, 4), (p4, 8))):
            h = self.tower(feature)
            height, width = h.shape[-2:]
            ys, xs = torch.meshgrid((torch.arange(height) + 0.5) * stride, (torch.arange(width) + 0.5) * stride, indexing="ij")
            points.append(torch.stack([xs, ys], -1).view(-1, 2))
            logits.append(self.cls(h).permute(0, 2, 3, 1).flatten(1, 2))
            regs.append(F.relu(self.reg(h) * self.scales[i]).permute(0, 2, 3, 1).flatten(1, 2) * stride)
            ctrs.append(self.ctr(h).flatten(1))
        logit, reg, ctr, point = torch.cat(logits, 1), torch.cat(regs, 1), torch.cat(ctrs, 1), torch.cat(points)
        ltrb = torch.cat([point[None, :, None] - xyxy[:, None, :, :2], xyxy[:, None, :, 2:] - point[None, :, None]], -1)
        inside = ltrb.amin(-1) > 0
        areas = (xyxy[..., 2:] - xyxy[..., :2]).prod(-1)[:, None].expand_as(inside).masked_fill(~inside, 1e8)
        least, index = areas.min(-1)
        is_pos = least < 1e8
        target = torch.gather(ltrb, 2, index[..., None, None].expand(-1, -1, 1, 4)).squeeze(2)
        label = labels.gather(1, index).masked_fill(~is_pos, 3)
        hot = F.one_hot(label, 4)[..., :3].float()
        n_pos = is_pos.sum().clamp(min=1)
        p = logit.sigmoid()
        ce = F.binary_cross_entropy_with_logits(logit, hot, reduction="none")
        focal = (ce * (1 - (p * hot + (1 - p) * (1 - hot))) ** 2 * (0.25 * hot + 0.75 * (1 - hot))).sum() / n_pos
        pos_t, pos_r = target[is_pos], reg[is_pos]
        lo, hi = torch.min(pos_t, pos_r), torch.max(pos_t, pos_r)
        inter, union_box = (lo[:, 0] + lo[:, 2]) * (lo[:, 1] + lo[:, 3]), (hi[:, 0] + hi[:, 2]) * (hi[:, 1] + hi[:, 3])
        union = (pos_t[:, 0] + pos_t[:, 2]) * (pos_t[:, 1] + pos_t[:, 3]) + (pos_r[:, 0] + pos_r[:, 2]) * (pos_r[:, 1] + pos_r[:, 3]) - inter
        giou = inter / union.clamp(min=1e-6) - (union_box - union) / union_box.clamp(min=1e-6)
        centre = (pos_t[:, ::2].amin(1) / pos_t[:, ::2].amax(1) * pos_t[:, 1::2].amin(1) / pos_t[:, 1::2].amax(1)).clamp(min=0).sqrt()
        box = ((1 - giou) * centre).sum() / centre.sum().clamp(min=1e-6)
        ctr_loss = F.binary_cross_entropy_with_logits(ctr[is_pos], centre, reduction="sum") / n_pos
        return {"loss": focal + box + ctr_loss, "cls": focal, "box": box, "ctr": ctr_loss}


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), torch.randint(3, (b, 16, 16))))
class DeepSupervision(nn.Module):
    """nnU-Net's losses at several resolutions, weighed by halves, Dice by row, all logits in training and the first else."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([ConvBlock(3, 8), ConvBlock(8, 16, 2), ConvBlock(16, 32, 2)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)])
        self.merge, self.heads = nn.ModuleList([ConvBlock(32, 16), ConvBlock(16, 8)]), nn.ModuleList([nn.Conv2d(16, 3, 1), nn.Conv2d(8, 3, 1)])

    def forward(self, x: Tensor, y: Tensor) -> Any:
        skips, outs = [], []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
        x = skips.pop()
        for up, merge, head in zip(self.up, self.merge, self.heads, strict=True):
            x = merge(torch.cat((up(x), skips.pop()), dim=1))
            outs.append(head(x))
        outs.reverse()
        loss = 0
        for i, logits in enumerate(outs):
            t = y[:, :: 2 ** i, :: 2 ** i]
            prob, hot = logits.softmax(1), F.one_hot(t, 3).movedim(-1, 1).to(logits.dtype)
            axes = tuple(range(2, prob.ndim))
            dice = (2 * (prob * hot).sum(axes) + 1e-5) / (prob.sum(axes) + hot.sum(axes) + 1e-5)
            loss = loss + (F.cross_entropy(logits, t) - dice[:, 1:].mean()) / 2 ** i
        return (loss, outs) if self.training else (loss, outs[0])


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), torch.randn(b, 3, 16, 16)))
class CycleGANStep(nn.Module):
    """The generators' step: two critics frozen by a flag for its time, cycles and identities."""

    def __init__(self) -> None:
        super().__init__()
        gen = lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 8, 3, 1, 1, padding_mode="reflect"), nn.InstanceNorm2d(8), nn.ReLU(True), nn.Conv2d(8, 3, 3, 1, 1), nn.Tanh())  # noqa: E731
        dis = lambda: nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(8, 1, 4, 1, 1))  # noqa: E731
        self.g_ab, self.g_ba, self.d_a, self.d_b = gen(), gen(), dis(), dis()
        for p in itertools.chain(self.d_a.parameters(), self.d_b.parameters()):
            p.requires_grad = False
        self.register_buffer("real", torch.tensor(1.0))

    def gan(self, logits: Tensor) -> Tensor:
        return F.mse_loss(logits, self.real.expand_as(logits))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        fake_b, fake_a = self.g_ab(a), self.g_ba(b)
        parts = {
            "idt": F.l1_loss(self.g_ba(a), a) + F.l1_loss(self.g_ab(b), b),
            "gan": self.gan(self.d_b(fake_b)) + self.gan(self.d_a(fake_a)),
            "cycle": F.l1_loss(self.g_ba(fake_b), a) + F.l1_loss(self.g_ab(fake_a), b),
        }
        return 5 * parts["idt"] + parts["gan"] + 10 * parts["cycle"], {k: v.detach() for k, v in parts.items()}


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), torch.randint(5, (b, 16, 16))))
class SPADE(nn.Module):
    """Normalisation by maps made of labels, which are resized for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.blocks = nn.Conv2d(5, 16, 3, padding=1), nn.ModuleList()
        for _ in range(3):
            self.blocks.append(nn.ModuleDict({"shared": nn.Sequential(nn.Conv2d(5, 16, 3, padding=1), nn.ReLU()), "gamma": nn.Conv2d(16, 16, 3, padding=1), "beta": nn.Conv2d(16, 16, 3, padding=1), "conv": nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 3, padding=1))}))
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        seg = torch.zeros(labels.shape[0], 5, *labels.shape[1:]).scatter_(1, labels.unsqueeze(1), 1.0)
        x = self.start(F.interpolate(seg, size=(4, 4)))
        for i, m in enumerate(self.blocks):
            if i:
                x = F.interpolate(x, scale_factor=2)
            maps = m["shared"](F.interpolate(seg, size=x.shape[2:], mode="nearest"))
            y = F.instance_norm(x) * (1 + m["gamma"](maps)) + m["beta"](maps)
            x = x + m["conv"](F.leaky_relu(y, 2e-1))
        fake = torch.tanh(self.out(x))
        return F.l1_loss(fake, target), fake


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), torch.randint(4, (b,)), torch.rand(b), torch.randn(b, 3, 16, 16), torch.rand(b)))
class RectifiedDiT(nn.Module):
    """Rectified flow with logit-normal times, labels dropped by a mask, adaptive norms; noise and times are given."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.pos, self.t, self.y = nn.Linear(48, 32), nn.Parameter(torch.randn(1, 16, 32) * 0.02), mlp(32, 32, 32, act=nn.SiLU), nn.Embedding(5, 32)
        self.ada = nn.ModuleList(nn.Linear(32, 192) for _ in range(3))
        self.attn, self.ff = nn.ModuleList(nn.MultiheadAttention(32, 4, batch_first=True) for _ in range(3)), nn.ModuleList(mlp(32, 64, 32, act=nn.GELU) for _ in range(3))
        self.out_ada, self.out = nn.Linear(32, 64), nn.Linear(32, 48)
        freqs = torch.exp(-math.log(10000) * torch.arange(16).float() / 16)
        self.register_buffer("freqs", freqs, persistent=False)

    def forward(self, x: Tensor, label: Tensor, u: Tensor, noise: Tensor, drop: Tensor) -> dict[str, Tensor]:
        t = torch.sigmoid(torch.special.ndtri(u.clamp(1e-3, 1 - 1e-3)))
        xt = (1 - t).view(-1, 1, 1, 1) * x + t.view(-1, 1, 1, 1) * noise
        b, c, h, w = xt.shape
        tokens = xt.reshape(b, c, h // 4, 4, w // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(b, -1, 48)
        angle = t[:, None] * 1000 * self.freqs[None]
        cond = self.t(torch.cat([angle.cos(), angle.sin()], -1)) + self.y(torch.where(drop < 0.1, 4, label))
        z = self.patch(tokens) + self.pos
        for ada, attn, ff in zip(self.ada, self.attn, self.ff, strict=True):
            s1, c1, g1, s2, c2, g2 = ada(F.silu(cond)).unsqueeze(1).chunk(6, dim=-1)
            y = F.layer_norm(z, (32,)) * (1 + c1) + s1
            z = z + g1 * attn(y, y, y, need_weights=False)[0]
            z = z + g2 * ff(F.layer_norm(z, (32,)) * (1 + c2) + s2)
        shift, scale = self.out_ada(F.silu(cond)).unsqueeze(1).chunk(2, -1)
        v = self.out(F.layer_norm(z, (32,)) * (1 + scale) + shift)
        v = v.view(b, h // 4, w // 4, 4, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(b, c, h, w)
        per = (v - (noise - x)).square().flatten(1).mean(1)
        ends = torch.linspace(0, 1, 5)
        bins = torch.stack([per.detach().mul((t >= lo) & (t < hi)).sum() for lo, hi in itertools.pairwise(ends)])
        return {"loss": per.mean(), "bins": bins}


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), torch.randint(0, 10, (b,)), torch.randn(b, 3, 16, 16)))
class ConsistencyStep(nn.Module):
    """Karras's preconditioning, neighbours on a schedule of noise, a pseudo-Huber loss beside an EMA teacher."""

    def __init__(self) -> None:
        super().__init__()
        net = lambda: nn.ModuleDict({"in": nn.Conv2d(3, 16, 3, 1, 1), "mid": ConvBlock(16, 16), "t": nn.Linear(16, 16), "out": nn.Conv2d(16, 3, 3, 1, 1)})  # noqa: E731
        self.online, self.teacher = net(), net().requires_grad_(False)
        self.register_buffer("sigmas", (0.002 ** (1 / 7) + torch.arange(11) / 10 * (80 ** (1 / 7) - 0.002 ** (1 / 7))) ** 7)
        self.freqs = torch.arange(1, 9).float()

    def denoise(self, net: nn.ModuleDict, x: Tensor, sigma: Tensor) -> Tensor:
        s = sigma.view(-1, 1, 1, 1)
        skip, out, inp = 0.25 / ((s - 0.002) ** 2 + 0.25), 0.5 * (s - 0.002) / (s ** 2 + 0.25).sqrt(), 1 / (s ** 2 + 0.25).sqrt()
        angle = sigma.log()[:, None] / 4 * self.freqs
        h = net["in"](x * inp) + net["t"](torch.cat([angle.sin(), angle.cos()], 1))[:, :, None, None]
        return skip * x + out * net["out"](net["mid"](h))

    def forward(self, x: Tensor, index: Tensor, noise: Tensor) -> Tensor:
        hi, lo = self.sigmas[index + 1], self.sigmas[index]
        ours = self.denoise(self.online, x + noise * hi[:, None, None, None], hi)
        with torch.no_grad():
            theirs = self.denoise(self.teacher, x + noise * lo.view(-1, 1, 1, 1), lo)
        c = 0.00054 * math.sqrt(x[0].numel())
        return ((((ours - theirs) ** 2 + c ** 2).sqrt() - c).mean((1, 2, 3)) / (hi - lo)).mean()


@listed(lambda b, n: (torch.randn(b, 3, 16, 16),))
class EMACodes(nn.Module):
    """A VQ-VAE whose codes are moving averages of what fell to them, and dead codes are set to rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 4, 2, 1)), nn.Sequential(nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1))
        self.register_buffer("codes", torch.randn(12, 8))
        self.register_buffer("size", torch.ones(12))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        z = self.enc(x)
        flat = z.movedim(1, -1).reshape(-1, 8)
        index = torch.cdist(flat, self.codes).argmin(1)
        q = F.embedding(index, self.codes)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(index, 12).type_as(flat)
                self.size.lerp_(hot.sum(0), 0.01)
                self.sums.lerp_(hot.t() @ flat, 0.01)
                dead = self.size < 0.05
                fresh = flat[torch.arange(12) % flat.shape[0]]
                n = self.size.sum()
                smooth = (self.size + 1e-5) / (n + 12e-5) * n
                self.codes.copy_(torch.where(dead[:, None], fresh, self.sums / smooth[:, None]))
        q = q.view(*z.movedim(1, -1).shape).movedim(-1, 1)
        commit = F.mse_loss(z, q.detach())
        out = self.dec(z + (q - z).detach())
        usage = torch.bincount(index, minlength=12).float() / index.numel()
        return F.mse_loss(out, x) + 0.25 * commit, {"perplexity": (-(usage * (usage + 1e-10).log()).sum()).exp(), "out": out}


@listed(lambda b, n: (torch.randn(b, 3, 32, 32), torch.randint(4, (b,))))
class SpatialTransformer(nn.Module):
    """A network that makes a grid and samples its input, deformable offsets, and labels smoothed."""

    def __init__(self) -> None:
        super().__init__()
        self.loc, self.theta = nn.Sequential(nn.Conv2d(3, 8, 7, 2), nn.MaxPool2d(2, 2), nn.ReLU(True), nn.AdaptiveAvgPool2d(3)), nn.Sequential(nn.Linear(72, 16), nn.ReLU(True), nn.Linear(16, 6))
        self.theta[-1].weight.data.mul_(0.1)
        self.theta[-1].bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.body = nn.Sequential(ConvBlock(3, 16, 2), ConvBlock(16, 32, 2), nn.Conv2d(32, 32, 3, 2, 1, groups=32), nn.AdaptiveMaxPool2d(1))
        self.fc = nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        theta = self.theta(self.loc(x).view(-1, 72)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.size()), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False, padding_mode="border")
        logits = self.fc(self.body(x).flatten(1))
        return F.cross_entropy(logits, y, label_smoothing=0.1), logits


@listed(lambda b, n: (torch.randn(b, 3, 16, 16), torch.randint(4, (b,)), torch.rand(b)))
class MixupManifold(nn.Module):
    """Manifold mixup at a layer that the count of steps says, with the batch turned by one as partners."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ConvBlock(3, 16, 2), ConvBlock(16, 32, 2), ConvBlock(32, 32), nn.Sequential(nn.Flatten(), nn.Linear(512, 4))])

    def forward(self, x: Tensor, y: Tensor, lam: Tensor) -> Tensor:
        hot = F.one_hot(y, 4).float()
        for i, layer in enumerate(self.layers):
            if i == 2 and self.training:
                w = lam.view(-1, 1, 1, 1)
                x, hot = w * x + (1 - w) * x.roll(1, 0), w[:, :, 0, 0] * hot + (1 - w[:, :, 0, 0]) * hot.roll(1, 0)
            x = layer(x)
        return -(hot * x.log_softmax(1)).sum(1).mean()


# sound
@listed(lambda b, n: (torch.randn(b, 16 * n),))
class SincNet(nn.Module):
    """Band-pass filters made of their edges at each call, log-compressed and pooled."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.band = nn.Parameter(torch.linspace(0.01, 0.3, 12)), nn.Parameter(torch.full((12,), 0.05))
        n = torch.arange(-15, 16).float()
        self.register_buffer("n", 2 * math.pi * n)
        self.register_buffer("window", torch.hamming_window(31, periodic=False))
        self.conv, self.out = nn.Sequential(nn.Conv1d(12, 24, 5, 2), nn.BatchNorm1d(24), nn.LeakyReLU(), nn.Conv1d(24, 24, 5, 2), nn.BatchNorm1d(24), nn.LeakyReLU()), nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        low = self.low.abs().unsqueeze(1)
        high = torch.clamp(low + self.band.abs().unsqueeze(1), max=0.5)
        sides = lambda f: 2 * f * torch.sinc(f * self.n / math.pi)  # noqa: E731
        filters = (sides(high) - sides(low)) * self.window
        filters = filters / filters.abs().max(dim=1, keepdim=True).values
        h = F.conv1d(F.layer_norm(x, x.shape[-1:]).unsqueeze(1), filters.unsqueeze(1), stride=2)
        h = self.conv(torch.log1p(h.abs()))
        return self.out(torch.cat([h.mean(-1), h.std(-1)], 1))


@listed(lambda b, n: (torch.randn(b, 32 * n), torch.randn(b, 2, 32 * n)))
class PermutationSeparator(nn.Module):
    """Masks over a short-time Fourier transform, complex numbers within, SI-SDR by the best permutation of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.mask = nn.LSTM(33, 32, 2, batch_first=True, bidirectional=True), nn.Linear(64, 66)
        self.register_buffer("window", torch.hann_window(64))

    @staticmethod
    def si_sdr(est: Tensor, ref: Tensor) -> Tensor:
        est, ref = est - est.mean(-1, keepdim=True), ref - ref.mean(-1, keepdim=True)
        proj = (est * ref).sum(-1, keepdim=True) * ref / (ref.square().sum(-1, keepdim=True) + 1e-8)
        return 10 * torch.log10(proj.square().sum(-1) / ((est - proj).square().sum(-1) + 1e-8) + 1e-8)

    def forward(self, mix: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
        spec = torch.stft(mix, 64, 32, window=self.window, return_complex=True)
        h, _ = self.rnn(spec.abs().clamp(min=1e-6).log().mT)
        masks = self.mask(h).unflatten(-1, (2, 33)).sigmoid().permute(0, 2, 3, 1)
        est = torch.istft((masks * spec.unsqueeze(1)).flatten(0, 1), 64, 32, window=self.window, length=mix.shape[-1]).view(-1, 2, mix.shape[-1])
        table = self.si_sdr(est.unsqueeze(2), sources.unsqueeze(1))
        scores = torch.stack([table[:, range(2), list(p)].mean(-1) for p in itertools.permutations(range(2))], -1)
        return -scores.amax(-1).mean(), est


@listed(lambda b, n: (torch.randn(b, n, 16), ids(b, 6), torch.full((b,), n), torch.randint(2, 7, (b,))))
class HybridCTC(nn.Module):
    """CTC and attention: joint losses, convolution in front that shortens lengths, relative shifts, intermediate CTC."""

    def __init__(self) -> None:
        super().__init__()
        self.sub, self.layers = nn.Conv1d(16, 32, 3, 2, 1), nn.ModuleList(block() for _ in range(4))
        self.ctc, self.back, self.emb, self.dec, self.out = nn.Linear(32, 64), nn.Linear(64, 32), nn.Embedding(64, 32), nn.TransformerDecoderLayer(32, 4, 64, 0.0, batch_first=True), nn.Linear(32, 64)

    def forward(self, x: Tensor, y: Tensor, n_x: Tensor, n_y: Tensor) -> dict[str, Tensor]:
        h = F.gelu(self.sub(x.mT)).mT
        n_h = torch.div(n_x + 1, 2, rounding_mode="floor")
        pad = torch.arange(h.size(1))[None] >= n_h[:, None]
        inter = 0.0
        for i, layer in enumerate(self.layers):
            h = layer(h, src_key_padding_mask=pad)
            if i == 1:
                logp = self.ctc(h).log_softmax(-1)
                inter = F.ctc_loss(logp.transpose(0, 1), y, n_h, n_y, zero_infinity=True)
                h = h + self.back(logp.exp())
        ctc = F.ctc_loss(self.ctc(h).log_softmax(-1).transpose(0, 1), y, n_h, n_y, zero_infinity=True)
        causal = torch.ones(y.size(1), y.size(1), dtype=torch.bool).triu(1)
        d = self.dec(self.emb(F.pad(y, (1, 0))[:, :-1]), h, tgt_mask=causal, memory_key_padding_mask=pad)
        target = y.masked_fill(torch.arange(y.size(1))[None] >= n_y[:, None], -1)
        att = F.cross_entropy(self.out(d).transpose(1, 2), target, ignore_index=-1, reduction="none").sum() / (target >= 0).sum()
        return {"loss": 0.3 * (ctc + inter) / 2 + 0.7 * att, "ctc": ctc, "att": att}


# graphs, points, physics
@listed(lambda b, n: (torch.randn(b, 7, 4, 4), torch.randn(b, 7, 4, 4)))
class NRI(nn.Module):
    """Edges of a full graph as relaxed categories, in evaluation the most likely, and a decoder step by step."""

    def __init__(self) -> None:
        super().__init__()
        off = torch.ones(4, 4) - torch.eye(4)
        send, receive = off.nonzero(as_tuple=True)
        self.register_buffer("rel_send", F.one_hot(send, 4).float())
        self.register_buffer("rel_rec", F.one_hot(receive, 4).float())
        self.enc1, self.enc2, self.edge = mlp(28, 24, 24, act=nn.ELU), mlp(48, 24, 24, act=nn.ELU), nn.Linear(24, 2)
        self.msg, self.out = nn.ModuleList(mlp(8, 24, 16) for _ in range(2)), mlp(20, 24, 4)

    def pairs(self, x: Tensor) -> Tensor:
        return torch.cat([self.rel_send @ x, self.rel_rec @ x], -1)

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        h = self.enc1(x.permute(0, 2, 1, 3).flatten(2))
        logits = self.edge(self.enc2(self.pairs(h)))
        edges = F.gumbel_softmax(logits, tau=0.5) if self.training else F.one_hot(logits.argmax(-1), 2).float()
        state, preds = x[:, 0], []
        for t in range(x.size(1)):
            if t % 3 == 0:
                state = x[:, t]
            pairs = self.pairs(state)
            message = sum(net(pairs) * edges[..., k : k + 1] for k, net in enumerate(self.msg))
            state = state + self.out(torch.cat([state, self.rel_rec.t() @ message], -1))
            preds.append(state)
        nll = ((torch.stack(preds, 1) - target) ** 2 / (2 * 5e-2)).sum() / (x.size(0) * x.size(2))
        prob = logits.softmax(-1)
        kl = (prob * (prob + 1e-16).log()).sum() / x.size(0)
        return {"loss": nll + kl, "nll": nll, "edges": edges}


@listed(lambda b, n: (torch.randn(b, 16), torch.rand(b, 6, 2), torch.randn(b, 6)))
class DeepONetPhysics(nn.Module):
    """Branch and trunk, and the residual of an equation by two derivatives in the forward; the boundary made hard."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk, self.bias = mlp(16, 32, 32, 16, act=nn.Tanh), mlp(2, 32, 32, 16, act=nn.Tanh), nn.Parameter(torch.zeros(1))

    def forward(self, u: Tensor, points: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            xt = points.detach().requires_grad_(True)
            out = torch.einsum("bk,bpk->bp", self.branch(u), self.trunk(xt)) + self.bias
            out = out * xt[..., 0] * (1 - xt[..., 0])
            (grad,) = torch.autograd.grad(out.sum(), xt, create_graph=True)
            (second,) = torch.autograd.grad(grad[..., 0].sum(), xt, create_graph=True)
            residual = grad[..., 1] - 0.01 * second[..., 0] - 0.01 * out ** 2
        loss = residual.square().mean() + F.mse_loss(out, value)
        return loss, out


@listed(lambda b, n: (torch.rand(b, 12, 3), torch.randn(b, 12, 3)))
class RadianceRender(nn.Module):
    """NeRF: samples along rays, coarse and then fine by the inverse of a cumulated histogram, composited."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine = mlp(39, 32, 32, 4), mlp(39, 32, 32, 4)

    @staticmethod
    def encode(x: Tensor, n: int = 6) -> Tensor:
        return torch.cat([x] + [f(2 ** i * x) for i in range(n) for f in (torch.sin, torch.cos)], -1)

    @staticmethod
    def composite(raw: Tensor, z: Tensor, dirs: Tensor) -> tuple[Tensor, Tensor]:
        dists = torch.cat([z[..., 1:] - z[..., :-1], torch.full_like(z[..., :1], 1e10)], -1) * dirs.norm(dim=-1, keepdim=True)
        alpha = 1 - torch.exp(-F.softplus(raw[..., 3]) * dists)
        weights = alpha * torch.cumprod(torch.cat([torch.ones_like(alpha[..., :1]), 1 - alpha + 1e-10], -1), -1)[..., :-1]
        return (weights.unsqueeze(-1) * raw[..., :3].sigmoid()).sum(-2), weights

    @staticmethod
    def sample(bins: Tensor, weights: Tensor, n: int) -> Tensor:
        weights = weights + 1e-5
        cdf = F.pad(torch.cumsum(weights / weights.sum(-1, keepdim=True), -1), (1, 0))
        u = torch.linspace(0.0, 1.0, n).expand(*cdf.shape[:-1], n).contiguous()
        inds = torch.searchsorted(cdf.contiguous(), u, right=True)
        below, above = (inds - 1).clamp(min=0), inds.clamp(max=cdf.shape[-1] - 1)
        cdf_b, cdf_a, bin_b, bin_a = cdf.gather(-1, below), cdf.gather(-1, above), bins.gather(-1, below), bins.gather(-1, above)
        denom = cdf_a - cdf_b
        return bin_b + (u - cdf_b) / torch.where(denom < 1e-5, torch.ones_like(denom), denom) * (bin_a - bin_b)

    def forward(self, rgb: Tensor, dirs: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.linspace(2.0, 6.0, 8).expand(*dirs.shape[:-1], 8)
        origin = torch.tensor([0.0, 0.0, -4.0])
        raw = self.coarse(self.encode(origin + dirs.unsqueeze(-2) * z.unsqueeze(-1)))
        c0, weights = self.composite(raw, z, dirs)
        new = self.sample(0.5 * (z[..., 1:] + z[..., :-1]), weights[..., 1:-1], 8).detach()
        z, _ = torch.sort(torch.cat([z, new], -1), -1)
        c1, _ = self.composite(self.fine(self.encode(origin + dirs.unsqueeze(-2) * z.unsqueeze(-1))), z, dirs)
        loss = F.mse_loss(c0, rgb) + F.mse_loss(c1, rgb)
        return loss, -10 * F.mse_loss(c1, rgb).detach().log10()


@listed(lambda b, n: (torch.randn(b, n, 6, 8), torch.randn(b, n, n, 4)))
class Evoformer(nn.Module):
    """Rows and columns with pair biases, outer products, triangles both ways; recycled once without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.m_in, self.z_in = nn.Linear(8, 16), nn.Linear(4, 8)
        self.blocks = nn.ModuleList(nn.ModuleDict({
            "row": nn.Linear(16, 48), "bias": nn.Linear(8, 2, bias=False), "row_out": nn.Linear(16, 16), "col": nn.Linear(16, 48), "col_out": nn.Linear(16, 16),
            "trans": mlp(16, 32, 16), "a": nn.Linear(16, 4), "b": nn.Linear(16, 4), "outer": nn.Linear(16, 8), "tri": nn.Linear(8, 32), "tri_out": nn.Linear(8, 8), "pair": mlp(8, 16, 8)}) for _ in range(2))
        self.head = nn.Linear(8, 10)

    def run(self, m: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        for k in self.blocks:
            q, key, v = k["row"](F.layer_norm(m, (16,))).movedim(2, 1).unflatten(-1, (3, 2, 8)).permute(3, 0, 1, 4, 2, 5)
            bias = k["bias"](z).permute(0, 3, 1, 2).unsqueeze(1)
            a = ((q @ key.mT) / 8 ** 0.5 + bias).softmax(-1) @ v
            m = m + k["row_out"](a.transpose(2, 3).flatten(-2)).movedim(1, 2)
            q, key, v = k["col"](F.layer_norm(m, (16,))).unflatten(-1, (3, 2, 8)).permute(3, 0, 1, 4, 2, 5)
            m = m + k["col_out"](F.scaled_dot_product_attention(q, key, v).transpose(2, 3).flatten(-2))
            m = m + k["trans"](m)
            z = z + k["outer"](torch.einsum("bisc,bjsd->bijcd", k["a"](m), k["b"](m)).flatten(-2) / m.shape[2])
            left, right, gl, gr = k["tri"](F.layer_norm(z, (8,))).chunk(4, -1)
            left, right = left * gl.sigmoid(), right * gr.sigmoid()
            z = z + k["tri_out"](torch.einsum("bikc,bjkc->bijc", left, right)) + k["tri_out"](torch.einsum("bkic,bkjc->bijc", left, right))
            z = z + k["pair"](z)
        return m, z

    def forward(self, msa: Tensor, pair: Tensor) -> Tensor:
        m, z = self.m_in(msa), self.z_in(pair)
        with torch.no_grad():
            m0, z0 = self.run(m, z)
        m = torch.cat([m[:, :, :1] + F.layer_norm(m0[:, :, :1], (16,)), m[:, :, 1:]], 2)
        _, z = self.run(m, z + F.layer_norm(z0, (8,)))
        return self.head(z + z.transpose(1, 2))


@listed(lambda b, n: (torch.randn(b, 8), torch.linspace(0, 1, 6), torch.randn(b, 6, 3)))
class LatentODE(nn.Module):
    """Runge-Kutta's fourth order over given times in a latent space, backward through every step."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.f, self.dec = nn.Linear(8, 12), mlp(12, 24, 12, act=nn.Tanh), mlp(12, 24, 3)

    def forward(self, x: Tensor, times: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        z = self.enc(x)
        path = [z]
        for t0, t1 in itertools.pairwise(times):
            h = t1 - t0
            k1 = self.f(z)
            k2 = self.f(z + h * k1 / 2)
            k3 = self.f(z + h * k2 / 2)
            z = z + h * (k1 + 2 * k2 + 2 * k3 + self.f(z + h * k3)) / 6
            path.append(z)
        out = self.dec(torch.stack(path, 1))
        return F.mse_loss(out, y), out


@listed(lambda b, n: (torch.randn(b, 3, 32), torch.randn(b, 3, 32)))
class HamiltonianNet(nn.Module):
    """A field by the gradient of an energy within the forward, and leapfrog steps through it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp(64, 32, 32, 1, act=nn.Softplus)

    def field(self, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            q, p = (x if x.requires_grad else x.detach().requires_grad_() for x in (q, p))
            energy = self.energy(torch.cat([q, p], -1)).sum()
            dq, dp = torch.autograd.grad(energy, (q, p), create_graph=True)
        return dp, -dq

    def forward(self, q: Tensor, p: Tensor) -> Tensor:
        a, b = q[:, 0], p[:, 0]
        loss = 0.0
        for t in range(1, q.shape[1]):
            dq, dp = self.field(a, b)
            a, b = a + 0.1 * dq, b + 0.1 * dp
            loss = loss + F.mse_loss(a, q[:, t]) + F.mse_loss(b, p[:, t])
        return loss


# learning to learn
@listed(lambda b, n: (torch.randn(b, 10, 3), torch.randn(b, 10, 1)))
class ANIL(nn.Module):
    """Tasks one by one in a loop, the head's inner steps by autograd through functional calls, query losses meant."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.rate = mlp(3, 24, 16), nn.Linear(16, 1), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        losses = []
        with torch.enable_grad():
            for xs, ys in zip(x, y, strict=True):
                h = F.relu(self.body(xs))
                fast = dict(self.head.named_parameters())
                for _ in range(2):
                    inner = F.mse_loss(functional_call(self.head, fast, (h[:5],)), ys[:5])
                    grads = torch.autograd.grad(inner, list(fast.values()), create_graph=self.training)
                    fast = {k: v - self.rate * g for (k, v), g in zip(fast.items(), grads, strict=True)}
                losses.append(F.mse_loss(functional_call(self.head, fast, (h[5:],)), ys[5:]))
        each = torch.stack(losses)
        return each.mean(), each.detach()


@listed(lambda b, n: (torch.randn(b, 6, 3, 8, 8), torch.randn(b, 4, 3, 8, 8), torch.randint(3, (b, 4))))
class PrototypeEpisodes(nn.Module):
    """Episodes with prototypes of support, a relation module over pairs, and a transductive refinement."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.rel = nn.Sequential(ConvBlock(3, 16, 2), ConvBlock(16, 16, 2), nn.Flatten(), nn.Linear(64, 16)), mlp(32, 16, 1)

    def forward(self, support: Tensor, query: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        b = support.size(0)
        both = self.body(torch.cat([support, query], 1).flatten(0, 1)).view(b, -1, 16)
        s, q = both.split([support.size(1), query.size(1)], 1)
        proto = s.view(b, 3, 2, 16).mean(2)
        for _ in range(2):
            soft = (-torch.cdist(q, proto) ** 2).softmax(-1)
            proto = (proto * 2 + soft.mT @ q) / (2 + soft.sum(1).unsqueeze(-1))
        near = -torch.cdist(q, proto) ** 2
        pair = torch.cat([q.unsqueeze(2).expand(-1, -1, 3, -1), proto.unsqueeze(1).expand(-1, q.size(1), -1, -1)], -1)
        logits = near + self.rel(pair).squeeze(-1)
        return F.cross_entropy(logits.flatten(0, 1), label.flatten()), logits


@listed(lambda b, n: (torch.randn(b, 12), torch.randint(3, (b,))))
class EvidentialEnsemble(nn.Module):
    """Members by vmap over stacked parameters, Dirichlet evidence, and its divergence annealed by a buffer."""

    def __init__(self, members: int = 3) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(members, 12, 24) * 0.3), nn.Parameter(torch.randn(members, 24, 3) * 0.3)
        self.register_buffer("anneal", torch.tensor(0.1))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        evidence = torch.vmap(lambda a, b: F.softplus(torch.relu(x @ a) @ b))(self.w1, self.w2)
        alpha = evidence + 1
        total = alpha.sum(-1, keepdim=True)
        hot = F.one_hot(y, 3).float()
        nll = (hot * (torch.digamma(total) - torch.digamma(alpha))).sum(-1)
        tilde = hot + (1 - hot) * alpha
        kl = torch.distributions.kl_divergence(torch.distributions.Dirichlet(tilde, validate_args=False), torch.distributions.Dirichlet(torch.ones_like(tilde), validate_args=False))
        return (nll + self.anneal * kl).mean(), 3 / total.squeeze(-1).mean(0)


@listed(lambda b, n: (torch.randn(b, 4, 12), torch.randint(3, (b,))))
class SAINTRows(nn.Module):
    """Attention over the columns of a row and then over the rows of the batch, with CutMix of the batch for contrast."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.cols, self.rows, self.norm = nn.ModuleList(nn.Linear(1, 8) for _ in range(12)), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), nn.TransformerEncoderLayer(96, 4, 96, 0.0, batch_first=True), nn.LayerNorm(96)
        self.head, self.proj = nn.Linear(96, 3), nn.Linear(96, 16)

    def encode(self, x: Tensor) -> Tensor:
        h = torch.stack([t(x[:, i : i + 1]) for i, t in enumerate(self.tok)], 1)
        return self.norm(self.rows(self.cols(h).flatten(1).unsqueeze(0)).squeeze(0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x[:, 0]
        keep = (torch.arange(12) % 3 > 0).float()
        h, other = self.encode(x), self.encode(x * keep + x.roll(1, 0) * (1 - keep))
        a, b = F.normalize(self.proj(h), dim=-1), F.normalize(self.proj(other), dim=-1)
        return F.cross_entropy(self.head(h), y) + 0.1 * F.cross_entropy(a @ b.T / 0.7, torch.arange(len(x)))


@listed(lambda b, n: (torch.randn(b, n, 5), torch.randint(4, (b,)), torch.randn(b, 8, 3), torch.randn(b, 8)))
class TemporalFusion(nn.Module):
    """Static context that gates, variables selected, an LSTM begun by it, interpretable attention, quantiles ahead."""

    def __init__(self, w: int = 16) -> None:
        super().__init__()
        self.static, self.past, self.future = nn.Embedding(4, w), nn.ModuleList(nn.Linear(1, w) for _ in range(5)), nn.ModuleList(nn.Linear(1, w) for _ in range(3))
        self.pick_p, self.pick_f = self.grn(5 * w + w, 5), self.grn(3 * w + w, 3)
        self.enc, self.dec, self.init = nn.LSTM(w, w, batch_first=True), nn.LSTM(w, w, batch_first=True), nn.Linear(w, 2 * w)
        self.glu, self.norm, self.q, self.k, self.v, self.o, self.out = nn.Linear(w, 2 * w), nn.LayerNorm(w), nn.Linear(w, 2 * w), nn.Linear(w, 2 * w), nn.Linear(w, w // 2), nn.Linear(w // 2, w), nn.Linear(w, 3)
        self.register_buffer("levels", torch.tensor([0.1, 0.5, 0.9]))

    @staticmethod
    def grn(i: int, o: int) -> nn.ModuleDict:
        return nn.ModuleDict({"a": nn.Linear(i, 16), "b": nn.Linear(16, 2 * o), "skip": nn.Linear(i, o), "norm": nn.LayerNorm(o)})

    def select(self, xs: list[Tensor], context: Tensor, m: nn.ModuleDict) -> Tensor:
        flat = torch.cat([*xs, context.unsqueeze(1).expand(-1, xs[0].size(1), -1)], -1)
        weights = m["norm"](F.glu(m["b"](F.elu(m["a"](flat))), -1) + m["skip"](flat)).softmax(-1)
        return (torch.stack(xs, -1) * weights.unsqueeze(-2)).sum(-1)

    def forward(self, past: Tensor, static: Tensor, future: Tensor, y: Tensor) -> dict[str, Tensor]:
        c = self.static(static)
        p = self.select([lin(past[..., i : i + 1]) for i, lin in enumerate(self.past)], c, self.pick_p)
        f = self.select([lin(future[..., i : i + 1]) for i, lin in enumerate(self.future)], c, self.pick_f)
        state = tuple(t.unsqueeze(0).contiguous() for t in self.init(c).chunk(2, -1))
        hp, state = self.enc(p, state)
        hf, _ = self.dec(f, state)
        h = self.norm(F.glu(self.glu(torch.cat([hp, hf], 1)), -1) + torch.cat([p, f], 1))
        t, n = h.size(1), f.size(1)
        q, k = (lin(h).view(-1, t, 2, 16).transpose(1, 2) for lin in (self.q, self.k))
        mask = torch.triu(torch.ones(t, t), diagonal=1).bool()
        att = (q[:, :, -n:] @ k.mT / 4).masked_fill(mask[-n:], float("-inf")).softmax(-1).mean(1)
        out = self.out(h[:, -n:] + self.o(att @ self.v(h)))
        err = y.unsqueeze(-1) - out
        return {"loss": torch.maximum(self.levels * err, (self.levels - 1) * err).sum(-1).mean(), "quantiles": out, "attention": att}
