"""A job that publishes its steps is seen from outside: step, stragglers, memory; at next to no cost."""

import json
import pathlib
import time
import types

import pytest
import torch
from processes import run_ranks
from torch import nn

import autopipe
from autopipe.simulator import watched


def runtime():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    pipe = autopipe.split(model, 2, (torch.randn(8, 8),), n_microbatches=4, costs="estimated")
    return pipe.runtime(nn.functional.mse_loss)


def train(rt, n=1):
    for _ in range(n):
        rt.step(torch.randn(8, 8), target=torch.randn(8, 8))


def test_two_ranks(tmp_path):
    run_ranks(pathlib.Path(__file__).parent / "publish_ranks.py", 2, tmp_path / "live", timeout_s=90)


def test_one_process(tmp_path):
    rt = runtime()
    rt.publish(tmp_path / "live", every_s=1e-6)
    assert watched(tmp_path / "live") is None
    train(rt, 3)
    seen = watched(tmp_path / "live")
    assert seen.step == 3
    assert seen.report.in_turn
    assert len(seen.report.events) == 16
    assert "step 3" in str(seen)
    assert "Idle" in str(seen)
    assert "<svg" in seen._repr_html_()
    assert json.loads(json.dumps(seen.to_dict()))["step"] == 3


def test_an_earlier_job_is_not_shown(tmp_path):
    first, second = runtime(), runtime()
    first.publish(tmp_path)
    train(first)
    assert watched(tmp_path).step == 1
    second.publish(tmp_path)
    assert watched(tmp_path) is None


def test_writing_is_light(tmp_path):
    rt = runtime()
    rt.publish(tmp_path, every_s=1e-9)
    train(rt)
    took = []
    for _ in range(5):
        train(rt)
        start = time.thread_time()
        rt.engine.publisher._write(torch.zeros(()))
        took.append(time.thread_time() - start)
    assert min(took) < 0.005


def test_a_folder_that_cannot_be(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    rt = runtime()
    with pytest.raises(autopipe.InputError, match="give another folder"):
        rt.publish(tmp_path / "file" / "live")
    with pytest.raises(autopipe.InputError, match="every_s"):
        rt.publish(tmp_path, every_s=0)
    rt.publish(tmp_path / "live", every_s=1e-9)
    (tmp_path / "live").rename(tmp_path / "gone")
    train(rt, 2)
    assert caplog.text.count("cannot be watched") == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda told: told["recorded"]["steps"][0]["actions"][0][0].update(stage=99),
        lambda told: told["recorded"]["steps"][0]["actions"][0][0].update(microbatch=-1),
        lambda told: told["recorded"]["steps"][0]["actions"].pop(0),
        lambda told: told["recorded"]["steps"][0]["actions"][0][0].update(microbatch=9),
        lambda told: told["recorded"]["steps"][0].pop("length_s"),
        lambda told: told.update(step="many"),
    ],
)
def test_what_is_no_job_s_is_refused(tmp_path, change):
    rt = runtime()
    rt.publish(tmp_path)
    train(rt)
    path = tmp_path / "rank-0.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    with pytest.raises(autopipe.StoreError, match="rank"):
        watched(tmp_path)


def test_a_job_is_silent_by_the_longest_of_its_steps(tmp_path):
    rt = runtime()
    rt.publish(tmp_path, every_s=1e-9)
    train(rt, 2)
    rt.step(torch.randn(1, 8), target=torch.randn(1, 8))  # the last batch of an epoch
    path = tmp_path / "rank-0.json"
    told = json.loads(path.read_text())
    told["recorded"]["steps"][0]["length_s"] = 60.0
    told["at_s"] -= 100.0
    path.write_text(json.dumps(told))
    seen = watched(tmp_path)
    assert seen.report.measured_step_s < 60
    assert not seen.is_silent
    told["at_s"] -= 300.0
    path.write_text(json.dumps(told))
    assert watched(tmp_path).is_silent


@pytest.mark.parametrize("change", [{"rank": 1}, {"n_ranks": 9}, {"plan": "another"}])
def test_ranks_that_are_missing_are_waited_for(tmp_path, change):
    rt = runtime()
    rt.publish(tmp_path)
    train(rt)
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert watched(tmp_path) is None


def test_no_folder(tmp_path):
    with pytest.raises(autopipe.StoreError, match=r"rt\.publish"):
        watched(tmp_path / "nothing")


def test_a_notebook_s_cell_is_redrawn(tmp_path, monkeypatch):
    ipython = pytest.importorskip("IPython", reason="needs the notebooks extra")
    with pytest.raises(autopipe.InputError, match="autopipe watch"):
        autopipe.watch(tmp_path)
    drawn = []
    handle = types.SimpleNamespace(update=lambda html: drawn.append(html.data))
    monkeypatch.setattr(ipython, "get_ipython", lambda: "a shell")
    monkeypatch.setattr(ipython.display, "display", lambda *shown, display_id: handle)
    rt = runtime()
    rt.publish(tmp_path)
    assert autopipe.watch(tmp_path, n=1) is None
    train(rt)
    seen = autopipe.watch(tmp_path, n=2, every_s=0.01)
    assert seen.step == 1
    assert ["<table" in html for html in drawn] == [False, True, True]
