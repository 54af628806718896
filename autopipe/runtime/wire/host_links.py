"""Direct connections between ranks on one host: who finds whom, and that it is who it says.

What goes over a connection is left to ``host_link``; large messages between hosts to ``group``.
"""

from __future__ import annotations

import contextlib
import hmac
import pathlib
import socket
import tempfile
import time
from collections.abc import Callable, Collection

from ...host_link import Link
from .board import Board

__all__ = ["connect"]

POLL_S = 0.1
CARD_S = 2.0
"""How long who knocks may take to say who it is."""


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
    for other, link in 2 * list(links.items()):
        while not link.agree(POLL_S):
            check(other)
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
