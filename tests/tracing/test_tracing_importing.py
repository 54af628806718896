"""A capture is the first in its process to call what imports more of torch."""

from __future__ import annotations

import subprocess
import sys

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


MADE = (
    "x = torch.func.grad(lambda t: self.a(t).sin().sum())(x)",
    "x = checkpoint(self.a, x, use_reentrant=False)",
)

EACH = """
import os, sys, torch, autopipe.tracing

for code in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        exec(code)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, code
"""


def test_the_compiler_is_imported_as_it_would_be_outside() -> None:
    codes = [NET.replace("{made}", made) for made in MADE]
    done = subprocess.run([sys.executable, "-c", EACH, *codes], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
