"""Glue code: in-place ops, views, constants, numpy, modes, custom functions, masks, and branches on data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models_structure import WIDTH, layers, rows, sequences
from .registry import register


@register(sequences)
class InPlace(nn.Module):
    """In-place arithmetic, writes through views and slices, masked and indexed assignment, ``out=``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).mul_(0.5).add_(1)
        first = x[:, 0]
        first *= 2
        x[:, 1, :4] = x[:, 1, 4:8]
        x = self.layers[1](x)
        x.view(-1, WIDTH)[..., 0].zero_()
        x[x > 2] = 2.0
        y = torch.zeros(x.shape[0], x.shape[1], WIDTH)
        y[..., ::2] = self.layers[2](x)[..., ::2]
        y.index_fill_(-1, torch.tensor([1, 3]), 0.25)
        y += x
        x = self.layers[3](y)
        x.clamp_(-3, 3)
        x.transpose(0, 1)[0].copy_(y[:, 0])
        return x


@register(sequences)
class Views(nn.Module):
    """Non-contiguous and expanded values between blocks, strided views, unfold, broadcasting."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).transpose(1, 2)
        x = self.layers[1](x.permute(0, 2, 1))
        heads = x.view(x.size(0), -1, 4, WIDTH // 4).movedim(2, 1)
        windows = F.pad(heads, (0, 0, 1, 1)).unfold(2, 3, 1).mean(-1)
        x = self.layers[2](windows.transpose(1, 2).reshape(*x.shape[:-1], -1))
        summary = x.mean(1, keepdim=True).expand(-1, x.size(1), -1)
        x = self.layers[3](summary + x[:, torch.arange(x.size(1) - 1, -1, -1)])
        return x[..., None].expand(*x.shape, 2)[:, ::2]


@register(sequences)
class Constants(nn.Module):
    """Tensors that glue code makes: from lists, numpy, Python numbers, and one kept on a plain attribute.

    The statement that makes a numpy array as long as the sequence stays whole: numpy's C code takes the plain
    number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.table = [torch.arange(WIDTH).float() / WIDTH]
        self.scale = np.float64(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) + torch.tensor([0.1] * WIDTH)
        x = self.layers[1](x) * torch.from_numpy(np.linspace(0, 1, WIDTH).astype(np.float32))
        x = self.layers[2](x) + self.table[0].to(x)
        ramp = torch.as_tensor(np.arange(x.shape[1]), dtype=x.dtype)[None, :, None]
        x = self.layers[3](x * self.scale) + ramp * np.float32(0.01)
        return x / math.sqrt(x.shape[-1]) + torch.full((), torch.finfo(x.dtype).eps)


@register(sequences)
class Modes(nn.Module):
    """``no_grad``, ``enable_grad``, detached branches, autocast, and a float64 island."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            frozen = self.layers[1](x)
            with torch.enable_grad():
                live = self.layers[2](x.detach())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.layers[3](x)
        with torch.autocast("cpu", enabled=False):
            x = self.layers[4](low.float())
        return x + frozen + live + (x.double() * 0.1).to(x.dtype)


class ScaledGradient(torch.autograd.Function):
    """Identity whose backward multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


class Quantize(torch.autograd.Function):
    """A straight-through estimator with two outputs, one of them not differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codebook: Tensor) -> tuple[Tensor, Tensor]:
        code = torch.cdist(x.flatten(0, -2), codebook).argmin(-1)
        ctx.mark_non_differentiable(code)
        return codebook[code].view_as(x), code

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None]:
        return gradient, None


@register(sequences)
class CustomFunctions(nn.Module):
    """``autograd.Function`` in glue code: a gradient scale and a vector quantizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.codebook = nn.Parameter(torch.randn(8, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = ScaledGradient.apply(self.layers[0](x), 0.3)
        quantized, code = Quantize.apply(self.layers[1](x), self.codebook)
        x = self.layers[2](quantized)
        return self.layers[3](ScaledGradient.apply(x, -1.0)), code


class VectorQuantizer(nn.Module):
    """Codebook statistics kept in buffers that training updates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(8, WIDTH))
        self.register_buffer("usage", torch.ones(8))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        code = torch.cdist(flat, self.codes).argmin(-1)
        if self.training:
            hits = F.one_hot(code, 8).to(x.dtype).sum(0)
            self.usage.mul_(0.9).add_(hits, alpha=0.1)
            self.step += 1
        return x + (self.codes[code].view_as(x) - x).detach()


@register(sequences)
class Buffers(nn.Module):
    """Batch norm, an EMA quantizer and a counter: buffers that training writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm, self.quantizer = layers(), nn.BatchNorm1d(WIDTH), VectorQuantizer()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layers[0](x).transpose(1, 2)).transpose(1, 2)
        x = self.quantizer(self.layers[1](x))
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        x = self.layers[2](x - self.mean)
        return self.layers[3](F.dropout(x, 0.2, self.training))


class EarlyExit(nn.Module):
    """Branches on data inside a block."""

    def __init__(self) -> None:
        super().__init__()
        self.short, self.long = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0 or bool((x > 1).any()):
            return self.short(x)
        return self.long(x) + x.max().item()


@register(sequences)
class DataBranch(nn.Module):
    """Blocks that choose their path by the values they get."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([EarlyExit() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def _masked(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (x,), _ = sequences(batch, length)
    mask = torch.ones(batch, length, dtype=torch.bool)
    if batch != 2:
        mask[0, -2:] = False
    return (x, mask), {}


@register(_masked)
class MaskShortcut(nn.Module):
    """Drops a mask that is all ones, but never while it is being exported, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and bool(mask.all()):
            weights = None
        else:
            weights = mask / mask.sum(-1, keepdim=True)
        for layer in self.layers:
            pooled = (
                x.mean(1, keepdim=True)
                if weights is None
                else torch.einsum("bt,btd->bd", weights, x)[:, None]
            )
            x = torch.tanh(layer(x + pooled))
        return x


@register(sequences)
class Sizes(nn.Module):
    """Sizes in arithmetic, comparisons, ranges, f-strings, ``len``, ``numel`` and factory calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        b, t, c = x.shape
        half = t // 2 + t % 2
        x = torch.cat([self.layers[0](x[:, :half]), self.layers[1](x[:, half:])], 1)
        steps = torch.linspace(0, 1, t) * (b * t) ** -0.5
        x = x + steps.view(1, t, 1).expand(b, -1, c)
        diagonal = torch.eye(t)[None].repeat(b, 1, 1) + x.new_ones(b, 1, t).tril(t - b)
        x = self.layers[2](diagonal @ x) * (4 * b / x.numel())
        x = x.reshape(b, -1).unflatten(1, (t, c)) if len(x) == b else x
        scale = max(t, 4) / min(t, 1000)
        return self.layers[3](x) * scale, t * b


@register(rows)
class Randomness(nn.Module):
    """Draws of every kind in glue code, one of them unused."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(3)
        x = self.layers[0](x) + torch.randn_like(x) * 0.1
        keep = torch.bernoulli(torch.full((x.shape[0], 1), 0.8))
        x = F.dropout(self.layers[1](x * keep), 0.5, self.training)
        noise = torch.empty_like(x).uniform_(-0.1, 0.1)
        x = self.layers[2](x + noise)
        order = torch.randperm(x.shape[0])
        x = x[order]
        return self.layers[3](F.gumbel_softmax(x, tau=0.7)) + torch.normal(0.0, 1.0, size=x.shape)


@register(sequences)
class TrainingOnly(nn.Module):
    """A whole auxiliary head that exists in training only, and an average that exists in evaluation only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.aux, self.head = layers(), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> dict[str, Any]:
        features = []
        for layer in self.layers:
            x = F.relu(layer(x))
            features.append(x)
        if self.training:
            return {"out": self.head(x), "aux": self.aux(features[1])}
        return {"out": self.head(x), "aux": None, "mean": torch.stack(features).mean(0)}


@register(sequences)
class Einops(nn.Module):
    """Complex numbers, FFT mixing, einsum, sorting, cumulative sums and top-k in glue code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = torch.fft.irfft(torch.fft.rfft(x, dim=-1) * self.filter, n=WIDTH, dim=-1)
        x = self.layers[1](torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real)
        values, index = x.sort(dim=-1, descending=True)
        x = self.layers[2](values.cumsum(-1) / torch.arange(1, WIDTH + 1))
        top = x.gather(-1, index[..., :4]).sum(-1, keepdim=True)
        scores = torch.einsum("btd,bsd->bts", x, x).softmax(-1)
        return self.layers[3](scores @ x) * torch.where(top > 0, top, torch.ones_like(top))
