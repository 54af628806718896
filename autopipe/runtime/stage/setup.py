"""What a runtime does once: pick a device, put stages there, say who it is to the other ranks.

Connecting to them is left to ``peers``.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...errors import InputError
from ...graph import Op
from ...plans import Plan
from ...stages import Stage

if TYPE_CHECKING:
    from ...tracing import Capture

__all__ = [
    "Generators",
    "card",
    "check_filled",
    "check_same",
    "exchange",
    "pick_device",
    "place",
    "written_buffers",
]


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


def check_same(capture: Capture, stages: Sequence[Stage]) -> None:
    """Raise :class:`InputError` where the model has other parameters by now than its stages hold.

    What changed inside modules that stages hold whole has changed there too.
    """
    now = dict(capture.model.named_parameters(remove_duplicate=False))
    held = dict(pair for stage in stages for pair in stage.named_parameters(remove_duplicate=False))
    other = [name for name, parameter in held.items() if now.get(name) is not parameter]
    other += [name for name in now if name not in held and name not in capture.ops.parameter]
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        raise InputError(
            f"the model's {', '.join(other[:3])}{more} were put in, or taken out, after it was split, so its "
            "stages would train without; change the model first (adapters, another head), then split it"
        )


def place(
    model: nn.Module, own: Sequence[Stage], stages: Sequence[Stage], device: torch.device, release: bool
) -> dict[str, tuple[Tensor, int]]:
    """Put the stages in ``own`` on ``device``; with ``release`` free the weights only others use.

    Parameters and buffers on the meta device get memory there, full of NaN so that one which nothing fills
    later shows. Returns those that no checkpoint holds (non-persistent buffers) with their present version.
    """
    filled: dict[int, Tensor] = {}
    unknown: dict[str, tuple[Tensor, int]] = {}
    for stage in own:
        saved = stage.state_dict(keep_vars=True)
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            if tensor.is_meta and id(tensor) not in filled:
                filled[id(tensor)] = new = _filled(tensor, device)
                if name not in saved and tensor.numel():
                    unknown[name] = new, new._version
    exchange((model, *stages), filled)
    for stage in own:
        stage.to(device)
    if release:
        kept = {id(t) for stage in own for t in (*stage.parameters(), *stage.buffers())}
        for stage in stages:
            for tensor in (*stage.parameters(), *stage.buffers()):
                if id(tensor) not in kept:
                    tensor.data = tensor.data.new_empty(0)
    return unknown


def exchange(roots: Iterable[nn.Module], new: Mapping[int, Tensor]) -> None:
    """Put other tensors in the place of parameters and buffers, wherever they are held: id of the old → new.

    What shared a tensor before shares the new one.
    """
    held = {id(d): d for root in roots for m in root.modules() for d in (m._parameters, m._buffers)}
    for tensors in held.values() if new else ():
        for name, tensor in tensors.items():
            if id(tensor) in new:
                tensors[name] = new[id(tensor)]  # type: ignore[assignment]


def _filled(meta: Tensor, device: torch.device) -> Tensor:
    is_whole = not meta.dtype.is_floating_point and not meta.dtype.is_complex
    new = torch.full_like(meta, 0 if is_whole else math.nan, device=device, requires_grad=False)
    return nn.Parameter(new, meta.requires_grad) if isinstance(meta, nn.Parameter) else new


def check_filled(unknown: dict[str, tuple[Tensor, int]]) -> None:
    """Raise :class:`InputError` for buffers of :func:`place` that nobody has written since; forget others."""
    empty = [name for name, (tensor, version) in unknown.items() if tensor._version == version]
    if empty:
        raise InputError(
            f"buffers {', '.join(empty)} have no values: they were on the meta device, and no checkpoint "
            "holds what is not persistent; make them on a real device, or write them in place on this "
            "rank's stages"
        )
    unknown.clear()


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
