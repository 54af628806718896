"""Tables of what runs when: the actions of a schedule, a simulated or measured step, a run's report.

How a table prints is left to ``table``.
"""

from __future__ import annotations

from ..schedule import Schedule
from ..simulator import Report, Timeline
from ..units import n_of
from .colours import swatch
from .generic import headline, over, ratio, tables
from .table import Column, Table, count, nbytes, percent, runs, seconds

__all__ = ["rank_table"]


@headline.register
def _(schedule: Schedule) -> str:
    pieces = n_of(schedule.n_microbatches, "microbatch", "microbatches")
    where = f"{n_of(schedule.n_stages, 'stage')} on {n_of(schedule.n_ranks, 'rank')}"
    return f"{schedule.name}: {where}, {pieces}"


@tables.register
def _(schedule: Schedule) -> tuple[Table, ...]:
    columns = (
        Column("rank", "rank", count),
        Column("order", "order", count),
        Column("stage", "stage", count),
        Column("kind", "kind"),
        Column("microbatch", "microbatch", count),
    )
    rows = tuple(
        (rank, i, a.stage, a.kind, a.microbatch)
        for rank, row in enumerate(schedule.actions)
        for i, a in enumerate(row)
    )
    return (Table("Actions", columns, rows),)


@headline.register
def _(timeline: Timeline) -> str:
    idle = f"{percent(timeline.bubble_fraction)} of all ranks' time idle"
    return f"{headline(timeline.schedule)}, step {seconds(timeline.step_s)} {timeline.source}, {idle}"


@tables.register
def _(timeline: Timeline) -> tuple[Table, ...]:
    columns = (
        Column("rank", "rank", count),
        Column("action", "action"),
        Column("start_s", "start", seconds),
        Column("end_s", "end", seconds),
        Column("seconds", "long", seconds),
    )
    rows = tuple((e.rank, str(e.action), e.start_s, e.end_s, e.end_s - e.start_s) for e in timeline.events)
    return (rank_table(timeline), Table("Events", columns, rows))


def rank_table(timeline: Timeline) -> Table:
    """One row per rank: busy, idle by cause, peak memory."""
    causes = ("warmup", "drain", "imbalance", "communication")
    columns = (
        Column("rank", "rank", count),
        Column("stages", "stages", runs),
        Column("busy_s", "busy", seconds),
        Column("idle", "idle", percent),
        *(Column(f"{cause}_s", cause, seconds) for cause in causes),
        Column("peak_bytes", "peak memory", nbytes),
    )
    step = timeline.step_s or 1.0
    peaks = timeline.peak_bytes or (None,) * timeline.schedule.n_ranks
    rows = tuple(
        (
            r,
            timeline.schedule.stages_of(r),
            busy,
            1 - busy / step,
            *(getattr(idle, f"{cause}_s") for cause in causes),
            peak,
        )
        for r, (busy, idle, peak) in enumerate(zip(timeline.busy_s, timeline.bubbles, peaks, strict=True))
    )
    return Table("Ranks", columns, rows, "Idle time by cause; a dash where memory is unknown.")


@headline.register
def _(report: Report) -> str:
    times = f"{seconds(report.predicted_step_s)} predicted, {seconds(report.measured_step_s)} measured"
    times += ", all ranks in turn in one process" if report.in_turn else ""
    relative = over(report.measured_step_s, report.predicted_step_s)
    return f"{report.plan.model}: step {times}, ratio {ratio(relative)}"


@tables.register
def _(report: Report) -> tuple[Table, ...]:
    columns = (
        Column("stage", "stage", count, swatch),
        Column("rank", "rank", count),
        Column("kind", "action"),
        Column("predicted_s", "predicted", seconds),
        Column("measured_s", "measured", seconds),
        Column("ratio", "ratio", ratio),
    )
    rows = tuple(
        (s.index, s.rank, kind, s.predicted[kind], took, over(took, s.predicted[kind]))
        for s in report.stages
        for kind, took in s.measured.items()
    )
    note = f"Medians over {n_of(report.n_steps, 'step')}, per microbatch."
    note += f" What is {report.other_schedule}." if report.other_schedule else ""
    held = (_held_table(report),) if report.peak_bytes else ()
    return (Table("Predicted and measured", columns, rows, note), *held)


def _held_table(report: Report) -> Table:
    columns = (
        Column("rank", "rank", count),
        Column("predicted_bytes", "predicted", nbytes),
        Column("measured_bytes", "measured", nbytes),
        Column("ratio", "ratio", ratio),
    )
    pairs = zip(report.predicted_peak_bytes, report.peak_bytes, strict=True)
    rows = tuple((rank, said, held, over(held, said)) for rank, (said, held) in enumerate(pairs))
    return Table("Memory, predicted and measured", columns, rows, "The most each rank held.")
