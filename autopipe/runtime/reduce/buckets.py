"""Gradients of DDP's replicas, averaged in buckets that are under way while the last backward goes on.

Which backward is a stage's last is left to ``worker``; how a bucket lies in a message to ``sums``.

Stages of one rank that have the same replicas share one row of buckets, which start in that order on every
replica, whatever order gradients come in: messages of a group have no other name. The first step that is
reduced finds the order in which gradients come, and does all at its end.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ...errors import InputError, StepError
from .sums import Flat, by_dtype

__all__ = ["Buckets"]

BUCKET_BYTES = 25 << 20


@dataclasses.dataclass
class _Bucket:
    """Parameters whose gradients go in one message, those that have come, and the message under way."""

    parameters: Sequence[nn.Parameter]
    come: set[int] = dataclasses.field(default_factory=set)
    sent: tuple[Flat, Any] | None = None

    @property
    def is_full(self) -> bool:
        return len(self.come) == len(self.parameters)


class Buckets:
    """The gradients of some wrapped stages of a rank, by stage, which ``group`` averages.

    Gradients of a parameter that several of the stages share, that come twice in a backward (reentrant
    checkpoints) or not at all, are averaged at the end of the step.
    """

    def __init__(self, group: Any, stages: Mapping[Hashable, DistributedDataParallel]) -> None:
        for ddp in stages.values():
            if getattr(ddp, "_comm_hooks", None):
                raise InputError(
                    "a stage's DistributedDataParallel has a communication hook, which a pipeline's own "
                    "reduction, once per step, does not call; leave it out"
                )
        self._group, self._size = group, dist.get_world_size(group)
        self._stages = {stage: list(ddp.parameters()) for stage, ddp in stages.items()}
        held = Counter(id(p) for parameters in self._stages.values() for p in parameters)
        self._all = {id(p): p for parameters in self._stages.values() for p in parameters}
        self._shared = {i for i, n in held.items() if n > 1}
        caps = (getattr(ddp, "bucket_bytes_cap", BUCKET_BYTES) for ddp in stages.values())
        self._cap_bytes = min(caps, default=BUCKET_BYTES)
        self._flags: tuple[bool, ...] = ()
        self._row: list[_Bucket] | None = None
        self._of: dict[int, _Bucket] = {}
        self._hooks: list[Any] = []
        self.begin()

    def begin(self) -> None:
        """Forget what a step that failed has left."""
        self.look_away()
        self._n_sent, self._is_due = 0, False
        self._seen: list[int] = []
        for bucket in self._row or ():
            bucket.come, bucket.sent = set(), None

    def watch(self, stage: Hashable) -> None:
        """The last backward of a stage begins."""
        self._is_due = True
        flags = tuple(p.requires_grad for p in self._all.values())
        if flags != self._flags:
            self._flags, self._row, self._of = flags, None, {}
        for parameter in self._stages[stage]:
            if parameter.requires_grad and id(parameter) not in self._shared:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._note))

    def look_away(self) -> None:
        """A backward is through."""
        while self._hooks:
            self._hooks.pop().remove()

    def _note(self, parameter: nn.Parameter) -> None:
        if self._row is None:
            self._seen.append(id(parameter))
            return
        bucket = self._of.get(id(parameter))
        if bucket is None:
            return
        if bucket.sent is not None:
            raise StepError(
                f"a gradient of shape {tuple(parameter.shape)} came again after it was averaged over the "
                "replicas: a backward adds to it more often than in earlier steps; keep reentrant "
                "checkpoints out of what only some steps run (use_reentrant=False)"
            )
        bucket.come.add(id(parameter))
        while self._n_sent < len(self._row) and self._row[self._n_sent].is_full:
            self._send(self._row[self._n_sent])

    def _send(self, bucket: _Bucket) -> None:
        # averaged before it is summed: half precision would overflow
        flat = Flat(bucket.parameters, 1 / self._size)
        work = dist.all_reduce(flat.numbers, group=self._group, async_op=True)
        bucket.sent = flat, work
        self._n_sent += 1

    def finish(self) -> None:
        """Average what is left, and let gradients be read; once in a step."""
        if not self._is_due:
            return
        row = self._row or []
        late = [p for i, p in self._all.items() if p.requires_grad and i not in self._of]
        ends = [_Bucket(same) for same in by_dtype(late)]
        for bucket in (*row[self._n_sent :], *ends):
            self._send(bucket)
        for bucket in (*row, *ends):
            assert bucket.sent is not None
            flat, work = bucket.sent
            work.wait()
            flat.put_back()
        if self._row is None:
            self._make(self._agreed())
        self.begin()

    def _agreed(self) -> list[nn.Parameter]:
        """Parameters whose gradients came once on every replica, in the order they did on the first."""
        n, place = Counter(self._seen), {i: at for at, i in enumerate(self._seen)}
        mine = torch.tensor([place[i] if n[i] == 1 else -1 for i in self._all], device="cpu")
        mine = mine.to(next(iter(self._all.values())).device)
        everyone = [torch.empty_like(mine) for _ in range(self._size)]
        dist.all_gather(everyone, mine, group=self._group)
        found = torch.stack(everyone).tolist()
        once = [i for i, places in zip(self._all, zip(*found, strict=True), strict=True) if min(places) >= 0]
        first = dict(zip(self._all, found[0], strict=True))
        return [self._all[i] for i in sorted(once, key=first.__getitem__)]

    def _make(self, parameters: Sequence[nn.Parameter]) -> None:
        self._row, open_ones = [], dict[torch.dtype, tuple[list[nn.Parameter], int]]()
        for parameter in parameters:
            held, n_bytes = open_ones.setdefault(parameter.dtype, ([], 0))
            held.append(parameter)
            n_bytes += parameter.numel() * parameter.itemsize
            open_ones[parameter.dtype] = held, n_bytes
            if n_bytes >= self._cap_bytes:
                self._row.append(_Bucket(open_ones.pop(parameter.dtype)[0]))
        self._row += [_Bucket(held) for held, _ in open_ones.values()]
        self._of = {id(p): bucket for bucket in self._row for p in bucket.parameters}
