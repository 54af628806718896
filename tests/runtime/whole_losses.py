"""Losses that compare the rows of a batch, each as users write it, with a target for so many rows."""

import functools
import itertools
import math

import torch
from torch import nn
from torch.nn import functional as F

import autopipe

WIDTH = 6
EXACT = 1e-10


def numbers(*shape, seed=1):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(n, n_classes=3):
    return torch.arange(n) * 5 % 7 % n_classes


def uneven(n):
    """What counts in each row: less and less."""
    return (torch.arange(WIDTH) <= torch.arange(n)[:, None] % (WIDTH + 2)).double()


def nt_xent(output, target):
    z = F.normalize(output, dim=-1)
    similar = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -math.inf)
    return F.cross_entropy(similar, (torch.arange(len(z)) + len(z) // 2) % len(z))


def info_nce(output, target):
    return F.cross_entropy(output @ target.T / 0.7, torch.arange(len(output)))


def dpo(output, target):
    chosen, rejected = output.logsumexp(-1).chunk(2)
    other_chosen, other_rejected = target.chunk(2)
    return -F.logsigmoid(0.5 * (chosen - rejected - other_chosen + other_rejected)).mean()


def hard_triplets(output, target):
    far = torch.cdist(output, output)
    same = target[:, None] == target[None]
    positive = far.masked_fill(~same, -math.inf).amax(1)
    negative = far.masked_fill(same, math.inf).amin(1)
    return F.relu(positive - negative + 1.0).mean()


def soft_dice(output, target):
    p = output.sigmoid()
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)


def tversky(output, target):
    p = output.sigmoid()
    hit, false_positive, missed = (p * target).sum(), (p * (1 - target)).sum(), ((1 - p) * target).sum()
    return 1 - (hit + 1) / (hit + 0.3 * false_positive + 0.7 * missed + 1)


def focal(output, target):
    entropy = F.binary_cross_entropy_with_logits(output, target, reduction="none")
    return ((1 - (-entropy).exp()) ** 2 * entropy).sum() / target.sum().clamp(min=1)


def masked_mean(output, target):
    wanted, mask = target
    return ((output - wanted).square() * mask).sum() / mask.sum()


def advantages(output, target):
    old, gained = target
    ratio = (output.log_softmax(-1)[:, 0] - old).exp()
    gained = (gained - gained.mean()) / (gained.std() + 1e-8)
    return -torch.minimum(ratio * gained, ratio.clamp(0.8, 1.2) * gained).mean()


def surrogate(output, target):
    """Normalised advantages on-policy: all ratios are one, and the loss is zero whatever the batch."""
    taken = output.log_softmax(-1)[:, 0]
    return -((taken - taken.detach()).exp() * (target - target.mean()) / target.std()).mean()


def cox(output, target):
    times, happened = target
    order = times.argsort(descending=True)
    risk = output[order, 0]
    return -((risk - risk.logcumsumexp(0)) * happened[order]).sum() / happened.sum()


def barlow(output, target):
    a, b = ((v - v.mean(0)) / v.std(0) for v in (output, target))
    crossed = a.T @ b / len(a)
    on, off = crossed.diagonal(), crossed - crossed.diagonal().diag()
    return (on - 1).square().sum() + 0.01 * off.square().sum()


def vicreg(output, target):
    spread = F.relu(1 - (output.var(0) + 1e-4).sqrt()).mean()
    centred = output - output.mean(0)
    shared = centred.T @ centred / (len(output) - 1)
    off = shared - shared.diagonal().diag()
    return F.mse_loss(output, target) + spread + off.square().sum() / WIDTH


def mmd(output, target):
    def near(a, b):
        return (-torch.cdist(a, b).square() / 8).exp().mean()

    return near(output, output) + near(target, target) - 2 * near(output, target)


def coral(output, target):
    return (output.T.cov() - target.T.cov()).square().sum() / (4 * WIDTH**2)


def ranking(output, target):
    apart = output[:, 0, None] - output[None, :, 0]
    ahead = target[:, None] > target[None]
    return F.softplus(-apart)[ahead].mean()


def balanced(output, target):
    weight = 1 / torch.bincount(target, minlength=WIDTH).clamp(min=1).double()
    return F.cross_entropy(output, target, weight)


def ctc(output, target):
    wanted, lengths = target
    said = output.unflatten(1, (3, 2)).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(said, wanted, torch.full((len(output),), 3), lengths, zero_infinity=True)


def diversity(output, target):
    mean = output.softmax(-1).mean(0)
    return F.cross_entropy(output, target) + (mean * mean.log()).sum()


def left_out(output, target):
    return F.cross_entropy(output, target)


def of_positives(output, target):
    """Of rows without any it has no gradient."""
    if not target.any():
        return torch.zeros((), dtype=torch.float64)
    return (output[target] - 1).square().mean()


def gated(output, target):
    """A mean over all rows, to which some add nothing: microbatches of such have no gradient."""
    if not target.any():
        return torch.zeros((), dtype=torch.float64)
    return ((output - 1).square().mean(1) * target).mean()


def summed_in_a_loop(output, target):
    """Of rows without positives it is a number of Python's own."""
    loss = 0.0
    for row, is_positive in zip(output, target, strict=True):
        if is_positive:
            loss = loss + row.square().sum().sqrt()
    return loss / len(output)


def by_own_slope(output, target):
    loss = F.cross_entropy(output, target)
    (slope,) = torch.autograd.grad(loss, output, retain_graph=True)
    return loss / slope.norm().detach()


def tempered():
    temperatures = itertools.cycle([1.0, 2.0, 3.0])
    return lambda output, target: F.cross_entropy(output / next(temperatures), target)


def decayed():
    def weights():
        weight = 1.0
        while True:
            yield weight
            weight *= 0.7

    by_call = weights()
    return lambda output, target: F.mse_loss(output, target) * next(by_call)


class Temperature(nn.Module):
    """In-batch negatives under a temperature that is learned with the model."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, output, target):
        similar = F.normalize(output, dim=-1) @ F.normalize(target, dim=-1).T * self.log_scale.exp()
        aims = torch.arange(len(output))
        return (F.cross_entropy(similar, aims) + F.cross_entropy(similar.T, aims)) / 2


class Centred(nn.Module):
    """Self-distillation whose centre moves with each batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, output, target):
        wanted = ((target - self.centre) / 0.5).softmax(-1)
        self.centre = 0.9 * self.centre + 0.1 * target.mean(0)
        return -(wanted * output.log_softmax(-1)).sum(-1).mean()


def counting():
    kept = {"calls": 0, "seen": []}

    def loss_fn(output, target):
        kept["calls"] += 1
        loss = F.mse_loss(output, target) * min(1.0, kept["calls"] / 4)
        kept["seen"].append(loss.item())
        return loss

    loss_fn.kept = kept
    return loss_fn


LOSSES = {
    "NT-Xent over halves": (lambda: nt_xent, lambda n: None),
    "InfoNCE over in-batch negatives": (lambda: info_nce, lambda n: numbers(n, WIDTH)),
    "DPO over halves": (lambda: dpo, lambda n: numbers(n)),
    "triplets with the hardest negatives": (lambda: hard_triplets, lambda n: labels(n, 2)),
    "soft Dice": (lambda: soft_dice, lambda n: (numbers(n, WIDTH) > 0.4).double()),
    "Tversky": (lambda: tversky, lambda n: (numbers(n, WIDTH) > 0.4).double()),
    "focal over the positives": (lambda: focal, lambda n: (numbers(n, WIDTH) > 0.9).double()),
    "masked mean": (lambda: masked_mean, lambda n: (numbers(n, WIDTH), uneven(n))),
    "advantages of the batch": (lambda: advantages, lambda n: (numbers(n), 2 * numbers(n, seed=2))),
    "advantages on-policy": (lambda: surrogate, lambda n: numbers(n)),
    "Cox partial likelihood": (lambda: cox, lambda n: (numbers(n), (numbers(n, seed=2) > -0.5).double())),
    "Barlow Twins": (lambda: barlow, lambda n: numbers(n, WIDTH)),
    "VICReg": (lambda: vicreg, lambda n: numbers(n, WIDTH)),
    "MMD": (lambda: mmd, lambda n: numbers(n, WIDTH)),
    "CORAL": (lambda: coral, lambda n: numbers(n, WIDTH)),
    "pairwise ranking": (lambda: ranking, lambda n: numbers(n)),
    "weights of classes in the batch": (lambda: balanced, labels),
    "CTC": (lambda: ctc, lambda n: (torch.ones(n, 2).long(), 1 + torch.arange(n) % 2)),
    "entropy of the mean": (lambda: diversity, labels),
    "labels left out": (lambda: left_out, lambda n: labels(n).where(torch.arange(n) % 3 > 0, -100)),
    "positives that some rows lack": (lambda: of_positives, lambda n: torch.arange(n) < 3),
    "a mean to which some rows add nothing": (lambda: gated, lambda n: torch.arange(n) < 3),
    "a Python number without positives": (lambda: summed_in_a_loop, lambda n: torch.arange(n) < 3),
    "a slope of its own": (lambda: by_own_slope, labels),
    "temperatures of an iterator": (tempered, labels),
    "weights of a generator": (decayed, lambda n: numbers(n, WIDTH)),
    "a learned temperature": (Temperature, lambda n: numbers(n, WIDTH)),
    "a centre that moves": (Centred, lambda n: numbers(n, WIDTH)),
    "one that counts its calls": (counting, lambda n: numbers(n, WIDTH)),
}


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, WIDTH)]
    return nn.Sequential(*layers).double()


def trained_on(model, loss_fn, batches):
    """Losses of batches, each with its target, whose gradients add up."""
    losses = []
    for x, target in batches:
        loss = loss_fn(model(x), target)
        loss.backward()
        losses.append(loss.item())
    return losses


def own(loss_fn):
    """What a loss keeps from call to call."""
    if isinstance(loss_fn, nn.Module):
        return {n: b.clone() for n, b in loss_fn.named_buffers()}
    return {k: list(v) if isinstance(v, list) else v for k, v in getattr(loss_fn, "kept", {}).items()}


@functools.cache
def captured():
    plain = model()
    return autopipe.capture(plain, (numbers(10, 5),))


def split(n_stages=2, **options):
    """The model in stages, of one capture, and its twin; ten rows make ragged microbatches."""
    options = {"costs": "estimated", "n_microbatches": 4, "time_limit_s": 0.2, **options}
    pipe = autopipe.split(captured(), n_stages, **options)
    pipe.model.load_state_dict(model().state_dict())
    pipe.model.zero_grad()
    return pipe, model()


def compare(found, wanted):
    for (name, p), q in zip(found.named_parameters(), wanted.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(
                p.grad, q.grad, rtol=EXACT, atol=EXACT, msg=lambda m, n=name: f"{n}: {m}"
            )
