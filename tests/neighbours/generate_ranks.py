"""One rank that generates from split models: ``python generate_ranks.py CHECK …``; alone without a group."""

import functools
import os
import sys

import pytest
import torch
import torch.distributed as dist
import transformers
from generating_models import ENCODERS, make, prompts, sounds
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import autopipe

N_NEW = 6


class Stop(StoppingCriteria):
    """Ends a sequence at an odd token in its last place, after some."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] % 5 == 0) & (input_ids.shape[1] > 9)


class Odd(LogitsProcessor):
    """Makes every other token less likely."""

    def __call__(self, input_ids, scores):
        return torch.cat([scores[:, ::2] - 3, scores[:, 1::2]], 1)


PROCESSORS = {
    "repetition_penalty": 1.2,
    "no_repeat_ngram_size": 2,
    "min_new_tokens": 3,
    "forced_bos_token_id": 7,
    "forced_eos_token_id": 2,
    "bad_words_ids": [[5], [6, 7]],
    "suppress_tokens": [9, 11],
    "exponential_decay_length_penalty": (3, 1.1),
    "logits_processor": LogitsProcessorList([Odd()]),
}
WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.7},
    "beams that sample": {"num_beams": 2, "do_sample": True},
    "criteria": {"stopping_criteria": StoppingCriteriaList([Stop()]), "repetition_penalty": 1.3},
    "processors": PROCESSORS,
    "processors of beams": {**PROCESSORS, "num_beams": 2},
    "draws": {"do_sample": True, "typical_p": 0.9, "min_p": 0.01, "epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
    "no cache": {"use_cache": False},
    "chunks": {"prefill_chunk_size": 3},
    "ends": {"eos_token_id": [*range(3, 61, 3)], "min_new_tokens": 2, "no_repeat_ngram_size": 2},
    "ends of beams": {"eos_token_id": [*range(3, 61, 3)], "num_beams": 3, "early_stopping": True},
    "begun": {"decoder_input_ids": torch.tensor([[2, 9, 8]] * 5)},
}


def given(family, n=5):
    """What a model of this family generates from."""
    ids, mask = prompts(n)
    return (
        {"input_features": sounds(n)} if family == "whisper" else {"input_ids": ids, "attention_mask": mask}
    )


def split(model, **options):
    n_ranks = int(os.environ.get("WORLD_SIZE", "2"))
    inputs = {**given(model.config.model_type, 4), "labels": prompts(4)[0]}
    options = {
        "n_stages": n_ranks,
        "n_microbatches": 2,
        "costs": "estimated",
        "balance": "uniform",
        **options,
    }
    return autopipe.split(model, options.pop("n_stages"), (), inputs, **options)


def generated(run, way, **inputs):
    """The tokens of ``run``, with the model's own generator seeded."""
    torch.manual_seed(5)
    return run(**inputs, max_new_tokens=N_NEW, **WAYS[way])


def same_tokens(family, *ways):
    """In every way the pipe generates what the model does, before training and after it."""
    plain, inputs = make(family), given(family)
    expected, draws = {}, {}
    for way in ways:
        expected[way], draws[way] = generated(plain.generate, way, **inputs), torch.rand(())
    assert len({tuple(row) for row in expected[ways[0]].tolist()}) > 1
    pipe = split(make(family))
    rt = pipe.runtime()
    in_pieces = functools.partial(pipe.generate, n_microbatches=2)
    for way in ways:
        tokens = generated(in_pieces, way, **inputs)
        assert torch.equal(tokens, expected[way]), (way, tokens, expected[way])
        assert torch.rand(()) == draws[way], "the generator is left where the model leaves it"
    assert torch.equal(generated(pipe.generate, ways[0], **inputs), expected[ways[0]])
    trains(pipe, rt, plain, ways[0], inputs)


def families(*names):
    """Of each family, in the ways that go by other code in it."""
    for name in names:
        same_tokens(name, "sampling" if name in ENCODERS else "greedy", "beams", "processors")


def trains(pipe, rt, plain, way, inputs):
    """Tokens are of the weights as they are now, and generating leaves training as it was."""
    family = plain.config.model_type
    batch = {**given(family, 4), "labels": prompts(4)[0]}
    optimizer, own = (
        torch.optim.SGD(x.parameters(), 0.1 if family in ENCODERS else 1.0) for x in (rt, plain)
    )
    for _ in range(2):
        rt.step(**batch)
        plain(**batch).loss.backward()
        for one in (optimizer, own):
            one.step()
            one.zero_grad()
        expected = generated(plain.generate, way, **inputs)
        assert torch.equal(generated(pipe.generate, way, **inputs), expected)
    merged = pipe.merge()
    for (name, a), b in zip(merged.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4, msg=name)


class Heard(BaseStreamer):
    """What a streamer was given: the prompt, then token by token."""

    def __init__(self):
        self.tokens, self.has_ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.has_ended = True


def one_prompt(family):
    """A single prompt goes in one piece, by position too; the rank that chooses streams its tokens."""
    ids = prompts()[0][:1]
    plain = make(family)
    expected = plain.generate(ids, max_new_tokens=N_NEW)
    pipe = split(make(family))
    pipe.runtime()
    heard = Heard()
    assert torch.equal(pipe.generate(ids, max_new_tokens=N_NEW, streamer=heard), expected)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    assert (heard.tokens, heard.has_ended) == ((expected[0].tolist(), True) if is_last else ([], False))
    config = transformers.GenerationConfig(max_new_tokens=N_NEW, pad_token_id=0)
    assert torch.equal(pipe.generate(ids, generation_config=config), expected)
    rt = pipe.runtime(feed=0)
    told = {"inputs": ids, "streamer": Heard()} if dist.get_rank() == 0 else {}
    with pytest.raises(autopipe.StepError, match="more than tensors and plain values"):
        pipe.generate(**told)
    del rt


class Breaks(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] > 9:
            raise RuntimeError("the user's own fault")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def around():
    """Other cuts, released weights, feeding, errors of the user's own, and what is refused."""
    ids, mask = prompts()
    inputs = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": N_NEW}
    plain = make("llama")
    expected = plain.generate(**inputs)
    for plan, options in (
        ({"pin": {"model.norm": 0}}, {}),
        ({"pin": {"model.layers.3": 0}}, {"release": True}),
        ({"n_stages": 4, "n_ranks": 2, "schedule": "zbv"}, {}),
    ):
        pipe = split(make("llama"), **plan)
        pipe.runtime(**options)
        found = pipe.generate(**inputs, n_microbatches=3)
        assert torch.equal(found, expected), (plan, found, expected)
    pipe = split(make("llama"))
    rank = dist.get_rank()
    rt = pipe.runtime(feed=0)
    assert torch.equal(pipe.generate(**(inputs if rank == 0 else {})), expected)
    rt = pipe.runtime()
    seen = transformers.GenerationConfig(output_hidden_states=True, return_dict_in_generate=True)
    for odd, message in (
        ({"guidance_scale": 1.5}, "does not take guidance_scale"),
        ({"generation_config": seen}, "does not take output_hidden_states"),
        ({"assistant_model": plain}, "does not take assistant_model"),
        ({"input_ids": ids + rank, "attention_mask": mask}, "was given different prompts"),
    ):
        with pytest.raises(autopipe.AutopipeError, match=message):
            pipe.generate(**{**inputs, **odd})
    for odd, message in (  # on one rank alone
        ({"guidance_scale": 1.5}, "does not take guidance_scale"),
        ({"max_new_tokens": N_NEW + 1}, "another with other values"),
        ({"n_microbatches": 0}, "n_microbatches is 0"),
    ):
        with pytest.raises(autopipe.InputError, match=message):
            pipe.generate(**{**inputs, **(odd if rank else {})})
    kind = RuntimeError if rank == 1 else autopipe.StepError
    with pytest.raises(kind, match="the user's own fault"):
        pipe.generate(**inputs, stopping_criteria=StoppingCriteriaList([Breaks()]))
    with pytest.raises(ValueError if rank == 1 else autopipe.StepError, match="not used by the model"):
        pipe.generate(**inputs, max_tokens=3)
    whole = {**inputs, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    found, own = pipe.generate(**whole), plain.generate(**whole)
    assert type(found) is type(own)
    assert torch.equal(found.sequences, expected)
    for name in ("scores", "logits"):
        for a, b in zip(found[name], own[name], strict=True):
            torch.testing.assert_close(a, b)
    rt.step(input_ids=ids, attention_mask=mask, labels=ids)
    with pytest.raises(autopipe.StaleError, match=r"pipe\.generate"):
        pipe.model.generate(**inputs)
    assert torch.equal(pipe.generate(**inputs), expected)
    with pytest.raises(autopipe.StepError, match=r"is at generate.*begins step|begins step.*is at generate"):
        pipe.generate(**inputs) if rank else rt.step(input_ids=ids, attention_mask=mask, labels=ids)


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](*sys.argv[2:])
