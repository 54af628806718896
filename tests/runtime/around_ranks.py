"""What users put around, into and between steps: right as in a plain loop, or refused and training goes on.

``python around_ranks.py CHECK …`` is one rank of checks; without a process group the same ones run alone.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import logging
import math
import pathlib
import pickle
import tempfile
import warnings

import numpy as np
import pytest
import rank_checks
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from traps.surroundings import default_dtype, deterministic

import autopipe
from autopipe.errors import AutopipeError, InputError, PlanError, StepError


def mean_square(output, target):
    return (output - target).square().mean()


def batch(rows=8, seed=1):
    return torch.randn(2, rows, 8, generator=torch.Generator().manual_seed(seed))


@functools.cache
def split():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    return autopipe.split(model, 2, (torch.randn(8, 8),), n_microbatches=4, costs="estimated")


class Pair:
    """A pipeline of two stages, a copy of one that is split once, and the plain model beside it."""

    def __init__(self, loss_fn=mean_square, **options):
        self.pipe, self.loss_fn = copy.deepcopy(split()), loss_fn
        self.model = self.pipe.model
        self.plain = copy.deepcopy(self.model)
        torch.manual_seed(0)
        self.rt = self.pipe.runtime(loss_fn, **options)

    def agrees(self, x, target, around=contextlib.nullcontext, tolerance=1e-5, **more):
        """A step of both, each within ``around()``: the same loss and gradients."""
        with around():
            loss = self.rt.step(x, target=target, **more).loss
        with around():
            expected = self.loss_fn(self.plain(x), target)
            expected.backward()
        close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
        torch.testing.assert_close(loss, expected.detach(), **close)
        self.same_gradients(tolerance)
        for parameter in (*self.rt.parameters(), *self.plain.parameters()):
            parameter.grad = None

    def same_gradients(self, tolerance=1e-5):
        for name, parameter in self.rt.named_parameters():
            wanted = self.plain.get_parameter(name).grad
            assert (parameter.grad is None) == (wanted is None), name
            if wanted is not None:
                torch.testing.assert_close(parameter.grad, wanted, rtol=tolerance, atol=tolerance)


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def is_whole():
    return not dist.is_initialized()


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def anomalies():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            yield


MODES = {
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), 2e-2),
    "anomaly detection": (anomalies, 1e-5),
    "saved tensors on the host": (torch.autograd.graph.save_on_cpu, 1e-5),
    "deterministic": (deterministic, 1e-5),
    "another default dtype": (functools.partial(default_dtype, torch.float64), 1e-5),
    "a function mode": (Functions, 1e-5),
    "a dispatch mode": (Dispatches, 1e-5),
    "gradients asked for": (torch.enable_grad, 1e-5),
    "a range of a profiler": (lambda: torch.autograd.profiler.record_function("step"), 1e-5),
}


def modes():
    """Steps within torch's own contexts; without gradients a step is refused, an evaluation right."""
    pair = Pair()
    x, y = batch()
    for name, (around, tolerance) in MODES.items():
        print(name, flush=True)
        pair.agrees(x, y, around, tolerance)
    for off in (torch.no_grad, torch.inference_mode):
        with off():
            with pytest.raises(InputError, match="evaluate"):
                pair.rt.step(x, target=y)
            loss = pair.rt.evaluate(x, target=y).loss
            outputs = pair.rt.forward(x)
        torch.testing.assert_close(loss, mean_square(pair.plain(x), y).detach())
        torch.testing.assert_close(outputs.clone(), pair.plain(x).detach())
        pair.agrees(x, y)


def inference(x):
    with torch.inference_mode():
        return x.clone()


def inferred():
    """What is made, loaded, moved or brought together within inference_mode trains on."""
    x, y = batch()
    cuts = [
        autopipe.split(split().graph, 2, n_microbatches=4, pin={"1": s}, costs="estimated").plan
        for s in (0, 1)
    ]
    folder = [tempfile.mkdtemp() if not rank() else None]
    if not is_whole():
        dist.broadcast_object_list(folder, 0)
    pair = Pair(release=True)
    with torch.inference_mode():
        pair.rt = pair.pipe.runtime(mean_square, release=True)
    made = [torch.optim.AdamW(w.parameters(), 0.01) for w in (pair.rt, pair.plain)]

    def step():
        pair.agrees(x, y, tolerance=1e-4)
        for way, optimizer in zip((pair.rt, pair.plain), made, strict=True):
            for p in way.parameters():
                p.grad = p.detach().clone()
            optimizer.step()
            optimizer.zero_grad()

    step()
    for between in (
        lambda: [call(f"{folder[0]}/save", optimizer=made[0]) for call in (pair.rt.save, pair.rt.load)],
        *(functools.partial(pair.rt.rebalance, plan=cut, optimizer=made[0]) for cut in cuts),
        lambda: pair.rt.clip_grad_norm_(1.0),
        pair.pipe.merge,
    ):
        with torch.inference_mode():
            between()
        assert not any(p.is_inference() for p in pair.rt.parameters())
        step()
    with torch.inference_mode():
        pair.pipe.merge()
    pair.model(x).sum().backward()
    assert all(p.grad is not None for p in pair.model.parameters())


BATCHES = {
    "fewer rows than microbatches": lambda x: x[:3],
    "one row": lambda x: x[:1],
    "columns first in memory": lambda x: x.t().contiguous().t(),
    "every second of wider rows": lambda x: torch.cat([x, x], 1)[:, ::2],
    "one row many times": lambda x: x[:1].expand(8, 8),
    "a part of more": lambda x: torch.cat([x, x])[3:9],
    "a parameter's data": lambda x: nn.Parameter(x).data,
}
REFUSED = {
    "no rows": (lambda x: x[:0], "empty"),
    "another dtype": (lambda x: x.double(), "float64"),
    "another number of dims": (lambda x: x[None], "dims"),
    "no tensor": (lambda x: x.numpy(), "was a tensor"),
    "a list": (lambda x: x.tolist(), "another structure|was a tensor"),
    "without values": (lambda x: x.to("meta"), "meta"),
    "made in inference mode": (inference, "inference_mode"),
    "sparse": (lambda x: x.to_sparse(), "sparse"),
}


def batches():
    """Batches of any layout in memory and number of rows; those that cannot be are refused alike."""
    pair = Pair()
    x, y = batch()
    for name, make in BATCHES.items():
        print(name, flush=True)
        pair.agrees(make(x), y[: len(make(x))])
    for name, (make, words) in REFUSED.items():
        print(name, flush=True)
        with pytest.raises(InputError, match=words):
            pair.rt.step(make(x), target=y)
    for given, words in (((x, x), "arguments"), ((), "arguments")):
        with pytest.raises(InputError, match=words):
            pair.rt.step(*given, target=y)
    pair.agrees(x, y)


def nested(output, target):
    if target is None:
        return output.square().mean()
    if isinstance(target, tuple):
        return mean_square(output, target[0]) + mean_square(output, target[1][0])
    return mean_square(output, target["y"]) * target["times"] * (len(target["name"]) if target["more"] else 1)


@dataclasses.dataclass
class Aim:
    y: torch.Tensor
    times: float = 2.0
    name: str = "text"
    more: object = None

    def __getitem__(self, key):
        return getattr(self, key)


class Held:
    def __init__(self, **named):
        vars(self).update(named)

    def __getitem__(self, key):
        return getattr(self, key)


def targets():
    """Targets of any structure; what is no row's goes to every microbatch, and what cannot be is refused."""
    pair = Pair(nested)
    x, y = batch()
    named = {"y": y, "times": 2.0, "name": "text", "more": None}
    odd = y.t().contiguous().t(), (y[:1].expand(8, 8),)
    kinds = collections.UserDict(named), Aim(y), Held(**named)
    for target in (None, named, {**named, "more": {1, 2}}, (y, [y * 2]), odd, *kinds):
        pair.agrees(x, target)
    made = pair.plain(x)
    for target, words in (
        ({**named, "y": y.to("meta")}, "meta"),
        ({**named, "y": made}, "detach"),
        ({**named, "name": ["a"] * 8}, "only tensors"),
        (Aim(y, name=["a"] * 8), "only tensors"),
        (Held(y=y, more=np.zeros(8)), "only tensors"),
        ({**named, "more": {y}}, "tensors in a set"),
    ):
        with pytest.raises(InputError, match=words):
            pair.rt.step(x, target=target)
    pair.agrees(x, named)


LOSSES = {
    "several": (lambda out: (out.mean(), out.sum()), "tuple"),
    "one for each row": (lambda out: out.mean(1), r"shape \(2,\)"),
    "a number": (lambda out: 1.0, "float"),
    "nothing": (lambda out: None, "NoneType"),
    "complex": (lambda out: torch.complex(out, out).mean(), "complex"),
    "detached": (lambda out: out.detach().mean(), "require a gradient"),
    "an error": (lambda out: out.no_such_thing, "no_such_thing"),
}


def losses():
    """What is no loss is told on every rank; in one process the next step is right."""
    x, y = batch()
    wrong, pair = [], None

    def loss_fn(output, target):
        return wrong[0](output) if wrong else mean_square(output, target)

    for name in LOSSES if is_whole() else ("one for each row", "an error"):
        print(name, flush=True)
        pair = pair if pair and is_whole() else Pair(loss_fn)
        pair.agrees(x, y)
        make, words = LOSSES[name]
        wrong.append(make)
        with pytest.raises(AutopipeError, match=words):
            pair.rt.step(x, target=y)
        wrong.clear()
        for parameter in pair.rt.parameters():
            parameter.grad = None
        if is_whole():
            pair.agrees(x, y)
        else:
            with pytest.raises(StepError, match=words):  # and every later call says why
                pair.rt.step(x, target=y)


def interrupted():
    """Ctrl-C at one rank, in its loss or before its step: that rank has it, and the others are told."""
    for where, who in (("loss", 1), ("weight", 0)):
        at = []

        def stop(here, at=at, who=who):
            if here in at and rank() == (0 if is_whole() else who):
                raise KeyboardInterrupt

        def loss_fn(output, target, stop=stop):
            stop("loss")
            return mean_square(output, target)

        def weigh(args, kwargs, target, stop=stop):
            stop("weight")
            return len(target)

        pair = Pair(loss_fn, loss_weight=weigh)
        x, y = batch()
        pair.agrees(x, y)
        at.append(where)
        is_mine = is_whole() or rank() == who
        kind = KeyboardInterrupt if is_mine else StepError
        with pytest.raises(kind) as told:
            pair.rt.step(x, target=y)
        assert is_mine or f"rank {who} was stopped by KeyboardInterrupt" in str(told.value)
        at.clear()
        if is_whole():
            for parameter in pair.rt.parameters():
                parameter.grad = None
            pair.agrees(x, y)


def in_one(x, y, write):
    """Two batches, the second of which is written over the first."""
    buffer = torch.empty_like(x)
    for values in (x, x + 1):
        write(buffer, values)
        yield {"input": buffer, "target": y}


CALLS = {
    "no microbatches": lambda rt, x, y: rt.step(x, target=y, n_microbatches=0),
    "fewer than none": lambda rt, x, y: rt.step(x, target=y, n_microbatches=-1),
    "half a microbatch": lambda rt, x, y: rt.step(x, target=y, n_microbatches=2.5),
    "microbatches in words": lambda rt, x, y: rt.step(x, target=y, n_microbatches="4"),
    "other outputs": lambda rt, x, y: rt.step(x, target=y, return_outputs="first"),
    "outputs elsewhere": lambda rt, x, y: rt.forward(x, outputs_on="none"),
    "a factor in words": lambda rt, x, y: rt.scaled("2"),
    "no factor": lambda rt, x, y: rt.scaled(math.nan),
    "an endless factor": lambda rt, x, y: rt.scaled(math.inf),
    "no norm": lambda rt, x, y: rt.clip_grad_norm_(math.nan),
    "a norm below zero": lambda rt, x, y: rt.clip_grad_norm_(-1.0),
    "a norm in words": lambda rt, x, y: rt.clip_grad_norm_("1"),
    "norms of order zero": lambda rt, x, y: rt.clip_grad_norm_(1.0, norm_type=0),
    "norms of negative order": lambda rt, x, y: rt.clip_grad_norm_(1.0, norm_type=-math.inf),
    "no batches": lambda rt, x, y: rt.accumulate([]),
    "a batch that is none": lambda rt, x, y: rt.accumulate([x]),
    "batches that are none": lambda rt, x, y: rt.accumulate(None),
    "batches in one buffer": lambda rt, x, y: rt.accumulate(in_one(x, y, torch.Tensor.copy_)),
    "batches in one array": lambda rt, x, y: rt.accumulate(
        in_one(x, y, lambda b, v: np.copyto(b.numpy(), v))
    ),
    "microbatches that show their address": lambda rt, x, y: rt.step(x, target=y, n_microbatches=object()),
    "random numbers in words": lambda rt, x, y: rt.forward(x, like_step="yes"),
    "a wrapper that is none": lambda rt, x, y: rt.wrap(None),
    "a wrapper that makes no module": lambda rt, x, y: rt.wrap(lambda stage: 3),
    "a gain in words": lambda rt, x, y: rt.rebalance(least_gain="1"),
    "no gain": lambda rt, x, y: rt.rebalance(least_gain=math.nan),
    "a plan that is none": lambda rt, x, y: rt.rebalance(plan=rt.plan.to_json()),
    "a plan that contradicts itself": lambda rt, x, y: rt.rebalance(
        plan=dataclasses.replace(rt.plan, stages=rt.plan.stages[::-1])
    ),
    "speeds in a row": lambda rt, x, y: rt.rebalance(speeds=[1.0, 2.0]),
    "a speed of no rank": lambda rt, x, y: rt.rebalance(speeds={9: 2.0}),
    "a rank in words": lambda rt, x, y: rt.rebalance(speeds={"0": 2.0}),
    "no speed": lambda rt, x, y: rt.rebalance(speeds={0: 0}),
    "a time in words": lambda rt, x, y: rt.rebalance(time_limit_s="1"),
    "an optimizer that is none": lambda rt, x, y: rt.rebalance(scheduler=3),
    "no folder": lambda rt, x, y: rt.publish(None),
    "a folder without a name": lambda rt, x, y: rt.publish(""),
    "a copy": lambda rt, x, y: copy.deepcopy(rt),
    "a shallow copy": lambda rt, x, y: copy.copy(rt),
    "a pickle": lambda rt, x, y: pickle.dumps(rt),
}


def calls():
    """Odd arguments are refused, and the next step is right; norms of every order are the plain model's."""
    pair = Pair()
    x, y = batch()
    for name, call in CALLS.items():
        print(name, flush=True)
        with pytest.raises((InputError, PlanError)):
            call(pair.rt, x, y)
    pair.agrees(x, y, n_microbatches=np.int64(3))
    rows = torch.cat([x[:4], x[4:] / 2])
    pair.rt.accumulate({"input": rows[i : i + 4].mul_(1 + i / 4), "target": y[i : i + 4]} for i in (0, 4))
    mean_square(pair.plain(x), y).backward()
    pair.same_gradients()
    for parameter in (*pair.rt.parameters(), *pair.plain.parameters()):
        parameter.grad = None
    first, second = pair.rt.scaled(0.5), pair.rt.scaled(4)
    with first, second, pair.rt.no_sync():
        pair.rt.step(x, target=y)
    pair.rt.step(x, target=y)
    (3 * mean_square(pair.plain(x), y)).backward()
    pair.same_gradients()
    for order in (1.0, 2, 3.0, math.inf):
        wanted = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.5, order)
        torch.testing.assert_close(pair.rt.clip_grad_norm_(0.5, order), wanted)
        pair.same_gradients()
    pair.rt.clip_grad_norm_(math.inf)
    pair.same_gradients()
    if not is_whole():
        with pytest.raises(StepError, match=r"outputs=(all|last)"):
            pair.rt.step(x, target=y, return_outputs="all" if rank() else "last")


def unlike():
    """Ranks that clip in unlike ways, save in unlike places or not all an optimizer are told, and go on."""
    if is_whole():
        return
    pair = Pair()
    x, y = batch()
    optimizer = torch.optim.SGD(list(pair.rt.parameters()), 0.1)
    pair.rt.step(x, target=y)
    mean_square(pair.plain(x), y).backward()
    for norm, order in ((0.1 + rank(), 2.0), (0.1, 1.0 + rank()), (0.1, (2.0, math.inf)[rank()])):
        with pytest.raises(InputError, match=r"calls clip_grad_norm_ with .*, and another with other values"):
            pair.rt.clip_grad_norm_(norm, order)
    pair.same_gradients()
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(InputError, match=r"rank 0 gave .*0, rank 1 gave .*1: a save is one folder"):
            pair.rt.save(f"{folder}/{rank()}")
        mine = {"optimizer": optimizer} if rank() else {}
        with pytest.raises(InputError, match=r"rank 1 gave an optimizer and rank 0.* gave none"):
            pair.rt.save("kept", **mine)
        assert not pathlib.Path("kept").exists()
    nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.1)
    pair.rt.clip_grad_norm_(0.1)
    pair.same_gradients()


def fed():
    """Under feed, batches that do not fit, or more on one rank than on another, are refused by all alike."""
    pair = Pair(feed=0)
    x, y = batch()
    cuts = slice(0, 2), slice(2, 7), slice(7, 8)
    batches = [{"input": x[cut], "target": y[cut]} for cut in cuts]

    def given(own, n_others):
        return own if is_whole() or rank() == 0 else [{}] * n_others

    for n_others in (0, 2, 4) if not is_whole() else ():
        with pytest.raises(InputError, match=rf"got 3 batches on rank 0, .* and {n_others} on rank 1"):
            pair.rt.accumulate(given(batches, n_others))
    odd = [*batches[:2], {"input": x.long(), "target": y}]
    for bad in (odd, [{"wrong": x}], [{"input": "text"}, *batches], [x], []):
        with pytest.raises(InputError):
            pair.rt.accumulate(given(bad, len(bad)))
    if not is_whole():
        with pytest.raises(InputError, match=r"batch 0 of .* is a NoneType"):
            pair.rt.accumulate([None] * 3 if rank() else batches)
    pair.rt.accumulate(given(batches, 3))
    mean_square(pair.plain(x), y).backward()
    pair.same_gradients()
    if is_whole():
        return
    with pytest.raises(StepError, match=r"is at (save|gather_weights); rank \d is at (save|gather_weights)"):
        pair.rt.save("nowhere") if rank() else pair.rt.gather_weights()


class Doubled(nn.Sequential):
    """Goes by how many rows there are."""

    def forward(self, x):
        return super().forward(x) * (2 if len(x) > 4 else 1)


def fed_anew():
    """Under feed, what only the whole batch asks to be recorded is recorded on every rank."""
    torch.manual_seed(0)
    model, (x, y) = Doubled(*[nn.Linear(8, 8) for _ in range(4)]), batch()
    plain = copy.deepcopy(model)
    rt = autopipe.split(model, 2, (x[:2],), n_microbatches=1, costs="estimated").runtime(
        mean_square, feed=0, mixed_rows="allow"
    )
    for n in (4, 4, 1, 2):
        given = {"x": x, "target": y} if is_whole() or rank() == 0 else {}
        loss = rt.step(**given, n_microbatches=n).loss
        parts = [mean_square(plain(a), b) for a, b in zip(x.chunk(n), y.chunk(n), strict=True)]
        torch.testing.assert_close(loss, torch.stack(parts).mean().detach(), check_dtype=False)


def optimizers():
    """Optimizers replaced and grown, other rates, layers frozen and thawed, gradients zeroed in place."""
    pair = Pair()
    sides = (dict(pair.rt.named_parameters()), dict(pair.plain.named_parameters()))
    groups = [[p for n, p in side.items() if "weight" in n] for side in sides]
    biases = [[p for n, p in side.items() if "bias" in n] for side in sides]
    made = [torch.optim.SGD(group, 0.1, momentum=0.9) for group in groups]
    rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in made]
    for step in range(6):
        if step == 2:
            for optimizer, more in zip(made, biases, strict=True):
                optimizer.add_param_group({"params": more, "lr": 0.05})
            rates = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in made]
        if step in (3, 5):
            for model in (pair.model, pair.plain):
                model[1].requires_grad_(step == 5)
                model[0][0].bias.requires_grad_(step == 5)
        if step == 4:
            made = [torch.optim.Adam(side.values(), 0.01) for side in sides]
            rates = [torch.optim.lr_scheduler.ConstantLR(o, 0.5, 3) for o in made]
        x, y = batch(seed=step)
        pair.rt.step(x, target=y)
        mean_square(pair.plain(x), y).backward()
        for optimizer, rate in zip(made, rates, strict=True):
            optimizer.step()
            rate.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
        for side in sides:
            for parameter in side.values() if step < 2 else ():
                parameter.grad = None
    for name, parameter in sides[0].items():
        torch.testing.assert_close(parameter, sides[1][name], rtol=1e-5, atol=1e-6, msg=name)


class OneRate(torch.optim.Optimizer):
    """Goes by one norm of all gradients, as Prodigy and D-Adaptation find their rate."""

    def __init__(self, params, lr=0.1, scale=1.0):
        super().__init__(params, {"lr": lr, "scale": scale})

    @torch.no_grad()
    def step(self):
        held = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(p.grad.square().sum() for p, _ in held).sqrt()
        for p, group in held:
            p.sub_(group["lr"] * group["scale"] * p.grad / norm)


class EachRate(OneRate):
    """Goes by each parameter's own norm."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad / p.grad.norm())


class Asking(EachRate):
    """Cannot be made of its defaults alone."""

    def __init__(self, params, asks):
        super().__init__(params)
        self.asks = asks


def optimizers_of_all():
    """An optimizer that makes one number of all gradients is refused where a rank has some of them."""
    pair = Pair()
    x, y = batch()
    named = dict(pair.rt.named_parameters())
    for kind, options in ((EachRate, {}), (Asking, {"asks": 1}), (OneRate, {"scale": 0.5})):
        print(kind.__name__, flush=True)
        optimizer = kind(named.values(), **options)
        seen: list[torch.optim.Optimizer] = []
        handle = register_optimizer_step_post_hook(lambda own, *_, seen=seen: seen.append(own))
        before, drawn = {name: p.detach().clone() for name, p in named.items()}, torch.get_rng_state()
        pair.rt.step(x, target=y)
        if kind is OneRate and not is_whole():
            with pytest.raises(InputError, match="OneRate makes a number of all its parameters"):
                optimizer.step()
            assert all(torch.equal(p, before[name]) for name, p in named.items())
        else:
            optimizer.step()
            optimizer.step()
            assert seen == [optimizer, optimizer]
            assert not any(torch.equal(p, before[name]) for name, p in named.items())
        assert torch.equal(drawn, torch.get_rng_state())
        handle.remove()
        optimizer.zero_grad()


def double(parameter):
    parameter.grad.mul_(2)


def hooks():
    """Hooks on gradients see those of the whole batch once; one that fails ends the step on every rank."""
    pair = Pair()
    x, y = batch()
    seen = []
    for side in (pair.model, pair.plain):
        for parameter in side.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
            parameter.register_post_accumulate_grad_hook(double)
    pair.agrees(x, y)
    first = pair.model[0][0].weight
    first.register_hook(lambda grad: seen.append(grad))
    first.register_post_accumulate_grad_hook(lambda p: int("a bug of the user's"))
    with pytest.raises(
        StepError, match=r"rank 0, a hook on the gradient of 0\.0\.weight: ValueError: .*a bug"
    ):
        pair.rt.step(x, target=y)
    assert len(seen) == (rank() == 0)
    pair = Pair()
    pair.model[0][1].register_full_backward_hook(lambda *_: int("a bug of the user's"))
    with pytest.raises(StepError, match=r"rank 0, stage 0, .*: ValueError: .*a bug"):
        pair.rt.step(x, target=y)


class Tied(nn.Module):
    """A first and a last layer that share their weight."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.between = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.between(self.first(x).tanh()))


def hooks_on_ties():
    """Hooks on the gradient of a tied weight see the sum once a step, whatever is summed when."""
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    x, y = batch()
    pipe = autopipe.split(model, 2, (x,), n_microbatches=4, costs="estimated")
    rt = pipe.runtime(mean_square)
    steppers = []
    for side in (model, plain):
        weight = side.first.weight
        weight.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
        weight.register_post_accumulate_grad_hook(double)
        steppers.append(torch.optim.SGD([weight], 0.1, momentum=0.9))

    def agree(n):
        for i in range(n):
            with rt.no_sync() if i + 1 < n else contextlib.nullcontext():
                rt.step(x, target=y)
            mean_square(plain(x), y).backward()
        torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)

    agree(1)
    agree(1)  # adds to what there is
    agree(3)
    for stepper in steppers:
        stepper.step()
        stepper.zero_grad()
    agree(2)
    with rt.no_sync():
        rt.step(x, target=y)
    mean_square(plain(x), y).backward()
    for side in (model, plain):
        side.first.weight.requires_grad_(False)
    agree(1)  # a frozen one keeps what it has
    for side in (model, plain):
        side.first.weight.requires_grad_(True)
    agree(1)
    if not is_whole():
        odd = model.first.weight.register_hook(lambda grad: None) if rank() == 0 else None
        for _ in range(2):
            with pytest.raises(
                InputError, match=r"first\.weight has unlike hooks .*3 on rank 0, 2 on rank 1"
            ):
                rt.step(x, target=y)
        if odd is not None:
            odd.remove()
        agree(2)


def ties_of_two_runtimes():
    """Steps of two runtimes of a model add up, whichever of them sums what the other's left in parts."""
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    x, y = batch()
    pipe = autopipe.split(model, 2, (x,), n_microbatches=4, costs="estimated")
    first, second = pipe.runtime(mean_square), pipe.runtime(lambda o, t: (o * t).mean())
    for one, other in ((first, second), (second, first), (first, first)):
        with one.no_sync():
            one.step(x, target=y)
        if not is_whole():
            with pytest.raises(InputError, match="clipping gradients comes after a step within no_sync"):
                other.clip_grad_norm_(1.0)
        other.step(x, target=y)
        for rt in (one, other):
            (mean_square(plain(x), y) if rt is first else (plain(x) * y).mean()).backward()
        torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)
        torch.testing.assert_close(
            other.clip_grad_norm_(1e9), nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
        )


def frozen_ties():
    """A tied weight that is frozen after some steps keeps the whole gradient that it has, on every rank."""
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    x, y = batch()
    rt = autopipe.split(model, 2, (x,), n_microbatches=4, costs="estimated").runtime(mean_square)
    for is_trained, syncs in ((True, True), (False, True), (True, False), (False, True), (True, True)):
        for side in (model, plain):
            side.first.weight.requires_grad_(is_trained)
        with contextlib.nullcontext() if syncs else rt.no_sync():
            rt.step(x, target=y)
        mean_square(plain(x), y).backward()
        if syncs:
            torch.testing.assert_close(model.first.weight.grad, plain.first.weight.grad)


class Weighing(nn.Module):
    """A loss that trains a weight of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, output, target):
        return mean_square(self.weight * output, target)


def norms_without_weights():
    """The norm is the same to the bit on a rank that has no weights, of whatever dtype they are."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], *[nn.Tanh() for _ in range(3)]).double()
    plain = copy.deepcopy(model)
    x, y = batch().double()
    pins = {str(i): int(i > 2) for i in range(6)}
    pipe = autopipe.split(model, 2, (x,), n_microbatches=4, costs="estimated", pin=pins)
    rt = pipe.runtime(mean_square)
    assert is_whole() or bool(list(rt.named_parameters())) == (rank() == 0)
    rt.step(x, target=y)
    mean_square(plain(x), y).backward()
    found = rt.clip_grad_norm_(0.1)
    torch.testing.assert_close(found, nn.utils.clip_grad_norm_(plain.parameters(), 0.1), rtol=1e-12, atol=0)
    if not is_whole():
        each = [torch.empty_like(found) for _ in range(2)]
        dist.all_gather(each, found)
        assert each[0] == each[1] == found


def hooks_under_wraps():
    """Hooks see gradients of the whole batch also where stages are wrapped, and those of a loss's weights."""
    losses = Weighing(), Weighing()
    pair = Pair(losses[0])
    x, y = batch()
    pair.rt.wrap(Around)
    for held in (pair.rt.parameters(), pair.plain.parameters(), *(loss.parameters() for loss in losses)):
        for parameter in held:
            parameter.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
    pair.rt.step(x, target=y)
    losses[1](pair.plain(x), y).backward()
    pair.same_gradients()
    torch.testing.assert_close(losses[0].weight.grad, losses[1].weight.grad)


def weights_of_the_loss():
    """A loss's weights are saved with their optimizer's state, and frozen on all ranks or on none."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        if not is_whole():
            dist.broadcast_object_list(folder)
        x, y = batch()
        found = []
        for part in ("undisturbed", "named", "first", "second"):
            loss_fn = Weighing()
            pair = Pair(loss_fn)
            both = torch.optim.Adam([*pair.rt.parameters(), *loss_fn.parameters()], 0.1)
            kept = {"optimizer": both, **({"loss": loss_fn} if part == "named" else {})}
            if part == "second":
                pair.rt.load(pathlib.Path(folder[0]) / "save", **kept)
            for _ in range(2 if part == "undisturbed" else 1):
                pair.rt.step(x, target=y)
                both.step()
                both.zero_grad()
            if part in ("named", "first"):
                pair.rt.save(pathlib.Path(folder[0]) / ("save" if part == "first" else "named"), **kept)
            if part == "named":
                trained = loss_fn.weight.detach().clone()
                with torch.no_grad():
                    loss_fn.weight.zero_()
                pair.rt.load(pathlib.Path(folder[0]) / "named", **kept)
                assert torch.equal(loss_fn.weight, trained)
                continue
            found.append(loss_fn.weight.detach().clone())
        plan = autopipe.plan(pair.pipe.graph, 2, n_microbatches=4, costs="estimated", pin={"1": 1})
        assert pair.rt.rebalance(plan=plan, optimizer=both)
        pair.rt.step(x, target=y)
    torch.testing.assert_close(found[2], found[0])
    assert not torch.equal(found[1], found[0])
    loss_fn.weight.requires_grad_(rank() != 0)
    if not is_whole():
        with pytest.raises(StepError, match="with other frozen parameters"):
            pair.rt.step(x, target=y)


def thawed_weights_of_the_loss():
    """What a loss keeps frozen is read on one rank alone; thawed after some steps it is trained on all."""
    losses = Weighing(), Weighing()
    pair = Pair(losses[0])
    x, y = batch()
    rates = [torch.optim.SGD(loss_fn.parameters(), 0.1) for loss_fn in losses]
    for step in range(4):
        for loss_fn in losses:
            loss_fn.weight.requires_grad_(step > 0)
        if step < 2:
            is_read = step == 1 or is_whole() or rank() == 1
            losses[0].weight.data.fill_(1.0 if is_read else 2.0)
        pair.rt.step(x, target=y)
        losses[1](pair.plain(x), y).backward()
        pair.same_gradients()
        if step == 0:
            assert losses[0].weight.grad is None
            continue
        torch.testing.assert_close(losses[0].weight.grad, losses[1].weight.grad)
        for rate in rates:
            rate.step()
            rate.zero_grad()
        torch.testing.assert_close(*(loss_fn.weight for loss_fn in losses))


class Around(nn.Module):
    def __init__(self, stage):
        super().__init__()
        self.stage = stage

    def forward(self, *values, **options):
        return self.stage(*values, **options)


def hooks_that_move():
    """Where weights move, their hooks are on every rank, or it is refused and training goes on."""
    pair = Pair()
    x, y = batch()
    optimizer = torch.optim.SGD(pair.rt.parameters(), 0.1)
    pair.agrees(x, y)
    plan = autopipe.plan(pair.pipe.graph, 2, n_microbatches=4, costs="estimated", pin={"1": 1})
    handles = [p.register_hook(lambda grad: 2 * grad) for p in pair.rt.parameters()]
    if not is_whole():
        with pytest.raises(InputError, match=r"1\.0\.weight has 1 hook .* on rank 0 and 0 on rank 1"):
            pair.rt.rebalance(plan=plan, optimizer=optimizer)
    for handle in handles:
        handle.remove()
    for side in (pair.model, pair.plain):
        for parameter in side.parameters():
            parameter.register_hook(lambda grad: 2 * grad)
    pair.agrees(x, y)
    assert pair.rt.rebalance(plan=plan, optimizer=optimizer)
    pair.agrees(x, y)


@contextlib.contextmanager
def heard():
    """Within it, what the library logs."""
    told, handler, logger = [], logging.Handler(), logging.getLogger("autopipe")
    handler.emit = lambda record: told.append(record.getMessage())
    logger.addHandler(handler)
    yield told
    logger.removeHandler(handler)


def skipped_steps():
    """An optimizer that is stepped on one rank alone is told of on the other, and loaded weights are not."""
    pair = Pair()
    x, y = batch()
    optimizer = torch.optim.SGD(pair.rt.parameters(), 0.1)
    for way in ("both", "loaded", "one"):
        pair.rt.step(x, target=y)
        if way == "loaded" and rank() == 0:
            pair.model[0].load_state_dict(pair.plain[0].state_dict())
        if way == "both" or (way == "one" and rank() == 0):
            optimizer.step()
        optimizer.zero_grad()
        with heard() as told:
            pair.rt.step(x, target=y)
        is_left = way == "one" and rank() > 0
        assert sum("as by an optimizer" in text for text in told) == is_left, (way, told)


def zeroed():
    """Gradients that one rank alone has still are told of there, once; where all keep them nothing is."""
    pair = Pair()
    x, y = batch()
    optimizer = torch.optim.SGD(pair.rt.parameters(), 0.1)
    for k in range(4):
        with heard() as told:
            pair.rt.step(x, target=y)
        is_left = k == 3 and rank() > 0
        assert sum("the gradients of step 2 are still here" in text for text in told) == is_left, (k, told)
        optimizer.step()
        if k == 1 or (k == 2 and rank() == 0):
            optimizer.zero_grad()


def surroundings():
    """Autocast or a default dtype that one rank alone steps under ends the step, and names it."""
    if is_whole():
        return
    for around, words in (
        (lambda: torch.autocast("cpu", torch.bfloat16, enabled=rank() == 0), "other autocast"),
        (lambda: default_dtype(torch.float64 if rank() else torch.float32), "other default dtype"),
    ):
        pair = Pair()
        x, y = batch()
        pair.agrees(x, y)
        with around(), pytest.raises(StepError, match=words):
            pair.rt.step(x, target=y)


def rates():
    """A rate that one rank alone changes is told of there and on the other, once."""
    pair = Pair()
    x, y = batch()
    optimizer = torch.optim.SGD(pair.rt.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for k in range(4):
        if k == 2 and rank() == 0:
            optimizer.param_groups[0]["lr"] *= 3
        with heard() as told:
            pair.rt.step(x, target=y)
            optimizer.step()
            pair.rt.step(x, target=y)
        is_told = k == 2 and not is_whole()
        assert (
            sum("optimizers step by lr=0.003 on rank 0 and lr=0.001 on rank 1" in t for t in told) == is_told
        ), told
        scheduler.step()


def loads():
    """Weights loaded between steps on every rank are trained on; on one rank alone they end the next step."""
    pair = Pair()
    x, y = batch()
    other = {name: 2 * value for name, value in pair.plain.state_dict().items()}
    pair.agrees(x, y)
    for load in (pair.model.load_state_dict, pair.pipe.load_state_dict, pair.plain.load_state_dict):
        load(other)
    pair.agrees(x, y)
    if rank() == 0:  # whose own these are, and no other's
        pair.model[0].load_state_dict(pair.plain[0].state_dict())
    pair.agrees(x, y)
    if is_whole():
        return
    if rank() == 1:
        pair.model.load_state_dict(pair.plain.state_dict())
    with pytest.raises(StepError, match=r"after [23] load_state_dict.* other calls of load_state_dict"):
        pair.rt.step(x, target=y)


def several():
    """Pipelines side by side, and two runtimes of one, each as if it were alone."""
    pairs = [Pair(), Pair(nested)]
    x, y = batch()
    for _ in range(2):
        for pair in pairs:
            pair.agrees(x, y if pair.loss_fn is mean_square else (y, [y]))
    second = pairs[0].pipe.runtime(mean_square)
    second.step(x, target=y)
    pairs[0].rt.step(x, target=y)
    (2 * mean_square(pairs[0].plain(x), y)).backward()
    pairs[0].same_gradients()


def released_twice():
    """A further runtime that frees weights of others goes on where the first had freed them."""
    pair = Pair(release=True)
    x, y = batch()
    pair.rt.step(x, target=y)
    second = pair.pipe.runtime(mean_square, release=True, schedule="gpipe")
    second.step(x, target=y)
    (2 * mean_square(pair.plain(x), y)).backward()
    pair.same_gradients()
    for name, value in pair.pipe.merge().state_dict().items():
        torch.testing.assert_close(value, pair.plain.state_dict()[name])


def reported():
    """A report right after stages are built anew tells of the steps before."""
    pair = Pair()
    x, y = batch()
    pair.agrees(x, y)
    engine = pair.rt.engine
    sizes = engine.message_bytes(engine.records[-1][2])
    for _ in range(2):
        pair.pipe.load_state_dict(pair.plain.state_dict(), assign=True)
        assert pair.rt.report().n_steps == 1
        assert engine.message_bytes(engine.records[-1][2]) == sizes
    assert bool(sizes) is not is_whole()


def groups():
    """The user's own use of the process group between steps, and the end of it, change nothing."""
    pair = Pair()
    x, y = batch()
    if is_whole():
        return
    for _ in range(2):
        pair.agrees(x, y)
        mine = torch.ones(3) * rank()
        dist.all_reduce(mine)
        assert mine.tolist() == [1.0] * 3
        alone = [dist.new_group([r]) for r in range(dist.get_world_size())]
        dist.all_reduce(mine, group=alone[rank()])
        dist.barrier()
    dist.destroy_process_group()
    pair.agrees(x, y)
    torch.testing.assert_close(pair.rt.clip_grad_norm_(1.0), torch.zeros(()))


CHECKED = (
    modes, inferred, batches, targets, losses, interrupted, calls, unlike, fed, fed_anew, optimizers,
    optimizers_of_all, hooks, hooks_on_ties, ties_of_two_runtimes, frozen_ties, weights_of_the_loss,
    thawed_weights_of_the_loss,
    norms_without_weights, hooks_under_wraps, hooks_that_move, skipped_steps, zeroed, surroundings, rates,
    loads, several, released_twice, reported, groups,
)  # fmt: skip
CHECKS = {f.__name__: f for f in CHECKED}


if __name__ == "__main__":
    rank_checks.run(CHECKS)
