"""What a forward writes into its arguments: told from what is put back, and never lost between two copies."""

import dataclasses
import types
from collections import UserDict, deque

import numpy as np
import pytest
import torch
from torch import nn

from autopipe.errors import CaptureError, InputError, ModelError
from autopipe.tracing import capture
from autopipe.tracing.inputs.mutable import holders


class Bare:
    """An object of which a copy of the arguments takes the very same."""

    def __init__(self):
        self.items, self.named, self.inner = [], {}, UserDict()
        self.members, self.queue = set(), deque([1, 2])
        self.numbers, self.text = np.arange(3.0), bytearray(b"text")


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    h: torch.Tensor | None = None


class Titled(dict):
    """A dict with an attribute beside its items."""


class Net(nn.Module):
    def __init__(self, write, fails=False):
        super().__init__()
        self.layer, self.write, self.fails = nn.Linear(4, 4), write, fails

    def forward(self, x, given, other=None):
        h = self.layer(x)
        self.write(given, h)
        if self.fails:
            raise RuntimeError("no more")
        return h if other is None else h + other["x"]


def content(bare):
    return {k: v.tolist() if isinstance(v, np.ndarray) else repr(v) for k, v in vars(bare).items()}


WRITES = {
    "an attribute": lambda bare, h: setattr(bare, "h", h),
    "an attribute that is gone": lambda bare, h: delattr(bare, "items"),
    "a list": lambda bare, h: bare.items.append(h),
    "a dict": lambda bare, h: bare.named.update(h=h),
    "a mapping": lambda bare, h: bare.inner.update(h=h),
    "a set": lambda bare, h: bare.members.add(h),
    "a deque": lambda bare, h: bare.queue.popleft(),
    "an array": lambda bare, h: bare.numbers.__iadd__(1),
    "bytes": lambda bare, h: bare.text.extend(b"more"),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("fails", [False, True])
def test_what_copies_have_in_common_is_refused_where_it_is_written_and_put_back(name, fails):
    bare = Bare()
    before = content(bare)
    with pytest.raises(ModelError if fails else CaptureError, match="no more" if fails else "argument given"):
        capture(Net(WRITES[name], fails), (torch.randn(2, 4), bare))
    assert content(bare) == before


@pytest.mark.parametrize("given", [set(), deque(), bytearray(b"a"), np.zeros(2)])
def test_arguments_that_are_written_themselves(given):
    def write(given, h):
        if isinstance(given, np.ndarray):
            given += 1
        else:
            (given.add if isinstance(given, set) else given.append)(1)

    with pytest.raises(CaptureError, match="writes into its argument given"):
        capture(Net(write), (torch.randn(2, 4), given))
    assert len(given) == {set: 0, deque: 0, bytearray: 1, np.ndarray: 2}[type(given)]
    assert not any(given) or given == b"a"


def test_slots_and_attributes_beside_items_are_written_for_a_caller():
    def write(given, h):
        given["slotted"].h = h
        given.title = h + 1

    def made():
        return Titled(slotted=Slotted(torch.ones(2, 4)))

    model = Net(write)
    found = capture(model, (torch.randn(2, 4), made()))
    x, expected, given = torch.randn(3, 4), made(), made()
    model(x, expected)
    found(x, given)
    assert torch.equal(given["slotted"].h, expected["slotted"].h)
    assert torch.equal(given.title, expected.title)


def test_one_container_in_two_places():
    def write(given, h):
        given["x"] = h

    x, held = torch.randn(2, 4), {"x": torch.ones(2, 4)}
    with pytest.raises(InputError, match="given and other are one object"):
        capture(Net(write), (x, held, held))
    found = capture(Net(write), (x, held, {**held}))
    with pytest.raises(InputError, match="given and other are one object"):
        found(x, held, held)
    assert torch.equal(held["x"], torch.ones(2, 4))


def test_one_container_in_two_places_may_be_read():
    model = Net(lambda given, h: None)
    x, held = torch.randn(2, 4), {"x": torch.ones(2, 4)}
    torch.testing.assert_close(capture(model, (x, held, held))(x, held, held), model(x, held, held))


def test_one_container_in_two_places_that_the_model_relies_on():
    def write(given, h):
        given["x"] = h

    with pytest.raises(InputError, match=r"KeyError.*given and other are one object"):
        capture(Net(write), (torch.randn(2, 4), (given := {}), given))


def test_an_object_in_two_places_that_stays_one_is_not_to_blame():
    given = Bare()
    with pytest.raises(ModelError, match="no more") as raised:
        capture(Net(lambda given, h: None, fails=True), (torch.randn(2, 4), given, given))
    assert "one object" not in str(raised.value)


def test_objects_that_all_know_one_another_are_looked_into_once_from_near():
    ring = [types.SimpleNamespace() for _ in range(12)]
    for one in ring:
        vars(one).update({f"other_{i}": other for i, other in enumerate(ring)})
    found = [*holders({"given": ring[0]})]
    assert {id(h.owner) for h in found} == set(map(id, ring))
    assert len(found) < 1000
