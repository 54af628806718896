"""Masks that code leaves out, as None, where data say so, are there for other data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from autopipe.tracing import capture


def kept(mask: Tensor) -> Tensor | None:
    """The mask, unless all is kept, of which code that is exported is not to go by."""
    if not torch.compiler.is_exporting() and math.isclose(mask.sum().item(), mask.numel()):
        return None
    return mask.unsqueeze(-1)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        shown = kept(mask)
        for layer in self.layers:
            x = torch.tanh(layer(x if shown is None else x * shown))
        return x


def test_a_mask_that_code_leaves_out_unless_it_is_exported_is_recorded_so() -> None:
    """Its function was kept whole, as it gave None on the example, and all other masks were refused."""
    torch.manual_seed(0)
    model = Padded()
    found = capture(model, (torch.randn(2, 6, 4), torch.ones(2, 6)))
    for n, ahead in ((6, 2), (8, 0), (5, 1)):
        x, mask = torch.randn(3, n, 4), torch.ones(3, n)
        mask[0, :ahead] = 0
        torch.testing.assert_close(found(x, mask), model(x, mask))


def test_masks_of_transformers_stay_apart_where_sizes_vary() -> None:
    """What leaves one out by its values and sizes was kept whole for the sizes, which refused all others."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    linear = {f"linear_{k}_head_dim": 8 for k in ("key", "value")}
    heads = {"num_key_value_heads": 1, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2}
    kinds = ["linear_attention", "full_attention"]
    config = transformers.Qwen3_5TextConfig(
        **sizes, **linear, **heads, num_hidden_layers=2, layer_types=kinds, use_cache=False, pad_token_id=0
    )
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForCausalLM(config).eval()
    ids = torch.randint(1, 32, (2, 16))
    found = capture(model, (), {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    for n, ahead in ((16, 3), (24, 0), (24, 5)):
        ids = torch.randint(1, 32, (3, n))
        mask = torch.ones_like(ids)
        mask[0, :ahead] = 0
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=mask).logits
            torch.testing.assert_close(found(input_ids=ids, attention_mask=mask).logits, expected)
