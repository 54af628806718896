"""Optimizers that make one number of all their parameters are told from others by a trial."""

import random

import pytest
import torch
from torch import nn

from autopipe.runtime.reduce.refusals import mixes_parameters


class Noisy(torch.optim.Optimizer):
    """Adds noise to each step, as Langevin dynamics does."""

    def __init__(self, params, draw):
        super().__init__(params, {"draw": draw})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad + self.defaults["draw"]())


class Clipping(torch.optim.Optimizer):
    """Clips by the norm of all."""

    def __init__(self, params, most):
        super().__init__(params, {"most": most})

    @torch.no_grad()
    def step(self):
        params = self.param_groups[0]["params"]
        norm = sum(p.grad.square().sum() for p in params).sqrt()
        for p in params:
            p.sub_(0.1 * p.grad * (self.defaults["most"] / norm).clamp(max=1))


class Sharpness(torch.optim.Optimizer):
    """Steps by the gradients at a place a little up along those of all, as SAM does, around another."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None
        params = self.param_groups[0]["params"]
        norm = sum(p.grad.square().sum() for p in params).sqrt()
        moves = [p.grad * self.defaults["rho"] / norm for p in params]
        for p, move in zip(params, moves, strict=True):
            p.add_(move)
        torch.enable_grad()(closure)()
        for p, move in zip(params, moves, strict=True):
            p.sub_(move)
        self.base_optimizer.step()


class Skipping(torch.optim.Optimizer):
    """Makes no step where the norm of all is above a limit."""

    def __init__(self, params, most):
        super().__init__(params, {"most": most})

    @torch.no_grad()
    def step(self):
        params = self.param_groups[0]["params"]
        if sum(p.grad.square().sum() for p in params).sqrt() < self.defaults["most"]:
            for p in params:
                p.sub_(0.1 * p.grad)


class Exponentiated(torch.optim.Optimizer):
    """Multiplies weights by powers, which large gradients make infinite."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.mul_((-self.defaults["lr"] * p.grad).exp())


class Closed(torch.optim.SGD):
    """Asks for a closure, and takes parameters one by one."""

    def step(self, closure):
        closure()
        super().step()


@pytest.mark.parametrize("draw", [lambda: torch.randn(()), random.random], ids=["torch", "Python"])
def test_an_optimizer_that_draws_is_taken_and_leaves_the_generators_as_they_were(draw):
    before = torch.random.get_rng_state(), random.getstate()
    assert not mixes_parameters(Noisy([nn.Parameter(torch.ones(2))], draw))
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == random.getstate()


@pytest.mark.parametrize("most", [0.1, 1.0, 100.0])
def test_one_that_clips_large_gradients_alone_is_told(most):
    assert mixes_parameters(Clipping([nn.Parameter(torch.ones(2))], most))


@pytest.mark.parametrize("most", [0.3, 2.0, 5.0, 700.0])
def test_one_that_skips_steps_above_a_norm_is_told(most):
    assert mixes_parameters(Skipping([nn.Parameter(torch.ones(2))], most))


@pytest.mark.parametrize("lr", [1e-3, 0.1, 10.0])
def test_one_whose_steps_overflow_and_takes_parameters_one_by_one_is_taken(lr):
    assert not mixes_parameters(Exponentiated([nn.Parameter(torch.ones(2))], lr))


@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW])
def test_one_around_another_that_asks_for_a_closure_is_tried(base):
    assert mixes_parameters(Sharpness([nn.Parameter(torch.ones(2))], base, lr=0.1))


def test_one_that_asks_for_a_closure_and_takes_parameters_one_by_one_is_taken():
    assert not mixes_parameters(Closed([nn.Parameter(torch.ones(2))], lr=0.1))
