"""Where torch.distributed.pipelining is silently wrong or fails, ours is right: one test for each.

Each fault was seen on torch 2.13; what is tested is that ours equals the plain model.
"""

import copy

import pytest
import torch
from runtime_models import grads, make, worst
from torch import nn
from torch.nn import functional as F

from autopipe.errors import InputError
from autopipe.runtime import Runtime


def check(model, args, target, kwargs=None, *, n_stages=2, steps=1, loss_fn=F.mse_loss, **options):
    """Gradients of ``steps`` accumulated steps equal the plain model's."""
    kwargs = kwargs or {}
    model = model.double()
    plain = copy.deepcopy(model)
    made = make(model, args, kwargs, n_stages=n_stages, **options)
    runtime = Runtime(*made, loss_fn=loss_fn)
    for _ in range(steps):
        out = runtime.step(*args, **kwargs, target=target)
        loss = loss_fn(plain(*args, **kwargs), target)
        loss.backward()
        assert abs(out.loss - loss.item()) < 1e-12
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12
    return runtime, model, plain


def x_of(rows=8, d=4):
    torch.manual_seed(0)
    return torch.randn(rows, d, dtype=torch.float64)


def mlp(d=4, n=4):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(d, d), nn.Tanh()) for _ in range(n)))


class Tied(nn.Module):
    def __init__(self, d=4):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def test_tied_gradients_are_summed():
    check(Tied(), (x_of(),), x_of(), n_stages=3)


def test_a_smaller_second_batch_returns_its_own_rows():
    x = x_of()
    runtime, model, _ = check(mlp(), (x,), x)
    model.eval()
    small = runtime.forward(x[:3] + 1)
    torch.testing.assert_close(small, model(x[:3] + 1))
    assert small.shape == (3, 4)


def test_batch_norm_statistics_see_each_microbatch_once():
    x = x_of()
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)).double()
    plain = copy.deepcopy(model)
    runtime = Runtime(*make(model, (x,), {}, n_stages=2), loss_fn=F.mse_loss, n_microbatches=2)
    runtime.step(x, target=x)
    for part in x.chunk(2):
        plain(part)
    assert model[1].num_batches_tracked == 2
    torch.testing.assert_close(model[1].running_mean, plain[1].running_mean)


def test_two_accumulated_steps_are_not_scaled():
    check(mlp(), (x_of(),), x_of(), steps=2)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-h2"])
def test_zero_bubble_keeps_the_weights_after_a_frozen_stage(schedule):
    model = mlp()
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    check(model, (x_of(),), x_of(), n_stages=4, schedule=schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_zero_bubble_counts_a_weight_used_twice_once_each(schedule):
    check(Tied(), (x_of(),), x_of(), n_stages=1, n_ranks=1, schedule=schedule)


def test_compiled_stages_train_the_same():
    """What ``torch.compile`` returns has no length to be asked for; its code differs from the model's."""
    model, x = mlp().double(), x_of()
    plain = copy.deepcopy(model)
    runtime = Runtime(*make(model, (x,), {}, n_stages=2), loss_fn=F.mse_loss)
    runtime.wrap(lambda stage: torch.compile(stage, backend="aot_eager"))
    for rows in (8, 7):
        runtime.step(x[:rows], target=x[:rows])
        F.mse_loss(plain(x[:rows]), x[:rows]).backward()
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12


def test_a_step_in_compiled_code_runs_as_it_is():
    """What ``torch.compile`` makes of a training function is the user's code, and nothing of a step's own."""
    model, x = mlp().double(), x_of()
    plain, graphs = copy.deepcopy(model), []
    runtime = Runtime(*make(model, (x,), {}, n_stages=2), loss_fn=F.mse_loss)

    def train(x):
        loss = runtime.step(x, target=x).loss
        return loss + x.square().mean()

    compiled = torch.compile(train, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    F.mse_loss(plain(x), x).backward()
    assert compiled(x) == pytest.approx((F.mse_loss(plain(x), x) + x.square().mean()).item(), rel=1e-12)
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12
    assert 1 <= len(graphs) <= 3


class Skip(nn.Module):
    """A value with several consumers in other stages."""

    def __init__(self, d=4):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        h = self.a(x)
        y = self.b(h) * h
        return self.d(self.c(y) + h)


def test_skips_with_several_consumers():
    check(Skip(), (x_of(),), x_of(), n_stages=4)


class Structured(nn.Module):
    """Dict, None and nested outputs; a non-contiguous value between stages; a dict target."""

    def __init__(self, d=4):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, y=None):
        h = self.a(x).unsqueeze(2).expand(-1, -1, 3).transpose(1, 2)
        return {"out": (self.b(h), None), "rows": [h.sum(-1)]}


def test_structured_outputs_and_targets():
    x = x_of()
    target = {"a": x.unsqueeze(1).expand(-1, 3, -1), "b": torch.ones(8, 3).double()}

    def loss_fn(output, target):
        return F.mse_loss(output["out"][0], target["a"]) + F.mse_loss(output["rows"][0], target["b"])

    check(Structured(), (x,), target, loss_fn=loss_fn)


@pytest.mark.parametrize("form", ["numpy", "a list", "in a dict", "nested", "ragged", "dicts", "scalars"])
def test_rows_of_a_target_that_is_no_tensor_are_refused(form):
    """Every microbatch would get all of them, and a loss that broadcasts be of another batch."""
    x = x_of()
    rows = x.sum(1).numpy()
    boxes = [torch.ones(i % 3 + 1, 4) for i in range(len(x))]
    target = {
        "numpy": rows,
        "a list": rows.tolist(),
        "in a dict": {"y": rows},
        "nested": [x.tolist(), x],
        "ragged": boxes,
        "dicts": [{"boxes": one} for one in boxes],
        "scalars": tuple(x.sum(1)),
    }
    runtime = Runtime(*make(mlp().double(), (x,), {}, n_stages=2), loss_fn=lambda y, t: y.sum())
    with pytest.raises(InputError, match="one for each row of the batch"):
        runtime.step(x, target=target[form])


def test_values_of_a_target_that_are_of_no_row_go_to_every_microbatch():
    def loss_fn(output, target):
        return target["weights"][1] * F.mse_loss(output, target["y"])

    check(mlp(), (x_of(),), {"y": x_of(), "weights": [1.0, 2.0]}, loss_fn=loss_fn)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_a_loss_that_calls_backward_is_refused(is_frozen):
    """It would reach the last stage alone, of which nothing may train."""

    def loss_fn(output, target):
        loss = F.mse_loss(output, target)
        loss.backward(retain_graph=True)
        return loss

    x, model = x_of(), mlp().double()
    model[3].requires_grad_(not is_frozen)
    runtime = Runtime(*make(model, (x,), {}, n_stages=2), loss_fn=loss_fn)
    with pytest.raises(InputError, match=r"loss_fn calls backward\(\)"):
        runtime.step(x, target=x)


def test_a_loss_that_differentiates_its_output_is_right():
    def loss_fn(output, target):
        (slope,) = torch.autograd.grad(output.pow(3).sum(), output, create_graph=True)
        return F.mse_loss(output, target) + slope.square().mean()

    check(mlp(), (x_of(),), x_of(), loss_fn=loss_fn)


class Lengths(nn.Module):
    """RoPE-like tables made from sizes, shared by later stages."""

    def __init__(self, d=4):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x):
        angle = torch.arange(x.shape[1], dtype=x.dtype).unsqueeze(-1) / x.shape[-1]
        cos, sin = angle.cos(), angle.sin()
        x = self.a(x) * cos + x * sin
        return self.b(x) * cos - x * sin


def test_lengths_may_change_at_every_step():
    torch.manual_seed(0)
    model = Lengths().double()
    plain = copy.deepcopy(model)
    x = torch.randn(6, 5, 4, dtype=torch.float64)
    runtime = Runtime(*make(model, (x,), {}, n_stages=2), loss_fn=F.mse_loss)
    for rows, length in ((6, 5), (5, 3), (2, 7), (6, 5)):
        x = torch.randn(rows, length, 4, dtype=torch.float64)
        runtime.step(x, target=x)
        F.mse_loss(plain(x), x).backward()
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12


def test_more_microbatches_than_rows():
    check(mlp(), (x_of(3),), x_of(3), n_microbatches=16)


def test_a_count_that_no_template_divides():
    check(mlp(n=8), (x_of(7),), x_of(7), n_stages=4, n_ranks=2, schedule="interleaved", n_microbatches=5)


def test_a_model_changed_after_the_split_is_refused():
    x = x_of()
    for name in ("3", "extra"):
        model = mlp().double()
        made = make(model, (x,), {}, n_stages=2)
        setattr(model, name, nn.Linear(4, 4))
        with pytest.raises(InputError, match=rf"{name}\.weight.* were put in, or taken out, after"):
            Runtime(*made)
    made = make(model := mlp().double(), (x,), {}, n_stages=2)
    model[3][0] = nn.Linear(4, 4).double()  # inside what a stage holds whole
    runtime = Runtime(*made, loss_fn=F.mse_loss)
    torch.testing.assert_close(runtime.step(x, target=x).loss, F.mse_loss(model(x), x).detach())


def test_a_step_without_gradients_is_refused():
    x = x_of()
    runtime = Runtime(*make(mlp().double(), (x,), {}, n_stages=2), loss_fn=F.mse_loss)
    with torch.no_grad(), pytest.raises(InputError, match=r"gradients.*evaluate\(\)"):
        runtime.step(x, target=x)
    with torch.no_grad():
        runtime.evaluate(x, target=x)
