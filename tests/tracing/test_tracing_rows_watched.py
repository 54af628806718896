"""A form is asked about many rows as about a few, while what its code asks of them is noted."""

from __future__ import annotations

import collections
import cProfile
import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe.torch_private import function_modes
from autopipe.tracing import capture
from autopipe.tracing.rows import (
    affordable,
    among_many,
    code_run,
    data_dependent,
    mixing,
    per_call_state,
    row_questions,
    tail,
)


class Leaf(nn.Module):
    """A layer with a plain attribute, so that it is one of a user's."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


class Net(nn.Module):
    """Three layers with these functions in turn."""

    def __init__(self, *functions: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(map(Leaf, itertools.islice(itertools.cycle(functions), 3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def counted(
    function: Any, monkeypatch: pytest.MonkeyPatch, *others: Any
) -> tuple[Any, collections.Counter[int]]:
    """A capture, and how often rows were asked about in batches of each size."""
    seen: collections.Counter[int] = collections.Counter()
    replay = mixing.replay

    def noting(model: Any, form: Any, given: Any, *told: Any, **how: Any) -> Any:
        seen[len(given["x"])] += 1
        return replay(model, form, given, *told, **how)

    monkeypatch.setattr(mixing, "replay", noting)
    torch.manual_seed(0)
    closed = [f"layers.{i}" for i in range(3)]
    return capture(Net(function, *others), (torch.randn(2, 4),), closed=closed).variation.mixing, seen


def limited(x: Tensor) -> Tensor:
    """What is larger than two rows are, and smaller than eight, is made smaller."""
    return x / x.norm().div(3.0).clamp(min=1)


def of_many(x: Tensor) -> Tensor:
    return x - x.mean(0) if len(x) >= 8 else x


def test_rows_are_asked_about_in_many_as_in_few(monkeypatch: pytest.MonkeyPatch) -> None:
    found, seen = counted(torch.tanh, monkeypatch)
    assert seen[8] == 3  # a and b, and each beside itself
    assert not found.always


@pytest.mark.parametrize("function", [limited, of_many])
def test_what_many_rows_alone_do_to_one_another_is_found(
    function: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seen = counted(function, monkeypatch)
    assert seen[8]
    assert found.always


def centred(x: Tensor) -> Tensor:
    return x - x.detach().amax(1, keepdim=True)


def long(x: Tensor) -> Tensor:
    return x.tanh() if len(x) <= 100 else x.tanh() * 1


def long_alone(x: Tensor) -> Tensor:
    return x if len(x) <= 100 else x.detach()


def test_gradients_of_many_rows_are_asked_where_code_that_names_so_many_holds_some_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, seen = counted(long, monkeypatch, centred)
    assert not found.always
    assert seen[8]
    assert max(seen) == 8
    found, seen = counted(long_alone, monkeypatch, centred)
    assert "others where they are 101" in found.always
    assert max(seen) == 8


def test_more_rows_than_take_little_memory_are_not_run_and_this_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[int] = []
    run_call = among_many.run_call

    def noting(model: Any, constants: Any, call: Any, args: Any, *told: Any) -> Any:
        given.append(len(args[0]))
        return run_call(model, constants, call, args, *told)

    monkeypatch.setattr(among_many, "run_call", noting)
    found, seen = counted(long_alone, monkeypatch, centred)
    assert max(given) >= 101
    assert found.always
    assert not found.unasked
    given.clear()
    monkeypatch.setattr(among_many, "_MOST_BYTES_NAMED", 1 << 9)
    monkeypatch.setattr(among_many, "_MOST_BYTES", 1 << 9)
    found, seen = counted(long_alone, monkeypatch, centred)
    assert max(given) <= 32
    assert found.always  # a form is run on so many instead
    assert seen[102]
    monkeypatch.setattr(affordable, "_LITTLE_BYTES", 1 << 12)
    found, seen = counted(long_alone, monkeypatch, centred)
    assert max(seen) == 8
    assert found.unasked == (100,)
    assert not found.said_untold
    monkeypatch.setattr(affordable, "_LITTLE_BYTES", 1 << 9)
    found, seen = counted(long_alone, monkeypatch, centred)
    assert max(seen) == 3  # of one more than the example is asked whether places matter
    assert found.unasked == (3, 5, 7)


def test_code_that_runs_is_looked_at_within_another_look() -> None:
    ran = code_run.CodeRun()
    with ran:
        with ran:
            limited(torch.ones(2))
        of_many(torch.ones(2))
    assert sys.getprofile() is None
    assert ran.may_run(limited)
    assert ran.may_run(of_many)
    assert not ran.may_run(centred)


def test_code_that_runs_is_looked_at_where_no_other_profiler_does() -> None:
    ran = code_run.CodeRun()
    with ran:
        assert sys.getprofile() is not None
        limited(torch.ones(2))
    assert sys.getprofile() is None
    assert ran.may_run(limited)
    assert not ran.may_run(of_many)
    profile = cProfile.Profile()
    with profile, code_run.CodeRun() as other:
        limited(torch.ones(2))
    assert other.may_run(of_many)
    assert any(entry.code is limited.__code__ for entry in profile.getstats())


class Doubled(Tensor):
    """Does with functions what code of its own says."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        limited(torch.ones(2))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: torch.nn.functional.triplet_margin_with_distance_loss(
            *x.expand(3, 1, 2), distance_function=lambda a, b: limited(a - b).sum()
        ),
        lambda x: x.apply_(lambda each: float(limited(torch.tensor([each])))),
        lambda x: torch.relu(x.as_subclass(Doubled)),
        lambda x: torch.func.vmap(limited)(x[None]),
    ],
)
def test_code_that_functions_of_torch_call_is_seen_to_run(ask: Any) -> None:
    ran = code_run.CodeRun()
    with data_dependent._Noted(), ran:
        ask(torch.ones(2))
    assert ran.may_run(limited)
    assert not ran.may_run(of_many)


class Writing(Leaf):
    """Names what writes in place, and leaves nothing behind but where ``left`` does."""

    def forward(self, x: Tensor) -> Tensor:
        self.function(self.linear.weight)
        return self.linear(x).clamp_(min=0)


def moved(weight: Tensor) -> None:
    weight.data.mul_(1.5)


@pytest.mark.parametrize("leaves", [moved, lambda weight: None])
def test_what_calls_leave_is_told_at_once_where_they_leave_nothing(
    leaves: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    held = per_call_state._held

    def noting(*told: Any) -> Any:
        asked.append(told)
        return held(*told)

    monkeypatch.setattr(per_call_state, "_held", noting)
    model = nn.Sequential(Writing(leaves), nn.Linear(4, 2))
    mixed = capture(model, (torch.randn(2, 4),), closed=["0"]).variation.mixing
    assert bool(asked) is (leaves is moved)
    assert bool(mixed.by_call or mixed.carried) is (leaves is moved)


class Counted(nn.Linear):
    """Notes its calls in training where no gradients are asked for."""

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(self.training and not torch.is_grad_enabled())
        return super().forward(x)


CALLS: list[bool] = []


def flagged(weight: Tensor) -> None:
    weight.requires_grad_(True)


@pytest.mark.parametrize("is_last", [False, True])
def test_what_calls_leave_is_told_once_the_last_that_may_write_has_run(
    is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, n_calls = per_call_state.CallsInTurn._leaves_all, []

    def noting(calls: Any) -> bool:
        CALLS.clear()
        leaves_all = told(calls)
        n_calls.append(sum(CALLS))
        return leaves_all

    monkeypatch.setattr(per_call_state.CallsInTurn, "_leaves_all", noting)
    layers = [Writing(lambda weight: None), Counted(4, 4)]
    model = nn.Sequential(*(reversed(layers) if is_last else layers))
    mixed = capture(model, (torch.randn(2, 4),), closed=["0", "1"]).variation.mixing
    assert n_calls == [2 * is_last]
    assert not mixed.by_call
    assert not mixed.carried


def test_what_asks_for_gradients_alone_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flagging(Leaf):
        def forward(self, x: Tensor) -> Tensor:
            flagged(self.linear.weight)
            return self.linear(x)

    asked: list[Any] = []
    monkeypatch.setattr(per_call_state.CallsInTurn, "_leaves_all", lambda calls: asked.append(calls))
    capture(nn.Sequential(Flagging(torch.tanh), nn.Linear(4, 2)), (torch.randn(2, 4),), closed=["0"])
    assert not asked


class Lengthy(nn.Module):
    """Names a number of rows in code that no call runs, or that runs from another number on."""

    def __init__(self, few: int, far: Any) -> None:
        super().__init__()
        self.few, self.far = few, far

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.much(x) if len(x) > self.few else x.detach().tanh())

    def much(self, x: Tensor) -> Tensor:
        return self.far(x) if len(x) > 100 else x.detach().tanh()


def mixed_far(x: Tensor) -> Tensor:
    return x.detach().tanh() - x.detach().mean(0)


def learnt_far(x: Tensor) -> Tensor:
    return x.tanh() + (x - x.detach())


@pytest.mark.parametrize("far", [mixed_far, learnt_far])
def test_what_code_names_is_asked_where_it_runs_or_would_with_more_rows(
    far: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_call, given = among_many.run_call, set()

    def noting(model: Any, constants: Any, call: Any, args: Any, *told: Any) -> Any:
        given.update(len(x) for x in args if isinstance(x, Tensor))
        return run_call(model, constants, call, args, *told)

    monkeypatch.setattr(among_many, "run_call", noting)
    found, _ = counted(Lengthy(few=20, far=far), monkeypatch)
    assert found.always
    assert 101 in given
    given.clear()
    found, seen = counted(Lengthy(few=1 << 20, far=far), monkeypatch)
    assert not found.always
    assert max(seen) == 8
    assert 101 not in given


class Numbered(Leaf):
    """A layer that has its number, and may name a number of rows."""

    def __init__(self, layer_idx: int, limit: int) -> None:
        super().__init__(torch.tanh)
        self.layer_idx, self.limit = layer_idx, limit

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y * (self.layer_idx + 1) if len(x) < self.limit else y - y.mean(0)


@pytest.mark.parametrize(("limits", "n_asked"), [([1 << 20] * 12, 1), ([1 << 20] * 11 + [300], 2)])
def test_alike_layers_that_have_their_numbers_are_given_many_rows_once(
    monkeypatch: pytest.MonkeyPatch, limits: list[int], n_asked: int
) -> None:
    asked: set[str] = set()
    run_call = among_many.run_call

    def noting(model: Any, constants: Any, call: Any, *told: Any) -> Any:
        asked.add(call.target)
        return run_call(model, constants, call, *told)

    monkeypatch.setattr(among_many, "run_call", noting)
    model = nn.Sequential(*(Numbered(i, limit) for i, limit in enumerate(limits)))
    found = capture(model, (torch.randn(2, 4),), closed=[str(i) for i in range(12)]).variation.mixing
    assert len(asked) == n_asked
    assert not found.always
    assert bool(found.beyond) is (n_asked == 2)


class Chained(nn.Module):
    """Goes another way from 300 rows on, which mixes them from 3,000 on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.much(x) if len(x) > 300 else self.linear(x)

    def much(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x - x.mean(0) if len(x) > 3000 else x


class Unchained(Chained):
    """Never does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * len(x) / len(x)


def test_a_layer_is_given_as_many_rows_as_its_code_names_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    run_call, given = among_many.run_call, set()

    def noting(model: Any, constants: Any, call: Any, args: Any, *told: Any) -> Any:
        given.update(len(x) for x in args if isinstance(x, Tensor))
        return run_call(model, constants, call, args, *told)

    monkeypatch.setattr(among_many, "run_call", noting)
    for kind in (Chained, Unchained):
        given.clear()
        model = nn.Sequential(kind(), nn.Linear(4, 2))
        beyond = capture(model, (torch.randn(2, 4),), closed=["0"]).variation.mixing.beyond
        assert (beyond is not None) is (kind is Chained)
        assert (max(given) > 3000) is (kind is Chained)


class Limited(Leaf):
    """Does as others do, up to so many rows."""

    def __init__(self, limit: int) -> None:
        super().__init__(torch.tanh)
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).tanh()
        return y if len(x) < self.limit else y - y.mean(0)


@pytest.mark.parametrize(("limit", "beyond"), [(300, 296), (1 << 21, None)])
@pytest.mark.parametrize("n_layers", [3, 12])
def test_a_layer_that_is_like_others_is_asked_of_many_rows_beside_what_it_gives_for_few(
    limit: int, beyond: int | None, n_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[int] = set()
    replay = mixing.replay

    def noting(model: Any, form: Any, given: Any, *told: Any, **how: Any) -> Any:
        seen.add(len(given["input_1"]))
        return replay(model, form, given, *told, **how)

    monkeypatch.setattr(mixing, "replay", noting)
    torch.manual_seed(0)
    model = nn.Sequential(*(Limited(1 << 20) for _ in range(n_layers - 1)), Limited(limit))
    closed = [str(i) for i in range(n_layers)]
    found = capture(model, (torch.randn(2, 4),), closed=closed).variation.mixing
    assert (found.beyond and found.beyond[0]) == beyond
    assert max(seen) == 8


class OfPlaces(Leaf):
    """Does something else from so many places on, of all rows together."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y - y.mean((0, 1)) if len(y.flatten(0, 1)) > 9000 else y


class OfFew(Leaf):
    """Names a number that no rows come to."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * len(x) / max(len(x), 1 << 40, 100)


@pytest.mark.parametrize("kind", [OfPlaces, OfFew])
def test_a_layer_is_given_no_more_rows_than_tell_anything(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run_call, given = among_many.run_call, set()

    def noting(model: Any, constants: Any, call: Any, args: Any, *told: Any) -> Any:
        given.update(len(x) for x in args if isinstance(x, Tensor))
        return run_call(model, constants, call, args, *told)

    monkeypatch.setattr(among_many, "run_call", noting)
    model = nn.Sequential(kind(torch.tanh), nn.Linear(4, 2))
    beyond = capture(model, (torch.randn(2, 16, 4),), closed=["0"]).variation.mixing.beyond
    assert (beyond is not None) is (kind is OfPlaces)
    assert 100 < max(given) < 1000


def test_a_profiler_sees_all_of_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    called: collections.Counter[str] = collections.Counter()
    run_call, given = among_many.run_call, set()

    def asking(model: Any, constants: Any, call: Any, args: Any, *told: Any) -> Any:
        given.update(len(x) for x in args if isinstance(x, Tensor))
        return run_call(model, constants, call, args, *told)

    monkeypatch.setattr(among_many, "run_call", asking)

    def profiler(frame: Any, event: str, argument: Any) -> None:
        called[frame.f_code.co_name] += event == "call"

    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        found, seen = counted(Lengthy(few=1 << 20, far=mixed_far), monkeypatch)
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(before)
    assert not found.always
    assert 101 in given  # which code runs is not looked at
    assert called["noting"] == seen.total()


def test_code_that_does_not_run_while_somebody_watches_is_asked_about_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unwatched(x: Tensor) -> Tensor:
        if any(isinstance(mode, data_dependent._Noted) for mode in function_modes()):
            raise RuntimeError("watched")
        return limited(x)

    assert counted(unwatched, monkeypatch)[0].always


class Centring(nn.Module):
    """A layer that stays whole, and takes the mean of its rows from them in one mode."""

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.linear, self.mode = nn.Linear(4, 4), mode

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return x - x.mean(0) if self.training is self.mode else x


class Branching(nn.Module):
    """Centres rows where some of them are left out, which the example has none of."""

    def __init__(self, mode: bool) -> None:
        super().__init__()
        self.first, self.centring, self.last = nn.Linear(4, 4), Centring(mode), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.last(self.first(x if mask.all() else self.centring(x)))


@pytest.mark.parametrize("mode", [False, True])
def test_a_form_beside_the_first_that_serves_both_modes_is_asked_in_both(mode: bool) -> None:
    torch.manual_seed(0)
    example = torch.randn(4, 4), torch.ones(4, 4, dtype=torch.bool)
    found = capture(Branching(mode), example, closed=["centring"])
    _, other = found.forms[False]
    assert found.forms[True] is found.forms[False] or found.forms[True][1] is other
    mixing = other.variation.mixing
    assert bool(mixing.always) is not mode
    assert bool(mixing.training) is mode


class Judging(nn.Module):
    """A layer that stays whole, and gives a loss."""

    def __init__(self, judge: Any) -> None:
        super().__init__()
        self.linear, self.judge = nn.Linear(4, 4), judge

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.judge(x.square().mean(), x)


@pytest.mark.parametrize(
    ("judge", "may_bend"),
    [
        (lambda number, x: number, False),
        (lambda number, x: (number + x.abs().mean()) / 2, False),
        (lambda number, x: sum([number, x.mean()]), False),
        (lambda number, x: number.clamp(max=1e9), True),
        (lambda number, x: number if float(number) < 1e9 else 1, True),
        (lambda number, x: number + (number + x - 1e9).relu().mean(), True),
    ],
)
def test_numbers_are_put_elsewhere_only_where_something_may_bend(
    judge: Any, may_bend: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    elsewhere = row_questions.numbers_elsewhere

    def noting(run: Any) -> Any:
        asked.append(elsewhere(run))
        return asked[-1]

    monkeypatch.setattr(row_questions, "numbers_elsewhere", noting)
    torch.manual_seed(0)
    capture(nn.Sequential(nn.Linear(4, 4), Judging(judge)), (torch.randn(2, 4),), closed=["1"])
    assert bool(asked) is may_bend
    assert all(evenly for evenly, *_ in asked)


class Scaled(nn.Module):
    """Goes by a number of its weights."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scales, self.scale = nn.Parameter(torch.rand(2)), scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.scales, x)


@pytest.mark.parametrize(
    ("scale", "is_of_rows"),
    [
        (lambda scales, x: x * scales[0], False),
        (lambda scales, x: x * scales.norm().clamp(max=2), False),
        (lambda scales, x: x * scales[(x > 9).any().long()], True),
        (lambda scales, x: scales[0] * x.mean().clamp(max=1e9), True),
        (lambda scales, x: (scales[0] * x.mean()).clamp(max=1e9), True),
        (lambda scales, x: (scales * x[:, :2]).mean().clamp(max=1e9), True),
    ],
)
def test_numbers_of_weights_alone_are_left_where_they_are(
    scale: Any, is_of_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    elsewhere = row_questions.numbers_elsewhere
    monkeypatch.setattr(row_questions, "numbers_elsewhere", lambda run: asked.append(0) or elsewhere(run))
    torch.manual_seed(0)
    capture(nn.Sequential(nn.Linear(4, 4), Scaled(scale)), (torch.randn(2, 4),), closed=["1"])
    assert bool(asked) is is_of_rows


class Contrast(nn.Module):
    """Each row is told from the others, by the product of their features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        features = self.layers(x)
        return nn.functional.cross_entropy(features @ features.T, torch.arange(len(x)))


def test_what_is_ahead_of_a_tail_is_one_form_where_the_model_is_one_in_both_modes(monkeypatch):
    asked = []
    real = tail.mixing

    def noting(code: Any, forms: Any, *told: Any, **how: Any) -> Any:
        asked.append(forms)
        return real(code, forms, *told, **how)

    monkeypatch.setattr(tail, "mixing", noting)
    found = capture(Contrast(), (torch.randn(4, 4),))
    assert found.variation.tail.ops
    assert found.graphs[False] is found.graphs[True]
    assert asked
    assert all(forms[False] is forms[True] for forms in asked)


class BeyondInTraining(nn.Module):
    """Takes the mean of its rows from so many on, in training alone."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return h - h.mean(0) if self.training and len(h) > self.most else h


@pytest.mark.parametrize("most", [3, 20, 64, 1000])
def test_a_limit_on_rows_in_training_alone_is_found(most: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), BeyondInTraining(most))
    mixing = capture(model, (torch.randn(2, 4),), closed=["1"]).variation.mixing
    assert not mixing.always
    assert bool(mixing.training) is (most < 1000)
