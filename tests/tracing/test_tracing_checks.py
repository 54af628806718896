"""Checks of data in a model's own code become run-time guards, wherever they stand."""

from __future__ import annotations

import contextlib
import logging
import warnings

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe.errors import InputError
from autopipe.tracing import capture
from autopipe.tracing.code.checks import expect, is_check


class Checked(nn.Module):
    """Refuses large values and rows that differ in how many elements are positive."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            raise ValueError("values over 100")
        assert not torch.isnan(x).any()
        if len(torch.unique_consecutive(x.isinf().sum(-1))) > 1:
            raise ValueError("rows differ")
        return self.second(self.first(x))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 100:
            x = x / 100
        return self.first(x)


def test_checks_hold_at_run_time() -> None:
    model = Checked()
    captured = capture(model, (torch.rand(2, 4),))
    x = torch.rand(3, 4)
    assert torch.equal(captured(x), model(x))
    with pytest.raises(InputError, match=r"test_tracing_checks\.py:\d+: a check of the data comes out True"):
        captured(x + 200)


def test_a_branch_that_computes_is_no_check() -> None:
    model = Branching()
    captured = capture(model, (torch.rand(2, 4),))
    for x in (torch.rand(3, 4), torch.rand(3, 4) + 200):
        assert torch.equal(captured(x), model(x))


def test_is_check_reads_the_source(tmp_path) -> None:
    path = tmp_path / "code.py"
    path.write_text("if a:\n    raise ValueError\nif b:\n    c = 1\nassert (\n    d\n)\n")
    assert [is_check(f"{path}:{n}") for n in range(1, 8)] == [True, False, False, False, False, True, False]
    assert not is_check("")


def test_expect_names_the_place() -> None:
    expect(torch.tensor(True), True, "model.py:3")
    with pytest.raises(InputError, match=r"model\.py:3"):
        expect(torch.tensor(True), False, "model.py:3")


class LateCheck(nn.Module):
    """Checks, at the end, a number that depends on the data that the layers before it made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        if y[y > -100].numel() // 4 < 1:
            raise ValueError("no row is left")
        return y.cos()


def test_a_check_stands_behind_what_it_reads_however_the_model_is_cut() -> None:
    model, x = LateCheck(), torch.rand(2, 4)
    captured = autopipe.capture(model, (x,))
    assert not any(op.is_movable for op in captured.ops.ops if op.name.startswith("expect"))
    pipe = autopipe.split(model, 2, (x,), costs="estimated", balance="parameters")
    assert torch.equal(pipe(x), model(x))
    with pytest.raises(InputError, match="a check of the data comes out True"):
        pipe(torch.full((2, 4), float("nan")))


class Named(nn.Module):
    """Picks an expert by a name made of data, and tells about it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(4, 4) for i in range(4)})

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[f"expert_{x.sum(0).argmax()}"](x)


class Telling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean()
        torch._check(len(x) > 0, lambda: f"no rows, mean {mean}")
        warnings.warn(f"the mean is {mean}", stacklevel=2)
        if len(x) > 100:
            message = f"too many rows, mean {mean}"
            raise ValueError(message)
        return self.second(self.first(x))


def test_a_name_made_of_data_is_a_branch() -> None:
    torch.manual_seed(0)
    rows = torch.eye(4)
    captured = capture(Named(), (rows[:1],))
    with pytest.raises(InputError, match=r"test_tracing_checks\.py:\d+: the model reads .* comes out 1"):
        captured(rows[1:2])
    model = nn.Sequential(nn.Linear(4, 4), Named(), nn.Linear(4, 4))
    captured = capture(model, (rows[:1],), open=["1"])
    for i in range(4):
        assert torch.equal(captured(rows[i : i + 1]), model(rows[i : i + 1]))


@pytest.mark.filterwarnings("ignore:the mean is")
def test_data_in_words_is_no_branch() -> None:
    model = Telling()
    captured = capture(model, (torch.randn(2, 4),))
    x = torch.randn(5, 4)
    assert torch.equal(captured(x), model(x))
    assert {op.module_path for op in captured.ops.compute} >= {"first", "second"}


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def run(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


class Policy(Layers):
    """A policy whose distribution is made, and its arguments checked, in the model's own forward."""

    def forward(self, x):
        x = self.run(x)
        chosen = torch.distributions.Normal(x[:, :2], x[:, 2:].exp(), validate_args=True)
        return chosen.log_prob(torch.zeros_like(x[:, :2])), chosen.entropy()


def test_the_checks_that_torch_makes_of_distributions_are_kept():
    model = Policy()
    captured = capture(model, (torch.randn(2, 4),))
    x = torch.randn(3, 4)
    for a, b in zip(captured(x), model(x), strict=True):
        torch.testing.assert_close(a, b)
    with pytest.raises(InputError, match="a check of the data"):
        captured(torch.full((3, 4), torch.nan))


def is_positive(x):
    return bool(x.abs().sum() > 0)


class Asking(Layers):
    """A check whose truth a function of the model's own asks for."""

    def forward(self, x):
        x = self.run(x)
        if not is_positive(x):
            raise ValueError("all is zero")
        return x


def test_a_check_asked_for_by_a_function_of_the_model_is_kept():
    model = Asking()
    captured = capture(model, (torch.randn(2, 4),))
    assert {op.module_path for op in captured.ops.compute} >= {"layers.0", "layers.1", "layers.2"}
    x = torch.randn(3, 4)
    torch.testing.assert_close(captured(x), model(x))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(InputError, match="a check of the data"):
        captured(x)


class Logs:
    """Has the methods of a logger, which do something else."""

    def log(self, text):
        return float(len(text))

    info = warning = log


_logger = logging.getLogger(__name__)
_logs = Logs()
TOLD = {
    "printed": lambda n, x: print("rows", n),
    "logged": lambda n, x: _logger.info(f"{n} rows"),
    "logged_later": lambda n, x: _logger.info("%s rows", n),
    "logged_by_name": lambda n, x: logging.getLogger("autopipe.tests").debug(f"{n!s} rows"),
    "warned": lambda n, x: warnings.warn(f"{n} rows", stacklevel=1),
}
TAKEN = {
    "beside_a_log": lambda n, x: x * float(len(str(n))) + x.new_tensor(1.0).log(),
    "beside_a_warning": lambda n, x: (_logger.info("rows"), x * len(f"{n}"))[1],
    "by_a_log_of_its_own": lambda n, x: x * _logs.log(str(n)),
    "by_an_attribute_named_info": lambda n, x: x * _logs.info(f"{n}"),
}


class Wording(Layers):
    def __init__(self, does):
        super().__init__()
        self.does = does

    def forward(self, x):
        x = self.run(x)
        found = self.does(x.shape[0], x)
        return x if found is None else found


@pytest.mark.filterwarnings("ignore:. rows")
@pytest.mark.parametrize("does", TOLD.values(), ids=TOLD)
def test_the_number_of_rows_in_words_that_tell_people_is_free(does):
    captured = capture(Wording(does), (torch.randn(4, 4),))
    assert captured(torch.randn(12, 4)).shape == (12, 4)


@pytest.mark.parametrize("does", TAKEN.values(), ids=TAKEN)
def test_the_number_of_rows_in_a_text_that_the_model_takes_is_seen(does):
    model, x = Wording(does), torch.randn(12, 4)
    captured = capture(model, (torch.randn(4, 4),))
    with contextlib.suppress(InputError):  # or it is recorded for this number, or followed
        assert torch.equal(captured(x), model(x))
