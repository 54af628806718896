"""A table that prints as text, HTML or a data frame from the same rows.

What goes into the tables of each type is left to ``tables``.
"""

from __future__ import annotations

import dataclasses
import functools
import html
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import AutopipeError
from ..units import format_bytes, format_seconds

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Column", "Table", "count", "nbytes", "percent", "runs", "seconds", "word"]


def count(n: float | None) -> str:
    """Whole numbers with thousands apart.

    >>> count(12345), count(None)
    ('12,345', '–')
    """
    return "–" if n is None else f"{n:,}"


def percent(x: float | None) -> str:
    """A fraction as a percentage; a dash where there is none.

    >>> percent(0.1234), percent(None)
    ('12.3%', '–')
    """
    return "–" if x is None else f"{x:.1%}"


def seconds(s: float | None) -> str:
    """Seconds for people; a dash where nothing was timed."""
    return "–" if s is None else format_seconds(s) if s else "0 s"


def nbytes(n: float | None) -> str:
    """Bytes for people; a dash where there are none."""
    return "–" if n is None else format_bytes(n)


def word(value: Any) -> str:
    """Anything as text; a dash for nothing, commas between several."""
    if value is None or value == "" or value == ():
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def runs(numbers: Sequence[int]) -> str:
    """Numbers with runs of three or more joined.

    >>> runs((0, 2, 3, 4, 5, 8, 9))
    '0, 2–5, 8, 9'
    """
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][-1] + 1:
            found[-1].append(n)
        else:
            found.append([n])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 2 else ", ".join(map(str, r)) for r in found)


_LEAST_WORD = 8
"""Characters that are left of a text where there is no room for all."""


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column: the name code uses (with its unit), the title people read, how a value prints.

    ``html`` is put before the text in HTML, such as a swatch or a bar; an ``extra`` column goes first where
    there is no room for all.
    """

    key: str
    title: str
    format: Callable[[Any], str] = word
    html: Callable[[Any], str] | None = None
    extra: bool = False

    @property
    def is_number(self) -> bool:
        return self.format not in (word, runs)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of raw values under titled columns, a title above and a note below."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""

    def cells(self, rows: Sequence[tuple[Any, ...]]) -> list[list[str]]:
        """The formatted text of some rows."""
        return [[c.format(v) for c, v in zip(self.columns, row, strict=True)] for row in rows]

    def text(self, max_rows: int = 60) -> str:
        """Aligned plain text; the middle of a long table is left out and counted."""
        head, tail, hidden = _ends(self.rows, max_rows)
        body = self.cells(head) + self.cells(tail)
        titles = [c.title for c in self.columns]
        widths = [max(len(line[i]) for line in [titles, *body]) for i in range(len(titles))]
        lines = [self._line(line, widths) for line in [titles, *body]]
        if hidden:
            lines.insert(1 + len(head), f"  … {hidden:,} more …")
        return "\n".join(filter(None, [self.title, *lines, self.note]))

    def _line(self, cells: list[str], widths: list[int]) -> str:
        pairs = zip(self.columns, cells, widths, strict=True)
        return "  ".join(t.rjust(w) if c.is_number else t.ljust(w) for c, t, w in pairs).rstrip()

    @functools.cached_property
    def widths(self) -> tuple[int, ...]:
        """Characters of each column."""
        lines = [[c.title for c in self.columns], *self.cells(self.rows)]
        return tuple(max(len(line[i]) for line in lines) for i in range(len(self.columns)))

    def cut_to(self, width: int) -> int:
        """At how many characters texts are cut so that lines fit the width, three between columns.

        Numbers are not cut: 0 where there is too little room beside them.
        """
        pairs = list(zip(self.columns, self.widths, strict=True))
        room = width - 3 * len(pairs) - sum(wide for column, wide in pairs if column.is_number)
        texts = [wide for column, wide in pairs if not column.is_number]
        if not texts:
            return int(room >= 0)
        longest = max(texts)
        fitting = (n for n in range(longest, 0, -1) if sum(min(n, wide) for wide in texts) <= room)
        found = next(fitting, 0)
        return found if found >= min(longest, _LEAST_WORD) else 0

    def fit(self, width: int) -> Table:
        """The table without as many of its extra columns, from the right, as it takes to fit the width."""
        wide = self.widths
        keep = list(range(len(self.columns)))
        for i in reversed(range(len(self.columns))):
            if self.columns[i].extra and sum(wide[k] + 3 for k in keep) > width:
                keep.remove(i)
        rows = tuple(tuple(row[k] for k in keep) for row in self.rows)
        return dataclasses.replace(self, columns=tuple(self.columns[k] for k in keep), rows=rows)

    def html(self, max_rows: int = 2000, caption: bool = True) -> str:
        """An HTML table; numbers are right-aligned by class ``n``. Long tables lose their middle."""
        head, tail, hidden = _ends(self.rows, max_rows)
        titles = "".join(f'<th scope="col"{_number(c)}>{html.escape(c.title)}</th>' for c in self.columns)
        gap = f'<tr><td colspan="{len(self.columns)}">… {hidden:,} more …</td></tr>' if hidden else ""
        body = self._rows(head) + gap + self._rows(tail)
        title = f"<caption>{html.escape(self.title)}</caption>" if caption and self.title else ""
        note = f'<p class="note">{html.escape(self.note)}</p>' if self.note else ""
        return f"<table>{title}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>{note}"

    def _rows(self, rows: Sequence[tuple[Any, ...]]) -> str:
        return "".join(f"<tr>{''.join(map(_cell, self.columns, row))}</tr>" for row in rows)

    def frame(self) -> pd.DataFrame:
        """The raw rows as a pandas DataFrame, columns named by their keys."""
        try:
            import pandas as pd
        except ImportError as error:
            raise AutopipeError('to_frame needs pandas: pip install "autopipe-torch[notebooks]"') from error
        return pd.DataFrame(list(self.rows), columns=[c.key for c in self.columns])


def _cell(column: Column, value: Any) -> str:
    before = column.html(value) if column.html else ""
    return f"<td{_number(column)}>{before}{html.escape(column.format(value))}</td>"


def _number(column: Column) -> str:
    return ' class="n"' if column.is_number else ""


def _ends(
    rows: tuple[tuple[Any, ...], ...], limit: int
) -> tuple[Sequence[tuple[Any, ...]], Sequence[tuple[Any, ...]], int]:
    """The first and last rows that fit the limit, and how many lie between."""
    if len(rows) <= limit:
        return rows, (), 0
    half = limit // 2
    return rows[: limit - half], rows[len(rows) - half :], len(rows) - limit
