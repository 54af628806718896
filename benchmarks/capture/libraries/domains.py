"""Models of particular domains: genomes and proteins, sound, scans, robots, few examples, policies, operators.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .catalogue import add, by_class, fixed_image, rows, sequence, tokens

__all__: list[str] = []


class _Loss(nn.Module):
    """A model and its loss of a target."""

    def __init__(self, body: nn.Module, loss: Any) -> None:
        super().__init__()
        self.body, self.loss = body, loss

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:
        made = self.body(x)
        return {"loss": self.loss(made, target), "made": made}


def _targets(width: int = 16, made: int = 1) -> Any:
    return lambda b, n: (torch.randn(b, width), torch.randn(b, made))


# proteins and genomes
add("ablang", "ablang2.models.ablang2.ablang", lambda m: m.AbLang(vocab_size=26, hidden_embed_size=32, n_attn_heads=4, n_encoder_blocks=3, padding_tkn=21, mask_tkn=23), tokens(20))
add("bpnet", "bpnetlite.bpnet", lambda m: m.BPNet(n_filters=16, n_layers=3, n_outputs=1, n_control_tracks=0, trimming=8, verbose=False), lambda b, n: (F.one_hot(torch.randint(0, 4, (b, 64)), 4).permute(0, 2, 1).float(),))


def _antiberty(m: Any) -> nn.Module:
    from transformers import BertConfig

    config = BertConfig(vocab_size=25, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64, max_position_embeddings=64)
    config.num_species = config.num_chains = config.num_grafts = 3
    return m.AntiBERTy(config)


add("mlm", "antiberty", _antiberty, lambda b, n: {"input_ids": torch.randint(5, 25, (b, n)), "attention_mask": torch.ones(b, n, dtype=torch.long)})

# sound
add("resnet1d", "pesto.model", lambda m: m.Resnet1d(n_chan_input=1, n_chan_layers=[20, 20, 10, 1], n_prefilt_layers=2, residual=True, n_bins_in=64, output_dim=32), lambda b, n: (torch.randn(b, 1, 64),))
add("passt", "hear21passt.models.passt", lambda m: m.PaSST(img_size=(32, 64), patch_size=16, stride=16, embed_dim=32, depth=3, num_heads=4, num_classes=5, distilled=True), lambda b, n: (torch.randn(b, 1, 32, 64),))
add("passt_patchout", "hear21passt.models.passt", lambda m: m.PaSST(u_patchout=2, s_patchout_t=1, img_size=(32, 64), patch_size=16, stride=16, embed_dim=32, depth=3, num_heads=4, num_classes=5, distilled=True), lambda b, n: (torch.randn(b, 1, 32, 64),))
add("mel", "torchlibrosa", lambda m: nn.Sequential(m.Spectrogram(n_fft=64, hop_length=32), m.LogmelFilterBank(sr=8000, n_fft=64, n_mels=16), nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)), lambda b, n: (torch.randn(b, 32 * n),))
add("dit", "stable_audio_tools.models.dit", lambda m: m.DiffusionTransformer(io_channels=4, embed_dim=128, cond_token_dim=16, depth=3, num_heads=2), lambda b, n: {"x": torch.randn(b, 4, n), "t": torch.rand(b), "cross_attn_cond": torch.randn(b, 5, 16)})


class _Compressor(nn.Module):
    """A compressor whose times are learned, held to what a reference made."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.m = m
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor, knobs: torch.Tensor, target: torch.Tensor) -> Any:
        ratio, at = self.net(knobs).sigmoid().unbind(-1)
        gain = self.m.compexp_gain(x.abs() + 1e-3, -24.0, 2 + 4 * ratio, -60.0, 0.8 * torch.ones_like(ratio), 0.2 + 0.5 * at, 0.2 * torch.ones_like(ratio))
        return {"loss": F.mse_loss(gain * x, target)}


add("compressor", "torchcomp", _Compressor, lambda b, n: (torch.rand(b, n), torch.randn(b, 8), torch.randn(b, n)))


class _Filter(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.filter = m.sample_wise_lpc
        self.rnn, self.out = nn.GRU(1, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.filter(x, 0.4 * self.out(self.rnn(x[..., None])[0]).tanh())


add("lpc", "torchlpc", _Filter, lambda b, n: (torch.randn(b, n),))

# scans
by_class("fastmri.models", lambda b, n: (torch.randn(b, 1, 32, 32),), Unet={"in_chans": 1, "out_chans": 1, "chans": 8, "num_pool_layers": 2, "drop_prob": 0.1})
by_class("fastmri.models", lambda b, n: (torch.randn(b, 1, 32, 32, 2),), NormUnet={"chans": 4, "num_pools": 2})
add("varnet", "fastmri.models", lambda m: m.VarNet(num_cascades=3, sens_chans=4, sens_pools=2, chans=4, pools=2), lambda b, n: {"masked_kspace": torch.randn(b, 3, 32, 32, 2), "mask": (torch.arange(32) % 2 == 0).view(1, 1, 1, 32, 1) | (abs(torch.arange(32) - 16) < 4).view(1, 1, 1, 32, 1), "num_low_frequencies": 6})

# pictures and video
add("coca", "coca_pytorch", lambda m: m.CoCa(dim=32, image_dim=16, num_tokens=64, unimodal_depth=2, multimodal_depth=2, dim_head=8, heads=4, num_img_queries=8), lambda b, n: {"text": torch.randint(1, 64, (b, n)), "image_tokens": torch.randn(b, 9, 16), "return_loss": True})
add("prior", "dalle2_pytorch", lambda m: m.DiffusionPriorNetwork(dim=32, depth=3, dim_head=8, heads=4, max_text_len=8), lambda b, n: {"image_embed": torch.randn(b, 32), "diffusion_timesteps": torch.rand(b), "text_embed": torch.randn(b, 32), "text_encodings": torch.randn(b, 8, 32)})
add("max_vit", "robotic_transformer_pytorch", lambda m: m.MaxViT(num_classes=5, dim=16, depth=(1, 1, 2), dim_head=8, window_size=2, dropout=0.1), fixed_image(3, 32))
add("image_v1", "k_diffusion.models", lambda m: m.ImageDenoiserModelV1(3, 16, [1, 1], [16, 32], [False, True]), lambda b, n: (torch.randn(b, 3, 16, 16), torch.rand(b) + 0.1))
add("yolov5n", "yolov5.models.yolo", lambda m: m.Model(str(__import__("pathlib").Path(m.__file__).parent / "yolov5n.yaml"), nc=3), fixed_image(3, 64))
add("faster_vit", "fastervit.models.faster_vit", lambda m: m.FasterViT(depths=[1, 1, 2, 1], num_heads=[2, 2, 4, 4], window_size=[8, 8, 4, 2], ct_size=2, dim=16, in_dim=16, mlp_ratio=2, resolution=64, num_classes=5, drop_path_rate=0.1, hat=[False, False, True, False]), fixed_image(3, 64))
add("mnist", "pytorch_adapt.models", lambda m: nn.Sequential(m.MNISTFeatures(), nn.Flatten(), m.Classifier(num_classes=5, in_size=768, h=32)), fixed_image(3, 28))


class _Prototypes(nn.Module):
    """Few-shot: a support set beside the queries."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.net = m.PrototypicalNetworks(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)))

    def forward(self, support: torch.Tensor, query: torch.Tensor, target: torch.Tensor) -> Any:
        self.net.process_support_set(support, torch.arange(3).repeat_interleave(2))
        scores = self.net(query)
        return {"loss": F.cross_entropy(scores, target), "scores": scores}


add("prototypes", "easyfsl.methods", _Prototypes, lambda b, n: (torch.randn(6, 16), torch.randn(b, 16), torch.randint(0, 3, (b,))))

# a layer of Bayes at the end
class _Bayes(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(16, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 16), nn.ELU()), head

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).train_loss_fn(y)


add("regression", "vbll", lambda m: _Bayes(m.Regression(16, 1, 1e-2)), _targets())
add("classes", "vbll", lambda m: _Bayes(m.DiscClassification(16, 4, 1e-2)), lambda b, n: (torch.randn(b, 16), torch.randint(0, 4, (b,))))

# equations
for _name, _made in (("fcnn", lambda m: m.FCNN(2, 1, hidden_units=(32, 32, 32))), ("resnet", lambda m: m.Resnet(2, 1, hidden_units=(32, 32))), ("sine", lambda m: nn.Sequential(nn.Linear(2, 32), m.SinActv(), nn.Linear(32, 32), m.Swish(trainable=True), nn.Linear(32, 1)))):
    add(_name, "neurodiffeq.networks", _made, rows(2))


class _Heat(nn.Module):
    """u_t = u_xx with its borders built in, as a solver of neurodiffeq asks of its networks."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        from neurodiffeq.conditions import IBVP1D
        from neurodiffeq.neurodiffeq import safe_diff

        self.net, self.diff = m.FCNN(2, 1, hidden_units=(32, 32, 32)), safe_diff
        self.condition = IBVP1D(t_min=0.0, t_min_val=lambda x: torch.sin(3.14 * x), x_min=0.0, x_min_val=lambda t: 0 * t, x_max=1.0, x_max_val=lambda t: 0 * t)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x, t = x.requires_grad_(), t.requires_grad_()
        u = self.condition.enforce(self.net, x, t)
        return (self.diff(u, t) - self.diff(u, x, order=2)).square().mean()


add("heat", "neurodiffeq.networks", _Heat, lambda b, n: (torch.rand(b, 1), torch.rand(b, 1)))

# sequences
add("retnet", "yet_another_retnet.retnet", lambda m: m.RetNet(64, d_model=32, nhead=4, num_layers=3, dim_feedforward=64), lambda b, n: (torch.randint(1, 64, (b, n)), torch.randint(1, 64, (b, n))))
add("simple", "zeta.structs", lambda m: m.SimpleTransformer(dim=32, depth=3, num_tokens=64, dim_head=8, heads=4), tokens())
add("decoder", "zeta.structs", lambda m: m.Transformer(num_tokens=64, max_seq_len=64, attn_layers=m.Decoder(dim=32, depth=3, heads=4)), tokens())


class _Rotary(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.inputs, self.parts, self.out = nn.Linear(32, 32), nn.ModuleList(nn.Linear(32, 96) for _ in range(3)), nn.Linear(32, 4)
        self.rotary = m.RotaryEmbedding(8, use_xpos=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inputs(x)
        for part in self.parts:
            q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in part(h).chunk(3, -1))
            q, k = self.rotary.rotate_queries_and_keys(q, k)
            h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(h)


add("xpos", "rotary_embedding_torch", _Rotary, sequence())


def _moment(m: Any) -> nn.Module:
    t5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 3, "vocab_size": 64, "feed_forward_proj": "gated-gelu", "is_gated_act": True, "dropout_rate": 0.1, "dense_act_fn": "gelu_new", "model_type": "t5"}
    pipe = m.MOMENTPipeline({"task_name": "forecasting", "model_name": "MOMENT", "transformer_type": "encoder_only", "d_model": None, "seq_len": 64, "patch_len": 8, "patch_stride_len": 8, "transformer_backbone": "google/flan-t5-small", "t5_config": t5, "randomly_initialize_backbone": True, "enable_gradient_checkpointing": False, "freeze_encoder": False, "freeze_embedder": False, "device": "cpu"}, model_kwargs={"task_name": "forecasting", "forecast_horizon": 8})
    pipe.init()
    return pipe


add("moment", "momentfm", _moment, lambda b, n: {"x_enc": torch.randn(b, 2, 64), "input_mask": torch.ones(b, 64)})

# experts and policies
class _Gaussian(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        import gymnasium

        class Policy(m.GaussianMixin, m.Model):  # type: ignore[name-defined, misc]
            def __init__(self, seen: Any, done: Any) -> None:
                m.Model.__init__(self, observation_space=seen, action_space=done, device="cpu")
                m.GaussianMixin.__init__(self, clip_actions=True)
                self.net = nn.Sequential(nn.Linear(8, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 3))
                self.log_std = nn.Parameter(torch.zeros(3))

            def compute(self, inputs: Any, role: str) -> Any:
                return self.net(inputs["observations"]), {"log_std": self.log_std}

        box = gymnasium.spaces.Box
        self.policy = Policy(box(-1, 1, (8,)), box(-1, 1, (3,)))

    def forward(self, states: torch.Tensor, taken: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
        _, told = self.policy.act({"observations": states, "taken_actions": taken}, role="policy")
        return -(told["log_prob"] * advantage).mean() - 0.01 * self.policy.get_entropy(role="policy").mean()


add("gaussian", "skrl.models.torch", _Gaussian, lambda b, n: (torch.randn(b, 8), torch.rand(b, 3), torch.randn(b, 1)))
add("real_nvp", "glasflow", lambda m: _LogProb(m.RealNVP(4, 3, n_neurons=16)), rows(4))
add("nsf_conditional", "glasflow", lambda m: _LogProb(m.CouplingNSF(4, 3, n_conditional_inputs=2, n_neurons=16)), lambda b, n: (torch.randn(b, 4), torch.randn(b, 2)))


class _LogProb(nn.Module):
    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        return -self.flow.log_prob(x, conditional=c).mean()


class _Can(nn.Module):
    """Edges of a cell complex, attended over the neighbours below and above."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(m.CANLayer(8, 8, heads=2, dropout=0.0, att_activation=nn.LeakyReLU(0.2)) for _ in range(3))
        self.out = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, down.to_sparse(), up.to_sparse())
        return self.out(x)


add("can", "topomodelx.nn", _Can, lambda b, n: (torch.randn(8, 8), (torch.rand(8, 8) > 0.5).float(), (torch.rand(8, 8) > 0.5).float()))
add("gate", "pytorch_toolbelt.modules", lambda m: nn.Sequential(m.CoordConv(3, 8, kernel_size=3, padding=1), m.ChannelSpatialGate2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), m.ChannelGate2d(8), nn.Conv2d(8, 2, 1)), fixed_image(3, 16))


def _dlinear(m: Any) -> nn.Module:
    return _Listed(m._DLinearModule(input_dim=2, output_dim=2, future_cov_dim=0, static_cov_dim=0, nr_params=1, shared_weights=False, kernel_size=5, const_init=True, input_chunk_length=24, output_chunk_length=6, train_sample_shape=None))


class _Listed(nn.Module):
    """A forecaster of darts, which takes its series in a dataclass, as its own trainer hands them on."""

    def __init__(self, body: nn.Module) -> None:
        from darts.utils.data.torch_datasets import utils

        super().__init__()
        self.body, self.utils = body, utils

    def forward(self, past: torch.Tensor, target: torch.Tensor) -> Any:
        given = self.utils.PLModuleInput(past_target=past, stage=self.utils.ModuleStage.TRAIN)
        made = self.body(given).prediction.squeeze(-1)
        return {"loss": F.mse_loss(made, target), "made": made}


add("dlinear", "darts.models.forecasting.dlinear", _dlinear, lambda b, n: (torch.randn(b, 24, 2), torch.randn(b, 6, 2)))
add("tide", "darts.models.forecasting.tide_model", lambda m: _Listed(m._TideModule(input_dim=2, output_dim=2, future_cov_dim=0, static_cov_dim=0, nr_params=1, num_encoder_layers=2, num_decoder_layers=2, decoder_output_dim=8, hidden_size=16, temporal_decoder_hidden=16, temporal_width_past=4, temporal_width_future=4, use_layer_norm=True, dropout=0.0, temporal_hidden_size_past=None, temporal_hidden_size_future=None, input_chunk_length=24, output_chunk_length=6, train_sample_shape=None)), lambda b, n: (torch.randn(b, 24, 2), torch.randn(b, 6, 2)))
add("tcn", "darts.models.forecasting.tcn_model", lambda m: _Listed(m._TCNModule(input_size=2, kernel_size=3, num_filters=8, num_layers=3, dilation_base=2, weight_norm=True, target_size=2, nr_params=1, target_length=24, dropout=0.0, input_chunk_length=24, output_chunk_length=6, train_sample_shape=None)), lambda b, n: (torch.randn(b, 24, 2), torch.randn(b, 24, 2)))


# speech
add("hifigan", "TTS.vocoder.models.hifigan_generator", lambda m: m.HifiganGenerator(8, 1, "1", [[1, 3, 5], [1, 3, 5]], [3, 5], [8, 8], 16, [4, 4]), lambda b, n: (torch.randn(b, 8, n),))
add("univnet", "TTS.vocoder.models.univnet_generator", lambda m: m.UnivnetGenerator(in_channels=4, out_channels=1, hidden_channels=8, cond_channels=8, upsample_factors=[4, 4], lvc_layers_each_block=2, lvc_kernel_size=3, kpnet_hidden_channels=16, kpnet_conv_size=3, dropout=0.0), lambda b, n: (torch.randn(b, 8, 16),))
add("lstm_speaker", "TTS.encoder.models.lstm", lambda m: m.LSTMSpeakerEncoder(8, proj_dim=16, lstm_dim=32, num_lstm_layers=2), lambda b, n: (torch.randn(b, 8, n),))

# knowledge
def _triples(n: int = 40) -> Any:
    import numpy as np
    from pykeen.triples import CoreTriplesFactory

    drawn = np.random.default_rng(0)
    return CoreTriplesFactory.create(torch.from_numpy(np.stack([drawn.integers(0, 20, n), drawn.integers(0, 4, n), drawn.integers(0, 20, n)], 1)), num_entities=20, num_relations=4)


class _Ranked(nn.Module):
    """A knowledge graph's model and its loss of true and untrue triples."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, true: torch.Tensor, untrue: torch.Tensor) -> Any:
        good, bad = self.body.score_hrt(true), self.body.score_hrt(untrue)
        return {"loss": F.margin_ranking_loss(good, bad, torch.ones_like(good), margin=1.0) + self.body.collect_regularization_term(), "good": good}


def _facts(b: int, n: int) -> Any:
    return tuple(torch.stack([torch.randint(0, 20, (b,)), torch.randint(0, 4, (b,)), torch.randint(0, 20, (b,))], 1) for _ in range(2))


for _name in ("TransE", "DistMult", "ComplEx", "RotatE", "TuckER", "ConvE"):
    add(_name, "pykeen.models", lambda m, n=_name: _Ranked(getattr(m, n)(triples_factory=_triples(), embedding_dim=16, random_seed=0)), _facts)

# a table's rows as a prompt
add("icl", "tabicl._model.tabicl", lambda m: _Prompted(m.TabICL(max_classes=4, embed_dim=16, col_num_blocks=1, col_nhead=2, col_num_inds=4, row_num_blocks=1, row_nhead=2, row_num_cls=2, icl_num_blocks=2, icl_nhead=2, dropout=0.0)), lambda b, n: (torch.randn(b, 12, 4), torch.randint(0, 4, (b, 8)).float(), torch.randint(0, 4, (b, 4))))


class _Prompted(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body.train()

    def train(self, mode: bool = True) -> Any:
        return self

    def forward(self, x: torch.Tensor, seen: torch.Tensor, target: torch.Tensor) -> Any:
        scores = self.body(x, seen)
        return {"loss": F.cross_entropy(scores.flatten(0, 1), target.flatten()), "scores": scores}
