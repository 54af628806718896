"""Layers of graphs, their pools and their readouts, of torch_geometric.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .catalogue import add
from .science import batched, graph

__all__: list[str] = []

PYG = "torch_geometric.nn"
for name, make in {
    "Tag": lambda m: m.TAGConv(16, 16, K=2), "GIN_eps": lambda m: m.GINConv(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), train_eps=True),
    "SSG": lambda m: m.SSGConv(16, 16, 0.1, K=2), "AGNN": lambda m: m.AGNNConv(), "graph_conv": lambda m: m.GraphConv(16, 16, aggr="max"), "SAGE_project": lambda m: m.SAGEConv(16, 16, aggr="max", project=True),
    "PDN": lambda m: _Edges(m.PDNConv(16, 16, 4, 8)), "GINE": lambda m: _Edges(m.GINEConv(nn.Linear(16, 16), edge_dim=4)), "NN": lambda m: _Edges(m.NNConv(16, 16, nn.Linear(4, 256))), "GEN": lambda m: _Edges(m.GENConv(16, 16, aggr="softmax", learn_t=True, edge_dim=4)),
    "CG": lambda m: _Edges(m.CGConv(16, 4)), "GATEdge": lambda m: _Edges(m.GATConv(16, 16, edge_dim=4)), "GMM": lambda m: _Edges(m.GMMConv(16, 16, 4, 3)), "GATv2Edge": lambda m: _Edges(m.GATv2Conv(16, 8, heads=2, edge_dim=4, residual=True)), "PNA_edges": lambda m: _Edges(m.PNAConv(16, 16, ["mean", "std"], ["identity", "amplification"], torch.ones(6, dtype=torch.long), edge_dim=4)),
    "DirGNN": lambda m: m.DirGNNConv(m.SAGEConv(16, 16)), "AntiSymmetric": lambda m: m.AntiSymmetricConv(16), "Simple": lambda m: m.SimpleConv("mean"), "Improved": lambda m: m.GCNConv(16, 16, improved=True, add_self_loops=True),
}.items():
    add(name, PYG, lambda m, k=make: _Layers([k(m) for _ in range(3)]), graph())
add("gcn2", PYG, lambda m: _Initial([m.GCN2Conv(16, 0.1, theta=0.5, layer=i + 1) for i in range(3)]), graph())
add("point_net", PYG, lambda m: _Points([m.PointNetConv(nn.Linear(19, 16)), m.PointNetConv(nn.Linear(19, 16))]), lambda b, n: (*graph()(b, n), torch.randn(8 * b, 3)))
add("point_transformer", PYG, lambda m: _Points([m.PointTransformerConv(16, 16), m.PointTransformerConv(16, 16)]), lambda b, n: (*graph()(b, n), torch.randn(8 * b, 3)))
add("deep", PYG, lambda m: _Layers([m.DeepGCNLayer(m.GENConv(16, 16), nn.LayerNorm(16), nn.ReLU(), block=k, dropout=0.1, ckpt_grad=c) for k, c in (("res+", True), ("res", False), ("plain", False))]), graph())
add("sag", PYG, lambda m: _Pooling(m, m.SAGPooling(16, 0.5)), batched)
add("asap", PYG, lambda m: _Pooling(m, m.ASAPooling(16, 0.5)), batched)
add("edge_pool", PYG, lambda m: _Pooling(m, m.EdgePooling(16)), batched)
add("mem_pool", PYG, lambda m: _Memory(m), batched)
add("set_transformer", PYG, lambda m: _Readout(m, m.aggr.SetTransformerAggregation(16, heads=2)), batched)
add("sort", PYG, lambda m: _Readout(m, m.SortAggregation(1)), batched)
add("gru", PYG, lambda m: _Readout(m, m.aggr.GRUAggregation(16, 16)), batched)
add("several", PYG, lambda m: _Readout(m, m.MultiAggregation(["mean", "max", "std", "softmax"], mode="sum")), batched)
add("dense_diff", PYG, lambda m: _Diff(m), lambda b, n: (torch.randn(b, 8, 16), (torch.rand(b, 8, 8) > 0.5).float(), torch.arange(8) < 8 - torch.arange(b)[:, None]))
add("dmon", PYG, lambda m: _Diff(m, "dmon"), lambda b, n: (torch.randn(b, 8, 16), (torch.rand(b, 8, 8) > 0.5).float(), torch.arange(8) < 8 - torch.arange(b)[:, None]))
add("hetero", PYG, lambda m: _Hetero(m), lambda b, n: (torch.randn(6 * b, 8), torch.randn(4 * b, 8), torch.stack([torch.randint(6 * b, (12 * b,)), torch.randint(4 * b, (12 * b,))])))
add("infomax", PYG, lambda m: _Infomax(m), graph())
add("norms", PYG, lambda m: _Norms(m), batched)
add("signed", PYG, lambda m: _Signed(m), lambda b, n: (*graph()(b, n), torch.randint(8 * b, (2, 8 * b))))


class _Layers(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.layers, self.head = nn.Linear(16, 16), nn.ModuleList(layers), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, edges).relu()
        return self.head(x)


class _Edges(nn.Module):
    """A layer whose edges have features, made of the ends of each."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.of_edge = layer, nn.Linear(32, 4)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        given = self.of_edge(torch.cat([x[edges[0]], x[edges[1]]], -1)).sigmoid()
        return self.layer(x, edges, given)


class _Initial(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.first, self.layers, self.head = nn.Linear(16, 16), nn.ModuleList(layers), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        x = x_0 = self.first(x).relu()
        for layer in self.layers:
            x = layer(x, x_0, edges).relu()
        return self.head(x).log_softmax(dim=-1)


class _Points(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, pos, edges).relu()
        return self.head(x)


class _Pooling(nn.Module):
    def __init__(self, m: Any, pool: nn.Module) -> None:
        super().__init__()
        self.conv, self.pool, self.again, self.read, self.head = m.GCNConv(16, 16), pool, m.GCNConv(16, 16), m.global_mean_pool, nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        x = self.conv(x, edges).relu()
        given = self.pool(x, edges, batch=batch)
        batch = next(t for t in given[2:] if isinstance(t, torch.Tensor) and t.dtype is torch.long and t.shape == given[0].shape[:1])
        return self.head(self.read(self.again(given[0], given[1]).relu(), batch))


class _Memory(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.conv, self.first, self.second, self.head = m.GCNConv(16, 16), m.MemPooling(16, 24, heads=2, num_clusters=4), m.MemPooling(24, 16, heads=2, num_clusters=1), nn.Linear(16, 3)
        self.kl = m.MemPooling.kl_loss

    def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> Any:
        x, s = self.first(self.conv(x, edges), batch)
        return self.head(self.second(x)[0].squeeze(1)), self.kl(s)


class _Readout(nn.Module):
    def __init__(self, m: Any, read: nn.Module) -> None:
        super().__init__()
        self.conv, self.read, self.head = m.GCNConv(16, 16), read, nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.read(self.conv(x, edges).relu(), batch))


class _Diff(nn.Module):
    def __init__(self, m: Any, how: str = "diff") -> None:
        super().__init__()
        self.assign, self.conv, self.head, self.how = m.DenseGCNConv(16, 3), m.DenseSAGEConv(16, 16), nn.Linear(16, 3), how
        self.pool = m.DMoNPooling([16], 3) if how == "dmon" else m.dense_diff_pool

    def forward(self, x: torch.Tensor, adj: torch.Tensor, mask: torch.Tensor) -> Any:
        h = self.conv(x, adj, mask).relu()
        if self.how == "dmon":
            _, h, _, *losses = self.pool(h, adj, mask)
            return self.head(h.mean(1)), sum(losses)
        h, _, link, entropy = self.pool(h, adj, self.assign(x, adj, mask), mask)
        return self.head(h.mean(1)), link + entropy


class _Hetero(nn.Module):
    """Nodes of two kinds, in dicts."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([m.HeteroConv({("a", "to", "b"): m.SAGEConv((8, 8), 8), ("b", "of", "a"): m.SAGEConv((8, 8), 8)}, aggr="sum") for _ in range(2)])
        self.heads = m.HeteroDictLinear({"a": 8, "b": 8}, 4)

    def forward(self, a: torch.Tensor, b: torch.Tensor, edges: torch.Tensor) -> dict[str, torch.Tensor]:
        x, given = {"a": a, "b": b}, {("a", "to", "b"): edges, ("b", "of", "a"): edges.flip(0)}
        for layer in self.layers:
            x = {k: v.relu() for k, v in layer(x, given).items()}
        return self.heads(x)


class _Infomax(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.model = m.DeepGraphInfomax(16, _Layers([m.GCNConv(16, 16), m.GCNConv(16, 16)]), lambda z, *_: z.mean(0).sigmoid(), lambda x, e: (x.flip(0), e))
        self.model.encoder.head = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        return self.model.loss(*self.model(x, edges))


class _Norms(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.convs = nn.ModuleList([m.GCNConv(16, 16) for _ in range(5)])
        self.norms = nn.ModuleList([m.GraphNorm(16), m.PairNorm(), m.InstanceNorm(16), m.GraphSizeNorm(), m.LayerNorm(16, mode="graph")])
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, edges), batch).relu()
        return self.head(x)


class _Signed(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.first, self.second, self.head = m.SignedConv(16, 8, first_aggr=True), m.SignedConv(8, 8, first_aggr=False), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, pos: torch.Tensor, neg: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x, pos, neg).relu(), pos, neg))
