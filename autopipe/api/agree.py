"""One rank decides, all ranks hold the same answer: no two ranks ever run different plans.

What is decided is left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import AutopipeError, PlanError

__all__ = ["check_same", "decide_once", "in_group"]

T = TypeVar("T")


def in_group() -> bool:
    """Whether a process group of more than one rank is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def check_same(what: str, value: str) -> None:
    """Raise :class:`PlanError` on every rank when ranks hold different values of ``what``."""
    if not in_group():
        return
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    odd = [f"rank {rank} has {v}" for rank, v in enumerate(values) if v != values[0]]
    if odd:
        raise PlanError(
            f"ranks disagree on {what}: rank 0 has {values[0]}, {', '.join(odd)}; give every rank the same "
            "model code, configuration and example shapes"
        )


def decide_once(decide: Callable[[], T]) -> T:
    """Run ``decide`` on rank 0 and give its result, which must pickle, to all.

    An error there is raised on every rank.
    """
    if not in_group():
        return decide()
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = decide()
        except Exception as error:
            # the peers wait in the broadcast below, so they hear of the failure before it is raised
            answer[1] = error if isinstance(error, AutopipeError) else PlanError(f"rank 0 failed: {error!r}")
            dist.broadcast_object_list(answer, src=0)
            raise
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]  # type: ignore[no-any-return]
