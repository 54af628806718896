"""Memory that two processes of a host share, in which messages go round: in at one end, out at the other.

Where a message lies is said by ``link``, over the connection whose ends the two are.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select
import socket
import weakref

__all__ = ["Incoming", "Outgoing", "Ring", "is_broken"]


class Ring:
    """Shared memory by its file, and a counter of bytes that are free again, as an event of the kernel's.

    No more of it is in memory than messages have been under way at once.
    """

    n_bytes = 1 << 26
    n_files = 2

    def __init__(self, memory: int, freed: int) -> None:
        self.files = [memory, freed]
        self._memory = mmap.mmap(memory, self.n_bytes)
        weakref.finalize(self, _closed, memory, freed)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def spans(self, place: int, n_bytes: int) -> list[tuple[int, int, int]]:
        """Of what lies at a place: (address, bytes in front of it, bytes), in two where it goes round."""
        first = min(n_bytes, self.n_bytes - place)
        found = [(self._address + place, 0, first)]
        return [*found, (self._address, first, n_bytes - first)] if first < n_bytes else found


class Outgoing:
    """The end that messages are put into a ring at."""

    def __init__(self, ring: Ring, connection: socket.socket) -> None:
        self.ring, self._connection = ring, connection
        self._next, self._n_free = 0, ring.n_bytes

    @classmethod
    def make(cls, connection: socket.socket) -> Outgoing | None:
        """With a ring of its own; None where the system has none to give."""
        if not (hasattr(os, "memfd_create") and hasattr(os, "eventfd")):
            return None
        with contextlib.ExitStack() as undo:
            try:
                memory = os.memfd_create("autopipe", os.MFD_CLOEXEC)
                undo.callback(os.close, memory)
                os.truncate(memory, Ring.n_bytes)
                freed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                undo.callback(os.close, freed)
                ring = Ring(memory, freed)
            except OSError:
                return None
            undo.pop_all()
        return cls(ring, connection)

    def put(self, address: int, n_bytes: int) -> int:
        """Copy what lies at an address into the ring; its place there. Waits until there is room."""
        self._take_back()
        while self._n_free < n_bytes:
            if not _is_readable(self.ring.files[1], self._connection):
                raise ConnectionResetError("the other end of the link is gone")
            self._take_back()
        if self._n_free == Ring.n_bytes:  # what was there last may still be in a cache
            self._next = 0
        place = self._next
        for there, before, n in self.ring.spans(place, n_bytes):
            ctypes.memmove(there, address + before, n)
        self._next = (place + n_bytes) % Ring.n_bytes
        self._n_free -= n_bytes
        return place

    def _take_back(self) -> None:
        """Have what the other end has freed."""
        if self._n_free < Ring.n_bytes:
            with contextlib.suppress(BlockingIOError):
                self._n_free += os.eventfd_read(self.ring.files[1])


class Incoming:
    """The end that messages are taken from a ring at."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring

    @classmethod
    def of(cls, files: list[int]) -> Incoming | None:
        """Of the files of another process's ring; None where they cannot be opened here."""
        with contextlib.ExitStack() as undo:
            undo.callback(_closed, *files)
            if len(files) < Ring.n_files:
                return None
            try:
                ring = Ring(*files)
            except OSError:
                return None
            undo.pop_all()
        return cls(ring)

    def take(self, place: int, address: int, n_bytes: int) -> None:
        """Copy what lies at a place of the ring to an address, and free it."""
        for there, before, n in self._ring.spans(place, n_bytes):
            ctypes.memmove(address + before, there, n)
        os.eventfd_write(self._ring.files[1], n_bytes)


def is_broken(connection: socket.socket) -> bool:
    """Whether the other end has closed a connection, or is gone; False of one that is closed here."""
    poll = select.poll()
    try:
        poll.register(connection, _GONE)
    except ValueError:
        return False
    return bool(poll.poll(0))


_GONE = getattr(select, "POLLRDHUP", select.POLLHUP)


def _is_readable(file: int, connection: socket.socket) -> bool:
    """Wait for something to be read from a file; False once a connection is broken instead."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    poll.register(connection, _GONE)
    return any(found == file for found, _ in poll.poll())


def _closed(*files: int) -> None:
    for file in files:
        os.close(file)
