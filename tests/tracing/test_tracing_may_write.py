"""Code that stays whole and writes in a branch that the example does not take writes there later."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.tracing import capture


def put(out, at, *, values):
    if len(at):
        out[at] = values


def hand_on(*given, **more):
    put(*given, **more)


class Experts(nn.Module):
    """Tokens go to one of three experts by a gate; none of the example goes to the last."""

    def __init__(self, how):
        super().__init__()
        self.embed = nn.Embedding(3, 4)
        self.gate = nn.Linear(4, 3, bias=False)
        nn.init.eye_(self.embed.weight)
        nn.init.eye_(self.gate.weight)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.how = how

    def forward(self, ids):
        x = self.embed(ids)
        chosen = self.gate(x).argmax(-1)
        out = torch.full_like(x, -1.0)
        for i, expert in enumerate(self.experts):
            at = (chosen == i).nonzero()[:, 0]
            if self.how == "item":
                if len(at):
                    out[at] = expert(x[at])
            elif self.how == "function":
                put(out, at, values=expert(x[at]))
            elif self.how == "starred":
                hand_on(out, at, values=expert(x[at]))
            elif self.how == "own":
                self.put(at, expert(x[at]), out)
            elif self.how == "torch's":
                if i == 2 and len(at):
                    torch.neg_(out)
            elif self.how == "in place":
                if i == 2 and len(at):
                    F.elu(out, inplace=True)
            elif len(at):
                out.index_add_(0, at, expert(x[at]))
        self.left = x.square().mean(-1, keepdim=True)
        return out

    def put(self, at, values, out):
        if len(at):
            out[at] = values


class Net(nn.Module):
    """Reads what its experts left, so that they are opened: their statements stay whole, not all of them."""

    def __init__(self, how):
        super().__init__()
        self.experts, self.head = Experts(how), nn.Linear(4, 2)

    def forward(self, ids):
        return self.head(self.experts(ids)) + self.experts.left


def batch(*chosen):
    return torch.tensor(chosen)


@pytest.mark.parametrize("how", ["item", "method", "function", "starred", "own", "torch's", "in place"])
def test_a_branch_that_was_not_taken_is_not_lost(how):
    torch.manual_seed(0)
    model = Net(how)
    captured = capture(model, (batch(0, 1, 1, 0),))
    for x in (batch(0, 1, 1, 0), batch(2, 1, 2, 0), batch(2, 2, 2, 2)):
        torch.testing.assert_close(captured(x), model(x))


def test_an_expert_that_first_gets_rows_in_training_trains():
    torch.manual_seed(0)
    model = Net("item")
    plain, x, y = copy.deepcopy(model), batch(0, 2, 2, 1), torch.ones(4, 2)
    pipe = autopipe.split(model, 2, (batch(0, 1, 1, 0),), n_microbatches=2, costs="estimated")
    pipe.runtime(nn.MSELoss()).step(x, target=y)
    nn.MSELoss()(plain(x), y).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.allclose(ours.grad, theirs.grad)
