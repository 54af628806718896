"""What the runtime does on the simulated accelerator; ``python accelerated_checks.py CHECK ...`` is one rank.

Every rank works on the device after its own number while device 0 is current. Each check runs eagerly under
the order check, and lazily, and its results equal the CPU's.
"""

import contextlib
import copy
import datetime
import itertools
import os
import pathlib
import sys
import time

import pytest
import simulated
import simulated.group
import torch
import torch.distributed as dist
from runtime_models import adversary, adversary_batch, adversary_loss, make, worst
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopipe
from autopipe import accelerator, measure
from autopipe.errors import StepError
from autopipe.runtime import Runtime

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DEVICE = torch.device("sim", RANK + 1)
WAYS = {"eager": {"races": 2}, "lazy": {"races": 0, "lazy": True}}
BATCHES = ((8, 6, 4), (7, 5, 4), (3, 6, 4), (8, 6, 4), (8, 6, 4), (8, 6, 4), (8, 6, 4))
SCHEDULES = {
    "gpipe": 1,
    "1f1b": 1,
    "interleaved": 2,
    "looped-bfs": 2,
    "zb-h1": 1,
    "zb-h2": 1,
    "zbv": 2,
    "dualpipev": 2,
    "cost-aware": 2,
}
EXACT = 1e-12


def train(step, parameters, clip):
    """Losses and norms of the batches, and the host's waits within each step."""
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.9)
    torch.manual_seed(7)
    losses, norms, waits = [], [], []
    for rows, length, m in BATCHES:
        batch = adversary_batch(rows, length)
        optimizer.zero_grad()
        with simulated.waits("autopipe") as found:
            losses.append(step(*batch, m))
            norms.append(clip(0.05))
        optimizer.step()
        waits.append(dict(found))
    return [x.item() for x in losses], [x.item() for x in norms], waits


def plain(model):
    def step(args, kwargs, target, m):
        loss = adversary_loss(model(*args, **kwargs), target)
        loss.backward()
        return loss.detach()

    return train(step, model.parameters(), lambda n: nn.utils.clip_grad_norm_(model.parameters(), n))


def ways_of(place, is_whole):
    """All ways, or one: that of the place in a row of checks, so that neighbours are run in unlike ones."""
    return tuple(WAYS) if is_whole else (tuple(WAYS)[place % len(WAYS)],)


def schedules(*names, offload="never"):
    """The adversarial program: every schedule equals the plain model, no race, no wait after warm-up.

    Those named in one way each, which is another on another number of ranks; without names all in both.
    """
    for i, name in enumerate(names or SCHEDULES):
        again = ({}, {"recompute": (0,)}, {"block_size": 3})[i % 3]
        for way in ways_of(i + WORLD, not names):
            model, *made = adversary(WORLD * SCHEDULES[name], name, WORLD, offload=offload, **again)
            wanted_model = copy.deepcopy(model)
            wanted = plain(wanted_model)
            with simulated.settings(**WAYS[way]):
                runtime = Runtime(*made, loss_fn=adversary_loss, device=DEVICE)
                assert torch.accelerator.current_device_index() == 0

                def step(args, kwargs, target, m, runtime=runtime):
                    return runtime.step(*args, **kwargs, target=target, n_microbatches=m).loss

                losses, norms, waits = train(step, runtime.parameters(), runtime.clip_grad_norm_)
                own = {name: p.detach().cpu() for name, p in runtime.named_parameters()}
            where = name, way, RANK
            assert max(abs(a - b) for a, b in zip(losses, wanted[0], strict=True)) < EXACT, where
            assert max(abs(a - b) for a, b in zip(norms, wanted[1], strict=True)) < EXACT, where
            assert worst(own, dict(wanted_model.named_parameters())) < EXACT, where
            assert not any(waits[3:]), (where, waits)
    assert not simulated.take_races()


def activations_on_the_host():
    """Whatever is kept on the host meanwhile, results are the plain model's; and the device holds less."""
    schedules("zb-h1", offload="activations")
    peaks = [kept_bytes(offload) for offload in ("never", "activations")]
    assert peaks[1] < 0.5 * peaks[0], peaks


def kept_bytes(offload):
    """The most the device holds in a step of eight microbatches, all in flight, over what it starts with."""
    layers = [m for _ in range(12) for m in (nn.Linear(64, 64), nn.Tanh())]
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(3))
    options = {"n_stages": WORLD, "n_ranks": WORLD, "schedule": "gpipe", "n_microbatches": 8}
    made = make(nn.Sequential(*layers), (x,), {}, offload=offload, **options)
    with simulated.settings(**WAYS["eager"]):
        runtime = Runtime(*made, loss_fn=nn.functional.mse_loss, device=DEVICE)
        for _ in range(3):  # the first steps ask about the loss, of all microbatches together
            runtime.step(x, target=x)
        before = accelerator.held_bytes(DEVICE)
        accelerator.reset_peak(DEVICE)
        runtime.step(x, target=x)
    return accelerator.peak_bytes(DEVICE) - before


class Wide(nn.Module):
    """What crosses has every kind of dtype; one stage may have no parameter that trains."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        h = self.first(x)
        small, mask, many = h.detach().mul(9).to(torch.int16), h > 0, torch.complex(h, h)
        h = torch.tanh(h)
        h = torch.where(mask, h + small.to(h.dtype) * 1e-3, many.real)
        return self.last(h)


class Dropping(nn.Module):
    """Dropout, in blocks that a checkpoint of the model's own runs again in backward, or not."""

    def __init__(self, is_checkpointed):
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.is_checkpointed = is_checkpointed

    def block(self, lin, x):
        return x + nn.functional.dropout(torch.tanh(lin(x)), 0.4)

    def forward(self, x):
        for lin in self.lins:
            x = (
                checkpoint(self.block, lin, x, use_reentrant=False)
                if self.is_checkpointed
                else self.block(lin, x)
            )
        return x


def mse_step(model, n_stages, *, n_ranks=WORLD, dtype=torch.float64, **options):
    """One step of a model of rows of eight numbers: the runtime, its loss and this rank's gradients."""
    plan_options = {k: options.pop(k) for k in ("recompute", "block_size") if k in options}
    x = torch.randn(4, 8, dtype=dtype, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(5)
    made = make(model.to(dtype), (x,), {}, n_stages=n_stages, n_ranks=n_ranks, **plan_options)
    torch.manual_seed(6)
    runtime = Runtime(*made, loss_fn=nn.functional.mse_loss, **{"device": DEVICE, **options})
    feeds = "feed" not in options or runtime.rank == options["feed"]
    loss = runtime.step(x, target=x, n_microbatches=2).loss if feeds else runtime.step().loss
    named = {n: p.grad.detach().cpu() for n, p in runtime.named_parameters() if p.grad is not None}
    return runtime, loss.item(), named


def every_dtype_crosses():
    torch.manual_seed(0)
    plain = Wide()
    _, loss, found = mse_step(copy.deepcopy(plain), WORLD, feed=0)
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    wanted = nn.functional.mse_loss(plain.double()(x), x)
    wanted.backward()
    assert abs(loss - wanted.item()) < EXACT
    assert worst(found, {n: p.grad for n, p in plain.named_parameters()}) < EXACT


def dropout_hangs_on_nothing():
    """Not on the current device, the number of stages, nor on what runs again in backward."""
    found = []
    for current in (0, DEVICE.index):
        torch.accelerator.set_device_index(current)
        for is_checkpointed in (False, True):
            for again in ({}, {"recompute": (0,)}, {"block_size": 2}):
                torch.manual_seed(0)
                model = Dropping(is_checkpointed)
                found.append(mse_step(model, WORLD, **again)[1:])
    torch.accelerator.set_device_index(0)
    for loss, gradients in found[1:]:
        assert abs(loss - found[0][0]) < EXACT
        assert worst(gradients, found[0][1]) < EXACT


def generators_need_not_be_shown():
    """Of a device whose module only says how to seed it: masks are the same, and the user's draws go on."""
    found = []
    for is_shown in (True, False):
        shown = vars(torch.sim)["default_generators"]
        if not is_shown:
            del vars(torch.sim)["default_generators"]
        try:
            torch.manual_seed(0)
            found.append(mse_step(Dropping(True), WORLD, recompute=(0,))[1:])
            with accelerator.using(DEVICE):
                found[-1] += (torch.rand(4, device=DEVICE).cpu(),)
        finally:
            vars(torch.sim)["default_generators"] = shown
    (loss, gradients, drawn), (other, again, later) = found
    assert loss == other
    assert worst(gradients, again) == 0
    assert torch.equal(drawn, later)


def a_scaler_steps_where_nothing_trains():
    torch.manual_seed(0)
    model = Wide()
    model.first.requires_grad_(False)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    made = make(model, (x,), {}, n_stages=WORLD, n_ranks=WORLD)
    runtime = Runtime(*made, loss_fn=nn.functional.mse_loss, device=DEVICE, scaler=scaler)
    optimizer = torch.optim.AdamW(runtime.parameters(), 0.1)
    for i in range(2):
        optimizer.zero_grad()
        runtime.step(x * (1e30 if i else 1.0), target=x, n_microbatches=2)
        scaler.unscale_(optimizer)
        runtime.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0  # the second step overflowed, on every rank


def the_rank_picks_its_device():
    """Of a group that was made without naming a backend; the model was built on the CPU.

    Where no device is asked for, or a kind of device.
    """
    for device in (None, "sim"):
        torch.accelerator.set_device_index(WORLD)
        torch.manual_seed(0)
        runtime, *_ = mse_step(Wide(), WORLD, device=device)
        assert runtime.device == torch.device("sim", int(os.environ["LOCAL_RANK"]))
        assert torch.accelerator.current_device_index() == runtime.device.index
        assert all(p.device == runtime.device for p in runtime.parameters())
        assert not runtime.engine.peers.crowded
    torch.accelerator.set_device_index(WORLD)
    autopipe.plan(Wide(), WORLD, args=(torch.zeros(4, 8),))  # which one rank decides
    assert torch.accelerator.current_device_index() == int(os.environ["LOCAL_RANK"])


def the_links_are_probed():
    """Over the group that carries the device's tensors, between ranks that each have the current one."""
    torch.accelerator.set_device_index(DEVICE.index)
    with simulated.settings(**WAYS["eager"]):
        cluster = measure.probe(WORLD)
    assert cluster.n_ranks == WORLD
    assert not cluster.cores  # those of hosts are no ranks' own
    for a, b in itertools.permutations(range(WORLD), 2):
        link = cluster.links[a, b]
        assert "simccl" in link.source
        assert link.latency_s > 0
        assert link.bandwidth_bytes_s > 0
        assert not link.host_s
    assert all(device.memory_bytes for device in cluster.devices)
    assert not simulated.take_races()


def times_are_the_devices():
    torch.manual_seed(0)
    with simulated.settings(delay_us=2000):
        runtime, *_ = mse_step(Wide(), WORLD)
    report = runtime.report()
    assert report.measured_step_s > 5e-3
    assert all(seconds > 5e-4 for stage in report.stages for seconds in stage.measured.values())


def a_batch_may_be_overwritten():
    """In pinned memory or not: as soon as the call returns, whenever the device comes to it."""
    torch.manual_seed(0)
    model = Wide().double()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 8, dtype=torch.float64).pin_memory()
    target = x.clone().pin_memory()
    made = make(model, (x.clone(),), {}, n_stages=WORLD, n_ranks=WORLD)
    for feed in (None, 0):
        runtime = Runtime(*made, loss_fn=nn.functional.mse_loss, device=DEVICE, feed=feed)
        for i in range(3):
            given = {} if feed is not None and RANK else {"x": x, "target": target}
            if i == 2:
                with simulated.waits("autopipe") as found:
                    runtime.step(**given)
                assert not found
            else:
                runtime.step(**given)
            nn.functional.mse_loss(plain(x), target).backward()
            x += 1.0  # the next batch, in the same memory
            target *= 0.5
        named = {n: p.grad for n, p in runtime.named_parameters()}
        assert worst(named, {n: p.grad for n, p in plain.named_parameters()}) < EXACT


def accumulating_waits_for_nothing():
    torch.manual_seed(0)
    model = Wide().double()
    plain = copy.deepcopy(model)
    x = torch.randn(4, 8, dtype=torch.float64)
    made = make(model, (x,), {}, n_stages=WORLD, n_ranks=WORLD)
    runtime = Runtime(*made, loss_fn=nn.functional.mse_loss, device=DEVICE)
    for _ in range(4):
        with simulated.waits("autopipe") as found:
            loss = runtime.accumulate([{"x": x, "target": x}, {"x": x[:3] + 1, "target": x[:3]}]).loss
    assert not found, found
    whole = torch.cat([x, x[:3] + 1])
    wanted = nn.functional.mse_loss(plain(whole), torch.cat([x, x[:3]]))
    assert abs(loss.item() - wanted.item()) < EXACT


def the_callers_stream_is_used():
    """A step made within a stream of the user's, between work of theirs on it."""
    for i in range(2):
        torch.manual_seed(0)
        plain = Wide().double()
        made = make(copy.deepcopy(plain), (torch.randn(4, 8).double(),), {}, n_stages=WORLD, n_ranks=WORLD)
        runtime = Runtime(*made, loss_fn=nn.functional.mse_loss, device=DEVICE)
        torch.accelerator.synchronize(DEVICE)
        side = torch.Stream(DEVICE)
        for _ in range(2):
            with side if i else contextlib.nullcontext():
                x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
                there = x.to(DEVICE) * 2
                loss = runtime.step(there, target=there, n_microbatches=2).loss * 3
                found = {n: p.grad.cpu() for n, p in runtime.named_parameters() if p.grad is not None}
                loss = loss.item()
        wanted = nn.functional.mse_loss(plain(2 * x), 2 * x)
        (2 * wanted).backward()
        assert abs(loss - 3 * wanted.item()) < EXACT
        assert worst(found, {n: p.grad for n, p in plain.named_parameters()}) < EXACT


class Bulky(nn.Module):
    """What crosses is large, and nobody's backward needs it."""

    def __init__(self, n_columns):
        super().__init__()
        self.grow, self.shrink, self.n = nn.Linear(8, 8), nn.Linear(8, 8), n_columns

    def forward(self, x):
        large = self.grow(x).repeat(1, self.n)
        return self.shrink(large.view(len(x), self.n, 8).sum(1))


def what_was_sent_is_let_go():
    """However many microbatches are in flight, a rank holds a few messages, not the outputs of all."""
    n_columns, m = 4096, 16
    message = 8 * 8 * n_columns
    for schedule in ("gpipe", "1f1b"):
        torch.manual_seed(0)
        model, x = Bulky(n_columns), torch.randn(m, 8)
        made = make(model, (x[:2],), {}, n_stages=2, n_ranks=WORLD, schedule=schedule, cuts=[2])
        runtime = Runtime(*made, loss_fn=nn.functional.mse_loss, device=DEVICE, n_microbatches=m)
        runtime.step(x, target=x)
        torch.accelerator.synchronize(DEVICE)
        torch.accelerator.reset_peak_memory_stats(DEVICE)
        before = torch.accelerator.memory_allocated(DEVICE)
        runtime.step(x, target=x)
        held = (torch.accelerator.max_memory_allocated(DEVICE) - before) / (message / 2)
        assert held < 9, (schedule, RANK, held)


def thawed_layers_train():
    """Recomputed stages learn anew what requires a gradient, whenever that changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    model[0].requires_grad_(False)
    plain, x = copy.deepcopy(model), torch.randn(4, 8, dtype=torch.float64)
    made = make(model, (x,), {}, n_stages=WORLD, n_ranks=WORLD, recompute=tuple(range(WORLD)))
    runtime = Runtime(*made, loss_fn=nn.functional.mse_loss, device=DEVICE)
    for thawed in (False, True, False):
        for one in (model, plain):
            one[0].requires_grad_(thawed)
            one.zero_grad()
        runtime.step(x, target=x, n_microbatches=2)
        nn.functional.mse_loss(plain(x), x).backward()
        named = {n: p.grad for n, p in runtime.named_parameters()}
        assert worst(named, {n: p.grad for n, p in plain.named_parameters()}) < EXACT, thawed


def out_of_memory_is_told_as_such():
    torch.manual_seed(0)
    runtime, *_ = mse_step(Wide(), WORLD)
    x = torch.randn(1 << 12, 8, dtype=torch.float64)
    room = torch.accelerator.memory_reserved(DEVICE) + ((1 << 16) if RANK else (1 << 30))
    with simulated.settings(capacity=room), pytest.raises(StepError, match="OutOfMemoryError") as caught:
        runtime.step(x, target=x, n_microbatches=2)
    assert "is gone" not in str(caught.value)
    settle(runtime)


def one_card_runs_many_ranks():
    """Processes that share a device: messages go by way of the host, results are the same."""
    torch.manual_seed(0)
    plain = Wide()
    runtime, loss, _ = mse_step(copy.deepcopy(plain), WORLD, device="sim:0")
    assert type(runtime._engine.peers.group).__name__ == "StagedGroup"
    assert runtime._engine.peers.crowded == tuple(range(WORLD))
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert abs(loss - nn.functional.mse_loss(plain.double()(x), x).item()) < EXACT


def a_failure_elsewhere_ends_the_step():
    """A rank fails while the others' streams wait for it: they raise its cause, and give out no numbers."""
    torch.manual_seed(0)
    runtime, *_ = mse_step(Wide(), WORLD)
    if RANK:
        runtime.stages[0].register_forward_pre_hook(_fails)
    with pytest.raises(StepError, match=r"rank 1, stage 1.*on purpose"):
        three_losses(runtime)
    settle(runtime)


def a_failing_op_is_told():
    """The device fails and its host, which never waits for it, would go on: every rank raises why."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    made = make(model, (torch.zeros(4, dtype=torch.int64),), {}, n_stages=WORLD, n_ranks=WORLD)
    runtime = Runtime(*made, loss_fn=nn.functional.mse_loss, device=DEVICE, check_finite=False)
    wanted = torch.zeros(4, 8)
    for _ in range(3):  # later ones wait for nothing
        runtime.step(torch.zeros(4, dtype=torch.int64), target=wanted)
    with contextlib.suppress(StepError):  # where the allocator asks after the device meanwhile
        runtime.step(torch.full((4,), 9), target=wanted)
    deadline = time.monotonic() + 30
    while runtime._engine.peers.watch.failure is None and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(StepError, match=r"^rank 0('s device failed|, ).*index"):
        runtime.step(torch.zeros(4, dtype=torch.int64), target=wanted)
    settle(runtime)


def a_rank_that_hangs_is_found():
    """The host is through with the step long since; its stream waits for a rank that never sends."""
    torch.manual_seed(0)
    runtime, *_ = mse_step(Wide(), WORLD, stall_limit_s=2.0)
    if RANK:
        runtime.stages[0].register_forward_pre_hook(lambda *_: time.sleep(8))
    began = time.monotonic()
    with pytest.raises(StepError, match=r"rank 1 is stuck in|ranks wait for one another|no sign of life"):
        three_losses(runtime)
    assert time.monotonic() - began < 40
    settle(runtime)


def three_losses(runtime):
    """A host runs ahead of its stream: it may hear only in the next step that one failed."""
    x = torch.randn(4, 8, dtype=torch.float64)
    for _ in range(3):
        float(runtime.step(x, target=x, n_microbatches=2).loss)


def settle(runtime):
    """What a failed step left under way comes to its end, before its memory is free."""
    runtime._engine.peers.close()
    with contextlib.suppress(RuntimeError):
        torch.accelerator.synchronize(DEVICE)


def _fails(*_):
    raise ValueError("on purpose")


def each_class_of_fault():
    every_dtype_crosses()
    a_batch_may_be_overwritten()
    accumulating_waits_for_nothing()
    the_callers_stream_is_used()
    what_was_sent_is_let_go()
    thawed_layers_train()
    dropout_hangs_on_nothing()
    generators_need_not_be_shown()
    a_scaler_steps_where_nothing_trains()
    times_are_the_devices()
    out_of_memory_is_told_as_such()
    a_failure_elsewhere_ends_the_step()
    a_failing_op_is_told()
    a_rank_that_hangs_is_found()
    assert not simulated.take_races()
    assert not simulated.native.strays()


def in_ways(calls, backend="gloo", **more):
    """Join the group, make each call in its ways, eagerly under the order check or lazily, and leave."""
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
    for call, ways in calls:
        for way in ways:
            with simulated.settings(**WAYS[way], **more):
                call()
    assert not simulated.take_races()
    leave()


def leave():
    """End well once all ranks are through, whatever threads are left."""
    print("done", flush=True)
    if WORLD > 1:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"done {RANK}", "")
        store.wait([f"done {rank}" for rank in range(WORLD)])
    os._exit(0)


def the_job_is_joined():
    """By split, in a script that says nothing of ranks nor devices: costs are of what the stages train on."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(8, 8)
    plain = copy.deepcopy(model)
    with simulated.settings(**WAYS["eager"]):
        pipe = autopipe.split(model, WORLD, (x,), n_microbatches=2)
        threads = [path.read_text().strip() for path in pathlib.Path("/proc/self/task").glob("*/comm")]
        assert "gloo_tcp_loop" in threads, threads  # the host's half of the group is still there
        assert pipe.costs.device == accelerator.name(torch.device("sim"))
        runtime = pipe.runtime(nn.functional.mse_loss)
        assert runtime.device == torch.device("sim", int(os.environ["LOCAL_RANK"]))
        assert torch.accelerator.current_device_index() == runtime.device.index
        found = runtime.step(x, target=x).loss
    assert abs(found.item() - nn.functional.mse_loss(plain(x), x).item()) < 1e-6
    assert not simulated.take_races()


GROUPS = {"the_rank_picks_its_device": (), "the_links_are_probed": ("simccl",)}
"""What group a check is in, beside gloo."""


def main(check, *arguments):
    if WORLD > 1 and check != "the_job_is_joined":
        dist.init_process_group(*GROUPS.get(check, ("gloo",)), timeout=datetime.timedelta(seconds=60))
    globals()[check](*arguments)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
