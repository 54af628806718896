"""Saves in the background: who waits for one does not wait for ever, and none fails without a word."""

import pathlib
import threading
import time

import aside_ranks
import leaving_ranks
import pytest
import torch
from processes import finish, run_ranks, start
from runtime_models import make
from torch import nn
from torch.nn import functional as F

from autopipe.errors import StoreError
from autopipe.runtime import Runtime, save_load
from autopipe.runtime.checkpoint import saving


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


@pytest.mark.timeout(100)
@pytest.mark.parametrize("how", ["end", "exit", "destroyed"])
def test_a_save_under_way_is_written_though_all_leave(tmp_path, how):
    run_ranks(pathlib.Path(leaving_ranks.__file__), 2, str(tmp_path), how, timeout_s=80)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["before", "c", "own-0", "own-1"]
    model = leaving_ranks.net()
    runtime = Runtime(*make(model, (torch.randn(8, 8),), {}, n_stages=1, n_ranks=1), loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1, momentum=0.9)
    runtime.load(tmp_path / "c", optimizer=optimizer)
    wanted = torch.load(tmp_path / "own-0") | torch.load(tmp_path / "own-1")
    assert wanted.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(p, wanted[n]) for n, p in model.named_parameters())
    assert all(optimizer.state[p]["momentum_buffer"].any() for p in model.parameters())


def test_the_program_may_go_elsewhere_while_a_save_is_written(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    runtime = Runtime(
        *make(model, (torch.randn(4, 4),), {}, n_stages=2, n_ranks=1), loss_fn=F.mse_loss, schedule="gpipe"
    )
    write, is_elsewhere = saving.save, threading.Event()

    def late(*args, **options):
        assert is_elsewhere.wait(30)
        return write(*args, **options)

    monkeypatch.setattr(save_load, "save", late)
    monkeypatch.chdir(tmp_path)
    under_way = runtime.save("c", background=True)
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    is_elsewhere.set()
    under_way.wait()
    assert (tmp_path / "c" / "autopipe.json").exists()
    assert not list((tmp_path / "inner").iterdir())


def test_a_load_waits_for_the_save_before_it(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    runtime = Runtime(
        *make(model, (torch.randn(4, 4),), {}, n_stages=2, n_ranks=1), loss_fn=F.mse_loss, schedule="gpipe"
    )
    wanted, write = model[0].weight.detach().clone(), saving.save

    def slow(*args, **options):
        time.sleep(0.3)
        return write(*args, **options)

    monkeypatch.setattr(save_load, "save", slow)
    runtime.save(tmp_path / "c", background=True)
    with torch.no_grad():
        model[0].weight.zero_()
    runtime.load(tmp_path / "c")
    assert torch.equal(model[0].weight, wanted)
    (tmp_path / "file").write_text("")
    runtime.save(tmp_path / "file", background=True)
    runtime.load(tmp_path / "c")  # what is there is as it was
    with pytest.raises(StoreError, match="is a file"):
        runtime.save(tmp_path / "d")
