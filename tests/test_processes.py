"""What ranks are forked from: a capture that fails in it is told to each, and no test waits for its start."""

import signal
from types import SimpleNamespace

import processes
import pytest
from processes import ROOT, finish, run_ranks, start

BROKEN = """
import runpy, sys, autopipe

def broken(*_, **__):
    raise KeyError("of a capture")

autopipe.split = broken
try:
    runpy.run_path(sys.argv[1])["check"]()
except RuntimeError as error:
    print(error)
"""

FORKED = """
import os, pathlib, sys, processes, warmed

warmed.FAILURE = "KeyError: 'of a capture'"
os.setsid = lambda: None  # it leads its session already
script = pathlib.Path(sys.argv[1]).with_name("never.py")
script.write_text("print('ran')")
processes._become(str(script), [], dict(os.environ), sys.argv[1])
"""


def test_it_is_kept(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    (output,) = run_ranks(script, 0, ROOT / "tests" / "warmed.py")
    assert "warmed.py, which is run ahead of all ranks, failed" in output
    assert output.rstrip().endswith("KeyError: 'of a capture'")


def test_ranks_end_by_it(tmp_path):
    script, told = tmp_path / "forked.py", tmp_path / "told"
    script.write_text(FORKED)
    told.touch()
    ((code, _),) = finish(start(script, 0, told), 60)
    assert code == 1
    assert told.read_text().rstrip().endswith("KeyError: 'of a capture'")


@pytest.mark.timeout(50)
def test_its_start_takes_no_time_of_a_test_and_ends(monkeypatch):
    found = []
    process = SimpleNamespace(
        start=lambda: found.append(signal.getitimer(signal.ITIMER_REAL)[0]), join=lambda: None
    )
    monkeypatch.setattr(processes, "_FORKS", SimpleNamespace(Process=lambda target: process))
    before = signal.getitimer(signal.ITIMER_REAL)[0]
    processes._wait_for.__wrapped__(-1)
    assert 50 < found[0] <= processes._MOST_START_S
    assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= before
