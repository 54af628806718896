"""A connection between two processes of one host that carries tensors of the host's memory.

Who connects to whom is left to ``runtime.wire.host_links``, the memory that both share to ``ring``.

A small message is one system call on each side, made by the thread that computes; a larger one is copied
into memory that both share and out of it, and the call says where it lies. A communicator instead shakes
hands for every message and hands it to a thread of its own: waking that costs several times what the
microbatch of a small model does, and while it is off its core with a lock held, the rank stands still.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
from typing import Any

import msgspec
from torch import Tensor

from ..accelerator import memory
from ..hardware import DIRECT_BYTES
from .ring import Incoming, Outgoing, Ring, is_broken

__all__ = ["MOST_BYTES", "SENT", "Arrival", "Link"]

BUFFER_BYTES = 1 << 20
"""The socket buffer asked for; Linux grants 416 KiB by default."""
MOST_BYTES = Ring.n_bytes // 2
"""The largest message that a link with shared memory carries."""
_PLACE_BYTES = 8
_HAS, _HAS_NOT = b"m", b"-"


class Link:
    """One end of a connection: tensors arrive in the order they were sent.

    A send ends at the latest once the other end expects the message: of what is expected, no more than a
    quarter of the socket's buffer, and of the shared memory no more than there is, are ever left unread, and
    below that a sender goes on. So whatever order is safe for sends that wait for their receive is safe here.
    Raises ``ConnectionError`` once the other end, or :meth:`abort`, has closed the link.

    Until both ends have agreed (:meth:`agree`) it carries small messages only, as it does where the system
    has no memory to share.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._room = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4
        self._socket = connection
        self._coming: collections.deque[tuple[Tensor, int, int]] = collections.deque()
        self._unread = self._unread_shared = self._n_expected = self._n_here = 0
        self._out = Outgoing.make(connection)
        self._in: Incoming | None = None
        self._has_heard = False
        self.below_bytes = DIRECT_BYTES
        """Messages of fewer bytes go by this link; the same at both ends."""
        if self._out is None:
            connection.sendall(_HAS_NOT)
        else:
            socket.send_fds(connection, [_HAS], self._out.ring.files)

    def agree(self, within_s: float) -> bool:
        """Hear what the other end says next, if it does within some seconds; else False, to be called again.

        Both ends hear twice before the first message: whether the other has memory to share, and whether it
        could open this one's. An end waits for nothing before it says either, so many links are agreed on
        one after another: all of them once, then all again.
        """
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if not poll.poll(1000 * within_s):
            return False
        said, files, *_ = socket.recv_fds(self._socket, len(_HAS), Ring.n_files)
        if not said:
            raise ConnectionResetError("the other end of the link is gone")
        if self._has_heard:
            if said == _HAS and self._in is not None and self._out is not None:
                self.below_bytes = MOST_BYTES + 1
            return True
        self._has_heard = True
        self._in = Incoming.of(files) if said == _HAS else None
        self._socket.sendall(_HAS if self._in is not None else _HAS_NOT)
        return True

    def send(self, tensor: Tensor) -> Sent:
        """Send a contiguous CPU tensor; it may be changed as soon as this returns."""
        n_bytes = tensor.nbytes
        if n_bytes < DIRECT_BYTES:
            self._socket.sendall(memory(tensor))
        else:
            if self._out is None:
                raise ConnectionResetError("this end of the link is closed")
            place = self._out.put(tensor.data_ptr(), n_bytes)
            self._socket.sendall(place.to_bytes(_PLACE_BYTES, "little"))
        return SENT

    def recv(self, tensor: Tensor) -> Arrival:
        """Expect a message in a contiguous CPU tensor; ``wait()`` on what is returned fills it."""
        return Arrival(self, tensor, self.expect(tensor))

    def expect(self, tensor: Tensor) -> int:
        """Expect a message in a contiguous CPU tensor; its number, which :meth:`fill` fills it by."""
        shared = 0 if tensor.nbytes < DIRECT_BYTES else tensor.nbytes
        # at most: memory in powers of two, and its bookkeeping
        n_buffered = 2 * (_PLACE_BYTES if shared else tensor.nbytes) + 1024
        self._unread += n_buffered
        self._unread_shared += shared
        while self._coming and (self._unread > self._room or self._unread_shared > Ring.n_bytes):
            self.fill(self._n_here + 1)
        self._coming.append((tensor, n_buffered, shared))
        self._n_expected += 1
        return self._n_expected

    def fill(self, number: int) -> None:
        """Wait for the messages that are expected, in order, up to one."""
        while self._n_here < number:
            tensor, n_buffered, shared = self._coming.popleft()
            self._unread -= n_buffered
            self._unread_shared -= shared
            if shared:
                place = bytearray(_PLACE_BYTES)
                self._read(place, _PLACE_BYTES)
                if self._in is None:
                    raise ConnectionResetError("this end of the link is closed")
                self._in.take(int.from_bytes(place, "little"), tensor.data_ptr(), shared)
            else:
                self._read(memory(tensor), tensor.nbytes)
            self._n_here += 1

    def _read(self, room: Any, n_bytes: int) -> None:
        """Fill what room there is; in parts where a signal or the other end keeps some."""
        n_read = self._socket.recv_into(room, n_bytes, socket.MSG_WAITALL)
        while n_read < n_bytes:
            rest = memoryview(room).cast("B")[n_read:]
            n_more = self._socket.recv_into(rest, len(rest), socket.MSG_WAITALL)
            if n_more == 0:
                raise ConnectionResetError("the other end of the link is gone")
            n_read += n_more

    def abort(self) -> None:
        """Break the connection: calls that wait, here and at the other end, raise at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def is_broken(self) -> bool:
        """Whether the other end has closed it, or is gone."""
        return is_broken(self._socket)

    def close(self) -> None:
        """Give the socket back, and the shared memory."""
        self._socket.close()
        self._out = self._in = None


class Arrival(msgspec.Struct, eq=False):
    """A message on its way into ``tensor``, and its number among those expected of a link."""

    link: Link
    tensor: Tensor
    number: int

    def wait(self, _limit: object = None) -> None:
        """Return once the message is here, and those expected before it."""
        self.link.fill(self.number)


class Sent:
    """A message that has left."""

    def wait(self, _limit: object = None) -> None:
        """Return at once."""


SENT = Sent()
