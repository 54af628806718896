"""Whatever users put around a step, into it or between two: right as in a plain loop, or refused at once."""

import pathlib

import around_ranks
import pytest
import torch
from processes import run_ranks

from autopipe import accelerator
from autopipe.errors import InputError

SCRIPT = pathlib.Path(around_ranks.__file__)


@pytest.mark.parametrize("check", around_ranks.CHECKS)
def test_in_one_process(check):
    around_ranks.CHECKS[check]()


@pytest.mark.timeout(150)
def test_on_two_ranks():
    run_ranks(SCRIPT, 2, *around_ranks.CHECKS, timeout_s=130)


def test_a_local_rank_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setattr(accelerator, "current", lambda: torch.device("cuda", 0))
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(InputError, match="LOCAL_RANK is 'first'"):
        accelerator.of_rank(carried=False)
