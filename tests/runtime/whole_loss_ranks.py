"""What ranks do with losses that compare rows: the plain loop's numbers, whatever is asked of them."""

import contextlib
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_checks import run
from torch.nn.parallel import DistributedDataParallel
from whole_losses import LOSSES, WIDTH, info_nce, labels, masked_mean, model, numbers, own, trained_on

import autopipe

EXACT = 1e-10


@functools.cache
def captured():
    return autopipe.capture(model(), (numbers(10, 5),))


def split(schedule, n_stages=2, n_ranks=2, **options):
    pipe = autopipe.split(
        captured(),
        n_stages,
        n_ranks=n_ranks,
        schedule=schedule,
        costs="estimated",
        n_microbatches=4,
        **options,
    )
    return pipe, model()


def compare(runtime, twin):
    wanted = dict(twin.named_parameters())
    for name, p in runtime.named_parameters():
        torch.testing.assert_close(p.grad, wanted[name].grad, rtol=EXACT, atol=EXACT, msg=name)


def check(name, schedule, n_stages=2, feed=None, **options):
    """Several steps, the first of which decides where nothing is asked for."""
    make_loss, make_target = LOSSES[name]
    pipe, twin = split(schedule, n_stages)
    pipe.model.load_state_dict(twin.state_dict())
    pipe.model.zero_grad()
    mine, plain = make_loss(), make_loss()
    runtime = pipe.runtime(mine, feed=feed, **options)
    batches = [(numbers(n, 5, seed=n), make_target(n)) for n in (10, 10, 6, 8)]
    for (x, target), loss in zip(batches, trained_on(twin, plain, batches), strict=True):
        given = {"target": target} if feed in (None, dist.get_rank()) else {}
        found = runtime.step(*([x] if given else []), **given).loss.item()
        assert abs(found - loss) < EXACT, (name, schedule, found, loss)
    compare(runtime, twin)
    if isinstance(mine, torch.nn.Module):
        for p, q in zip(mine.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=EXACT, atol=EXACT)
    elif dist.get_rank() == 1:
        assert own(mine).keys() == own(plain).keys()
    pipe.merge()


def asked_for():
    for name, schedule, n_stages in (
        ("DPO over halves", "1f1b", 2),
        ("a learned temperature", "zb-h1", 2),
        ("masked mean", "interleaved", 4),
        ("Barlow Twins", "dualpipev", 4),
    ):
        check(name, schedule, n_stages, loss_on="batch")
    check("a centre that moves", "1f1b", feed=1, loss_on="batch")


def found():
    for name, schedule, n_stages in (
        ("focal over the positives", "1f1b", 2),
        ("weights of classes in the batch", "zb-h1", 2),
        ("soft Dice", "zbv", 4),
        ("CTC", "interleaved", 4),
        ("a mean to which some rows add nothing", "1f1b", 2),
        ("a mean to which some rows add nothing", "zb-h1", 2),
        ("a centre that moves", "1f1b", 2),
        ("one that counts its calls", "zb-h1", 2),
    ):
        check(name, schedule, n_stages, feed=0 if name == "soft Dice" else None)
    pipe, twin = split("1f1b")
    loss_fn, target = LOSSES["Cox partial likelihood"][0](), LOSSES["Cox partial likelihood"][1](10)
    runtime = pipe.runtime(loss_fn, schedule="1f1b")
    wanted = loss_fn(twin(numbers(10, 5)), target).item()
    for _ in range(2):  # what is found ahead of the first step
        assert abs(runtime.evaluate(numbers(10, 5), target=target).loss.item() - wanted) < EXACT
    assert abs(runtime.step(numbers(10, 5), target=target).loss.item() - wanted) < EXACT
    pipe.merge()


def later():
    """Labels that do not count come in a step that asks nothing else; one rank alone has them, or both."""
    for feed in (0, None):
        pipe, twin = split("1f1b")
        pipe.model.load_state_dict(twin.state_dict())
        pipe.model.zero_grad()
        weights = [*pipe.model.parameters()]  # of both ranks

        def loss_fn(output, target, weights=weights):
            return F.cross_entropy(output, target) + 0 * len(weights)

        runtime = pipe.runtime(loss_fn, feed=feed)
        for step in range(5):
            x, target = numbers(10, 5), labels(10).where((torch.arange(10) > 0) | (step != 3), -100)
            given = {"target": target} if feed in (None, dist.get_rank()) else {}
            found = runtime.step(*([x] if given else []), **given).loss.item()
            wanted = trained_on(twin, F.cross_entropy, [(x, target)])[0]
            assert abs(found - wanted) < EXACT, (step, found, wanted)
        compare(runtime, twin)
        pipe.merge()


def replicas(loss_on=None):
    """Two pipelines of two ranks: each replica's batch is its own, and gradients are their mean."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    replica = mesh.get_local_rank("dp")
    pipe, twin = split("1f1b")
    pipe.model.zero_grad()
    runtime = pipe.runtime(info_nce, mesh=mesh, loss_on=loss_on)
    runtime.wrap(lambda stage: DistributedDataParallel(stage, process_group=mesh.get_group("dp")))
    losses = []
    for seed in (1, 2, 3):
        halves = [(numbers(10, 5, seed=seed + 10 * i), numbers(10, WIDTH, seed=seed + i)) for i in range(2)]
        found = runtime.step(halves[replica][0], target=halves[replica][1]).loss.item()
        each = [info_nce(twin(x), target) for x, target in halves]
        (sum(each) / 2).backward()
        losses.append(abs(found - each[replica].item()))
    assert max(losses) < EXACT, losses
    compare(runtime, twin)
    pipe.merge()


def replicas_differ():
    """Only one of two replicas has labels left out in the first steps: both go on with the whole batch."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    replica = mesh.get_local_rank("dp")
    pipe, twin = split("1f1b")
    pipe.model.zero_grad()
    runtime = pipe.runtime(masked_mean, mesh=mesh)
    runtime.wrap(lambda stage: DistributedDataParallel(stage, process_group=mesh.get_group("dp")))
    for step in range(4):
        halves = []
        for i in range(2):
            mask = torch.ones(10, WIDTH).double()
            mask[: 2 + i + step, 2:] = float(i == 0 and step < 3)
            halves.append((numbers(10, 5, seed=step + 10 * i), (numbers(10, WIDTH, seed=i), mask)))
        (x, target), each = halves[replica], [masked_mean(twin(x), target) for x, target in halves]
        with contextlib.ExitStack() as stack:
            if step == 1:
                stack.enter_context(runtime.no_sync())
            loss = runtime.step(x, target=target).loss.item()
        (sum(each) / 2).backward()
        assert abs(loss - each[replica].item()) < EXACT, step
    compare(runtime, twin)
    pipe.merge()
    pipe, twin = split("1f1b")
    runtime = pipe.runtime(masked_mean, mesh=mesh)  # of which one replica has a single row to begin with
    runtime.wrap(lambda stage: DistributedDataParallel(stage, process_group=mesh.get_group("dp")))
    n = 1 if replica else 10
    found = runtime.step(numbers(n, 5), target=(numbers(n, WIDTH), torch.ones(n, WIDTH).double()))
    assert found.loss.isfinite()
    pipe.merge()


def replicas_later():
    """One replica has labels that do not count, or all set a weight, in a step that asks nothing else."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    replica = mesh.get_local_rank("dp")
    for way in ("labels", "weight"):
        pipe, twin = split("1f1b")
        pipe.model.load_state_dict(twin.state_dict())
        pipe.model.zero_grad()
        kept = {"weight": 0.0}

        def loss_fn(output, target, kept=kept):
            spread = output.std(0).mean() if kept["weight"] else 0.0
            return F.cross_entropy(output, target) + kept["weight"] * spread

        runtime = pipe.runtime(loss_fn, mesh=mesh)
        runtime.wrap(lambda stage: DistributedDataParallel(stage, process_group=mesh.get_group("dp")))
        for step in range(5):
            is_other = step == 3
            kept["weight"] = 0.5 * (is_other and way == "weight")
            halves = []
            for i in range(2):
                is_out = (torch.arange(10) == 0) & (is_other and i == 0 and way == "labels")
                halves.append((numbers(10, 5, seed=step + 10 * i), labels(10).where(~is_out, -100)))
            (x, target), each = halves[replica], [loss_fn(twin(x), target) for x, target in halves]
            found = runtime.step(x, target=target).loss.item()
            (sum(each) / 2).backward()
            assert abs(found - each[replica].item()) < EXACT, (way, step)
        compare(runtime, twin)
        pipe.merge()


if __name__ == "__main__":
    asked = {"asked_for": asked_for, "found": found, "replicas_asked": functools.partial(replicas, "batch")}
    run(
        {
            **asked,
            "later": later,
            "replicas": replicas,
            "replicas_differ": replicas_differ,
            "replicas_later": replicas_later,
        }
    )
