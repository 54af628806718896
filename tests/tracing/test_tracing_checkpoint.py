"""Activation checkpointing in glue code: leaves called under it are computed again in backward."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopipe.hardware import Cluster
from autopipe.stages import build
from autopipe.stages.verify import run_stages
from autopipe.tracing import capture
from tests.zoo.cut import uniform_plan


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)
        self.out = nn.Linear(8, 8)
        self.n_runs = torch.zeros((), dtype=torch.int)

    def forward(self, x):
        self.n_runs += 1
        return x + self.out(self.drop(self.inner(x).relu()))


class Model(nn.Module):
    """Every other block checkpointed, in training only."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 2)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        x = self.head.bias.sum() + x
        for i, block in enumerate(self.blocks):
            is_saved = not self.training or i % 2
            x = block(x) if is_saved else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def runs_and_gradients(model, run):
    for block in model.blocks:
        block.n_runs.zero_()
    model.zero_grad()
    torch.manual_seed(1)
    run().square().sum().backward()
    return [int(b.n_runs) for b in model.blocks], {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("is_cut", [False, True])
def test_checkpointed_leaves_run_again_in_backward(use_reentrant, is_cut):
    torch.manual_seed(0)
    model, x = Model(use_reentrant), torch.randn(3, 8)
    captured = capture(model, (x,))
    stages = build(captured, uniform_plan(captured.ops, 2, Cluster.uniform(2)))

    def run():
        return captured.assemble(run_stages(captured, stages, (x,), {})) if is_cut else captured(x)

    n_runs, expected = runs_and_gradients(model, lambda: model(x))
    assert n_runs == [2, 1, 2, 1]
    n_runs, found = runs_and_gradients(model, run)
    assert n_runs == [2, 1, 2, 1]
    torch.testing.assert_close(found, expected)
    model.eval()
    torch.testing.assert_close(run(), model(x))
