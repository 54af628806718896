"""Modules, weights and buffers are listed as torch's own generators give them, and found by these names."""

import pytest
import torch
from torch import nn

from autopipe.tracing.members import buffers_in, modules_in, parameters_in, registered, submodule


class Tied(nn.Module):
    """One layer at two places, one weight under two names, places without a layer, weight or buffer."""

    def __init__(self):
        super().__init__()
        layer = nn.Linear(4, 4)
        self.blocks = nn.ModuleDict({"a": nn.Sequential(layer, nn.BatchNorm1d(4)), "b": nn.Sequential(layer)})
        self.head, self.none = nn.Linear(4, 4, bias=False), None
        self.head.weight = layer.weight
        self.register_module("nothing", None)
        self.register_buffer("table", None)
        self.register_buffer("other", self.blocks["a"][1].running_mean)


class Own(nn.Module):
    """Says itself what lies in it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        yield f"{prefix}mine", self.layer.weight

    def named_buffers(self, prefix="", recurse=True, remove_duplicate=True):
        yield f"{prefix}table", self.layer.bias


@pytest.mark.parametrize("is_once", [True, False])
@pytest.mark.parametrize("prefix", ["", "net.0"])
@pytest.mark.parametrize(
    "make", [Tied, Own, lambda: nn.Sequential(Tied(), Own(), torch.jit.script(nn.Linear(2, 2)))]
)
def test_members_are_those_that_torch_names_in_its_order(make, prefix, is_once):
    model = make()
    for ours, name in ((modules_in, "modules"), (parameters_in, "parameters"), (buffers_in, "buffers")):
        expected = [*getattr(model, f"named_{name}")(prefix=prefix, remove_duplicate=is_once)]
        found = ours(model, prefix, is_once=is_once)
        assert [n for n, _ in found] == [n for n, _ in expected]
        assert all(a is b for (_, a), (_, b) in zip(found, expected, strict=True))


class Handed(nn.Module):
    """Gives a function in the place of a layer or weight that it is asked for."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4))])
        self.scale = nn.Parameter(torch.ones(4))

    def __getattr__(self, name):
        found = super().__getattr__(name)
        return lambda *given: found if not given else found(*given)


class Behind(Handed):
    """Has something of its own under the name of its layers."""

    layers = property(lambda self: ("first", "second"))


@pytest.mark.parametrize(
    "make", [Tied, Handed, Behind, lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2)))]
)
def test_members_are_found_whatever_a_class_gives_under_their_names(make):
    model = nn.Sequential(make(), make())
    assert all(submodule(model, path) is module for path, module in modules_in(model, is_once=False))
    for path, tensor in [*parameters_in(model, is_once=False), *buffers_in(model, is_once=False)]:
        assert registered(model, path).equal(tensor)
    for wrong in ("2", "0.none", "0.nothing", "0.layers.7"):
        with pytest.raises(AttributeError):
            submodule(model, wrong)
