"""Arguments that a forward writes into: a caller finds there what the model would have left."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

from torch import Tensor, nn

from .registry import WIDTH, sequences, trap


@dataclasses.dataclass
class Pair:
    """Two fields, of which one is given."""

    x: Tensor
    y: Any = None


class Loose:
    """A plain object with a tensor, or without."""

    def __init__(self, x: Any = None) -> None:
        self.x = x


def in_a_dict(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A dict of two tensors and a dict."""
    (x,) = sequences(batch, length, seed)
    return ({"x": x, "y": x * 2, "more": {"z": x + 1}},)


def in_a_list(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A list of two tensors."""
    (x,) = sequences(batch, length, seed)
    return ([x, x * 2],)


def in_objects(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A dataclass, an object and a mapping that is no dict."""
    (x,) = sequences(batch, length, seed)
    return Pair(x), Loose(x * 2), UserDict(x=x)


def with_empty_ones(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A tensor, and containers to fill."""
    return (*sequences(batch, length, seed), {}, [])


def with_a_bare_object(batch: int, length: int, seed: int) -> tuple[Any, ...]:
    """A tensor, and an object that holds none."""
    return (*sequences(batch, length, seed), Loose())


class Fills(nn.Module):
    """Puts what it computes into the dict that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        given["h"] = self.layer(given["x"])
        return given["h"] * 2


@trap(inputs=in_a_dict)
def key_added(self: Any, given: Any) -> Tensor:
    given["h"] = self.layers[0](given["x"])
    given["n"] = given["x"].shape[0]
    return self.run(given["h"] + given["y"])


@trap(inputs=in_a_dict)
def keys_replaced_and_taken(self: Any, given: Any) -> Tensor:
    given["x"] = given["x"] * 2
    given["more"]["z"], given["more"]["w"] = given["y"], given["more"]["z"]
    return self.run(given["x"] + given.pop("y"))


@trap(inputs=in_a_dict)
def given_dict_returned(self: Any, given: Any) -> Any:
    given["h"] = self.run(given["x"])
    return given


@trap(inputs=in_a_dict, fills=Fills)
def key_added_by_a_layer(self: Any, given: Any) -> Tensor:
    return self.run(self.fills(given))


@trap(inputs=in_a_dict)
def key_added_in_training(self: Any, given: Any) -> Tensor:
    if self.training:
        given["h"] = self.layers[0](given["x"])
    return self.run(given["x"])


@trap(inputs=in_a_list)
def list_that_grows(self: Any, given: Any) -> Tensor:
    given.append(self.layers[0](given[0]))
    given[0] = given[1] + 1
    return self.run(given[-1])


@trap(inputs=in_a_list)
def list_that_shrinks(self: Any, given: Any) -> Tensor:
    return self.run(given.pop(0) + 1)


@trap(inputs=in_objects)
def attributes_set(self: Any, pair: Any, loose: Any, named: Any) -> Tensor:
    pair.y = self.layers[0](pair.x)
    loose.h = loose.x + pair.y
    named["h"] = loose.h * named["x"]
    return self.run(named["h"])


@trap(inputs=with_empty_ones)
def empty_containers_filled(self: Any, x: Tensor, named: Any, listed: Any) -> Tensor:
    named["h"] = self.layers[0](x)
    listed += [named["h"] + 1, "a text"]
    return self.run(listed[0])


@trap("refused", inputs=with_a_bare_object)
def bare_object_filled(self: Any, x: Tensor, loose: Any) -> Tensor:
    loose.x = self.layers[0](x)
    return self.run(loose.x)


@trap("refused", inputs=with_a_bare_object)
def list_in_a_bare_object_filled(self: Any, x: Tensor, loose: Any) -> Tensor:
    loose.x = loose.x or []
    loose.x.append(self.layers[0](x))
    return self.run(loose.x[0])
