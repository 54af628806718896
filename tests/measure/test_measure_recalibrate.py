"""`autopipe run` leaves stage times that `autopipe profile --recalibrate` corrects its costs by."""

from __future__ import annotations

import json
import pathlib

import pytest
from typer.testing import CliRunner

from autopipe.cli.app import command

MODEL = """
from torch import nn
def make():
    blocks = (nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(4))
    return nn.Sequential(*blocks)
"""


def test_a_run_corrects_the_next_profile(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPIPE_STORE", str(tmp_path / "store"))
    app = command()
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    common = [f"{file}:make", "-m", "2", "--batch", "8"]
    profile = ["profile", *common, "--json", "--recalibrate"]
    before = CliRunner().invoke(app, profile)
    assert before.exit_code != 0
    assert "ledger has no run" in before.output
    ran = CliRunner().invoke(app, ["run", *common, "--steps", "2"])
    assert ran.exit_code == 0, ran.output
    after = CliRunner().invoke(app, profile)
    assert after.exit_code == 0, after.output
    assert any("recalibrated on 2" in note for note in json.loads(after.stdout)["notes"])
