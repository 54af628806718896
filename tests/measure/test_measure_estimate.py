"""Estimates: counts worked out by hand, models without data, rooflines and their fit, device descriptions."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from measure_models import Net, Stack, captured, ids
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError, StoreError
from autopipe.hardware import Device
from autopipe.measure import (
    DEVICES,
    GUESSED,
    LINKS,
    Efficiency,
    described,
    device,
    estimate,
    fit,
    link,
    profile,
)
from autopipe.measure.efficiency import seconds
from autopipe.measure.kernel_counts import Counter, Kernels, Saved
from autopipe.tracing import Capture

PLAIN = Device("plain", flops_s={"float32": 1e9}, bandwidth_bytes_s=1e9, launch_s=1e-6)
PERFECT = Efficiency(matrix=1.0, memory=1.0)


def test_a_block_by_hand() -> None:
    capture = captured(Stack(2).train(), torch.ones(4, 16))
    table = estimate(capture, PLAIN, efficiency=PERFECT)
    block = table[capture.ops.compute[1].name]
    flops = 2 * 2 * 4 * 16 * 64
    assert block.flops == flops
    assert block.source == "estimated"
    assert block.saved_bytes == 4 * 4 * (16 + 64)
    # addmm, relu, addmm, add; the products read x, weight and bias and write their value
    products = 4 * ((4 * 16 + 16 * 64 + 64 + 4 * 64) + (4 * 64 + 64 * 16 + 16 + 4 * 16))
    others = 4 * (2 * 4 * 64 + 3 * 4 * 16)
    assert block.forward_s == pytest.approx(4e-6 + max(flops, products) / 1e9 + others / 1e9)
    assert block.backward_s > block.forward_s


@pytest.mark.parametrize("missing", [("flops_s",), ("bandwidth_bytes_s",), ("flops_s", "bandwidth_bytes_s")])
def test_on_a_device_without_rates_nothing_is_free(missing) -> None:
    unknown = dataclasses.replace(PLAIN, **{name: {"flops_s": {}}.get(name, 0.0) for name in missing})
    with pytest.raises(InputError, match=f"'plain', whose {' and '.join(missing)} (is|are) not known"):
        estimate(captured(Stack(2).train(), torch.ones(4, 16)), unknown)
    with pytest.raises(InputError, match="give the Device its peak rates"):
        autopipe.plan(Stack(2), 2, (torch.ones(4, 16),), costs="estimated", device=unknown)


def test_estimate_and_profile_agree_on_what_does_not_hang_on_time() -> None:
    capture = captured(Net().train(), ids(), ids())
    measured = profile(capture, min_s=0.0, min_passes=3, progress=False)
    estimated = estimate(capture, PLAIN)
    assert not estimated.notes
    assert measured.costs.keys() == estimated.costs.keys()
    for op, cost in measured.costs.items():
        assert estimated[op].flops == cost.flops
        assert estimated[op].saved_bytes == cost.saved_bytes, op


def test_a_meta_model_is_estimated_like_a_real_one() -> None:
    with torch.device("meta"):
        model = Stack(3).train()
    meta = estimate(captured(model, torch.ones(4, 16, device="meta")), PLAIN)
    real = estimate(captured(Stack(3).train(), torch.ones(4, 16)), PLAIN)
    assert list(meta.costs.values()) == list(real.costs.values())


class Counting(nn.Module):
    """Returns beside its loss how many answers are right, as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, int, float]:
        scores = self.head(torch.tanh(self.layer(x)))
        right = (scores.argmax(-1) == target).sum()
        return F.cross_entropy(scores, target), int(right), float(right) / len(target)


def test_a_model_that_returns_numbers_of_its_data_is_estimated() -> None:
    capture = captured(Counting().train(), torch.randn(6, 8), torch.randint(0, 4, (6,)))
    table = estimate(capture, PLAIN)
    head = next(op.name for op in capture.ops.compute if op.target == "head")
    assert table[head].backward_s > 0  # gradients start at the loss that is returned with them


class Tour(nn.Module):
    """Visits rows by their scores, each once, and checks that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        seen = torch.zeros(x.shape[:2], dtype=torch.bool)
        total = h.new_zeros(len(x), 8)
        for _ in range(2):
            chosen = h.sum(-1).masked_fill(seen, -torch.inf).max(1)[1]
            assert not seen.gather(1, chosen[:, None]).any()
            seen = seen.scatter(1, chosen[:, None], True)
            total = total + h[torch.arange(len(x)), chosen]
        return total


def test_code_that_makes_tensors_of_sizes_and_checks_data_is_estimated_without_either_failing() -> None:
    table = estimate(captured(Tour(), torch.randn(3, 5, 4)), PLAIN)
    assert not table.notes


def test_a_bare_graph_is_estimated_with_more_doubt() -> None:
    capture = captured(Stack(2).train(), torch.ones(4, 16))
    exact, rough = estimate(capture, PLAIN), estimate(capture.ops, PLAIN)
    op = capture.ops.compute[1].name
    assert rough[op].flops == exact[op].flops
    assert rough[op].spread == 3 * exact[op].spread


@given(st.floats(0.05, 1.0), st.floats(0.05, 1.0), st.floats(1e-6, 1e-4))
def test_a_fit_finds_the_efficiency_that_made_the_times(
    matrix: float, memory: float, launch_s: float
) -> None:
    truth = Efficiency(matrix, memory, launch_s)
    small = [Kernels(n, 0, 8, 0, "float32") for n in range(1, 5)]
    moving = [Kernels(1, 0, n * 10**6, 0, "float32") for n in range(1, 5)]
    products = [Kernels(1, n * 10**7, 8, 8, "float32") for n in range(1, 5)]
    kernels = [*small, *moving, *products]
    found = fit([(k, seconds(k, PLAIN, truth)) for k in kernels], PLAIN)
    assert found.matrix == pytest.approx(matrix, rel=1e-3)
    assert found.memory == pytest.approx(memory, rel=1e-3)
    assert found.spread < 1e-3


def test_where_kernels_are_queued_the_longer_of_launch_and_work_counts() -> None:
    queued = dataclasses.replace(PLAIN, launches_ahead=True)
    light, heavy = Kernels(10, 0, 100), Kernels(10, 10**6, 100, 100, "float32")
    exact = Efficiency(matrix=1.0, memory=1.0)
    assert seconds(light, queued, exact) == 10 * PLAIN.launch_s
    assert seconds(heavy, queued, exact) == pytest.approx(1e-3)
    assert seconds(heavy, PLAIN, exact) == pytest.approx(1e-3 + 1e-5)


def test_a_fit_tells_ops_bound_by_launches_from_those_bound_by_work() -> None:
    queued = dataclasses.replace(PLAIN, launches_ahead=True)
    truth = Efficiency(matrix=0.5, memory=0.25, launch_s=4e-6)
    made = [Kernels(n, 0, 50 * n) for n in range(2, 12)]
    made += [Kernels(3, 10**5 * n, 10**4, 10**4, "float32") for n in range(5, 15)]
    made += [Kernels(3, 0, 10**5 * n) for n in range(5, 15)]
    found = fit([(k, seconds(k, queued, truth)) for k in made], queued)
    assert found.launch_s == pytest.approx(4e-6, rel=0.02)
    assert found.memory == pytest.approx(0.25, rel=0.02)
    assert [seconds(k, queued, found) for k in made] == pytest.approx(
        [seconds(k, queued, truth) for k in made], rel=0.02
    )


def test_a_fit_tells_convolutions_from_products_and_traffic_from_arithmetic() -> None:
    truth = Efficiency(0.5, 0.8, 1e-6, convolution=2.0, matrix_memory=0.25)
    works = [(1 + i % 3, 10**7 * (1 + i % 4), 10**6 * (1 + i % 5)) for i in range(24)]
    products = [Kernels(n, f, b, b, "float32") for n, f, b in works]
    convolutions = [Kernels(n, f, b, b, "float32", f) for n, f, b in works]
    others = [Kernels(n, 0, b, 0, "float32") for n, _, b in works]
    found = fit([(k, seconds(k, PLAIN, truth)) for k in (*products, *convolutions, *others)], PLAIN)
    assert found.convolution == pytest.approx(2.0)
    assert found.matrix_memory == pytest.approx(0.25)
    assert (found.matrix, found.memory) == (pytest.approx(0.5), pytest.approx(0.8))
    assert found.spread < 1e-6


def test_convolutions_are_counted_apart() -> None:
    image, kernel = torch.ones(1, 2, 8, 8), torch.ones(3, 2, 3, 3, requires_grad=True)
    with Counter() as counter:
        F.conv2d(image, kernel).sum().backward()
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert counter.kernels.flops == counter.kernels.convolution_flops + 2 * 2 * 2 * 2
    assert counter.kernels.convolution_flops >= 2 * (2 * 2 * 9 * 3 * 6 * 6)


def test_a_fit_to_nothing_is_what_was_assumed() -> None:
    assert fit([], PLAIN) == Efficiency()


def test_time_never_falls_with_work() -> None:
    times = [seconds(Kernels(1, f, f, f, "float32"), PLAIN, Efficiency()) for f in (0, 1, 10**6, 10**9)]
    assert times == sorted(times)
    assert times[0] == PLAIN.launch_s


@pytest.mark.parametrize("name", DEVICES)
def test_every_description_names_its_source(name: str) -> None:
    described = device(name)
    assert described.source
    assert described.bandwidth_bytes_s > 0
    assert described.flops_s["float32"] > 0
    assert device(described.name) == described


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h100-sxm5-80gb", "H100"),
        ("NVIDIA A100 80GB", "A100"),
        ("RTX 4090", "RTX4090"),
        ("mi300x oam", "MI300X"),
    ],
)
def test_a_device_may_be_named_in_other_words(name: str, key: str) -> None:
    assert device(name) == DEVICES[key]


def test_what_the_driver_says_of_memory_counts_where_it_is_less() -> None:
    assert described("NVIDIA A100-SXM4-40GB").name == DEVICES["A100"].name
    smaller = described("NVIDIA A100-SXM4-40GB", 42 * 10**9)
    assert smaller.memory_bytes == 42 * 10**9
    assert smaller.reserved_bytes < DEVICES["A100"].reserved_bytes
    assert described("NVIDIA A100-SXM4-80GB", 85 * 10**9) == DEVICES["A100"]
    assert described("unheard of", 16 * 10**9).memory_bytes == 16 * 10**9


@pytest.mark.parametrize("name", LINKS)
def test_every_link_names_its_source(name: str) -> None:
    assert link(name).source
    assert 0 < link(name).seconds(1) < link(name).seconds(10**9)


def test_a_device_of_ones_own(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(dataclasses.asdict(PLAIN)))
    assert device(path) == PLAIN
    path.write_text('{"name": "mine", "speeed": 2}')
    with pytest.raises(StoreError, match=r"mine\.json.*speeed is no field of it"):
        device(path)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    # those of variants too, which have other rates and other memory than the device they are called like
    for name in ("H3000", "H2000", "GH200 480GB", "H100 PCIe", "A100-SXM4-40GB", "RTX 4090 Laptop", "L40"):
        with pytest.raises(InputError, match="H200"):
            device(name)
    with pytest.raises(InputError, match="NVLink4"):
        link("string")


class Attention(nn.Module):
    """One attention over ``n_heads`` heads of 16, with or without a mask."""

    def __init__(self, n_heads: int = 2, masked: bool = False):
        super().__init__()
        self.qkv = nn.Linear(32, 3 * 16 * n_heads)
        self.n_heads, self.masked = n_heads, masked

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:2], 3, self.n_heads, 16)
        q, k, v = self.qkv(x).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
        mask = torch.ones(x.shape[1], x.shape[1], device=x.device).tril() > 0 if self.masked else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=not self.masked)


def attention(masked: bool, seq: int = 256) -> Capture:
    return autopipe.capture(Attention(masked=masked).train(), (torch.ones(1, seq, 32),))


@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_keeps_no_matrix_of_all_pairs(masked: bool) -> None:
    capture = attention(masked)
    matrix = 256 * 256 * 4  # of one head; the mask is kept once, as what is added for all heads
    saved = {}
    for kind in ("", "cpu", "cuda"):
        table = estimate(capture, dataclasses.replace(PLAIN, attention=kind))
        saved[kind] = table.total(table.costs).saved_bytes
        assert any("attention is assumed" in note for note in table.notes) is bool(kind)
        pairs = 256 * 257 // 2 if kind and not masked else 256 * 256
        assert table.total(table.costs).flops == 2 * 2 * 2 * pairs * 16 + 2 * 256 * 32 * 96
    assert saved["cpu"] <= saved[""] - matrix
    assert saved["cuda"] <= saved[""] - matrix


def test_attention_on_the_cpu_is_counted_as_it_runs() -> None:
    capture = attention(masked=False)
    measured = profile(capture, min_s=0.0, min_passes=3, progress=False)
    estimated = estimate(capture, "CPU")
    assert measured.total(measured.costs).flops == estimated.total(estimated.costs).flops
    assert measured.total(measured.costs).saved_bytes == estimated.total(estimated.costs).saved_bytes


def test_half_precision_without_a_mask_runs_flash_attention() -> None:
    for masked, kernel in ((False, "flash"), (True, "memory-efficient")):
        table = estimate(attention(masked), "H200", dtype=torch.bfloat16)
        assert table.notes == (f"attention is assumed to run the {kernel} kernel",)


class Keeps(nn.Module):
    """Counts its calls and keeps a table of its first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.n_calls, self.table = nn.Linear(4, 4), 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        self.table = torch.arange(x.shape[1]) if self.table is None else self.table
        return self.layer(x) * self.table[: x.shape[1], None]


def test_an_estimate_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(Keeps(), Keeps())
    estimate(autopipe.capture(model, (torch.randn(2, 3, 4),)), "H100")
    assert [(m.n_calls, m.table) for m in model] == [(0, None), (0, None)]


class Gated(nn.Module):
    """A fused projection whose halves gate one another: views of one value."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.last = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.both(x).chunk(2, -1)
        return self.last(F.silu(gate) * value)


class Fused(nn.Module):
    """Attention on queries, keys and values of one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class InPlace(nn.Module):
    """Values that functions write into, and a layer that returns several, each its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        F.relu_(y)
        top, _ = y.topk(4, -1)
        return self.last(top) * y.sigmoid()


KEPT = {
    "gated": Gated,
    "fused": Fused,
    "in place": InPlace,
    "in place by a layer": lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_views_share_and_writes_leave_is_kept_once(name: str) -> None:
    model, x = KEPT[name](), torch.randn(4, 6, 8)
    saved = Saved(p.untyped_storage()._cdata for p in model.parameters())
    with saved():
        out = model(x)
    out.sum().backward()
    capture = captured(model, x)
    for table in (
        estimate(capture, dataclasses.replace(PLAIN, attention="cpu")),
        profile(capture, min_s=0.0, min_passes=2, progress=False),
    ):
        assert table.total(table.costs).saved_bytes == sum(saved.storages.values())


def test_a_gpus_dropout_keeps_a_byte_of_each_value() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)).train()
    capture = captured(model, torch.ones(4, 8))
    for kind, mask in (("cuda", 1), ("cpu", 4)):
        table = estimate(capture, dataclasses.replace(PLAIN, attention=kind))
        assert table.total(table.costs).saved_bytes == 2 * 4 * 8 * 4 + mask * 4 * 8
    still = estimate(captured(model.eval(), torch.ones(4, 8)), PLAIN, training=False)
    assert still.total(still.costs).saved_bytes == 2 * 4 * 8 * 4


class After(Fused):
    """Attention, then a frozen layer, a norm, and a layer that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 8).requires_grad_(False)
        self.norm, self.last = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.frozen(super().forward(x))))


class Aligned(nn.Module):
    """A loss that no device computes without data, behind layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        frames, n = (torch.full((x.shape[0],), t.shape[1]) for t in (x, labels))
        return F.ctc_loss(self.layers(x).log_softmax(-1).transpose(0, 1), labels, frames, n)


def test_what_lies_ahead_of_an_op_that_cannot_run_has_its_backward() -> None:
    """No gradient came out of it, so that nothing ahead of it had one on paper."""
    table = estimate(captured(Aligned().train(), torch.ones(4, 12, 8), torch.ones(4, 3).long()), PLAIN)
    assert any(note.startswith("ctc_loss: ") for note in table.notes)
    assert table["layers_2"].backward_s > table["layers_2"].forward_s
    assert all(table[op].backward_s for op in ("layers_0", "layers_1", "log_softmax"))
    assert table["layers_0"].backward_input_s == 0


def test_what_trains_no_matrix_leaves_nothing_to_w() -> None:
    table = estimate(captured(After().train(), torch.ones(4, 6, 8)), PLAIN)

    def parts(op: str) -> tuple[float, float]:
        cost = table[op]
        return cost.backward_input_s / cost.backward_s, cost.backward_weight_s / cost.backward_s

    assert parts("qkv") == (0, 1)  # of the batch there is no gradient
    assert parts("scaled_dot_product_attention") == parts("frozen") == parts("norm") == (1, 0)
    assert parts("last") == (0.5, 0.5)


class Heads(nn.Module):
    """Attention within a layer of torch's, of more tokens than a matrix of all pairs has room for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2, 0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.attention(y, y, y, need_weights=False)[0]


@pytest.mark.parametrize(("kind", "kernel"), [("cuda", "memory-efficient"), ("cpu", "flash")])
def test_attention_within_torchs_layers_is_the_kernel_too(kind: str, kernel: str) -> None:
    n = 256
    model = Heads().train() if kind == "cuda" else Heads().eval()
    capture = captured(model, torch.ones(2, n, 8))
    device = dataclasses.replace(PLAIN, attention=kind)
    table = estimate(capture, device, training=model.training)
    assert table.notes == (f"attention is assumed to run the {kernel} kernel",)
    assert table.total(table.costs).saved_bytes < 2 * 2 * n * n
    left_alone = estimate(capture, PLAIN, training=model.training)
    assert left_alone.total(left_alone.costs).saved_bytes > 2 * 2 * n * n * 4
    x = torch.ones(3, 8)
    assert torch.equal(F.dropout(x, 1.0), torch.zeros(3, 8))
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


class Annealed(nn.Module):
    """Goes by a count of its calls, which is a number among the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.n_calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return self.linear(x) / (1 + self.n_calls)


def test_numbers_that_only_data_tell_are_those_of_the_example() -> None:
    capture = autopipe.capture(Annealed(), (torch.randn(6, 4),))
    assert any(node.name.startswith("number") for node in capture.graphs[True].nodes)
    assert not [note for note in estimate(capture, device="H200").notes if GUESSED in note]
