"""Runtimes of one pipe count the steps of its model together: draws, saves and resumes go by that."""

import copy

import torch
from torch import nn

import autopipe

X, Y = torch.randn(2, 8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def mean_square(output, target):
    return (output - target).square().mean()


def fresh():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)]).double()
    return autopipe.split(model, 2, (X,), costs="estimated", n_microbatches=2)


def losses(*runtimes):
    return [rt.step(X, target=Y).loss.item() for rt in runtimes]


def test_a_further_runtime_goes_on_with_the_draws():
    pipe = fresh()
    other = copy.deepcopy(pipe)
    first = pipe.runtime(mean_square)
    wanted = losses(first, first, first, first)
    assert len({*wanted}) == 4
    one = other.runtime(mean_square)
    assert losses(one, one) == wanted[:2]
    two = other.runtime(mean_square, schedule="gpipe", n_microbatches=2)
    assert losses(two, one) == wanted[2:]
    again = copy.deepcopy(other).runtime(mean_square)
    assert losses(again, again) == wanted[:2], "a copy is independent"


def test_draws_without_gradients_go_on_too():
    pipe = fresh()
    other = copy.deepcopy(pipe)
    first = pipe.runtime(mean_square)
    wanted = [first.evaluate(X, target=Y).loss.item() for _ in range(2)]
    found = [other.runtime(mean_square).evaluate(X, target=Y).loss.item() for _ in range(2)]
    assert found == wanted


def test_saves_of_a_further_runtime_follow_the_first_ones(tmp_path):
    pipe = fresh()
    one = pipe.runtime(mean_square)
    losses(one, one, one)
    one.save(tmp_path, keep_last=2)
    two = pipe.runtime(mean_square)
    losses(two)
    two.save(tmp_path, keep_last=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    wanted = losses(one, two)
    other = fresh()
    a, b = other.runtime(mean_square), other.runtime(mean_square)
    assert a.resume(tmp_path) == 4
    assert losses(b, a) == wanted, "whichever of them has resumed"


def test_what_is_due_goes_by_the_steps_of_each_runtime(monkeypatch, tmp_path):
    """A run that goes on after many steps is looked at as a new one is."""
    pipe = fresh()
    rt = pipe.runtime(mean_square)
    losses(*[rt] * 3)
    rt.save(tmp_path / "c")
    looked = []
    other = fresh().runtime(mean_square)
    other.load(tmp_path / "c")
    monkeypatch.setattr(
        other.engine, "follow_parameters", lambda: looked.append(other.engine.progress.n_steps)
    )
    losses(*[other] * 5)
    assert looked == [3, 4, 5, 7]


def test_batches_that_are_accumulated_are_one_step(tmp_path):
    """And draw each its own; a run that goes on draws as the one before would have."""
    batches = [{"input": X, "target": Y}] * 3
    rt = fresh().runtime(mean_square)
    for _ in range(2):
        rt.accumulate(batches)
    rt.save(tmp_path, keep_last=1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]
    other = fresh().runtime(mean_square)
    assert other.resume(tmp_path) == 2
    found = [other.accumulate(batches).loss.item(), *losses(other)]
    assert found == [rt.accumulate(batches).loss.item(), *losses(rt)]
    assert found[0] != losses(fresh().runtime(mean_square))[0]
