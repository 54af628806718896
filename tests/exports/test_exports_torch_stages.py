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
@pytest.mark.parametrize("is_spread", [True, False])
def test_layers_in_a_row_are_the_model(name, n_stages, is_spread):
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
        value = layer(*value) if is_spread and isinstance(value, tuple) else layer(value)
    output = value
    loss(output, target).backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, gradients[n], rtol=1e-12, atol=1e-14)


def test_layers_whose_rows_depend_on_one_another_are_told(caplog):
    model, args, *_ = MODELS["contrastive"]()
    layers = autopipe.split(model, 2, args, costs="estimated").to_layers()
    assert "rows of a batch of Contrastive depend on one another" in caplog.text
    value = args[0]
    for layer in layers:
        value = layer(value)
    torch.testing.assert_close(value, model(*args))


class OfAPair(torch.nn.Linear):
    def forward(self, pair):
        return super().forward(pair[0]) * pair[1]


def test_a_model_of_one_tuple_gets_it_whole():
    model, pair = OfAPair(4, 4), (torch.randn(3, 4), torch.randn(3, 4))
    (layer,) = autopipe.split(model, 1, (pair,), costs="estimated").to_layers()
    torch.testing.assert_close(layer(pair), model(pair))
