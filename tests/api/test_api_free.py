"""What is left free is found: the stage count, the order of devices; and such plans run like any other."""

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import InputError
from autopipe.hardware import Cluster, Device, Link

X, Y = torch.randn(12, 8), torch.randn(12, 8)
SPEEDS = (1.0, 4.0, 2.0)


def mlp() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))


def split(n_stages=None, **options) -> autopipe.Pipe:
    return autopipe.split(mlp(), n_stages, (X,), costs="estimated", n_microbatches=4, **options)


def test_free_stage_counts_need_a_number_of_devices():
    with pytest.raises(InputError, match=r"neither n_stages nor .* n_ranks=8"):
        split()
    with pytest.raises(InputError, match="n_ranks is 0"):
        split("auto", n_ranks=0)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_free_stage_counts_are_tried_up_to_the_ranks(schedule):
    pipe = split("auto", n_ranks=3, schedule=schedule)
    per_rank = 2 if schedule == "interleaved" else 1
    assert {c.n_stages for c in pipe.plan.candidates} == {per_rank * n for n in (1, 2, 3)}
    assert pipe.plan.n_ranks == pipe.plan.n_stages // per_rank


def test_a_plan_with_its_ranks_in_another_order_trains_like_the_model():
    cluster = Cluster(tuple(Device(speed=f) for f in SPEEDS), local=Link(1e-9, 1e12))
    pipe = split(3, cluster=cluster, device_order="auto", schedule="zbv", memory_limit=["1GB", "1GB", "2GB"])
    work = [sum(len(s.ops) for s in pipe.plan.stages if s.rank == r) for r in range(3)]
    assert sorted(pipe.plan.placement) == [0, 1, 2]
    assert work.index(max(work)) == SPEEDS.index(max(SPEEDS))
    loss = pipe.runtime(loss_fn=nn.functional.mse_loss).step(X, target=Y).loss
    assert torch.allclose(loss, nn.functional.mse_loss(pipe(X), Y))


def test_of_steps_that_are_equal_the_plan_that_needs_least_memory_is_taken():
    """Messages take longer than work here, so that many cuts have the same step but for rounding."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    pipe = autopipe.split(model, 4, (torch.randn(32, 64),), n_microbatches=8, costs="estimated")
    assert [len(stage.ops) for stage in pipe.plan.stages] == [2, 2, 2, 2]


def test_modules_are_kept_whole_or_opened_as_told():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 8))

    def calls(pipe):
        return [op.module_path for op in pipe.graph.ops.compute]

    assert calls(autopipe.split(model, 2, (X,), costs="estimated")) == ["0.0", "0.1", "0.2", "1"]
    pipe = autopipe.split(model, 2, (X,), costs="estimated", closed=["0"])
    assert calls(pipe) == ["0", "1"]
    assert torch.equal(pipe(X), model(X))
    assert calls(autopipe.split(model, args=(X,), plan=pipe.plan, closed=["0"])) == ["0", "1"]
    with pytest.raises(InputError, match=r"closed\[0\]|no module"):
        autopipe.split(model, 2, (X,), costs="estimated", closed=["2"])
    with pytest.raises(InputError, match="open, closed would be ignored"):
        autopipe.split(pipe.graph, 2, costs="estimated", closed=["0"], open=["0"])


def test_a_call_that_only_torchs_layers_make_is_at_their_line():
    captured = autopipe.capture(mlp(), (X,))
    assert all("container.py:" in op.source for op in captured.ops.compute)
