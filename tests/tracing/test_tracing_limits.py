"""What a capture refuses, and what it leaves untouched: bad inputs, bad models, the model's own state."""

import collections
import copy
import pickle
import random
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopipe
from autopipe.errors import CaptureError, InputError
from autopipe.torch_private import CUSTOM_FUNCTION
from autopipe.tracing import capture
from autopipe.tracing.state.state import draw_alike, preserved

APPLY = vars(CUSTOM_FUNCTION).get("apply")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, mask=None, flag=True):
        h = self.norm(self.layers(x))
        return h if mask is None else h * mask


def state_of(model):
    flags = [(m.training, dict(m._forward_hooks), len(vars(m))) for m in model.modules()]
    return flags, {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()


def assert_same_state(before, after):
    assert before[0] == after[0]
    torch.testing.assert_close(before[1], after[1], rtol=0, atol=0)
    assert torch.equal(before[2], after[2])


@pytest.fixture
def captured():
    return capture(Net(), (torch.randn(3, 4),), {"mask": torch.ones(3, 1)})


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (
            (torch.randn(3, 4).double(),),
            {"mask": torch.ones(3, 1)},
            r"argument x is torch.float64.*\.to\(torch.float32\)",
        ),
        ((torch.randn(3, 4, 1),), {"mask": torch.ones(3, 1)}, "x has shape"),
        ((torch.randn(3, 5),), {"mask": torch.ones(3, 1)}, "dim 1 of x is fixed at 4 and is 5 now"),
        ((torch.randn(3, 4),), {"mask": [torch.ones(3, 1)]}, "argument mask has another structure"),
        ((torch.randn(3, 4),), {"nonsense": 1}, "does not take these arguments"),
    ],
)
def test_call_that_does_not_fit(captured, args, kwargs, message):
    with pytest.raises(autopipe.InputError, match=message):
        captured(*args, **kwargs)


class RootBranch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x):
        h = self.layers(x)
        if h.sum() > 0:
            return h * 2
        return h


class RootCounter(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.calls = []

    def forward(self, x):
        self.calls.append(None)
        return self.layers(x) * len(self.calls)


class Iterates(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x):
        return (layer(x) for layer in self.layers)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x):
        F.dropout(self.norm(x), 0.5)
        return self.layers(x) @ torch.ones(3, 3)


@pytest.mark.parametrize(
    ("cls", "error", "message"),
    [
        (
            RootBranch,
            autopipe.CaptureError,
            r"test_tracing_limits.py:\d+.*layers\(x\)\.sum\(\) > 0 \((True|False) here\).*"
            "input data.*submodule",
        ),
        (RootCounter, autopipe.CaptureError, r"RootCounter.calls.*next call"),
        (Iterates, autopipe.CaptureError, "generator.*tuple or list"),
        (Broken, autopipe.ModelError, "Broken's own forward fails"),
    ],
)
def test_model_that_cannot_be_captured_is_left_as_it_was(cls, error, message):
    model, x = cls().eval(), torch.randn(2, 4)
    before = state_of(model)
    with pytest.raises(error, match=message):
        capture(model, (x,))
    assert_same_state(before, state_of(model))
    assert vars(CUSTOM_FUNCTION).get("apply") is APPLY
    assert not torch.compiler.is_exporting()
    assert len([1, 2]) == 2


def test_model_is_left_as_it_was():
    model, x = Net(), torch.randn(3, 4)
    model.norm.eval()
    before = state_of(model)
    capture(model, (x,))
    assert_same_state(before, state_of(model))


def test_what_would_be_recorded_inside_a_transform_is_refused():
    class Unrolled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x):
            for step in range(x.shape[1]):
                x = torch.tanh(self.layer(x)) + step
            return x * self.scale

    model, x = Unrolled(), torch.randn(3, 2, 4)
    refused = pytest.raises(autopipe.InputError, match=r"inside a transform of torch.func")
    with refused:
        torch.func.grad(lambda v: capture(model, (x,))(x).sum() + v.sum())(x)
    found = capture(model, (x,))
    expected = torch.func.grad(lambda v: model(v).sum())(x)
    assert torch.equal(torch.func.grad(lambda v: found(v).sum())(x), expected)
    with refused:  # a length that is recorded as it is met
        torch.func.grad(lambda v: found(v).sum())(torch.randn(3, 5, 4))
    pipe = autopipe.split(model, 1, (x,), costs="estimated")
    with refused:  # other weights, of which the model's own code takes one
        torch.func.grad(lambda w: torch.func.functional_call(pipe, w, (x,)).sum())(
            dict(pipe.named_parameters())
        )


def test_arguments_of_capture():
    with pytest.raises(autopipe.InputError, match=r"takes a torch.nn.Module"):
        capture(F.relu)
    with pytest.raises(autopipe.InputError, match="no module 'nope'"):
        capture(Net(), (torch.randn(2, 4),), open=("nope",))
    with pytest.raises(autopipe.InputError, match=r"does not tell its inputs.*forward\(x\)"):
        capture(Net())


@pytest.mark.parametrize(
    "first",
    [nn.Linear(4, 4), nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Embedding(10, 4)],
    ids=["linear", "conv", "embedding"],
)
def test_inputs_inferred_from_the_first_layer(first):
    model = nn.Sequential(
        first, nn.ReLU(), nn.LayerNorm([4] if not isinstance(first, nn.Sequential) else [4, 30, 30])
    )
    assert len(capture(model).ops.inputs) == 1


def test_inputs_told_by_the_model():
    model = Net()
    model.example_input_array = torch.randn(5, 4)
    assert capture(model).example[0][0].shape == (5, 4)


class Branching(nn.Module):
    """Looks at a size, and pads only short inputs."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x):
        if x.shape[1] > 20:
            x = x[:, :20]
        return self.layers(x)


def test_size_that_decides_is_checked_at_run_time():
    model, long = Branching(), torch.randn(3, 21, 4)
    captured = capture(model, (torch.randn(2, 8, 4),))
    assert captured(torch.randn(3, 20, 4)).shape == (3, 20, 4)
    with pytest.raises(autopipe.InputError, match=r"not seq > 20.*seq = 21.*test_tracing_limits.py:\d+"):
        captured.bind((long,))
    torch.testing.assert_close(captured(long), model(long))


class Unrolled(nn.Module):
    """Loops over a size in Python."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, x):
        return torch.stack([self.layers(x[:, i]) for i in range(x.shape[1])], 1)


def test_size_that_is_baked_in_is_so_in_one_form():
    model, longer = Unrolled(), torch.randn(2, 4, 4)
    captured = capture(model, (torch.randn(2, 3, 4),))
    assert captured(torch.randn(5, 3, 4)).shape == (5, 3, 4)
    with pytest.raises(autopipe.InputError, match="dim 1 of x is fixed at 3 and is 4 now"):
        captured.bind((longer,))
    torch.testing.assert_close(captured(longer), model(longer))


class Shortcut(nn.Module):
    """Leaves its mask out where that seems to change nothing, except while it is traced."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask):
        h = self.first(x)
        if torch.compiler.is_exporting() or not mask.all():
            h = h * torch.tril(torch.ones(4, 4)).sum(0)
        return self.second(h)


def test_a_shortcut_is_taken_where_the_model_takes_it():
    torch.manual_seed(0)
    x, ones = torch.randn(3, 4), torch.ones(3, 4)
    mask = torch.ones(3, 4)
    mask[2, 1] = 0
    model = Shortcut()
    for example in (ones, mask):
        captured = capture(model, (x, example))
        for given in (ones, mask):
            torch.testing.assert_close(captured(x, given), model(x, given))


class Slots:
    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor


HOLDERS = {
    "set": lambda t: {t},
    "frozenset": lambda t: frozenset([t]),
    "deque": lambda t: collections.deque([[t]]),
    "dict_values": lambda t: {"a": t}.values(),
    "mappingproxy": lambda t: types.MappingProxyType({"a": t}),
    "Slots": Slots,
}


class Held(nn.Module):
    def __init__(self, returned, taken):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.returned, self.taken = returned, taken

    def forward(self, given):
        return self.returned(self.layer(self.taken(given)))


@pytest.mark.parametrize("name", HOLDERS)
def test_containers_that_hide_tensors_are_refused(name):
    hold = HOLDERS[name]
    with pytest.raises(
        CaptureError, match=f"returns a {name}, whose tensors cannot be followed; return a tuple"
    ):
        capture(Held(lambda t: {"nested": hold(t)}, lambda t: t), (torch.randn(2, 4),))
    with pytest.raises(
        InputError, match=f"argument given is a {name}, whose tensors cannot be followed; pass"
    ):
        capture(Held(lambda t: t, lambda _: torch.zeros(2, 4)), (hold(torch.randn(2, 4)),))


@pytest.mark.parametrize("value", [{1, 2}, collections.deque(["a"]), frozenset()], ids=repr)
def test_containers_without_tensors_are_constants(value):
    captured = capture(Held(lambda t: (t, value), lambda t: t), (torch.randn(2, 4),))
    assert captured(torch.randn(3, 4))[1] == value


class Reads(nn.Module):
    """Its forward reads what a layer made, and calls its first parameter by a name of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(this, x):
        y = this.layer(x)
        return y if y.mean() > 0 else -y


def test_a_read_of_values_names_the_line_whatever_the_first_parameter_is_called():
    with pytest.raises(
        CaptureError, match=r"test_tracing_limits.py:\d+ .*reads the value of layer\(x\).mean"
    ):
        capture(Reads(), (torch.randn(2, 4),))


class Growing(nn.Module):
    """Puts a larger tensor in a buffer's place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1, 4))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x.detach().mean(0, keepdim=True)])
        return self.layer(x - self.seen.mean(0))


def test_a_buffer_that_is_replaced_by_another_size_is_named():
    with pytest.raises(
        CaptureError, match=r"replaces the buffer seen by .*; seen\.copy_\(\.\.\.\) writes to it"
    ):
        capture(Growing(), (torch.randn(2, 4),))


class Ids(nn.Module):
    """Takes ids as an array, as data loaders of recommenders give them."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, ids):
        return self.head(self.embed(torch.as_tensor(ids)))


def test_another_array_is_told_to_be_given_as_a_tensor():
    ids = np.arange(48).reshape(6, 8) % 8
    found = capture(Ids(), (ids,))
    torch.testing.assert_close(found(ids.copy()), found.model(ids))
    with pytest.raises(InputError, match="ids is another ndarray than when captured; give it as a tensor"):
        found(ids + 1 - 8 * (ids == 7))


class Chosen(nn.Module):
    def forward(self, x):
        return x[x[:, 0] > 0]


class Counting(Net):
    def __init__(self):
        super().__init__()
        self.chosen = Chosen()

    def forward(self, x):
        rows = self.chosen(x)
        return self.layers(rows.sum(0)) * (2 if rows.size(0) > 6 else 1)


def test_a_capture_is_pickled_before_and_after_its_modules_are_made():
    x = torch.randn(4, 4)
    found = capture(Counting(), (x,))
    expected = found(x)
    assert "expect_size" in found.module.code
    for copied in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        torch.testing.assert_close(copied(x), expected)


def softened(x):
    return F.softplus(x)


class Applying(Net):
    def forward(self, x, function):
        return function(super().forward(x))


def test_a_capture_on_a_function_that_names_modules_is_pickled_and_copied():
    x = torch.randn(4, 4)
    found = capture(Applying(), (x, softened))
    expected = found(x, softened)
    for copied in (pickle.loads(pickle.dumps(found)), copy.deepcopy(found)):
        torch.testing.assert_close(copied(x, softened), expected)


def test_what_goes_by_how_much_a_layer_gives_is_asked_of_inputs_where_sizes_are_fixed():
    model, x = Counting(), torch.linspace(-1, 1, 32).view(8, 4)
    x[:, 0] = 1
    found = capture(model, (x,), dynamic=False)
    for given in (x, x + 1, x - torch.arange(8).view(8, 1)):
        torch.testing.assert_close(found(given), model(given))


class Summing(Counting):
    def forward(self, x):
        rows = self.chosen(x)
        return self.layers(rows.sum(0) / rows.new_full((rows.size(0),), 2.0).sum())


def test_how_much_a_layer_gives_is_followed_where_sizes_are_fixed():
    model = Summing()
    found = capture(model, (torch.randn(8, 4).abs(),), dynamic=False)
    for seed in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(found(x), model(x))


class Telling(Counting):
    """Goes by how many rows a layer picks, which on ordinary data is all of them."""

    def forward(self, x):
        return self.layers(self.chosen(x + 90)) * (2 if len(self.chosen(x + 90).tanh()) < len(x) else 1)


class Flagged(nn.Module):
    """Picks rows where it is told to."""

    def forward(self, x, picks=True):
        return x[F.gelu(x)[:, 0] > 0] if picks else x[: len(x)]


class ToldTo(Counting):
    """Calls a layer that goes by no data, and then again so that it does."""

    def __init__(self):
        super().__init__()
        self.chosen = Flagged()

    def forward(self, x):
        factor = 1 + (len(self.chosen(x + 90, picks=False).tanh()) < len(x))
        return self.layers(self.chosen(x + 90)) * (factor + (len(self.chosen(x + 90).tanh()) < len(x)))


@pytest.mark.parametrize("model", [Telling, ToldTo])
@pytest.mark.parametrize("dynamic", ["auto", False])
def test_how_much_a_layer_gives_is_checked_where_it_was_the_same_on_all_data_tried(model, dynamic):
    model, x = model(), torch.randn(8, 4)
    found = capture(model, (x,), dynamic=dynamic)
    torch.testing.assert_close(found(x + 1), model(x + 1))
    x[1] = -100
    with pytest.raises(InputError, match=r"test_tracing_limits.py:\d+: .* (7|was 8)"):
        found(x)


CHECKERS = {
    "what is checked": "isinstance(items[draw(32) % len(items)], float)",
    "what is taken": "items[draw(32) % len(items)] > 1.5",
    "what is taken by a small chance": "draw(32) < 1000",
    "what it fails by": "1 / draw(32) > 0",
}


def drawing(of):
    """A model that goes by a truth which code of another's making draws."""
    # a name of C, as libraries bind it, shows no draw
    told = eval(f"lambda items: {CHECKERS[of]}", {"draw": random.getrandbits, "__name__": "torch_like"})

    class Drawing(Net):
        def forward(self, x):
            return self.layers(x) * (2 if told([1.0, 2.0]) else 1)

    return Drawing()


def test_draws_that_nothing_goes_by_are_left_out_and_told():
    model, x = drawing("what is checked"), torch.randn(3, 4)
    found = capture(model, (x,))
    torch.testing.assert_close(found(x), model(x))
    assert any("Python's or numpy's generator" in note for note in found.notes)


@pytest.mark.parametrize("of", [*CHECKERS][1:])
def test_draws_that_something_goes_by_are_refused(of):
    said = "random draws" if of == "what it fails by" else None
    with pytest.raises(CaptureError, match=said):
        capture(drawing(of), (torch.randn(3, 4),))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("greatest", [False, True])
def test_what_draws_until_a_number_fits_ends_where_draws_are_alike(greatest):
    def alike():
        draw_alike(greatest=greatest)

    with preserved(nn.Linear(1, 1)):
        for generator in (random, np.random):
            alike()
            found = {round(generator.random(), 9) for _ in range(200)}
            assert found == {float(greatest)}
        for draw in (
            lambda: random.normalvariate(0, 1),
            lambda: random.gammavariate(2.0, 1),
            lambda: random.sample(range(1000), 5),
            lambda: random.choice([1, 2, 3]),
            lambda: np.random.normal(size=100),
            lambda: np.random.gamma(0.5, size=100),
        ):
            alike()
            draw()
