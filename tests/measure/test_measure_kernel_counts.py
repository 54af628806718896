"""Kernels, live bytes and saved storages are what can be counted by hand."""

from __future__ import annotations

import gc

import torch
from torch import nn

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
