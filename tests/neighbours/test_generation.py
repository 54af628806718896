"""A split model generates what the model does, token for token, stage by stage."""

import pathlib

import pytest
import torch
from processes import run_ranks

import autopipe

pytest.importorskip("transformers", reason="needs the transformers extra")

SCRIPT = pathlib.Path(__file__).parent / "generate_ranks.py"


@pytest.mark.parametrize(
    ("n_ranks", "families"),
    [
        (2, ["qwen3", "gemma3_text", "falcon"]),
        (3, ["bart"]),
        pytest.param(2, ["mistral", "gemma2", "mixtral", "opt", "bloom", "gpt_neox"], marks=pytest.mark.slow),
        pytest.param(3, ["marian", "pegasus", "whisper"], marks=pytest.mark.slow),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else None,
)
def test_tokens_of_families(n_ranks, families):
    run_ranks(SCRIPT, n_ranks, "families", *families)


def test_tokens_on_two_ranks():
    ways = ("greedy", "sampling", "beams", "beams that sample", "criteria", "no cache", "chunks")
    run_ranks(SCRIPT, 2, "same_tokens", "gpt2", *ways, "ends", "ends of beams", "processors", "draws")


def test_tokens_of_an_encoder_and_a_decoder():
    """The first layer's position bias goes along to the next ranks'; the encoder runs once."""
    ways = ("greedy", "sampling", "beams", "beams that sample", "criteria", "no cache", "begun")
    run_ranks(SCRIPT, 2, "same_tokens", "t5", *ways, "ends of beams", "processors of beams")


def test_one_prompt():
    run_ranks(SCRIPT, 2, "one_prompt", "llama")


def test_tokens_on_four_ranks():
    run_ranks(SCRIPT, 4, "same_tokens", "llama", "greedy", "beams")


def test_what_is_around():
    """Other cuts, released weights, feeding, errors of the user's own, and what is refused."""
    run_ranks(SCRIPT, 2, "around")


def test_alone_it_is_the_model_s_own():
    from generate_ranks import split
    from generating_models import make, prompts

    model = make("llama")
    ids, mask = prompts()
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=3)
    pipe = split(model)
    assert torch.equal(pipe.generate(ids, attention_mask=mask, max_new_tokens=3), expected)
    pipe.runtime()
    assert torch.equal(pipe.generate(ids, attention_mask=mask, max_new_tokens=3), expected)
    plain = autopipe.split(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), 2)
    with pytest.raises(autopipe.AutopipeError, match="no generate method"):
        plain.generate(ids)
