"""The README's first script runs as it stands, alone and on two ranks; every public name is in the README."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from processes import run_ranks

import autopipe
from autopipe.api import Pipe
from autopipe.runtime import Runtime

README = pathlib.Path(__file__).parents[1] / "README.md"


@pytest.mark.timeout(200)
def test_first_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(re.search(r"```python\n(.*?)```", README.read_text(), re.S)[1])
    environment = {**os.environ, "PYTHONPATH": str(README.parent)}
    alone = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=90, check=True
    ).stdout
    losses = {re.search(r"loss (\S+)$", text, re.M)[1][:7] for text in (alone, *run_ranks(script, 2))}
    assert len(losses) == 1


def test_every_method_of_a_runtime_is_named():
    text = README.read_text()
    public = [n for n in dir(Runtime) if not n.startswith("_") and callable(getattr(Runtime, n))]
    assert [n for n in public if f"`{n}`" not in text] == []
    verbs = [n for n in autopipe.__all__ if n.islower()]
    assert [n for n in verbs if f"autopipe.{n}(" not in text] == []


@pytest.mark.parametrize("floor", ["tracing", "runtime"])
def test_every_room_is_named(floor):
    inside = README.parent / "autopipe" / floor
    row = re.search(rf"^  {floor}/ .*:([^/]*)\n  \w+/", README.read_text(), re.M)[1]
    assert set(re.findall(r"\w+", row)) == {path.parent.name for path in inside.glob("*/__init__.py")}


def test_help_of_a_pipe_is_a_page():
    names = [n for n in dir(Pipe) if not n.startswith("_")]
    assert {"runtime", "verify", "merge", "state_dict"} <= set(names)
    assert "register_forward_hook" not in names
    assert len(names) <= 16
