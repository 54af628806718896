"""Models that solve, learn from tables, hear and see on spheres, of further libraries.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .catalogue import add, fixed_image, rows, sequence, tokens

__all__: list[str] = []

add("transfo_xl", "pytorch_pretrained_bert.modeling_transfo_xl", lambda m: m.TransfoXLModel(m.TransfoXLConfig(64, cutoffs=[16, 32], d_model=32, d_embed=32, n_head=4, d_head=8, d_inner=64, n_layer=3, tgt_len=16, mem_len=16)), tokens())
add("choices", "pytorch_pretrained_bert.modeling", lambda m: m.BertForMultipleChoice(m.BertConfig(64, 32, 3, 4, 64), 3), lambda b, n: (torch.randint(64, (b, 3, n)),))
add("double_heads", "pytorch_pretrained_bert.modeling_openai", lambda m: m.OpenAIGPTDoubleHeadsModel(m.OpenAIGPTConfig(64, n_positions=64, n_ctx=64, n_embd=32, n_layer=3, n_head=4)), lambda b, n: (torch.randint(64, (b, 2, n)), torch.randint(n, (b, 2))))
add("vit", "pytorch_pretrained_vit", lambda m: m.ViT(patches=8, dim=32, ff_dim=64, num_heads=4, num_layers=3, image_size=32, num_classes=4, dropout_rate=0.1), fixed_image(3, 32))
add("mnasnet_small", "geffnet", lambda m: m.mnasnet_small(num_classes=4), fixed_image(3, 64))
add("efficientnet_cc", "geffnet", lambda m: m.efficientnet_cc_b0_4e(num_classes=4, drop_connect_rate=0.1), fixed_image(3, 64))
add("broyden", "torchdeq", lambda m: _Equilibrium(m, "broyden"), rows(8))
add("anderson", "torchdeq", lambda m: _Equilibrium(m, "anderson"), rows(8))
add("programs", "qpth.qp", lambda m: _Programs(m), rows(8))
add("lasso", "lassonet.model", lambda m: m.LassoNet(8, 16, 16, 4, dropout=0.1), rows(8))
add("mixture", "pomegranate.gmm", lambda m: _Mixture(m), rows(4))
add("geometric", "lgatr", lambda m: _Geometric(m), lambda b, n: (torch.randn(b, n, 4),))
add("slim", "lgatr", lambda m: m.LGATrSlim(num_blocks=2, in_v_channels=1, out_v_channels=1, hidden_v_channels=8, in_s_channels=2, out_s_channels=3, hidden_s_channels=16, num_heads=2), lambda b, n: (torch.randn(b, n, 1, 4), torch.randn(b, n, 2)))
add("kan", "neuromancer.modules.blocks", lambda m: m.KANBlock(4, 2, hsizes=[8, 8], grid_sizes=[5]), rows(4))
add("convex", "neuromancer.modules.blocks", lambda m: m.InputConvexNN(4, 2, hsizes=[8, 8], nonlin=nn.Softplus), rows(4))
add("stacked", "neuromancer.modules.blocks", lambda m: m.StackedMLP(4, 2, n_stacked_mf_layers=3), rows(4))
add("mfcc", "diffsptk", lambda m: nn.Sequential(m.STFT(64, 16, 64), m.MFCC(fft_length=64, mfcc_order=8, n_channel=16, sample_rate=8000, learnable=True), nn.Linear(8, 4)), lambda b, n: (torch.randn(b, 16 * n),))
add("mcep", "diffsptk", lambda m: nn.Sequential(nn.Linear(64, 64), m.STFT(64, 16, 64), m.MelCepstralAnalysis(fft_length=64, cep_order=8, alpha=0.3, n_iter=2), nn.Linear(9, 4)), lambda b, n: (torch.randn(b, 64),))
add("sfno", "torch_harmonics.examples.models.sfno", lambda m: m.SphericalFourierNeuralOperator(img_size=(16, 32), embed_dim=8, num_layers=2, scale_factor=2), lambda b, n: (torch.randn(b, 3, 16, 32),))
add("crepe", "torchcrepe.model", lambda m: m.Crepe("tiny"), lambda b, n: (torch.randn(b, 1024),))
add("llama", "curated_transformers.models.llama", lambda m: _Curated(m.LlamaCausalLM(_llama(m))), tokens())
add("transunet", "self_attention_cv.transunet", lambda m: m.TransUnet(in_channels=3, img_dim=64, vit_blocks=2, vit_dim_linear_mhsa_block=64, classes=3), fixed_image(3, 64))
add("unetr", "self_attention_cv.UnetTr.UnetTr", lambda m: m.UNETR(img_shape=(32, 32, 32), input_dim=1, output_dim=2, embed_dim=32, patch_size=16, num_heads=4, ext_layers=[1, 2, 3, 4], base_filters=4, dim_linear_block=64), lambda b, n: (torch.randn(b, 1, 32, 32, 32),))
add("msa", "self_attention_cv.MSA_transformer", lambda m: m.MSATransformerEncoder(dim=32, rows=4, blocks=3, heads=4, dim_linear_block=64), lambda b, n: (torch.randn(b, 4, n, 32),))
add("reversible", "revtorch", lambda m: nn.Sequential(nn.Linear(8, 16), m.ReversibleSequence(nn.ModuleList([m.ReversibleBlock(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(3)]), eagerly_discard_variables=False), nn.Linear(16, 4)), rows(8))
add("posterior", "lampe.inference", lambda m: m.NPE(3, 8, hidden_features=[16, 16], transforms=2), lambda b, n: (torch.randn(b, 3), torch.randn(b, 8)))
add("flow_matching", "lampe.inference", lambda m: _Guided(m.FMPE(3, 8, hidden_features=[16, 16])), lambda b, n: (torch.randn(b, 3), torch.randn(b, 8), torch.rand(b)))
add("bert", "bert_pytorch", lambda m: m.BERT(64, hidden=32, n_layers=3, attn_heads=4), lambda b, n: (torch.randint(1, 64, (b, n)), torch.randint(1, 3, (b, n))))
add("weight_drop", "torchnlp.nn", lambda m: _Dropped(m), sequence(16))
add("crystals", "chgnet.model.functions", lambda m: nn.Sequential(m.GatedMLP(8, 16, hidden_dim=16, norm="layer"), m.MLP(16, hidden_dim=(16, 16), output_dim=2)), rows(8))


class _Equilibrium(nn.Module):
    """A layer that is applied until it changes nothing."""

    def __init__(self, m: Any, solver: str) -> None:
        super().__init__()
        self.first, self.layer, self.head = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.deq = m.get_deq(f_solver=solver, f_max_iter=12, b_max_iter=12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = self.first(x)
        found, _ = self.deq(lambda z: torch.tanh(0.5 * self.layer(z) + u), torch.zeros_like(u))
        return self.head(found[-1])


class _Programs(nn.Module):
    """A layer that solves a quadratic program for each row."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.m, self.first, self.head = m, nn.Linear(8, 6), nn.Linear(6, 2)
        self.bounds = nn.Parameter(torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = self.first(x)
        none = x.new_zeros(0)
        return self.head(self.m.QPFunction(verbose=-1)(torch.eye(6).to(x), p, self.bounds, x.new_ones(4), none, none))


class _Mixture(nn.Module):
    """How likely features are under a mixture of normal distributions."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        normal = importlib.import_module("pomegranate.distributions").Normal
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.mixture = m.GeneralMixtureModel([normal([float(i)] * 3, [1.0, 2.0, 0.5], covariance_type="diag") for i in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixture.log_probability(self.net(x))


class _Geometric(nn.Module):
    """Momenta of particles, as multivectors."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.m = m
        self.model = m.LGATr(num_blocks=2, in_mv_channels=1, out_mv_channels=1, hidden_mv_channels=4, in_s_channels=0, out_s_channels=0, hidden_s_channels=8, attention={"num_heads": 2}, mlp={})

    def forward(self, x: torch.Tensor) -> Any:
        out, _ = self.model(self.m.embed_vector(x).unsqueeze(-2))
        return self.m.extract_scalar(out).mean(1)


class _Curated(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.mask = model, importlib.import_module("curated_transformers.layers").AttentionMask

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, self.mask(torch.ones_like(ids).bool())).logits


def _llama(m: Any) -> Any:
    return m.LlamaConfig(hidden_width=32, intermediate_width=64, n_query_heads=4, n_hidden_layers=3, n_key_value_heads=2, n_pieces=64, rotary_embedding_fraction=1.0)


class _Guided(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, theta: torch.Tensor, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.model(theta, x, t)


class _Dropped(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.first, self.layers, self.attend = nn.Linear(16, 16), nn.ModuleList([m.WeightDropLinear(16, 16, weight_dropout=0.2) for _ in range(2)]), m.Attention(16)
        self.lock = m.LockedDropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(self.lock(x))
        for layer in self.layers:
            h = torch.relu(layer(h))
        return self.attend(h, x)[0]
