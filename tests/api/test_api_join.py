"""A launcher's environment that is not whole is told with the line to write, before anything is done."""

import multiprocessing
import subprocess
import sys

import pytest
import torch

import autopipe

WHOLE = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (dict.fromkeys(("RANK", "MASTER_ADDR", "MASTER_PORT")), "RANK, MASTER_ADDR, MASTER_PORT"),
        ({"RANK": None}, "but RANK is not set"),
        ({"MASTER_PORT": None}, "but MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE is 'two'"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"MASTER_PORT": "29500 "}, "MASTER_PORT is '29500 '"),
    ],
)
def test_an_environment_that_is_not_whole(monkeypatch, changed, says):
    for name, value in {**WHOLE, **changed}.items():
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(autopipe.AutopipeError, match="torchrun") as told:
        autopipe.split(model, 2, (torch.ones(4, 4),), costs="estimated")
    assert says in str(told.value)
    with pytest.raises(autopipe.AutopipeError):
        autopipe.plan(model, 2, (torch.ones(4, 4),), costs="estimated")
    assert not torch.distributed.is_initialized()


AGAIN = """
import multiprocessing
def work():
    pass
print(getattr(multiprocessing.current_process(), "_inheriting", False), flush=True)
if __name__ == "__main__":
    worker = multiprocessing.get_context("spawn").Process(target=work)
    worker.start()
    worker.join()
"""


def test_a_worker_that_runs_the_script_again_does_not_take_its_ranks_place(monkeypatch, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(AGAIN)
    said = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.split() == ["False", "True"]  # what a worker knows itself by
    for name, value in WHOLE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with pytest.raises(autopipe.InputError, match="if __name__ == '__main__'"):
        autopipe.split(model, 2, (torch.ones(4, 4),), costs="estimated")
    assert not torch.distributed.is_initialized()
