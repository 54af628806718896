"""Pieces of batches and batches of pieces lie in memory as what they are of."""

import itertools

import pytest
import torch

from autopipe.tracing.inputs.layout import concatenated, copied, lying_as, lying_like


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_pieces_and_batches_keep_the_order_of_axes(order):
    value = torch.randn(4, 3, 2).permute(order)
    for axis in range(3):
        pieces = [lying_like(value, piece) for piece in value.split(1, axis)]
        for piece in pieces:
            assert piece.permute([*map(order.index, range(3))]).is_contiguous() or not piece.is_contiguous()
        joined = concatenated([lying_like(value, piece) for piece in value.split(2, axis)], axis)
        assert torch.equal(joined, value)
        assert joined.stride() == value.stride()


@pytest.mark.parametrize("n", [1, 2, 3])
def test_rows_of_a_turned_batch_are_no_more_contiguous_than_it_is(n):
    value = torch.randn(6, 7).t()
    assert not any(lying_like(value, piece).is_contiguous() for piece in value.split(n))


def test_what_is_not_dense_is_joined_as_torch_does():
    value = torch.randn(1, 3).expand(4, 3)
    joined = concatenated(value.split(2), 0)
    assert torch.equal(joined, value)
    assert joined.is_contiguous()


LAID = {
    "rows with gaps": lambda n: torch.randn(n, 10)[:, :6],
    "elements with gaps": lambda n: torch.randn(n, 12)[:, ::2],
    "turned": lambda n: torch.randn(6, n).t(),
    "turned, with gaps": lambda n: torch.randn(12, n).t()[:, ::2],
    "one row for all": lambda n: torch.randn(1, 6).expand(n, 6),
    "one element for a row": lambda n: torch.randn(n, 1).expand(n, 6),
    "one for all": lambda n: torch.randn(1, 1).expand(n, 6),
    "dense": lambda n: torch.randn(n, 6),
}


@pytest.mark.parametrize("name", LAID)
@pytest.mark.parametrize("n", [1, 4])
def test_copies_lie_as_what_they_are_of(name, n):
    value = LAID[name](n)
    copy = copied(value)
    assert torch.equal(copy, value)
    assert copy.stride() == value.stride() or n == 1
    assert copy.untyped_storage().data_ptr() != value.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", LAID)
def test_more_rows_lie_as_those_they_are_made_of(name):
    value = LAID[name](4)
    for rows in ([0, 1], [0, 1, 2, 3, 0, 1, 2]):
        made = lying_as(value[rows], value)
        assert torch.equal(made, value[rows])
        assert made.is_contiguous() is value.is_contiguous()
        assert [s == 0 for s in made.stride()] == [s == 0 for s in value.stride()]


def test_rows_made_of_a_single_one_do_not_lie_in_one_place():
    row = torch.randn(6, 1).t()
    made = lying_as(row[[0, 0, 0]], row)
    made[0] += 1
    assert torch.equal(made[1:], row[[0, 0]])
