"""Statements of a root's own forward that go by data, or by sizes in a loop, stay whole as functions do."""

from __future__ import annotations

import contextlib
import functools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopipe
from autopipe.errors import AutopipeError, CaptureError
from autopipe.tracing import capture
from autopipe.tracing.runs.session import Session

D = 4


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(D, D), nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
        self.weight, self.steps = nn.Parameter(torch.eye(D) / 2), 0

    def scaled(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Halving(Base):
    """Goes by the data as long as these say."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        while float(x.detach().abs().amax()) > 0.5:
            x = self.scaled(x)
        return self.after(x)


class Recurrent(Base):
    """Goes through a sequence, with a list of what it has seen."""

    def forward(self, x: Tensor) -> Any:
        x = self.before(x)
        state, seen = x.new_zeros(x.shape[0], D), []
        for t in range(x.shape[1]):
            state = torch.tanh(x[:, t] @ self.weight + state)
            seen.append(state)
        return self.after(torch.stack(seen, 1)), state


class Ragged(Base):
    """Takes the mean of each row as far as it is told to."""

    def forward(self, x: Tensor, n: Tensor) -> Tensor:
        x = self.before(x)
        if n.max() == 0:
            return self.after(x.mean(1))
        means = [x[b, : n[b]].mean(0, keepdim=True) for b in range(x.shape[0])]
        return self.after(torch.cat(means))


class Around(Base):
    """Has names of its own around the statement, a function within, and calls the class below."""

    def forward(self, x: Tensor, *, shift: float = 2.0) -> Tensor:
        factor, kept = shift / 2, {"x": x}
        while x.detach().abs().amax().item() > 1:
            halved = lambda y: y * factor / 2  # noqa: E731
            kept["x"] = x = halved(self.scaled(x))
        return self.after(kept["x"] + super().scaled(x))


def draws(seed: int, rows: int = 2, length: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(rows, length, D, generator=generator, dtype=torch.float64)


def held_alike(model: nn.Module, run: Any, *args: Tensor) -> None:
    for training in (False, True):
        model.train(training)
        for expected, got in zip(_shown(model, model, args), _shown(model, run, args), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def _shown(model: nn.Module, run: Any, args: tuple[Tensor, ...]) -> list[Tensor]:
    out = run(*args)
    leaves = [out] if isinstance(out, Tensor) else list(out)
    loss = sum(t.square().sum() for t in leaves)
    used = torch.autograd.grad(loss, [*model.parameters()], allow_unused=True, materialize_grads=True)
    return [*(t.detach() for t in leaves), *used]


@pytest.mark.parametrize("kind", [Halving, Recurrent])
def test_a_loop_runs_as_often_as_the_model_runs_it(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    pipe = autopipe.split(model, 2, (draws(0),), costs="estimated", n_microbatches=1)
    for x in (draws(1), 9 * draws(2), draws(3) / 99, draws(4, 3), draws(5, 2, 7)):
        held_alike(model, pipe, x)


def test_a_comprehension_takes_what_numbers_among_the_inputs_say() -> None:
    torch.manual_seed(0)
    model = Ragged().double()
    pipe = autopipe.split(model, 2, (draws(0), torch.tensor([2, 5])), costs="estimated", n_microbatches=1)
    for n in ([5, 1], [3, 3, 4]):
        held_alike(model, pipe, draws(1, len(n)), torch.tensor(n))


def test_what_the_statement_is_shown_as_tells_where_it_is() -> None:
    found = capture(Halving(), (draws(0).float(),))
    (op,) = [o for o in found.ops.ops if "line" in o.target]
    assert "Halving.forward, line" in op.target
    assert op.parameters == ("weight",)


def test_a_statement_with_names_around_it() -> None:
    torch.manual_seed(0)
    model = Around().double()
    found = capture(model, (draws(0),))
    for x in (draws(1), 9 * draws(2), 99 * draws(3, 3)):
        torch.testing.assert_close(found(x), model(x), rtol=1e-12, atol=1e-12)


class Returning(Base):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            if float(x.sum()) > 1e3:
                return x
            x = self.before(x)
        return self.after(x)


class Counting(Base):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e3 or x.amax().item() > 3:
            self.steps = self.steps + 1
            x = x / self.steps
        return self.after(self.before(x))


def test_what_data_have_a_forward_count_is_counted() -> None:
    model, twin = Counting().double(), Counting().double()
    twin.load_state_dict(model.state_dict())
    held = capture(model, (draws(0),))
    for seed in range(4):
        x = draws(seed) * (1 + 9 * (seed % 2))
        torch.testing.assert_close(held(x), twin(x))
        assert model.steps == twin.steps
    assert twin.steps >= 2


def test_what_no_statement_can_do_alone_is_refused() -> None:
    model = Returning().double()
    with pytest.raises(CaptureError, match=r"line|value|attribute|reads"):
        capture(model, (draws(0),))
    assert "forward" not in vars(model)


def test_a_number_kept_as_an_attribute_is_told_with_its_place() -> None:
    class Keeping(Base):
        def forward(self, x: Tensor) -> Tensor:
            x = self.after(self.before(x))
            self.last = x.sum().item()
            return x if self.last > 0 else -x

    with pytest.raises(CaptureError, match=r"Keeping\.forward, line \d+ cannot stay whole .*attribute last"):
        capture(Keeping().double(), (draws(0),))


def test_other_names_than_on_the_example_are_refused() -> None:
    class Setting(Base):
        def forward(self, x: Tensor) -> Tensor:
            extra = None
            if x.sum().item() > 0 and x.amax().item() > 0.1:
                extra = x * 2
            return self.after(self.before(x if extra is None else extra))

    model = Setting().double()
    found = capture(model, (draws(0).abs(),))
    for x in (draws(1).abs(), -draws(1).abs()):
        with contextlib.suppress(AutopipeError):
            torch.testing.assert_close(found(x), model(x))


def around(times: int) -> Any:
    """A decorator as libraries have them: its function has the forward inside in its closure."""

    def decorate(forward: Any) -> Any:
        @functools.wraps(forward)
        def wrapper(self: nn.Module, *args: Any, scale: float = 1.0, **kwargs: Any) -> Tensor:
            return forward(self, *args, **kwargs) * times * scale

        return wrapper

    return decorate


class Decorated(Halving):
    @around(2)
    @torch.enable_grad()
    @around(3)
    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        while float(x.detach().abs().amax()) > 0.5:
            x = self.scaled(x)
        return self.after(x)


def test_a_statement_is_taken_out_of_a_forward_within_decorators() -> None:
    torch.manual_seed(0)
    model = Decorated().double()
    forward = Decorated.forward
    pipe = autopipe.split(model, 2, (draws(0),), costs="estimated", n_microbatches=1)
    assert Decorated.forward is forward
    assert "forward" not in vars(model)
    for x in (draws(1), 9 * draws(2), draws(3) / 99, draws(4, 3)):
        held_alike(model, pipe, x)


class Taught(Base):
    """Goes on from what it is given or from what it said, as a draw has it that a statement inside makes."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        said = []
        token = x[:, 0]
        for t in range(1, x.shape[1]):
            said.append(torch.tanh(self.scaled(token)))
            is_taught = random.random() < (0.5 if self.training else 0.0)
            token = x[:, t] if is_taught else said[-1]
        return self.after(torch.stack(said, 1))


def test_a_statement_that_leaves_a_truth_behind_is_kept_with_those_around() -> None:
    torch.manual_seed(0)
    model = Taught().double()
    pipe = autopipe.split(model, 2, (draws(0),), costs="estimated", n_microbatches=1)
    given = set()
    for seed in range(6):
        for training in (False, True):
            model.train(training)
            results = []
            for run in (model, pipe):
                random.seed(seed)
                results.append(run(draws(1, 3, 6)))
            torch.testing.assert_close(*results)
            given.add((training, float(results[0].detach().sum())))
    assert sum(training for training, _ in given) > 1 == sum(not training for training, _ in given)


class Experts(nn.Module):
    """Runs the experts that were chosen alone, and leaves how evenly they were."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(D, 3), nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.balance: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        weight, chosen = shares.max(-1)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows = (chosen == n).nonzero(as_tuple=True)[0]
            if rows.numel() == 0:
                continue
            out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        self.balance = shares.mean(0).square().sum() if self.training else 0.0
        return out


class Collecting(Base):
    """Adds up what its layers left in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for layer in self.layers:
            x = x + layer(x)
        balance = sum(m.balance for m in self.modules() if isinstance(m, Experts))
        return self.after(x).square().mean() + 0.1 * balance


def test_statements_of_layers_whose_inside_others_use_stay_whole() -> None:
    torch.manual_seed(0)
    model, x = Collecting().double(), draws(0, 6)[:, 0]
    captured = capture(model, (x,))
    whole = {op.module_path for op in captured.ops.ops if op.name.startswith("line_")}
    assert whole == {"layers.0", "layers.1"}
    for rows in (x, -x, draws(1, 6)[:, 0], draws(2, 3)[:, 0], x[:1].repeat(4, 1)):
        held_alike(model, captured, rows)


def test_a_model_that_has_changed_is_taken_apart_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Collecting().double(), draws(0, 6)[:, 0]
    captured = capture(model, (x,))
    tries = 0
    in_both_modes = Session.in_both_modes

    def counted(session: Session) -> Any:
        nonlocal tries
        tries += 1
        return in_both_modes(session)

    monkeypatch.setattr(Session, "in_both_modes", counted)
    model.train()(x)  # leaves other balances
    assert captured(-x) == model(-x)
    assert tries == 1


class Dropping(nn.Module):
    """Leaves layers out by a number that a statement draws and the next one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            p = random.uniform(0, 1)
            if self.training and p < 0.5:
                continue
            x = x + layer(x)
        return self.last(x)


class DroppingOfThis(Dropping):
    """The same, and calls itself by another name."""

    def forward(this, x: Tensor) -> Tensor:
        x = this.first(x)
        for layer in this.layers:
            p = random.uniform(0, 1)
            if this.training and p < 0.5:
                continue
            x = x + layer(x)
        return this.last(x)


@pytest.mark.parametrize("kind", [Dropping, DroppingOfThis])
def test_what_a_statement_draws_and_another_reads_is_one_whatever_self_is_called(kind: type) -> None:
    torch.manual_seed(0)
    model = kind()
    captured = capture(model, (torch.randn(3, D),))
    for seed in range(4):
        x = torch.randn(3, D)
        random.seed(seed)
        expected = model(x)
        random.seed(seed)
        torch.testing.assert_close(captured(x), expected)
