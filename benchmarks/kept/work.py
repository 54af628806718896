"""A small training run with everything that a checkpoint can hold, for the parts of this benchmark.

Planning is by estimated costs, so that every process cuts alike.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe

__all__ = ["Loader", "Net", "Trainer"]

WIDTH, ROWS = 8, 8


class Counter(nn.Module):
    """Keeps a number beside its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.n_seen = nn.Linear(WIDTH, WIDTH), 0

    def get_extra_state(self) -> Any:
        return {"n_seen": self.n_seen, "grid": torch.arange(3.0)}

    def set_extra_state(self, state: Any) -> None:
        self.n_seen = state["n_seen"]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.lin(x)) + x


class Net(nn.Module):
    """A tie, dropout, a frozen part, statistics, mixed dtypes and state that is no tensor."""

    def __init__(self, n_layers: int = 4) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Counter() for _ in range(n_layers))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.inner[0].lin.weight
        self.low = nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16), requires_grad=False)

    def to(self, *args: Any, **kwargs: Any) -> Net:
        """What is half stays so."""
        super().to(*args, **kwargs)
        self.low.data = self.low.data.bfloat16()
        return self

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = self.drop(layer(x)) + x
        return self.head(self.norm(self.frozen(x)) * self.low)


class Loader:
    """Batches in a random order, with a position."""

    def __init__(self) -> None:
        self.generator, self.n = torch.Generator().manual_seed(5), 0

    def draw(self) -> Tensor:
        """The next batch."""
        self.n += 1
        return torch.randn(ROWS, WIDTH, generator=self.generator)

    def state_dict(self) -> dict[str, Any]:
        return {"n": self.n, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n = state["n"]
        self.generator.set_state(state["generator"])


class Trainer:
    """A runtime in this process, or this rank's, and what a loop keeps beside it."""

    def __init__(
        self,
        n_stages: int,
        *,
        n_layers: int = 4,
        costs: str = "estimated",
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.model, self.dtype = Net(n_layers).to(dtype), dtype
        example = (torch.randn(ROWS, WIDTH, dtype=dtype),)
        limit_s = options.get("stall_limit_s")
        self.pipe = autopipe.split(
            self.model, n_stages, example, costs=costs, n_microbatches=2, stall_limit_s=limit_s
        )
        self.runtime = self.pipe.runtime(F.mse_loss, **options)
        self.loader = Loader()
        optimizer = torch.optim.AdamW(self.runtime.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
        self.kept: dict[str, Any] = {"optimizer": optimizer, "scheduler": scheduler, "loader": self.loader}

    def train(self, n_steps: int, clip: float | None = None) -> list[float]:
        """The losses of so many steps."""
        losses = []
        for _ in range(n_steps):
            x = self.loader.draw().to(self.dtype)
            self.kept["optimizer"].zero_grad()
            losses.append(self.runtime.step(x, target=x + random.random()).loss.item())
            if clip is not None:
                self.runtime.clip_grad_norm_(clip)
            self.kept["optimizer"].step()
            self.kept["scheduler"].step()
        return losses

    def state(self) -> dict[str, Any]:
        """All that a load may change, as comparable copies."""
        tensors = {n: t for s in self.runtime.stages for n, t in s.state_dict().items()}
        objects = {key: thing.state_dict() for key, thing in self.kept.items()}
        everything = [tensors, objects, torch.get_rng_state(), random.getstate()]
        return {str(i): _frozen(each) for i, each in enumerate(everything)}


def _frozen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (
            str(value.dtype),
            tuple(value.shape),
            bytes(value.detach().reshape(-1).view(torch.uint8).numpy()),
        )
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_frozen(item) for item in value]
    return repr(value)
