"""Models that count their calls and go by it, and how steps of a pipeline are held against them."""

import copy
import types

import torch
from torch import Tensor, nn

WIDTH = 4


class Counting(nn.Module):
    """Layers whose forward a subclass counts in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Unread(Counting):
    """Only counts, calls and numbers."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.n_numbers = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.n_numbers += x.numel()
        return self.run(x).square().mean()


class EveryOther(Counting):
    """A second loss in every other call, as an actor's beside its critic's."""

    def __init__(self) -> None:
        super().__init__()
        self.total_it, self.policy_freq, self.actor = 0, 2, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.total_it += 1
        y = self.run(x)
        loss = y.square().mean()
        return loss + self.actor(y).square().mean() if self.total_it % self.policy_freq == 0 else loss


class Warming(Counting):
    """A factor that grows over the first steps, in training alone, and one that decays."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.warmup, self.beta = 0, 3, 1.0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.step += 1
        y = self.run(x * self.beta) * min(1.0, self.step / self.warmup)
        self.beta *= 0.9
        return y.square().mean()


class Seeing(Counting):
    """Counts rows."""

    def __init__(self) -> None:
        super().__init__()
        self.n_seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_seen += x.shape[0]
        return (self.run(x) / self.n_seen).square().mean()


class Part(nn.Module):
    """A part that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.n = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.outer(torch.tanh(self.inner(x)) * (1.0 / self.n + self.n / 4))


class OfParts(nn.Module):
    """Parts that count, opened to be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x.square().mean()


class Ticking(nn.Module):
    """A layer that only counts, and goes by it."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n += 1
        return x * (1 + self.n / 8)


class OfALayer(Counting):
    """A layer counts that would else stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.tick = Ticking()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.tick(x)).square().mean()


class Annealed(nn.Module):
    """A part that counts in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.state = {"n": 0, "rate": 0.9}

    def forward(self, x: Tensor) -> Tensor:
        self.state["n"] += 1
        return self.outer(torch.tanh(self.inner(x))) * max(0.5, self.state["rate"] ** self.state["n"])


class InContainers(Counting):
    """Counts in an object, a list and a dict, and goes by them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Annealed() for _ in range(2))
        self.schedule, self.seen = types.SimpleNamespace(step=0, tau=1.0), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.schedule.step += 1
        self.seen[0] += x.shape[0]
        for part in self.parts:
            x = part(x)
        y = self.run(x * self.schedule.tau) / (self.seen[0] + self.schedule.step)
        self.schedule.tau *= 0.9
        return y.square().mean()


MODELS = {cls.__name__: cls for cls in (Unread, EveryOther, Warming, Seeing, OfParts, OfALayer, InContainers)}


def model_and_twin(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    return model, copy.deepcopy(model)


def batch(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def counts(model: nn.Module) -> dict[str, object]:
    held = {f"{p}.{k}": v for p, m in model.named_modules() for k, v in vars(m).items()}
    found = {name: v for name, v in held.items() if type(v) in (int, float)}
    inside = {n: vars(v) if isinstance(v, types.SimpleNamespace) else v for n, v in held.items()}
    return found | {n: copy.copy(v) for n, v in inside.items() if n.rpartition(".")[2] in _CONTAINERS}


_CONTAINERS = ("state", "schedule", "seen")


def check_steps(rt, model: nn.Module, twin: nn.Module, n_steps: int = 6, is_quiet: bool = False) -> None:
    """A step counts once, whatever its number of microbatches; so does a call for the loss alone."""

    def given(seed: int) -> tuple[Tensor, ...]:
        return () if is_quiet else (batch(seed),)

    for seed in range(n_steps):
        own = [p for _, p in rt.named_parameters()]
        for p in (*own, *twin.parameters()):
            p.grad = None
        expected = twin(batch(seed))
        expected.backward()
        torch.testing.assert_close(torch.Tensor(rt.step(*given(seed)).loss), expected.detach())
        grads = dict(twin.named_parameters())
        for name, p in rt.named_parameters():
            other = grads[name].grad
            assert (p.grad is None or not p.grad.any()) if other is None else torch.allclose(p.grad, other)
        assert counts(model) == counts(twin)
    model.eval()
    twin.eval()
    torch.testing.assert_close(torch.Tensor(rt.evaluate(*given(9)).loss), twin(batch(9)).detach())
    assert counts(model) == counts(twin)
    model.train()
    twin.train()
