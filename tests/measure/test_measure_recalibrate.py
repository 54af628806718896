"""`autopipe run` leaves stage times that `autopipe profile --recalibrate` corrects its costs by."""

from __future__ import annotations

import json
import pathlib

import pytest
from typer.testing import CliRunner

from autopipe.cli.app import app

MODEL = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.b(self.a(x).relu())
def make():
    return nn.Sequential(*(Block() for _ in range({n}))), (torch.ones(8, 64),)
"""


@pytest.mark.parametrize("n", [4, 1])
def test_a_run_corrects_the_next_profile(
    n: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPIPE_STORE", str(tmp_path / "store"))
    file = tmp_path / "model.py"
    file.write_text(MODEL.format(n=n))
    common = [f"{file}:make", "-m", "2"]
    profile = ["profile", *common, "--json", "--recalibrate"]
    before = CliRunner().invoke(app, profile)
    assert before.exit_code != 0
    assert "ledger has no run" in before.output
    ran = CliRunner().invoke(app, ["run", *common, "--steps", "2"])
    assert ran.exit_code == 0, ran.output
    after = CliRunner().invoke(app, profile)
    assert after.exit_code == 0, after.output
    assert any("recalibrated on 2" in note for note in json.loads(after.stdout)["notes"])
    assert (len(json.loads(after.stdout)["costs"]) > n) is (n == 1)  # a single block is opened
