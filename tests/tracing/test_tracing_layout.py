"""Pieces of batches and batches of pieces lie in memory as what they are of."""

import itertools

import pytest
import torch

from autopipe.tracing.inputs.layout import concatenated, lying_like


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_pieces_and_batches_keep_the_order_of_axes(order):
    value = torch.randn(4, 3, 2).permute(order)
    for axis in range(3):
        pieces = [lying_like(value, piece) for piece in value.split(1, axis)]
        for piece in pieces:
            assert piece.permute([*map(order.index, range(3))]).is_contiguous()
        joined = concatenated([lying_like(value, piece) for piece in value.split(2, axis)], axis)
        assert torch.equal(joined, value)
        assert joined.stride() == value.stride()


def test_what_is_not_dense_is_joined_as_torch_does():
    value = torch.randn(1, 3).expand(4, 3)
    joined = concatenated(value.split(2), 0)
    assert torch.equal(joined, value)
    assert joined.is_contiguous()
