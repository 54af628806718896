"""Models of packages on audio effects, spectrograms, flow of pictures, series, clicks and generated weights.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .by_hand import ids
from .catalogue import add, fixed_image, image, sequence

__all__: list[str] = []


# spectrograms and waves: audyn, dasp-pytorch
def _coded(cls: str, **options: Any) -> Any:
    def build(m: Any) -> nn.Module:
        encoder = nn.Sequential(nn.Conv1d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv1d(16, 16, 4, 2, 1))
        decoder = nn.Sequential(nn.ConvTranspose1d(16, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose1d(16, 1, 4, 2, 1))
        return getattr(m, cls)(encoder, decoder, codebook_size=8, embedding_dim=16, **options)

    return build


add("vqvae", "audyn.models", _coded("VQVAE"), lambda b, n: (torch.randn(b, 1, 4 * n),))
add("vqvae_kmeans", "audyn.models", _coded("VQVAE", init_by_kmeans=3), lambda b, n: (torch.randn(b, 1, 4 * n),))
add("rvqvae", "audyn.models", _coded("RVQVAE", num_stages=3, dropout=False), lambda b, n: (torch.randn(b, 1, 4 * n),))
add("rvqvae_dropout", "audyn.models", _coded("RVQVAE", num_stages=3), lambda b, n: (torch.randn(b, 1, 4 * n),))


def _separating(m: Any) -> nn.Module:
    encoder, decoder = m.tasnet.Encoder(1, 16, kernel_size=8, stride=4), m.tasnet.Decoder(1, 16, kernel_size=8, stride=4)
    return m.ConvTasNet.build_from_config(encoder, decoder, bottleneck_channels=16, hidden_channels=16, skip_channels=16, num_blocks=2, num_layers=3, is_causal=False)


add("conv_tasnet", "audyn.models", _separating, lambda b, n: (torch.randn(b, 1, 8 * n),))
add("pixelsnail", "audyn.models.pixelsnail", lambda m: m.PixelSNAIL(3, 8, 8, 3, num_heads=2, num_blocks=2, num_repeats=1), fixed_image(3, 8))


class _Mastering(nn.Module):
    """Predicts settings of an equaliser, of a compressor and of a gain from sound, and applies them to it."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.effects = [m.ParametricEQ(16000), m.Gain(16000), m.Distortion()]
        counts = [18, 1, 1]
        self.heads = nn.ModuleList(nn.Linear(16, c) for c in counts)
        self.encode = nn.Sequential(nn.Conv1d(1, 16, 8, 4), nn.ReLU(), nn.Conv1d(16, 16, 8, 4), nn.AdaptiveAvgPool1d(1), nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        h = self.encode(x)
        for effect, head in zip(self.effects[:2], self.heads, strict=False):
            x = effect.process_normalized(x, head(h).sigmoid())
        return x


add("mastering", "dasp_pytorch", _Mastering, lambda b, n: (torch.randn(b, 1, 16 * n),))


# flow: ezflow
def _flow(name: str, **options: Any) -> Any:
    def build(m: Any) -> nn.Module:
        config = m.get_default_model_cfg(name)
        config.merge_from_list([v for pair in options.items() for v in pair])
        return m.build_model(name, cfg=config, custom_cfg=True)

    return build


def _frames(b: int, n: int) -> tuple[Tensor, Tensor]:
    return torch.rand(b, 3, 4 * n, 4 * n), torch.rand(b, 3, 4 * n, 4 * n)


add("raft", "ezflow.models", _flow("RAFT", UPDATE_ITERS=3), _frames)
add("pwcnet", "ezflow.models", _flow("PWCNet"), lambda b, n: (torch.rand(b, 3, 64, 64), torch.rand(b, 3, 64, 64)))
add("flownet_s", "ezflow.models", _flow("FlowNetS"), lambda b, n: (torch.rand(b, 3, 64, 64), torch.rand(b, 3, 64, 64)))


# series: mtst-forecasting, tisc, deep-time-series
add("relative", "mtst", lambda m: m.MTSTForecaster(3, output_shape=(6, 2), embed_dim=16, heads=4, n_layers=2, max_len=128), sequence(3))
add("both", "mtst", lambda m: m.MTSTForecaster(3, output_shape=(6,), embed_dim=16, heads=4, n_layers=2, max_len=128, positional_encoding="both"), sequence(3))


def _classifier(name: str) -> Any:
    def build(m: Any) -> nn.Module:
        return getattr(m, f"{name}Builder")(num_classes=4, num_features=16, timestep=32, dimentions=3, num_layers=2, nhead=2, dim_feedforward=32).build()

    return build


for _name in ("Transformer", "BiLSTM"):
    add(_name, f"tisc.modules.{_name}", _classifier(_name), sequence(3))


def _windows(b: int, n: int) -> tuple[dict[str, Tensor]]:
    return ({"encoding.targets": torch.randn(b, 8, 2), "encoding.nontargets": torch.randn(b, 8, 3), "decoding.nontargets": torch.randn(b, 4, 3), "label.targets": torch.randn(b, 4, 2)},)


class _Forecast(nn.Module):
    """The loss of a window, as its own training step computes it."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.body.calculate_loss(self.body(batch), batch)


_WINDOW = {"encoding_length": 8, "decoding_length": 4, "target_names": ["a", "b"], "nontarget_names": ["c", "d", "e"]}
add("mlp", "deep_time_series.model", lambda m: _Forecast(m.MLP(hidden_size=16, n_hidden_layers=2, **_WINDOW)), _windows)
add("rnn", "deep_time_series.model", lambda m: _Forecast(m.RNN(hidden_size=16, n_layers=2, rnn_class=nn.GRU, **_WINDOW)), _windows)
add("transformer", "deep_time_series.model", lambda m: _Forecast(m.SingleShotTransformer(d_model=16, n_heads=2, n_layers=2, **_WINDOW)), _windows)


# experts and generated weights: soft-moe, hyperlight
add("vit", "soft_moe", lambda m: m.SoftMoEVisionTransformer(num_experts=4, slots_per_expert=2, moe_layer_index=[1, 2], img_size=32, patch_size=8, num_classes=5, embed_dim=32, depth=3, num_heads=4), fixed_image(3, 32))


class _Generated(nn.Module):
    """A small network of which another makes the weights of convolutions."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
        self.main = m.hypernetize(body, modules=m.find_modules_of_type(body, [nn.Conv2d]))
        self.hyper = m.HyperNet(input_shapes={"h": (6,)}, output_shapes=self.main.external_shapes(), hidden_sizes=[8, 16])

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        with self.main.using_externals(self.hyper(h=h)):
            return self.main(x)


add("convolutions", "hyperlight", _Generated, lambda b, n: (torch.randn(b, 3, 16, 16), torch.rand(6)))
add("topk", "pytorch_mixtures", lambda m: _mixed(m, "TopkMoE", "topk"), sequence(16))
add("chosen", "pytorch_mixtures", lambda m: _mixed(m, "ExpertChoiceMoE", "expert_choice"), sequence(16))


def _mixed(m: Any, cls: str, router: str) -> nn.Module:
    config = m.MoEConfig(hidden_dim=16, intermediate_dim=32, num_experts=4, expert_fn="ff", expert_act="silu", router_fn=router, capacity_factor=1.25, topk=2, dtype=torch.float32)
    return nn.Sequential(nn.Linear(16, 16), getattr(m, cls)(config), nn.Linear(16, 4))


# diffusion and pictures of bodies: score-models, monai-generative, timm-3d, iunets, flexivit, piqa
class _Score(nn.Module):
    """Denoising score matching, as its fit method computes it."""

    def __init__(self, m: Any, body: nn.Module) -> None:
        super().__init__()
        self.model = m.ScoreModel(model=body, sigma_min=1e-2, sigma_max=50.0, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        return self.model.loss_fn(x)


add("mlp", "score_models", lambda m: _Score(m, m.MLP(dimensions=6, layers=2, units=16)), lambda b, n: (torch.randn(b, 6),))
add("ddpm", "score_models", lambda m: m.ScoreModel(model=m.DDPM(channels=1, nf=16, ch_mult=[1, 2], num_res_blocks=1, dimensions=2), sigma_min=1e-2, sigma_max=50.0, device="cpu"), lambda b, n: (torch.rand(b), torch.randn(b, 1, 16, 16)))
add("ncsnpp", "score_models", lambda m: m.ScoreModel(model=m.NCSNpp(channels=1, nf=16, ch_mult=[1, 2], num_res_blocks=1, dimensions=1), beta_min=0.1, beta_max=20.0, device="cpu"), lambda b, n: (torch.rand(b), torch.randn(b, 1, 32)))
add("energy", "score_models", lambda m: m.EnergyModel(model=m.MLP(dimensions=6, layers=2, units=16, nn_is_energy=True), sigma_min=1e-2, sigma_max=50.0, device="cpu"), lambda b, n: (torch.rand(b), torch.randn(b, 6)))
add("vqvae", "generative.networks.nets", lambda m: m.VQVAE(2, 1, 1, num_channels=(8, 16), num_res_layers=1, num_res_channels=(8, 16), downsample_parameters=((2, 4, 1, 1),) * 2, upsample_parameters=((2, 4, 1, 1, 0),) * 2, num_embeddings=8, embedding_dim=8), image(1, 32))
add("autoencoder", "generative.networks.nets", lambda m: m.AutoencoderKL(2, num_channels=(8, 16), num_res_blocks=1, attention_levels=(False, True), latent_channels=2, norm_num_groups=4), fixed_image(1, 16))
add("unet", "generative.networks.nets", lambda m: m.DiffusionModelUNet(2, 1, 1, num_res_blocks=1, num_channels=(8, 16), attention_levels=(False, True), norm_num_groups=4, num_head_channels=8, with_conditioning=True, cross_attention_dim=6), lambda b, n: {"x": torch.randn(b, 1, 16, 16), "timesteps": torch.randint(0, 100, (b,)), "context": torch.randn(b, 2, 6)})
for _name in ("resnet18", "densenet121"):
    add(_name, "timm_3d", lambda m, n=_name: m.create_model(n, pretrained=False, num_classes=4, in_chans=1), lambda b, n: (torch.randn(b, 1, 32, 32, 32),))
add("reversible", "iunets", lambda m: m.iUNet(in_channels=4, architecture=(2, 2), dim=2, verbose=0), fixed_image(4, 16))


class _Compared(nn.Module):
    """A small network that restores pictures, and a measure of likeness as its loss."""

    def __init__(self, measure: nn.Module, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, channels, 3, padding=1), nn.Sigmoid())
        self.measure = measure

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 1 - self.measure(self.body(x), y)


for _name in ("SSIM", "MS_SSIM", "GMSD", "MDSI", "HaarPSI", "VSI", "FSIM"):
    add(_name, "piqa", lambda m, n=_name: _Compared(getattr(m, n)(), 3), lambda b, n: (torch.rand(b, 3, 192, 192), torch.rand(b, 3, 192, 192)))


# bodies in space: ezgatr, cliffordlayers
add("gatr", "ezgatr.nets.mv_only_gatr", lambda m: m.MVOnlyGATrModel(m.MVOnlyGATrConfig(num_layers=2, size_context=64, size_channels_hidden=8, size_channels_intermediate=8, attn_num_heads=2)), lambda b, n: (torch.randn(b, n, 1, 16),))


for _name in ("CliffordBasicBlock2d", "CliffordFourierBasicBlock2d"):
    add(_name, "cliffordlayers.models.models_2d", lambda m, n=_name: nn.Sequential(*(getattr(m, n)((1, 1), 4, 4, norm=True, **({"modes1": 4, "modes2": 4} if "Fourier" in n else {})) for _ in range(2))), lambda b, n: (torch.randn(b, 4, 16, 16, 4),))


# states, spikes and splines: tracetorch, neural-ssm, torch-dimensions, inkan, unikan, exact-snn-nn
class _Stepped(nn.Module):
    """Spikes over time: states are set to nothing ahead of each batch."""

    def __init__(self, m: Any, *layers: nn.Module) -> None:
        super().__init__()
        self.net = m.Model()
        self.net.net = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        self.net.zero_states()
        out = [self.net.net(step) for step in x.unbind(1)]
        return torch.stack(out, 1)


add("spikes", "tracetorch", lambda m: _Stepped(m, nn.Linear(4, 8), m.snn.LIB(8), nn.Linear(8, 8), m.snn.SRLIB(8), nn.Linear(8, 3), m.snn.LI(3)), lambda b, n: (torch.randn(b, 6, 4),))
add("spaces", "tracetorch", lambda m: _Stepped(m, nn.Linear(4, 8), m.ssm.S4(8, 4), nn.Linear(8, 8), m.ssm.S6(8, 4), nn.Linear(8, 3)), lambda b, n: (torch.randn(b, 6, 4),))
add("gated", "tracetorch", lambda m: _Stepped(m, nn.Linear(4, 8), m.rnn.GRU(8, 8), m.rnn.LSTM(8, 8), nn.Linear(8, 3)), lambda b, n: (torch.randn(b, 6, 4),))


class _First(nn.Module):
    """A model of whose results the first is wanted."""

    def __init__(self, body: nn.Module, **given: Any) -> None:
        super().__init__()
        self.body, self.given = body, given

    def forward(self, *args: Tensor) -> Any:
        return self.body(*args, **self.given)[0]


for _name in ("tv", "l2n", "lru"):
    add(_name, "neural_ssm", lambda m, n=_name: _First(m.DeepSSM(d_input=3, d_output=2, d_model=8, d_state=8, n_layers=2, param=n), mode="scan"), sequence(3))
for _name in ("Mamba", "LSTM", "Transformer"):
    add(_name, "torch_dimensions", lambda m, n=_name: getattr(m, n)(16, 2, lattice=m.Lattice(shape=(4, 3), time=True)), lambda b, n: (torch.randn(b, 6, 4, 3, 16),))
add("S4ND", "torch_dimensions", lambda m: m.S4ND(16, 2, dim=2, shape=(4, 3)), lambda b, n: (torch.randn(b, 6, 4, 3, 16),))
add("network", "inkan", lambda m: m.KANNetwork([8, 16, 4]), lambda b, n: (torch.rand(b, 8),))
add("universal", "unikan", lambda m: m.SKAN_pure([8, 16, 4]), lambda b, n: (torch.rand(b, 8),))


class _Times(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.m, self.net = m, nn.Sequential(m.ExactTTFSLinear(8, 16, t_max=40.0, bias_val=1.5), m.ExactTTFSLinear(16, 4, t_max=40.0, bias_val=1.5))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.m.latency_cross_entropy(self.net(x.t()), y, 40.0)


add("first_spikes", "exact_snn", _Times, lambda b, n: (torch.rand(b, 8) * 20, torch.randint(0, 4, (b,))))


# proteins and tables: tape-proteins, tabular-transformers
def _protein(cls: str, config: str, **options: Any) -> Any:
    return lambda m: getattr(m, cls)(getattr(m, config)(**options))


add("masked", "tape", _protein("ProteinBertForMaskedLM", "ProteinBertConfig", vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64), lambda b, n: (ids(b, n) % 29, torch.ones(b, n), ids(b, n) % 29))
add("contacts", "tape", _protein("ProteinBertForContactPrediction", "ProteinBertConfig", vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64), lambda b, n: (ids(b, n) % 29, torch.ones(b, n)))
add("unirep", "tape", _protein("UniRepForLM", "UniRepConfig", vocab_size=26, input_size=10, hidden_size=16), lambda b, n: (torch.randint(1, 25, (b, 8)), torch.ones(b, 8)))
add("resnet", "tape", _protein("ProteinResNetForValuePrediction", "ProteinResNetConfig", vocab_size=30, hidden_size=32, num_hidden_layers=2), lambda b, n: (ids(b, n) % 29, torch.ones(b, n), torch.randn(b, 1)))


add("tab", "tabtransformer.model", lambda m: m.TabTransformer(categories=(5, 3), num_continuous=4, dim=16, dim_out=2, depth=2, heads=2, attn_dropout=0.1, ff_dropout=0.1), lambda b, n: (torch.stack([torch.randint(0, 5, (b,)), torch.randint(0, 3, (b,))], 1), torch.randn(b, 4)))
add("ft", "fttransformer.model", lambda m: m.FTTransformer(categories=(5, 3), num_continuous=4, dim=16, dim_out=2, depth=2, heads=2, attn_dropout=0.1, ff_dropout=0.1), lambda b, n: (torch.stack([torch.randint(0, 5, (b,)), torch.randint(0, 3, (b,))], 1), torch.randn(b, 4)))
