"""The key of a job: what makes its ranks' messages its own, though others may reach its ports.

Who sends what is left to ``board`` and ``peers``. A message carries a code that only the key can make, for
that message in that place; any other is as if it had not come.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import pathlib
import secrets
import stat
import tempfile

__all__ = ["KEY_VARIABLE", "Seal", "attempt", "job_key"]

CODE_HEX = 32
SECRET_BYTES = 32
KEY_VARIABLE = "AUTOPIPE_JOB_KEY"
_logger = logging.getLogger(__name__)


def attempt() -> str:
    """Which start of the job this is, for names in a store that outlives a restart."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def job_key() -> bytes:
    """``AUTOPIPE_JOB_KEY``; else, on one host, a secret that only this user can read.

    Without either (several hosts; or, with a warning, no folder to keep a secret in) it is made of what the
    job's environment says of itself, which keeps accidents out but nobody who knows it.
    """
    given = os.environ.get(KEY_VARIABLE)
    if given:
        return hashlib.sha256(given.encode()).digest()
    secret = b""
    if _is_one_host():
        try:
            secret = _users_secret()
        except (OSError, RuntimeError) as error:  # the latter where a user has no home
            _logger.warning(
                "no secret of this user can be kept (%s): who knows this job's address can speak for its "
                "ranks; set %s to a secret",
                error,
                KEY_VARIABLE,
            )
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    said = "/".join(os.environ.get(name, "") for name in names)
    return hashlib.sha256(secret + said.encode()).digest()


def _is_one_host() -> bool:
    n_here, n_all = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if n_here is not None and n_all is not None:
        return n_here == n_all
    return os.environ.get("MASTER_ADDR", "") in ("127.0.0.1", "localhost", "::1")


def _users_secret() -> bytes:
    """The secret of this user on this host, made at first. Raises ``OSError`` where none can be kept safe."""
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (pathlib.Path(home) if home else pathlib.Path.home() / ".cache") / "autopipe"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / "job-key"
    if not path.exists():
        with tempfile.NamedTemporaryFile(dir=folder) as made:  # only this user can read it
            made.write(secrets.token_bytes(SECRET_BYTES))
            made.flush()
            os.fsync(made.fileno())
            with contextlib.suppress(FileExistsError):
                os.link(made.name, path)
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{path} can be read by others")
        secret = file.read()
    if len(secret) < SECRET_BYTES:
        raise PermissionError(f"{path} holds {len(secret)} bytes of {SECRET_BYTES}; remove it")
    return secret


class Seal:
    """Seals texts for one pipeline of one start of a job."""

    def __init__(self, key: bytes, name: str) -> None:
        self._key = hmac.digest(key, name.encode(), "sha256")

    def code(self, place: str, text: str) -> str:
        """What only the key makes of a text in its place."""
        return hmac.digest(self._key, f"{place}\0{text}".encode(), "sha256").hex()[:CODE_HEX]

    def close(self, place: str, text: str) -> str:
        """The text with its code before it."""
        return self.code(place, text) + text

    def open(self, place: str, sealed: bytes) -> str | None:
        """The text; None where the code is not ours."""
        try:
            found = sealed.decode()
        except UnicodeDecodeError:
            return None
        code, text = found[:CODE_HEX], found[CODE_HEX:]
        return text if hmac.compare_digest(code.encode(), self.code(place, text).encode()) else None
