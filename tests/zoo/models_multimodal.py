"""Vision-language models whose images come as packed patches, beside a grid that says whose they are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import register

IMAGE, VOCAB, WIDTH, PATCH = 3, 40, 24, 12


def documents(
    grids: list[tuple[int, int, int]], length: int = 24, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """One text and one image of ``(frames, height, width)`` patches per sample, the first text padded."""
    generator = torch.Generator().manual_seed(len(grids) * 100 + length)
    ids = torch.randint(4, VOCAB, (len(grids), length), generator=generator)
    for text, (frames, height, width) in zip(ids, grids, strict=True):
        text[1 : 1 + frames * height * width // 4] = IMAGE
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    n_patches = sum(frames * height * width for frames, height, width in grids)
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(n_patches, PATCH, generator=generator).to(dtype),
        "image_grid_thw": torch.tensor(grids),
        "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | (ids == IMAGE), -100),
    }


def _documents(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (), documents([(1, 4, 4)] * batch, length)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).transpose(-4, -2).unbind(-3)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(mixed.transpose(-3, -2).flatten(-2))
        return x + self.mlp(x)


class Tower(nn.Module):
    """Patches attend to those of their own image; four neighbours make a token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed = nn.Linear(PATCH, WIDTH)
        self.rows, self.columns = nn.Embedding(8, WIDTH), nn.Embedding(8, WIDTH)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.merger = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, pixels: Tensor, grid: Tensor) -> Tensor:
        where, counts = [], []
        for frames, height, width in grid.tolist():
            at = torch.cartesian_prod(torch.arange(height), torch.arange(width))
            where.append(at.repeat(frames, 1))
            counts.append(frames * height * width)
        rows, columns = torch.cat(where).unbind(-1)
        x = self.patch_embed(pixels) + self.rows(rows) + self.columns(columns)
        image = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        for block in self.blocks:
            x = block(x, image[:, None] == image)
        return self.merger(x.unflatten(0, (-1, 4)).flatten(1))


@register(_documents)
class PackedPatches(nn.Module):
    """Image tokens scattered into the text; tower and model read the grid in Python, as Qwen-VL does."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = Tower()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(4))
        self.lm_head = nn.Linear(WIDTH, VOCAB)

    def image_features(self, pixels: Tensor, grid: Tensor) -> tuple[Tensor, ...]:
        """The tokens of each image."""
        return torch.split(self.visual(pixels, grid), (grid.prod(-1) // 4).tolist())

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor,
        image_grid_thw: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
    ) -> dict[str, Tensor]:
        x = self.embed_tokens(input_ids)
        images = torch.cat(self.image_features(pixel_values, image_grid_thw))
        is_image = (input_ids == IMAGE).unsqueeze(-1).expand_as(x)
        x = x.masked_scatter(is_image, images)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask = (causal & attention_mask[:, None, :].bool())[:, None]
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits, "images": images}


def _crops(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Three crops of every image, one after another, before the texts that they belong to."""
    generator = torch.Generator().manual_seed(batch)
    crops = torch.randn(3 * batch, 3, length // 8 * 8, length // 8 * 8, generator=generator)
    return (crops, torch.randint(0, VOCAB, (batch, 9), generator=generator)), {}


@register(_crops)
class PackedCrops(nn.Module):
    """As many crops to each text, told apart by their number alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 4, 4)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))
        self.words = nn.Embedding(VOCAB, WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, crops: Tensor, ids: Tensor) -> Tensor:
        seen = self.stem(crops).flatten(2).mean(-1)
        x = torch.cat([seen.view(ids.shape[0], -1, WIDTH), self.words(ids)], 1)
        return self.head(self.blocks(x).mean(1))
