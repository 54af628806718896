"""What a runtime does once: pick a device, put stages there, say who it is to the other ranks.

Connecting to them is left to ``peers``.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..graph import Op
from ..plans import Plan
from ..stages import Stage

if TYPE_CHECKING:
    from ..tracing import Capture

__all__ = ["Generators", "card", "pick_device", "place", "written_buffers"]


def card(capture: Capture, plan: Plan, stages: Sequence[Stage], schedule: str) -> dict[str, Any]:
    """What every rank must have alike, and (``own``) what only it knows."""
    return {
        "the model": capture.ops.digest,
        "the plan": _digest(plan.to_json()),
        "the stages' code": _digest("".join(stage.code for stage in stages)),
        "the schedule": schedule,
        "own seed": torch.initial_seed(),
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def pick_device(
    wanted: torch.device | str | None, stages: Sequence[Stage], is_distributed: bool
) -> torch.device:
    """The device asked for; else this process's GPU under NCCL; else the model's own."""
    if wanted is not None:
        return torch.device(wanted)
    if is_distributed and "nccl" in dist.get_backend():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
    first = next((p for stage in stages for p in stage.parameters()), None)
    return torch.device("cpu") if first is None or first.device.type == "meta" else first.device


def place(own: Sequence[Stage], stages: Sequence[Stage], device: torch.device, release: bool) -> None:
    """Put the stages in ``own`` on ``device``; with ``release`` free the weights only others use.

    Parameters on the meta device get memory, uninitialised, without losing who shares them; ``load`` fills
    them.
    """
    for stage in own:
        for tensor in (*stage.parameters(), *stage.buffers()):
            if tensor.device.type == "meta":
                filled: Tensor = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    filled = nn.Parameter(filled, tensor.requires_grad)
                torch.utils.swap_tensors(tensor, filled)
        stage.to(device)
    if release:
        kept = {id(t) for stage in own for t in (*stage.parameters(), *stage.buffers())}
        for stage in stages:
            for tensor in (*stage.parameters(), *stage.buffers()):
                if id(tensor) not in kept:
                    tensor.data = tensor.data.new_empty(0)


def written_buffers(stage: Stage, ops: Sequence[Op]) -> list[tuple[nn.Module, str]]:
    """The stage's buffers that its forward writes, such as batch-norm statistics: (module, name in it)."""
    written = {name for op in ops for name in op.mutated_buffers}
    return [
        (module, name)
        for path, module in stage.named_modules()
        for name in module._buffers
        if f"{path}.{name}".lstrip(".") in written
    ]


class Generators:
    """The user's random generators, to be left as they were found."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
