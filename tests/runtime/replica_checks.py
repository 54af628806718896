"""What ranks do that hold the same stages: replicas in DDP and FSDP2, layers split by tensor parallelism."""

import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import math
import pathlib

import pytest
import runtime_checks as shared
import torch
import torch.distributed as dist
from runtime_checks import Runtime, compare_merged, mlp, train_both
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from autopipe.api import Pipe
from autopipe.errors import InputError, StepError, StoreError
from autopipe.schedule import build


def data_parallel():
    """2 × 2: a pipeline of two ranks with a tie, two replicas, in DDP and sharded by FSDP2."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(shared.KIND, (2, 2), mesh_dim_names=("pp", "dp"))
    group = mesh.get_group("dp")
    replica = mesh.get_local_rank("dp")
    wrappers = {
        "ddp": lambda stage: DistributedDataParallel(stage, process_group=group),
        "fsdp": lambda stage: fully_shard(stage, mesh=mesh["dp"]) and None,
    }
    for name, schedule in (("ddp", "1f1b"), ("ddp", "zb-h1"), ("fsdp", "zb-h1")):
        model, *made = mlp(2, schedule=schedule, tied=True)
        plain = copy.deepcopy(model)
        runtime = Runtime(*made, loss_fn=F.mse_loss, mesh=mesh)
        with told() as words:
            runtime.wrap(wrappers[name])
        assert ["fully_shard keeps whole" in w for w in words] == [True] * (name == "fsdp"), words
        optimizer = torch.optim.SGD(runtime.parameters(), 0.1, momentum=0.9)
        reference = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(4)
        for _ in range(3):
            x = torch.randn(16, 8, dtype=torch.float64)
            mine = x[8 * replica : 8 * replica + 8]
            optimizer.zero_grad(), reference.zero_grad()
            with runtime.no_sync():
                assert reductions(runtime, mine[:4]) == 0, name
            # replicas weigh by their rows: four beside two; what an accelerator's thread sends is not seen
            seen = reductions(runtime, mine[4 : 8 - 2 * replica])
            assert seen == 1 or shared.KIND != "cpu", (name, seen)
            (F.mse_loss(plain(x[[0, 1, 2, 3, 8, 9, 10, 11]]), x[[0, 1, 2, 3, 8, 9, 10, 11]])).backward()
            (F.mse_loss(plain(x[[4, 5, 6, 7, 12, 13]]), x[[4, 5, 6, 7, 12, 13]])).backward()
            clip_and_step(runtime, optimizer, plain, reference)
        compare_whole(runtime, plain)
        n_late = weights_that_come_late(runtime, mine)
        wanted = made[1].n_microbatches if (name, schedule) == ("ddp", "zb-h1") else 0
        assert n_late == wanted, (name, schedule, n_late)


@contextlib.contextmanager
def told():
    """What the package warns of within it."""
    words, handler = [], logging.Handler(logging.WARNING)
    handler.emit = lambda record: words.append(record.getMessage())
    logging.getLogger("autopipe").addHandler(handler)
    yield words
    logging.getLogger("autopipe").removeHandler(handler)


def weights_that_come_late(runtime, x):
    """How many microbatches of a step have gradients of weights that a W makes, and no I."""
    weight = next(p for n, p in runtime.named_parameters() if n.endswith("weight"))
    stage, *_ = runtime._engine.workers.values()
    late = []

    def run(m, run=stage.backward_weight):
        before = None if weight.grad is None else weight.grad.clone()
        run(m)
        late.append(before is None or not torch.equal(before, weight.grad))

    stage.backward_weight = run
    runtime._engine._lines.clear()
    runtime.step(x, target=x)
    return sum(late)


class Reductions(TorchDispatchMode):
    """Counts the reductions among replicas; the pipeline's own communicators do not go through here."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_reduction = func.namespace == "c10d" and "reduce" in func.__name__
        # where what is given and what is made lie apart, the latter is whatever was in its memory
        self.count += is_reduction and any(map(_is_gradient, torch.utils._pytree.tree_leaves(args)))
        return func(*args, **(kwargs or {}))


def _is_gradient(tensor):
    """Sums of weights, which replicas compare, come twice, once negated."""
    if not isinstance(tensor, torch.Tensor) or tensor.numel() < 2 or not tensor.is_floating_point():
        return False
    first, second = tensor.flatten().tensor_split(2)
    return not torch.equal(first, -second)


def reductions(runtime, x):
    """How many times a step reduces gradients over replicas."""
    with Reductions() as seen:
        runtime.step(x, target=x)
    return seen.count


def clip_and_step(runtime, optimizer, plain, reference):
    norm = runtime.clip_grad_norm_(0.5)
    wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    assert abs(norm.item() - wanted.item()) < 1e-10, (norm, wanted)
    optimizer.step(), reference.step()


def compare_whole(runtime, plain):
    for name, p in runtime.named_parameters():
        found, wanted = p, plain.get_parameter(name)
        if hasattr(p, "full_tensor") and shared.KIND == "cpu":
            found = p.full_tensor()
        elif hasattr(p, "full_tensor"):  # functional collectives want a backend of torch's own
            found, mesh = p.to_local(), p.device_mesh
            wanted = wanted.chunk(mesh.size(), p.placements[0].dim)[mesh.get_local_rank()]
        torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-10)


def tensor_parallel():
    """2 × 2: a pipeline of two ranks, each stage's layers split over two by DTensor."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = dist.init_device_mesh(shared.KIND, (2, 2), mesh_dim_names=("pp", "tp"))

    def shard(stage):
        first, second = [name for name, _ in stage.named_children()]
        return parallelize_module(stage, mesh["tp"], {first: ColwiseParallel(), second: RowwiseParallel()})

    for schedule in ("1f1b", "zb-h1"):
        model, *made = mlp(2, schedule=schedule)
        plain = copy.deepcopy(model)
        runtime = Runtime(*made, loss_fn=F.mse_loss, mesh=mesh)
        runtime.wrap(shard)
        optimizer = torch.optim.SGD(runtime.parameters(), 0.1, momentum=0.9)
        assert all(hasattr(p, "full_tensor") for n, p in runtime.named_parameters() if "weight" in n)
        reference = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(4)
        for _ in range(3):
            x = torch.randn(8, 8, dtype=torch.float64)
            optimizer.zero_grad(), reference.zero_grad()
            runtime.step(x, target=x)
            F.mse_loss(plain(x), x).backward()
            clip_and_step(runtime, optimizer, plain, reference)
        compare_whole(runtime, plain)


class Refuses:
    """A loader that one process cannot say the state of."""

    def state_dict(self):
        if dist.get_rank() == 3:
            raise OSError("no position")
        return {}


def sharded_saves(directory):
    """2 × 2: what replicas or shards of one kind saved, those of another go on from; a fault hangs nobody."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    path = pathlib.Path(directory)
    meshes = {
        kind: dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp" if kind == "tp" else "dp"))
        for kind in ("ddp", "fsdp", "tp")
    }

    def split(stage):
        first, second = [name for name, _ in stage.named_children()]
        plan = {first: ColwiseParallel(), second: RowwiseParallel()}
        return parallelize_module(stage, meshes["tp"]["tp"], plan)

    wrappers = {
        "ddp": lambda stage: DistributedDataParallel(stage, process_group=meshes["ddp"].get_group("dp")),
        "fsdp": lambda stage: fully_shard(stage, mesh=meshes["fsdp"]["dp"]) and None,
        "tp": split,
    }
    plain = mlp(2)[0]
    reference = torch.optim.AdamW(plain.parameters(), 0.01)
    torch.manual_seed(4)
    for i, kind in enumerate(("ddp", "fsdp", "tp", "fsdp", "ddp")):
        runtime = Runtime(*mlp(2)[1:], loss_fn=F.mse_loss, mesh=meshes[kind], stall_limit_s=20.0)
        runtime.wrap(wrappers[kind])
        optimizer = torch.optim.AdamW(runtime.parameters(), 0.01)
        if i:
            runtime.load(path / str(i - 1), optimizer=optimizer)
            compare_whole(runtime, plain)
        for _ in range(2):
            x = torch.randn(16, 8, dtype=torch.float64)
            mine = x if kind == "tp" else x.chunk(2)[meshes[kind].get_local_rank("dp")]
            optimizer.zero_grad(), reference.zero_grad()
            runtime.step(mine, target=mine)
            F.mse_loss(plain(x), x).backward()
            optimizer.step(), reference.step()
        compare_whole(runtime, plain)
        if kind == "fsdp":
            for name, more in (("bad", {"loader": Refuses()}), ("file/inner.pt", {}), ("file/inner", {})):
                (path / "file").touch()
                with pytest.raises(StoreError, match="was not saved"):
                    runtime.save(path / name, **({"optimizer": optimizer, **more} if more else {}))
            runtime.save(path / "one.pt")
        runtime.save(path / str(i), optimizer=optimizer, background=i % 2 == 1).wait()
        if kind == "fsdp":
            found = torch.load(path / "one.pt", weights_only=True)
            assert shared.worst(found, plain.state_dict()) < shared.EXACT
    dist.barrier()
    assert sorted(p.name for p in path.iterdir()) == [*map(str, range(5)), "file", "one.pt"]


def shared_states(directory):
    """2 × 2: an optimizer whose state replicas share is saved once it is whole, and never in parts."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    path, mesh = pathlib.Path(directory), dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group, replica = mesh.get_group("dp"), mesh.get_local_rank("dp")

    def made(group=group):
        runtime = Runtime(*mlp(2)[1:], loss_fn=F.mse_loss, mesh=mesh, stall_limit_s=20.0)
        runtime.wrap(lambda stage: DistributedDataParallel(stage, process_group=mesh.get_group("dp")))
        kind = functools.partial(
            ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW, process_group=group
        )
        return runtime, kind(runtime.parameters(), lr=0.01)

    plain = mlp(2)[0]
    reference = torch.optim.AdamW(plain.parameters(), 0.01)
    torch.manual_seed(4)
    runtime, optimizer = made()
    for i in range(4):
        x = torch.randn(16, 8, dtype=torch.float64)
        mine = x.chunk(2)[replica]
        optimizer.zero_grad(), reference.zero_grad()
        runtime.step(mine, target=mine)
        F.mse_loss(plain(x), x).backward()
        optimizer.step(), reference.step()
        if i == 0:
            with pytest.raises(StoreError, match=r"consolidate_state_dict|by the first replica"):
                runtime.save(path / "parts", optimizer=optimizer)
            optimizer.consolidate_state_dict()
            runtime.save(path / "0", optimizer=optimizer)
            runtime, optimizer = made()
            runtime.load(path / "0", optimizer=optimizer)
        if i == 1:
            optimizer.consolidate_state_dict()
            runtime.save(path / "1", optimizer=optimizer)
            runtime, _ = made()
            optimizer = torch.optim.AdamW(runtime.parameters(), 0.01)
            runtime.load(path / "1", optimizer=optimizer)
    compare_whole(runtime, plain)
    _, optimizer = made(None)
    with pytest.raises(InputError, match=r"ZeroRedundancyOptimizer shares .* ranks \[0, 1, 2, 3\]"):
        optimizer.step()


def sharded_values_are_refused():
    """2 × 2: a value that crosses stages while it is spread over ranks."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = dist.init_device_mesh(shared.KIND, (2, 2), mesh_dim_names=("pp", "tp"))
    spread = {name: ColwiseParallel(use_local_output=False) for name in "bd"}
    runtime = Runtime(*mlp(2)[1:], loss_fn=F.mse_loss, mesh=mesh)
    runtime.wrap(lambda stage: parallelize_module(stage, mesh["tp"], spread) and None)
    x = torch.randn(8, 8, dtype=torch.float64)
    with pytest.raises(StepError, match="stage 0 gives a DTensor among"):
        runtime.step(x, target=x)


def wrapping_unties_nothing_in_silence():
    """Stages of one rank that share a parameter, each sharded on its own."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(shared.KIND, (2,), mesh_dim_names=("dp",))
    alone = dist.init_device_mesh(shared.KIND, (2, 1), mesh_dim_names=("dp", "pp"))
    _, *made = mlp(4, n_ranks=1, tied=True)
    runtime = Runtime(*made, loss_fn=F.mse_loss, mesh=alone)
    with pytest.raises(InputError, match="is shared by several stages of rank 0"):
        runtime.wrap(lambda stage: fully_shard(stage, mesh=mesh) and None)


def sharded_weights_come_back():
    """2 × 2: the model is whole after training sharded stages, a tie and a released stage included."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(shared.KIND, (2, 2), mesh_dim_names=("pp", "dp"))
    model, captured, plan, _ = mlp(2, tied=True)
    plain = copy.deepcopy(model)
    pipe = Pipe(captured, plan)
    runtime = pipe.runtime(F.mse_loss, mesh=mesh, release=True, device=shared.DEVICE)
    runtime.wrap(lambda stage: fully_shard(stage, mesh=mesh["dp"]) and None)
    train_both(runtime, plain, steps=2)
    compare_merged(pipe, plain)


def gathers():
    """2 × 2: sharded stages are whole once a step, or in turn where memory has no room for two."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(shared.KIND, (2, 2), mesh_dim_names=("pp", "dp"))
    replica = mesh.get_local_rank("dp")
    stage_bytes = 8 * (8 * 8 + 8)
    # of both stages: half the weights, half of Adam's moments, whole gradients
    kept_bytes = stage_bytes + 2 * stage_bytes + 2 * stage_bytes
    row = build("interleaved", 2, 4, 4).actions[mesh.get_local_rank("pp")]
    in_turn = sum(a.stage != b.stage for a, b in itertools.pairwise(row)) + 1
    for room, n_wanted in ((None, 2), (2 * stage_bytes, 2), (stage_bytes, in_turn), (stage_bytes - 1, 0)):
        model, captured, plan, stages = mlp(4, n_ranks=2, schedule="interleaved")
        limit = {} if room is None else {"memory_limit": kept_bytes + room}
        plain, plan = copy.deepcopy(model), dataclasses.replace(plan, settings=limit)
        runtime = Runtime(captured, plan, stages, loss_fn=F.mse_loss, mesh=mesh)
        runtime.wrap(lambda stage: fully_shard(stage, mesh=mesh["dp"]) and None)
        optimizer = torch.optim.SGD(runtime.parameters(), 0.1)
        reference = torch.optim.SGD(plain.parameters(), 0.1)
        torch.manual_seed(4)
        for i in range(3):
            x = torch.randn(16, 8, dtype=torch.float64)
            mine = x[8 * replica : 8 * replica + 8]
            with Gathered() as seen:
                runtime.step(mine, target=mine)
            # the first step finds out what is gathered; left alone, weights stay whole after an evaluation
            assert i == 0 or shared.KIND != "cpu" or seen.count == n_wanted, (room, seen.count)
            F.mse_loss(plain(x), x).backward()
            clip_and_step(runtime, optimizer, plain, reference)
            optimizer.zero_grad(), reference.zero_grad()
            found = runtime.evaluate(mine, target=mine).loss.item()
            assert abs(found - F.mse_loss(plain(mine), mine).item()) < shared.EXACT
            if room is None:
                weights = [p for stage in runtime.stages for p in stage.parameters()]
                assert all(hasattr(p, "to_local") for p in weights)  # let go again
        compare_whole(runtime, plain)


class Gathered(TorchDispatchMode):
    """Counts how often weights are gathered; what an accelerator's thread does is not seen."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d" and "allgather" in func.__name__
        return func(*args, **(kwargs or {}))


class Sometimes(nn.Module):
    """Uses a part of its parameters only for some values, and one never."""

    def __init__(self, d=8):
        super().__init__()
        self.always, self.now_and_then = nn.Linear(d, d), nn.Linear(d, d)
        self.never, self.phase = (
            nn.Parameter(torch.randn(d)),
            nn.Parameter(torch.randn(d, dtype=torch.cdouble)),
        )

    def forward(self, x):
        y = torch.tanh(self.always(x)) * torch.view_as_real(self.phase).sum()
        return self.now_and_then(y) if float(x.detach()[:, 0].sum()) > 0 else y


class Replicated(nn.Module):
    """Parts that are used now and then, frozen, tied over stages, of other dtypes, in inner checkpoints."""

    def __init__(self):
        super().__init__()
        self.first, self.often, self.frozen = nn.Linear(8, 8), Sometimes(), nn.Linear(8, 8)
        self.again, self.last = Again(), nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.again(self.frozen(self.often(torch.tanh(self.first(x))))))


class Again(nn.Module):
    """A reentrant checkpoint around what is also used outside it: a backward adds twice to its gradient."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.utils.checkpoint.checkpoint(self.lin, torch.sin(x), use_reentrant=True)
        return y + self.lin(x)


def buckets():
    """Two replicas of a pipeline in one process: exact whatever gradients come, and when; and sent early."""
    mesh = dist.init_device_mesh(shared.KIND, (2, 1), mesh_dim_names=("dp", "pp"))
    group, replica = mesh.get_group("dp"), mesh.get_local_rank("dp")
    for schedule, n_stages, cap in (("1f1b", 3, 1e-4), ("zb-h1", 2, 25), ("interleaved", 2, 1e-3)):
        torch.manual_seed(0)
        model = Replicated().double()
        plain = copy.deepcopy(model)
        x = torch.randn(4, 8, dtype=torch.float64)
        made = shared.make(model, (x,), {}, n_stages=n_stages, n_ranks=1, schedule=schedule)
        runtime = Runtime(*made, loss_fn=F.mse_loss, mesh=mesh, n_microbatches=2, mixed_rows="allow")
        runtime.wrap(
            lambda s, cap=cap: (
                DistributedDataParallel(s, process_group=group, bucket_cap_mb=cap)
                if any(p.requires_grad for p in s.parameters())
                else s
            )
        )
        early = sent_early(runtime)
        for i in range(6):
            # one replica's data use a part that the other's do not, in turn
            x = torch.randn(12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
            x[:, 0] = x[:, 0].abs() * torch.tensor([1.0, -1.0]).repeat_interleave(6) * (-1) ** i
            shares = x[:8], x[8:]
            for m in (model, plain):
                m.frozen.requires_grad_(i > 3)
                m.zero_grad()
            runtime.step(shares[replica], target=shares[replica])
            for part in shares:  # a microbatch each, as the branch is of the microbatch
                for piece in part.chunk(2):
                    (F.mse_loss(plain(piece), piece) * len(piece) / 12).backward()
            found, wanted = (shared.grads(m.named_parameters()) for m in (model, plain))
            assert shared.worst(found, wanted) < shared.EXACT, (schedule, i)
        assert any(early), schedule


def sent_early(runtime):
    """How many buckets of each step were under way before all backwards were through."""
    found = []
    for worker in runtime._engine.workers.values():
        made = worker.replicas._buckets
        if made is not None and not found:
            finish = made.finish

            def look(made=made, finish=finish):
                found.append(made._n_sent)
                finish()

            made.finish = look
    return found


def replicas_in_step():
    """2 × 2: replicas may accumulate and fail in unlike numbers of batches; unlike weights are told."""
    mesh = dist.init_device_mesh(shared.KIND, (2, 2), mesh_dim_names=("pp", "dp"))
    group, replica = mesh.get_group("dp"), mesh.get_local_rank("dp")
    model, *made = mlp(2)
    plain, fails = copy.deepcopy(model), []

    def loss_fn(output, target):
        return F.mse_loss(output, target) * (math.nan if fails else 1.0)

    runtime = Runtime(*made, loss_fn=loss_fn, mesh=mesh, stall_limit_s=20.0)
    runtime.wrap(lambda stage: DistributedDataParallel(stage, process_group=group))
    optimizer, reference = (torch.optim.SGD(p, 0.1) for p in (runtime.parameters(), plain.parameters()))
    torch.manual_seed(4)
    x = torch.randn(16, 8, dtype=torch.float64)
    if replica:  # a forward of its own
        runtime.evaluate(x, target=x)
    for i in range(3):
        x = torch.randn(16, 8, dtype=torch.float64)
        mine = x[:4] if replica == 0 else x[4:]
        runtime.accumulate([{"x": part, "target": part} for part in mine.split(4)])
        F.mse_loss(plain(x), x).backward()
        clip_and_step(runtime, optimizer, plain, reference)
        optimizer.zero_grad(), reference.zero_grad()
        if i == 0:
            fails += [True] * replica
            with pytest.raises(StepError, match="the loss is nan" if replica else "loss of another replica"):
                runtime.step(mine, target=mine)
            fails.clear()
            optimizer.zero_grad()
    compare_whole(runtime, plain)
    with torch.no_grad():
        for parameter in runtime.parameters() if dist.get_rank() == 1 else ():
            parameter.mul_(1.5)
    with pytest.raises(StepError, match=r"stage 0: .* have different values on its replicas, ranks 0, 1"):
        runtime.step(x, target=x)


def replicas_with_hooks():
    """2 × 2: a hook that would be given one replica's part of a gradient is refused, by name."""
    mesh = dist.init_device_mesh(shared.KIND, (2, 2), mesh_dim_names=("pp", "dp"))
    model, *made = mlp(2)
    runtime = Runtime(*made, loss_fn=F.mse_loss, mesh=mesh, stall_limit_s=20.0)
    runtime.wrap(lambda s: DistributedDataParallel(s, process_group=mesh.get_group("dp")))
    x = torch.randn(16, 8, dtype=torch.float64)
    handles = [p.register_hook(lambda grad: grad) for p in model.parameters()]
    for handle in handles:
        handle.remove()
    runtime.step(x, target=x)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad)
    with pytest.raises((InputError, StepError), match=r"a hook on the gradient of .* this replica's part"):
        runtime.step(x, target=x)


def replicas_draw_their_own():
    """On one batch each replica has other dropout masks, the same ones at another cut."""
    world = dist.get_world_size()

    def losses(n_ranks):
        mesh = dist.init_device_mesh(shared.KIND, (n_ranks, world // n_ranks), mesh_dim_names=("pp", "dp"))
        torch.manual_seed(3)
        x = torch.randn(9, 5, dtype=torch.float64)
        made = shared.make(shared.Noisy().double(), (x,), {}, n_stages=n_ranks)
        torch.manual_seed(5)
        loss = Runtime(*made, loss_fn=F.mse_loss, mesh=mesh).step(x, target=x[:, :2]).loss.item()
        found = [None] * world
        dist.all_gather_object(found, (mesh.get_local_rank("dp"), loss))
        return dict(found)

    alone, cut = losses(1), losses(2)
    assert len(set(alone.values())) == world
    assert all(abs(loss - alone[replica]) < shared.EXACT for replica, loss in cut.items())


def replicas():
    data_parallel()
    replicas_draw_their_own()
    tensor_parallel()
    sharded_weights_come_back()
    gathers()
    sharded_values_are_refused()


def shares_of_labels():
    """Replicas weigh by the labels they counted: one may have none, or batches of unlike length."""
    mesh = dist.init_device_mesh(shared.KIND, (2, 1), mesh_dim_names=("dp", "pp"))
    group, replica = mesh.get_group("dp"), mesh.get_local_rank("dp")
    torch.manual_seed(0)
    model = Labelled().double()
    plain = copy.deepcopy(model)
    ids = torch.randint(0, 9, (4, 5))
    made = shared.make(model, (ids, ids), {}, n_stages=2, n_ranks=1, cuts=[5])
    runtime = Runtime(*made, mesh=mesh, n_microbatches=2, check_finite=False)
    runtime.wrap(lambda s: DistributedDataParallel(s, process_group=group) if list(s.parameters()) else s)
    for masked in (0, 3, 4):
        ids = torch.randint(0, 9, (12, 5))
        labels = ids.clone()
        labels[8 : 8 + masked] = -100
        labels[0, :4] = -100
        mine = slice(0, 8) if replica == 0 else slice(8, 12)
        model.zero_grad(), plain.zero_grad()
        runtime.step(ids[mine], labels[mine])
        plain(ids, labels)["loss"].backward()
        found, wanted = (shared.grads(m.named_parameters()) for m in (model, plain))
        assert shared.worst(found, wanted) < shared.EXACT, masked
        # the same in batches of unlike numbers of labels
        model.zero_grad()
        cuts = (slice(0, 1), slice(1, 8)) if replica == 0 else (slice(8, 9), slice(9, 12))
        if masked < 4:
            runtime.accumulate([(ids[cut], labels[cut]) for cut in cuts])
            assert shared.worst(shared.grads(model.named_parameters()), wanted) < shared.EXACT, masked


class Labelled(nn.Module):
    def __init__(self, d=8):
        super().__init__()
        self.emb, self.mid, self.out = nn.Embedding(9, d), nn.Linear(d, d), nn.Linear(d, 9)

    def forward(self, ids, labels):
        logits = self.out(torch.tanh(self.mid(self.emb(ids))))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}
