"""Questions about rows find the code of methods that stay whole, optimizers in a layer are put back."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe


class Middle(nn.Module):
    """A method of the outermost module in the middle of its layers, which reads what keeps it whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def middle(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.c(self.b(self.middle(self.a(x).tanh())).tanh())[:, 0], y)


class Detaches(Middle):
    def middle(self, h: Tensor) -> Tensor:
        return (lambda h: h.detach() if len(h) == 1 else h)(h)


class Hooks(Middle):
    def middle(self, h: Tensor) -> Tensor:
        h = h * 1.0
        if h.requires_grad:
            h.register_hook(lambda g: g * 2 if len(g) == 1 else g)
        return h


def stepped(model: nn.Module, n_microbatches: int, **options: object) -> tuple[Tensor, Tensor]:
    """The gradient of the first weight after a step, and the plain model's."""
    x, y = torch.randn(4, 4), torch.randn(4)
    plain = copy.deepcopy(model)
    plain(x, y).backward()
    pipe = autopipe.split(model, 2, (x, y), costs="estimated", n_microbatches=n_microbatches, **options)
    pipe.runtime().step(x, y)
    return model.a.weight.grad, plain.a.weight.grad


def test_methods_kept_whole_that_give_a_single_row_other_gradients_get_two() -> None:
    torch.manual_seed(0)
    for kind in (Detaches, Hooks):
        found, wanted = stepped(kind(), 4)
        assert torch.allclose(found, wanted, atol=1e-6), kind


class Fits(nn.Module):
    """Takes a step of an optimizer of its own in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.optimizer = torch.optim.SGD([self.scale], lr=0.1, momentum=0.9)

    def forward(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            off = ((self.scale - h.detach().mean()) ** 2).sum()
            (self.scale.grad,) = torch.autograd.grad(off, self.scale)
        self.optimizer.step()
        self.scale.grad = None
        return h * self.scale.detach()


class Fitted(Middle):
    def __init__(self) -> None:
        super().__init__()
        self.fits = Fits()

    def middle(self, h: Tensor) -> Tensor:
        return self.fits(h)


def test_an_optimizer_in_a_layer_is_as_it_was_before_the_capture() -> None:
    torch.manual_seed(0)
    model = Fitted()
    found, wanted = stepped(model, 1, closed=["fits"])
    assert torch.allclose(found, wanted, atol=1e-6)


class CountsBeside(nn.Module):
    """Counts beside a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.n = nn.BatchNorm1d(8), 0

    def forward(self, h: Tensor) -> Tensor:
        self.n += 1
        return self.norm(h) * (1 + 0.1 * self.n)


class Counted(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.fits = CountsBeside()


def test_a_layer_that_counts_beside_a_batch_norm_runs_once_where_stages_recompute() -> None:
    torch.manual_seed(0)
    model = Counted()
    found, wanted = stepped(model, 1, closed=["fits"], recompute="always")
    assert model.fits.n == 1
    assert torch.allclose(found, wanted, atol=1e-6)


class Draws(nn.Module):
    """Draws from a sequence of its own in each forward, one number for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = torch.quasirandom.SobolEngine(8)

    def forward(self, h: Tensor) -> Tensor:
        return h * (1 + self.sequence.draw(1))


class Drawn(Fitted):
    def __init__(self) -> None:
        super().__init__()
        self.fits = Draws()


def test_a_sequence_in_a_layer_goes_on_where_it_was_before_the_capture() -> None:
    torch.manual_seed(0)
    found, wanted = stepped(Drawn(), 1, closed=["fits"])
    assert torch.allclose(found, wanted, atol=1e-6)
