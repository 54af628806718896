"""Rows that depend on one another in gradients alone, where code holds some of these back."""

import copy

import pytest
import torch
from splitting import split_by_layers
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError


class Held(nn.Module):
    """Layers with a ``middle`` and a loss, either of which may hold gradients back."""

    def __init__(self, middle=None, loss=F.mse_loss):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.middle, self.loss = middle or nn.Identity(), loss

    def forward(self, x, y):
        return self.loss(self.c(self.middle(self.b(self.a(x).tanh()))), y)


class HeldWithRows(Held):
    """Gives its rows beside the loss: both are made of the same values."""

    def forward(self, x, y):
        made = self.c(self.middle(self.b(self.a(x).tanh())))
        return {"loss": self.loss(made, y), "made": made.tanh()}


KINDS = pytest.mark.parametrize("kind", [Held, HeldWithRows])


def over_itself(y, target):
    loss = F.mse_loss(y, target)
    return loss / loss.detach()


def by_numbers(y, target):
    losses = [F.mse_loss(y, target), y.abs().mean()]
    return sum(loss / loss.item() for loss in losses)


def as_large(y, target):
    loss, other = F.mse_loss(y, target), y.abs().mean()
    return loss + other * (loss / other).detach()


class Weighed(nn.Module):
    """Code kept whole, whose number is a mean of rows' while its gradients are none."""

    def forward(self, y, target):
        loss, other = F.mse_loss(y, target), y.abs().mean()
        with torch.no_grad():
            weight = loss / other
        return loss + weight * (other - other.detach())


class WeighedAside(nn.Module):
    """The same, by a method that torch runs without gradients."""

    @staticmethod
    @torch.no_grad()
    def held(loss, other):
        return loss / other, other * 1

    def forward(self, y, target):
        loss, other = F.mse_loss(y, target), y.abs().mean()
        weight, held = self.held(loss, other)
        return loss + weight * (other - held)


class Apart(nn.Module):
    """Holds back gradients row by row, as comparison of two views does."""

    def forward(self, y, target):
        return -F.cosine_similarity(y, target + y.detach()).mean()


def steps_as_the_model(make, *, sizes=(6, 6, 5)):
    torch.manual_seed(0)
    plain = make().double()
    torch.manual_seed(0)
    model = make().double()
    batches = [[torch.randn(n, 4, dtype=torch.float64) for _ in range(2)] for n in sizes]
    pipe = split_by_layers(model, 2, tuple(batches[0]), n_microbatches=3)
    runtime = pipe.runtime()
    for x, y in batches:
        runtime.step(x, y)
        given = plain(x, y)
        (given["loss"] if isinstance(given, dict) else given).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        plain.zero_grad()
        model.zero_grad()
    return pipe


@KINDS
@pytest.mark.parametrize("loss", [over_itself, by_numbers, as_large, Weighed(), WeighedAside()])
def test_a_loss_by_what_it_holds_back_of_all_rows_has_the_whole_batch(loss, kind):
    assert steps_as_the_model(lambda: kind(loss=loss)).graph.variation.tail.ops


@KINDS
def test_gradients_held_back_row_by_row_are_no_mixing(kind):
    assert not steps_as_the_model(lambda: kind(loss=Apart())).graph.variation.mixing.always


class Centred(nn.Module):
    """Gives what it is given; its gradients go by the mean of all rows."""

    def forward(self, h):
        return h + h * (h.mean(0) - h.mean(0).detach())


class FewAlone(nn.Module):
    """Learns of few rows alone."""

    def __init__(self, hold):
        super().__init__()
        self.hold = hold

    def forward(self, h):
        return self.hold(h)


def beyond(h):
    return h.detach() if len(h) > 16 else h


def without_grad(h):
    with torch.set_grad_enabled(h.shape[0] < 12):
        return h * 2


def scaled(h):
    return h + (h - h.detach()) / len(h)


def cut(h):
    return torch.cat([h[:20], h[20:].detach()])


def steps_on_the_whole_batch(make, mixed_rows="tail", n_microbatches=2):
    """Of steps on batches of 8 rows, and many, the greatest part by which loss and gradients are off."""
    torch.manual_seed(0)
    model, given = make().double(), torch.randn(8, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    pipe = split_by_layers(model, 2, (given, given), n_microbatches=n_microbatches)
    runtime, off = pipe.runtime(mixed_rows=mixed_rows), []
    for n in (8, 24, 44, 30):
        x, y = (torch.randn(n, 4, dtype=torch.float64) for _ in range(2))
        found = runtime.step(x, y).loss.detach().as_subclass(torch.Tensor)
        made = plain(x, y)
        loss = made["loss"] if isinstance(made, dict) else made
        loss.backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        off += [abs(found - loss.detach()) / loss.detach()]
        off += [(ours.grad - theirs.grad).norm() / theirs.grad.norm() for ours, theirs in pairs]
        model.zero_grad()
        plain.zero_grad()
    return float(max(off))


@KINDS
@pytest.mark.parametrize("n_microbatches", [2, 4])
@pytest.mark.parametrize("middle", [FewAlone(cut), Centred()])
def test_late_layers_whose_gradients_alone_hang_on_all_rows_have_the_whole_batch(
    middle, n_microbatches, kind
):
    assert steps_on_the_whole_batch(lambda: kind(middle), n_microbatches=n_microbatches) < 1e-10


@pytest.mark.parametrize("middle", [FewAlone(cut), Centred()])
def test_microbatches_of_late_layers_whose_gradients_hang_on_all_rows_give_others(middle):
    assert steps_on_the_whole_batch(lambda: Held(middle), "allow") > 1e-3


@KINDS
@pytest.mark.parametrize("hold", [beyond, without_grad, scaled])
def test_layers_that_hold_back_gradients_from_so_many_rows_on_are_refused(hold, kind):
    x = torch.randn(8, 4, dtype=torch.float64)
    model = kind(FewAlone(hold)).double()
    pipe = autopipe.split(model, 2, (x, x), costs="estimated", n_microbatches=2)
    with pytest.raises(InputError, match=r"hang on how many (rows )?there are"):
        pipe.runtime().step(x, x)


class Exchanged(nn.Module):
    """Gives what it is given; each row learns of the one beside it, so that together they learn the same."""

    def forward(self, h):
        other = h.flip(0)
        return h.detach() + other - other.detach()


@KINDS
def test_layers_whose_gradients_alone_mix_rows_are_refused(kind):
    x = torch.randn(8, 4, dtype=torch.float64)
    pipe = split_by_layers(kind(Exchanged()).double(), 2, (x, x), n_microbatches=2)
    with pytest.raises(InputError, match=r"gradients of .* are not those of each row"):
        pipe.runtime().step(x, x)


class HeldWithNumbers(Held):
    """Gives a mean over all rows, and what these come to."""

    def forward(self, x, y):
        made = self.c(self.middle(self.b(self.a(x).tanh())))
        return {"loss": self.loss(made, y), "much": made.square().sum()}


@pytest.mark.parametrize("kind", [HeldWithRows, HeldWithNumbers])
def test_gradients_of_rows_alone_and_many_are_made_once_where_outputs_are_means_or_rows(kind, monkeypatch):
    made = []
    grad = torch.autograd.grad

    def noting(outputs, *told, **how):
        made.append((len(outputs), n_rows[-1]))
        return grad(outputs, *told, **how)

    n_rows = []
    model = kind(loss=Apart()).double()
    model.a.register_forward_pre_hook(lambda module, given: n_rows.append(len(given[0])))
    monkeypatch.setattr(torch.autograd, "grad", noting)
    x = torch.randn(2, 4, dtype=torch.float64)
    found = autopipe.capture(model, (x, x)).variation.mixing
    assert not found.always
    alone = 2  # one of row a, one of row b
    assert [n for n, rows in made if rows == 2][-alone:] == [2, 2]
    assert len([n for n, rows in made if rows == 2]) == alone + (4 if kind is HeldWithRows else 2)
    of_many = [n for n, rows in made if rows == 8]
    assert of_many == ([2] if kind is HeldWithRows else [2, 1, 1])


class Open(Held):
    """Holds gradients back in its own forward, by what it is given or how many rows that has."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x, y):
        return self.loss(self.c(self.run(self, x)), y)


class OpenWithRows(Open):
    """Gives its rows beside the loss."""

    def forward(self, x, y):
        made = self.c(self.run(self, x))
        return {"loss": self.loss(made, y), "made": made.tanh()}


def few_alone(model, x):
    h = model.b(model.a(x).tanh())
    return h.detach() if len(x) > 16 else h


def few_with_grad(model, x):
    with torch.set_grad_enabled(len(x) < 16):
        return model.b(model.a(x).tanh())


def large_alone(model, x):
    h = model.b(model.a(x).tanh())
    return h.detach() if (x > 1.5).any() else h


def large_rows(model, x):
    h = model.b(model.a(x).tanh())
    is_large = (x > 1.5).any(1, keepdim=True)
    return torch.where(is_large, h.detach(), h) if is_large.any() else h


def unlike(n):
    """Rows of which the last few are large."""
    x = torch.rand(n, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    x[-2:] += 1
    return x


@pytest.mark.parametrize("kind", [Open, OpenWithRows])
@pytest.mark.parametrize("asked", [few_alone, few_with_grad, large_alone])
def test_open_code_that_holds_gradients_back_by_a_question_about_all_rows_is_refused(asked, kind):
    x, more = unlike(8) / 2, unlike(24)
    pipe = split_by_layers(kind(asked).double(), 2, (x, x), n_microbatches=3)
    with pytest.raises(InputError, match="which changes gradients"):
        pipe.runtime().step(more, more)


def test_open_code_that_holds_back_gradients_of_rows_that_it_asks_for_is_no_mixing():
    x, more = unlike(8) / 2, unlike(24)
    torch.manual_seed(0)
    plain = Open(large_rows).double()
    model = copy.deepcopy(plain)
    pipe = split_by_layers(model, 2, (x, x), n_microbatches=3)
    pipe.runtime().step(more, more)
    plain(more, more).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Rounded(nn.Module):
    """Rounds as numbers of eight bits would be, within what it has seen in training; nothing, at first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("least", torch.tensor(torch.inf))
        self.register_buffer("most", torch.tensor(-torch.inf))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.least.copy_(torch.minimum(self.least, x.min()))
                self.most.copy_(torch.maximum(self.most, x.max()))
        step = (self.most - self.least).clamp(min=1e-8) / 255
        rounded = ((x - self.least) / step).round().clamp(0, 255) * step + self.least
        return x + (rounded - x).detach()


def test_what_gives_no_numbers_before_it_has_seen_any_mixes_rows_in_training_alone(caplog):
    torch.manual_seed(0)
    model = nn.Sequential(Rounded(), nn.Linear(6, 16), nn.ReLU(), Rounded(), nn.Linear(16, 2)).double()
    x, target = torch.randn(8, 6).double(), torch.randn(8, 2).double()
    pipe = split_by_layers(model, 2, (x,), n_microbatches=2)
    runtime = pipe.runtime(loss_fn=F.mse_loss)
    runtime.step(x, target=target)
    assert "in training: 0 at" in caplog.text
    caplog.clear()
    model.eval()
    found = runtime.step(x, target=target).loss.detach().as_subclass(torch.Tensor)
    torch.testing.assert_close(found, F.mse_loss(model(x), target).detach())
    assert not caplog.text
