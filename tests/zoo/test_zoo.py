"""Every hand-written model: captured and cut in 4, it gives the model's outputs and every gradient."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from autopipe.errors import CaptureError, InputError
from autopipe.hardware import Cluster
from autopipe.stages import build
from autopipe.stages.verify import run_stages
from autopipe.tracing import capture
from zoo.cut import uniform_plan
from zoo.observe import difference, fingerprint, observe, seed
from zoo.registry import CASES

pytestmark = pytest.mark.filterwarnings(
    # torch.compile reads .grad of what it is given, in the model alone as well
    "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"
)
EXAMPLE, OTHER_BATCH, OTHER_LENGTH = (2, 32), (3, 32), (2, 24)


@functools.cache
def captured(name: str) -> Any:
    """The capture of a case at the example size and its stages, made once: models stay as they are."""
    seed()
    model = CASES[name].build().eval()
    args, kwargs = CASES[name].inputs(*EXAMPLE)
    before = fingerprint(model)
    found = capture(model, args, kwargs)
    assert fingerprint(model) == before
    return found, build(found, uniform_plan(found.ops, 4, Cluster.uniform(4)))


def sizes_of(name: str) -> list[tuple[int, int]]:
    case = CASES[name]
    return [EXAMPLE] + [OTHER_BATCH] * case.has_batches + [OTHER_LENGTH] * case.has_lengths


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if not case.refused])
def test_stages_equal_the_model_in_both_modes_at_every_size(name: str) -> None:
    found, stages = captured(name)
    assert len(stages) >= min(4, CASES[name].n_stages)
    model = found.model
    for size in sizes_of(name):
        for training in (False, True):
            model.train(training)
            args, kwargs = CASES[name].inputs(*size)
            expected = observe(model, lambda args=args, kwargs=kwargs: model(*args, **kwargs))
            got = observe(model, lambda args=args, kwargs=kwargs: run(found, stages, args, kwargs))
            assert not difference(expected, got), f"{size}, training={training}"


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if not case.refused])
def test_ranks_that_each_capture_the_model_hold_the_same_graph(name: str) -> None:
    found, _ = captured(name)
    seed()
    args, kwargs = CASES[name].inputs(*EXAMPLE)
    # another model of the same class, so that no object is the first one's
    assert capture(CASES[name].build().eval(), args, kwargs).ops.digest == found.ops.digest


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case.refused])
def test_branch_in_the_model_itself_is_refused_with_its_line(name: str) -> None:
    seed()
    model = CASES[name].build()
    args, kwargs = CASES[name].inputs(*EXAMPLE)
    with pytest.raises(CaptureError, match=rf"models_text\.py:\d+.*{CASES[name].refused}"):
        capture(model, args, kwargs)


def test_a_size_that_cannot_vary_is_refused_with_its_input_and_axis() -> None:
    found, _ = captured("Constants")
    with pytest.raises(InputError, match="dim 2 of x is fixed at 16 and is 24 now"):
        found.bind((torch.ones(2, 32, 24),), {})


def run(found: Any, stages: Any, args: Any, kwargs: Any) -> Any:
    return found.assemble(run_stages(found, stages, args, kwargs))
