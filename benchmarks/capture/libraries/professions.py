"""Models of packages on forecasts of weather and series, survival, control, letters and several media.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .by_hand import ids
from .catalogue import add, by_class, fixed_image, image, rows, tokens

__all__: list[str] = []


class Behind(nn.Module):
    """A net, and a loss of a package on what it gives and the other arguments."""

    def __init__(self, net: nn.Module, loss: Callable[..., Any], squeezes: bool = False) -> None:
        super().__init__()
        self.net, self.loss, self.squeezes = net, loss, squeezes

    def forward(self, x: Tensor, *others: Tensor) -> tuple[Tensor, Tensor]:
        out = self.net(x)
        out = out.squeeze(-1) if self.squeezes else out
        return self.loss(out, *others), out


def net(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.ReLU()]
    return nn.Sequential(*layers[:-2])


def survival(b: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features, durations and events, of which the first took place."""
    return torch.randn(b, 8), torch.rand(b) + 0.1, (torch.rand(b) < 0.7).index_fill(0, torch.tensor(0), True)


def discrete(b: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    x, _, event = survival(b, n)
    return x, torch.randint(0, 10, (b,)), event.float()


# pycox and torchsurv
for loss_name, inputs in (("NLLLogistiHazardLoss", discrete), ("NLLPMFLoss", discrete), ("NLLMTLRLoss", discrete), ("BCESurvLoss", discrete), ("CoxPHLoss", survival)):
    add(loss_name, "pycox.models.loss", lambda m, name=loss_name: Behind(net(8, 32, 32, 1 if name == "CoxPHLoss" else 10), getattr(m, name)(), name == "CoxPHLoss"), inputs)
add("NLLPCHazardLoss", "pycox.models.loss", lambda m: Behind(net(8, 32, 32, 10), m.NLLPCHazardLoss()), lambda b, n: (*discrete(b, n), torch.rand(b)))
add("DeepHitSingleLoss", "pycox.models.loss", lambda m: Behind(net(8, 32, 32, 10), m.DeepHitSingleLoss(0.2, 0.1)), lambda b, n: (*discrete(b, n), torch.ones(b, b).triu(1)))
add("cox", "torchsurv.loss.cox", lambda m: Behind(net(8, 32, 32, 1), lambda out, time, event: m.neg_partial_log_likelihood(out, event, time)), survival)
add("weibull", "torchsurv.loss.weibull", lambda m: Behind(net(8, 32, 32, 2), lambda out, time, event: m.neg_log_likelihood_weibull(out, event, time)), survival)


# weather: metnet, dgmr
add("metnet", "metnet", lambda m: m.MetNet(input_channels=3, sat_channels=3, input_size=16, output_channels=4, hidden_dim=16, num_att_layers=1, num_att_heads=4, forecast_steps=6, use_preprocessor=False), lambda b, n: (torch.randn(b, 4, 3, 16, 16), 2))
by_class("metnet.layers", fixed_image(6, 32), DownSampler={"in_channels": 6, "output_channels": 64})
by_class("metnet.layers", lambda b, n: (torch.randn(b, 4, 6, 8, 8),), ConvGRU={"input_dim": 6, "hidden_dim": 8, "kernel_size": (3, 3), "n_layers": 2, "input_p": 0.0, "hidden_p": 0.0})
by_class("dgmr", lambda b, n: (torch.rand(b, 4, 1, 64, 64),), SpatialDiscriminator={"input_channels": 1, "num_timesteps": 2, "num_layers": 2}, TemporalDiscriminator={"input_channels": 1, "num_layers": 2})
by_class("dgmr.layers", fixed_image(8, 8), AttentionLayer={"input_channels": 8, "output_channels": 8})
by_class("dgmr.layers", fixed_image(3, 16), CoordConv={"in_channels": 3, "out_channels": 8, "with_r": True, "kernel_size": 3})


# control: elegantrl
by_class("elegantrl.agents.net", rows(8),
    QNetDuel={"dims": [32, 32], "state_dim": 8, "action_dim": 3},
    QNetTwinDuel={"dims": [32, 32], "state_dim": 8, "action_dim": 3},
    ActorSAC={"dims": [32, 32], "state_dim": 8, "action_dim": 3},
    ActorPPO={"dims": [32, 32], "state_dim": 8, "action_dim": 3},
    DenseNet={"lay_dim": 8},
)
by_class("elegantrl.agents.net", lambda b, n: (torch.randn(b, 8), torch.randn(b, 3)), CriticTwin={"dims": [32, 32], "state_dim": 8, "action_dim": 3})


# letters: deep-phonemizer, easyocr
def padded(b: int, n: int) -> Tensor:
    """Token ids, of which the last of the second row are padding."""
    x = ids(b, n)
    x[1:, -4:] = 0
    return x


add("forward", "dp.model.model", lambda m: m.ForwardTransformer(64, 30, d_model=32, d_fft=64, layers=2, heads=2), lambda b, n: ({"text": padded(b, n)},), package="deep_phonemizer")
add("autoregressive", "dp.model.model", lambda m: m.AutoregressiveTransformer(64, 64, 1, d_model=32, d_fft=64, encoder_layers=2, decoder_layers=2, heads=2), lambda b, n: ({"text": padded(b, n), "phonemes": padded(b, 12)},), package="deep_phonemizer")
add("crnn", "easyocr.model.model", lambda m: m.Model(1, 32, 16, 20), lambda b, n: (torch.randn(b, 1, 32, 4 * n), torch.zeros(b, 4, dtype=torch.long)))
add("vgg", "easyocr.model.vgg_model", lambda m: m.Model(1, 32, 16, 20), lambda b, n: (torch.randn(b, 1, 32, 4 * n), torch.zeros(b, 4, dtype=torch.long)))


# sequences and memories: dnc, tft-torch, umnn, toto
by_class("dnc", lambda b, n: (torch.randn(b, 8, 6),), DNC={"input_size": 6, "hidden_size": 12, "num_hidden_layers": 1, "nr_cells": 5, "cell_size": 4, "read_heads": 2})
by_class("tft_torch.tft", lambda b, n: (torch.randn(b, n, 16), torch.randn(b, n, 8)), GatedResidualNetwork={"input_dim": 16, "hidden_dim": 16, "output_dim": 12, "context_dim": 8, "dropout": 0.0})
by_class("tft_torch.tft", lambda b, n: (torch.randn(b, 64), torch.randn(b, 8)), VariableSelectionNetwork={"input_dim": 16, "num_inputs": 4, "hidden_dim": 16, "dropout": 0.0, "context_dim": 8})
by_class("tft_torch.tft", lambda b, n: (torch.randn(b, 8, 16), torch.randn(b, n, 16), torch.randn(b, n, 16)), InterpretableMultiHeadAttention={"embed_dim": 16, "num_heads": 4})
add("monotonic", "UMNN", lambda m: m.MonotonicNN(3, [16, 16], nb_steps=10), lambda b, n: (torch.randn(b, 1), torch.randn(b, 2)))
add("flow", "UMNN", lambda m: m.UMNNMAFFlow(nb_flow=2, nb_in=4, hidden_derivative=[16, 16], hidden_embedding=[16, 16], embedding_s=6, nb_steps=10), rows(4))
add("toto", "toto.model.backbone", lambda m: m.Transformer(num_layers=3, embed_dim=32, num_heads=4, mlp_hidden_dim=64, dropout=0.0, spacewise_every_n_layers=3, spacewise_first=False, use_memory_efficient_attention=False), lambda b, n: (torch.randn(b, 3, 8, 32), torch.zeros(b, 1, 8)))


# pictures: pytorch3dunet, torchseg, facexlib, x-metaformer, bit-diffusion, nuwa, muse-maskgit, dropblock
by_class("pytorch3dunet.unet3d.model", lambda b, n: (torch.randn(b, 1, 8, 16, 16),),
    UNet3D={"in_channels": 1, "out_channels": 2, "f_maps": 8, "num_groups": 4, "num_levels": 3},
    ResidualUNet3D={"in_channels": 1, "out_channels": 2, "f_maps": 8, "num_groups": 4, "num_levels": 3},
    ResidualUNetSE3D={"in_channels": 1, "out_channels": 2, "f_maps": 8, "num_groups": 4, "num_levels": 3},
)
for name in ("Unet", "FPN", "MAnet", "DeepLabV3Plus"):
    add(name, "torchseg", lambda m, name=name: getattr(m, name)("resnet10t", encoder_weights=None, classes=3), fixed_image())
add("bisenet", "facexlib.parsing.bisenet", lambda m: m.BiSeNet(5), fixed_image())
by_class("x_metaformer", image(),
    CAFormer={"in_channels": 3, "depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64), "num_heads": 2, "drop_path_rate": 0.0},
    ConvFormer={"in_channels": 3, "depths": (1, 1, 1, 1), "dims": (8, 16, 32, 64), "drop_path_rate": 0.1},
)
add("unet", "bit_diffusion", lambda m: m.Unet(dim=8, dim_mults=(1, 2), channels=3, bits=2, resnet_block_groups=4), lambda b, n: (torch.randn(b, 6, 16, 16), torch.rand(b)))
add("vqgan", "nuwa_pytorch", lambda m: m.VQGanVAE(dim=16, image_size=32, num_layers=2, vq_codebook_size=32, vq_codebook_dim=16, use_vgg_and_gan=False, vq_kmeans_init=False, resnet_groups=4, attn_heads=2, attn_dim_head=8), fixed_image(3, 32))
add("vqgan", "muse_maskgit_pytorch", lambda m: m.VQGanVAE(dim=16, codebook_size=32, layers=2, use_vgg_and_gan=False), fixed_image(3, 32))
add("blocks", "dropblock", lambda m: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), m.DropBlock2D(0.2, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), m.DropBlock2D(0.1, 3), nn.Flatten(), nn.LazyLinear(4)), fixed_image(3, 16))


# layers: rational, fft-conv, monotonenorm, cached-conv
add("rational", "rational.torch", lambda m: nn.Sequential(nn.Linear(12, 24), m.Rational(cuda=False), nn.Linear(24, 24), m.Rational("tanh", cuda=False, version="B"), nn.Linear(24, 3)), rows(12))
add("convolutions", "fft_conv_pytorch", lambda m: nn.Sequential(m.FFTConv1d(2, 8, 7, padding=3), nn.GELU(), m.FFTConv1d(8, 8, 5, stride=2, groups=2), nn.GELU(), m.FFTConv1d(8, 4, 3, dilation=2)), lambda b, n: (torch.randn(b, 2, 2 * n),))
add("monotone", "monotonenorm", lambda m: m.SigmaNet(nn.Sequential(m.direct_norm(nn.Linear(6, 16), kind="one-inf"), m.GroupSort(4), m.direct_norm(nn.Linear(16, 16), kind="inf"), m.GroupSort(4), m.direct_norm(nn.Linear(16, 1), kind="inf")), sigma=1.0, monotone_constraints=[1, 1, 0, 0, 0, 0]), rows(6))
add("sequential", "cached_conv", lambda m: m.CachedSequential(m.Conv1d(2, 8, 3, padding=m.get_padding(3)), nn.LeakyReLU(0.2), m.Conv1d(8, 8, 4, stride=2, padding=m.get_padding(4, 2)), nn.LeakyReLU(0.2), m.ConvTranspose1d(8, 2, 4, stride=2, padding=1)), lambda b, n: (torch.randn(b, 2, 2 * n),))


# several media: torchmultimodal
_FLAVA = {f"{part}_{key}": value for part in ("image", "text", "multimodal") for key, value in {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64}.items()}
add("flava", "torchmultimodal.models.flava.model", lambda m: m.flava_model(**_FLAVA, image_size=32, patch_size=8, vocab_size=64, max_position_embeddings=64, text_and_image_proj_size=16), lambda b, n: {"image": torch.randn(b, 3, 32, 32), "text": ids(b, n)})
_COCA = {"vision_patch_size": 8, "vision_dim_feedforward": 64, "vision_n_layer": 2, "vision_n_head": 4, "vocab_size": 64, "num_text_positions": 17, "text_hidden_dim": 32, "text_n_layer": 2, "text_n_head": 4, "text_dim_feedforward": 64, "text_output_dim": 32, "fusion_n_layer": 2, "fusion_n_head": 4, "fusion_dim_feedforward": 64, "multimodal_output_projection_dim": 64, "pooler_input_embed_dim": 32, "pooler_output_embed_dim": 32, "pooler_n_head": 4, "pooler_n_queries": 8, "image_size": 32}
add("coca", "torchmultimodal.models.coca.coca_model", lambda m: m.coca_for_pretraining(**_COCA), lambda b, n: (torch.randn(b, 3, 32, 32), ids(b, 16)))
by_class("torchmultimodal.modules.layers.transformer", lambda b, n: (torch.randn(b, n, 32), torch.randn(b, 9, 24)), TransformerDecoder={"n_layer": 3, "d_model": 32, "n_head": 4, "dim_feedforward": 64, "dim_kv": 24, "final_layer_norm_eps": 1e-5})


# words masked by one net and judged by another
def _electra(m: Any) -> nn.Module:
    def made() -> nn.Module:
        layers = [nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2)]
        return nn.Sequential(nn.Embedding(64, 32), *layers, nn.Linear(32, 64))

    return m.Electra(made(), made(), num_tokens=64, discr_dim=32, discr_layer=-2, mask_token_id=2, pad_token_id=0)


add("pretraining", "electra_pytorch", _electra, tokens())
