"""Profiles: what is measured, what is shared, what is left alone, what happens when an op cannot be run."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
import platform
import resource
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from measure_models import Block, Net, Recurrent, Stack, captured, ids
from processes import children
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint

import autopipe
from autopipe.costs import CostTable
from autopipe.errors import CostError, InputError
from autopipe.measure import Store, alike_ops, estimate, profile
from autopipe.measure import passes as passes_module

QUICK = {"min_s": 0.0, "min_passes": 3, "progress": False}


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().train()


def told(table: CostTable) -> list[str]:
    """The notes, but for that of a machine that others use too."""
    return [note for note in table.notes if "taking the CPU away" not in note]


def test_every_op_has_a_cost(net: Net) -> None:
    capture = captured(net, ids(), ids())
    table = profile(capture, **QUICK)
    assert set(table.costs) == {op.name for op in capture.ops.compute if not op.is_size}
    blocks = [table[op.name] for op in capture.ops.compute if op.target.startswith("blocks.")]
    first, second = (dataclasses.replace(block, saved_values=()) for block in blocks)
    assert first == second
    for block in blocks:
        assert block.source == "measured"
        assert block.forward_s > 0
        assert block.backward_s == pytest.approx(block.backward_input_s + block.backward_weight_s)
        assert block.flops == 2 * 2 * 24 * 16 * 64
    assert table.source == "measured"
    assert table.residual is not None
    assert (
        table.optimizer_s_per_tensor > 0
    )  # what few bytes take beside it may be less than is told from noise
    assert CostTable.from_dict(table.to_dict()) == table


def test_saved_bytes_of_a_block_by_hand() -> None:
    capture = captured(Stack(2).train(), torch.ones(4, 16))
    table = profile(capture, **QUICK)
    first, second = (table[op.name] for op in capture.ops.compute)
    # the block's input (for the first product) and relu's output (for relu and the second product)
    assert first.saved_bytes == second.saved_bytes == 4 * 16 * 4 + 4 * 64 * 4
    assert second.saved_values == (capture.ops.compute[0].name,)


class Masked(nn.Module):
    """Layers that keep for backward a mask made by glue."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones_like(x).tril()
        for layer in self.layers:
            x = layer(x) * mask
        return x


def test_what_is_kept_of_a_movable_op_is_counted_with_it() -> None:
    """A stage that makes it again keeps it too, whichever op of the model is the first to."""
    for find in (functools.partial(profile, **QUICK), estimate):
        capture = captured(Masked().train(), torch.ones(8, 16))
        table = find(capture)
        masks = [op.name for op in capture.ops.compute if op.is_movable and table[op.name].saved_bytes]
        assert [table[name].saved_bytes for name in masks] == [8 * 16 * 4]
        assert table[masks[0]].saved_values == (masks[0],)
        products = [table[op.name] for op in capture.ops.compute if masks[0] in table[op.name].saved_values]
        assert sum(c.saved_bytes for c in products[1:]) == 0


def test_dims_of_a_microbatch(net: Net) -> None:
    capture = captured(net, ids(8), ids(8))
    (batch,) = (d.name for d in capture.ops.dims if d.example == 8)
    whole, piece = (profile(capture, dims={batch: n}, **QUICK) for n in (8, 2))
    block = next(op.name for op in capture.ops.compute if op.target == "blocks.0")
    assert piece.dims[batch] == 2
    assert whole[block].saved_bytes == 4 * piece[block].saved_bytes
    assert whole[block].flops == 4 * piece[block].flops


def test_an_unknown_dim_is_refused(net: Net) -> None:
    with pytest.raises(InputError, match="no dims \\['hight'\\]"):
        profile(captured(net, ids(), ids()), dims={"hight": 3}, **QUICK)


def test_the_model_is_left_alone(net: Net) -> None:
    capture = captured(net, ids(), ids())
    net.eval()
    net.embed.weight.grad = torch.full_like(net.embed.weight, 7.0)
    calls: list[int] = []
    net.head.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    parameters = {name: (p, p.clone(), p.grad) for name, p in net.named_parameters()}
    buffers = {name: (b, b.clone()) for name, b in net.named_buffers()}
    state = torch.random.get_rng_state()
    profile(capture, **QUICK)
    for name, p in net.named_parameters():
        same, value, grad = parameters[name]
        assert p is same
        assert torch.equal(p, value)
        assert p.grad is grad
    for name, b in net.named_buffers():
        assert b is buffers[name][0]
        assert torch.equal(b, buffers[name][1])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not calls
    assert not any(m.training for m in net.modules())
    assert bool((net.embed.weight.grad == 7).all())


def test_equal_blocks_are_run_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike_ops, "OUT_OF_CACHE", 0)
    runs: set[nn.Module] = set()
    capture = captured(Stack(40).train(), torch.ones(4, 16))
    # state that the model's code reaches would be put back
    hook = register_module_forward_pre_hook(lambda module, args: runs.add(module))
    try:
        table = profile(capture, **QUICK)
    finally:
        hook.remove()
    # the first takes an input without gradient and is of another kind than the 39 behind it
    assert sum(isinstance(module, Block) for module in runs) == 1 + 4
    assert len(table.costs) == 40
    assert len({table[op.name].forward_s for op in capture.ops.compute[1:]}) == 1


def test_a_failing_op_is_reported_and_the_rest_measured() -> None:
    model = Stack(3).train()
    capture = captured(model, torch.ones(4, 16))
    model.blocks[1].fails = True
    table = profile(capture, **QUICK)
    first, broken, last = (table[op.name] for op in capture.ops.compute)
    broken_name = capture.ops.compute[1].name
    assert (first.source, broken.source, last.source) == ("measured", "estimated", "measured")
    assert broken.forward_s > 0
    assert broken.spread > first.spread
    (note,) = told(table)
    assert "blocks.1" in note
    assert "no kernel for this block" in note
    plan = autopipe.plan(capture, 2, costs=table, n_microbatches=1)
    assert plan.settings["uncounted"].startswith(f"1 op could not be measured, each estimated: {broken_name}")


def test_nan_is_reported_where_it_begins() -> None:
    model = Stack(3).train()
    capture = captured(model, torch.ones(4, 16))
    model.blocks[1].spoils = True
    table = profile(capture, **QUICK)
    (note,) = told(table)
    assert "blocks.1" in note
    assert "NaN" in note
    spoiled = profile(captured(Stack(1).train(), torch.full((4, 16), float("nan"))), **QUICK)
    assert any("input" in note and "NaN" in note for note in spoiled.notes)


def test_interrupted_profiles_go_on_from_where_they_were(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = captured(Stack(2).train(), torch.ones(4, 16))
    done = 0
    whole = passes_module.Passes.whole

    def interrupted(self: passes_module.Passes, keep: bool = True, *, beside: str = "") -> None:
        nonlocal done
        done += keep and not beside
        if done == 3:
            raise KeyboardInterrupt
        whole(self, keep, beside=beside)

    monkeypatch.setattr(passes_module.Passes, "whole", interrupted)
    with pytest.raises(KeyboardInterrupt):
        profile(capture, store=tmp_path, **QUICK)
    assert sum(1 for _ in Store(tmp_path).entries("op")) > 0
    done = -100
    profile(capture, store=tmp_path, **QUICK)
    assert done == -99, "two of three passes were in the store"


def test_a_full_store_measures_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = captured(Stack(2).train(), torch.ones(4, 16))
    first = profile(capture, store=tmp_path, **QUICK)
    monkeypatch.setattr(passes_module.Passes, "by_ops", lambda self, part: pytest.fail("measured again"))
    assert profile(capture, store=Store(tmp_path), **QUICK) == first


def test_a_damaged_measurement_is_refused_and_taken_again(tmp_path: pathlib.Path) -> None:
    capture = captured(Stack(2).train(), torch.ones(4, 16))
    profile(capture, store=tmp_path, **QUICK)
    for path in tmp_path.rglob("*.json"):
        path.write_text(path.read_text()[:-20])
    table = profile(capture, store=tmp_path, **QUICK)
    assert any("damaged" in note for note in table.notes)
    assert all(cost.source == "measured" for cost in table.costs.values())
    assert not told(profile(capture, store=tmp_path, **QUICK))


def test_frozen_parameters_cost_no_weight_gradient() -> None:
    model = Stack(2).train().requires_grad_(False)
    capture = captured(model, torch.ones(4, 16))
    table = profile(capture, **QUICK)
    assert all(cost.backward_s == 0 for cost in table.costs.values())


@pytest.mark.parametrize("options", [{"autocast": torch.bfloat16}, {"dtype": torch.bfloat16}])
def test_low_precision(options: dict[str, torch.dtype]) -> None:
    capture = captured(Stack(2, 32).train(), torch.ones(4, 32))
    full, low = profile(capture, **QUICK), profile(capture, **QUICK, **options)
    op = capture.ops.compute[1].name
    assert not told(low)
    assert low[op].source == "measured"
    assert low[op].saved_bytes != full[op].saved_bytes


def test_a_meta_model_cannot_be_measured() -> None:
    with torch.device("meta"):
        model = Stack(2)
    with pytest.raises(CostError, match=r"meta device.*estimated"):
        profile(captured(model, torch.ones(4, 16, device="meta")), device="cpu", **QUICK)


def test_peers_are_ended(net: Net) -> None:
    before = children()
    table = profile(captured(net, ids(), ids()), n_peers=1, **QUICK)
    assert table.source == "measured"
    assert children() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_profile_of_a_model_on_the_host() -> None:
    model = Stack(3, 256).train()
    capture = captured(model, torch.ones(64, 256))
    table = profile(capture, device="cuda", **QUICK)
    assert table.device == torch.cuda.get_device_name()
    assert all(c.forward_s > 0 and c.backward_s > 0 for c in table.costs.values())
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_a_model_that_cannot_run_whole_is_not_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: passes_module.Passes) -> None:
        raise RuntimeError("too large as a whole")

    monkeypatch.setattr(passes_module.Passes, "_whole", fails)
    table = profile(captured(Stack(2).train(), torch.ones(4, 16)), **QUICK)
    assert table.residual is None
    assert "too large as a whole" in told(table)[0]
    assert all(cost.forward_s > 0 for cost in table.costs.values())


def test_an_op_that_fails_only_when_timed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(3, 256).train()
    capture = captured(model, torch.ones(64, 256))
    calls = 0
    forward = Block.forward

    def tired(self: Block, x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += self is model.blocks[1]
        if calls > 3 and self is model.blocks[1]:
            raise RuntimeError("out of breath")
        return forward(self, x)

    monkeypatch.setattr(Block, "forward", tired)
    table = profile(capture, **QUICK)
    first, broken, _ = (table[op.name] for op in capture.ops.compute)
    assert (first.source, broken.source) == ("measured", "estimated")
    assert broken.forward_s > 0
    assert any("blocks.1" in note and "out of breath" in note for note in table.notes)


# the compiler looks at the gradient of every tensor it is given, leaf or not
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_leaf_modules_are_timed_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        def run(*args: object) -> object:
            nonlocal calls
            calls += 1
            return module.forward(*args)

        return run

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    capture = captured(Stack(2).train(), torch.ones(4, 16))
    plain, table = profile(capture, **QUICK), profile(capture, compiled=True, **QUICK)
    assert calls >= 2 * 3 * (QUICK["min_passes"] + 1)
    assert any("compiled" in note for note in table.notes)
    for op in capture.ops.compute:
        assert table[op.name].source == "measured"
        assert table[op.name].flops == plain[op.name].flops
        assert table[op.name].saved_bytes == plain[op.name].saved_bytes


def test_light_ops_behind_an_input_have_an_input_gradient() -> None:
    capture = captured(Stack(2).train(), torch.ones(4, 16))
    first, second = (profile(capture, **QUICK)[op.name] for op in capture.ops.compute)
    assert first.backward_input_s == 0
    assert 0 < second.backward_input_s < second.backward_s


def test_scales_and_shifts_leave_nothing_to_w() -> None:
    capture = captured(
        torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16)), torch.ones(4, 16)
    )
    linear, norm = (profile(capture, **QUICK)[op.name] for op in capture.ops.compute)
    assert norm.backward_weight_s == 0 < norm.backward_input_s
    assert linear.backward_weight_s > 0


FAULTS = """
import resource, torch
import autopipe.measure
from autopipe import accelerator

def work():
    kept = [torch.ones(1 << 20) for _ in range(24)]

def faults():
    work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

new = faults()
accelerator.keep_freed(torch.device("cpu"))
print(new, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc gives memory back by limits that move")
def test_freed_memory_is_not_faulted_in_anew() -> None:
    run = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, timeout=60, check=True)
    new, settled = map(int, run.stdout.split())
    pages = 24 * (4 << 20) // resource.getpagesize()  # of all that is held at once; whole huge pages are one
    assert settled <= pages < new, (new, settled)


def test_picking_from_a_tuple_costs_nothing() -> None:
    table = profile(captured(Recurrent(), torch.randn(4, 8, 16)), **QUICK)
    leaves = {name: cost for name, cost in table.costs.items() if name in ("a", "b")}
    picks = [cost for name, cost in table.costs.items() if name not in leaves]
    assert len(picks) >= 4
    assert all(cost.forward_s == cost.backward_s == cost.flops == 0 for cost in picks)
    assert all(cost.forward_s > 0 for cost in leaves.values())


class Checkpointed(Stack):
    """The model itself checkpoints the first of its blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](checkpoint(self.blocks[0], x, use_reentrant=False))


def test_what_the_model_checkpoints_keeps_its_input_alone() -> None:
    capture = captured(Checkpointed(2).train(), torch.ones(4, 16, requires_grad=True))
    table = profile(capture, **QUICK)
    again, kept = (table[op.name] for op in capture.ops.compute)
    assert again.saved_bytes <= 4 * 16 * 4 < kept.saved_bytes


def test_a_measurement_taken_under_other_settings_is_not_used() -> None:
    from autopipe.measure.timers import device_settings

    before = torch.get_float32_matmul_precision()
    plain = device_settings("cpu")
    try:
        torch.set_float32_matmul_precision("medium" if before != "medium" else "highest")
        assert device_settings("cpu") != plain
    finally:
        torch.set_float32_matmul_precision(before)
    assert device_settings("cpu") == plain
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert device_settings("cpu") != plain
    assert device_settings("cpu") == plain
    # once these are used, torch's older switch cannot be read
    products = torch.backends.mkldnn.matmul
    kept = products.fp32_precision
    try:
        products.fp32_precision = "bf16"
        assert device_settings("cpu") != plain
    finally:
        products.fp32_precision = kept
    assert torch.get_float32_matmul_precision() == before


class FirstData(nn.Module):
    """Sets itself up from the first batch it sees, counts its calls and keeps what it made last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.is_set, self.n_calls = nn.Parameter(torch.ones(4)), False, 0
        self.offset = torch.zeros(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_set:
            self.scale.data.copy_(1 / x.detach().std(0))
            self.offset.copy_(x.detach().mean(0))
            self.is_set = True
        self.n_calls += 1
        self.last = x
        return (x - self.offset) * self.scale


@pytest.mark.parametrize("verb", [autopipe.profile, functools.partial(autopipe.split, n_stages=2)])
def test_a_model_that_sets_itself_up_from_data_is_left_as_it_was(verb: Callable[..., object]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), FirstData(), nn.Linear(4, 4))
    before = copy.deepcopy(model)
    verb(model, args=(torch.randn(8, 4),))
    for (name, found), wanted in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(found, wanted), name
    assert not model[1].is_set
    assert model[1].n_calls == 0
    assert not hasattr(model[1], "last")
    assert not model[1].offset.any()
