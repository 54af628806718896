"""What a step begins with, timed ahead of any pipeline: the parts of the runtime, or at least binding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopipe
from autopipe.runtime.data.microbatch import Splitter
from autopipe.runtime.data.step_start import beginning
from autopipe.runtime.data.weights import Weigher


def test_a_batch_is_taken_in_as_in_every_step_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    capture = autopipe.capture(model, (torch.randn(6, 4),))
    done = []
    for kind, name in ((Splitter, "split"), (Weigher, "weigh")):
        method = getattr(kind, name)
        monkeypatch.setattr(
            kind, name, lambda *a, method=method, name=name, **k: done.append(name) or method(*a, **k)
        )
    begin = beginning(capture, 3)
    assert done == ["split", "weigh"]
    done.clear()
    sizes, _, _ = begin()[0]
    assert [rows for rows, _ in sizes] == [2, 2, 2]
    assert done == ["weigh"]  # cut as the one before


def test_a_batch_that_cannot_be_cut_is_bound() -> None:
    class Whole(nn.Module):
        def forward(self, x):
            return x.sum()

    capture = autopipe.capture(Whole(), (torch.randn(6, 4),))
    begin = beginning(capture, 0)  # no step has so few
    assert [value.shape for value in begin().values()] == [(6, 4)]


def test_profiles_hold_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from autopipe.api import op_costs

    asked = []
    monkeypatch.setattr(op_costs, "beginning", lambda capture, n: asked.append(n) or (lambda: None))
    model, quick = nn.Linear(4, 4), {"progress": False, "min_s": 0.0, "min_passes": 1}
    table = autopipe.profile(model, (torch.randn(8, 4),), n_microbatches=4, **quick)
    assert asked == [4]
    assert 0.0 <= table.start_s < 1e-3
