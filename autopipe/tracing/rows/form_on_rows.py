"""A form of a model and the tensors whose rows it is asked about: what most questions begin with.

Asking is left to the other modules of this room.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from torch import Tensor, device

from ...graph import Dim
from ...units import Size
from ..calls.call import Recording
from ..code.own_code import OwnCode

__all__ = ["FormOnRows"]


@dataclasses.dataclass(frozen=True, slots=True)
class FormOnRows:
    """A form on the tensors ``given``, whose rows lie along ``dim``.

    Attributes
    ----------
    shapes: the formulas of each call's tensors, by its id. begin: sets mode and state.
    takes: whether the form is right for so many rows.
    """

    code: OwnCode
    form: Recording
    given: Mapping[str, Tensor]
    dim: Dim
    shapes: Mapping[int, tuple[tuple[Size, ...], ...]]
    device: device
    begin: Callable[[], None]
    takes: Callable[[int], bool]
