"""What a batch answers by data, sizes or places is not what microbatches do; late, it is asked the batch."""

import copy
import re

import pytest
import torch
from rows_models import Asking, Deciding
from splitting import split_by_layers
from torch import nn
from torch.nn import functional as F

from autopipe.errors import InputError
from autopipe.tracing import capture
from autopipe.tracing.rows import mixing as rows
from autopipe.tracing.rows import other_answers
from autopipe.tracing.rows.noise import EvenNoise
from autopipe.tracing.sizes.rerun import replay

DOUBLES = [lambda x, _: x.sum() > 0, lambda _, ids: 1 in ids[0], lambda _, ids: bool((ids > 0).all())]


@pytest.mark.parametrize("doubles", DOUBLES)
def test_what_is_asked_of_all_rows_and_not_of_each_is_refused(doubles):
    torch.manual_seed(0)
    x, ids = torch.randn(6, 4), torch.randint(2, 9, (6, 3))
    pipe = split_by_layers(Asking(doubles), 2, (x, ids), n_microbatches=3)
    runtime = pipe.runtime(loss_fn=lambda y, _: y.square().mean())
    with pytest.raises(InputError, match=r"rows_\w+.py:\d+ asks .* of all rows at once"):
        runtime.step(x, ids)
    assert torch.isfinite(runtime.step(x, ids, n_microbatches=1).loss)


@pytest.mark.parametrize("reduce", [lambda y: y.square().mean(), lambda y: y.square().sum()])
@pytest.mark.parametrize("doubles", DOUBLES)
def test_what_is_asked_of_all_rows_at_the_end_is_answered_by_the_batch(doubles, reduce):
    torch.manual_seed(0)
    x, ids = torch.randn(6, 4).double(), torch.randint(2, 9, (6, 3))
    model = Asking(doubles, reduce).double()
    pipe = split_by_layers(model, 2, (x, ids), n_microbatches=3)
    assert re.search(r"rows_\w+.py:\d+ asks .* of all rows at once", pipe.graph.variation.mixing.always)
    runtime = pipe.runtime(loss_fn=lambda y, _: y.square().mean())
    for row in range(6):
        turned = ids.roll(row, 0)
        turned[: row % 2] = 1
        stepped_as_the_model(runtime, model, x.roll(row, 0), turned)


def stepped_as_the_model(runtime, model, *args):
    """A step gives the loss and gradients of the model; where that has none, of its output's mean square."""
    twin = copy.deepcopy(model)
    loss = twin(*args).square().mean() if type(model) is Asking else twin(*args)
    loss.backward()
    model.zero_grad()
    torch.testing.assert_close(runtime.step(*args).loss.item(), loss.item(), rtol=1e-12, atol=1e-12)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        given = [torch.zeros_like(w) if w.grad is None else w.grad for w in (p, q)]
        torch.testing.assert_close(*given, rtol=0, atol=1e-12)


class HeadOfMasked(nn.Module):
    """A head for what is masked, where anything is; or a loss over how many are, alone where none is."""

    def __init__(self, is_ratio):
        super().__init__()
        self.a, self.b, self.is_ratio = nn.Linear(4, 8), nn.Linear(8, 8), is_ratio
        self.values, self.head = nn.Linear(8, 4), nn.Linear(8, 5)

    def forward(self, x, labels):
        h = self.b(self.a(x).relu()).tanh()
        counted = labels >= 0
        if self.is_ratio:
            p = self.head(h).sigmoid()
            hit, missed = p[:, 0].log() * counted, (1 - p[:, 1]).log() * ~counted
            n = counted.sum()
            return -missed.sum() if n == 0 else -(hit.sum() + missed.sum()) / n
        loss = F.mse_loss(self.values(h), x)
        if counted.any():
            loss = loss + F.cross_entropy(self.head(h[counted]), labels[counted])
        return loss


@pytest.mark.parametrize("n_counted", [0, 6])
@pytest.mark.parametrize("is_ratio", [False, True])
def test_a_head_of_what_any_row_has_gets_the_batch(is_ratio, n_counted):
    torch.manual_seed(0)
    model = HeadOfMasked(is_ratio).double()

    def batch(*counted, n=6):
        labels = torch.full((n,), -100)
        labels[list(counted)] = torch.arange(len(counted)) % 5
        return torch.randn(n, 4).double(), labels

    example = batch(*range(n_counted))
    runtime = split_by_layers(model, 2, example, n_microbatches=3).runtime()
    for args in (batch(0), batch(5), batch(), batch(1, 2, 4), batch(2, n=4), batch(0, 1, 6, n=7)):
        stepped_as_the_model(runtime, model, *args)


class AskingOfLabels(Asking):
    """Its loss is a mean over labels."""

    def forward(self, x, labels):
        y = F.cross_entropy(self.b(self.a(x).relu()).flatten(0, 1), labels.flatten())
        return y * 2 if self.doubles(x, labels) else y


@pytest.mark.parametrize(
    "doubles",
    [lambda x, _: x.sum() > 0, lambda _, ids: bool((ids >= 0).all()), lambda _, ids: bool((ids < 0).any())],
)
def test_what_is_asked_of_all_rows_is_found_where_labels_weigh_them(doubles):
    torch.manual_seed(0)
    model = AskingOfLabels(doubles).double()
    x, labels = torch.randn(4, 6, 4).double(), torch.randint(0, 4, (4, 6))
    labels[3, :3] = -100
    runtime = split_by_layers(model, 2, (x, labels), n_microbatches=2).runtime()
    for row in range(4):
        stepped_as_the_model(runtime, model, x.roll(row, 0), labels.roll(row, 0))


class ContrastOfMasked(nn.Module):
    """Every row is told from all others; what it asks of all is asked early or late."""

    def __init__(self, is_late):
        super().__init__()
        self.a, self.b, self.is_late = nn.Linear(4, 4), nn.Linear(4, 4), is_late

    def forward(self, x, y, mask):
        factor = 2 if mask.all() else 3
        z = self.a(x if self.is_late else x * factor).tanh() @ self.b(y).T
        return F.cross_entropy(z * factor if self.is_late else z, torch.arange(len(x)))


@pytest.mark.parametrize("is_late", [True, False])
def test_what_is_asked_of_all_rows_before_a_tail_is_in_it(is_late):
    torch.manual_seed(0)
    model, x, y = ContrastOfMasked(is_late).double(), *torch.randn(2, 4, 4).double()
    mask = torch.tensor([True, True, True, False])
    runtime = split_by_layers(model, 2, (x, y, mask), n_microbatches=2).runtime()
    for given in (mask, mask.flip(0), ~mask, mask | True):
        stepped_as_the_model(runtime, model, x, y, given)


class OtherwiseOn(nn.Module):
    """Goes another way on some inputs than on those it is captured with."""

    def __init__(self, asks, does, noise):
        super().__init__()
        self.a, self.b, self.asks, self.does = nn.Linear(4, 4), nn.Linear(4, 4), asks, does
        self.noise = nn.Dropout(noise)

    def forward(self, x, flag):
        x = self.noise(self.a(x))
        return self.b((self.does(x) if self.asks(x, flag) else x).relu()).mean(1)


def _otherwise(asks, does, rows, length, is_flagged, noise=0.0):
    """A runtime of such a model and what to step it with; of the model the loss on that."""
    torch.manual_seed(0)
    model, flag = OtherwiseOn(asks, does, noise).double(), torch.tensor(False)
    pipe = split_by_layers(model, 2, (torch.randn(4, 6, 4).double(), flag), n_microbatches=2)
    x, flag = torch.randn(rows, length, 4).double(), torch.tensor(is_flagged)
    runtime = pipe.runtime(loss_fn=lambda y, _: y.square().mean())
    return runtime, (x, flag), model(x, flag).square().mean().detach()


@pytest.mark.parametrize(
    ("asks", "length", "is_flagged"),
    [(lambda x, _: x.shape[1] > 8, 12, False), (lambda _, flag: bool(flag), 6, True)],
)
def test_rows_that_other_inputs_than_the_example_mix_are_refused(asks, length, is_flagged):
    runtime, batch, loss = _otherwise(asks, lambda x: x - x.mean(0), 6, length, is_flagged)
    with pytest.raises(InputError, match=r"mean\(0\) at .*test_runtime_rows_answers.py:\d+"):
        runtime.step(*batch)
    torch.testing.assert_close(
        runtime.step(*batch, n_microbatches=1).loss.detach().as_subclass(torch.Tensor), loss
    )


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_example_of_one_number_hides_no_mixing(value):
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), Deciding(lambda x: x / (x.abs().max() + 1e-6)), nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(layers[1], layers[0], *layers[2:]).double()
    pipe = split_by_layers(model, 2, (torch.full((4, 6, 4), value).double(),), n_microbatches=2)
    with pytest.raises(InputError, match="rows of a batch of Sequential depend on one another"):
        pipe.runtime(loss_fn=lambda y, _: y.square().mean()).step(torch.randn(4, 6, 4).double())


ORDER = torch.zeros(64, dtype=torch.long)


class Set(nn.Module):
    """Goes by what others set: a number, or places of rows in a tensor of the file."""

    def __init__(self, is_number):
        super().__init__()
        self.weight, self.is_number, self.number = nn.Parameter(torch.ones(4)), is_number, 1

    def forward(self, x):
        return x * self.weight * self.number if self.is_number else x[ORDER[: len(x)]] * self.weight


class Sets(nn.Module):
    """Sets for its last layers what follows from how many rows there are."""

    def __init__(self, is_number):
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.whole, self.head = Set(is_number), nn.Linear(4, 4)

    def forward(self, x):
        if self.whole.is_number:
            self.whole.number = x.shape[0]
        else:
            ORDER[: len(x)].copy_(torch.arange(len(x) - 1, -1, -1))
        return self.head(self.whole(torch.tanh(self.body(x))))


@pytest.mark.parametrize("is_number", [True, False])
def test_what_is_set_for_layers_of_a_tail_is_set_there(is_number):
    torch.manual_seed(0)
    model, x, y = Sets(is_number).double(), torch.randn(8, 4).double(), torch.randn(8).double()
    pipe = split_by_layers(model, 2, (x[:4],), n_microbatches=4)
    runtime = pipe.runtime(loss_fn=lambda found, y: (found.mean(-1) - y).square().mean())
    found = runtime.step(x, target=y).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(found, (model(x).mean(-1) - y).square().mean().detach())


class MeanOfChosen(nn.Module):
    """A mean over what a mask chooses; nothing where it chooses nothing."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x, mask):
        y = self.body(x)
        return (y[mask] - x[mask]).square().mean() if mask.any() else y.sum() * 0


def test_a_form_that_gives_the_tail_nothing_is_refused_beside_one_that_does():
    torch.manual_seed(0)
    model, x, mask = MeanOfChosen().double(), torch.randn(4, 4).double(), torch.ones(4, 4).bool()
    runtime = split_by_layers(model, 2, (x, mask), n_microbatches=2).runtime()
    mask[2:] = False
    with pytest.raises(InputError, match="pass n_microbatches=1"):
        runtime.step(x, mask)
    found = runtime.step(x, mask, n_microbatches=1).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(found, model(x, mask).detach())


class OtherwiseAsked(nn.Module):
    """Makes twice as much of all rows where what it asks of them is so."""

    def __init__(self, asks):
        super().__init__()
        self.a, self.b, self.asks = nn.Linear(4, 4), nn.Linear(4, 4), asks

    def forward(self, x):
        h = self.a(x)
        return self.b(torch.tanh(h * 2 if self.asks(x) else h))


ASKED = [
    lambda x: (x[:, 0] > 50).any(),
    lambda x: (x[:, 0] > 50).any() and len(x) > 3,
    lambda x: x.max() > 50,
    lambda x: not (x[:, 0] < 50).all(),
]
"""What no row of the example is, one of the batch is, and no data made of the example's rows show."""


def _asked(asks, n_microbatches):
    torch.manual_seed(0)
    model = OtherwiseAsked(asks).double()
    pipe = split_by_layers(model, 2, (torch.randn(4, 4).double(),), n_microbatches=n_microbatches)
    return model, pipe.runtime(loss_fn=lambda y, _: y.square().mean())


@pytest.mark.parametrize("asks", ASKED)
def test_what_one_row_of_a_batch_answers_for_all_is_refused_where_microbatches_answer_otherwise(asks):
    model, runtime = _asked(asks, 2)
    x = torch.randn(8, 4).double()
    x[0, 0] = 60.0
    with pytest.raises(InputError, match=r"test_runtime_rows_answers.py:\d+ asks .* of all rows at once"):
        runtime.step(x)
    found = runtime.step(x, n_microbatches=1).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(found, model(x).square().mean().detach())


def test_what_data_and_the_number_of_rows_answer_together_is_refused_where_microbatches_answer_otherwise():
    model, runtime = _asked(lambda x: (x[:, 0] > 50).any() and len(x) > 3, 4)
    x = torch.randn(8, 4).double()
    x[::2, 0] = 60.0
    with pytest.raises(InputError, match=r"test_runtime_rows_answers.py:\d+ asks how many rows there are"):
        runtime.step(x)
    found = runtime.step(x, n_microbatches=2).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(found, model(x).square().mean().detach())


@pytest.mark.parametrize("asks", ASKED)
@pytest.mark.parametrize("is_there", [False, True])
def test_what_all_microbatches_answer_as_their_batch_is_no_obstacle(asks, is_there):
    model, runtime = _asked(asks, 2)
    x = torch.randn(8, 4).double()
    if is_there:
        x[::4, 0] = 60.0
    found = runtime.step(x).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(found, model(x).square().mean().detach())


NOISES = [0.0, 1e-12]
"""None is drawn, or as good as none."""


@pytest.mark.parametrize("noise", NOISES)
def test_what_a_model_does_with_so_many_rows_alone_is_refused_where_microbatches_have_fewer(noise):
    runtime, batch, loss = _otherwise(lambda x, _: len(x) < 4, lambda x: x * 2, 6, 6, False, noise)
    with pytest.raises(InputError, match=r"test_runtime_rows_answers.py:\d+ asks how many rows there are"):
        runtime.step(*batch)
    torch.testing.assert_close(
        runtime.step(*batch, n_microbatches=1).loss.detach().as_subclass(torch.Tensor), loss
    )


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(("rows", "n_microbatches"), [(3, 3), (5, 3)])
def test_one_row_may_go_a_way_of_its_own_that_comes_to_the_same(rows, n_microbatches, noise):
    told = lambda x, _: len(x) == 1, lambda x: x[0][None] + 0
    runtime, batch, loss = _otherwise(*told, rows, 6, False, noise)
    found = runtime.step(*batch, n_microbatches=n_microbatches).loss.detach()
    torch.testing.assert_close(found.as_subclass(torch.Tensor), loss)


class Calls(nn.Module):
    """Counts its calls in training, or does not."""

    def __init__(self, is_counting):
        super().__init__()
        self.is_counting = is_counting
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x):
        if self.is_counting and self.training:
            self.n += 1
        return x * 2


def test_a_form_beside_the_first_is_asked_in_training_too_where_it_writes(monkeypatch):
    """One that serves both modes: in evaluation always; what writes nothing is only compared in training."""
    runs = []
    monkeypatch.setattr(rows, "replay", lambda *given, **how: runs.append(given[1]) or replay(*given, **how))

    def n_runs(is_counting):
        runs.clear()
        model = OtherwiseOn(lambda _, flag: bool(flag), Calls(is_counting), 0.0)
        forms = capture(model, (torch.randn(4, 6, 4), torch.tensor(False))).forms[True]
        assert len(forms) == 2
        longer = max(runs, key=lambda form: len(form.calls))
        return sum(run is longer for run in runs)

    assert n_runs(False) < n_runs(True) <= 2 * n_runs(False)


class Dropping(nn.Module):
    """Leaves out in training or ``always``; asks whether anything is masked."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.first, self.last, self.always = nn.Linear(4, 4), nn.Linear(4, 4), always

    def forward(self, x, mask):
        x = F.dropout(self.first(x), 0.5, self.always or self.training)
        return self.last(x if mask.all() else x * mask)


@pytest.mark.parametrize("always", [False, True])
def test_forms_are_compared_without_noise_where_any_is_drawn(monkeypatch, always):
    made, evened = other_answers.FormPairs._given_by, []

    def given_by(pairs, form, *told):
        evened.clear()
        found = made(pairs, form, *told)
        assert bool(evened) is (always or pairs._model.training)
        return found

    def even(device):
        evened.append(device)
        return EvenNoise(device)

    monkeypatch.setattr(other_answers, "EvenNoise", even)
    monkeypatch.setattr(other_answers.FormPairs, "_given_by", given_by)
    captured = capture(Dropping(always), (torch.randn(4, 4), torch.ones(4, 4)))
    assert len(captured.forms[False]) == 2


class Limited(nn.Module):
    """Takes few rows at once."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        if len(x) > 4:
            raise ValueError("too many rows")
        return self.b(self.a(x).relu()).square().mean()


def test_a_model_that_cannot_take_all_rows_takes_microbatches(caplog):
    torch.manual_seed(0)
    model, x = Limited().double(), torch.randn(8, 4).double()
    runtime = split_by_layers(model, 2, (x[:2],), n_microbatches=1).runtime()
    wanted = torch.stack([model(piece).detach() for piece in x.split(2)]).mean()
    with caplog.at_level("WARNING", "autopipe"):
        for _ in range(2):
            found = runtime.step(x, n_microbatches=4).loss.detach().as_subclass(torch.Tensor)
            torch.testing.assert_close(found, wanted)
    assert caplog.text.count("cannot be recorded on so many") == 1
