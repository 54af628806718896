"""Where a tensor comes from that no recorded call gave: known memory, or code that torch does not show.

What follows for the recording is left to ``ledger``.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable

import torch
from torch import Tensor

from ..inputs.contents import are_equal_tensors

__all__ = ["Unseen", "alive", "held_now", "same_memory", "twin_in_memory"]


_LOOKED_AT = 1 << 12
"""Of tensors with at most so many elements the content is compared: numpy may write to them unsaid."""


def alive() -> dict[int, Tensor]:
    """Every tensor there is, by id: what a run then finds and is not among them was made by it."""
    return {id(o): o for o in gc.get_objects() if issubclass(type(o), Tensor)}


@dataclasses.dataclass(slots=True)
class Unseen:
    """Tensors that a run of the model made where no call shows it: by line, in order, what they held.

    ``is_probe`` says that the run is on other data, to see what of it they hold.
    """

    is_probe: bool
    before: dict[int, Tensor]
    by_line: dict[str, list[Tensor]] = dataclasses.field(default_factory=dict)
    expected: dict[str, list[Tensor]] = dataclasses.field(default_factory=dict)

    def note(self, tensor: Tensor, source: str) -> bool:
        """Whether the tensor holds what the one at the same place held on other data."""
        held = self.by_line.setdefault(source, [])
        held.append(tensor.detach().clone())
        others = self.expected.get(source, [])
        return self.is_probe or (
            len(held) <= len(others) and are_equal_tensors(held[-1], others[len(held) - 1])
        )


def held_now(*tensors: Tensor) -> list[bytes | int]:
    """What tensors hold, in a form that compares; of large ones, how often they were written to."""
    return [*map(_held, tensors)]


def _held(tensor: Tensor) -> bytes | int:
    is_there = tensor.layout is torch.strided and not tensor.is_meta
    if is_there and tensor.numel() <= _LOOKED_AT:
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return -1 if tensor.is_inference() else tensor._version


def twin_in_memory(tensor: Tensor, known: Iterable[object]) -> Tensor | None:
    """The known tensor that lies in the memory of this one, laid out alike: another object of the same."""
    place = _place(tensor)
    if place is None or tensor.grad_fn is not None or type(tensor) not in (Tensor, torch.nn.Parameter):
        return None
    return next((t for t in known if isinstance(t, Tensor) and _place(t) == place), None)


def _place(tensor: Tensor) -> tuple[object, ...] | None:
    """Where a tensor lies, and how; None where that cannot be asked."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return None
    try:
        return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    except RuntimeError:
        return None


def same_memory(tensor: Tensor, requires_grad: bool) -> Tensor:
    """Another tensor on the memory of one, as ``Parameter`` and dlpack make it: gradients end at it."""
    return tensor.detach().requires_grad_(requires_grad)
