"""The second walk: models of other libraries, as their documentation builds them, small.

``python -m benchmarks.capture.libraries [PREFIX ...]`` tries each in this process and prints a table; libraries
that are not installed are left out and named. What is compared is left to ``trial``.
"""

# ruff: noqa: E501

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import logging
import pathlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import autopipe
from tests.zoo.observe import seed

from .inputs import Sizes
from .trial import N_STAGES, SOLVE_S, Subject, compare, n_blocks

__all__ = ["CASES", "main"]

if importlib.util.find_spec("torchvision") is not None and not hasattr(torch.ops.torchvision, "nms"):
    # a torchvision whose compiled ops do not fit this torch imports once the ops it speaks of are known by name
    for op in ("nms", "qnms"):
        torch.library.define(f"torchvision::{op}", "(Tensor boxes, Tensor scores, float threshold) -> Tensor")

LIMIT_S = 60
Inputs = Callable[[int, int], tuple[Any, ...]]
CASES: dict[str, tuple[Callable[[], nn.Module], Inputs]] = {}


def image(channels: int = 3, side: int = 64) -> Inputs:
    return lambda b, n: (torch.randn(b, channels, side * n // 32, side * n // 32),)


def fixed_image(channels: int = 3, side: int = 64) -> Inputs:
    return lambda b, n: (torch.randn(b, channels, side, side),)


def tokens(vocabulary: int = 64) -> Inputs:
    return lambda b, n: (torch.randint(1, vocabulary, (b, n)),)


def sequence(width: int = 32) -> Inputs:
    return lambda b, n: (torch.randn(b, n, width),)


def rows(width: int) -> Inputs:
    return lambda b, n: (torch.randn(b, width),)


def sound(factor: int = 320) -> Inputs:
    return lambda b, n: (torch.randn(b, 1, factor * n),)


def graph(width: int = 16) -> Inputs:
    return lambda b, n: (torch.randn(8 * b, width), torch.arange(8 * b).repeat(2, 2)[:, : 16 * b] % (8 * b))


def add(name: str, module: str, build: Callable[[Any], nn.Module], inputs: Inputs) -> None:
    """A model called ``name``, which ``build`` makes of the imported ``module``."""
    package = module.partition(".")[0]
    CASES[f"{package}/{name}"] = (lambda: build(importlib.import_module(module)), inputs)


def by_class(module: str, inputs: Inputs, **classes: dict[str, Any]) -> None:
    for name, options in classes.items():
        add(name, module, lambda m, n=name, o=options: getattr(m, n)(**o), inputs)


VIT = {
    "image_size": 64,
    "patch_size": 16,
    "num_classes": 10,
    "dim": 32,
    "depth": 3,
    "heads": 4,
    "mlp_dim": 64,
}
SQUARE = fixed_image()
for name, more in {
    "vit": {}, "simple_vit": {}, "deepvit": {}, "simple_flash_attn_vit": {},
    "vit_for_small_dataset": {}, "simple_vit_with_register_tokens": {}, "simple_vit_with_qk_norm": {},
    "simple_vit_with_patch_dropout": {}, "vit_with_patch_dropout": {}, "parallel_vit": {},
    "vit_with_patch_merger": {}, "rvt": {}, "local_vit": {},
}.items():  # fmt: skip
    title = {"simple_vit": "SimpleViT", "deepvit": "DeepViT", "rvt": "RvT", "local_vit": "LocalViT"}
    kind = title.get(name, "SimpleViT" if name.startswith("simple") else "ViT")
    add(name, f"vit_pytorch.{name}", lambda m, k=kind, o=more: getattr(m, k)(**VIT, **o), SQUARE)
add(
    "cait",
    "vit_pytorch.cait",
    lambda m: m.CaiT(**{**VIT, "depth": 2}, cls_depth=1, dropout=0.1, emb_dropout=0.1),
    SQUARE,
)
add(
    "twins",
    "vit_pytorch.twins_svt",
    lambda m: m.TwinsSVT(
        num_classes=10, s1_emb_dim=16, s2_emb_dim=16, s3_emb_dim=16, s4_emb_dim=16, s3_depth=1
    ),
    fixed_image(side=224),
)
add("mobile_vit", "vit_pytorch.mobile_vit", lambda m: m.MobileViT((64, 64), [24, 32, 40], [4, 4, 8, 8, 8, 8, 8, 8, 8, 8, 8], 10), SQUARE)  # fmt: skip
add("cct", "vit_pytorch.cct", lambda m: m.CCT(img_size=64, embedding_dim=32, n_conv_layers=2, kernel_size=7, stride=2, padding=3, pooling_kernel_size=3, pooling_stride=2, pooling_padding=1, num_layers=2, num_heads=4, mlp_ratio=2.0, num_classes=10, positional_embedding="learnable"), SQUARE)  # fmt: skip
add("mixer", "mlp_mixer_pytorch", lambda m: m.MLPMixer(image_size=64, channels=3, patch_size=16, dim=32, depth=3, num_classes=10), SQUARE)  # fmt: skip
add("gmlp", "g_mlp_pytorch", lambda m: m.gMLPVision(image_size=64, patch_size=16, num_classes=10, dim=32, depth=3), SQUARE)  # fmt: skip

LAYERS = {"dim": 32, "depth": 3, "heads": 4}
for name, more in {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 2},
    "t5_bias": {"rel_pos_bias": True}, "rmsnorm": {"use_rmsnorm": True}, "glu": {"ff_glu": True},
    "dropout": {"attn_dropout": 0.1, "ff_dropout": 0.1}, "qk_norm": {"attn_qk_norm": True},
    "kv_heads": {"attn_kv_heads": 2}, "sandwich": {"sandwich_norm": True}, "macaron": {"macaron": True},
}.items():  # fmt: skip
    add(name, "x_transformers", lambda m, o=more: m.TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=m.Decoder(**LAYERS, **o)), tokens())  # fmt: skip
add("encoder", "x_transformers", lambda m: m.TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=m.Encoder(**LAYERS)), tokens())  # fmt: skip
add("continuous", "x_transformers", lambda m: m.ContinuousTransformerWrapper(dim_in=32, dim_out=16, max_seq_len=64, attn_layers=m.Encoder(**LAYERS)), sequence())  # fmt: skip

by_class("torchvision.models", image(), resnet18={"num_classes": 10}, resnet50={"num_classes": 10},
    densenet121={"num_classes": 10}, mobilenet_v2={"num_classes": 10}, mobilenet_v3_small={"num_classes": 10},
    efficientnet_b0={"num_classes": 10}, regnet_y_400mf={"num_classes": 10}, shufflenet_v2_x0_5={"num_classes": 10},
    squeezenet1_1={"num_classes": 10}, convnext_tiny={"num_classes": 10}, mnasnet0_5={"num_classes": 10},
    swin_t={"num_classes": 10})  # fmt: skip
add("fcn", "torchvision.models.segmentation", lambda m: m.fcn_resnet50(weights=None, weights_backbone=None, num_classes=4), image())  # fmt: skip
for name in ["resnet10t.c3_in1k", "resnetv2_50", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "mixer_s32_224", "convnext_atto", "efficientnet_lite0", "mobilenetv3_small_050", "regnetx_002", "ghostnet_050", "tinynet_e", "lcnet_035", "poolformer_s12", "levit_128s", "xcit_nano_12_p16_224", "coat_tiny", "swin_tiny_patch4_window7_224", "mobilevit_xxs", "edgenext_xx_small", "repvgg_a0", "hrnet_w18_small", "gernet_s", "dla34", "pit_ti_224", "resmlp_12_224", "gmixer_12_224", "convmixer_768_32"]:  # fmt: skip
    side = 224 if "224" in name or name.startswith(("levit", "coat_", "xcit")) else 96
    name = name.partition(".")[0] if "c3" in name else name
    add(name, "timm", lambda m, n=name: m.create_model(n, num_classes=10), fixed_image(side=side))
SMP = {"encoder_name": "resnet18", "encoder_weights": None, "classes": 2}
by_class("segmentation_models_pytorch", image(), Unet=SMP, UnetPlusPlus=SMP, FPN=SMP, Linknet=SMP, PAN=SMP,
    DeepLabV3=SMP, DeepLabV3Plus=SMP, MAnet=SMP, UPerNet=SMP)  # fmt: skip
add("unet", "monai.networks.nets", lambda m: m.UNet(2, 1, 2, (8, 16, 32), (2, 2), num_res_units=2), image(1))
add("attention_unet", "monai.networks.nets", lambda m: m.AttentionUnet(2, 1, 2, (8, 16, 32), (2, 2)), image(1))  # fmt: skip
add("segresnet", "monai.networks.nets", lambda m: m.SegResNet(2, init_filters=8, in_channels=1), image(1))
add("vit", "monai.networks.nets", lambda m: m.ViT(1, 64, 16, hidden_size=32, mlp_dim=64, num_layers=3, num_heads=4, classification=True, spatial_dims=2), fixed_image(1))  # fmt: skip
add("densenet", "monai.networks.nets", lambda m: m.DenseNet121(2, 1, 4), image(1))
add("vnet", "monai.networks.nets", lambda m: m.BasicUNet(2, 1, 2, (8, 8, 16, 16, 32, 8)), image(1))

add("unet2d", "diffusers", lambda m: m.UNet2DModel(sample_size=32, in_channels=3, out_channels=3, layers_per_block=1, block_out_channels=(32, 64), down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D")), lambda b, n: (torch.randn(b, 3, n, n), torch.randint(100, (b,))))  # fmt: skip
add("unet2d_condition", "diffusers", lambda m: m.UNet2DConditionModel(sample_size=32, layers_per_block=1, block_out_channels=(32, 64), cross_attention_dim=32, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D")), lambda b, n: (torch.randn(b, 4, n, n), torch.randint(100, (b,)), torch.randn(b, 7, 32)))  # fmt: skip
add("autoencoder", "diffusers", lambda m: m.AutoencoderKL(block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2), image(3, 32))  # fmt: skip
add("vq", "diffusers", lambda m: m.VQModel(block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, num_vq_embeddings=32), image(3, 32))  # fmt: skip
add("dit", "diffusers", lambda m: m.DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=16, patch_size=2, num_embeds_ada_norm=10), lambda b, n: (torch.randn(b, 4, 16, 16), torch.randint(100, (b,)), torch.randint(10, (b,))))  # fmt: skip
add("prior", "diffusers", lambda m: m.PriorTransformer(num_attention_heads=2, attention_head_dim=16, num_layers=3, embedding_dim=32, num_embeddings=8), lambda b, n: (torch.randn(b, 32), torch.randint(100, (b,)), torch.randn(b, 32), torch.randn(b, 8, 32)))  # fmt: skip

GNN = {"in_channels": 16, "hidden_channels": 16, "num_layers": 3, "out_channels": 4}
by_class("torch_geometric.nn", graph(), GCN=GNN, GraphSAGE=GNN, GAT=GNN, GIN=GNN, PNA={**GNN, "aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(4, dtype=torch.long)}, EdgeCNN=GNN)  # fmt: skip
add("linkx", "torch_geometric.nn", lambda m: m.LightGCN(16, 8, 2), lambda b, n: (graph()(2, n)[1],))
add("schnet", "torch_geometric.nn", lambda m: m.SchNet(16, 16, 2, 8), lambda b, n: (torch.randint(1, 9, (5 * b,)), torch.randn(5 * b, 3), torch.arange(b).repeat_interleave(5)))  # fmt: skip
add("egnn", "egnn_pytorch", lambda m: m.EGNN_Network(depth=2, dim=16), lambda b, n: (torch.randn(b, n, 16), torch.randn(b, n, 3)))  # fmt: skip
add("gated", "e3nn.nn.models.v2106.gate_points_networks", lambda m: m.SimpleNetwork("3x0e", "2x0e", 1.5, 4, 8.0), lambda b, n: ({"pos": torch.randn(8, 3), "x": torch.randn(8, 3), "batch": torch.zeros(8, dtype=torch.long)},))  # fmt: skip
add("fno", "neuralop.models", lambda m: m.FNO((8, 8), 1, 1, 16, n_layers=3), image(1, 32))
add("uno", "neuralop.models", lambda m: m.TFNO((8, 8), 1, 1, 16, n_layers=3), image(1, 32))
add("siren", "siren_pytorch", lambda m: m.SirenNet(2, 16, 1, 3), rows(2))

add("wav2vec2", "torchaudio.models", lambda m: m.wav2vec2_model("group_norm", [(32, 10, 5), (32, 3, 4)], False, 32, 0.1, 8, 2, 3, 4, 0.1, 64, 0.1, 0.1, False, 0.1, 8), lambda b, n: (torch.randn(b, 100 * n),))  # fmt: skip
add("conformer", "torchaudio.models", lambda m: m.Conformer(32, 4, 64, 3, 7), lambda b, n: (torch.randn(b, n, 32), torch.full((b,), n)))  # fmt: skip
add("conv_tasnet", "torchaudio.models", lambda m: m.ConvTasNet(2, 16, 32, 3, 16, 32, 2, 2), sound())
add("deepspeech", "torchaudio.models", lambda m: m.DeepSpeech(32, 64, 10), lambda b, n: (torch.randn(b, 1, n, 32),))  # fmt: skip
add("wavernn", "torchaudio.models", lambda m: m.WaveRNN([4, 4, 4], 16, 64, n_res_block=2, n_rnn=32, n_fc=32, n_freq=16, n_hidden=16, n_output=16), lambda b, n: (torch.randn(b, 1, 64 * (n - 4)), torch.randn(b, 1, 16, n)))  # fmt: skip
add("conformer", "conformer", lambda m: m.Conformer(dim=32, depth=3, dim_head=16, heads=2), sequence())
add(
    "encodec", "encodec.modules", lambda m: m.SEANetEncoder(dimension=32, n_filters=4, ratios=[4, 2]), sound()
)
by_class("speechbrain.nnet.normalization", sequence(), LayerNorm={"input_size": 32})

for kind, options in {
    "VectorQuantize": {"dim": 32, "codebook_size": 16}, "FSQ": {"levels": [8, 5, 5], "dim": 32},
    "LFQ": {"dim": 32, "codebook_size": 16}, "ResidualVQ": {"dim": 32, "codebook_size": 16, "num_quantizers": 3},
    "SimVQ": {"dim": 32, "codebook_size": 16}, "ResidualFSQ": {"dim": 32, "levels": [8, 5], "num_quantizers": 2},
    "RandomProjectionQuantizer": {"dim": 32, "num_codebooks": 2, "codebook_dim": 8, "codebook_size": 16},
}.items():  # fmt: skip
    add(kind, "vector_quantize_pytorch", lambda m, k=kind, o=options: nn.Sequential(nn.Linear(32, 32), getattr(m, k)(**o)), sequence())  # fmt: skip

add("performer", "performer_pytorch", lambda m: m.PerformerLM(num_tokens=64, max_seq_len=64, dim=32, depth=3, heads=4, dim_head=8), tokens())  # fmt: skip
add("reformer", "reformer_pytorch", lambda m: m.ReformerLM(num_tokens=64, dim=32, depth=2, max_seq_len=64, heads=4, bucket_size=8, n_hashes=2), tokens())  # fmt: skip
add("perceiver", "perceiver_pytorch", lambda m: m.Perceiver(input_channels=3, input_axis=2, num_freq_bands=4, max_freq=8.0, depth=2, num_latents=8, latent_dim=32, num_classes=10), lambda b, n: (torch.randn(b, n, n, 3),))  # fmt: skip
add("linear_attention", "linear_attention_transformer", lambda m: m.LinearAttentionTransformerLM(num_tokens=64, dim=32, heads=4, depth=3, max_seq_len=64), tokens())  # fmt: skip
add("nystromformer", "nystrom_attention", lambda m: m.Nystromformer(dim=32, dim_head=8, heads=4, depth=3, num_landmarks=8), sequence())  # fmt: skip
add("sinkhorn", "sinkhorn_transformer", lambda m: m.SinkhornTransformerLM(num_tokens=64, dim=32, heads=4, depth=2, max_seq_len=64, bucket_size=8), tokens())  # fmt: skip
add("h_transformer", "h_transformer_1d", lambda m: m.HTransformer1D(num_tokens=64, dim=32, depth=2, max_seq_len=64, heads=4, dim_head=8, block_size=8), tokens())  # fmt: skip
add("axial", "axial_attention", lambda m: m.AxialAttention(dim=32, heads=4, num_dimensions=2), lambda b, n: (torch.randn(b, 8, 8, 32),))  # fmt: skip
add("tab_transformer", "tab_transformer_pytorch", lambda m: m.TabTransformer(categories=(4, 5), num_continuous=3, dim=16, dim_out=1, depth=3, heads=2), lambda b, n: (torch.randint(4, (b, 2)), torch.randn(b, 3)))  # fmt: skip
add("ft_transformer", "tab_transformer_pytorch", lambda m: m.FTTransformer(categories=(4, 5), num_continuous=3, dim=16, dim_out=1, depth=3, heads=2), lambda b, n: (torch.randint(4, (b, 2)), torch.randn(b, 3)))  # fmt: skip
by_class("rtdl_revisiting_models", rows(8), MLP={"d_in": 8, "d_out": 2, "n_blocks": 3, "d_block": 16, "dropout": 0.1}, ResNet={"d_in": 8, "d_out": 2, "n_blocks": 3, "d_block": 16, "d_hidden": 16, "d_hidden_multiplier": None, "dropout1": 0.1, "dropout2": 0.1})  # fmt: skip
add("tabm", "tabm", lambda m: m.TabM.make(n_num_features=8, d_out=2), rows(8))
add("tabnet", "pytorch_tabnet.tab_network", lambda m: m.TabNet(8, 2, group_attention_matrix=torch.eye(8)), rows(8))  # fmt: skip
add("neural_ode", "torchdiffeq", lambda m: _Ode(m), rows(8))
add("leaky", "snntorch", lambda m: _Spiking(m), rows(8))
add("spiking", "spikingjelly.activation_based", lambda m: _jelly(), rows(8))
add("realnvp", "nflows.transforms", lambda m: _Flow(m), rows(8))
add("nsf", "zuko.flows", lambda m: _Density(m), rows(4))
add("exact_gp", "gpytorch", lambda m: _Kernel(m), rows(4))
add("gpt", "litgpt", lambda m: m.GPT(m.Config(n_layer=3, n_head=4, n_embd=32, vocab_size=64, padded_vocab_size=64, block_size=64)), tokens())  # fmt: skip
add("mamba", "mambapy.mamba", lambda m: m.Mamba(m.MambaConfig(d_model=32, n_layers=3)), sequence())
add("ppo", "stable_baselines3.common.torch_layers", lambda m: m.MlpExtractor(8, [16, 16], nn.Tanh), rows(8))
add("yolo", "ultralytics.nn.tasks", lambda m: m.ClassificationModel("yolov8n-cls.yaml", nc=10, verbose=False), image())  # fmt: skip
add("clip_text", "open_clip.transformer", lambda m: m.TextTransformer(context_length=32, vocab_size=64, width=32, heads=4, layers=3), lambda b, n: (torch.randint(1, 64, (b, 32)),))  # fmt: skip
add("clip_vision", "open_clip.transformer", lambda m: m.VisionTransformer(64, 16, 32, 3, 4, 2.0), SQUARE)
add("efficientnet", "efficientnet_pytorch", lambda m: m.EfficientNet.from_name("efficientnet-b0", num_classes=10), image())  # fmt: skip
add("hardnet", "kornia.feature", lambda m: m.HardNet(), lambda b, n: (torch.randn(b, 1, 32, 32),))
add("enformer", "enformer_pytorch", lambda m: m.Enformer.from_hparams(dim=96, depth=2, heads=4, target_length=8, output_heads={"human": 5}), lambda b, n: (torch.randn(b, 1024, 4),))  # fmt: skip
add("unet", "denoising_diffusion_pytorch", lambda m: m.Unet(dim=16, dim_mults=(1, 2), flash_attn=False), lambda b, n: (torch.randn(b, 3, n, n), torch.randint(100, (b,))))  # fmt: skip
add("simclr", "lightly.models.modules", lambda m: m.SimCLRProjectionHead(32, 32, 16), rows(32))
add("byol", "lightly.models.modules", lambda m: m.BYOLProjectionHead(32, 64, 16), rows(32))


class _Ode(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.library = library
        self.inside = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = torch.linspace(0, 1, 5)
        return self.head(self.library.odeint(lambda t, y: self.inside(y), x, times, method="rk4")[-1])


class _Spiking(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.first, self.second = library.Leaky(0.9), library.Leaky(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.first.init_leaky(), self.second.init_leaky()
        out = []
        for _ in range(4):
            spikes, one = self.first(self.a(x), one)
            spikes, two = self.second(self.b(spikes), two)
            out.append(two)
        return torch.stack(out)


def _jelly() -> nn.Module:
    neuron = importlib.import_module("spikingjelly.activation_based.neuron")
    return nn.Sequential(nn.Linear(8, 16), neuron.IFNode(), nn.Linear(16, 4), neuron.IFNode())


class _Flow(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        made = [library.MaskedAffineAutoregressiveTransform(8, 16) for _ in range(3)]
        self.flow = library.CompositeTransform(made)

    def forward(self, x: torch.Tensor) -> Any:
        return self.flow(x)


class _Density(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.flow = library.NSF(4, transforms=2, hidden_features=(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.flow().log_prob(x).mean()


class _Kernel(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.kernel = library.kernels.ScaleKernel(library.kernels.RBFKernel())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel(self.features(x)).to_dense()


def tried(name: str) -> dict[str, Any]:
    """One model: ``eager`` says why it does not run by itself; else what was found of capture and parity."""
    build, inputs = CASES[name]
    found: dict[str, Any] = {"name": name}
    drawn = [0]

    def given(sizes: Sizes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        torch.manual_seed(drawn[0] + sizes.batch)
        return inputs(sizes.batch, sizes.length), {}

    try:
        seed()
        model = build().eval()
        args, _ = given(Sizes(2, 32))
        for training in (False, True):
            model.train(training)(*args)
        model.eval()
    except Exception as error:
        return {**found, "eager": f"{type(error).__name__}: {str(error)[:160]}"}
    start = time.perf_counter()
    try:
        captured = autopipe.capture(model, args)
        found["seconds"] = round(time.perf_counter() - start, 3)
        n_stages = min(N_STAGES, n_blocks(model))
        pipe = autopipe.split(
            model, n_stages, args, costs="estimated", n_microbatches=1, time_limit_s=SOLVE_S
        )
        runs = {"graph": captured, "stages": pipe}
    except autopipe.AutopipeError as error:
        return {**found, "refused": f"{type(error).__name__}: {str(error)[:300]}"}
    except Exception as error:
        return {**found, "raw": f"{type(error).__name__}: {str(error)[:300]}"}
    subject = Subject(model, given, "library")
    found |= compare(subject, runs)["stages"]
    drawn[0] = 1000
    other = compare(subject, {"stages": pipe})["stages"]
    found |= {"data": other["parity"], "data_problem": other.get("parity_problem", "")}
    return found


def each(names: list[str]) -> Iterator[dict[str, Any]]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"longer than {LIMIT_S} s")

    signal.signal(signal.SIGALRM, late)
    for name in names:
        signal.alarm(LIMIT_S)
        try:
            yield tried(name)
        except TimeoutError as error:
            yield {"name": name, "late": str(error)}
        finally:
            signal.alarm(0)


def main() -> None:
    """Try the models whose names start with one of the arguments, or all; see the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefixes", nargs="*")
    parser.add_argument("--json", type=pathlib.Path)
    asked = parser.parse_args()
    logging.getLogger("autopipe").setLevel(logging.ERROR)
    names = [n for n in CASES if not asked.prefixes or n.startswith(tuple(asked.prefixes))]
    results = []
    for found in each(names):
        results.append(found)
        print({k: v for k, v in found.items() if v not in ("", None)}, flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
