"""Outputs of the full batch, made of those of its microbatches."""

import logging
import math

import pytest
import torch
from runtime_models import make
from torch import nn

from autopipe.errors import InputError
from autopipe.runtime import Runtime


class Shapes(nn.Module):
    """Outputs with the batch in every place it can have, and in none."""

    def __init__(self, mixes=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(2))
        self.mixes = mixes

    def forward(self, x):
        states = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            states.append(x)
        out = {
            "first": x,
            "stacked": torch.stack(states),
            "last": x.movedim(0, -1),
            "folded": x.flatten(0, 1),
            "top": x.max(-1),
            "scale": self.scale,
            "kind": "shapes",
        }
        return {**out, "similarity": x[:, 0] @ x[:, 0].T} if self.mixes else out


def shapes(mixes=False, **options):
    torch.manual_seed(0)
    model, x = Shapes(mixes).double(), torch.randn(4, 3, 4, dtype=torch.float64)
    return model, x, Runtime(*make(model, (x,), {}, n_stages=2, n_microbatches=2), **options)


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_outputs_are_joined_where_their_batch_is(rows, caplog):
    model, _, runtime = shapes()
    x = torch.randn(rows, 3, 4, dtype=torch.float64)
    found, wanted = runtime.forward(x), model(x)
    assert found.pop("kind") == wanted.pop("kind")
    values, indices = found.pop("top")
    torch.testing.assert_close((values, indices), tuple(wanted.pop("top")), rtol=0, atol=1e-12)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    assert not caplog.text


def test_outputs_that_microbatches_cannot_give_are_refused():
    model, x, runtime = shapes(mixes=True)
    torch.testing.assert_close(runtime.forward(x)["similarity"], model(x)["similarity"], rtol=0, atol=1e-12)
    model, x, runtime = shapes(mixes=True, mixed_rows="allow")
    with pytest.raises(InputError, match=r"axes 0, 1.*n_microbatches=1"):
        runtime.forward(x)
    torch.testing.assert_close(
        runtime.forward(x, n_microbatches=1)["similarity"], model(x)["similarity"], rtol=0, atol=1e-12
    )


class Scalars(nn.Module):
    """Scalars beside the rows: a mean over these, one over labels if there are any, and one of neither."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x, labels=None):
        h = torch.tanh(self.a(x))
        logits = self.b(h)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "mean": h.square().mean(), "fixed": torch.tensor(1.5)}


@pytest.mark.parametrize("asks", ["forward", "evaluate", "step"])
@pytest.mark.parametrize("whose", ["loss_fn", "a sum", "the model"])
def test_scalars_are_those_of_the_whole_batch(whose, asks):
    torch.manual_seed(0)
    model = Scalars().double()
    x = torch.randn(7, 4, dtype=torch.float64)
    labels = torch.tensor([2, -100, -100, 1, 0, -100, 1])
    own = whose == "the model"
    args = (x, labels) if own else (x,)
    reduction = "sum" if whose == "a sum" else "mean"
    options = {} if own else {"loss_fn": nn.MSELoss(reduction=reduction)}
    if not own:
        mse = options["loss_fn"]
        options["loss_fn"] = _OfLogits(mse) if whose == "a sum" else lambda out, y: mse(out["logits"], y)
    runtime = Runtime(*make(model, args, {}, n_stages=2, n_microbatches=3), **options)
    wanted = model(*args)
    if asks == "forward":
        found = runtime.forward(*args)
    else:
        target = {} if own else {"target": torch.zeros_like(wanted["logits"])}
        found = getattr(runtime, asks)(*args, **target, return_outputs=True).outputs
    if own:  # all but the loss weigh as the loss does
        del found["mean"], wanted["mean"]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


class _OfLogits(nn.Module):
    """A loss that says that it is a sum, as torch's do."""

    def __init__(self, loss):
        super().__init__()
        self.reduction, self.loss = loss.reduction, loss

    def forward(self, out, target):
        return self.loss(out["logits"], target)


class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x.mul_(2)
        return self.b(torch.tanh(self.a(x)))


def test_an_input_that_is_written_to_trains_in_microbatches():
    torch.manual_seed(0)
    model, x, y = Doubles().double(), torch.randn(7, 4).double(), torch.randn(7, 3).double()
    runtime = Runtime(*make(model, (x.clone(),), {}, n_stages=2, n_microbatches=3), loss_fn=nn.MSELoss())
    wanted = nn.functional.mse_loss(model(x.clone()), y)
    torch.testing.assert_close(runtime.step(x.clone(), target=y).loss, wanted.detach(), rtol=0, atol=1e-12)


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.b(torch.tanh(self.a(x)))
        return h, (h > 99).sum(0)


def test_an_output_without_a_batch_that_may_differ_is_warned_of(caplog):
    x = torch.randn(6, 4)
    runtime = Runtime(*make(Large(), (x,), {}, n_stages=2, n_microbatches=3))
    with caplog.at_level(logging.WARNING, logger="autopipe"):
        runtime.forward(x)
        runtime.forward(x)
    assert caplog.text.count("has no batch axis and hangs on the rows") == 1


def far(n):
    """Of many sums, each of the one before twice."""
    for _ in range(30):
        n = n + n
    return n


class Numbers(nn.Module):
    """Numbers made of sizes beside a tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.b(torch.tanh(self.a(x)))
        return {
            "h": h,
            "rows": len(x),
            "places": h.shape[0] * x.shape[1],
            "odd": 2 * x.size(0) + 1,
            "share": 1 / x.shape[0],
            "root": math.sqrt(h.numel()),
            "far": far(len(x)),
            "shape": tuple(h.shape),
            "width": h.shape[-1],
            "seven": 7,
        }


@pytest.mark.parametrize("rows", [4, 7])
def test_numbers_of_the_batch_are_the_whole_batchs(rows, caplog):
    model, x = Numbers(), torch.randn(rows, 3, 4)
    runtime = Runtime(*make(model, (torch.randn(4, 3, 4),), {}, n_stages=2, n_microbatches=3))
    found, wanted = runtime.forward(x), model(x)
    torch.testing.assert_close(found.pop("h"), wanted.pop("h"))
    assert found == wanted
    assert not caplog.text


class Counted(nn.Module):
    """Tells beside its outputs how many rows there are, and a number that 22 rows do not have."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))), len(x), 1 / (len(x) - 22)


def test_a_loss_that_divides_by_the_number_of_rows_is_a_mean_over_them(caplog):
    torch.manual_seed(0)
    model, x = Counted().double(), torch.randn(6, 4, dtype=torch.float64)

    def loss_fn(output, target):
        return (output[0] - target).square().sum() / output[1]

    runtime = Runtime(*make(model, (x,), {}, n_stages=2, n_microbatches=3), loss_fn=loss_fn)
    loss = runtime.step(x, target=x).loss
    torch.testing.assert_close(loss, loss_fn(model(x), x).detach(), check_dtype=False)
    assert not caplog.text


def test_a_number_that_the_whole_batch_has_not_is_that_of_the_first_microbatch():
    runtime = Runtime(*make(Counted(), (torch.randn(6, 4),), {}, n_stages=2, n_microbatches=2))
    _, rows, left = runtime.forward(torch.randn(22, 4))
    assert (rows, left) == (22, 1 / (11 - 22))
