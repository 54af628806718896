"""Leaves that are alike run once on meta and where no data lead; the graph is that of each of them run."""

import copy
import types

import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError
from autopipe.tracing import capture
from autopipe.tracing.calls.sharing import Twins


class Block(nn.Module):
    def __init__(self, d=4):
        super().__init__()
        self.a, self.b = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(self.a(x).relu())


class Stack(nn.Module):
    """Blocks in a row; ``between`` is glue behind each."""

    def __init__(self, block=Block, n=6, between=lambda model, block, x: block(x)):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(block() for _ in range(n))
        self.between = between

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self.between(self, block, x)
        return self.head(x)


class Writes(Block):
    """Changes what it is given."""

    def forward(self, x):
        x.mul_(2.0)
        return super().forward(x)


class Passes(Block):
    """Gives back what it is given, beside something new."""

    def forward(self, x):
        return super().forward(x), x


class Wide(Block):
    """What it gives is one row, many times."""

    def forward(self, x):
        return super().forward(x).mean(0, keepdim=True).expand(x.shape)


class Drops(Block):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


class Draws(Block):
    """Draws by itself and by a layer inside."""

    def __init__(self, d=4):
        super().__init__(d)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(super().forward(x) + torch.rand_like(x)) + torch.rand_like(x[:1])


class Normed(Block):
    def __init__(self, d=4):
        super().__init__(d)
        self.norm = nn.BatchNorm1d(d)

    def forward(self, x):
        return self.norm(super().forward(x))


class Fills(Block):
    """Puts a tensor into a dict that is handed from block to block."""

    def forward(self, x, memory):
        memory["seen"] = memory.get("seen", 0) + x.mean()
        return super().forward(x) + memory["seen"]


class Numbered(Block):
    """Each is a little other than the one before."""

    n_made = 0

    def __init__(self):
        super().__init__()
        Numbered.n_made += 1
        self.scale = float(Numbered.n_made % 2)

    def forward(self, x):
        return super().forward(x) if self.scale else super().forward(x).unsqueeze(0).squeeze(0)


def adds(model, block, x):
    x = block(x)
    x += 1.0
    return x


def unpacks(model, block, x):
    y, x = block(x)
    return y * x


def derives(model, block, x):
    x = x.detach().requires_grad_()
    y = block(x)
    return y + torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def twice(model, block, x):
    return block(block(x))


def quietly(model, block, x):
    with torch.no_grad():
        quiet = block(x)
    return block(x) + quiet


def hands_on(model, block, x):
    memory = {}
    return block(block(x, memory), memory)


def hooked(model):
    model.blocks[2].register_forward_hook(lambda module, args, result: result * 2)
    return model


def patched(model):
    model.blocks[3].forward = types.MethodType(lambda self, x: self.b(self.a(x)), model.blocks[3])
    return model


def frozen(model):
    for p in model.blocks[:3].parameters():
        p.requires_grad_(False)
    return model


def shared_weights(model):
    model.blocks[4].a.weight = model.blocks[1].a.weight
    return model


MODELS = {
    "plain": lambda: Stack(),
    "written to by glue": lambda: Stack(between=adds),
    "called twice": lambda: Stack(between=twice),
    "with and without gradients": lambda: Stack(between=quietly),
    "derivatives": lambda: Stack(between=derives),
    "writes its input": lambda: Stack(Writes),
    "gives back its input": lambda: Stack(Passes, between=unpacks),
    "expanded": lambda: Stack(Wide),
    "dropout": lambda: Stack(Drops),
    "draws in places": lambda: Stack(Draws),
    "buffers": lambda: Stack(Normed),
    "a dict": lambda: Stack(Fills, between=hands_on),
    "unlike": lambda: Stack(Numbered),
    "hooked": lambda: hooked(Stack()),
    "patched": lambda: patched(Stack()),
    "frozen": lambda: frozen(Stack()),
    "shared weights": lambda: shared_weights(Stack()),
}


def graph_of(model):
    """The op graph on meta and what it was made from; what is said where there is none."""
    try:
        captured = capture(copy.deepcopy(model).to("meta"), (torch.ones(6, 4, device="meta"),))
    except CaptureError as error:
        return str(error)
    return captured.ops, [graph.python_code("self").src for graph in captured.graphs.values()]


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_that_of_every_leaf_run(name, monkeypatch):
    model = MODELS[name]()
    found = graph_of(model)
    monkeypatch.setattr(Twins, "key", lambda *_: None)
    assert found == graph_of(model)
    assert not isinstance(found, str)


def test_alike_leaves_run_once_on_meta(monkeypatch):
    model, runs, linear = Stack(n=40).to("meta"), [], nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *a: runs.append(0) or linear(*a))
    captured = capture(model, (torch.ones(6, 4, device="meta"),))
    assert sum(op.target.startswith("blocks.") for op in captured.ops.ops) == 40
    assert 2 * 40 <= len(runs) < 3 * 40  # the model itself runs once, at other sizes
    runs.clear()
    opened = captured.open(*(f"blocks.{i}" for i in range(20)))
    assert sum(op.target.startswith("blocks.") for op in opened.ops.ops) == 20 * 2 + 20
    assert 0 < len(runs) < 40


class Asking(nn.Module):
    """Masks what it is given only where the mask says so."""

    def __init__(self, stack):
        super().__init__()
        self.stack = stack

    def forward(self, x, mask):
        return self.stack(x if mask.all() else x * mask)


def forms_of(model):
    """The code of every form on the CPU, and what its calls draw: as the example leads, as masks would."""
    given = torch.ones(6, 4), torch.ones(6, 4, dtype=torch.bool)
    captured = capture(copy.deepcopy(model), given, dynamic=False)
    return {
        flag: [(f.graph.python_code("self").src, [n.meta.get("stream") for n in f.graph.nodes]) for f in fs]
        for flag, fs in captured.forms.items()
    }


@pytest.mark.parametrize("name", MODELS)
def test_where_no_data_lead_the_graph_is_that_of_every_leaf_run(name, monkeypatch):
    model = Asking(MODELS[name]())
    found = forms_of(model)
    monkeypatch.setattr(Twins, "key", lambda *_: None)
    assert found == forms_of(model)
    assert [len(forms) for forms in found.values()] == [2, 2]


@pytest.mark.parametrize("block", [Block, Drops])
def test_alike_leaves_run_once_where_no_data_lead(block, monkeypatch):
    model, runs, linear = Asking(Stack(block, n=40)), [], nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda *a: runs.append(0) or linear(*a))
    capture(model, (torch.ones(6, 4), torch.ones(6, 4, dtype=torch.bool)), dynamic=False)
    n_runs = len(runs) / (2 * 40)
    # in each mode: recorded, and compared with the model; sizes of results need no run, as layers show them
    assert 5 <= n_runs < 6.5


def test_leaves_that_no_other_is_like_are_not_told_apart_by_what_they_are_given():
    kinds = {"embed": "table", "block.0": "block", "block.1": "block", "head": "map"}
    twins = Twins(kinds.__getitem__, dict.fromkeys(kinds, False))
    assert twins.among == {"block.0": False, "block.1": False}
