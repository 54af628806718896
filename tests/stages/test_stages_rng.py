"""Streams per seed, microbatch, module and count: fixed by the scope, untouched outside it."""

import torch
import torch.nn.functional as F
from torch import nn

from autopipe.stages import rng


def draw(owner: str, start: int = 0) -> float:
    rng.reseed(owner, start)
    return float(torch.rand(()))


def test_outside_a_scope_the_global_generator_runs_on():
    torch.manual_seed(3)
    expected = [float(torch.rand(())) for _ in range(2)]
    torch.manual_seed(3)
    assert [draw("a"), draw("a")] == expected


def test_inside_a_scope_only_seed_microbatch_and_place_decide():
    with rng.Scope(7, 0):
        first, other = draw("a"), draw("b")
        torch.rand(100)
        assert draw("a") == first
        with rng.Scope(7, 1):
            assert draw("a") != first
        assert draw("b") == other
    with rng.Scope(8, 0):
        assert draw("a") != first
    with rng.Scope(7, 0):
        assert draw("a") == first


def test_a_draw_is_its_modules_whether_the_module_is_called_whole_or_not():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Dropout(0.5)

        def forward(self, x):
            return F.dropout(self.inner(F.dropout(x, 0.2)), 0.2)

    module, x = Twice(), torch.ones(64)
    paths = {id(module): "m", id(module.inner): "m.inner"}
    with rng.Scope(7, 0, paths):
        rng.reseed("m")
        whole = module(x)
    with rng.Scope(7, 0, paths):
        rng.reseed("m", 1, {"m": 1})
        last = F.dropout(torch.ones(64), 0.2)
        rng.reseed("m.inner")
        middle = module.inner(torch.ones(64))
        rng.reseed("m")
        assert torch.equal(F.dropout(x, 0.2) * middle * last, whole)


def test_a_generator_put_back_draws_the_same_again():
    with rng.Scope(7, 0):
        rng.reseed("a")
        torch.rand(3)
        state = torch.get_rng_state()
        first = [torch.rand(3), torch.rand(3)]
    with rng.Scope(7, 1):
        rng.reseed("a")
        torch.rand(3)
        other = torch.rand(3)
    assert not torch.equal(first[0], other)
    assert not torch.equal(first[0], first[1])
    scope = rng.Scope(7, 0)
    with scope:
        rng.reseed("a")
        torch.rand(3)
        torch.rand(3)
    with scope:
        torch.set_rng_state(state)
        assert all(torch.equal(torch.rand(3), was) for was in first)


def test_a_model_that_seeds_itself_keeps_its_numbers():
    torch.manual_seed(5)
    expected = torch.rand(3)
    with rng.Scope(7, 0):
        rng.reseed("a")
        torch.manual_seed(5)
        assert torch.equal(torch.rand(3), expected)


def test_scope_closes_on_error():
    try:
        with rng.Scope(1, 1):
            raise KeyError
    except KeyError:
        torch.manual_seed(0)
    expected = float(torch.rand(()))
    torch.manual_seed(0)
    assert draw("a") == expected
