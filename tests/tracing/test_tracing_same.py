"""The pipe makes the attention calls that the model makes, whatever the example's mask was."""

import pytest
import torch

import autopipe
from autopipe.tracing import capture
from benchmarks.same.calls import attention_calls
from benchmarks.same.models import CASES


@pytest.mark.parametrize("name", ["Llama", "BERT", "Gemma3"])
@pytest.mark.parametrize("example", ["none", "ones", "ragged"])
def test_attention_calls_are_the_models(name: str, example: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model = case.make(64, 4).eval()
    captured = capture(model, kwargs=case.batch(3, 64, example, 64))
    for mask in ("none",) if example == "none" else ("ones", "ragged"):
        given = case.batch(3, 64, mask, 64)
        with attention_calls() as expected:
            plain = model(**given).logits
        with attention_calls() as found:
            ours = captured(**given).logits
        assert found == expected
        torch.testing.assert_close(ours, plain)


def test_no_mask_crosses_a_boundary_that_the_model_does_without() -> None:
    case = CASES["Llama"]
    pipe = autopipe.split(case.make(64, 4), 2, kwargs=case.batch(2, 64, "none", 64))
    assert not [n for stage in pipe.stages for n in stage.outputs if "mask" in n]
