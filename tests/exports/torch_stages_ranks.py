"""One rank of a split that torch's own schedule trains; its gradients are held against the plain model's."""

import copy
import sys
import tempfile

import pytest
import torch
import torch.distributed as dist
from exports_models import MODELS
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineScheduleRuntime

import autopipe
from autopipe.errors import InputError, StaleError
from autopipe.schedule import build, to_csv

SCHEDULES = {
    "gpipe": (pipelining.ScheduleGPipe, "gpipe", 1),
    "1f1b": (pipelining.Schedule1F1B, "1f1b", 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, "interleaved", 2),
    "zero-bubble": (pipelining.ScheduleInterleavedZeroBubble, "interleaved", 2),
    "looped-bfs": (pipelining.ScheduleLoopedBFS, "looped-bfs", 2),
    "zbv": (pipelining.ScheduleZBVZeroBubble, "zbv", 2),
    "dualpipev": (pipelining.ScheduleDualPipeV, "dualpipev", 2),
    "file": (_PipelineScheduleRuntime, "interleaved", 2),
}


def runner_of(schedule, stages, n, loss_fn):
    """torch's own, or the one that reads a file, with a schedule of ours that torch has not."""
    kind = SCHEDULES[schedule][0]
    alone = issubclass(kind, PipelineScheduleSingle)
    made = kind(stages[0] if alone else stages, n, loss_fn=loss_fn, scale_grads=True)
    if schedule == "file":
        n_ranks = dist.get_world_size()
        ours = build("zb-h1", n_ranks, 2 * n_ranks, n, placement=[s % n_ranks for s in range(2 * n_ranks)])
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(to_csv(ours))
            file.flush()
            made._load_csv(file.name, format="compute_only")
    return made


def check(model_name: str, schedule: str) -> None:
    make = MODELS[model_name]
    torch.manual_seed(0)
    model, args, kwargs, loss_fn, target = make()
    plain = copy.deepcopy(model)
    n_ranks, n = dist.get_world_size(), 4
    n_stages = n_ranks * SCHEDULES[schedule][2]
    pipe = autopipe.split(
        model, n_stages, args, kwargs, n_microbatches=n, schedule=SCHEDULES[schedule][1], costs="estimated",
        balance="parameters",
    )  # fmt: skip
    stages = pipe.to_torch_stages()
    runner = runner_of(schedule, stages, n, loss_fn)
    first = any(s.is_first for s in stages)
    last = any(s.is_last for s in stages)
    optimizer = torch.optim.SGD([p for s in stages for p in s.submod.parameters()], lr=0.1)
    losses = []
    for _ in range(3):
        mine: list[torch.Tensor] = []
        given = (args, kwargs) if first else ((), {})
        runner.step(*given[0], **given[1], **({"target": target, "losses": mine} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        if last:
            losses.append(torch.stack(mine).mean())
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        total = loss_fn(plain(*args, **kwargs), target)
        total.backward()
        reference.step()
        reference.zero_grad()
        if last:
            torch.testing.assert_close(losses[step], total.detach(), rtol=1e-10, atol=1e-12)
    with pytest.raises(StaleError):
        copy.deepcopy(model.state_dict())
    merged = dict(pipe.merge().named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(merged[name], parameter, rtol=1e-10, atol=1e-12)


def refusals() -> None:
    model, args, kwargs, *_ = MODELS["skips"]()
    pipe = autopipe.split(model, 2, args, kwargs, n_microbatches=4, costs="estimated")
    with pytest.raises(InputError, match="equal microbatches"):
        pipe.to_torch_stages(n_microbatches=3)
    tied, args, kwargs, *_ = MODELS["tied"]()
    pipe = autopipe.split(tied, 2, args, kwargs, n_microbatches=4, costs="estimated", ties="sync")
    with pytest.raises(InputError, match="is used by stages 0 and 1"):
        pipe.to_torch_stages()
    contrastive, args, kwargs, *_ = MODELS["contrastive"]()
    pipe = autopipe.split(contrastive, 2, args, kwargs, n_microbatches=4, costs="estimated")
    with pytest.raises(InputError, match=r"depend on one another .* run each of 4 microbatches for itself"):
        pipe.to_torch_stages()
    assert len(pipe.to_torch_stages(n_microbatches=1)) == 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if sys.argv[1] == "refusals":
        refusals()
    for schedule in sys.argv[2:]:
        check(sys.argv[1], schedule)
    dist.barrier()
    dist.destroy_process_group()
