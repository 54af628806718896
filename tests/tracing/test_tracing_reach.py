"""What a model's code reaches is put back, and nothing else is touched."""

import builtins
import math
import random
import sys
import types

import numpy as np
import torch
from torch import nn

from autopipe.tracing import capture, preserved
from autopipe.tracing.state.global_names import is_foreign
from autopipe.tracing.state.reach import reached


class Helper:
    """Looks names up where its library keeps them, as evaluators do."""

    def __init__(self):
        self.names = {"python": vars(builtins), "here": globals()}


class Registry(dict):
    """Keeps by class name what it is given, and makes something of what is taken out."""

    def __setitem__(self, key, value):
        super().__setitem__(str(type(key)), value)

    def __getitem__(self, key):
        return super().__getitem__(key)()


REGISTRY = Registry()


class Registered(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        REGISTRY[x] = list
        return self.b(self.a(x) + len(REGISTRY["made"]))


def test_containers_of_classes_of_their_own_are_left_as_they_were():
    dict.__setitem__(REGISTRY, "made", tuple)
    model = Registered()
    with preserved(model) as snapshot:
        model(torch.randn(2, 4))
        assert len(REGISTRY) == 2
        snapshot.restore()
        assert list(dict.items(REGISTRY)) == [("made", tuple)]
    capture(model, (torch.randn(2, 4),))
    assert list(dict.items(REGISTRY)) == [("made", tuple)]


def test_namespaces_are_never_emptied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.helper = Helper()
    vars(builtins)["made_up"] = 1
    try:
        with preserved(model):
            del vars(builtins)["made_up"]
        assert "made_up" not in vars(builtins)
    finally:
        vars(builtins).pop("made_up", None)
    assert capture(model, (torch.randn(2, 4),)).ops.ops


class Divided(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.captured = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(math.gcd(x.shape[1], 6)):
            x = self.a(x)
        return self.captured(x)


def test_a_capture_held_where_the_model_has_a_name_records_further_forms(monkeypatch):
    model = Divided()
    monkeypatch.setitem(globals(), "captured", capture(model, (torch.randn(2, 6, 4),)))
    x = torch.randn(2, 10, 4)
    torch.testing.assert_close(globals()["captured"](x), model(x))


def test_modules_are_told_from_others_whose_names_begin_so():
    assert all(map(is_foreign, ("torch.nn", "numpy", "abc")))
    assert not any(map(is_foreign, ("torchlike.nets", "numpyish", "abcd", "loggings")))


class Noting(nn.Module):
    def noted(self, x):
        return x

    def other(self, x, kept=None):
        return x

    def forward(self, x):
        return self.other(self.noted(x))


def test_what_a_method_comes_to_hold_after_a_look_is_found_by_the_next(monkeypatch):
    model, held, by_default = Noting(), [1], [2]

    def found():
        return {id(holder) for _, _, holder in reached(model).holders}

    assert found().isdisjoint(map(id, (held, by_default)))
    monkeypatch.setattr(Noting.noted, "held", held, raising=False)
    monkeypatch.setattr(Noting.other, "__defaults__", (by_default,))
    assert {id(held), id(by_default)} <= found()
    monkeypatch.undo()
    assert found().isdisjoint(map(id, (held, by_default)))


NAMED_LATER = [3]


def naming(self, x):
    return x, NAMED_LATER


def test_what_a_method_comes_to_name_after_a_look_is_found_by_the_next(monkeypatch):
    model = Noting()
    assert not any(holder is NAMED_LATER for _, _, holder in reached(model).holders)
    monkeypatch.setattr(Noting.noted, "__code__", naming.__code__)
    assert any(holder is NAMED_LATER for _, _, holder in reached(model).holders)
    monkeypatch.undo()
    assert not any(holder is NAMED_LATER for _, _, holder in reached(model).holders)


class Imports(nn.Module):
    """Takes a generator from a module that its forward imports, and holds what makes others."""

    def __init__(self):
        super().__init__()
        self.seeds, self.bits = np.random.SeedSequence(0), np.random.PCG64(0)

    def forward(self, x):
        import users_generators

        return x * users_generators.RNG.random()


def test_generators_are_reached_by_imports_of_a_forward_and_by_what_makes_them(monkeypatch):
    module = types.ModuleType("users_generators")
    module.RNG = random.Random(0)
    monkeypatch.setitem(sys.modules, "users_generators", module)
    found = dict(reached(Imports()).own_generators)
    assert found.keys() == {"seeds", "bits", "RNG of users_generators"}
    assert found["RNG of users_generators"] is module.RNG


OF_A_TABLE, OF_AN_OBJECT, OF_AN_OPERATOR, OF_A_BACKWARD = [0], [0], [0], [0]
"""Each is named by code alone that no name in the model's own leads to."""


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        OF_A_TABLE[0] += 1
        return grad


class Counter:
    def count(self, x):
        OF_AN_OBJECT[0] += 1
        return x * 2


@torch.library.custom_op("autopipe_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    OF_AN_OPERATOR[0] += 1
    return x.clone()


def count_backward(ctx, grad):
    OF_A_BACKWARD[0] += 1
    return grad


counted.register_autograd(count_backward)
COUNTING = {"counting": Counting}


class Leading(nn.Module):
    """Leads to what counts by a table, an object and an operator."""

    def __init__(self):
        super().__init__()
        self.linear, self.counter = nn.Linear(4, 4), Counter()

    def forward(self, x):
        x = self.counter.count(COUNTING["counting"].apply(self.linear(x)))
        return torch.ops.autopipe_tests.counted(x)


def test_code_in_tables_objects_and_operators_is_followed():
    found = frozenset().union(*(names for *_, names in reached(Leading()).files))
    assert found >= {"OF_A_TABLE", "OF_AN_OBJECT", "OF_AN_OPERATOR", "OF_A_BACKWARD"}


def test_what_it_counts_is_put_back():
    model, x = Leading(), torch.randn(4, 4, requires_grad=True)
    with preserved(model) as snapshot:
        model(x).sum().backward()
        assert (OF_A_TABLE, OF_AN_OBJECT, OF_AN_OPERATOR, OF_A_BACKWARD) == ([1],) * 4
        snapshot.restore()
    assert (OF_A_TABLE, OF_AN_OBJECT, OF_AN_OPERATOR, OF_A_BACKWARD) == ([0],) * 4
