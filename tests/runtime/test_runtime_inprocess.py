"""In one process: every schedule gives the full batch's step, exactly."""

import copy
import time

import pytest
import torch
from crossed import crossed
from runtime_models import (
    Noisy,
    adversary,
    adversary_batch,
    adversary_loss,
    grads,
    make,
    worst,
)
from torch import nn

import autopipe
from autopipe.errors import InputError, StepError
from autopipe.runtime import Runtime
from autopipe.schedule import NAMES
from autopipe.schedule import build as build_schedule
from autopipe.torch_private import CALL_HOOK

TRAINING = [n for n in NAMES if n != "forward-only"]
PER_RANK = {"interleaved": 2, "looped-bfs": 2, "zbv": 2, "dualpipev": 2}
BATCHES = ((8, 6, 4), (7, 5, 4), (3, 6, 4), (9, 4, 2), (8, 6, 5), (1, 3, 4))


def train_plain(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    losses = []
    for args, kwargs, target in steps:
        optimizer.zero_grad()
        loss = adversary_loss(model(*args, **kwargs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@crossed(schedule=TRAINING, recompute=["nothing", "stages", "blocks"])
def test_adversary_equals_full_batch(schedule, recompute):
    n_ranks = 2 if schedule in PER_RANK else 4
    n_stages = n_ranks * PER_RANK.get(schedule, 1)
    everything = tuple(range(n_stages)) if recompute == "stages" else ()
    size = 3 if recompute == "blocks" else 0
    model, captured, plan, stages = adversary(n_stages, schedule, n_ranks, everything, block_size=size)
    assert any(stage.recomputes for stage in stages) == bool(size)
    plain = copy.deepcopy(model)
    steps = [adversary_batch(rows, length) for rows, length, _ in BATCHES]
    wanted = train_plain(plain, steps)
    runtime = Runtime(captured, plan, stages, loss_fn=adversary_loss)
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1, momentum=0.9, weight_decay=0.01)
    for (args, kwargs, target), (*_, m), loss in zip(steps, BATCHES, wanted, strict=True):
        optimizer.zero_grad()
        out = runtime.step(*args, **kwargs, target=target, n_microbatches=m)
        optimizer.step()
        assert abs(out.loss.item() - loss) < 1e-12
        assert not out.loss.requires_grad
    assert worst(dict(model.named_parameters()), dict(plain.named_parameters())) < 1e-12


def test_a_given_schedule_loses_its_surplus_microbatches():
    model, captured, plan, stages = adversary(4, "dualpipev", 2)
    plain = copy.deepcopy(model)
    given = build_schedule("dualpipev", 2, 4, 9)
    assert given.overlapped
    runtime = Runtime(captured, plan, stages, loss_fn=adversary_loss, schedule=given, n_microbatches=9)
    for rows in (9, 5, 3):
        args, kwargs, target = adversary_batch(rows, 4)
        runtime.step(*args, **kwargs, target=target)
        adversary_loss(plain(*args, **kwargs), target).backward()
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12


def test_gradients_that_do_not_exist_stay_none():
    model, captured, plan, stages = adversary(4, "1f1b", 4)
    args, kwargs, target = adversary_batch(6, 4)
    Runtime(captured, plan, stages, loss_fn=adversary_loss).step(*args, **kwargs, target=target)
    found = grads(model.named_parameters())
    plain = copy.deepcopy(model)
    plain.zero_grad()
    adversary_loss(plain(*args, **kwargs), target).backward()
    assert worst(found, grads(plain.named_parameters())) < 1e-12
    assert found["unused"] is None
    assert found["only_index.weight"] is None


def noisy(schedule, n_stages, n_ranks):
    torch.manual_seed(3)
    model = Noisy().double()
    x = torch.randn(8, 5, dtype=torch.float64)
    return model, *make(model, (x,), {}, n_stages=n_stages, n_ranks=n_ranks, schedule=schedule)


def train_noisy(schedule, n_stages, n_ranks, **options):
    model, captured, plan, stages = noisy(schedule, n_stages, n_ranks)
    torch.manual_seed(5)
    runtime = Runtime(captured, plan, stages, loss_fn=nn.functional.mse_loss, **options)
    generator = torch.Generator().manual_seed(9)
    for _ in range(3):
        x = torch.randn(9, 5, dtype=torch.float64, generator=generator)
        y = torch.randn(9, 2, dtype=torch.float64, generator=generator)
        runtime.step(x, target=y)
    return {**dict(model.named_buffers()), **grads(model.named_parameters())}


@pytest.mark.parametrize("schedule", TRAINING)
def test_random_numbers_and_statistics_do_not_depend_on_the_cut(schedule):
    n_ranks = 2 if schedule in PER_RANK else 3
    n_stages = n_ranks * PER_RANK.get(schedule, 1)
    found = train_noisy(schedule, n_stages, n_ranks)
    assert worst(found, train_noisy("1f1b", 1, 1)) < 1e-12


def test_statistics_are_those_of_microbatches_in_turn():
    torch.manual_seed(3)
    model = Noisy().double()
    model.drop.p = 0.0
    x, y = torch.randn(9, 5).double(), torch.randn(9, 2).double()
    plain = copy.deepcopy(model)
    captured, plan, stages = make(model, (x,), {}, n_stages=3, schedule="gpipe")
    model.eval(), plain.eval()
    for m in (model, plain):
        m.bn.train(), m.bn2.train()
    Runtime(captured, plan, stages, loss_fn=nn.functional.mse_loss).step(x, target=y)
    for xs, ys in zip(x.split((3, 2, 2, 2)), y.split((3, 2, 2, 2)), strict=True):
        (nn.functional.mse_loss(plain(xs), ys) * len(xs) / 9).backward()
    assert worst(dict(model.named_buffers()), dict(plain.named_buffers())) < 1e-12
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_stage_that_runs_again_reads_buffers_as_it_found_them(schedule):
    torch.manual_seed(3)
    first = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5), n_power_iterations=1)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    with torch.no_grad():
        first.parametrizations.weight.original.add_(torch.randn(5, 5))  # far from where it settles
    x, y = torch.randn(8, 5).double(), torch.randn(8, 2).double()
    plain = copy.deepcopy(model)
    captured, plan, stages = make(model, (x,), {}, n_stages=3, schedule=schedule, recompute=(0, 1, 2))
    Runtime(captured, plan, stages, loss_fn=nn.functional.mse_loss).step(x, target=y)
    for xs, ys in zip(x.split(2), y.split(2), strict=True):
        (nn.functional.mse_loss(plain(xs), ys) / 4).backward()
    assert worst(dict(model.named_buffers()), dict(plain.named_buffers())) < 1e-12
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12


class Moving(nn.Module):
    """Scales by an average, which it moves or another layer does."""

    def __init__(self, average, moves):
        super().__init__()
        self.moves, self.layer = moves, nn.Linear(5, 5).double()
        self.register_buffer("average", average)

    def forward(self, x):
        if self.moves:
            self.average.mul_(0.5).add_(x.detach().mean(0))
        return torch.tanh(self.layer(x) * (1 + self.average))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("part", [slice(None), slice(2)])
def test_a_stage_that_runs_again_reads_buffers_of_several_layers_as_it_found_them(first, part):
    torch.manual_seed(3)
    average = torch.zeros(2, 5).double()
    layers = [Moving(average[1], first), Moving(average[part][1], not first)]
    model = nn.Sequential(*layers, nn.Linear(5, 2).double())
    x, y = torch.randn(8, 5).double(), torch.randn(8, 2).double()
    plain = copy.deepcopy(model)
    captured, plan, stages = make(model, (x,), {}, n_stages=1, schedule="gpipe", recompute=(0,))
    Runtime(captured, plan, stages, loss_fn=nn.functional.mse_loss, mixed_rows="allow").step(x, target=y)
    for xs, ys in zip(x.split(2), y.split(2), strict=True):
        (nn.functional.mse_loss(plain(xs), ys) / 4).backward()
    assert worst(dict(model.named_buffers()), dict(plain.named_buffers())) < 1e-12
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12


def test_the_users_generator_is_left_alone():
    _, captured, plan, stages = noisy("1f1b", 3, 3)
    runtime = Runtime(captured, plan, stages, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    runtime.step(torch.ones(8, 5).double(), target=torch.ones(8, 2).double())
    assert torch.equal(before, torch.get_rng_state())


def test_accumulating_over_steps_adds_up():
    model, captured, plan, stages = adversary(3, "1f1b", 3)
    runtime = Runtime(captured, plan, stages, loss_fn=adversary_loss)
    plain = copy.deepcopy(model)
    batches = [adversary_batch(5, 4), adversary_batch(6, 3)]
    with runtime.no_sync():
        args, kwargs, target = batches[0]
        runtime.step(*args, **kwargs, target=target)
    args, kwargs, target = batches[1]
    runtime.step(*args, **kwargs, target=target)
    for args, kwargs, target in batches:
        adversary_loss(plain(*args, **kwargs), target).backward()
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12


def test_forward_gives_the_models_own_structure():
    model, captured, plan, stages = adversary(3, "1f1b", 3)
    runtime = Runtime(captured, plan, stages, loss_fn=adversary_loss)
    args, kwargs, target = adversary_batch(7, 4)
    model.eval()
    out, wanted = runtime.forward(*args, **kwargs), model(*args, **kwargs)
    assert set(out) == set(wanted)
    assert out["nothing"] is None
    assert out["aux"][1] == wanted["aux"][1]
    torch.testing.assert_close(out["logits"], wanted["logits"])
    torch.testing.assert_close(out["logits"].requires_grad, False)
    result = runtime.evaluate(*args, **kwargs, target=target, return_outputs=True)
    torch.testing.assert_close(result.loss, adversary_loss(wanted, target).detach())
    torch.testing.assert_close(result.outputs["logits"], wanted["logits"])


def test_it_can_step_again_after_a_raise():
    model, captured, plan, stages = adversary(4, "1f1b", 4)
    runtime = Runtime(captured, plan, stages, loss_fn=adversary_loss)
    args, kwargs, target = adversary_batch(8, 4)

    def broken(module, given, output):
        raise ValueError("from a hook")

    handle = model.custom.register_forward_hook(broken)
    stage = next(s.index for s in stages if any(m is model.custom for m in s.modules()))
    where = f"rank {stage}, stage {stage}, microbatch 0, action {stage}F0: ValueError: from a hook"
    with pytest.raises(StepError, match=where) as caught:
        runtime.step(*args, **kwargs, target=target)
    assert isinstance(caught.value.__cause__, ValueError)
    handle.remove()
    model.zero_grad()
    plain = copy.deepcopy(model)
    runtime.step(*args, **kwargs, target=target)
    adversary_loss(plain(*args, **kwargs), target).backward()
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12


def test_a_nan_is_traced_to_its_stage():
    model, captured, plan, stages = adversary(4, "1f1b", 4)
    runtime = Runtime(captured, plan, stages, loss_fn=adversary_loss)
    args, kwargs, target = adversary_batch(8, 4)
    args[1][5] = float("nan")  # late, in the third microbatch
    stage = next(s.index for s in stages if "late" in s.inputs)
    with pytest.raises(StepError, match=f"the loss is nan.*stage {stage}, microbatch 2, action {stage}F2"):
        runtime.step(*args, **kwargs, target=target)
    with torch.no_grad():
        model.norm.weight[0] = float("inf")
    args, kwargs, target = adversary_batch(8, 4)
    with pytest.raises(StepError, match=r"parameter norm\.weight.*microbatch 0"):
        runtime.step(*args, **kwargs, target=target)
    off = Runtime(captured, plan, stages, loss_fn=adversary_loss, check_finite=False)
    assert not torch.isfinite(off.step(*args, **kwargs, target=target).loss)


def test_bad_losses_are_refused():
    _, captured, plan, stages = noisy("1f1b", 2, 2)
    x, y = torch.randn(8, 5).double(), torch.randn(8, 2).double()
    with pytest.raises(InputError, match=r"shape \(4, 2\)"):
        Runtime(captured, plan, stages, loss_fn=lambda o, t: o - t, n_microbatches=2).step(x, target=y)
    with pytest.raises(InputError, match="holds none"):
        Runtime(captured, plan, stages).step(x)
    with pytest.raises(InputError, match="at least 1"):
        Runtime(captured, plan, stages, n_microbatches=0)


def test_weights_moved_away_are_told_where_they_are_met():
    model, captured, plan, stages = noisy("1f1b", 2, 2)
    x, y = torch.randn(8, 5).double(), torch.randn(8, 2).double()
    with pytest.raises(InputError, match=r"device is 'meta'; .* what is there has no values"):
        Runtime(captured, plan, stages, loss_fn=nn.functional.mse_loss, device="meta")
    runtime = Runtime(captured, plan, stages, loss_fn=nn.functional.mse_loss)
    runtime.step(x, target=y)
    model.to("meta")
    with pytest.raises(StepError, match=r"rank 0, stage 0, microbatch 0.*meta"):
        runtime.step(x, target=y)


def test_nothing_of_a_step_stays_alive():
    import gc

    gc.collect()
    gc.freeze()  # what is there by now is not counted: earlier tests' tensors would hide what this one leaves
    model, captured, plan, stages = adversary(4, "zb-h1", 4)
    runtime = Runtime(captured, plan, stages, loss_fn=adversary_loss)
    args, kwargs, target = adversary_batch(8, 4)

    def tensors():
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    runtime.step(*args, **kwargs, target=target)
    gradients = [p.grad for p in model.parameters()]  # Python has an object for each from here on
    assert any(g is not None for g in gradients)
    before = tensors()
    for _ in range(3):
        runtime.step(*args, **kwargs, target=target)
    assert tensors() <= before
    handles, n_left = [], 0

    def fails(module, given, output):
        nonlocal n_left
        n_left -= 1
        if n_left < 0:
            raise ValueError("from a hook")

    for module in (model.custom, model.norm):
        handles.append(module.register_forward_hook(fails))
    for n in range(2 * runtime.engine.options.n_microbatches):
        n_left = n
        with pytest.raises(StepError, match="from a hook"):
            runtime.step(*args, **kwargs, target=target)
    for handle in handles:
        handle.remove()
    with pytest.raises(StepError, match="lost"):
        runtime.step(*args, **kwargs, target=Lost())
    del handles, fails, handle, module
    assert tensors() <= before


class Lost:
    """A target that ends the loss."""

    def __getitem__(self, key):
        raise ValueError("lost")


def test_a_model_without_parameters_still_makes_an_optimizer():
    pipe = autopipe.split(nn.Sequential(nn.Tanh(), nn.Sigmoid()), 1, (torch.randn(4, 3),), costs="estimated")
    runtime = pipe.runtime(loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(runtime.parameters())
    runtime.clip_grad_norm_(1.0)
    optimizer.step()
    assert not dict(runtime.named_parameters())


def test_a_report_of_one_process_predicts_the_work_of_all_ranks_in_turn():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    pipe = autopipe.split(model, 2, (torch.randn(8, 8),), n_microbatches=4, costs="estimated", device="H100")
    runtime = pipe.runtime(loss_fn=nn.functional.mse_loss)
    began_s = time.perf_counter()
    runtime.step(torch.randn(8, 8), target=torch.randn(8, 8))
    took_s = time.perf_counter() - began_s
    report = runtime.report()
    assert report.in_turn
    assert report.measured_step_s <= took_s
    assert all(0 <= start <= end <= took_s for _, _, start, end in report.events)
    assert report.predicted_step_s == pytest.approx(4 * sum(s.seconds for s in pipe.plan.stages))
    assert report.peak_bytes == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rank_on_cuda_reports_the_most_it_held():
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
    x = torch.randn(1024, 512, device="cuda")
    pipe = autopipe.split(model, 1, (x,), n_microbatches=4, costs="estimated")
    runtime = pipe.runtime(loss_fn=nn.functional.mse_loss)
    runtime.step(x, target=x)
    report = runtime.report()
    weights = sum(p.nbytes for p in model.parameters())
    assert not report.in_turn
    libraries = 256 * 2**20  # of their workspaces there is one for each thread that calls them
    assert 2 * weights + x.nbytes < report.peak_bytes[0] < 100 * 2**20 + libraries
    assert "Memory, predicted and measured" in report.to_html()


class Sparse(nn.Module):
    """An adjacency in a buffer, and one made of weights between two layers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("edges", torch.eye(4).roll(1, 0).to_sparse())
        self.weights = nn.Parameter(torch.rand(4))
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x):
        made = self.weights.diag().to_sparse()
        return self.last(made @ (self.edges @ self.first(x)))


def test_sparse_tensors_are_priced_and_cross_stages():
    torch.manual_seed(0)
    model, x = Sparse(), torch.randn(4, 6)
    model(x).square().mean().backward()
    expected = grads(model.named_parameters())
    model.zero_grad()
    pipe = autopipe.split(model, 3, (x,), n_microbatches=1, costs="estimated", pin={"first": 1})
    pipe.runtime(lambda output, target: output.square().mean()).step(x)
    torch.testing.assert_close(grads(model.named_parameters()), expected)


def test_what_is_put_around_a_stage_between_steps_is_called_in_each_forward():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    x, y = torch.randn(6, 2), torch.randn(6, 1)
    captured, plan, stages = make(model, (x,), {}, n_stages=2, n_microbatches=3)
    runtime = Runtime(captured, plan, stages, loss_fn=nn.functional.mse_loss)
    stage, seen = stages[1], []

    def n_calls():
        seen.clear()
        runtime.step(x, target=y)
        return len(seen)

    def note(module, *_):
        seen.append(module)

    assert n_calls() == 0
    registers = [
        stage.register_forward_pre_hook,
        stage.register_forward_hook,
        stage.register_full_backward_pre_hook,
    ]
    for register in registers:
        handle = register(note)
        assert n_calls() == 3
        handle.remove()
        assert n_calls() == 0
    forward = stage.forward
    stage.forward = lambda *values, **options: (seen.append(stage), forward(*values, **options))[1]
    assert n_calls() == 3
    del stage.forward
    vars(stage)[CALL_HOOK] = lambda *values: (seen.append(stage), forward(*values))[1]  # as compile() does
    assert n_calls() == 3


def test_a_layer_that_torchscript_has_trains():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).double()
    plain = copy.deepcopy(model)
    model[1] = torch.jit.script(model[1])
    x = torch.randn(6, 4, dtype=torch.float64)
    pipe = autopipe.split(model, 2, (x,), costs="estimated")
    pipe.runtime(lambda out, target: out.square().mean(), n_microbatches=3).step(x, target=x)
    plain(x).square().mean().backward()
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < 1e-12


class Normed(nn.Module):
    """Its first call keeps what its second puts back, as normalisation of series does."""

    def forward(self, x, way):
        if way == "norm":
            self.mean, self.spread = x.mean(1, keepdim=True).detach(), x.std(1, keepdim=True).detach()
            return (x - self.mean) / self.spread
        return x * self.spread + self.mean


class Series(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layers = Normed(), nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x):
        y = self.norm(self.layers[0](x), "norm")
        for layer in self.layers[1:3]:
            y = torch.tanh(layer(y))
        return self.layers[3](self.norm(y, "back"))


@pytest.mark.parametrize("closed", [[], ["norm"]])
def test_what_one_call_of_a_layer_keeps_for_another_is_its_microbatchs_own(closed):
    torch.manual_seed(0)
    model, x = Series().double(), torch.randn(6, 5, 4).double()
    pipe = autopipe.split(
        autopipe.capture(model, (x,), closed=closed), 2, costs="estimated", n_microbatches=3
    )
    runtime = pipe.runtime(loss_fn=lambda y, _: y.square().mean())
    for n in (6, 5):
        model.zero_grad()
        loss = model(x[:n]).square().mean()
        loss.backward()
        wanted = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        assert runtime.step(x[:n]).loss.item() == pytest.approx(loss.item(), rel=1e-12)
        for p, grad in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, grad)


class AsksForGradients(nn.Module):
    """Goes another way for inputs that require a gradient; trains by the second one's share then."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y):
        h = self.a(2 * x if x.requires_grad else x).tanh()
        return self.b(h + (self.a(y) if y.requires_grad else self.a(y).detach()))


def test_a_model_that_asks_which_inputs_require_a_gradient_is_answered_as_by_the_batch():
    torch.manual_seed(0)
    model = AsksForGradients().double()
    plain, given = copy.deepcopy(model), torch.randn(2, 7, 4, dtype=torch.float64)
    runtime = autopipe.split(model, 2, tuple(given), costs="estimated", n_microbatches=3).runtime(
        loss_fn=lambda out, _: out.square().mean()
    )
    for flags in ((False, False), (True, True), (False, True), (True, False), (False, False)):
        batch, own = ([t.clone().requires_grad_(f) for t, f in zip(given, flags, strict=True)] for _ in "ab")
        model.zero_grad()
        plain.zero_grad()
        loss, expected = runtime.step(*batch).loss, plain(*own).square().mean()
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        for ours, theirs in zip((*model.parameters(), *batch), (*plain.parameters(), *own), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(runtime.forward(*batch), plain(*own).detach())


class Balance(nn.Module):
    """Two losses, weighed by what each asks of a weight that another layer has."""

    def __init__(self, allow_unused):
        super().__init__()
        self.options = {"retain_graph": True, "allow_unused": allow_unused, "materialize_grads": allow_unused}

    def forward(self, first, second, weight):
        slopes = [torch.autograd.grad(loss, weight, **self.options)[0].norm() for loss in (first, second)]
        return first + second * (slopes[0] / (slopes[1] + 1e-4)).detach()


class Balanced(nn.Module):
    def __init__(self, allow_unused):
        super().__init__()
        self.encode, self.decode, self.judge = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 1)
        self.balance = Balance(allow_unused)

    def forward(self, x):
        made = self.decode(self.encode(x).relu())
        return self.balance((made - x).abs().mean(), -self.judge(made).mean(), self.decode.weight)


@pytest.mark.parametrize("allow_unused", [False, True])
def test_layers_differentiate_what_others_made(allow_unused):
    """A stage that held such a layer alone would reach none of it: slopes of nothing, or an error."""
    torch.manual_seed(0)
    model, x = Balanced(allow_unused), torch.randn(6, 4)
    plain = copy.deepcopy(model)
    plain(x).backward()
    assert "torch.autograd.grad" in autopipe.capture(model, (x,)).module.code
    loss = autopipe.split(model, 2, (x,), costs="estimated", n_microbatches=1).runtime().step(x).loss
    assert loss == pytest.approx(plain(x).item(), rel=1e-5)
    assert worst(grads(plain.named_parameters()), grads(model.named_parameters())) < 1e-6


def halved_slope(x, made):
    slope, *_ = torch.autograd.grad(made.sum(), x, create_graph=True)
    while slope.abs().max() > 0.01:
        slope = slope / 2
    return slope


class Halving(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        return halved_slope(x, self.net(x))


class HalvingItself(Halving):
    def halved(self, x, made):
        return halved_slope(x, made)

    def forward(self, x):
        x = x.detach().requires_grad_()
        return self.halved(x, self.net(x))


def weighed_by_slope(model, loss):
    slope = torch.autograd.grad(loss, model.net[0].weight, retain_graph=True, allow_unused=True)[0]
    return loss if slope is None or slope.norm() < 0 else loss * slope.norm().detach()


class Weighing(Halving):
    def forward(self, x):
        return weighed_by_slope(self, self.net(x).square().mean())


class RunsBackward(nn.Module):
    def forward(self, x, made):
        made.sum().backward(inputs=[x], retain_graph=True)
        slope, x.grad = x.grad, None
        return made if slope is None else made + slope.detach()


class RunningBackward(Halving):
    def __init__(self):
        super().__init__()
        self.run = RunsBackward()

    def forward(self, x):
        x = x.detach().requires_grad_()
        return self.run(x, self.net(x))


@pytest.mark.parametrize("kind", [Halving, HalvingItself, Weighing, RunningBackward])
def test_code_kept_whole_does_not_differentiate_what_others_made(kind):
    with pytest.raises(autopipe.CaptureError, match="takes a derivative through what other code has made"):
        autopipe.capture(kind(), (torch.randn(6, 4),))
