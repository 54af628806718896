"""``int()`` and ``float()`` of sizes are followed, and numbers in the data stay in the graph."""

import importlib
import math
import sys

import pytest
import torch
from torch import nn

from autopipe.errors import AutopipeError
from autopipe.tracing import capture


class Net(nn.Module):
    """Four layers behind what a subclass does first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def run(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Rounded(Net):
    def forward(self, x):
        n = x.shape[1]
        padded = int(math.ceil(n / 4) * 4)
        x = nn.functional.pad(x, (0, 0, 0, padded - n))
        return self.run(x)[:, : int(n * 0.7)] / float(n)


class Pooled(Net):
    """The mean over the nodes of each graph; ``index`` says which graph a node is of."""

    def forward(self, x, index):
        x = self.run(x)
        n_graphs = int(index.max()) + 1
        out = x.new_zeros(n_graphs, x.shape[1]).index_add(0, index, x)
        return out / torch.bincount(index, minlength=n_graphs)[:, None]


class Chosen(Net):
    """A number in the data goes where only Python can follow it."""

    def __init__(self, use):
        super().__init__()
        self.use = use

    def forward(self, x, index):
        return self.run(x) * self.use(index.max().item())


def test_rounded_sizes_are_right_at_other_lengths():
    model = Rounded()
    found = capture(model, (torch.randn(2, 10, 4),))
    for n in (10, 11, 13, 16):
        x = torch.randn(3, n, 4)
        torch.testing.assert_close(found(x), model(x))
    assert not {"int", "float"} & set(globals())


SCRIPT = """
import argparse, collections, math
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x):
        kept = int(x.shape[1] * 0.5)
        for layer in self.layers:
            x = layer(x).tanh()
        return x[:, :kept], float(x.detach().mean())

def other():
    {line}
"""
CALLED = [
    "argparse.ArgumentParser().add_argument('--lr', type=float, default=0.1)",
    "collections.defaultdict(int)",
    "sorted(['2', '10'], key=int)",
    "[*map(float, '12')]",
    "int.from_bytes(bytes(2), 'big')",
]


@pytest.mark.parametrize("line", CALLED)
def test_a_script_may_have_casts_called_elsewhere(line, tmp_path, monkeypatch):
    """One that reads its options by ``type=float`` fixed sizes that it rounds, or was refused."""
    (tmp_path / "a_script.py").write_text(SCRIPT.format(line=line))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "a_script", raising=False)
    script = importlib.import_module("a_script")
    script.other()
    model = script.Model()
    found = capture(model, (torch.randn(2, 10, 4),))
    for n in (10, 11, 16):
        x = torch.randn(3, n, 4)
        torch.testing.assert_close(found(x), model(x))
    script.other()
    monkeypatch.delitem(sys.modules, "a_script")


def test_what_is_called_elsewhere_may_not_ask_for_the_type_itself(tmp_path, monkeypatch):
    """A ``key`` that asks which numbers are whole was answered by what stood for ``int``."""
    line = "return max([1, 2.5, 3.0], key=lambda n: (type(n) is int, n))"
    source = SCRIPT.format(line=line).replace("x[:, :kept], float(x.detach().mean())", "x * other()")
    (tmp_path / "a_teller.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    model, x = importlib.import_module("a_teller").Model(), torch.randn(2, 10, 4)
    monkeypatch.delitem(sys.modules, "a_teller")
    torch.testing.assert_close(capture(model, (x,))(x), model(x))


def test_a_number_of_groups_is_read_from_the_data_of_each_call():
    model = Pooled()
    found = capture(model, (torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])))
    for index in ([0, 1, 2, 3, 4, 4], [0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 2, 2, 3]):
        given = torch.randn(len(index), 4), torch.tensor(index)
        torch.testing.assert_close(found(*given), model(*given))


@pytest.mark.parametrize(
    "use",
    [
        lambda n: 2.0 if n > 2 else 3.0,
        lambda n: {2: 2.0, 3: 3.0}[n],
        lambda n: sum(float(i) for i in range(n)),
        lambda n: math.isqrt(n + 10),
    ],
)
def test_what_python_makes_of_a_number_in_the_data_is_never_stale(use):
    model = Chosen(use)
    x, index = torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])
    try:
        found = capture(model, (x, index))
    except AutopipeError:
        return
    torch.testing.assert_close(found(x, index), model(x, index))
    other = torch.tensor([0, 0, 1, 1, 2, 3])
    try:
        got = found(x, other)
    except AutopipeError:
        return
    torch.testing.assert_close(got, model(x, other))


class Weighed(Net):
    """The mean of what counts, by a number that Python reads out of a tensor."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, x, index):
        counts = (index > 1)[:, None]
        return (self.run(x) * counts).sum(0) / max(self.read(x, index), 1.0)


@pytest.mark.parametrize(
    "read",
    [
        lambda x, index: float((index > 1).sum()),
        lambda x, index: (index > 1).float().sum().item(),
        lambda x, index: (index > 1).sum().item() + 0.5,
        lambda x, index: float(x.detach().abs().max()) * 2,
        lambda x, index: 1 / x.detach().pow(2).mean().item() ** 0.5,
        lambda x, index: math.sqrt(x.detach().abs().sum().item()),
        lambda x, index: math.exp(float(x.detach().mean())),
        lambda x, index: int(x.detach().abs().sum()) + 1,
        lambda x, index: [3.0, 5.0][int(x.detach()[0, 0] > 0)] + x.detach().std().item(),
    ],
)
def test_a_number_read_out_of_a_tensor_is_that_of_each_call(read):
    model = Weighed(read)
    found = capture(model, (torch.randn(6, 4), torch.tensor([0, 0, 1, 1, 2, 2])))
    for n in (6, 6, 9):
        given = torch.randn(n, 4) * n, torch.randint(0, 4, (n,))
        torch.testing.assert_close(found(*given), model(*given))


class Twins(Net):
    def forward(self, x):
        one = self.layers[0](x)
        a, b = one.div(self.layers[1].bias[0]), one.div(self.layers[1].bias[0])
        return self.run(a if torch.equal(a, b) else b * 2)


def test_values_that_are_made_alike_are_equal_whatever_the_data():
    model = Twins()
    found = capture(model, (torch.randn(2, 4),))
    x = torch.randn(3, 4)
    torch.testing.assert_close(found(x), model(x))
