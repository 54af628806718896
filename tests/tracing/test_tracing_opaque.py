"""Functions and methods that draw from numpy or ``random``, or read data, are recorded as one call."""

from __future__ import annotations

import pathlib
import random
import sys
import types
from random import random as chance
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe.errors import CaptureError
from autopipe.tracing import capture


def draw_mask(shape: tuple[int, int], p: float) -> np.ndarray:
    """A numpy mask, as speech models make it."""
    return np.random.rand(*shape) < p


def longest(mask: Tensor) -> Tensor:
    """Reads data in Python."""
    return torch.tensor(max(mask.sum(-1).tolist()))


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.training:
            drawn = draw_mask(x.shape[:2], 0.5)
            x = x.masked_fill(torch.tensor(drawn, device=x.device, dtype=torch.bool)[..., None], 0.0)
        x = self.layers[1](x) / longest(mask)
        return self.layers[2](x)


class Jitter(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * random.uniform(0.9, 1.1) if self.training else x


def seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


def test_functions_stay_whole_and_layers_stay_apart() -> None:
    model = Masking()
    captured = capture(model, (torch.rand(2, 5, 4), torch.ones(2, 5)))
    targets = [node.target for node in captured.graphs[True].nodes]
    assert {draw_mask, longest, "layers.0", "layers.1", "layers.2"} <= set(targets)
    mask = torch.ones(3, 6)
    mask[0, 2:] = 0
    for training in (True, False):
        model.train(training)
        for _ in range(2):
            x = torch.rand(3, 6, 4)
            seed()
            expected = model(x, mask)
            seed()
            assert torch.equal(captured(x, mask), expected)


def test_a_draw_in_a_forward_keeps_its_module_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Jitter(), nn.Linear(4, 4)).train()
    captured = capture(model, (torch.rand(2, 4),))
    x = torch.rand(2, 4)
    for _ in range(2):
        state = random.getstate()
        expected = model(x)
        random.setstate(state)
        assert torch.equal(captured(x), expected)


def row_lengths(mask: torch.Tensor) -> torch.Tensor:
    """Goes through as many rows as there are."""
    return torch.stack([row.sum() for row in mask.flatten(0, 1)]).view(mask.shape[:2])


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layer(x).unflatten(1, (3, -1)).unbind(1)
        return first + second * third + row_lengths(x)[:, :4, None]


DRAWS = {
    "numpy.random.beta": lambda: np.random.beta(0.4, 0.4),
    "numpy.random.dirichlet": lambda: np.random.dirichlet([1.0, 1.0])[0],
    "numpy.random.random_sample": lambda: np.random.random_sample(),
    "random.betavariate": lambda: random.betavariate(1, 2),
    "random.getrandbits": lambda: random.getrandbits(3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_of_any_distribution_is_told_by_its_name(name: str) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x * float(DRAWS[name]()))

    with pytest.raises(CaptureError, match=f"{name} draws a random number"):
        capture(Mixed(), (torch.randn(2, 4),))


def test_a_loop_over_rows_stays_whole_and_unpacking_does_not() -> None:
    captured = capture(Rows(), (torch.rand(2, 12, 4),))
    assert row_lengths in [node.target for node in captured.graphs[True].nodes]
    x = torch.rand(5, 12, 4)
    assert torch.equal(captured(x), captured.model(x))


class Body(nn.Module):
    """Blocks, and a method beside them that reads data in Python."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen, self.last = how, 0, torch.zeros(1)
        self.scale = nn.Parameter(torch.ones(4))
        self.gate = nn.Linear(4, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4))

    def pieces(self, x: Tensor) -> tuple[Tensor, ...]:
        """Rows in pieces, as many as data say."""
        sizes = [int(n) for n in (self.gate(x).flatten() > 0).long().add(1).tolist()]
        if self.how == "parameter":
            x = x * self.scale
        if self.how == "attribute":
            self.seen = len(sizes)
        return x.repeat_interleave(torch.tensor(sizes), 0).split(sizes)

    def number(self, x: Tensor) -> Any:
        return x.max().item() if self.how == "number" else 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat(self.pieces(x)) + self.number(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("how", ["alone", "parameter", "attribute", "number"])
def test_a_method_stays_whole_alone_where_it_sets_nothing(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Body(how), nn.Linear(4, 4))
    captured = capture(model, (torch.rand(2, 4),))
    called = [op.target for op in captured.ops.compute if op.parameters]
    is_alone = how != "attribute"  # a number that torch alone takes is no obstacle
    assert ("1.blocks.0.0" in called or "1.blocks.0" in called) == is_alone
    assert ("1" in called) != is_alone
    for rows in (1, 5):
        x = torch.randn(rows, 4)
        assert torch.equal(captured(x), model(x))
    if is_alone:
        named = {"1.gate.weight", "1.gate.bias", "1.scale"}  # in its code, whether this call reads it or not
        assert {*captured.ops.by_name["pieces"].parameters} == named
    assert not any(name in vars(m) for m in model.modules() for name in ("pieces", "_compiled_call_impl"))


def test_code_of_packages_whose_names_begin_with_torch_is_the_models_own():
    place = f"{pathlib.Path(torch.__file__).parent}_elsewhere/nets.py"
    source = """
def longest(mask):
    return torch.tensor(max(mask.sum(-1).tolist()))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x, mask):
        return self.layers[2](self.layers[1](self.layers[0](x) / longest(mask)))
"""
    package = types.ModuleType("torch_elsewhere")
    vars(package).update(torch=torch, nn=nn)
    exec(compile(source, place, "exec"), vars(package))
    sys.modules["torch_elsewhere"] = package
    try:
        model, x = package.Net(), torch.randn(2, 5, 4)
        captured = capture(model, (x, torch.ones(2, 5)))
        mask = torch.ones(2, 5).tril()
        torch.testing.assert_close(captured(x, mask), model(x, mask))
        assert any(op.source.startswith(place) for op in captured.ops.ops)
    finally:
        del sys.modules["torch_elsewhere"]


class Sometimes(nn.Module):
    """Draws by a name of its own for a function of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def guess(self, x: Tensor) -> Tensor:
        return x * 2 if chance() < 0.5 else x

    def forward(self, x: Tensor) -> Tensor:
        x = self.guess(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_draw_under_another_name_is_drawn_each_time() -> None:
    model = Sometimes()
    captured = capture(model, (torch.rand(2, 4),))
    assert chance is random.random
    for number in range(8):
        x = torch.rand(2, 4)
        random.seed(number)
        expected = model(x)
        random.seed(number)
        assert torch.equal(captured(x), expected)


class Features(nn.Module):
    """Uses what a forward hook keeps of a layer inside, as feature extractors do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Linear(12, 2)
        self.kept: dict[str, Tensor] = {}
        self.net[2].register_forward_hook(self.keep)

    def keep(self, module: nn.Module, args: Any, result: Tensor) -> None:
        self.kept["hidden"] = result.flatten(1) * 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        hidden = self.kept.pop("hidden")
        return self.head(torch.cat([y, hidden], 1))


def test_what_a_hook_keeps_of_a_layer_is_that_of_each_call() -> None:
    torch.manual_seed(0)
    model = Features()
    captured = capture(model, (torch.rand(2, 4),))
    pipe = autopipe.split(model, 2, (torch.rand(2, 4),), costs="estimated", n_microbatches=1)
    for rows in (2, 5):
        x = torch.rand(rows, 4)
        for run in (captured, pipe):
            model.zero_grad()
            model(x).sum().backward()
            expected = [p.grad for p in model.parameters()]
            model.zero_grad()
            run(x).sum().backward()
            torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@torch.jit.script
def mixed(x: Tensor, y: Tensor) -> Tensor:
    if x.size(0) > 3:
        x = x * 2
    return torch.tanh(x) + y


class Scripted(Sometimes):
    """Calls a scripted function on its way."""

    def guess(self, x: Tensor) -> Tensor:
        return mixed(self.layers[0](x), x)


@pytest.mark.filterwarnings("ignore")
def test_scripted_functions_are_recorded() -> None:
    model = Scripted()
    captured = capture(model, (torch.rand(2, 4),))
    assert mixed(torch.ones(1), torch.ones(1)).shape == (1,)
    for rows in (2, 5):
        x = torch.rand(rows, 4)
        torch.testing.assert_close(captured(x), model(x))
