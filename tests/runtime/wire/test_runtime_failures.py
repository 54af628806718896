"""Whatever happens to one rank, all others end soon and say the same."""

import pathlib
import re

import pytest
from processes import finish, start

SCRIPT = pathlib.Path(__file__).parents[1] / "runtime_ranks.py"
LIMIT_S, MARGIN_S = 4, 25
"""The ranks' ``stall_limit_s``, and how long after it all have to know at the latest."""

CASES = {
    # how rank 1 fails: what everyone is told
    "raise": r"rank 1, stage 1, microbatch 1, action 1F1: ValueError: bad weather",
    "oom": r"rank 1, stage 1, microbatch 1, action 1F1: OutOfMemoryError: .*3 GiB.*predicted",
    "kill": r"rank 1 is gone without a word",
    "kill host": r"rank 0 is gone without a word|the process that hosts the store is gone",
    "exit": r"rank 1 was stopped by SystemExit in 1F1",
    "stuck": r"rank 1 is stuck in 1F1 for \d",
    "hook": r"rank 0, a hook on the gradient of \S+\.weight: ValueError: bad weather",
    "shape": r"rank (1 begins step 2 with 6 rows|2 begins step 2 with 8 rows).* with other rows;",
    "data": r"rank \d begins step 2 with 8 rows.* with other values.*feed=0",
    "ties": r"tied parameter \S+ has different values on ranks 0, 2",
    "host left": r"rank 0 left after batch 1; give every rank the same number of batches",
    "own code": r"rank 1 stopped after batch 1 with ValueError: no more data",
    "save": r"was not saved, and .* rank 1: the optimizer has parameters that are not",
    "clip": r"begins step 2 .*; rank 1 is at clip_grad_norm_|rank 1 is at clip_grad_norm_; rank 0 begins",
    "nan": r"the loss is nan: .* parameter \w\.weight, in rank 1, stage 1, microbatch 0, action 1F0",
    "plan": r"ranks disagree on the plan",
    "code": r"ranks disagree on the model",
    "never": r"rank 1 never started",
    "left": r"rank 1 left: its script came to an end",
}


ENDED = {"kill host": 0, "host left": 0} | dict.fromkeys(
    ("kill", "exit", "stuck", "never", "left", "own code"), 1
)
"""Ranks that end in their own way: that of the case."""
HOSTS = ("raise", "kill host", "host left")
"""Cases in which rank 0 hosts the job's store, as without a launcher, and stays until others have read it."""


@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", CASES)
def test_all_ranks_end_with_one_message(how, tmp_path):
    message, is_host = CASES[how], how in HOSTS
    ranks = start(SCRIPT, 3, "failing", how, int(is_host), tmp_path, is_hosted_by_rank_0=is_host)
    asleep = [ranks.pop(1)] if how in ("stuck", "never") else []
    try:
        results = finish(ranks, 60)
    finally:
        for rank in asleep:
            rank.end()
    results[1:1] = [(0, "")] * len(asleep)
    told = set()
    for rank, (code, out) in enumerate(results):
        if how in ENDED and rank == ENDED[how]:
            continue
        assert code == 3, f"rank {rank} ended with {code}:\n{out[-3000:]}"
        found = re.search(r"(\w+) after ([\d.]+) s: (.*)", out, re.S)
        assert found, f"rank {rank}:\n{out[-3000:]}"
        assert found[1] in ("StepError", "PlanError", "StoreError")
        assert float(found[2]) < LIMIT_S + MARGIN_S
        told.add(found[3].strip())
    if how not in ("never", "plan", "code", "kill host"):  # there each rank speaks for itself
        assert len(told) == 1, told
    assert all(re.search(message, text, re.S) for text in told), told
