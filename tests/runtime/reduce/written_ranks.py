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


def made():
    torch.manual_seed(0)
    model = Scaled().double()
    pipe = autopipe.split(model, 2, (X,), costs="estimated", balance="uniform")
    rt = pipe.runtime(loss_fn=mean_square)
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
    hook: r"hooks of layers\.3\.linear changed on rank 0, and the stage with that layer is on rank 1",
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
        for call in CALLS.values():  # the step first: it looks at layers
            with pytest.raises(InputError, match=words):
                call(pipe, rt)
        if rank == 1:
            write(model)
        torch.testing.assert_close(rt.step(X, target=Y).loss, plain(write))
        pipe.merge()


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


CHECKS = {check.__name__: check for check in (on_one, beside_a_load, unseen, by_its_own, alike)}

if __name__ == "__main__":
    rank_checks.run(CHECKS)
