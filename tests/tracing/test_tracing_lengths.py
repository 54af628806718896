"""Sizes of intermediate values that are sizes of an input are read there."""

import pytest
import torch
from torch import nn

from autopipe.errors import InputError
from autopipe.tracing import capture


class Positions(nn.Module):
    """Positions from the embedded tokens' length; ``trim`` cuts rows of padding off inside a leaf first."""

    def __init__(self, trim=False):
        super().__init__()
        self.embed, self.positions = nn.Embedding(11, 8), nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.trim = Trim() if trim else nn.Identity()

    def forward(self, ids, context=None):
        h = self.trim(self.embed(ids))
        if context is not None:
            h = h + self.embed(context).mean(1, keepdim=True)
        h = h + self.positions(torch.arange(h.shape[1], device=ids.device))
        for block in self.blocks:
            h = block(h)
        return h


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, h):
        return h + self.out(self.inner(h).relu())


class Trim(nn.Module):
    """Drops the positions that no row uses: those whose values are all zero."""

    def forward(self, h):
        return h[:, : int(h.abs().sum((0, 2)).ne(0).sum())]


class Scaled(nn.Embedding):
    """An embedding of its own kind, which capture keeps whole and knows nothing of."""

    def forward(self, ids):
        return super().forward(ids) * 2


def sources(captured):
    return {
        n.args[0].name for n in captured.graphs[True].nodes if n.op == "call_method" and n.target == "size"
    }


@pytest.mark.parametrize("embedding", [nn.Embedding, Scaled])
def test_the_length_of_embedded_tokens_is_that_of_the_tokens(embedding):
    model = Positions()
    model.embed = embedding(11, 8)
    captured = capture(model, (torch.randint(1, 11, (2, 9)),))
    assert sources(captured) == {"ids"}
    assert captured.ops.by_name["arange"].is_movable
    assert not any(b == "size" for a, b in captured.ops.edges if a == "embed")
    longer = torch.randint(1, 11, (3, 14))
    torch.testing.assert_close(captured(longer), model(longer))


def test_a_length_that_data_decides_is_read_where_it_is():
    model = Positions(trim=True).eval()
    with torch.no_grad():
        model.embed.weight[0] = 0
    captured = capture(model, (torch.randint(1, 11, (2, 9)),))
    assert "ids" not in sources(captured)
    padded = torch.randint(1, 11, (2, 9))
    padded[:, 6:] = 0
    torch.testing.assert_close(captured(padded), model(padded))


def test_inputs_of_one_length_at_capture_stay_apart():
    model = Positions()
    captured = capture(model, (torch.randint(1, 11, (2, 9)), torch.randint(1, 11, (2, 9))))
    assert "ids" not in sources(captured)
    for lengths in ((9, 5), (6, 9)):
        given = [torch.randint(1, 11, (2, n)) for n in lengths]
        torch.testing.assert_close(captured(*given), model(*given))


def test_a_check_holds_for_each_of_the_inputs_that_were_of_one_length():
    class Branches(Positions):
        def forward(self, ids, context):
            return super().forward(ids, context) * (2 if context.shape[1] > 4 else 1)

    model = Branches()
    captured = capture(model, (torch.randint(1, 11, (2, 9)), torch.randint(1, 11, (2, 9))))
    short = torch.randint(1, 11, (2, 9)), torch.randint(1, 11, (2, 3))
    with pytest.raises(InputError, match=r"at seq = 3"):
        captured(*short)
    other = torch.randint(1, 11, (2, 8)), torch.randint(1, 11, (2, 12))
    torch.testing.assert_close(captured(*other), model(*other))
