"""A forward that counts its calls: a step is one call, whatever its number of microbatches."""

import copy

import pytest
import torch
from counting_models import MODELS, batch, check_steps, counts, model_and_twin
from crossed import crossed
from splitting import split_by_layers
from torch import nn

from autopipe.errors import CaptureError, InputError
from autopipe.exports.tensor_chain import relays
from autopipe.tracing import capture


@crossed(name=MODELS, cut=[(2, 1), (2, 4), (3, 4)])
def test_a_step_counts_once(name, cut, caplog):
    n_stages, n_microbatches = cut
    model, twin = model_and_twin(name)
    pipe = split_by_layers(model, n_stages, (batch(0),), n_microbatches=n_microbatches)
    assert counts(model) == counts(twin)  # a capture counts none
    check_steps(pipe.runtime(), model, twin)
    for seed in range(3):
        torch.testing.assert_close(pipe(batch(seed)), twin(batch(seed)))
    assert counts(model) == counts(twin)
    assert not caplog.records


@pytest.mark.parametrize("name", MODELS)
def test_stages_that_count_are_verified(name):
    model, twin = model_and_twin(name)
    pipe = split_by_layers(model, 2, (batch(0),), n_microbatches=2)
    assert pipe.verify()
    assert counts(model) == counts(twin)


class Annealed(nn.Module):
    """Layers, and a factor that falls with each call at a rate that is held beside the count."""

    def __init__(self):
        super().__init__()
        self.layers, self.state = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))), {"n": 0, "rate": 0.9}

    def forward(self, x):
        self.state["n"] += 1
        return self.layers(x) * self.state["rate"] ** self.state["n"]


def test_what_else_a_container_holds_is_looked_at_and_a_count_may_be_set():
    model, x = Annealed(), torch.randn(4, 4)
    twin = copy.deepcopy(model)
    pipe = split_by_layers(model, 2, (x,))
    for change in ({"rate": 0.7}, {"n": 0}, {"n": 5, "rate": 0.8}):
        for each in (model, twin):
            each.state.update(change)
        for _ in range(2):
            torch.testing.assert_close(pipe(x), twin(x))
        assert model.state == twin.state


def test_a_model_without_weights_counts():
    with torch.device("meta"):
        model, x = MODELS["Warming"](), torch.empty(8, 4)
    assert {*capture(model, (x,)).inputs.held} == {"step", "beta"}


def test_stages_of_torch_do_not_count():
    model, _ = model_and_twin("EveryOther")
    pipe = split_by_layers(model, 2, (batch(0),))
    with pytest.raises(InputError, match=r"self\.total_it"):
        relays(pipe.graph, pipe.stages, *pipe.graph.example)


class OfData(nn.Module):
    """Averages what it computes in a plain number, and goes by it."""

    def __init__(self):
        super().__init__()
        self.layers, self.mean = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 0.0

    def forward(self, x):
        y = self.layers(x)
        self.mean = 0.9 * self.mean + 0.1 * y.mean().item()
        return y * (1 + self.mean)


def test_a_number_made_of_data_is_no_count():
    with pytest.raises(CaptureError, match="mean"):
        split_by_layers(OfData(), 2, (torch.randn(4, 4),))


class CountedFromTheFirst(nn.Module):
    def __init__(self, **begun):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        vars(self).update(begun)

    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return self.b(self.a(x).tanh())


def test_a_count_that_the_first_call_makes_is_refused_with_where_it_belongs():
    x = torch.randn(4, 4)
    with pytest.raises(CaptureError, match=r"calls .* is None, 1, 2 .*; have __init__ set it"):
        capture(CountedFromTheFirst(), (x,))
    capture(CountedFromTheFirst(calls=0), (x,))
