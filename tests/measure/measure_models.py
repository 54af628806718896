"""Small models whose costs can be worked out by hand, for the tests of this room."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe.tracing import Capture

__all__ = ["Block", "Net", "Recurrent", "Stack", "captured", "ids"]


class Block(nn.Module):
    """A residual block of two linear layers; ``fails`` raises, ``spoils`` returns NaN."""

    def __init__(self, width: int, *, fails: bool = False, spoils: bool = False):
        super().__init__()
        self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.fails, self.spoils = fails, spoils

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("no kernel for this block")
        h = self.b(F.relu(self.a(x)))
        return h * float("nan") if self.spoils else x + h


class Stack(nn.Module):
    """Equal blocks one after another."""

    def __init__(self, n: int, width: int = 16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Net(nn.Module):
    """Embedding, blocks, batch norm and dropout with glue between, a head tied to the embedding, a loss."""

    def __init__(self, n: int = 2, width: int = 16, n_words: int = 50):
        super().__init__()
        self.embed = nn.Embedding(n_words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(n))
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(width, n_words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor, labels: Tensor) -> Tensor:
        h = self.embed(words) + torch.arange(words.shape[1], device=words.device)[None, :, None] / 100
        for block in self.blocks:
            h = block(h)
        h = self.drop(self.norm(h.transpose(1, 2)).transpose(1, 2))
        logits = self.head(h)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))


def ids(batch: int = 4, seq: int = 6, n_words: int = 50) -> Tensor:
    """Word ids, all below ``n_words``: ``[batch, seq]``."""
    return torch.randint(0, n_words, (batch, seq), generator=torch.Generator().manual_seed(0))


class Recurrent(nn.Module):
    """Two equal recurrent layers of whose tuples different numbers of pieces are used."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.LSTM(16, 16, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, (h, c) = self.a(x)
        return self.b(x, (h, c))[0]


def captured(model: nn.Module, *args: Tensor) -> Capture:
    """A capture of the model in which every block is one op."""
    blocks = [name for name, module in model.named_modules() if isinstance(module, Block)]
    return autopipe.capture(model, args, closed=blocks)
