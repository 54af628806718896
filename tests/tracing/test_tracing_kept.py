"""What a forward computes for people alone: numbers read of data that no later code goes by."""

import logging

import pytest
import torch
from splitting import split_by_layers
from torch import Tensor, nn

from autopipe.errors import CaptureError
from autopipe.tracing import capture
from autopipe.tracing.code import kept, messages

WIDTH = 4


class Base(nn.Module):
    """Layers, and a few things to keep numbers in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.last, self.running, self.losses, self.stats = None, 0.0, [], {}
        self.meter, self.calls, self.factor = Meter(), 0, 1.0

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def mean_loss(self) -> float:
        """What a script asks for, and no call."""
        return sum(self.losses) / len(self.losses)


class Meter:
    """An average that is kept beside."""

    def __init__(self) -> None:
        self.total, self.n = 0.0, 0

    def update(self, value: float, n: int) -> None:
        self.total, self.n = self.total + float(value) * n, self.n + n


class Last(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.run(x)
        self.last = {"mean": y.mean().item(), "largest": float(y.abs().max())}
        return y


class Listed(Base):
    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            self.stats.setdefault(i, []).append((x.mean().item(), x.detach().numpy().std()))
        self.losses.append(x.square().mean().item())
        return x


class Metered(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.run(x)
        self.meter.update(y.square().mean(), len(x))
        return y


class Running(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.run(x)
        loss = y.square().mean().item()
        self.running += loss
        self.calls += 1
        if self.calls % 2 == 0:
            logging.getLogger("mine").info("%.3f, %.3f", self.running / self.calls, round(y.max().item(), 2))
        return y


@pytest.mark.parametrize("cls", [Last, Listed, Metered, Running])
@pytest.mark.parametrize("n_microbatches", [1, 3])
def test_what_only_people_read_stands_in_no_way(cls, n_microbatches, caplog):
    torch.manual_seed(0)
    model = cls().double()
    twin = cls().double()
    twin.load_state_dict(model.state_dict())
    held = {name: repr(value) for name, value in vars(model).items() if name not in ("meter", "calls")}
    x = torch.randn(6, WIDTH, dtype=torch.float64)
    pipe = split_by_layers(model, 3, (x,), n_microbatches=n_microbatches)
    assert [r.getMessage() for r in caplog.records if "which stages do not set" in r.getMessage()]
    rt = pipe.runtime(loss_fn=lambda out, _: out.square().mean())
    for seed in range(4):
        given = torch.randn(6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        for p in (*model.parameters(), *twin.parameters()):
            p.grad = None
        twin(given).square().mean().backward()
        rt.step(given)
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    assert model.calls == twin.calls
    assert {name: repr(vars(model)[name]) for name in held} == held


class Threshold(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.run(x)
        self.last = y.mean().item()
        return y * 2 if self.last > 0 else y


class Averaged(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.run(x)
        self.running = 0.9 * self.running + 0.1 * y.abs().mean().item()
        return y / (1 + self.running)


class ByHelper(Base):
    """A number that is told on its way to where it is gone by."""

    def noted(self, value: float) -> float:
        self.factor = value
        return value

    def forward(self, x: Tensor) -> Tensor:
        y = self.run(x)
        logging.getLogger("mine").info("%f", self.noted(y.mean().item()))
        return y * self.factor


class ThroughAnother(Base):
    """A number that is kept, and kept again where it is gone by."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.run(x)
        self.last = y.mean().item()
        self.factor = self.last
        return y * self.factor


class ByText(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.run(x)
        self.last = y.mean().item()
        return y * getattr(self, "last")  # noqa: B009


@pytest.mark.parametrize("cls", [ByHelper, ThroughAnother, ByText])
def test_what_is_computed_with_is_followed(cls):
    torch.manual_seed(0)
    model, twin = cls().double(), cls().double()
    twin.load_state_dict(model.state_dict())
    held = capture(model, (torch.randn(6, WIDTH, dtype=torch.float64),))
    other = torch.randn(6, WIDTH, dtype=torch.float64) - 1
    torch.testing.assert_close(held(other), twin(other))


@pytest.mark.parametrize("cls", [Threshold, Averaged])
def test_what_code_goes_by_is_no_note(cls):
    with pytest.raises(CaptureError, match=r"attribute (last|running|factor)|Python reads|goes by"):
        capture(cls().double(), (torch.randn(6, WIDTH, dtype=torch.float64),))


@pytest.mark.parametrize("cls", [Listed, ByHelper])
def test_what_is_written_where_code_reads_data_is_looked_for_once(cls, monkeypatch):
    asked: list[str] = []

    def noting(module):
        original, name = module._lies_in, module.__name__

        def lies_in(*given):
            asked.append(name)
            return original(*given)

        monkeypatch.setattr(module, "_lies_in", lies_in)

    noting(kept)
    noting(messages)
    kept._keeping.cache_clear()
    messages._speaking.cache_clear()
    given = (torch.randn(6, WIDTH, dtype=torch.float64),)
    capture(cls().double(), given, dynamic=False)
    assert set(asked) == {kept.__name__, messages.__name__}
    asked.clear()
    capture(cls().double(), given, dynamic=False)
    assert asked == []
