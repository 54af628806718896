"""Training programs as users of an accelerator write them; ``python user_checks.py NAME ...`` is one rank.

Each trains a pipeline of two ranks through ``autopipe.split``, and the plain model by the same loop on the
same device in one process; both end alike. Without names all run, lazily too.
"""

import copy
import gc
import json
import pathlib
import sys
import tempfile
import warnings

import accelerated_checks
import simulated
import torch
import torch.distributed as dist
from accelerated_checks import DEVICE, RANK, WORLD
from around_checks import layouts, overflow_on_one_stage, side_by_side
from kind_models import KINDS, check_calls, model_and_twin
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from user_models import (
    Labelled,
    Mlp,
    Net,
    Writes,
    alike,
    follow,
    ids,
    loss_fn,
    near,
    numbers,
    same_gradients,
    seeded,
    split,
)

import autopipe
from autopipe import demo


def mixed_precision():
    """Autocast to half or bfloat16, GradScaler, clipping, AdamW and a schedule of its rate."""
    for dtype in (torch.bfloat16, torch.float16):
        model = seeded(Net)
        plain = copy.deepcopy(model).to(DEVICE)
        scalers = [torch.amp.GradScaler("sim", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
        _, runtime = split(model, ids(), runtime={"autocast": dtype, "scaler": scalers[0]})
        optimizers = [torch.optim.AdamW(list(m.parameters()), 1e-2) for m in (runtime, plain)]
        rates = [torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6) for o in optimizers]
        for step in range(5):
            batch = ids(seed=step)
            for o in optimizers:
                o.zero_grad()
            loss = runtime.step(batch, target=batch).loss
            there, total = batch.to(DEVICE), 0.0
            for part in there.chunk(4):
                with torch.autocast("sim", dtype):
                    out = plain(part)
                    mean = loss_fn(out, part) / 4
                scalers[1].scale(mean).backward()
                total += mean.item()
            near(loss, total, 2e-3)
            for scaler, o in zip(scalers, optimizers, strict=True):
                scaler.unscale_(o)
            near(runtime.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(plain.parameters(), 0.5), 2e-3)
            for scaler, o, rate in zip(scalers, optimizers, rates, strict=True):
                scaler.step(o)
                scaler.update()
                rate.step()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        alike(runtime, plain, 5e-3)


def half_weights():
    """A model kept in bfloat16, and one in half precision."""
    for dtype in (torch.bfloat16, torch.float16):
        model = seeded(Net).to(dtype)
        plain = copy.deepcopy(model).to(DEVICE)
        _, runtime = split(model, ids())
        optimizers = [torch.optim.SGD(list(m.parameters()), 0.1) for m in (runtime, plain)]
        for step in range(3):
            batch = ids(seed=step)
            loss = runtime.step(batch, target=batch).loss
            total = 0.0
            for part in batch.to(DEVICE).chunk(4):
                mean = loss_fn(plain(part), part) / 4
                mean.backward()
                total += mean.item()
            near(loss, total, 1e-2)
            for o in optimizers:
                o.step()
                o.zero_grad()
        alike(runtime, plain, 2e-2)


def compiled():
    """Stages behind torch.compile."""
    for schedule in ("1f1b", "zb-h1"):
        model = seeded(Net)
        plain = copy.deepcopy(model).to(DEVICE)
        _, runtime = split(model, ids(), schedule=schedule)
        runtime.wrap(lambda stage: torch.compile(stage, backend="aot_eager"))
        follow(runtime, plain, loss_fn, [ids(seed=i) for i in range(3)])


def ragged_epochs():
    """A loader whose last batch has three rows or one; evaluation in between, with dropout and batch norm."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 8), nn.Linear(8, 8)
    )
    plain = copy.deepcopy(model).to(DEVICE)
    pipe, runtime = split(model, numbers(), loss=F.mse_loss, n_microbatches=2)
    optimizers = [torch.optim.Adam(list(m.parameters()), 0.01) for m in (runtime, plain)]
    data = numbers(20)
    for _ in range(2):
        pipe.train(), plain.train()
        for batch in data.split(8):
            runtime.step(batch, target=batch)
            there = batch.to(DEVICE)
            # statistics are those of microbatches: as many rows as the pipe gave each
            for part in torch.tensor_split(there, 2):
                (F.mse_loss(plain(part), part) * len(part) / len(there)).backward()
            for o in optimizers:
                o.step()
                o.zero_grad()
        pipe.eval(), plain.eval()
        with torch.no_grad():
            wanted = plain(data[:5].to(DEVICE))
        result = runtime.evaluate(data[:5], target=data[:5], return_outputs=True)
        near(result.loss, F.mse_loss(wanted, data[:5].to(DEVICE)))
        torch.testing.assert_close(result.outputs.cpu(), wanted.cpu(), atol=1e-5, rtol=0)
        torch.testing.assert_close(runtime.forward(data[:1]).cpu(), wanted[:1].cpu(), atol=1e-5, rtol=0)
    alike(runtime, plain, 1e-5)


def saved_midway():
    """Saved in the midst of an epoch, resumed on another device, and read by the plain model."""
    shared = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(shared, 0)
    model = seeded(Net)
    plain = copy.deepcopy(model).to(DEVICE)
    _, runtime = split(model, ids())
    optimizer = torch.optim.AdamW(runtime.parameters(), 0.01, eps=1e-3)
    other_optimizer = torch.optim.AdamW(plain.parameters(), 0.01, eps=1e-3)

    def one(rt, opt, step):
        rt.step(ids(seed=step), target=ids(seed=step))
        opt.step()
        opt.zero_grad()

    def one_plain(step):
        there = ids(seed=step).to(DEVICE)
        loss_fn(plain(there), there).backward()
        other_optimizer.step()
        other_optimizer.zero_grad()

    for step in range(2):
        one(runtime, optimizer, step)
        one_plain(step)
    runtime.save(f"{shared[0]}/at", optimizer=optimizer, background=True).wait()
    elsewhere = torch.device("sim", WORLD - RANK)
    _, again = split(seeded(Net), ids(), device=elsewhere)
    fresh = torch.optim.AdamW(again.parameters(), 0.5)
    again.load(f"{shared[0]}/at", optimizer=fresh)
    for step in range(2, 4):
        one(again, fresh, step)
        one(runtime, optimizer, step)
        one_plain(step)
    alike(again, plain, 1e-5)
    alike(runtime, plain, 1e-5)
    again.save(f"{shared[0]}/one.pt")
    read = Net()
    read.load_state_dict(torch.load(f"{shared[0]}/one.pt", weights_only=True))
    for name, value in read.named_parameters():
        torch.testing.assert_close(value, plain.get_parameter(name).cpu(), atol=1e-5, rtol=0)


def pinned_loader():
    """Batches of a loader that pins, sent ahead by the user on the stream that is current, or on another."""
    model = seeded(Mlp)
    plain = copy.deepcopy(model).to(DEVICE)
    _, runtime = split(model, numbers(), loss=F.mse_loss)
    optimizers = [torch.optim.SGD(list(m.parameters()), 0.05) for m in (runtime, plain)]
    loader = DataLoader(TensorDataset(numbers(40)), batch_size=8)
    side = torch.Stream(DEVICE)
    main = torch.accelerator.current_stream(DEVICE)
    for i, (batch,) in enumerate(loader):
        pinned = batch.pin_memory()
        if i % 2:
            with side:
                x = pinned.to(DEVICE, non_blocking=True)
            main.wait_stream(side)
            x.record_stream(main)
        else:
            x = pinned.to(DEVICE, non_blocking=True)
        found = runtime.step(x, target=x).loss
        wanted = F.mse_loss(plain(x), x)
        wanted.backward()
        for o in optimizers:
            o.step()
            o.zero_grad()
        x.zero_()  # its memory is the user's again
        near(found, wanted)
    alike(runtime, plain)


def written_inputs():
    """Inputs that the user changes in place between steps, and values that the model changes."""
    model = seeded(Writes)
    plain = copy.deepcopy(model).to(DEVICE)
    _, runtime = split(model, numbers(), loss=F.mse_loss)
    x, there = numbers().to(DEVICE), numbers().to(DEVICE)
    for _ in range(3):
        found = runtime.step(x, target=x).loss
        wanted = F.mse_loss(plain(there), there)
        wanted.backward()
        near(found, wanted)
        x.add_(1.0), there.add_(1.0)
        torch.testing.assert_close(x.cpu(), there.cpu())
    named = dict(plain.named_parameters())
    for name, p in runtime.named_parameters():
        torch.testing.assert_close(p.grad.cpu(), named[name].grad.cpu(), atol=1e-5, rtol=0)


def inputs_with_gradients():
    """What the pipeline takes was made by a network of the user's on the same device."""
    model, before = seeded(Mlp), seeded(nn.Linear, 8, 8).to(DEVICE)
    plain, plain_before = copy.deepcopy(model).to(DEVICE), copy.deepcopy(before)
    _, runtime = split(model, numbers(), loss=F.mse_loss)
    for step in range(2):
        x = numbers(seed=step).to(DEVICE)
        found = runtime.step(before(x), target=x).loss
        wanted = F.mse_loss(plain(plain_before(x)), x)
        wanted.backward()
        near(found, wanted)
    torch.testing.assert_close(before.weight.grad.cpu(), plain_before.weight.grad.cpu(), atol=1e-5, rtol=0)
    same_gradients(runtime, plain)


def calls_of_other_kinds():
    """Labels that are left out and a number that changes, with batches on the device."""
    for name, options in (("labels left out", {}), ("a number each step", {"feed": 0})):
        example, calls = (on_device(c) for c in KINDS[name])
        model, twin = (m.to(DEVICE) for m in model_and_twin())
        pipe = autopipe.split(model, 2, kwargs=example, n_microbatches=2, costs="estimated")
        is_quiet = "feed" in options and RANK != 0
        check_calls(pipe.runtime(**options), model, twin, [example, *calls, example], is_quiet)


def on_device(given):
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(DEVICE), given)


def other_devices():
    """A model built on another device than the rank's, batches and loss on a third, targets on the host."""

    def loss(output, target):
        return F.mse_loss(output.to("sim:0"), target.to("sim:0"))

    for scaler in (None, torch.amp.GradScaler("sim", init_scale=4.0)):
        model = seeded(Mlp).to("sim:0")
        plain = copy.deepcopy(model).to(DEVICE)
        _, runtime = split(model, numbers().to("sim:0"), loss=loss, runtime={"scaler": scaler})
        for step in range(3):
            x = numbers(seed=step)
            found = runtime.step(x.to("sim:0"), target=x).loss
            wanted = F.mse_loss(plain(x.to(DEVICE)), x.to(DEVICE))
            (wanted * (1.0 if scaler is None else 4.0)).backward()
            near(found, wanted)
        same_gradients(runtime, plain)


class Elsewhere(nn.CrossEntropyLoss):
    """A mean over labels that count, made on another device than the stage's."""

    def forward(self, output, target):
        return super().forward(output.to("sim:0"), target.to("sim:0"))


def labels_elsewhere():
    """What each microbatch's labels weigh is counted on one device, and its loss made on another."""
    model = seeded(Mlp)
    plain = copy.deepcopy(model).to(DEVICE)
    _, runtime = split(model, numbers(), loss=Elsewhere())
    for step in range(3):
        x = numbers(seed=step)
        labels = x.argmax(-1)
        labels.view(-1)[: 1 + 2 * step] = -100
        found = runtime.step(x, target=labels).loss
        wanted = F.cross_entropy(plain(x.to(DEVICE)), labels.to(DEVICE))
        wanted.backward()
        near(found, wanted)
    same_gradients(runtime, plain)


def default_device():
    """Under torch.set_default_device and a default dtype of the user's."""
    torch.set_default_device(DEVICE)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        model = Mlp(p=0.2)
        assert next(model.parameters()).device == DEVICE
        x = torch.randn(8, 8)
        dist.broadcast(host := x.cpu(), 0)
        x = host.to(DEVICE)
        _, runtime = split(model, x, loss=F.mse_loss, device=None)
        loss = runtime.step(x, target=x).loss
        assert loss.dtype is torch.float64
        assert runtime.evaluate(x, target=x).loss.isfinite()
        optimizer = torch.optim.Adam(runtime.parameters())
        optimizer.step()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def hooks_of_the_user():
    """Hooks on modules and parameters, gradients clipped by value, some made zero, frozen parts."""
    model = seeded(Net)
    model.blocks[0].requires_grad_(False)
    plain = copy.deepcopy(model).to(DEVICE)
    seen = []
    for one in (model, plain):
        one.blocks[1].register_forward_hook(lambda m, a, out: seen.append(out.shape))
        one.blocks[1].linear1.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    _, runtime = split(model, ids(), n_microbatches=1)
    batch = ids()
    found = runtime.step(batch, target=batch).loss
    wanted = loss_fn(plain(batch.to(DEVICE)), batch.to(DEVICE))
    wanted.backward()
    near(found, wanted)
    for name, p in runtime.named_parameters():
        other = plain.get_parameter(name)
        assert (p.grad is None) == (other.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad.cpu(), other.grad.cpu(), atol=1e-5, rtol=0)


def rebalanced():
    """Cut anew after some steps, and trained on."""
    model = seeded(Net, n=4)
    plain = copy.deepcopy(model).to(DEVICE)
    _, runtime = split(model, ids())
    optimizers = [torch.optim.AdamW(list(m.parameters()), 0.01, eps=1e-3) for m in (runtime, plain)]
    other = autopipe.split(
        seeded(Net, n=4), WORLD, (ids(),), n_microbatches=4, costs="estimated", pin={"blocks.1": WORLD - 1}
    ).plan

    def steps(span):
        for step in span:
            batch = ids(seed=step)
            found = runtime.step(batch, target=batch).loss
            there = batch.to(DEVICE)
            wanted = loss_fn(plain(there), there)
            wanted.backward()
            near(found, wanted, 1e-5)
            for o in optimizers:
                o.step()
                o.zero_grad()

    steps(range(2))
    runtime.rebalance(plan=other, optimizer=optimizers[0])
    steps(range(2, 4))
    alike(runtime, plain, 1e-5)


def channels_last():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Conv2d(8, 4, 3),
        nn.Flatten(),
        nn.Linear(144, 5),
    ).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model).to(DEVICE)
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1)).contiguous(
        memory_format=torch.channels_last
    )
    y = torch.arange(8) % 5
    _, runtime = split(model, x, loss=F.cross_entropy)
    for _ in range(2):
        found = runtime.step(x, target=y).loss
        wanted = F.cross_entropy(plain(x.to(DEVICE)), y.to(DEVICE))
        wanted.backward()
        near(found, wanted)
    same_gradients(runtime, plain)


def labels_on_the_device():
    """Microbatches with unlike numbers of labels, one with none: nobody waits to count them."""
    model, batch = seeded(Labelled).to(DEVICE), ids().to(DEVICE)
    plain, labels = copy.deepcopy(model), batch.clone()
    labels[:3], labels[4, 2:] = -100, -100
    pipe = autopipe.split(model, WORLD, (batch, batch), n_microbatches=4, costs="estimated")
    runtime = pipe.runtime()
    for step in range(4):
        for p in runtime.parameters():
            p.grad = None
        with simulated.waits("autopipe") as found:
            loss = runtime.step(batch, labels).loss
        assert step < 2 or not found, found
    wanted = plain(batch, labels)
    wanted.backward()
    near(loss, wanted)
    same_gradients(runtime, plain)
    nothing = torch.full_like(labels, -100)
    assert runtime.evaluate(batch, nothing).loss.isnan() == plain(batch, nothing).isnan()


def watched():
    """Seen from elsewhere while it runs: nobody waits for it, and the loss is there when it has come."""
    shared = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(shared, 0)
    _, runtime = split(seeded(Mlp), numbers(), loss=F.mse_loss)
    for _ in range(2):
        runtime.step(numbers(), target=numbers())
    runtime.publish(shared[0], 1e-3)
    with simulated.waits("autopipe") as found:
        for _ in range(3):
            loss = runtime.step(numbers(), target=numbers()).loss
    assert not found, found
    torch.accelerator.synchronize(DEVICE)
    last = runtime.step(numbers(), target=numbers()).loss
    told = json.loads(next(pathlib.Path(shared[0]).glob(f"rank-{RANK}.json")).read_text())
    near(told["loss"], loss)
    near(last, loss)
    assert runtime.report().measured_step_s > 0


def nothing_is_left():
    """Runtimes made and dropped give their memory back."""
    held = []
    for _ in range(3):
        _, runtime = split(seeded(Mlp), numbers(), loss=F.mse_loss)
        for step in range(2):
            runtime.step(numbers(seed=step), target=numbers(seed=step))
        del runtime, _
        gc.collect()
        torch.accelerator.synchronize(DEVICE)
        held.append(torch.accelerator.memory_allocated(DEVICE))
    assert held[-1] <= held[0], held


def demo_program():
    """What the demo trains, small."""
    sizes = demo.Sizes(
        vocabulary=256, layers=2, width=64, length=12, batch=8, n_files=2, steps=6, timed_steps=2
    )
    found = demo.train(sizes, DEVICE)
    assert RANK or max(found) < 1e-5, found


CHECKS = {
    f.__name__: f
    for f in (
        mixed_precision,
        half_weights,
        compiled,
        ragged_epochs,
        saved_midway,
        pinned_loader,
        written_inputs,
        inputs_with_gradients,
        calls_of_other_kinds,
        other_devices,
        labels_elsewhere,
        default_device,
        hooks_of_the_user,
        rebalanced,
        channels_last,
        labels_on_the_device,
        watched,
        layouts,
        side_by_side,
        overflow_on_one_stage,
        nothing_is_left,
        demo_program,
    )
}


def main(*names):
    warnings.simplefilter("ignore")
    ways = ("eager",) if names else tuple(accelerated_checks.WAYS)
    accelerated_checks.in_ways([(CHECKS[name], ways) for name in names or CHECKS])


if __name__ == "__main__":
    main(*sys.argv[1:])
