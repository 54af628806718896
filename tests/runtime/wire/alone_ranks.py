"""What a rank or a replica finds or holds alone; ``alone_ranks.py CHECK FOLDER`` is one rank."""

import contextlib
import copy
import functools
import gc
import math
import operator
import os
import pathlib
import sys
import time
import weakref

import pytest
import runtime_checks as shared
import torch
import torch.distributed as dist
from replica_checks import compare_whole
from runtime_checks import Runtime, mlp
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import autopipe
from autopipe.api.agree import decide_once
from autopipe.errors import AutopipeError, InputError, StepError, StoreError
from autopipe.runtime import save_load

WAYS = ("ddp", "fsdp")
LIMIT_S = 20.0


def mesh_of_two():
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))


def replicated(mesh, way, loss_fn=F.mse_loss, **options):
    """A model, and a pipeline of two ranks of it, in two replicas."""
    from torch.distributed.fsdp import fully_shard

    model, *made = mlp(2)
    plain = copy.deepcopy(model)
    runtime = Runtime(*made, loss_fn=loss_fn, mesh=mesh, stall_limit_s=LIMIT_S, **options)
    if way == "ddp":
        runtime.wrap(lambda stage: DistributedDataParallel(stage, process_group=mesh.get_group("dp")))
    else:
        runtime.wrap(lambda stage: fully_shard(stage, mesh=mesh["dp"]) and None)
    return plain, runtime


def shares(seed, replica):
    """All rows of a batch, and a replica's."""
    x = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, x[:8] if replica == 0 else x[8:]


def losses(_):
    """A loss that is not finite on one replica: no replica takes the step, however it was made."""
    mesh = mesh_of_two()
    replica, bad = mesh.get_local_rank("dp"), []

    def loss_fn(output, target):
        return F.mse_loss(output, target) * (bad[0] if bad else 1.0)

    def plainly(runtime, mine):
        runtime.step(mine, target=mine)

    def in_parts(runtime, mine):
        parts = mine.chunk(2) if way == "fsdp" else mine.split(2)
        runtime.accumulate([{"x": part, "target": part} for part in parts])

    def by_hand(runtime, mine):
        for part, is_last in ((mine[:2], False), (mine[2:], True)):
            with contextlib.nullcontext() if is_last else runtime.no_sync():
                runtime.step(part, target=part)
            if replica:
                bad.clear()  # only the first of them is bad

    for way in WAYS:
        plain, runtime = replicated(mesh, way, loss_fn)
        optimizer, reference = (torch.optim.SGD(p, 0.1) for p in (runtime.parameters(), plain.parameters()))
        for seed, (act, value) in enumerate(
            [(act, v) for act in (plainly, in_parts, by_hand) for v in (1.0, math.nan, math.inf)]
        ):
            x, mine = shares(seed, replica)
            bad[:] = [value] if replica and value != 1.0 else []
            if value == 1.0:
                act(runtime, mine)
                if act is not by_hand:
                    F.mse_loss(plain(x), x).backward()
                    optimizer.step(), reference.step()
            else:
                own = rf"the loss is {value}" if replica else "the loss of another replica is not finite"
                with pytest.raises(StepError, match=own):
                    act(runtime, mine)
            optimizer.zero_grad(), reference.zero_grad()
            bad.clear()
        compare_whole(runtime, plain)
        batches = [{"x": part, "target": part} for part in mine.split(2)]
        with (
            pytest.raises(InputError, match="of them as many") if way == "fsdp" else contextlib.nullcontext()
        ):
            runtime.accumulate(batches)
        # an evaluation is each replica's own
        bad[:] = [math.nan] * replica
        with pytest.raises(StepError, match="the loss is nan") if replica else contextlib.nullcontext():
            runtime.evaluate(mine, target=mine)
        bad.clear()


def partly(_):
    """So it is where the stages of one rank alone are wrapped, and others' are averaged by hand."""
    mesh = mesh_of_two()
    replica, rank, bad = mesh.get_local_rank("dp"), mesh.get_local_rank("pp"), []
    group = mesh.get_group("dp")

    def loss_fn(output, target):
        return F.mse_loss(output, target) * (math.nan if bad else 1.0)

    runtime = Runtime(*mlp(2)[1:], loss_fn=loss_fn, mesh=mesh, stall_limit_s=20.0)
    runtime.wrap(lambda stage: DistributedDataParallel(stage, process_group=group) if rank else None)
    _, mine = shares(0, replica)
    for _ in range(2):
        runtime.accumulate([{"x": part, "target": part} for part in mine.split(4)])  # two, and one
        bad[:] = [True] * replica
        own = "the loss is nan" if replica else "the loss of another replica is not finite"
        with pytest.raises(StepError, match=own):
            runtime.step(mine, target=mine)
        with runtime.no_sync():
            runtime.step(mine, target=mine)
        bad.clear()
        runtime.evaluate(mine, target=mine)  # has a loss of its own
        with pytest.raises(StepError, match=own):
            runtime.step(mine, target=mine)
        runtime.step(mine, target=mine)


def causes(_):
    """What ends one replica is what all ranks of the others report, wherever they were, within seconds."""
    mesh, fails = mesh_of_two(), []
    replica = mesh.get_local_rank("dp")

    def loss_fn(output, target):
        if fails:
            raise fails[0]("the fault of one replica")
        return F.mse_loss(output, target)

    def refused(runtime, mine):
        runtime.step(mine, target=mine[:1] if replica else mine)

    def broken(kind, runtime, mine):
        fails[:] = [kind] * replica
        runtime.step(mine, target=mine)

    def frozen(runtime, mine):
        for parameter in runtime.parameters():
            parameter.requires_grad_(not replica)
        runtime.step(mine, target=mine)

    def unread(runtime, mine):
        def batches():
            yield {"x": mine, "target": mine}
            if replica:
                raise ValueError("the fault of one replica")

        runtime.accumulate(batches())

    faults = [functools.partial(broken, k) for k in (ValueError, InputError, StepError, ConnectionError)]
    acts = [(fault, "the fault of one replica", 0) for fault in faults]
    acts += [(faults[0], "the fault of one replica", 3), (refused, "target has 1 rows", 1)]
    acts += [(frozen, "freeze and thaw the same", 1), (unread, "the fault of one replica", 1)]
    for way in WAYS:
        for act, says, n_before in acts if way == "ddp" else acts[3:]:
            _, runtime = replicated(mesh, way, loss_fn)
            _, mine = shares(0, replica)
            for _ in range(n_before):
                runtime.step(mine, target=mine)
            began_s = time.monotonic()
            with pytest.raises(AutopipeError, match=says):
                act(runtime, mine)
            assert time.monotonic() - began_s < LIMIT_S, (act, way)
            fails.clear()
            mesh = mesh_of_two()  # what failed has broken the groups of the other


def scaled(_):
    """Under a scaler all skip the step that overflowed on one replica, and halve their scales."""
    mesh = mesh_of_two()
    replica, bad = mesh.get_local_rank("dp"), []

    def loss_fn(output, target):
        return F.mse_loss(output, target) * (math.inf if bad else 1.0)

    for way in WAYS:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        plain, runtime = replicated(mesh, way, loss_fn, scaler=scaler)
        optimizer, reference = (torch.optim.SGD(p, 0.1) for p in (runtime.parameters(), plain.parameters()))
        for seed, overflows in enumerate((False, True, False)):
            x, mine = shares(seed, replica)
            bad[:] = [True] if overflows and replica else []
            runtime.step(mine, target=mine)
            scaler.unscale_(optimizer)
            runtime.clip_grad_norm_(0.5)
            scaler.step(optimizer), scaler.update()
            if not overflows:
                F.mse_loss(plain(x), x).backward()
                torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                reference.step()
            optimizer.zero_grad(), reference.zero_grad()
        assert scaler.get_scale() == 2.0
        compare_whole(runtime, plain)


def calls(folder):
    """Saves and loads that ranks of one replica, or one replica, call in other ways: all refuse."""
    mesh, folder = mesh_of_two(), pathlib.Path(folder)
    replica, rank = mesh.get_local_rank("dp"), dist.get_rank()
    _, runtime = replicated(mesh, "ddp")
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1, momentum=0.9)
    _, mine = shares(0, replica)
    runtime.step(mine, target=mine)
    optimizer.step()

    def optimizer_of(has_one):
        return {"optimizer": optimizer} if has_one else {}

    runtime.save(folder / "good", **optimizer_of(True))
    unlike = {
        "a folder of one replica's ranks each": lambda: runtime.save(folder / str(rank * replica)),
        "a folder of each replica": lambda: runtime.save(folder / str(replica)),
        "an optimizer of one replica's": lambda: runtime.save(folder / "a", **optimizer_of(replica)),
        "an optimizer of three ranks": lambda: runtime.save(folder / "a", **optimizer_of(rank != 3)),
        "in the background": lambda: runtime.save(folder / str(replica), background=True),
        "loads of one replica's": lambda: runtime.load(folder / "good", **optimizer_of(replica)),
        "loads of three ranks": lambda: runtime.load(folder / "good", **optimizer_of(rank != 3)),
    }
    for what, call in unlike.items():
        with pytest.raises(InputError, match=r"the same|give every rank's own|call it alike everywhere"):
            call()
        assert [p.name for p in folder.iterdir()] == ["good"], what
    runtime.load(folder / "good", **optimizer_of(True))
    runtime.step(mine, target=mine)


def rows(folder):
    """Replicas that see other saves of a row, as one is made or removed meanwhile, resume the first one's."""
    mesh, folder = mesh_of_two(), pathlib.Path(folder)
    replica = mesh.get_local_rank("dp")
    _, runtime = replicated(mesh, "ddp")
    _, mine = shares(0, replica)
    for _ in range(3):
        runtime.step(mine, target=mine)
        runtime.save(folder, keep_last=3)
    dist.barrier()
    found = save_load.steps_in
    for seen in (slice(1, None), slice(0, 0)):
        save_load.steps_in = (lambda root, seen=seen: found(root)[seen]) if replica else found
        assert runtime.resume(folder) == 3
    save_load.steps_in = found


class Labels(nn.Module):
    """Whose tied weight trains without its values' sum: a cross entropy's gradient after a norm has none."""

    def __init__(self):
        super().__init__()
        self.emb, self.norm, self.head = nn.Embedding(30, 12), nn.LayerNorm(12), nn.Linear(12, 30, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids):
        return self.head(self.norm(self.emb(ids)))


def rates(_):
    """Ranks whose optimizers step their copies of a tied parameter otherwise are told, whatever trains it."""
    torch.manual_seed(0)
    ids = torch.randint(0, 30, (8, 5))
    made = shared.make(Labels().double(), (ids,), {}, n_stages=2)
    runtime = Runtime(*made, loss_fn=_cross_entropy, stall_limit_s=20.0)
    optimizer = torch.optim.SGD(runtime.parameters(), 0.01 * (1 + dist.get_rank()))

    def train():
        for _ in range(20):
            runtime.step(ids, target=ids)
            optimizer.step(), optimizer.zero_grad()

    with pytest.raises(StepError, match=r"tied parameter emb.weight has different values on ranks 0, 1"):
        train()


def _cross_entropy(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def lets_go(_):
    """No rank keeps a batch once its step is made, nor in those steps that are looked at more closely."""
    runtime = Runtime(*mlp(2)[1:], loss_fn=F.mse_loss, stall_limit_s=20.0)
    for _ in range(3):
        x, target = (torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator()) for _ in range(2))
        held = weakref.ref(x), weakref.ref(target)
        result = runtime.step(x, target=target)
        del x, target
        assert [ref() for ref in held] == [None, None], result


def crossed(_):
    """Of two pipelines one rank steps the first and the other the second: both hear of it by the limit."""
    limit_s = 2.0
    one, other = (Runtime(*mlp(2)[1:], loss_fn=F.mse_loss, stall_limit_s=limit_s) for _ in range(2))
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for runtime in (one, other, one):
        runtime.step(x, target=x)
    began_s = time.monotonic()
    with pytest.raises(
        StepError, match=r"wait for one another: rank . at the start of a step( of another|, )"
    ):
        (one if dist.get_rank() else other).step(x, target=x)
    assert time.monotonic() - began_s < 4 * limit_s
    dist.barrier()  # none leaves before the other has heard


def ends(_):
    """All that pipelines have of threads and open files ends with them, of talks before there is one too."""
    own = pathlib.Path("/proc/self")
    gc.disable()

    def left_after(n, most=(math.inf, math.inf)):
        for _ in range(n):
            decide_once(lambda: "a plan", str, str, 20.0)
            runtime = Runtime(*mlp(2)[1:], loss_fn=F.mse_loss, stall_limit_s=20.0)
            x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            runtime.step(x, target=x)
        del runtime
        gc.collect()  # once: what it frees is to leave nothing for another time
        counts, until_s = [(-1, -1)], time.monotonic() + LIMIT_S
        while len(counts) < 2 or counts[-1] != counts[-2] or any(map(operator.gt, counts[-1], most)):
            assert time.monotonic() < until_s, (counts, most)
            time.sleep(1.0)  # threads take a moment to end, and more on a busy machine
            counts.append(tuple(len(list((own / kind).iterdir())) for kind in ("task", "fd")))
        return counts[-1]

    left_after(4, most=left_after(1))


class Scheduler:
    """Takes no state on one rank."""

    def state_dict(self):
        return {"at": 1}

    def load_state_dict(self, state):
        if dist.get_rank() == 3:
            raise ValueError("not mine")


def meshes(_):
    """A rank that forgets the mesh: the others of its pipeline hear of it at once, and all go on with one."""
    mesh, (_, x) = mesh_of_two(), shares(0, 0)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).double()
    pipe = autopipe.split(model, 2, (x,), n_ranks=2, n_microbatches=2, costs="estimated")
    rank, began_s = dist.get_rank(), time.monotonic()
    for odd in (1, 0):
        is_told = pytest.raises(
            InputError, match=r"for 2 ranks but 4 are running.*pass a mesh with a 'pp' dim"
        )
        with is_told if rank < 2 else contextlib.nullcontext():
            pipe.runtime(F.mse_loss, mesh=None if rank == odd else mesh, stall_limit_s=60.0)
        dist.barrier()  # one that comes again at once is met by those that still look for it
    pipe.runtime(F.mse_loss, mesh=mesh, stall_limit_s=60.0).step(x, target=x)
    assert time.monotonic() - began_s < 30


def shared_states(folder):
    """A load that fails on one rank leaves optimizers that replicas share as they were, inside too."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    mesh = mesh_of_two()
    replica = mesh.get_local_rank("dp")
    _, runtime = replicated(mesh, "ddp")
    kind = functools.partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    optimizer = kind(runtime.parameters(), process_group=mesh.get_group("dp"), lr=0.01)

    def trained(lr):
        optimizer.param_groups[0]["lr"] = lr
        _, mine = shares(3, replica)
        runtime.step(mine, target=mine)
        optimizer.step()

    def held():
        state = optimizer.optim.state.values()
        kept = [v.clone() for each in state for v in each.values()]
        rates = [g["lr"] for o in (optimizer, optimizer.optim) for g in o.param_groups]
        return [*kept, torch.tensor(rates), *(p.detach().clone() for p in runtime.parameters())]

    trained(0.01)
    optimizer.consolidate_state_dict()
    runtime.save(folder, optimizer=optimizer, scheduler=Scheduler())
    trained(0.05)
    before = held()
    with pytest.raises(StoreError, match=r"scheduler does not take|another replica could not"):
        runtime.load(folder, optimizer=optimizer, scheduler=Scheduler())
    assert all(torch.equal(a, b) for a, b in zip(held(), before, strict=True))
    trained(0.05)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    shared.KIND = "cpu"
    globals()[sys.argv[1]](sys.argv[2])
    print("done")
    sys.stdout.flush()
    os._exit(0)
