"""Code that stays whole and takes derivatives of its rows' sum: each row has its own, in microbatches too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopipe


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def slope(energy: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(energy(x).sum(), x, create_graph=True)
    return found


class Layer(nn.Module):
    """A layer that takes the derivative itself."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()

    def forward(self, x: Tensor) -> Tensor:
        return slope(self.energy, x)


class OfLayer(nn.Module):
    closed = ("layer",)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(4, 4), Layer(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x)))


class OfMethod(nn.Module):
    """A method that stays whole, as it goes by what it has found."""

    closed = ()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.energy, self.last = nn.Linear(4, 4), Energy(), nn.Linear(4, 2)

    def sloped(self, x: Tensor) -> Tensor:
        found = slope(self.energy, x)
        if not torch.isfinite(found).all().item():
            raise ValueError("no slope")
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.sloped(self.first(x)))


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("make", [OfLayer, OfMethod])
def test_derivatives_of_what_stays_whole_are_right_in_microbatches(make, recompute):
    """Asked without gradients it fails, and the batch's size would be fixed."""
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(6, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    pipe = autopipe.split(
        model, 2, (x,), costs="estimated", n_microbatches=3, recompute=recompute, closed=make.closed
    )
    assert pipe.plan.n_microbatches == 3
    runtime = pipe.runtime(lambda out, _: out.square().mean())
    for _ in range(2):  # from the second on a stage that runs again knows its gradients
        plain.zero_grad()
        model.zero_grad()
        loss = plain(x).square().mean()
        loss.backward()
        assert float(runtime.step(x).loss) == pytest.approx(loss.item(), rel=1e-12)
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)


class Forces(nn.Module):
    """An energy of positions and its derivative by them, which the forward takes itself."""

    closed = ()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.energy, self.last = nn.Linear(4, 4), Energy(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        energy = self.energy(self.first(x))
        (forces,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return self.last(forces), energy


def expected_of(model: nn.Module, x: Tensor) -> Tensor | tuple[Tensor, ...]:
    out = model(x)
    return tuple(o.detach() for o in out) if isinstance(out, tuple) else out.detach()


@pytest.mark.parametrize("n_microbatches", [1, 3])
@pytest.mark.parametrize("make", [OfLayer, OfMethod, Forces])
def test_derivatives_are_taken_where_a_step_makes_no_gradients(make, n_microbatches):
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(6, 4, dtype=torch.float64)
    pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=3, closed=make.closed)

    def loss_of(out, _):
        return sum(o.square().mean() for o in out) if isinstance(out, tuple) else out.square().mean()

    expected = expected_of(model, x)
    runtime = pipe.runtime(loss_of)
    found = runtime.evaluate(x, n_microbatches=n_microbatches).loss
    assert float(found) == pytest.approx(loss_of(expected, None).item(), rel=1e-12)
    outputs = runtime.forward(x, n_microbatches=n_microbatches)
    torch.testing.assert_close(outputs, expected)
    assert not any(o.requires_grad for o in (outputs if isinstance(outputs, tuple) else (outputs,)))
