"""Puts fresh parameters and buffers in the place of a model's own while it is replayed.

Running the model is left to ``replay``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .. import accelerator
from ..errors import CostError
from .replay import Replay

__all__ = ["stand_ins"]


@contextlib.contextmanager
def stand_ins(
    replay: Replay,
    *,
    training: bool = True,
) -> Iterator[None]:
    """Puts fresh leaves in the place of the parameters and buffers a replay uses, and takes them out again.

    A stand-in shares memory with the original where device and dtype agree; buffers are copied, so running
    statistics stay what they were. Gradients, hooks on parameters, training flags and the random state are
    the user's again afterwards.

    Raises :class:`CostError` when a parameter has no data and ``device`` is not meta.
    """
    device, dtype = replay.device, replay.dtype
    flags = [(m, m.training) for m in replay.model.modules()]
    swapped: list[tuple[nn.Module, str, Tensor]] = []
    made: dict[int, Tensor] = {}
    try:
        for module in replay.modules:
            tensors = [*module._parameters.items(), *module._buffers.items()]
            for name, tensor in tensors:
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = _stand_in(tensor, device, dtype)
                swapped.append((module, name, tensor))
                setattr(module, name, made[id(tensor)])
        for module, _ in flags:
            module.training = training
        with _fork_rng(torch.device(device)):
            yield
    finally:
        for module, name, tensor in swapped:
            setattr(module, name, tensor)
        for module, flag in flags:
            module.training = flag


def _stand_in(tensor: Tensor, device: torch.device | str, dtype: torch.dtype | None) -> Tensor:
    if tensor.is_meta and torch.device(device).type != "meta":
        raise CostError(
            "the model is on the meta device, so there is nothing to measure; "
            "use costs='estimated' with a device description, or load its weights first"
        )
    to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    fresh = tensor.detach().to(device, to)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fresh, requires_grad=tensor.requires_grad)
    return fresh.clone()


def _fork_rng(device: torch.device) -> contextlib.AbstractContextManager[None]:
    if not accelerator.is_async(device):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
