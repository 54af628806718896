"""A running job, live: its ranks as a table, what one should look at in words, redrawn as it goes on.

Reading what the job tells is left to ``simulator``.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..errors import InputError
from ..simulator import DRIFTED, Watched, watched
from .table import Column, Table, count, nbytes, percent, runs, seconds
from .tables import headline, ratio, tables
from .timeline_svg import gantt
from .views import cell, html

__all__ = ["follow", "watch"]


@headline.register
def _(job: Watched) -> str:
    run = job.report
    over = run.measured_step_s / run.predicted_step_s if run.predicted_step_s else None
    parts = [f"{run.plan.model}: step {job.step:,}"]
    parts += [f"loss {job.loss:.4f}"] if job.loss is not None else []
    said = f"{seconds(run.predicted_step_s)} predicted, ratio {ratio(over)}"
    parts.append(f"{seconds(run.measured_step_s)} a step ({said})")
    parts.append(f"told {seconds(job.age_s)} ago")
    return ", ".join(parts)


@tables.register
def _(job: Watched) -> tuple[Table, ...]:
    run = job.report
    timeline, causes = run.timeline, ("warmup", "drain", "imbalance", "communication")
    held = run.peak_bytes or (None,) * run.plan.n_ranks
    columns = (
        Column("rank", "rank", count),
        Column("stages", "stages", runs, extra=True),
        Column("busy_s", "busy", seconds),
        Column("slowness", "against plan", lambda x: f"{x:.2f}×"),
        Column("idle", "idle", percent),
        *(Column(f"{cause}_s", cause, seconds, extra=True) for cause in causes),
        Column("peak_bytes", "memory", nbytes),
        Column("predicted_bytes", "predicted", nbytes),
    )
    step_s = timeline.step_s or 1.0
    rows = tuple(
        (
            rank,
            timeline.schedule.stages_of(rank),
            busy_s,
            run.slowness[rank],
            1 - busy_s / step_s,
            *(getattr(idle, f"{cause}_s") for cause in causes),
            held[rank],
            said,
        )
        for rank, (busy_s, idle, said) in enumerate(
            zip(timeline.busy_s, timeline.bubbles, run.predicted_peak_bytes, strict=True)
        )
    )
    return (Table("Ranks in the last step", columns, rows, " ".join(remarks(job))),)


def remarks(job: Watched) -> Iterator[str]:
    """What one should look at, a sentence each."""
    run, predicted = job.report, job.report.predicted
    idle = run.timeline.bubble
    whole = run.timeline.step_s * run.plan.n_ranks or 1.0
    shares = {c: getattr(idle, f"{c}_s") / whole for c in ("warmup", "drain", "imbalance", "communication")}
    by_cause = ", ".join(f"{c} {percent(x)}" for c, x in sorted(shares.items(), key=lambda item: -item[1]))
    said = "" if run.in_turn else f" ({percent(predicted.bubble_fraction)} predicted)"
    yield f"Idle {percent(run.timeline.bubble_fraction)}{said}: {by_cause}."
    for rank in run.stragglers:
        yield f"Rank {rank} straggles: {run.slowness[rank]:.2f} times as long as planned beside the others."
    if run.drift > DRIFTED:
        yield f"Work lies {run.drift:.2f} times further from even than planned: rebalance() would cut anew."
    if job.is_silent:
        yield f"Nothing was told for {seconds(job.age_s)}: the job has ended, or stands still."


@html.register
def _(job: Watched) -> str:
    run = job.report
    drawn = gantt(run.predicted, run.timeline) if run.events else ""
    return cell(headline(job), [tables(job)[0].html(), drawn])


def follow(folder: str | pathlib.Path, every_s: float = 1.0) -> Iterator[Watched | None]:
    """What the job that publishes to ``folder`` does, every ``every_s`` seconds; None while it begins."""
    yield watched(folder)
    while True:
        time.sleep(every_s)
        yield watched(folder)


def watch(folder: str | pathlib.Path, *, every_s: float = 1.0, n: int | None = None) -> Watched | None:
    """Show a running job, redrawn in its cell every ``every_s`` seconds until the kernel is interrupted.

    For notebooks; in a terminal there is ``autopipe watch``. ``folder`` is where the job publishes
    (:meth:`Runtime.publish`). ``n``: only so many times. Returns what was seen last.

    Raises :class:`InputError` outside of IPython, :class:`StoreError` for a folder that no job publishes to.
    """
    show, seen = _display(), None
    with contextlib.suppress(KeyboardInterrupt):
        for job in itertools.islice(follow(folder, every_s), n):
            seen = job if job is not None else seen
            show(job)
    return seen


def _display() -> Callable[[Any], None]:
    """Shows something in the place of what it showed before."""
    try:
        ipython: Any = importlib.import_module("IPython")
    except ImportError:
        ipython = None
    if ipython is None or ipython.get_ipython() is None:
        raise InputError("watch() draws in notebooks; in a terminal write: autopipe watch FOLDER")
    drawn = importlib.import_module("IPython.display").HTML
    handle = ipython.display.display(drawn("<p>…</p>"), display_id=True)

    def show(job: Watched | None) -> None:
        shown = "<p>No step of all ranks yet.</p>" if job is None else job._repr_html_()
        if handle is not None:
            handle.update(drawn(shown))

    return show
