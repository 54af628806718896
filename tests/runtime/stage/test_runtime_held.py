"""What each rank holds in a step, counted storage by storage, beside what its plan says."""

import collections
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopipe
from autopipe.memory import plan_memory, rank_memory
from autopipe.runtime.stage.worker import Worker
from autopipe.simulator import plan_schedule

N = 8


class Held(TorchDispatchMode):
    """Counts the bytes of storages made within it, on the rank that is at work when they are."""

    def __init__(self, known):
        super().__init__()
        self.rank = 0
        self.alive, self.peak = collections.Counter(), collections.Counter()
        self.known = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for storage in (t.untyped_storage() for t in tree_leaves(out) if isinstance(t, Tensor)):
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.alive[self.rank] += storage.nbytes()
                weakref.finalize(storage, self._end, storage._cdata, self.rank, storage.nbytes())
        self.peak[self.rank] = max(self.peak[self.rank], self.alive[self.rank])
        return out

    def _end(self, key, rank, n_bytes):
        self.known.discard(key)
        self.alive[rank] -= n_bytes


def held(monkeypatch, pipe, x):
    """Per rank, the most a step holds beside weights and gradients in which loss_fn is asked nothing."""
    count = Held([])

    def noted(method):
        def act(worker, m):
            count.rank = worker.stage.rank
            method(worker, m)

        return act

    for name in ("forward", "backward", "backward_input", "backward_weight"):
        monkeypatch.setattr(Worker, name, noted(getattr(Worker, name)))
    runtime = pipe.runtime(loss_fn=lambda output, target: (output * output).mean(), mixed_rows="allow")
    for _ in range(3):
        runtime.step(x, target=x)
    own = [*pipe.model.parameters(), *pipe.model.buffers(), x]
    count.known = {t.untyped_storage()._cdata for t in (*own, *(p.grad for p in pipe.model.parameters()))}
    with count:
        runtime.step(x, target=x)
    return [count.peak[rank] for rank in range(pipe.plan.n_ranks)]


def convolutions():
    def block():
        return nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()

    return nn.Sequential(*[layer for _ in range(9) for layer in block()]), torch.randn(N * 8, 8, 16, 16)


class Transformer(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": "gelu"}
        self.first = nn.Linear(d, d)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(d, 4, 4 * d, **options) for _ in range(8))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def transformer():
    return Transformer(), torch.randn(N * 4, 32, 32)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
@pytest.mark.parametrize("make", [convolutions, transformer])
def test_what_waits_for_w_is_what_is_planned(monkeypatch, make, schedule):
    torch.manual_seed(0)
    model, x = make()
    pipe = autopipe.split(
        model, n_ranks=2, args=(x,), schedule=schedule, n_microbatches=N, balance="parameters"
    )
    planned = rank_memory(plan_schedule(pipe.plan, None, N), plan_memory(pipe.plan, pipe.costs))
    found = held(monkeypatch, pipe, x)
    ratios = [bytes_ / told.peak_activation_bytes for bytes_, told in zip(found, planned, strict=True)]
    assert max(ratios) < 1.1, ratios
