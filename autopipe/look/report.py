"""One offline HTML page about a plan: what was cut where and why, what it should cost, and what ran.

Tables come from ``tables``, the data its scripts draw from ``report_data``; this composes the page.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import importlib.metadata
import importlib.resources
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..costs import CostTable
from ..errors import InputError
from ..graph import OpGraph
from ..memory import memory_limits
from ..plans import Plan, rank_bytes
from ..simulator import Report, Timeline, simulate
from ..units import n_of, parse_bytes
from .cut_reasons import cut_reasons
from .mesh import Mesh, drawing
from .report_data import graph_payload, time_payload, tree_payload
from .table import Table, count, nbytes, percent, seconds, word
from .tables import boundary_table, candidate_table, certificate, stage_table, tables, tie_table

__all__ = ["report"]

SCRIPTS = ("base.js", "tree.js", "ops.js", "time.js", "main.js")
NEAR = 4
"""A limit less than this many times the highest peak is drawn; beyond, peaks would be flat beside it."""
Section = tuple[str, str, str]
"""The id, the title and the body of a part of the page."""


def report(
    plan: Plan,
    *,
    graph: OpGraph | None = None,
    costs: CostTable | None = None,
    timeline: Timeline | None = None,
    measured: Report | Timeline | None = None,
    mesh: Mesh | None = None,
) -> str:
    """The page as HTML: no outside links, light and dark, readable on a phone, usable from the keyboard.

    Parameters
    ----------
    graph, costs: what was planned; without the graph the module tree and the op graph are left out.
    timeline: the prediction to draw; by default ``simulate(plan, costs=costs)``.
    measured: the timeline of a step that ran, or a run's report that holds one; drawn under the prediction.
    mesh: the plan laid over a job's processes, replicas and hosts.
    """
    predicted = timeline if timeline is not None else simulate(plan, costs=costs)
    run = measured if isinstance(measured, Report) else None
    ran = measured.timeline if isinstance(measured, Report) else measured
    if ran is not None and ran.schedule.placement != predicted.schedule.placement:
        raise InputError(
            f"what ran had {n_of(ran.schedule.n_stages, 'stage')} on {n_of(ran.schedule.n_ranks, 'rank')}, "
            f"the plan has {plan.n_stages} on {plan.n_ranks}; give the measurement of this plan"
        )
    held = run.peak_bytes if run is not None else ()
    sections = [
        _stages(plan),
        *((_held(run),) if run is not None else ()),
        *(_graph_sections(graph) if graph is not None else ()),
        _boundaries(plan),
        *((_mesh(mesh),) if mesh is not None else ()),
        _schedule(predicted, ran),
        _memory(plan, predicted, held),
        _reasons(plan, costs),
        _assumptions(plan, costs),
    ]
    blocks = {"d-time": time_payload(plan, predicted, ran, memory_limits(plan), held)}
    if graph is not None:
        blocks |= {"d-graph": graph_payload(graph, plan, costs), "d-tree": tree_payload(graph, plan, costs)}
    return _page(plan.model, _header(plan, predicted, run or ran), sections, blocks)


def _header(plan: Plan, predicted: Timeline, measured: Report | Timeline | None) -> str:
    stages, ranks = n_of(plan.n_stages, "stage"), n_of(plan.n_ranks, "rank")
    pieces = n_of(plan.n_microbatches, "microbatch", "microbatches")
    lead = f"{stages} on {ranks}, {pieces} per step under the {plan.schedule} schedule."
    figures = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}<small>{html.escape(more)}</small></dd></div>"
        for name, value, more in _figures(plan, predicted, measured)
    )
    return (
        f"<header><h1>{html.escape(plan.model)}</h1><p class=lead>{html.escape(lead)}</p>"
        f'<dl class="figures">{figures}</dl></header>'
    )


def _figures(
    plan: Plan, predicted: Timeline, measured: Report | Timeline | None
) -> Sequence[tuple[str, str, str]]:
    out = [("step, predicted", seconds(predicted.step_s), _bound(plan.bounds.step_lower_s))]
    if measured is not None:
        out.append(("step, measured", *_measured(predicted, measured)))
    out.append(("idle", percent(predicted.bubble_fraction), "of all ranks' time in a step"))
    fullest = max(range(plan.n_ranks), key=lambda r: _rank_memory(plan, predicted, r))
    limit = memory_limits(plan)[fullest]
    room = f"rank {fullest}" + (f", limit {nbytes(limit)}" if limit is not None else ", no limit given")
    out.append(("fullest rank", nbytes(_rank_memory(plan, predicted, fullest)), room))
    between = [b for s, d, b in plan.handed if plan.placement[s] != plan.placement[d]]
    sent = sum(b.n_bytes * (1 + b.differentiable) for b in between)
    ties = sum(t.mode == "sync" for t in plan.ties)
    note = f"{len(plan.boundaries)} values" + (f", {ties} tied summed" if ties else "")
    out.append(("sent per step", nbytes(sent * plan.n_microbatches), note))
    gap = "unknown" if math.isinf(plan.step_gap) else percent(plan.step_gap)
    out.append(("gap of the step", gap, certificate(plan)))
    return out


def _measured(predicted: Timeline, measured: Report | Timeline) -> tuple[str, str]:
    if isinstance(measured, Timeline):
        took_s, said_s = measured.step_s, predicted.work_s if measured.in_turn else predicted.step_s
    else:
        took_s, said_s = measured.measured_step_s, measured.predicted_step_s
    how = f"the {seconds(said_s)} of all ranks in turn" if measured.in_turn else "predicted"
    return seconds(took_s), f"{took_s / said_s:.2f}× {how}" if said_s else ""


def _bound(least_s: float) -> str:
    return f"no less than {seconds(least_s)}" if least_s > 0 else ""


def _rank_memory(plan: Plan, predicted: Timeline, rank: int) -> float:
    if predicted.peak_bytes:
        return predicted.peak_bytes[rank]
    return rank_bytes(plan, rank)


def _stages(plan: Plan) -> Section:
    return "stages", "Stages", _table(stage_table(plan)) + _titled(tie_table(plan))


def _held(run: Report) -> Section:
    text = "What the last steps took against what the plan said they would."
    if run.in_turn:
        text += " One process ran all ranks in turn, so nothing overlapped as the schedule has it."
    first, *more = tables(run)
    return "measured", "Measured", f"<p>{text}</p>" + _table(first) + "".join(map(_titled, more))


def _graph_sections(graph: OpGraph) -> tuple[Section, Section]:
    tree = (
        "<p>The modules as the model has them: which stages each lies in, and its share of a microbatch's "
        'forward and backward.</p><div id="tree"></div>'
    )
    ops = (
        f"<p>All {count(len(graph.ops))} ops in program order, tinted by stage. Values run down the lanes on "
        "the left from the op that makes them to the last that uses them; dashed ones cross a cut. "
        "Squares are modules, dots functions.</p>"
        '<div class="tools"><input id="ops-find" type="search" placeholder="Find an op, then Enter" '
        'aria-label="Find an op"><button id="ops-out">Zoom out</button><button id="ops-in">Zoom in</button>'
        '<button id="ops-all">Whole graph</button></div>'
        '<div class="view pick" id="ops" tabindex="0" role="application" style="height:30rem" aria-label="Op '
        'graph. Arrow keys move between ops, plus and minus zoom."><canvas></canvas>'
        '<i style="display:block"></i></div><div id="detail" aria-live="polite"></div>'
    )
    return ("modules", "Modules", tree), ("graph", "Op graph", ops)


def _boundaries(plan: Plan) -> Section:
    table = boundary_table(plan)
    if not table.rows:
        return "boundaries", "Boundaries", "<p>One stage: nothing crosses.</p>"
    text = "<p>What crosses each cut, and what is cheaper to compute again than to send.</p>"
    return "boundaries", "Boundaries", text + _table(table)


def _mesh(mesh: Mesh) -> Section:
    text = (
        "<p>Each process of the job with its stages and memory; a row is a replica of the pipeline. Sizes "
        "are of a step, both ways; a heavy line parts hosts.</p>"
    )
    drawn = f'<div class="scroll" tabindex="0" role="region" aria-label="Mesh">{drawing(mesh)}</div>'
    return "mesh", "Mesh", text + drawn + "".join(map(_titled, tables(mesh)))


def _legend(measured: Any) -> str:
    rows = "<span>upper row predicted, lower measured</span>" if measured is not None else ""
    kinds = "F pale, B full, W faint; underlined what the step waits for"
    return f'<span class="legend">{rows}<span>{kinds}</span></span>'


def _schedule(predicted: Timeline, measured: Timeline | None) -> Section:
    lost = "".join(
        f"<dt>{html.escape(cause)}</dt><dd>{percent(share)}</dd>"
        for cause, share in _bubble(predicted).items()
    )
    body = (
        "<p>What every rank does when. Hover or use the arrow keys for an action; drag to pan, "
        "Ctrl and the wheel, a pinch, or + and − to zoom.</p>"
        '<div class="tools"><button id="gantt-out">Zoom out</button><button id="gantt-in">Zoom in</button>'
        f'<button id="gantt-all">Whole step</button>{_legend(measured)}</div>'
        '<div style="position:relative"><div class="view" id="gantt" tabindex="0" role="application" '
        'aria-label="Schedule. Arrow keys move between actions, plus and minus zoom.">'
        '<canvas></canvas><i></i></div><div class="tip"></div></div>'
        '<output id="gantt-says" aria-live="polite"></output>'
    )
    causes = f'<h3>Idle time by cause</h3><dl class="plain">{lost}</dl>' if lost else ""
    return "schedule", "Schedule", body + causes


def _bubble(timeline: Timeline) -> Mapping[str, float]:
    """Cause → share of all ranks' time in the step, the largest first."""
    whole = timeline.step_s * timeline.schedule.n_ranks or 1.0
    shares = {k.removesuffix("_s"): s / whole for k, s in dataclasses.asdict(timeline.bubble).items()}
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _memory(plan: Plan, predicted: Timeline, held: Sequence[int]) -> Section:
    limits = sorted({x for x in memory_limits(plan) if x is not None})
    near = limits and limits[0] < NEAR * max(predicted.peak_bytes, default=0)
    drawn = " (dashed)" if near else ", far above" if limits else ""
    limit = f" The limit is {word(tuple(map(nbytes, limits)))}{drawn}." if limits else ""
    limit += " The solid line is the most that was measured." if held else ""
    body = (
        f"<p>Predicted memory of each rank over the step, on the schedule's time axis.{limit}</p>"
        '<div style="position:relative"><div class="view" id="memory-rows" tabindex="0" role="application" '
        'aria-label="Memory per rank over time. Plus and minus zoom.">'
        '<canvas></canvas><i></i></div><div class="tip"></div></div>'
    )
    return "memory", "Memory", body


def _reasons(plan: Plan, costs: CostTable | None) -> Section:
    b = plan.bounds
    facts = {"certificate": certificate(plan), "this step": f"{seconds(plan.step_s)} predicted"}
    if b.bottleneck_lower_s > 0:
        facts |= {
            "slowest stage": f"{seconds(b.bottleneck_s)} per microbatch, communication it waits for included",
            "no cut can beat": seconds(b.bottleneck_lower_s),
            "no step can beat": seconds(b.step_lower_s),
        }
    text = html.escape("\n".join(cut_reasons(plan, costs)) or "One stage: there is no cut.")
    body = _facts(facts) + f'<h3>Cut by cut</h3><pre class="why" tabindex="0">{text}</pre>'
    return "why", "Why this cut", body + _titled(candidate_table(plan))


def _assumptions(plan: Plan, costs: CostTable | None) -> Section:
    facts: dict[str, Any] = {"autopipe": importlib.metadata.version("autopipe-torch")}
    if costs is not None:
        facts["costs"] = f"{costs.source} on {costs.device or 'an unnamed device'}"
        facts |= {"sizes": _pairs(costs.dims)} if costs.dims else {}
        if costs.residual is not None:
            facts["whole model against sum of ops"] = f"{costs.residual:+.1%}"
        facts |= dict(costs.versions)
    facts["devices"] = word(tuple(dict.fromkeys(d.name for d in plan.cluster.devices)))
    link = plan.cluster.local
    facts["links"] = f"{seconds(link.latency_s)} + bytes / {nbytes(link.bandwidth_bytes_s)} per s on a host"
    if link.bandwidth_bytes_s == float("inf"):
        facts["links"] = "taken as free on a host"
    said = {"dims", "versions"} if costs is not None else set()
    facts |= {
        k.replace("_", " "): _limit(v) if k == "memory_limit" else v
        for k, v in plan.settings.items()
        if v not in (None, (), [], {}) and k not in said
    }
    facts["graph digest"] = plan.graph_digest
    return "assumptions", "Assumptions", _facts(facts)


def _limit(asked: Any) -> str:
    each = asked if isinstance(asked, (list, tuple)) else (asked,)
    return word(tuple(nbytes(parse_bytes(x)) for x in each))


def _pairs(value: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in value.items())


def _facts(facts: Mapping[str, Any]) -> str:
    shown = {k: _pairs(v) if isinstance(v, Mapping) else word(v) for k, v in facts.items()}
    rows = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd>" for k, v in shown.items())
    return f'<dl class="plain">{rows}</dl>'


def _table(table: Table) -> str:
    """A table in a box that scrolls by itself, by keyboard too."""
    name = html.escape(table.title)
    inner = table.html(caption=False)
    body, _, note = inner.partition("</table>")
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">{body}</table></div>{note}'


def _titled(table: Table) -> str:
    return f"<h3>{html.escape(table.title)}</h3>{_table(table)}" if table.rows else ""


@functools.cache
def _asset(name: str) -> str:
    return (importlib.resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _page(title: str, header: str, sections: Sequence[Section], blocks: Mapping[str, Any]) -> str:
    links = "".join(f'<a href="#{i}">{html.escape(t)}</a>' for i, t, _ in sections)
    main = "".join(f'<section id="{i}"><h2>{html.escape(t)}</h2>{body}</section>' for i, t, body in sections)
    stored = "".join(map(_stored, blocks, blocks.values()))
    script = "\n".join(map(_asset, SCRIPTS))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)} – pipeline plan</title>"
        f'<link rel="icon" href="data:,"><style>{_asset("report.css")}</style></head><body>{header}'
        f'<nav aria-label="Sections"><div>{links}<button id="theme" hidden>Theme: auto</button></div></nav>'
        f"<main>{main}</main><footer>Made by autopipe. This file stands alone: nothing is loaded from "
        f'elsewhere.</footer>{stored}<script>"use strict";\n(() => {{\n{script}}})();</script>'
        "</body></html>\n"
    )


def _stored(name: str, block: Any) -> str:
    """Data for the scripts; "<" is escaped so that no name in it can end the element."""
    text = json.dumps(block, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'
