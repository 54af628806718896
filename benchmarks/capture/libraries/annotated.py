"""Models of the annotated implementations of labml_nn, one a paper.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .catalogue import add, image, rows, tokens

__all__: list[str] = []

L = "labml_nn"


def ids_first(b: int, n: int) -> tuple[Any, ...]:
    """Token ids ``[length, batch]``."""
    return (torch.randint(1, 64, (n, b)),)


def first(width: int) -> Any:
    """Features ``[length, batch, width]``."""
    return lambda b, n: (torch.randn(n, b, width),)


def of(name: str) -> Any:
    """A module of the library."""
    return importlib.import_module(f"{L}.{name}")


def layer(attention: nn.Module | None = None, d: int = 32) -> nn.Module:
    """A transformer's layer as its page builds it, with an attention of another page."""
    forward = of("transformers.feed_forward").FeedForward(d, 64, 0.1)
    attention = attention or of("transformers.mha").MultiHeadAttention(4, d, 0.1)
    return of("transformers.models").TransformerLayer(d_model=d, self_attn=attention, feed_forward=forward, dropout_prob=0.1)


class _Language(nn.Module):
    """A language model around an encoder that takes ``[length, batch, width]`` and perhaps a mask."""

    def __init__(self, encoder: nn.Module, takes_mask: bool = True) -> None:
        super().__init__()
        self.embedding = of("transformers.models").EmbeddingsWithPositionalEncoding(32, 64)
        self.encoder, self.takes_mask = encoder, takes_mask
        self.generator = of("transformers.models").Generator(64, 32)
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        if not self.takes_mask:
            out = self.encoder(self.embedding(x))
            return self.generator(out)
        if self.mask is None or self.mask.size(0) != len(x):
            self.mask = of("transformers.utils").subsequent_mask(len(x)).to(x.device)
        out = self.encoder(self.embedding(x), self.mask)
        return (self.generator(out[0]), *out[1:]) if isinstance(out, tuple) else self.generator(out)


def encoder(attention: nn.Module | None = None) -> nn.Module:
    """Three layers of one kind."""
    return of("transformers.models").Encoder(layer(attention), 3)


add("fnet", f"{L}.transformers.fnet", lambda m: nn.Sequential(nn.Embedding(64, 32), _Unmasked(encoder(m.FNetMix())), nn.Linear(32, 64)), ids_first)
add("aft", f"{L}.transformers.aft", lambda m: _Language(encoder(m.AFTLocal(32, 64, 8))), ids_first)
add("gmlp", f"{L}.transformers.gmlp", lambda m: _Gmlp(m), ids_first)
add("feedback", f"{L}.transformers.feedback", lambda m: _Language(m.FeedbackTransformer(m.FeedbackTransformerLayer(d_model=32, attn=m.FeedbackAttention(4, 32, 0.1), feed_forward=of("transformers.feed_forward").FeedForward(32, 64, 0.1), dropout_prob=0.1), 2), False), lambda b, n: (torch.randint(1, 64, (n // 4, b)),))
add("feedback_kv", f"{L}.transformers.feedback", lambda m: _Language(m.FeedbackTransformerKV(m.FeedbackTransformerLayer(d_model=32, attn=m.FeedbackAttention(4, 32, 0.1, is_kv_precomputed=True), feed_forward=of("transformers.feed_forward").FeedForward(32, 64, 0.1), dropout_prob=0.1), 2, 32, 4), False), lambda b, n: (torch.randint(1, 64, (n // 4, b)),))
add("conv_mixer", f"{L}.conv_mixer", lambda m: m.ConvMixer(m.ConvMixerLayer(32, 5), 4, m.PatchEmbeddings(32, 4, 3), m.ClassificationHead(32, 10)), image())
add("fast_weights", f"{L}.transformers.fast_weights", lambda m: _Language(m.FastWeightsAttentionTransformer(m.FastWeightsAttentionTransformerLayer(d_model=32, attn=m.FastWeightsAttention(4, 32, 0.1, m.DPFP()), feed_forward=of("transformers.feed_forward").FeedForward(32, 64, 0.1), dropout_prob=0.1), 2), False), lambda b, n: (torch.randint(1, 64, (n // 4, b)),))
add("ddpm", f"{L}.diffusion.ddpm.unet", lambda m: m.UNet(3, 32, (1, 2), (False, True), 1), lambda b, n: (torch.randn(b, 3, n, n), torch.randint(0, 100, (b,))))
add("stable", f"{L}.diffusion.stable_diffusion.model.unet", lambda m: m.UNetModel(in_channels=4, out_channels=4, channels=32, n_res_blocks=1, attention_levels=[0, 1], channel_multipliers=[1, 2], n_heads=2, d_cond=16), lambda b, n: (torch.randn(b, 4, n, n), torch.randint(0, 100, (b,)), torch.randn(b, 5, 16)))
add("gat", f"{L}.graphs.gat", lambda m: _Graph(m.GraphAttentionLayer), lambda b, n: (torch.randn(8 * b, 16), torch.rand(8 * b, 8 * b, 1) > 0.5))
add("gat2", f"{L}.graphs.gatv2", lambda m: _Graph(m.GraphAttentionV2Layer), lambda b, n: (torch.randn(8 * b, 16), torch.rand(8 * b, 8 * b, 1) > 0.5))
add("style", f"{L}.gan.stylegan", lambda m: _Style(m), rows(16))
add("discriminator", f"{L}.gan.stylegan", lambda m: m.Discriminator(5, 8, 32), lambda b, n: (torch.randn(4 * b, 3, 32, 32),))
add("rhn", f"{L}.recurrent_highway_networks", lambda m: m.RHN(8, 16, 2, 2), first(8))
add("lstm", f"{L}.lstm", lambda m: m.LSTM(8, 16, 2), first(8))
add("hyper_lstm", f"{L}.hypernetworks.hyper_lstm", lambda m: m.HyperLSTM(8, 16, 8, 4, 1), first(8))
add("neox", f"{L}.neox.model", lambda m: nn.Sequential(m.Embedding(64, 32), m.TransformerLayer(32, 4), m.TransformerLayer(32, 4), m.FinalNorm(32), m.ReadoutLayer(32, 64)), tokens())
add("resnet", f"{L}.resnet", lambda m: nn.Sequential(m.ResNetBase([1, 1, 1], [8, 16, 32]), nn.Linear(32, 10)), image())
add("ponder", f"{L}.adaptive_computation.ponder_net", lambda m: m.ParityPonderGRU(8, 16, 5), rows(8))
add("fta", f"{L}.activations.fta", lambda m: nn.Sequential(nn.Linear(8, 16), m.FTA(-1.0, 1.0, 0.5, 0.5), nn.Linear(64, 16), nn.Linear(16, 4)), rows(8))
add("capsule", f"{L}.capsule_networks.mnist", lambda m: m.MNISTCapsuleNetworkModel(), lambda b, n: (torch.rand(b, 1, 28, 28),))
add("lora", f"{L}.lora.gpt2", lambda m: m.GPTModel(d_model=32, n_heads=4, n_layers=3, n_positions=64, layer_norm_epsilon=1e-5, vocab_size=64, r=4), tokens())
add("retro", f"{L}.transformers.retro.model", lambda m: m.RetroModel(64, 32, 3, {1}, 8, 4, 8, 64, m.NearestNeighborEncoder(8, 2, {1}, 32, 4, 8, 64)), lambda b, n: (torch.randint(1, 64, (b, n)), torch.randint(1, 64, (b, n // 8, 2, 16))))
add("unet", f"{L}.unet", lambda m: m.UNet(3, 2), image(3, 32))
add("sketch", f"{L}.sketch_rnn", lambda m: _Sketch(m), lambda b, n: (torch.randn(n, b, 5),))
add("cycle", f"{L}.gan.cycle_gan", lambda m: m.GeneratorResNet(3, 2), image(3, 32))
add("evidence", f"{L}.uncertainty.evidence", lambda m: _Evidence(m), rows(8))
add("penalty", f"{L}.gan.wasserstein.gradient_penalty", lambda m: _Penalty(m), rows(8))


class _Unmasked(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, None)


class _Gmlp(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([library.GMLPBlock(32, 64, 64) for _ in range(3)])
        self.head = nn.Linear(32, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = of("transformers.utils").subsequent_mask(len(x))
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x=x, mask=mask)
        return self.head(x)


class _Graph(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.one, self.two = kind(16, 32, 4), kind(32, 5, 1, is_concat=False)
        self.activation, self.dropout = nn.ELU(), nn.Dropout(0.6)

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.one(self.dropout(x), adjacency))
        return self.two(self.dropout(x), adjacency)


class _Style(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.mapping, self.generator = library.MappingNetwork(16, 4), library.Generator(4, 16, 8, 32)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        w = self.mapping(z)
        w = w[None, :, :].expand(self.generator.n_blocks, -1, -1)
        noise, side = [], 4
        for i in range(self.generator.n_blocks):
            noise.append((None if i == 0 else torch.randn(len(z), 1, side, side), torch.randn(len(z), 1, side, side)))
            side *= 2
        return self.generator(w, noise)


class _Sketch(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.encoder, self.decoder = library.EncoderRNN(8, 16), library.DecoderRNN(8, 16, 4)
        self.loss, self.divergence = library.ReconstructionLoss(), library.KLDivLoss()

    def forward(self, strokes: torch.Tensor) -> Any:
        z, mu, sigma_hat = self.encoder(strokes)
        zs = z.unsqueeze(0).expand(len(strokes) - 1, -1, -1)
        mixture, q_logits, _ = self.decoder(torch.cat([strokes[:-1], zs], 2), z, None)
        target = torch.cat([strokes[1:, :, :2], strokes[1:, :, 2:].softmax(-1)], -1)
        mask = torch.ones(len(strokes) - 1, strokes.size(1))
        return self.loss(mask, target, mixture, q_logits) + self.divergence(sigma_hat, mu)


class _Evidence(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Softplus())
        self.risk, self.divergence = library.SquaredErrorBayesRisk(), library.KLDivergenceLoss()

    def forward(self, x: torch.Tensor) -> Any:
        evidence = self.net(x)
        target = nn.functional.one_hot(x[:, :4].argmax(-1), 4).float()
        return evidence, self.risk(evidence, target) + self.divergence(evidence, target)


class _Penalty(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.penalty = library.GradientPenalty()

    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            d = self.net(x)
            return d, self.penalty(x, d)
