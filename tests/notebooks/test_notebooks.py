"""Every notebook runs from a fresh kernel, was committed with outputs, and says what it predicted."""

from __future__ import annotations

import os
import pathlib
import re
import time

import nbformat
import pytest
from fresh_kernel import NOTEBOOKS, execute
from jupyter_client.provisioning import local_provisioner
from nbclient.output_widget import OutputWidget
from processes import PATHS, Rank

CELL_LIMIT_S = 240
"""A whole notebook takes under 30 s on two idle cores, which ``benchmarks.look.notebooks`` checks."""

STARTED = NOTEBOOKS[-1].stem
"""The notebook whose kernel is started as users start it; the others' are forked from what holds torch."""


class Forked(Rank):
    """A kernel, as what launches those of users returns one."""

    stdin = stdout = stderr = None

    def __init__(self, command, *, cwd, env, **_):
        script = pathlib.Path(__file__).with_name("forked_kernel.py")
        paths = os.pathsep.join(map(str, PATHS))
        super().__init__(script, [cwd, *command[command.index("-f") :]], {**env, "PYTHONPATH": paths}, None)
        while os.getpgid(self.pid) != self.pid:  # until it is signalled without whoever it was forked from
            time.sleep(1e-3)

    def poll(self):
        return self.returncode

    def wait(self):
        code = self.returncode
        self.end()
        return code


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


@pytest.mark.filterwarnings("ignore:Proactor event loop:RuntimeWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_from_a_fresh_kernel(path, tmp_path, monkeypatch):
    if path.stem != STARTED:
        monkeypatch.setattr(local_provisioner, "launch_kernel", Forked)
    notebook = nbformat.read(path, as_version=4)
    execute(notebook, tmp_path, CELL_LIMIT_S)
    if "What if" not in path.read_text():
        told = re.search(
            r"predicted ([\d.,]+) \S+ +measured ([\d.,]+) \S+ +ratio ([\d.]+)", printed(notebook)
        )
        assert told, "a notebook in which something ran ends in predicted, measured, ratio"
        predicted, measured, ratio = (float(x.replace(",", "")) for x in told.groups())
        assert ratio == pytest.approx(measured / predicted, rel=0.02, abs=0.01)  # of rounded figures


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_reply_that_comes_while_a_widget_answers_is_seen(tmp_path, monkeypatch):
    """Else the cell lasts until its time is up."""
    monkeypatch.setattr(local_provisioner, "launch_kernel", Forked)
    send, limit_s = OutputWidget.send, 60

    def late(*args):
        time.sleep(0.3)  # in which the cell ends
        send(*args)

    monkeypatch.setattr(OutputWidget, "send", late)
    source = "import ipywidgets\nout = ipywidgets.Output()\nwith out:\n    display('shown')"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    assert execute(notebook, tmp_path, limit_s) < limit_s
    assert "shown" in str(notebook.metadata.widgets)
