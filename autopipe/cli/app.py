"""The verbs that plan and look: profile, plan, simulate, compare, explain, diff, report.

Verbs that touch machines are left to ``machine``; both are thin over ``planning`` and the package's rooms,
which they import when run, so that help and completion answer at once.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Annotated, Any

import typer

from . import options as o
from .output import EXIT_CODES, Verdict, emit, guard, note, step, table

__all__ = ["app", "run"]

app = typer.Typer(
    name="autopipe",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Any nn.Module, unmodified, as a balanced pipeline: plan it, simulate it, look at it.",
    epilog="Exit codes: " + "; ".join(f"**{code}** {what}" for code, what in EXIT_CODES.items()) + ".",
)


def run() -> None:
    """Run the command line with every verb."""
    from . import machine

    machine.register(app)
    app()


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        import autopipe

        print(autopipe.__version__)
        raise typer.Exit


@app.command()
def profile(
    model: o.Model,
    microbatches: o.Microbatches = 1,
    meta: o.Meta = False,
    batch: o.Batch = 8,
    seq: o.Seq = 128,
    inputs: o.Input = None,
    dtype: o.Dtype = None,
    device: o.Device = None,
    recalibrate: o.Recalibrate = False,
    out: o.Out = None,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """What each op of a model costs for one microbatch: measured, or estimated for a described device."""
    with guard(debug), step("profiling", spin=False):
        from .planning import Request

        request = Request(model, meta, batch, seq, tuple(inputs or ()), dtype, device)
        _, costs = request.profile(microbatches or 1, recalibrate)
        _write(out, json.dumps(costs.to_dict()))
    emit(costs.to_dict(), _shown(costs), as_json)


@app.command()
def plan(
    model: o.Model,
    stages: o.Stages,
    microbatches: o.Microbatches = None,
    schedule: o.Schedule = "1f1b",
    ranks: o.Ranks = None,
    memory: o.Memory = None,
    ties: o.Ties = "auto",
    cluster: o.Cluster = None,
    device: o.Device = None,
    costs: o.Costs = None,
    meta: o.Meta = False,
    batch: o.Batch = 8,
    seq: o.Seq = 128,
    inputs: o.Input = None,
    dtype: o.Dtype = None,
    html: Annotated[
        pathlib.Path | None, typer.Option(help="Also write the report here.", rich_help_panel=o.SAY)
    ] = None,
    out: o.Out = None,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Where to cut a model into stages, what a step should take, and how far from optimal the cut can be."""
    with guard(debug), step("capturing, costing and solving", spin=False):
        from .planning import Request

        request = Request(model, meta, batch, seq, tuple(inputs or ()), dtype, device, costs, cluster)
        pipe = request.split(
            stages,
            n_microbatches=microbatches,
            schedule=schedule,
            n_ranks=ranks,
            memory_limit=memory,
            ties=ties,
        )
        text = pipe.plan.to_json()
        _write(out, text)
        if html is not None:
            pipe.plan.to_html(html, graph=pipe.graph.ops, costs=pipe.costs)
    emit(json.loads(text) if as_json else None, _shown(pipe.plan), as_json)


@app.command()
def simulate(
    plan: o.PlanFile,
    schedule: Annotated[
        str | None,
        typer.Option("--schedule", "-s", help="Another schedule, or a .csv of one as torch writes it."),
    ] = None,
    microbatches: o.Microbatches = None,
    trace: Annotated[pathlib.Path | None, typer.Option(help="Write a Chrome / Perfetto trace here.")] = None,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """A step of a plan in time: length, idle time by cause, memory; as planned or under another schedule."""
    with guard(debug), step("simulating"):
        from ..look import headline, tables
        from ..plans import Plan
        from ..schedule import from_csv
        from ..simulator import simulate as predict

        given = from_csv(pathlib.Path(schedule)) if schedule and schedule.endswith(".csv") else schedule
        timeline = predict(Plan.from_json(plan), schedule=given, n_microbatches=microbatches)
        if trace is not None:
            trace.write_text(json.dumps(timeline.to_chrome_trace()))
    emit(timeline.to_dict(), f"{headline(timeline)}\n\n{timeline}\n\n{table(tables(timeline)[0])}", as_json)


@app.command()
def compare(
    target: Annotated[
        str, typer.Argument(help=f"A plan's JSON, or a model: {o.MODEL_HELP}.", show_default=False)
    ],
    stages: Annotated[str, typer.Option(help="For a model: stage counts, separated by commas.")] = "2,4",
    schedules: Annotated[str, typer.Option(help="Separated by commas.")] = "gpipe,1f1b,zb-h1",
    microbatches: Annotated[
        str, typer.Option(help="Separated by commas; by default the plan's, or 8 for a model.")
    ] = "",
    memory: o.Memory = None,
    cluster: o.Cluster = None,
    device: o.Device = None,
    costs: o.Costs = None,
    meta: o.Meta = False,
    batch: o.Batch = 8,
    seq: o.Seq = 128,
    inputs: o.Input = None,
    dtype: o.Dtype = None,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Schedules × microbatch counts × stage counts as a table, the fastest first."""
    with guard(debug), step("planning and simulating", spin=False):
        from ..plans import Plan
        from .comparing import comparison, plans_of
        from .planning import Request

        counts = _numbers(microbatches, "--microbatches")
        if pathlib.Path(target).is_file() and target.endswith(".json"):
            plans = {n: Plan.from_json(target) for n in counts or [0]}
            pairs = [(plan, n or plan.n_microbatches) for n, plan in plans.items()]
        else:
            request = Request(target, meta, batch, seq, tuple(inputs or ()), dtype, device, costs, cluster)
            pairs = plans_of(request, _numbers(stages, "--stages"), counts or [8], memory)
        result = comparison(pairs, [s.strip() for s in schedules.split(",")])
    rows = [dict(zip((c.key for c in result.columns), row, strict=True)) for row in result.rows]
    emit(rows, table(result), as_json)


@app.command()
def explain(
    plan: o.PlanFile,
    cut: Annotated[
        int | None, typer.Option(help="Only the cut after this stage.", min=0, show_default=False)
    ] = None,
    costs: Annotated[
        pathlib.Path | None,
        typer.Option(help="Costs that `autopipe profile --out` wrote: adds what moving each cut would cost."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help=f"With --costs: prices moves with communication and memory. {o.MODEL_HELP}",
            show_default=False,
        ),
    ] = None,
    meta: o.Meta = False,
    batch: o.Batch = 8,
    seq: o.Seq = 128,
    inputs: o.Input = None,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """Why each cut is where it is: loads on both sides, what crosses, what else was tried, how sure it is."""
    with guard(debug):
        from ..costs import CostTable
        from ..errors import InputError
        from ..look import certificate, cut_reasons
        from ..plans import Plan
        from ..solve import explain as explain_moves
        from .planning import Request, read_json

        loaded = Plan.from_json(plan)
        if cut is not None and cut >= loaded.n_stages - 1:
            raise InputError(f"there is no cut after stage {cut}; the plan has {loaded.n_stages} stages")
        if model is not None and costs is None:
            raise InputError("--model prices moves by --costs; give what `autopipe profile --out` wrote")
        prices = CostTable.from_dict(read_json(costs)) if costs is not None else None
        reasons = cut_reasons(loaded, prices if model is None else None)
        shown = reasons if cut is None else reasons[cut : cut + 1]
        bounds = {**dataclasses.asdict(loaded.bounds), "gap": loaded.bounds.gap}
        told: dict[str, Any] = {"cuts": list(shown), "bounds": bounds}
        lines = [f"{loaded.model}: {certificate(loaded)}", *shown]
        if model is not None and prices is not None:
            graph = _graph(Request(model, meta, batch, seq, tuple(inputs or ())), loaded)
            found = explain_moves(loaded, graph, prices)
            moves = tuple(m for m in found.moves if cut in (None, m.cut))
            found = dataclasses.replace(found, moves=moves)
            told["explanation"] = found.to_dict()
            lines.append(str(found))
    emit(told, "\n".join(lines), as_json)


@app.command()
def diff(
    before: Annotated[pathlib.Path, typer.Argument(help="The plan that was.")],
    after: Annotated[pathlib.Path, typer.Argument(help="The plan that would be.")],
    threshold: Annotated[
        float, typer.Option(help="How much worse is too much, as a fraction of step time and of memory.")
    ] = 0.02,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """What changed between two plans; exit code 1 when the second is worse by more than the threshold."""
    with guard(debug):
        from ..plans import Plan

        result = Plan.from_json(before).diff(Plan.from_json(after))
        worse = result.worse(threshold)
        emit({**result.to_dict(), "worse": list(worse)}, str(result), as_json)
        if worse:
            raise Verdict("" if as_json else f"worse by more than {threshold:.1%}: {', '.join(worse)}")


@app.command()
def report(
    plan: o.PlanFile,
    out: Annotated[pathlib.Path, typer.Option("--out", "-o", help="The page to write.")] = pathlib.Path(
        "report.html"
    ),
    model: Annotated[
        str | None,
        typer.Option(help=f"Adds the module tree and op graph. {o.MODEL_HELP}", show_default=False),
    ] = None,
    costs: Annotated[
        pathlib.Path | None, typer.Option(help="Costs that `autopipe profile --out` wrote.")
    ] = None,
    measured: Annotated[
        pathlib.Path | None,
        typer.Option(help="A timeline of a step that ran, as `autopipe run --out` writes."),
    ] = None,
    meta: o.Meta = False,
    batch: o.Batch = 8,
    seq: o.Seq = 128,
    inputs: o.Input = None,
    as_json: o.Json = False,
    debug: o.Debug = False,
) -> None:
    """One offline page about a plan: stages, modules, ops, boundaries, schedule, memory, reasons."""
    with guard(debug), step("drawing"):
        from ..costs import CostTable
        from ..plans import Plan
        from ..simulator import Timeline
        from .planning import Request, read_json

        loaded = Plan.from_json(plan)
        context: dict[str, Any] = {}
        if model is not None:
            context["graph"] = _graph(Request(model, meta, batch, seq, tuple(inputs or ())), loaded)
        if costs is not None:
            context["costs"] = CostTable.from_dict(read_json(costs))
        if measured is not None:
            context["measured"] = Timeline.from_dict(read_json(measured))
        loaded.to_html(out, **context)
    note("open it in any browser; it loads nothing from elsewhere")
    emit({"path": str(out)}, str(out), as_json)


def _graph(request: Any, loaded: Any) -> Any:
    """The model's op graph, opened as it was when the plan was made."""
    from ..errors import PlanError

    captured = request.capture()
    for path in loaded.settings.get("opened", ()):
        captured = captured.open(path)
    if captured.ops.digest != loaded.graph_digest:
        raise PlanError(
            f"the plan was made for another graph ({loaded.graph_digest}) than {request.model} has now "
            f"({captured.ops.digest}); give the same --batch, --seq, --input and --meta, or plan again"
        )
    return captured.ops


def _shown(item: Any) -> str:
    from ..look import headline, tables

    return "\n\n".join([headline(item), *map(table, tables(item))])


def _write(path: pathlib.Path | None, text: str) -> None:
    if path is not None:
        path.write_text(text)


def _numbers(text: str, option: str) -> list[int]:
    from ..errors import InputError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    bad = [part for part in parts if not part.isdigit() or int(part) < 1]
    if bad:
        raise InputError(f"{option} has {bad[0]!r}; write whole numbers of at least 1, separated by commas")
    return list(map(int, parts))
