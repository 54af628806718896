"""A capture is the first in its process to call what imports more of torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

NET = """
import sys
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
import autopipe

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        {made}
        return self.b(torch.tanh(x))

model, x = Net(), torch.randn(4, 4)
is_first = "torch._dynamo" not in sys.modules
captured = autopipe.capture(model, (x,))
assert is_first and "torch._dynamo" in sys.modules
torch.testing.assert_close(captured(x), model(x))
assert torch.equal(torch.compile(model.b, backend="eager")(x), model.b(x))
"""


@pytest.mark.parametrize(
    "made",
    [
        "x = torch.func.grad(lambda t: self.a(t).sin().sum())(x)",
        "x = checkpoint(self.a, x, use_reentrant=False)",
    ],
    ids=["derivative", "checkpoint"],
)
def test_the_compiler_is_imported_as_it_would_be_outside(made: str) -> None:
    code = NET.replace("{made}", made)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
