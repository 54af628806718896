"""Models of signals of other libraries: brain waves, sound, spikes, and series of numbers.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .catalogue import add, rows, sequence, sound, tokens

__all__: list[str] = []

WAVES: dict[str, dict[str, Any]] = {
    "EEGNet": {}, "Deep4Net": {"n_times": 500}, "ShallowFBCSPNet": {}, "ATCNet": {"input_window_seconds": 2.0, "sfreq": 128},
    "EEGConformer": {"n_times": 500}, "BDTCN": {"n_filters": 16, "n_blocks": 2}, "TIDNet": {}, "EEGITNet": {}, "EEGNeX": {},
    "SPARCNet": {}, "ContraWR": {"sfreq": 128}, "SyncNet": {}, "CTNet": {}, "EEGTCNet": {}, "MSVTNet": {},
    "SCCNet": {"sfreq": 128}, "IFNet": {"sfreq": 128}, "FBCNet": {"sfreq": 128}, "EEGMiner": {"sfreq": 128},
    "EEGSimpleConv": {"sfreq": 128}, "MEDFormer": {}, "BIOT": {"sfreq": 200, "n_times": 1000}, "TCFormer": {},
}
for name, more in WAVES.items():
    options = {"n_chans": 8, "n_outputs": 3, "n_times": 256} | more
    add(name, "braindecode.models", lambda m, n=name, o=options: getattr(m, n)(**o), lambda b, n, t=options["n_times"]: (torch.randn(b, 8, t),))

add("demucs", "demucs.demucs", lambda m: m.Demucs(["a", "b"], audio_channels=1, channels=4, depth=3, lstm_layers=0), sound(64))
add("htdemucs", "demucs.htdemucs", lambda m: m.HTDemucs(["a", "b"], audio_channels=1, channels=8, nfft=512, depth=3, t_layers=2, t_heads=2, segment=1, samplerate=8192, use_train_segment=False), lambda b, n: (torch.randn(b, 1, 256 * n),))
add("demucs", "denoiser.demucs", lambda m: m.Demucs(hidden=8, depth=3, resample=2), lambda b, n: (torch.randn(b, 1, 64 * n),))
add("spectral", "auraloss.freq", lambda m: _Heard(m.MultiResolutionSTFTLoss(fft_sizes=[64, 128], hop_sizes=[16, 32], win_lengths=[64, 128])), lambda b, n: (torch.randn(b, 1, 32 * n),))
add("intelligible", "torch_stoi", lambda m: _Heard(m.NegSTOILoss(sample_rate=10000), flat=True), lambda b, n: (torch.randn(b, 1, 256 * n),))
add("transformer", "moshi.modules.transformer", lambda m: m.StreamingTransformer(d_model=32, num_heads=4, num_layers=3, dim_feedforward=64, causal=True, context=16, positional_embedding="rope"), sequence())
add("encoder", "moshi.modules", lambda m: m.SEANetEncoder(channels=1, dimension=16, n_filters=4, ratios=[4, 2], causal=True, pad_mode="constant"), sound(16))
add("waves", "audio_diffusion_pytorch", lambda m: m.DiffusionModel(net_t=m.UNetV0, in_channels=1, channels=[8, 16], factors=[1, 4], items=[1, 2], attentions=[0, 1], attention_heads=2, attention_features=8, diffusion_t=m.VDiffusion, sampler_t=m.VSampler), lambda b, n: (torch.randn(b, 1, 32 * n),))

add("lif", "norse.torch", lambda m: m.SequentialState(nn.Linear(8, 16), m.LIF(), nn.Linear(16, 16), m.LIF(), nn.Linear(16, 4), m.LI()), lambda b, n: (torch.randn(n, b, 8),))
add("lsnn", "norse.torch", lambda m: m.SequentialState(m.LSNNRecurrent(8, 16), nn.Linear(16, 4), m.LIF()), lambda b, n: (torch.randn(n // 4, b, 8),))
add("lif", "sinabs.layers", lambda m: nn.Sequential(nn.Linear(8, 16), m.LIF(tau_mem=10.0), nn.Linear(16, 16), m.LIF(tau_mem=10.0), nn.Linear(16, 4), m.ExpLeak(tau_mem=10.0)), lambda b, n: (torch.randn(b, n // 4, 8),))
add("iaf", "sinabs.layers", lambda m: nn.Sequential(nn.Conv2d(1, 8, 3), m.IAFSqueeze(batch_size=2), nn.AvgPool2d(2), nn.Conv2d(8, 8, 3), m.IAFSqueeze(batch_size=2), nn.Flatten(), nn.Linear(200, 4)), lambda b, n: (torch.randn(2 * b, 1, 16, 16),))

add("mac", "titans_pytorch", lambda m: m.MemoryAsContextTransformer(num_tokens=64, dim=32, depth=2, segment_len=8, num_persist_mem_tokens=2, num_longterm_mem_tokens=2, dim_head=8, heads=4, neural_memory_layers=(2,), neural_memory_segment_len=4), tokens())
add("memory", "titans_pytorch", lambda m: nn.Sequential(nn.Linear(32, 32), m.NeuralMemory(dim=32, chunk_size=8)), sequence())
for name, both in {"one_way": False, "both_ways": True}.items():
    add(name, "s5", lambda m, both=both: nn.Sequential(nn.Linear(8, 16), m.S5Block(16, 16, both), m.S5Block(16, 16, both), nn.Linear(16, 4)), sequence(8))
add("bolt", "chronos.chronos_bolt", lambda m: m.ResidualBlock(8, 16, 4, "relu"), rows(8))
add("bolt_t5", "chronos.chronos_bolt", lambda m: _bolt(m), lambda b, n: (torch.randn(b, 2 * n),))
add("mixer", "torchtsmixer", lambda m: m.TSMixer(32, 8, 4, output_channels=2), sequence(4))

P = "pypots.nn.modules"
add("saits", f"{P}.saits", lambda m: m.BackboneSAITS(16, 6, 2, 16, 2, 8, 8, 32, 0.1, 0.1), lambda b, n: (torch.randn(b, 16, 6), (torch.rand(b, 16, 6) > 0.3).float()))
add("timesnet", f"{P}.timesnet", lambda m: m.BackboneTimesNet(2, 16, 0, 2, 16, 16, 3), lambda b, n: (torch.randn(b, 16, 16),))
add("scinet", f"{P}.scinet", lambda m: m.BackboneSCINet(16, 16, 6, 8, 1, 2, 1, 1), lambda b, n: (torch.randn(b, 16, 6),))
add("film", f"{P}.film", lambda m: m.BackboneFiLM(16, 6, 16, [32], [1, 2], 8, 0.5, 0), lambda b, n: (torch.randn(b, 32, 6),))
add("segrnn", f"{P}.segrnn", lambda m: m.BackboneSegRNN(16, 6, 8, 4, 16), lambda b, n: (torch.randn(b, 16, 6),))
add("frets", f"{P}.frets", lambda m: m.BackboneFreTS(16, 6, 8, 16, 16), lambda b, n: (torch.randn(b, 16, 8),))
add("tefn", f"{P}.tefn", lambda m: m.BackboneTEFN(16, 6, 0, 3), lambda b, n: (torch.randn(b, 16, 6),))
add("tcn", f"{P}.tcn", lambda m: m.BackboneTCN(6, [8, 8, 8]), lambda b, n: (torch.randn(b, 6, n),))


class _Heard(nn.Module):
    """A small network that cleans a wave, and a measure of how well."""

    def __init__(self, measure: nn.Module, flat: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(1, 8, 9, padding=4), nn.PReLU(), nn.Conv1d(8, 8, 9, padding=4), nn.PReLU(), nn.Conv1d(8, 1, 1))
        self.measure, self.flat = measure, flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cleaned = self.layers(x)
        return self.measure(cleaned[:, 0], x[:, 0]) if self.flat else self.measure(cleaned, x)


def _bolt(library: Any) -> nn.Module:
    config = importlib.import_module("transformers").T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=2, feed_forward_proj="relu", decoder_start_token_id=0)
    config.chronos_config = {"context_length": 64, "prediction_length": 16, "input_patch_size": 8, "input_patch_stride": 8, "quantiles": [0.1, 0.5, 0.9], "use_reg_token": True}
    return library.ChronosBoltModelForForecasting(config)
