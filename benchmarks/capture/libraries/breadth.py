"""Models of packages from here and there: speech, series, policies, fields.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .catalogue import add, fixed_image, rows, sequence, tokens

__all__: list[str] = []


class _Keywords(nn.Module):
    """A model that takes what comes after its first argument by name, beside what is given for all calls."""

    def __init__(self, body: nn.Module, *names: str, **given: Any) -> None:
        super().__init__()
        self.body, self.names, self.given = body, names, given

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> Any:
        return self.body(x, **dict(zip(self.names, more, strict=True)), **self.given)


class _Forecast(nn.Module):
    """A forecaster and its loss, as its package's experiments train it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *x: torch.Tensor) -> Any:
        *past, target = x
        made = self.body(*past)
        made = made[0] if isinstance(made, tuple) else made
        return {"loss": F.mse_loss(made[:, -target.shape[1]:], target), "made": made}


# speech
def _spoken(b: int, n: int) -> Any:
    return {"x": torch.randn(b, n, 16), "cond": torch.randn(b, n, 16), "text": torch.randint(0, 30, (b, n // 2)), "time": torch.rand(b)}


class _Spoken(nn.Module):
    """A backbone of flow matching; of a model's dictionary of arguments its own defaults are the rest."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, cond: torch.Tensor, text: torch.Tensor, time: torch.Tensor) -> Any:
        return self.body(x=x, cond=cond, text=text, time=time)


add("dit", "f5_tts.model.backbones.dit", lambda m: _Spoken(m.DiT(dim=32, depth=2, heads=2, dim_head=16, ff_mult=2, mel_dim=16, text_num_embeds=32, text_dim=16, conv_layers=1, dropout=0.0)), _spoken)
add("mmdit", "f5_tts.model.backbones.mmdit", lambda m: _Spoken(m.MMDiT(dim=32, depth=2, heads=2, dim_head=16, ff_mult=2, mel_dim=16, text_num_embeds=32, dropout=0.0)), _spoken)
add("unett", "f5_tts.model.backbones.unett", lambda m: _Spoken(m.UNetT(dim=32, depth=4, heads=2, dim_head=16, ff_mult=2, mel_dim=16, text_num_embeds=32, dropout=0.0)), _spoken)


def _bigvgan(m: Any, block: str) -> nn.Module:
    from bigvgan.env import AttrDict

    return m.BigVGAN(AttrDict({"resblock": block, "upsample_rates": [4, 4], "upsample_kernel_sizes": [8, 8], "upsample_initial_channel": 32, "resblock_kernel_sizes": [3, 5], "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]] if block == "1" else [[1, 3], [1, 3]], "activation": "snakebeta", "snake_logscale": True, "num_mels": 16, "use_tanh_at_final": False, "use_bias_at_final": False}), use_cuda_kernel=False)


for _block in ("1", "2"):
    add(f"resblock{_block}", "bigvgan.bigvgan", lambda m, k=_block: _bigvgan(m, k), lambda b, n: (torch.randn(b, 16, n),))
add("text", "matcha.models.components.text_encoder", lambda m: m.Encoder(32, 64, 2, 3, kernel_size=3, p_dropout=0.0), lambda b, n: (torch.randn(b, 32, n), torch.ones(b, 1, n)))
add("decoder", "matcha.models.components.decoder", lambda m: m.Decoder(16, 8, channels=(32, 32), dropout=0.0, attention_head_dim=16, n_blocks=1, num_mid_blocks=1, num_heads=2, act_fn="snakebeta"), lambda b, n: (torch.randn(b, 8, n), torch.ones(b, 1, n), torch.randn(b, 8, n), torch.rand(b)))

# series
_seen = lambda b, n: (torch.randn(b, 32, 4), torch.randn(b, 8, 4))  # noqa: E731
_TIMES = {"SCINet": {"output_len": 8, "input_len": 32, "input_dim": 4, "num_levels": 2, "dropout": 0.0}, "FITS": {"seq_len": 32, "pred_len": 8, "individual": False, "enc_in": 4, "cut_freq": 8}, "FreTS": {"seq_len": 32, "pred_len": 8, "enc_in": 4, "channel_independence": False}, "TSMixer": {"L": 32, "C": 4, "T": 8, "n_mixer": 3, "dropout": 0.0}, "Crossformer": {"data_dim": 4, "in_len": 32, "out_len": 8, "seg_len": 4, "win_size": 2, "factor": 2, "d_model": 16, "d_ff": 32, "n_heads": 2, "e_layers": 2}}
for _name, _options in _TIMES.items():
    add(_name, f"torch_timeseries.model.{_name}", lambda m, n=_name, o=_options: _Forecast(getattr(m, n)(**o)), _seen)
_marked = lambda b, n: (torch.randn(b, 32, 4), torch.rand(b, 32, 4) - 0.5, torch.randn(b, 24, 4), torch.rand(b, 24, 4) - 0.5, torch.randn(b, 8, 4))  # noqa: E731
_MARKED = {"PatchTST": {"seq_len": 32, "pred_len": 8, "enc_in": 4, "n_heads": 2, "d_model": 16, "d_ff": 32, "patch_len": 8, "stride": 4}, "iTransformer": {"seq_len": 32, "pred_len": 8, "c_in": 4, "n_heads": 2, "d_model": 16, "d_ff": 32, "dropout": 0.0}, "TimesNet": {"seq_len": 32, "label_len": 16, "pred_len": 8, "d_ff": 16, "d_model": 16, "num_kernels": 2, "top_k": 2, "enc_in": 4, "c_out": 4}}
for _name, _options in _MARKED.items():
    add(_name, f"torch_timeseries.model.{_name}", lambda m, n=_name, o=_options: _Forecast(getattr(m, n)(**o)), _marked)

# transformers of papers
add("depthless", "RIM_pytorch.depth_less_transformer", lambda m: m.DepthlessTransformer(32, num_blocks=2, num_message_exchanges=2, dim_head=16, heads=2, causal=True, num_tokens=64), tokens())
add("looped", "RLT", lambda m: m.RLT(32, enc_depth=2, dec_depth=2, num_tokens=64, dim_head=16, heads=2), tokens())
add("hierarchy", "HRM", lambda m: _Reasoner(m), lambda b, n: (torch.randint(0, 64, (b, n)), torch.randint(0, 64, (b, n))))


class _Reasoner(nn.Module):
    """Two nets that think at two paces, and their loss."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        each = {"dim": 32, "depth": 1, "attn_dim_head": 16, "heads": 2, "use_rmsnorm": True, "rotary_pos_emb": True, "pre_norm": False}
        self.body = m.HRM(networks=[dict(each), dict(each)], num_tokens=64, dim=32, reasoning_steps=2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.body(x, labels=labels)[0]


class _Layers(nn.Module):
    """Layers that take a sequence and give a tuple, of which the first goes on."""

    def __init__(self, *layers: nn.Module, width: int = 32) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = nn.Linear(16, width), nn.ModuleList(layers), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            made = layer(x)
            x = made[0] if isinstance(made, tuple) else made
        return self.head(x)


add("stacks", "stack_attention", lambda m: _Layers(m.StackTransLayer(32, num_stacks=2, dim_stack=8, stack_size=6), m.StackTransLayer(32, num_stacks=2, dim_stack=8, stack_size=6)), sequence(16))
add("slstm", "tirex.models.slstm.layer", lambda m: _slstm(), sequence(16))


def _slstm() -> nn.Module:
    from tirex.models.slstm.block import sLSTMBlock, sLSTMBlockConfig

    config = sLSTMBlockConfig(embedding_dim=32, num_heads=2, ffn_proj_factor=2.0)
    return _Layers(*(sLSTMBlock(config, "torch") for _ in range(2)))


add("learner", "tokenlearner_pytorch", lambda m: nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), _Turned(), m.TokenLearner(S=4), nn.LayerNorm(16), nn.Linear(16, 8)), lambda b, n: (torch.randn(b, 3, 8, 8),))


class _Turned(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).contiguous()


add("tranception", "tranception_pytorch", lambda m: m.Tranception(dim=32, depth=2, heads=4, dim_head=16), tokens(21))
add("asac", "ASAC", lambda m: m.ASAC(dim=32, depth=2, heads=2, dim_head=16, to_embedding=nn.Linear(16, 32), num_classes=4), sequence(16))

# weather, robots, policies
add("student", "anymal_belief_state_encoder_decoder_pytorch.networks", lambda m: m.Student(4, proprio_dim=12, extero_dim=6, latent_extero_dim=4, gru_hidden_size=16, mlp_hidden=(32, 16), belief_state_dim=24, privileged_dim=5), lambda b, n: (torch.randn(b, 12), torch.randn(b, 4, 6)))
add("teacher", "anymal_belief_state_encoder_decoder_pytorch.networks", lambda m: m.Teacher(4, proprio_dim=12, extero_dim=6, latent_extero_dim=4, privileged_dim=5, mlp_hidden=(32, 16)), lambda b, n: (torch.randn(b, 12), torch.randn(b, 4, 6), torch.randn(b, 5)))
add("dueling", "all.nn", lambda m: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), m.Dueling(nn.Linear(32, 1), nn.Linear(32, 4))), rows(8))
add("categorical", "all.nn", lambda m: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), m.CategoricalDueling(nn.Linear(32, 11), nn.Linear(32, 44))), rows(8))
add("noisy", "all.nn", lambda m: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), m.NoisyFactorizedLinear(32, 32), nn.ReLU(), m.NoisyLinear(32, 4)), rows(8))

# fields and low bits
add("fourier", "rff.layers", lambda m: nn.Sequential(m.GaussianEncoding(sigma=1.0, input_size=2, encoded_size=16), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)), rows(2))
add("positional", "rff.layers", lambda m: nn.Sequential(m.PositionalEncoding(sigma=1.0, m=8), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)), rows(2))
add("siren", "siren", lambda m: m.SIREN([32, 32, 32], 2, 3, w0=1.0, w0_initial=30.0), rows(2))
add("low_bits", "bitlinear_pytorch.bitlinear", lambda m: nn.Sequential(nn.Linear(16, 32), m.BitLinear(32, 32), nn.GELU(), m.BitLinear(32, 32), nn.GELU(), nn.Linear(32, 4)), rows(16))
for _name, _options in {"LeNet": {"in_shape": (28, 28, 1), "num_classes": 4, "verbose": False}, "WRN": {"in_shape": (16, 16, 3), "num_classes": 4, "n": 1, "k": 1, "num_feature_maps": (8, 8, 16, 16), "verbose": False, "use_batch_norm": False}}.items():
    add(_name, f"hypnettorch.mnets.{ {'LeNet': 'lenet', 'WRN': 'wide_resnet'}[_name] }", lambda m, n=_name, o=_options: getattr(m, n)(**o), lambda b, n, s=_options["in_shape"]: (torch.randn(b, s[0] * s[1] * s[2]),))
add("gru", "hypnettorch.mnets.simple_rnn", lambda m: m.SimpleRNN(n_in=8, rnn_layers=(16, 16), fc_layers=(8, 4), use_lstm=True, verbose=False), lambda b, n: (torch.randn(n, b, 8),))

# classifiers of continual learning and chemistry
add("mlp", "avalanche.models.simple_mlp", lambda m: m.SimpleMLP(num_classes=4, input_size=64, hidden_size=32, hidden_layers=2, drop_rate=0.0), rows(64))
add("icarl", "avalanche.models.icarl_resnet", lambda m: m.make_icarl_net(4, n=1), fixed_image(side=32))
add("attention", "deepchem.models.torch_models.layers", lambda m: _Highway(m), rows(16))


class _Highway(nn.Module):
    """Layers of chemistry's networks for fingerprints."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(m.MultilayerPerceptron(16, 32, d_hidden=(32, 32), dropout=0.0), m.HighwayLayer(32), m.HighwayLayer(32), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)
