"""Saves in the background: who waits for one does not wait for ever, and none fails without a word."""

import pathlib
import time

import aside_ranks
import pytest
import torch
from processes import finish, start
from runtime_models import make
from torch import nn
from torch.nn import functional as F

from autopipe.errors import StoreError
from autopipe.runtime import Runtime


@pytest.mark.timeout(100)
def test_a_rank_that_stops_while_it_saves_is_told_and_a_slow_one_is_waited_for(tmp_path):
    (code, output), _ = finish(start(pathlib.Path(aside_ranks.__file__), 2, str(tmp_path)), 80)
    assert code == 0, output[-3000:]
    assert "told after" in output


def test_a_failure_that_nobody_waits_for_is_told(tmp_path, caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    runtime = Runtime(
        *make(model, (torch.randn(4, 4),), {}, n_stages=2, n_ranks=1), loss_fn=F.mse_loss, schedule="gpipe"
    )
    (tmp_path / "c").write_text("a file")
    saving = runtime.save(tmp_path / "c", background=True)
    while not saving.is_done:
        time.sleep(0.01)
    assert "the save in the background failed" in caplog.text
    assert "is a file" in caplog.text
    with pytest.raises(StoreError, match="is a file"):
        saving.wait()
