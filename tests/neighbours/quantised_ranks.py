"""Adapters over a quantised base: ``quantised_ranks.py KIND FOLDER`` alone saves what the plain loop reaches.

As a rank it trains the split model and holds the adapters it saved against those.
"""

import os
import pathlib
import sys
import warnings

import peft
import torch
from causal_models import make
from safetensors.torch import load_file
from torch import nn

import autopipe
from autopipe.neighbours.adapters import save_adapters

IS_PLAIN = "RANK" not in os.environ


class Int8Linear(nn.Linear):
    """Whole numbers, and a scale for each row that is noted beside them until the first call takes it."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        numbers = (linear.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.weight.scale, self.taken = scale, None

    def forward(self, x):
        if self.weight.scale is not None:
            self.taken, self.weight.scale = self.weight.scale, None
        return nn.functional.linear(x, self.weight * self.taken)


def replace(model, make_layer):
    for parent in (p for layer in model.model.layers for p in (layer.self_attn, layer.mlp)):
        for name, linear in [*parent.named_children()]:
            if isinstance(linear, nn.Linear):
                setattr(parent, name, make_layer(linear))


def by_numbers(model):
    replace(model, Int8Linear)


def by_bitsandbytes(model):
    import bitsandbytes

    def made(linear):
        sizes = linear.in_features, linear.out_features
        new = bitsandbytes.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
        new.weight = bitsandbytes.nn.Int8Params(
            linear.weight.data, requires_grad=False, has_fp16_weights=False
        )
        return new

    replace(model, made)
    model.is_loaded_in_8bit = True
    model.to("cpu")


def by_torchao(model):
    import torchao

    torchao.quantize_(model.model.layers, torchao.quantization.Int8WeightOnlyConfig())


def adapted(kind):
    base = make("llama").train()
    {"numbers": by_numbers, "bitsandbytes": by_bitsandbytes, "torchao": by_torchao}[kind](base)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, config)


def batches():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 61, (4, 7), generator=generator) for _ in range(3)]


def plainly(kind, folder):
    model = adapted(kind)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for ids in batches():
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "plain")


def split(kind, folder):
    model, ids = adapted(kind), batches()[0]
    inputs = {"input_ids": ids, "labels": ids}
    pipe = autopipe.split(model, 2, (), inputs, n_microbatches=2, costs="estimated")
    rt = pipe.runtime()
    optimizer = torch.optim.SGD([p for p in rt.parameters() if p.requires_grad], 0.1)
    for ids in batches():
        rt.step(input_ids=ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()
    save_adapters(rt, folder / "split")
    if rt.rank == 0:
        found, expected = (
            load_file(folder / way / "adapter_model.safetensors") for way in ("split", "plain")
        )
        assert len(expected) == 4 * 2 * 2
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-3)
        start = peft.get_peft_model_state_dict(adapted(kind))
        assert max(float((found[n] - start[n]).abs().max()) for n in found) > 1e-3


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    (plainly if IS_PLAIN else split)(sys.argv[1], pathlib.Path(sys.argv[2]))
