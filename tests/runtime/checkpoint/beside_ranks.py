"""Optimizers that keep something beside their ``state``; ``beside_ranks.py CHECK FOLDER`` is one rank."""

import copy
import os
import pathlib
import sys

import pytest
import torch
import torch.distributed as dist
from keep_ranks import Deep, cut
from torch.nn import functional as F

from autopipe.errors import InputError
from autopipe.runtime import Runtime
from autopipe.stages import build
from autopipe.tracing import capture


class Around(torch.optim.Optimizer):
    """Slow weights in its own state, around an optimizer whose groups it shares."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, dict(inner.defaults))
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("slow", p.detach().clone())
        self.inner.step()
        for p, kept in self.state.items():
            p.data.copy_(kept["slow"].lerp_(p.detach(), 0.5))


class Through(Around):
    """Keeps them in the state of the optimizer that it is around, which knows it."""

    def __init__(self, inner):
        super().__init__(inner)
        self.state, inner.outer = inner.state, self


class Aside(torch.optim.SGD):
    """Keeps in attributes what ``made`` makes of its parameters."""

    def __init__(self, parameters, made):
        super().__init__(parameters, 0.1)
        self.aside = made([p for group in self.param_groups for p in group["params"]])


KEPT = {
    "copies in lists": lambda ps: [[p.detach().clone() for p in ps]],
    "tensors by id": lambda ps: {id(p): torch.zeros_like(p) for p in ps},
    "tensors by parameter": lambda ps: {p: p.detach().clone() for p in ps},
    "one flat buffer": lambda ps: torch.cat([p.detach().flatten() for p in ps]),
}
NAMED = {"parameters": list, "numbers by parameter": lambda ps: dict.fromkeys(ps, 1.0)}
OTHER = {"a few numbers": lambda ps: torch.zeros(3), "nothing of theirs": lambda ps: {"lr": [0.1], 3: None}}


def pipeline(layouts=((4, 4), (7, 1))):
    torch.manual_seed(1)
    x = torch.randn(8, 8, dtype=torch.float64)
    model = Deep().double()
    captured = capture(model, (x,))
    plans = [cut(captured, list(sizes)) for sizes in layouts]
    torch.manual_seed(5)
    runtime = Runtime(captured, plans[0], build(captured, plans[0]), loss_fn=F.mse_loss, stall_limit_s=20.0)
    return model, runtime, plans


def train(runtime, optimizer, n=2):
    for i in range(n):
        x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        optimizer.zero_grad()
        runtime.step(x, target=x)
        optimizer.step()


def moves(_):
    """What is kept beside an optimizer's state moves with it where it is given, else is refused by name."""
    _, runtime, plans = pipeline()
    for made in (*KEPT.values(), *NAMED.values()):
        optimizer = Aside(runtime.parameters(), made)
        with pytest.raises(InputError, match=r"optimizer, a Aside, keeps something of .* in \.aside"):
            runtime.rebalance(plan=plans[1], optimizer=optimizer)
        assert runtime.plan is plans[0]
    optimizer = Around(torch.optim.AdamW(runtime.parameters(), 0.01))
    with pytest.raises(InputError, match=r"is made around an optimizer in \.inner, whose state would stay"):
        runtime.rebalance(plan=plans[1], optimizer=optimizer)
    for made in OTHER.values():
        other = Aside(runtime.parameters(), made)
        assert runtime.rebalance(plan=plans[1], optimizer=other)
        assert runtime.rebalance(plan=plans[0], optimizer=other)
    found = []
    for is_cut in (False, True):
        model, runtime, plans = pipeline()
        optimizer = Around(torch.optim.AdamW(runtime.parameters(), 0.01))
        train(runtime, optimizer)
        for plan in plans[::-1] if is_cut else ():
            assert runtime.rebalance(plan=plan, optimizer=optimizer, inner=optimizer.inner)
            held = [p for group in optimizer.param_groups for p in group["params"]]
            assert len({*map(id, held)}) == len(held)
            train(runtime, optimizer)
        if not is_cut:
            train(runtime, optimizer), train(runtime, optimizer)
        runtime.gather_weights()
        found.append(copy.deepcopy(model.state_dict()))
    assert all(torch.allclose(t, found[1][n], rtol=0, atol=1e-12) for n, t in found[0].items())


def saves(folder):
    """So with saves; an optimizer that holds its parameters, or numbers of another kind, is saved."""
    _, runtime, _ = pipeline()
    for made in KEPT.values():
        with pytest.raises(Exception, match=r"keeps numbers of its parameters in \.aside"):
            runtime.save(folder, optimizer=Aside(runtime.parameters(), made))
    for made in (*NAMED.values(), *OTHER.values()):
        runtime.save(folder, optimizer=Aside(runtime.parameters(), made))
    optimizer = Around(torch.optim.AdamW(runtime.parameters(), 0.01))
    train(runtime, optimizer)
    with pytest.raises(Exception, match=r"around an optimizer in \.inner, whose state its own state_dict"):
        runtime.save(folder, optimizer=optimizer)
    path = pathlib.Path(folder) / "both"
    runtime.save(path, optimizer=optimizer, inner=optimizer.inner)
    train(runtime, optimizer)
    wanted = [p.detach().clone() for p in runtime.parameters()]
    optimizer = Around(torch.optim.AdamW(runtime.parameters(), 0.01))
    runtime.load(path, optimizer=optimizer, inner=optimizer.inner)
    assert optimizer.param_groups is optimizer.inner.param_groups
    train(runtime, optimizer)
    assert all(torch.equal(p, w) for p, w in zip(runtime.parameters(), wanted, strict=True))


def saves_through(folder):
    """A state that is one for two optimizers is saved and loaded through either of them."""
    _, runtime, _ = pipeline()

    def made():
        return Through(torch.optim.SGD(runtime.parameters(), 0.01, momentum=0.9))

    optimizer = made()
    train(runtime, optimizer)
    runtime.save(folder, optimizer=optimizer)
    train(runtime, optimizer)
    wanted = [p.detach().clone() for p in runtime.parameters()]
    optimizer = made()
    runtime.load(folder, optimizer=optimizer)
    assert optimizer.state is optimizer.inner.state
    assert optimizer.param_groups is optimizer.inner.param_groups
    train(runtime, optimizer)
    assert all(torch.equal(p, w) for p, w in zip(runtime.parameters(), wanted, strict=True))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]](sys.argv[2])
    print("done")
    sys.stdout.flush()
    os._exit(0)
