"""Bytes of a parameter under each preset are those of its source, and plans are made with them."""

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import InputError
from autopipe.hardware import Cluster, Device
from autopipe.measure import device
from autopipe.memory import memory_limits, plan_memory
from autopipe.presets import held


@pytest.mark.parametrize(
    ("precision", "optimizer", "total"),
    [
        ("fp32", "adam", 16), ("fp32", "sgd", 8), ("fp32", "sgd-momentum", 12), ("bf16", "adam", 8),
        ("bf16", "sgd", 4), ("bf16-mixed", "adam", 18), ("bf16-mixed", "sgd", 10), ("bf16-mixed", "muon", 14),
        ("fp8", "adam", 17), ("fp32", "muon", 12),
    ],
)  # fmt: skip
def test_bytes_of_a_parameter(precision, optimizer, total):
    assert held(precision, optimizer).total == total


def test_eight_bit_adam_keeps_two_bytes_and_scales():
    assert held("fp32", "adam-8bit").optimizer == pytest.approx(2.03, abs=0.01)


def test_muon_is_adam_for_what_is_no_matrix():
    assert held("fp32", "muon", is_matrix=False).total == 16


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
