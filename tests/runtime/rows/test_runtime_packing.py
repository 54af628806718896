"""Batches of packed image patches: each microbatch gets the rows of its own samples, or none are cut."""

import copy

import pytest
import torch
from runtime_models import grads, make, worst
from splitting import split_by_layers
from torch import nn
from zoo.models_multimodal import PackedCrops, PackedPatches, documents

from autopipe.errors import InputError
from autopipe.runtime import Runtime

EVEN, RAGGED = [(1, 4, 4)] * 2, [(1, 2, 4), (2, 4, 4), (1, 4, 4), (1, 2, 2), (1, 4, 4)]
EXACT = 1e-12


@pytest.mark.parametrize(("grids", "n"), [(EVEN * 2, 3), (RAGGED, 5), (RAGGED, 2)])
def test_steps_on_patches_equal_the_full_batch(grids, n):
    torch.manual_seed(0)
    model = PackedPatches().double()
    runtime = Runtime(*make(model, (), documents(EVEN, dtype=torch.float64), n_stages=3))
    plain, batch = copy.deepcopy(model), documents(grids, dtype=torch.float64)
    found = runtime.step(**batch, n_microbatches=n, return_outputs=True)
    wanted = plain(**batch)
    wanted["loss"].backward()
    assert abs(found.loss - wanted["loss"]) < EXACT
    assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT
    for name in ("logits", "images"):
        torch.testing.assert_close(found.outputs[name], wanted[name].detach())


def test_patches_that_are_not_those_of_the_grid_are_refused():
    batch = documents(EVEN, dtype=torch.float64)
    runtime = Runtime(*make(PackedPatches().double(), (), batch, n_stages=2))
    batch["pixel_values"] = batch["pixel_values"][:-4]
    with pytest.raises(
        InputError, match="pixel_values has 28 rows, and those of image_grid_thw multiply to 32"
    ):
        runtime.step(**batch, n_microbatches=2)


def test_rows_without_a_grid_are_cut_alike():
    torch.manual_seed(0)
    model = PackedCrops().double().eval()
    crops, ids = torch.randn(6, 3, 16, 16).double(), torch.randint(40, (2, 9))
    runtime = Runtime(*make(model, (crops, ids), {}, n_stages=2))
    crops, ids = torch.randn(15, 3, 16, 16).double(), torch.randint(40, (5, 9))
    torch.testing.assert_close(runtime.forward(crops, ids, n_microbatches=2), model(crops, ids).detach())


class Bias(nn.Module):
    """A bias for each row fixes how many there are; a single row would be broadcast."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.bias = nn.Parameter(torch.randn(4, 4))

    def forward(self, x):
        return self.layers(x) * self.bias


def test_a_batch_that_is_fixed_is_not_cut():
    x = torch.randn(4, 4)
    runtime = Runtime(*make(Bias(), (x,), {}, n_stages=2), loss_fn=nn.functional.mse_loss)
    assert runtime.step(x, target=x, n_microbatches=1).loss > 0
    with pytest.raises(InputError, match="x cannot be cut into 4 microbatches: its 4 rows are fixed"):
        runtime.step(x, target=x, n_microbatches=4)


class Passages(nn.Module):
    """Two passages to each question, of which those of other questions are negatives, too."""

    def __init__(self):
        super().__init__()
        self.ask, self.tell = (
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
            nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)),
        )

    def forward(self, questions, passages):
        scores = self.ask(questions) @ self.tell(passages).t()
        return nn.functional.cross_entropy(scores, torch.arange(0, len(passages), 2))


@pytest.mark.parametrize("n", [2, 5])
def test_packed_rows_that_depend_on_one_another_come_together(n):
    torch.manual_seed(0)
    model = Passages().double()
    example = torch.randn(2, 4).double(), torch.randn(4, 4).double()
    runtime = split_by_layers(model, 2, example).runtime()
    plain, batch = copy.deepcopy(model), (torch.randn(5, 4).double(), torch.randn(10, 4).double())
    found, wanted = runtime.step(*batch, n_microbatches=n), plain(*batch)
    wanted.backward()
    assert abs(found.loss - wanted) < EXACT
    assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT


class Centred(nn.Module):
    """Rows that are packed are normalised over all of the batch, before most of the parameters."""

    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x, crops):
        crops = self.first(crops)
        crops = (crops - crops.mean(0)) / crops.std(0)
        return (self.rest(crops).unflatten(0, (len(x), -1)).mean(1) - x).square().mean()


def test_packed_rows_that_depend_on_one_another_early_are_refused():
    torch.manual_seed(0)
    runtime = Runtime(*make(Centred(), (torch.randn(2, 4), torch.randn(6, 4)), {}, n_stages=2))
    with pytest.raises(InputError, match="rows of a batch of Centred depend on one another"):
        runtime.step(torch.randn(4, 4), torch.randn(12, 4), n_microbatches=2)
