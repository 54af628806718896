"""Buffers that a forward makes anew in another size, as tables of places are."""

import copy

import pytest
import torch
from torch import nn

import autopipe
from autopipe.errors import CaptureError


class Grid(nn.Module):
    """A head that makes its grid anew where the image has another size."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)
        self.register_buffer("grid", torch.zeros(1), persistent=False)

    def forward(self, x):
        y = self.head(torch.tanh(self.body(x)))
        if self.grid.shape[-2:] != y.shape[-2:]:
            rows, columns = (torch.arange(n, dtype=y.dtype) for n in y.shape[-2:])
            self.grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
        return y + self.grid


class Registered(nn.Module):
    """Registers its table in its first call."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        if not hasattr(self, "shift"):
            self.register_buffer("shift", torch.linspace(0, 1, 2, dtype=x.dtype)[:, None, None], False)
        return self.head(torch.tanh(self.body(x))) + self.shift


@pytest.mark.parametrize("cls", [Grid, Registered])
@pytest.mark.parametrize("calls", [False, True], ids=["", "called itself between"])
def test_a_table_made_anew_is_no_state(cls, calls, caplog):
    torch.manual_seed(0)
    model = cls().double()
    twin = copy.deepcopy(model)

    def images(seed, size):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(4, 3, size, size, dtype=torch.float64, generator=generator)

    pipe = autopipe.split(model, 2, (images(0, 5),), costs="estimated", n_microbatches=2)
    assert "which stages do not set" in caplog.text
    rt = pipe.runtime(loss_fn=lambda out, _: out.square().mean())
    for seed, size in enumerate((5, 7, 5)):
        x = images(seed, size)
        if calls:
            model(x)
        for p in (*model.parameters(), *twin.parameters()):
            p.grad = None
        expected = twin(x).square().mean()
        expected.backward()
        assert abs(rt.step(x).loss.item() - expected.item()) < 1e-12
        torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


class OfData(nn.Module):
    """Keeps what the last call made, with its rows."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(1), persistent=False)

    def forward(self, x):
        y = self.head(torch.tanh(self.body(x)))
        y = y + self.last.mean()
        self.last = y.detach()
        return y


class Growing(nn.Module):
    """Has one place more in its table after each call."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.table = torch.zeros(len(self.table) + 1)
        return self.head(torch.tanh(self.body(x))) * len(self.table)


class Persistent(Grid):
    """A grid that the state_dict has."""

    def __init__(self):
        super().__init__()
        self._non_persistent_buffers_set.clear()


@pytest.mark.parametrize(("cls", "shape"), [(OfData, (3, 4)), (Growing, (3, 4)), (Persistent, (2, 3, 5, 5))])
def test_a_buffer_that_is_state_is_refused(cls, shape):
    with pytest.raises(CaptureError, match="replaces the buffer"):
        autopipe.split(cls(), 2, (torch.randn(shape),), costs="estimated")
