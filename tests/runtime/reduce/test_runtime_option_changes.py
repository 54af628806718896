"""Options that one rank's optimizer alone has otherwise are told; those of each group's own are not."""

import functools
import re

import pytest
import torch
from torch import nn

from autopipe.runtime.reduce.option_changes import OptionChanges, are_unlike, unlike


class Counting(torch.optim.SGD):
    """Keeps a number of its own in its groups."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + len(group["params"])
        return super().step(closure)


def one_group(rank, kind=torch.optim.SGD, lr=0.1):
    return kind([nn.Parameter(torch.ones(2)) for _ in range(1 + rank)], lr=lr)


def by_rank(rank):
    return one_group(rank, lr=0.1 * (1 + rank))


def decays(rank):
    """What decays and what does not; the last rank has none of the former."""
    held = [{"params": [nn.Parameter(torch.ones(2))] if rank < 2 else [], "weight_decay": 0.1}]
    return torch.optim.SGD([*held, {"params": [nn.Parameter(torch.ones(2))]}], lr=0.1)


def layers(rank):
    held = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    return torch.optim.SGD([{"params": [p], "lr": 0.9 ** (3 * rank + i)} for i, p in enumerate(held)])


def alike_groups(rank):
    held = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    return torch.optim.AdamW([{"params": [p]} for p in held], lr=0.1)


def changed(rank, optimizer, k, name="lr", value=0.01):
    if k == 1 and rank == 1:
        optimizer.param_groups[-1][name] = value


def tensors(rank):
    return one_group(rank, lr=torch.tensor(0.1))


def filled(rank, optimizer, k):
    if k == 1 and rank == 0:
        optimizer.param_groups[0]["lr"].fill_(0.02)


def scheduled(rank, optimizer, k):
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


def parted(rank, optimizer, k):
    """A schedule for each group, and that of the first goes on alone on a rank that has no second."""
    for i, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.1 * 0.5 ** (k * (i + 1))


def left(rank, optimizer, k):
    return None


TOLD = {
    "a rate": (one_group, changed, "lr=0.1 on rank 0 and lr=0.01 on rank 1"),
    "a decay": (
        one_group,
        functools.partial(changed, name="weight_decay", value=1.0),
        "weight_decay=0 on rank 0 and weight_decay=1 on rank 1",
    ),
    "a rate in one of two groups": (decays, changed, "lr=0.1 on rank 0 and lr=0.01 on rank 1"),
    "betas": (
        functools.partial(one_group, kind=torch.optim.Adam),
        functools.partial(changed, name="betas", value=(0.5, 0.9)),
        r"betas=\(0.9, 0.999\) on rank 0 and betas=\(0.5, 0.9\) on rank 1",
    ),
    "a tensor": (tensors, filled, "lr=0.0199999996 on rank 0 and lr=0.100000001 on rank 1"),
    "rates by rank": (by_rank, left, "lr=0.1 on rank 0 and lr=0.2 on rank 1"),
}
MEANT = {
    "nothing": (one_group, left),
    "a schedule": (one_group, scheduled),
    "decays": (decays, scheduled),
    "a rate for each layer": (layers, scheduled),
    "a schedule for each group": (alike_groups, parted),
    "an optimizer's own": (functools.partial(one_group, kind=Counting), scheduled),
}


def union_and_told(make, change, n_ranks=3):
    watches, optimizers = [OptionChanges() for _ in range(n_ranks)], [*map(make, range(n_ranks))]
    for k in range(3):
        for rank, (watch, optimizer) in enumerate(zip(watches, optimizers, strict=True)):
            change(rank, optimizer, k)
            watch.before_step(optimizer)
            optimizer.step()
            watch.after_step(optimizer)
    union = functools.reduce(int.__or__, (watch.bits for watch in watches))
    assert 0 <= union < 1 << 63
    return union, unlike([watch.told() for watch in watches])


@pytest.mark.parametrize("case", TOLD)
def test_what_one_rank_changes_is_told(case):
    make, change, words = TOLD[case]
    union, found = union_and_told(make, change)
    assert are_unlike(union)
    shown = " and ".join(f"{has} on rank {rank}" for rank, has in found[0].items())
    assert re.fullmatch(words, shown), shown


@pytest.mark.parametrize("case", MEANT)
def test_what_groups_have_of_their_own_is_not(case):
    union, found = union_and_told(*MEANT[case])
    assert found is None
    assert are_unlike(union) is (case in ("a rate for each layer",)), "asked of others each time"


def test_a_rank_that_has_not_stepped_says_nothing():
    watch, optimizer = OptionChanges(), one_group(0)
    watch.before_step(optimizer)
    assert not are_unlike(watch.bits | OptionChanges().bits)
