"""Models whose rows depend on one another are found out; those whose rows do not are not."""

import pytest
import torch
from runtime_models import Adversary, adversary_batch, make
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError
from autopipe.graph import batch_dim
from autopipe.runtime import mixing
from autopipe.tracing import capture
from autopipe.tracing.rows import mixing as rows
from autopipe.tracing.rows import row_questions
from autopipe.tracing.rows.other_answers import two_rows
from autopipe.tracing.rows.results import Results
from autopipe.tracing.rows.varied_data import unlike
from autopipe.tracing.sizes.rerun import replay
from autopipe.tracing.sizes.variation import Mixing


class Contrast(nn.Module):
    """Every row is told from all others in the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        return F.cross_entropy(self.a(x) @ self.b(y).T, torch.arange(len(x)))


class TimeFirst(nn.Module):
    """Reads its sequences along the axis that others have the batch in."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.LSTM(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.body(x)[0])


class Clipped(nn.Module):
    """Asks that each row is told less than the one before it; where it is, nothing is left of the loss."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        told = self.b(self.a(x))
        return F.relu(told[1:] - told[:-1]).sum()


class Hardest(nn.Module):
    """Of two rows of two kinds nothing is left of the loss in any order, of more there is."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, kind):
        told = self.b(self.a(x).relu())
        apart, is_same = torch.cdist(told, told), kind[:, None] == kind
        farthest, nearest = (apart * is_same).amax(1), (apart + 1e9 * is_same).amin(1)
        return F.relu(farthest - nearest + 0.1).mean()


class Constant(nn.Module):
    """A number that is the same for all rows is no sign that they mix."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        told = self.b(self.a(x).relu())
        return told.square().mean(), told.new_tensor(3.0), (told * 0).sum()


def found(model, *args, **kwargs):
    torch.manual_seed(0)
    captured, _, stages = make(model, args, kwargs, n_stages=2)
    return mixing(captured, stages, args, kwargs, 3)


def test_rows_that_depend_on_one_another():
    assert "output 0 differs" in found(Contrast(), torch.randn(6, 4), torch.randn(6, 4))
    assert "output 0 differs" in found(TimeFirst(), torch.randn(5, 6, 4))


@pytest.mark.parametrize("is_reversed", [True, False])
def test_rows_that_depend_on_one_another_in_one_order_alone(is_reversed):
    torch.manual_seed(0)
    model, x = Clipped(), torch.randn(2, 4)
    assert bool(model(x)) != bool(model(x.flip(0)))
    captured = autopipe.capture(model, (x.flip(0) if is_reversed else x,))
    assert "alone give 0 and 0" in captured.variation.mixing.always


def test_rows_whose_loss_is_clipped_to_nothing():
    torch.manual_seed(0)
    model, x, kind = Hardest().double(), 3 * torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 2
    assert not bool(model(x[:2], kind[:2]))
    pipe = autopipe.split(model, 2, (x, kind), costs="estimated", n_microbatches=4)
    assert "cdist" in pipe.graph.variation.mixing.always
    whole = model(x, kind).item()
    assert whole
    assert pipe.runtime().step(x, kind).loss.item() == pytest.approx(whole, rel=1e-10)
    assert not autopipe.capture(Constant(), (torch.randn(6, 4),)).variation.mixing.always


def test_rows_that_do_not():
    args, kwargs, _ = adversary_batch(5, 4)
    assert not found(Adversary().double(), *args, **kwargs)
    assert not found(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4)), torch.randn(7, 4)
    )
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert not found(model, torch.randn(1, 4))
    assert model.training


def test_verify_warns(caplog):
    pipe = autopipe.split(TimeFirst(), 2, (torch.randn(5, 6, 4),), costs="estimated", n_microbatches=2)
    pipe.verify()
    assert "microbatches do not give what the whole batch does" in caplog.text
    assert "n_microbatches=1" in caplog.text


class Views(nn.Module):
    """Two views of each row, cat in one batch and told apart by a loss over all of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        z = F.normalize(torch.cat([self.a(x), self.b(x)]), dim=-1)
        scores = (z @ z.T).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
        return F.cross_entropy(scores, (torch.arange(len(z)) + len(z) // 2) % len(z))


class Redundant(nn.Module):
    """A loss on the correlation of features over the batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        c = self.a(x).T @ self.b(x) / len(x)
        return (c - torch.eye(4)).square().sum()


class Variational(nn.Module):
    """Draws noise inside, row by row."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 6), nn.Linear(3, 4)

    def forward(self, x):
        mean, spread = self.encode(x).chunk(2, -1)
        out = self.decode(mean + torch.randn_like(mean) * (spread / 2).exp())
        return F.mse_loss(out, x) + (mean.square() + spread.exp() - spread - 1).mean()


class Tokens(nn.Module):
    """A mean over the tokens that count, of which rows have unlike many."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)

    def forward(self, ids, labels):
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


class Lasting(nn.Module):
    """A mean over what lasts, of which rows have unlike much and no loss of torch's says so."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, lengths):
        lasts = torch.arange(x.shape[1]) < lengths[:, None]
        error = self.head(self.body(x)).square().mean(-1)
        return (error * lasts).sum() / lengths.sum()


class Summed(Lasting):
    """A sum over rows."""

    def forward(self, x, lengths):
        return (self.head(self.body(x)) - lengths[:, None, None]).square().sum(), self.body(x)


class Penalised(Lasting):
    """A sum over rows, and what the weights cost."""

    def forward(self, x, lengths):
        return (
            self.head(self.body(x)) - lengths[:, None, None]
        ).square().sum() + self.body.weight.square().sum()


class Noised(nn.Module):
    """A loss of its own over noise that each row draws: in both modes, or in training alone."""

    def __init__(self, reduce, *, always=True):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reduce, self.always = reduce, always

    def forward(self, x):
        y = self.head(F.dropout(self.body(x), 0.5, self.always or self.training))
        if self.always:
            y = y + torch.randn_like(y) * torch.rand(())
        return self.reduce(
            y.square().mean(-1), x.new_empty(len(x)).bernoulli_(0.5) if self.always else y[:, 0]
        )


def captured_mixing(model, *args):
    torch.manual_seed(0)
    return autopipe.capture(model, args).variation.mixing


@pytest.mark.parametrize(
    ("make_model", "n_inputs", "where"),
    [(Contrast, 2, " @ "), (Views, 1, "cross_entropy"), (Redundant, 1, "sum"), (TimeFirst, 1, "body")],
)
def test_a_step_that_would_be_wrong_is_refused(make_model, n_inputs, where):
    torch.manual_seed(0)
    shape = (6, 4) if make_model is not TimeFirst else (6, 3, 4)
    args = tuple(torch.randn(shape) for _ in range(n_inputs))
    pipe = autopipe.split(make_model(), 2, args, costs="estimated", n_microbatches=3)
    refuses = "tail" if make_model is TimeFirst else "refuse"
    runtime = pipe.runtime(loss_fn=lambda y, _: y.square().mean() if y.ndim else y, mixed_rows=refuses)
    with pytest.raises(autopipe.InputError, match="depend on one another") as refusal:
        runtime.step(*args)
    assert where in str(refusal.value)
    assert "n_microbatches=1" in str(refusal.value)
    assert torch.isfinite(runtime.step(*args, n_microbatches=1).loss)


def test_mixed_rows_can_be_allowed(caplog):
    args = torch.randn(6, 4), torch.randn(6, 4)
    pipe = autopipe.split(Contrast(), 2, args, costs="estimated", n_microbatches=3)
    runtime = pipe.runtime(mixed_rows="allow")
    assert torch.isfinite(runtime.step(*args).loss)
    assert "depend on one another" in caplog.text


def test_noise_and_unlike_weights_are_no_mixing(caplog):
    x, ids = torch.randn(6, 4), torch.randint(8, (6, 5))
    assert captured_mixing(Variational(), x) == Mixing()
    labels = torch.where(torch.arange(5) < torch.randint(2, 6, (6, 1)), ids, -100)
    assert captured_mixing(Tokens(), ids, labels) == Mixing()
    autopipe.split(Variational(), 2, (x,), costs="estimated", n_microbatches=3).verify()
    assert "microbatches" not in caplog.text


@pytest.mark.parametrize("always", [True, False])
def test_sums_of_noise_are_sums_and_means_are_means(always):
    x = torch.randn(6, 4)
    assert captured_mixing(Noised(lambda e, _: e.sum(), always=always), x) == Mixing(sums=True)
    assert captured_mixing(Noised(lambda e, _: e.mean(), always=always), x) == Mixing()
    found = captured_mixing(Noised(lambda e, _: e.sum() + 3, always=always), x)
    assert "for three rows" in found.always


def test_means_over_rows_that_are_drawn_run_on_the_whole_batch():
    model = Noised(lambda e, drawn: (e * drawn).sum() / (drawn.sum() + 0.1))
    pipe = autopipe.split(model, 2, (torch.randn(6, 4),), costs="estimated", n_microbatches=3)
    assert pipe.graph.variation.mixing.always
    assert pipe.graph.ops.tail


def test_a_sum_over_noise_is_added_up_over_microbatches():
    torch.manual_seed(0)
    x = torch.randn(600, 4)
    pipe = autopipe.split(Noised(lambda e, _: e.sum()), 2, (x[:6],), costs="estimated", n_microbatches=3)
    ratio = pipe.runtime().step(x).loss / pipe.model(x)
    assert 0.8 < ratio < 1.25


@pytest.mark.parametrize("make_model", [Lasting, Summed, Penalised])
def test_losses_over_what_is_no_label_are_those_of_the_batch(make_model):
    torch.manual_seed(0)
    model = make_model().double()
    x, lengths = torch.randn(6, 5, 4, dtype=torch.float64), torch.tensor([5, 1, 2, 5, 3, 1])
    pipe = autopipe.split(model, 2, (x, lengths), costs="estimated", n_microbatches=3)
    assert pipe.graph.variation.mixing.sums == (make_model is Summed)
    assert bool(pipe.graph.ops.tail) == (make_model is not Summed)
    whole = model(x, lengths)
    loss = whole[0] if make_model is Summed else whole
    loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert abs(pipe.runtime().step(x, lengths).loss.item() - loss.item()) < 1e-10 * loss.item()
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-10, atol=1e-10)


def test_batch_norm_is_warned_of_once(caplog):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    x = torch.randn(6, 4)
    pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=3)
    runtime = pipe.runtime(loss_fn=lambda y, _: y.square().mean())
    runtime.evaluate(x)
    runtime.step(x)
    runtime.step(x)
    assert caplog.text.count("each microbatch is a batch of its own") == 1


class Placed(nn.Module):
    """Does to its rows what hangs on where they are, or on how many there are."""

    def __init__(self, place, *, is_late, p=0.0):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(p)
        self.place, self.is_late = place, is_late

    def forward(self, x):
        x = self.c(x)
        x = self.b(self.a(x if self.is_late else self.place(x)).relu())
        return self.place(x) if self.is_late else x


def of_first(x):
    x = x * 1
    x[0].mul_(2)
    return x


PLACES = {
    "number": lambda x: x * x.shape[0],
    "numbered": lambda x: x + torch.arange(len(x), dtype=x.dtype)[:, None],
    "first": of_first,
    "last": lambda x: torch.cat([x[:-1], x[-1:] * 3]),
    "halves": lambda x: torch.cat([half * i for i, half in enumerate(x.chunk(2), 1)]),
}


@pytest.mark.parametrize("p", [0.0, 0.2])
@pytest.mark.parametrize("place", PLACES)
def test_rows_that_hang_on_their_places_are_refused(place, p):
    x = torch.randn(6, 4)
    pipe = autopipe.split(
        Placed(PLACES[place], is_late=False, p=p), 2, (x,), costs="estimated", n_microbatches=3
    )
    with pytest.raises(InputError, match="hang on their places or on how many there are"):
        pipe.runtime(loss_fn=lambda y, _: y.square().mean()).step(x)


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_hang_on_their_places_late_run_on_the_whole_batch(place):
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    model = Placed(PLACES[place], is_late=True).double()
    pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=3)
    loss = model(x).square().mean()
    loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    found = pipe.runtime(loss_fn=lambda y, _: y.square().mean()).step(x).loss
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-12, atol=1e-12)


def test_rows_that_are_told_apart_by_place_but_made_alike_are_no_mixing():
    def shifted(x):
        number = torch.arange(len(x), dtype=x.dtype)[:, None]
        return (x + number) - number

    x = torch.randn(6, 4, dtype=torch.float64)
    assert captured_mixing(Placed(shifted, is_late=False, p=0.2).double(), x) == Mixing()


class Asking(nn.Module):
    """Goes by what it asks of its whole batch."""

    def __init__(self, doubles, reduce=lambda y: y):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.doubles, self.reduce = doubles, reduce

    def forward(self, x, ids):
        y = self.b(self.a(x).relu())
        return self.reduce(y * 2 if self.doubles(x, ids) else y)


class MasksWhereAny(nn.Module):
    """Asks its batch whether any of it is masked; a row of which nothing is stays the same either way."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask):
        x = self.a(x)
        if not mask.all():
            x = x.masked_fill(~mask, 0.0)
        return self.b(x.relu())


@pytest.mark.parametrize("reduce", [lambda y: y, lambda y: y.square().mean(), lambda y: y.square().sum()])
@pytest.mark.parametrize(
    "doubles", [lambda x, _: x.sum() > 0, lambda _, ids: 1 in ids[0], lambda _, ids: bool((ids > 0).all())]
)
def test_what_is_asked_of_all_rows_and_not_of_each_is_refused(doubles, reduce):
    torch.manual_seed(0)
    x, ids = torch.randn(6, 4), torch.randint(2, 9, (6, 3))
    pipe = autopipe.split(Asking(doubles, reduce), 2, (x, ids), costs="estimated", n_microbatches=3)
    runtime = pipe.runtime(loss_fn=lambda y, _: y.square().mean())
    with pytest.raises(InputError, match=r"test_runtime_rows.py:\d+ asks .* of all rows at once"):
        runtime.step(x, ids)
    assert torch.isfinite(runtime.step(x, ids, n_microbatches=1).loss)


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
    x, labels = torch.randn(4, 6, 4), torch.randint(0, 4, (4, 6))
    labels[3, :3] = -100
    runtime = autopipe.split(
        AskingOfLabels(doubles), 2, (x, labels), costs="estimated", n_microbatches=2
    ).runtime()
    with pytest.raises(InputError, match=r"test_runtime_rows.py:\d+ asks .* of all rows at once"):
        runtime.step(x, labels)
    assert torch.isfinite(runtime.step(x, labels, n_microbatches=1).loss)


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
def test_what_is_asked_of_all_rows_before_a_tail_is_refused(is_late):
    torch.manual_seed(0)
    model, x, y = ContrastOfMasked(is_late).double(), *torch.randn(2, 4, 4).double()
    mask = torch.tensor([True, True, True, False])
    runtime = autopipe.split(model, 2, (x, y, mask), costs="estimated", n_microbatches=2).runtime()
    if is_late:
        torch.testing.assert_close(runtime.step(x, y, mask).loss.as_subclass(torch.Tensor), model(x, y, mask))
        return
    with pytest.raises(InputError, match=r"test_runtime_rows.py:\d+ asks .* of all rows at once"):
        runtime.step(x, y, mask)


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
    pipe = autopipe.split(
        model, 2, (torch.randn(4, 6, 4).double(), flag), costs="estimated", n_microbatches=2
    )
    x, flag = torch.randn(rows, length, 4).double(), torch.tensor(is_flagged)
    runtime = pipe.runtime(loss_fn=lambda y, _: y.square().mean())
    return runtime, (x, flag), model(x, flag).square().mean().detach()


@pytest.mark.parametrize(
    ("asks", "length", "is_flagged"),
    [(lambda x, _: x.shape[1] > 8, 12, False), (lambda _, flag: bool(flag), 6, True)],
)
def test_rows_that_other_inputs_than_the_example_mix_are_refused(asks, length, is_flagged):
    runtime, batch, loss = _otherwise(asks, lambda x: x - x.mean(0), 6, length, is_flagged)
    with pytest.raises(InputError, match=r"mean\(0\) at .*test_runtime_rows.py:\d+"):
        runtime.step(*batch)
    torch.testing.assert_close(
        runtime.step(*batch, n_microbatches=1).loss.detach().as_subclass(torch.Tensor), loss
    )


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_example_of_one_number_hides_no_mixing(value):
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), Deciding(lambda x: x / (x.abs().max() + 1e-6)), nn.Linear(4, 4), nn.Linear(4, 4)
    model = nn.Sequential(layers[1], layers[0], *layers[2:]).double()
    pipe = autopipe.split(
        model, 2, (torch.full((4, 6, 4), value).double(),), costs="estimated", n_microbatches=2
    )
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
    pipe = autopipe.split(model, 2, (x[:4],), costs="estimated", n_microbatches=4)
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
    runtime = autopipe.split(model, 2, (x, mask), costs="estimated", n_microbatches=2).runtime()
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
    pipe = autopipe.split(
        model, 2, (torch.randn(4, 4).double(),), costs="estimated", n_microbatches=n_microbatches
    )
    return model, pipe.runtime(loss_fn=lambda y, _: y.square().mean())


@pytest.mark.parametrize("asks", ASKED)
def test_what_one_row_of_a_batch_answers_for_all_is_refused_where_microbatches_answer_otherwise(asks):
    model, runtime = _asked(asks, 2)
    x = torch.randn(8, 4).double()
    x[0, 0] = 60.0
    with pytest.raises(InputError, match=r"test_runtime_rows.py:\d+ asks .* of all rows at once"):
        runtime.step(x)
    found = runtime.step(x, n_microbatches=1).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(found, model(x).square().mean().detach())


def test_what_data_and_the_number_of_rows_answer_together_is_refused_where_microbatches_answer_otherwise():
    model, runtime = _asked(lambda x: (x[:, 0] > 50).any() and len(x) > 3, 4)
    x = torch.randn(8, 4).double()
    x[::2, 0] = 60.0
    with pytest.raises(InputError, match=r"test_runtime_rows.py:\d+ asks how many rows there are"):
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
    with pytest.raises(InputError, match=r"test_runtime_rows.py:\d+ asks how many rows there are"):
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


def test_a_form_beside_the_first_is_asked_once_whatever_it_writes(monkeypatch):
    runs = []
    monkeypatch.setattr(rows, "replay", lambda *given, **how: runs.append(given[1]) or replay(*given, **how))

    def n_runs(is_counting):
        runs.clear()
        model = OtherwiseOn(lambda _, flag: bool(flag), Calls(is_counting), 0.0)
        forms = capture(model, (torch.randn(4, 6, 4), torch.tensor(False))).forms[True]
        assert len(forms) == 2
        longer = max(runs, key=lambda form: len(form.calls))
        return sum(run is longer for run in runs)

    assert n_runs(True) == n_runs(False)


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
    runtime = autopipe.split(model, 2, (x[:2],), costs="estimated", n_microbatches=1).runtime()
    wanted = torch.stack([model(piece).detach() for piece in x.split(2)]).mean()
    with caplog.at_level("WARNING", "autopipe"):
        for _ in range(2):
            found = runtime.step(x, n_microbatches=4).loss.detach().as_subclass(torch.Tensor)
            torch.testing.assert_close(found, wanted)
    assert caplog.text.count("cannot be recorded on so many") == 1


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
    pipe = autopipe.split(model, 2, (x, torch.tensor(number)), costs="estimated", n_microbatches=2)
    runtime = pipe.runtime(loss_fn=lambda y, _: y.square().mean())
    if mixes:
        with pytest.raises(InputError, match=r"test_runtime_rows.py:\d+"):
            runtime.step(x, torch.tensor(other))
    loss = runtime.step(x, torch.tensor(other), n_microbatches=1 if mixes else 2).loss
    wanted = model(x, torch.tensor(other)).square().mean().detach()
    torch.testing.assert_close(loss.detach().as_subclass(torch.Tensor), wanted)


class Deciding(nn.Module):
    """A layer that goes by what it is given: stays whole."""

    def __init__(self, does):
        super().__init__()
        self.weight, self.does = nn.Parameter(torch.ones(4)), does

    def forward(self, x):
        return self.does(x) * self.weight


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


def decided(does, n_rows):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Deciding(does), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    x = torch.rand(n_rows, 6, 4).double()
    pipe = autopipe.split(model, 3, (x,), costs="estimated", n_microbatches=2)
    return model, x, pipe.runtime(loss_fn=lambda y, _: y.square().mean())


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


class FirstOfAll(nn.Module):
    """A loss, in a layer that stays whole, of no more than so many rows."""

    def forward(self, x):
        assert len(x.tolist()) == len(x)
        return x[:20].square().mean()


def test_a_loss_kept_whole_of_the_first_rows_alone_is_refused():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), FirstOfAll()).double()
    x = torch.randn(40, 4, dtype=torch.float64)
    runtime = autopipe.split(model, 2, (x[:6],), costs="estimated", n_microbatches=2).runtime()
    with pytest.raises(InputError, match="whose rows hang on how many there are"):
        runtime.step(x)
    assert runtime.step(x, n_microbatches=1).loss.item() == pytest.approx(model(x).item(), rel=1e-12)


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


class Routed(nn.Module):
    """A layer that says how unevenly all tokens of a batch choose, as experts are balanced."""

    def __init__(self):
        super().__init__()
        self.gate, self.linear = nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x):
        chances = self.gate(x).softmax(-1).flatten(0, 1)
        chosen = F.one_hot(chances.argmax(-1), 3).to(x.dtype)
        return x + self.linear(x), 3 * (chances.mean(0) * chosen.mean(0)).sum()


class Balanced(nn.Module):
    """A small share of its loss says how evenly its layers' tokens choose."""

    def __init__(self, share):
        super().__init__()
        self.layers, self.head, self.share = (
            nn.ModuleList([Routed() for _ in range(3)]),
            nn.Linear(4, 5),
            share,
        )

    def forward(self, x, labels):
        told = 0.0
        for layer in self.layers:
            x, uneven = layer(x)
            told = told + uneven
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + self.share * told


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("share", "is_told"), [(1e-2, True), (1e-3, True), (0.0, False)])
def test_what_mixes_rows_in_a_small_share_of_a_loss_is_found_in_any_precision(share, is_told, dtype):
    torch.manual_seed(0)
    model, x = Balanced(share).to(dtype), torch.randn(4, 6, 4).to(dtype)
    found = captured_mixing(model, x, torch.randint(0, 5, (4, 6)))
    assert bool(found.always) == is_told


class Weighted(nn.Module):
    """Its rows have weights, by all of which it divides, or by their number."""

    def __init__(self, *, is_divided):
        super().__init__()
        self.a, self.b, self.is_divided = nn.Linear(4, 4), nn.Linear(4, 4), is_divided

    def forward(self, x, weights):
        told = self.b(self.a(x).relu()).square().mean(-1) * weights
        return told.sum() / weights.sum() if self.is_divided else told.mean()


@pytest.mark.parametrize("is_divided", [True, False])
def test_weights_that_are_all_one_in_the_example_weigh(is_divided):
    torch.manual_seed(0)
    model, x = Weighted(is_divided=is_divided).double(), torch.randn(8, 4).double()
    pipe = autopipe.split(model, 2, (x[:4], torch.ones(4).double()), costs="estimated", n_microbatches=4)
    assert bool(pipe.graph.ops.tail) == is_divided
    weights = torch.rand(8).double()
    loss = pipe.runtime().step(x, weights).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(loss, model(x, weights).detach(), rtol=1e-12, atol=0)


class Bent(nn.Module):
    """Its loss, or a part of it, is bent at a level."""

    def __init__(self, bend):
        super().__init__()
        self.a, self.b, self.bend = nn.Linear(4, 4), nn.Linear(4, 3), bend

    def forward(self, x, labels):
        told = self.b(self.a(x).relu())
        return self.bend(F.cross_entropy(told, labels), told.square().mean())


BENDS = {
    "flooded": lambda loss, _: (loss - 0.1).abs() + 0.1,
    "free bits": lambda loss, size: loss + size.clamp(min=50),
    "limited": lambda loss, size: torch.minimum(loss, loss.new_tensor(9.0)) + size,
    "limited in place": lambda loss, size: (loss * 1).clamp_(max=9) + size,
    "under a threshold": lambda loss, _: F.threshold(loss, 0.01, 0.01),
    "left out if small": lambda loss, size: loss * (loss > 0.01) + size,
    "the larger one": lambda loss, size: torch.stack([loss, size + 2]).amax(),
    "apart from a level": lambda loss, _: F.smooth_l1_loss(loss, loss.new_tensor(0.1), beta=0.001),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", BENDS)
def test_a_loss_that_is_bent_where_no_example_comes_runs_on_the_whole_batch(kind, dtype):
    torch.manual_seed(0)
    model, x, labels = Bent(BENDS[kind]).to(dtype), torch.randn(8, 4, dtype=dtype), torch.arange(8) % 3
    pipe = autopipe.split(model, 2, (x[:4], labels[:4]), costs="estimated", n_microbatches=4)
    assert pipe.graph.ops.tail
    x[::2] *= 30
    loss = pipe.runtime().step(x, labels).loss.detach().as_subclass(torch.Tensor)
    rounding = 1e-12 if dtype is torch.float64 else 1e-6
    torch.testing.assert_close(loss, model(x, labels).detach(), rtol=rounding, atol=0)


class Judging(nn.Module):
    """A layer that stays whole, and computes a loss that is bent at a level."""

    def __init__(self, bend):
        super().__init__()
        self.bend = bend

    def forward(self, told, labels):
        return self.bend(F.cross_entropy(told, labels), told.square().mean())


class BentInside(nn.Module):
    """Leaves its loss to a layer."""

    def __init__(self, bend):
        super().__init__()
        self.a, self.b, self.judge = nn.Linear(4, 4), nn.Linear(4, 3), Judging(bend)

    def forward(self, x, labels):
        return self.judge(self.b(self.a(x).relu()), labels)


@pytest.mark.parametrize("kind", BENDS)
def test_a_loss_that_is_bent_inside_a_layer_runs_on_the_whole_batch(kind):
    torch.manual_seed(0)
    model, x, labels = BentInside(BENDS[kind]).double(), torch.randn(8, 4).double(), torch.arange(8) % 3
    pipe = autopipe.split(model, 2, (x[:4], labels[:4]), costs="estimated", n_microbatches=4)
    assert pipe.graph.ops.tail
    x[::2] *= 30
    loss = pipe.runtime().step(x, labels).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(loss, model(x, labels).detach(), rtol=1e-12, atol=0)


def shortened(x):
    return x * (30 / x.norm()).clamp(max=1)


class Shortening(nn.Module):
    """A layer that stays whole, and shortens all rows where they are long together."""

    def forward(self, x):
        return shortened(x)


class Long(nn.Module):
    """Shortens its rows late, by a function or a layer."""

    def __init__(self, shorten):
        super().__init__()
        self.a, self.b, self.shorten = nn.Linear(4, 8), nn.Linear(8, 3), shorten

    def forward(self, x, labels):
        return F.cross_entropy(self.b(self.shorten(self.a(x))), labels)


@pytest.mark.parametrize("shorten", [shortened, Shortening()])
def test_rows_shortened_where_all_of_them_are_long_are_found(shorten):
    """A function is a part of the tail; what a layer does to its rows is not seen there."""
    torch.manual_seed(0)
    model, x, labels = Long(shorten).double(), torch.randn(8, 4).double(), torch.arange(8) % 3
    pipe = autopipe.split(model, 2, (x[:4], labels[:4]), costs="estimated", n_microbatches=4)
    if shorten is not shortened:
        with pytest.raises(InputError, match="depend on one another"):
            pipe.runtime().step(x * 99, labels)
        return
    loss = pipe.runtime().step(x * 99, labels).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(loss, model(x * 99, labels).detach(), rtol=1e-12, atol=0)


def test_layers_that_make_numbers_of_each_row_mix_none():
    def bent_each(x):
        return torch.stack([row * (30 / row.norm()).clamp(max=1) for row in x])

    model, x, runtime = decided(bent_each, 4)
    for factor in (1, 90):
        loss, wanted = runtime.step(x * factor).loss, model(x * factor).square().mean().detach()
        torch.testing.assert_close(loss.as_subclass(torch.Tensor), wanted)


def test_a_bend_is_found_where_rows_weigh_otherwise_by_their_labels():
    labels = torch.tensor([[-100, -100, 1], [0, 1, 2], [0, 0, 1], [2, 0, 1]])
    x = torch.randn(4, 3, 4)
    for bend, mixes in ((BENDS["flooded"], True), (lambda loss, _: 2 * loss, False)):
        model = Bent(lambda loss, size, bend=bend: bend(loss, size))
        model.b = nn.Sequential(nn.Linear(4, 3), nn.Flatten(0, 1))
        found = captured_mixing(OverTokens(model), x, labels)
        assert bool(found.always) is mixes, found


class OverTokens(nn.Module):
    """Gives a loss the labels of all tokens in a row."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, labels):
        return self.inner(x, labels.flatten())


def test_a_bend_that_no_loss_reaches_is_no_mixing():
    model = Bent(lambda loss, size: loss.clamp(min=0) + size.abs())
    assert captured_mixing(model, torch.randn(4, 4), torch.arange(4) % 3) == Mixing()


class AskingHowItLies(nn.Module):
    """Reads time first, and goes by how its input lies in memory."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.b(self.a(x.view(-1, 4)).tanh()).view_as(x)
        return (y * 2 if x.is_contiguous() else y).mean()


def test_microbatches_lie_in_memory_as_their_batch_does():
    model, x = AskingHowItLies().double(), torch.randn(5, 4, 4).double()
    pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=2)
    for given in (x, x + 1):
        loss = pipe.runtime(batch_dims={"x": 1}).step(given).loss
        torch.testing.assert_close(loss.as_subclass(torch.Tensor), model(given))


def test_on_an_accelerator_no_row_points_out_of_a_table():
    x, ids = torch.randn(6, 4), torch.randint(2, 9, (6, 3))
    dim = batch_dim(capture(Asking(lambda _, ids: bool((ids > 0).all())), (x, ids)).ops.dims)
    least = {
        kind: min(
            int(batches["ab"]["ids"].min())
            for batches in two_rows({"x": x, "ids": ids}, dim, torch.device(kind))
        )
        for kind in ("cpu", "cuda")
    }
    assert least == {"cpu": -100, "cuda": 0}


class Dropping(Asking):
    """Draws noise in training alone; one form serves both modes."""

    def __init__(self, doubles):
        super().__init__(doubles)
        self.drop = nn.Dropout(0.1)

    def forward(self, x, ids):
        return super().forward(self.drop(x), ids)


def test_what_is_asked_of_all_rows_is_found_where_training_draws():
    x, ids = torch.randn(6, 4), torch.randint(2, 9, (6, 3))
    found = captured_mixing(Dropping(lambda _, ids: bool((ids > 0).all())), x, ids)
    assert "of all rows at once" in found.always


class LeavesOut(nn.Module):
    """Leaves out labels of a kind that other labels choose."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, labels):
        y = self.b(self.a(x).relu())
        left_out = 3 if (labels == 3).any() else 2
        return F.cross_entropy(y, labels, ignore_index=left_out)


@pytest.mark.parametrize("example", [[0, 1, 2, 1], [0, 3, 2, 1]])
def test_what_all_labels_say_of_which_are_left_out_is_asked_of_all_rows(example):
    model, x = LeavesOut(), torch.randn(4, 4)
    pipe = autopipe.split(model, 2, (x, torch.tensor(example)), costs="estimated", n_microbatches=2)
    with pytest.raises(InputError, match="of all rows at once"):
        pipe.runtime().step(x, torch.tensor([3, 2, 1, 2]))


class NormsWhereAny(MasksWhereAny):
    """Mixes rows in training as well, as batch norm does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, mask):
        return super().forward(self.norm(x), mask)


def test_rows_that_training_alone_mixes_are_not_taken_to_answer_otherwise():
    found = captured_mixing(NormsWhereAny(), torch.randn(6, 4), torch.ones(6, 4, dtype=torch.bool))
    assert found.training
    assert not found.always


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_each_row_may_be_asked_is_no_mixing(is_whole):
    mask = torch.rand(6, 4) > (-1.0 if is_whole else 0.4)
    assert captured_mixing(MasksWhereAny(), torch.randn(6, 4), mask) == Mixing()


def test_what_is_rounded_otherwise_among_more_rows_is_no_mixing():
    def rounded(x):
        return x * (1 + 1e-7 * len(x))

    x = torch.randn(6, 4, dtype=torch.float64)
    assert captured_mixing(Placed(rounded, is_late=False).double(), x) == Mixing()


def test_rows_that_are_all_alike_hide_nothing():
    x = torch.ones(6, 4)
    assert " @ " in captured_mixing(Contrast(), x, x).always


class Tallies(nn.Module):
    """Counts its calls, averages over them, and counts its rows, which comes out the same in any pieces."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4)
        for name in ("calls", "average", "rows"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self.rows += len(x)
            self.average.lerp_(x.detach().mean(), 0.1)
        return self.b(self.a(x)).square().mean()


def test_what_is_written_at_each_call_is_told_by_name(caplog):
    pipe = autopipe.split(Tallies(), 2, (torch.randn(8, 4),), costs="estimated", n_microbatches=2)
    (note,) = pipe.graph.notes
    assert "calls, average, a.weight_u and" in note
    assert "rows" not in pipe.graph.variation.mixing.by_call
    caplog.clear()
    runtime = pipe.runtime()
    for _ in range(2):
        runtime.step(torch.randn(8, 4))
    assert caplog.text.count("calls, average, a.weight_u") == 1


class Stepped(nn.Module):
    """Counts rows in a way that is another for more than three of them."""

    def __init__(self, least):
        super().__init__()
        self.least, self.a = least, nn.Linear(4, 4)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.rows += len(x) if len(x) > self.least else len(x) ** 2
        return self.a(x).square().mean()


@pytest.mark.parametrize(("least", "told"), [(3, ()), (8, ("rows",))])
def test_nothing_is_told_of_what_a_form_writes_on_rows_that_it_is_not_for(least, told):
    found = capture(Stepped(least), (torch.randn(2, 4),))
    assert found.variation.mixing.by_call == told


class Edges(nn.Module):
    """Sums over edges, which tell their ends by number."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, edges):
        x = self.a(x)
        return self.b(x.index_add(0, edges[1], x[edges[0]])).square().mean()


class Picks(Edges):
    """Takes rows of one argument in the order that another tells."""

    def forward(self, x, places):
        return self.b(torch.tanh(self.a(x[places]))).square().mean()


class Along(Edges):
    """Takes places within each row, which are nobody else's."""

    def forward(self, x, places):
        x = self.a(x).gather(1, places[..., None].expand(-1, -1, 4))
        return self.b(torch.tanh(x)).square().mean()


class Bags(nn.Module):
    """Sums over bags, which begin at offsets."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.EmbeddingBag(9, 4), nn.Linear(4, 4)

    def forward(self, tokens, offsets):
        return self.b(torch.tanh(self.a(tokens, offsets))).square().mean()


def pointing(seed):
    torch.manual_seed(seed)
    return {
        "a graph": (Edges(), (torch.randn(20, 4), torch.randint(0, 20, (2, 30)))),
        "few edges": (Edges(), (torch.randn(20, 4), torch.tensor([[18, 12], [17, 3]]))),
        "as many edges": (Edges(), (torch.randn(8, 4), torch.randint(0, 8, (2, 8)))),
        "an order": (Picks(), (torch.randn(8, 4), torch.randperm(8))),
        "one row": (Picks(), (torch.randn(8, 4), torch.full((8,), 3))),
        "bags": (Bags(), (torch.randint(0, 9, (16,)), torch.arange(0, 16, 4))),
        "bags of one": (Bags(), (torch.randint(0, 9, (8,)), torch.arange(8))),
    }


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", list(pointing(0)))
def test_inputs_that_point_to_rows_are_not_cut(name, seed):
    model, args = pointing(seed)[name]
    pipe = autopipe.split(model, 2, args, costs="estimated", n_microbatches=2)
    assert pipe.graph.variation.mixing.always
    with pytest.raises(InputError, match=r"depend on one another .*[^ ]\), so .* pass n_microbatches=1"):
        pipe.runtime().step(*args)
    loss = pipe.runtime(n_microbatches=1).step(*args).loss
    torch.testing.assert_close(loss, model(*args).detach(), check_dtype=False)


def test_inputs_that_point_into_their_own_row_are_cut():
    torch.manual_seed(0)
    model, args = Along(), (torch.randn(8, 5, 4), torch.randint(0, 5, (8, 3)))
    pipe = autopipe.split(model, 2, args, costs="estimated", n_microbatches=2)
    assert not pipe.graph.variation.mixing.always
    torch.testing.assert_close(pipe.runtime().step(*args).loss, model(*args).detach())


class Counted(nn.Module):
    """A mean over labels, and a little of what rows make together."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

    def forward(self, ids, labels):
        y = self.head(self.body(ids))
        together = F.one_hot(ids, 8).double().mean((0, 1)) * y.softmax(-1).mean((0, 1))
        return F.cross_entropy(y.flatten(0, 1), labels.flatten()) + 0.01 * together.sum()


class Positives(nn.Module):
    """A sum over what is positive, divided by how much there is of it."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, positive):
        return (self.head(self.body(x).tanh()).square().mean(-1) * positive).sum() / positive.sum()


class Derived(nn.Module):
    """A loss that weighs itself by a derivative, where there is one to take."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        loss = self.head(self.body(x).tanh()).square().mean()
        try:
            weight = torch.autograd.grad(loss, self.head.weight, retain_graph=True)[0].norm().detach()
        except RuntimeError:
            weight = loss.new_zeros(())
        return loss * (1 + weight)


def labels(n_counted):
    return torch.where(torch.arange(5) < torch.tensor(n_counted)[:, None], 3, -100)


@pytest.mark.parametrize("n_counted", [[5] * 6, [5, 2, 4, 1, 3, 5], [5, 0, 0, 2, 0, 1]])
def test_a_little_mixing_is_told_beside_labels(n_counted):
    for seed in range(3):
        torch.manual_seed(seed)
        assert autopipe.capture(Counted().double(), (torch.randint(8, (6, 5)), labels(n_counted))).ops.tail


def test_rows_that_give_no_number_alone_hide_no_mixing():
    x, positive = torch.randn(6, 4).double(), torch.tensor([1.0, 0, 0, 1, 1, 0]).double()
    assert autopipe.capture(Positives().double(), (x, positive)).ops.tail
    ids = torch.randint(8, (6, 5))
    assert captured_mixing(Tokens(), ids, labels([5, 0, 0, 2, 0, 1])) == Mixing()  # which are counted


def test_rows_are_told_apart_where_derivatives_are_taken():
    assert (
        "for two rows that alone give"
        in captured_mixing(Derived().double(), torch.randn(6, 4).double()).always
    )


class Reducing(nn.Module):
    """Reduces a loss over labels, of those that a mask lets through, in a way of its own."""

    def __init__(self, reduce):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)
        self.reduce = reduce

    def forward(self, ids, labels, mask):
        logits = self.head(self.body(self.table(ids)).tanh())
        return self.reduce(logits.transpose(1, 2), labels, mask)


def each_loss(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none")


REDUCTIONS = {
    "sum over counted": lambda z, y, m: F.cross_entropy(z, y, reduction="sum") / (y != -100).sum(),
    "sum over a number": lambda z, y, m: F.cross_entropy(z, y, reduction="sum") / (y != -100).sum().item(),
    "sum over rows": lambda z, y, m: F.cross_entropy(z, y, reduction="sum") / len(y),
    "sum over tokens": lambda z, y, m: F.cross_entropy(z, y, reduction="sum") / y.numel(),
    "sum over a mask": lambda z, y, m: F.cross_entropy(z, y, reduction="sum") / m.sum(),
    "sum": lambda z, y, m: F.cross_entropy(z, y, reduction="sum"),
    "mean under a mask": lambda z, y, m: (each_loss(z, y) * m).sum() / m.sum(),
    "mean of rows": lambda z, y, m: ((each_loss(z, y) * m).sum(1) / m.sum(1)).mean(),
    "mean and a penalty": lambda z, y, m: F.cross_entropy(z, y) + (z.square().mean(1) * m).sum() / m.sum(),
    "largest": lambda z, y, m: each_loss(z, y).amax(),
}


@pytest.mark.parametrize("is_example_whole", [False, True])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_losses_that_a_model_reduces_itself_are_those_of_the_batch(name, is_example_whole, caplog):
    torch.manual_seed(0)
    model = Reducing(REDUCTIONS[name]).double()
    ids, mask = torch.randint(9, (6, 5)), torch.arange(5) < torch.tensor([5, 1, 2, 5, 3, 1])[:, None]
    labels = torch.where(torch.rand(6, 5) < 0.6, ids, -100)
    labels[:, 0] = ids[:, 0]
    example = (ids, ids, torch.ones_like(mask)) if is_example_whole else (ids, labels, mask)
    pipe = autopipe.split(model, 2, example, costs="estimated", n_microbatches=3)
    assert pipe.graph.variation.mixing.sums == (name == "sum")
    loss = model(ids, labels, mask)
    loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert pipe.runtime().step(ids, labels, mask).loss.item() == pytest.approx(loss.item(), rel=1e-10)
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-10, atol=1e-12)
    assert "cannot be weighed" not in caplog.text


class Labelled(nn.Module):
    """A loss over labels of rows that something is done to first, early or late."""

    def __init__(self, place, *, is_late):
        super().__init__()
        sizes = (4, 4, 4, 4) if is_late else (4,)
        self.a = nn.Sequential(*[nn.Linear(4, size) for size in sizes])
        self.b = nn.Linear(4, 4) if is_late else nn.Sequential(nn.Linear(4, 32), nn.Linear(32, 4))
        self.place = place

    def forward(self, x, kinds):
        return F.cross_entropy(self.b(self.place(self.a(x), kinds)), kinds[:, 0])


def of_longest(x, kinds):
    return x[:, : int((kinds > 0).sum(1).max())].sum(1, keepdim=True) + x


def largest_of_written(x, kinds):
    seen = torch.zeros(x.shape, dtype=x.dtype)
    seen[:] = x
    return x * (2 / seen.norm()).clamp(max=1.0)


GATHERED = {
    "order": lambda x, kinds: x + torch.arange(len(x), dtype=x.dtype)[:, None],
    "any": lambda x, kinds: x * (1 + (kinds == 3).any()),
    "how many kinds": lambda x, kinds: x * torch.unique(kinds).numel(),
    "longest": of_longest,
    "largest norm": lambda x, kinds: x * (2 / x.norm()).clamp(max=1.0),
    "largest norm of what is written": largest_of_written,
}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("name", GATHERED)
def test_rows_that_the_examples_first_two_hide_the_mixing_of(name, is_late):
    torch.manual_seed(0)
    model = Labelled(GATHERED[name], is_late=is_late).double()
    kinds = torch.tensor([[1, 0, 3], [2, 3, 0], [0, 1, 3], [1, 1, 0], [0, 0, 0], [2, 2, 2]])
    args = torch.randn(6, 4, dtype=torch.float64), torch.where(torch.arange(6)[:, None] < 2, kinds[:1], kinds)
    pipe = autopipe.split(model, 2, args, costs="estimated", n_microbatches=3)
    assert pipe.graph.variation.mixing.always
    runtime = pipe.runtime()
    args = args[0], kinds
    if not is_late:
        with pytest.raises(InputError, match="depend on one another"):
            runtime.step(*args)
        return
    loss = model(*args).item()
    assert runtime.step(*args).loss.item() == pytest.approx(loss, rel=1e-10)


class Positions(nn.Module):
    """Labels are places in the row; those behind its end are left out, by a number that the sizes make."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x, first, last):
        z = self.head(self.body(x).tanh()).squeeze(-1)
        n = z.size(1)
        one, other = (F.cross_entropy(z, y.clamp(0, n), ignore_index=n) for y in (first, last))
        return (one + other) / 2


def test_labels_are_counted_where_sizes_say_which_are_left_out():
    places = torch.tensor([1, 9, 2, 0, 3, 4]), torch.tensor([2, 9, 3, 1, 0, 2])
    found = captured_mixing(Positions().double(), torch.randn(6, 5, 4).double(), *places)
    assert found == Mixing()
    assert found.is_asked


@pytest.mark.parametrize("n_rows", [2, 6])
def test_a_mean_over_labels_is_asked_of_few_runs(monkeypatch, n_rows):
    runs = []
    monkeypatch.setattr(rows, "replay", lambda *given, look: runs.append(0) or replay(*given, look=look))
    captured_mixing(Tokens(), torch.randint(8, (n_rows, 5)), labels([5, 2, 4, 1, 3, 5][:n_rows]))
    assert len(runs) <= 10


class Angles(nn.Module):
    """Waves over the places in a row."""

    def forward(self, x, of_places):
        return torch.cos(of_places.to(x.dtype))[None, :, None]


class Largest(nn.Module):
    """Goes by what all rows hold."""

    def forward(self, x, of_places):
        return 1 + (x == 3).any().to(x.dtype) + 0 * of_places[None, :, None]


class Told(Largest):
    """Does so where a table that hangs on no row tells it to."""

    def forward(self, x, of_places):
        return super().forward(x, of_places) if of_places.any() else torch.ones(1, len(of_places), 1).double()


class Sometimes(Largest):
    """Does so by chance."""

    def forward(self, x, of_places):
        return super().forward(x, of_places) if torch.rand(()) < 0.5 else 1.0 + 0 * of_places[None, :, None]


class Beside(nn.Module):
    """Gives what another does beside something of each row."""

    def __init__(self, whole):
        super().__init__()
        self.whole = whole()

    def forward(self, x, of_places):
        return x.square(), self.whole(x, of_places)


class Within(nn.Module):
    """Hands on what it is given, a bias, beside something of each row."""

    def forward(self, x, bias):
        return x + 1, bias


class Turned(Tokens):
    """What stays whole gives is without rows, in part at least."""

    def __init__(self, whole):
        super().__init__()
        self.whole, self.next = whole, Within()

    def forward(self, ids, labels):
        x = self.embed(ids)
        turned = self.whole((ids[..., None] + 0 * x).detach(), torch.arange(ids.shape[1]))
        if isinstance(turned, tuple):
            turned = self.next(*turned)[1]
        return F.cross_entropy(self.head(x * turned).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("whole", [Angles, Largest, Told, Sometimes])
def test_what_a_module_makes_of_sizes_alone_gathers_nothing(monkeypatch, whole, is_beside):
    runs, ids = [], torch.randint(4, 8, (6, 5))
    ids[:2, 0] = 3
    monkeypatch.setattr(rows, "replay", lambda *given, look: runs.append(0) or replay(*given, look=look))
    model = Turned(Beside(whole) if is_beside else whole()).double()
    found = capture(model, (ids, labels([5, 2, 4, 1, 3, 5])), closed=["whole"]).variation.mixing
    if whole is Sometimes:
        assert len(runs) > 10  # nothing is proven of it
        return
    assert bool(found.always) == (whole is not Angles)
    assert len(runs) <= 11 or found.always  # one of them to see whether the module reads what it is given


class Two(Tokens):
    """A mean over labels and what is made of it by another."""

    def __init__(self, joined):
        super().__init__()
        self.joined = joined

    def forward(self, ids, labels):
        logits = self.head(self.embed(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return self.joined(loss, F.cross_entropy(logits[:, 0], ids[:, 0]))


@pytest.mark.parametrize(
    ("joined", "is_linear"),
    [
        (lambda a, b: (a + b) / 2, True),
        (lambda a, b: a + b * 0.1, True),
        (lambda a, b: a * b, False),
        (lambda a, b: 1 / (a + b), False),
        (lambda a, b: a + b.exp(), False),
    ],
    ids=["mean", "scaled", "product", "inverse", "exp"],
)
def test_sums_of_means_over_labels_gather_nothing_beside(monkeypatch, joined, is_linear):
    seen = []
    for home, name in (
        (rows, "mixed_in"),
        (rows, "of_other_signs"),
        (Results, "moved"),
        (Results, "neither"),
    ):
        monkeypatch.setattr(home, name, lambda *_, **__: "")  # which may find it first
    monkeypatch.setattr(row_questions, "unlike", lambda *given: seen.append([*unlike(*given)]) or seen[-1])
    captured_mixing(Two(joined), torch.randint(8, (6, 5)), labels([5, 2, 4, 1, 3, 5]))
    assert any(seen) != is_linear


class ByMode(nn.Module):
    """Stays whole, drops in training, and may then do with its rows what it does not in evaluation."""

    def __init__(self, mixes, drops):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        self.mixes, self.drops = mixes, drops

    def forward(self, x):
        x = self.inner(x).tanh()
        x = self.mixes(x) if self.training else x
        return self.outer(F.dropout(x, self.drops, self.training))


class OfModes(nn.Module):
    def __init__(self, *told):
        super().__init__()
        self.layers = nn.ModuleList(ByMode(*told) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class MethodOfModes(nn.Module):
    """Reads its rows in a method, which stays whole and goes by the mode as well."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def centered(self, x):
        return x - x.mean(0) if x.sum().isfinite().item() and self.training else x

    def forward(self, x):
        for layer in self.layers:
            x = self.centered(layer(x))
        return x


def test_a_method_that_mixes_rows_in_training_alone_is_found():
    found = captured_mixing(MethodOfModes(), torch.randn(4, 4))
    assert "centered" in found.training
    assert not found.always


@pytest.mark.parametrize("drops", [0.0, 0.1])
@pytest.mark.parametrize(
    "mixes",
    [lambda x: x - x.mean(0), lambda x: x + x.flip(0), lambda x: x + x[torch.rand(len(x)).argsort()]],
)
def test_a_module_that_mixes_rows_in_training_alone_is_found(mixes, drops):
    found = captured_mixing(OfModes(mixes, drops), torch.randn(4, 4))
    assert "layers." in found.training
    assert not found.always


@pytest.mark.parametrize("drops", [0.0, 0.1])
@pytest.mark.parametrize("mixes", [lambda x: x, lambda x: 2 * x, lambda x: x + torch.rand_like(x)])
def test_a_module_that_mixes_none_is_not_told_of_by_its_mode(mixes, drops):
    assert captured_mixing(OfModes(mixes, drops), torch.randn(4, 4)) == Mixing()


def by_counts(logits, labels):
    counts = torch.bincount(labels, minlength=3).to(logits.dtype).clamp(min=1)
    return len(labels) / (3 * counts)


def by_logits(logits, labels):
    return 1 / logits.detach().softmax(1).mean(0)


def by_whether_present(logits, labels):
    return torch.ones(3, dtype=logits.dtype).index_fill(0, labels, 2.0)


@pytest.mark.parametrize("alike", [None, 0, 1])
@pytest.mark.parametrize("weigh", [by_counts, by_logits, by_whether_present])
def test_classes_weighed_by_what_the_batch_holds(weigh, alike):
    """Two rows may come out as the mean of each alone even so, as counted classes do."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x, labels):
            logits = self.b(self.a(x).tanh())
            return F.cross_entropy(logits, labels, weight=weigh(logits, labels))

    torch.manual_seed(0)
    model = Model().double()
    x, labels = torch.randn(8, 4, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 0, 1, 1, 2])
    example = x, labels if alike is None else torch.full_like(labels, alike)
    runtime = autopipe.split(model, 2, example, costs="estimated", n_microbatches=4).runtime()
    assert runtime.step(x, labels).loss.item() == pytest.approx(model(x, labels).item(), rel=1e-12)
