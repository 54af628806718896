"""What mixes rows at a model's end runs once on the whole batch: the same numbers as the plain model."""

import collections
import copy
import pathlib

import pytest
import torch
import torch.nn.functional as F
from processes import run_ranks
from splitting import split_by_layers
from tail_checks import EXACT, batch, loss_fn, plain, runtime_of, same, split, worst
from tail_models import MODELS, Balanced, Early, Mined, Similar, TwoTowers, features
from torch import nn

import autopipe
from autopipe.tracing.rows import tail

SCRIPT = pathlib.Path(__file__).parents[1] / "runtime_ranks.py"


@pytest.mark.parametrize("make_model", MODELS)
def test_equal_to_the_plain_model(make_model, caplog):
    model, args, pipe = split(make_model, 1)
    assert pipe.graph.ops.tail, pipe.graph.variation.tail.obstacle
    for n_stages in (1, 2, 4):
        if n_stages > 1:
            pipe = split(pipe.graph, n_stages)[2]
        (loss,), (output,), twin = plain(model, args)
        runtime = runtime_of(pipe, make_model)
        found = runtime.step(*args, return_outputs=True)
        assert abs(found.loss.item() - loss) < EXACT
        assert worst(runtime.named_parameters(), twin) < EXACT
        same(found.outputs, output)
        same(list(model.buffers()), list(twin.buffers()))
        same(runtime.forward(*args), plain(model, args)[1][0])
        model.zero_grad()
    assert "depend on one another" not in caplog.text


@pytest.mark.timeout(120)
@pytest.mark.parametrize("n_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_equal_on_ranks(n_ranks):
    run_ranks(SCRIPT, n_ranks, "tails", timeout_s=100)


def test_a_model_that_mixes_in_the_middle_is_refused():
    torch.manual_seed(0)
    args = (*features(6), *features(6))
    pipe = split_by_layers(Early(), 2, args, n_microbatches=3)
    assert not pipe.graph.ops.tail
    with pytest.raises(autopipe.InputError, match=r"in the middle.*n_microbatches=1"):
        pipe.runtime().step(*args)
    assert torch.isfinite(pipe.runtime().step(*args, n_microbatches=1).loss)


def test_refused_or_allowed_where_asked():
    model, args, pipe = split(TwoTowers, 2)
    with pytest.raises(autopipe.InputError, match="depend on one another"):
        pipe.runtime(mixed_rows="refuse").step(*args)
    (loss,), _, _ = plain(model, args)
    assert abs(pipe.runtime(mixed_rows="allow").step(*args).loss.item() - loss) > 0.1


class Once(nn.Module):
    """One layer for each row, and two behind the mean of all rows, which have half of the parameters."""

    def __init__(self):
        super().__init__()
        self.ahead, self.first, self.second = nn.Linear(6, 12), nn.Linear(12, 4), nn.Linear(4, 5)

    def forward(self, x):
        return self.second(self.first(self.ahead(x).mean(0)).tanh()).square().sum()


def test_a_tail_that_is_most_of_a_model_is_cut_where_one_microbatch_is_all():
    torch.manual_seed(0)
    model, x = Once().double(), torch.randn(6, 6, dtype=torch.float64)
    plain = copy.deepcopy(model)
    with pytest.raises(autopipe.InfeasibleError, match=r"2 stages at most.*mix the rows of a batch"):
        autopipe.split(model, 3, (x,), costs="estimated", n_microbatches=2)
    pipe = autopipe.split(model, 3, (x,), costs="estimated", n_microbatches=1)
    assert pipe.graph.ops.tail
    assert "tail" not in pipe.plan.settings
    loss = pipe.runtime().step(x).loss
    expected = plain(x)
    expected.backward()
    torch.testing.assert_close(loss.item(), expected.item())
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=1e-12)
    with pytest.raises(autopipe.InputError, match="plan for several microbatches"):
        pipe.runtime(n_microbatches=2).step(x)


def test_the_plan_waits_for_every_microbatch_and_says_so():
    pipe = split(TwoTowers, 4)[2]
    assert pipe.plan.schedule == "gpipe"
    assert all(s.in_flight == pipe.plan.n_microbatches for s in pipe.plan.stages)
    assert "mix the rows of a batch" in pipe.plan.settings["tail"]
    assert "tail_models.py" in pipe.plan.settings["tail"]
    assert "mix the rows of a batch" in str(pipe)
    assert split(TwoTowers, 4, schedule="interleaved")[2].plan.schedule == "looped-bfs"
    assert split(TwoTowers, 2, schedule="auto")[2].plan.schedule in ("gpipe", "looped-bfs")
    assert split(TwoTowers, 2, schedule="zb-h1", n_microbatches=1)[2].plan.schedule == "zb-h1"
    with pytest.raises(autopipe.InputError, match="'gpipe' or 'looped-bfs'"):
        split(TwoTowers, 2, schedule="zb-h1")
    with pytest.raises(autopipe.InputError, match="'gpipe' or 'looped-bfs'"):
        pipe.runtime(schedule="1f1b")


def test_its_memory_grows_with_the_batch():
    """Scores of every pair: with the batch their bytes grow with its square, whatever the microbatches."""

    def last(n):
        torch.manual_seed(0)
        args = (*features(n), *features(n))
        made = autopipe.split(TwoTowers(), 2, args, costs="estimated", n_microbatches=4, time_limit_s=0.2)
        return made.plan.stages[-1].memory_bytes

    assert last(512) > 3.5 * last(256)


def test_accumulated_scaled_and_weighed():
    model, args, pipe = split(Mined, 2)
    other = batch(Mined, 6)
    losses, _, twin = plain(model, args, other)
    runtime = runtime_of(pipe, Mined)
    with runtime.no_sync():
        runtime.step(*args)
    runtime.step(*other)
    assert worst(runtime.named_parameters(), twin) < EXACT
    model.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    runtime = runtime_of(pipe, Mined, scaler=scaler)
    assert abs(runtime.step(*args).loss.item() - losses[0]) < EXACT
    for p in model.parameters():
        p.grad /= 64.0
    assert worst(runtime.named_parameters(), plain(model, args)[2]) < EXACT


def test_balance_of_experts_where_one_takes_every_row_of_the_example():
    torch.manual_seed(0)
    model = Balanced().double()
    with torch.no_grad():
        model.router.weight.copy_(torch.tensor([[1.0], [-1.0], [0.0]]))
    (x,) = batch(Similar)
    pipe = split_by_layers(model, 2, (x.abs(),), n_microbatches=3)
    assert pipe.graph.ops.tail
    (loss,), _, twin = plain(model, (x,))
    runtime = pipe.runtime()
    assert abs(runtime.step(x).loss.item() - loss) < EXACT
    assert worst(runtime.named_parameters(), twin) < EXACT


def test_gradients_of_inputs():
    model, (x, y), pipe = split(TwoTowers, 2)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    plain(model, (a, y))
    pipe.runtime().step(b, y)
    same(b.grad, a.grad)


def test_dropout_does_not_depend_on_the_cut():
    found = []
    for n_stages in (1, 2, 4):
        torch.manual_seed(0)
        model = Similar().double().train()
        x = torch.randn(7, 6, dtype=torch.float64)
        pipe = autopipe.split(model, n_stages, (x,), costs="estimated", n_microbatches=3, time_limit_s=0.2)
        torch.manual_seed(1)
        loss = pipe.runtime(loss_fn).step(x).loss.item()
        found.append((loss, [p.grad.clone() for p in model.parameters()]))
    for loss, grads in found[1:]:
        assert abs(loss - found[0][0]) < EXACT
        same(grads, found[0][1])


def test_batch_norm_ahead_of_the_tail_is_warned_of(caplog):
    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.towers = torch.nn.BatchNorm1d(6), TwoTowers()

        def forward(self, x, y):
            return self.towers(self.norm(x), y)

    torch.manual_seed(0)
    args = (*features(8), *features(8))
    captured = autopipe.capture(Normed(), args, open=["towers"])
    pipe = split_by_layers(captured, 2, n_microbatches=2)
    assert pipe.graph.ops.tail
    pipe.runtime().step(*args)
    assert "norm in training" in caplog.text


def test_verify_runs_the_tail_on_the_batch(caplog):
    split(TwoTowers, 2)[2].verify()
    assert "microbatches" not in caplog.text


def test_a_plan_that_has_the_tail_elsewhere_is_refused():
    from runtime_models import make

    torch.manual_seed(0)
    args = batch(TwoTowers)
    captured, plan, stages = make(TwoTowers().double(), args, {}, n_stages=3)
    assert "tail" not in stages[-1].sections
    with pytest.raises(autopipe.InputError, match="plan for several microbatches"):
        autopipe.runtime.Runtime(captured, plan, stages).step(*args)


class Transposed(nn.Module):
    """Hands a norm, the first layer of its tail, what lies in another order than it counts axes."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        h = self.last(self.inner(x).tanh()).transpose(1, 3)
        h = self.norm(h).transpose(1, 3).flatten(1)
        return F.cross_entropy(h @ h.t() / 9, torch.arange(len(h), device=h.device)), h.t().contiguous().t()


@pytest.mark.parametrize("training", [False, True])
def test_what_a_tail_is_given_lies_as_that_of_the_batch(training):
    torch.manual_seed(0)
    model, x = Transposed().double().train(training), torch.randn(6, 1, 5, 6).double()
    pipe = split_by_layers(model, 2, (x,), n_microbatches=3)
    assert "norm" in pipe.graph.ops.tail
    twin = copy.deepcopy(model)
    loss, features_ = twin(x)
    loss.backward()
    found = pipe.runtime().step(x, return_outputs=True)
    assert abs(found.loss - loss.item()) < EXACT
    assert found.outputs[1].stride() == features_.stride()
    for parameter, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad, rtol=0, atol=1e-10)


class InAnotherOrder(nn.Module):
    """Makes the factors of its loss in the other order where gradients are not asked for."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.b(self.a(x).relu())
        spread = x.square().mean() if not torch.is_grad_enabled() else None
        contrast = F.cross_entropy(x @ x.T, torch.arange(len(x)))
        return contrast * (x.square().mean() if spread is None else spread)


def test_what_a_tail_is_given_without_rows_is_made_in_it_in_every_form():
    torch.manual_seed(0)
    model, x = InAnotherOrder().double(), torch.randn(6, 4).double()
    runtime = split_by_layers(model, 2, (x,), n_microbatches=3).runtime()
    expected = model(x).detach()
    torch.testing.assert_close(runtime.step(x).loss.detach().as_subclass(torch.Tensor), expected)
    torch.testing.assert_close(runtime.evaluate(x).loss.as_subclass(torch.Tensor), expected)


class PerTask(nn.Module):
    """A mean over tasks of the means over rows that have a label, as for tables with gaps."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x, y, there):
        h, losses = self.b(torch.tanh(self.a(x))), []
        for task in range(3):
            rows = there[:, task] > 0
            if rows.any():
                losses.append(F.mse_loss(h[rows, task], y[rows, task]))
        return torch.stack(losses).mean()


@pytest.mark.parametrize("seed", [3, 11, 21, 22])
def test_tasks_of_which_rows_have_no_label_are_those_of_the_batch_or_refused(seed):
    """Where the example's first rows have no label of a task, and where one of microbatches has none."""
    torch.manual_seed(seed)
    model = PerTask().double()
    given = [
        (torch.randn(n, 6).double(), torch.randn(n, 3).double(), (torch.rand(n, 3) > 0.4).float())
        for n in (6, 8, 5)
    ]
    given[0][2][:2, 1] = 0.0
    runtime = split_by_layers(model, 2, given[0], n_microbatches=3).runtime()
    for args in given:
        twin = copy.deepcopy(model)
        loss = twin(*args)
        loss.backward()
        model.zero_grad()
        try:
            found = runtime.step(*args).loss
        except autopipe.InputError:
            found = runtime.step(*args, n_microbatches=1).loss
        assert abs(found.item() - loss.item()) < EXACT
        assert worst(runtime.named_parameters(), twin) < EXACT


def test_what_follows_is_found_with_one_look_at_each_value(monkeypatch):
    looks = collections.Counter()
    is_mixed = tail._View._is_mixed
    views = []  # so that none has the id of another

    def looking(self, call):
        views.append(self)
        looks[id(self), call.name] += 1
        return is_mixed(self, call)

    monkeypatch.setattr(tail._View, "_is_mixed", looking)
    assert split(TwoTowers, 2)[2].graph.ops.tail
    assert {*looks.values()} == {1}
