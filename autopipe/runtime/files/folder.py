"""A directory that appears whole or not at all: drafted beside its place, put there by one rename.

What is in it is left to ``saving``; here are drafts, what a kill left of them, and the oldest of a row.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import pathlib
import re
import secrets
import shutil
from collections.abc import Iterable

from ...errors import InputError, StoreError

__all__ = ["MANIFEST", "Draft", "forget_oldest", "resolve", "step_path", "steps_in", "sync"]

MANIFEST = "autopipe.json"
OWN = re.compile(
    r"autopipe\.json|(model|state)-\d{5,}-of-\d{5,}\.(safetensors|json)"
    r"|model\.safetensors\.index\.json|(generation_)?config\.json"
)
"""Names that a save gives its files, for where a damaged manifest does not say."""
_AT_FDCWD, _EXCHANGE = -100, 2
_logger = logging.getLogger(__name__)
_STEP = re.compile(r"step-(\d{8,})")
_GOING = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}\.part")
_ASIDE = re.compile(r"\.(step-\d{8,})\.[0-9a-f]{8}\.old")


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
        with contextlib.suppress(OSError):  # some file systems know no locks: what the dead left stays there
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def commit(self) -> None:
        """Put it in its place, whatever earlier save is there; what was added to that one comes along."""
        sync(self.path)
        check_replaceable(self.target)
        is_new = not self.target.exists()
        if is_new:
            self.path.rename(self.target)
        else:
            self._take_over()
            sync(self.path)
            _exchange(self.path, self.target)
        try:
            sync(self.target.parent)
        except OSError as error:  # it is in its place
            _logger.warning("%s is whole, but may go with a crash of its host: %s", self.target, error)
        if not is_new:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def drop(self) -> None:
        """Give it up."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            with contextlib.suppress(OSError):  # where it was not locked; a forked child may hold it too
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = -1

    def _take_over(self) -> None:
        """What a user put beside an earlier save, such as a tokenizer's files; that one may be damaged."""
        from .manifest import read_manifest

        there = {file.name for file in self.target.iterdir()}
        try:
            own = {MANIFEST, *(read_manifest(self.target).files if there else ())}
        except StoreError:
            own = {name for name in there if OWN.fullmatch(name)}
        for name in there - own:
            if not (self.path / name).exists():
                shutil.copy2(self.target / name, self.path / name, follow_symlinks=False)


def check_replaceable(target: pathlib.Path) -> None:
    """Raise :class:`InputError` where a save at ``target`` would destroy what is no earlier save."""
    if target.is_symlink():
        raise InputError(f"{target} is a symbolic link, which a save does not follow; give the folder itself")
    if not target.exists():
        return
    if not target.is_dir():
        raise InputError(f"{target} is a file; give a new folder to save in")
    if target.samefile(os.curdir):
        raise InputError(
            f"{target.absolute()} is the working directory, which a save would replace; give a folder in it"
        )
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


def sync(folder: pathlib.Path) -> None:
    """Have the system write what it holds back of a directory's names, where its file system has that."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            raise
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
    try:
        new.rename(old)
    except OSError:
        aside.rename(old)
        raise
    aside.rename(new)


def resolve(path: pathlib.Path) -> pathlib.Path:
    """``path``, or where nothing is there what a kill between two renames left of it."""
    if path.exists():
        return path
    left = _left_of(path, "old") if path.parent.is_dir() else []
    return left[-1] if left else path


def _left_of(target: pathlib.Path, kind: str) -> list[pathlib.Path]:
    """Directories beside ``target`` that saves of it, and of no other name, made."""
    pattern = re.compile(re.escape(f".{target.name}.") + rf"[0-9a-f]{{8}}\.{kind}")
    return sorted(p for p in target.parent.iterdir() if pattern.fullmatch(p.name))


def _sweep(target: pathlib.Path) -> None:
    """Remove drafts of the same directory whose makers are dead; put back what they set aside."""
    left = resolve(target)
    if left != target:
        left.rename(target)
    _remove_dead(_left_of(target, "(part|old)"))


def _remove_dead(drafts: Iterable[pathlib.Path]) -> None:
    """Remove those whose makers are dead."""
    for stale in drafts:
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
    """The whole saves of a row, newest first; one that a kill left set aside by the name it has."""
    if not root.is_dir():
        return []
    named = {root / (aside[1] if (aside := _ASIDE.fullmatch(p.name)) else p.name) for p in root.iterdir()}
    found = [p for p in named if _STEP.fullmatch(p.name) and (resolve(p) / MANIFEST).is_file()]
    return sorted(found, key=_number, reverse=True)


def forget_oldest(root: pathlib.Path, n_kept: int, n_steps: int) -> None:
    """Remove the saves of a row before the newest ``n_kept`` of those up to step ``n_steps``.

    Later ones, of a run that went further, stay. What cannot be removed stays with a warning, as does what
    somebody put folders in: the save that was just made is whole.
    """
    try:
        saves = steps_in(root)
        _remove_dead([p for p in root.iterdir() if _GOING.fullmatch(p.name)])
    except OSError as error:
        _logger.warning("older saves stay, since %s cannot be looked through: %s", root, error)
        return
    later = [p.name for p in saves if _number(p) > n_steps]
    if later:
        _logger.warning(
            "%s holds %s, later than this save at step %d: another run made it, and resume() will go on from "
            "it; use another folder, or remove it",
            root,
            later[0],
            n_steps,
        )
    for old in [p for p in saves if _number(p) <= n_steps][n_kept:]:
        try:
            _remove(resolve(old), root / f".{old.name}.{secrets.token_hex(4)}.part")
        except OSError as error:
            _logger.warning(
                "cannot remove %s, older than the %d to keep: %s", old, n_kept, error.strerror or error
            )


def _remove(save: pathlib.Path, aside: pathlib.Path) -> None:
    """Remove a save, set ``aside`` first so that none is ever seen in part."""
    if save.is_symlink():
        save.unlink()
        return
    inner = [entry.name for entry in save.iterdir() if entry.is_dir()]
    if inner:
        raise OSError(errno.ENOTEMPTY, f"it holds folders that no save makes ({', '.join(inner[:3])})")
    save.rename(aside)
    shutil.rmtree(aside)


def _number(save: pathlib.Path) -> int:
    return int(save.name.removeprefix("step-"))
