"""What code that goes by data makes of the rows beside is told of where little comes of it."""

import pytest
import torch
from rows_models import captured_mixing, decided
from torch import nn

from autopipe.tracing.rows import row_questions
from autopipe.tracing.rows.results import COARSE


def near_enough(x):
    """Roots by Newton's iteration, until all are near enough."""
    of = x.abs() + 0.5
    root = of
    while (root * root - of).abs().max() > 1e-2:
        root = (root + of / root) / 2
    return root


def balanced(x):
    """Rows and columns that sum to one, nearly."""
    shares = x[..., :4, :].exp()
    for _ in range(50):
        shares = shares / shares.sum(-1, keepdim=True)
        shares = shares / shares.sum(-2, keepdim=True)
        if (shares.sum(-1) - 1).abs().max() < 1e-2:
            break
    return x + shares.sum(-2, keepdim=True) + shares[..., :1, :]


def settled(x):
    """A fixed point, nearly."""
    found = torch.zeros_like(x)
    for _ in range(60):
        new = (found.flip(-1) * 0.8 + x).tanh()
        if (new - found).norm() < 1e-2 * new.norm():
            break
        found = new
    return found


def halved_until_bounded(x):
    """What is cut off there is at the bound exactly once it is halved."""
    x = x.clamp(-1, 1)
    while (x.abs() > 0.5).any():
        x = x * 0.5
    return x


def halved_from_beyond(x):
    x = x.clamp(-2, 2)
    while (x.abs() > 1).any():
        x = x * 0.5
    return x


def slopes_until_bounded(x):
    slopes = 1 - x.tanh().square()
    while (slopes > 0.1).any():
        slopes = slopes / 2
    return x * slopes


def slightly_smaller(x):
    x = x.tanh()
    while (x.abs() > 0.95).sum() > 3:
        x = x * 0.97
    return x


def near_enough_by_row(x):
    of = x.abs() + 0.5
    root, is_far = of, torch.ones(len(x), *[1] * (x.ndim - 1), dtype=torch.bool)
    while is_far.any():
        root = torch.where(is_far, (root + of / root) / 2, root)
        is_far = (root * root - of).abs().flatten(1).amax(-1).view(is_far.shape) > 1e-2
    return root


def halved_by_row(x):
    x = x.clamp(-2, 2)
    while (is_far := (x.abs() > 1).flatten(1).any(-1)).any():
        x = torch.where(is_far.view(-1, *[1] * (x.ndim - 1)), x * 0.5, x)
    return x


def so_often(x):
    root = of = x.abs() + 0.5
    for _ in range(int(torch.tensor(9.0).item())):
        root = (root + of / root) / 2
    return root


OF_ALL = [
    near_enough, balanced, settled, halved_until_bounded, halved_from_beyond, slopes_until_bounded,
    slightly_smaller,
]  # fmt: skip
OF_ROWS = [near_enough_by_row, halved_by_row, so_often]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("does", [*OF_ALL, *OF_ROWS])
def test_turns_that_end_for_all_rows_at_once_are_told_of(does, dtype, caplog):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Layer(does), nn.Linear(4, 4)).to(dtype)
    found = captured_mixing(model, torch.rand(4, 6, 4, dtype=dtype))
    assert bool(found.always or found.nearly) == (does in OF_ALL), found


class Layer(nn.Module):
    def __init__(self, does):
        super().__init__()
        self.weight, self.does = nn.Parameter(torch.ones(4)), does

    def forward(self, x):
        return self.does(x) * self.weight


@pytest.mark.parametrize("does", [near_enough, near_enough_by_row])
def test_a_step_says_where_rows_hang_a_little_on_others(does, caplog):
    model, x, runtime = decided(does, 4)
    runtime.step(x, n_microbatches=1)
    loss = runtime.step(x).loss.as_subclass(torch.Tensor)
    torch.testing.assert_close(loss, model(x).square().mean().detach(), rtol=0.05, atol=0)
    said = [r.getMessage() for r in caplog.records if "hangs on the rows beside it" in r.getMessage()]
    assert len(said) == (does is near_enough)
    assert all("1 at " in each and ".py:" in each and "n_microbatches=1" in each for each in said)


def test_what_is_far_off_is_refused_and_not_called_little(monkeypatch):
    torch.manual_seed(0)
    x = torch.rand(4, 6, 4)
    model = nn.Sequential(nn.Linear(4, 4), Layer(near_enough), nn.Linear(4, 4))
    assert not captured_mixing(model, x).always
    monkeypatch.setattr(row_questions, "COARSE", {dtype: 1e-3 * level for dtype, level in COARSE.items()})
    found = captured_mixing(model, x)
    assert found.always
    assert not found.nearly
