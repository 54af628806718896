"""Models whose rows depend on one another are found out; those whose rows do not are not."""

import pytest
import torch
from rows_models import Asking, Tokens, captured_mixing, found, labels
from runtime_models import Adversary, adversary_batch
from splitting import split_by_layers
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError
from autopipe.graph import batch_dim
from autopipe.tracing import capture
from autopipe.tracing.rows.other_answers import two_rows
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
    pipe = split_by_layers(model, 2, (x, kind), n_microbatches=4)
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
    pipe = split_by_layers(TimeFirst(), 2, (torch.randn(5, 6, 4),), n_microbatches=2)
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


@pytest.mark.parametrize(
    ("make_model", "n_inputs", "where"),
    [(Contrast, 2, " @ "), (Views, 1, "cross_entropy"), (Redundant, 1, "sum"), (TimeFirst, 1, "body")],
)
def test_a_step_that_would_be_wrong_is_refused(make_model, n_inputs, where):
    torch.manual_seed(0)
    shape = (6, 4) if make_model is not TimeFirst else (6, 3, 4)
    args = tuple(torch.randn(shape) for _ in range(n_inputs))
    pipe = split_by_layers(make_model(), 2, args, n_microbatches=3)
    refuses = "tail" if make_model is TimeFirst else "refuse"
    runtime = pipe.runtime(loss_fn=lambda y, _: y.square().mean() if y.ndim else y, mixed_rows=refuses)
    with pytest.raises(autopipe.InputError, match="depend on one another") as refusal:
        runtime.step(*args)
    assert where in str(refusal.value)
    assert "n_microbatches=1" in str(refusal.value)
    assert torch.isfinite(runtime.step(*args, n_microbatches=1).loss)


class Mixed(nn.Module):
    """Blends every row and its label with those of another row, which an input names."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, labels, other):
        told = self.b(self.a(x + x[other]).relu())
        return F.cross_entropy(told, labels) + F.cross_entropy(told, labels[other])


def test_rows_are_looked_at_before_labels_are_counted():
    args = torch.randn(6, 4), torch.tensor([0, 1, 2, 2, 1, 0]), torch.arange(5, -1, -1)
    runtime = split_by_layers(Mixed(), 2, args, n_microbatches=2).runtime()
    with pytest.raises(autopipe.InputError, match="depend on one another"):
        runtime.step(*args)
    assert torch.isfinite(runtime.step(*args, n_microbatches=1).loss)


def test_mixed_rows_can_be_allowed(caplog):
    args = torch.randn(6, 4), torch.randn(6, 4)
    pipe = split_by_layers(Contrast(), 2, args, n_microbatches=3)
    runtime = pipe.runtime(mixed_rows="allow")
    assert torch.isfinite(runtime.step(*args).loss)
    assert "depend on one another" in caplog.text


def test_noise_and_unlike_weights_are_no_mixing(caplog):
    x, ids = torch.randn(6, 4), torch.randint(8, (6, 5))
    assert captured_mixing(Variational(), x) == Mixing()
    labels = torch.where(torch.arange(5) < torch.randint(2, 6, (6, 1)), ids, -100)
    assert captured_mixing(Tokens(), ids, labels) == Mixing()
    split_by_layers(Variational(), 2, (x,), n_microbatches=3).verify()
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
    pipe = split_by_layers(model, 2, (torch.randn(6, 4),), n_microbatches=3)
    assert pipe.graph.variation.mixing.always
    assert pipe.graph.ops.tail


def test_a_sum_over_noise_is_added_up_over_microbatches():
    torch.manual_seed(0)
    x = torch.randn(600, 4)
    pipe = split_by_layers(Noised(lambda e, _: e.sum()), 2, (x[:6],), n_microbatches=3)
    ratio = pipe.runtime().step(x).loss / pipe.model(x)
    assert 0.8 < ratio < 1.25


@pytest.mark.parametrize("make_model", [Lasting, Summed, Penalised])
def test_losses_over_what_is_no_label_are_those_of_the_batch(make_model):
    torch.manual_seed(0)
    model = make_model().double()
    x, lengths = torch.randn(6, 5, 4, dtype=torch.float64), torch.tensor([5, 1, 2, 5, 3, 1])
    pipe = split_by_layers(model, 2, (x, lengths), n_microbatches=3)
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
    pipe = split_by_layers(model, 2, (x,), n_microbatches=3)
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
    pipe = split_by_layers(Placed(PLACES[place], is_late=False, p=p), 2, (x,), n_microbatches=3)
    with pytest.raises(InputError, match="hang on their places or on how many there are"):
        pipe.runtime(loss_fn=lambda y, _: y.square().mean()).step(x)


class Placing(nn.Module):
    """Gives each row the places along it, scaled by what they are over all rows, as ``CoordConv`` does."""

    def __init__(self, is_of_rows):
        super().__init__()
        self.a, self.b, self.c = nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3)
        self.is_of_rows = is_of_rows

    def forward(self, x):
        n = len(x) if self.is_of_rows else 1
        places = torch.linspace(-1, 1, x.shape[2]).repeat(n, 1, 1)
        scaled = (places / places.std()).expand(len(x), -1, -1)
        return self.c(self.b(self.a(torch.cat([x, scaled], 1))))


@pytest.mark.parametrize("is_of_rows", [True, False])
def test_a_spread_over_the_places_of_all_rows_hangs_on_how_many_there_are(is_of_rows):
    """The spread of a sample is less the larger it is, which outputs show by less than a thousandth."""
    said = captured_mixing(Placing(is_of_rows), torch.randn(4, 3, 32)).always
    assert ("std()" in said) is is_of_rows
    assert bool(said) is is_of_rows


class Narrowed(nn.Module):
    """Drops its last axis where that is of one place, as it is at the example's length alone."""

    def __init__(self):
        super().__init__()
        self.a, self.norm = nn.Conv1d(3, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.b = nn.Conv1d(8, 4, 16)

    def forward(self, x):
        return self.b(self.norm(self.a(x))).squeeze(-1)


def test_rows_are_told_where_an_output_has_other_axes_at_other_lengths():
    found = autopipe.capture(Narrowed(), (torch.randn(4, 3, 16),)).variation
    assert [str(n) for n in [*found.shapes.values()][-1][0]] == ["batch", "4"]
    assert "norm" in found.mixing.training


@pytest.mark.parametrize("place", PLACES)
def test_rows_that_hang_on_their_places_late_run_on_the_whole_batch(place):
    torch.manual_seed(0)
    x = torch.randn(6, 4, dtype=torch.float64)
    model = Placed(PLACES[place], is_late=True).double()
    pipe = split_by_layers(model, 2, (x,), n_microbatches=3)
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
    pipe = split_by_layers(model, 2, (x,), n_microbatches=2)
    for given in (x, x + 1):
        loss = pipe.runtime(batch_dims={"x": 1}).step(given).loss
        torch.testing.assert_close(loss.as_subclass(torch.Tensor), model(given))


def test_on_an_accelerator_no_row_points_out_of_a_table():
    x, ids = torch.randn(6, 4), torch.randint(2, 9, (6, 3))
    dim = batch_dim(capture(Asking(lambda _, ids: bool((ids > 0).all())), (x, ids)).ops.dims)
    least = {
        kind: min(
            int(batch_of("ab")["ids"].min())
            for batch_of in two_rows({"x": x, "ids": ids}, dim, torch.device(kind))
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
    pipe = split_by_layers(model, 2, (x, torch.tensor(example)), n_microbatches=2)
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
    pipe = split_by_layers(Tallies(), 2, (torch.randn(8, 4),), n_microbatches=2)
    (note,) = pipe.graph.notes
    assert "calls, average, a.weight_u and" in note
    assert "rows" not in pipe.graph.variation.mixing.by_call
    caplog.clear()
    runtime = pipe.runtime()
    for _ in range(2):
        runtime.step(torch.randn(8, 4))
    assert caplog.text.count("calls, average, a.weight_u") == 1


class Balanced(nn.Module):
    """Moves a bias towards what fewer rows are of, by one step a call; of the example as many are of each."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.register_buffer("bias", torch.zeros(2))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                counts = F.one_hot(x.argmax(1), 2).sum(0).float()
                self.bias += (counts.mean() - counts).sign()
        return self.a(x).square().mean()


def test_a_step_by_what_few_rows_are_of_is_told_where_the_example_has_as_many_of_each():
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 1.0], [1.0, 2.0], [3.0, 0.0], [1.0, 3.0]])
    assert capture(Balanced(), (x,)).variation.mixing.by_call == ("bias",)


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
    pipe = split_by_layers(model, 2, args, n_microbatches=2)
    assert pipe.graph.variation.mixing.always
    with pytest.raises(InputError, match=r"depend on one another .*[^ ]\), so .* pass n_microbatches=1"):
        pipe.runtime().step(*args)
    loss = pipe.runtime(n_microbatches=1).step(*args).loss
    torch.testing.assert_close(loss, model(*args).detach(), check_dtype=False)


def test_inputs_that_point_into_their_own_row_are_cut():
    torch.manual_seed(0)
    model, args = Along(), (torch.randn(8, 5, 4), torch.randint(0, 5, (8, 3)))
    pipe = split_by_layers(model, 2, args, n_microbatches=2)
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
