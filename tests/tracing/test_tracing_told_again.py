"""What is told once in a process, of code and of torch, is told anew where others have put theirs there."""

import math
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopipe.tracing import capture
from autopipe.tracing.calls.call import Call
from autopipe.tracing.code.attributes import names_of_open, spells_mode
from autopipe.tracing.patches.patches import applied
from autopipe.tracing.runs.assumptions import _functions_of_torch
from autopipe.tracing.state.namespaces import Spaces

FILE = """
from torch import nn


def helper(layer):
    return layer.width


class Net(nn.Module):
    def forward(self, x):
        return helper(self.layer)
"""


@pytest.fixture
def file():
    module = types.ModuleType("net_of_a_file")
    sys.modules[module.__name__] = module
    exec(FILE, vars(module))
    yield module
    del sys.modules[module.__name__]


def test_names_that_open_code_asks_for_are_those_of_the_code_that_is_there_now(file):
    classes = frozenset([file.Net])
    assert {"layer", "width"} <= names_of_open(classes)
    assert "depth" not in names_of_open(classes)
    assert not spells_mode(classes)
    exec("def helper(layer):\n    return vars(layer)['training'], layer.depth", vars(file))
    assert {"layer", "depth", "__dict__"} <= names_of_open(classes)
    assert "width" not in names_of_open(classes)
    assert spells_mode(classes)


def test_code_put_into_a_function_is_seen(file):
    classes = frozenset([file.Net])
    assert not spells_mode(classes)
    file.helper.__code__ = (lambda layer: vars(layer)["training"]).__code__
    assert spells_mode(classes)
    assert "vars" in names_of_open(classes)


def test_functions_of_torch_have_the_names_that_they_have_now(monkeypatch):
    def own(x):
        return x

    gelu, called = functional.gelu, [Call("call_function", own), Call("call_function", functional.gelu)]
    assert _functions_of_torch(called) == [("torch.nn.functional", "gelu")]
    monkeypatch.setattr(functional, "gelu", own)
    monkeypatch.setattr(functional, "its_gelu", gelu, raising=False)
    assert _functions_of_torch(called) == [
        ("torch.nn.functional", "gelu"),
        ("torch.nn.functional", "its_gelu"),
    ]


def test_what_is_patched_is_made_once_and_anew_where_others_put_theirs(monkeypatch):
    own = math.sqrt

    def patched():
        with applied(()):
            return math.sqrt

    first = patched()
    assert first is not own
    assert first is patched()
    assert math.sqrt is own
    with applied(()):
        outer = math.sqrt
        inner = patched()  # of what stands there now, so that both are asked
        assert outer is first
        assert inner is not first
        assert math.sqrt is outer
    monkeypatch.setattr(math, "sqrt", lambda x: 7.0)
    assert patched() is not first
    assert patched()(2.0) == 7.0


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) / math.sqrt(x.shape[1])
        return x


def test_captures_that_take_the_same_patches_follow_the_sizes_of_each():
    for n in (3, 5):
        model = Scaled()
        found = capture(model, (torch.randn(2, n, 4),))
        for shape in ((2, n, 4), (2, 7, 4)):
            x = torch.randn(shape)
            torch.testing.assert_close(found(x), model(x))


def test_namespaces_are_read_again_where_a_value_has_taken_the_place_of_another(file):
    spaces = Spaces(lambda value: isinstance(value, frozenset))
    file.first, file.second = frozenset("a"), 2

    def found():
        return {name: value for space, name, value in spaces.found() if space is vars(file)}

    assert found() == {"first": frozenset("a")}
    last = spaces.found()
    assert spaces.found() is last
    file.first = frozenset("b")
    assert found() == {"first": frozenset("b")}
    file.first = 1
    assert found() == {}
    file.third = frozenset("c")
    assert found() == {"third": frozenset("c")}
