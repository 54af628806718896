"""Calls that run again take their arguments, whatever these lie in, from one list of values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.tracing.calls.call import Call, Recording
from autopipe.tracing.calls.places import Places
from autopipe.tracing.inputs.structure import flatten
from autopipe.tracing.sizes.rerun import replay

A, B = Call("placeholder", "a"), Call("placeholder", "b")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ((), ()),
        ((A,), (1,)),
        ((B, 3, A, A), (2, 3, 1, 1)),
        (([A, 3],), ([1, 3],)),
        (((A, (B, slice(None, A))), {"k": B}), ((1, (2, slice(None, 1))), {"k": 2})),
        ((A, (3, slice(2), None), slice(1, 2)), (1, (3, slice(2), None), slice(1, 2))),
        (([3], {"k": 4}), ([3], {"k": 4})),
    ],
)
def test_arguments_are_those_of_calls_and_constants(given: Any, taken: Any) -> None:
    places = Places([A, B])
    take = places.taking(given)
    assert take([1, 2, *places.constants]) == taken


def test_lists_and_dicts_are_new_each_time() -> None:
    places = Places([A])
    take = places.taking(([3], {"k": [4]}))
    for _ in range(2):
        rows, named = take([None, *places.constants])
        assert (rows, named) == ([3], {"k": [4]})
        rows.append(0)
        named["k"].append(0)


class Inner(nn.Module):
    """Has a property where a module of that name lies."""

    half = property(lambda self: self._modules["half"])

    def __init__(self) -> None:
        super().__init__()
        self.register_module("other", nn.Linear(2, 2))
        self._modules["half"] = nn.Linear(2, 1)


def test_a_recording_runs_again_with_other_modules_in_their_places() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), Inner())
    x = Call("placeholder", "x")
    calls = [x]
    for path in ("0.0", "1.other", "1.half"):
        calls.append(Call("call_module", path, (calls[-1],), path=path))
    joined = Call("call_function", torch.cat, ([calls[-1], x],), {"dim": 1})
    calls += [joined, Call("output", "output", ((joined,),))]
    form = Recording(False, calls, flatten((0,))[1], [], {})

    def check(data: Tensor) -> None:
        (found,) = replay(model, form, {"x": data}, torch.device("cpu")).result
        y = model[1]._modules["half"](model[1].other(model[0](data)))
        torch.testing.assert_close(found, torch.cat([y, data], 1))

    check(torch.randn(3, 2))
    model[0][0] = nn.Linear(2, 2)
    check(torch.randn(4, 2))
    joined.take(([x, calls[3]],), {"dim": 1})
    (found,) = replay(model, form, {"x": torch.ones(1, 2)}, torch.device("cpu")).result
    assert found[0, :2].tolist() == [1, 1]
