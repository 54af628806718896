"""What a model's code reaches is put back, and nothing else is touched."""

import builtins

import torch
from torch import nn

from autopipe.tracing import capture, preserved


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


class Noted(nn.Module):
    """Whose first call takes what is noted on its parameter, as layers of quantised weights do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.weight.scale, self.taken = torch.full((4, 1), 0.5), None

    def forward(self, x):
        if self.weight.scale is not None:
            self.taken, self.weight.scale, self.weight.seen = self.weight.scale, None, True
        return x @ (self.weight * self.taken)


def test_what_is_noted_on_parameters_is_as_it_was():
    model = nn.Sequential(Noted(), nn.ReLU(), Noted())
    scales = [model[i].weight.scale for i in (0, 2)]
    captured = capture(model, (torch.randn(4, 4),))
    for i, scale in zip((0, 2), scales, strict=True):
        assert model[i].weight.scale is scale
        assert not hasattr(model[i].weight, "seen")
    twin = nn.Sequential(Noted(), nn.ReLU(), Noted())
    x = torch.randn(4, 4)
    assert torch.equal(captured(x), twin(x))
