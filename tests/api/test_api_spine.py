"""One real model all the way: captured, costed, cut, built, and trained on 1, 2 and 4 ranks."""

import copy
import pathlib
import re

import pytest
import torch
from processes import run_ranks
from train_gpt2 import VOCABULARY, make_model, make_optimizer

import autopipe

SCRIPT = pathlib.Path(__file__).with_name("train_gpt2.py")


@pytest.mark.parametrize(
    ("n_ranks", "schedule", "dtype", "optimizer", "tolerance"),
    [
        (2, "gpipe", "float32", "adamw", 1e-5),
        (4, "1f1b", "float64", "sgd", 1e-10),
        pytest.param(2, "1f1b", "float64", "adamw", 1e-10, marks=pytest.mark.slow),
        pytest.param(4, "gpipe", "float32", "sgd", 1e-5, marks=pytest.mark.slow),
    ],
)
def test_ten_steps_equal_a_plain_loop(n_ranks, schedule, dtype, optimizer, tolerance):
    costs = "measured" if (n_ranks, schedule) == (4, "1f1b") else "estimated"  # exact whatever the cut
    outputs = run_ranks(SCRIPT, n_ranks, schedule, dtype, optimizer, costs)
    found = [re.search(r"ties (\d+) worst (\S+)", output) for output in outputs]
    assert all(found)
    assert all(int(m[1]) == 1 for m in found)
    assert max(float(m[2]) for m in found) <= tolerance


def test_ten_steps_in_one_process():
    model = make_model(torch.float64)
    plain = copy.deepcopy(model)
    ids = torch.randint(0, VOCABULARY, (8, 16))
    example = {"input_ids": ids, "labels": ids}
    pipe = autopipe.split(model, 3, kwargs=example, n_microbatches=4, costs="estimated")
    runtime = pipe.runtime()
    ours, theirs = make_optimizer("sgd", runtime.parameters()), make_optimizer("sgd", plain.parameters())
    for _ in range(10):
        ids = torch.randint(0, VOCABULARY, (6, 12))
        out = runtime.step(input_ids=ids, labels=ids)
        loss = plain(input_ids=ids, labels=ids).loss
        loss.backward()
        assert torch.allclose(out.loss, loss.detach(), atol=1e-12)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    worst = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert worst <= 1e-10
