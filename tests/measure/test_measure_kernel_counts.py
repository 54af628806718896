"""Kernels, live bytes and saved storages are what can be counted by hand."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopipe.measure.kernel_counts import Counter, Saved


def test_flops_and_bytes_of_a_product() -> None:
    a, b = torch.ones(4, 8), torch.ones(8, 2)
    with Counter() as counter:
        a @ b
    assert counter.kernels.n == 1
    assert counter.kernels.flops == 2 * 4 * 8 * 2
    assert counter.kernels.bytes == counter.kernels.matrix_bytes == 4 * (32 + 16 + 8)
    assert counter.kernels.dtype == "float32"


def test_views_move_nothing() -> None:
    x = torch.ones(4, 8)
    with Counter() as counter:
        x.view(8, 4).transpose(0, 1)[0].detach()
    assert counter.kernels.n == 0
    assert counter.live_bytes == 0


def test_an_expanded_tensor_is_read_where_it_lies() -> None:
    x = torch.ones(1, 8).expand(1000, 8)
    with Counter() as counter:
        x.sum()
    assert counter.kernels.bytes == 8 * 4 + 4


TABLE, IDS, ROWS = torch.ones(1000, 8), torch.tensor([3, 7, 7]), torch.ones(3, 8)
EACH = IDS[:, None].expand(3, 8)
LOOKED_UP = {
    "embedding": lambda: F.embedding(IDS, TABLE),
    "bag": lambda: F.embedding_bag(IDS, TABLE, IDS.new_zeros(1)),
    "index_select": lambda: TABLE.index_select(0, IDS),
    "index": lambda: TABLE[IDS],
    "gather": lambda: TABLE.gather(0, EACH),
    "take": lambda: TABLE.take(IDS),
}
WRITTEN_IN = {
    "index_add_": lambda table: table.index_add_(0, IDS, ROWS),
    "index_copy_": lambda table: table.index_copy_(0, IDS, ROWS),
    "scatter_add_": lambda table: table.scatter_add_(0, EACH, ROWS),
    "scatter_": lambda table: table.scatter_(0, EACH, 1.0),
    "index_put_": lambda table: table.index_put_((IDS,), ROWS, accumulate=True),
}


@pytest.mark.parametrize("name", LOOKED_UP)
def test_of_a_table_the_places_looked_up_are_read(name: str) -> None:
    with Counter() as counter:
        LOOKED_UP[name]()
    rows, ids = 3 * 8 * 4, 3 * 8
    assert ids < counter.kernels.bytes <= 2 * rows + 6 * ids


@pytest.mark.parametrize("name", WRITTEN_IN)
def test_of_a_table_the_places_written_are_read_and_written(name: str) -> None:
    table = TABLE.clone()
    with Counter() as counter:
        WRITTEN_IN[name](table)
    assert 3 * 8 * 4 * 2 < counter.kernels.bytes <= 3 * 8 * 4 * 3 + 3 * 8


def test_a_gradient_of_a_table_is_written_whole() -> None:
    table = TABLE.clone().requires_grad_()
    out = F.embedding(IDS, table)
    with Counter() as counter:
        out.backward(ROWS)
    assert counter.kernels.bytes >= TABLE.nbytes


def test_a_masked_write_may_be_anywhere() -> None:
    table = TABLE.clone()
    with Counter() as counter:
        table.index_put_((table[:, 0] > 2,), torch.ones(()))
    assert counter.kernels.bytes >= 2 * TABLE.nbytes


def test_what_is_overwritten_is_not_read() -> None:
    x = torch.ones(8)
    with Counter() as counter:
        x.zero_(), x.copy_(torch.ones(8).mul_(2)), x.fill_(3.0)
    assert counter.kernels.bytes == 32 + 32 + 64 + 64 + 32


def test_live_bytes_fall_when_tensors_die() -> None:
    with Counter() as counter:
        x = torch.ones(100)
        y = x * 2
        assert counter.live_bytes == 800
        del x
        gc.collect()
        assert counter.live_bytes == 400
        z = y.add_(1)
        assert counter.live_bytes == 400
        assert counter.reset_peak() == 400
        del y, z
        assert (counter.live_bytes, counter.peak_bytes) == (0, 400)


def test_saved_storages_once_and_no_parameters() -> None:
    layer, x = nn.Linear(8, 8), torch.ones(4, 8)
    saved = Saved(p.untyped_storage()._cdata for p in layer.parameters())
    with saved():
        y = layer(x)
        (y * y).sum()
    assert sum(saved.storages.values()) == x.nbytes + y.nbytes
