"""Inputs by rule: tensors for a model's forward, from its signature, main input name and config.

No model is named here. What is done with the inputs is left to ``trial``.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .configs import VOCAB, walk

__all__ = ["EXAMPLE", "OTHER_BATCH", "OTHER_LENGTH", "Recipe", "Sizes", "make", "recipes"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """How big the inputs are; ``stretch`` multiplies image sides and audio lengths."""

    batch: int
    length: int
    stretch: float = 1.0
    is_padded: bool = False


EXAMPLE = Sizes(2, 32)
OTHER_BATCH = Sizes(3, 32, is_padded=True)
OTHER_LENGTH = Sizes(2, 24, 1.5)


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """Which of several conventions a model follows where its signature does not tell."""

    labels: bool = True
    audio: str = "raw"
    image: str = "plain"
    media: bool = True
    cache: bool = True
    n_media_tokens: int = 0


def recipes(model: Any) -> Iterator[Recipe]:
    """The conventions to try, likeliest first."""
    names = set(inspect.signature(model.forward).parameters)
    has_audio = names & {"input_values", "input_features", "audio_values"}
    has_media = "input_ids" in names and names & {"pixel_values", "input_features", "input_values"}
    audio = ("raw", "mel-time", "time-mel") if has_audio else ("raw",)
    caches = (True, False) if "use_cache" in names else (True,)
    both = (True, False)
    image = ("plain", "sized", "tiles", "sized tiles") if "pixel_values" in names else ("plain",)
    for choice in itertools.product(both if has_media else (True,), caches, both, image, audio):
        media, cache, labels, picture, sound = choice
        yield Recipe(labels, sound, picture, media, cache)


def make(model: Any, task: str, sizes: Sizes, recipe: Recipe) -> dict[str, Any]:
    """Keyword arguments for ``model.forward``; equal arguments give equal tensors."""
    return _Maker(model, task, sizes, recipe).kwargs()


def find(config: Any, *names: str, default: Any = None) -> Any:
    """The first of ``names`` that the config or a nested one has and that is not None."""
    for name in names:
        for _, part in walk(config):
            value = vars(part).get(name, getattr(type(part), name, None))
            if value is not None and not isinstance(value, property):
                return value
    return default


class _Maker:
    def __init__(self, model: Any, task: str, sizes: Sizes, recipe: Recipe) -> None:
        self.model, self.config, self.task = model, model.config, task
        self.sizes, self.recipe = sizes, recipe
        self.parameters = inspect.signature(model.forward).parameters
        self.generator = torch.Generator().manual_seed(sizes.batch * 1000 + sizes.length)

    def kwargs(self) -> dict[str, Any]:
        out: dict[str, Any] = {} if self.recipe.cache else {"use_cache": False}
        makers = (self._text, self._media, self._decoder, self._labels)
        for maker in makers:
            out.update({k: v for k, v in maker().items() if k in self.parameters})
        return out

    # text

    def _ids(self, length: int) -> Tensor:
        special = {
            t
            for _, part in walk(self.config)
            for n, v in vars(part).items()
            if re.search(r"token_(id|index)$|_id$", n)
            for t in (v if isinstance(v, list) else [v])
            if isinstance(t, int)
        }
        vocab = min(int(find(self.config, "vocab_size", default=VOCAB) or VOCAB), VOCAB)
        allowed = torch.tensor([i for i in range(vocab) if i not in special and i > 3] or [0])
        picks = torch.randint(len(allowed), (self.sizes.batch, length), generator=self.generator)
        return allowed[picks]

    def _text(self) -> dict[str, Any]:
        if "input_ids" not in self.parameters:
            return {}
        length = self.sizes.length + (self.recipe.n_media_tokens if self.recipe.media else 0)
        if self.task == "zero-shot":
            length = min(length, int(find(self.config, "max_position_embeddings", default=length)))
        ids = self._ids(length)
        mask = torch.ones_like(ids)
        if self.sizes.is_padded:
            mask[0, -3:] = 0
            ids[0, -3:] = int(find(self.config, "pad_token_id", default=0))
        eos = find(self.config, "eos_token_id")
        if isinstance(eos, int) and 0 <= eos < VOCAB:
            last = mask.sum(-1, keepdim=True) - 1
            ids.scatter_(1, last, eos)
        out: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        if "bbox" in self.parameters:
            corners = torch.randint(0, 100, (*ids.shape, 2, 2), generator=self.generator).sort(-2).values
            out["bbox"] = corners.flatten(-2)
        out.update(self._place_media(ids))
        return out

    def _place_media(self, ids: Tensor) -> dict[str, Any]:
        n = self.recipe.n_media_tokens
        if not (self.recipe.media and n):
            return {}
        token = find(
            self.config, "image_token_id", "image_token_index", "audio_token_id", "audio_token_index"
        )
        if token is None:
            return {}
        ids[:, 1 : 1 + n] = token
        kinds = torch.zeros_like(ids)
        kinds[:, 1 : 1 + n] = 1
        return {n: kinds for n in ("mm_token_type_ids", "token_type_ids") if "mm" in n or self._required(n)}

    def _required(self, name: str) -> bool:
        return name in self.parameters and self.parameters[name].default is inspect.Parameter.empty

    # images and sound

    def _media(self) -> dict[str, Any]:
        if not self.recipe.media:
            return {}
        out: dict[str, Any] = {}
        if "pixel_values" in self.parameters:
            out.update(self._pixels())
        if {"input_values", "input_features"} & set(self.parameters):
            out.update(self._sound())
        return out

    def _pixels(self) -> dict[str, Any]:
        batch, config = self.sizes.batch, self.config
        channels = find(config, "num_channels", "in_channels", "in_chans", default=3)
        side = find(config, "image_size", "img_size", "input_size", default=64)
        height, width = side[-2:] if isinstance(side, (list, tuple)) and len(side) > 1 else (side, side)
        # a text holds a token for each piece of its image
        stretch = 1.0 if self.recipe.n_media_tokens else self.sizes.stretch
        height, width = int(height * stretch), int(width * stretch)
        if "image_grid_thw" in self.parameters or "image_grid_hws" in self.parameters:
            return self._patches(channels)
        shape: tuple[int, ...] = (batch, channels, height, width)
        frames = find(config, "num_frames")
        if frames and "video" in type(self.model).__name__.lower():
            shape = (batch, frames, *shape[1:])
        if "tiles" in self.recipe.image:
            shape = (batch, 1, *shape[1:])
        out: dict[str, Any] = {"pixel_values": self._normal(*shape)}
        if "sized" in self.recipe.image:
            out["image_sizes"] = torch.tensor([[height, width]] * batch)
        return out

    def _patches(self, channels: int) -> dict[str, Any]:
        patch = int(find(self.config, "patch_size", default=14))
        frames = int(find(self.config, "temporal_patch_size", default=1))
        rows = self.sizes.batch * 16
        grid = torch.tensor([[1, 4, 4]] * self.sizes.batch)
        pixels = self._normal(rows, channels * frames * patch * patch)
        return {"pixel_values": pixels, "image_grid_thw": grid, "image_grid_hws": grid[:, 1:]}

    def _sound(self) -> dict[str, Any]:
        batch, config = self.sizes.batch, self.config
        mels = int(
            find(
                config,
                "feature_projection_input_dim",
                "num_mel_bins",
                "n_mels",
                "feature_size",
                "input_feat_per_channel",
                default=80,
            )
        )
        frames = find(config, "max_source_positions")
        time = int((2 * frames if frames else find(config, "max_length", default=96)) * self.sizes.stretch)
        time = time if frames and self.recipe.audio == "mel-time" else min(time, 1024)
        shapes = {
            "raw": (batch, int(8000 * self.sizes.stretch)),
            "mel-time": (batch, mels, time),
            "time-mel": (batch, time, mels),
        }
        values = self._normal(*shapes[self.recipe.audio])
        name = "input_values" if "input_values" in self.parameters else "input_features"
        out: dict[str, Any] = {name: values}
        if "input_ids" not in self.parameters and "attention_mask" in self.parameters:
            steps = values.shape[1] if self.recipe.audio != "mel-time" else time
            mask = torch.ones(batch, steps, dtype=torch.long)
            if self.sizes.is_padded:
                mask[0, -steps // 8 :] = 0
            out["attention_mask"] = mask
        return out

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    # decoders and targets

    def _decoder(self) -> dict[str, Any]:
        if "decoder_input_ids" not in self.parameters or (
            self.task == "vision-text" and not self.recipe.labels
        ):
            return {}
        if self.task in ("sequence", "question", "token"):
            return {}
        return {"decoder_input_ids": self._ids(self.sizes.length // 2)}

    def _labels(self) -> dict[str, Any]:
        if not self.recipe.labels:
            return {}
        batch, length = self.sizes.batch, self.sizes.length
        if self.recipe.media and "decoder_input_ids" not in self.parameters:
            length += self.recipe.n_media_tokens
        if self.task == "question":
            return {n: self._below(length, batch) for n in ("start_positions", "end_positions")}
        n_labels = max(2, int(find(self.config, "num_labels", default=2)))
        if self.task in ("sequence", "image", "audio"):
            return {"labels": self._below(n_labels, batch)}
        if self.task == "token":
            return {"labels": self._below(n_labels, batch, length)}
        if self.task == "zero-shot":
            return {"return_loss": True}
        if self.task == "ctc":
            return {"labels": self._ids(2)}
        return {"labels": self._ids(length // 2 if "decoder_input_ids" in self.parameters else length)}

    def _below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)
