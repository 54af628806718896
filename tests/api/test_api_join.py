"""A launcher's environment that is not whole is told with the line to write, before anything is done."""

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
