"""Adapters over an 8-bit base: gradients are those of the plain model."""

import pytest
import torch

import autopipe

peft = pytest.importorskip("peft", reason="needs the peft extra")
bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")


def quantised():
    from generating_models import make

    base = make("llama").train()
    for layer in base.model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, linear in [*parent.named_children()]:
                if isinstance(linear, torch.nn.Linear):
                    new = bitsandbytes.nn.Linear8bitLt(
                        linear.in_features, linear.out_features, bias=False, has_fp16_weights=False
                    )
                    new.weight = bitsandbytes.nn.Int8Params(
                        linear.weight.data, requires_grad=False, has_fp16_weights=False
                    )
                    setattr(parent, name, new)
    base.is_loaded_in_8bit = True
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(base.to("cpu"), config)


@pytest.mark.filterwarnings("ignore")
def test_gradients_of_adapters():
    model = quantised()
    ids = torch.randint(3, 61, (4, 7), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    pipe = autopipe.split(
        model, 2, (), {"input_ids": ids, "labels": ids}, n_microbatches=2, costs="estimated"
    )
    rt = pipe.runtime()
    rt.step(input_ids=ids, labels=ids)
    found = {n: p.grad for n, p in rt.named_parameters() if p.grad is not None}
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)
    assert len(expected) == 4 * 2 * 2
