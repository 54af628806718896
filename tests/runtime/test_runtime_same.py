"""Copies of a parameter are compared by their sums."""

import torch
from torch import nn

from autopipe.runtime.reduce.same import Apart


def looked(mine, others):
    """What is told of ``mine`` where other ranks hold ``others``."""
    apart = Apart()
    theirs = torch.stack([p.detach().sum(dtype=torch.float64) for p in others]) if others else torch.empty(0)

    def largest(ends):
        ends.copy_(torch.maximum(ends, torch.cat([theirs, -theirs])))

    apart.look("0, 1", [f"p{i}" for i in range(len(mine))], mine, largest)
    return apart.told()


def test_copies_are_apart_where_their_sums_are():
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(3, dtype=torch.bfloat16))]
    assert looked(mine, mine) is None
    assert looked(mine, [mine[0], nn.Parameter(2 * mine[1])]) == ("0, 1", ["p1"])


def test_a_stage_whose_parameters_are_all_frozen_has_none_that_are_apart():
    assert looked([], []) is None
