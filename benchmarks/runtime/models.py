"""The models that are measured, and plans that cut them where both runtimes are to cut.

Measuring is left to ``measurements``.
"""

from __future__ import annotations

import torch
from torch import nn

from autopipe.hardware import Cluster
from autopipe.plans import Bounds, Plan, StagePlan
from autopipe.schedule import placement
from autopipe.stages import Stage, build
from autopipe.tracing import Capture, capture


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


class Embed(nn.Module):
    """Token and position embeddings."""

    def __init__(self, vocab: int, length: int, d: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, d), nn.Parameter(torch.randn(length, d))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position


def language_model(n_blocks: int = 6, d: int = 256, vocab: int = 16752, length: int = 64) -> Chain:
    """DistilGPT2's depth and proportions at a third of its width and vocabulary, untied."""
    torch.manual_seed(0)
    return Chain([Embed(vocab, length, d), *(Block(d) for _ in range(n_blocks)), nn.Linear(d, vocab)])


class ConvNextBlock(nn.Module):
    """Depthwise convolution and a two-layer perceptron on each position, as in ConvNeXt."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(d, d, 7, padding=3, groups=d)
        self.norm = nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.scale = nn.Parameter(torch.full((d,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.mix(x).permute(0, 2, 3, 1))
        h = self.scale * self.down(nn.functional.gelu(self.up(h)))
        return x + h.permute(0, 3, 1, 2)


class Reduce(nn.Module):
    """Normalises and makes each ``factor`` × ``factor`` patch one position."""

    def __init__(self, n_in: int, n_out: int, factor: int) -> None:
        super().__init__()
        self.norm, self.patch = nn.GroupNorm(1, n_in), nn.Conv2d(n_in, n_out, factor, factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.patch(self.norm(x))


class Classify(nn.Module):
    """Classes of the mean over all positions."""

    def __init__(self, d: int, n_classes: int) -> None:
        super().__init__()
        self.out = nn.Linear(d, n_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x.mean((2, 3)))


def pyramid(
    depths: tuple[int, ...] = (3, 3, 9, 3),
    widths: tuple[int, ...] = (32, 64, 128, 256),
    n_classes: int = 1000,
) -> Chain:
    """ConvNeXt-T at a third of its width: positions shrink fourfold where channels double."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    n_in = 3
    for depth, width in zip(depths, widths, strict=True):
        layers.append(Reduce(n_in, width, 2 if layers else 4))
        layers += [ConvNextBlock(width) for _ in range(depth)]
        n_in = width
    return Chain([*layers, Classify(n_in, n_classes)])


def batch(model: Chain, row: list[int], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs, each of shape ``row``, and targets: the next tokens of tokens, else numbers."""
    first = model.layers[0]
    if isinstance(first, Embed):
        tokens = torch.randint(first.token.num_embeddings, (rows, *row))
        return tokens, tokens.roll(-1, 1)
    x = torch.randn(rows, *row)
    with torch.no_grad():
        return x, torch.randn(rows, *model(x[:1]).shape[1:])


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy with tokens, mean squared error with numbers."""
    if target.is_floating_point():
        return nn.functional.mse_loss(output, target)
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def take(model: Chain, x: torch.Tensor) -> Capture:
    """The model captured with each layer one op."""
    captured = capture(model, (x,), closed=tuple(f"layers.{i}" for i in range(len(model.layers))))
    if len(captured.ops.compute) != len(model.layers):
        raise RuntimeError(f"captured {len(captured.ops.compute)} ops for {len(model.layers)} layers")
    return captured


def split(
    model: Chain, x: torch.Tensor, cuts: list[int], n_ranks: int, schedule: str, n_microbatches: int
) -> tuple[Capture, Plan, tuple[Stage, ...]]:
    """Capture, plan and stages with the layers cut before the given indices."""
    captured = take(model, x)
    names = [op.name for op in captured.ops.compute]
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
