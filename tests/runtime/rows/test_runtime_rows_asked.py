"""A batch is refused where its rows come out otherwise under its own form than under its microbatches'."""

import pytest
import torch
from splitting import split_by_layers
from torch import nn

import autopipe
from autopipe.errors import InputError
from autopipe.tracing.rows import other_answers
from autopipe.tracing.sizes.rerun import replay


class Ways(nn.Module):
    """Goes one of several ways by what it asks of all its rows."""

    def __init__(self, does):
        super().__init__()
        self.a, self.b, self.does = nn.Linear(4, 4), nn.Linear(4, 4), does

    def forward(self, x):
        return self.b(self.does(x, self.a(x)).sin()).square().mean()


def three(x, h):
    if x.mean() > 1:
        return h * 2
    if x.mean() < -1:
        return h * 3
    return h


def four(x, h):
    level = x.mean()
    if level > 3:
        return h * 4
    if level > 1:
        return h * 2
    return h * 3 if level < -1 else h


def nested(x, h):
    if x.mean() > 1:
        return h * 2 if x.max() > 5 else h * 3
    return h * 5 if x.min() < -5 else h


def counted(x, h):
    for _ in range(int(x.mean().abs())):
        h = h * 1.5
    return h


def two_of_three_alike(x, h):
    if x.mean() > 1:
        return h * 2
    return h + h if x.mean() < -1 else h


def by_a_longest(x, h):
    if x.amax() > 5:
        return h * 2
    return h / 2 if x.amax() > 2 else h


ASKING = [three, four, nested, counted, two_of_three_alike, by_a_longest]
LEVELS = [
    (0, 0),
    (2, 2),
    (2, -2),
    (-2, -2),
    (4, 4),
    (4, 0),
    (0, 4),
    (4, 2),
    (6, -8),
    (3, -7),
    (8, -8),
    (7, 7),
]


def _way(does, x):
    """What a way multiplies rows by."""
    return does(x, torch.ones(())).item()


@pytest.mark.parametrize("does", ASKING)
def test_batches_are_refused_where_they_go_another_way_than_their_microbatches_and_only_there(does):
    torch.manual_seed(0)
    model = Ways(does).double()
    example = torch.randn(4, 4).double() / 10
    pipe = split_by_layers(model, 2, (example,), n_microbatches=2)
    runtime = pipe.runtime()
    was_refused = set()
    for levels in LEVELS:
        x = torch.cat([level + torch.randn(3, 4).double() / 10 for level in levels])
        is_other = any(_way(does, x) != _way(does, rows) for rows in x.chunk(2))
        was_refused.add(is_other)
        if is_other:
            with pytest.raises(
                InputError, match=r"test_runtime_rows_asked.py:\d+ asks .* of all rows at once"
            ):
                runtime.step(x)
        whole = model(x)
        (wanted,) = torch.autograd.grad(whole, model.a.weight)
        model.zero_grad()
        found = runtime.step(x, n_microbatches=1 if is_other else 2).loss
        torch.testing.assert_close(found.detach().as_subclass(torch.Tensor), whole.detach())
        torch.testing.assert_close(model.a.weight.grad, wanted)
    assert was_refused == {True, False}


def test_a_form_runs_once_on_rows_of_its_own_beside_all_others(monkeypatch):
    runs = []

    def noted(model, form, batch, *told, **how):
        runs.append((form, batch))
        return replay(model, form, batch, *told, **how)

    monkeypatch.setattr(other_answers, "replay", noted)
    found = autopipe.capture(Ways(three), (torch.randn(4, 4) / 10,))
    assert len(found.forms[True]) == 3
    last = [*dict.fromkeys(id(form) for form, _ in runs)][-1]
    batches = [id(batch) for form, batch in runs if id(form) == last]
    assert len(runs) > 3
    assert len(batches) == len({*batches})


class FewAtOnce(Ways):
    """Takes few rows at once, so that nobody knows what it would make of more."""

    def forward(self, x):
        if len(x) > 4:
            raise ValueError("too many rows")
        return super().forward(x)


@pytest.mark.parametrize("levels", [(2, 0, 0), (0, 2, 0), (0, 0, 2), (-2, 2, 2), (2, 2, -2)])
def test_microbatches_that_answer_otherwise_are_refused_in_any_order_where_their_batch_is_not_known(levels):
    torch.manual_seed(0)
    model = FewAtOnce(three).double()
    pipe = split_by_layers(model, 2, (torch.randn(3, 4).double() / 10,), n_microbatches=3)
    runtime = pipe.runtime()
    alike = torch.cat([levels[0] + torch.randn(2, 4).double() / 10 for _ in levels])
    found = runtime.step(alike).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(found, torch.stack([model(rows).detach() for rows in alike.chunk(3)]).mean())
    with pytest.raises(InputError, match="of all rows at once"):
        runtime.step(torch.cat([level + torch.randn(2, 4).double() / 10 for level in levels]))
