"""The models that are measured, and plans that cut them where both runtimes are to cut.

Measuring is left to ``measurements``.
"""

from __future__ import annotations

import torch
from torch import nn

from autopipe.hardware import Cluster
from autopipe.plans import Bounds, Plan, StagePlan
from autopipe.schedule import placement
from autopipe.stages import build
from autopipe.tracing import capture


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, d: int, heads: int = 4, factor: int = 4) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True)
        self.up, self.down = nn.Linear(d, factor * d), nn.Linear(factor * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Chain(nn.Module):
    """Layers in a row."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def transformer(n_blocks: int = 8, d: int = 256) -> Chain:
    torch.manual_seed(0)
    return Chain([Block(d) for _ in range(n_blocks)])


def neurons(n: int) -> Chain:
    torch.manual_seed(0)
    return Chain([nn.Linear(1, 1) for _ in range(n)])


def heavy_head(n_blocks: int = 5, d: int = 256, vocab: int = 16384) -> Chain:
    """Blocks and a head that costs several of them."""
    torch.manual_seed(0)
    return Chain([*(Block(d) for _ in range(n_blocks)), nn.Linear(d, vocab)])


def split(model: Chain, x: torch.Tensor, cuts: list[int], n_ranks: int, schedule: str, n_microbatches: int):
    """Capture, plan and stages with the layers cut before the given indices."""
    captured = capture(model, (x,))
    names = [op.name for op in captured.ops.compute]
    if len(names) != len(model.layers):
        raise RuntimeError(f"captured {len(names)} ops for {len(model.layers)} layers")
    edges = [0, *cuts, len(names)]
    n_stages = len(edges) - 1
    ranks = placement(schedule, n_ranks, n_stages)
    stages = tuple(StagePlan(i, ranks[i], tuple(names[edges[i] : edges[i + 1]])) for i in range(n_stages))
    plan = Plan(
        captured.ops.model,
        captured.ops.digest,
        stages,
        (),
        (),
        schedule,
        n_microbatches,
        0.1,
        Bounds(0.0, 0.0, 0.0, False),
        Cluster.uniform(n_ranks),
    )
    return captured, plan, build(captured, plan)
