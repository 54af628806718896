"""What user code writes to between steps on some ranks alone; ``written_ranks.py CHECK`` is one of two."""

import os
import pathlib

import pytest
import rank_checks
import torch
import torch.distributed as dist
from torch import nn

import autopipe
from autopipe.errors import InputError


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("gain", torch.ones(4))
        self.register_buffer("shift", torch.zeros(4), persistent=False)

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.gain + self.shift


class Scaled(nn.Module):
    """Layers with a scale each, and one that the first and the last stage read."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def mean_square(output, target):
    return (output - target).square().mean()


FOLDER = pathlib.Path(os.environ["FOLDER"])
X, Y = torch.randn(2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def made(n_microbatches=None, **kept):
    torch.manual_seed(0)
    model = Scaled().double()
    options = {} if n_microbatches is None else {"n_microbatches": n_microbatches}
    pipe = autopipe.split(model, 2, (X,), costs="estimated", balance="uniform", **options)
    rt = pipe.runtime(**{"loss_fn": mean_square, **kept})
    return model, pipe, rt


def plain(write):
    torch.manual_seed(0)
    model = Scaled().double()
    write(model)
    return mean_square(model(X), Y)


@torch.no_grad()
def scale(model):
    model.scale.mul_(2)


@torch.no_grad()
def gain(model):
    model.layers[3].gain.mul_(2)


@torch.no_grad()
def weight(model):
    model.layers[3].linear.weight.mul_(2)


def replace(model):
    model.layers[3].gain = model.layers[3].gain * 2


def hook(model):
    model.layers[3].linear.register_forward_hook(lambda module, given, output: output * 2)


REFUSED = {
    hook: r"hooks of layers\.3\.linear changed on rank 0, and the stage that runs it is on rank 1",
    scale: "scale has other values on each of ranks 0 and 1",
    gain: r"layers\.3\.gain was written to on rank 0, and the stage that reads it is on rank 1",
    weight: r"layers\.3\.linear\.weight was written to on rank 0",
    replace: r"layers\.3\.gain was written to on rank 0",
}
CALLS = {
    "step": lambda pipe, rt: rt.step(X, target=Y),
    "evaluate": lambda pipe, rt: rt.evaluate(X, target=Y),
    "save": lambda pipe, rt: rt.save(FOLDER / "none"),
    "merge": lambda pipe, rt: pipe.merge(),
    "rebalance": lambda pipe, rt: rt.rebalance(plan=rt.plan),
}


def on_one():
    """What one rank writes alone is refused by each call, on both, until the other has written it too."""
    rank = dist.get_rank()
    for write, words in REFUSED.items():
        model, pipe, rt = made()
        if write is not weight:
            rt.step(X, target=Y)
        if rank == 0:
            write(model)
        for call in CALLS.values():
            with pytest.raises(InputError, match=words):
                call(pipe, rt)
        if rank == 1:
            write(model)
        torch.testing.assert_close(rt.step(X, target=Y).loss, plain(write))
        pipe.merge()


def uncut():
    """Layers are looked at where no batch is cut, by each call, and no more once they are as they were."""
    for call in CALLS.values():
        model, pipe, rt = made(n_microbatches=1)
        handle = None
        if dist.get_rank() == 0:
            handle = model.layers[3].linear.register_forward_hook(lambda module, given, output: output * 2)
        with pytest.raises(InputError, match=REFUSED[hook]):
            call(pipe, rt)
        if handle is not None:
            handle.remove()
        torch.testing.assert_close(rt.step(X, target=Y).loss, plain(lambda model: None))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.n_calls, self.p = nn.Linear(4, 4), 0, 0.0

    def forward(self, x):
        self.n_calls += 1
        return self.linear(x) * (1 - self.p)


def counted():
    """What calls change in layers is no change of a user's; that is told beside it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Counting() for _ in range(4)]).double()
    pipe = autopipe.split(model, 2, (X,), costs="estimated", balance="uniform", n_microbatches=1)
    rt = pipe.runtime(loss_fn=mean_square)
    for k in range(5):
        for layer in model:
            layer.p = 0.1 * k
        rt.step(X, target=Y)
    if dist.get_rank() == 0:
        model[3].p = 0.9
    with pytest.raises(InputError, match=r"3\.p changed on rank 0"):
        rt.step(X, target=Y)


class Weighed(nn.Module):
    """A loss with an attribute, a buffer, a frozen weight and one that trains."""

    def __init__(self):
        super().__init__()
        self.power = 2.0
        self.register_buffer("shift", torch.zeros((), dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)
        self.heat = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, output, target):
        return self.frozen * self.heat * ((output - target).abs() ** self.power).mean() + self.shift


@torch.no_grad()
def shifted(loss):
    loss.shift.add_(1)


@torch.no_grad()
def frozen(loss):
    loss.frozen.mul_(3)


def powered(loss):
    loss.power = 3.0


def losses():
    """What one rank changes of a loss that another makes is refused; what all change counts."""
    words = {
        shifted: r"loss_fn\.shift was written",
        frozen: r"loss_fn\.frozen was written",
        powered: r"loss_fn\.power",
    }
    for change, told in words.items():
        plain, loss = Weighed(), Weighed()
        _, _, rt = made(loss_fn=loss)
        optimizer = torch.optim.SGD([*rt.parameters(), loss.heat], 0.0)
        for _ in range(3):
            rt.step(X, target=Y)
            optimizer.step()
            assert not rt.engine.written.any
        if dist.get_rank() == 0:
            change(loss)
        for call in ("step", "evaluate", "save"):
            with pytest.raises(InputError, match=told + " .*rank 0.*rank 1"):
                CALLS[call](None, rt)
        if dist.get_rank() == 1:
            change(loss)
        change(plain)
        torch.manual_seed(0)
        expected = plain(Scaled().double()(X), Y)
        torch.testing.assert_close(rt.step(X, target=Y).loss, expected.detach(), check_dtype=False)


def scales():
    """A scaler that one rank alone changes the scale of ends the step."""
    scaler = torch.amp.GradScaler("cpu", 2.0**8)
    _, _, rt = made(scaler=scaler)
    optimizer = torch.optim.SGD(rt.parameters(), 0.1)
    for k in range(2):
        rt.step(X, target=Y)
        scaler.step(optimizer)
        scaler.update(2.0 ** (4 + k) if dist.get_rank() == 0 or k == 0 else None)
        optimizer.zero_grad()
    with pytest.raises(autopipe.StepError, match=r"other scale of the scaler"):
        rt.step(X, target=Y)


def beside_a_load():
    """A load puts right what it reads, and tells nothing of what it does not."""
    model, _, rt = made()
    rt.save(FOLDER / "before")
    if dist.get_rank() == 0:
        gain(model)
    rt.load(FOLDER / "before")
    torch.testing.assert_close(rt.step(X, target=Y).loss, plain(lambda model: None))
    if dist.get_rank() == 0:
        model.layers[3].shift.add_(1)
    rt.load(FOLDER / "before")
    with pytest.raises(InputError, match=r"layers\.3\.shift was written to on rank 0"):
        rt.step(X, target=Y)


def unseen():
    """A write that leaves no trace in what is shared is found where a closer look is due."""
    model, _, rt = made()
    if dist.get_rank() == 1:
        model.scale.data.mul_(2)
    with pytest.raises(InputError, match="scale has other values"):
        rt.step(X, target=Y)


def by_its_own():
    """What the rank that reads it writes alone is what the pipeline goes by."""
    for write in (gain, weight, hook):
        model, _, rt = made()
        if write is hook:
            rt.step(X, target=Y)
        if dist.get_rank() == 1:
            write(model)
        torch.testing.assert_close(rt.step(X, target=Y).loss, plain(write))
    model, pipe, rt = made()
    rt.step(X, target=Y)
    pipe.merge()
    if dist.get_rank() == 0:
        weight(model)
    with pytest.raises(InputError, match="was written to on rank 0"):
        rt.step(X, target=Y)


def alike():
    """What both write is what the plain model does, saves included."""
    for write in (scale, gain, weight, replace, hook):
        model, pipe, rt = made()
        if write is hook:
            rt.step(X, target=Y)
        write(model)
        torch.testing.assert_close(rt.step(X, target=Y).loss, plain(write))
        for _ in range(3):
            gain(model)
            rt.step(X, target=Y)
        rt.save(FOLDER / write.__name__)
        saved = [layer.gain.clone() for layer in model.layers]
        gain(model)
        rt.load(FOLDER / write.__name__)
        assert all(torch.equal(m.gain, was) for m, was in zip(model.layers, saved, strict=True))
        rt.step(X, target=Y)
        pipe.merge()
        rt.step(X, target=Y)


CHECKS = {
    check.__name__: check
    for check in (on_one, uncut, counted, losses, beside_a_load, unseen, by_its_own, alike, scales)
}

if __name__ == "__main__":
    rank_checks.run(CHECKS)
