"""Large examples are recorded on few of their rows, where that is all the same to the model."""

import queue
import types
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autopipe
from autopipe.errors import InputError
from autopipe.tracing import capture
from autopipe.units import size_at


class Noting(nn.Linear):
    """Notes what it has run on, where no state that a capture puts back is.

    It does not ask how many rows there are: code that does is run on many, too.
    """

    rows: ClassVar[Any] = queue.SimpleQueue()

    def forward(self, x):
        self.rows.put(x)
        return super().forward(x)


def taken() -> list[int]:
    """The rows of each run since the last question."""
    return [len(Noting.rows.get()) for _ in range(Noting.rows.qsize())]


class Net(nn.Module):
    """What it does may depend on the number of rows; some may be picked by their index."""

    def __init__(self, behaviour):
        super().__init__()
        self.linear, self.behaviour = Noting(5, 5), behaviour

    def forward(self, x, picked=None):
        h = self.linear(x)
        if self.behaviour == "branches" and x.shape[0] > 10:
            h = h.relu()
        if self.behaviour == "fixed":
            h = h + torch.arange(100.0).view(20, 5)
        return h if picked is None else h[picked]


def captured(behaviour, *more):
    taken()
    model = Net(behaviour)
    args = (torch.randn(20, 5), *more)
    return model, args, capture(model, args, closed=["linear"])


def test_few_rows_are_enough():
    model, args, found = captured("plain")
    assert max(taken()) < 20
    assert found.example[0][0] is args[0]
    assert found.ops.example_dims["batch"] == 20
    for rows in (1, 3, 20, 33):
        x = torch.randn(rows, 5)
        torch.testing.assert_close(found(x), model(x))


@pytest.mark.parametrize("behaviour", ["branches", "fixed"])
def test_model_that_is_another_on_few_rows(behaviour):
    model, args, found = captured(behaviour)
    torch.testing.assert_close(found(*args), model(*args))
    assert found.form_of(found.inputs.bind(model, args, {})) == 0
    few = torch.randn(2, 5)
    if behaviour == "branches":
        torch.testing.assert_close(found(few), model(few))
    else:
        with pytest.raises(InputError):
            found(few)


def test_rows_that_are_pointed_to_are_kept():
    picked = torch.randint(0, 20, (7, 3))
    model, args, found = captured("plain", picked)
    assert taken()[0] == 20  # recorded on all of them; only whether rows mix is tried on two
    torch.testing.assert_close(found(*args), model(*args))


class Tokens(nn.Module):
    """May look at the first hundred tokens alone, which shows at more than a hundred only."""

    def __init__(self, n_most):
        super().__init__()
        self.embedding, self.head, self.n_most = nn.Embedding(10, 5), Noting(5, 5), n_most

    def forward(self, tokens):
        return self.head(self.embedding(tokens)[:, : self.n_most].flatten(0, 1))


@pytest.mark.parametrize("n_most", [None, 100])
def test_few_tokens_are_enough_where_shapes_agree_at_all(n_most):
    taken()
    model, tokens = Tokens(n_most), torch.randint(0, 10, (2, 200))
    found = capture(model, (tokens,), closed=["head"])
    length = n_most or 200
    assert (sum(rows >= 2 * length for rows in taken()) == 1) == (n_most is None)
    assert found.ops.example_dims == {"batch": 2, "seq": 200}
    (shape,) = {t.shape for t in found.ops.by_name["head"].outputs}
    assert size_at(shape[0], found.ops.example_dims) == 2 * length
    for size in (200, 31, 250):
        other = torch.randint(0, 10, (3, size))
        torch.testing.assert_close(found(other), model(other))


class Halving(nn.Module):
    """Bakes in that a length is even, in a way that only an odd length shows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        odd = list(range(h.shape[1]))[-1] % 2 == 0
        return h[:, :-1] if odd else h


def test_length_that_is_fixed_has_a_form_of_its_own():
    model, odd = Halving(), torch.randn(2, 17, 4)
    found = capture(model, (torch.randn(2, 16, 4),))
    torch.testing.assert_close(found(torch.randn(3, 16, 4)).shape, torch.Size([3, 16, 4]))
    with pytest.raises(InputError, match="fixed at 16"):
        found.bind((odd,))
    torch.testing.assert_close(found(odd), model(odd))


class CallsItselfThis(nn.Module):
    """Has an input called like what others call the module, and one in a dict with keys that are no text."""

    def __init__(this) -> None:
        super().__init__()
        this.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))

    def forward(this, self, edges):
        return this.layers(self) + edges[0, 1] - edges[1, "a"]


def test_names_of_inputs_are_free() -> None:
    model = CallsItselfThis()
    x, edges = torch.randn(2, 4), {(0, 1): torch.randn(2, 4), (1, "a"): torch.randn(2, 4)}
    pipe = autopipe.split(model, 2, (x, edges), costs="estimated", balance="parameters")
    assert torch.equal(pipe(x, edges), model(x, edges))


@pytest.mark.parametrize("fake", [("model",), ("x",), ("model", "x"), ()])
def test_fake_tensors_are_told(fake) -> None:
    def made() -> tuple[nn.Module, torch.Tensor]:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)

    model, x = made()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model_of_none, x_of_none = made()
        if not fake:
            with pytest.raises(InputError, match="tensors that are made here are fake"):
                autopipe.split(model, 2, (x,), costs="estimated")
            return
    model, x = model_of_none if "model" in fake else model, x_of_none if "x" in fake else x
    with pytest.raises(InputError, match=r"are fake \(FakeTensorMode\)"):
        autopipe.split(model, 2, (x,), costs="estimated")


def test_no_object_but_a_tensor_is_fake() -> None:
    class Scaled(nn.Sequential):
        def forward(self, x: torch.Tensor, how: Any) -> torch.Tensor:
            return super().forward(x) * how.scale

    model, x = Scaled(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(2, 4)
    how = types.SimpleNamespace(fake_mode="none", scale=2.0)
    pipe = autopipe.split(model, 2, (x, how), costs="estimated")
    assert torch.equal(pipe(x, how), model(x, how))


def test_a_default_device_without_values_is_nothing_to_a_model_that_makes_none() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    with torch.device("meta"):
        pipe = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=2)
        pipe.verify()
    assert torch.equal(pipe(x), model(x))
