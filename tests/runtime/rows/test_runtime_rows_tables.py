"""Tables of whole numbers that say which row is whose: what was found of rows holds for what is in them."""

import copy

import pytest
import torch
from splitting import split_by_layers
from torch import nn

from autopipe.errors import InputError


class Ordered(nn.Module):
    """Takes rows, or features, in the order of a table."""

    def __init__(self, take):
        super().__init__()
        self.a, self.b, self.take = nn.Linear(4, 4), nn.Linear(4, 4), take
        self.register_buffer("table", torch.arange(32))
        self.register_buffer("counted", torch.ones(32, dtype=torch.bool))

    def forward(self, x):
        return self.take(self, self.b(self.a(x).tanh()))


class Kept(nn.Module):
    """Stays whole: its code asks what its data holds."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(32))

    def forward(self, h):
        if not bool(h.isfinite().all()):
            raise ValueError("not finite")
        return h[self.table[: len(h)]]


class OrderedInside(Ordered):
    """The same in a layer."""

    def __init__(self):
        super().__init__(lambda self, h: self.kept(h))
        self.kept = Kept()


def sliced(self, h):
    return h[self.table[: len(h)]]


def narrowed(self, h):
    return h.index_select(0, self.table.narrow(0, 0, h.shape[0]))


def counted_up(self, h):
    return h[self.table[torch.arange(len(h))]]


def masked(self, h):
    return h * self.counted[: len(h), None]


def of_features(self, h):
    return h[:, self.table[: h.shape[1]]]


def of_positions(self, h):
    return h + self.table[:4]


def swap(model):
    for module in model.modules():
        if "table" in module._buffers:
            module.table[:2] = torch.tensor([1, 0])
            if hasattr(module, "counted"):
                module.counted[1] = False


def trained(make):
    """A runtime after a step, its model and a twin of that."""
    torch.manual_seed(0)
    model = make().double()
    twin, x = copy.deepcopy(model), torch.randn(6, 4, dtype=torch.float64)
    pipe = split_by_layers(model, 2, (x,), n_microbatches=3)
    runtime = pipe.runtime(loss_fn=lambda y, target: (y - target).square().mean())
    runtime.step(x, target=x)
    return runtime, model, twin, x


@pytest.mark.parametrize("take", [sliced, narrowed, counted_up, masked, None])
def test_a_table_by_which_rows_are_taken_is_not_written_anew_unseen(take):
    runtime, model, _, x = trained(lambda: Ordered(take) if take else OrderedInside())
    model.load_state_dict(model.state_dict())
    runtime.step(x, target=x)
    swap(model)
    with pytest.raises(InputError, match=r"what .*(table|counted) holds changed after the capture"):
        runtime.step(x, target=x)


@pytest.mark.parametrize(
    ("take", "n"), [(sliced, 1), (counted_up, 1), (masked, 1), (None, 1), (of_features, 3), (of_positions, 3)]
)
def test_a_table_may_be_written_anew_where_no_rows_of_several_microbatches_are_taken_by_it(take, n):
    runtime, model, twin, x = trained(lambda: Ordered(take) if take else OrderedInside())
    swap(model)
    swap(twin)
    model.zero_grad()
    loss = runtime.step(x, target=x, n_microbatches=n).loss.item()
    expected = (twin(x) - x).square().mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
