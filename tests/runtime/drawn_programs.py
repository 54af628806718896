"""Training programs drawn at random from what users combine, each beside the plain model's own loop.

A program is a model, how it is cut and run, how it is trained, and what is called between steps. Where the
model draws random numbers, a pipeline of one stage stands for the plain loop.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import random

import torch
from runtime_models import Square, cuts_allowed, make_plan, with_blocks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from autopipe.api import Pipe
from autopipe.tracing import capture

__all__ = ["agrees", "draw"]

STEPS = 4
WIDTH = 6
EXACT = {"rtol": 1e-10, "atol": 1e-10}
AFTER_STEPS = {"rtol": 1e-7, "atol": 1e-7}
"""Optimizers that divide by small numbers make more of a rounding."""
PER_RANK = {
    "gpipe": 1, "1f1b": 1, "interleaved": 2, "looped-bfs": 2, "zb-h1": 1, "zb-h2": 1, "zbv": 2,
    "dualpipev": 2, "cost-aware": 2,
}  # fmt: skip


class Block(nn.Module):
    """A residual block that computes in one of several ways."""

    def __init__(self, kind: str, dropout: float) -> None:
        super().__init__()
        self.kind, self.norm, self.dropout = kind, nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH) * 0.1)
        if kind == "spectral":
            self.linear = nn.utils.parametrizations.spectral_norm(self.linear)

    def inner(self, x: Tensor) -> Tensor:
        h = self.dropout(torch.tanh(self.linear(self.norm(x))))
        return h + Square.apply(h, self.scale) if self.kind == "function" else h * self.scale

    def forward(self, x: Tensor) -> Tensor:
        if self.kind in ("checkpoint", "reentrant"):
            return x + checkpoint(self.inner, x, use_reentrant=self.kind == "reentrant")
        return x + self.inner(x)


class Chain(nn.Module):
    """Blocks with ties and skips between them; its loss is outside."""

    def __init__(self, kinds, ties, skips, dropout) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind, dropout) for kind in kinds)
        for a, b in ties:
            self.blocks[b].norm = self.blocks[a].norm
            self.blocks[b].scale = self.blocks[a].scale
        self.skips, self.head = skips, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        seen = [x]
        for block in self.blocks:
            seen.append(block(seen[-1]) + (seen[-3] if self.skips and len(seen) > 3 else 0))
        return self.head(seen[-1])


class Language(nn.Module):
    """A tied embedding and head, and a mean over labels that count within."""

    def __init__(self, kinds, ties, skips, dropout) -> None:
        super().__init__()
        self.embed, self.chain = nn.Embedding(11, WIDTH), Chain(kinds, ties, skips, dropout)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        logits = self.head(self.chain(self.embed(ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Towers(nn.Module):
    """Compares the rows of a batch at its end."""

    def __init__(self, kinds, ties, skips, dropout) -> None:
        super().__init__()
        self.one, self.other = Chain(kinds, ties, skips, dropout), Block("plain", dropout)
        self.heat = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, y):
        a, b = F.normalize(self.one(x), dim=-1), F.normalize(self.other(y), dim=-1)
        logits = a @ b.T * self.heat.exp()
        return {"loss": F.cross_entropy(logits, torch.arange(len(logits), device=logits.device)), "a": a}


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@dataclasses.dataclass(frozen=True)
class Cut:
    """How the model is cut and run, from some step on."""

    schedule: str
    n_ranks: int
    seed: int
    again: int
    """0: nothing runs again in backward; 1: whole stages; more: blocks of so many ops."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What is drawn."""

    seed: int
    kind: type[nn.Module]
    kinds: tuple[str, ...]
    ties: tuple[tuple[int, int], ...]
    skips: bool
    dropout: float
    frozen: str
    thaws: int
    hook: str
    module_hook: str
    optimizer: str
    clip: float | None
    scales: bool
    n_microbatches: int
    rows: tuple[int, ...]
    ways: tuple[str, ...]
    keeps: int
    """After this step gradients are not zeroed."""
    calls: tuple[tuple[str, ...], ...]
    cuts: tuple[Cut, ...]
    resumes: int
    """The step that the second cut begins with, in a pipeline made anew."""
    schedule: str
    """Of rates: none (``""``), or torch's by that name."""
    changes: tuple[str, ...]
    """What is done to both models' weights after each step."""

    @property
    def is_random(self) -> bool:
        """Whether no plain loop draws the same or updates as often."""
        return self.dropout > 0 or "spectral" in self.kinds


def draw(seed: int) -> Program:
    """The program of a seed."""
    r = random.Random(seed)
    kind = r.choice((Chain, Chain, Language, Towers))
    hook = r.choice(("", "", "norm", "after"))
    names = ["plain", "function", "checkpoint", *(["spectral"] if kind is Chain else [])]
    names += [] if hook else ["reentrant"]  # which calls hooks for each part of a gradient
    schedules = ("gpipe", "looped-bfs") if kind is Towers else tuple(PER_RANK)
    keeps, resumes = r.choice((-1, -1, 0, 1, 2)), r.choice((STEPS, STEPS, 1, 2, 3))
    called = ("evaluate", "forward", "save", "rebalance", "gather", "report", "second", "verify")
    return Program(
        seed=seed,
        kind=kind,
        kinds=tuple(r.choice(names) for _ in range(5)),
        ties=r.choice(((), (), ((0, 4),), ((0, 2), (0, 4)), ((1, 2),))),
        skips=r.random() < 0.3,
        dropout=r.choice((0.0, 0.0, 0.3)),
        frozen=r.choice(("", "", "0.", "2.", "bias", "scale", "head")),
        thaws=r.choice((STEPS, 1, 2)),
        hook=hook,
        module_hook=r.choice(("", "", "", "forward", "backward")),
        optimizer=r.choice(("sgd", "adamw", "groups", "adagrad", "rmsprop", "nadam")),
        clip=r.choice((None, None, 2.0, 1.0, float("inf"))),
        scales=r.random() < 0.2,
        n_microbatches=r.choice((1, 2, 3, 4, 7)),
        rows=tuple(r.choice((8, 8, 9, 5, 4)) for _ in range(STEPS)),
        ways=tuple(r.choice(("step", "step", "accumulate", "no_sync")) for _ in range(STEPS)),
        keeps=-1 if keeps + 1 == resumes else keeps,
        calls=tuple(tuple(c for c in r.sample(called, 2) if r.random() < 0.4) for _ in range(STEPS)),
        cuts=tuple(
            Cut(r.choice(schedules), r.choice((1, 2, 3)), r.randrange(1000), r.choice((0, 0, 1, 2, 3)))
            for _ in range(2)
        ),
        resumes=resumes,
        schedule=r.choice(("", "", "CosineAnnealingLR", "ReduceLROnPlateau", "OneCycleLR")),
        changes=tuple(r.choice(("", "", "shrink", "start", "rates", "average")) for _ in range(STEPS)),
    )


class Side:
    """A model and what trains it: the plain one, or a pipeline of it."""

    def __init__(self, program: Program, cut: Cut | None, folder: pathlib.Path) -> None:
        self.program, self.cut, self.folder = program, cut, folder
        torch.manual_seed(program.seed)
        p = program
        self.model = p.kind(p.kinds, p.ties, p.skips, p.dropout).double()
        self._freeze(bool(not p.frozen))
        linears = [m for m in self.model.modules() if type(m) is nn.Linear]
        if p.module_hook == "forward":
            linears[len(linears) // 2].register_forward_hook(lambda m, given, output: output * 1.1)
        elif p.module_hook == "backward":
            linears[len(linears) // 2].register_full_backward_hook(lambda m, given, _: (given[0] * 0.7,))
        self.loss_fn = mean_square if p.kind is Chain else None
        self.scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=2) if p.scales else None
        named = self.model.named_parameters()
        if cut is not None:
            args, kwargs, _ = self.batch(99, 8)
            self.pipe = Pipe(*self._planned(capture(self.model, args, kwargs), cut))
            self._run()
            named = self.rt.named_parameters()
        for i, parameter in enumerate(self.model.parameters()):
            if i % 3 == 0 and parameter.requires_grad:
                self._hook(parameter)
        self.named = dict(named)
        self.optimizer = self._optimizer(self.named)
        self.scheduler = self._scheduler()
        self.start = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self.average = Average({name: self.start[name] for name in self.named})

    def _planned(self, captured, cut):
        r, n = random.Random(cut.seed), cut.n_ranks * PER_RANK[cut.schedule]
        names, tail = [op.name for op in captured.ops.compute], captured.variation.tail.ops
        ahead = min((names.index(name) for name in tail), default=len(names))
        places = [at for at in cuts_allowed(captured.ops) if at <= ahead]
        at = sorted(r.sample(places, n - 1))
        again = tuple(range(0, n, 2)) if cut.again == 1 else ()
        options = {"n_ranks": cut.n_ranks, "schedule": cut.schedule, "cuts": at, "recompute": again}
        plan = make_plan(captured, n, n_microbatches=self.program.n_microbatches, **options)
        return captured, with_blocks(plan, captured.ops, cut.again) if cut.again > 1 else plan

    def _run(self) -> None:
        mixed = "allow" if "spectral" in self.program.kinds else "tail"
        self.rt = self.pipe.runtime(self.loss_fn, scaler=self.scaler, mixed_rows=mixed)

    def _freeze(self, trains: bool) -> None:
        for name, parameter in self.model.named_parameters():
            if self.program.frozen in name:
                parameter.requires_grad_(trains)

    def _hook(self, parameter: nn.Parameter) -> None:
        if self.program.hook == "norm":
            parameter.register_hook(lambda grad: grad / (1 + grad.norm()))
        elif self.program.hook == "after":
            parameter.register_post_accumulate_grad_hook(halve)

    def _optimizer(self, named):
        kind, held = self.program.optimizer, list(named.values())
        if kind == "sgd":
            return torch.optim.SGD(held, 0.05, momentum=0.9, weight_decay=0.01)
        if kind == "adamw":
            return torch.optim.AdamW(held, 1e-2)
        if kind == "adagrad":
            return torch.optim.Adagrad(held, 1e-2)
        if kind == "rmsprop":
            return torch.optim.RMSprop(held, 1e-3, momentum=0.5, centered=True)
        if kind == "nadam":
            return torch.optim.NAdam(held, 1e-2)
        groups = [[p for p in held if (p.ndim > 1) is matrices] for matrices in (True, False)]
        return torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1]}], 1e-2)

    def _scheduler(self):
        kind, of = self.program.schedule, self.optimizer
        if kind == "CosineAnnealingLR":
            return torch.optim.lr_scheduler.CosineAnnealingLR(of, STEPS)
        if kind == "ReduceLROnPlateau":
            return torch.optim.lr_scheduler.ReduceLROnPlateau(of, factor=0.5, patience=0)
        if kind == "OneCycleLR":
            return torch.optim.lr_scheduler.OneCycleLR(of, 0.05, total_steps=STEPS, cycle_momentum=False)
        return None

    # -- steps --------------------------------------------------------------------------------------

    def batch(self, number: int, rows: int):
        """Arguments and target of a batch by its number."""
        g = torch.Generator().manual_seed(1000 * self.program.seed + number)
        x, y = torch.randn(2, rows, WIDTH, generator=g, dtype=torch.float64)
        if self.program.kind is Language:
            ids = torch.randint(0, 11, (2, rows, 3 + number % 2), generator=g)
            left_out = torch.rand(ids[1].shape, generator=g) < 0.3
            return (ids[0],), {"labels": ids[1].masked_fill(left_out, -100)}, None
        return ((x, y), {}, None) if self.program.kind is Towers else ((x,), {}, y)

    def batches(self, k: int):
        """Those of step ``k``, and what each weighs in its gradient."""
        way, rows = self.program.ways[k], self.program.rows[k]
        if way == "step" or self.program.kind is Towers or "spectral" in self.program.kinds:
            return [self.batch(10 * k, rows)], [1.0]
        if way == "no_sync":
            return [self.batch(10 * k + i, rows) for i in range(2)], [0.5, 0.5]
        found = [self.batch(10 * k + i, rows - i) for i in range(3)]
        counts = [float((b[1]["labels"] != -100).sum()) if b[1] else len(b[0][0]) for b in found]
        return found, [n / sum(counts) for n in counts]

    def step(self, k: int) -> Tensor:
        """The gradients of step ``k``; its loss."""
        if self.program.frozen and k == self.program.thaws:
            self._freeze(True)
        batches, shares = self.batches(k)
        if self.cut is None:
            losses = [share * self.loss(batch) for batch, share in zip(batches, shares, strict=True)]
            for loss in losses:
                (self.scaler.scale(loss) if self.scaler else loss).backward()
            return torch.stack(losses).sum().detach()
        if len(batches) == 3:
            names = ["ids"] if self.program.kind is Language else ["x"]
            given = [
                {**dict(zip(names, args, strict=True)), **kwargs, **self._target(y)}
                for args, kwargs, y in batches
            ]
            return self.rt.accumulate(given).loss.as_subclass(Tensor)
        total = torch.zeros((), dtype=torch.float64)
        for i, ((args, kwargs, target), share) in enumerate(zip(batches, shares, strict=True)):
            around = self.rt.no_sync() if i + 1 < len(batches) else self.rt.scaled(1.0)
            with around, self.rt.scaled(share):
                loss = self.rt.step(*args, **kwargs, **self._target(target)).loss
            total += share * loss.as_subclass(Tensor)
        return total

    def loss(self, batch) -> Tensor:
        """The plain model's."""
        args, kwargs, target = batch
        output = self.model(*args, **kwargs)
        return self.loss_fn(output, target) if self.loss_fn is not None else output["loss"]

    def _target(self, target):
        return {} if self.loss_fn is None else {"target": target}

    def finish(self, k: int, loss: Tensor) -> Tensor | None:
        """Clip, step and zero, and what follows; the norm, where it clips."""
        norm = None
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.program.clip is not None:
            clip = functools.partial(nn.utils.clip_grad_norm_, self.model.parameters())
            norm = (clip if self.cut is None else self.rt.clip_grad_norm_)(0.05, self.program.clip)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        if k != self.program.keeps or self.scaler is not None:
            self.optimizer.zero_grad(set_to_none=k % 2 == 0)
        if self.scheduler is not None:
            is_plateau = self.program.schedule == "ReduceLROnPlateau"
            self.scheduler.step(loss.item()) if is_plateau else self.scheduler.step()
        self._change(self.program.changes[k])
        return norm

    @torch.no_grad()
    def _change(self, what: str) -> None:
        for name, parameter in self.named.items():
            if what == "shrink":
                parameter.mul_(0.9)
            elif what == "start" and "bias" in name:
                parameter.copy_(self.start[name])
            elif what == "average":
                self.average.held[name].lerp_(parameter, 0.3)
        if what == "rates" and self.scheduler is None:
            for group in self.optimizer.param_groups:
                group["lr"], group["weight_decay"] = group["lr"] * 0.5, 0.05

    # -- between steps ------------------------------------------------------------------------------

    def objects(self):
        """What trains it, to save."""
        others = {"scaler": self.scaler, "scheduler": self.scheduler}
        kept = {name: thing for name, thing in others.items() if thing is not None}
        return {"optimizer": self.optimizer, "average": self.average, **kept}

    def call(self, what: str, k: int) -> None:
        """What changes nothing."""
        args, kwargs, target = self.batch(500 + k, 5)
        if what in ("evaluate", "forward"):
            self.pipe.eval()
            if what == "evaluate":
                self.rt.evaluate(*args, **kwargs, **self._target(target))
            else:
                self.rt.forward(*args, **kwargs)
            self.pipe.train()
        elif what == "save":
            self.rt.save(self.folder / f"{k}", background=k % 2 == 1, **self.objects()).wait()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.5)
            self.rt.load(self.folder / f"{k}", **self.objects())
        elif what == "rebalance":
            _, plan = self._planned(self.pipe.graph, dataclasses.replace(self.cut, seed=self.cut.seed + k))
            self.rt.rebalance(plan=plan, optimizer=self.optimizer)
        elif what == "gather":
            self.rt.gather_weights()
        elif what == "report":
            str(self.rt.report())
        elif what == "second":
            self._run()
        elif what == "verify" and not self.program.is_random:
            self.pipe.verify()


class Average:
    """A running average of weights, by name."""

    def __init__(self, start: dict[str, Tensor]) -> None:
        self.held = {name: value.clone() for name, value in start.items()}

    def state_dict(self) -> dict[str, Tensor]:
        return self.held

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.held = {name: value.clone() for name, value in state.items()}


def halve(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.5)


def agrees(program: Program, folder: pathlib.Path) -> None:
    """Run a program both ways and hold each step's loss, gradients and norm, and all weights, beside another.

    Raises :class:`AssertionError` where they differ.
    """
    whole = Cut("gpipe", 1, 0, 0)
    wanted = Side(program, whole if program.is_random else None, folder)
    found = Side(program, program.cuts[0], folder)
    for k in range(STEPS):
        if k == program.resumes:
            found.rt.save(folder / "row", keep_last=1, **found.objects())
            found = Side(program, program.cuts[1], folder)
            if program.frozen and k > program.thaws:
                found._freeze(True)
            assert found.rt.resume(folder / "row", **found.objects()) > 0
        for what in program.calls[k]:
            found.call(what, k)
        close = EXACT if k == 0 else AFTER_STEPS
        losses = found.step(k).double(), wanted.step(k).double()
        torch.testing.assert_close(*losses, **close)
        same(grads(found.model), grads(wanted.model), close)
        norms = [side.finish(k, loss) for side, loss in zip((found, wanted), losses, strict=True)]
        if program.clip is not None:
            torch.testing.assert_close(*norms, **close)
    same(dict(found.model.named_parameters()), dict(wanted.model.named_parameters()), AFTER_STEPS)
    same(found.average.held, wanted.average.held, AFTER_STEPS)
    same(dict(found.model.named_buffers()), dict(wanted.model.named_buffers()), AFTER_STEPS)


def grads(model: nn.Module) -> dict[str, Tensor]:
    """Gradients by name; zeros, of an earlier step, are none."""
    held = {name: p.grad for name, p in model.named_parameters()}
    return {name: grad.clone() for name, grad in held.items() if grad is not None and grad.any()}


def same(found, wanted, close) -> None:
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())
    for name, value in found.items():
        torch.testing.assert_close(
            value.detach(), wanted[name].detach(), **close, msg=lambda m, n=name: f"{n}: {m}"
        )
