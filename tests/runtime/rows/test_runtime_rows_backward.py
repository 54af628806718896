"""Rows that each forward takes for themselves, and a backward for all of them together, are found out."""

import copy
import functools

import pytest
import torch
from splitting import split_by_layers
from torch import nn
from torch.nn import functional as F

import autopipe


class Normed(torch.autograd.Function):
    """Leaves values alone, and gives gradients the length of one."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / grad.norm()


class Averaged(torch.autograd.Function):
    """Leaves values alone, and divides gradients by how many rows there are."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad / len(grad)


class Halved(torch.autograd.Function):
    """Leaves values alone, and turns gradients of the second half of rows round."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        first, second = grad.tensor_split(2)
        return torch.cat((first, -second))


class Doubled(torch.autograd.Function):
    """Gives values, and their sums whose gradients it divides by how many rows there are."""

    @staticmethod
    def forward(ctx, x):
        return x.clone(), x.sum(-1)

    @staticmethod
    def backward(ctx, grad, of_sums):
        return grad + (of_sums / len(of_sums)).unsqueeze(-1)


class Turned(torch.autograd.Function):
    """Leaves values alone, and turns gradients round."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Within(nn.Module):
    """A layer that calls a function with a backward of its own."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function.apply(self.linear(x))


class Summing(nn.Module):
    """A layer that adds both results of a function."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        values, sums = self.function.apply(self.linear(x))
        return values + sums.unsqueeze(-1)


class Dropping(nn.Module):
    """A layer with a function of its own, or hooked on, that leaves out at random."""

    def __init__(self, function):
        super().__init__()
        self.linear, self.dropout, self.function = nn.Linear(6, 6), nn.Dropout(0.3), function
        if function is None:
            self.linear.register_full_backward_pre_hook(lambda _, given: (given[0] * 0.5,))

    def forward(self, x):
        x = self.dropout(torch.tanh(self.linear(x)))
        return x if self.function is None else self.function.apply(x)


@pytest.mark.parametrize(("function", "is_mixed"), [(None, False), (Turned, False), (Averaged, True)])
def test_what_is_left_out_beside_more_rows_is_no_mixing(function, is_mixed):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Dropping(function), nn.Linear(6, 6)).double()
    captured = autopipe.capture(model, (torch.randn(8, 6, dtype=torch.float64),))
    variation = captured.variation
    assert bool(variation.mixing.backward or variation.tail.ops) is is_mixed


class Drawing(nn.Module):
    """A layer that divides gradients by how many rows there are, beside what it draws."""

    def __init__(self, draws):
        super().__init__()
        self.linear, self.draws = nn.Linear(6, 6), draws

    def forward(self, x):
        return Averaged.apply(self.linear(x)) * self.draws(x)


@pytest.mark.parametrize(
    "draws",
    [
        lambda x: torch.bernoulli(torch.ones_like(x)),
        lambda x: torch.rand_like(x) > 0.7,
        lambda x: 1 + torch.randint(0, 2, (len(x), 1)),
    ],
)
def test_noise_hides_no_mixing_in_a_backward(draws):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Drawing(draws), nn.Linear(6, 6)).double()
    variation = autopipe.capture(model, (torch.randn(8, 6, dtype=torch.float64),)).variation
    assert variation.mixing.backward or variation.tail.ops


class Hooking(nn.Module):
    """A layer that hooks on the gradient of what it computes, in its forward or from outside."""

    def __init__(self, hook, *, is_inside):
        super().__init__()
        self.linear, self.hook, self.is_inside = nn.Linear(4, 4), hook, is_inside
        if not is_inside:
            self.linear.register_full_backward_hook(lambda _, given, __: (hook(given[0]),))

    def forward(self, x):
        x = self.linear(x)
        if self.is_inside and x.requires_grad:
            x.register_hook(self.hook)
        return x


class Packing(nn.Module):
    """A layer that saves for its backward less than it computed with."""

    def __init__(self, pack):
        super().__init__()
        self.linear, self.pack = nn.Linear(4, 4), pack

    def forward(self, x):
        x = self.linear(x)
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda packed: packed):
            return torch.tanh(x)


def hook_on(x, hook):
    if x.requires_grad:
        x.register_hook(hook)


def hook_within(x, hook):
    def within(x):
        if x.requires_grad:
            x.register_hook(hook)

    within(x)


def hook_ahead(x, hook):
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(lambda given: (hook(given[0]),))


class Hooker:
    """Sets a hook, as an object does of which a layer has an attribute."""

    def __init__(self, hook):
        self.hook = hook

    def attach(self, x):
        if x.requires_grad:
            x.register_hook(self.hook)


class HookedByAnObject(nn.Module):
    """A layer that stays whole as it reads data, and has an object set its hook."""

    def __init__(self, hook):
        super().__init__()
        self.linear, self.hooker = nn.Linear(4, 4), Hooker(hook)

    def forward(self, x):
        x = self.linear(x)
        assert len(x.tolist()) == len(x)
        self.hooker.attach(x)
        return x * 1


class Passing(nn.Module):
    """A layer that stays whole as it reads data, and has a function or a method of its own set its hook."""

    def __init__(self, sets, hook):
        super().__init__()
        self.linear, self.sets, self.hook = nn.Linear(4, 4), sets, hook

    def of_its_own(self, x):
        if x.requires_grad:
            x.register_hook(self.hook)

    def forward(self, x):
        x = self.linear(x)
        assert len(x.tolist()) == len(x)
        if self.sets == "method":
            self.of_its_own(x)
        elif self.sets == "function":
            hook_on(x, self.hook)
        elif self.sets == "ahead":
            hook_ahead(x, self.hook)
        else:
            hook_within(x, self.hook)
        return x * 1


class HookingItself(nn.Module):
    """Hooks on a gradient in its own forward, and computes its loss, which may tell rows from one another."""

    def __init__(self, hook, *, is_contrastive):
        super().__init__()
        self.words, self.hook, self.is_contrastive = Words(), hook, is_contrastive

    def forward(self, ids):
        x = self.words.table(ids).mean(1)
        if x.requires_grad:
            x.register_hook(self.hook)
        found = self.words.head(self.words.layer(x).relu())
        if self.is_contrastive:
            return F.cross_entropy(found @ found.roll(1, 0).T, torch.arange(len(found)))
        return F.cross_entropy(found, ids[:, 0] % 3)


def normed(gradient):
    return gradient / gradient.norm()


def averaged(gradient):
    return gradient / len(gradient)


def limited(gradient):
    return gradient.clamp(-1e-3, 1e-3) * 2


def rounded(tensor):
    return (tensor * 8).round() / 8


def rounded_by_the_largest(tensor):
    return rounded(tensor / tensor.abs().max()) * tensor.abs().max()


class Words(nn.Module):
    """The mean of words' entries in a table, through a layer, and maybe a function in its own forward."""

    def __init__(self, *, table=None, layer=None, function=None, by_frequency=False):
        super().__init__()
        self.table = nn.Embedding(9, 4) if table is None else table
        self.layer = nn.Linear(4, 4) if layer is None else layer
        self.beside, self.head = nn.Parameter(torch.randn(9, 4)), nn.Linear(4, 3)
        self.function, self.by_frequency = function, by_frequency

    def forward(self, ids):
        x = self.table(ids) + F.embedding(ids, self.beside, scale_grad_by_freq=self.by_frequency)
        x = x if self.function is None else self.function.apply(x)
        return self.head(self.layer(x.mean(1)).relu())


MIXED = {
    "a table": (lambda: Words(table=nn.Embedding(9, 4, scale_grad_by_freq=True)), "the backward of table"),
    "its function": (lambda: Words(by_frequency=True), "the backward of embedding"),
    "a function": (lambda: Words(function=Normed), "the backward of apply"),
    "a layer's function": (lambda: Words(layer=Within(Normed)), "the backward of apply"),
    "a layer's hook": (lambda: Words(layer=Hooking(normed, is_inside=True)), "the backward of layer"),
    "a hook on a layer": (lambda: Words(layer=Hooking(normed, is_inside=False)), "the backward of layer"),
    "a hook set by an object": (lambda: Words(layer=HookedByAnObject(normed)), "the backward of layer"),
    "a function by numbers": (lambda: Words(function=Averaged), "the backward of apply"),
    "a layer's function by numbers": (lambda: Words(layer=Within(Averaged)), "the backward of apply"),
    "a function by places": (lambda: Words(function=Halved), "the backward of apply"),
    "a layer's function by places": (lambda: Words(layer=Within(Halved)), "the backward of apply"),
    "a second result": (lambda: Words(layer=Summing(Doubled)), "the backward of apply"),
    "a hook by numbers": (
        lambda: Words(layer=Hooking(averaged, is_inside=True)),
        "the backward of layer",
    ),
    "what is saved": (lambda: Words(layer=Packing(rounded_by_the_largest)), "the backward of "),
    **{
        f"a hook set by {sets}": (lambda s=sets: Words(layer=Passing(s, normed)), "the backward of layer")
        for sets in ("method", "function", "ahead", "within")
    },
}
ALONE = {
    "torch's own": Words,
    "a function": lambda: Words(function=Turned),
    "a layer's function": lambda: Words(layer=Within(Turned)),
    "a layer's hook": lambda: Words(layer=Hooking(limited, is_inside=True)),
    "a hook on a layer": lambda: Words(layer=Hooking(limited, is_inside=False)),
    "a hook set by a function": lambda: Words(layer=Passing("function", limited)),
    "what is saved": lambda: Words(layer=Packing(rounded)),
    "a frozen table": lambda: Words(
        table=nn.Embedding(9, 4, scale_grad_by_freq=True).requires_grad_(requires_grad=False)
    ),
}


def off(made, *, training=True, **options):
    """How far gradients of a step in microbatches are from those of the whole batch."""
    torch.manual_seed(0)
    model = made().double().train(training)
    plain = copy.deepcopy(model)
    ids, target = torch.randint(0, 9, (8, 5)), torch.randint(0, 3, (8,))
    pipe = split_by_layers(model, 2, (ids,))
    pipe.runtime(loss_fn=F.cross_entropy, n_microbatches=4).step(ids, target=target, **options)
    F.cross_entropy(plain(ids), target).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs if b.grad is not None)


@pytest.mark.parametrize(
    ("kind", "training"),
    [
        pytest.param(kind, training, marks=[] if training or i % 2 else pytest.mark.slow)
        for i, kind in enumerate(MIXED)
        for training in (True, False)
    ],
)
def test_what_mixes_rows_in_its_backward_alone_is_in_the_tail_or_warned_of(kind, training, caplog):
    """In evaluation mode too, in which models without dropout are trained; of a first layer it is no tail."""
    made, words = MIXED[kind]
    assert off(made, training=training, n_microbatches=1) < 1e-12
    assert "depend on one another" not in caplog.text
    is_first = kind in ("a table", "its function")
    assert (off(made, training=training) < 1e-12) is not is_first
    assert (f"depend on one another ({words}" in caplog.text) is is_first


def test_a_backward_is_not_told_of_where_none_runs(caplog):
    made, words = MIXED["a table"]
    ids = torch.randint(0, 9, (8, 5))
    pipe = split_by_layers(made(), 2, (ids,))
    runtime = pipe.runtime(loss_fn=F.cross_entropy, n_microbatches=4)
    runtime.forward(ids)
    assert "depend on one another" not in caplog.text
    runtime.step(ids, target=ids[:, 0] % 3)
    assert words in caplog.text


@pytest.mark.parametrize("kind", ALONE)
def test_a_backward_that_leaves_rows_alone_is_no_mixing(kind, caplog):
    assert off(ALONE[kind]) < 1e-12
    assert "depend on one another" not in caplog.text


@pytest.mark.parametrize("is_contrastive", [False, True])
@pytest.mark.parametrize("hook", [normed, limited])
def test_what_mixes_rows_in_its_backward_ahead_of_a_loss_of_the_models_own_is_in_the_tail(
    hook, is_contrastive, caplog
):
    torch.manual_seed(0)
    model = HookingItself(hook, is_contrastive=is_contrastive).double()
    plain, ids = copy.deepcopy(model), torch.randint(0, 9, (8, 5))
    pipe = split_by_layers(model, 2, (ids,), n_microbatches=4)
    assert bool(pipe.graph.ops.tail) == (is_contrastive or hook is normed)
    loss = pipe.runtime().step(ids).loss.detach().as_subclass(torch.Tensor)
    whole = plain(ids)
    whole.backward()
    torch.testing.assert_close(loss, whole.detach())
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert max(float((a.grad - b.grad).abs().max()) for a, b in pairs if b.grad is not None) < 1e-12
    assert "depend on one another" not in caplog.text


def test_many_backwards_are_asked_with_as_many_runs_as_one(monkeypatch):
    plain, asked = torch.autograd.grad, []
    monkeypatch.setattr(
        torch.autograd, "grad", lambda made, *rest, **how: asked.append(made) or plain(made, *rest, **how)
    )
    counts = []
    for n_layers in (1, 6):
        asked.clear()
        model = nn.Sequential(*(Within(Turned) for _ in range(n_layers)))
        split_by_layers(model, 1, (torch.randn(4, 4),))
        counts.append(len(asked))
    assert counts[0] == counts[1] > 0


class Penalty(torch.autograd.Function):
    """Hands a loss on, with a little of a penalty on logits that is there in the backward alone."""

    @staticmethod
    def forward(ctx, loss, logits):
        ctx.save_for_backward(logits)
        return loss.clone()

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        return grad, 1e-3 * logits / len(logits)


class Clipped(torch.autograd.Function):
    """A weight as it is, whose gradient is cut off."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1e-2, 1e-2)


class Handed(nn.Module):
    """Functions with a backward of their own before a loss, or around what has no rows: a loss, a weight."""

    def __init__(self, kind):
        super().__init__()
        self.words = Words(function=Normed if kind == "normed" else None)
        self.kind, self.out = kind, nn.Parameter(torch.randn(3, 3))

    def forward(self, ids, target):
        logits = self.words(ids)
        own = {"clipped": Clipped, "turned": Turned}.get(self.kind)
        logits = logits @ (self.out if own is None else own.apply(self.out))
        loss = F.cross_entropy(logits, target)
        return Penalty.apply(loss, logits) if self.kind == "penalty" else loss


@pytest.mark.parametrize("kind", ["penalty", "clipped", "normed", "turned"])
def test_backwards_that_are_wrong_in_parts_are_in_the_tail(kind, caplog):
    torch.manual_seed(0)
    model = Handed(kind)
    plain = copy.deepcopy(model)
    ids, target = torch.randint(0, 9, (8, 5)), torch.randint(0, 3, (8,))
    pipe = split_by_layers(model, 2, (ids, target))
    plain(ids, target).backward()
    pipe.runtime(n_microbatches=4).step(ids, target=target)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert bool(pipe.graph.ops.tail) == (kind != "turned")
    assert all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs)
    assert "depend on one another" not in caplog.text


class OtherWay(nn.Module):
    """Does something else where all words come late in the table."""

    def __init__(self, does):
        super().__init__()
        self.words, self.does = Words(), does

    def forward(self, ids):
        x = self.words.table(ids).mean(1)
        if ids.min() > 4:
            x = self.does(x)
        return self.words.head(self.words.layer(x).relu())


def with_its_hook(hook, x):
    x = x * 2
    if x.requires_grad:
        x.register_hook(hook)
    return x


@pytest.mark.parametrize(
    ("does", "is_told"),
    [
        (Normed.apply, True),
        (Turned.apply, False),
        (functools.partial(with_its_hook, normed), True),
        (functools.partial(with_its_hook, limited), False),
    ],
)
def test_backwards_where_a_model_goes_another_way_than_on_its_example_are_asked_too(does, is_told, caplog):
    torch.manual_seed(0)
    model = OtherWay(does).double()
    plain, few, late = copy.deepcopy(model), torch.randint(0, 4, (8, 5)), torch.randint(5, 9, (8, 5))
    pipe = split_by_layers(model, 2, (few,), n_microbatches=4)
    runtime = pipe.runtime(loss_fn=F.cross_entropy)
    runtime.step(few, target=few[:, 0] % 3)
    assert "depend on one another" not in caplog.text
    model.zero_grad()
    runtime.step(late, target=late[:, 0] % 3)
    F.cross_entropy(plain(late), late[:, 0] % 3).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    is_equal = all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs if b.grad is not None)
    assert is_equal is not is_told
    assert ("depend on one another" in caplog.text) == is_told
