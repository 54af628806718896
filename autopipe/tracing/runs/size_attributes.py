"""Attributes that a forward leaves in its module and that follow from the sizes of its inputs alone.

Such as a table that is kept until another size comes. What else may have changed is left to ``assumptions``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..calls.faults import of_models
from ..inputs.contents import are_equal_tensors
from ..inputs.structure import flatten
from ..state.example_data import device_of, fresh, other_data
from ..state.state import preserved, seed
from .assumptions import Attribute

__all__ = ["follow_sizes", "sizes_of"]


def sizes_of(args: Any, kwargs: Any) -> tuple[Any, ...]:
    """The shapes of the tensors among a call's arguments, in their order."""
    return tuple([tuple(v.shape) for v in flatten((args, kwargs))[0] if isinstance(v, torch.Tensor)])


def follow_sizes(model: nn.Module, changed: Sequence[Attribute], args: Any, kwargs: Any) -> bool:
    """Whether at these inputs it makes no difference that attributes are no longer as they were.

    So it is where the model gives the same from where it stands as with them as they were, and leaves the
    same in them each time, on other data of these sizes too. The model itself is asked, and left as it is.
    """
    device = device_of(model, args, kwargs)

    def run(given: Any) -> tuple[list[Any], list[Any]]:
        args, kwargs = fresh(given, device)
        seed(device)
        answer = flatten(model(*args, **kwargs))[0]
        return answer, flatten([vars(a.module).get(a.name) for a in changed])[0]

    given = args, kwargs
    try:
        with preserved(model) as snapshot:
            now, left = run(given)
            snapshot.restore()
            _, left_by_others = run(other_data(given))
            snapshot.restore()
            for attribute in changed:
                attribute.put_back()
            then, left_then = run(given)
    except of_models():  # whatever it is: then the model cannot be asked here
        return False
    return _are_equal(now, then) and _are_equal(left, left_then) and _are_equal(left, left_by_others)


def _are_equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(_is_equal, first, second))


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two values are the same; objects only where they are one."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return are_equal_tensors(a, b)
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str, bytes)) and a == b)
