"""The options verbs share, each declared once. What they do is left to the verbs."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

__all__ = [
    "Batch",
    "Cluster",
    "Costs",
    "Debug",
    "Device",
    "Dtype",
    "Input",
    "Json",
    "Memory",
    "Meta",
    "Microbatches",
    "Model",
    "Out",
    "PlanFile",
    "Ranks",
    "Schedule",
    "Seq",
    "Stages",
    "Ties",
]

MODEL_HELP = (
    "package.module:factory, file.py:factory, hf:CONFIG.json or its directory, timm:NAME or torchvision:NAME"
)
MODEL = "The model"
RUN = "How it runs"
SAY = "Output"

Model = Annotated[str, typer.Argument(help=MODEL_HELP, show_default=False)]
PlanFile = Annotated[pathlib.Path, typer.Argument(help="A plan's JSON, as `autopipe plan --out` writes it.")]

Meta = Annotated[
    bool, typer.Option("--meta", help="Shapes only, no weights; costs are estimated.", rich_help_panel=MODEL)
]
Batch = Annotated[int, typer.Option(help="Rows of the example batch.", min=1, rich_help_panel=MODEL)]
Seq = Annotated[int, typer.Option(help="Tokens per row, for text models.", min=1, rich_help_panel=MODEL)]
Input = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        help="An example input by shape, such as 8x3x224x224 or 8x128:int64; repeat in order.",
        rich_help_panel=MODEL,
    ),
]
Dtype = Annotated[
    str | None, typer.Option(help="Make the model in this dtype, such as bfloat16.", rich_help_panel=MODEL)
]

Stages = Annotated[int, typer.Option("--stages", "-n", help="How many stages.", min=1, rich_help_panel=RUN)]
Ranks = Annotated[
    int | None, typer.Option(help="How many processes share the stages.", min=1, rich_help_panel=RUN)
]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", "-m", help="Pieces of a batch per step.", min=1, rich_help_panel=RUN),
]
Schedule = Annotated[
    str,
    typer.Option(
        "--schedule",
        "-s",
        help="gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-h2, zbv, dualpipev or auto.",
        rich_help_panel=RUN,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Measure on this torch device (cpu, cuda:0), or estimate for this hardware (H100, a file).",
        rich_help_panel=RUN,
    ),
]
Cluster = Annotated[
    pathlib.Path | None,
    typer.Option(help="A cluster's JSON, as `autopipe probe --out` writes it.", rich_help_panel=RUN),
]
Memory = Annotated[str | None, typer.Option(help="Limit per rank, such as 80GB.", rich_help_panel=RUN)]
Costs = Annotated[
    str | None,
    typer.Option(
        help="measured, estimated, or a file that `autopipe profile --out` wrote.", rich_help_panel=RUN
    ),
]
Ties = Annotated[str, typer.Option(help="Tied parameters: auto, sync or colocate.", rich_help_panel=RUN)]

Recalibrate = Annotated[
    bool,
    typer.Option(
        "--recalibrate",
        help="Correct the costs by the stage times that `autopipe run` measured.",
        rich_help_panel=RUN,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=SAY)]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.", rich_help_panel=SAY)]
Out = Annotated[
    pathlib.Path | None, typer.Option("--out", "-o", help="Also write the result here.", rich_help_panel=SAY)
]
