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


@pytest.mark.parametrize("draw", [lambda: torch.randn(()), random.random], ids=["torch", "Python"])
def test_an_optimizer_that_draws_is_taken_and_leaves_the_generators_as_they_were(draw):
    before = torch.random.get_rng_state(), random.getstate()
    assert not mixes_parameters(Noisy([nn.Parameter(torch.ones(2))], draw))
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert before[1] == random.getstate()


@pytest.mark.parametrize("most", [0.1, 1.0, 100.0])
def test_one_that_clips_large_gradients_alone_is_told(most):
    assert mixes_parameters(Clipping([nn.Parameter(torch.ones(2))], most))
