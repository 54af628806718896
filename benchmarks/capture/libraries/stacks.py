"""Layers of many papers, stacked as people stack them: attentions, recurrences, low bits, complex numbers.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .catalogue import add, fixed_image, image, rows, sequence, tokens

__all__: list[str] = []


class _Stack(nn.Module):
    """Layers between an embedding and a head, added to their input; a layer's first result counts."""

    def __init__(self, layers: Any, width: int = 32, *, n_tokens: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(n_tokens, width) if n_tokens else nn.Linear(width, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, n_tokens or width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            made = layer(x)
            x = x + (made[0] if isinstance(made, tuple) else made)
        return self.head(x)


class _Self(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(x, x, x)


class _Keywords(nn.Module):
    """A model that takes its further arguments by name."""

    def __init__(self, body: nn.Module, *names: str, **given: Any) -> None:
        super().__init__()
        self.body, self.names, self.given = body, names, given

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        return self.body(x, **dict(zip(self.names, more, strict=True)), **self.given)


def _fixed_sequence(width: int = 32, length: int = 32) -> Any:
    return lambda b, n: (torch.randn(b, length, width),)


# recurrences and long convolutions
add("block", "light_recurrent_unit_pytorch", lambda m: m.LightRecurrentUnitBlock(32, depth=3, heads=2, has_ff_block=True), sequence())
add("unit", "light_recurrent_unit_pytorch", lambda m: _Stack([m.LightRecurrentUnit(32, depth=2) for _ in range(2)]), sequence())
add("gated", "light_recurrent_unit_pytorch", lambda m: _Stack([m.GatedLightRecurrentUnit(32, depth=2) for _ in range(2)]), sequence())
add("lru", "LRU_pytorch", lambda m: _Stack([m.LRU(in_features=32, out_features=32, state_features=16) for _ in range(3)]), sequence())
add("gss", "gated_state_spaces_pytorch", lambda m: m.GatedStateSpacesLM(num_tokens=64, dim=32, depth=3, dss_kernel_N=16, dss_kernel_H=16), tokens())
add("ds_conv", "gated_state_spaces_pytorch.dsconv", lambda m: m.GatedDsConvLM(num_tokens=64, dim=32, depth=3, heads=4, dim_dsconv=32, max_seq_len=64), tokens())
add("smoothing", "gated_state_spaces_pytorch.mhesa", lambda m: m.GatedExponentialSmoothingLM(num_tokens=64, dim=32, depth=3, heads=4, dim_mhesa=32), tokens())
add("ets", "etsformer_pytorch", lambda m: _Keywords(m.ETSFormer(time_features=4, model_dim=32, embed_kernel_size=3, layers=2, heads=4, K=4), num_steps_forecast=4), lambda b, n: (torch.randn(b, n, 4),))
add("classes", "etsformer_pytorch", lambda m: m.ClassificationWrapper(etsformer=m.ETSFormer(time_features=1, model_dim=32, layers=2, heads=4, K=4), heads=4, dim_head=8), lambda b, n: (torch.randn(b, 64),))

# attentions
add("flash", "flash_pytorch", lambda m: m.FLASHTransformer(num_tokens=64, dim=32, depth=3, causal=True, group_size=16, query_key_dim=16), tokens())
add("flash_both_ways", "flash_pytorch", lambda m: m.FLASHTransformer(num_tokens=64, dim=32, depth=3, group_size=16, query_key_dim=16, laplace_attn_fn=True, norm_type="layernorm"), tokens())
add("gau", "flash_pytorch", lambda m: nn.Sequential(*(m.GAU(dim=32, query_key_dim=16, causal=True, rel_pos_bias=True) for _ in range(4))), sequence())
for _name in ("AFTFull", "AFTSimple", "AFTLocal"):
    add(_name, "aft_pytorch", lambda m, n=_name: _Stack([getattr(m, n)(32, 32, hidden_dim=16, **({"s": 8} if n == "AFTLocal" else {})) for _ in range(4)]), _fixed_sequence())
add("adjacent", "adjacent_attention_network", lambda m: m.AdjacentAttentionNetwork(dim=32, depth=3, heads=2, dim_head=16), lambda b, n: (torch.randn(b, n, 32), torch.randint(0, 2, (b, n, n)).bool() | torch.eye(n, dtype=torch.bool)))
add("on_attention", "aoa_pytorch", lambda m: _Stack([m.AttentionOnAttention(dim=32, heads=2, dim_head=16) for _ in range(4)]), sequence())
add("kronecker", "kronecker_attention_pytorch", lambda m: nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(m.KroneckerSelfAttention(dim=32, heads=2, dim_heads=16) for _ in range(3)), nn.Conv2d(32, 3, 1)), image(side=16))
add("remixer", "remixer_pytorch", lambda m: _Stack([m.RemixerBlock(dim=32, seq_len=32, causal=True) for _ in range(4)], n_tokens=64), lambda b, n: (torch.randint(0, 64, (b, 32)),))
add("involution", "involution_pytorch", lambda m: nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(nn.Sequential(m.Inv2d(channels=32, kernel_size=3, stride=1), nn.GroupNorm(4, 32), nn.ReLU()) for _ in range(3)), nn.Conv2d(32, 3, 1)), image(side=16))
add("hpb", "ITTR_pytorch", lambda m: nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *(m.HPB(dim=32, dim_head=16, heads=2, attn_height_top_k=4, attn_width_top_k=4) for _ in range(3)), nn.Conv2d(32, 3, 1)), image(side=16))
add("grams", "n_grammer_pytorch", lambda m: _Stack([m.VQNgrammer(num_clusters=16, dim_per_head=16, num_heads=2, ngram_vocab_size=128, ngram_emb_dim=8, concat_ngrams=True), nn.LayerNorm(32), nn.Linear(32, 32)], n_tokens=64), tokens())
add("dilated", "dilated_attention_pytorch.dilated_attention", lambda m: _Stack([_Self(m.MultiheadDilatedAttention(32, 4, dilation_rates=[1, 2], segment_lengths=[8, 16])) for _ in range(3)]), sequence())
add("tversky", "tversky_neural_network", lambda m: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), m.TverskyProjectionLayer(16, 16, 8), m.TverskyProjectionLayer(16, 4, 8)), rows(8))


class _Memories(nn.Module):
    """Blocks that look into memories."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(m.HTMBlock(dim=32, heads=2, dim_head=16, topk_mems=2, mem_chunk_size=8) for _ in range(3))
        self.head = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor, memories: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, memories)
        return self.head(x)


add("memories", "htm_pytorch", _Memories, lambda b, n: (torch.randn(b, n, 32), torch.randn(b, 40, 32)))
add("symbols", "esbn_pytorch", lambda m: m.ESBN(value_dim=16, key_dim=16, hidden_dim=32, output_dim=4, encoder=nn.Sequential(nn.Flatten(1), nn.Linear(3 * 8 * 8, 32), nn.ReLU(), nn.Linear(32, 16))), lambda b, n: (torch.randn(3, b, 3, 8, 8),))

# proteins, tables and functions
add("bert", "protein_bert_pytorch", lambda m: m.ProteinBERT(num_tokens=21, num_annotation=32, dim=32, dim_global=16, depth=3, attn_heads=2, attn_dim_head=16, local_to_global_attn=True), lambda b, n: (torch.randint(0, 21, (b, n)), torch.randint(0, 2, (b, 32)).float()))
add("bert_attends", "protein_bert_pytorch", lambda m: _Keywords(m.ProteinBERT(num_tokens=21, num_annotation=32, dim=32, dim_global=16, depth=3, attn_heads=2, attn_dim_head=16, local_self_attn=True, num_global_tokens=2, glu_conv=True), "annotation", "mask"), lambda b, n: (torch.randint(0, 21, (b, n)), torch.randint(0, 2, (b, 32)).float(), torch.arange(n) < torch.randint(n // 2, n, (b, 1))))
add("additive", "nam_pytorch", lambda m: m.NAM(6), rows(6))
add("mixer", "mlp_mixer", lambda m: m.MLPMixer(img_size=32, img_channels=3, num_classes=10, mixer_depth=3, num_patches=16, num_channels=32, expansion=2, dropout=0.0), fixed_image(side=32))
add("hyper", "hypnettorch.hnets.mlp_hnet", lambda m: _Hyper(m), rows(4))


class _Hyper(nn.Module):
    """A network whose weights another makes of a task's embedding."""

    def __init__(self, hnets: Any) -> None:
        super().__init__()
        from hypnettorch.mnets.mlp import MLP

        self.main = MLP(n_in=4, n_out=2, hidden_layers=(16, 16), no_weights=True, verbose=False)
        self.maker = hnets.HMLP(self.main.param_shapes, cond_in_size=8, layers=(32, 32), num_cond_embs=3, verbose=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.main.forward(x, weights=self.maker.forward(cond_id=1))


# low bits
add("bits", "bitlinear", lambda m: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), m.BitLinear(64, 64), nn.ReLU(), m.BitLinear(64, 64), nn.ReLU(), nn.Linear(64, 8)), rows(32))
add("bits_of_model", "bitlinear", lambda m: (lambda net: (m.bitlinearize(net), net)[1])(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))), rows(32))
add("transformer", "bitnet", lambda m: m.BitNetTransformer(num_tokens=64, dim=64, depth=2, heads=8, ff_mult=2), tokens())
add("feed_forward", "bitnet", lambda m: _Stack([m.BitFeedForward(32, 32, 2, swish=True, post_act_ln=True) for _ in range(4)]), sequence())

# complex numbers
_waves = lambda width: lambda b, n: (torch.randn(b, n, width, dtype=torch.complex64),)  # noqa: E731


class _Absolute(nn.Module):
    """A complex network and the sizes of what it makes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).abs()


add("encoder", "torchcvnn.nn", lambda m: _Absolute(nn.Linear(8, 16, dtype=torch.complex64), m.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0), m.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0, norm_first=True), nn.Linear(16, 4, dtype=torch.complex64)), _waves(8))
add("convolutions", "torchcvnn.nn", lambda m: _Absolute(nn.Conv2d(1, 8, 3, padding=1, dtype=torch.complex64), m.BatchNorm2d(8), m.modReLU(), m.AvgPool2d(2, 2, 0), nn.Conv2d(8, 8, 3, padding=1, dtype=torch.complex64), m.CReLU(), nn.Conv2d(8, 2, 1, dtype=torch.complex64)), lambda b, n: (torch.randn(b, 1, n, n, dtype=torch.complex64),))
add("kan", "complextorch.models", lambda m: _Absolute(m.CVKAN([4, 8, 8, 2])), lambda b, n: (torch.randn(b, 4, dtype=torch.complex64),))
add("vit", "complextorch.models", lambda m: _Absolute(m.ViT(image_size=16, patch_size=4, in_channels=1, num_classes=4, dim=16, depth=3, heads=2, mlp_dim=32)), lambda b, n: (torch.randn(b, 1, 16, 16, dtype=torch.complex64),))
add("steinmetz", "complextorch.models", lambda m: _Absolute(m.SteinmetzNetwork(4, 16, 2)), lambda b, n: (torch.randn(b, 4, dtype=torch.complex64),))
add("rotated", "complexNN.nn", lambda m: _Absolute(m.cLinear(8, 16), m.cRelu(), m.cLinear(16, 16), m.cRelu(), m.cLinear(16, 4)), _waves(8))

# points
add("classes", "pointnet", lambda m: m.PointNetCls(3, 10, stn_3d=m.STN(in_dim=3), dropout=0.0), lambda b, n: (torch.randn(b, 3, n),))
add("parts", "pointnet", lambda m: m.PointNetSeg(3, 10, stn_3d=m.STN(in_dim=3)), lambda b, n: (torch.randn(b, 3, n),))
add("no_turn", "pointnet", lambda m: m.PointNetCls(3, 10, stn_3d=None, dropout=0.0), lambda b, n: (torch.randn(b, 3, n),))
