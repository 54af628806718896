"""What draws from Python's or numpy's generator has the same numbers at any cut, and where it runs again."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import autopipe
from autopipe.api import Pipe
from autopipe.api.options import Options
from autopipe.api.planning import make_plan
from autopipe.errors import InfeasibleError

HOW = {"n_microbatches": 3, "costs": "estimated", "balance": "uniform", "time_limit_s": 0.2}


class Dropping(nn.Module):
    """Leaves out layers, in glue."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.layers = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.draw = draw

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            if not self.training or self.draw() > 0.5:
                x = x + layer(x).tanh()
        return x


class Scaled(nn.Module):
    """A layer that draws within, by each generator in turn, and is random in training alone."""

    def __init__(self):
        super().__init__()
        self.linear, self.drop = nn.Linear(6, 6), nn.Dropout(0.2)

    def forward(self, x):
        if not self.training:
            return self.linear(x)
        x = self.drop(self.linear(x)) * random.uniform(0.5, 1.5)
        return x[:, torch.as_tensor(np.random.permutation(6))].tanh() + np.random.randn()


def by_python():
    return random.random()


def by_numpy():
    return np.random.uniform()


MODELS = {
    "glue, Python": lambda: Dropping(by_python),
    "glue, numpy": lambda: Dropping(by_numpy),
    "layers": lambda: nn.Sequential(*[Scaled() for _ in range(4)], nn.Linear(6, 6)),
    "blocks": lambda: nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), Scaled()) for _ in range(4)]),
}


def trained(model, x, n_stages, opened=(), **options):
    """Two steps: the losses, and every gradient after the second."""
    model.zero_grad()
    asked = Options.of(n_stages=n_stages, **HOW, **options)
    planned = make_plan(autopipe.capture(model, (x,), open=opened), (), None, asked)
    torch.manual_seed(3)
    runtime = Pipe(planned.capture, planned.plan).runtime(nn.functional.mse_loss)
    losses = [float(runtime.step(x, target=x).loss) for _ in range(2)]
    return losses, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", MODELS)
def test_numbers_of_other_generators_hang_on_neither_cut_nor_schedule_nor_what_runs_again(kind):
    torch.manual_seed(0)
    model, x = MODELS[kind]().double(), torch.randn(6, 6, dtype=torch.float64)
    random.seed(1)
    np.random.seed(1)
    losses, gradients = trained(model, x, 1)
    assert losses[0] != losses[1]
    for n_stages, options in [
        (2, {}),
        (2, {"schedule": "gpipe", "recompute": "always"}),
        (4, {"schedule": "interleaved", "n_ranks": 2}),
        (3, {"recompute": "auto"}),
    ]:
        if kind.startswith("glue") and n_stages > 2:
            continue  # its loop over layers is one op
        random.seed(n_stages)
        np.random.seed(n_stages)
        before = random.getstate(), np.random.get_state()[1].tolist()
        found, others = trained(model, x, n_stages, **options)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
        assert found == pytest.approx(losses, rel=1e-12)
        for a, b in zip(gradients, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)), None])
def test_what_a_loss_draws_is_new_in_each_step(model):
    torch.manual_seed(0)
    model, x, drawn = model or MODELS["layers"](), torch.randn(6, 6), []

    def loss_fn(output, target):
        drawn.append((random.random(), np.random.rand()))
        return nn.functional.mse_loss(output, target)

    runtime = autopipe.split(model, 2, (x,), n_microbatches=2, costs="estimated").runtime(loss_fn)
    runtime.step(x, target=x)
    drawn.clear()
    for _ in range(3):
        runtime.step(x, target=x)
    assert len({a for a, _ in drawn}) == len({b for _, b in drawn}) == len(drawn) == 3


def test_outside_a_step_blocks_run_again_with_the_numbers_they_had():
    torch.manual_seed(0)
    model, x = MODELS["layers"]().double(), torch.randn(6, 6, dtype=torch.float64)
    gradients = []
    for recompute in ("never", "always"):
        model.zero_grad()
        pipe = autopipe.split(model, 2, (x,), n_microbatches=1, costs="estimated", recompute=recompute)
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(5)
        pipe(x).square().sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_a_layer_that_draws_outside_torch_is_not_opened_for_the_sake_of_stages():
    model, x = nn.Sequential(Scaled()).double(), torch.randn(6, 6, dtype=torch.float64)
    with pytest.raises(InfeasibleError, match="can be cut into 1 stage"):
        autopipe.split(model, 2, (x,), n_microbatches=2, costs="estimated")
