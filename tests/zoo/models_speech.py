"""Speech and sequence models: convolutional front ends, CTC, and recurrent stacks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from .models_text import Block, tokens
from .registry import register

WIDTH = 32


def waves(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Signals [batch, 40 × length]."""
    return (torch.randn(batch, 40 * length, generator=torch.Generator().manual_seed(batch)),), {}


def _labelled(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    (wave,), _ = waves(batch, length)
    lengths = torch.full((batch,), 40 * length)
    lengths[0] -= 0 if batch == 2 else 80
    return (wave,), {"lengths": lengths, "labels": torch.arange(batch * 3).view(batch, 3) % 9 + 1}


@register(_labelled)
class Wav2Vec(nn.Module):
    """Strided convolutions, weight-normed position convolution, transformer, CTC loss over real lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ModuleList([nn.Conv1d(n, WIDTH, 10, 5) for n in (1, WIDTH)])
        self.norm, self.project = nn.GroupNorm(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.position = weight_norm(nn.Conv1d(WIDTH, WIDTH, 8, padding=4, groups=4), dim=2)
        self.mask_embed = nn.Parameter(torch.rand(WIDTH))
        self.layers = nn.ModuleList([Block(p=0.0) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 10)

    def _frames(self, lengths: Tensor) -> Tensor:
        for conv in self.conv:
            lengths = torch.div(lengths - conv.kernel_size[0], conv.stride[0], rounding_mode="floor") + 1
        return lengths

    def forward(self, wave: Tensor, lengths: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        x = wave[:, None]
        for conv in self.conv:
            x = F.gelu(conv(x))
        x = self.project(self.norm(x).transpose(1, 2))
        frames = self._frames(lengths)
        visible = torch.arange(x.shape[1])[None] < frames[:, None]
        x = x.masked_fill(~visible[..., None], 0.0)
        if self.training:
            masked = torch.rand(x.shape[:2]) < 0.1
            x[masked] = self.mask_embed.to(x.dtype)
        x = x + F.gelu(self.position(x.transpose(1, 2))[..., :-1]).transpose(1, 2)
        for layer in self.layers:
            x = layer(x, visible[:, None, None])
        logits = self.head(x)
        loss = None
        if labels is not None:
            log_probs = F.log_softmax(logits, -1, dtype=torch.float32).transpose(0, 1)
            with torch.backends.cudnn.flags(enabled=False):
                target_lengths = torch.full((labels.shape[0],), labels.shape[1])
                loss = F.ctc_loss(log_probs, labels, frames, target_lengths, zero_infinity=True)
        return {"loss": loss, "logits": logits}


@register(waves)
class Conformer(nn.Module):
    """STFT features, subsampling, half-step feed-forwards around attention and depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(32), persistent=False)
        self.subsample = nn.Conv1d(17, WIDTH, 3, 2, 1)
        self.blocks = nn.ModuleList([ConformerBlock() for _ in range(4)])
        self.head = nn.Linear(WIDTH, 6)

    def forward(self, wave: Tensor) -> Tensor:
        spectrum = torch.stft(wave, 32, 16, window=self.window, return_complex=True)
        x = self.subsample(torch.log1p(spectrum.abs() ** 2)).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x).log_softmax(-1)


class ConformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ff1, self.ff2 = (
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(2)
        )
        self.attention, self.norm = Block(p=0.0), nn.BatchNorm1d(WIDTH)
        self.pointwise, self.depthwise = (
            nn.Conv1d(WIDTH, 2 * WIDTH, 1),
            nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.ff1(x)
        x = self.attention(x)
        y = self.depthwise(F.glu(self.pointwise(x.transpose(1, 2)), dim=1))
        x = x + F.silu(self.norm(y)).transpose(1, 2)
        return x + 0.5 * self.ff2(x)


@register(tokens)
class LSTMStack(nn.Module):
    """GNMT's shape: a bidirectional layer, residual layers with states kept, tuple outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(4)])
        self.dropout, self.out = nn.Dropout(0.2), nn.Linear(WIDTH, 50)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x, _ = self.first(self.embed(ids))
        states = []
        for layer in self.layers:
            y, state = layer(self.dropout(x))
            x = x + y
            states.append(state)
        return self.out(x), states


@register(tokens)
class GRUSeq2Seq(nn.Module):
    """Encoder GRU with packed rows, attention over its output at every step of a decoder cell."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.decoder = nn.GRUCell(2 * WIDTH, WIDTH)
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 50)

    def forward(self, ids: Tensor) -> Tensor:
        memory, hidden = self.encoder(self.embed(ids))
        state, previous, outputs = hidden[-1], self.embed.weight[1].expand(ids.size(0), -1), []
        for _ in range(4):
            scores = torch.bmm(memory, self.query(state).unsqueeze(-1)).squeeze(-1)
            context = torch.einsum("bt,btd->bd", scores.softmax(-1), memory)
            state = self.decoder(torch.cat([previous, context], -1), state)
            outputs.append(self.out(state))
            previous = self.embed(outputs[-1].argmax(-1))
        return torch.stack(outputs, 1)


@register(tokens)
class PackedRNN(nn.Module):
    """Packs by the lengths found in the data: the encoder branches on values and stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = PackedEncoder()
        self.mlp = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encoder(ids)
        for layer in self.mlp:
            x = torch.tanh(layer(x))
        return x


class PackedEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(50, WIDTH), nn.RNN(WIDTH, WIDTH, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids > 5).sum(-1).clamp(min=1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embed(ids), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.rnn(packed)[1].squeeze(0)


class SelectiveScan(nn.Module):
    """A state-space layer written as a Python loop over time in glue code."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.dt, self.out = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.A_log = nn.Parameter(torch.log(torch.arange(1, 5).float().repeat(WIDTH, 1)))

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.in_proj(x).chunk(2, -1)
        dt = F.softplus(self.dt(u))
        decay = torch.exp(-self.A_log.exp() * dt[..., None])
        state = x.new_zeros(x.shape[0], WIDTH, 4)
        outputs = []
        for step in range(x.shape[1]):
            state = decay[:, step] * state + u[:, step, :, None]
            outputs.append(state.sum(-1))
        return x + self.out(torch.stack(outputs, 1) * F.silu(gate))


@register(tokens)
class Mamba(nn.Module):
    """Layers that loop over time stay whole, so that the loop follows the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50)
        self.layers = nn.ModuleList([SelectiveScan() for _ in range(4)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
