"""What the ranks of the multi-process tests do; each check runs on every rank."""

import copy
import functools
import os
import pathlib
import re
import sys
import time

import pytest
import runtime_models
import tail_checks
import torch
import torch.distributed as dist
from runtime_models import (
    Adversary,
    Noisy,
    Routed,
    adversary_batch,
    adversary_loss,
    captured_once,
    cut,
    cuts_allowed,
    grads,
    make,
    make_plan,
    worst,
)
from torch import nn
from torch.nn import functional as F
from zoo.models_multimodal import PackedPatches, documents

from autopipe import runtime as room
from autopipe.api import Pipe
from autopipe.errors import AutopipeError, InputError, StepError
from autopipe.runtime.checkpoint.loading import open_checkpoint
from autopipe.runtime.wire import channel as channels
from autopipe.runtime.wire import peers
from autopipe.runtime.wire.group import FOREVER
from autopipe.stages import build
from autopipe.tracing import capture

SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "looped-bfs": 2,
    "zb-h1": 1,
    "zb-h2": 1,
    "zbv": 2,
    "dualpipev": 2,
}
BATCHES = ((8, 6, 4), (7, 5, 4), (3, 6, 4), (9, 4, 2), (8, 6, 5))
EXACT = 1e-12
KIND, DEVICE = "cpu", None
"""Of the accelerator that checks run on, and this rank's; another script may say so."""


def Runtime(*made, **options):
    return room.Runtime(*made, **{"device": DEVICE, **options})


def adversary(schedule, n_ranks, per_rank, recompute=False, block_size=0):
    n = n_ranks * per_rank
    again = tuple(range(0, n, 2)) if recompute else ()
    return runtime_models.adversary(n, schedule, n_ranks, again, block_size=block_size)


def train_plain(model, steps, clip=None):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    losses, norms = [], []
    for args, kwargs, target in steps:
        optimizer.zero_grad()
        loss = adversary_loss(model(*args, **kwargs), target)
        loss.backward()
        if clip:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def adversary_on_every_schedule(*names):
    """Those named, or all."""
    world = dist.get_world_size()
    for i, (schedule, per_rank) in enumerate(SCHEDULES.items()):
        if names and schedule not in names:
            continue
        again = ({}, {"recompute": True}, {"block_size": 3})[i % 3]
        model, captured, plan, stages = adversary(schedule, world, per_rank, **again)
        plain = copy.deepcopy(model)
        torch.manual_seed(7)
        steps = [adversary_batch(rows, length) for rows, length, _ in BATCHES]
        losses, norms = train_plain(plain, steps, clip=0.05)
        runtime = Runtime(captured, plan, stages, loss_fn=adversary_loss)
        optimizer = torch.optim.SGD(runtime.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
        for (args, kwargs, target), (*_, m), loss, norm in zip(steps, BATCHES, losses, norms, strict=True):
            optimizer.zero_grad()
            out = runtime.step(*args, **kwargs, target=target, n_microbatches=m)
            found = runtime.clip_grad_norm_(0.05).item()
            optimizer.step()
            assert abs(out.loss.item() - loss) < EXACT, (schedule, out.loss, loss)
            assert abs(found - norm) < EXACT, (schedule, found, norm)
        error = worst(dict(runtime.named_parameters()), dict(plain.named_parameters()))
        assert error < EXACT, (schedule, error)
        assert {n for n, _ in runtime.named_parameters()} <= {n for n, _ in plain.named_parameters()}
        one_process_agrees(runtime, model, plain)


def one_process_agrees(runtime, model, plain):
    """Outputs on every rank, on the last only, and the loss without gradients."""
    args, kwargs, target = adversary_batch(5, 3)
    torch.manual_seed(11)
    args, kwargs, target = adversary_batch(5, 3)
    model.eval(), plain.eval()
    wanted = plain(*args, **kwargs)
    out = runtime.forward(*args, **kwargs)
    torch.testing.assert_close(out["logits"].cpu(), wanted["logits"], rtol=0, atol=EXACT)
    assert out["nothing"] is None
    assert out["aux"][1] == 3
    out = runtime.forward(*args, **kwargs, outputs_on="last")
    assert (out is None) == (runtime.stages[-1].is_last is False)
    result = runtime.evaluate(*args, **kwargs, target=target)
    assert abs(result.loss.item() - adversary_loss(wanted, target).item()) < EXACT
    model.train(), plain.train()


def noise_does_not_depend_on_ranks():
    world = dist.get_world_size()

    def noisy():
        return Noisy().double(), (torch.randn(8, 5, dtype=torch.float64),)

    def train(schedule, n_stages, n_ranks, mesh=None):
        recompute = (1,) if n_stages > 1 else ()
        options = {"n_stages": n_stages, "n_ranks": n_ranks, "schedule": schedule, "recompute": recompute}
        made = cut(captured_once(noisy), **options)
        torch.manual_seed(5)
        runtime = Runtime(*made, loss_fn=F.mse_loss, mesh=mesh)
        generator = torch.Generator().manual_seed(9)
        for _ in range(3):
            x = torch.randn(9, 5, dtype=torch.float64, generator=generator)
            runtime.step(x, target=x[:, :2])
        state = {n: b for s in runtime.stages for n, b in s.named_buffers()}
        return {**state, **grads(runtime.named_parameters())}

    # one batch for all: replicas with batches of their own draw other noise
    alone = dist.init_device_mesh(KIND, (world, 1), mesh_dim_names=("tp", "pp"))
    wanted = train("1f1b", 1, 1, alone)
    for schedule in ("gpipe", "zb-h1"):
        assert worst(train(schedule, world, world), wanted) < EXACT
    assert worst(train("interleaved", 2 * world, world), wanted) < EXACT


def accumulation_and_zero_grad():
    world = dist.get_world_size()
    model, captured, plan, stages = adversary("1f1b", world, 1)
    plain = copy.deepcopy(model)
    runtime = Runtime(captured, plan, stages, loss_fn=adversary_loss)

    def both(sync, rows):
        args, kwargs, target = adversary_batch(rows, 4)
        if sync:
            runtime.step(*args, **kwargs, target=target)
        else:
            with runtime.no_sync():
                runtime.step(*args, **kwargs, target=target)
        adversary_loss(plain(*args, **kwargs), target).backward()

    def compare():
        wanted = grads(plain.named_parameters())
        assert worst(grads(runtime.named_parameters()), wanted) < EXACT

    torch.manual_seed(2)
    for pattern in ((True, True), (False, True), (True, False, True), (True, True, True)):
        for i, sync in enumerate(pattern):
            both(sync, 4 + i)
            if not sync and world > 1:
                with pytest.raises(InputError, match="tied parameters are not summed yet"):
                    runtime.clip_grad_norm_(1.0)
        compare()
        for p in runtime.parameters():
            if p.grad is not None:
                p.grad.zero_()
        plain.zero_grad(set_to_none=False)
    model.zero_grad(), plain.zero_grad()
    both(True, 3)
    compare()
    model.frozen.requires_grad_(True), plain.frozen.requires_grad_(True)  # thawed between steps
    model.first.requires_grad_(False), plain.first.requires_grad_(False)
    model.zero_grad(), plain.zero_grad()
    both(True, 5)
    compare()


class Mlp(nn.Module):
    def __init__(self, d=8, tied=False):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(d, d) for _ in range(4))
        if tied:
            self.d.weight = self.a.weight

    def forward(self, x):
        return self.d(torch.relu(self.c(torch.relu(self.b(torch.relu(self.a(x)))))))


def _mlp(dtype, tied):
    return Mlp(tied=tied).to(dtype), (torch.randn(8, 8, dtype=dtype),)


def mlp(n_stages, dtype=torch.float64, tied=False, **options):
    captured = captured_once(_mlp, dtype, tied)
    return captured.model, *cut(captured, n_stages=n_stages, **options)


def overflow_and_autocast():
    world = dist.get_world_size()
    model, *made = mlp(world, torch.float32)
    scaler = torch.amp.GradScaler(KIND, init_scale=1024.0, growth_interval=1000)
    runtime = Runtime(*made, loss_fn=F.mse_loss, autocast=torch.bfloat16, scaler=scaler)
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1)
    plain = copy.deepcopy(model)
    x = torch.randn(8, 8)
    runtime.step(x, target=x)
    scaler.unscale_(optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(plain(x).float(), x)
    loss.backward()
    for name, p in runtime.named_parameters():
        torch.testing.assert_close(p.grad.cpu(), plain.get_parameter(name).grad, rtol=0.05, atol=0.02)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1024.0
    before = [p.detach().clone() for p in runtime.parameters()]
    optimizer.zero_grad()
    # only the first rank overflows, and there the first of two optimizers
    optimizers = [torch.optim.SGD([p], 0.1) for p in runtime.parameters() if p.requires_grad]
    handle = model.a.weight.register_hook(lambda g: g * float("inf"))
    runtime.step(x, target=x)
    handle.remove()
    for each in optimizers:
        scaler.unscale_(each)
        scaler.step(each)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(before, runtime.parameters(), strict=True))


def train_both(runtime, plain, steps):
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1, momentum=0.9)
    reference = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    torch.manual_seed(4)
    for _ in range(steps):
        x = torch.randn(8, 8, dtype=torch.float64)
        optimizer.zero_grad(), reference.zero_grad()
        runtime.step(x, target=x)
        F.mse_loss(plain(x), x).backward()
        optimizer.step(), reference.step()


def compare_merged(pipe, plain):
    merged = pipe.merge()
    assert [n for n, _ in merged.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert worst(merged.state_dict(), plain.state_dict()) < EXACT
    x = torch.randn(3, 8, dtype=torch.float64)
    torch.testing.assert_close(copy.deepcopy(merged).cpu()(x), plain(x))


def weights_come_and_go(directory):
    """Released and merged; and made on the meta device, so that each rank loads only its own stages."""
    model, captured, plan, _ = mlp(2, tied=True)
    plain = copy.deepcopy(model)
    pipe = Pipe(captured, plan)
    runtime = pipe.runtime(F.mse_loss, release=True, device=DEVICE)
    freed = [n for n, p in model.named_parameters() if not p.numel()]
    assert freed == ["a.bias", "b.weight", "b.bias"] if dist.get_rank() else ["c.weight", "c.bias", "d.bias"]
    train_both(runtime, plain, steps=2)
    runtime.save(pathlib.Path(directory) / "trained")
    compare_merged(pipe, plain)
    train_both(runtime, plain, steps=1)  # and on

    with torch.device("meta"):
        empty = Mlp(tied=True).double()
    x = torch.empty(8, 8, dtype=torch.float64, device="meta")
    captured, plan, _ = make(empty, (x,), {}, n_stages=2)
    pipe = Pipe(captured, plan)
    runtime = pipe.runtime(F.mse_loss, device=DEVICE or "cpu")
    held = {n for n, p in empty.named_parameters() if not p.is_meta}
    assert held == {n for n, _ in runtime.named_parameters()} != set(dict(empty.named_parameters()))
    runtime.load(pathlib.Path(directory) / "trained")
    plain = Mlp(tied=True).double()
    saved = pathlib.Path(directory) / "trained"
    state = plain.state_dict()
    state.pop("d.weight")
    open_checkpoint(saved).read(state)
    train_both(runtime, plain, steps=2)
    compare_merged(pipe, plain)


def checkpoints(directory):
    """Saved by all ranks, loaded by all ranks under another cut, by one process, and by the plain model."""
    world, path = dist.get_world_size(), pathlib.Path(directory)
    _, captured, plan, stages = adversary("1f1b", world, 1)
    runtime = Runtime(captured, plan, stages, loss_fn=adversary_loss)
    optimizer = torch.optim.AdamW(runtime.parameters(), 0.01)
    torch.manual_seed(8)
    batches = [adversary_batch(6, 4) for _ in range(4)]

    def train(runtime, optimizer, batches):
        for args, kwargs, target in batches:
            optimizer.zero_grad()
            runtime.step(*args, **kwargs, target=target)
            optimizer.step()

    train(runtime, optimizer, batches[:2])
    runtime.save(path / "shards", optimizer=optimizer, max_shard_bytes=1000)
    assert len(list((path / "shards").glob("*.safetensors"))) > 2
    runtime.save(path / "one.pt")
    train(runtime, optimizer, batches[2:])
    wanted = {n: p.detach().cpu().clone() for n, p in runtime.named_parameters()}
    parts = [None] * world
    dist.all_gather_object(parts, wanted)
    whole = {name: tensor for part in parts for name, tensor in part.items()}
    _, captured, plan, stages = adversary("interleaved", world, 2)
    other = Runtime(captured, plan, stages, loss_fn=adversary_loss)
    for p in other.parameters():
        p.data.zero_()
    fresh = torch.optim.AdamW(other.parameters(), 0.5)
    other.load(path / "shards", optimizer=fresh)
    assert fresh.param_groups[0]["lr"] == 0.01
    train(other, fresh, batches[2:])
    assert worst(dict(other.named_parameters()), whole) < EXACT
    plain = Adversary().double()
    plain.load_state_dict(torch.load(path / "one.pt", weights_only=True))
    assert plain.head.weight is plain.emb.weight


def matched_report():
    world = dist.get_world_size()
    _, *made = mlp(world)
    runtime = Runtime(*made, loss_fn=F.mse_loss)
    x = torch.randn(8, 8, dtype=torch.float64)
    for _ in range(3):
        time.sleep(0.5 * (world == 2 and runtime.rank))  # its own optimizer took longer
        runtime.step(x, target=x)
    clock, ahead_s = time.perf_counter, 1e5 * runtime.rank  # hosts that started at other times
    time.perf_counter = lambda: clock() + ahead_s
    try:
        runtime.step(x, target=x)
        runtime.step(x, target=x)
        report = runtime.report()
    finally:
        time.perf_counter = clock
    assert world > 2 or report.measured_step_s < 0.4
    assert len(report.events) == 2 * 4 * world
    assert report.n_steps == 5
    for found in (report.between_actions_s, report.beside_actions_s):
        assert len(found) == world
        assert all(0 < seconds < report.measured_step_s for seconds in found)
    assert all(set(s.measured) == {"F", "B"} for s in report.stages)
    ends = {(a.kind, a.stage, a.microbatch): end for _, a, _, end in report.events}
    starts = {(a.kind, a.stage, a.microbatch): start for _, a, start, _ in report.events}
    slack_s = 1e-3  # how far clocks are apart is measured to half a message's time there and back
    for stage in range(1, world):
        for m in range(4):
            assert starts["F", stage, m] >= ends["F", stage - 1, m] - slack_s
            assert starts["B", stage - 1, m] >= ends["B", stage, m] - slack_s
    assert 0 < report.bubble_fraction < 1
    assert not report.in_turn
    assert "predicted" in str(report)
    idle = [line.split() for line in str(report).splitlines()]
    first = next(i for i, words in enumerate(idle) if words[:3] == ["idle", "rank", "in"])
    assert idle[first][4:] == ["warmup", "drain", "imbalance", "communication"]
    shares = [int(words[1].rstrip("%")) for words in idle[first + 1 : first + 1 + world]]
    timeline = report.timeline
    for share, busy_s in zip(shares, timeline.busy_s, strict=True):
        assert abs(share - 100 * (1 - busy_s / timeline.step_s)) < 1


def shapes_may_depend_on_data():
    """Routed rows cross in both directions, before any edge is settled and after."""
    world = dist.get_world_size()
    for schedule, per_rank in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)):
        torch.manual_seed(0)
        model, x = Routed().double(), torch.randn(8, 5, dtype=torch.float64)
        n = world * per_rank
        captured = capture(model, (x,))
        expert = [op.name for op in captured.ops.compute].index("expert")
        cuts = [cut for cut in cuts_allowed(captured.ops) if cut >= expert][: n - 1]
        plan = make_plan(captured, n, world, schedule, cuts=cuts, recompute=(1,))
        made = captured, plan, build(captured, plan)
        plain = copy.deepcopy(model)
        runtime = Runtime(*made, loss_fn=F.mse_loss)
        for _ in range(4):
            x = torch.randn(8, 5, dtype=torch.float64)
            runtime.step(x, target=x)
            F.mse_loss(plain(x), x).backward()
            torch.testing.assert_close(runtime.forward(x).cpu(), plain(x).detach())
        assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT, schedule
        assert any(edge.values.varies for edge in runtime._engine.edges), schedule


def one_rank_feeds():
    """Only one rank has the batch, whatever its shapes and structure; errors there reach all."""
    world = dist.get_world_size()
    for source, schedule in ((0, "1f1b"), (world - 1, "zb-h1")):
        model, captured, plan, stages = adversary(schedule, world, 1, recompute=True)
        plain = copy.deepcopy(model)
        runtime = Runtime(captured, plan, stages, loss_fn=adversary_loss, feed=source)
        torch.manual_seed(7)
        for rows, length, m in BATCHES:
            args, kwargs, target = adversary_batch(rows, length)
            if dist.get_rank() == source:
                loss = runtime.step(*args, **kwargs, target=target, n_microbatches=m).loss
            else:
                loss = runtime.step().loss
            wanted = adversary_loss(plain(*args, **kwargs), target)
            wanted.backward()
            assert abs(loss.item() - wanted.item()) < EXACT
        assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT, schedule
    with pytest.raises(InputError, match="argument"):
        runtime.step(*args[:1], target=target)
    # refused on the rank that feeds and, as they were given inputs, on the others: all go on
    if dist.get_rank() == source:
        assert runtime.step(*args, **kwargs, target=target, n_microbatches=m).loss is not None
    else:
        assert runtime.step().loss is not None
    dist.barrier()  # what ends one rank's next step would end the others' last one
    with pytest.raises((InputError, StepError), match=r"only rank \d feeds"):
        runtime.step(*args, **kwargs, target=target)


class Windowed(nn.Module):
    """Pads to windows of four where that is needed, and counts long texts twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        n = x.shape[1]
        for layer in self.layers:
            pad = -x.shape[1] % 4
            if pad:
                x = F.pad(x, (0, 0, 0, pad))
            x = torch.tanh(layer(x)) * (2 if n > 10 else 1)
            x = (x.unflatten(1, (-1, 4)).mean(2, keepdim=True) + x.unflatten(1, (-1, 4))).flatten(1, 2)
            x = x[:, :n] if pad else x
        return x


def _windowed():
    return Windowed().double(), (torch.randn(4, 8, 8, dtype=torch.float64),)


def sizes_may_take_another_way():
    """Lengths at which the model's own code does something else, fed or given, recomputed or not."""
    world = dist.get_world_size()
    for source, recompute in ((None, ()), (0, tuple(range(world)))):
        made = cut(captured_once(_windowed), n_stages=world, recompute=recompute)
        assert sum(form.for_sizes for form in made[0].forms[True]) >= 1
        plain = copy.deepcopy(made[0].model)
        runtime = Runtime(*made, loss_fn=F.mse_loss, feed=source)
        for length in (8, 9, 6, 12, 8):
            x = torch.randn(4, length, 8, dtype=torch.float64)
            if source is None or dist.get_rank() == source:
                runtime.step(x, target=x)
            else:
                runtime.step()
            F.mse_loss(plain(x), x).backward()
        assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT, source


class Longest(nn.Module):
    """Goes through as many positions as the longest row has, which only the data tell; at eight it writes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, lengths):
        first = x
        for layer in self.layers:
            x = layer(x).tanh()
        n = int(lengths.max())
        if n == 8:
            first.mul_(2)
        return sum(x[:, i] for i in range(n)) + first[:, 0] * (n % 2)


def kinds_that_were_not_met_are_recorded():
    """What reads otherwise than at capture is recorded by every rank, in any microbatch, or refused."""
    world = dist.get_world_size()
    for source, release in ((None, False), (world - 1, False), (0, True)):
        torch.manual_seed(0)
        example = (torch.randn(2, 8, 8, dtype=torch.float64), torch.tensor([4, 3]))
        made = make(Longest().double(), example, {}, n_stages=world)
        plain = copy.deepcopy(made[0].model)
        # the longest row of a microbatch is another than the batch's: each is a batch of its own
        how = {"feed": source, "release": release, "mixed_rows": "allow"}
        runtime = Runtime(*made, loss_fn=F.mse_loss, **how)
        own, all_of_it = (torch.optim.SGD(m.parameters(), 0.1) for m in (runtime, plain))
        is_given = source in (None, dist.get_rank())
        for longest in (4, 5, 3, 8, 5, 4):
            x, target = torch.randn(4, 8, 8, dtype=torch.float64), torch.randn(4, 8, dtype=torch.float64)
            lengths = torch.tensor([2, 4, 1, longest])
            step = functools.partial(runtime.step, n_microbatches=2)
            if is_given:
                step = functools.partial(step, x, lengths, target=target)
            if longest == 8:
                with pytest.raises(AutopipeError) as told:
                    step()
                assert re.search(r"runtime_checks.py:\d+: .*comes out 8 here and was", str(told.value))
                continue
            wanted = [
                F.mse_loss(plain(x[rows], lengths[rows]), target[rows]) / 2
                for rows in (slice(2), slice(2, 4))
            ]
            sum(wanted).backward()
            assert abs(step().loss.item() - sum(wanted).item()) < EXACT, (source, longest)
            assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT
            for optimizer in (own, all_of_it):
                optimizer.step()
                optimizer.zero_grad()


class Tasks(nn.Module):
    """Has a head for each of many tasks, which a number tells."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(12))
        self.last = nn.Linear(8, 8)

    def forward(self, x, task):
        for linear in self.inner:
            x = torch.tanh(linear(x))
        return self.last(self.heads[task.item()](x))


def tasks_that_were_not_met_train_their_own_heads():
    """Each rank has the heads that no form was recorded for, and trains them once they are asked for."""
    world = dist.get_world_size()
    for source, release in ((None, False), (0, True)):
        torch.manual_seed(0)
        x = torch.randn(4, 8, dtype=torch.float64)
        made = make(Tasks().double(), (x, torch.tensor(0)), {}, n_stages=world)
        plain = copy.deepcopy(made[0].model)
        runtime = Runtime(*made, loss_fn=F.mse_loss, feed=source, release=release)
        optimizers = [torch.optim.Adam(m.parameters(), 0.1) for m in (runtime, plain)]
        for task in (1, 11, 0, 10, 11):
            x, target = torch.randn(2, 4, 8, dtype=torch.float64)
            step = functools.partial(runtime.step, n_microbatches=2)
            if source in (None, dist.get_rank()):
                step = functools.partial(step, x, torch.tensor(task), target=target)
            wanted = F.mse_loss(plain(x, torch.tensor(task)), target)
            wanted.backward()
            assert abs(step().loss.item() - wanted.item()) < EXACT, (source, task)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        own, weights = dict(runtime.named_parameters()), dict(plain.named_parameters())
        assert worst(own, {n: weights[n] for n in own}) < EXACT


class Scaled(nn.Module):
    """Begins with a buffer of one rank's, which no step writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.linspace(1.0, 2.0, 8))
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x):
        x = x * self.scale
        for linear in self.inner:
            x = torch.tanh(linear(x)) * 2
        return x


def released_weights_have_their_shapes():
    """A model that changes is recorded anew where most of its weights are no longer here."""
    torch.manual_seed(0)
    model, x = Scaled().double(), torch.randn(8, 8, dtype=torch.float64)
    plain = copy.deepcopy(model)
    made = make(model, (x,), {}, n_stages=dist.get_world_size())
    runtime = Runtime(*made, loss_fn=F.mse_loss, release=True, device=DEVICE)
    for frozen in ((), (0, 5), (1,)):
        for one in (model, plain):
            for i, linear in enumerate(one.inner):
                linear.requires_grad_(i not in frozen)
        x = x + 1.0
        loss = F.mse_loss(plain(x), x)
        loss.backward()
        assert abs(runtime.step(x, target=x).loss.item() - loss.item()) < EXACT, frozen
        assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT
    own = {id(p) for stage in runtime.stages for p in stage.parameters()}
    assert all(id(p) in own or not p.shape.numel() for p in model.parameters())


class Centred(nn.Module):
    """Takes the mean of all rows from each as often as it is told to; for that weights of all ranks run."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x, times):
        for linear in self.inner:
            x = torch.tanh(linear(x))
        return x - sum(x.mean(0) for _ in range(int(times)))


def released_weights_hide_no_rows_that_meet():
    """What is first met when each rank has its own weights alone is asked for rows that it mixes."""
    torch.manual_seed(0)
    x = torch.randn(8, 8, dtype=torch.float64)
    made = make(Centred().double(), (x, torch.tensor(0)), {}, n_stages=dist.get_world_size())
    runtime = Runtime(*made, loss_fn=F.mse_loss, release=True, n_microbatches=2)
    runtime.step(x, torch.tensor(0), target=x)
    with pytest.raises(InputError, match=r"mean\(0\)\)* at .*runtime_checks.py:\d+"):
        runtime.step(x, torch.tensor(2), target=x)


def ragged_patches():
    """Images of several sizes: microbatches of equally many samples, and of other shapes."""
    world = dist.get_world_size()
    for feed in (None, world - 1):
        torch.manual_seed(0)
        model = PackedPatches().double()
        plain = copy.deepcopy(model)
        made = make(model, (), documents([(1, 4, 4)] * 2, dtype=torch.float64), n_stages=world)
        runtime = Runtime(*made, feed=feed)
        for grids in ([(1, 2, 4), (2, 4, 4), (1, 4, 4), (1, 2, 2)], [(1, 4, 4)] * 3):
            batch = documents(grids, dtype=torch.float64)
            is_given = feed in (None, dist.get_rank())
            loss = runtime.step(**batch if is_given else {}, **{"n_microbatches": 2} if is_given else {}).loss
            wanted = plain(**batch)["loss"]
            wanted.backward()
            assert abs(loss.item() - wanted.item()) < EXACT
        assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT


class Rendezvous:
    """A communicator as strict as NCCL's: one stream per pair of ranks, a send blocks until it is received.

    Two ranks that send to each other at once would take the other's tensor for the acknowledgement.
    """

    def __init__(self, group):
        self.group, self.wait = group, group.wait
        self.n_messages = 0

    def link(self, peer):
        return None

    def send(self, tensor, peer):
        self.n_messages += 1
        leaving, answer = self.group.send(tensor, peer), torch.zeros(3, dtype=torch.uint8)
        self.group.recv(answer, peer).wait(FOREVER)
        assert answer.tolist() == [1, 2, 3]
        return leaving

    def recv(self, tensor, peer):
        arriving = self.group.recv(tensor, peer)
        arriving.wait(FOREVER)
        self.group.send(torch.tensor([1, 2, 3], dtype=torch.uint8), peer).wait(FOREVER)
        return Done()


class Done:
    def wait(self, limit):
        pass


def rendezvous():
    """Every schedule gets through when sends and receives block in turn, each pair of ranks in one line."""
    world = dist.get_world_size()
    for schedule, per_rank in SCHEDULES.items():
        model, captured, plan, stages = adversary(schedule, world, per_rank)
        plain = copy.deepcopy(model)
        runtime = Runtime(captured, plan, stages, loss_fn=adversary_loss, stall_limit_s=10.0)
        channel = runtime._engine._channel
        strict = Rendezvous(channel.groups[True])
        channel.groups = strict, strict
        torch.manual_seed(7)
        for _ in range(2):
            args, kwargs, target = adversary_batch(8, 4)
            runtime.step(*args, **kwargs, target=target)
            adversary_loss(plain(*args, **kwargs), target).backward()
        assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT, schedule
        assert strict.n_messages > 0


class Wide(nn.Module):
    """Stages hand on a large value, one that skips to the end, and a narrow one."""

    def __init__(self, n=6, d=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(n))
        self.narrow = nn.Linear(d, 1)

    def forward(self, x):
        skip = h = self.layers[0](x)
        small = self.narrow(skip)
        for layer in self.layers[1:]:
            h = torch.relu(layer(h)) + 0.1 * skip + small
        return h


def _wide():
    return Wide(), (torch.randn(2, 20, 16),)


def messages_of_all_sizes():
    """Far more messages than a socket holds, on it and through shared memory; then as between hosts."""
    world = dist.get_world_size()
    connect, rows = peers.connect, 64
    ask_ahead, n_ahead = channels._Way.recv_ahead, 0

    def counted(way, m):
        nonlocal n_ahead
        ask_ahead(way, m)
        n_ahead += m in way._arriving

    channels._Way.recv_ahead = counted
    for length, is_apart in ((20, False), (300, False), (20, True)):
        peers.connect = (lambda *_: {}) if is_apart else connect
        n_ahead = 0
        for schedule in ("gpipe", "zb-h1", "interleaved"):
            captured = captured_once(_wide)
            plain, x = copy.deepcopy(captured.model), torch.randn(rows, length, 16)
            n_stages = world * SCHEDULES[schedule]
            made = cut(captured, n_stages=n_stages, n_ranks=world, schedule=schedule)
            runtime = Runtime(*made, loss_fn=F.mse_loss, n_microbatches=rows // 2, stall_limit_s=20.0)
            runtime.step(x, target=x)
            F.mse_loss(plain(x), x).backward()
            assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < 1e-5
        # the group alone is asked for a message before it is its turn, and links carry all of these
        assert bool(n_ahead) is is_apart, (length, is_apart, n_ahead)
    peers.connect, channels._Way.recv_ahead = connect, ask_ahead


def tails():
    tail_checks.on_ranks(DEVICE)


def what_hangs_on_ranks(*schedules):
    """Of what is so on two ranks what may be otherwise on ranks that have two neighbours."""
    shapes_may_depend_on_data()
    one_rank_feeds()
    adversary_on_every_schedule(*schedules)
    noise_does_not_depend_on_ranks()
    matched_report()


def everything(*schedules):
    sizes_may_take_another_way()
    kinds_that_were_not_met_are_recorded()
    tasks_that_were_not_met_train_their_own_heads()
    ragged_patches()
    accumulation_and_zero_grad()
    overflow_and_autocast()
    what_hangs_on_ranks(*schedules)


# -- failures: each rank prints how and when it ended ---------------------------------------------------


def failing(how, *rest):
    """Rank 1, or the store's host, fails in the second step; every other rank prints what it was told."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, captured, plan, stages = mlp(world, tied=how == "ties")
    options = {"stall_limit_s": 4.0}
    failing_rank = 0 if how in ("kill host", "host left") else 1
    if how == "plan" and rank == 1:
        _, captured, plan, stages = mlp(world, n_microbatches=2)
    if how == "code" and rank == 1:
        _, captured, plan, stages = mlp(world, tied=True)
    if how == "never" and rank == 1:
        time.sleep(100)  # it is ended when the others are
    if how == "left" and rank == 1:
        sys.exit(0)
    x = torch.randn(8, 8, dtype=torch.float64)
    try:
        runtime = Runtime(captured, plan, stages, loss_fn=F.mse_loss, **options)
        runtime.step(x, target=x)
        if rank == failing_rank:
            counter = iter(range(100))
            stages[rank].register_forward_pre_hook(lambda *_: misbehave(how) if next(counter) == 1 else None)
        began = time.time()
        if how == "shape" and rank == 1:
            x = x[:6]
        if how == "data" and rank == 1:
            x = x + 1
        if how == "ties" and rank == 2:
            with torch.no_grad():
                next(model.parameters()).add_(1)
        if how == "host left" and rank == failing_rank:
            return
        if how == "clip" and rank == 1:
            runtime.clip_grad_norm_(1.0)
        if how == "own code" and rank == 1:
            raise ValueError("no more data")
        if how == "save":
            optimizer = torch.optim.SGD((nn.Linear(2, 2) if rank == 1 else runtime).parameters(), 0.1)
            runtime.save(pathlib.Path(rest[1]), optimizer=optimizer)
        if how == "hook" and rank == 0:  # which ends its step last
            next(runtime.parameters()).register_hook(lambda _: misbehave("raise"))
        if how == "nan" and rank == 1:
            with torch.no_grad():
                next(stages[1].parameters()).fill_(float("nan"))
        runtime.step(x, target=x)
    except (AutopipeError, RuntimeError) as error:
        if isinstance(error, InputError) or (how == "kill" and error.__cause__):  # a broken link says no more
            raise
        began = locals().get("began", time.time())
        print(f"{type(error).__name__} after {time.time() - began:.1f} s: {error}", flush=True)
        told = pathlib.Path(rest[1])
        (told / f"told-{rank}").touch()
        while rank == 0 and int(rest[0]) and len([*told.glob("told-*")]) < world:
            time.sleep(0.02)  # others read their cause in its store
        os._exit(3)
    print("no error", flush=True)
    os._exit(0)


def misbehave(how):
    if how == "raise":
        raise ValueError("bad weather")
    if how == "oom":
        raise torch.OutOfMemoryError("out of memory: tried to allocate 3 GiB")
    if how in ("kill", "kill host"):
        os.kill(os.getpid(), 9)
    if how == "stuck":
        time.sleep(100)  # it is ended when the others are
    if how == "exit":
        sys.exit(5)


def patience():
    """A rank may take its time between steps, also after a talk with the others."""
    _, *made = mlp(dist.get_world_size())
    runtime = Runtime(*made, loss_fn=F.mse_loss, stall_limit_s=1.5)
    x = torch.randn(8, 8, dtype=torch.float64)
    for _ in range(2):
        runtime.step(x, target=x)
        runtime.report()
        if dist.get_rank() == 1:
            time.sleep(3)


def growth(n_steps):
    """Thousands of steps without a byte more, on every rank."""
    import resource

    _, *made = mlp(dist.get_world_size())
    runtime = Runtime(*made, loss_fn=F.mse_loss)
    x = torch.randn(8, 8, dtype=torch.float64)

    def resident():
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    for _ in range(200):
        runtime.step(x, target=x)
    before = resident()
    for _ in range(int(n_steps)):
        runtime.step(x, target=x)
    assert resident() - before < 4 << 20, (before, resident())
