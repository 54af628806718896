"""Vision models in the styles of torchvision, timm and diffusers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import register


def images(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Square images whose side is the length, a multiple of 8."""
    generator = torch.Generator().manual_seed(batch)
    return (torch.randn(batch, 3, length // 8 * 8, length // 8 * 8, generator=generator),), {}


class Bottleneck(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width // 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width // 2)
        self.conv2 = nn.Conv2d(width // 2, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(width, width, 1, stride) if stride != 1 else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


@register(images)
class ResNet(nn.Module):
    """Stem, four stages, pooled head: the torchvision shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        for i in range(4):
            self.add_module(f"layer{i + 1}", nn.Sequential(Bottleneck(16, 1 + (i == 2)), Bottleneck(16)))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class DenseLayer(nn.Module):
    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(n_in), nn.Conv2d(n_in, 8, 3, padding=1)

    def forward(self, features: list[Tensor]) -> Tensor:
        return F.dropout(self.conv(F.relu(self.norm(torch.cat(features, 1)))), 0.2, training=self.training)


@register(images)
class DenseNet(nn.Module):
    """Each layer takes a list of everything before it; dropout follows the mode in glue code."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.ModuleDict({f"denselayer{i}": DenseLayer(8 * (i + 1)) for i in range(6)})
        self.classifier = nn.Linear(56, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.block.values():
            features.append(layer(features))
        return self.classifier(F.adaptive_avg_pool2d(torch.cat(features, 1), 1).flatten(1))


def _inverted_residual(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(width, 2 * width, 1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.Hardswish(inplace=True),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.Hardswish(inplace=True),
        nn.Conv2d(2 * width, width, 1, bias=False),
        nn.BatchNorm2d(width, momentum=0.01),
    )


def _drop_path(x: Tensor, p: float, training: bool) -> Tensor:
    """Stochastic depth as timm writes it: one draw per row."""
    if p == 0.0 or not training:
        return x
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - p)
    mask.div_(1 - p)
    return x * mask


@register(images)
class MobileNet(nn.Module):
    """Inverted residuals with batch norm, squeeze-and-excite glue and per-row stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.blocks = nn.Sequential(*[_inverted_residual(16) for _ in range(5)])
        self.gates = nn.ModuleList([nn.Conv2d(16, 16, 1) for _ in range(5)])
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_stem(x)
        for i, (block, gate) in enumerate(zip(self.blocks, self.gates, strict=True)):
            y = block(x)
            y = y * gate(y.mean((2, 3), keepdim=True)).sigmoid()
            x = x + _drop_path(y, 0.1 * i, self.training)
        return self.head(x.mean([-2, -1]))


class Attention(nn.Module):
    def __init__(self, width: int, n_heads: int = 4) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, n, c = x.shape
        q, k, v = (
            self.qkv(x).reshape(b, n, 3, self.n_heads, c // self.n_heads).permute(2, 0, 3, 1, 4).unbind(0)
        )
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.1 if self.training else 0.0)
        return self.proj(out.transpose(1, 2).reshape(b, n, c))


class ViTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), Attention(width)
        self.norm2, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
        )
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + _drop_path(self.attn(self.norm1(x)), 0.2, self.training)
        return x + self.scale * self.mlp(self.norm2(x))


@register(images)
class ViT(nn.Module):
    """Class token, position embeddings resized to the image, per-row stochastic depth, layer scale."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 8, 8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, width, 4, 4) * 0.02)
        self.blocks = nn.Sequential(*[ViTBlock(width) for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        position = F.interpolate(self.pos_embed, size=x.shape[-2:], mode="bilinear", align_corners=False)
        x = (x + position).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
        return self.head(self.norm(self.blocks(x))[:, 0])


class SwinBlock(nn.Module):
    """Windows of 4 × 4 with a cyclic shift; the mask is made from the size in the forward."""

    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.norm, self.attn, self.mlp = nn.LayerNorm(width), Attention(width), nn.Linear(width, width)
        self.table = nn.Parameter(torch.zeros(49, 4))
        index = torch.arange(4)
        relative = index[:, None] - index[None, :] + 3
        self.register_buffer(
            "index", relative.repeat_interleave(4, 0).repeat_interleave(4, 1), persistent=False
        )

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        shortcut = x
        x = self.norm(x)
        pad = (4 - h % 4) % 4, (4 - w % 4) % 4
        x = F.pad(x, (0, 0, 0, pad[1], 0, pad[0]))
        x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        hp, wp = x.shape[1], x.shape[2]
        x = x.view(b, hp // 4, 4, wp // 4, 4, c).transpose(2, 3).reshape(-1, 16, c)
        bias = self.table[self.index].permute(2, 0, 1)
        x = self.attn(x, bias)
        x = x.view(b, hp // 4, wp // 4, 4, 4, c).transpose(2, 3).reshape(b, hp, wp, c)
        x = torch.roll(x, (self.shift, self.shift), (1, 2))[:, :h, :w].contiguous()
        x = shortcut + x
        return x + F.gelu(self.mlp(x))


@register(images)
class Swin(nn.Module):
    """Shifted windows, padding to the window, patch merging by strided slices."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 2, 2)
        self.stages = nn.ModuleList(
            [nn.Sequential(SwinBlock(w, 0), SwinBlock(w, 2)) for w in (width, 2 * width)]
        )
        self.reduce = nn.Linear(4 * width, 2 * width, bias=False)
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages[0](self.embed(x).permute(0, 2, 3, 1))
        x = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.head(self.stages[1](self.reduce(x)).mean((1, 2)))


class ConvBlock(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(n_in, n_out, 3, padding=1), nn.GroupNorm(4, n_out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(self.conv(x)))


@register(images)
class UNet(nn.Module):
    """Contracting and expanding path with a skip per level, padded where sizes do not match."""

    def __init__(self) -> None:
        super().__init__()
        widths = (8, 16, 32)
        self.down = nn.ModuleList([ConvBlock(n, m) for n, m in zip((3, *widths), widths, strict=False)])
        self.middle = ConvBlock(32, 32)
        self.up = nn.ModuleList([nn.ConvTranspose2d(n, m, 2, 2) for n, m in ((32, 32), (32, 16), (16, 8))])
        self.merge = nn.ModuleList([ConvBlock(2 * m, m) for m in (32, 16, 8)])
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            skip = skips.pop()
            x = up(x)
            dy, dx = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
            x = merge(torch.cat([skip, x], dim=1))
        return self.out(x)


class ResnetBlock2D(nn.Module):
    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, n_in), nn.Conv2d(n_in, n_out, 3, padding=1)
        self.time_emb_proj = nn.Linear(32, 2 * n_out)
        self.norm2, self.conv2 = nn.GroupNorm(4, n_out), nn.Conv2d(n_out, n_out, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(n_in, n_out, 1) if n_in != n_out else None

    def forward(self, hidden: Tensor, temb: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(hidden)))
        scale, shift = self.time_emb_proj(F.silu(temb))[:, :, None, None].chunk(2, dim=1)
        h = self.conv2(F.silu(self.norm2(h) * (1 + scale) + shift))
        return (self.conv_shortcut(hidden) if self.conv_shortcut is not None else hidden) + h


def _diffusion(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (sample,), _ = images(batch, length)
    generator = torch.Generator().manual_seed(batch)
    text = torch.randn(batch, 5, 16, generator=generator)
    return (sample, torch.arange(batch) * 10 + 3), {"encoder_hidden_states": text, "return_dict": True}


@register(_diffusion)
class UNet2DCondition(nn.Module):
    """diffusers' shape: time embedding in every block, cross attention, a stack of residuals, dict output."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, 16, 3, padding=1)
        self.time_embedding = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 32))
        self.down_blocks = nn.ModuleList([ResnetBlock2D(16, 16), ResnetBlock2D(16, 32)])
        self.downsamplers = nn.ModuleList([nn.Conv2d(16, 16, 3, 2, 1), nn.Conv2d(32, 32, 3, 2, 1)])
        self.mid_block = ResnetBlock2D(32, 32)
        self.cross = nn.MultiheadAttention(32, 4, kdim=16, vdim=16, batch_first=True)
        self.up_blocks = nn.ModuleList([ResnetBlock2D(64, 16), ResnetBlock2D(32, 16)])
        self.conv_out = nn.Conv2d(16, 3, 3, padding=1)

    def _time(self, timestep: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(8, dtype=torch.float32, device=timestep.device) / 8 * 9.2)
        angles = timestep[:, None].float() * frequencies[None]
        return torch.cat([angles.sin(), angles.cos()], dim=-1)

    def forward(
        self, sample: Tensor, timestep: Any, encoder_hidden_states: Tensor, return_dict: bool = False
    ) -> Any:
        if not torch.is_tensor(timestep):
            timestep = torch.tensor([timestep], device=sample.device)
        temb = self.time_embedding(self._time(timestep.expand(sample.shape[0])).to(dtype=sample.dtype))
        h = self.conv_in(sample)
        residuals: tuple[Tensor, ...] = ()
        for block, downsampler in zip(self.down_blocks, self.downsamplers, strict=True):
            h = block(h, temb)
            residuals += (h,)
            h = downsampler(h)
        h = self.mid_block(h, temb)
        tokens = h.flatten(2).transpose(1, 2)
        tokens = (
            tokens + self.cross(tokens, encoder_hidden_states, encoder_hidden_states, need_weights=False)[0]
        )
        h = tokens.transpose(1, 2).reshape(h.shape)
        for block in self.up_blocks:
            residual, residuals = residuals[-1], residuals[:-1]
            h = F.interpolate(h, size=residual.shape[2:], mode="nearest")
            h = block(torch.cat([h, residual], dim=1), temb)
        out = self.conv_out(h)
        return {"sample": out} if return_dict else (out,)


def _video(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(batch)
    return ([torch.randn(batch, 3, frames, 16, 16, generator=generator) for frames in (2, 8)],), {}


class Pathways(nn.Module):
    """One stage of both pathways with a lateral connection: a list in, a list out."""

    def __init__(self, slow: int, fast: int) -> None:
        super().__init__()
        self.slow, self.fast = (
            nn.Conv3d(slow + 4, slow, (1, 3, 3), padding=(0, 1, 1)),
            nn.Conv3d(fast, fast, 3, padding=1),
        )
        self.lateral = nn.Conv3d(fast, 4, (5, 1, 1), stride=(4, 1, 1), padding=(2, 0, 0))
        self.norm = nn.BatchNorm3d(slow)

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        slow, fast = x
        fused = torch.cat([slow, self.lateral(fast)], 1)
        return [F.relu(self.norm(self.slow(fused))), F.relu(self.fast(fast))]


@register(_video, has_lengths=False)
class SlowFast(nn.Module):
    """Two tensors cross every boundary, as a list; the input is a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.s1_slow, self.s1_fast = nn.Conv3d(3, 8, 1), nn.Conv3d(3, 4, 1)
        self.stages = nn.ModuleList([Pathways(8, 4) for _ in range(4)])
        self.head = nn.Linear(12, 5)

    def forward(self, x: list[Tensor]) -> Tensor:
        x = [self.s1_slow(x[0]), self.s1_fast(x[1])]
        for stage in self.stages:
            x = stage(x)
        return self.head(torch.cat([F.adaptive_avg_pool3d(p, 1).flatten(1) for p in x], 1))


class FPN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lateral = nn.ModuleList([nn.Conv2d(n, 8, 1) for n in (8, 16, 32)])

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        out, previous = {}, None
        for (name, x), conv in reversed(list(zip(features.items(), self.lateral, strict=True))):
            x = conv(x)
            if previous is not None:
                x = x + F.interpolate(previous, size=x.shape[-2:], mode="nearest")
            out[name] = previous = x
        return dict(sorted(out.items()))


@register(images)
class Detector(nn.Module):
    """Backbone features in a dict, a feature pyramid, shared heads on each level, anchors from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Conv2d(n, m, 3, 2, 1) for n, m in ((3, 8), (8, 16), (16, 32))])
        self.fpn = FPN()
        self.cls, self.box = nn.Conv2d(8, 3, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = {}
        for i, layer in enumerate(self.body):
            x = F.relu(layer(x))
            features[f"p{i}"] = x
        scores, boxes, anchors = [], [], []
        for level in self.fpn(features).values():
            scores.append(self.cls(level).flatten(2))
            boxes.append(self.box(level).flatten(2))
            h, w = level.shape[-2:]
            ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
            anchors.append(torch.stack([ys, xs], 0).flatten(1))
        return {
            "scores": torch.cat(scores, 2),
            "boxes": torch.cat(boxes, 2),
            "anchors": torch.cat(anchors, 1),
        }
