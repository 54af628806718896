"""A ``loss_fn`` that goes another way later, as its user sets something between steps, is asked at once."""

import dataclasses
import enum
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from whole_losses import EXACT, WIDTH, compare, info_nce, numbers, split, trained_on

import autopipe

STEPS = 8
LATER = 5
"""A step in which nothing else has it asked: neither one of 0, 1, 2 and 4 nor with batches cut otherwise."""
EPOCH = 0


class ByEpoch:
    """Compares rows from an epoch on that it was given."""

    def __init__(self, first=LATER):
        self.epoch, self.first = 0, first

    def __call__(self, output, target):
        return info_nce(output, target) if self.epoch >= self.first else F.mse_loss(output, target)

    def set(self, step):
        self.epoch = step


class ByNumber(ByEpoch):
    def __call__(self, output, target):
        return info_nce(output, target) if self.epoch > 4 else F.mse_loss(output, target)


class ByWeight(nn.Module):
    """Adds a term whose weight is nothing at first, kept in a buffer of one place."""

    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.zeros((), dtype=torch.float64))

    def forward(self, output, target):
        return F.mse_loss(output, target) + self.weight * info_nce(output, target)

    def set(self, step):
        self.weight.fill_(max(0.0, 0.1 * (step + 1 - LATER)))


class ByFunction(ByEpoch):
    """Has another function in its place."""

    def __init__(self):
        self.made = F.mse_loss

    def __call__(self, output, target):
        return self.made(output, target)

    def set(self, step):
        self.made = info_nce if step >= LATER else F.mse_loss


class ByFlag(ByEpoch):
    """Is told by an attribute that comes late."""

    def __call__(self, output, target):
        return info_nce(output, target) if hasattr(self, "is_warm") else F.mse_loss(output, target)

    def set(self, step):
        if step >= LATER:
            self.is_warm = True


class ByItem(ByEpoch):
    """Is a method of a trainer that has its settings in a dict."""

    def __init__(self):
        self.settings = {"phase": "first", "unused": 0}

    def __call__(self, output, target):
        return info_nce(output, target) if self.settings["phase"] == "second" else F.mse_loss(output, target)

    def set(self, step):
        self.settings["phase"] = "second" if step >= LATER else "first"
        self.settings["unused"] = step


@dataclasses.dataclass
class Weighed:
    of_pairs: float


class Phase(Weighed, enum.Enum):
    """Whose members have no hash, as they are of a class of data."""

    FIRST = 0.0
    SECOND = 1.0


class ByPhase(ByEpoch):
    def __init__(self):
        self.phase = Phase.FIRST

    def __call__(self, output, target):
        return F.mse_loss(output, target) + self.phase.of_pairs * info_nce(output, target)

    def set(self, step):
        self.phase = Phase.SECOND if step >= LATER else Phase.FIRST


class BySparse(ByFlag):
    """Has a tensor whose values cannot be read in the usual ways."""

    def __init__(self):
        self.near = torch.eye(3).to_sparse()

    def __call__(self, output, target):
        assert self.near.is_sparse
        return super().__call__(output, target)


class ByLength(ByEpoch):
    """Goes by how many entries its user has put in a list."""

    def __init__(self):
        self.seen = []

    def __call__(self, output, target):
        return F.mse_loss(output, target) if len(self.seen) < 6 else info_nce(output, target)

    def set(self, step):
        self.seen.append(step)


class BySwap(ByEpoch):
    """Has a module of torch's in an attribute, whose place another takes, and which is then changed."""

    def __init__(self):
        self.made = nn.MSELoss()

    def __call__(self, output, target):
        return self.made(output, target)

    def set(self, step):
        if step == 3:
            self.made = nn.MSELoss()
        if step == LATER:
            self.made.reduction = "sum"


class ByClass(ByEpoch):
    """Weighs classes, all alike at first."""

    def __init__(self):
        self.weight = torch.ones(WIDTH, dtype=torch.float64)

    def __call__(self, output, target):
        return F.cross_entropy(output, target.argmax(1), self.weight)

    def set(self, step):
        if step == LATER:
            self.weight[0] = 5.0


class Margin(ByEpoch):
    """Asks more than a margin of pairs, which is nothing until targets are far apart."""

    def __init__(self):
        pass

    def __call__(self, output, target):
        return F.relu(info_nce(output, target * 0.01) - 2.5 + target.abs().mean())

    def set(self, step):
        pass


def test_one_that_had_no_gradient_is_asked_until_it_has():
    pipe, twin = split()
    runtime, x = pipe.runtime(Margin()), numbers(10, 5)
    for step in range(STEPS):
        target = (0.01 if step < LATER else 2.0) * numbers(10, WIDTH)
        found = runtime.step(x, target=target).loss.item()
        assert trained_on(twin, Margin(), [(x, target)]) == pytest.approx([found], rel=EXACT), step
    compare(pipe.model, twin)


def made_partial():
    def base(output, target, spread=0):
        return F.mse_loss(output, target) + (output.var(0).mean() if spread else 0.0)

    def put(step):
        made.keywords["spread"] = int(step >= LATER)

    made = functools.partial(base, spread=0)
    made.set = put
    return made


class ByGlobal(ByEpoch):
    def __call__(self, output, target):
        return F.mse_loss(output, target) if EPOCH < LATER else info_nce(output, target)

    def set(self, step):
        global EPOCH
        EPOCH = step


class ByClosure(ByEpoch):
    def __init__(self):
        epoch = 0

        def call(output, target):
            return F.mse_loss(output, target) if epoch < LATER else info_nce(output, target)

        def put(step):
            nonlocal epoch
            epoch = step

        self.call, self.set = call, put

    def __call__(self, output, target):
        return self.call(output, target)


def steps(make):
    """A runtime's steps beside the plain loop's."""
    pipe, twin = split()
    mine, plain = make(), make()
    runtime, x, target = pipe.runtime(mine), numbers(10, 5), numbers(10, WIDTH)
    for step in range(STEPS):
        for each in (mine, plain):
            each.set(step)
        found = runtime.step(x, target=target).loss.item()
        assert trained_on(twin, plain, [(x, target)]) == pytest.approx([found], rel=EXACT), step
    compare(pipe.model, twin)


@pytest.mark.parametrize(
    "make",
    [
        ByEpoch,
        ByNumber,
        ByWeight,
        ByFunction,
        ByFlag,
        ByItem,
        ByPhase,
        BySparse,
        ByLength,
        BySwap,
        ByClass,
        made_partial,
        ByGlobal,
        ByClosure,
    ],
    ids=lambda c: c.__name__,
)
def test_what_a_user_sets_between_steps(make):
    steps(make)


class ByNewFunctions(ByFunction):
    """Has one made anew in each step, which may lie where an earlier one lay."""

    def set(self, step):
        self.made = lambda output, target: (info_nce if step >= LATER else F.mse_loss)(output, target)


@pytest.mark.parametrize("later", [9, 11, 13])
def test_functions_made_anew_in_each_step_are_told_apart(later, monkeypatch):
    monkeypatch.setitem(globals(), "LATER", later)
    monkeypatch.setitem(globals(), "STEPS", later + 1)
    steps(ByNewFunctions)


def test_torchs_own_whose_reduction_is_set_later_is_refused():
    pipe, _ = split()
    loss_fn, x, target = nn.MSELoss(), numbers(10, 5), numbers(10, WIDTH)
    runtime = pipe.runtime(loss_fn)
    for _ in range(LATER):
        runtime.step(x, target=target)
    loss_fn.reduction = "sum"
    with pytest.raises(autopipe.errors.InputError, match="not the weighted sum"):
        runtime.step(x, target=target)


class Counted(ByEpoch):
    """Takes a mean over rows whatever is set, and notes the sizes that it is called with."""

    def __init__(self):
        self.epoch, self.sizes = 0, []

    def __call__(self, output, target):
        self.sizes.append(len(output))
        return F.mse_loss(output, target) * (1.0 if self.epoch < 100 else 0.5)


def test_an_epoch_that_takes_the_code_no_other_way_asks_nothing():
    pipe, _ = split()
    loss_fn = Counted()
    runtime, x, target = pipe.runtime(loss_fn), numbers(10, 5), numbers(10, WIDTH)
    for step in range(40):
        loss_fn.set(step)
        runtime.step(x, target=target)
    assert loss_fn.sizes == [3, 3, 2, 2] * 40  # what it was asked beside is put back


CALLS = 0


class CountingGlobally:
    """An object, not a module, whose method writes to a global."""

    def __call__(self, output, target):
        global CALLS
        CALLS += 1
        return F.mse_loss(output, target) / CALLS


def test_a_global_that_an_objects_method_counts_in_is_of_batches():
    global CALLS
    pipe, twin = split()
    x, target, found = numbers(10, 5), numbers(10, WIDTH), []
    runtime, CALLS = pipe.runtime(CountingGlobally()), 0
    found = [runtime.step(x, target=target).loss.item() for _ in range(3)]
    assert CALLS == 3
    CALLS = 0
    assert trained_on(twin, CountingGlobally(), [(x, target)] * 3) == pytest.approx(found, rel=EXACT)
    compare(pipe.model, twin)


class Counting(nn.Module):
    """Counts labels and calls, of which a stage that runs again is not to make more."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, output, target):
        self.seen += target.numel()
        return F.mse_loss(output, target)


@pytest.mark.parametrize("options", [{}, {"loss_on": "microbatches"}, {"loss_on": "batch"}])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_behind_a_stage_that_runs_again_it_is_called_once(options, schedule):
    pipe, twin = split(
        recompute="always", schedule="gpipe" if options.get("loss_on") == "batch" else schedule
    )
    mine, plain = Counting(), Counting()
    runtime, x, target = pipe.runtime(mine, **options), numbers(10, 5), numbers(10, WIDTH)
    for _ in range(4):
        found = runtime.step(x, target=target).loss.item()
        assert trained_on(twin, plain, [(x, target)]) == pytest.approx([found], rel=EXACT)
    compare(pipe.model, twin)
    assert mine.seen == plain.seen


def penalised(output, target):
    """Two gradients by the output, of which the loss is made."""
    score = output.tanh().square().sum()
    (slope,) = torch.autograd.grad(score, output, create_graph=True)
    return F.mse_loss(output, target) + slope.square().mean()


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("options", [{}, {"loss_on": "batch"}])
def test_a_loss_may_be_made_of_gradients_by_the_output(recompute, options):
    pipe, twin = split(recompute=recompute)
    runtime, x, target = pipe.runtime(penalised, **options), numbers(10, 5), numbers(10, WIDTH)
    for _ in range(4):
        found = runtime.step(x, target=target).loss.item()
        assert trained_on(twin, penalised, [(x, target)]) == pytest.approx([found], rel=EXACT)
    compare(pipe.model, twin)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize("options", [{}, {"loss_on": "batch"}])
def test_one_made_of_gradients_by_weights_is_refused(recompute, options):
    pipe, _ = split(recompute=recompute)
    weight = [*pipe.model.parameters()][-2]

    def loss_fn(output, target):
        loss = F.mse_loss(output, target)
        return loss + torch.autograd.grad(loss, weight, create_graph=True)[0].norm()

    with pytest.raises(
        autopipe.errors.InputError, match="takes gradients by what its output does not lead to"
    ):
        pipe.runtime(loss_fn, **options).step(numbers(10, 5), target=numbers(10, WIDTH))


def test_of_the_last_stage_it_may_be_under_microbatches():
    pipe, twin = split(recompute="always", n_microbatches=2)
    weights = [[*each.parameters()][-2] for each in (pipe.model, twin)]

    def made(output, target, weight):
        loss = F.mse_loss(output, target)
        return loss + torch.autograd.grad(loss, weight, create_graph=True)[0].sum()

    x, target = numbers(10, 5), numbers(10, WIDTH)
    runtime = pipe.runtime(lambda o, t: made(o, t, weights[0]), loss_on="microbatches")
    found = runtime.step(x, target=target).loss.item()
    assert trained_on(twin, lambda o, t: made(o, t, weights[1]), [(x, target)]) == pytest.approx(
        [found], rel=EXACT
    )
    compare(pipe.model, twin)
