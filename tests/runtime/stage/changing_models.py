"""A model with state that its user changes between steps, and how steps of a pipeline are held against it."""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 4


class Reversed(torch.autograd.Function):
    """Turns gradients around, by a factor."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class Scheduled(nn.Module):
    """Layers with a temperature, a schedule's step and a reversal of gradients among them, and an option."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.temperature, self.factor, self.step, self.act, self.is_plain = 1.0, 0.0, 0, "tanh", True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layers[0](x)) / self.temperature
        x = getattr(torch, self.act)(self.layers[1](x))
        x = Reversed.apply(x, self.factor)
        if not self.is_plain:
            x = x * x.sigmoid()
        x = torch.tanh(self.layers[2](x))
        return self.layers[3](x * (self.step / 5) if self.step < 5 else x)


def states() -> list[dict[str, object]]:
    """What is set ahead of each step: numbers that are others each time, options that come and go."""
    return [
        {"temperature": 1 + n / 3, "factor": n / 7, "step": n}
        | {"act": "tanh" if n % 4 < 2 else "sigmoid", "is_plain": n < 6}
        for n in range(9)
    ]


def model_and_twin() -> tuple[Scheduled, Scheduled]:
    torch.manual_seed(0)
    model = Scheduled().double()
    return model, copy.deepcopy(model)


def batch(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def check_step(rt, twin: nn.Module, seed: int, is_quiet: bool = False) -> None:
    """One step's loss and gradients are those of the plain model."""
    x = batch(seed)
    for parameter in (*rt.parameters(), *twin.parameters()):
        parameter.grad = None
    loss = (rt.step() if is_quiet else rt.step(x, target=x)).loss
    wanted = F.mse_loss(twin(x), x)
    wanted.backward()
    assert abs(loss.item() - wanted.item()) < 1e-12
    plain = dict(twin.named_parameters())
    for name, parameter in rt.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name].grad, rtol=1e-10, atol=1e-12)
