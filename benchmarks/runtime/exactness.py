"""How far training an adversarial model in a pipeline ends from training it in one process, in fp64.

Two programs, both over ``tests/runtime``'s adversary (skips to several consumers, int, bool and None across
cuts, sizes, expanded and non-contiguous values, an input first used late, a path of parameters beside the
data, a weight tied across the pipeline, one used twice in a stage, a custom function, parameters without a
gradient) and a frozen stage; batch, length and microbatch count change at every step. ``exact`` is held
against the plain model on full batches. ``noisy`` adds batch norm and dropout, and is held against one
process that runs the microbatches one after another.

Starting the ranks is left to ``ranks``, summarising to ``__main__``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.runtime import Runtime
from autopipe.schedule import NAMES
from autopipe.stages import Stage, build, rng
from autopipe.tracing import Capture, capture
from tests.runtime.runtime_models import (
    Adversary,
    adversary_batch,
    adversary_loss,
    cuts_allowed,
    make_plan,
    worst,
)

TWO_PER_RANK = ("interleaved", "looped-bfs", "zbv", "dualpipev")
SCHEDULES = tuple(name for name in NAMES if name != "forward-only")
STEPS = ((8, 6, 4), (7, 5, 4), (3, 6, 4), (9, 4, 2), (8, 6, 5), (4, 3, 4))
"""(rows, length, microbatches) of each step."""
VOCAB = 13


class Program(nn.Module):
    """The adversary, then a frozen part, then a head; with batch norm and dropout before it where noisy."""

    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.body = Adversary(vocab=VOCAB)
        self.ice = nn.Sequential(nn.Linear(VOCAB, VOCAB), nn.Tanh(), nn.Linear(VOCAB, VOCAB))
        self.ice.requires_grad_(False)
        self.norm = nn.BatchNorm1d(VOCAB) if noisy else nn.Identity()
        self.drop = nn.Dropout(0.3 if noisy else 0.0)
        self.out = nn.Linear(VOCAB, VOCAB)

    def forward(self, tokens: Tensor, late: Tensor, scale: Tensor, table: Tensor) -> dict[str, Any]:
        given = self.body(tokens, late, scale, table)
        logits = self.ice(given["logits"]).transpose(1, 2)
        return {**given, "logits": self.out(self.drop(self.norm(logits)).transpose(1, 2))}


def captured(model: Program) -> Capture:
    args, kwargs, _ = adversary_batch(4, 5)
    return capture(model, args, kwargs, open=("body",))


def cuts(taken: Capture, n_stages: int) -> list[int]:
    """Even cuts, of which two keep the frozen part a stage of its own where there are three stages."""
    names, allowed = [op.name for op in taken.ops.compute], cuts_allowed(taken.ops)
    ice = next(i for i, op in enumerate(taken.ops.compute) if op.module_path == "ice")
    assert {ice, ice + 1} <= set(allowed), names
    around = [ice, ice + 1][: n_stages - 1]
    rest = [i for i in allowed if i < ice]
    n = n_stages - 1 - len(around)
    return sorted([*around, *(rest[(i * len(rest)) // (n + 1)] for i in range(1, n + 1))])


Reference = Callable[[int, Any, Any, Any, int], Tensor]


def full_batches(model: Program) -> Reference:
    """Backward of the plain model's loss of the whole batch."""

    def step(index: int, args: Any, kwargs: Any, target: Any, n_microbatches: int) -> Tensor:
        loss = adversary_loss(model(*args, **kwargs), target)
        loss.backward()
        return loss.detach()

    return step


def one_after_another(model: Program, seed: int) -> Reference:
    """Backward of each microbatch's loss in turn, by hand, over the whole model as a single stage."""
    taken = captured(model)
    stage: Stage = build(taken, make_plan(taken, 1))[0]

    def step(index: int, args: Any, kwargs: Any, target: Any, n_microbatches: int) -> Tensor:
        rows, total = len(args[0]), torch.zeros((), dtype=torch.float64)
        n = min(rows, n_microbatches)
        sizes = [rows // n + (m < rows % n) for m in range(n)]
        tokens, late = args[0].split(sizes), args[1].split(sizes)
        labels, weight = target["labels"].split(sizes), target["weight"][0].split(sizes)
        for m, size in enumerate(sizes):
            leaves = taken.bind((tokens[m], late[m], args[2]), kwargs)
            with rng.scope(rng.mix(seed, index), m):
                output = taken.assemble(stage(*(leaves[name] for name in stage.inputs)))
            loss = adversary_loss(output, {"labels": labels[m], "weight": [weight[m]]}) * (size / rows)
            loss.backward()
            total += loss.detach()
        return total

    return step


def exactness(*, planned: int, noisy: bool) -> dict[str, float]:
    """Per schedule, the largest difference in losses, parameters and buffers after some optimizer steps."""
    found = {}
    for schedule in SCHEDULES:
        torch.manual_seed(0)
        model = Program(noisy).double()
        plain = copy.deepcopy(model)
        batches = [adversary_batch(rows, length, VOCAB) for rows, length, _ in STEPS]
        n_stages = planned * (2 if schedule in TWO_PER_RANK else 1)
        taken = captured(model)
        plan = make_plan(taken, n_stages, planned, schedule, cuts=cuts(taken, n_stages))
        runtime = Runtime(taken, plan, build(taken, plan), loss_fn=adversary_loss)
        reference = one_after_another(plain, torch.initial_seed()) if noisy else full_batches(plain)
        optimizers = [
            torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01)
            for parameters in (runtime.parameters(), plain.parameters())
        ]
        error = 0.0
        for index, ((args, kwargs, target), (*_, m)) in enumerate(zip(batches, STEPS, strict=True)):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = runtime.step(*args, **kwargs, target=target, n_microbatches=m).loss
            wanted = reference(index, args, kwargs, target, m)
            error = max(error, (loss - wanted).abs().item())
            for optimizer in optimizers:
                optimizer.step()
        own = dict(runtime.named_parameters())
        own |= {name: b for stage in runtime.stages for name, b in stage.named_buffers() if name[0] != "_"}
        error = max(error, worst(own, {**dict(plain.named_parameters()), **dict(plain.named_buffers())}))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, error)
        found[schedule] = max(everyone)
    return found
