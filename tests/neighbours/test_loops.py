"""A split GPT-2 in the loops of other libraries reaches what the plain model does there."""

import pathlib

import pytest
from processes import run_ranks

pytest.importorskip("transformers", reason="needs the transformers extra")

SCRIPT = pathlib.Path(__file__).parent / "loop_ranks.py"


@pytest.fixture
def hold(tmp_path):
    """Train plainly in one process, then on ranks, which compare."""

    def held(check, *args):
        for n_ranks in (0, 2):
            run_ranks(SCRIPT, n_ranks, check, tmp_path, *args)

    return held


def test_a_loop_that_calls_backward(hold):
    hold("plainly")


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(hold, precision):
    pytest.importorskip("accelerate", reason="needs the accelerate extra")
    hold("accelerated", precision)


def test_fabric(hold):
    pytest.importorskip("lightning", reason="needs the lightning extra")
    hold("fabric")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(hold, precision):
    pytest.importorskip("lightning", reason="needs the lightning extra")
    hold("lightning_trainer", precision)
