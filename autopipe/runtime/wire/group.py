"""Messages among some ranks of a pipeline: one small interface, and the three ways that carry it.

A group is made straight from a store, so that only its members need to ask for it, and breaking it harms
nobody else's. Who they are is left to ``peers``, what a message holds to ``announcement``.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ... import accelerator
from ...errors import InputError
from ...host_link import Link
from ...torch_private import backend_plugin, plugin_options

__all__ = ["FOREVER", "Group", "HostGroup", "StagedGroup", "break_group", "make_group"]

FOREVER = datetime.timedelta(days=7)
"""Time limit of every wait: stalls are judged by the watch, which knows what is expected."""


class Group(Protocol):
    """Messages among ``ranks`` (numbers within the pipeline), of contiguous tensors.

    What ``send`` and ``recv`` return is under way; ``wait`` lets what follows use it: the host waits, or on
    an accelerator its stream. Tensors of the host's may go by the ``link`` to a peer instead, if it carries
    as many bytes.
    """

    ranks: tuple[int, ...]

    def send(self, tensor: Tensor, peer: int) -> Any: ...
    def recv(self, tensor: Tensor, peer: int) -> Any: ...
    def wait(self, work: Any) -> None: ...
    def link(self, peer: int) -> Link | None: ...
    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> None: ...
    def broadcast(self, tensor: Tensor, source: int) -> None: ...
    def connect(self, pairs: Iterable[tuple[int, int]], limit_s: float) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...


def make_group(
    store: Any,
    name: str,
    ranks: Sequence[int],
    rank: int,
    device: torch.device,
    connect_s: float,
    links: Mapping[int, Link],
    *,
    shares_device: bool,
    check: Callable[[], None],
) -> Group:
    """The group that carries tensors of ``device``; ``shares_device`` where two ranks are on one.

    ``check`` raises once the pipeline has failed, and follows every wait: an accelerator's return then as if
    all were well, and another thread of this rank may have been refused meanwhile.
    """
    place = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
    if accelerator.is_async(device) and not shares_device:
        return DeviceGroup(place, ranks, rank, device, check)
    kind = StagedGroup if shares_device else HostGroup
    return kind(place, ranks, rank, connect_s, links, check)


class HostGroup:
    """Tensors on the CPU over gloo; but for what ``links`` carry. Waits are the host's."""

    def __init__(
        self,
        store: Any,
        ranks: Sequence[int],
        rank: int,
        connect_s: float,
        links: Mapping[int, Link],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.ranks, self._me = tuple(ranks), tuple(ranks).index(rank)
        self._links, self._check = links, check
        limit = datetime.timedelta(seconds=connect_s)
        self._backend: Any = dist.ProcessGroupGloo(store, self._me, len(self.ranks), limit)

    def link(self, peer: int) -> Link | None:
        """What goes to and comes from rank ``peer`` by shared memory; None where all of it is gloo's."""
        return self._links.get(peer)

    def send(self, tensor: Tensor, peer: int) -> Any:
        """Start sending to rank ``peer``."""
        link = self._links.get(peer)
        if link is not None and tensor.nbytes < link.below_bytes:
            return link.send(tensor)
        return self._backend.send([tensor], self.ranks.index(peer), 0)

    def recv(self, tensor: Tensor, peer: int) -> Any:
        """Start receiving from rank ``peer``."""
        link = self._links.get(peer)
        if link is not None and tensor.nbytes < link.below_bytes:
            return link.recv(tensor)
        return self._backend.recv([tensor], self.ranks.index(peer), 0)

    def wait(self, work: Any) -> None:
        """Block until it is over."""
        work.wait(FOREVER)
        self._check()

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> None:
        """Reduce over all members, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = op, FOREVER
        self.wait(self._backend.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every member rank ``source``'s value, in place."""
        if self.ranks[self._me] != source:
            self.wait(self.recv(tensor, source))
            return
        # a message each beats gloo's broadcast many times over for what is small
        for work in [self.send(tensor, r) for r in self.ranks if r != source]:
            self.wait(work)

    def connect(self, pairs: Iterable[tuple[int, int]], limit_s: float) -> None:
        """Nothing is left to connect: gloo did when the group was made."""

    def abort(self) -> None:
        """Break every connection: calls that wait, here and at the other members, raise at once."""
        backend = self._backend
        if backend is not None:  # another thread may have closed it
            _break(backend, self._me, len(self.ranks))

    def close(self) -> None:
        """End gloo's threads and connections, which go with their owner; nothing is under way any more."""
        self._backend = None


def _break(backend: Any, rank: int, size: int) -> None:
    """Break every connection of one of gloo's communicators."""
    try:
        # gloo has no abort, but a wait that times out closes all connections of its communicator
        nobody = backend.recv([torch.empty(1, device="cpu")], (rank + 1) % size, _NOBODY_SENDS)
        nobody.wait(datetime.timedelta(milliseconds=1))
    except RuntimeError:
        return


def break_group(group: Any, device: torch.device) -> None:
    """Break a process group of torch's own that carries tensors of ``device``: whoever waits in it raises."""
    if group.size() == 1:
        return
    if device.type == "cpu":
        _break(group, group.rank(), group.size())
    else:
        group.abort()


class StagedGroup(HostGroup):
    """Tensors of accelerators by way of the host: for ranks that share one, which NCCL refuses.

    Slow, since every message waits for the device; it is there so that one card can run many ranks.
    """

    def send(self, tensor: Tensor, peer: int) -> Any:
        return super().send(tensor.cpu(), peer)

    def recv(self, tensor: Tensor, peer: int) -> Any:
        there = torch.empty_like(tensor, device="cpu")
        return _Staged(super().recv(there, peer), there, tensor)

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> None:
        there = tensor.cpu()
        super().all_reduce(there, op)
        tensor.copy_(there)


class _Staged:
    """A message that is on the host when it has come, and is then copied to its place."""

    def __init__(self, work: Any, there: Tensor, tensor: Tensor) -> None:
        self._work, self._there, self._tensor = work, there, tensor

    def wait(self, limit: datetime.timedelta) -> None:
        self._work.wait(limit)
        self._tensor.copy_(self._there)


class DeviceGroup:
    """Tensors of an accelerator over its own backend: NCCL, or what its maker has for it.

    Each direction has communicators of its own, so that a pair's messages pass one another and overlap with
    compute, on streams of high priority where the backend has them. Only streams wait. What the backend may
    not know how to send goes as bytes.
    """

    def __init__(
        self,
        store: Any,
        ranks: Sequence[int],
        rank: int,
        device: torch.device,
        check: Callable[[], None],
    ) -> None:
        self.ranks, self._me, self._device = tuple(ranks), tuple(ranks).index(rank), device
        self._check = check
        name = accelerator.backend(device)
        with _left_to_us(name):
            self._up, self._down = (
                _backend(name, dist.PrefixStore(way, store), self._me, len(self.ranks))  # type: ignore[attr-defined]
                for way in ("up", "down")
            )

    def link(self, peer: int) -> Link | None:
        """None: links carry what is in the host's memory."""
        return None

    def send(self, tensor: Tensor, peer: int) -> Any:
        """Start sending to rank ``peer``, after what the current stream holds."""
        to = self.ranks.index(peer)
        return (self._up if self._me < to else self._down).send([_sendable(tensor)], to, 0)

    def recv(self, tensor: Tensor, peer: int) -> Any:
        """Start receiving from rank ``peer``, after what the current stream holds."""
        source = self.ranks.index(peer)
        return (self._up if source < self._me else self._down).recv([_sendable(tensor)], source, 0)

    def wait(self, work: Any) -> None:
        """Let the current stream wait. Given a time limit, the host would."""
        work.wait()
        self._check()

    def all_reduce(self, tensor: Tensor, op: Any = ReduceOp.SUM) -> None:
        """Reduce over all members, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        self.wait(self._up.allreduce([tensor], options))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Give every member rank ``source``'s value, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.ranks.index(source), 0
        self.wait(self._up.broadcast([_sendable(tensor)], options))

    def connect(self, pairs: Iterable[tuple[int, int]], limit_s: float) -> None:
        """Open all connections now, in one order on every rank, and wait until they carry something.

        Made in the midst of a step they would stop it, and nothing could end a wait for them. ``pairs`` are
        the ranks that send to one another, lower one first.
        """
        limit, me = datetime.timedelta(seconds=limit_s), self.ranks[self._me]
        token = torch.zeros(1, device=self._device)
        for pair in sorted(set(pairs)):
            if me in pair:
                peer = pair[0] if me == pair[1] else pair[1]
                for source in pair:
                    (self.send if me == source else self.recv)(token, peer).wait(limit)
        self._up.allreduce([token], dist.AllreduceOptions()).wait(limit)

    def abort(self) -> None:
        """Break every connection: streams go on, with whatever their memory holds."""
        for backend in (self._up, self._down):
            backend.abort()

    def close(self) -> None:
        """Shut the communicators down, once everything sent has arrived."""
        for backend in (self._up, self._down):
            backend.shutdown()


@contextlib.contextmanager
def _left_to_us(name: str) -> Iterator[None]:
    """Backends that are made within it leave failures and waits to their owner, whatever the job has set.

    As a rule a thread of torch's ends the process, without a word of ours, once a message fails or is
    aborted, or any kernel failed.
    """
    given = {f"TORCH_{name.upper()}_{what}": "0" for what in _LEFT_TO_US}
    before = {key: os.environ.get(key) for key in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


_LEFT_TO_US = ("ASYNC_ERROR_HANDLING", "RETHROW_CUDA_ERRORS", "BLOCKING_WAIT")
"""Ends of the variables that torch's backends read when they are made."""


def _backend(name: str, store: Any, rank: int, size: int) -> Any:
    """A backend of torch's own, or one that a device's package registered."""
    own = getattr(dist, f"ProcessGroup{name.upper()}", None)
    if own is not None:
        options = own.Options()
        options._timeout = FOREVER
        if hasattr(options, "is_high_priority_stream"):
            options.is_high_priority_stream = True
        return own(store, rank, size, options)
    plugin = backend_plugin(name)
    if plugin is None:
        raise InputError(
            f"no process-group backend {name!r} is at hand; import the package that registers it, or pass "
            "device='cpu' to runtime()"
        )
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, FOREVER)
    options = plugin_options()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout, options.group_id = FOREVER, "autopipe"
    options.global_ranks_in_group = list(range(size))
    return plugin.creator_fn(options, None)


_AS_THEY_ARE = frozenset(
    (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8)
)


def _sendable(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _AS_THEY_ARE else accelerator.raw(tensor)


_NOBODY_SENDS = 1 << 16
