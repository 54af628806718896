"""What all ranks of a pipeline do together for another library: meet, and bring weights to one rank.

Checkpoints of whole models are left to ``runtime``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from ..runtime.engine import Engine

__all__ = ["gather_trained", "meet"]


def meet(engine: Engine, words: str) -> None:
    """Wait until every rank of the pipeline is here; ``words`` say at what."""
    if engine.peers is not None:
        with engine.turn, engine.peers.together(words, waits=True):
            engine.peers.gather(0)


def gather_trained(engine: Engine) -> dict[str, Tensor]:
    """Every parameter that is trained, by its first name in the model, on rank 0; elsewhere none.

    Raises :class:`InputError` for parameters that are sharded.
    """
    first = engine.capture.ops.parameter
    trained: dict[str, tuple[int, Tensor]] = {}
    for stage in engine.all_stages:
        for name, parameter in stage.named_parameters():
            if hasattr(parameter, "to_local"):
                raise InputError(
                    f"{name} is sharded; gather the weights with pipe.merge(), then save the model"
                )
            if parameter.requires_grad:
                known = first[name].name if name in first else name
                trained.setdefault(known, (stage.rank, parameter))
    if engine.peers is None:
        return {name: own.detach().cpu() for name, (_, own) in trained.items()}
    found: dict[str, Tensor] = {}
    with engine.turn, engine.peers.together("gathering what is trained", waits=False):
        group = engine.peers.group
        for name, (owner, own) in trained.items():
            if engine.rank == owner:
                value = own.detach().contiguous()
            elif engine.rank == 0:
                shape = first[name].shape if name in first else own.shape
                value = torch.empty(shape, dtype=own.dtype, device=engine.device)
                group.wait(group.recv(value, owner))
            if engine.rank == owner != 0:
                group.wait(group.send(value, 0))
            if engine.rank == 0:
                found[name] = value.cpu()
    return found
