"""A capture that fails in what ranks are forked from is told to each of them."""

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
