"""FLOPs are those a hand counts: expert products, attention under its mask, recurrences, custom operators."""

from __future__ import annotations

import logging
import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import autopipe
from autopipe.errors import InputError
from autopipe.measure import count_flops, device, estimate, flops
from autopipe.measure.kernel_counts import Counter
from autopipe.measure.meta_attention import FusedAttention
from autopipe.torch_private import COND, CONTROL


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
    assert counted(lambda: F.pdist(torch.randn(30, 5))).kernels.flops == 2 * 30 * 29 // 2 * 5


def test_transforms_of_real_numbers_are_half_of_complex_ones():
    x, whole = torch.randn(3, 64), round(5 * 3 * 64 * math.log2(64))
    assert counted(lambda: torch.fft.fft(x.to(torch.complex64))).kernels.flops == whole
    half = torch.fft.rfft(x)
    assert counted(lambda: torch.fft.rfft(x)).kernels.flops == whole // 2
    assert counted(lambda: torch.fft.irfft(half)).kernels.flops == whole // 2


CONVOLUTIONS = {
    "plain": (F.conv2d, (2, 6, 10, 10), (8, 6, 3, 3), {}, 2 * 2 * 64 * 8 * 6 * 9),
    "in groups": (F.conv2d, (2, 6, 10, 10), (8, 3, 3, 3), {"groups": 2}, 2 * 2 * 64 * 8 * 3 * 9),
    "depthwise": (F.conv1d, (2, 6, 10), (6, 1, 3), {"groups": 6}, 2 * 2 * 8 * 6 * 3),
    "in steps": (F.conv3d, (2, 4, 7, 7, 7), (5, 4, 3, 3, 3), {"stride": 2}, 2 * 2 * 27 * 5 * 4 * 27),
    "transposed": (F.conv_transpose2d, (2, 6, 5, 5), (6, 8, 3, 3), {"stride": 2}, 2 * 2 * 25 * 6 * 8 * 9),
    "transposed in groups": (
        F.conv_transpose2d, (2, 6, 5, 5), (6, 4, 3, 3), {"groups": 2}, 2 * 2 * 25 * 6 * 4 * 9
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_convolutions_count_as_by_hand_forward_and_for_each_gradient(name, device):
    run, size, kernel, options, by_hand = CONVOLUTIONS[name]
    for wanted in ((True, True), (True, False), (False, True)):
        x, weight = (
            torch.ones(n, device=device, requires_grad=g) for n, g in zip((size, kernel), wanted, strict=True)
        )
        with Counter() as counter:
            out = run(x, weight, **options)
            assert counter.kernels.flops == by_hand
            out.backward(torch.ones_like(out))
        assert counter.kernels.flops == counter.kernels.convolution_flops == by_hand * (1 + sum(wanted))


def test_the_gradients_of_a_bilinear_layer_count_as_much_as_its_value():
    layer, x, y = nn.Bilinear(3, 4, 5), torch.randn(7, 3), torch.randn(7, 4)
    with Counter() as counter:
        out = layer(x.requires_grad_(), y.requires_grad_())
        forward = counter.kernels.flops
        out.sum().backward()
    assert forward == 2 * 7 * 5 * 3 * 4
    assert counter.kernels.flops == 4 * forward


class Looped(nn.Module):
    """A layer, a loop over its rows that torch compiles as it is called, a layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        return self.last(CONTROL.scan(lambda carry, row: (carry @ row, carry.clone()), y[0], y)[1])


class Scored(nn.Module):
    """Attention by a function of scores, which on a CPU has no backward."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(16, 16)

    def forward(self, x):
        q = x[:, None].expand(-1, 2, -1, -1)
        return self.last(flex_attention(q, q, q, score_mod=lambda s, b, h, i, j: s - (i - j).abs()).sum(1))


WATCHED = {
    "scan": (Looped, (3, 4, 4), 3 * 2 * 4 * 4 * 4),
    "flex_attention": (Scored, (2, 16, 16), 2 * 2 * 2 * 16 * 16 * (16 + 16)),
}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", WATCHED)
def test_operators_over_functions_count_what_these_run_and_the_model_goes_on(name):
    kind, size, by_hand = WATCHED[name]
    model, x = kind(), torch.randn(size)
    expected = model(x)
    captured = autopipe.capture(model, (x,))
    measured = autopipe.profile(captured, progress=False, min_s=0.0, min_passes=2)
    for table in (estimate(captured, device("H200")), measured):
        assert table[name].flops == by_hand
        assert not [note for note in table.notes if name in note or "FLOP" in note]
    assert measured[name].source == "measured"
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()


def test_branches_and_loops_count_what_they_run():
    x = torch.randn(4, 4)
    once = counted(lambda: x @ x).kernels.flops
    branch = counted(lambda: getattr(*COND)(x.sum() > 1e9, lambda a: (a @ a @ a,), lambda a: (a @ a,), (x,)))
    assert (branch.kernels.flops, branch.uncounted) == (once, {})


def test_ops_that_come_whole_without_gradients_count_as_their_parts():
    layer, q = nn.Linear(8, 4), torch.randn(1, 2, 6, 4)
    with torch.inference_mode():
        assert counted(lambda: layer(torch.ones(3, 8))).kernels.flops == 2 * 3 * 8 * 4
        assert counted(lambda: torch.matmul(q, q.transpose(-1, -2))).kernels.flops == 2 * 2 * 6 * 6 * 4
        found = counted(lambda: F.scaled_dot_product_attention(q, q, q))
    assert (found.kernels.flops, found.uncounted) == (2 * 2 * 6 * 6 * 8, {})


ELEMENTWISE = {
    "norms": lambda x: F.normalize(x) * torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    "gammas": lambda x: torch.lgamma(x.abs() + 1) + torch.digamma(x.abs() + 1),
    "cross": lambda x: torch.linalg.cross(x[..., :3], x[..., 1:4]),
    "roots": lambda x: x.abs().sqrt() + (x.abs() + 1).rsqrt(),
    "frequencies": lambda x: x * torch.fft.fftshift(torch.fft.fftfreq(16)),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_what_sounds_like_products_and_is_none_is_not_told_as_uncounted(name):
    x = torch.randn(4, 8, 16, 16, requires_grad=True)
    with Counter() as counter:
        ELEMENTWISE[name](x).sum().backward()
    assert (counter.kernels.flops, counter.uncounted) == (0, {})


FACTORED = {
    "qr": torch.linalg.qr,
    "raw qr": torch.geqrf,
    "reflections": lambda a: torch.orgqr(a, a[0]),
    "cholesky": torch.linalg.cholesky,
    "solve": lambda a: torch.linalg.solve(a, a),
    "svd": torch.linalg.svdvals,
    "eigenvalues": torch.linalg.eigvalsh,
    "inverse": torch.linalg.inv,
    "determinant": torch.linalg.slogdet,
    "exponential": torch.matrix_exp,
    "least squares": lambda a: torch.linalg.lstsq(a, a),
}


@pytest.mark.parametrize("name", FACTORED)
def test_factorizations_have_no_formula_and_are_told(name):
    assert counted(lambda: FACTORED[name](3 * torch.eye(6))).uncounted


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


@torch.library.custom_op("autopipe_tests::only_with_data", mutates_args=())
def only_with_data(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum()


class WithData(nn.Module):
    def forward(self, x):
        return only_with_data(x.detach()) + x


def test_what_cannot_run_without_data_is_told_by_the_plan(caplog):
    model = nn.Sequential(nn.Linear(16, 16), WithData(), nn.Linear(16, 4))
    with caplog.at_level(logging.WARNING):
        plan = autopipe.plan(model, 2, (torch.randn(8, 16),), costs="estimated", n_microbatches=1)
    assert re.match(r"1 op could not run without data, .*: \w+; the notes", plan.settings["uncounted"])
    assert "could not run without data" in caplog.text


class Logging(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = self.b(self.a(x))
        return x, x.mean().item()


def test_numbers_that_are_not_there_without_data_are_no_guesses(caplog):
    with caplog.at_level(logging.WARNING):
        plan = autopipe.plan(Logging(), 2, (torch.randn(8, 16),), costs="estimated", n_microbatches=1)
    assert "uncounted" not in plan.settings
    assert "without data" not in caplog.text


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
