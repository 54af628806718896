"""A ``loss_fn`` that compares the rows of a batch gets the batch: the plain loop's loss and gradients."""

import copy
import pathlib

import pytest
import torch
import torch.nn.functional as F
from processes import run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from whole_losses import (
    LOSSES,
    WIDTH,
    compare,
    info_nce,
    labels,
    masked_mean,
    numbers,
    own,
    split,
    trained_on,
    uneven,
)

import autopipe
from autopipe.errors import InputError, StepError
from autopipe.runtime.execute import program
from autopipe.schedule import NAMES

EXACT = 1e-10
SCRIPT = pathlib.Path(__file__).parents[1] / "whole_loss_ranks.py"


def check(name, pipe, twin, sizes=(10, 6, 8), **options):
    """Steps on batches of several sizes leave what the plain loop does, in model and loss."""
    make_loss, make_target = LOSSES[name]
    batches = [(numbers(n, 5, seed=n), make_target(n)) for n in sizes]
    mine, plain = make_loss(), make_loss()
    runtime = pipe.runtime(mine, **options)
    losses = [runtime.step(x, target=target).loss.item() for x, target in batches]
    assert losses == pytest.approx(trained_on(twin, plain, batches), rel=EXACT, abs=EXACT)
    compare(pipe.model, twin)
    if isinstance(mine, nn.Module):
        compare(mine, plain)
    for key, value in own(plain).items():
        assert own(mine)[key] == pytest.approx(value, rel=EXACT), key


@pytest.mark.parametrize("options", [{"loss_on": "batch"}, {}], ids=["asked for", "found"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_on_the_batch_is_the_plain_loops(name, options):
    check(name, *split(), **options)


@pytest.mark.parametrize("schedule", [n for n in NAMES if n != "forward-only"])
def test_under_every_schedule(schedule):
    n_stages = 4 if schedule in ("interleaved", "looped-bfs", "zbv", "dualpipev", "cost-aware") else 2
    pipe, twin = split(n_stages, n_ranks=2, schedule=schedule)
    check("InfoNCE over in-batch negatives", pipe, twin, loss_on="batch")


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_stages_that_run_again_do_so_after_it(recompute):
    pipe, twin = split(2, recompute=recompute)
    check("a learned temperature", pipe, twin, loss_on="batch")


class Two(nn.Module):
    """Gives rows in a dict, and a mean of all of them beside it, as a balancing term is."""

    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(5, 8), nn.Linear(8, 1), nn.Linear(8, WIDTH)

    def forward(self, x):
        h = self.first(x).tanh()
        return {"z": self.last(h), "gates": (self.gate(h).sigmoid(), h.square().mean())}


def of_two(output, target):
    gate, load = output["gates"]
    return info_nce(output["z"] * gate, target) + 0.1 * load + gate.mean().log()


def of_parts(pipe, loss_fn, **options):
    return pipe.runtime(loss_fn, loss_on="batch", **options)


def test_nested_outputs_and_numbers_among_them_have_their_gradients():
    torch.manual_seed(0)
    net, x, target = Two().double(), numbers(10, 5), numbers(10, WIDTH)
    plain = copy.deepcopy(net)
    pipe = autopipe.split(net, 2, (x,), costs="estimated", n_microbatches=4)
    found = of_parts(pipe, of_two).step(x, target=target)
    assert trained_on(plain, of_two, [(x, target)]) == pytest.approx([found.loss.item()], rel=EXACT)
    compare(net, plain)


def test_what_else_a_step_does_it_does_of_the_batch_too():
    """Inputs' gradients, factors, scalers, outputs, accumulated batches and losses without gradients."""
    pipe, twin = split()
    x, target = numbers(10, 5).requires_grad_(), numbers(10, WIDTH)
    runtime = of_parts(pipe, info_nce)
    with runtime.scaled(3.0):
        found = runtime.step(x, target=target, return_outputs=True)
    same = x.detach().clone().requires_grad_()
    loss = info_nce(twin(same), target)
    (3 * loss).backward()
    torch.testing.assert_close(x.grad, same.grad, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(found.outputs, twin(same), rtol=EXACT, atol=EXACT)
    compare(pipe.model, twin)
    for training in (True, False):
        pipe.train(training)
        assert runtime.evaluate(x.detach(), target=target).loss.item() == pytest.approx(
            loss.item(), rel=EXACT
        )
    pipe.train()
    for each in (pipe.model, twin):
        each.zero_grad()
    batches = [(numbers(n, 5, seed=n), numbers(n, WIDTH)) for n in (10, 6)]
    found = runtime.accumulate([{"input": x, "target": t} for x, t in batches])
    loss = sum(len(x) / 16 * info_nce(twin(x), t) for x, t in batches)
    loss.backward()
    assert found.loss.item() == pytest.approx(loss.item(), rel=EXACT)
    compare(pipe.model, twin)


def test_a_scaler_scales_it_and_a_loss_that_is_not_finite_is_told():
    pipe, twin = split()
    x, target = numbers(10, 5), numbers(10, WIDTH)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    of_parts(pipe, info_nce, scaler=scaler).step(x, target=target)
    (256 * info_nce(twin(x), target)).backward()
    compare(pipe.model, twin)
    with pytest.raises(
        StepError, match=r"loss is nan: .* is the loss of the whole batch, in rank 1, stage 1;"
    ):
        of_parts(pipe, masked_mean).step(x, target=(target, torch.zeros_like(target)))


def test_a_schedule_that_goes_backward_before_is_refused_where_it_is_asked_for():
    pipe, _ = split()
    with pytest.raises(InputError, match=r"loss_fn is called on the whole batch.*'gpipe' or 'looped-bfs'.*"):
        of_parts(pipe, info_nce, schedule="1f1b")
    with pytest.raises(InputError, match="no loss_fn"):
        pipe.runtime(loss_on="batch")
    with pytest.raises(InputError, match="'batch', 'microbatches'"):
        pipe.runtime(info_nce, loss_on="rows")


class Leaving(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, WIDTH)

    def forward(self, x):
        h = self.first(x).tanh()
        self.load = h.square().mean()
        return self.last(h)


def test_what_one_microbatch_left_beside_its_output_is_refused():
    torch.manual_seed(0)
    net, x = Leaving().double(), numbers(10, 5)
    pipe = autopipe.split(net, 1, (x,), costs="estimated", n_microbatches=4)
    with pytest.raises(InputError, match="which a stage sets for each microbatch"):
        of_parts(pipe, lambda output, target: info_nce(output, target) + net.load).step(
            x, target=numbers(10, WIDTH)
        )


@pytest.mark.parametrize(
    "use",
    [
        torch.neg,
        abs,
        lambda v: v + 1,
        lambda v: 2 / v,
        lambda v: v[0],
        lambda v: v < 1,
        float,
        len,
        list,
        bool,
    ],
)
def test_an_output_that_microbatches_do_not_make_is_refused(use):
    torch.manual_seed(0)
    x, net = numbers(10, 5), nn.Linear(5, WIDTH).double()

    class Spread(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            h = self.net(x)
            return h, h.detach().std(0)

    pipe = autopipe.split(Spread(), 1, (x,), costs="estimated", n_microbatches=4)
    with pytest.raises(InputError, match="hangs on the rows of a batch"):
        pipe.runtime(lambda o, t: info_nce(o[0], t) + use(o[1]), loss_on="batch", mixed_rows="allow").step(
            x, target=numbers(10, WIDTH)
        )


def order(runtime):
    """The actions of the last step, in one process."""
    return [str(what) for what in runtime.engine.records[-1][2].line.timed if what is not None]


def test_a_mean_over_rows_keeps_the_schedule_and_its_calls(caplog):
    calls = []
    pipe, twin = split()

    def loss_fn(output, target):
        calls.append(len(output))
        return F.mse_loss(output, target)

    runtime, x, target = pipe.runtime(loss_fn), numbers(10, 5), numbers(10, WIDTH)
    for _ in range(4):
        runtime.step(x, target=target)
    assert calls == [3, 3, 2, 2] * 4
    assert order(runtime).index("1B0") < order(runtime).index("1F1")
    trained_on(twin, F.mse_loss, [(x, target)] * 4)
    compare(pipe.model, twin)
    assert not caplog.text


def test_one_that_compares_rows_keeps_one_that_waits_and_says_so_once(caplog):
    pipe, _ = split()
    runtime = pipe.runtime(info_nce)
    for _ in range(4):
        runtime.step(numbers(10, 5), target=numbers(10, WIDTH))
    assert order(runtime).index("1F3") < order(runtime).index("1B0")
    assert caplog.text.count("loss_fn is called once on the whole batch") == 1


def test_a_mask_of_ones_does_not_hide_a_mean_over_it(caplog):
    pipe, twin = split()
    runtime, x, wanted = pipe.runtime(masked_mean), numbers(10, 5), numbers(10, WIDTH)
    masks = [torch.ones(10, WIDTH).double()] * 3 + [uneven(10)]  # the fourth step asks nothing
    losses = [runtime.step(x, target=(wanted, mask)).loss.item() for mask in masks]
    assert losses == pytest.approx(
        trained_on(twin, masked_mean, [(x, (wanted, m)) for m in masks]), rel=EXACT
    )
    assert "with labels in other places" in caplog.text


def train_both(make_loss, make_target, sizes=(10, 10, 6)):
    """Steps of a runtime and of the plain loop, from the same state of torch's generator; both losses."""
    pipe, twin = split()
    mine, plain = make_loss(), make_loss()
    runtime = pipe.runtime(mine)
    for i, n in enumerate(sizes):
        x = numbers(n, 5, seed=i)
        torch.manual_seed(i)
        found = runtime.step(x, target=make_target(n)).loss.item()
        torch.manual_seed(i)
        assert trained_on(twin, plain, [(x, make_target(n))]) == pytest.approx([found], rel=EXACT), i
        compare(pipe.model, twin)
    return mine, plain


def scaled(output, target):
    return F.mse_loss(output.mul_(2), target)


def centred(output, target):
    return F.mse_loss(output.sub_(output.mean(0)), target)


def shifted(output, target):
    target -= 0.5
    return info_nce(output, target)


@pytest.mark.parametrize("loss_fn", [scaled, centred, shifted])
def test_a_loss_may_write_to_what_it_is_given(loss_fn, caplog):
    train_both(lambda: loss_fn, lambda n: numbers(n, WIDTH))
    assert ("called once on the whole batch" in caplog.text) is (loss_fn is not scaled)


class Trainer:
    """Calls a module of its own, and keeps outputs in a queue larger than what is looked at in captures."""

    def __init__(self, n=1, queue=torch.clone):
        self.criterion, self.place = LOSSES["a centre that moves"][0](), 0
        self.queue = queue(numbers(n, WIDTH, seed=5))

    def loss(self, output, target):
        far = output @ torch.as_tensor(self.queue).clone().T
        self.queue[: len(output)] = output.detach()[: len(self.queue)]
        return self.criterion(output, target) + far.logsumexp(1).mean()

    @property
    def kept(self):
        return self.criterion.centre, torch.as_tensor(self.queue)


@pytest.mark.parametrize("queue", [torch.clone, torch.Tensor.numpy], ids=["tensor", "array"])
@pytest.mark.parametrize("way", ["method", "function"])
def test_what_a_loss_reaches_is_put_back_whatever_holds_it(queue, way):
    trainers = []

    def make_loss():
        trainers.append(trainer := Trainer(2**14, queue))
        return trainer.loss if way == "method" else lambda output, target: trainer.loss(output, target)

    train_both(make_loss, lambda n: numbers(n, WIDTH))
    for found, wanted in zip(*(t.kept for t in trainers), strict=True):
        torch.testing.assert_close(found, wanted, rtol=EXACT, atol=EXACT)


class WarmingUp:
    def __init__(self):
        self.n_calls = 0

    def __call__(self, output, target):
        self.n_calls += 1
        return F.mse_loss(output, target) * (1.0 if self.n_calls < 7 else 0.5)


def test_a_count_of_calls_that_matters_later_is_a_count_of_batches():
    mine, plain = train_both(WarmingUp, lambda n: numbers(n, WIDTH), (10,) * 8)
    assert mine.n_calls == plain.n_calls == 8


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_draws_does_so_once_for_the_batch(reduction, caplog):
    def loss_fn(output, target):
        return F.mse_loss(F.dropout(output, 0.3), target, reduction=reduction)

    train_both(lambda: loss_fn, lambda n: numbers(n, WIDTH))
    assert "it draws random numbers" in caplog.text


def by_hand(output, target):
    counts = target != -100
    return F.cross_entropy(output[counts], target[counts])


@pytest.mark.parametrize("loss_fn", [lambda o, t: F.cross_entropy(o, t), by_hand])
def test_labels_that_do_not_count_are_asked_about_when_they_first_come(loss_fn):
    """The fourth step asks nothing else."""
    pipe, twin = split()
    runtime, x = pipe.runtime(loss_fn), numbers(10, 5)
    for step in range(4):
        target = labels(10).where((torch.arange(10) > 0) | (step < 3), -100)
        found = runtime.step(x, target=target).loss.item()
        assert trained_on(twin, loss_fn, [(x, target)]) == pytest.approx([found], rel=EXACT), step
    compare(pipe.model, twin)


def test_a_loss_that_one_microbatch_is_too_small_for_gets_the_batch():
    pipe, twin = split(n_microbatches=8)

    def loss_fn(output, target):
        assert len(output) > 1
        return info_nce(output, target)

    x, target = numbers(10, 5), numbers(10, WIDTH)
    found = [pipe.runtime(loss_fn).step(x, target=target).loss.item()]
    assert found == pytest.approx(trained_on(twin, loss_fn, [(x, target)]), rel=EXACT)
    compare(pipe.model, twin)


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_it_is_asked_in_evaluation_too(context):
    pipe, twin = split()
    runtime, x, target = pipe.runtime(info_nce), numbers(10, 5), numbers(10, WIDTH)
    with context():
        found = [runtime.evaluate(x, target=target).loss.item() for _ in range(2)]
    assert found == pytest.approx([info_nce(twin(x), target).item()] * 2, rel=EXACT)


def worst(output, target):
    """Has no gradient, and is that of one row."""
    return (output.argmax(1) - target).abs().double().max()


def test_what_has_no_gradient_may_be_evaluated():
    pipe, twin = split()
    x, target = numbers(10, 5), labels(10)
    wanted = [worst(twin(x), target).item()] * 2
    runtime = pipe.runtime(worst)
    assert [runtime.evaluate(x, target=target).loss.item() for _ in range(2)] == wanted
    with pytest.raises(InputError, match="the loss does not require a gradient"):
        pipe.runtime(worst).step(x, target=target)


def test_a_loss_that_fails_on_all_says_why():
    pipe, _ = split()
    with pytest.raises(StepError, match="no such thing"):
        pipe.runtime(lambda output, target: {}["no such thing"]).step(numbers(10, 5), target=numbers(10, 2))


def test_where_memory_has_no_room_for_all_microbatches_such_a_loss_is_refused():
    pipe, _ = split()
    limit = max(s.memory_bytes for s in pipe.plan.stages)
    pipe, twin = split(memory_limit=limit)
    x, target = numbers(10, 5), numbers(10, WIDTH)
    runtime = pipe.runtime(lambda output, target: F.mse_loss(output, target))
    assert order_after(runtime, x, target).index("1B0") < order(runtime).index("1F1")
    trained_on(twin, F.mse_loss, [(x, target)])
    compare(pipe.model, twin)
    with pytest.raises(InputError, match=r"not the weighted sum .* pass loss_on='batch'"):
        pipe.runtime(info_nce).step(x, target=target)


def test_where_no_limit_is_known_large_outputs_have_no_room(monkeypatch):
    monkeypatch.setattr(program, "_NO_MATTER_BYTES", 0)
    pipe, _ = split()
    with pytest.raises(InputError, match="not the weighted sum"):
        pipe.runtime(info_nce).step(numbers(10, 5), target=numbers(10, WIDTH))


def test_items_of_an_iterator_are_refused_there(monkeypatch):
    monkeypatch.setattr(program, "_NO_MATTER_BYTES", 0)
    pipe, _ = split()
    loss_fn = LOSSES["temperatures of an iterator"][0]()
    with pytest.raises(
        InputError, match="takes items from an iterator, one call's each: pass loss_on='batch'"
    ):
        pipe.runtime(loss_fn).step(numbers(10, 5), target=labels(10))


def test_one_that_cannot_be_asked_is_told(caplog):
    pipe, _ = split()

    def loss_fn(output, target):  # of which autograd takes no gradient by the output alone
        return checkpoint(info_nce, output, target, use_reentrant=True)

    runtime = pipe.runtime(loss_fn)
    for _ in range(3):
        runtime.step(numbers(10, 5), target=numbers(10, WIDTH))
    (record,) = caplog.records
    assert "cannot be told, and it is called on each: RuntimeError: " in record.getMessage()


def order_after(runtime, x, target):
    runtime.step(x, target=target)
    return order(runtime)


def test_torchs_own_losses_are_refused_where_shapes_make_them_compare_rows():
    pipe, _ = split()
    with pytest.warns(UserWarning, match="size"), pytest.raises(InputError, match="not the weighted sum"):
        pipe.runtime(F.mse_loss).step(numbers(10, 5), target=numbers(10, 1, WIDTH))


def test_each_microbatch_is_a_batch_where_that_is_asked_for(caplog):
    pipe, twin = split()
    x, target = numbers(10, 5), numbers(10, WIDTH)
    found = pipe.runtime(info_nce, loss_on="microbatches").step(x, target=target).loss.item()
    parts = zip(x.tensor_split([3, 6, 8]), target.tensor_split([3, 6, 8]), strict=True)
    wanted = sum(len(a) / 10 * info_nce(twin(a), b) for a, b in parts)
    assert found == pytest.approx(wanted.item(), rel=EXACT)
    assert not caplog.text


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("n_ranks", "names"),
    [
        (2, ["asked_for", "found", "later"]),
        (4, ["replicas_asked", "replicas", "replicas_differ", "replicas_later"]),
    ],
)
def test_on_ranks(n_ranks, names):
    run_ranks(SCRIPT, n_ranks, *names, timeout_s=100)
