"""Code kept whole that mixes rows is found, at whatever number of rows and on whatever data it does."""

import copy

import pytest
import torch
from rows_models import captured_mixing, decided
from splitting import split_by_layers
from torch import nn

import autopipe
from autopipe.errors import InputError
from autopipe.tracing.rows import mixing
from autopipe.tracing.sizes.rerun import replay


class GoingByANumber(nn.Module):
    """Has a statement that stays whole, and goes by a number that is no part of the batch."""

    def __init__(self, does):
        super().__init__()
        self.a, self.b, self.does = nn.Linear(4, 4), nn.Linear(4, 4), does

    def forward(self, x, number):
        x = self.a(x)
        for _ in range(int(number)):
            x = self.does(x)
        return self.b(x.relu())


@pytest.mark.parametrize(("number", "other"), [(0, 2), (0.4, 1.5)])
@pytest.mark.parametrize("mixes", [True, False])
def test_rows_that_code_kept_whole_mixes_at_other_numbers_are_refused(number, other, mixes):
    does = (lambda x: x - x.mean(0)) if mixes else (lambda x: x * 0.5)
    torch.manual_seed(0)
    model, x = GoingByANumber(does).double(), torch.randn(4, 4).double()
    pipe = split_by_layers(model, 2, (x, torch.tensor(number)), n_microbatches=2)
    runtime = pipe.runtime(loss_fn=lambda y, _: y.square().mean())
    if mixes:
        with pytest.raises(InputError, match=r"test_runtime_rows_kept_whole.py:\d+"):
            runtime.step(x, torch.tensor(other))
    loss = runtime.step(x, torch.tensor(other), n_microbatches=1 if mixes else 2).loss
    wanted = model(x, torch.tensor(other)).square().mean().detach()
    torch.testing.assert_close(loss.detach().as_subclass(torch.Tensor), wanted)


def less_its_mean_often(x):
    for _ in range(int(x.abs().max() / 2)):
        x = x - x.mean(0)
    return x


def half_where_all_are_large(x):
    return x / 2 if x.abs().mean() > 5 else x


def twice_where_many_are_large(x):
    return x * 2 if (x > 20).any() and len(x) > 4 else x


def twice_where_there_are_many(x):
    return x * 2 if len(x) > 4 else x


def twice_from_sixteen_on(x):
    return x * 2 if len(x) >= 16 else x


MOST_AT_ONCE = 40


def less_its_mean_above_a_number_of_the_file(x):
    if x.shape[0] > MOST_AT_ONCE:
        return x - x.mean(0)
    return x


def less_its_mean_above_a_default(x, most=20):
    return x if x.shape[0] <= most else x - x.mean(0)


def less_its_mean_above_a_variable(x):
    most = 20
    return x if x.shape[0] <= most else x - x.mean(0)


def each_up_to_a_number(x):
    n = min(len(x), 20)
    return torch.cat([x[:n], x[n:] * 2])


def capped(n, most=20):
    return min(n, most)


def each_up_to_a_number_of_a_function(x):
    n = capped(len(x))
    return torch.cat([x[:n], x[n:] * 2])


def twice_the_first(x):
    x = x.clone()
    x[:20] *= 2
    return x


def without_all_but_the_last(x):
    return torch.cat([x[:-20].detach() * 0, x[-20:]])


def twice_the_first_in_tokens(x):
    rows = x.flatten(0, 1)
    return torch.cat([rows[..., :120, :] * 2, rows[120:]]).view_as(x)


def pieces_in_turn(x):
    return torch.cat([piece * (i + 1) for i, piece in enumerate(x.split(20))])


def twice_where_there_are_many_large(x):
    return x * 2 if len(x) > 4 and (x > 20).any() else x


def less_its_mean_where_a_row_is_nothing(x):
    return x - x.mean(0) if (x == 0).flatten(1).all(-1).any() else x


def less_its_mean_where_one_is_in_a_band(x):
    return x - x.mean(0) if bool(((x > 3.5) & (x < 3.75)).any().item()) else x


def each_kind_where_there_is_any(x):
    rows, out = x.flatten(0, -2), torch.zeros_like(x.flatten(0, -2))
    for kind in range(4):
        is_kind = rows.argmax(-1) == kind
        if is_kind.any():
            out[is_kind] = rows[is_kind] * (kind + 1)
    return out.view_as(x)


def each_kind_there_is(x):
    kinds, out = x.flatten(1).argmax(-1), torch.zeros_like(x)
    for kind in kinds.unique().tolist():
        is_kind = kinds == kind
        if is_kind.any():
            out[is_kind] = x[is_kind] * (kind + 1)
    return out


def halved_until_small(x):
    with torch.no_grad():
        factor = torch.ones_like(x[..., :1])
        while ((x * factor).abs() > 1).any():
            factor = torch.where((x * factor).abs().amax(-1, keepdim=True) > 1, factor / 2, factor)
    return x * factor


def halved_as_slopes_are(x, shape=torch.tanh):
    """Slopes, of which those of any rows come below the limit at once, or nearly so."""
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(shape(given).sum(), given)
    while slopes.abs().max() > 0.1:
        slopes = slopes / 2
    return x * slopes


def halved_as_straight_slopes_are(x):
    return halved_as_slopes_are(x, nn.functional.hardtanh)


def halved_by_the_norm(x):
    x = x.sigmoid()
    while x.square().mean().sqrt() > 0.1:
        x = x / 2
    return x


def first_of_a_kind(x):
    rows, out = x.flatten(0, -2), torch.zeros_like(x.flatten(0, -2))
    for kind in range(4):
        chosen = (rows.argmax(-1) == kind).nonzero()[:, 0][: len(rows) // 2]
        out[chosen] = rows[chosen] * (kind + 1)
    return out.view_as(x)


def clipped_where_any_are_large(x):
    return x.clamp(-3, 3) if x.abs().max() > 3 else x


def decayed_in_steps(x):
    time, step = 0.0, 0.5
    while time < 1:
        step = min(step, 1 - time)
        off = float((step * step * x).detach().abs().max() / (1 + x.detach().abs().max()))
        if off < 0.1:
            x, time = x * (1 - step + step * step / 2), time + step
        step *= 0.5 if off >= 0.1 else 1.2
    return x


@pytest.mark.parametrize(
    "does",
    [
        less_its_mean_often,
        half_where_all_are_large,
        twice_where_many_are_large,
        twice_where_there_are_many,
        twice_from_sixteen_on,
        less_its_mean_above_a_number_of_the_file,
        less_its_mean_above_a_default,
        less_its_mean_above_a_variable,
        each_up_to_a_number,
        each_up_to_a_number_of_a_function,
        twice_the_first,
        without_all_but_the_last,
        twice_the_first_in_tokens,
        pieces_in_turn,
        twice_where_there_are_many_large,
        less_its_mean_where_a_row_is_nothing,
        less_its_mean_where_one_is_in_a_band,
        first_of_a_kind,
        halved_as_slopes_are,
        halved_as_straight_slopes_are,
        halved_by_the_norm,
    ],
)
def test_rows_that_a_layer_kept_whole_mixes_on_other_data_are_refused(does):
    model, x, runtime = decided(does, 4)
    with pytest.raises(InputError, match="rows of a batch of Sequential depend on one another"):
        runtime.step(x.repeat(2, 1, 1))
    wanted = model(x * 9).square().mean().detach()
    torch.testing.assert_close(runtime.step(x * 9, n_microbatches=1).loss.as_subclass(torch.Tensor), wanted)


def less_its_mean_from_many_on(x):
    return x.detach().numpy().size and (x - x.mean(0) if len(x) > 20 else x * 1)


class Calling(nn.Module):
    """Calls a function that stays whole without a layer of its own around it."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(less_its_mean_from_many_on(self.a(x)))


def test_a_function_kept_whole_is_asked_at_more_rows_than_it_compares_with():
    assert "how many there are" in captured_mixing(Calling().double(), torch.randn(4, 4).double()).always


class Told(nn.Module):
    """Goes by the mode, and by how many rows it is told there are."""

    def forward(self, x, n):
        is_far = bool((x > 100).any())
        if self.training and n > 40:
            x = x - x.mean(0)
        return x * 2 if is_far else x


class Telling(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.inner, self.b = nn.Linear(4, 4), Told(), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(self.inner(self.a(x), x.shape[0] * 2))


def test_a_layer_that_goes_by_the_mode_is_asked_by_the_size_that_it_is_told():
    assert "inner at" in captured_mixing(Telling(), torch.randn(8, 4)).training


class FirstOfAll(nn.Module):
    """A loss, in a layer that stays whole, of no more than so many rows."""

    def forward(self, x):
        assert len(x.tolist()) == len(x)
        return x[:20].square().mean()


def test_a_loss_kept_whole_of_the_first_rows_alone_runs_on_the_whole_batch():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), FirstOfAll()).double()
    x = torch.randn(40, 4, dtype=torch.float64)
    runtime = split_by_layers(model, 2, (x[:6],), n_microbatches=2).runtime()
    assert runtime.step(x).loss.item() == pytest.approx(model(x).item(), rel=1e-12)


@pytest.mark.parametrize(
    ("does", "allowed"),
    [
        (clipped_where_any_are_large, 1e-12),
        (each_kind_where_there_is_any, 1e-12),
        (each_kind_there_is, 1e-12),
        (halved_until_small, 1e-12),
        (decayed_in_steps, 0.05),
    ],
)
def test_a_layer_may_go_by_data_and_leave_rows_alone(does, allowed):
    model, x, runtime = decided(does, 4)
    for factor in (1, 20, -20):
        loss, wanted = runtime.step(x * factor).loss, model(x * factor).square().mean().detach()
        torch.testing.assert_close(loss.as_subclass(torch.Tensor), wanted, rtol=allowed, atol=0)


class Limited(nn.Module):
    """Has a layer that stays whole and gives twice of more than so many."""

    def __init__(self, goes_by):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.limited = Limit(goes_by)

    def forward(self, x):
        return self.last(self.limited(self.first(x)))


class Limit(nn.Module):
    def __init__(self, goes_by):
        super().__init__()
        self.goes_by, self.most = goes_by, 20

    def forward(self, x):
        return x * 2 if self.goes_by(x) > self.most else x


@pytest.mark.parametrize("is_of_rows", [False, True])
def test_a_limit_in_a_layer_is_asked_of_the_layer_alone(monkeypatch, is_of_rows):
    seen = []

    def replayed(model, form, given, *told, **how):
        seen.append(len(given["x"]))
        return replay(model, form, given, *told, **how)

    monkeypatch.setattr(mixing, "replay", replayed)
    model = Limited((lambda x: x.shape[0]) if is_of_rows else (lambda x: x.shape[-1])).double()
    found = captured_mixing(model, torch.randn(4, 4).double())
    assert ("how many there are" in found.always) is is_of_rows
    assert max(seen) <= 8


class Anew(nn.Module):
    """Attention by distance whose weights each call makes of their numbers, as AFT's local one does."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.bias = nn.Linear(4, 4), nn.Parameter(torch.randn(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        near = [[self.bias[i][j].item() if abs(i - j) < 2 else 0.0 for j in range(3)] for i in range(3)]
        self.bias = nn.Parameter(torch.tensor(near, dtype=x.dtype))
        return self.bias.exp() @ self.value(x)


def test_weights_that_each_call_makes_anew_have_the_gradient_of_one_microbatch_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Anew(), nn.Linear(4, 2)).double()
    x = torch.randn(6, 3, 4).double()
    twin = copy.deepcopy(model)
    model(x), twin(x)
    pipe = split_by_layers(model, 2, (x,), n_microbatches=3)
    runtime = pipe.runtime(loss_fn=lambda output, _: output.square().mean())
    with pytest.raises(autopipe.InputError, match=r"makes 1\.bias anew.*n_microbatches=1"):
        runtime.step(x)
    runtime.step(x, n_microbatches=1)
    twin(x).square().mean().backward()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
