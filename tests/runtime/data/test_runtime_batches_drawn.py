"""Batches that accumulate() draws from an iterable: what may be the same object for all of them."""

import collections.abc

import numpy as np
import pytest
import torch

from autopipe.errors import InputError
from autopipe.runtime.data.intake import drawn
from autopipe.runtime.data.microbatch import WHOLE_BYTES

SMALL, LARGE = (4, 3), (WHOLE_BYTES // 4, 3)


class Items(collections.abc.Sequence):
    """A sequence that makes each of its two items as it is asked for it."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return self.make(range(2)[i])


def as_items(make):
    return Items(make)


def as_generator(make):
    return (make(i) for i in range(2))


@pytest.mark.parametrize("ways", [as_items, as_generator])
@pytest.mark.parametrize("kind", [lambda x: {"x": x}, lambda x: [x], lambda x: ({"x": [x]},)])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("write", [torch.Tensor.fill_, lambda b, v: np.copyto(b.numpy(), v)])
def test_batches_in_one_buffer_are_refused(ways, kind, shape, write):
    buffer = torch.zeros(shape)

    def make(i):
        write(buffer, i + 1)
        return kind(buffer)

    with pytest.raises(InputError, match=r"batch 0 of .* was overwritten"):
        drawn(ways(make))


@pytest.mark.parametrize("ways", [as_items, as_generator])
@pytest.mark.parametrize("write", [torch.Tensor.fill_, lambda b, v: np.copyto(b.numpy(), v)])
def test_a_buffer_that_is_given_the_values_it_has_is_none_of_several_batches(ways, write):
    mask = torch.zeros(SMALL)

    def make(i):
        write(mask, 1)
        return {"x": torch.full(SMALL, i), "mask": mask}

    assert [int(batch["x"][0, 0]) for batch in drawn(ways(make))] == [0, 1]


@pytest.mark.parametrize("ways", [as_items, as_generator])
@pytest.mark.parametrize(("one", "at"), [({}, "x"), ([None], 0)])
def test_one_mapping_or_list_may_hold_each_batch_in_turn(ways, one, at):
    def make(i):
        one[at] = torch.full(SMALL, i)
        return one

    assert [int(batch[at][0, 0]) for batch in drawn(ways(make))] == [0, 1]
