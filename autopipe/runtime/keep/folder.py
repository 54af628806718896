"""A directory that appears whole or not at all: drafted beside its place, put there by one rename.

What is in it is left to ``saving``; here are drafts, what a kill left of them, and the oldest of a row.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import pathlib
import re
import secrets
import shutil

from ...errors import InputError, StoreError

__all__ = ["MANIFEST", "Draft", "forget_oldest", "resolve", "step_path", "steps_in", "sync"]

MANIFEST = "autopipe.json"
_AT_FDCWD, _EXCHANGE = -100, 2
_STEP = re.compile(r"step-(\d{8,})")


class Draft:
    """A new directory under way, locked as long as its maker lives.

    Attributes
    ----------
    path: where it is now. target: where it will be.
    """

    def __init__(self, target: pathlib.Path) -> None:
        """Raises :class:`InputError` where ``target`` is something that must not be replaced."""
        check_replaceable(target)
        self.target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        self.path = target.parent / f".{target.name}.{secrets.token_hex(4)}.part"
        self.path.mkdir()
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def commit(self) -> None:
        """Put it in its place, whatever earlier save is there; what was added to that one comes along."""
        sync(self.path)
        check_replaceable(self.target)
        if self.target.exists():
            self._take_over()
            sync(self.path)
            _exchange(self.path, self.target)
            sync(self.target.parent)
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.rename(self.target)
            sync(self.target.parent)
        self._unlock()

    def drop(self) -> None:
        """Give it up."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_over(self) -> None:
        """What a user put beside an earlier save, such as a tokenizer's files."""
        from .manifest import read_manifest

        if not (self.target / MANIFEST).exists():
            return
        ours = {MANIFEST, *read_manifest(self.target).files}
        for file in self.target.iterdir():
            if file.name not in ours and not (self.path / file.name).exists():
                shutil.copy2(file, self.path / file.name, follow_symlinks=False)


def check_replaceable(target: pathlib.Path) -> None:
    """Raise :class:`InputError` where a save at ``target`` would destroy what is no earlier save."""
    if target.is_symlink():
        raise InputError(f"{target} is a symbolic link, which a save does not follow; give the folder itself")
    if not target.exists():
        return
    if not target.is_dir():
        raise InputError(f"{target} is a file; give a new folder to save in")
    names = sorted(entry.name for entry in target.iterdir())
    if names and MANIFEST not in names:
        raise InputError(
            f"{target} holds {', '.join(names[:3])} and is no checkpoint that a save may replace; give a new "
            "folder"
        )
    inner = [name for name in names if (target / name).is_dir()]
    if inner:
        raise InputError(
            f"{target} holds folders ({', '.join(inner[:3])}) that a save would lose; give a new one"
        )


def sync(path: pathlib.Path) -> None:
    """Have the system write what it holds back of a file or a directory's names."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(new: pathlib.Path, old: pathlib.Path) -> None:
    """Swap two directories: in one call where the file system can, else in two with the old one set aside."""
    if hasattr(ctypes.CDLL(None), "renameat2"):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _EXCHANGE) == 0:
            return
        if ctypes.get_errno() not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(old))
    aside = old.parent / f".{old.name}.{secrets.token_hex(4)}.old"
    old.rename(aside)
    new.rename(old)
    aside.rename(new)


def resolve(path: pathlib.Path) -> pathlib.Path:
    """``path``, or where nothing is there what a kill between two renames left of it."""
    if path.exists():
        return path
    left = sorted(path.parent.glob(f".{path.name}.*.old")) if path.parent.is_dir() else []
    return left[-1] if left else path


def _sweep(target: pathlib.Path) -> None:
    """Remove drafts of the same directory whose makers are dead; put back what they set aside."""
    left = resolve(target)
    if left != target:
        left.rename(target)
    for stale in [
        *target.parent.glob(f".{target.name}.*.part"),
        *target.parent.glob(f".{target.name}.*.old"),
    ]:
        with contextlib.suppress(OSError):
            fd = os.open(stale, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(stale)
            finally:
                os.close(fd)


# -- rows of saves ----------------------------------------------------------------------------------------


def step_path(root: pathlib.Path, n_steps: int) -> pathlib.Path:
    """Where the save after ``n_steps`` steps is in a row of them."""
    return root / f"step-{n_steps:08d}"


def steps_in(root: pathlib.Path) -> list[pathlib.Path]:
    """The whole saves of a row, newest first."""
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if _STEP.fullmatch(p.name) and (p / MANIFEST).is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")), reverse=True)


def forget_oldest(root: pathlib.Path, n_kept: int) -> None:
    """Remove all but the newest ``n_kept`` saves of a row. Raises :class:`StoreError` where that fails."""
    for old in steps_in(root)[n_kept:]:
        gone = root / f".{old.name}.{secrets.token_hex(4)}.part"
        try:
            old.rename(gone)
            shutil.rmtree(gone)
        except OSError as error:
            raise StoreError(
                f"cannot remove {old}, older than the {n_kept} to keep: {error.strerror}"
            ) from error
