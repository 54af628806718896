"""Models of molecules, graphs, equations and geometry of further libraries.

How a model is listed is left to ``catalogue``.
"""

# ruff: noqa: E501
# fmt: off

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .catalogue import add, rows

__all__: list[str] = []

add("esm2", "esm.model.esm2", lambda m: m.ESM2(num_layers=3, embed_dim=32, attention_heads=4), lambda b, n: (torch.randint(4, 24, (b, n)),))
add("se3", "se3_transformer_pytorch", lambda m: m.SE3Transformer(dim=8, heads=2, depth=1, dim_head=4, num_degrees=2, valid_radius=10, num_neighbors=4), lambda b, n: (torch.randn(b, 12, 8), torch.randn(b, 12, 3), torch.ones(b, 12).bool()))
add("equiformer", "equiformer_pytorch", lambda m: m.Equiformer(dim=(8, 4), dim_in=(16,), input_degrees=1, num_degrees=2, heads=2, dim_head=(4, 4), depth=2, num_neighbors=4, valid_radius=10.0, reduce_dim_out=True), lambda b, n: (torch.randn(b, 12, 16), torch.randn(b, 12, 3), torch.ones(b, 12).bool()))
add("perceptron", "geometric_vector_perceptron", lambda m: _Vectors(m), lambda b, n: (torch.randn(b, 16), torch.randn(b, 8, 3)))
add("neurons", "VN_transformer", lambda m: _Neurons(m), lambda b, n: (torch.randn(b, n, 3), torch.randn(b, n, 16)))
add("points", "invariant_point_attention", lambda m: _Points(m), lambda b, n: (torch.randn(b, n, 16), torch.randn(b, n, n, 16)))
add("energies", "torchani", lambda m: _Energies(m), lambda b, n: (torch.randint(4, (b, 6)), 2 * torch.randn(b, 6, 3)))
for name, forces in {"mace": False, "mace_forces": True}.items():
    add(name, "mace.modules", lambda m, f=forces: _Mace(m, f), lambda b, n: (2 * torch.randn(6 * b, 3), torch.randint(2, (6 * b,)), *_all_pairs(b, 6)))


add("residual", "pina.model", lambda m: m.ResidualFeedForward(3, 2), rows(3))
add("fno", "pina.model", lambda m: m.FNO(lifting_net=nn.Linear(3, 8), projecting_net=nn.Linear(8, 1), n_modes=4, dimensions=1, n_layers=3, inner_size=8), lambda b, n: (torch.randn(b, n, 3),))
add("kan", "pina.model", lambda m: m.KolmogorovArnoldNetwork([3, 8, 8, 2]), rows(3))
add("pirate", "pina.model", lambda m: m.PirateNet(3, 16, 2), rows(3))
add("fcn", "torchphysics", lambda m: _Physics(m), lambda b, n: (torch.randn(b, 2), torch.rand(b, 1)))
add("cde", "torchcde", lambda m: _Controlled(m), lambda b, n: (torch.randn(b, 8, 3),))
add("poses", "pypose", lambda m: _Poses(m), lambda b, n: (torch.randn(b, 8), torch.randn(b, 3)))
add("inertial", "pypose", lambda m: _Inertial(m), lambda b, n: (torch.randn(b, n, 6),))
add("hyperbolic", "hypll.nn", lambda m: _Hyperbolic(m), rows(8))
add("complex", "cplxmodule.nn", lambda m: nn.Sequential(m.RealToCplx(), m.CplxLinear(4, 8), m.CplxModReLU(), m.CplxLinear(8, 8), m.CplxBatchNorm1d(8), m.CplxLinear(8, 4), m.CplxToReal()), rows(8))
add("additive", "memcnn", lambda m: nn.Sequential(nn.Linear(8, 16), m.InvertibleModuleWrapper(m.AdditiveCoupling(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))), m.InvertibleModuleWrapper(m.AdditiveCoupling(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))), nn.Linear(16, 4)), rows(8))
add("deep_onet", "continuiti.operators", lambda m: m.DeepONet(_shapes(), trunk_width=16, trunk_depth=2, branch_width=16, branch_depth=2, basis_functions=8), lambda b, n: (torch.randn(b, 1, 8), torch.randn(b, 1, 8), torch.randn(b, 1, 8)))


class _Vectors(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList([m.GVP(dim_vectors_in=8, dim_vectors_out=8, dim_feats_in=16, dim_feats_out=16, vector_gating=True) for _ in range(3)])
        self.norm = m.GVPLayerNorm(16)

    def forward(self, features: torch.Tensor, vectors: torch.Tensor) -> Any:
        for layer in self.layers:
            features, vectors = layer((features, vectors))
        return self.norm(features, vectors)


class _Neurons(nn.Module):
    """Features that turn with their points."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.model = m.VNTransformer(dim=16, depth=2, dim_head=8, heads=2, dim_feat=16, bias_epsilon=1e-6)

    def forward(self, places: torch.Tensor, features: torch.Tensor) -> Any:
        return self.model(places, feats=features)


class _Points(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([m.IPABlock(dim=16, heads=2) for _ in range(2)])

    def forward(self, x: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
        turns = torch.eye(3).expand(*x.shape[:2], 3, 3)
        for block in self.blocks:
            x = block(x, pairwise_repr=pairs, rotations=turns, translations=x[..., :3])
        return x


class _Energies(nn.Module):
    """Potentials of molecules, and the forces that are their derivatives."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.model = m.arch.simple_ani(["H", "C", "N", "O"], lot="wb97x-631gd", ensemble_size=1, repulsion=False, dispersion=False, periodic_table_index=False)

    def forward(self, kinds: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return self.model((kinds, places)).energies


def _all_pairs(b: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Edges between all atoms of each molecule, and whose each atom is."""
    one = torch.cartesian_prod(torch.arange(n), torch.arange(n))
    one = one[one[:, 0] != one[:, 1]].T
    return torch.cat([one + n * i for i in range(b)], 1), torch.arange(b).repeat_interleave(n)


class _Mace(nn.Module):
    def __init__(self, m: Any, forces: bool) -> None:
        super().__init__()
        irreps = importlib.import_module("e3nn.o3").Irreps
        block = m.interaction_classes["RealAgnosticResidualInteractionBlock"]
        self.forces = forces
        self.model = m.MACE(r_max=6.0, num_bessel=4, num_polynomial_cutoff=5, max_ell=1, interaction_cls=block, interaction_cls_first=m.interaction_classes["RealAgnosticInteractionBlock"], num_interactions=2, num_elements=2, hidden_irreps=irreps("8x0e + 8x1o"), MLP_irreps=irreps("8x0e"), gate=torch.nn.functional.silu, atomic_energies=torch.zeros(2).numpy(), avg_num_neighbors=5.0, atomic_numbers=[1, 8], correlation=2)

    def forward(self, places: torch.Tensor, kinds: torch.Tensor, edges: torch.Tensor, batch: torch.Tensor) -> Any:
        n_edges, n_graphs = edges.shape[1], len(places) // 6
        data = {"positions": places.clone(), "node_attrs": nn.functional.one_hot(kinds, 2).to(places.dtype), "edge_index": edges, "batch": batch, "shifts": places.new_zeros(n_edges, 3), "unit_shifts": places.new_zeros(n_edges, 3), "cell": places.new_zeros(3 * n_graphs, 3), "ptr": torch.arange(0, len(places) + 1, 6)}
        out = self.model(data, training=self.training, compute_force=self.forces)
        return (out["energy"], out["forces"]) if self.forces else out["energy"]


class _Physics(nn.Module):
    """A network from named spaces to named spaces."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.m, self.space = m, m.spaces.R2("x") * m.spaces.R1("t")
        self.model = m.models.FCN(self.space, m.spaces.R1("u"), hidden=(16, 16, 16))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        points = self.m.spaces.Points.from_coordinates({"x": x, "t": t})
        return self.model(points).as_tensor


class _Controlled(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.m, self.first, self.last = m, nn.Linear(3, 8), nn.Linear(8, 2)
        self.field = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 24), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        path = self.m.CubicSpline(self.m.hermite_cubic_coefficients_with_backward_differences(x))
        z = self.m.cdeint(X=path, func=lambda t, z: self.field(z).view(*z.shape[:-1], 8, 3), z0=self.first(path.evaluate(path.interval[0])), t=path.interval, method="rk4", adjoint=False)
        return self.last(z[:, -1])


class _Poses(nn.Module):
    """Learnt motions of points."""

    def __init__(self, m: Any) -> None:
        super().__init__()
        self.m, self.net, self.head = m, nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6)), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
        pose = self.m.se3(0.1 * self.net(x)).Exp()
        return self.head((pose @ pose.Inv() @ pose).Act(points))


class _Inertial(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        self.net, self.integrate = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)), m.module.IMUPreintegrator(reset=True, prop_cov=False)

    def forward(self, x: torch.Tensor) -> Any:
        x = x + 0.1 * self.net(x)
        state = self.integrate(dt=torch.full((*x.shape[:2], 1), 0.01), gyro=x[..., :3], acc=x[..., 3:])
        return state["pos"], state["vel"], state["rot"].tensor()


class _Hyperbolic(nn.Module):
    def __init__(self, m: Any) -> None:
        super().__init__()
        manifolds, of = importlib.import_module("hypll.manifolds.poincare_ball"), importlib.import_module("hypll.tensors")
        self.ball, self.tangent = manifolds.PoincareBall(c=manifolds.Curvature(requires_grad=True)), of.TangentTensor
        self.layers = nn.Sequential(m.HLinear(8, 16, manifold=self.ball), m.HReLU(manifold=self.ball), m.HLinear(16, 4, manifold=self.ball))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        on_ball = self.ball.expmap(self.tangent(data=x, man_dim=-1, manifold=self.ball))
        return self.layers(on_ball).tensor


def _shapes() -> Any:
    of = importlib.import_module("continuiti.operators.shape")
    return of.OperatorShapes(x=of.TensorShape(dim=1, size=torch.Size([8])), u=of.TensorShape(dim=1, size=torch.Size([8])), y=of.TensorShape(dim=1, size=torch.Size([8])), v=of.TensorShape(dim=1, size=torch.Size([8])))
