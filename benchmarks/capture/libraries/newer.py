"""Models of further libraries: attention of many kinds, medical networks, measures, codes and forecasts.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .catalogue import add, fixed_image, image, rows, sequence, tokens

__all__: list[str] = []

LM = {"num_tokens": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
LISTED = LM | {"max_seq_len": 64}


def pairs(b: int, n: int) -> tuple[Any, ...]:
    """Two images in [0, 1]."""
    return torch.rand(b, 3, 2 * n, 2 * n), torch.rand(b, 3, 2 * n, 2 * n)


def places(b: int, n: int) -> tuple[Any, ...]:
    """Features and coordinates of points."""
    return torch.randn(b, n, 16), torch.randn(b, n, 3)


def without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    """The options that are left."""
    return {k: v for k, v in options.items() if k not in names}


add("timesformer", "timesformer_pytorch", lambda m: m.TimeSformer(dim=32, image_size=32, patch_size=16, num_frames=4, num_classes=10, depth=2, heads=4, dim_head=8, attn_dropout=0.1), lambda b, n: (torch.randn(b, 4, 3, 32, 32),))
add("slots", "slot_attention", lambda m: m.SlotAttention(num_slots=5, dim=32, iters=3), sequence())
add("halo", "halonet_pytorch", lambda m: nn.Sequential(nn.Conv2d(3, 16, 1), m.HaloAttention(dim=16, block_size=4, halo_size=2, dim_head=8, heads=2), nn.ReLU(), m.HaloAttention(dim=16, block_size=4, halo_size=2, dim_head=8, heads=2)), image())
add("res_mlp", "res_mlp_pytorch", lambda m: m.ResMLP(image_size=64, patch_size=16, dim=32, depth=3, num_classes=10), fixed_image())
add("block_recurrent", "block_recurrent_transformer_pytorch", lambda m: m.BlockRecurrentTransformer(**LISTED, block_width=16, num_state_vectors=16, recurrent_layers=(2,), use_flash_attn=False), tokens())
add("megabyte", "MEGABYTE_pytorch", lambda m: m.MEGABYTE(num_tokens=64, dim=(32, 16), max_seq_len=(16, 4), depth=(2, 2), dim_head=8, heads=4, flash_attn=False), lambda b, n: (torch.randint(1, 64, (b, 2 * n)),))
add("mega", "mega_pytorch", lambda m: m.Mega(num_tokens=64, dim=32, depth=3, ema_heads=4, attn_dim_qk=16, attn_dim_value=32), tokens())
add("hourglass", "hourglass_transformer_pytorch", lambda m: m.HourglassTransformerLM(num_tokens=64, dim=32, max_seq_len=64, heads=4, dim_head=8, shorten_factor=2, depth=(1, 2, 1)), tokens())
add("token_shift", "token_shift_gpt", lambda m: m.TokenShiftGPT(num_tokens=64, dim=32, max_seq_len=64, depth=3), tokens())
add("cross", "bidirectional_cross_attention", lambda m: m.BidirectionalCrossAttention(dim=32, heads=4, dim_head=8, context_dim=16), lambda b, n: (torch.randn(b, n, 32), torch.randn(b, 7, 16)))
add("peer", "PEER_pytorch", lambda m: nn.Sequential(nn.Linear(32, 32), m.PEER(dim=32, heads=2, num_experts=64, num_experts_per_head=4, dim_key=16), nn.Linear(32, 4)), sequence())
add("charformer", "charformer_pytorch", lambda m: m.GBST(num_tokens=64, dim=32, max_block_size=4, downsample_factor=4, score_consensus_attn=True), tokens())
add("compressive", "compressive_transformer_pytorch", lambda m: m.CompressiveTransformer(num_tokens=64, emb_dim=32, dim=32, depth=2, heads=4, seq_len=64, mem_len=64, cmem_len=16, memory_layers=[2]), tokens())
add("fast", "fast_transformer_pytorch", lambda m: m.FastTransformer(**LISTED, absolute_pos_emb=True), lambda b, n: (torch.randint(1, 64, (b, n)), torch.ones(b, n).bool()))
add("perceiver_ar", "perceiver_ar_pytorch", lambda m: m.PerceiverAR(**(LISTED | {"dim_head": 32}), cross_attn_seq_len=16, cross_attn_dropout=0.5), lambda b, n: (torch.randint(1, 64, (b, n + 16)),))
add("recurrent_memory", "recurrent_memory_transformer_pytorch", lambda m: m.RecurrentMemoryTransformer(**LM, num_memory_tokens=4, seq_len=64, causal=True, use_flash_attn=False), tokens())
add("min_gru", "minGRU_pytorch.minGRULM", lambda m: m.minGRULM(num_tokens=64, dim=32, depth=3), tokens())
add("points", "point_transformer_pytorch", lambda m: m.PointTransformerLayer(dim=16, pos_mlp_hidden_dim=16, attn_mlp_hidden_mult=2), places)
add("graph_transformer", "graph_transformer_pytorch", lambda m: m.GraphTransformer(dim=32, depth=2, edge_dim=16, with_feedforwards=True, gated_residual=True, rel_pos_emb=True), lambda b, n: (torch.randn(b, n, 32), torch.randn(b, n, n, 16)))
add("xunet", "x_unet", lambda m: m.XUnet(dim=8, channels=3, dim_mults=(1, 2), nested_unet_depths=(1, 1), weight_standardize=False), image(3, 32))
add("roformer", "bs_roformer", lambda m: m.BSRoformer(dim=16, depth=1, time_transformer_depth=1, freq_transformer_depth=1, heads=2, dim_head=8, flash_attn=False, stft_n_fft=64, stft_hop_length=16, stft_win_length=64, freqs_per_bands=(9, 12, 12)), lambda b, n: (torch.randn(b, 16 * n),))
add("glom", "glom_pytorch", lambda m: m.Glom(dim=16, levels=3, image_size=32, patch_size=8), fixed_image(side=32))
add("deformable", "deformable_attention", lambda m: nn.Sequential(nn.Conv2d(3, 16, 1), m.DeformableAttention(dim=16, dim_head=8, heads=2, downsample_factor=4, offset_scale=4, offset_kernel_size=6)), image(3, 32))
add("isab", "isab_pytorch", lambda m: m.ISAB(dim=32, heads=4, num_latents=8), sequence())
add("memory_efficient", "memory_efficient_attention_pytorch", lambda m: m.Attention(dim=32, dim_head=8, heads=4, causal=True, memory_efficient=True, q_bucket_size=8, k_bucket_size=16), sequence())
add("uformer", "uformer_pytorch", lambda m: m.Uformer(dim=8, stages=2, num_blocks=1, window_size=8, dim_head=8, heads=2, ff_mult=2), image(3, 32))
add("triangle", "triangle_multiplicative_module", lambda m: nn.Sequential(nn.Linear(8, 16), m.TriangleMultiplicativeModule(dim=16, hidden_dim=16, mix="ingoing"), nn.Linear(16, 4)), lambda b, n: (torch.randn(b, n, n, 8),))
add("agent", "agent_attention_pytorch", lambda m: nn.Sequential(nn.Linear(32, 32), m.AgentSelfAttention(dim=32, num_agent_tokens=8, dim_head=8, heads=4), nn.Linear(32, 4)), sequence())
add("infini", "infini_transformer_pytorch", lambda m: m.InfiniTransformer(**LM), tokens())
add("mogrifier", "mogrifier", lambda m: m.Mogrifier(dim=32, iters=4, factorize_k=4), lambda b, n: (torch.randn(b, n, 32), torch.randn(b, n, 32)))
add("en", "en_transformer", lambda m: m.EnTransformer(dim=16, depth=2, dim_head=64, heads=2, edge_dim=0, neighbors=4), places)
add("gateloop", "gateloop_transformer", lambda m: m.Transformer(num_tokens=64, dim=32, depth=2, use_gate_looped_attn=True), tokens())
add("mlm", "mlm_pytorch", lambda m: m.MLM(importlib.import_module("x_transformers").TransformerWrapper(num_tokens=64, max_seq_len=64, attn_layers=importlib.import_module("x_transformers").Encoder(dim=32, depth=3, heads=4)), mask_token_id=2, pad_token_id=0, mask_prob=0.3), tokens())
add("flow", "rectified_flow_pytorch", lambda m: m.RectifiedFlow(m.rectified_flow.Unet(dim=8, dim_mults=(1, 2))), lambda b, n: (torch.rand(b, 3, 16, 16),))

add("plain_unet", "dynamic_network_architectures.architectures.unet", lambda m: m.PlainConvUNet(1, 3, [8, 16, 32], nn.Conv2d, 3, [1, 2, 2], [1, 1, 1], 2, [1, 1], conv_bias=True, norm_op=nn.InstanceNorm2d, norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU, deep_supervision=True), image(1))
add("residual_unet", "dynamic_network_architectures.architectures.unet", lambda m: m.ResidualEncoderUNet(1, 3, [8, 16, 32], nn.Conv2d, 3, [1, 2, 2], [1, 1, 1], 2, [1, 1], conv_bias=True, norm_op=nn.InstanceNorm2d, norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU), image(1))
add("lpips", "lpips", lambda m: m.LPIPS(net="alex", pretrained=False, pnet_rand=True, verbose=False), pairs)
for name in ["SSIMLoss", "MultiScaleSSIMLoss", "GMSDLoss", "VSILoss", "FSIMLoss", "HaarPSILoss", "VIFLoss", "MDSILoss", "TVLoss", "DSSLoss", "SRSIMLoss"]:
    add(name, "piq", lambda m, n=name: _Restored(getattr(m, n)(**({"kernel_size": 3} if n == "MultiScaleSSIMLoss" else {})), n == "TVLoss"), lambda b, n: (torch.rand(b, 3, 6 * n, 6 * n), torch.rand(b, 3, 6 * n, 6 * n)))
add("ssim", "pytorch_msssim", lambda m: _Restored(m.SSIM(data_range=1.0), False), pairs)
add("unmix", "openunmix.model", lambda m: m.OpenUnmix(nb_bins=33, nb_channels=1, hidden_size=16, nb_layers=2, max_bin=30), lambda b, n: (torch.rand(b, 1, 33, n),))
add("linear", "bayesian_torch.layers", lambda m: _Divergences([m.LinearReparameterization(8, 16), m.LinearFlipout(16, 16), m.LinearReparameterization(16, 2)]), rows(8))
add("packed", "torch_uncertainty.layers", lambda m: nn.Sequential(m.PackedLinear(8, 16, alpha=2, num_estimators=2, first=True), nn.ReLU(), m.PackedLinear(16, 4, alpha=2, num_estimators=2, last=True)), rows(8))
for name in ["VAE", "BetaVAE", "VQVAE", "RAE_L2", "WAE_MMD", "IWAE", "INFOVAE_MMD", "SVAE", "DisentangledBetaVAE", "AE", "BetaTCVAE", "VAMP", "LinNormFlow"]:
    add(name, "pythae.models", lambda m, n=name: _auto(m, n), lambda b, n: ({"data": torch.rand(b, 1, 28, 28)},))
add("resnet18", "antialiased_cnns", lambda m: m.resnet18(pretrained=False), image())
add("nbeats", "nbeats_pytorch.model", lambda m: m.NBeatsNet(stack_types=("trend", "seasonality", "generic"), forecast_length=4, backcast_length=16, hidden_layer_units=16, thetas_dim=(4, 4, 4), nb_blocks_per_stack=2), lambda b, n: (torch.randn(b, 16),))
for name, options in {"DnCNN": {"in_channels": 3, "out_channels": 3, "depth": 4, "nf": 8, "pretrained": None}, "UNet": {"in_channels": 3, "out_channels": 3, "scales": 2}, "DRUNet": {"in_channels": 3, "out_channels": 3, "nc": [8, 8, 8, 8], "nb": 1, "pretrained": None}, "SCUNet": {"in_nc": 3, "config": [1] * 7, "dim": 16, "pretrained": None}, "GSDRUNet": {"alpha": 1.0, "in_channels": 3, "out_channels": 3, "nb": 1, "nc": [8, 8, 8, 8], "pretrained": None}, "ArtifactRemoval": {}, "Restormer": {"in_channels": 3, "out_channels": 3, "dim": 8, "num_blocks": [1] * 4, "num_refinement_blocks": 1, "heads": [1] * 4, "pretrained": None}}.items():
    if options:
        add(name, "deepinv.models", lambda m, n=name, o=options: getattr(m, n)(**o), (lambda b, n: (torch.rand(b, 3, n, n), 0.1)) if "DRUNet" in name else image(3, 32))
add("vocos", "vocos.models", lambda m: m.VocosBackbone(input_channels=16, dim=32, intermediate_dim=64, num_layers=3), lambda b, n: (torch.randn(b, 16, n),))
add("xlstm", "xlstm", lambda m: _xlstm(m), sequence())
add("bnn", "torchbnn", lambda m: nn.Sequential(m.BayesLinear(prior_mu=0, prior_sigma=0.1, in_features=8, out_features=16), nn.ReLU(), m.BayesLinear(prior_mu=0, prior_sigma=0.1, in_features=16, out_features=2)), rows(8))
add("complex", "complexPyTorch.complexLayers", lambda m: _Complex(m), rows(8))
add("neural_ode", "torchdyn.core", lambda m: m.NeuralODE(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4)), solver="rk4", sensitivity="autograd", return_t_eval=False), rows(4))
add("resnest", "resnest.torch", lambda m: m.resnest50_fast_1s1x64d(num_classes=10), image())
add("wavelets", "pytorch_wavelets", lambda m: _Wavelets(m), image(3, 32))


class _Restored(nn.Module):
    """A small network that restores an image, and a measure of how well."""

    def __init__(self, measure: nn.Module, is_alone: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1), nn.Sigmoid())
        self.measure, self.is_alone = measure, is_alone

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        return self.measure(x) if self.is_alone else self.measure(x, y)


class _Divergences(nn.Module):
    """Layers that each return a divergence beside their result."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> Any:
        total = torch.zeros(())
        for layer in self.layers:
            x, divergence = layer(x)
            x, total = x.tanh(), total + divergence
        return x, total


def _auto(models: Any, name: str) -> nn.Module:
    config = getattr(models, f"{name}Config", None) or getattr(models, f"{name}_Config")
    return getattr(models, name)(config(input_dim=(1, 28, 28), latent_dim=4))


def _xlstm(library: Any) -> nn.Module:
    mlstm = library.mLSTMBlockConfig(mlstm=library.mLSTMLayerConfig(conv1d_kernel_size=4, qkv_proj_blocksize=4, num_heads=4))
    return library.xLSTMBlockStack(library.xLSTMBlockStackConfig(mlstm_block=mlstm, context_length=48, num_blocks=3, embedding_dim=32))


class _Complex(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.first, self.second = library.ComplexLinear(8, 16), library.ComplexLinear(16, 4)
        self.norm = library.ComplexBatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(torch.complex(x, x.flip(-1))))).abs()


class _Wavelets(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.apart, self.together = library.DWTForward(J=2, wave="db1", mode="zero"), library.DWTInverse(wave="db1", mode="zero")
        self.low, self.high = nn.Conv2d(3, 3, 1), nn.ModuleList([nn.Conv2d(3, 3, 1) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low, high = self.apart(x)
        high = [conv(h.transpose(1, 2).flatten(0, 1)).unflatten(0, h.shape[:1] + h.shape[2:3]).transpose(1, 2) for conv, h in zip(self.high, high, strict=True)]
        return self.together((self.low(low), high))
