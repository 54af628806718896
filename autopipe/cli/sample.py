"""A small model with a skip and a tied pair, which ``doctor`` splits and trains.

What is done with it is left to ``machine_commands``.
"""

import torch
from torch import Tensor, nn

__all__ = ["small"]


class Small(nn.Module):
    """Embedding, two residual blocks, a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)
        )
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids ``[batch, seq]`` to logits ``[batch, seq, 64]``."""
        h = self.embed(ids)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def small() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and example inputs."""
    torch.manual_seed(0)
    return Small(), (torch.randint(0, 64, (8, 16), device="cpu"),)
