"""What one call of a model leaves for the next: queues of keys, running averages, power iterations."""

import collections
import functools
import types

import pytest
import torch
from splitting import split_by_layers
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import InputError
from autopipe.tracing.rows import per_call_state
from autopipe.tracing.sizes.rerun import replay


class Keyed(nn.Module):
    """Layers, and a loss that goes by what ``keep`` has kept of earlier calls."""

    def __init__(self, keep):
        super().__init__()
        self.a, self.b, self.keep = nn.Linear(4, 8), nn.Linear(8, 4), keep

    def forward(self, x):
        y = self.b(self.a(x).tanh())
        return y.square().mean() + self.keep(F.normalize(y, dim=1)).mean()


class Queue(nn.Module):
    """Keys of earlier calls, as momentum contrast has them: a row is compared with each."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.linspace(-1, 1, 48).view(12, 4))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, y):
        loss = (y @ self.keys.clone().T).logsumexp(1)
        if self.training:
            with torch.no_grad():
                places = (self.at + torch.arange(len(y))) % len(self.keys)
                self.keys[places] = y
                self.at.add_(len(y)).remainder_(len(self.keys))
        return loss


class Centre(nn.Module):
    """Compares with a running mean of the rows before, as self-distillation does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, y):
        loss = (y - self.mean).abs().sum(1)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(0.5 * y.mean(0))
        return loss


class Apart(nn.Module):
    """Compares rows with one another, as they lie about a running mean of those before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, y):
        loss = ((y - self.mean) @ (y + self.mean).T).logsumexp(1)
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.5).add_(0.5 * y.mean(0))
        return loss


class History(nn.Module):
    """Divides by the mean of the losses so far, which it holds in a list."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def forward(self, y):
        loss = y.abs().sum(1).mean()
        self.losses.append(float(loss.detach()))
        return loss * len(self.losses) / sum(self.losses)


class Decayed(nn.Module):
    """Makes its weights smaller with each call, by ``data``."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, y):
        if self.training:
            self.a.weight.data.mul_(0.9)
        return self.a(y).square().sum(1)


class Teacher(nn.Module):
    """Compares with a layer whose weights follow those of another, in a method of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.mean = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(requires_grad=False)

    @torch.no_grad()
    def follow(self):
        for mean, weight in zip(self.mean.parameters(), self.a.parameters(), strict=True):
            mean.mul_(0.5).add_(weight, alpha=0.5)

    def forward(self, y):
        if self.training:
            self.follow()
        return (self.a(y) - self.mean(y)).square().sum(1)


class Scaled(nn.Module):
    """Multiplies by a buffer that it makes smaller with each call, by ``data``."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, y):
        if self.training:
            self.scale.data.mul_(0.9)
        return (y * self.scale.clone()).abs().sum(1)


class Prototypes(Keyed):
    """Compares with the running mean of rows of its kind, which a loop of its own forward moves."""

    def __init__(self):
        super().__init__(None)
        self.register_buffer("means", torch.linspace(-1, 1, 12).view(3, 4))

    def forward(self, x):
        y = self.b(self.a(x).tanh())
        kinds = x.argmax(1) % 3
        loss = (y - self.means[kinds]).square().sum(1).mean()
        if self.training:
            with torch.no_grad():
                for kind in kinds.unique():
                    self.means[kind] = 0.5 * self.means[kind] + 0.5 * y[kinds == kind].mean(0)
        return loss


class Confident(Keyed):
    """Counts rows of each kind, of which those count that are far enough, the further the more there were."""

    def __init__(self):
        super().__init__(None)
        self.register_buffer("counts", torch.zeros(3))

    def forward(self, x):
        y = self.b(self.a(x).tanh())
        kinds = x.argmax(1) % 3
        counted = x.abs().amax(1) > 0.03 * self.counts[kinds]
        if self.training:
            self.counts.index_add_(0, kinds, torch.ones(len(x), dtype=self.counts.dtype))
        return (y.square().sum(1) * counted).mean()


WRITING = [Decayed, Teacher, Scaled]


@pytest.mark.parametrize("keep", [Queue, Centre, Apart, History, Prototypes, *WRITING])
def test_what_one_call_leaves_for_the_next_is_left_once_a_step(keep):
    def make():
        torch.manual_seed(0)
        made = keep()
        return (made if isinstance(made, Keyed) else Keyed(made)).double()

    plain, model = make(), make()
    batches = [torch.randn(n, 4, dtype=torch.float64) for n in (6, 6, 5)]
    pipe = split_by_layers(model, 2, (batches[0],), n_microbatches=3)
    runtime = pipe.runtime()
    ours = torch.optim.SGD(runtime.parameters(), 0.1)
    theirs = torch.optim.SGD(plain.parameters(), 0.1)
    for x in batches:
        expected = plain(x)
        expected.backward()
        torch.testing.assert_close(runtime.step(x).loss, expected.detach())
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    runtime.gather_weights()
    torch.testing.assert_close(model.state_dict(), plain.state_dict())
    runtime.evaluate(batches[0])


def test_what_goes_by_counts_beyond_what_one_call_comes_to_is_found():
    torch.manual_seed(0)
    found = autopipe.capture(Confident().double(), (torch.randn(6, 4, dtype=torch.float64),)).variation
    assert found.mixing.carried
    assert found.tail.ops


class Watched(nn.Module):
    """Compares rows with one another, and keeps a running mean that nothing goes by."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.b(self.a(x).tanh())
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * y.mean(0))
        return (y @ y.T).logsumexp(1).mean()


def test_what_each_microbatch_writes_ahead_of_a_tail_is_told_of(caplog):
    model, x = Watched().double(), torch.randn(6, 4, dtype=torch.float64)
    pipe = split_by_layers(model, 2, (x,), n_microbatches=3)
    assert pipe.graph.ops.tail
    pipe.runtime().step(x)
    assert "a forward in training changes mean at each call" in caplog.text


class ByKind(nn.Module):
    """Compares rows with one another, or with what a call gives beside them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x, wanted=None):
        y = self.b(self.a(x).tanh())
        return (y @ y.T).logsumexp(1).mean() if wanted is None else F.mse_loss(y, wanted)


def test_a_loss_of_another_kind_of_call_is_not_taken_of_one_microbatch():
    model, x = ByKind().double(), torch.randn(6, 4, dtype=torch.float64)
    runtime = split_by_layers(model, 2, (x,), n_microbatches=3).runtime()
    runtime.step(x)
    with pytest.raises(InputError, match="makes a number of all rows, in a call unlike the one"):
        runtime.step(x, wanted=torch.ones_like(x))
    expected = F.mse_loss(model.b(model.a(x).tanh()), torch.ones_like(x))
    torch.testing.assert_close(
        runtime.step(x, wanted=torch.ones_like(x), n_microbatches=1).loss, expected.detach()
    )


class KeyedEarly(Keyed):
    """Goes by what calls have left ahead of nearly all of its weights."""

    def forward(self, x):
        return self.b(self.a(x + self.keep(F.normalize(x, dim=1))[:, None]).tanh()).square().mean()


class Powers(nn.Module):
    """Divides by a largest value that it comes nearer to with each call, whatever the rows."""

    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))

    def forward(self, y):
        return self.a(y).square().sum(1)


class Unit(nn.Module):
    """Makes the rows of its weights of length one, which they are in a second call."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, y):
        self.a.weight.data = F.normalize(self.a.weight.data, dim=1)
        return self.a(y).square().sum(1)


@pytest.mark.parametrize(
    ("keep", "name"),
    [(Queue, "keys"), (Powers, "_u"), (Decayed, "a.weight"), (Teacher, "mean.weight"), (Scaled, "scale")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_calls_leave_early_in_a_model_is_told(keep, name, dtype, caplog):
    torch.manual_seed(0)
    model, x = KeyedEarly(keep()).to(dtype), torch.randn(6, 4, dtype=dtype)
    pipe = split_by_layers(model, 2, (x,), n_microbatches=3)
    caplog.clear()
    runtime = pipe.runtime()
    for _ in range(2):
        runtime.step(x)
    (told,) = [r.getMessage() for r in caplog.records if "n_microbatches=1" in r.getMessage()]
    assert name in told.partition(" at each call")[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_that_a_second_call_leaves_as_the_first_did_are_not_told_of(dtype, caplog):
    model, x = KeyedEarly(Unit()).to(dtype), torch.randn(6, 4, dtype=dtype)
    pipe = split_by_layers(model, 2, (x,), n_microbatches=3)
    pipe.runtime().step(x)
    assert "n_microbatches=1" not in caplog.text


class Hooked(Keyed):
    """Goes by a running mean that a hook on a layer of torch's keeps."""

    def __init__(self):
        super().__init__(None)
        self.register_buffer("mean", torch.zeros(8))
        self.a.register_forward_hook(self.follow)

    def follow(self, layer, given, made):
        if layer.training:
            self.mean.mul_(0.9).add_(0.1 * made.detach().mean(0))

    def forward(self, x):
        return self.b((self.a(x) - self.mean).tanh()).square().mean()


def test_what_a_hook_leaves_for_the_next_call_is_told(caplog):
    model, x = Hooked().double(), torch.randn(6, 4, dtype=torch.float64)
    split_by_layers(model, 2, (x,), n_microbatches=3).runtime().step(x)
    assert any("n_microbatches=1" in r.getMessage() and "mean" in r.getMessage() for r in caplog.records)


class Table(nn.Module):
    """Scales places of a row, by a table that it fills anew for more of them than it has, or for any."""

    def __init__(self, most):
        super().__init__()
        self.most, self.n_calls = most, 0
        self.register_buffer("table", torch.linspace(1, 2, 16))

    def forward(self, x):
        if x.shape[1] > self.most:
            self.n_calls += 1
            self.table.copy_(torch.linspace(1, 2, 16) + self.n_calls)
        return x * self.table[: x.shape[1]]


@pytest.mark.parametrize("writes", [False, True])
def test_code_that_only_names_what_writes_is_called_twice_and_not_asked_further(monkeypatch, writes):
    runs = []
    monkeypatch.setattr(
        per_call_state, "replay", lambda *told, **how: runs.append(told) or replay(*told, **how)
    )
    model = nn.Sequential(nn.Linear(4, 4), Table(2 if writes else 8), nn.Linear(4, 4))
    captured = autopipe.capture(model, (torch.randn(4, 4),), closed=["1"])
    mixing = captured.forms[True][0].variation.mixing
    assert bool(mixing.by_call or mixing.carried or mixing.always) is writes
    assert (len(runs) == 2) is not writes


class HookedOnce(nn.Module):
    """A hook that doubles what a layer gives in its first call, and takes itself away."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

        def doubled(module, given, out):
            handle.remove()
            return 2 * out

        handle = self.a.register_forward_hook(doubled)

    def forward(self, x):
        return self.b(self.a(x).tanh()).square().mean()


@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_a_hook_that_takes_itself_away_is_told_of(n_microbatches, caplog):
    torch.manual_seed(0)
    model = HookedOnce().double()
    torch.manual_seed(0)
    twin = HookedOnce().double()
    x = torch.randn(6, 4, dtype=torch.float64)
    pipe = split_by_layers(model, 2, (x,), n_microbatches=n_microbatches)
    rt = pipe.runtime()
    losses = [(rt.step(x).loss.item(), twin(x).item()) for _ in range(3)]
    are_alike = [abs(a - b) < 1e-12 for a, b in losses]
    assert are_alike == [n_microbatches == 1, True, True]
    assert ("one call leaves a for the next" in caplog.text) is (n_microbatches > 1)


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, layer):
        ctx.layer = layer
        return h.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.seen += 1
        return gradient, None


class Backwards(nn.Module):
    """Keeps something of its backwards, or of the gradients of its weight."""

    def __init__(self, does):
        super().__init__()
        self.does, self.seen, self.weight = does, 0, nn.Parameter(torch.ones(4).double())
        self.register_buffer("size", torch.ones(()).double())

    def forward(self, h):
        return self.does(self, h) * self.weight


def follows_a_function(layer, h):
    return Counted.apply(h, layer) * (1 + layer.seen)


def follows_a_hook(layer, h):
    h = h * layer.size.clone()

    def adds(gradient):
        layer.size.add_(gradient.abs().sum())

    if h.requires_grad:
        h.register_hook(adds)
    return h


def follows_what_unpacks(layer, h):
    def unpacked(t):
        layer.seen += 1
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpacked):
        return torch.tanh(h) * (1 + layer.seen)


def follows_its_gradient(layer, h):
    return h if layer.weight.grad is None else h * layer.weight.grad.norm()


def follows_its_gradient_by_a_text(layer, h):
    gradient = getattr(layer.weight, "grad")  # noqa: B009 - as code does that loops over names
    return h if gradient is None else h * gradient.norm()


def follows_its_gradient_in_a_hook(layer, h):
    if h.requires_grad:
        h = h.clone()
        h.register_hook(lambda gradient: gradient if layer.weight.grad is None else gradient * 2)
    return h


def drops_its_gradient(layer, h):
    layer.zero_grad()
    return h


def counts_a_function(layer, h):
    return Counted.apply(h, layer)


def stepper(does, is_whole=True):
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), Backwards(does), nn.Linear(4, 4), nn.Linear(4, 4)
    model, x = nn.Sequential(*layers).double(), torch.randn(4, 4).double()
    closed = ["1"] if is_whole else ()
    pipe = split_by_layers(model, 2, (x,), n_microbatches=2, closed=closed)
    return pipe.runtime(loss_fn=lambda y, _: y.square().mean()), model, x


@pytest.mark.parametrize(
    "does",
    [
        follows_a_function,
        follows_a_hook,
        follows_what_unpacks,
        follows_its_gradient,
        follows_its_gradient_by_a_text,
        follows_its_gradient_in_a_hook,
        drops_its_gradient,
    ],
)
def test_what_microbatches_leave_in_backward_for_the_next_is_refused(does):
    runtime, model, x = stepper(does)
    with pytest.raises(InputError, match="what the backwards of others have left"):
        runtime.step(x)
    expected = model(x).square().mean()
    assert torch.allclose(runtime.step(x, n_microbatches=1).loss, expected)


def test_what_a_backward_counts_for_nobody_is_told(caplog):
    runtime, model, x = stepper(counts_a_function)
    assert runtime.step(x).loss.item() == pytest.approx(model(x).square().mean().item())
    assert any("1.seen" in r.getMessage() for r in caplog.records)


class Holding(nn.Module):
    """Stays whole, and scales by a count of its calls that an object of some kind holds."""

    def __init__(self, held, count):
        super().__init__()
        self.held, self.count, self.layer = held, count, nn.Linear(4, 4)

    def forward(self, y):
        y = self.layer(y)
        return (y if y.detach().sum().item() < 1e9 else -y) * (1 + 0.1 * self.count(self.held))


def in_a_queue(held):
    held.append(held[-1] + 1)
    return held[-1]


def in_a_counter(held):
    held["calls"] += 1
    return held["calls"]


def in_an_object(held):
    held.calls += 1
    return held.calls


@pytest.mark.parametrize(
    ("held", "count"),
    [
        (collections.deque([0], maxlen=2), in_a_queue),
        (collections.Counter(), in_a_counter),
        (types.SimpleNamespace(calls=0), in_an_object),
    ],
    ids=["queue", "counter", "object"],
)
def test_a_count_is_told_of_whatever_holds_it(held, count, caplog):
    model, x = nn.Sequential(nn.Linear(4, 4), Holding(held, count), nn.Linear(4, 4)), torch.randn(6, 4)
    pipe = split_by_layers(model, 2, (x,), n_microbatches=3)
    pipe.runtime(loss_fn=lambda y, _: y.square().mean()).step(x)
    told = [r.getMessage() for r in caplog.records]
    assert any("one call leaves 1 for the next" in t or "changes 1.held[" in t for t in told), told


class Ticks:
    """Counts calls, and scales by how many there were."""

    def __init__(self, period=2):
        self.n, self.period = 0, period

    def scaled(self, y):
        self.n += 1
        return y * (1 + self.n % self.period)

    def __call__(self, layer, given, made):
        return self.scaled(made)


def by_a_hook_on_the_layer(layer):
    layer.n = 0

    def hook(layer, given, made):
        layer.n += 1
        return made * (1 + layer.n % 2)

    layer.register_forward_hook(hook)


def by_a_closure(layer, register="register_forward_hook"):
    n = 0

    def hook(layer, given, made=None):
        nonlocal n
        n += 1
        return (given[0] if made is None else made) * (1 + n % 2)

    getattr(layer, register)(hook)


def by_a_hook_ahead(layer):
    by_a_closure(layer, "register_forward_pre_hook")


def by_an_object(layer):
    layer.register_forward_hook(Ticks())


def scaled_by_calls(layer, y):
    layer.n_calls = getattr(layer, "n_calls", 0) + 1
    return y * (1 + layer.n_calls % 2)


class HelpedByAFunction(nn.Linear):
    def forward(self, x):
        return scaled_by_calls(self, super().forward(x))


class DeeplyHeld(nn.Linear):
    """Counts in an object within dicts, and what has none of its code."""

    def __init__(self, n_in, n_out, ticks=None):
        super().__init__(n_in, n_out)
        self.parts = {"scale": {"by": ticks or Ticks()}}

    def forward(self, x):
        return self.parts["scale"]["by"].scaled(super().forward(x))


def hooked(add):
    """A layer of torch's with a hook."""
    layer = nn.Linear(4, 4)
    add(layer)
    return layer


@pytest.mark.parametrize(
    "made",
    [
        functools.partial(hooked, by_a_hook_on_the_layer),
        functools.partial(hooked, by_a_closure),
        functools.partial(hooked, by_a_hook_ahead),
        functools.partial(hooked, by_an_object),
        functools.partial(HelpedByAFunction, 4, 4),
        functools.partial(DeeplyHeld, 4, 4),
    ],
)
def test_a_count_that_other_code_than_the_layers_own_keeps_is_told_of(made, caplog):
    model, x = nn.Sequential(nn.Linear(4, 4), made(), nn.Linear(4, 4)), torch.randn(6, 4)
    pipe = split_by_layers(model, 2, (x,), n_microbatches=3, closed=["1"])
    pipe.runtime(loss_fn=lambda y, _: y.square().mean()).step(x)
    told = [r.getMessage() for r in caplog.records]
    assert any("one call leaves 1 for the next" in t or "changes 1.n" in t for t in told), told


@pytest.mark.parametrize("period", [2, 3], ids=["as at first behind a call", "another behind each call"])
@pytest.mark.parametrize("is_hook", [False, True])
def test_layers_that_count_in_one_place_are_in_one_stage(period, is_hook):
    ticks = Ticks(period)
    layers = [nn.Linear(4, 4) if is_hook else DeeplyHeld(4, 4, ticks) for _ in range(2)]
    for layer in layers if is_hook else ():
        layer.register_forward_hook(ticks)
    model = nn.Sequential(nn.Linear(4, 4), layers[0], nn.Linear(4, 4), layers[1], nn.Linear(4, 4))
    ops = autopipe.capture(model, (torch.randn(6, 4),), closed=["1", "3"]).ops
    names = {op.name for op in ops.compute if op.target in ("1", "3")}
    assert any(names <= {*group} for group in ops.groups)


class Tabled(nn.Linear):
    """Scales by a table that the first layer to come makes for all."""

    def __init__(self, tables):
        super().__init__(4, 4)
        self.tables = tables

    def forward(self, x):
        if "table" not in self.tables:
            self.tables["table"] = torch.linspace(1, 2, 4)
        return super().forward(x) * self.tables["table"]


def test_layers_that_share_a_table_which_each_would_make_alike_are_apart():
    tables = {}
    model = nn.Sequential(*[Tabled(tables) for _ in range(4)])
    captured = autopipe.capture(model, (torch.randn(6, 4),), closed=["0", "1", "2", "3"])
    assert not captured.ops.groups
    assert not captured.variation.mixing.carried
