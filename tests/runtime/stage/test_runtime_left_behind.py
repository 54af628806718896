"""A loss that takes what a forward has left in an attribute is right, or refused with what mends it."""

import copy
import pathlib

import pytest
import torch
from left_models import Net, loss_of
from processes import run_ranks

import autopipe
from autopipe.errors import InputError


def trained(model, take, n_stages, n_microbatches, **options):
    held, loss_fn = loss_of(take)
    torch.manual_seed(0)
    x, y = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    held["model"] = twin = copy.deepcopy(model)
    wanted = loss_fn(twin(x), y)
    wanted.backward()
    held["model"] = model
    pipe = autopipe.split(model, n_stages, (x,), n_microbatches=n_microbatches, costs="estimated", **options)
    loss = pipe.runtime(loss_fn).step(x, target=y).loss
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return loss.item() - wanted.item(), max((a.grad - b.grad).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("n_microbatches", [1, 4])
@pytest.mark.parametrize("take", [lambda m: m.gated.extra, lambda m: m.levels], ids=["layer", "root"])
def test_what_a_stage_has_left_for_the_loss_is_refused(take, n_microbatches, schedule):
    with pytest.raises(InputError, match="return it from forward, and take it from the output"):
        trained(Net().double(), take, 3, n_microbatches, schedule=schedule, pin={"last.2": 2})


@pytest.mark.parametrize("n_microbatches", [1, 4])
def test_what_the_last_stage_has_left_of_its_own_microbatch_is_the_models(n_microbatches):
    found = trained(Net(is_last=True).double(), lambda m: m.gated.extra, 2, n_microbatches, pin={"gated": 1})
    assert max(map(abs, found)) < 1e-12


@pytest.mark.parametrize("take", [lambda m: m.last[2].weight.square().sum(), lambda m: m.first[0].bias.sum()])
def test_a_loss_may_take_weights(take):
    assert max(map(abs, trained(Net().double(), take, 3, 4))) < 1e-12


@pytest.mark.parametrize("name", ["gated.extra", "levels"])
def test_what_another_rank_sets_is_refused(name):
    run_ranks(pathlib.Path(__file__).with_name("left_ranks.py"), 2, name)
