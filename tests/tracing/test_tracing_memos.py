"""Cached functions: a recording neither reads a size from them nor leaves one in them."""

import functools
import math
import sys
import types

import pytest
import torch
from torch import nn

from autopipe.tracing import capture
from autopipe.tracing.patches.memos import Memos


@functools.lru_cache
def halves(shape):
    return (*shape[:-1], 2, shape[-1] // 2)


@functools.lru_cache
def ramp(n):
    return torch.arange(n)[:, None] / n


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x):
        x = x + x.reshape(halves(tuple(x.shape))).mean(-2).repeat(1, 1, 2) + ramp(x.shape[1])
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_cached_recipe_of_sizes_leaves_them_free(is_warm):
    halves.cache_clear()
    ramp.cache_clear()
    for _ in range(2):  # what one capture leaves behind must not reach the next
        model = Net()
        if is_warm:
            model(torch.randn(2, 6, 4))
        found = capture(model, (torch.randn(2, 6, 4),))
        for shape in ((2, 6, 4), (3, 6, 4), (2, 9, 4)):
            x = torch.randn(shape)
            torch.testing.assert_close(found(x), model(x))
        assert isinstance(halves.cache_info().currsize, int)
        assert all(type(n) is int for n in halves((2, 6, 4)))


class Tables:
    @functools.lru_cache  # noqa: B019
    def ramp(self, n):
        return torch.arange(n)[:, None] / 8

    @staticmethod
    @functools.lru_cache
    def fall(n):
        return torch.arange(n, 0, -1)[:, None] / 8


class Methods(nn.Module):
    """Its own cached method, an object's, a static one, and one kept in an attribute."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.tables, self.sines = Tables(), functools.lru_cache(lambda n: torch.arange(n).sin()[:, None])

    @functools.lru_cache  # noqa: B019
    def cosines(self, n):
        return torch.arange(n).cos()[:, None]

    def forward(self, x):
        n = x.shape[1]
        x = x + self.tables.ramp(n) + Tables.fall(n) + self.sines(n) + self.cosines(n)
        for layer in self.layers:
            x = layer(x)
        return x


def test_cached_methods_leave_sizes_free():
    kinds = {type(vars(Tables)[name]) for name in ("ramp", "fall")}
    model = Methods()
    model(torch.randn(2, 6, 4))
    found = capture(model, (torch.randn(2, 6, 4),))
    for shape in ((2, 6, 4), (3, 6, 4), (2, 9, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(found(x), model(x))
    assert {type(vars(Tables)[name]) for name in ("ramp", "fall")} == kinds
    assert model.sines.cache_info().currsize == model.cosines.cache_info().currsize > 0


@functools.lru_cache
def doubled(n):
    return 2 * n


def test_what_stands_in_the_place_of_a_cached_function_is_of_the_one_that_is_there(monkeypatch):
    here = sys.modules[__name__]
    found = Memos(nn.Linear(1, 1), [])
    at = types.SimpleNamespace(is_recorded=True)
    for held in (doubled, functools.lru_cache(lambda n: 3 * n), functools.lru_cache(lambda n: 4 * n)):
        monkeypatch.setattr(here, "doubled", held)
        for _ in range(2):
            with found.bypassed(at):
                assert doubled is not held
                assert doubled(5) == held(5)
            assert doubled is held
    monkeypatch.setattr(here, "doubled", math.sqrt)
    with found.bypassed(at):
        assert doubled is math.sqrt
    assert doubled is math.sqrt


def test_what_stands_in_files_is_made_once_for_all_recordings():
    here, stands = sys.modules[__name__], []
    for is_recorded in (True, False):
        found, at = Memos(nn.Linear(1, 1), []), types.SimpleNamespace(is_recorded=is_recorded)
        with found.bypassed(at):
            stands.append(here.doubled)
            assert doubled(6) == 12
    assert stands[0] is stands[1] is not doubled
