"""Tables print the same rows as text, HTML and a frame, whatever is in them."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from autopipe.look.table import Column, Table, nbytes, runs, seconds

COLUMNS = (Column("name", "name"), Column("time_s", "time", seconds), Column("size", "size", nbytes))
ROWS = st.lists(st.tuples(st.text(max_size=12), st.floats(0, 1e3), st.integers(0, 10**12)), max_size=30)


@given(ROWS)
def test_text_has_a_line_per_row_and_html_a_tr(rows):
    clean = [(re.sub(r"\s", "_", a), b, c) for a, b, c in rows]
    table = Table("title", COLUMNS, tuple(clean))
    assert len(table.text().splitlines()) == 2 + len(clean)
    assert table.html().count("<tr>") == 1 + len(clean)


def test_long_tables_lose_their_middle_and_say_so():
    table = Table("", COLUMNS, tuple((str(i), 1.0, i) for i in range(100)))
    lines = table.text(max_rows=10).splitlines()
    assert len(lines) == 12
    assert "90 more" in lines[6]
    assert lines[1].startswith("0 ")
    assert lines[-1].startswith("99")


def test_markup_in_names_is_escaped():
    html = Table("<b>", COLUMNS, (("<script>x</script>", 0.0, 0),)).html()
    assert "<script>" not in html
    assert "<b>" not in html


def test_frame_keeps_raw_values_under_their_keys():
    frame = Table("", COLUMNS, (("a", 0.25, 3), ("b", None, 4))).frame()
    assert list(frame.columns) == ["name", "time_s", "size"]
    assert frame["time_s"][0] == 0.25
    assert frame["size"].sum() == 7


@given(st.sets(st.integers(0, 60)))
def test_runs_name_exactly_the_numbers_given(numbers):
    said: set[int] = set()
    for part in filter(None, runs(sorted(numbers)).split(", ")):
        first, _, last = part.partition("–")
        said |= set(range(int(first), int(last or first) + 1))
    assert said == numbers


@given(ROWS, st.integers(1, 80))
def test_texts_are_cut_as_far_as_lines_need_and_numbers_are_not(rows, width):
    table = Table("", COLUMNS, tuple(rows))
    text, *numbers = table.widths

    def line(n):
        return min(n, text) + sum(numbers) + 9

    n = table.cut_to(width)
    assert 0 <= n <= text
    if n:
        assert line(n) <= width
        assert n == text or line(n + 1) > width
    else:
        assert line(min(8, text)) > width
