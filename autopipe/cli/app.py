"""The command line: every verb under one name.

What a verb does is left to ``plan_commands`` and ``machine_commands``, which import the package's rooms when
run, so that help and completion answer at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from . import machine_commands, plan_commands
from .output import EXIT_CODES

__all__ = ["app"]

VERBS = (
    plan_commands.profile,
    plan_commands.plan,
    plan_commands.simulate,
    plan_commands.compare,
    plan_commands.explain,
    plan_commands.diff,
    plan_commands.report,
    plan_commands.watch,
    machine_commands.probe,
    machine_commands.run,
    machine_commands.doctor,
)
app = typer.Typer(
    name="autopipe",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Any nn.Module, unmodified, as a balanced pipeline: plan it, simulate it, look at it.",
    epilog="Exit codes: " + "; ".join(f"**{code}** {what}" for code, what in EXIT_CODES.items()) + ".",
)
for verb in VERBS:
    app.command()(verb)


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        import autopipe

        print(autopipe.__version__)
        raise typer.Exit
