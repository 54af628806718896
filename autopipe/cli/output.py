"""How verbs speak: results to stdout as text or JSON, progress to a terminal's stderr, errors in two lines.

What is said is left to the verbs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import (
    AutopipeError,
    CaptureError,
    CostError,
    InputError,
    ModelError,
    PlanError,
    ScheduleError,
    StepError,
    StoreError,
)
from . import INTERRUPTED

__all__ = [
    "EXIT_CODES",
    "Output",
    "aside",
    "check_apart",
    "emit",
    "exit_code",
    "guard",
    "note",
    "step",
    "table",
    "writable",
]

OK, NO, USAGE, INFEASIBLE, MODEL, OTHER = range(6)
EXIT_CODES = {
    OK: "done",
    NO: "done, and the answer is no (diff: worse; simulate: over --memory; doctor: a check failed)",
    USAGE: "wrong usage: an option, a name or a file that does not fit",
    INFEASIBLE: "no plan meets the limits, or a plan or schedule does not fit",
    MODEL: "the model cannot be loaded, captured, costed or run",
    OTHER: "any other failure",
    INTERRUPTED: "ended by Ctrl-C",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """What a verb found: as plain values for JSON, as text, and why its answer is no, if it is."""

    result: Any
    text: str
    no: str = ""


def emit(told: Output | None, as_json: bool) -> None:
    """Print what a verb found, if it is this process that says it; exit code 1 where its answer is no."""
    import typer

    if told is None:
        return
    try:
        print(_json(told.result) if as_json else told.text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StoreError(
            f"cannot write the result to the output: {error.strerror or error}; make room there, or send it "
            "elsewhere"
        ) from error
    if told.no:
        if not as_json:
            print(told.no, file=sys.stderr)
        raise typer.Exit(NO)


def _json(result: Any) -> str:
    """The values as JSON, which knows no infinity and no NaN: those are null."""

    def known(value: Any) -> Any:
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, dict):
            return {k: known(v) for k, v in value.items()}
        return [known(v) for v in value] if isinstance(value, (list, tuple)) else value

    return json.dumps(known(result), indent=1, default=str, allow_nan=False)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What a model prints goes to stderr meanwhile: stdout has a verb's result alone."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def writable(option: str, path: pathlib.Path) -> None:
    """Raises :class:`InputError` before any work where its result could not be written."""
    folder = pathlib.Path(os.path.realpath(path)).parent  # where the path is a link, its target's
    if str(path) == "-":
        raise InputError(f"{option} - would be a file of that name; --json prints the result instead")
    if path.is_dir():
        raise InputError(f"{option} {path} is a folder; give a file in it, such as {path / 'result.json'}")
    if not path.exists() and not folder.is_dir():
        raise InputError(f"{option} {path}: there is no folder {folder}; make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise InputError(f"{option} {path} may not be written by this user; give another place")


def check_apart(written: Mapping[str, pathlib.Path], read: Iterable[object]) -> None:
    """Raise :class:`InputError` where a file to be written is another one too, or is ``read`` from.

    What is read are the options' values; a name such as ``file.py:factory`` or ``hf:config.json`` holds one.
    """
    names = [text for value in read for text in {str(value), *str(value).split(":")} if text]
    files = [name for name in names if _is_file(name)]
    known = {os.path.realpath(name): f"what this command reads, {name}" for name in files}
    for option, path in written.items():
        place = os.path.realpath(path)
        if place in known:
            raise InputError(f"{option} {path} would replace {known[place]}; give another place")
        known[place] = f"what {option} writes"


def _is_file(name: str) -> bool:
    """Whether a word names a file; of one that is too long for a name it does not."""
    try:
        return pathlib.Path(name).is_file()
    except OSError:
        return False


def note(message: str) -> None:
    """A line for people, on stderr, on terminals only."""
    if sys.stderr.isatty():
        print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(message: str, spin: bool = True) -> Iterator[None]:
    """A spinner with what is being done, on a terminal; nothing in a pipe.

    Without ``spin`` only a line: where measuring shows a bar of its own.
    """
    if not spin:
        note(f"{message} …")
    if not spin or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(message):
        yield


def table(rows: Any) -> str:
    """A :class:`autopipe.look.Table` as text: with rules on a terminal, plain in a pipe."""
    if not sys.stdout.isatty():
        return str(rows.text())
    from io import StringIO

    from rich import box
    from rich.console import Console
    from rich.table import Table

    width = Console().width
    rows = rows.fit(width - 1)  # rules have an edge
    if not (longest := rows.cut_to(width - 1)):
        return str(rows.text())
    out = Table(title=rows.title, title_justify="left", title_style="bold", box=box.SIMPLE, padding=(0, 1))
    for column in rows.columns:
        most, side = (None, "right") if column.is_number else (longest, "left")
        out.add_column(column.title, justify=side, max_width=most, no_wrap=True)  # type: ignore[arg-type]
    for cells in rows.cells(rows.rows):
        out.add_row(*cells)
    console = Console(file=StringIO(), force_terminal=True, width=width)
    console.print(out)
    return str(console.file.getvalue()).rstrip() + (f"\n{rows.note}" if rows.note else "")  # type: ignore[attr-defined]


def exit_code(error: BaseException) -> int:
    """The documented exit code of an error."""
    kinds: tuple[tuple[tuple[type[BaseException], ...], int], ...] = (
        ((InputError, StoreError, OSError), USAGE),
        ((PlanError, ScheduleError), INFEASIBLE),
        ((ModelError, CaptureError, CostError, StepError), MODEL),
    )
    return next((code for types, code in kinds if isinstance(error, types)), OTHER)


@contextlib.contextmanager
def guard(debug: bool) -> Iterator[None]:
    """Turn errors into one or two lines and an exit code; ``debug`` lets the traceback through."""
    import typer

    try:
        yield
    except (typer.Exit, BrokenPipeError):
        raise
    except SystemExit as error:  # ``typer.Exit`` is none
        told = ModelError(
            f"the model's code, or a library's, ended the process with SystemExit: {error.code}; have it "
            "raise an error that says why"
        )
        if debug:
            raise told from error
        print(_in_short(told), file=sys.stderr)
        raise typer.Exit(exit_code(told)) from None
    except Exception as error:
        if debug:
            raise
        print(_in_short(error), file=sys.stderr)
        raise typer.Exit(exit_code(error)) from None


_WORD = 10
"""What is no longer may stand in a message for another reason than that it is the cause."""


def _in_options(text: str) -> str:
    """A message in the words of the command line, which says what there is no option for."""
    from .options import Making, Planning
    from .planning import ARGUMENTS

    for option, name in ARGUMENTS.items():
        text = re.sub(rf"\b{name}=['\"]?([\w-]+)['\"]?", rf"--{option} \1", text)
        text = re.sub(rf"(?<![\w./]){name}(?![\w=/]|\.\w)", f"--{option}", text)  # no part of a path
    runs = sys.modules.get("autopipe.runtime.options")  # what was not loaded has raised nothing
    options = {field.name for group in (Making, Planning) for field in dataclasses.fields(group)}
    known = {field.name for field in dataclasses.fields(runs.Options)} - options if runs else set()
    names = [name for name in dict.fromkeys(re.findall(r"\b(\w+)=", text)) if name in known]
    if not names:
        return text
    return f"{text}\n  {', '.join(names)}: of pipe.runtime() in Python; the command line has no such option"


def _in_short(error: Exception) -> str:
    if isinstance(error, (AutopipeError, OSError)):
        cause = error.__cause__
        if isinstance(error, OSError) and error.filename:
            return (
                f"autopipe: cannot open {error.filename}: {error.strerror}; name a file where you may write"
            )
        told = f"autopipe: {_in_options(str(error))}"
        if cause is None:
            return told
        said = getattr(cause, "strerror", None) or _first(cause)
        if len(said) > _WORD and said in str(error):
            return told
        return f"{told}\n  because {type(cause).__name__}: {_first(cause)}"
    return (
        f"autopipe: this is a bug of autopipe, or of code it ran: {type(error).__name__}: {_first(error)}\n"
        "  run it again with --debug to see where, and report that"
    )


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]
