"""What a model's code reaches is put back, and nothing else is touched."""

import builtins

import torch
from torch import nn

from autopipe.tracing import capture, preserved


class Helper:
    """Looks names up where its library keeps them, as evaluators do."""

    def __init__(self):
        self.names = {"python": vars(builtins), "here": globals()}


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
