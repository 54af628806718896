"""Formulas: exact where the truth is a formula, refused where too few sizes are known."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from measure_models import Stack, captured

from autopipe.costs import CostTable
from autopipe.errors import CostError, StoreError
from autopipe.hardware import Device
from autopipe.measure import Efficiency, SymbolicCosts, estimate, fit_costs
from autopipe.tracing import Capture

# a device on which matrix kernels are bound by arithmetic, so that seconds are linear in FLOPs and bytes
LINEAR = Device("linear", flops_s={"float32": 1e9}, bandwidth_bytes_s=1e12, launch_s=1e-6)
KNOWN = ({"batch": 2, "seq": 8}, {"batch": 8, "seq": 16}, {"batch": 4, "seq": 64})


@pytest.fixture(scope="module")
def capture() -> Capture:
    found = captured(Stack(2).train(), torch.ones(4, 24, 16))
    assert found.ops.example_dims == {"batch": 4, "seq": 24}
    return found


def tables(capture: Capture, *dims: dict[str, int]) -> list[CostTable]:
    return [estimate(capture, LINEAR, dims=d, efficiency=Efficiency(1.0, 1.0)) for d in dims]


def test_formulas_hold_at_other_sizes(capture: Capture) -> None:
    fitted = fit_costs(capture, tables(capture, *KNOWN))
    assert fitted.error < 1e-6
    for dims in ({"batch": 1, "seq": 8}, {"batch": 16, "seq": 128}):
        (truth,) = tables(capture, dims)
        predicted = fitted.at(dims)
        assert predicted.dims == truth.dims
        for op, cost in truth.costs.items():
            assert predicted[op].forward_s == pytest.approx(cost.forward_s, rel=1e-3)
            assert predicted[op].backward_s == pytest.approx(cost.backward_s, rel=1e-3)
            assert predicted[op].saved_bytes == cost.saved_bytes
            assert predicted[op].flops == cost.flops


def test_another_microbatch_size_needs_no_new_profile(capture: Capture) -> None:
    fitted = fit_costs(capture, tables(capture, *KNOWN))
    small, large = (fitted.at({"batch": b, "seq": 16}) for b in (1, 4))
    op = capture.ops.compute[1].name
    assert large[op].saved_bytes == 4 * small[op].saved_bytes
    assert small[op].forward_s < large[op].forward_s < 4 * small[op].forward_s


def test_formulas_survive_json(capture: Capture) -> None:
    fitted = fit_costs(capture, tables(capture, *KNOWN))
    read = SymbolicCosts.from_dict(json.loads(json.dumps(fitted.to_dict())))
    known, again = (f.at({"batch": 3, "seq": 40}) for f in (fitted, read))
    for op, cost in known.costs.items():
        assert dataclasses.astuple(again[op])[:4] == pytest.approx(dataclasses.astuple(cost)[:4])
        assert (again[op].saved_bytes, again[op].flops) == (cost.saved_bytes, cost.flops)
    assert read.fitted_at == fitted.fitted_at
    with pytest.raises(StoreError, match="version 7"):
        SymbolicCosts.from_dict({**fitted.to_dict(), "version": 7})
    with pytest.raises(StoreError, match="damaged"):
        SymbolicCosts.from_dict({"version": 1})


def test_one_size_is_not_enough(capture: Capture) -> None:
    with pytest.raises(CostError, match="two or more"):
        fit_costs(capture, tables(capture, KNOWN[0], KNOWN[0]))
