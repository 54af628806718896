"""A communicator of some ranks that is the pipeline's own: breaking it harms nobody else's.

Made straight from a store, so that only its members need to ask for it. Who they are is left to ``peers``.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from .link import LINK_BYTES, Link

__all__ = ["Group"]

FOREVER = datetime.timedelta(days=7)
"""Time limit of every wait: stalls are judged by the watch, which knows what is expected."""


class Group:
    """Messages among ``ranks`` (numbers within the pipeline), of tensors on ``device``.

    Small ones on the CPU go over ``links`` where there are any.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        connect_s: float,
        links: Mapping[int, Link] | None = None,
    ) -> None:
        self.ranks, self._me = tuple(ranks), tuple(ranks).index(rank)
        place = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        self.is_nccl = device.type == "cuda"
        self._links = {} if self.is_nccl or links is None else links
        if self.is_nccl:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = FOREVER
            self._backend: Any = dist.ProcessGroupNCCL(place, self._me, len(self.ranks), options)
        else:
            limit = datetime.timedelta(seconds=connect_s)
            self._backend = dist.ProcessGroupGloo(place, self._me, len(self.ranks), limit)
        self.send_to, self.recv_from = self._backend.send, self._backend.recv

    def send(self, tensor: Tensor, peer: int) -> Any:
        """Start sending a contiguous tensor to rank ``peer``; ``wait()`` on what is returned."""
        if tensor.nbytes < LINK_BYTES and peer in self._links:
            return self._links[peer].send(tensor)
        return self.send_to([tensor], self.ranks.index(peer), 0)

    def recv(self, tensor: Tensor, peer: int) -> Any:
        """Start receiving into a contiguous tensor from rank ``peer``."""
        if tensor.nbytes < LINK_BYTES and peer in self._links:
            return self._links[peer].recv(tensor)
        return self.recv_from([tensor], self.ranks.index(peer), 0)

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> None:
        """Reduce a contiguous tensor over all members, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = op, FOREVER
        self._backend.allreduce([tensor], options).wait(FOREVER)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every member rank ``source``'s value of a contiguous tensor, in place."""
        if self.is_nccl:
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = self.ranks.index(source), 0
            self._backend.broadcast([tensor], options).wait()
        elif self.ranks[self._me] != source:
            self.recv(tensor, source).wait(FOREVER)
        else:
            # a message each beats gloo's broadcast many times over for what is small
            for work in [self.send(tensor, r) for r in self.ranks if r != source]:
                work.wait(FOREVER)

    def abort(self) -> None:
        """Break every connection: calls that wait, here and at the other members, raise at once."""
        if self.is_nccl:
            self._backend.abort()
            return
        try:
            # gloo has no abort, but a wait that times out closes all connections of its communicator
            other = (self._me + 1) % len(self.ranks)
            self.recv_from([torch.empty(1)], other, _NOBODY_SENDS).wait(datetime.timedelta(milliseconds=1))
        except RuntimeError:
            return


_NOBODY_SENDS = 1 << 16
