"""Splits under torch's own schedules: losses and trained weights equal the plain model's."""

import pathlib

import pytest
import torch
from exports_models import MODELS
from processes import run_ranks

import autopipe
from autopipe.errors import InputError

SCRIPT = pathlib.Path(__file__).parent / "torch_stages_ranks.py"


@pytest.mark.parametrize(
    ("model", "schedules", "n_ranks"),
    [
        ("skips", ("1f1b", "zero-bubble", "dualpipev"), 2),
        ("padded", ("interleaved", "looped-bfs", "zbv", "file"), 2),
        ("padded", ("gpipe",), 4),
    ],
)
def test_torchs_schedules_train_a_split_exactly(model, schedules, n_ranks):
    run_ranks(SCRIPT, n_ranks, model, *schedules)


def test_what_torchs_stages_cannot_do_is_refused():
    run_ranks(SCRIPT, 2, "refusals")


def test_without_a_process_group_there_are_no_torch_stages():
    model, args, kwargs, *_ = MODELS["skips"]()
    pipe = autopipe.split(model, 2, args, kwargs, costs="estimated")
    with pytest.raises(InputError, match="init_process_group"):
        pipe.to_torch_stages()


@pytest.mark.parametrize("name", ["skips", "padded"])
@pytest.mark.parametrize("n_stages", [1, 3, 5])
def test_layers_in_a_row_are_the_model(name, n_stages):
    model, args, kwargs, loss, target = MODELS[name]()
    expected = model(*args, **kwargs)
    loss(expected, target).backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    pipe = autopipe.split(model, n_stages, args, kwargs, costs="estimated", balance="parameters")
    before = torch.get_rng_state()
    layers = pipe.to_layers()
    assert torch.equal(before, torch.get_rng_state())
    value = args
    for layer in layers:
        value = layer(*value)
        value = value if isinstance(value, tuple) and layer is not layers[-1] else (value,)
    (output,) = value
    loss(output, target).backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[n], rtol=1e-12, atol=1e-14)
