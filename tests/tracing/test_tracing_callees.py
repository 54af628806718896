"""Functions of libraries that go by data stay whole, with the layers they reach, whatever their name."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe.errors import InputError
from autopipe.tracing import capture

LIBRARY = """
def halve(func, y):
    steps = 0
    while float(y.detach().abs().amax()) > 1 and steps < 9:
        y, steps = func(y) / 2, steps + 1
    return y

def solve(func, y, scale=1.0):
    return halve(func, y) * scale

class Field(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def forward(self, y):
        return self.inside.field(y)

def solve_field(inside, y):
    return halve(Field(inside), y)

def solve_and_count(inside, y):
    inside.steps = getattr(inside, "steps", 0) + 1
    return halve(inside.field, y) * inside.steps
"""


@pytest.fixture
def library() -> Iterator[Any]:
    made = types.ModuleType("elsewhere")
    vars(made).update(nn=nn, torch=torch)
    exec(compile(LIBRARY, "elsewhere.py", "exec"), vars(made))
    sys.modules["elsewhere"] = made
    yield made
    del sys.modules["elsewhere"]


Solve = Callable[["Equation", Tensor], Tensor]


class Equation(nn.Module):
    """Layers around what a library computes of more of them, in steps that data decide."""

    def __init__(self, library: Any, solve: Solve) -> None:
        super().__init__()
        self.library, self.solve = library, solve
        self.before, self.a, self.b = (nn.Linear(4, 4) for _ in range(3))
        self.after = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        self.scale, self.rare = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def field(self, y: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(y))) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.solve(self, self.before(x)))


def by_attribute(model: Equation, y: Tensor) -> Tensor:
    return model.library.solve(model.field, y, scale=0.5)


def around_the_model(model: Equation, y: Tensor) -> Tensor:
    return model.library.solve(lambda y: model.b(model.a(y)), y)


def around_a_tensor(model: Equation, y: Tensor) -> Tensor:
    shift = y.mean()
    return model.library.solve(lambda y: model.a(y) + shift, y)


def the_model_itself(model: Equation, y: Tensor) -> Tensor:
    return model.library.solve_field(model, y)


@pytest.mark.parametrize("solve", [by_attribute, around_the_model, around_a_tensor, the_model_itself])
def test_a_library_goes_by_data_and_the_layers_around_it_stay_apart(library: Any, solve: Solve) -> None:
    torch.manual_seed(0)
    model = Equation(library, solve).double()
    # a mean of all rows goes into what is solved: it runs on the whole batch, in the last stage
    n_stages = 2 if solve is around_a_tensor else 3
    pipe = autopipe.split(model, n_stages, (torch.randn(3, 4).double(),), costs="estimated")
    whole = [op for op in pipe.graph.ops.compute if "a.weight" in op.parameters]
    assert len(whole) == 1
    assert not {"before.weight", "after.0.weight", "rare.weight"} & {*whole[0].parameters}
    for rows, spread in ((3, 1), (5, 40), (2, 0.01)):
        x = torch.randn(rows, 4).double() * spread
        expected, got = model(x), pipe(x)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        wanted = [p for n, p in model.named_parameters() if "rare" not in n]
        for one, other in zip(
            torch.autograd.grad(expected.sum(), wanted, allow_unused=True),
            torch.autograd.grad(got.sum(), wanted, allow_unused=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class Judged(Equation):
    """Such a model that gives a loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


@pytest.mark.parametrize("n_microbatches", [2, 4])
def test_a_mean_of_all_rows_that_a_library_is_given_is_that_of_the_whole_batch(
    library: Any, n_microbatches: int
) -> None:
    torch.manual_seed(0)
    model = Judged(library, around_a_tensor).double()
    pipe = autopipe.split(model, 2, (torch.randn(3, 4).double(),), costs="estimated")
    x = 40 * torch.randn(8, 4).double()
    expected = model(x)
    named = {n: p for n, p in model.named_parameters() if n.split(".")[0] in ("before", "a", "after")}
    wanted = torch.autograd.grad(expected, [*named.values()])
    got = pipe.runtime(n_microbatches=n_microbatches).step(x).loss
    torch.testing.assert_close(got, expected.detach(), rtol=1e-10, atol=1e-10)
    for (name, parameter), grad in zip(named.items(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-10, atol=1e-10, msg=name)


def sometimes_rare(model: Equation, y: Tensor) -> Tensor:
    return model.library.solve(Picky(model), y)


class Picky:
    """Calls a layer for large values only, by a way that no code names."""

    def __init__(self, model: Equation) -> None:
        self.model = model

    def __call__(self, y: Tensor) -> Tensor:
        name = "rare" if float(y.detach().abs().amax()) > 100 else "a"
        return getattr(self.model, name)(y)


def large_is_rare(model: Equation, y: Tensor) -> Tensor:
    names = {True: "rare", False: "a"}
    return model.library.solve(lambda y: getattr(model, names[bool(y.detach().abs().amax() > 100)])(y), y)


@pytest.mark.parametrize("solve", [large_is_rare, sometimes_rare])
def test_a_layer_that_the_example_did_not_reach_is_told(library: Any, solve: Solve) -> None:
    torch.manual_seed(0)
    model = Equation(library, solve)
    try:
        found = capture(model, (torch.randn(3, 4),))
    except autopipe.AutopipeError:
        return
    x = torch.randn(3, 4)
    torch.testing.assert_close(found(x), model(x))
    with pytest.raises(InputError, match="rare"):
        found(1e4 * x)


def counted(model: Equation, y: Tensor) -> Tensor:
    return model.library.solve_and_count(model, y)


def test_what_no_stand_in_can_be_put_into_is_refused(library: Any) -> None:
    with pytest.raises(autopipe.AutopipeError):
        capture(Equation(library, counted), (torch.randn(3, 4),))


class Made(nn.Module):
    """Calls a library that writes code for the sizes at hand."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self.library = library
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.library.doubled(layer(x))
        return x


def test_code_written_for_sizes_stays_with_what_writes_it(library: Any) -> None:
    def doubled(x: Tensor) -> Tensor:
        shape = tuple(int.__index__(n) for n in x.shape)
        names = {"torch": torch}
        exec(f"def run(x):\n    return torch.reshape(x, {(2, *shape)[1:]}) * 2", names)
        return names["run"](x)

    library.doubled = types.FunctionType(doubled.__code__, {**globals()}, "doubled")
    model = Made(library)
    found = capture(model, (torch.randn(2, 6, 4),))
    assert not found.variation.checks
    assert {d.name for d in found.variation.dims} >= {"batch"}
    for rows, length in ((3, 6), (2, 9), (5, 4)):
        x = torch.randn(rows, length, 4)
        torch.testing.assert_close(found(x), model(x))


def by_hand(y: Tensor, targets: Tensor, spare: bool = False) -> tuple[Tensor, Tensor | None]:
    """Pairs rows by what they hold, in Python, as matchers of detectors do; the rest is None by default."""
    cost = torch.cdist(y, targets).detach()
    order = [min(range(len(targets)), key=lambda j, row=row: float(row[j])) for row in cost]
    return (y - targets[order]).square().mean(), y.mean() if spare and order[0] else None


LOSSES = {"matched": by_hand}


class Matched(nn.Module):
    """Reaches a function of its file as something holds it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.how, self.held = how, by_hand

    @property
    def loss_function(self) -> Any:
        return LOSSES["matched"]

    def forward(self, x: Tensor, targets: Tensor) -> Any:
        y = self.layers(x)
        if self.how == "property":
            return self.loss_function(y, targets)
        if self.how == "dict":
            return LOSSES["matched"](y, targets)
        return self.held(y, targets, spare=self.how == "sometimes")


@pytest.mark.parametrize("how", ["property", "dict", "attribute"])
def test_a_function_that_something_holds_stays_whole(how: str) -> None:
    torch.manual_seed(0)
    model, code = Matched(how).double(), by_hand.__code__
    example = torch.randn(2, 3, 4).double().unbind()
    pipe = autopipe.split(model, 2, example, costs="estimated", n_microbatches=1)
    assert (by_hand.__code__, by_hand.__defaults__, by_hand.__kwdefaults__) == (code, (False,), None)
    assert by_hand in [node.target for node in pipe.graph.graphs[True].nodes]
    for rows in (3, 5):
        x, targets = torch.randn(2, rows, 4).double().unbind()
        (expected, nothing), (got, also_nothing) = model(x, targets), pipe(x, targets)
        assert nothing is also_nothing is None
        wanted = torch.autograd.grad(expected, [*model.parameters()])
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.autograd.grad(got, [*model.parameters()]), wanted)


def test_nothing_that_data_decide_is_asked_for_at_each_run() -> None:
    torch.manual_seed(0)
    model = Matched("sometimes").double()
    x = torch.randn(3, 4).double()
    near = model.layers(x).detach()
    first, other = near, near.roll(1, 0)
    captured = capture(model, (x, first))
    assert captured(x, first)[1] is None is model(x, first)[1]
    assert model(x, other)[1] is not None
    with pytest.raises(InputError, match="None"):
        captured(x, other)
