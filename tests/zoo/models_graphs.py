"""Graph nets written with scatter and index ops, recommenders, and models of sets and points."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .registry import register

WIDTH = 16


def _graph(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``batch`` ring graphs of ``length`` nodes, as one graph."""
    generator = torch.Generator().manual_seed(batch)
    n = batch * length
    node = torch.arange(n)
    following = node // length * length + (node + 1) % length
    edge_index = torch.stack([torch.cat([node, following]), torch.cat([following, node])])
    return (torch.randn(n, WIDTH, generator=generator), edge_index), {
        "edge_attr": torch.randn(2 * n, 4, generator=generator),
        "batch": node // length,
    }


class GCNConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.edge = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(4, WIDTH)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        degree = torch.zeros(x.size(0), dtype=x.dtype).scatter_add_(0, target, torch.ones(target.size(0)))
        norm = degree.clamp(min=1).pow(-0.5)
        message = self.lin(x)[source] * (norm[source] * norm[target])[:, None] + self.edge(edge_attr)
        return torch.zeros_like(x).index_add(0, target, message) + self.bias


class GATConv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.att = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(2, 4, WIDTH // 4) * 0.1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index.unbind(0)
        h = self.lin(x).view(-1, 4, WIDTH // 4)
        score = F.leaky_relu((h * self.att[0]).sum(-1)[source] + (h * self.att[1]).sum(-1)[target], 0.2)
        top = score.new_full((x.size(0), 4), -1e9).scatter_reduce(
            0, target[:, None].expand(-1, 4), score, "amax", include_self=False
        )
        weight = (score - top[target]).exp()
        total = torch.zeros(x.size(0), 4).index_add_(0, target, weight)
        out = torch.zeros_like(h).index_add_(0, target, h[source] * (weight / total[target])[..., None])
        return F.dropout(F.elu(out.flatten(1)), 0.1, self.training)


@register(_graph)
class GraphNet(nn.Module):
    """Message passing with scatter_add, scatter_reduce and index_add; one readout row per graph."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(), GATConv(), GCNConv(), GATConv()])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(4)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + F.relu(norm(conv(x, edge_index, edge_attr)))
        pooled = Readout()(x, batch)
        return self.head(pooled[batch]) + self.head(x)


class Readout(nn.Module):
    """A module made anew in each forward: it belongs to no path of the model."""

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return torch.zeros_like(x).index_add_(0, batch, x)


@dataclasses.dataclass
class Molecules:
    """Positions and kinds of atoms, and how many neighbours count."""

    position: Tensor
    kind: Tensor
    n_neighbours: int = 3
    name: str = "water"


def _molecules(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(batch)
    position = torch.randn(batch, length, 3, generator=generator)
    return (Molecules(position, torch.arange(batch * length).view(batch, length) % 4),), {}


class SchNetBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Sequential(nn.Linear(8, WIDTH), nn.Softplus(), nn.Linear(WIDTH, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, radial: Tensor, index: Tensor) -> Tensor:
        near = torch.take_along_dim(x[:, None].expand(-1, x.size(1), -1, -1), index[..., None], 2)
        return x + self.mix((near * self.filter(radial)).sum(2))


@register(_molecules)
class SchNet(nn.Module):
    """A dataclass comes in; neighbours by topk; a dataclass with an int and a string comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, WIDTH)
        self.register_buffer("centers", torch.linspace(0, 3, 8))
        self.blocks = nn.ModuleList([SchNetBlock() for _ in range(4)])
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, molecules: Molecules) -> Molecules:
        x, position = self.embed(molecules.kind), molecules.position
        distance = (position[:, :, None] - position[:, None]).pow(2).sum(-1).add(1e-6).sqrt()
        nearest, index = distance.topk(molecules.n_neighbours + 1, -1, largest=False)
        radial = torch.exp(-((nearest[..., None] - self.centers) ** 2))
        for block in self.blocks:
            x = block(x, radial, index)
        return dataclasses.replace(molecules, position=self.energy(x).sum(1), kind=index)


def _clicks(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(batch)
    dense = torch.rand(batch, 6, generator=generator)
    sparse = {f"c{i}": torch.randint(0, 20, (batch, 2 + i), generator=generator) for i in range(4)}
    return (dense,), {"sparse": sparse, "weights": None}


@register(_clicks, has_lengths=False)
class DLRM(nn.Module):
    """Wide and deep: embedding bags, pairwise interaction by triangular index, wide part beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.tables = nn.ModuleDict({f"c{i}": nn.EmbeddingBag(20, WIDTH, mode="sum") for i in range(4)})
        self.wide = nn.ParameterDict({f"c{i}": nn.Parameter(torch.randn(20) * 0.1) for i in range(4)})
        self.top = nn.Sequential(nn.Linear(WIDTH + 10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: dict[str, Tensor], weights: Tensor | None = None) -> Tensor:
        bottom = self.bottom(dense)
        parts = [bottom, *[self.tables[name](ids) for name, ids in sparse.items()]]
        stacked = torch.stack(parts, 1)
        rows, columns = torch.tril_indices(len(parts), len(parts), offset=-1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))[:, rows, columns]
        wide = sum(self.wide[name][ids].sum(-1, keepdim=True) for name, ids in sparse.items())
        return torch.sigmoid(self.top(torch.cat([bottom, pairs], 1)) + wide).squeeze(-1)


def _points(batch: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(batch, 3, length, generator=torch.Generator().manual_seed(batch)),), {}


@register(_points)
class PointNet(nn.Module):
    """A predicted transform applied to the points, max over points, features given back beside the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Sequential(
            nn.Conv1d(3, 16, 1), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(16, 9)
        )
        self.convs = nn.ModuleList([nn.Conv1d(n, m, 1) for n, m in ((3, 16), (16, 16), (16, 32))])
        self.norms = nn.ModuleList([nn.BatchNorm1d(m) for m in (16, 16, 32)])
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        matrix = self.transform(x).view(-1, 3, 3) + torch.eye(3)
        x = torch.bmm(x.transpose(2, 1), matrix).transpose(2, 1)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.relu(norm(conv(x)))
        features, _ = torch.max(x, 2)
        difference = torch.bmm(matrix, matrix.transpose(2, 1)) - torch.eye(3)[None]
        return self.head(features), features, torch.mean(torch.norm(difference, dim=(1, 2)))


@register(_points)
class DeepEquilibrium(nn.Module):
    """Iterates until converged: a loop that depends on values, whole inside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Conv1d(3, WIDTH, 1), nn.Conv1d(WIDTH, 2, 1)
        self.solvers = nn.ModuleList([FixedPoint() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for solver in self.solvers:
            x = x + solver(x)
        return self.head(x)


class FixedPoint(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(20):
            following = torch.tanh(0.1 * self.cell(z) + x)
            if (following - z).abs().max() < 1e-3:
                break
            z = following
        return following
