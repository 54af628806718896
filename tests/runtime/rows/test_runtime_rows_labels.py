"""Losses that count labels, weigh them or sum up means are those of the batch."""

import copy

import pytest
import torch
from rows_models import Tokens, captured_mixing, labels
from splitting import split_by_layers
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError
from autopipe.tracing import capture
from autopipe.tracing.rows import analysis, row_questions
from autopipe.tracing.rows import mixing as rows
from autopipe.tracing.rows.results import Results
from autopipe.tracing.rows.varied_data import unlike
from autopipe.tracing.sizes.rerun import replay
from autopipe.tracing.sizes.variation import Mixing, Tail


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
    pipe = split_by_layers(model, 2, example, n_microbatches=3)
    assert pipe.graph.variation.mixing.sums == (name == "sum")
    loss = model(ids, labels, mask)
    loss.backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert pipe.runtime().step(ids, labels, mask).loss.item() == pytest.approx(loss.item(), rel=1e-10)
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-10, atol=1e-12)
    assert "cannot be weighed" not in caplog.text


class Dropped(nn.Module):
    """A mean over labels, in training behind noise."""

    def __init__(self, between):
        super().__init__()
        self.table, self.between, self.head = nn.Embedding(9, 8), between, nn.Linear(8, 9)

    def forward(self, ids, labels):
        x = self.table(ids)
        x = F.dropout(x, 0.3) if self.training else x
        return F.cross_entropy(self.head(self.between(x)).transpose(1, 2), labels)


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize("counts", [(2, 5), (5, 5), (0, 5), (5, 0)])
def test_noise_and_rows_of_unlike_many_labels_are_no_mixing(counts):
    ids = torch.randint(9, (6, 5))
    labels = torch.where(torch.arange(5) < torch.tensor([*counts, 3, 4, 2, 3])[:, None], ids, -100)
    assert captured_mixing(Dropped(nn.Identity()), ids, labels) == Mixing()
    assert captured_mixing(Dropped(Centred()), ids, labels).always


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
    pipe = split_by_layers(model, 2, args, n_microbatches=3)
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
    monkeypatch.setattr(rows, "replay", lambda *given, **how: runs.append(0) or replay(*given, **how))
    captured_mixing(Tokens(), torch.randint(8, (n_rows, 5)), labels([5, 2, 4, 1, 3, 5][:n_rows]))
    assert len(runs) <= 11  # one of them for how much two rows make


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
    monkeypatch.setattr(rows, "replay", lambda *given, **how: runs.append(0) or replay(*given, **how))
    model = Turned(Beside(whole) if is_beside else whole()).double()
    found = capture(model, (ids, labels([5, 2, 4, 1, 3, 5])), closed=["whole"]).variation.mixing
    if whole is Sometimes:
        assert len(runs) > 16  # nothing is proven of it
        return
    assert bool(found.always) == (whole is not Angles)
    # one sees whether the module reads what it is given, two ask one row
    assert len(runs) <= 18 or found.always


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
    runtime = split_by_layers(model, 2, example, n_microbatches=4).runtime()
    assert runtime.step(x, labels).loss.item() == pytest.approx(model(x, labels).item(), rel=1e-12)


class Lacking(nn.Module):
    """Told values of which some are missing, with a loss of its own."""

    def __init__(self, loss, is_whole):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), nn.Linear(4, 3)
        self.loss = nn.Module() if is_whole else loss
        if is_whole:
            self.loss.forward = loss

    def forward(self, x, told):
        return self.loss(self.head(self.body(x)), told)


LOSSES = {
    "nanmean": lambda y, told: (y - told).detach().nanmean() * y.mean(),
    "those there are": lambda y, told: (y - told)[~told.isnan()].abs().mean(),
    "by how many there are": lambda y, told: (
        ((y - told.nan_to_num()) * told.isfinite()).square().sum() / told.isfinite().sum().clamp(min=1)
    ),
    "rows that have one": lambda y, told: (y.sum(1) - told[:, 0])[~torch.isnan(told[:, 0])].square().mean(),
}


@pytest.mark.parametrize("is_whole", [False, True], ids=["", "whole"])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_what_batches_lack_and_the_example_does_not_is_left_out_of_the_whole_batch(loss, is_whole):
    torch.manual_seed(0)
    model = Lacking(loss, is_whole).double()
    x, told = torch.randn(6, 4).double(), torch.randn(6, 3).double()
    runtime = split_by_layers(model, 2, (x, told), n_microbatches=3).runtime()
    told = torch.where(torch.rand(6, 3) < 0.4, torch.nan, told)
    told[0, 0], told[2:4, 0] = 0.5, torch.nan
    wanted = model(x, told)
    grads = torch.autograd.grad(wanted, [*model.parameters()])
    torch.testing.assert_close(runtime.step(x, told).loss.as_subclass(torch.Tensor), wanted)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


def test_what_each_row_lacks_is_no_mixing():
    model = Lacking(lambda y, told: (y - told.nan_to_num()).square().nanmean(1).mean(), False).double()
    assert not captured_mixing(model, torch.randn(6, 4).double(), torch.randn(6, 3).double()).always


class Masking(nn.Module):
    """A masked language model that draws itself which words count, in a way of its own."""

    def __init__(self, hide, *, takes_derivatives=False):
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 9)
        self.hide, self.takes_derivatives = hide, takes_derivatives

    def forward(self, ids):
        seen, labels = self.hide(ids, torch.rand(ids.shape) < 0.4)
        h = self.body(self.table(seen)).tanh()
        if self.takes_derivatives:
            h = h + torch.autograd.grad(h.square().sum(), h, create_graph=True)[0]
        z = self.head(h)
        return {"loss": F.cross_entropy(z.flatten(0, 1), labels.flatten()), "z": z, "labels": labels}


def hide_in_place(ids, hidden):
    labels = ids.clone()
    labels[~hidden] = -100
    return ids.masked_fill(hidden, 0), labels


HIDING = {
    "in place": hide_in_place,
    "where": lambda ids, hidden: (torch.where(hidden, 0, ids), torch.where(hidden, ids, -100)),
    "masked_fill": lambda ids, hidden: (ids.masked_fill(hidden, 0), ids.masked_fill(~hidden, -100)),
}


@pytest.mark.parametrize("takes_derivatives", [False, True])
@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("n_stages", [1, 2])
def test_labels_that_a_forward_draws_are_averaged_over_as_they_were_drawn(
    n_stages, hiding, takes_derivatives, caplog
):
    torch.manual_seed(0)
    model = Masking(HIDING[hiding], takes_derivatives=takes_derivatives).double()
    twin, ids = copy.deepcopy(model), torch.randint(1, 9, (8, 6))
    pipe = split_by_layers(model, n_stages, (ids,), n_microbatches=4)
    done = pipe.runtime().step(ids, return_outputs=True)
    labels = done.outputs["labels"]
    assert len({int((part != -100).sum()) for part in labels.chunk(4)}) > 1
    twin.hide = lambda ids, hidden: (torch.where(labels == -100, ids, 0), labels)
    loss = twin(ids)["loss"]
    loss.backward()
    assert float(done.loss) == pytest.approx(loss.item(), abs=1e-12)
    assert float(done.outputs["loss"]) == pytest.approx(loss.item(), abs=1e-12)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    assert "cannot be weighed" not in caplog.text


def test_labels_that_are_drawn_where_nothing_may_run_on_the_whole_batch_are_told_of(caplog, monkeypatch):
    monkeypatch.setattr(analysis, "find_tail", lambda *_, **__: Tail(obstacle="nothing may"))
    model, ids = Masking(HIDING["where"]).double(), torch.randint(1, 9, (8, 6))
    pipe = split_by_layers(model, 2, (ids,), n_microbatches=4)
    pipe.runtime(mixed_rows="allow").step(ids)
    assert "drawn inside the model" in caplog.text


WEIGHTS_BY_LABEL = {
    "above": lambda y: (y > 0).double() + 0.1,
    "up to": lambda y: (y <= 3).double() + 0.1,
    "the first alone": lambda y: torch.tensor([9, 1, 1, 1, 1.0], dtype=torch.float64)[y],
    "odd ones": lambda y: (y % 2).double() + 0.1,
    "limited": lambda y: y.clamp(max=1).double() + 0.1,
}


@pytest.mark.parametrize("kind", WEIGHTS_BY_LABEL)
@pytest.mark.parametrize("first", [[4, 4, 3], [0, 0, 2]])
def test_a_mean_by_weights_of_labels_is_found_where_the_first_rows_weigh_alike(kind, first):
    class Weighing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 5)

        def forward(self, x, y):
            weights = WEIGHTS_BY_LABEL[kind](y)
            each = F.cross_entropy(self.last(self.first(x).relu()), y, reduction="none")
            return (each * weights).sum() / weights.sum()

    torch.manual_seed(0)
    y = torch.tensor([*first, 0, 3, 4, 2, 1])
    captured = autopipe.capture(Weighing().double(), (torch.randn(8, 4, dtype=torch.float64), y))
    assert captured.variation.mixing.always
