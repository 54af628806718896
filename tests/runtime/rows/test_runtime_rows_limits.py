"""Limits on how many rows there are, or on their places, are found however they are written down."""

from __future__ import annotations

import bisect
import functools
import math
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from splitting import split_by_layers
from torch import Tensor, nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError

LIMITS: dict[str, Callable[[Tensor], Tensor]] = {
    "behind": lambda h: h * torch.arange(len(h)).sub(12).clamp(min=0)[:, None].add(1),
    "chosen": lambda h: torch.where((torch.arange(len(h)) > 12)[:, None], h * 2, h),
    "least": lambda h: h * min(len(h), 12),
    "first": lambda h: torch.cat([h[:12] * 2, h[12:]]),
    "counted": lambda h: h / (torch.full((len(h),), 1.0).cumsum(0) - 12).clamp(min=1)[:, None],
    "in fractions": lambda h: h * torch.arange(len(h)).double().clamp(min=12.0).sub(11)[:, None],
    "divided": lambda h: h * (1 + torch.arange(len(h)) // 12)[:, None],
    "one in many": lambda h: h * (1 + (torch.arange(len(h)) % 13 == 12))[:, None],
    "rounded": lambda h: h * (1 + (torch.arange(len(h)) * 0.08).floor())[:, None],
    "held": lambda h: h * (1 + (torch.arange(len(h)) > torch.tensor(12)))[:, None],
    "triangle": lambda h: h * (1 + torch.ones(len(h), len(h)).tril(-12).any(1))[:, None],
    "number": lambda h: h * torch.tensor(len(h) / 12.0).clamp(min=1),
    "numbers": lambda h: h * torch.tensor(h.numel()).clamp(min=48).div(48),
    "loop": lambda h: torch.cat([h[i : i + 12] * (1 + i) for i in range(0, len(h), 12)]),
}
INSIDE: dict[str, Callable[[Tensor], Tensor]] = {
    "root": lambda h: h * max(3, math.isqrt(len(h) - 1)),
    "branch": lambda h: h * 2 if len(h) // 13 else h,
    "NumPy": lambda h: h * torch.from_numpy(np.maximum(np.arange(len(h)) - 12, 0) + 1)[:, None],
    "list": lambda h: h * torch.tensor([1 + i // 12 for i in range(len(h))])[:, None],
}
OPEN: dict[str, Callable[[Tensor], Tensor]] = {
    "root": INSIDE["root"],
    "power": lambda h: h * max(4, int(len(h) ** 0.5)),
    "logarithm": lambda h: h * max(3.0, math.log(len(h))),
    "pairs": lambda h: h * max(120, math.comb(len(h), 2)),
    "sides": lambda h: h * (2 if math.sqrt(len(h)) * 2 > 9 else 1),
    "quarter": lambda h: h * max(7, round(len(h) * 0.25)),
    "divisor": lambda h: h * math.gcd(len(h), 6),
    "multiple": lambda h: h * math.lcm(len(h), 4),
    "third": lambda h: h * (round(len(h) / 3) + 1),
}
OPEN_EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "ones": lambda h: h * (1 + (torch.ones(h.shape[0]).sum() == 15)),
    "new ones": lambda h: h * (1 + (h.new_ones(h.shape[0]).sum() == 15)),
    "ones alike": lambda h: h * (1 + (torch.ones_like(h[:, 0]).sum() == 15)),
    "a product": lambda h: h * (1 + (torch.ones(h.shape[0]).dot(torch.ones(h.shape[0])) == 15)),
    "places": lambda h: h * (1 + (torch.arange(h.shape[0]).max() == 14)),
}
"""Something else of exactly so many rows, in a number made of sizes alone."""
FAR_LIMITS = {"rows": 500}
FAR: dict[str, Callable[[Tensor], Tensor]] = {
    "branch": lambda h: h * 2 if len(h) > 500 else h,
    "held": lambda h: h * 2 if len(h) > FAR_LIMITS["rows"] else h,
    "elements": lambda h: h * 2 if h.numel() > 2_000 else h,
    "bytes": lambda h: h * 2 if h.nbytes > 16_000 else h,
    "chunks": lambda h: torch.cat([piece * (1 + i) for i, piece in enumerate(h.split(500))]),
    "first": lambda h: torch.cat([h[:500], h[500:] * 2]),
    "behind": lambda h: h * torch.arange(1, len(h) + 1).clamp(min=500)[:, None],
    "most": lambda h: h * max(500, len(h)),
}
"""The same of more rows than a form is run on."""
BY_NUMBER = {15: 2}
HELD = [2.0 if n == 15 else 1.0 for n in range(40)]
FUNCTIONS: dict[int, Callable[[Tensor], Tensor]] = {15: lambda h: h * 2}


TUPLE, ARRAY, PLACES = tuple(HELD), np.array(HELD), torch.tensor(HELD, dtype=torch.float64)


def filled() -> list[float]:
    table = [1.0] * 64
    table[15] = 2.0
    return table


class Settings:
    rows = 15


SETTINGS = Settings()


def of_lines(h: Tensor) -> Tensor:
    if (
        len(h)  # and more of it
        == 15
    ):
        return h * 2
    return h


def of_a_variable(h: Tensor) -> Tensor:
    most = SETTINGS.rows
    over = len(h) - most
    if over == 0:
        return h * 2
    return h


def asked(h: Tensor, n: int) -> Tensor:
    return h * 2 if len(h) == n else h


class Given(nn.Module):
    """A number of its own, by way of a variable, or one on a device."""

    def __init__(self, *, is_tensor: bool) -> None:
        super().__init__()
        self.register_buffer("most", torch.tensor(15) if is_tensor else None)
        self.rows = 15

    def forward(self, h: Tensor) -> Tensor:
        rows = self.rows if self.most is None else 0
        if h.shape[0] == (rows or self.most):
            h = h * 2
        return h


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        return g * 2 if len(g) ** 2 == 225 else g


class ByAnotherName(torch.autograd.Function):
    forward = Doubles.forward

    @staticmethod
    def vjp(ctx, g):
        return g * 2 if len(g) ** 2 == 225 else g


class Holder:
    """An object that applies a function, by an attribute."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, h: Tensor) -> Tensor:
        applied: Tensor = self.function.apply(h)
        return applied


@torch.library.custom_op("autopipe_tests::copied", mutates_args=())
def copied(h: Tensor) -> Tensor:
    return h.clone()


copied.register_autograd(lambda ctx, g: g * 2 if len(g) ** 2 == 225 else g)
TABLE, APPLIES = {"doubles": Doubles}, [Doubles.apply]


def hooked(h: Tensor) -> Tensor:
    h = h.clone()
    if h.requires_grad:
        h.register_hook(lambda g: g * 2 if len(g) * 3 == 45 else g)
    return h


class DropsExactly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(1e-12)

    def forward(self, h: Tensor) -> Tensor:
        return self.drop(h) * (2 if len(h) == 15 else 1)


class DrawsExactly(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return (h + 1e-9 * torch.randn_like(h)) * (2 if len(h) == 15 else 1)


@torch.jit.script
def scripted(h: Tensor) -> Tensor:
    return h * 2 if len(h) == 15 else h


class Scripted(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * 2 if h.size(0) == 15 else h


@torch.jit.script
def counted_by_ones(h: Tensor) -> Tensor:
    return h * (1 + (torch.ones_like(h[:, 0]).sum() == 15))


@torch.jit.script
def counted_by_a_product(h: Tensor) -> Tensor:
    ones = torch.ones_like(h[:, 0])
    return h * (1 + (ones.dot(ones) == 15))


class CountedByOnes(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h * (1 + (h.new_ones(h.shape[0]).sum() == 15))


EXACT: dict[str, Callable[[Tensor], Tensor]] = {
    "is": lambda h: h * 2 if len(h) == 15 else h,
    "among": lambda h: h * 2 if h.shape[0] in (13, 15) else h,
    "remainder": lambda h: h * 2 if len(h) % 5 == 0 else h,
    "table": lambda h: h * BY_NUMBER.get(len(h), 1),
    "elements": lambda h: h * 2 if h.numel() == 60 else h,
    "difference": lambda h: h if len(h) - 15 else h * 2,
    "function": lambda h: h * 2 if operator.eq(len(h), 15) else h,
    "close": lambda h: h * 2 if math.isclose(len(h), 15.0) else h,
    "popped": lambda h: h * {15: 2}.pop(len(h), 1),
    "list": lambda h: h * HELD[len(h)],
    "tensor": lambda h: h * torch.tensor(HELD)[len(h)],
    "between": lambda h: h * (1 + bisect.bisect([15, 16], len(h)) % 2),
    "range": lambda h: h * 2 if len(h) in range(15, 17) else h,
    "text": lambda h: h * 2 if f"n{len(h)}" == "n15" else h,
    "within": lambda h: h * (lambda n: 2 if n == 15 else 1)(len(h)),
    "functions": lambda h: FUNCTIONS.get(len(h), torch.clone)(h),
    "behind dropout": DropsExactly(),
    "behind noise": DrawsExactly(),
    "behind noise, from some on": lambda h: h * (1 + 1e-9 * torch.rand_like(h)) * (2 if len(h) > 14 else 1),
    "behind other noise": lambda h: (
        (h + 0 * torch.multinomial(torch.ones(len(h), 4), 1)) * (1 + (len(h) == 15))
    ),
    "histogram": lambda h: h * (1 + (torch.histc(h[:, 0], 1, -1e9, 1e9)[0] == 15)),
    "little": lambda h: h + 1e-4 * h.mean(0) if len(h) == 15 else h,
    "scripted": scripted,
    "a scripted part": lambda h: scripted(h).neg(),
    "a scripted layer": torch.jit.script(Scripted()),
    "scripted, counted by ones": counted_by_ones,
    "scripted, counted by a product": counted_by_a_product,
    "a scripted layer, counted by ones": torch.jit.script(CountedByOnes()),
    "of lines": of_lines,
    "of a variable": of_a_variable,
    "asked for elsewhere": lambda h: asked(h, 15),
    "asked for by a part": lambda h: functools.partial(asked, n=15)(h),
    "own": Given(is_tensor=False),
    "own tensor": Given(is_tensor=True),
    "tuple": lambda h: h * TUPLE[len(h)],
    "array": lambda h: h * float(ARRAY[len(h)]),
    "taken": lambda h: h * PLACES.select(0, len(h)),
    "square": lambda h: h * 2 if len(h) * len(h) == 225 else h,
    "times": lambda h: h * 2 if len(h) * 3 == 45 else h,
    "half": lambda h: h * 2 if len(h) / 2 == 7.5 else h,
    "in hex": lambda h: h * 2 if hex(len(h)) == "0xf" else h,
    "one of many": lambda h: h * (1 + F.one_hot(torch.tensor(len(h)), 64)[15]),
    "filled": lambda h: h * filled()[len(h)],
    "named by a text": lambda h: h * 2 if len(h) == getattr(SETTINGS, "rows") + 0 else h,  # noqa: B009
    "around": lambda h: h * 2 if 14 < len(h) < 16 else h,
    "any": lambda h: h * 2 if any(n == len(h) for n in (9, 15)) else h,
    "set": lambda h: h * 2 if len(h) in {n * n - 1 for n in (4, 7)} else h,
    "bits": lambda h: h * h.shape[0].bit_length(),
    "whole root": lambda h: h * 2 if math.sqrt(len(h) + 1).is_integer() else h,
    "part of a text": lambda h: h * 2 if str(len(h)) in "15 27" else h,
    "primes": lambda h: h * 2 if all(len(h) % k for k in range(2, len(h))) else h,
    "pieces": lambda h: h * 2 if len(h.split(4)) == 4 else h,
    "one after another": lambda h: h * 2 if sum(1 for _ in h) ** 2 == 225 else h,
    "its mean": lambda h: h + (h - h.mean(0)) if len(h) ** 2 == 900 else h,
}
"""Something else of exactly so many rows."""


def aside(h):
    return h.detach()


EXACT_GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "held back": lambda h: h.detach() if len(h) ** 2 == 225 else h,
    "held back by what runs then alone": lambda h: aside(h) if len(h) ** 2 == 225 else h,
    "held back in a thread": lambda h: (
        ThreadPoolExecutor(1).submit(aside, h).result() if len(h) ** 2 == 225 else h
    ),
    "backward": Doubles.apply,
    "backward where gradients are asked": lambda h: Doubles.apply(h) if h.requires_grad else h,
    "backward of so many": lambda h: Doubles.apply(h) if h.requires_grad and len(h) ** 2 == 225 else h,
    "backward by another name": lambda h: ByAnotherName.apply(h),
    "backward in a table": lambda h: TABLE["doubles"].apply(h),
    "backward bound in a list": lambda h: APPLIES[0](h),
    "backward of an object": Holder(Doubles),
    "backward in a table of so many": lambda h: TABLE["doubles"].apply(h) if len(h) ** 2 == 225 else h,
    "operator": lambda h: copied(h),
    "operator by its name": lambda h: torch.ops.autopipe_tests.copied(h),
    "overload": torch.ops.autopipe_tests.copied.default,
    "hook": hooked,
}
"""Other gradients of exactly so many rows."""
FREE: dict[str, Callable[[Tensor], Tensor]] = {
    "size": lambda h: h.reshape(len(h), -1) * torch.ones(len(h), 1),
    "zeros": lambda h: torch.cat([h, h.new_zeros(len(h), 4)], 1)[:, :4],
    "same": lambda h: h * (torch.arange(len(h)).clamp(max=0)[:, None] + 1),
    "pieces": lambda h: torch.cat([h[i : i + 12] * 2 for i in range(0, len(h), 12)]),
}


class Kept(nn.Module):
    """What Python reads in it keeps it whole."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, h: Tensor) -> Tensor:
        return h if h.isnan().any() else self.act(h)


class Limited(nn.Module):
    """Something of rows early in a model, in open code or in a layer that is kept whole."""

    def __init__(self, act: Callable[[Tensor], Tensor], is_whole: bool) -> None:
        super().__init__()
        self.ahead, self.act = nn.Linear(4, 4), Kept(act) if is_whole else act
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(self.act(self.ahead(x))), y)


def limited(act: Callable[[Tensor], Tensor], is_whole: bool) -> tuple[nn.Module, autopipe.Pipe]:
    """A model with something of rows in it, and its pipe; recorded on eight."""
    torch.manual_seed(0)
    model = Limited(act, is_whole).double()
    example = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3
    return model, split_by_layers(model, 2, example, n_microbatches=2)


def loss_of(model: nn.Module, pipe: autopipe.Pipe, n_rows: int) -> tuple[float, float]:
    """The loss of a step of so many rows in two microbatches, and the plain model's."""
    x, y = torch.randn(n_rows, 4, dtype=torch.float64), torch.arange(n_rows) % 3
    expected = model(x, y).item()
    return pipe.runtime().step(x, y).loss.item(), expected


def stepped(act: Callable[[Tensor], Tensor], is_whole: bool, n_rows: int = 30) -> tuple[float, float]:
    """See :func:`loss_of`."""
    return loss_of(*limited(act, is_whole), n_rows)


@pytest.mark.parametrize(
    ("name", "is_whole"),
    [
        pytest.param(name, is_whole, marks=pytest.mark.slow if is_whole and i % 3 else [])
        for i, name in enumerate(LIMITS)
        for is_whole in (False, True)
    ],
)
def test_a_limit_on_rows_is_refused(name, is_whole):
    with pytest.raises(InputError, match="depend on one another"):
        stepped(LIMITS[name], is_whole)


@pytest.mark.parametrize("name", INSIDE)
def test_so_is_one_that_only_code_kept_whole_has(name):
    with pytest.raises(InputError, match="depend on one another"):
        stepped(INSIDE[name], is_whole=True)


@pytest.mark.parametrize("name", EXACT)
def test_so_is_what_code_kept_whole_does_of_exactly_so_many_rows(name):
    with pytest.raises(InputError, match="depend on one another"):
        stepped(EXACT[name], is_whole=True)


@pytest.mark.parametrize("name", ["scripted", "a scripted layer"])
def test_so_is_what_scripted_code_does_beside_open_code(name):
    with pytest.raises(InputError, match="depend on one another"):
        stepped(EXACT[name], is_whole=False)


@pytest.mark.parametrize("name", EXACT_GRADIENTS)
def test_so_are_other_gradients_of_exactly_so_many_rows(name):
    with pytest.raises(InputError, match="depend on one another"):
        stepped(EXACT_GRADIENTS[name], is_whole=True)


def test_so_are_those_of_an_operator_in_open_code():
    with pytest.raises(InputError, match="depend on one another"):
        stepped(torch.ops.autopipe_tests.copied.default, is_whole=False)


class Plain(torch.autograd.Function):
    forward = Doubles.forward

    @staticmethod
    def backward(ctx, g):
        return g


def test_so_are_those_of_one_of_layers_that_are_alike_but_for_what_an_object_applies():
    layers = nn.Sequential(*(Kept(Holder(function)) for function in (Plain, Plain, Doubles)))
    with pytest.raises(InputError, match="depend on one another"):
        stepped(layers, is_whole=False)


class InTraining(nn.Module):
    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, h: Tensor) -> Tensor:
        return self.does(h) if self.training else h


@pytest.mark.parametrize("name", ["backward", "backward in a table", "held back", "operator"])
def test_so_are_those_in_training_alone(name):
    with pytest.raises(InputError, match="the gradients of whose rows hang on how many there are"):
        stepped(InTraining(EXACT_GRADIENTS[name]), is_whole=True)


OWN = torch.tensor(40)


class OfWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.most = nn.Parameter(torch.tensor(40.0))

    def forward(self, h: Tensor) -> Tensor:
        return h * 2 if len(h) == int(self.most) else h


@pytest.mark.parametrize(
    "act", [lambda h: h * 2 if len(h) == OWN else h, OfWeight()], ids=["tensor", "weight"]
)
def test_so_is_a_larger_number_in_a_tensor(act):
    with pytest.raises(InputError, match="others where they are 40"):
        stepped(act, is_whole=True, n_rows=80)


class Complex(nn.Module):
    """Complex numbers that code kept whole makes a little larger of exactly so many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.act = Kept(lambda h: h * 1.05 if len(h) == 15 else h)

    def forward(self, h: Tensor) -> Tensor:
        return self.act(torch.complex(h, h)).real


def test_so_is_a_little_of_complex_numbers():
    with pytest.raises(InputError, match="others where they are 15"):
        stepped(Complex(), is_whole=False)


COMPUTED: dict[int, Callable[[Tensor], Tensor]] = {
    50: lambda h: h * 2 if len(h) ** 2 == 2500 else h,
    49: lambda h: h * 2 if math.sqrt(len(h)) == 7 else h,
    51: lambda h: h * 2 if len(h) * 3 == 153 else h,
}


@pytest.mark.parametrize("n", COMPUTED)
def test_so_is_a_larger_number_that_is_computed(n):
    with pytest.raises(InputError, match=f"others where they are {n}"):
        stepped(COMPUTED[n], is_whole=True, n_rows=2 * n)


def of_a_square(h: Tensor) -> Tensor:
    return h * 2 if len(h) ** 2 == 225 else h


class Around(nn.Module):
    """What may hide a question: training alone, a count beside it, places of rows in one, a flag, a loss."""

    def __init__(self, kind: str, *, is_asking: bool = True) -> None:
        super().__init__()
        self.kind, self.is_asking, self.n = kind, is_asking, 0

    def forward(self, h: Tensor) -> Tensor:
        if h.isnan().any() or not self.is_asking or (self.kind == "training" and not self.training):
            return h
        if self.kind == "count":
            self.n += 1
        return of_a_square(h)


class InGroups(nn.Module):
    """A layer that is given two places of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.act = Kept(lambda h: h * 2 if len(h) ** 2 == 900 else h)

    def forward(self, h: Tensor) -> Tensor:
        return self.act(h.repeat_interleave(2, 0)).unflatten(0, (-1, 2)).mean(1)


class Held(nn.Module):
    """A layer that goes by what it holds, which its class does not tell."""

    def __init__(self, asks: Any, *held: Any) -> None:
        super().__init__()
        self.linear, self.asks = nn.Linear(4, 4), asks
        self.first, self.last = held if len(held) == 2 else (held[0], None)

    def forward(self, h: Tensor) -> Tensor:
        h = self.linear(h)
        return h * 2 if not h.isnan().any() and self.asks(len(h), self.first, self.last) else h


def by_flags(n: int, is_first: bool, is_last: bool) -> bool:
    return is_last and n**2 == 225


def by_table(n: int, table: Any, last: None) -> bool:
    return bool(table[n] == 2)


def by_limit(n: int, first: Any, last: Any, limit: int) -> bool:
    return n**2 == limit**2


ONES = [1.0] * 64
IN_PLACES = {
    "list": [by_table, ONES, HELD],
    "array": [by_table, np.array(ONES), ARRAY],
    "tensor": [by_table, torch.tensor(ONES), torch.tensor(HELD)],
}


HIDDEN = {
    "flags": nn.Sequential(*(Held(by_flags, i < 2, i == 2) for i in range(3))),
    "argument of a partial": nn.Sequential(
        *(Held(functools.partial(by_limit, limit=limit), None) for limit in (0, 0, 15))
    ),
    **{
        name: nn.Sequential(*(Held(asks, held) for held in (other, other, table)))
        for name, (asks, other, table) in IN_PLACES.items()
    },
    "thread": Kept(lambda h: ThreadPoolExecutor(1).submit(of_a_square, h).result()),
    "class of a number": Kept(
        lambda h: h * 2 if type(h.shape[0]) is int and len(h.shape) + h.shape[0] == 17 else h
    ),
    "count": Around("count"),
    "one of alike layers": nn.Sequential(*(Around("", is_asking=i == 2) for i in range(3))),
    "groups": InGroups(),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_so_is_what_asks_where_little_shows_it(name):
    with pytest.raises(InputError, match="depend on one another"):
        stepped(HIDDEN[name], is_whole=False)


def test_what_asks_in_training_alone_is_told_as_batch_norm_is():
    model = Limited(Around("training"), is_whole=False)
    mixing = autopipe.capture(model, (torch.randn(8, 4), torch.arange(8) % 3)).variation.mixing
    assert not mixing.always
    assert "others where they are 15" in mixing.training


class Judge(nn.Module):
    """A loss that is another of exactly so many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 16)), Judged()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.last(self.layers(x), y)


class Judged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 3)

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.linear(h), y)
        return loss * 2 if not h.isnan().any() and len(h) ** 2 == 225 else loss


def test_a_loss_that_is_another_of_exactly_so_many_rows_is_of_the_whole_batch():
    torch.manual_seed(0)
    model, x, y = Judge().double(), torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 3
    expected = model(x, y).item()
    pipe = split_by_layers(model, 2, (x[:8], y[:8]), n_microbatches=2)
    assert pipe.runtime().step(x, y).loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", OPEN)
def test_so_is_what_a_function_makes_of_their_number(name):
    with pytest.raises(InputError, match="depend on one another"):
        stepped(OPEN[name], is_whole=False)


@pytest.mark.parametrize("name", OPEN_EXACT)
def test_so_is_what_a_number_made_of_sizes_does_of_exactly_so_many_rows(name):
    with pytest.raises(InputError, match="depend on one another"):
        stepped(OPEN_EXACT[name], is_whole=False)


def test_a_number_that_goes_nowhere_of_exactly_so_many_rows_is_not():
    found, expected = stepped(lambda h: F.pad(h, (0, 0, 0, -len(h) % 2))[: len(h)], is_whole=False)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", FAR)
def test_a_far_limit_in_code_kept_whole_is_refused_for_batches_beyond_it(name):
    model, pipe = limited(FAR[name], is_whole=True)
    with pytest.raises(InputError, match=r"act at .*, on more than (49\d|500) rows"):
        loss_of(model, pipe, 600)
    found, expected = loss_of(model, pipe, 400)
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["behind", "branch", "chunks", "elements", "first"])
def test_so_is_one_in_open_code(name):
    model, pipe = limited(FAR[name], is_whole=False)
    with pytest.raises(InputError, match="depend on one another"):
        loss_of(model, pipe, 600)
    found, expected = loss_of(model, pipe, 200)
    assert found == pytest.approx(expected, rel=1e-12)


class Wide(nn.Module):
    """A limit in a layer that is given rows of 32 KiB, and holds it in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead, self.act, self.behind = nn.Linear(4, 4096), Kept(self.limited), nn.Linear(4096, 3)
        self.limits = {"rows": 20}

    def limited(self, h: Tensor) -> Tensor:
        return h * 2 if h.shape[0] > self.limits["rows"] else h

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.behind(self.act(self.ahead(x))), y)


def test_a_limit_in_a_layer_of_wide_rows_is_refused():
    torch.manual_seed(0)
    model, x, y = Wide().double(), torch.randn(30, 4, dtype=torch.float64), torch.arange(30) % 3
    pipe = split_by_layers(model, 2, (x[:8], y[:8]), n_microbatches=2)
    with pytest.raises(InputError, match="depend on one another"):
        pipe.runtime().step(x, y)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("name", FREE)
def test_what_only_has_as_many_rows_is_not(name, is_whole):
    found, expected = stepped(FREE[name], is_whole)
    assert found == pytest.approx(expected, rel=1e-12)


class Configured(nn.Module):
    """Looks names up in its settings, with an error of its own for those that are not there."""

    def __init__(self):
        super().__init__()
        self.linear, self.settings = nn.Linear(6, 6), {"scale": 2.0}

    def __getattr__(self, name):
        settings = vars(self).get("settings", {})
        return settings[name] if name not in ("linear", "settings") else super().__getattr__(name)

    def forward(self, x):
        values = {"limit": 1.0}
        return self.linear(x) * (self.scale if x.isfinite().all() and max(values.values()) > 0 else 1.0)


def test_a_layer_whose_own_getattr_fails_is_captured():
    model = nn.Sequential(nn.Linear(6, 6), Configured(), nn.Linear(6, 4))
    found, x = autopipe.capture(model, (torch.randn(8, 6),)), torch.randn(5, 6)
    torch.testing.assert_close(found(x), model(x))
