"""FLOPs are those a hand counts: expert products, attention under its mask, recurrences, custom operators."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError
from autopipe.measure import count_flops, device, estimate, flops
from autopipe.measure.kernel_counts import Counter
from autopipe.measure.meta_attention import FusedAttention


def counted(run) -> Counter:
    with Counter() as counter:
        run()
    return counter


B, S, V, H = 8, 8, 512, 64
"""Few enough keys that all pairs in place of the causal half are under 2% of everything."""


def mixtral():
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=V, hidden_size=H, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    layer = H * (64 + 32 + 32 + 64) + 2 * 3 * H * 128 + H * 4
    return config, 2 * layer + H * V, 16 + 16


def qwen3_moe():
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=V, hidden_size=H, intermediate_size=128, moe_intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=3,
    )  # fmt: skip
    layer = H * (64 + 32 + 32 + 64) + 3 * 3 * H * 96 + H * 8
    return config, 2 * layer + H * V, 16 + 16


def deepseek_v3():
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        vocab_size=V, hidden_size=H, intermediate_size=128, moe_intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2,
        n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16, n_group=2, topk_group=1,
    )  # fmt: skip
    latent = H * 32 + 32 * 4 * 24 + H * (16 + 8) + 16 * 4 * 32 + 4 * 16 * H
    experts = 2 * 3 * H * 48 + 3 * H * 48 + H * 8
    return config, 2 * latent + 3 * H * 128 + experts + H * V, 24 + 16


def gpt_oss():
    from transformers import GptOssConfig

    config = GptOssConfig(
        vocab_size=V, hidden_size=H, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    layer = H * (64 + 32 + 32 + 64) + 2 * (H * 2 * 96 + 96 * H) + H * 8
    return config, 2 * layer + H * V, 16 + 16


@pytest.mark.parametrize("make", [mixtral, qwen3_moe, deepseek_v3, gpt_oss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mixtures_of_experts_count_as_by_hand(make, dtype):
    from transformers import AutoModelForCausalLM

    config, products, widths = make()
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        ids = torch.zeros(B, S, dtype=torch.long)
    table = estimate(autopipe.capture(model, (), {"input_ids": ids, "labels": ids}), device("H200"))
    by_hand = 2 * B * S * products + 2 * 2 * B * 4 * (S * (S + 1) // 2) * widths
    assert table.total(table.costs).flops == pytest.approx(by_hand, rel=0.02)
    assert not [note for note in table.notes if "FLOP" in note]


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_count_the_same_however_they_run(implementation):
    from transformers import AutoModelForCausalLM

    config, products, _ = mixtral()
    config.use_cache = False
    config._experts_implementation = implementation
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, V, (B, S))
    counter = counted(lambda: model(ids))
    assert counter.kernels.flops == pytest.approx(2 * B * S * products, rel=0.02)
    assert not counter.uncounted


def test_grouped_products_forward_and_backward():
    rows, weight = torch.randn(12, 16, dtype=torch.bfloat16), torch.randn(3, 16, 32, dtype=torch.bfloat16)
    rows.requires_grad_(), weight.requires_grad_()
    offsets = torch.tensor([4, 4, 12], dtype=torch.int32)
    with Counter() as counter:
        out = F.grouped_mm(rows, weight, offs=offsets)
        forward = counter.kernels.flops
        out.backward(torch.ones_like(out))
    assert forward == 2 * 12 * 16 * 32
    assert counter.kernels.flops == 3 * forward


@pytest.mark.parametrize(("n", "m"), [(16, 16), (16, 24), (24, 16)])
def test_causal_attention_counts_the_pairs_it_lets_through(n, m):
    q, k = torch.randn(2, 3, n, 8, requires_grad=True), torch.randn(2, 3, m, 8, requires_grad=True)
    pairs = sum(min(i + 1, m) for i in range(n))
    for is_causal, visible in ((True, pairs), (False, n * m)):
        with Counter() as counter:
            out = F.scaled_dot_product_attention(q, k, k, is_causal=is_causal)
            forward = counter.kernels.flops
            out.sum().backward()
        assert forward == 2 * 2 * 3 * visible * (8 + 8)
        assert counter.kernels.flops == forward * 7 // 2


@pytest.mark.parametrize(
    ("kind", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16), ("cuda", torch.float32)]
)
def test_causal_attention_on_paper_is_that_of_the_kernel_it_would_be(kind, dtype):
    q = torch.empty(2, 4, 64, 16, device="meta", dtype=dtype)
    kv = torch.empty(2, 2, 64, 16, device="meta", dtype=dtype)
    with FusedAttention(kind), Counter() as counter:
        F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=True)
    assert counter.kernels.flops == 2 * 2 * 4 * (64 * 65 // 2) * 32


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_count_their_products(kind):
    layer = kind(16, 32, batch_first=True)
    x = torch.randn(4, 10, 16)
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    counter = counted(lambda: layer(x))
    assert counter.kernels.flops == 2 * 4 * 10 * gates * 32 * (16 + 32)


def test_other_products():
    x, y = torch.randn(8, 8), torch.randn(8)
    assert counted(lambda: x @ y).kernels.flops == 2 * 64
    assert counted(lambda: y @ y).kernels.flops == 16
    assert (
        counted(lambda: torch.cdist(torch.randn(30, 5), torch.randn(40, 5))).kernels.flops == 2 * 30 * 40 * 5
    )
    assert counted(lambda: nn.Bilinear(3, 4, 5)(torch.randn(7, 3), torch.randn(7, 4))).kernels.flops > 0
    n = counted(lambda: torch.fft.fft(torch.randn(64, dtype=torch.complex64))).kernels.flops
    assert n == round(5 * 64 * math.log2(64))


def test_elementwise_kernels_are_counted_as_none():
    x = torch.randn(4, 8, 16, 16, requires_grad=True)
    with Counter() as counter:
        y = F.interpolate(F.gelu(F.layer_norm(x, (16,))), scale_factor=2, mode="bilinear")
        F.softmax(F.silu(y).flatten(1), -1).rsqrt().cumsum(-1).sum().backward()
    assert counter.kernels.flops == 0
    assert not counter.uncounted


@torch.library.custom_op("autopipe_tests::mix", mutates_args=())
def mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@mix.register_fake
def _(x, weight):
    return x.new_empty(x.shape[0], weight.shape[1])


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        return torch.relu(mix(x.detach(), self.weight.detach())) + x + self.weight.sum()


def test_what_has_no_formula_is_told_and_can_be_given_one(caplog):
    model = nn.Sequential(nn.Linear(16, 16), Mixing(), nn.Linear(16, 4))
    x = torch.randn(8, 16)
    with caplog.at_level(logging.WARNING):
        plan = autopipe.plan(model, 2, (x,), costs="estimated", n_microbatches=1)
    assert "calls, at least" in plan.settings["uncounted"]
    assert "autopipe_tests.mix" in plan.settings["uncounted"]
    assert "have no FLOP count" in caplog.text
    before = estimate(autopipe.capture(model, (x,)))
    count_flops(mix, lambda x, weight, out: 2 * x.numel() * weight.shape[1])
    try:
        after = estimate(autopipe.capture(model, (x,)))
    finally:
        flops._given.clear()
    assert not [note for note in after.notes if "FLOP" in note]
    assert after.total(after.costs).flops - before.total(before.costs).flops == 2 * 8 * 16 * 16


@pytest.mark.parametrize("op", ["mix", 3, None, nn.Linear])
def test_a_formula_is_for_an_operator(op):
    with pytest.raises(InputError):
        count_flops(op, lambda out: 0)


@pytest.mark.parametrize(
    ("formula", "says"),
    [
        (lambda x, weight, out: -1, "says -1"),
        (lambda x, weight, out: float("nan"), "says nan"),
        (lambda x, weight, out: 10**30, "says 1000"),
        (lambda x, weight, out: 2.5, "says 2.5"),
        (lambda x, weight, out: True, "says True"),
        (lambda x, weight, out: None, "says None"),
        (lambda x, out: 1, "failed with TypeError"),
    ],
)
def test_a_formula_that_says_no_count_is_told(formula, says):
    x = torch.randn(8, 16)
    captured = autopipe.capture(nn.Sequential(nn.Linear(16, 16), Mixing()), (x,))
    count_flops(mix, formula)
    try:
        with pytest.raises(InputError, match=f"autopipe_tests::mix {says}"):
            estimate(captured)
        with pytest.raises(InputError, match=f"autopipe_tests::mix {says}"):
            autopipe.profile(captured, progress=False)
    finally:
        flops._given.clear()


def test_a_formula_may_say_it_in_floats():
    captured = autopipe.capture(Mixing(), (torch.randn(8, 16),))
    count_flops(mix, lambda x, weight, out: 2e3)
    try:
        found = estimate(captured)
    finally:
        flops._given.clear()
    assert found.total(found.costs).flops == 2000
