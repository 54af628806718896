"""The options verbs share, each declared once, in groups that a verb takes whole.

What they do is left to the verbs, making options of a group's fields to ``command``.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Annotated, Any

import typer

from ..arguments import brief, digits

__all__ = ["MODEL_HELP", "RUN", "SAY", "Making", "Microbatches", "Model", "Name", "Out", "Planning", "Target"]

MODEL_HELP = (
    "package.module:factory, file.py:factory, hf:CONFIG.json or its directory, timm:NAME or torchvision:NAME"
)
MODEL = "The model"
RUN = "How it runs"
SAY = "Output"


def _schedules() -> list[str]:
    from ..schedule import NAMES

    return [*NAMES, "auto"]


def _devices() -> list[str]:
    from ..measure import DEVICES

    return ["cpu", "cuda", *DEVICES]


def _count(text: Any) -> int | str:
    """A whole number of at least 1, or ``auto``."""
    found = "auto" if text == "auto" else digits(str(text))
    if not found:
        raise typer.BadParameter(f"{brief(text)} is neither a whole number of at least 1 nor auto")
    return found


Model = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)]
Target = Annotated[
    str,
    typer.Argument(
        help=f"A plan's JSON, as `autopipe plan --out` writes it, or a model to plan: {MODEL_HELP}.",
        show_default=False,
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="With a plan's JSON: the model it was made for, which adds its op graph and costs.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", "-m", help="Pieces of a batch per step.", min=1, rich_help_panel=RUN),
]
Out = Annotated[
    pathlib.Path | None, typer.Option("--out", "-o", help="Also write the result here.", rich_help_panel=SAY)
]


@dataclasses.dataclass(frozen=True, slots=True)
class Making:
    """How a model is made and what its ops cost."""

    meta: Annotated[
        bool,
        typer.Option("--meta", help="Shapes only, no weights; costs are estimated.", rich_help_panel=MODEL),
    ] = False
    batch: Annotated[
        int | None,
        typer.Option(help="Rows of the example batch where it is made here.", min=1, rich_help_panel=MODEL),
    ] = None
    seq: Annotated[
        int | None,
        typer.Option(help="Tokens per row, for text models named by hf:.", min=1, rich_help_panel=MODEL),
    ] = None
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            help="An example input by shape, such as 8x3x224x224 or 8x128:int64; repeat in order.",
            rich_help_panel=MODEL,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="Make the model in this dtype, such as bfloat16.", rich_help_panel=MODEL),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            help="Measure on this torch device (cpu, cuda:0), or estimate for this hardware (H100, a file).",
            rich_help_panel=RUN,
            autocompletion=_devices,
        ),
    ] = None
    costs: Annotated[
        str | None,
        typer.Option(
            help="measured, estimated, or a file that `autopipe profile --out` wrote.", rich_help_panel=RUN
        ),
    ] = None
    cluster: Annotated[
        pathlib.Path | None,
        typer.Option(help="A cluster's JSON, as `autopipe probe --out` writes it.", rich_help_panel=RUN),
    ] = None


@dataclasses.dataclass(frozen=True, slots=True)
class Planning:
    """How a model is cut and run; None means what suits, or what a given plan says."""

    stages: Annotated[
        Any,
        typer.Option(
            "--stages",
            "-n",
            help="How many stages; auto, the default: the fastest count on at most --ranks or the cluster's.",
            parser=_count,
            metavar="INTEGER|auto",
            rich_help_panel=RUN,
        ),
    ] = None
    microbatches: Annotated[
        Any,
        typer.Option(
            "--microbatches",
            "-m",
            help="Pieces of a batch per step; auto: the shortest step, with one to four a stage.",
            parser=_count,
            metavar="INTEGER|auto",
            rich_help_panel=RUN,
        ),
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            "-s",
            help="gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zbv, dualpipev, cost-aware or auto.",
            show_default="1f1b",
            rich_help_panel=RUN,
            autocompletion=_schedules,
        ),
    ] = None
    ranks: Annotated[
        int | None, typer.Option(help="How many processes share the stages.", min=1, rich_help_panel=RUN)
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(help="Limit per rank, such as 80GB; or one for each, by commas.", rich_help_panel=RUN),
    ] = None
    recompute: Annotated[
        str | None,
        typer.Option(
            help="What runs again in backward: never, auto (the cheapest blocks that let it fit) or always.",
            show_default="never",
            rich_help_panel=RUN,
            autocompletion=lambda: ["never", "auto", "always"],
        ),
    ] = None
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap",
            help="Whether transfers hide behind work when cuts are chosen.",
            show_default="overlap",
            rich_help_panel=RUN,
        ),
    ] = None
    device_order: Annotated[
        str | None,
        typer.Option(
            help="How stages lie on the cluster's ranks: hosts (one by one), given, or auto (the best).",
            show_default="hosts",
            rich_help_panel=RUN,
            autocompletion=lambda: ["hosts", "given", "auto"],
        ),
    ] = None
    precision: Annotated[
        str | None,
        typer.Option(
            help="How parameters are kept: fp32, bf16-mixed (fp32 master and gradients), bf16 or fp8.",
            show_default="as the model's are",
            rich_help_panel=RUN,
            autocompletion=lambda: ["fp32", "bf16-mixed", "bf16", "fp8"],
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="Whose state is counted: adam, sgd, sgd-momentum, muon or adam-8bit.",
            show_default="adam",
            rich_help_panel=RUN,
            autocompletion=lambda: ["adam", "sgd", "sgd-momentum", "muon", "adam-8bit"],
        ),
    ] = None
    offload: Annotated[
        str | None,
        typer.Option(
            help="What is kept in the host's memory: never (nothing), optimizer, activations or all.",
            show_default="never",
            rich_help_panel=RUN,
            autocompletion=lambda: ["never", "optimizer", "activations", "all"],
        ),
    ] = None
    ties: Annotated[
        str | None,
        typer.Option(
            help="Tied parameters: auto, sync or colocate.",
            show_default="auto",
            rich_help_panel=RUN,
            autocompletion=lambda: ["auto", "sync", "colocate"],
        ),
    ] = None
