"""The verbs that plan and look: profile, plan, simulate, compare, explain, diff, report, watch.

Verbs that touch machines are left to ``machine_commands``; both are thin over ``planning`` and the package's
rooms.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import sys
from typing import Annotated, Any

import typer

from ..files import write_text
from . import options as o
from .command import verb
from .output import Output, note, table

__all__: list[str] = []


@verb("profiling", spin=False)
def profile(
    model: o.Model,
    making: o.Making,
    microbatches: o.Microbatches = 1,
    recalibrate: Annotated[
        bool,
        typer.Option(
            "--recalibrate",
            help="Correct the costs by the stage times that `autopipe run` measured.",
            rich_help_panel=o.RUN,
        ),
    ] = False,
    out: o.Out = None,
) -> Output:
    """Measure what each op of a model costs for one microbatch, or estimate it for a described device."""
    from .planning import Request

    _, costs = Request(model, making).profile(microbatches or 1, recalibrate)
    if out is not None:
        write_text(out, json.dumps(costs.to_dict()))
    return Output(costs.to_dict(), "\n".join([_shown(costs), *(f"Note: {line}" for line in costs.notes)]))


@verb("capturing, costing and solving", spin=False)
def plan(
    model: o.Model,
    making: o.Making,
    how: o.Planning,
    html: Annotated[
        pathlib.Path | None, typer.Option(help="Also write the report here.", rich_help_panel=o.SAY)
    ] = None,
    out: o.Out = None,
) -> Output:
    """Cut a model into stages: where, what a step should take, how far its bottleneck is from the least."""
    from .planning import Request

    pipe = Request(model, making).split(how)
    text = pipe.plan.to_json(out)
    if html is not None:
        pipe.plan.to_html(html, graph=pipe.graph.ops, costs=pipe.costs)
    uncounted = pipe.plan.settings.get("uncounted")
    warned = [f"Warning: in its costs {uncounted}."] if uncounted else []
    return Output(json.loads(text), "\n".join([_shown(pipe.plan), *warned]))


@verb("simulating", spin=False)
def simulate(
    target: o.Target,
    making: o.Making,
    how: o.Planning,
    trace: Annotated[
        pathlib.Path | None,
        typer.Option(help="Write a Chrome / Perfetto trace here.", rich_help_panel=o.SAY),
    ] = None,
) -> Output:
    """Simulate a step of a plan, as planned or under another schedule: length, idle time by cause, memory.

    `--schedule` also takes a .csv of a schedule as torch writes it. With a plan's JSON, `--cluster` puts it
    on other links and devices of other speeds, and `--memory` says whether it would fit.
    """
    from ..look import tables
    from ..schedule import from_csv
    from ..simulator import simulate as predict
    from .comparing import over_memory
    from .planning import is_plan, planned

    own = pathlib.Path(how.schedule) if how.schedule and how.schedule.endswith(".csv") else None
    given = from_csv(own) if own is not None else None
    if own is not None:
        how = dataclasses.replace(how, schedule=None)
    found = planned(target, making, how)
    asked = (how.schedule, how.microbatches) if is_plan(target) else (None, None)
    timeline = predict(found.plan, schedule=given or asked[0], n_microbatches=asked[1], costs=found.costs)
    if trace is not None:
        write_text(trace, json.dumps(timeline.to_chrome_trace()))
    over = over_memory(found.plan, timeline)
    text = f"{timeline}\n\n{table(tables(timeline)[0])}"
    return Output({**timeline.to_dict(), "over_memory": over}, text, "; ".join(over))


@verb("planning and simulating", spin=False)
def compare(
    target: o.Target,
    making: o.Making,
    stages: Annotated[
        str | None,
        typer.Option(
            "--stages",
            "-n",
            help="For a model: counts, by commas.",
            show_default="2,4",
            rich_help_panel=o.RUN,
        ),
    ] = None,
    schedules: Annotated[str, typer.Option(help="By commas.", rich_help_panel=o.RUN)] = "gpipe,1f1b,zb-h1",
    microbatches: Annotated[
        str,
        typer.Option(
            "--microbatches",
            "-m",
            help="Counts, by commas; by default the plan's, or 8 for a model.",
            rich_help_panel=o.RUN,
        ),
    ] = "",
    memory: Annotated[
        str | None, typer.Option(help="Limit per rank, such as 80GB.", rich_help_panel=o.RUN)
    ] = None,
) -> Output:
    """Compare schedules, microbatch counts and stage counts in a table: least time per microbatch first."""
    from ..errors import InputError
    from .comparing import Compared, comparison, plans_of
    from .planning import Request, is_plan, planned

    counts = _numbers(microbatches, "--microbatches")
    if is_plan(target):
        found = planned(target, making, o.Planning(stages=stages, memory=memory))
        wanted = counts or [found.plan.n_microbatches]
        compared: list[Compared] = [(found.plan, n, found.costs) for n in wanted]
    else:
        cuts = _numbers("2,4" if stages is None else stages, "--stages")
        if not cuts:
            raise InputError("--stages names no count; give some, such as 2,4")
        compared = plans_of(Request(target, making), cuts, counts or [8], memory)
    names = [name for part in schedules.split(",") if (name := part.strip())]
    if not names:
        raise InputError("--schedules names none; give some, such as gpipe,1f1b")
    result = comparison(compared, names)
    rows = [dict(zip((c.key for c in result.columns), row, strict=True)) for row in result.rows]
    return Output(rows, table(result))


@verb("planning and pricing moves", spin=False)
def explain(
    target: o.Target,
    making: o.Making,
    how: o.Planning,
    model: o.Name = None,
    cut: Annotated[
        int | None, typer.Option(help="Only the cut after this stage.", min=0, show_default=False)
    ] = None,
) -> Output:
    """Explain each cut: loads on both sides, what crosses, what a move would cost, how good it is.

    With a plan's JSON, `--costs` FILE adds what moving each cut would cost, and `--model` prices moves with
    communication and memory.
    """
    from ..errors import InputError
    from ..look import certificate, cut_reasons
    from ..solve import explain as explain_moves
    from .planning import is_plan, planned

    found = planned(target, making, how, model)
    plan, graph, costs = found.plan, found.graph, found.costs
    if cut is not None and cut >= plan.n_stages - 1:
        raise InputError(f"there is no cut after stage {cut}; the plan has {plan.n_stages} stages")
    reasons = cut_reasons(plan, costs if graph is None else None)
    shown = reasons if cut is None else reasons[cut : cut + 1]
    told: dict[str, Any] = {
        "cuts": list(shown),
        "bounds": {**dataclasses.asdict(plan.bounds), "gap": plan.bounds.gap, "step_gap": plan.step_gap},
    }
    lines = [f"{plan.model}: {certificate(plan)}", *shown]
    if graph is not None and costs is not None:
        priced = explain_moves(plan, graph, costs)
        priced = dataclasses.replace(priced, moves=tuple(m for m in priced.moves if cut in (None, m.cut)))
        told["explanation"] = priced.to_dict()
        lines.append(str(priced))
        if is_plan(target) and making.costs is None:
            lines.append(
                "Moves are priced by costs taken now; --costs FILE prices them by those of a profile."
            )
    return Output(told, "\n".join(lines))


@verb("comparing")
def diff(
    before: Annotated[pathlib.Path, typer.Argument(help="The plan before the change, as JSON.")],
    after: Annotated[pathlib.Path, typer.Argument(help="The plan after it.")],
    threshold: Annotated[
        float, typer.Option(help="How much worse is too much, as a fraction of step time and of memory.")
    ] = 0.02,
) -> Output:
    """Show what changed between two plans; exit code 1 if the second is worse by more than the threshold."""
    from ..arguments import number
    from ..plans import Plan
    from ..simulator import warn_if_changed

    number("--threshold", threshold)
    plans = Plan.from_json(before), Plan.from_json(after)
    for plan, path in zip(plans, (before, after), strict=True):
        warn_if_changed(plan, str(path))
    result = plans[0].diff(plans[1])
    worse = result.worse(threshold)
    no = f"worse by more than {threshold:.1%}: {', '.join(worse)}" if worse else ""
    return Output({**result.to_dict(), "worse": list(worse)}, str(result), no)


@verb("drawing", spin=False)
def report(
    target: o.Target,
    making: o.Making,
    how: o.Planning,
    model: o.Name = None,
    measured: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="A timeline of a step that ran, as `autopipe run --out` writes.", rich_help_panel=o.SAY
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Draw the plan over the job's processes, by dims in their order, such as dp=2,pp=4.",
            rich_help_panel=o.SAY,
        ),
    ] = None,
    per_host: Annotated[
        int | None,
        typer.Option(help="With --mesh: processes of each host.", min=1, rich_help_panel=o.SAY),
    ] = None,
    out: Annotated[
        pathlib.Path, typer.Option("--out", "-o", help="The page to write.", rich_help_panel=o.SAY)
    ] = pathlib.Path("report.html"),
) -> Output:
    """Write one offline page about a plan: stages, modules, ops, boundaries, schedule, memory, reasons.

    With `--mesh` also the processes of all replicas on their hosts, and what crosses between them, which is
    printed too.
    """
    from ..errors import InputError
    from ..look import Mesh
    from ..schema import load
    from ..simulator import Timeline
    from ..simulator import simulate as predict
    from .planning import is_plan, planned

    found = planned(target, making, how, model)
    context: dict[str, Any] = {"graph": found.graph, "costs": found.costs}
    if is_plan(target) and (how.schedule or how.microbatches):
        context["timeline"] = predict(
            found.plan, schedule=how.schedule, n_microbatches=how.microbatches, costs=found.costs
        )
    if measured is not None:
        context["measured"] = Timeline.from_dict(load(measured, "the timeline"))
    if per_host is not None and mesh is None:
        raise InputError("--per-host goes with --mesh, such as --mesh dp=2,pp=4; add it, or leave this out")
    told, text = {"path": str(out)}, str(out)
    if mesh is not None:
        laid = context["mesh"] = Mesh.parse(found.plan, mesh, per_host)
        told |= laid.to_dict()
        text = f"{_shown(laid)}\n\n{out}"
    found.plan.to_html(out, **context)
    note("open it in any browser; it loads nothing from elsewhere")
    return Output(told, text)


@verb("watching", spin=False)
def watch(
    folder: Annotated[pathlib.Path, typer.Argument(help="Where the job publishes: rt.publish(FOLDER).")],
    every: Annotated[
        float, typer.Option(help="Seconds between looks, at least 0.1.", rich_help_panel=o.SAY)
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once.", rich_help_panel=o.SAY)] = False,
    as_json: bool = False,
) -> Output | None:
    """Watch a running job: step, idle time by cause, stragglers, drift from the plan, memory; Ctrl-C ends.

    It shows the steps that `rt.publish(FOLDER)`, or `autopipe run --publish FOLDER`, writes there. With
    `--once` or `--json`, and where its output is no terminal, it looks once; exit code 1 until every rank has
    written.
    """
    from ..arguments import number
    from ..simulator import watched

    number("--every", every, 0.1, most=1e6, unit="seconds")
    if sys.stdout.isatty() and not (once or as_json):
        _redraw(folder, every)
        return None
    job = watched(folder)
    if job is None:
        return Output({}, "", f"no step of all ranks was told in {folder} yet")
    return Output(job.to_dict(), _shown(job))


def _redraw(folder: pathlib.Path, every_s: float) -> None:
    """On a terminal, in place, until Ctrl-C."""
    from rich.live import Live
    from rich.text import Text

    from ..look import follow

    with contextlib.suppress(KeyboardInterrupt), Live(auto_refresh=False) as screen:
        for job in follow(folder, every_s):
            shown = "no step of all ranks was told yet" if job is None else _shown(job)
            screen.update(Text.from_ansi(shown), refresh=True)


def _shown(item: Any) -> str:
    from ..look import headline, tables

    return "\n\n".join([headline(item), *map(table, tables(item))])


def _numbers(text: str, option: str) -> list[int]:
    from ..arguments import brief, digits
    from ..errors import InputError

    parts = [part.strip() for part in text.split(",") if part.strip()]
    counts = [digits(part) or 0 for part in parts]
    if 0 in counts:
        bad = brief(parts[counts.index(0)])
        raise InputError(f"{option} has {bad}; write whole numbers of at least 1, separated by commas")
    return counts
