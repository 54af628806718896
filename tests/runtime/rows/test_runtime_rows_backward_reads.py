"""Backwards of a model's own that go by what they are given or have kept, where the example shows nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.tracing.rows import backwards


def function(backward, forward=lambda x: x.clone()):
    """A function of one tensor, which its backward is given with the gradient."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx, slope):
            return backward(slope, *ctx.saved_tensors)

    return Own.apply


def shortened_if_large(slope, x):
    return slope / slope.norm() if slope.abs().max() > 50 else slope


def shortened_by_a_bend(slope, x):
    return slope * (40 / slope.norm()).clamp(max=1)


def nothing_if_tiny(slope, x):
    return torch.zeros_like(slope) if slope.abs().max().item() < 1e-3 else slope


def by_the_sign_of_all(slope, x):
    return slope if slope.sum() > 0 else slope * 0.1


def by_what_is_kept(slope, x):
    return slope * (x > 0) if x.mean() > 0 else slope * 0.1


def by_how_many_are_kept(slope, x):
    count = int((x.abs() > 20).sum())
    return slope / count if count > 2 else slope


def by_the_largest_kept(slope, x):
    return slope / x.abs().max().clamp(min=30)


def turned_if_any(slope, x):
    if (x.abs() > 1e6).any():
        slope = slope - slope.mean(0)
    return slope


def cut_off(slope, x):
    return slope.clamp(-1e-2, 1e-2) if slope.abs().max() > 1e-2 else slope


def shortened_by_row(slope, x):
    long = slope.norm(dim=-1) > 1e-2
    slope = slope.clone()
    if long.any():
        slope[long] = slope[long] / slope[long].norm(dim=-1, keepdim=True) * 1e-2
    return slope


def as_it_is_if_it_is_a_number(slope, x):
    return slope.nan_to_num() if slope.isnan().any() else slope


def told_ahead(tell, backward):
    """A function whose forward tells its backward of what it is given, other than by what it saves."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.told = tell(x)
            return x.clone()

        @staticmethod
        def backward(ctx, slope):
            return backward(slope, ctx.told)

    return Own.apply


TOLD = {
    "a truth": (lambda x: bool((x.abs() > 20).any()), lambda s, told: s * 0.1 if told else s, True),
    "a number": (lambda x: x.abs().max(), lambda s, told: s * (9 / told).clamp(max=1), True),
    "a figure": (lambda x: x.norm().item(), lambda s, told: s * min(1.0, 90 / told), True),
    "each row's": (
        lambda x: x.abs().amax(-1, keepdim=True),
        lambda s, told: s * (9 / told).clamp(max=1),
        False,
    ),
    "how many": (lambda x: None, lambda s, told: s if len(s) > 3 else s * 0.5, True),
}


class Words(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.own = own

    def forward(self, ids):
        return self.head(self.own(self.layer(self.table(ids).mean(1))).relu())


class Leaf(nn.Module):
    def __init__(self, own):
        super().__init__()
        self.own = own

    def forward(self, x):
        assert len(x.tolist()) == len(x)
        return self.own(x)


class Noisy(Leaf):
    """Adds noise in training, so that more runs tell what it does in either mode."""

    def forward(self, x):
        made = super().forward(x)
        return made + 0.1 * torch.rand_like(made) if self.training else made


def hooked(backward):
    """A hook on the gradient of what it gives, of a backward that goes by that alone."""

    def own(x):
        if x.requires_grad:
            x.register_hook(lambda slope: backward(slope, x))
        return x * 1

    return own


OF_SLOPES = [shortened_if_large, shortened_by_a_bend, nothing_if_tiny, by_the_sign_of_all]
OF_ALL = [*OF_SLOPES, by_what_is_kept, by_how_many_are_kept, by_the_largest_kept, turned_if_any]
OF_ROWS = [cut_off, shortened_by_row, as_it_is_if_it_is_a_number]
WAYS = {
    "function": function,
    "layer's": lambda backward: Leaf(function(backward)),
    "hook": hooked,
    "layer's hook": lambda backward: Leaf(hooked(backward)),
}


CASES = [(b, w) for b in (*OF_ALL, *OF_ROWS) for w in WAYS if b in (*OF_SLOPES, *OF_ROWS) or "hook" not in w]


@pytest.mark.parametrize(("backward", "way"), CASES)
def test_backwards_that_mix_rows_on_some_data_run_on_the_whole_batch(backward, way, caplog):
    torch.manual_seed(0)
    model = Words(WAYS[way](backward)).double()
    ids, target = torch.randint(0, 9, (8, 5)), torch.randint(0, 3, (8,))
    pipe = autopipe.split(model, 2, (ids,), costs="estimated", n_microbatches=4)
    assert bool(pipe.graph.ops.tail) == (backward in OF_ALL)
    runtime = pipe.runtime(loss_fn=lambda y, t: weight * F.cross_entropy(y, t))
    for weight in (1.0, 1e-5, 1e5, -1.0):
        model.zero_grad()
        plain = copy.deepcopy(model)
        runtime.step(ids, target=target)
        (weight * F.cross_entropy(plain(ids), target)).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.allclose(a.grad, b.grad, rtol=1e-9, atol=0) for a, b in pairs)
    assert "depend on one another" not in caplog.text


@pytest.mark.parametrize("is_inside", [True, False])
@pytest.mark.parametrize("kind", TOLD)
def test_backwards_that_go_by_what_their_forward_tells_them_of_all_rows_are_found(kind, is_inside):
    tell, backward, is_of_all = TOLD[kind]
    own = told_ahead(tell, backward)
    torch.manual_seed(0)
    model = Words(Leaf(own) if is_inside else own).double()
    pipe = autopipe.split(model, 2, (torch.randint(0, 9, (8, 5)),), costs="estimated", n_microbatches=4)
    found = pipe.graph.variation.mixing
    assert bool(pipe.graph.ops.tail or found.always) == is_of_all, found


def packed(layer, x):
    """Numbers kept for the backward are rounded by the largest of all, or of a row."""

    def pack(kept):
        step = kept.detach().abs().amax(layer.axes, keepdim=True).clamp(min=1e-9) / 127
        return (kept.detach() / step).round(), step

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[0] * kept[1]):
        return layer.linear(x).tanh()


class Packed(nn.Module):
    """A layer that is recorded as one, and opened where that mixes rows."""

    def __init__(self, axes):
        super().__init__()
        self.linear, self.axes = nn.Linear(8, 8), axes

    def forward(self, x):
        return packed(self, x)


@pytest.mark.parametrize("axes", [(0, 1), (-1,)])
def test_backwards_are_asked_where_a_layer_is_opened_as_it_mixes_rows(axes, caplog):
    """Late enough is the loss alone, which does not hold what was kept ahead of it."""

    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.packed, self.wide = nn.Linear(8, 8), Packed(axes), nn.Linear(8, 64)
            self.last = nn.Linear(64, 3)

        def forward(self, x, target):
            return F.cross_entropy(self.last(self.wide(self.packed(self.first(x))).relu()), target)

    torch.manual_seed(0)
    model = Late().double()
    plain, x, target = copy.deepcopy(model), torch.randn(8, 8).double(), torch.arange(8) % 3
    pipe = autopipe.split(model, 2, (x, target), costs="estimated", n_microbatches=4)
    pipe.runtime().step(x, target)
    plain(x, target).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    is_equal = all(torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-12) for a, b in pairs)
    assert is_equal is ("depend on one another (the backward of packed" not in caplog.text)
    assert is_equal is (axes == (-1,))


def test_a_backward_is_asked_once_however_many_runs_have_shown_it(monkeypatch):
    asked = []

    def noting(run, made, *others):
        asked.append([(call.name, i) for call, i, _ in made])
        return are_mixed(run, made, *others)

    are_mixed = backwards._are_mixed
    monkeypatch.setattr(backwards, "_are_mixed", noting)
    own = function(lambda slope, x: slope / slope.norm())
    model = nn.Sequential(nn.Linear(4, 4), Noisy(own), nn.Linear(4, 64), Noisy(own))
    captured = autopipe.capture(model, (torch.randn(4, 4),))
    assert "the backward of" in captured.variation.mixing.backward
    together, *each = asked
    assert len(together) == 2
    assert each == [[made] for made in together]


def forked(backward):
    """A function that gives what it is given twice; its backward is given the gradients of both."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone(), x.clone()

        @staticmethod
        def backward(ctx, a, b):
            return backward(a, b)

    return Own.apply


def projected(a, b, over):
    return a + b - over / b.square().sum().clamp(min=1e-30) * b


def projected_if_against(a, b):
    over = (a * b).sum()
    return projected(a, b, over) if over < 0 else a + b


def projected_where_against(a, b):
    return projected(a, b, (a * b).sum().clamp(max=0))


def projected_by_row(a, b):
    over = (a * b).sum(-1, keepdim=True).clamp(max=0)
    return a + b - over / b.square().sum(-1, keepdim=True).clamp(min=1e-30) * b


class Forked(nn.Module):
    """Two tasks of one layer, of which the second is to undo what the first learns."""

    def __init__(self, own):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.own = own

    def forward(self, ids):
        a, b = self.own(self.layer(self.table(ids).mean(1)))
        return self.head(a) - 2 * self.head(b).tanh()


@pytest.mark.parametrize("backward", [projected_if_against, projected_where_against, projected_by_row])
def test_backwards_of_several_gradients_are_asked_where_these_go_against_one_another(backward):
    torch.manual_seed(0)
    model = Forked(forked(backward)).double()
    ids, target = torch.randint(0, 9, (8, 5)), torch.randint(0, 3, (8,))
    pipe = autopipe.split(model, 2, (ids,), costs="estimated", n_microbatches=4)
    assert bool(pipe.graph.ops.tail) == (backward is not projected_by_row)
    plain = copy.deepcopy(model)
    pipe.runtime(loss_fn=F.cross_entropy).step(ids, target=target)
    F.cross_entropy(plain(ids), target).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-15) for a, b in pairs)


class Sparse(torch.autograd.Function):
    """Softmax with a backward of its own, of each row alone."""

    @staticmethod
    def forward(ctx, x):
        shares = x.softmax(-1)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(ctx, slope):
        (shares,) = ctx.saved_tensors
        return shares * (slope - (slope * shares).sum(-1, keepdim=True))


@pytest.mark.parametrize("own", [Sparse.apply, function(shortened_by_row)])
@pytest.mark.parametrize("n_behind", [1, 4])
def test_a_backward_of_each_row_is_none_that_mixes_where_batch_norm_does(own, n_behind, caplog):
    torch.manual_seed(0)
    behind = [nn.Linear(6, 6) for _ in range(n_behind)]
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), Leaf(own), *behind)
    pipe = autopipe.split(model, 2, (torch.randn(8, 6),), costs="estimated")
    variation = pipe.graph.variation
    assert "1" in variation.mixing.training
    assert (variation.mixing.backward, variation.tail.ops) == ("", ())
    model.eval()
    runtime = pipe.runtime(lambda out, _: out.square().mean(), n_microbatches=2)
    caplog.clear()
    runtime.step(torch.randn(8, 6))
    assert not caplog.records


def test_a_backward_that_mixes_is_found_behind_batch_norm_in_evaluation(caplog):
    own = function(lambda slope, x: slope / slope.norm())
    model = nn.Sequential(
        nn.Linear(6, 6), Leaf(own), nn.BatchNorm1d(6), *(nn.Linear(6, 6) for _ in range(4))
    ).eval()
    pipe = autopipe.split(model, 2, (torch.randn(8, 6),), costs="estimated")
    assert "the backward of 1" in pipe.graph.variation.mixing.backward
    caplog.clear()
    pipe.runtime(lambda out, _: out.square().mean(), n_microbatches=2).step(torch.randn(8, 6))
    assert "the backward of 1" in caplog.text


class Contrasting(nn.Module):
    """Compares rows at its end in training alone, behind code whose backward mixes them there alone."""

    def __init__(self, own):
        super().__init__()
        self.body, self.own = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), own
        self.middle = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))

    def forward(self, x):
        h = self.body(x)
        h = self.middle(self.own(h) if self.training else h)
        return (h @ h.T).logsumexp(-1) if self.training else h.square().mean(-1)


def test_a_backward_that_mixes_in_training_alone_is_found_ahead_of_a_tail():
    own = function(lambda slope, x: slope / slope.norm())
    variation = autopipe.capture(Contrasting(own), (torch.randn(8, 6),)).variation
    assert variation.tail.ops
    assert "the backward of" in variation.mixing.backward


def shared(n_made, share):
    """A function that gives what it is given so many times; its backward adds a ``share`` of one gradient."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return tuple(x.clone() for _ in range(n_made))

        @staticmethod
        def backward(ctx, *slopes):
            return sum(slopes) + share(*slopes) * slopes[-1]

    return Own.apply


class Several(nn.Module):
    """Several tasks of one layer."""

    def __init__(self, own):
        super().__init__()
        self.table, self.layer, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.own = own

    def forward(self, x):
        return sum(
            self.head(made) * 2**i for i, made in enumerate(self.own(self.layer(self.table(x).tanh())))
        )


def over(some, others):
    """How far some gradients are above ten times others."""
    return (some.norm() / others.norm() - 10).relu()


@pytest.mark.parametrize(
    ("n_made", "share", "is_of_all"),
    [
        (3, lambda a, b, c: (a * c).sum().clamp(max=0), True),
        (5, lambda a, b, c, d, e: (a * e).sum().clamp(max=0), True),
        (5, lambda a, b, c, d, e: (b * d).sum().clamp(max=0), True),
        (2, over, True),
        (2, lambda a, b: over(b, a), True),
        (3, lambda a, b, c: over(c, a), True),
        (2, lambda a, b: a.norm() / b.norm() if a.norm() > 10 * b.norm() else 0, True),
        (2, lambda a, b: a.norm() / b.norm(), True),
        (3, lambda a, b, c: (a * c).sum(-1, keepdim=True).clamp(max=0), False),
        (2, lambda a, b: (a.norm(dim=-1) - 10 * b.norm(dim=-1)).relu()[:, None], False),
    ],
)
def test_backwards_are_asked_with_any_two_gradients_apart(n_made, share, is_of_all):
    torch.manual_seed(0)
    model = Several(shared(n_made, share)).double()
    variation = autopipe.capture(model, (torch.randn(8, 4, dtype=torch.float64),)).variation
    assert bool(variation.mixing.backward or variation.tail.ops) is is_of_all
