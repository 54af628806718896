"""Seeds per op and microbatch: fixed by the scope, untouched outside it."""

import torch

from autopipe.stages import rng


def draw(op: str) -> float:
    rng.reseed(op)
    return float(torch.rand(()))


def test_outside_a_scope_the_global_generator_runs_on():
    torch.manual_seed(3)
    expected = [float(torch.rand(())) for _ in range(2)]
    torch.manual_seed(3)
    assert [draw("a"), draw("a")] == expected


def test_inside_a_scope_only_seed_microbatch_and_op_decide():
    with rng.scope(7, 0):
        first, other = draw("a"), draw("b")
        torch.rand(100)
        assert draw("a") == first
        with rng.scope(7, 1):
            assert draw("a") != first
        assert draw("b") == other
    with rng.scope(8, 0):
        assert draw("a") != first
    with rng.scope(7, 0):
        assert draw("a") == first


def test_scope_closes_on_error():
    try:
        with rng.scope(1, 1):
            raise KeyError
    except KeyError:
        torch.manual_seed(0)
    expected = float(torch.rand(()))
    torch.manual_seed(0)
    assert draw("a") == expected
