"""Losses that transformers models compute themselves, over labels of which some do not count."""

import logging

import pytest
import torch

import autopipe

transformers = pytest.importorskip("transformers")


def llama() -> torch.nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=50,
        )
    )


def gpt2() -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=50,
            n_layer=2,
            n_embd=16,
            n_head=2,
            n_positions=16,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def bert() -> torch.nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def t5() -> torch.nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=16,
            d_ff=32,
            d_kv=8,
            num_layers=2,
            num_heads=2,
            vocab_size=50,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


@pytest.mark.parametrize("make", [llama, gpt2, bert, t5])
def test_padded_labels_weigh_by_those_that_count(make):
    model = make().double()
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
