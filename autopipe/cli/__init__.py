"""The ``autopipe`` command: starts it, or says what it needs.

The verbs are left to ``app`` and the modules beside it.
"""

import sys

__all__ = ["INTERRUPTED", "main"]

INTERRUPTED = 130
"""The exit code of what Ctrl-C has ended, as of every other command."""


def main() -> None:
    """Run the command line; exits with the codes ``output`` lists."""
    try:
        _start()
    except KeyboardInterrupt:  # Ctrl-C before a verb has begun
        raise SystemExit(INTERRUPTED) from None


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
