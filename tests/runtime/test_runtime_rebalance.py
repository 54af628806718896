"""Cutting anew from measured times, in one process; on several ranks it is in ``keep_ranks``."""

import copy
import dataclasses
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError, PlanError


class Layer(nn.Module):
    """As quick as its size says, until it is told to take its time."""

    def __init__(self, d=16):
        super().__init__()
        self.lin, self.pause_s = nn.Linear(d, d), 0.0

    def forward(self, x):
        if self.pause_s and not isinstance(x, torch._subclasses.FakeTensor):
            time.sleep(self.pause_s)
        return torch.tanh(self.lin(x)) + x


def made(n_stages=2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(*[Layer() for _ in range(8)], nn.Dropout(0.1))
    x = torch.randn(8, 16)
    pipe = autopipe.split(model, n_stages, (x,), costs="estimated", n_microbatches=4, **options)
    return model, pipe, pipe.runtime(F.mse_loss), x


def layers_of(stage):
    return sum(name.endswith("lin.weight") for name, _ in stage.named_parameters())


def test_a_slow_block_moves_the_cut_and_training_goes_on():
    model, pipe, rt, x = made()
    _, _, other, _ = made()
    runtimes = rt, other
    optimizers = [torch.optim.AdamW(r.parameters(), 0.01) for r in runtimes]

    def train():
        for r, optimizer in zip(runtimes, optimizers, strict=True):
            optimizer.zero_grad()
            r.step(x, target=x)
            optimizer.step()

    train()
    assert [layers_of(s) for s in rt.stages] == [4, 4]
    for layer in model[:2]:
        layer.pause_s = 5e-3
    for _ in range(3):
        train()
    report = rt.report()
    assert report.drift > 1.3
    assert "rebalance() would cut anew" in str(report)
    assert rt.rebalance(optimizer=optimizers[0])
    assert layers_of(rt.stages[0]) < 4
    assert pipe.plan is rt.plan
    assert pipe.stages == rt.stages
    for _ in range(2):
        train()
    assert all(torch.equal(a, b) for a, b in zip(rt.parameters(), other.parameters(), strict=True))
    assert not rt.rebalance(optimizer=optimizers[0], least_gain=3.0)
    plain = copy.deepcopy(model).eval()
    assert torch.allclose(pipe.eval()(x), plain(x))


def test_what_there_is_to_plan_from_is_said():
    _, pipe, rt, x = made()
    with pytest.raises(InputError, match="no step was run"):
        rt.rebalance()
    again = autopipe.split(copy.deepcopy(pipe.model), plan=pipe.plan, args=(x,))
    bare = again.runtime(F.mse_loss)
    bare.step(x, target=x)
    with pytest.raises(InputError, match="without costs"):
        bare.rebalance()
    _, other, _, _ = made(3)
    with pytest.raises(InputError, match="n_ranks 2 and the plan is for 3"):
        rt.rebalance(plan=other.plan)
    with pytest.raises(PlanError, match="the plan's boundaries have nothing, and its stages make that "):
        rt.rebalance(plan=dataclasses.replace(pipe.plan, boundaries=()))
    rt.step(x, target=x)
