"""What a user may do with the model itself while ranks train it: right, or refused at once.

``python honest_ranks.py CHECK …`` is one rank of a check; without a process group the same checks run alone.
"""

import contextlib
import copy
import functools
import logging
import pathlib

import pytest
import rank_checks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm as total_norm  # before there is any runtime
from torch.optim.swa_utils import AveragedModel

import autopipe


class Net(nn.Module):
    """Batch norm's statistics, a frozen layer and a tie, over enough layers for two stages."""

    def __init__(self, d=8):
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(d, d), nn.Tanh()) for _ in range(4)])
        self.norm = nn.BatchNorm1d(d)
        self.frozen = nn.Linear(d, d).requires_grad_(False)
        self.head = nn.Linear(d, d)
        self.head.weight = self.body[0][0].weight

    def forward(self, x):
        return self.head(self.frozen(self.norm(self.body(x))))


def split(seed=0, **options):
    torch.manual_seed(seed)
    model, x = Net(), torch.randn(8, 8)
    return autopipe.split(model, 2, (x,), n_microbatches=2, costs="estimated", **options)


_split_once = functools.cache(split)


def make(**options):
    """The same model each time, and a pipe of it that is split once; draws go on as they do from a model."""
    pipe = copy.deepcopy(_split_once(**options))
    torch.manual_seed(0)
    Net(), torch.randn(8, 8)
    return pipe.model, pipe


def mean_square(output, target):
    return (output - target).square().mean()


def train(rt, optimizer, n_steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(n_steps):
        x, y = torch.randn(2, 8, 8, generator=generator)
        rt.step(x, target=y)
        rt.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def alone(n_steps=3, change=lambda model: None):
    """The weights that plain training reaches, batch norm by microbatches as the pipeline has it."""
    torch.manual_seed(0)
    model = Net()
    change(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    for _ in range(n_steps):
        x, y = torch.randn(2, 8, 8, generator=generator)
        model.train()
        for half, target in zip(x.chunk(2), y.chunk(2), strict=True):
            (mean_square(model(half), target) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model


def is_whole():
    return not dist.is_initialized()


READERS = {
    "model(x)": lambda model, pipe: model(torch.randn(8, 8)),
    "pipe(x)": lambda model, pipe: pipe(torch.randn(8, 8)),
    "model.state_dict()": lambda model, pipe: model.state_dict(),
    "pipe.state_dict()": lambda model, pipe: pipe.state_dict(),
    "AveragedModel": lambda model, pipe: AveragedModel(model),
    "deepcopy": lambda model, pipe: copy.deepcopy(model),
    "verify": lambda model, pipe: pipe.verify(),
    "torch.save": lambda model, pipe: torch.save(model, pathlib.Path("/dev/null")),
    "parameters_to_vector": lambda model, pipe: nn.utils.parameters_to_vector(model.parameters()),
    "buffers": lambda model, pipe: [float(b.double().sum()) for b in model.buffers()],
    "numpy": lambda model, pipe: [p.detach().numpy().copy() for p in model.parameters()],
    "foreach": lambda model, pipe: torch._foreach_norm(list(model.parameters())),
    "functional_call": lambda model, pipe: torch.func.functional_call(
        model, dict(model.named_parameters()), (torch.randn(8, 8),)
    ),
    "sum of squares": lambda model, pipe: sum(float(p.detach().square().sum()) for p in model.parameters()),
}


def stale():
    """After a step every way to read the model's weights is right, or raises and says what to do."""
    model, pipe = make()
    average = AveragedModel(model)
    for read in READERS.values():
        read(model.eval(), pipe)
    model.train()
    rt = pipe.runtime(loss_fn=mean_square)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    train(rt, optimizer)
    expected = alone()
    refused = []
    readers = {**READERS, "update_parameters": lambda model, pipe: average.update_parameters(model)}
    for name, read in readers.items():
        try:
            read(model.eval(), pipe)
        except autopipe.StaleError as error:
            refused += [name] if "pipe.merge()" in str(error) else []
    whole = len(tuple(rt.stages)) == 2
    # the buffers that steps write are with one rank
    assert set(refused) >= set() if whole else set(refused) >= set(readers) - {"buffers"}, refused
    assert not (whole and refused), refused
    # what needs no value goes on
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in expected.parameters())
    model.train().zero_grad()
    assert "rank" in repr(list(model.parameters())) or whole
    merged = pipe.merge()
    for (name, a), b in zip(merged.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=name)
    for read in readers.values():
        read(model.eval(), pipe)
    model.train()
    assert type(merged.body[0][0].weight) is nn.Parameter
    assert merged.head.weight is merged.body[0][0].weight
    train(rt, optimizer, 1)
    if not whole:
        with pytest.raises(autopipe.StaleError, match="is trained by rank"):
            model(torch.randn(8, 8))


CHANGES = {
    "a layer frozen": lambda model: model.body[1].requires_grad_(False),
    "a layer thawed": lambda model: model.frozen.requires_grad_(True),
    "weights loaded": lambda model: model.load_state_dict(
        {k: v * 0.5 for k, v in Net().state_dict().items()}
    ),
    "a forward hook": lambda model: model.body[3].register_forward_hook(lambda m, a, out: out * 2),
    "a forward pre-hook": lambda model: model.body[2].register_forward_pre_hook(lambda m, a: (a[0] * 2,)),
    "a parameter's hook": lambda model: [
        p.register_hook(lambda g: g * 2) for p in model.parameters() if p.requires_grad
    ],
    "a new parameter in place": lambda model: setattr(model.head, "bias", nn.Parameter(torch.ones(8))),
    "evaluation mode": lambda model: model.eval(),
}


def changed():
    """What a user changes of the model between steps is what ranks go on with."""
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(3))
    for name, change in CHANGES.items():
        model, pipe = make()
        rt = pipe.runtime(loss_fn=mean_square)
        optimizer = torch.optim.SGD(rt.parameters(), 0.1, momentum=0.9)
        train(rt, optimizer, 1)
        plain = alone(1).train()
        for one in (model, plain):
            torch.manual_seed(5)
            change(one)
        loss = rt.step(x, target=y).loss
        expected = torch.zeros(())
        for half, target in zip(x.chunk(2), y.chunk(2), strict=True):
            part = mean_square(plain(half), target) / 2
            part.backward()
            expected += part.detach()
        torch.testing.assert_close(loss, expected, msg=name)
        norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        torch.testing.assert_close(rt.clip_grad_norm_(1e9), norm, msg=name)
    for change, message in (
        (lambda model: model.half(), "dtype"),
        (lambda model: setattr(model, "head", nn.Linear(8, 8)), "what Net holds"),
        (lambda model: model.register_forward_hook(lambda m, a, out: out * 2), "hooks of Net"),
    ):
        model, pipe = make()
        rt = pipe.runtime(loss_fn=mean_square)
        train(rt, torch.optim.SGD(rt.parameters(), 0.1), 1)
        with contextlib.suppress(autopipe.StaleError):
            change(model)
        with pytest.raises(autopipe.InputError, match=message):
            rt.step(x, target=y)


@contextlib.contextmanager
def warned(*words):
    """Within it just these warnings about parts of the model are given."""
    told, handler = [], logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("autopipe.runtime.reduce.refusals")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert len(told) == len(words), told
    assert all(word in text for word, text in zip(words, told, strict=True)), told


def clipping():
    """A norm over ``model.parameters()`` is the model's or refused; ours is the model's."""
    model, pipe = make()
    rt = pipe.runtime(loss_fn=mean_square)
    torch.manual_seed(1)
    x, y = torch.randn(2, 8, 8)
    rt.step(x, target=y)
    norm = rt.clip_grad_norm_(1e9)
    if is_whole():
        torch.testing.assert_close(nn.utils.clip_grad_norm_(model.parameters(), 1e9), norm)
        return
    with pytest.raises(autopipe.StaleError, match="clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(autopipe.StaleError, match="clip_grad_norm_"):
        sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None)
    for p in (p for p in rt.parameters() if p.grad is not None):  # each by a norm of its own
        torch.testing.assert_close(nn.utils.clip_grad_norm_(p, 1e9), p.grad.norm())
    own = [p.grad for p in rt.parameters() if p.grad is not None]
    with warned("gives the norm of those alone"):
        assert total_norm(own) < norm
    with warned():
        total_norm([grad.clone() for grad in own])
        rt.clip_grad_norm_(1e9)


def loaded():
    """Loading a state dict into the model on every rank gives it to every rank."""
    model, pipe = make()
    rt = pipe.runtime(loss_fn=mean_square)
    optimizer = torch.optim.SGD(rt.parameters(), 0.1, momentum=0.9)
    train(rt, optimizer, 1)
    other = alone().state_dict()
    model.load_state_dict(other)
    merged = pipe.merge()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, other[name], msg=name)


def planned():
    """A model is priced and planned again while ranks train it: that takes no value of its weights."""
    model, pipe = make()
    before = autopipe.plan(pipe.graph, 2, costs="estimated", n_microbatches=2)
    rt = pipe.runtime(loss_fn=mean_square)
    train(rt, torch.optim.SGD(rt.parameters(), 0.1), 1)
    kinds = [type(t) for t in (*model.parameters(), *model.buffers())]
    for given in (pipe.graph, model):
        args = () if given is pipe.graph else (torch.randn(8, 8),)
        again = autopipe.plan(given, 2, args, costs="estimated", n_microbatches=2)
        assert (again.graph_digest, again.n_stages) == (before.graph_digest, 2)
    once = {"min_passes": 1, "max_passes": 1, "min_s": 0.0, "progress": False}
    assert autopipe.profile(pipe.graph, n_microbatches=2, **once).costs.keys() >= {"head"}
    assert [type(t) for t in (*model.parameters(), *model.buffers())] == kinds
    assert "running_mean" in model.norm._buffers
    train(rt, torch.optim.SGD(rt.parameters(), 0.1), 1)


class Critic(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.judge = net, nn.Sequential(*[nn.Linear(8, 8) for _ in range(5)])

    def forward(self, x):
        return self.judge(self.net(x))


def two_pipelines():
    """One network in two pipelines: right on the same ranks, refused where one would take old weights."""
    net, pipe = make(balance="parameters")
    other = autopipe.split(Critic(net), 2, (torch.randn(8, 8),), n_microbatches=2, costs="estimated")
    first, second = pipe.runtime(loss_fn=mean_square), other.runtime(loss_fn=mean_square)
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
    first.step(x, target=y)
    if is_whole():
        second.step(x, target=y)
        return
    shared = set(net.parameters())
    owners = [{i: set(s.parameters()) & shared for i, s in enumerate(p.stages)} for p in (pipe, other)]
    assert owners[0] != owners[1]
    with pytest.raises(autopipe.AutopipeError, match="part of two pipelines"):
        second.step(x, target=y)


def merged_between():
    """Between the steps of two pipelines, merging makes one network right in both."""
    net, pipe = make(balance="parameters")
    other = autopipe.split(Critic(net), 2, (torch.randn(8, 8),), n_microbatches=2, costs="estimated")
    first, second = pipe.runtime(loss_fn=mean_square), other.runtime(loss_fn=mean_square)
    x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(2):
        for p, rt in ((pipe, first), (other, second)):
            optimizer = torch.optim.SGD(rt.parameters(), 0.1)
            losses.append(rt.step(x, target=y).loss)
            optimizer.step()
            optimizer.zero_grad()
            p.merge()
    torch.manual_seed(0)
    plain = Net()
    torch.randn(8, 8)
    critic = Critic(plain)
    for i, loss in enumerate(losses):
        model = critic if i % 2 else plain
        expected = 0.0
        for half, target in zip(x.chunk(2), y.chunk(2), strict=True):
            part = mean_square(model(half), target) / 2
            part.backward()
            expected += float(part.detach())
        assert abs(float(loss) - expected) < 1e-5, (i, loss, expected)
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
                p.grad = None


def other_weights():
    """Ranks that begin with other weights are told which, and what to write."""
    rank = 0 if is_whole() else dist.get_rank()
    if is_whole():
        split(rank).runtime(loss_fn=mean_square)
        return
    pipe = split(rank)
    with pytest.raises(
        autopipe.InputError, match=r"differ between rank 0 and rank 1.*torch.manual_seed\(0\)"
    ):
        pipe.runtime(loss_fn=mean_square)
    # a rank that trains already has only its own weights as they are: it may make another runtime
    _, pipe = make()
    rt = pipe.runtime(loss_fn=mean_square)
    train(rt, torch.optim.SGD(rt.parameters(), 0.1), 1)
    again = pipe.runtime(loss_fn=mean_square, schedule="gpipe")
    train(again, torch.optim.SGD(rt.parameters(), 0.1), 1)


def other_options():
    """Options that ranks have different are named before any step."""
    if is_whole():
        return
    _, pipe = make()
    rank = dist.get_rank()
    for name, options in {
        "n_microbatches": {"n_microbatches": 1 + rank},
        "having a scaler": {"scaler": torch.amp.GradScaler("cpu") if rank else None},
        "loss_reduction": {"loss_reduction": ("mean", "sum")[rank]},
        "feed": {"feed": rank},
        "autocast": {"autocast": lambda: torch.autocast("cpu", (torch.bfloat16, torch.float16)[rank])},
    }.items():
        with pytest.raises(autopipe.PlanError, match=f"ranks disagree on {name}: rank 0 has .*, rank 1 has"):
            pipe.runtime(loss_fn=mean_square, **options)


def wrapped():
    """A pipe inside DistributedDataParallel would train whole copies: refused."""
    if is_whole():
        return
    _, pipe = make()
    with pytest.raises(autopipe.InputError, match=r"pipe\.runtime"):
        nn.parallel.DistributedDataParallel(pipe)


def wrapped_stages():
    """DistributedDataParallel's own error on stages that are no replicas says what to do, too."""
    if is_whole():
        return
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 9), nn.Linear(9, 8))
    pipe = autopipe.split(
        model, 2, (torch.randn(8, 8),), n_microbatches=2, costs="estimated", pin={"0": 0, "1": 1, "2": 1}
    )
    rt = pipe.runtime(loss_fn=mean_square)
    with pytest.raises(RuntimeError, match="same model") as refused:
        rt.wrap(nn.parallel.DistributedDataParallel)
    assert "process_group=mesh.get_group('dp')" in refused.value.__notes__[0]


def told_of_whole():
    """A training call of the whole pipe on each rank is told of once."""
    _, pipe = make()
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("autopipe.api.pipe").addHandler(handler)
    for _ in range(2):
        pipe(torch.randn(8, 8))
    logging.getLogger("autopipe.api.pipe").removeHandler(handler)
    assert len(records) == (0 if is_whole() else 1)


def equal_batches():
    """Replicas that are given one another's batches (a sampler that does not shard) are told of it, once."""
    if is_whole():
        return
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("autopipe.runtime.reduce.data_parallel")
    logger.addHandler(handler)
    for shared in (False, True):
        torch.manual_seed(0)
        pipe = autopipe.split(Net(), 1, (torch.randn(8, 8),), n_ranks=1, n_microbatches=2, costs="estimated")
        rt = pipe.runtime(loss_fn=mean_square, mesh=mesh)
        group = mesh.get_group("dp")
        rt.wrap(lambda s, g=group: nn.parallel.DistributedDataParallel(s, process_group=g))
        torch.manual_seed(0 if shared else dist.get_rank())
        for _ in range(3):
            x, y = torch.randn(2, 8, 8)
            rt.step(x, target=y)
    logger.removeHandler(handler)
    assert len(records) == 1
    assert "DistributedSampler(dataset, num_replicas=2" in records[0].getMessage()


class Tokens(nn.Module):
    """A language model whose loss averages over the labels that count."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])

    def forward(self, ids, labels):
        scores = self.head(self.blocks(self.embed(ids)))
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten()), "scores": scores}


def grads(named):
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def accumulated():
    """Several batches, ragged and with labels that do not count, are the step of all of them together."""
    torch.manual_seed(0)
    model = Tokens().double()
    plain = copy.deepcopy(model)
    ids = torch.randint(0, 11, (11, 5))
    labels = torch.where(torch.rand(11, 5) < 0.4, -100, ids)
    labels[5:8] = -100
    pipe = autopipe.split(model, 2, (ids[:4], labels[:4]), n_microbatches=2, costs="estimated")
    rt = pipe.runtime()
    expected = plain(ids, labels)["loss"]
    expected.backward()
    wanted = grads(plain.named_parameters())
    sizes = (4, 1, 3, 3)
    parts = [{"ids": a, "labels": b} for a, b in zip(ids.split(sizes), labels.split(sizes), strict=True)]
    for batches in (parts, [tuple(part.values()) for part in parts]):
        loss = rt.accumulate(batches).loss
        torch.testing.assert_close(loss, expected.detach())
        for name, value in grads(rt.named_parameters()).items():
            torch.testing.assert_close(value, wanted[name])
        for p in rt.parameters():
            p.grad = None
    # one rank has the batches
    feeding = pipe.runtime(feed=0)
    feeds = is_whole() or dist.get_rank() == 0
    loss = feeding.accumulate(parts if feeds else [{}] * len(parts)).loss
    torch.testing.assert_close(loss, expected.detach())
    for name, value in grads(feeding.named_parameters()).items():
        torch.testing.assert_close(value, wanted[name])
    # over rows, with a target; a factor for those who count themselves
    torch.manual_seed(0)
    model, pipe = make()
    model.eval()
    plain = copy.deepcopy(model)
    x, y = torch.randn(2, 7, 8)
    rt = pipe.runtime(loss_fn=mean_square)
    expected = mean_square(plain(x), y)
    expected.backward()
    loss = rt.accumulate([{"x": a, "target": b} for a, b in zip(x.split(3), y.split(3), strict=True)]).loss
    torch.testing.assert_close(loss, expected.detach())
    with rt.scaled(2.0):
        rt.step(x, target=y)
    wanted = grads(plain.named_parameters())
    for name, value in grads(rt.named_parameters()).items():
        torch.testing.assert_close(value, 3 * wanted[name], rtol=1e-4, atol=1e-6)


class Noisy(nn.Module):
    """Uses its input early and late, and drops some of what it computes."""

    def __init__(self, d=8):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)]
        self.body = nn.Sequential(*layers)

    def forward(self, x):
        return self.body(x) + x


def chained():
    """A generator learns from a critic: the gradient of the critic's input goes on into the generator."""
    for schedule in ("1f1b", "zb-h1"):
        torch.manual_seed(0)
        maker, judge = Noisy().double(), Noisy().double().eval()
        plain_maker, plain_judge = copy.deepcopy(maker).eval(), copy.deepcopy(judge)
        before = nn.Linear(8, 8).double()  # plain, the same on every rank
        z, batch = torch.randn(2, 8, 8).double()
        options = {"n_microbatches": 2, "costs": "estimated", "schedule": schedule}
        first, second = (autopipe.split(m, 2, (batch,), **options) for m in (maker, judge))
        dot = {"loss_fn": lambda output, grad: (output * grad).sum(), "loss_reduction": "sum"}
        make_rt, judge_rt = first.runtime(**dot), second.runtime(loss_fn=mean_square)
        # with dropout, the step repeats what the forward drew
        made = make_rt.forward(z, like_step=True).requires_grad_()
        again = make_rt.step(z, target=torch.zeros_like(made), return_outputs="all").outputs
        torch.testing.assert_close(again, made.detach())
        # without, everything is the plain chain's: critic, generator, and a plain layer before both
        maker.eval()
        inner = before(z)
        made = make_rt.forward(inner.detach()).requires_grad_()
        judge_rt.step(made, target=batch)
        make_rt.step(inner, target=made.grad)
        mine = grads(before.named_parameters())
        before.zero_grad()
        mean_square(plain_judge(plain_maker(before(z))), batch).backward()
        torch.testing.assert_close(mine, grads(before.named_parameters()))
        for name, value in grads(make_rt.named_parameters()).items():
            torch.testing.assert_close(value, plain_maker.get_parameter(name).grad)
        for name, value in grads(judge_rt.named_parameters()).items():
            torch.testing.assert_close(value, plain_judge.get_parameter(name).grad)
        with torch.no_grad(), pytest.raises(autopipe.InputError, match="evaluate"):
            judge_rt.step(made, target=batch)


def halve(model):
    """Other tensors for all of the model's, tied as they were."""
    model.load_state_dict(
        {n: v / 2 if v.is_floating_point() else v for n, v in own_state(model)}, assign=True
    )
    model.head.weight = model.body[0][0].weight


def own_state(model):
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]


def replaced():
    """Tensors put in place of the model's once it has a runtime: gradients of new ties are summed."""
    model, pipe = make(ties="sync")
    rt = pipe.runtime(loss_fn=mean_square)
    assert [tie.mode for tie in pipe.plan.ties] == ["sync"]
    halve(model)
    optimizer = torch.optim.SGD(rt.parameters(), 0.1, momentum=0.9)
    train(rt, optimizer)
    if not is_whole():
        for name in ("model(x)", "model.state_dict()", "sum of squares"):
            with pytest.raises(autopipe.StaleError):
                READERS[name](model, pipe)
    torch.testing.assert_close(pipe.merge().state_dict(), alone(change=halve).state_dict())


class Rooted(nn.Module):
    """Parameters that no layer holds, and so each stage by itself."""

    def __init__(self, d=8):
        super().__init__()
        self.before, self.after = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.first, self.second = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x + self.before))) * self.after


def assigned():
    """A runtime trains what ``pipe.load_state_dict(assign=True)`` brings; one with wrapped stages refuses."""
    torch.manual_seed(0)
    model = Rooted()
    x, y = torch.randn(2, 8, 8)
    pipe = autopipe.split(model, 2, (x,), n_microbatches=2, costs="estimated")
    rt = pipe.runtime(loss_fn=mean_square)
    torch.manual_seed(1)
    other = Rooted()
    nn.init.normal_(other.before)
    nn.init.normal_(other.after)
    pipe.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    mean_square(other(x), y).backward()
    rt.step(x, target=y)
    for name, parameter in rt.named_parameters():
        assert parameter is model.get_parameter(name)
        torch.testing.assert_close(parameter.grad, other.get_parameter(name).grad)
    rt.wrap(lambda stage: None if stage.index else torch.nn.Sequential(stage))
    with pytest.raises(autopipe.InputError, match="wrapped"):
        pipe.load_state_dict(other.state_dict(), assign=True)


def tied_otherwise():
    """Parameters that are tied or parted once there is a runtime are refused by name, until put back."""
    model, pipe = make()
    rt = pipe.runtime(loss_fn=mean_square)
    optimizer = torch.optim.SGD(rt.parameters(), 0.1)
    head, first, second = model.head, model.body[0][0], model.body[2][0]
    with torch.no_grad():
        copied = nn.Parameter(first.weight.clone())
    one, other = first.weight, second.weight
    for module, wrong, right in ((head, copied, one), (second, one, other)):
        module.weight = wrong
        is_right = is_whole() and module is second
        refusal = pytest.raises(autopipe.InputError, match=r"body\.0\.0\.weight, .* one tensor")
        with contextlib.nullcontext() if is_right else refusal:
            train(rt, optimizer, 1)
        module.weight = right
    train(rt, optimizer, 1)


CHECKED = (
    replaced,
    assigned,
    tied_otherwise,
    changed,
    accumulated,
    chained,
    stale,
    clipping,
    planned,
    loaded,
    two_pipelines,
    merged_between,
    other_weights,
    other_options,
    wrapped,
    wrapped_stages,
    told_of_whole,
    equal_batches,
)
CHECKS = {f.__name__: f for f in CHECKED}


if __name__ == "__main__":
    rank_checks.run(CHECKS)
