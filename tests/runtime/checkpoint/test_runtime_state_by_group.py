"""What a scheduler keeps for each group goes with the groups, and what it keeps for each phase does not."""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from autopipe.runtime.checkpoint.state_by_group import by_group

NAMES = "abcd"


class Stepped(lr_scheduler.LRScheduler):
    """One of a user's own, with a list of steps and a pair that no group has a part in."""

    def __init__(self, optimizer, steps=(2, 4), betas=(0.9, 0.99)):
        self.steps, self.betas = [*steps], betas
        super().__init__(optimizer)

    def get_lr(self):
        factor = 0.5 ** sum(self.last_epoch >= step for step in self.steps)
        return [factor * base for base in self.base_lrs]


def rates(groups):
    return [0.1 * (1 + NAMES.index(group[0])) for group in groups]


KINDS = {
    "one cycle": lambda o, r: lr_scheduler.OneCycleLR(o, max_lr=r, total_steps=20),
    "one cycle in three phases": lambda o, r: lr_scheduler.OneCycleLR(
        o, max_lr=r, total_steps=20, three_phase=True
    ),
    "lambdas": lambda o, r: lr_scheduler.LambdaLR(o, [lambda step: 0.9**step for _ in r]),
    "milestones": lambda o, r: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9), Stepped(o)], [2, 4]
    ),
    "a user's own": lambda o, r: Stepped(o),
}


def state(kind, groups, n_steps):
    parameters = [{"params": [nn.Parameter(torch.zeros(1)) for _ in group]} for group in groups]
    for group, rate in zip(parameters, rates(groups), strict=True):
        group["lr"] = rate
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    scheduler = KINDS[kind](optimizer, rates(groups))
    for _ in range(n_steps):
        optimizer.step()
        scheduler.step()
    return scheduler.state_dict()


def plain(value):
    """Without functions, which are another's in each scheduler."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if not callable(item)}
    return [*map(plain, value)] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("savers", "here"),
    [
        (["ab", "cd"], "bc"),
        (["cd", "ab"], "bc"),
        (["abc", "cda"], "bcd"),
        (["bc", "ad"], "abcd"),
        (["abcd"], "d"),
    ],
)
def test_what_goes_by_groups_goes_with_them(kind, savers, here):
    trees = [state(kind, saver, 5) for saver in savers]
    found = by_group(trees, savers, here, state(kind, here, 0), lambda name: [name])
    assert plain(found) == plain(state(kind, here, 5))
