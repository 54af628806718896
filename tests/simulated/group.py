"""A process group for ``sim`` devices with NCCL's rules, as backend ``simccl``; gloo carries the bytes.

The rules: one communicator for collectives and one per pair of ranks, made when first used, which waits for
all its members; each runs what it is given in order, on a stream of its own and after what the stream of the
caller holds; no tags; a send is done when its receive is. ``wait()`` makes the caller's stream wait and
``wait(timeout)`` the host. CPU tensors, other devices' and some dtypes are refused. After an abort nothing
more arrives. A message that fails or is aborted under way ends the process, unless
``TORCH_SIMCCL_ASYNC_ERROR_HANDLING`` was 0 when the group was made.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import native

__all__ = ["Group", "bytes_sent"]

REFUSED = {torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32}
POLL_S = 2e-4
MEET = datetime.timedelta(seconds=60)
"""How long the ranks of a new communicator wait for one another."""
FOREVER = datetime.timedelta(days=7)
bytes_sent = [0]
"""By this process, in messages between two ranks."""


class Work(torch._C._distributed_c10d.Work):
    """An operation under way; holds its tensors until somebody waits."""

    def __init__(self, group: Group, lane: Lane, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._group, self._lane, self._tensors = group, lane, list(tensors)
        self._done = torch.Event(lane.device)
        self._done.record(lane.stream)

    def is_completed(self) -> bool:
        with torch.accelerator.device_index(self._lane.device.index):
            return bool(self._done.query())

    def is_success(self) -> bool:
        return not self._group.error

    def exception(self) -> BaseException | None:
        return None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        self._group.check()
        torch.accelerator.current_stream(self._lane.device).wait_event(self._done)
        if timeout:
            native.count_wait("Work.wait(timeout)")
            deadline = time.monotonic() + timeout.total_seconds()
            while not self._done.query():
                self._group.check()
                if time.monotonic() > deadline:
                    self._group.abort()
                    raise dist.DistBackendError("simccl: timed out")
                time.sleep(POLL_S)
            self._group.check()
        self._tensors = []
        return True

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[self._lane.device])
        with self._lane.stream:
            future.set_result(self._tensors)
        return future


class Lane:
    """A communicator: some ranks, one device, one stream."""

    def __init__(
        self, store: Any, rank: int, size: int, device: torch.device, limit: Any, priority: int
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.gloo = dist.ProcessGroupGloo(store, rank, size, min(limit, MEET))
        number = native.new_stream(device.index, priority)
        kind = int(torch._C._autograd.DeviceType.PrivateUse1)
        self.stream = torch.Stream(stream_id=number, device_index=device.index, device_type=kind)

    def run(
        self,
        group: Group,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        call: Callable[[list[Tensor]], None],
    ) -> Work:
        """Let the stream make ``call`` with CPU tensors over the memory of ``reads`` and ``writes``."""

        def guarded(seen: list[Tensor]) -> None:
            try:
                if not group.is_aborted:
                    call(seen)
            except RuntimeError as error:
                if not group.is_aborted:
                    group.error = f"{name}: {error}"
                    group.tear_down(group.error)

        self.stream.wait_stream(torch.accelerator.current_stream(self.device))
        native.launch(self.device.index, self.stream.stream_id, name, reads, writes, guarded)
        work = Work(group, self, [*writes] or [*reads])
        group.latest[self.stream.stream_id] = work
        return work


class Group(dist.ProcessGroup):
    """``size`` ranks, of which this is ``rank``."""

    def __init__(
        self, store: Any, rank: int, size: int, limit: datetime.timedelta, priority: int = 0
    ) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size, self._limit, self._priority = store, rank, size, limit, priority
        self._lanes: dict[str, Lane] = {}
        self.latest: dict[int, Work] = {}
        self.is_aborted, self.error = False, ""
        self.beside: Any = None  # torch's own group of the same ranks, held as long as this one
        self._ends_process = os.environ.get("TORCH_SIMCCL_ASYNC_ERROR_HANDLING", "3") in ("1", "3")

    def tear_down(self, why: str) -> None:
        """What NCCL's watch thread does with a message that failed."""
        if self._ends_process:
            print(f"simccl: {why}; the process is taken down", file=sys.stderr, flush=True)
            os.abort()

    def check(self) -> None:
        """Raise what NCCL's watch thread would have found."""
        if self.is_aborted or self.error:
            raise dist.DistBackendError(f"simccl: {self.error or 'the communicator was aborted'}")

    def getBackendName(self) -> str:
        return "simccl"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("sim")]  # what torch sends objects by

    def _lane(self, tensors: Sequence[Tensor], peer: int | None = None) -> Lane:
        self.check()
        for t in tensors:
            if t.device.type != "sim":
                raise RuntimeError(f"simccl: no backend type associated with device type {t.device.type}")
            if t.dtype in REFUSED:
                raise TypeError(f"simccl: unconvertible NCCL type {t.dtype}")
            if not t.is_contiguous() or t.device != tensors[0].device:
                raise ValueError("simccl: tensors must be contiguous and on one device")
        low, high = sorted((self._rank, self._rank if peer is None else peer))
        key = "all" if peer is None else f"{low}:{high}"
        if key not in self._lanes:
            rank, size = (self._rank, self._size) if peer is None else (int(self._rank == high), 2)
            place = dist.PrefixStore(key, self._store)
            self._lanes[key] = Lane(place, rank, size, tensors[0].device, self._limit, self._priority)
        if self._lanes[key].device != tensors[0].device:
            raise ValueError(
                f"simccl: {key} is on {self._lanes[key].device}, the tensor on {tensors[0].device}"
            )
        return self._lanes[key]

    # -- between two ranks ------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        lane = self._lane(tensors, peer)
        bytes_sent[0] += tensors[0].nbytes

        def call(seen: list[Tensor]) -> None:
            lane.gloo.send([_bytes(seen[0])], 1 - lane.rank, 0).wait(FOREVER)
            lane.gloo.recv([torch.empty(1)], 1 - lane.rank, 1).wait(FOREVER)

        return lane.run(self, f"send to rank {peer}", tensors, [], call)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        lane = self._lane(tensors, peer)

        def call(seen: list[Tensor]) -> None:
            lane.gloo.recv([_bytes(seen[0])], 1 - lane.rank, 0).wait(FOREVER)
            lane.gloo.send([torch.empty(1)], 1 - lane.rank, 1).wait(FOREVER)

        return lane.run(self, f"receive from rank {peer}", [], tensors, call)

    def batch(self, ops: Sequence[Any]) -> Work:
        """Sends and receives at once, as one operation of the communicator of all: ``ncclGroupEnd``."""
        sends = [op for op in ops if op.op is dist.isend]
        receives = [op for op in ops if op.op is not dist.isend]
        reads, writes = [op.tensor for op in sends], [op.tensor for op in receives]
        lane = self._lane([*reads, *writes])
        bytes_sent[0] += sum(t.nbytes for t in reads)

        def call(seen: list[Tensor]) -> None:
            works = [
                (lane.gloo.send if op.op is dist.isend else lane.gloo.recv)([_bytes(t)], op.group_peer, 0)
                for op, t in zip([*sends, *receives], seen, strict=True)
            ]
            for work in works:
                work.wait(FOREVER)

        return lane.run(self, "batch of messages", reads, writes, call)

    # -- among all --------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Work:
        lane, given = self._lane(tensors), dist.AllreduceOptions()
        given.reduceOp = dist.ReduceOp.SUM if options is None else options.reduceOp
        is_mean = given.reduceOp == dist.ReduceOp.AVG
        if is_mean:
            given.reduceOp = dist.ReduceOp.SUM

        def call(seen: list[Tensor]) -> None:
            lane.gloo.allreduce(seen, given).wait(FOREVER)
            if is_mean:
                torch._foreach_div_(seen, self._size)

        return lane.run(self, "all-reduce", [], tensors, call)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> Work:
        works = [self.allreduce([t], options) for t in tensors]
        return works[-1]

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Work:
        lane, given = self._lane(tensors), dist.BroadcastOptions()
        given.rootRank = 0 if options is None else options.rootRank
        return lane.run(
            self, "broadcast", [], tensors, lambda seen: lane.gloo.broadcast(seen, given).wait(FOREVER)
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Work:
        lane = self._lane([*inputs, *outputs[0]])
        return lane.run(
            self,
            "all-gather",
            inputs,
            outputs[0],
            lambda s: lane.gloo.allgather([s[1:]], s[:1]).wait(FOREVER),
        )

    def _allgather_base(self, output: Tensor, own: Tensor, options: Any = None) -> Work:
        return self.allgather([list(output.view(-1).chunk(self._size))], [own.view(-1)])

    def _reduce_scatter_base(self, output: Tensor, own: Tensor, options: Any = None) -> Work:
        lane = self._lane([own, output])
        is_mean = options is not None and options.reduceOp == dist.ReduceOp.AVG

        def call(seen: list[Tensor]) -> None:
            whole = seen[0].clone()
            lane.gloo.allreduce([whole]).wait()
            mine = whole.view(-1).chunk(self._size)[self._rank].view_as(seen[1])
            seen[1].copy_(mine / self._size if is_mean else mine)

        return lane.run(self, "reduce-scatter", [own], [output], call)

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def barrier(self, opts: Any = None) -> Work:
        work = self.allreduce([torch.zeros(1, device=torch.device("sim", native.current_device()))])
        work.wait(self._limit)
        return work

    # -- its end ----------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Break every communicator: what waits on them goes on, with whatever its memory holds."""
        self.is_aborted = True
        with contextlib.suppress(RuntimeError):  # what failed on the device, who asks it next is told
            if not all(work.is_completed() for work in self.latest.values()):
                self.tear_down("aborted with a message under way")
        for lane in self._lanes.values():
            try:  # a wait that times out closes gloo's connections
                nobody = lane.gloo.recv([torch.empty(1)], (lane.rank + 1) % lane.size, 1 << 16)
                nobody.wait(datetime.timedelta(milliseconds=1))
            except RuntimeError:
                continue

    def shutdown(self) -> None:
        """Drop the communicators, as whoever made them has to."""
        self._lanes.clear()


def _batch_isend_irecv(ops: list[Any]) -> list[Any]:
    """torch's, which puts messages in one operation for its own class of group alone."""
    group = ops[0].group or dist.group.WORLD
    return [group.batch(ops)] if isinstance(group, Group) else _torchs_batch(ops)


_torchs_batch, dist.batch_isend_irecv = dist.batch_isend_irecv, _batch_isend_irecv


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _create(store: Any, rank: int, size: int, limit: datetime.timedelta) -> Group:
    """What torch asks for. It puts a group written in Python in place of all it made for other devices.

    Dropped on one rank, gloo's connections would break while another still makes its end of them.
    """
    group = Group(store, rank, size, limit)
    group.beside = sys._getframe(1).f_locals.get("pg")
    return group


dist.Backend.register_backend("simccl", _create, devices=["sim"])
