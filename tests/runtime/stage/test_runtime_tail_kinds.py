"""What a tail joins lies as the kind of call has it: of one kind in blocks, of another row by row."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopipe


class Views(nn.Module):
    """A loss over two views of each row: one behind the other, or one of all rows ahead of the next."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
        self.other = nn.Linear(4, 4)

    def forward(self, x, order: int = 1):
        x = self.body(x)
        views = F.normalize(torch.stack([x, self.other(x)], order).flatten(0, 1), dim=-1)
        alike = (views @ views.T).logsumexp(1)
        return (alike * torch.arange(1, 1 + len(alike)).to(alike)).mean()


@pytest.mark.parametrize("first", [0, 1])
def test_views_lie_as_each_kind_of_call_has_them(first):
    torch.manual_seed(0)
    model, x = Views().double(), torch.randn(6, 4).double()
    pipe = autopipe.split(model, 2, (x,), {"order": first}, costs="estimated", n_microbatches=3)
    runtime = pipe.runtime()
    for order in (first, 1 - first, first):
        torch.testing.assert_close(runtime.step(x, order=order).loss, model(x, order), rtol=1e-12, atol=0)
