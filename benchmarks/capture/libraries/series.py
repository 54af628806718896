"""Models of time series: classifiers of tsai, detectors of deepod, forecasters of darts and granite-tsfm.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

import torch

from .catalogue import Inputs, add, by_class

__all__: list[str] = []


def channels(n: int = 3, length: int = 0) -> Inputs:
    """Series ``[batch, channels, length]``, which grow with the length where none is given."""
    return lambda b, m: (torch.randn(b, n, length or m),)


# tsai
_TSAI = "tsai.models.all"
by_class(_TSAI, channels(),
    FCN={"c_in": 3, "c_out": 4, "layers": [8, 16, 8]},
    FCNPlus={"c_in": 3, "c_out": 4, "layers": [8, 16, 8], "residual": True, "coord": True},
    GRU={"c_in": 3, "c_out": 4, "hidden_size": 16, "n_layers": 2, "bidirectional": True},
    InceptionTime={"c_in": 3, "c_out": 4, "nf": 4},
    InceptionTimePlus={"c_in": 3, "c_out": 4, "nf": 4, "concat_pool": True},
    LSTMPlus={"c_in": 3, "c_out": 4, "hidden_size": [16, 8], "n_layers": 1},
    ResCNN={"c_in": 3, "c_out": 4},
    ResNet={"c_in": 3, "c_out": 4},
    ResNetPlus={"c_in": 3, "c_out": 4, "nf": 8, "sa": True, "se": 4},
    TCN={"c_in": 3, "c_out": 4, "layers": [8, 8, 8], "conv_dropout": 0.1},
    TransformerModel={"c_in": 3, "c_out": 4, "d_model": 32, "n_head": 4, "n_layers": 3},
    XceptionTime={"c_in": 3, "c_out": 4, "nf": 4},
    XceptionTimePlus={"c_in": 3, "c_out": 4, "nf": 4, "coord": True},
)
by_class(_TSAI, channels(3, 32),
    GRUAttention={"c_in": 3, "c_out": 4, "seq_len": 32, "hidden_size": 16, "n_heads": 4, "d_ff": 32},
    LSTM_FCN={"c_in": 3, "c_out": 4, "seq_len": 32, "hidden_size": 16, "conv_layers": [8, 16, 8]},
    MGRU_FCNPlus={"c_in": 3, "c_out": 4, "seq_len": 32, "hidden_size": 16, "conv_layers": [16, 16, 16], "se": 4},
    MLP={"c_in": 3, "c_out": 4, "seq_len": 32, "layers": [32, 32, 32]},
    OmniScaleCNN={"c_in": 3, "c_out": 4, "seq_len": 32, "layers": [128, 1024]},
    MiniRocketPlus={"c_in": 3, "c_out": 4, "seq_len": 32, "num_features": 168},
    HydraPlus={"c_in": 3, "c_out": 4, "seq_len": 32, "k": 2, "g": 4},
    ConvTranPlus={"c_in": 3, "c_out": 4, "seq_len": 32, "dim_ff": 32},
    PatchTST={"c_in": 3, "c_out": None, "seq_len": 32, "pred_dim": 8, "d_model": 16, "d_ff": 32, "patch_len": 8, "stride": 4},
    TSPerceiver={"c_in": 3, "c_out": 4, "seq_len": 32, "n_latents": 8, "d_latent": 16, "n_layers": 2, "self_n_heads": 4},
    TSSequencerPlus={"c_in": 3, "c_out": 4, "seq_len": 32, "d_model": 16, "depth": 3},
    TST={"c_in": 3, "c_out": 4, "seq_len": 32, "d_model": 16, "n_heads": 4, "d_ff": 32},
    TSTPlus={"c_in": 3, "c_out": 4, "seq_len": 32, "d_model": 16, "n_heads": 4, "d_ff": 32},
    TSiTPlus={"c_in": 3, "c_out": 4, "seq_len": 32, "d_model": 16, "depth": 3, "n_heads": 4, "lsa": True, "use_token": True},
    TransformerLSTMPlus={"c_in": 3, "c_out": 4, "seq_len": 32, "d_model": 32, "nhead": 4, "dim_feedforward": 32},
    XCMPlus={"c_in": 3, "c_out": 4, "seq_len": 32, "nf": 8},
    gMLP={"c_in": 3, "c_out": 4, "seq_len": 32, "d_model": 16, "d_ffn": 32, "depth": 3},
    mWDNPlus={"c_in": 3, "c_out": 4, "seq_len": 32, "nf": 4},
)
_CLASSES = {"a": ["#na#", "0", "1", "2"], "b": ["#na#", "0", "1"]}


def _table(b: int, n: int) -> tuple[Any, ...]:
    return torch.stack([torch.randint(0, 4, (b,)), torch.randint(0, 3, (b,))], 1), torch.randn(b, 5)


by_class(_TSAI, _table,
    TabTransformer={"classes": _CLASSES, "cont_names": list("vwxyz"), "c_out": 3, "d_model": 16, "n_layers": 3, "n_heads": 4},
    GatedTabTransformer={"classes": _CLASSES, "cont_names": list("vwxyz"), "c_out": 3, "d_model": 16, "n_layers": 3, "n_heads": 4},
    TabFusionTransformer={"classes": _CLASSES, "cont_names": list("vwxyz"), "c_out": 3, "d_model": 16, "n_layers": 3, "n_heads": 4},
)

# deepod
by_class("deepod.core.networks.base_networks", lambda b, n: (torch.randn(b, n, 6),),
    GRUNet={"n_features": 6, "n_hidden": "16,16", "n_output": 8},
    LSTMNet={"n_features": 6, "n_hidden": "16", "n_output": 8},
    TCNnet={"n_features": 6, "n_hidden": "16,16", "n_output": 8},
    TcnAE={"n_features": 6, "n_hidden": "16,12", "n_emb": 8},
)
by_class("deepod.core.networks.base_networks", lambda b, n: (torch.randn(b, 32, 6),),
    ConvSeqEncoder={"n_features": 6, "n_hidden": "16", "n_output": 8, "seq_len": 32},
)
by_class("deepod.core.networks.base_networks", lambda b, n: (torch.randn(b, 12),),
    MLPnet={"n_features": 12, "n_hidden": "32,16", "n_output": 4, "batch_norm": True, "skip_connection": "concat"},
    MlpAE={"n_features": 12, "n_hidden": "32,16", "n_emb": 4, "dropout": 0.1},
)

# granite-tsfm
add("tinytimemixer", "tsfm_public.models.tinytimemixer", lambda m: m.TinyTimeMixerForPrediction(m.TinyTimeMixerConfig(context_length=32, patch_length=8, patch_stride=8, num_input_channels=3, d_model=16, decoder_d_model=16, num_layers=2, decoder_num_layers=2, prediction_length=8, dropout=0.1)), lambda b, n: {"past_values": torch.randn(b, 32, 3), "future_values": torch.randn(b, 8, 3)}, "granite_tsfm")
add("tinytimemixer_mixed", "tsfm_public.models.tinytimemixer", lambda m: m.TinyTimeMixerForPrediction(m.TinyTimeMixerConfig(context_length=32, patch_length=8, patch_stride=8, num_input_channels=3, d_model=16, decoder_d_model=16, num_layers=2, decoder_num_layers=2, prediction_length=8, mode="mix_channel", gated_attn=True, adaptive_patching_levels=2)), lambda b, n: {"past_values": torch.randn(b, 32, 3), "past_observed_mask": torch.rand(b, 32, 3) > 0.2}, "granite_tsfm")
add("tspulse", "tsfm_public.models.tspulse", lambda m: m.TSPulseForReconstruction(m.TSPulseConfig(context_length=32, patch_length=8, patch_stride=8, num_input_channels=3, d_model=16, num_layers=2, decoder_num_layers=2)), lambda b, n: {"past_values": torch.randn(b, 32, 3)}, "granite_tsfm")
