"""Odd batches, pipelines side by side and overflows on an accelerator; ``user_checks`` runs them."""

import copy

import pytest
import torch
from accelerated_checks import DEVICE, RANK
from torch import nn
from torch.nn import functional as F
from user_models import Mlp, near, numbers, same_gradients, seeded, split

import autopipe


def layouts():
    """Batches on the device and the host that lie in memory in any way, targets too; and those refused."""
    model = seeded(Mlp)
    plain = copy.deepcopy(model).to(DEVICE)
    _, runtime = split(model, numbers(), loss=F.mse_loss)
    ways = (
        lambda x: x.t().contiguous().t(),
        lambda x: x[:1].expand(8, 8),
        lambda x: torch.cat([x, x], 1)[:, ::2],
        lambda x: torch.cat([x, x])[3:9],
        lambda x: x[:3],
    )
    for i, lay in enumerate(ways):
        host = numbers(seed=i)
        for x in (lay(host), lay(host.to(DEVICE))):
            near(runtime.step(x, target=lay(host.to(DEVICE))).loss, lossy(plain, lay(host)))
        same_gradients(runtime, plain)
    with torch.inference_mode():
        kept = numbers().to(DEVICE)
    for bad in (numbers()[:0].to(DEVICE), kept, numbers().to("meta"), numbers().double().to(DEVICE)):
        with pytest.raises(autopipe.InputError):
            runtime.step(bad, target=bad)
    near(runtime.step(kept.clone(), target=numbers()).loss, lossy(plain, numbers()))
    same_gradients(runtime, plain)


def lossy(plain, x):
    """The plain model's loss of two steps on a batch, gradients added."""
    there = x.to(DEVICE)
    loss = F.mse_loss(plain(there), there)
    loss.backward()
    return loss


def side_by_side():
    """Two pipelines on one device, in turns, within streams of the user's and between work of theirs."""
    pairs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = Mlp()
        plain = copy.deepcopy(model).to(DEVICE)
        pairs.append((split(model, numbers(), loss=F.mse_loss)[1], plain))
    own = nn.Linear(8, 8).to(DEVICE)
    side = torch.Stream(DEVICE)
    torch.accelerator.synchronize(DEVICE)
    with side:
        for step in range(4):
            runtime, plain = pairs[step % 2]
            x = own(numbers(seed=step).to(DEVICE)).detach()
            found = runtime.step(x, target=x).loss * 2
            own(x).sum().backward()
            near(found, 2 * lossy(plain, x))
            with torch.no_grad():
                near(runtime.evaluate(x, target=x).loss, F.mse_loss(plain(x), x))
        for runtime, plain in pairs:
            same_gradients(runtime, plain)


def overflow_on_one_stage():
    """An infinite gradient on one rank alone: every rank skips the step and shrinks its scale."""
    model = seeded(Mlp)
    scaler = torch.amp.GradScaler("sim", init_scale=1024.0)
    _, runtime = split(model, numbers(), loss=F.mse_loss, runtime={"scaler": scaler})
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1)
    bad = [RANK == 0]
    first = next(p for p in runtime.parameters() if p.requires_grad)
    first.register_hook(lambda grad: grad * float("inf") if bad[0] else grad)
    x = numbers()
    for step in range(3):
        bad[0] = step == 1 and RANK == 0
        before = [p.detach().cpu().clone() for p in runtime.parameters()]
        runtime.step(x, target=x)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        kept = [torch.equal(a, b.cpu()) for a, b in zip(before, runtime.parameters(), strict=True)]
        assert kept[0] == (step == 1), (step, kept)
        assert scaler.get_scale() == (1024.0 if step == 0 else 512.0)
