"""Training loops as users write them, each on a pipeline and on the plain model: the same to rounding.

``python loop_ranks.py LOOP …`` is one rank of them; without a process group the same loops run alone.
"""

import contextlib
import copy
import functools
import itertools
import os
import pathlib
import tempfile

import rank_checks
import torch
import torch.distributed as dist
from torch import nn

import autopipe


class ByMode(nn.Module):
    """Does in training what it does not in evaluation."""

    def forward(self, x):
        return 2 * x if self.training else x


class Net(nn.Module):
    """Layers of which the first and the last share a weight."""

    def __init__(self, d=6):
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(d, d), nn.Tanh()) for _ in range(4)])
        self.by_mode, self.norm, self.head = ByMode(), nn.LayerNorm(d), nn.Linear(d, d)
        self.head.weight = self.body[0][0].weight

    def forward(self, x):
        return self.head(self.norm(self.by_mode(self.body(x))))


def mean_square(output, target):
    return (output - target).square().mean()


def data(n_rows=8, *, seed=1):
    return torch.randn(2, n_rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def batches(n, n_rows=8):
    return [data(n_rows, seed=seed) for seed in range(n)]


class Plain:
    """The model by itself."""

    def __init__(self, scaler=None):
        torch.manual_seed(0)
        self.model, self.scaler = Net().double(), scaler

    def train(self, mode):
        self.model.train(mode)

    def step(self, x, y, factor=1.0):
        loss = mean_square(self.model(x), y)
        made = loss * factor
        (made if self.scaler is None else self.scaler.scale(made)).backward()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, x, y):
        return mean_square(self.model(x), y).item()

    def named_parameters(self):
        return self.model.named_parameters()

    def parameters(self):
        return self.model.parameters()

    def clip(self, max_norm):
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item()

    def save(self, folder, optimizer):
        torch.save(
            {"model": self.model.state_dict(), "optimizer": optimizer.state_dict()},
            folder / f"plain-{os.getpid()}.pt",
        )

    def load(self, folder, optimizer):
        saved = torch.load(folder / f"plain-{os.getpid()}.pt")
        self.model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])


@functools.cache
def split(schedule):
    torch.manual_seed(0)
    model, x = Net().double(), data()[0]
    return autopipe.split(model, 2, (x,), n_microbatches=4, costs="estimated", schedule=schedule)


class Piped:
    """A pipeline of it: a copy of one that is split once."""

    def __init__(self, scaler=None, schedule="1f1b"):
        self.pipe = copy.deepcopy(split(schedule))
        self.model = self.pipe.model
        self.rt = self.pipe.runtime(loss_fn=mean_square, scaler=scaler)

    def train(self, mode):
        self.pipe.train(mode)

    def step(self, x, y, factor=1.0):
        with self.rt.scaled(factor) if factor != 1.0 else contextlib.nullcontext():
            return self.rt.step(x, target=y).loss.item()

    def evaluate(self, x, y):
        return self.rt.evaluate(x, target=y).loss.item()

    def named_parameters(self):
        return self.rt.named_parameters()

    def parameters(self):
        return self.rt.parameters()

    def clip(self, max_norm):
        return self.rt.clip_grad_norm_(max_norm).item()

    def save(self, folder, optimizer):
        self.rt.save(folder / "piped", optimizer=optimizer)

    def load(self, folder, optimizer):
        self.rt.load(folder / "piped", optimizer=optimizer)


def evaluated_between(made):
    """Evaluates between steps, and goes on from the best weights at the end."""
    way = made()
    optimizer = torch.optim.Adam(way.parameters(), 0.02)
    best, kept, seen = float("inf"), {}, []
    for x, y in batches(5):
        seen.append(way.step(x, y))
        optimizer.step()
        optimizer.zero_grad()
        way.train(False)
        seen.append(way.evaluate(*data(5, seed=99)))
        way.train(True)
        if seen[-1] < best:
            best, kept = seen[-1], {name: p.detach().clone() for name, p in way.named_parameters()}
    with torch.no_grad():
        for name, p in way.named_parameters():
            p.copy_(kept[name])
    return way, [*seen, way.evaluate(*data(5, seed=99))]


def accumulated_over_steps(made):
    """Several steps, weighed, for each of the optimizer's; gradients are zeroed and not dropped."""
    way = made()
    optimizer, seen = torch.optim.SGD(way.parameters(), 0.1, momentum=0.9), []
    for i, (x, y) in enumerate(batches(7)):
        seen.append(way.step(x, y, factor=1 / 3))
        if i % 3 == 2:
            seen.append(way.clip(0.05))
            optimizer.step()
            optimizer.zero_grad(set_to_none=i == 2)
    return way, seen


def groups_and_rates(made):
    """Groups with decays of their own, one of them added later, under a schedule of rates."""
    way = made()
    named = dict(way.named_parameters())
    late = [p for name, p in named.items() if name.startswith("norm")]
    decayed = [p for name, p in named.items() if p.ndim > 1]
    plain = [p for name, p in named.items() if p.ndim == 1 and not name.startswith("norm")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 0.05}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], 0.02, weight_decay=0.0)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=8)
    seen = []
    for i, (x, y) in enumerate(batches(6)):
        if i == 3 and late:
            optimizer.add_param_group({"params": late, "lr": 0.01})
        seen.append(way.step(x, y))
        optimizer.step()
        optimizer.zero_grad()
        if i < 3:
            rates.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    return way, seen


def frozen_halfway(made):
    """Freezes the first layers halfway, and thaws them again."""
    way = made()
    optimizer, seen = torch.optim.Adam(way.parameters(), 0.02), []
    for i, (x, y) in enumerate(batches(6)):
        if i in (2, 4):
            way.model.body[1].requires_grad_(i == 4)
            way.model.body[0][0].bias.requires_grad_(i == 4)
        seen.append(way.step(x, y))
        optimizer.step()
        optimizer.zero_grad()
    return way, seen


def smaller_last_batch(made):
    """Epochs over shuffled rows that the batch does not divide; fewer rows than microbatches at last."""
    way = made()
    (x, y), optimizer, seen = data(19), torch.optim.SGD(way.parameters(), 0.1), []
    shuffling = torch.Generator().manual_seed(4)
    for _ in range(3):
        for rows in torch.randperm(19, generator=shuffling).split(8):
            seen.append(way.step(x[rows], y[rows]))
            optimizer.step()
            optimizer.zero_grad()
    return way, seen


def clipped_by_value(made):
    """Clips each gradient's values, and adds a little noise to them."""
    way = made()
    optimizer, seen = torch.optim.SGD(way.parameters(), 0.5), []
    for x, y in batches(5):
        seen.append(way.step(x, y))
        nn.utils.clip_grad_value_(way.parameters(), 0.01)
        for name, p in way.named_parameters():
            p.grad.add_(0.001 * len(name))
        optimizer.step()
        optimizer.zero_grad()
    return way, seen


def two_optimizers(made):
    """Steps one optimizer's weights at every step, another's at every other."""
    way = made()
    named = dict(way.named_parameters())
    first = [p for name, p in named.items() if name.endswith("bias")]
    rest = [p for name, p in named.items() if not name.endswith("bias")]
    often, seldom = torch.optim.Adam(first, 0.02), torch.optim.SGD(rest, 0.1, momentum=0.5)
    seen = []
    for i, (x, y) in enumerate(batches(6)):
        seen.append(way.step(x, y))
        often.step()
        often.zero_grad()
        if i % 2:
            seldom.step()
            seldom.zero_grad()
    return way, seen


def averaged(made):
    """Evaluates with a running average of the weights in their place, and trains on with the weights."""
    way = made()
    average = {name: p.detach().clone() for name, p in way.named_parameters()}
    optimizer, seen = torch.optim.Adam(way.parameters(), 0.02), []

    @torch.no_grad()
    def swap():
        for name, p in way.named_parameters():
            held = p.clone()
            p.copy_(average[name])
            average[name].copy_(held)

    for x, y in batches(5):
        seen.append(way.step(x, y))
        optimizer.step()
        optimizer.zero_grad()
        for name, p in way.named_parameters():
            average[name].lerp_(p.detach(), 0.3)
        swap()
        seen.append(way.evaluate(*data(5, seed=99)))
        swap()
    return way, seen


def resumed(made):
    """Trains, saves, and goes on in another model with another optimizer."""
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        if dist.is_initialized():
            dist.broadcast_object_list(folder, 0)
        seen = []
        for i in range(2):
            way = made()
            optimizer = torch.optim.Adam(way.parameters(), 0.02)
            if i:
                way.load(pathlib.Path(folder[0]), optimizer)
            for x, y in batches(4)[2 * i : 2 * i + 2]:
                seen.append(way.step(x, y))
                optimizer.step()
                optimizer.zero_grad()
            if not i:
                way.save(pathlib.Path(folder[0]), optimizer)
        if dist.is_initialized():
            dist.barrier()
    return way, seen


def scaled_losses(made):
    """Scales its losses; one batch overflows, whose step is left out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    way = made(scaler=scaler)
    optimizer, seen = torch.optim.SGD(way.parameters(), 0.1, momentum=0.9), []
    for i, (x, y) in enumerate(batches(6)):
        loss = way.step(x, y * 1e308 if i == 2 else y)
        seen += [0.0 if i == 2 else loss]
        scaler.unscale_(optimizer)
        if i != 2:
            seen.append(way.clip(0.5))
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
        optimizer.zero_grad()
    return way, seen


def with_a_penalty(made):
    """Adds to the gradients those of what the weights themselves cost, by a backward of its own."""
    way = made()
    optimizer, seen = torch.optim.SGD(way.parameters(), 0.1), []
    for x, y in batches(4):
        seen.append(way.step(x, y))
        sum(p.abs().sum() for _, p in way.named_parameters()).mul(0.01).backward()
        optimizer.step()
        optimizer.zero_grad()
    return way, seen


def sharpness_aware(made):
    """Takes gradients where the loss is higher, a little up along the first ones, for each step."""
    way = made()
    optimizer, seen = torch.optim.SGD(way.parameters(), 0.1), []
    for x, y in batches(4):
        seen.append(way.step(x, y))
        norm = way.clip(float("inf"))
        with torch.no_grad():
            moves = {name: 0.05 * p.grad / norm for name, p in way.named_parameters()}
            for name, p in way.named_parameters():
                p.add_(moves[name])
        optimizer.zero_grad()
        seen += [norm, way.step(x, y)]
        with torch.no_grad():
            for name, p in way.named_parameters():
                p.sub_(moves[name])
        optimizer.step()
        optimizer.zero_grad()
    return way, seen


LOOPS = (
    evaluated_between,
    accumulated_over_steps,
    groups_and_rates,
    frozen_halfway,
    smaller_last_batch,
    clipped_by_value,
    two_optimizers,
    averaged,
    resumed,
    scaled_losses,
    with_a_penalty,
    sharpness_aware,
)


def compare(loop, schedule):
    plain, wanted = loop(Plain)
    piped, found = loop(lambda **given: Piped(schedule=schedule, **given))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    weights = dict(plain.model.named_parameters(remove_duplicate=False))
    own = dict(piped.named_parameters())
    assert own
    for name, p in own.items():
        torch.testing.assert_close(p.detach(), weights[name].detach(), rtol=1e-10, atol=1e-12)


CHECKS = {
    f"{loop.__name__}/{schedule}": lambda loop=loop, schedule=schedule: compare(loop, schedule)
    for loop, schedule in itertools.product(LOOPS, ("1f1b", "zb-h1"))
}


if __name__ == "__main__":
    rank_checks.run(CHECKS)
