"""Opening a leaf of a capture: the graph that capturing with it open gives, with less to find out."""

import torch
from torch import nn

from autopipe.tracing import capture
from autopipe.tracing.sizes import trials


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return x + self.b(self.a(x).relu())


class Patches(nn.Module):
    """Images whose sides must be equal, and whose channels are fixed."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 4, 4, stride=4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x @ x.transpose(2, 3) + x.flatten(2).unflatten(2, (x.shape[2], x.shape[2]))


def test_an_opened_leaf_gives_the_graph_that_capturing_it_open_gives(monkeypatch):
    model, x = Patches(), torch.randn(2, 3, 32, 32)
    captured = capture(model, (x,))
    runs = []
    replay = trials.replay
    monkeypatch.setattr(trials, "replay", lambda *a: runs.append(0) or replay(*a))
    afresh = capture(model, (x,), open=["blocks.2"])
    n_afresh = len(runs)
    opened = captured.open("blocks.2")
    assert len(runs) - n_afresh < n_afresh
    assert opened.ops == afresh.ops
    assert opened.variation.fixed == afresh.variation.fixed
    assert {"blocks_2_a", "blocks_2_b", "blocks_1"} <= {op.name for op in opened.ops.ops}
    torch.testing.assert_close(opened(torch.ones(3, 3, 40, 40)), model(torch.ones(3, 3, 40, 40)))
