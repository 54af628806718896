"""The pipe makes the attention calls that the model makes, whatever the example's mask was."""

import dataclasses

import pytest
import torch

import autopipe
from autopipe.tracing import capture
from benchmarks.same.calls import attention_calls
from benchmarks.same.models import CASES
from benchmarks.same.paired import crossing_masks


@pytest.mark.parametrize("name", ["Llama", "BERT", "Gemma3"])
@pytest.mark.parametrize("example", ["none", "ones", "ragged"])
def test_attention_calls_are_the_models(name: str, example: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model = case.make(64, 4).eval()
    captured = capture(model, kwargs=case.batch(3, 64, example))
    for mask in ("none",) if example == "none" else ("ones", "ragged"):
        given = case.batch(3, 64, mask)
        with attention_calls() as expected:
            plain = model(**given).logits
        with attention_calls() as found:
            ours = captured(**given).logits
        assert found == expected
        torch.testing.assert_close(ours, plain)


def test_no_mask_crosses_a_boundary_that_the_model_does_without() -> None:
    case = CASES["Llama"]
    model, given = case.make(64, 4), case.batch(2, 48, "none")
    pipe = autopipe.split(model, 2, kwargs=given, costs="estimated")
    with attention_calls() as calls:
        model(**given)
    assert [(call.mask, call.scores) for call in calls] == [(None, (48, 48))] * 4
    assert crossing_masks(pipe, calls) == 0
    # were scores as large as the hidden states, which do cross, they would be found
    wide = dataclasses.replace(calls[0], query=(2, 4, 48, 16), key=(2, 2, 64, 16))
    assert crossing_masks(pipe, [wide]) > 0
