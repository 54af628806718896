"""Files that a user names: opened where they are regular ones, read up to a size, or told why not.

What they hold is left to the rooms that read them.
"""

from __future__ import annotations

import functools
import operator
import os
import stat

from .errors import StoreError

__all__ = ["open_regular", "read_bytes", "read_text"]

_PIECE_BYTES = 1 << 20
# those that the system has: without waiting, where it is a pipe, for somebody who writes to it
_FLAGS = functools.reduce(
    operator.or_, (getattr(os, name, 0) for name in ("O_RDONLY", "O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
)

Path = str | os.PathLike[str]


def open_regular(path: Path, what: str = "", *, follows_links: bool = True) -> tuple[int, int]:
    """(descriptor, size in bytes) of a regular file, which ``what`` names in errors.

    Raises :class:`StoreError` for what cannot be opened, and for folders, pipes, sockets and devices.
    """
    try:
        fd = os.open(path, _FLAGS if follows_links else _FLAGS | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        raise _refused(path, what, error) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise _refused(path, what, "it is no regular file; give the file itself, not a pipe or a folder")
    return fd, found.st_size


def read_bytes(path: Path, most: int, what: str = "", *, follows_links: bool = True) -> bytes:
    """All of a regular file of at most ``most`` bytes, whatever size the system says it has.

    Raises :class:`StoreError`.
    """
    fd, n_bytes = open_regular(path, what, follows_links=follows_links)
    pieces: list[bytes] = []
    try:
        with os.fdopen(fd, "rb") as file:
            while n_bytes <= most and (piece := file.read(_PIECE_BYTES)):
                pieces.append(piece)
                n_bytes = max(n_bytes, _PIECE_BYTES * (len(pieces) - 1) + len(piece))
    except OSError as error:
        raise _refused(path, what, error) from error
    if n_bytes > most:
        raise _refused(path, what, f"it has {n_bytes} bytes or more, and such a file at most {most}")
    return b"".join(pieces)


def read_text(path: Path, most: int, what: str = "") -> str:
    """The text of a regular file of at most ``most`` bytes of UTF-8, less the mark some editors begin with.

    Raises :class:`StoreError`.
    """
    try:
        return read_bytes(path, most, what).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(path, what, error) from error


def _refused(path: Path, what: str, why: str | Exception) -> StoreError:
    source = f"{what} from {path}" if what else f"{path}"
    return StoreError(f"cannot read {source}: {getattr(why, 'strerror', None) or why}")
