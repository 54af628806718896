"""Copies of a parameter are compared by their sums."""

import torch
from torch import nn

from autopipe.runtime.reduce.diverged import Diverged


def looked(mine, others):
    """What is told of ``mine`` where other ranks hold ``others``."""
    apart, names, theirs = Diverged(), [f"p{i}" for i in range(len(mine))], []
    Diverged().look("0, 1", names, others, lambda ends: theirs.append(ends.clone()))
    apart.look("0, 1", names, mine, lambda ends: ends.copy_(torch.maximum(ends, theirs[0])))
    return apart.told()


def test_copies_are_apart_where_their_sums_are():
    torch.manual_seed(0)
    mine = [nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(3, dtype=torch.bfloat16))]
    assert looked(mine, mine) is None
    assert looked(mine, [mine[0], nn.Parameter(2 * mine[1])]) == ("0, 1", ["p1"])


def test_copies_whose_sums_are_the_same_are_apart_too():
    mine = nn.Parameter(torch.rand(30, 12))
    step = torch.randn(30, 12)
    step -= step.mean(0)  # over labels
    step -= step.mean(1, keepdim=True)  # over features
    assert looked([mine], [nn.Parameter(mine + step)]) == ("0, 1", ["p0"])


def test_a_stage_whose_parameters_are_all_frozen_has_none_that_are_apart():
    assert looked([], []) is None
