"""The ``autopipe`` command: starts it, or says what it needs.

The verbs are left to ``app`` and the modules beside it.
"""

import io
import os
import pathlib
import sys

__all__ = ["INTERRUPTED", "main"]

INTERRUPTED = 130
"""The exit code of what Ctrl-C has ended, as of every other command."""


def main() -> None:
    """Run the command line; exits with the codes ``output`` lists."""
    _open_streams()
    try:
        _start()
    except KeyboardInterrupt:  # Ctrl-C before a verb has begun
        raise SystemExit(INTERRUPTED) from None


def _open_streams() -> None:
    """Where a stream is closed, what is written goes nowhere; what its encoding has no sign for is a ?."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = pathlib.Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - to the end
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _start() -> None:
    try:
        import rich  # noqa: F401 - typer shows help through it
        import typer  # noqa: F401
    except ImportError as error:
        print(
            f'autopipe: the command line needs {error.name}: pip install "autopipe-torch[cli]"',
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    from .app import app

    app()
