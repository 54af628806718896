"""Losses that transformers models compute themselves, over labels of which some do not count."""

import logging

import pytest
import torch

import autopipe

transformers = pytest.importorskip("transformers")


SMALL = {
    "Llama": {"intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1},
    "GPT2": {"n_head": 2, "n_positions": 16, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Bert": {
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "T5": {
        "d_ff": 32,
        "d_kv": 8,
        "num_heads": 2,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "num_decoder_layers": 2,
    },
}
HEADS = {
    "Llama": "LlamaForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Bert": "BertForMaskedLM",
    "T5": "T5ForConditionalGeneration",
}


@pytest.mark.parametrize("family", SMALL)
def test_padded_labels_weigh_by_those_that_count(family):
    config = getattr(transformers, f"{family}Config")(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, bos_token_id=0, eos_token_id=0, **SMALL[family]
    )
    model = getattr(transformers, HEADS[family])(config).double()
    ids = torch.randint(1, 50, (6, 10))
    mask = (torch.arange(10) < torch.tensor([10, 3, 9, 2, 10, 4])[:, None]).long()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    pipe = autopipe.split(model, 2, kwargs=example, n_microbatches=4, costs="estimated")
    loss = model(**batch).loss
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    got = pipe.runtime().step(**batch).loss
    assert abs(got.item() - loss.item()) < 1e-6
    worst = max(float((p.grad - expected[n]).abs().max()) for n, p in model.named_parameters())
    assert worst < 1e-7 * max(float(g.abs().max()) for g in expected.values())


class MadeLabels(torch.nn.Module):
    """Its labels come out of a module, so that no count can be read off the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.codes, self.body = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)

    def forward(self, x):
        return torch.nn.functional.cross_entropy(self.body(x), self.codes(x).argmax(-1))


def test_a_loss_that_cannot_be_weighed_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        autopipe.split(MadeLabels(), 1, (torch.randn(4, 4),), costs="estimated").runtime()
    assert "made inside the model" in caplog.text
    assert "loss_weight" in caplog.text
