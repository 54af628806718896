"""Runs a notebook from a fresh kernel, for the tests and for the command that saves their outputs."""

from __future__ import annotations

import pathlib
import tempfile
import time
from typing import Any

import zmq
from nbclient import NotebookClient
from nbclient.output_widget import OutputWidget
from traitlets.config import Config

FOLDER = pathlib.Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LIMIT_S = 30
"""A notebook takes less on two idle cores."""


class Output(OutputWidget):
    """The page's side of an output widget, which tells the kernel what it shows.

    It sends through the socket that the client waits on for the kernel's reply. Sending takes the wake-up of a
    reply that came just before, which the client then waits for until the cell's time is up: whoever sends so
    must ask for the socket's events afterwards, as the pyzmq guide says of edge-triggered sockets.
    """

    def send(self, data: Any = None, metadata: Any = None, buffers: Any = None) -> None:
        """Send a message to the kernel, and wake whoever waits for one that is there already."""
        super().send(data, metadata, buffers)
        self.kernel_client.shell_channel.socket.get(zmq.EVENTS)


def execute(notebook: Any, folder: str | pathlib.Path, timeout_s: float) -> float:
    """Run every cell in ``folder``, filling in outputs; the seconds it took, the kernel's start included.

    The kernel is reached through files instead of ports: a free port found before the kernel binds it may
    be taken by another process meanwhile, and the kernel then dies of "address already in use".
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="kernel") as place:
        reached = {"transport": "ipc", "connection_file": str(pathlib.Path(place) / "k.json")}
        client = NotebookClient(
            notebook,
            kernel_name="python3",
            timeout=timeout_s,
            resources={"metadata": {"path": str(folder)}},
            record_timing=False,
            config=Config(ConnectionFileMixin=reached),
        )
        client.widget_registry = {"@jupyter-widgets/output": {"OutputModel": Output}}
        client.execute()
    return time.perf_counter() - start
