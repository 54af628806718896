"""Every benchmark can be started as its README says: from the root, with nothing on the path but that."""

import importlib
import pathlib
import subprocess
import sys

import pytest

from benchmarks.kept.rank import PLACES

ROOT = pathlib.Path(__file__).parents[1]


def test_every_module_of_the_benchmarks_can_be_imported():
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
        and path.parent.name != "tasks"  # scripts as users write them, which run when imported
    ]
    code = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("moment", PLACES)
def test_a_fault_has_its_place(moment):
    where, name, _ = PLACES[moment]
    module, _, cls = where.partition(":")
    holder = importlib.import_module(module)
    assert callable(getattr(getattr(holder, cls) if cls else holder, name))
