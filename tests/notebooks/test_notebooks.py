"""Every notebook runs from a fresh kernel, was committed with outputs, and says what it predicted."""

from __future__ import annotations

import re

import nbformat
import pytest
from fresh_kernel import LIMIT_S, NOTEBOOKS, execute

MARGIN = 3
"""A notebook takes under ``LIMIT_S`` on an idle machine; tests often share theirs."""


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook):
    return "".join(
        out["text"] for cell in code_cells(notebook) for out in cell.outputs if out.output_type == "stream"
    )


def test_there_are_six_in_order():
    assert [p.name[0] for p in NOTEBOOKS] == list("123456")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_with_outputs_and_without_errors(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    kinds = [out.output_type for cell in code_cells(notebook) for out in cell.outputs]
    assert kinds
    assert "error" not in kinds
    assert all(cell.execution_count for cell in code_cells(notebook))


@pytest.mark.timeout(LIMIT_S * MARGIN + 30)
@pytest.mark.filterwarnings("ignore:Proactor event loop:RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_from_a_fresh_kernel(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    assert execute(notebook, tmp_path, LIMIT_S * MARGIN) < LIMIT_S * MARGIN
    if "What if" not in path.read_text():
        told = re.search(
            r"predicted ([\d.,]+) \S+ +measured ([\d.,]+) \S+ +ratio ([\d.]+)", printed(notebook)
        )
        assert told, "a notebook in which something ran ends in predicted, measured, ratio"
        predicted, measured, ratio = (float(x.replace(",", "")) for x in told.groups())
        assert ratio == pytest.approx(measured / predicted, abs=0.02)
