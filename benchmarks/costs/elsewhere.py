"""Models of other packages that predictions are held against, chosen before any of them was measured.

The six that costs were made with are in ``models``. Sizes are for a CPU thread; each returns its loss. What a
package needs is imported when its model is built: ``pip install x-transformers vit-pytorch diffusers mambapy
litgpt timm monai mlp-mixer-pytorch linear-attention-transformer segmentation-models-pytorch``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["CROWDED", "ELSEWHERE", "SHAPES", "prepare"]

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
V = 4000


class Tokens(nn.Module):
    """A language model with its loss: logits ``[batch, seq, vocab]`` against the tokens themselves."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.model(ids)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Classes(nn.Module):
    """A classifier with its loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.model(image), label)


class Dense(nn.Module):
    """A net whose output has its input's rows, with its loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.model(x), y)


class Recurrent(nn.Module):
    """Embedding, LSTM layers, head."""

    def __init__(self, width: int = 256, n_layers: int = 4):
        super().__init__()
        self.embedding = nn.Embedding(V, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(n_layers))
        self.head = nn.Linear(width, V)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embedding(ids)
        for layer in self.layers:
            h = layer(h)[0]
        return self.head(h)


class Denoising(nn.Module):
    """A diffusers net at a fixed time, with its loss."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, noisy: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        return F.mse_loss(self.model(noisy, time).sample, noise)


def prepare() -> None:
    """Lets torchvision be imported beside a torch that its compiled operators are not built for."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


_libraries: list[torch.library.Library] = []


def _ids(batch: int, seq: int) -> Tensor:
    return torch.randint(1, V, (batch, seq))


def _pictures(batch: int, size: int, n_classes: int = 100) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, size, size), torch.randint(0, n_classes, (batch,))


def x_decoder(batch: int) -> Built:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=256, depth=6, heads=4, rotary_pos_emb=True)
    return (
        Tokens(TransformerWrapper(num_tokens=V, max_seq_len=128, attn_layers=layers)),
        (_ids(batch, 96),),
        {},
    )


def simple_vit(batch: int) -> Built:
    from vit_pytorch.simple_vit import SimpleViT

    net = SimpleViT(image_size=96, patch_size=8, num_classes=100, dim=256, depth=6, heads=4, mlp_dim=768)
    return Classes(net), _pictures(batch, 96), {}


def mixer(batch: int) -> Built:
    from mlp_mixer_pytorch import MLPMixer

    net = MLPMixer(image_size=96, channels=3, patch_size=8, dim=256, depth=6, num_classes=100)
    return Classes(net), _pictures(batch, 96), {}


def convnext(batch: int) -> Built:
    import timm

    return Classes(timm.create_model("convnext_atto", num_classes=100)), _pictures(batch, 96), {}


def efficientnet(batch: int) -> Built:
    import timm

    return Classes(timm.create_model("efficientnet_lite0", num_classes=100)), _pictures(batch, 96), {}


def mamba(batch: int) -> Built:
    from mambapy.mamba import Mamba, MambaConfig

    body = Mamba(MambaConfig(d_model=128, n_layers=4))
    return Tokens(nn.Sequential(nn.Embedding(V, 128), body, nn.Linear(128, V))), (_ids(batch, 64),), {}


def lstm(batch: int) -> Built:
    return Tokens(Recurrent()), (_ids(batch, 64),), {}


def pythia(batch: int) -> Built:
    from litgpt.config import Config
    from litgpt.model import GPT

    net = GPT(Config(n_layer=6, n_head=4, n_embd=256, block_size=128, padded_vocab_size=V, vocab_size=V))
    return Tokens(net), (_ids(batch, 96),), {}


def linear_attention(batch: int) -> Built:
    from linear_attention_transformer import LinearAttentionTransformerLM

    net = LinearAttentionTransformerLM(num_tokens=V, dim=256, heads=4, depth=4, max_seq_len=128, causal=False)
    return Tokens(net), (_ids(batch, 128),), {}


def diffusion_unet(batch: int) -> Built:
    from diffusers import UNet2DModel

    net = UNet2DModel(
        sample_size=32,
        block_out_channels=(64, 128),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=32,
    )
    noisy, noise = torch.randn(batch, 3, 32, 32), torch.randn(batch, 3, 32, 32)
    return Denoising(net), (noisy, noise, torch.full((batch,), 10)), {}


def volume_unet(batch: int) -> Built:
    from monai.networks.nets import BasicUNet

    net = BasicUNet(spatial_dims=3, in_channels=1, out_channels=1, features=(16, 16, 32, 64, 64, 16))
    return Dense(net), (torch.randn(batch, 1, 32, 32, 32), torch.randn(batch, 1, 32, 32, 32)), {}


def segmentation(batch: int) -> Built:
    import segmentation_models_pytorch as smp

    net = smp.Unet("resnet18", encoder_weights=None, classes=3)
    return Dense(net), (torch.randn(batch, 3, 96, 96), torch.randn(batch, 3, 96, 96)), {}


def t5(batch: int) -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=V,
        d_model=256,
        d_kv=64,
        d_ff=768,
        num_layers=4,
        num_heads=4,
        use_cache=False,
        dropout_rate=0.0,
    )
    ids = _ids(batch, 64)
    shifted = F.pad(ids[:, :-1], (1, 0))
    net = T5ForConditionalGeneration(config)
    return net, (), {"input_ids": ids, "decoder_input_ids": shifted, "labels": ids + 0}


def mixtral(batch: int) -> Built:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=V,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
    )
    ids = _ids(batch, 64)
    return MixtralForCausalLM(config), (), {"input_ids": ids, "labels": ids.clone()}


ELSEWHERE: Mapping[str, Callable[[int], Built]] = {
    f.__name__: f
    for f in (
        x_decoder, simple_vit, mixer, convnext, efficientnet, mamba, lstm, pythia, linear_attention,
        diffusion_unet, volume_unet, segmentation, t5, mixtral,
    )
}  # fmt: skip
"""By name, what builds a model and its example batch of a given size."""

SHAPES: Mapping[str, tuple[int, int]] = {
    name: (n_ranks, n_microbatches)
    for name, n_ranks, n_microbatches in (
        ("x_decoder", 2, 8), ("simple_vit", 2, 4), ("mixer", 2, 16), ("convnext", 2, 8),
        ("efficientnet", 2, 4), ("mamba", 2, 4), ("lstm", 2, 8), ("pythia", 2, 2), ("linear_attention", 2, 8),
        ("diffusion_unet", 2, 4), ("volume_unet", 2, 2), ("segmentation", 2, 4), ("t5", 2, 8),
        ("mixtral", 1, 8),
    )
}  # fmt: skip
"""Ranks and microbatches of each, settled before any was measured."""

CROWDED: Mapping[str, tuple[int, int]] = {"x_decoder": (4, 8), "simple_vit": (3, 8), "t5": (4, 8)}
"""Some of them on more ranks than a machine of two cores can run at once."""
