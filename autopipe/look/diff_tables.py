"""The tables of what changed between two plans.

Finding the changes is left to ``plans``.
"""

from __future__ import annotations

from ..plans import PlanDiff
from .table import Column, Table, count, nbytes, percent, seconds, word
from .tables import headline, tables

__all__: list[str] = []


@headline.register
def _(diff: PlanDiff) -> str:
    if diff.is_empty:
        return "The plans are equal"
    _, before, after, _ = diff.figures[0]
    run = " → ".join(dict.fromkeys(diff.schedule))
    of = f" of another model, {diff.model[1]} for {diff.model[0]}" if len({*diff.model}) > 1 else ""
    return f"{run}{of}: step {seconds(before)} → {seconds(after)}{_change(before, after)}"


@tables.register
def _(diff: PlanDiff) -> tuple[Table, ...]:
    show = {"s": seconds, "bytes": nbytes, "": count, "share": percent}
    columns = tuple(Column(key, title) for key, title in zip(_KEYS, ("", "before", "after", ""), strict=True))
    rows = tuple((w, show[u](a), show[u](b), _change(a, b)) for w, a, b, u in diff.figures)
    parts = (
        ("op", "moved", diff.moved),
        ("value", "crossing differently", diff.crossing),
        ("parameter", "tied differently", diff.ties),
        ("setting", "asked for differently", diff.asked),
    )
    more = [
        Table(
            f"{len(changes)} {what}s {how}" if len(changes) != 1 else f"1 {what} {how}",
            (Column("what", what), Column("before", "before"), Column("after", "after")),
            tuple((name, word(a), word(b)) for name, a, b in changes),
        )
        for what, how, changes in parts
        if changes
    ]
    return Table("", columns, rows), *more


_KEYS = ("what", "before", "after", "change")


def _change(before: float, after: float) -> str:
    return f" ({after / before - 1:+.1%})" if before and after != before else ""
