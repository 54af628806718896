"""Models of graphs, molecules, equations and densities, and spiking ones, of other libraries.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .catalogue import Inputs, add, by_class, fixed_image, image, rows

__all__: list[str] = []


def graph(width: int = 16) -> Inputs:
    """A graph of eight nodes a sample, with as many edges as chance has it, twice over."""
    return lambda b, n: (torch.randn(8 * b, width), torch.randint(8 * b, (2, 16 * b)))


GNN = {"in_channels": 16, "hidden_channels": 16, "num_layers": 3, "out_channels": 4}
by_class("torch_geometric.nn", graph(), GCN=GNN, GraphSAGE=GNN, GAT=GNN, GIN=GNN, PNA={**GNN, "aggregators": ["mean", "max"], "scalers": ["identity"], "deg": torch.ones(4, dtype=torch.long)}, EdgeCNN=GNN)
add("linkx", "torch_geometric.nn", lambda m: m.LightGCN(16, 8, 2), lambda b, n: (graph()(2, n)[1],))
add("schnet", "torch_geometric.nn", lambda m: m.SchNet(16, 16, 2, 8), lambda b, n: (torch.randint(1, 9, (5 * b,)), torch.randn(5 * b, 3), torch.arange(b).repeat_interleave(5)))
add("egnn", "egnn_pytorch", lambda m: m.EGNN_Network(depth=2, dim=16), lambda b, n: (torch.randn(b, n, 16), torch.randn(b, n, 3)))
add("gated", "e3nn.nn.models.v2106.gate_points_networks", lambda m: m.SimpleNetwork("3x0e", "2x0e", 1.5, 4, 8.0), lambda b, n: ({"pos": torch.randn(8, 3), "x": torch.randn(8, 3), "batch": torch.zeros(8, dtype=torch.long)},))
add("fno", "neuralop.models", lambda m: m.FNO((8, 8), 1, 1, 16, n_layers=3), image(1, 32))
add("uno", "neuralop.models", lambda m: m.TFNO((8, 8), 1, 1, 16, n_layers=3), image(1, 32))
add("siren", "siren_pytorch", lambda m: m.SirenNet(2, 16, 1, 3), rows(2))
add("neural_ode", "torchdiffeq", lambda m: _Ode(m), rows(8))
add("leaky", "snntorch", lambda m: _Spiking(m), rows(8))
add("spiking", "spikingjelly.activation_based", lambda m: _Reset(_jelly(), m.functional.reset_net), rows(8))
add("realnvp", "nflows.transforms", lambda m: _Flow(m), rows(8))
add("nsf", "zuko.flows", lambda m: _Density(m), rows(4))
add("exact_gp", "gpytorch", lambda m: _Kernel(m), rows(4))


class _Ode(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.library = library
        self.inside = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = torch.linspace(0, 1, 5)
        return self.head(self.library.odeint(lambda t, y: self.inside(y), x, times, method="rk4")[-1])


class _Spiking(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.first, self.second = library.Leaky(0.9), library.Leaky(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.first.init_leaky(), self.second.init_leaky()
        out = []
        for _ in range(4):
            spikes, one = self.first(self.a(x), one)
            spikes, two = self.second(self.b(spikes), two)
            out.append(two)
        return torch.stack(out)


def _jelly() -> nn.Module:
    neuron = importlib.import_module("spikingjelly.activation_based.neuron")
    return nn.Sequential(nn.Linear(8, 16), neuron.IFNode(), nn.Linear(16, 4), neuron.IFNode())


class _Flow(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        made = [library.MaskedAffineAutoregressiveTransform(8, 16) for _ in range(3)]
        self.flow = library.CompositeTransform(made)

    def forward(self, x: torch.Tensor) -> Any:
        return self.flow(x)


class _Density(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.flow = library.NSF(4, transforms=2, hidden_features=(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -self.flow().log_prob(x).mean()


class _Kernel(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.kernel = library.kernels.ScaleKernel(library.kernels.RBFKernel())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kernel(self.features(x)).to_dense()


class _Sde(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.library = library
        self.drift, self.spread = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def f(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.drift(y))

    def g(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 0.1 * torch.sigmoid(self.spread(y))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.library.sdeint(self, x, torch.linspace(0, 1, 3), dt=0.25, method="euler")[-1])


class _Forces(nn.Module):
    """Energy and forces of atoms, which are its derivative by their positions."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, kinds: torch.Tensor, places: torch.Tensor, which: torch.Tensor) -> Any:
        with torch.enable_grad():
            places = places.detach().requires_grad_()
            energy = self.inside(kinds, places, which)
            forces = -torch.autograd.grad(energy.sum(), places, create_graph=True)[0]
        return energy, forces


class _Physics(nn.Module):
    """The residual of a heat equation at points in space and time, with the field and its derivatives."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            field = self.inside(points)
            first = torch.autograd.grad(field.sum(), points, create_graph=True)[0]
            second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0][:, 0]
        return ((first[:, 1] - 0.1 * second) ** 2).mean() + (field**2).mean()


class _Pooled(nn.Module):
    def __init__(self, library: Any) -> None:
        super().__init__()
        self.first, self.second = library.GCNConv(16, 16), library.GATConv(16, 16)
        self.norm, self.pool = library.BatchNorm(16), library.global_mean_pool
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, edges: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x, edges)).relu()
        return self.head(self.pool(self.second(x, edges).relu(), which))


class _Score(nn.Module):
    def __init__(self, flow: Any) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, x: torch.Tensor) -> Any:
        return self.flow.forward_kld(x)


def molecules(b: int, n: int) -> tuple[Any, ...]:
    """Five atoms for each of the molecules."""
    return torch.randint(1, 9, (5 * b,)), torch.randn(5 * b, 3), torch.arange(b).repeat_interleave(5)


def batched(b: int, n: int) -> tuple[Any, ...]:
    """Graphs of eight nodes each."""
    edges = torch.randint(8, (2, 16 * b)) + 8 * torch.arange(b).repeat_interleave(16)
    return torch.randn(8 * b, 16), edges, torch.arange(b).repeat_interleave(8)


add("pooled", "torch_geometric.nn", lambda m: _Pooled(m), batched)
add("schnet_forces", "torch_geometric.nn", lambda m: _Forces(m.SchNet(16, 16, 2, 8)), molecules)
add("dimenet", "torch_geometric.nn", lambda m: m.DimeNetPlusPlus(16, 1, 2, 8, 8, 8, 4, 3), molecules)
add("attentive", "torch_geometric.nn", lambda m: m.AttentiveFP(16, 16, 2, 4, 2, 2), lambda b, n: (batched(b, n)[0], batched(b, n)[1], torch.randn(16 * b, 4), batched(b, n)[2]))
add("deep_gcn", "torch_geometric.nn", lambda m: nn.ModuleList([m.GCNConv(16, 16)])[0], graph())
add("sequential", "torch_geometric.nn", lambda m: m.Sequential("x, edges", [(m.GCNConv(16, 16), "x, edges -> x"), nn.ReLU(), (m.SAGEConv(16, 16), "x, edges -> x"), nn.ReLU(), nn.Linear(16, 4)]), graph())
add("physics", "siren_pytorch", lambda m: _Physics(m.SirenNet(2, 16, 1, 3)), rows(2))
add("sde", "torchsde", lambda m: _Sde(m), rows(8))
add("adaptive_ode", "torchdiffeq", lambda m: _Adaptive(m), rows(8))
add("realnvp", "normflows", lambda m: _Score(m.NormalizingFlow(m.distributions.base.DiagGaussian(4), [f for _ in range(3) for f in (m.flows.AffineCouplingBlock(m.nets.MLP([2, 16, 4], init_zeros=True)), m.flows.Permute(4, mode="swap"))])), rows(4))
add("spline", "normflows", lambda m: _Score(m.NormalizingFlow(m.distributions.base.DiagGaussian(4), [f for _ in range(2) for f in (m.flows.AutoregressiveRationalQuadraticSpline(4, 1, 16), m.flows.LULinearPermute(4))])), rows(4))
add("allinone", "FrEIA.framework", lambda m: _invertible(m), rows(4))
add("autoregressive", "pyro.nn", lambda m: m.AutoRegressiveNN(6, [16, 16], param_dims=(1, 1)), rows(6))
add("c4", "escnn.nn", lambda m: _Steered(m), fixed_image(1, 33))
add("bayesian", "blitz.modules", lambda m: nn.Sequential(m.BayesianLinear(8, 16), nn.ReLU(), m.BayesianLinear(16, 16), nn.ReLU(), m.BayesianLinear(16, 2)), rows(8))
add("tensorized", "tltorch", lambda m: nn.Sequential(m.FactorizedLinear((4, 4), (4, 4), rank=0.5, factorization="blocktt"), nn.ReLU(), nn.Linear(16, 4)), rows(16))
add("kan", "kan", lambda m: m.KAN(width=[2, 4, 1], grid=3, k=3, auto_save=False), rows(2))
add("latent", "snntorch", lambda m: _Reset(nn.Sequential(nn.Linear(8, 16), m.Synaptic(0.9, 0.8, init_hidden=True), nn.Linear(16, 4), m.Leaky(0.9, init_hidden=True, output=True)), importlib.import_module("snntorch.utils").reset), rows(8))
add("scaled_dot", "geoopt.manifolds", lambda m: _Ball(m.PoincareBall()), rows(8))


class _Adaptive(_Ode):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = torch.linspace(0, 1, 3)
        return self.head(self.library.odeint(lambda t, y: self.inside(y), x, times, rtol=1e-3, atol=1e-4)[-1])


def _invertible(framework: Any) -> nn.Module:
    blocks = importlib.import_module("FrEIA.modules")
    net = framework.SequenceINN(4)
    for _ in range(3):
        net.append(blocks.AllInOneBlock, subnet_constructor=lambda a, b: nn.Sequential(nn.Linear(a, 16), nn.ReLU(), nn.Linear(16, b)))
    return net


class _Steered(nn.Module):
    """Convolutions that turn with their images; its fields are the library's own objects."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        space = importlib.import_module("escnn.gspaces").rot2dOnR2(4)
        self.library, self.given = library, library.FieldType(space, [space.trivial_repr])
        hidden = library.FieldType(space, 4 * [space.regular_repr])
        self.layers = library.SequentialModule(library.R2Conv(self.given, hidden, 5), library.InnerBatchNorm(hidden), library.ReLU(hidden), library.R2Conv(hidden, hidden, 5), library.ReLU(hidden), library.GroupPooling(hidden))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.library.GeometricTensor(x, self.given)).tensor
        return self.head(x.mean((2, 3)))


class _Reset(nn.Module):
    """A net with a state of its own, started anew for each batch and shown it three times."""

    def __init__(self, inside: nn.Module, reset: Any) -> None:
        super().__init__()
        self.inside, self.reset = inside, reset

    def forward(self, x: torch.Tensor) -> Any:
        self.reset(self.inside)
        return [self.inside(x) for _ in range(3)][-1]


class _Ball(nn.Module):
    def __init__(self, ball: Any) -> None:
        super().__init__()
        self.ball = ball
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ball.expmap0(0.1 * x)
        for layer in self.layers:
            x = self.ball.expmap0(layer(self.ball.logmap0(x)))
        return self.ball.dist0(x)
