"""Models that detect, read, compress, draw and follow images, of further libraries.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .catalogue import add, fixed_image, image, rows

__all__: list[str] = []

add("hiera", "hiera", lambda m: m.Hiera(input_size=(64, 64), embed_dim=16, num_heads=1, stages=(1, 1, 2, 1), mask_unit_size=(2, 2), q_pool=1, num_classes=10, drop_path_rate=0.1), fixed_image())
add("mae", "hiera", lambda m: m.MaskedAutoencoderHiera(input_size=(64, 64), embed_dim=16, num_heads=1, stages=(1, 1, 2, 1), decoder_embed_dim=16, decoder_depth=2, decoder_num_heads=2), fixed_image())
for name, kind in {"factorized": "FactorizedPrior", "hyper": "ScaleHyperprior", "mean_scale": "MeanScaleHyperprior", "context": "JointAutoregressiveHierarchicalPriors"}.items():
    add(name, "compressai.models", lambda m, k=kind: getattr(m, k)(N=8, M=12), lambda b, n: (torch.rand(b, 3, 2 * n - n % 32 * 2 + 64 * (n % 32 > 0), 64),))
add("attention", "compressai.models", lambda m: m.Cheng2020Attention(N=8), fixed_image())
add("db", "doctr.models.detection", lambda m: m.db_mobilenet_v3_large(pretrained=False, pretrained_backbone=False, exportable=True), image())
add("linknet", "doctr.models.detection", lambda m: m.linknet_resnet18(pretrained=False, pretrained_backbone=False, exportable=True), image())
add("densenet", "torchxrayvision.models", lambda m: m.DenseNet(num_classes=4, in_channels=1, growth_rate=8, block_config=(2, 2, 2), num_init_features=16), image(1))
add("autoencoder", "torchxrayvision.autoencoders", lambda m: m.ResNetAE(weights=None), fixed_image(1, 224))
add("generator", "torchgan.models", lambda m: m.DCGANGenerator(16, 32, 3, 8), rows(16))
add("discriminator", "torchgan.models", lambda m: m.DCGANDiscriminator(32, 3, 8), fixed_image(side=32))
add("conditional", "torchgan.models", lambda m: m.ConditionalGANGenerator(4, 16, 32, 3, 8), lambda b, n: (torch.randn(b, 16), torch.randint(4, (b,))))
add("unet", "azula.nn.unet", lambda m: m.UNet(in_channels=3, out_channels=3, mod_features=16, hid_channels=(8, 16), hid_blocks=(1, 1), groups=4, norm="group"), lambda b, n: (torch.randn(b, 3, n, n), torch.randn(b, 16)))
add("vit", "azula.nn.vit", lambda m: m.ViT(in_channels=3, out_channels=3, mod_features=16, hid_channels=32, hid_blocks=3, attention_heads=4, patch_size=4), lambda b, n: (torch.randn(b, 3, 32, 32), torch.randn(b, 16)))
add("denoiser", "azula.denoise", lambda m: _Denoiser(m), lambda b, n: (torch.randn(b, 8), torch.rand(b)))
add("flow", "torchcfm.models", lambda m: m.MLP(dim=2, w=16, time_varying=True), rows(3))
add("unet", "torchcfm.models.unet", lambda m: m.UNetModel(dim=(3, 16, 16), num_channels=32, num_res_blocks=1, channel_mult=(1, 2)), lambda b, n: (torch.rand(b), torch.randn(b, 3, 16, 16)))
add("small", "unet", lambda m: m.UNet2D(in_channels=1, out_classes=2, num_encoding_blocks=3, out_channels_first_layer=8, normalization="batch", padding=1), image(1, 32))
for name, of, options, inputs in [
    ("x3d", "x3d.create_x3d", {"input_clip_length": 4, "input_crop_size": 64, "model_num_class": 5}, lambda b, n: (torch.randn(b, 3, 4, 64, 64),)),
    ("slow", "resnet.create_resnet", {"input_channel": 3, "model_depth": 50, "model_num_class": 5, "head_pool_kernel_size": (4, 2, 2), "stem_dim_out": 8}, lambda b, n: (torch.randn(b, 3, 4, 64, 64),)),
    ("csn", "csn.create_csn", {"model_depth": 50, "model_num_class": 5, "head_pool_kernel_size": (1, 2, 2), "stem_dim_out": 16}, lambda b, n: (torch.randn(b, 3, 4, 64, 64),)),
    ("mvit", "vision_transformers.create_multiscale_vision_transformers", {"spatial_size": 32, "temporal_size": 4, "depth": 3, "patch_embed_dim": 16, "num_heads": 2, "head_num_classes": 5, "embed_dim_mul": [[1, 2.0]], "atten_head_mul": [[1, 2.0]], "pool_q_stride_size": [[1, 1, 2, 2]], "pool_kv_stride_adaptive": [1, 2, 2], "pool_kvq_kernel": [3, 3, 3]}, lambda b, n: (torch.randn(b, 3, 4, 32, 32),)),
]:
    add(name, f"pytorchvideo.models.{of.partition('.')[0]}", lambda m, f=of, o=options: getattr(m, f.partition(".")[2])(**o), inputs)
add("two", "x_clip", lambda m: m.CLIP(dim_text=32, dim_image=32, dim_latent=16, num_text_tokens=64, text_enc_depth=2, text_seq_len=32, text_heads=4, visual_enc_depth=2, visual_image_size=32, visual_patch_size=8, visual_heads=4, text_dim_head=8, visual_dim_head=8), lambda b, n: (torch.randint(1, 64, (b, 32)), torch.randn(b, 3, 32, 32)))


class _Denoiser(nn.Module):
    """A denoiser around a network of two arguments."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        noise = importlib.import_module("azula.noise")
        self.inner = m.KarrasDenoiser(_Timed(), noise.VPSchedule())

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> Any:
        return self.inner(x, t).mean


class _Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor, t: torch.Tensor, **more: Any) -> torch.Tensor:
        return self.layers(torch.cat([x, t[..., None].expand(*x.shape[:-1], 1)], -1))
