"""Runs a notebook from a fresh kernel, for the tests and for the command that saves their outputs."""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import Any

from nbclient import NotebookClient
from traitlets.config import Config

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LIMIT_S = 30
"""A notebook takes less on two idle cores."""


def execute(notebook: Any, folder: str | pathlib.Path, timeout_s: float) -> float:
    """Run every cell in ``folder``, filling in outputs; the seconds it took, the kernel's start included.

    The kernel is reached through files instead of ports: a free port found before the kernel binds it may
    be taken by another process meanwhile, and the kernel then dies of "address already in use".
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kernel") as place:
        reached = {"transport": "ipc", "connection_file": str(pathlib.Path(place) / "k.json")}
        NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=timeout_s,
            resources={"metadata": {"path": str(folder)}},
            record_timing=False,
            config=Config(ConnectionFileMixin=reached),
        ).execute()
    return time.perf_counter() - start
