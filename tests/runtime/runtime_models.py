"""Models and plans that the runtime's tests share: the nastier, the better."""

import copy
import dataclasses
import functools
import itertools

import torch
from torch import nn
from torch.nn import functional as F

from autopipe.hardware import Cluster
from autopipe.plans import Boundary, Bounds, Plan, StagePlan, Tie, crossing, shared
from autopipe.schedule import placement as default_placement
from autopipe.stages import build
from autopipe.tracing import capture

BOUNDS = Bounds(0.0, 0.0, 0.0, False)


class Square(torch.autograd.Function):
    """A custom function whose backward must not be split."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return 2 * x * w * g, (g * x * x).flatten(0, -2).sum(0)


class Custom(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.w = nn.Parameter(torch.randn(d) * 0.1)

    def forward(self, x):
        return Square.apply(x, self.w) + x


class Twice(nn.Module):
    """Uses one weight twice in a row and another through a view."""

    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.view = nn.Parameter(torch.randn(2 * d, d) * 0.2)

    def forward(self, x):
        x = torch.tanh(self.lin(torch.tanh(self.lin(x))))
        return x + F.linear(x, self.view[: x.shape[-1]])


class Nested(nn.Module):
    """Returns a nested value with a tensor, an int, None and a bool tensor."""

    def __init__(self, d):
        super().__init__()
        self.lin = nn.Linear(d, d)

    def forward(self, x):
        return {"h": (self.lin(x), None), "n": x.shape[1], "mask": x.sum(-1) > 0}


class TakesNested(nn.Module):
    def forward(self, x, nested):
        h, nothing = nested["h"]
        assert nothing is None
        return torch.where(nested["mask"].unsqueeze(-1), x + h / nested["n"], x - h)


class Adversary(nn.Module):
    """Everything a pipeline gets wrong at once; see the comments."""

    def __init__(self, d=6, vocab=13):
        super().__init__()
        self.emb = nn.Embedding(vocab, d)
        self.first = nn.Linear(d, d)
        self.frozen = nn.Linear(d, d).requires_grad_(False)
        self.nested = Nested(d)
        self.twice = Twice(d)
        self.takes = TakesNested()
        self.custom = Custom(d)
        self.side = nn.Parameter(torch.randn(3, d))  # a path of parameters beside the data
        self.unused = nn.Parameter(torch.randn(d))  # gets no gradient
        self.only_index = nn.Linear(d, d)  # used for an argmax only: no gradient either
        self.late = nn.Linear(d, d)
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.emb.weight  # tied over the whole pipeline

    def forward(self, tokens, late, scale, table, flag=True):
        h = self.emb(tokens)  # skips to three later consumers
        n = tokens.shape[1]  # a size that crosses
        keep = tokens != 0  # bool
        order = torch.argsort(tokens, dim=1)  # int
        wide = self.first(h.mean(1, keepdim=True)).expand(-1, n, -1)  # expanded, not contiguous
        fixed = torch.cos(h.detach())  # float without a gradient
        x = torch.tanh(self.first(h)) + wide  # first used twice, perhaps in two stages
        x = self.frozen(x)
        nested = self.nested(x)
        x = self.twice(x).transpose(1, 2)  # not contiguous
        picked = self.only_index(h).argmax(-1, keepdim=True)
        x = x.transpose(1, 2) + fixed + picked * 0.01
        side = torch.tanh(self.side).mean(0) * table.mean()
        x = self.takes(x, nested)
        x = torch.gather(x, 1, order.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        x = self.custom(x) * keep.unsqueeze(-1) + side
        x = x + self.late(late).unsqueeze(1) * scale  # an input first used late
        x = self.norm(x + h / n)
        if flag:
            x = x + wide
        logits = self.head(x)
        return {"logits": logits, "nothing": None, "aux": (h.mean(), n)}


def adversary_batch(rows, length, vocab=13, d=6):
    tokens = torch.randint(0, vocab, (rows, length))
    late = torch.randn(rows, d, dtype=torch.float64)
    table = torch.randn(1, d, dtype=torch.float64)
    args = (tokens, late, torch.tensor(0.7, dtype=torch.float64))
    target = {"labels": torch.randint(0, vocab, (rows, length)), "weight": [torch.rand(rows).double()]}
    return args, {"table": table}, target


def adversary_loss(output, target):
    per_token = F.cross_entropy(output["logits"].transpose(1, 2), target["labels"], reduction="none")
    return (per_token.mean(1) * target["weight"][0]).mean()


class Noisy(nn.Module):
    """Batch norm and dropout: what a pipeline can only match microbatch by microbatch."""

    def __init__(self, d=5):
        super().__init__()
        self.a = nn.Linear(d, d)
        self.bn = nn.BatchNorm1d(d)
        self.drop = nn.Dropout(0.4)
        self.b = nn.Linear(d, d)
        self.bn2 = nn.BatchNorm1d(d)
        self.c = nn.Linear(d, 2)

    def forward(self, x):
        h = self.drop(torch.relu(self.bn(self.a(x))))
        h = self.bn2(self.b(h)) + F.dropout(x, 0.2, self.training)
        return self.c(self.drop(h))


class Route(nn.Module):
    """Picks rows by data: how many differs from microbatch to microbatch."""

    def __init__(self, d):
        super().__init__()
        self.gate = nn.Linear(d, 1)

    def forward(self, x):
        where = (self.gate(x).squeeze(-1) > 0).nonzero().squeeze(-1)
        return x[where], where


class Routed(nn.Module):
    """A mixture with one expert: shapes that depend on data, picked in a module and in glue code."""

    def __init__(self, d=5):
        super().__init__()
        self.inp, self.route = nn.Linear(d, d), Route(d)
        self.expert, self.second, self.out = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        h = torch.tanh(self.inp(x))
        picked, where = self.route(h)
        h = h.index_add(0, where, self.second(torch.tanh(self.expert(picked))))
        keep = h.sum(-1) > 0
        y = torch.tanh(self.second(h[keep]))
        return self.out(h.index_add(0, torch.nonzero(keep)[:, 0], y))


class Wide(nn.Module):
    """One value that every later stage needs."""

    def __init__(self, d=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(d, d) for _ in range(6))

    def forward(self, x):
        h = self.layers[0](x)
        x = h
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x)) * h
        return x


def cuts_allowed(ops):
    """The places between compute ops that split no group."""
    names = [op.name for op in ops.compute]
    at = {name: i for i, name in enumerate(names)}
    allowed = set(range(1, len(names)))
    for group in ops.groups:
        places = [at[name] for name in group if name in at]
        if places:
            allowed -= set(range(min(places) + 1, max(places) + 1))
    return sorted(allowed)


def make_plan(captured, n_stages, n_ranks=None, schedule="1f1b", n_microbatches=4, cuts=None, recompute=()):
    """A plan of near-equal numbers of ops, or with the given cuts."""
    n_ranks = n_ranks or n_stages
    names = [op.name for op in captured.ops.compute]
    allowed = cuts_allowed(captured.ops)
    if cuts is None:
        cuts = [allowed[(i * len(allowed)) // n_stages] for i in range(1, n_stages)]
    edges = [0, *cuts, len(names)]
    ranks = default_placement(schedule, n_ranks, n_stages)
    stages = tuple(
        StagePlan(i, ranks[i], tuple(names[a:b]), recompute=i in recompute)
        for i, (a, b) in enumerate(itertools.pairwise(edges))
    )
    cluster = Cluster.uniform(n_ranks)
    ops = captured.ops
    plan = Plan(ops.model, ops.digest, stages, (), (), schedule, n_microbatches, 0.01, BOUNDS, cluster)
    crosses, ties = crossing(ops, plan.stages_of, n_stages), shared(ops, plan.stages_of)
    return dataclasses.replace(
        plan,
        boundaries=tuple(
            Boundary(op.name, min(plan.stages_of[op.name]), there, 0, op.requires_grad)
            for op, there in crosses
        ),
        ties=tuple(
            Tie(p.name, p.names, at, p.bytes, "sync" if len({ranks[s] for s in at}) > 1 else "colocate", 0.0)
            for p, at in ties
        ),
    )


def with_blocks(plan, ops, size):
    """The plan with every stage recomputed in blocks of so many neighbouring ops, where that is exact."""
    allowed = set(cuts_allowed(ops))
    at = {op.name: i for i, op in enumerate(ops.compute)}

    def blocks(stage):
        out = []
        for name in stage.ops:
            if out and (len(out[-1]) < size or at[name] not in allowed):
                out[-1] += (name,)
            else:
                out.append((name,))
        return tuple(b for b in out if not any(ops.by_name[op].mutated_buffers for op in b))

    stages = (dataclasses.replace(stage, recomputed=blocks(stage)) for stage in plan.stages)
    return dataclasses.replace(plan, stages=tuple(stages))


def make(model, args, kwargs, **options):
    return cut(capture(model, args, kwargs), **options)


@functools.cache
def _captured_once(build, *options, closed):
    torch.manual_seed(1)
    return capture(*build(*options), closed=closed)


def captured_once(build, *options, closed=()):
    """A copy of the one capture of what ``build`` makes, which no form is added to.

    Draws go on as they do from a model.
    """
    captured = copy.deepcopy(_captured_once(build, *options, closed=closed))
    torch.manual_seed(1)
    build(*options)
    return captured


def _adversary():
    model = Adversary().double()
    return model, *adversary_batch(4, 5)[:2]


def adversary(n_stages, schedule, n_ranks, recompute=(), **options):
    """The same adversary each time, and what ``make`` makes of it."""
    captured = captured_once(_adversary)
    torch.manual_seed(0)
    options |= {"schedule": schedule, "n_ranks": n_ranks, "recompute": recompute}
    return captured.model, *cut(captured, n_stages=n_stages, **options)


def cut(captured, *, n_stages, block_size=0, offload="never", **options):
    """The capture, its plan and its stages."""
    plan = make_plan(captured, n_stages, **options)
    plan = dataclasses.replace(plan, settings={"offload": offload})
    if block_size:
        plan = with_blocks(plan, captured.ops, block_size)
    return captured, plan, build(captured, plan)


def grads(named):
    return {name: None if p.grad is None else p.grad.detach().cpu().clone() for name, p in named}


def worst(found, wanted):
    """The largest difference of two dicts of tensors; inf where one has None and the other not."""
    worst = 0.0
    for name, value in found.items():
        if (value is None) != (wanted[name] is None):
            return float("inf")
        if value is not None and value.numel():
            worst = max(worst, (value.cpu() - wanted[name].cpu()).abs().max().item())
    return worst
