"""Losses over the weights of all rows, which no example need show, are made of the whole batch."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopipe
from autopipe.tracing import capture

HEAVY = 4
WEIGHTS = [1.0, 1.0, 1.0, 1.0, 20.0]


class Classes(nn.Module):
    """A classifier whose forward gives the mean ``weighed``, beside others' weights, of its losses."""

    def __init__(self, weighed):
        super().__init__()
        self.first, self.next, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.weighed = weighed
        self.register_buffer("table", torch.tensor(WEIGHTS))

    def forward(self, x, labels):
        logits = self.last(self.next(self.first(x).tanh()).tanh())
        return self.weighed(self, logits, labels)


def over(weights, logits, labels):
    return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / weights.sum()


def by_table(model, logits, labels):
    return over(model.table[labels], logits, labels)


def by_list(model, logits, labels):
    return over(torch.tensor(WEIGHTS)[labels], logits, labels)


def by_kinds(model, logits, labels):
    return over((F.one_hot(labels, 5) * torch.tensor(WEIGHTS)).sum(-1), logits, labels)


def by_limit(model, logits, labels):
    return over(1 + F.relu(labels - 3.0) * 19, logits, labels)


def by_quotient(model, logits, labels):
    return over(1 + labels // HEAVY * 19.0, logits, labels)


def normalised(model, logits, labels):
    weights = (labels // HEAVY * 19 + 1).float()
    return (F.cross_entropy(logits, labels, reduction="none") * weights / weights.mean()).mean()


def of_those_counted(model, logits, labels):
    counts = labels < HEAVY
    return F.mse_loss(logits[counts], torch.ones_like(logits)[counts]) + logits.square().mean()


class Inside(nn.Module):
    """A loss that stays whole."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, logits, labels):
        return self.weights(logits, labels)


class Normalised(nn.Module):
    """Weights, in a layer that stays whole, whose mean is one."""

    def forward(self, labels):
        weights = labels // HEAVY * 19 + 1.0
        return weights / weights.mean()


class Weighing(Classes):
    """Takes its losses times such weights."""

    def __init__(self, _):
        super().__init__(self.mean)
        self.weights = Normalised()

    @staticmethod
    def mean(model, logits, labels):
        return (F.cross_entropy(logits, labels, reduction="none") * model.weights(labels)).mean()


class Kept(Classes):
    """Has such a loss."""

    def __init__(self, weights):
        super().__init__(lambda model, logits, labels: model.inside(logits, labels))
        self.inside = Inside(weights)


def of_numpy(logits, labels):
    return over(torch.from_numpy(np.array(WEIGHTS, np.float32)[labels.numpy()]), logits, labels)


def of_reads(logits, labels):
    return over(torch.tensor([WEIGHTS[int(n)] for n in labels]), logits, labels)


def written(logits, labels):
    weights = torch.ones(len(labels))
    weights[labels >= HEAVY] = 20.0
    return over(weights, logits, labels)


def of_torch(logits, labels):
    return F.cross_entropy(logits, labels, weight=torch.tensor(WEIGHTS))


def left_out(logits, labels):
    return F.cross_entropy(logits, labels, ignore_index=HEAVY)


def shared_out_inside(logits, labels):
    return shared_out(None, logits, labels)


def of_a_count(logits, labels):
    return logits.square().sum() / max(1, int((labels < HEAVY).sum()))


def shared_out(model, logits, labels):
    return (F.cross_entropy(logits, labels, reduction="none") * (labels // HEAVY * 2.0).softmax(0)).sum()


def of_length_one(model, logits, labels):
    return F.cross_entropy(logits, labels, reduction="none") @ F.normalize(
        1 + labels // HEAVY * 19.0, p=1, dim=0
    )


def in_training(model, logits, labels):
    return by_limit(model, logits, labels) if model.training else logits


GLUE = [
    shared_out,
    of_length_one,
    in_training,
    by_table,
    by_list,
    by_kinds,
    by_limit,
    by_quotient,
    normalised,
    of_those_counted,
]
WHOLE = [shared_out_inside, of_numpy, of_reads, written, of_torch, left_out, of_a_count]


def made(loss):
    torch.manual_seed(0)
    model = loss(loss) if isinstance(loss, type) else Kept(loss) if loss in WHOLE else Classes(loss)
    return model, (torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 1, 0]))


@pytest.mark.parametrize("loss", [*GLUE, *WHOLE, Weighing])
def test_weights_that_no_row_of_the_example_has_are_those_of_the_whole_batch(loss):
    model, args = made(loss)
    twin = copy.deepcopy(model)
    pipe = autopipe.split(model, 2, args, costs="estimated", n_microbatches=3, time_limit_s=0.2)
    x, labels = torch.randn(7, 4), torch.tensor([4, 0, 1, 4, 2, 3, 0])
    expected = twin(x, labels)
    expected.backward()
    torch.testing.assert_close(pipe.runtime().step(x, labels).loss, expected.detach())
    for (name, got), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(got.grad, wanted.grad, msg=name)


def mean(model, logits, labels):
    return (
        F.mse_loss(logits, torch.ones_like(logits)) * 2
        - logits.sum() / len(labels)
        + model.first.weight.norm()
    )


def over_sizes(model, logits, labels):
    return (logits * torch.ones_like(logits)).sum() / torch.ones_like(logits).sum()


def of_labels(model, logits, labels):
    return (F.cross_entropy(logits, labels) + 1) / 2


def scaled_by_a_type(model, logits, labels):
    return (logits * torch.ones(5).type_as(logits).softmax(-1)).square().mean()


def even(logits, labels):
    total = sum(F.mse_loss(logits, torch.full_like(logits, n)) for n in range(3))
    return torch.stack([total, logits.abs().mean()]).sum() / (3 * logits.shape[-1])


@pytest.mark.parametrize("loss", [mean, over_sizes, of_labels, scaled_by_a_type])
def test_even_means_are_made_of_each_microbatch(loss):
    model, args = made(loss)
    found = capture(model, args).variation
    assert not found.mixing.always
    assert not found.tail.ops


def test_even_means_of_code_that_stays_whole_are_seen_to_be():
    torch.manual_seed(0)
    found = capture(Kept(even), (torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 1, 0]))).variation
    assert not found.mixing.always
    assert not found.tail.ops


class Doubled(torch.autograd.Function):
    """Gives back the memory of its input, as reversible layers do."""

    @staticmethod
    def forward(ctx, x):
        doubled = x.detach() * 2
        x.untyped_storage().resize_(0)
        return doubled

    @staticmethod
    def backward(ctx, slope):
        return slope * 2


class Freeing(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = Doubled.apply(layer(x))
        return x.square().sum() / x.shape[0]


def test_code_that_frees_its_inputs_is_not_run_on_them_again():
    """What ran before has freed them: to read them again ends the process."""
    torch.manual_seed(0)
    model, x = Freeing(), torch.randn(4, 4)
    captured = capture(model, (x,))
    assert captured(x).item() == pytest.approx(model(x).item())
    freeing = {op.name for op in captured.ops.ops if op.name.startswith("Doubled")}
    assert len(freeing) == 2
    assert all(len({*group} & freeing) < 2 for group in captured.ops.groups)
