"""Keeps measurements on disk: one small JSON file per measurement, named by a hash of what was measured.

What is measured, and what is done with a file that is refused, is left to the callers.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import StoreError
from ..files import write_text
from ..schema import load, versioned

__all__ = ["Store"]

VERSION = 1


class Store:
    """A folder of measurements, shared by all models and processes of a user.

    A measurement's address is the hash of its kind and key; the key says everything the figures depend on
    (op signature, dims, device, dtype, torch version, …). Each file repeats its key and carries a checksum
    of its content. Files are written whole beside their place and then moved there, so that readers and
    interrupted writers never meet half a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = Store(folder)
    ...     store.put("op", {"signature": "Linear", "torch": "2.13"}, {"seconds": [0.5]})
    ...     store.get("op", {"signature": "Linear", "torch": "2.13"}), store.get("op", {"torch": "2.14"})
    ({'seconds': [0.5]}, None)
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.root = pathlib.Path(root).expanduser()

    @classmethod
    def default(cls) -> Store:
        """The user's own: ``$AUTOPIPE_STORE``, else ``autopipe`` in the user's cache folder."""
        cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        return cls(os.environ.get("AUTOPIPE_STORE", str(pathlib.Path(cache) / "autopipe")))

    def path(self, kind: str, key: Mapping[str, Any]) -> pathlib.Path:
        """Where a measurement is, or would be."""
        name = _digest([VERSION, kind, dict(key)])
        return self.root / kind / name[:2] / f"{name}.json"

    def get(self, kind: str, key: Mapping[str, Any]) -> Any:
        """The measurement kept under a key, or None.

        Raises :class:`StoreError`, naming the file and the reason, for one that is damaged, was written by
        another version, or holds something else than its name says.
        """
        path = self.path(kind, key)
        try:
            data = _read(path)
        except FileNotFoundError:
            return None
        if data["kind"] != kind or data["key"] != _plain(key):
            raise StoreError(f"{path} holds the measurement of something else; delete it")
        return data["value"]

    def put(self, kind: str, key: Mapping[str, Any], value: Any) -> None:
        """Keeps a JSON value under a key, in the place of what was there.

        Raises :class:`StoreError` where the folder cannot be written to.
        """
        body = {"kind": kind, "key": _plain(key), "value": value}
        text = json.dumps({"version": VERSION, **body, "checksum": _digest(body)})
        path = self.path(kind, key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, text)
        except (OSError, StoreError) as error:
            raise StoreError(
                f"cannot keep measurements in {self.root}: {error.__cause__ or error}; give a folder "
                "that can be written to, as store= or in AUTOPIPE_STORE"
            ) from error

    def entries(self, kind: str) -> Iterator[tuple[dict[str, Any], Any]]:
        """Every (key, value) of a kind. Raises :class:`StoreError` at the first file that is not sound."""
        for path in sorted((self.root / kind).glob("??/*.json")):
            data = _read(path)
            yield data["key"], data["value"]


def _read(path: pathlib.Path) -> dict[str, Any]:
    if not path.exists():
        raise FileNotFoundError(path)
    try:
        data = versioned(load(path, "the measurement"), VERSION, f"the measurement {path}")
    except StoreError as error:
        raise StoreError(f"{error}: {path} is damaged or of another version; delete it") from error
    body = {name: data.get(name) for name in ("kind", "key", "value")}
    if data.get("checksum") != _digest(body):
        raise StoreError(f"{path} is damaged: its checksum does not match; delete it to measure again")
    return body


def _plain(key: Mapping[str, Any]) -> Any:
    """A key as JSON gives it back."""
    return json.loads(json.dumps(dict(key)))


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
