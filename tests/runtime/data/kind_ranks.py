"""Calls of other kinds than the example's on two ranks, each given the batch or fed it.

``kind_ranks.py`` is one rank: each kind in one of the ways, or in each of them with ``all``.
"""

import copy
import sys

import pytest
import torch
import torch.distributed as dist
from kind_models import KINDS, check_calls, given, model_and_twin
from torch import nn

import autopipe
from autopipe.errors import InputError

WAYS: tuple[dict, ...] = ({}, {"feed": 0}, {"schedule": "gpipe", "release": True})
"""What runtimes are told beside the defaults."""


def check(name: str, options: dict) -> None:
    example, calls = KINDS[name]
    model, twin = model_and_twin()
    pipe = autopipe.split(model, 2, kwargs=example, n_microbatches=3, costs="estimated")
    rt = pipe.runtime(**options)
    is_quiet = "feed" in options and dist.get_rank() != 0
    check_calls(rt, model, twin, [example, *calls, example], is_quiet)
    assert len(pipe.graph.kinds) > 1


def check_refused() -> None:
    """What a batch recorded that the source refused, the others record with the next that needs it."""
    model, twin = model_and_twin()
    pipe = autopipe.split(model, 2, kwargs=given("labels"), n_microbatches=2, costs="estimated")
    is_source = dist.get_rank() == 0
    refuses = [True]

    def weight(args, kwargs, target):
        if refuses[0]:
            raise ValueError("no weight")
        return float(kwargs["ids"].shape[0])

    rt = pipe.runtime(feed=0, loss_weight=weight)
    for kwargs in (given("labels", "mask"), given("labels", "image")):
        with pytest.raises((InputError, ValueError), match="no weight"):
            rt.step(**(kwargs if is_source else {}))
    assert len(pipe.graph.kinds) == (3 if is_source else 1)
    refuses[0] = False
    calls = [
        given("labels"),
        given("labels", as_dict=False),
        given("labels", "mask"),
        given("labels", "image"),
    ]
    check_calls(rt, model, twin, calls, is_quiet=not is_source)
    assert len(pipe.graph.kinds) == 4


class Tasks(nn.Module):
    """Has a head for each of some tasks, which a number tells, and takes a gate where one is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12))

    def forward(self, x, task, gate=None):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        if gate is not None:
            x = x * gate
        return self.heads[task.item()](x)


def check_refused_forms() -> None:
    """A form of a known kind that a refused batch recorded is told to the others, in order with new kinds."""
    torch.manual_seed(0)
    model = Tasks().double()
    twin = copy.deepcopy(model)
    x = torch.randn(4, 4, dtype=torch.float64)
    first, second, third = ((x, torch.tensor(n)) for n in (0, 9, 10))
    gate = {"gate": x.sigmoid()}
    pipe = autopipe.split(model, 2, args=first, n_microbatches=2, costs="estimated")
    n_forms = [len(pipe.graph.forms[True])]
    is_source = dist.get_rank() == 0
    refuses = [True]

    def weight(args, kwargs, target):
        if refuses[0]:
            raise ValueError("no weight")
        return float(args[0].shape[0])

    rt = pipe.runtime(loss_fn=nn.functional.mse_loss, feed=0, loss_weight=weight)
    for args, kwargs in ((second, {}), (first, gate)):
        with pytest.raises((InputError, ValueError), match="no weight"):
            rt.step(*args, **kwargs, target=x) if is_source else rt.step()
        n_forms.append(len(pipe.graph.forms[True]))
    assert (n_forms[0] < n_forms[1] < n_forms[2]) if is_source else (n_forms[0] == n_forms[2])
    refuses[0] = False
    for args, kwargs in ((first, {}), (third, {}), (second, {}), (first, gate)):
        found = rt.step(*args, **kwargs, target=x) if is_source else rt.step()
        wanted = nn.functional.mse_loss(twin(*args, **kwargs), x)
        wanted.backward()
        assert abs(found.loss.item() - wanted.item()) < 1e-12
    plain = dict(twin.named_parameters())
    for name, parameter in rt.named_parameters():
        torch.testing.assert_close(parameter.grad, plain[name].grad)
    assert len(pipe.graph.kinds) == 2


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    turns = range(len(WAYS)) if sys.argv[1:] == ["all"] else [0]
    for i, name in enumerate(KINDS):
        for turn in turns:
            check(name, WAYS[(i + turn) % len(WAYS)])
    check_refused()
    check_refused_forms()
    dist.destroy_process_group()
