"""Files that users name: opened where they are regular, read up to a size, or written whole, or told why not.

What they hold is left to the rooms that read them.
"""

from __future__ import annotations

import functools
import operator
import os
import pathlib
import secrets
import shutil
import stat

from .arguments import place
from .errors import StoreError

__all__ = ["open_regular", "read_bytes", "read_text", "unreadable", "write_text"]

_PIECE_BYTES = 1 << 20
# those that the system has: without waiting, where it is a pipe, for somebody at its other end
_FLAGS = functools.reduce(
    operator.or_, (getattr(os, name, 0) for name in ("O_CLOEXEC", "O_NONBLOCK", "O_BINARY"))
)

Path = str | os.PathLike[str]


def open_regular(path: Path, what: str = "", *, follows_links: bool = True) -> tuple[int, int]:
    """(descriptor, size in bytes) of a regular file, which ``what`` names in errors.

    Raises :class:`StoreError` for what cannot be opened, and for folders, pipes, sockets and devices.
    """
    try:
        fd = os.open(path, _FLAGS if follows_links else _FLAGS | os.O_NOFOLLOW)
    except (OSError, ValueError) as error:
        raise unreadable(path, error, what) from error
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise _refused(path, what, "it is no regular file", "give the file itself, not a pipe or a folder")
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
        raise unreadable(path, error, what) from error
    if n_bytes > most:
        raise _refused(
            path, what, f"it has {n_bytes} bytes or more, and such a file at most {most}", "give another"
        )
    return b"".join(pieces)


def read_text(path: Path, most: int, what: str = "") -> str:
    """The text of a regular file of at most ``most`` bytes of UTF-8, less the mark some editors begin with.

    Raises :class:`StoreError`.
    """
    try:
        return read_bytes(path, most, what).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise unreadable(path, error, what) from error


def unreadable(path: Path, error: Exception, what: str = "") -> StoreError:
    """What to raise where reading a file, which ``what`` names, ended in ``error``."""
    remedy = next((told for kinds, told in _REMEDIES if isinstance(error, kinds)), "give another")
    return _refused(path, what, getattr(error, "strerror", None) or str(error), remedy)


_REMEDIES: tuple[tuple[tuple[type[Exception], ...], str], ...] = (
    ((FileNotFoundError, NotADirectoryError), "give the path of one that is there"),
    ((PermissionError,), "give one that this user may read"),
    ((UnicodeDecodeError,), "give one of text in UTF-8"),
)


def _refused(path: Path, what: str, why: str, remedy: str) -> StoreError:
    source = f"{what} from {path}" if what else f"{path}"
    return StoreError(f"cannot read {source}: {why}; {remedy}")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text to a file, whole or not at all: what was there stays until one rename replaces it.

    Of a link the target is replaced. A pipe or device is written to as it is, and so is a file in a folder
    that takes no others. Raises :class:`StoreError`.
    """
    try:
        given = place("path", path)
        target = pathlib.Path(os.path.realpath(given))
        if given.exists() and not (given.is_file() and os.access(target.parent, os.W_OK)):
            _write_at(given, text, os.O_TRUNC)
        else:
            _replace(target, text)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise StoreError(f"cannot write {path}: {why}; give a place that can be written to") from error


def _replace(path: pathlib.Path, text: str) -> None:
    aside = path.with_name(f".{secrets.token_hex(8)}.new")
    try:
        _write_at(aside, text, os.O_CREAT | os.O_EXCL)
        if path.exists():
            shutil.copymode(path, aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _write_at(path: pathlib.Path, text: str, flags: int) -> None:
    fd = os.open(path, _FLAGS | os.O_WRONLY | flags, 0o666)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        os.set_blocking(fd, True)
        file.write(text)
        file.flush()
        if path.is_file():
            os.fsync(fd)
