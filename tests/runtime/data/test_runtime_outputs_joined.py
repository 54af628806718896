"""Outputs with several places for each row, numbers of rows and numbers that are sums are the batch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from splitting import split_by_layers
from torch import Tensor, nn

from autopipe.errors import AutopipeError, InputError
from autopipe.runtime.wire.announcement import Form


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(4, 4), nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.b(torch.tanh(self.a(x))))


def compared(function: Callable[[Tensor], Any], loss_fn: Any, sizes: tuple[int, ...] = (6, 5, 4)) -> None:
    """Steps and evaluations of a pipeline in three microbatches beside the plain model."""
    torch.manual_seed(0)
    model = Net(function).double()
    pipe = split_by_layers(model, 2, (torch.randn(6, 3, 4).double(),), n_microbatches=3)
    runtime = pipe.runtime() if loss_fn is None else pipe.runtime(loss_fn=loss_fn)
    for n in sizes:
        x = torch.randn(n, 3, 4).double()
        model.zero_grad()
        expected = model(x)
        loss = expected[0] if loss_fn is None else loss_fn(expected, None)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        result = runtime.step(x, return_outputs=True)
        torch.testing.assert_close(result.outputs, expected, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(result.loss, loss, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close([p.grad for p in model.parameters()], gradients, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(runtime.forward(x), expected, rtol=1e-9, atol=1e-12)


def mean_of_first(output: Any, target: Any) -> Tensor:
    return (output if isinstance(output, Tensor) else output[0]).square().mean()


PLACES: dict[str, Callable[[Tensor], Any]] = {
    "one block after another": lambda h: torch.cat([h, -2 * h]),
    "repeated": lambda h: h.repeat(3, 1, 1),
    "rows side by side": lambda h: torch.stack([h, -2 * h], 1).flatten(0, 1),
    "repeated in place": lambda h: h.repeat_interleave(3, 0),
    "steps of each row": lambda h: h.flatten(0, 1),
    "rows of each step": lambda h: (h, h.transpose(0, 1).reshape(-1, 4)),
    "whole numbers": lambda h: (h, torch.cat([h.argmax(-1), h.argmin(-1)])),
}
MIXED: dict[str, Callable[[Tensor], Any]] = {
    "centred blocks": lambda h: torch.cat([h, -2 * h]) - torch.cat([h, -2 * h]).mean(0),
    "softmax over blocks": lambda h: torch.cat([h, 2 * h]).softmax(0),
    "pairs": lambda h: h[torch.triu_indices(len(h), len(h), 1)].diff(dim=0)[0],
    "one more": lambda h: torch.cat([h.new_ones(1, 3, 4), h]),
}


@pytest.mark.parametrize("kind", PLACES)
def test_places_of_rows_come_in_the_order_of_the_batch(kind: str) -> None:
    compared(PLACES[kind], mean_of_first)


@pytest.mark.parametrize("kind", MIXED)
def test_places_that_are_not_of_single_rows_are_made_of_the_batch(kind: str) -> None:
    compared(MIXED[kind], mean_of_first, sizes=(6,))


NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "sum and mean": lambda h: (h.square().sum(), h.mean()),
    "mean and sum": lambda h: (h.square().mean(), h.sum()),
    "sum, mean and rows": lambda h: (h.square().sum(), h.mean(), h),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_loss_of_the_models_own_beside_numbers_of_another_kind(kind: str) -> None:
    compared(NUMBERS[kind], None)


def test_sums_beside_a_loss_function_are_added_up() -> None:
    compared(lambda h: (h, h.sum(), h.mean()), mean_of_first)


def test_a_sum_that_a_loss_function_takes_for_its_loss_is_told(caplog: pytest.LogCaptureFixture) -> None:
    compared(lambda h: (h.square().sum(),), lambda output, target: output[0], sizes=(6,))
    assert "loss_fn is called once on the whole batch" in caplog.text


def test_an_output_whose_size_is_no_multiple_of_the_rows_is_refused() -> None:
    with pytest.raises(InputError, match="no certain number of places"):
        compared(lambda h: (h, torch.arange(len(h) + 1)), mean_of_first, sizes=(6,))


class Padded(nn.Module):
    """Gives three places at least, however few rows there are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        told = self.last(self.first(x).tanh())
        padded = F.pad(told, (0, 0, 0, max(len(x), 3) - len(x)))
        return F.cross_entropy(padded[: len(x)], y), padded


def test_an_output_of_which_small_microbatches_have_more_places_than_the_batch_is_refused() -> None:
    x, y = torch.randn(8, 6), torch.arange(8) % 3
    for n_microbatches, is_right in ((2, True), (4, False)):
        model = Padded()
        pipe = split_by_layers(model, 2, (x, y), n_microbatches=n_microbatches)
        runtime = pipe.runtime()
        assert runtime.step(x, y).loss.isfinite()
        if is_right:
            torch.testing.assert_close(runtime.forward(x, y)[1], model(x, y)[1])
            continue
        with pytest.raises(AutopipeError, match=r"3 places along axis 0 for a microbatch of 2 rows"):
            runtime.step(x, y, return_outputs=True)


def test_a_sparse_output_is_that_of_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    compared(lambda h: (h, h.relu().detach().to_sparse()), mean_of_first)
    assert "could not be told" not in caplog.text


def test_a_sparse_tensor_does_not_cross_between_ranks() -> None:
    with pytest.raises(
        InputError, match="sparse_coo does not cross between ranks; let the model return to_dense"
    ):
        Form.of(torch.eye(3).to_sparse())


COUNTED: dict[str, Callable[[Tensor], Any]] = {
    "rows that meet a condition": lambda h: (
        h,
        (h[:, 0, 0] > 0).nonzero(),
        torch.where(h[:, 0, 0] > h[:, 1, 0]),
    ),
    "places in rows": lambda h: (h, (h > 0).nonzero()),
    "every row": lambda h: (h, torch.arange(len(h)), torch.ones(len(h), dtype=torch.long).cumsum(0)),
    "every step of a row": lambda h: (
        h,
        torch.arange(h.shape[0] * h.shape[1]).view(h.shape[:2]),
        h.argmax(-1),
    ),
    "how many there are": lambda h: (h, torch.tensor(len(h)), len(h), h.shape),
    "how many meet a condition": lambda h: (h, (h > 0).sum(), (h > 0).sum().item(), len((h > 0).nonzero())),
    "how many of each kind": lambda h: (h, torch.bincount(h.argmax(-1).flatten(), minlength=4)),
    "sums of columns": lambda h: (h, h.sum((0, 1)), h.sum().item()),
    "what stays": lambda h: (h, torch.tensor(h.shape[1]), torch.arange(h.shape[1]), (h > 9).any()),
}
UNTOLD: dict[str, Callable[[Tensor], Any]] = {
    "an order of rows": lambda h: (h, h[:, 0, 0].argsort()),
    "places in columns": lambda h: (h, (h[0] > 0).nonzero()),
    "places behind kinds": lambda h: (h, torch.cat([h[:, 0].argmax(-1), torch.arange(len(h))])),
    "the first row": lambda h: (h, torch.arange(len(h)) == 0),
}
NEITHER: dict[str, Callable[[Tensor], Any]] = {
    "the best row": lambda h: (h, h[:, 0, 0].argmax()),
    "what the best row holds": lambda h: (h, h[h[:, 0, 0].argmax()]),
    "the largest of each column": lambda h: (h, h.amax(0)),
    "spreads": lambda h: (h, h.std(0)),
    "products of rows, whether any": lambda h: (h, torch.linalg.svdvals(h[:, 0]).sum().item(), (h[0] > 0)),
    "a count beside a size": lambda h: (h, torch.tensor([len(h), 3])),
}
MEANS: dict[str, Callable[[Tensor], Any]] = {
    "columns": lambda h: (h, h.mean(0), h.mean((0, 1), keepdim=True)),
    "products": lambda h: (h, torch.einsum("bti,btj->ij", h, h) / len(h)),
    "Python's numbers": lambda h: (h, h.mean().item(), float(h.square().sum()) / len(h)),
    "of one place": lambda h: (h, h.mean().view(1, 1), h.sum().view(1)),
}
LATER: dict[str, Callable[[Tensor], Any]] = {
    "a sum of parts": lambda h: (h, torch.relu(h - 1e-3).sum(), h.mean()),
    "a sum of parts in columns": lambda h: (h, torch.relu(h - 1e-3).sum(0)),
    "a count in floats": lambda h: (h, (h > 1e-3).double().sum()),
}
FIRST: dict[str, Callable[[Tensor], Any]] = {
    "rows of a kind that the example lacks": lambda h: (h, (h[:, 0, 0] > 99).nonzero()),
    "a count of what the example lacks": lambda h: (h, (h > 99).sum()),
}


@pytest.mark.parametrize("kind", COUNTED)
def test_whole_numbers_of_rows_and_counts_are_those_of_the_batch(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    compared(COUNTED[kind], mean_of_first)
    assert "batch axis" not in caplog.text


def test_what_the_first_rows_of_the_example_lack_is_asked_of_its_others() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4).double()
    model = Net(lambda h: (h, (h[:, 0, 0] > h[:, 1, 0]).nonzero(), (h[:, 0, 0] > h[:, 1, 0]).sum())).double()
    met = model(x)[1].flatten()
    assert 0 < len(met) <= 4
    example = x[torch.ones(6).index_fill(0, met, 2.0).argsort()]
    pipe = split_by_layers(model, 2, (example,), n_microbatches=3)
    outputs = pipe.runtime(loss_fn=mean_of_first).step(x, return_outputs=True).outputs
    torch.testing.assert_close(outputs, model(x))


def in_three(function: Callable[[Tensor], Any]) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4).double()
    pipe = split_by_layers(Net(function).double(), 2, (x,), n_microbatches=3)
    return pipe.runtime(loss_fn=mean_of_first), x


@pytest.mark.parametrize("kind", UNTOLD)
def test_whole_numbers_that_microbatches_do_not_tell_are_refused_by_name(kind: str) -> None:
    runtime, x = in_three(UNTOLD[kind])
    runtime.step(x)
    with pytest.raises(
        InputError, match=r"output \w+ has (no certain number of places|whole numbers that hang)"
    ):
        runtime.step(x, return_outputs=True)


@pytest.mark.parametrize("kind", MEANS)
def test_means_over_rows_are_those_of_the_batch(kind: str) -> None:
    compared(MEANS[kind], mean_of_first)


LOGGED: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda h: h.square().mean().item(),
    "float": lambda h: float(h.square().mean().detach()),
    "tolist": lambda h: h.square().mean().tolist(),
    "on the host": lambda h: h.square().mean().detach().cpu().item(),
    "a share": lambda h: (h.argmax(-1) == 1).float().mean().item(),
    "a share of none": lambda h: (h > 99).float().mean().item(),
    "a count": lambda h: (h.argmax(-1) == 1).sum().item() / h[..., 0].numel(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", LOGGED)
def test_numbers_that_a_model_logs_are_those_of_the_batch(kind: str, dtype: torch.dtype) -> None:
    """Those of narrow tensors were held to the rounding of the widest, and refused as no means."""
    torch.manual_seed(0)
    model = Net(lambda h: (h.square().mean(), {"log": LOGGED[kind](h)})).to(dtype)
    runtime = split_by_layers(model, 2, (torch.randn(6, 3, 4, dtype=dtype),), n_microbatches=3).runtime()
    for n in (6, 5):
        x = torch.randn(n, 3, 4, dtype=dtype)
        found, expected = runtime.step(x, return_outputs=True).outputs[1]["log"], model(x)[1]["log"]
        assert isinstance(found, float)
        assert found == pytest.approx(expected, rel=5 * torch.finfo(dtype).eps, abs=1e-9)


def test_a_number_that_is_every_microbatches_is_as_the_model_gives_it() -> None:
    """The mean of seven rows' shares rounded it."""

    class Scaled(Net):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), self.scale.item()

    model = Scaled(lambda h: h)
    model.scale = nn.Parameter(torch.tensor(0.1))
    x = torch.randn(7, 3, 4)
    runtime = split_by_layers(model, 2, (x,), n_microbatches=3).runtime()
    assert runtime.forward(x)[1] == model(x)[1]


@pytest.mark.parametrize("bend", [torch.exp, torch.sqrt])
def test_what_bends_a_mean_is_no_mean(
    bend: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    """Of rows that are nearly alike it looks like one."""
    torch.manual_seed(0)
    model = Net(lambda h: (h, bend(1 + h.mean()).item()))
    x = torch.randn(6, 3, 4) * 1e-2
    runtime = split_by_layers(model, 2, (x,), n_microbatches=3).runtime(loss_fn=mean_of_first)
    result = runtime.step(x, return_outputs=True)
    assert "their mean is returned" in caplog.text
    assert result.outputs[1] == pytest.approx(model(x)[1], rel=1e-2)


@pytest.mark.parametrize("kind", LATER)
def test_sums_that_are_nought_for_the_example_are_those_of_the_batch(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4).double()
    model = Net(LATER[kind]).double()
    with torch.no_grad():
        model.b.weight[:], model.b.bias[:] = model.b.weight.abs(), 0.0
        model.a.weight[:], model.a.bias[:] = model.a.weight.abs(), 0.0
    pipe = split_by_layers(model, 2, (-x.abs(),), n_microbatches=3)
    assert not model(-x.abs())[1].any()
    assert model(x)[1].any()
    outputs = pipe.runtime(loss_fn=mean_of_first).step(x, return_outputs=True).outputs
    torch.testing.assert_close(outputs, model(x))


@pytest.mark.parametrize("kind", NEITHER)
def test_what_is_neither_mean_nor_sum_of_rows_is_refused_by_name(kind: str) -> None:
    runtime, x = in_three(NEITHER[kind])
    runtime.step(x)
    with pytest.raises(InputError, match=r"output \w+ has no batch axis .* neither a mean nor a sum"):
        runtime.step(x, return_outputs=True)


@pytest.mark.parametrize("kind", ["what the best row holds", "the largest of each column", "spreads"])
def test_a_loss_of_what_is_neither_mean_nor_sum_of_rows_is_refused(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4).double()
    pipe = split_by_layers(Net(NEITHER[kind]).double(), 2, (x,), n_microbatches=3)

    def loss_fn(output: Any, target: Any) -> Tensor:
        return output[0].square().mean() + output[1].square().mean()

    with pytest.raises(InputError, match=r"loss_fn takes .* neither a mean nor a sum.* n_microbatches=1"):
        pipe.runtime(loss_fn=loss_fn).step(x)
    for options in ({"n_microbatches": 1}, {"loss_on": "microbatches"}):
        pipe.runtime(loss_fn=loss_fn, **options).step(x)


def test_a_table_whose_places_vary_where_the_rows_are_fixed_is_no_batch() -> None:
    class Matched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, queries: Tensor, choices: Tensor, table: Tensor) -> Tensor:
            found = torch.einsum("bk,bck->bc", self.a(queries), self.b(choices).view(len(queries), 3, 4))
            return found + (queries @ table.t()).sum(-1, keepdim=True)

    torch.manual_seed(0)
    given = torch.randn(6, 4), torch.randn(18, 4), torch.randn(4, 4)
    pipe = split_by_layers(Matched(), 2, given)
    runtime = pipe.runtime(loss_fn=lambda output, target: output.square().mean())
    assert torch.equal(runtime.step(*given).loss, pipe.graph.model(*given).square().mean())
    with pytest.raises(InputError, match="loss_fn takes of the whole batch what microbatches do not give"):
        runtime.step(*given, n_microbatches=2)


@pytest.mark.parametrize("kind", FIRST)
def test_counts_of_what_the_example_lacks_are_told_by_name(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, x = in_three(FIRST[kind])
    runtime.step(x[:1].expand_as(x), return_outputs=True)  # all microbatches give the same
    assert caplog.text.count("has no batch axis and hangs on the rows of a batch") == 1


TOLD_BY_SIZE: dict[str, Callable[[Tensor], Any]] = {
    "a truth": lambda h: (h, len(h) > 3),
    "of a word": lambda h: (h, len("large" if len(h) > 3 else "as small")),
    "a number": lambda h: (h, 0.5 if len(h) > 3 else 2),
    "nothing": lambda h: (h, None if len(h) > 3 else 2),
}


@pytest.mark.parametrize("kind", TOLD_BY_SIZE)
def test_constants_that_the_number_of_rows_decides_are_those_of_the_batch(kind: str) -> None:
    compared(TOLD_BY_SIZE[kind], mean_of_first)
