"""Direct connections between ranks on one host, for small messages: a Unix socket for each pair of ranks.

Large messages, and those between hosts, are left to ``group``.

A message here is one system call on each side, made by the thread that computes. A communicator instead
shakes hands for every message and hands it to a thread of its own: waking that costs several times what the
microbatch of a small model does.
"""

from __future__ import annotations

import collections
import contextlib
import hmac
import pathlib
import select
import socket
import tempfile
import time
from collections.abc import Callable, Collection

import msgspec
from torch import Tensor

from ...accelerator import memory
from .board import Board

__all__ = ["SENT", "Link", "connect"]

POLL_S = 0.1
CARD_S = 2.0
"""How long who knocks may take to say who it is."""
BUFFER_BYTES = 1 << 20
"""The socket buffer asked for; Linux grants 416 KiB by default."""


class Link:
    """One end of a connection: tensors arrive in the order they were sent.

    A send ends at the latest once the other end expects the message: of what is expected, no more than a
    quarter of the socket's buffer is ever left unread, and below that Linux lets a sender go on. So whatever
    order is safe for sends that wait for their receive is safe here. Raises ``ConnectionError`` once the
    other end, or :meth:`abort`, has closed the link.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        self._room = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 4
        self._socket = connection
        self._coming: collections.deque[tuple[Tensor, int]] = collections.deque()
        self._unread = self._n_expected = self._n_here = 0

    def send(self, tensor: Tensor) -> Sent:
        """Send a contiguous CPU tensor; it may be changed as soon as this returns."""
        self._socket.sendall(memory(tensor))
        return SENT

    def recv(self, tensor: Tensor) -> Arrival:
        """Expect a message in a contiguous CPU tensor; ``wait()`` on what is returned fills it."""
        return Arrival(self, tensor, self.expect(tensor))

    def expect(self, tensor: Tensor) -> int:
        """Expect a message in a contiguous CPU tensor; its number, which :meth:`fill` fills it by."""
        n_buffered = 2 * tensor.nbytes + 1024  # at most: memory in powers of two, and its bookkeeping
        self._unread += n_buffered
        while self._coming and self._unread > self._room:
            self.fill(self._n_here + 1)
        self._coming.append((tensor, n_buffered))
        self._n_expected += 1
        return self._n_expected

    def fill(self, number: int) -> None:
        """Wait for the messages that are expected, in order, up to one."""
        while self._n_here < number:
            tensor, n_buffered = self._coming.popleft()
            self._unread -= n_buffered
            room, n_bytes = memory(tensor), tensor.nbytes
            n_read = self._socket.recv_into(room, n_bytes, socket.MSG_WAITALL)
            if n_read < n_bytes:
                self._read_rest(memoryview(room).cast("B")[n_read:])
            self._n_here += 1

    def _read_rest(self, room: memoryview) -> None:
        """Fill what is left of a tensor, of which a signal or the other end has kept some."""
        while room:
            n_read = self._socket.recv_into(room, len(room), socket.MSG_WAITALL)
            if n_read == 0:
                raise ConnectionResetError("the other end of the link is gone")
            room = room[n_read:]

    def abort(self) -> None:
        """Break the connection: calls that wait, here and at the other end, raise at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    @property
    def is_broken(self) -> bool:
        """Whether the other end has closed it, or is gone."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLRDHUP if hasattr(select, "POLLRDHUP") else select.POLLHUP)
        except ValueError:
            return False  # closed here
        return bool(poll.poll(0))

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()


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


def connect(board: Board, rank: int, n_ranks: int, check: Callable[[int], None]) -> dict[int, Link]:
    """Links from ``rank`` to the ranks of a pipeline it shares a host with; each rank calls it once.

    Every rank opens a socket in a folder only its user can enter, and knocks at those of lower ranks: who
    finds the folder is on the same host. Who knocks says which rank it is, sealed with the job's key. While
    it waits for a rank it calls ``check`` with that rank again and again, which raises when there is no use.
    """
    if not hasattr(socket, "AF_UNIX"):
        return {}
    links: dict[int, Link] = {}
    with tempfile.TemporaryDirectory(prefix="autopipe-") as folder, _socket() as door:
        path = str(pathlib.Path(folder) / "door")
        with contextlib.suppress(OSError):  # a folder whose name is too long for a socket: nobody finds it
            door.bind(path)
            door.listen(n_ranks)
            door.settimeout(POLL_S)
        board.post(f"door/{rank}", path)
        for lower in range(rank):
            connection = _knock(_await(board, f"door/{lower}", lower, check))
            board.post(f"knock/{rank}/{lower}", "" if connection is None else "here")
            if connection is not None:
                connection.sendall(_card(board, rank, lower))
                links[lower] = Link(connection)
        coming = {h for h in range(rank + 1, n_ranks) if _await(board, f"knock/{h}/{rank}", h, check)}
        while coming:
            found = _answer(board, door, rank, coming)
            if found is None:
                check(min(coming))
            else:
                links[found[0]] = Link(found[1])
                coming.discard(found[0])
    return links


def _await(board: Board, key: str, source: int, check: Callable[[int], None]) -> str:
    while (found := board.look(key)) is None:
        check(source)
        time.sleep(0.002)
    return found


def _card(board: Board, rank: int, lower: int) -> bytes:
    return rank.to_bytes(4, "little") + board.seal.code(f"link/{rank}/{lower}", "").encode()


def _answer(
    board: Board, door: socket.socket, rank: int, coming: Collection[int]
) -> tuple[int, socket.socket] | None:
    """Who knocked, and its connection; None where nobody did who belongs here."""
    try:
        connection, _ = door.accept()
    except TimeoutError:
        return None
    connection.settimeout(CARD_S)
    try:
        card = connection.recv(len(_card(board, 0, 0)), socket.MSG_WAITALL)
    except OSError:
        card = b""
    higher = int.from_bytes(card[:4], "little")
    if higher in coming and hmac.compare_digest(card, _card(board, higher, rank)):
        connection.settimeout(None)
        return higher, connection
    connection.close()
    return None


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)


def _knock(path: str) -> socket.socket | None:
    connection = _socket()
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection
