"""Optimizers that keep something beside their ``state``: moved and saved with it, or refused by name."""

import pathlib

import beside_ranks
import pytest
import torch
from processes import run_ranks

from autopipe.runtime.checkpoint.optimizer_extras import snapshot


@pytest.mark.timeout(120)
@pytest.mark.parametrize("check", ["moves", "saves", "saves_through"])
def test_of_optimizers(check, tmp_path):
    run_ranks(pathlib.Path(beside_ranks.__file__), 2, check, str(tmp_path), timeout_s=100)


def test_an_optimizer_is_put_back_whatever_its_load_did_to_its_groups():
    optimizer = beside_ranks.Through(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1))
    groups, state = optimizer.param_groups, optimizer.state
    put_back = snapshot(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    groups[0]["lr"], optimizer.state = 0.5, {}
    put_back()
    assert (optimizer.param_groups, optimizer.state) == (groups, state)
    assert [(len(group["params"]), group["lr"]) for group in groups] == [(1, 0.1)]
