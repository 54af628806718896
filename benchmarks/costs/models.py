"""The models that costs are checked on: six shapes of network, sized for a CPU thread.

Running them is left to the other modules of this benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .elsewhere import ELSEWHERE, SHAPES, prepare

__all__ = ["MODELS", "build"]

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


class Unet(nn.Module):
    """A U-Net of ``depth`` levels with two convolutions each way per level; returns its loss."""

    def __init__(self, width: int = 32, depth: int = 3, n_channels: int = 3):
        super().__init__()
        widths = [width * 2**i for i in range(depth)]
        self.down = nn.ModuleList(
            _convolutions(a, b) for a, b in zip([n_channels, *widths], widths, strict=False)
        )
        self.middle = _convolutions(widths[-1], 2 * widths[-1])
        self.up = nn.ModuleList(_convolutions(3 * b, b) for b in reversed(widths))
        self.head = nn.Conv2d(width, n_channels, 1)

    def forward(self, image: Tensor, clean: Tensor) -> Tensor:
        h, skips = image, []
        for block in self.down:
            h = block(h)
            skips.append(h)
            h = F.max_pool2d(h, 2)
        h = self.middle(h)
        for block in self.up:
            h = block(torch.cat([F.interpolate(h, scale_factor=2.0), skips.pop()], 1))
        return F.mse_loss(self.head(h), clean)


def _convolutions(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, padding=1),
        nn.GroupNorm(8, n_out),
        nn.SiLU(),
        nn.Conv2d(n_out, n_out, 3, padding=1),
        nn.GroupNorm(8, n_out),
        nn.SiLU(),
    )


def _text(model: nn.Module, batch: int, seq: int) -> Built:
    ids = torch.randint(1, model.config.vocab_size, (batch, seq))
    return model, (), {"input_ids": ids, "labels": ids}


def _image(model: nn.Module, batch: int, size: int) -> Built:
    labels = torch.randint(0, model.config.num_labels, (batch,))
    return model, (), {"pixel_values": torch.randn(batch, 3, size, size), "labels": labels}


def gpt2(batch: int = 8, seq: int = 128, n_layer: int = 8) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=384, n_layer=n_layer, n_head=6, vocab_size=8000, bos_token_id=0, eos_token_id=0
    )
    return _text(GPT2LMHeadModel(config), batch, seq)


def llama(batch: int = 8, seq: int = 128, n_layer: int = 8) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=n_layer,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=8000,
    )
    return _text(LlamaForCausalLM(config), batch, seq)


def bert(batch: int = 8, seq: int = 128) -> Built:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=6,
        vocab_size=8000,
    )
    return _text(BertForMaskedLM(config), batch, seq)


def vit(batch: int = 8, size: int = 96) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=6,
        image_size=size,
        patch_size=8,
        num_labels=100,
    )
    return _image(ViTForImageClassification(config), batch, size)


def resnet(batch: int = 8, size: int = 96) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic")
    config.num_labels = 100
    return _image(ResNetForImageClassification(config), batch, size)


def unet(batch: int = 8, size: int = 64) -> Built:
    return Unet(), (), {k: torch.randn(batch, 3, size, size) for k in ("image", "clean")}


MODELS: Mapping[str, Callable[..., Built]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
    "unet": unet,
}


def build(name: str, **sizes: int) -> Built:
    """A model by name, in training mode, with its example inputs."""
    torch.manual_seed(0)
    if name in ELSEWHERE:
        prepare()
        sizes.setdefault("batch", max(8, SHAPES[name][1]))
    model, args, kwargs = {**MODELS, **ELSEWHERE}[name](**sizes)
    return model.train(), args, kwargs
