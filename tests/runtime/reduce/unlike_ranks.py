"""Ranks and replicas of which not all do, or measure, the same; ``unlike_ranks.py CHECK`` is one of four."""

import copy
import dataclasses
import math
import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from keep_ranks import cut
from runtime_models import captured_once
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import autopipe
from autopipe.errors import InputError, StepError
from autopipe.runtime import Runtime, rebalance
from autopipe.stages import build


class Layer(nn.Module):
    """As quick as its size says, until it is told to take its time."""

    pause_s = 0.0

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        if self.pause_s:
            time.sleep(self.pause_s)
        return torch.tanh(self.lin(x)) + x


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(Layer() for _ in range(8))

    def forward(self, x):
        for layer in self.inner:
            x = layer(x)
        return x


def batch(seed):
    return torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _layers():
    return Layers().double(), (batch(0),)


def pipeline(**options):
    """2 × 2, of layouts 4 + 4 and 7 + 1."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    captured = captured_once(_layers)
    plain = copy.deepcopy(captured.model)
    plans = [cut(captured, list(sizes)) for sizes in ((4, 4), (7, 1))]
    stages = build(captured, plans[0])
    runtime = Runtime(
        captured, plans[0], stages, loss_fn=F.mse_loss, mesh=mesh, stall_limit_s=20.0, **options
    )
    return mesh, plain, runtime, plans


def compare(runtime, plain):
    for name, p in runtime.named_parameters():
        wanted = plain.get_parameter(name).grad
        torch.testing.assert_close(p.grad, wanted, rtol=0, atol=1e-12)


def wraps():
    """A stage is wrapped on one rank of each pipeline alone, before the first step or after some."""
    for n_before in (0, 2):
        mesh, plain, runtime, _ = pipeline()
        replica, group = mesh.get_local_rank("dp"), mesh.get_group("dp")
        for i in range(n_before):
            runtime.step(batch(i), target=batch(i))
            F.mse_loss(plain(batch(i)), batch(i)).backward()
        if runtime.rank == 1:
            runtime.wrap(lambda s, group=group: DistributedDataParallel(s, process_group=group))
        plain.zero_grad()
        for p in runtime.parameters():
            p.grad = None
        for i in range(2):
            x = batch(i)
            mine = x.chunk(2)[replica]
            runtime.step(mine, target=mine)
            # what is wrapped has the average, what is not its own
            part = x if runtime.rank == 1 else mine
            F.mse_loss(plain(part), part).backward()
            compare(runtime, plain)


def frozen():
    """Nothing of the first stage trains: DDP refuses that, and its ranks are told to let it be."""
    mesh, plain, runtime, _ = pipeline()
    replica, group = mesh.get_local_rank("dp"), mesh.get_group("dp")
    for model in (plain, runtime.engine.capture.model):
        model.inner[:4].requires_grad_(False)
    if runtime.rank == 0:
        with pytest.raises(InputError, match=r"stage 0, in which nothing trains .* give None"):
            runtime.wrap(lambda s: DistributedDataParallel(s, process_group=group))

    def wrapper(s):
        trains = any(p.requires_grad for p in s.parameters())
        return DistributedDataParallel(s, process_group=group) if trains else None

    runtime.wrap(wrapper)
    x = batch(0)
    runtime.step(x.chunk(2)[replica], target=x.chunk(2)[replica])
    F.mse_loss(plain(x), x).backward()
    compare(runtime, plain)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


def within():
    """What averages over replicas lies in another wrapper, behind ``torch.compile``, or in parts."""
    from torch.distributed.fsdp import fully_shard

    def parts(stage, mesh):
        for module in stage.modules():
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh["dp"])

    wrappers = (
        lambda s, mesh: Around(DistributedDataParallel(s, process_group=mesh.get_group("dp"))),
        lambda s, mesh: torch.compile(
            DistributedDataParallel(s, process_group=mesh.get_group("dp")), backend="eager"
        ),
        lambda s, mesh: Around(fully_shard(s, mesh=mesh["dp"])),
        parts,
    )
    for wrapper in wrappers:
        mesh, plain, runtime, _ = pipeline()
        replica = mesh.get_local_rank("dp")
        runtime.wrap(lambda s, wrapper=wrapper, mesh=mesh: wrapper(s, mesh))
        for i in range(2):
            pieces = batch(i)[:5], batch(i)[5:]
            runtime.step(pieces[replica], target=pieces[replica])
            F.mse_loss(plain(batch(i)), batch(i)).backward()
            for name, p in runtime.named_parameters():
                found = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                torch.testing.assert_close(found, plain.get_parameter(name).grad, rtol=0, atol=1e-12)


def zeroes():
    """A loss that is not finite, in gradients not yet averaged: told with their sum, unless zeroed."""
    mesh, plain, runtime, _ = pipeline()
    replica, group = mesh.get_local_rank("dp"), mesh.get_group("dp")
    runtime.wrap(lambda s: DistributedDataParallel(s, process_group=group))
    x, bad = batch(0), torch.full((8, 8), math.inf, dtype=torch.float64)
    for sets_to_none in (True, False):
        with runtime.no_sync():
            runtime.step(x if replica else bad, target=x)
        for p in runtime.parameters():
            p.grad = None if sets_to_none else p.grad.zero_()
        plain.zero_grad()
        runtime.step(x.chunk(2)[replica], target=x.chunk(2)[replica])
        F.mse_loss(plain(x), x).backward()
        compare(runtime, plain)
        for p in runtime.parameters():
            p.grad = None
    with runtime.no_sync():
        runtime.step(x if replica else bad, target=x)
    with pytest.raises(StepError, match="of another replica is not" if replica else "the loss is nan"):
        runtime.step(x, target=x)


def shards():
    """So it is where replicas hold shards: what those have yet to sum, no parameter shows between steps."""
    mesh, _, runtime, _ = pipeline()
    replica = mesh.get_local_rank("dp")
    runtime.wrap(lambda s: fully_shard(s, mesh=mesh["dp"]) and None)
    x, bad = batch(0), torch.full((8, 8), math.inf, dtype=torch.float64)
    runtime.step(x, target=x)  # gradients in shards: to look at one, every replica has to join
    with runtime.no_sync():
        runtime.step(x if replica else bad, target=x)
    for worker in runtime.engine.workers.values():
        worker.replicas.let_go()
    with pytest.raises(StepError, match="of another replica is not" if replica else "the loss is nan"):
        runtime.step(x, target=x)


def counted_on():
    """What DDP can only do with one backward a step is refused when a stage is wrapped so."""
    mesh, _, runtime, _ = pipeline()
    group = mesh.get_group("dp")
    with pytest.raises(InputError, match=r"static_graph=True\), which counts on one backward for each r"):
        runtime.wrap(lambda s: DistributedDataParallel(s, process_group=group, static_graph=True))


def cuts():
    """Replicas that measure other times cut alike, to the first's plan; all refuse unlike plans."""
    mesh, _, runtime, plans = pipeline()
    replica, x = mesh.get_local_rank("dp"), batch(0)
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1)
    for odd in (replica, runtime.rank):
        with pytest.raises(InputError, match="given unlike plans"):
            runtime.rebalance(plan=plans[odd], optimizer=optimizer)
    longer = dataclasses.replace(plans[1], n_microbatches=8)
    for odd in (replica, runtime.rank):  # a pipeline that runs cannot be cut to it
        with pytest.raises(InputError, match="given unlike plans"):
            runtime.rebalance(plan=longer if odd else plans[1], optimizer=optimizer)
    with pytest.raises(InputError, match="n_microbatches 4 and the plan is for 8"):
        runtime.rebalance(plan=longer, optimizer=optimizer)
    assert runtime.rebalance(plan=plans[1], optimizer=optimizer)
    torch.manual_seed(1)
    model = Layers().double()
    runtime = autopipe.split(model, 2, (x,), costs="estimated", n_ranks=2).runtime(F.mse_loss, mesh=mesh)
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1)
    solved, plan_again = [], rebalance.plan_again
    rebalance.plan_again = lambda *args, **how: solved.append(args) or plan_again(*args, **how)
    for slow in (range(2), range(6, 8)):
        for i, layer in enumerate(model.inner):
            layer.pause_s = 5e-3 * (i in slow) * (replica == 0)
        for _ in range(2):
            runtime.step(x, target=x)
        assert runtime.rebalance(optimizer=optimizer)  # the second replica alone would not
        told = [None] * 4
        dist.all_gather_object(told, [stage.ops for stage in runtime.plan.stages])
        assert told == [told[0]] * 4
        runtime.step(x, target=x)
    rebalance.plan_again = plan_again
    assert len(solved) == 2 * (replica == runtime.rank == 0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    print("done")
    sys.stdout.flush()
    os._exit(0)
