"""Bytes of a parameter under each preset are those of its source, and plans are made with them."""

import dataclasses

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import InfeasibleError, InputError
from autopipe.hardware import Cluster, Device
from autopipe.measure import device
from autopipe.memory import memory_limits, plan_memory
from autopipe.presets import bytes_per_parameter


@pytest.mark.parametrize(
    ("precision", "optimizer", "total"),
    [
        ("fp32", "adam", 16), ("fp32", "sgd", 8), ("fp32", "sgd-momentum", 12), ("bf16", "adam", 8),
        ("bf16", "sgd", 4), ("bf16-mixed", "adam", 18), ("bf16-mixed", "sgd", 10), ("bf16-mixed", "muon", 14),
        ("fp8", "adam", 17), ("fp32", "muon", 12),
    ],
)  # fmt: skip
def test_bytes_of_a_parameter(precision, optimizer, total):
    assert bytes_per_parameter(precision, optimizer).total == total


def test_eight_bit_adam_keeps_two_bytes_and_scales():
    assert bytes_per_parameter("fp32", "adam-8bit").optimizer == pytest.approx(2.03, abs=0.01)


def test_muon_is_adam_for_what_is_no_matrix():
    assert bytes_per_parameter("fp32", "muon", is_matrix=False).total == 16


def wide(dtype=torch.float32) -> nn.Module:
    layers = [nn.Linear(64, 64, bias=False) for _ in range(4)]
    return nn.Sequential(*layers).to(dtype)


def planned(dtype=torch.float32, **options) -> autopipe.Plan:
    x = torch.randn(4, 64, dtype=dtype)
    return autopipe.plan(wide(dtype), 2, (x,), costs="estimated", n_microbatches=2, **options)


@pytest.mark.parametrize(
    ("dtype", "options", "per_parameter"),
    [
        (torch.float32, {}, 16),
        (torch.bfloat16, {}, 8),
        (torch.bfloat16, {"precision": "bf16-mixed"}, 18),
        (torch.float32, {"precision": "bf16-mixed"}, 18),
        (torch.bfloat16, {"precision": "fp8", "optimizer": "sgd-momentum"}, 13),
        (torch.float32, {"optimizer": "muon"}, 12),
        (torch.bfloat16, {"precision": "bf16-mixed", "offload": "optimizer"}, 6),
        (torch.float32, {"precision": "bf16-mixed", "offload": "optimizer"}, 6),
        (torch.float32, {"precision": "fp8", "offload": "optimizer"}, 5),
        (torch.float64, {"precision": "fp8", "offload": "optimizer"}, 5),
        (torch.float32, {"optimizer_bytes_per_parameter_byte": 3.0}, 20),
    ],
)
def test_a_plan_counts_what_its_preset_holds(dtype, options, per_parameter):
    plan = planned(dtype, **options)
    static = sum(m.static_bytes for m in plan_memory(plan))
    assert static == 4 * 64 * 64 * per_parameter
    assert autopipe.Plan.from_json(plan.to_json()) == plan


def test_offload_has_its_price():
    plain, offloaded = planned(device="H100"), planned(device="H100", offload="optimizer")
    assert offloaded.settings["optimizer_s_per_byte"] > 10 * plain.settings["optimizer_s_per_byte"]
    assert offloaded.step_s > plain.step_s


def offloadable(**options) -> autopipe.Plan:
    """Four microbatches in a model that keeps more than it sends: three in flight in its first stage."""
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    x = torch.randn(64, 64)
    return autopipe.plan(nn.Sequential(*blocks), 3, (x,), costs="estimated", n_microbatches=4, **options)


def test_offloaded_activations_are_in_neither_memory_nor_free():
    plain, moved = (
        offloadable(device="H100", offload=o, balance="uniform") for o in ("never", "activations")
    )
    for stage, other, memory in zip(plain.stages, moved.stages, plan_memory(moved), strict=True):
        assert stage.ops == other.ops
        received = sum(b.n_bytes for b in moved.boundaries if stage.index in b.destinations)
        assert other.saved_bytes == received < stage.saved_bytes
        assert other.memory_bytes == memory.total_bytes
        away = other.memory_bytes - other.workspace_bytes - other.in_flight * received
        assert away == stage.memory_bytes - stage.workspace_bytes - stage.in_flight * stage.saved_bytes
        least = stage.saved_bytes / device("H100").host_bandwidth_bytes_s
        assert other.forward_s >= stage.forward_s + least
        assert other.backward_s >= stage.backward_s + least
    assert moved.stages[0].memory_bytes < plain.stages[0].memory_bytes
    assert moved.step_s > plain.step_s
    assert moved.settings["offload"] == "activations"
    assert autopipe.Plan.from_json(moved.to_json()) == moved


def test_offload_lets_fit_what_does_not():
    needs = max(s.memory_bytes for s in offloadable(device="H100").stages)
    limit = max(s.memory_bytes for s in offloadable(device="H100", offload="activations").stages)
    assert limit < needs
    with pytest.raises(InfeasibleError):
        offloadable(device="H100", memory_limit=limit)
    plan = offloadable(device="H100", memory_limit=limit, offload="activations")
    assert max(s.memory_bytes for s in plan.stages) <= limit


def test_what_is_offloaded_crosses_the_slowest_devices_link():
    slow = dataclasses.replace(device("H100"), host_bandwidth_bytes_s=1e9)
    fast = offloadable(cluster=Cluster.uniform(3, device("H100")), device="H100", offload="all")
    one = Cluster((device("H100"), slow, device("H100")))
    assert offloadable(cluster=one, device="H100", offload="all").step_s > fast.step_s


def test_offload_that_cannot_be_is_refused():
    with pytest.raises(InputError, match=r"processor, whose memory is the host's already"):
        offloadable(offload="activations")
    with pytest.raises(InputError, match=r"keep nothing to offload"):
        offloadable(device="H100", offload="all", recompute="always")


def test_costs_of_offloaded_activations_say_so():
    blocks = [nn.Linear(8, 8) for _ in range(4)]
    options = {"n_microbatches": 2, "device": "H100"}
    x = torch.randn(4, 8)
    model = nn.Sequential(*blocks)
    pipe = autopipe.split(model, 2, (x,), costs="estimated", offload="activations", **options)
    assert autopipe.CostTable.from_dict(pipe.costs.to_dict()) == pipe.costs
    again = autopipe.split(model, 2, (x,), costs=pipe.costs, offload="activations", **options)
    assert again.plan.step_s == pipe.plan.step_s
    with pytest.raises(InputError, match="offload='activations' too"):
        autopipe.split(model, 2, (x,), costs=pipe.costs, **options)


def test_mixed_precision_costs_activations_in_bf16():
    full, mixed = planned(), planned(precision="bf16-mixed")
    saved = [sum(s.saved_bytes for s in plan.stages) for plan in (full, mixed)]
    assert saved[1] < saved[0]


def test_a_precision_that_the_parameters_have_not_is_refused():
    with pytest.raises(InputError, match=r"0\.weight is float32.*bfloat16\(\)"):
        planned(precision="bf16")
    with pytest.raises(InputError, match="give it or them"):
        planned(precision="fp32", optimizer_bytes_per_parameter_byte=2.0)


def test_a_device_keeps_some_of_its_memory():
    h100 = device("H100")
    assert h100.usable_bytes < h100.memory_bytes
    plan = planned(cluster=Cluster.uniform(2, h100))
    assert memory_limits(plan) == (h100.usable_bytes,) * 2
    assert Device(memory_bytes=None, reserved_bytes=5).usable_bytes is None
