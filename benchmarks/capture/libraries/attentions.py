"""Transformers and attentions of many kinds, and models of clicks, of further libraries.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .catalogue import add, fixed_image, image, sequence, tokens

__all__: list[str] = []

add("mmdit", "mmdit", lambda m: _Keywords(m.MMDiT(depth=3, dim_text=16, dim_image=32, dim_cond=8, dim_head=8, heads=4), "text_tokens", "image_tokens", "time_cond"), lambda b, n: (torch.randn(b, 8, 16), torch.randn(b, n, 32), torch.randn(b, 8)))
add("generalized", "mmdit.mmdit_generalized_pytorch", lambda m: _Modalities(m.MMDiT(depth=2, dim_modalities=(16, 32, 24), dim_head=8, heads=4, num_residual_streams=1)), lambda b, n: (torch.randn(b, 8, 16), torch.randn(b, n, 32), torch.randn(b, 6, 24)))
add("ngpt", "nGPT_pytorch", lambda m: m.nGPT(num_tokens=64, dim=32, depth=3, dim_head=8, heads=4), tokens())
add("ngpt_manual", "nGPT_pytorch", lambda m: m.nGPT(num_tokens=64, dim=32, depth=3, dim_head=8, heads=4, manual_norm_weights=True, tied_embedding=True), tokens())
add("ntransformer", "nGPT_pytorch", lambda m: m.nTransformer(dim=32, depth=3, dim_head=8, heads=4), sequence())
add("ring", "ring_attention_pytorch", lambda m: m.RingTransformer(num_tokens=64, dim=32, depth=3, dim_head=8, heads=4, causal=True, bucket_size=8), tokens())
add("regular", "ring_attention_pytorch", lambda m: m.RingTransformer(num_tokens=64, dim=32, depth=3, dim_head=8, heads=4, force_regular_attn=True), tokens())
add("compositional", "compositional_attention_pytorch", lambda m: nn.Sequential(*[m.CompositionalAttention(dim=32, dim_head=8, num_searches=4, prenorm=True, causal=True) for _ in range(3)]), sequence())
add("rela", "rela_transformer", lambda m: m.ReLATransformer(num_tokens=64, dim=32, depth=3, max_seq_len=64, heads=4, dim_head=8, num_memory_kv=2), tokens())
add("ponder", "ponder_transformer", lambda m: _Keywords(m.PonderTransformer(num_tokens=64, dim=32, max_seq_len=64, heads=4, dim_head=8), "x", "labels"), lambda b, n: (torch.randint(64, (b, n)), torch.randint(64, (b, n))))
add("feedback", "feedback_transformer_pytorch", lambda m: m.FeedbackTransformer(num_tokens=64, dim=32, depth=3, seq_len=4, mem_len=16, heads=4, dim_head=8), tokens())
add("omninet", "omninet_pytorch", lambda m: m.Omninet(dim=32, depth=4, dim_head=8, heads=4, pool_layer_tokens_every=2), sequence())
add("causal", "omninet_pytorch", lambda m: m.OmninetCausal(dim=32, depth=4, dim_head=8, heads=4, pool_layer_tokens_every=2), sequence())
add("streams", "multistream_transformers", lambda m: m.MultistreamTransformer(dim=32, depth=2, num_tokens=64, max_seq_len=64, heads=4, dim_head=8, causal=True, num_streams=2), tokens())
add("stam", "stam_pytorch", lambda m: m.STAM(dim=32, image_size=32, patch_size=8, num_frames=3, num_classes=4, space_depth=2, space_heads=4, space_mlp_dim=32, time_depth=2, time_heads=4, time_mlp_dim=32, space_dim_head=8, time_dim_head=8), lambda b, n: (torch.randn(b, 3, 3, 32, 32),))
add("hamburger", "hamburger_pytorch", lambda m: nn.Sequential(nn.Conv2d(3, 16, 4, 4), m.Hamburger(dim=16, n=64, ratio=4, K=3), nn.Conv2d(16, 8, 1)), fixed_image(3, 32))
add("global", "gsa_pytorch", lambda m: nn.Sequential(nn.Conv2d(3, 16, 4, 4), m.GSA(dim=16, dim_out=32, dim_key=8, heads=4, rel_pos_length=16), nn.ReLU(), m.GSA(dim=32, dim_key=8, heads=4)), image())
add("groups", "lie_transformer_pytorch", lambda m: m.LieTransformer(num_tokens=16, dim=16, heads=2, dim_head=8, depth=2, liftsamples=1), lambda b, n: (torch.randint(16, (b, 12)), torch.randn(b, 12, 3)))
add("resampler", "flamingo_pytorch", lambda m: m.PerceiverResampler(dim=32, depth=2, dim_head=8, heads=4, num_latents=8), lambda b, n: (torch.randn(b, 1, n, 32),))
add("gated", "flamingo_pytorch", lambda m: _Media(m), lambda b, n: (torch.randn(b, n, 32), torch.randn(b, 2, 6, 32), torch.arange(n).remainder(8).eq(0).expand(b, n)))
add("tnt", "transformer_in_transformer", lambda m: m.TNT(image_size=32, patch_dim=32, pixel_dim=12, patch_size=8, pixel_size=4, depth=3, num_classes=4, heads=4, dim_head=8), fixed_image(3, 32))
add("uniformer", "uniformer_pytorch", lambda m: m.Uniformer(num_classes=4, dims=(8, 16, 16, 32), depths=(1, 1, 1, 1), dim_head=8), lambda b, n: (torch.randn(b, 3, 4, 32, 32),))
add("hierarchical", "simple_hierarchical_transformer", lambda m: m.HierarchicalTransformer(num_tokens=64, dim=32, depth=2, seq_len=64, dim_head=8, heads=4, hierarchies=(1, 2), window_sizes=(16, None)), tokens())
add("bottleneck", "discrete_key_value_bottleneck_pytorch", lambda m: nn.Sequential(nn.Linear(8, 16), m.DiscreteKeyValueBottleneck(dim=16, num_memories=16, dim_memory=8, decay=0.9), nn.Linear(8, 4)), sequence(8))
add("zorro", "zorro_pytorch", lambda m: _Keywords(m.Zorro(32, 2, dim_head=8, heads=4, num_fusion_tokens=4, audio_patch_size=8, video_patch_size=8), "audio", "video"), lambda b, n: (torch.randn(b, 1024), torch.randn(b, 3, 4, 16, 16)))
add("complex", "complex_valued_transformer", lambda m: m.ComplexTransformer(32, depth=2, num_tokens=64, causal=True, dim_head=8, heads=4), tokens())
add("sparse", "native_sparse_attention_pytorch.transformer", lambda m: m.Transformer(num_tokens=64, dim=32, depth=2, dim_head=8, heads=4, use_sparse_attn=True, sparse_attn_kwargs={"sliding_window_size": 8, "compress_block_size": 4, "compress_block_sliding_stride": 2, "selection_block_size": 4, "num_selected_blocks": 2}), tokens())
add("streams", "hyper_connections", lambda m: _Streams(m), sequence())
add("sru", "sru", lambda m: _Recurrent(m.SRU(16, 16, num_layers=3, dropout=0.1, layer_norm=True)), lambda b, n: (torch.randn(n, b, 16),))
add("srupp", "sru", lambda m: _Recurrent(m.SRUpp(16, 32, 16, num_layers=2, dropout=0.1)), lambda b, n: (torch.randn(n, b, 16),))

FIELDS = {"field_dims": torch.tensor([10, 20, 5]).numpy(), "embed_dim": 8}
for name, kind, more in [
    ("xdfm", "xdfm.ExtremeDeepFactorizationMachineModel", {"mlp_dims": (16, 16), "dropout": 0.1, "cross_layer_sizes": (8, 8)}),
    ("afn", "afn.AdaptiveFactorizationNetwork", {"LNN_dim": 16, "mlp_dims": (16, 16), "dropouts": (0, 0.1, 0.1)}),
    ("afm", "afm.AttentionalFactorizationMachineModel", {"attn_size": 8, "dropouts": (0.1, 0.1)}),
    ("fnfm", "fnfm.FieldAwareNeuralFactorizationMachineModel", {"mlp_dims": (16,), "dropouts": (0.1, 0.1)}),
    ("pnn", "pnn.ProductNeuralNetworkModel", {"mlp_dims": (16,), "dropout": 0.1, "method": "outer"}),
]:
    add(name, "torchfm.model", lambda m, k=kind, o=more: getattr(importlib.import_module(f"torchfm.model.{k.partition('.')[0]}"), k.partition(".")[2])(**FIELDS, **o), lambda b, n: (torch.randint(5, (b, 3)),))


class _Keywords(nn.Module):
    """A model that takes its inputs by name."""

    def __init__(self, model: nn.Module, *names: str) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *given: torch.Tensor) -> Any:
        return self.model(**dict(zip(self.names, given, strict=True)))


class _Modalities(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *given: torch.Tensor) -> Any:
        return self.model(modality_tokens=given)


class _Media(nn.Module):
    """Text that looks at the pictures before it."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([m.GatedCrossAttentionBlock(dim=32, dim_head=8, heads=4) for _ in range(3)])

    def forward(self, x: torch.Tensor, media: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, media, media_locations=places)
        return x


class _Streams(nn.Module):
    """Residual streams that layers mix."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        made, self.expand, self.reduce = m.get_init_and_expand_reduce_stream_functions(4)
        self.layers = nn.ModuleList([made(dim=32, branch=nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU())) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.expand(x)
        for layer in self.layers:
            x = layer(x)
        return self.reduce(x)


class _Recurrent(nn.Module):
    """Layers in turn along the first axis, and a head."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.head = layers, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0])
