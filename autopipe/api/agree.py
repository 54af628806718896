"""One rank decides, all ranks hold the same answer: no two ranks ever run different plans.

What is decided is left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import AutopipeError, PlanError

__all__ = ["decide_once", "in_group", "make_alike"]

T = TypeVar("T")


def in_group() -> bool:
    """Whether a process group of more than one rank is up."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def make_alike(what: str, make: Callable[[], T], digest: Callable[[T], str]) -> T:
    """Run ``make`` on every rank and check that the results are alike.

    Where one rank fails all raise: that rank its own error, the others one that names it. Raises
    :class:`PlanError` on every rank when digests differ.
    """
    if not in_group():
        return make()
    made: T | None = None
    failure: Exception | None = None
    try:
        made = make()
        mine = ("made", digest(made))
    except Exception as error:
        # the peers wait in the gather below, so they hear of the failure before it is raised
        failure = error
        mine = ("failed", f"{type(error).__name__}: {error}")
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if failure is not None:
        raise failure
    failed = [
        f"rank {rank} failed: {text}" for rank, (state, text) in enumerate(everyone) if state == "failed"
    ]
    if failed:
        raise PlanError("; ".join(failed))
    odd = [f"rank {rank} has {text}" for rank, (_, text) in enumerate(everyone) if text != everyone[0][1]]
    if odd:
        raise PlanError(
            f"ranks disagree on {what}: rank 0 has {everyone[0][1]}, {', '.join(odd)}; give every rank the "
            "same model code, configuration and example shapes"
        )
    return made  # type: ignore[return-value]


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
