"""Makes a command of a verb's function: shares out its options, speaks for it, ends with its exit code.

The verbs are left to ``plan_commands`` and ``machine_commands``, the command line they make up to ``app``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from .options import SAY
from .output import Output, check_apart, emit, guard, step, writable

__all__ = ["verb"]

Verb = Callable[..., Output | None]
WRITTEN = {"out", "html", "trace"}
"""The options that name a file which a verb writes."""
SPEAKING = {
    "as_json": Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=SAY)],
    "debug": Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.", rich_help_panel=SAY)],
}


def verb(doing: str, *, spin: bool = True) -> Callable[[Verb], Callable[..., None]]:
    """A function as a verb of the command line, which prints what it returns as text or JSON.

    A parameter whose type is one of ``options``' groups becomes an option per field of the group.
    One named ``as_json`` hears whether JSON is asked for. ``doing`` is shown meanwhile on a terminal; without
    ``spin`` it is a line, where a bar shows progress.
    """

    def made(function: Verb) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        signature = inspect.signature(function)
        groups = {name: hints[name] for name in signature.parameters if dataclasses.is_dataclass(hints[name])}

        def called(**given: Any) -> None:
            as_json, debug = given["as_json"], given.pop("debug")
            if "as_json" not in signature.parameters:
                del given["as_json"]
            written = {f"--{name}": given[name] for name in WRITTEN & given.keys() if given[name] is not None}
            read = [value for name, value in given.items() if name not in WRITTEN]
            for name, group in groups.items():
                given[name] = group(**{f.name: given.pop(f.name) for f in dataclasses.fields(group)})
            with guard(debug):
                for option, path in written.items():
                    writable(option, path)
                check_apart(written, read)
                with step(doing, spin):
                    told = function(**given)
                emit(told, as_json)

        options: dict[str, tuple[Any, Any]] = {}
        for name, parameter in signature.parameters.items():
            if name in groups:
                of = get_type_hints(groups[name], include_extras=True)
                options |= {f.name: (of[f.name], f.default) for f in dataclasses.fields(groups[name])}
            else:
                options[name] = (hints[name], parameter.default)
        options |= {name: (kind, False) for name, kind in SPEAKING.items()}
        called.__name__, called.__doc__ = function.__name__, function.__doc__
        called.__annotations__ = {name: kind for name, (kind, _) in options.items()}
        called.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
                for name, (kind, default) in options.items()
            ]
        )
        return called

    return made
