"""Still more of what people write in a hurry: ``hurried_again_ranks.py``, alone or as a rank.

Odd batches and losses, models that are changed after the split, schedules, and what one rank does alone. As
in ``hurried_ranks``: each is right, or refused with the remedy.
"""

import copy
import logging
import os

import pytest
import torch
import torch.distributed as dist
from hurried_ranks import IS_ALONE, apart, batch, main, network, plainly, split, train
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import autopipe

RANK = int(os.environ.get("RANK", "0"))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def hear(name):
    """What a logger of autopipe says from now on."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    return said, lambda: logging.getLogger(name).removeHandler(handler)


def loops(prepare=lambda x, y: (x, y), schedule=lambda optimizer: lambda loss: None, n=3, loss=F.mse_loss):
    """A loop on both, with batches and a schedule that are made alike; the largest difference."""
    _, pipe, _ = split()
    rt, model = pipe.runtime(loss), network()
    mine, own = sgd(rt.parameters()), sgd(model.parameters())
    after, own_after = schedule(mine), schedule(own)
    for i in range(n):
        x, y = prepare(*batch(i))
        found = rt.step(x, target=y).loss
        mine.step()
        mine.zero_grad()
        after(found)
        expected = loss(model(x), y)
        expected.backward()
        own.step()
        own.zero_grad()
        own_after(expected)
        assert abs(float(found) - float(expected)) < 1e-6
    return apart(pipe.merge(), model)


# -- calling it otherwise ---------------------------------------------------------------------------


def runtime_called():
    split()[2](batch(0)[0])


def result_unpacked():
    _loss, _outputs = split()[2].step(batch(0)[0], target=batch(0)[1])


def logits_of_the_result():
    return split()[2].step(batch(0)[0], target=batch(0)[1]).logits


def module_of_the_runtime():
    return split()[2].module


def keyword_for_a_position():
    x, y = batch(0)
    return abs(float(split()[2].step(input=x, target=y).loss) - float(F.mse_loss(network()(x), y)))


def forgotten_input():
    split()[2].step(target=batch(0)[1])


def strings_beside():
    x, y = batch(0)
    split()[2].step(x, target=y, names=["a"] * 8)


def outputs_of_a_step():
    x, y = batch(0)
    found = split()[2].step(x, target=y, return_outputs=True).outputs
    return float((found - network()(x)).abs().max())


def runtime_made_again():
    _, pipe, rt = split()
    train(rt, sgd(rt.parameters()), 1)
    again = pipe.runtime(F.mse_loss)
    optimizer = sgd(again.parameters())
    again.step(batch(1)[0], target=batch(1)[1])
    optimizer.step()
    return apart(pipe.merge(), plainly())


def loaded_into_the_pipe():
    _, pipe, rt = split()
    pipe.load_state_dict(plainly(1).state_dict())
    optimizer = sgd(rt.parameters())
    rt.step(batch(1)[0], target=batch(1)[1])
    optimizer.step()
    return apart(pipe.merge(), plainly())


def second_pipe_to_evaluate():
    model, _, rt = split()
    train(rt, sgd(rt.parameters()))
    _, _, other = split(model)
    return float((other.forward(batch(0)[0]) - plainly()(batch(0)[0])).abs().max())


# -- batches ----------------------------------------------------------------------------------------


def ragged_last_batch():
    sizes = iter((8, 6, 3))

    def cut(x, y):
        n = next(sizes)
        return x[:n], y[:n]

    return loops(cut)


def one_row():
    return loops(lambda x, y: (x[:1], y[:1]))


def one_axis_more():
    return loops(lambda x, y: (x[:, None].expand(8, 3, 8), y[:, None].expand(8, 3, 8)))


def as_numpy():
    x, y = batch(0)
    split()[2].step(x.numpy(), target=y)


def as_a_list_of_rows():
    x, y = batch(0)
    split()[2].step(list(x), target=y)


def in_double():
    x, y = batch(0)
    split()[2].step(x.double(), target=y)


def too_few_targets():
    x, y = batch(0)
    split()[2].step(x, target=y[:5])


def target_that_broadcasts():
    x, y = batch(0)
    found = split()[2].step(x, target=y[:1]).loss
    return abs(float(found) - float(F.mse_loss(network()(x), y[:1].expand(8, 8))))


def not_a_number():
    x, y = batch(0)
    split()[2].step(x / 0, target=y)


def not_a_number_passed_over():
    _, pipe, rt = split()
    optimizer = sgd(rt.parameters())
    for i in range(3):
        x, y = batch(i)
        try:
            rt.step(x * float("nan") if i == 1 else x, target=y)
        except autopipe.StepError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    model = network()
    own = sgd(model.parameters())
    for i in (0, 2):
        F.mse_loss(model(batch(i)[0]), batch(i)[1]).backward()
        own.step()
        own.zero_grad()
    return apart(pipe.merge(), model)


# -- losses -----------------------------------------------------------------------------------------


def with_loss(loss_fn):
    _, pipe, _ = split()
    return pipe.runtime(loss_fn).step(batch(0)[0], target=batch(0)[1])


def loss_as_a_dict():
    with_loss(lambda output, target: {"loss": F.mse_loss(output, target)})


def loss_as_a_tuple():
    with_loss(lambda output, target: (F.mse_loss(output, target), {}))


def loss_of_each_row():
    with_loss(lambda output, target: (output - target).square().mean(1))


def loss_as_a_number():
    with_loss(lambda output, target: F.mse_loss(output, target).item())


def loss_without_the_output():
    with_loss(lambda output, target: target.square().mean())


def loss_that_sums():
    """Told of at the first steps: nothing else says that it is no mean."""
    said, stop = hear("autopipe")
    with_loss(lambda output, target: (output - target).square().sum())
    stop()
    # the rank with the loss says it
    assert said or not (IS_ALONE or RANK), said
    assert all("loss_reduction" in line for line in said), said
    return 0.0


class Tempered(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return F.mse_loss(output * self.scale, target)


def loss_with_a_weight(of=lambda loss: loss, is_trained=True):
    """Every rank holds the loss's weight, and each trains it."""
    mine, own, model = Tempered(), Tempered(), network()
    for loss in (mine, own):
        loss.requires_grad_(is_trained)
    rt = split()[1].runtime(of(mine))
    optimizer, plain = (
        sgd([*rt.parameters(), *mine.parameters()]),
        sgd([*model.parameters(), *own.parameters()]),
    )
    for i in range(3):
        x, y = batch(i)
        found = rt.step(x, target=y).loss
        expected = own(model(x), y)
        expected.backward()
        assert abs(float(found) - float(expected.detach())) < 1e-6
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    return float((mine.scale - own.scale).detach().abs())


def loss_around_a_weight():
    return loss_with_a_weight(lambda loss: lambda output, target: loss(output, target))


def loss_around_a_frozen_weight():
    return loss_with_a_weight(lambda loss: lambda output, target: loss(output, target), is_trained=False)


# -- schedules and switches -------------------------------------------------------------------------


def plateau():
    def schedule(optimizer):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, patience=0, factor=0.5, threshold=1.0
        ).step

    return loops(schedule=schedule, n=5)


def one_cycle():
    def schedule(optimizer):
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=6)
        return lambda loss: cycle.step()

    return loops(schedule=schedule, n=5)


def fused_optimizer():
    _, pipe, rt = split()
    model = network()
    optimizers = [torch.optim.AdamW(list(x.parameters()), fused=True) for x in (rt, model)]
    for i in range(2):
        x, y = batch(i)
        rt.step(x, target=y)
        F.mse_loss(model(x), y).backward()
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=False)
    return apart(pipe.merge(), model)


def anomalies_looked_for():
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        return loops(n=1)


def default_dtype_changed():
    batches, expected = [batch(i) for i in range(2)], plainly()
    _, pipe, rt = split()
    optimizer = sgd(rt.parameters())
    torch.set_default_dtype(torch.float64)
    try:
        for x, y in batches:
            rt.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_default_dtype(torch.float32)
    return apart(pipe.merge(), expected)


def evaluated_between():
    model, pipe, rt = split()
    optimizer, own = sgd(rt.parameters()), network()
    plain = sgd(own.parameters())
    worst = 0.0
    for i in range(2):
        x, y = batch(i)
        pipe.eval()
        worst = max(worst, abs(float(rt.evaluate(x, target=y).loss) - float(F.mse_loss(own(x), y))))
        model.train()
        rt.step(x, target=y)
        F.mse_loss(own(x), y).backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    return max(worst, apart(pipe.merge(), own))


# -- models changed after the split -----------------------------------------------------------------


def changed(change):
    model, pipe, rt = split()
    change(model)
    train(rt, sgd(rt.parameters()), 2)
    return apart(pipe.merge(), plainly(prepare=change))


def weight_norm():
    return changed(lambda m: parametrizations.weight_norm(m[0]))


def pruned():
    return changed(lambda m: prune.l1_unstructured(m[0], "weight", 0.5))


def wrapped_layer():
    def change(model):
        model[2] = nn.Sequential(model[2], nn.Identity())

    return changed(change)


def appended_layer():
    return changed(lambda m: m.append(nn.Linear(8, 8)))


def on_the_host_again():
    return changed(lambda m: m.to("cpu"))


def sparse_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8, sparse=True), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    ids, y = torch.arange(8), batch(0)[1]
    own = copy.deepcopy(model)
    pipe = autopipe.split(model, 2, (ids,), n_microbatches=2, costs="estimated", balance="uniform")
    rt = pipe.runtime(F.mse_loss)
    optimizer, plain = sgd(rt.parameters()), sgd(own.parameters())
    rt.step(ids, target=y)
    F.mse_loss(own(ids), y).backward()
    optimizer.step()
    plain.step()
    return apart(pipe.merge(), own)


class TwoLosses(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x, y):
        made = self.body(x)
        return {"error": F.mse_loss(made, y), "size": made.square().mean()}


def losses_of_the_model_added():
    """They are means over a microbatch each: nothing is to be said of them."""
    x, y = batch(0)
    own, model = TwoLosses(), TwoLosses()
    pipe = autopipe.split(model, 2, (x, y), n_microbatches=4, costs="estimated", balance="uniform")
    said, stop = hear("autopipe")
    found = pipe.runtime(lambda output, target: output["error"] + 0.1 * output["size"]).step(x, y).loss
    stop()
    assert not said, said
    expected = own(x, y)
    return abs(float(found) - float(expected["error"] + 0.1 * expected["size"]))


# -- an optimizer's state ---------------------------------------------------------------------------


def state_of_one_rank_for_all():
    """As when rank 0 alone saves it: the others are refused it, and go on with their own."""
    _, pipe, rt = split()
    model = network()
    mine, plain = (torch.optim.Adam(one.parameters(), 0.01) for one in (rt, model))
    for i in range(3):
        rt.step(batch(i)[0], target=batch(i)[1])
        F.mse_loss(model(batch(i)[0]), batch(i)[1]).backward()
        for one in (mine, plain):
            one.step()
            one.zero_grad()
        own = copy.deepcopy(mine.state_dict())
        found = [own]
        if not IS_ALONE:
            dist.broadcast_object_list(found)
        mine = torch.optim.Adam(rt.parameters(), 0.01)
        if RANK:
            with pytest.raises(autopipe.InputError, match=r"'0\.weight'.*'4\.weight'.*rt\.load"):
                mine.load_state_dict(found[0])
        mine.load_state_dict(own if RANK else found[0])
    return apart(pipe.merge(), model)


# -- what one rank does alone -----------------------------------------------------------------------


def alone(what):
    """Rank 0 does something by itself while the others go on to the next step."""
    _, pipe, rt = split()
    x, y = batch(1)
    rt.step(x, target=y)
    if RANK == 0:
        what(pipe, rt)
    rt.step(x, target=y)
    return 0.0


def evaluated_on_one_rank():
    return alone(lambda pipe, rt: rt.evaluate(batch(0)[0], target=batch(0)[1]))


def evaluation_mode_on_one_rank():
    return alone(lambda pipe, rt: pipe.eval())


def frozen_on_one_rank():
    return alone(lambda pipe, rt: pipe.model[0].requires_grad_(False))


REFUSED = {
    "runtime_called": r"rt\.step",
    "result_unpacked": r"result\.loss",
    "logits_of_the_result": "outputs",
    "module_of_the_runtime": r"pipe\.model",
    "forgotten_input": "'input'",
    "strings_beside": "'names'",
    "as_numpy": "tensor",
    "as_a_list_of_rows": "capture again",
    "in_double": "float64",
    "one_axis_more": "capture again",
    "target_that_broadcasts": "batch_dims",
    "wrapped_layer": "capture again",
    "too_few_targets": "target",
    "not_a_number": "not finite",
    "loss_as_a_dict": "scalar",
    "loss_as_a_tuple": "scalar",
    "loss_of_each_row": "scalar",
    "loss_as_a_number": "scalar",
    "loss_without_the_output": "does not use the output",
    "appended_layer": "capture again",
}
REFUSED_ON_RANKS = {
    **REFUSED,
    "second_pipe_to_evaluate": r"pipe\.merge",
    "weight_norm": "parametrizations",
    "pruned": "pruning",
    "evaluated_on_one_rank": "gradients=",
    "evaluation_mode_on_one_rank": "training=",
    "frozen_on_one_rank": "trained=",
    "loss_around_a_weight": "requires_grad_",
}
HABITS = [
    runtime_called, result_unpacked, logits_of_the_result, module_of_the_runtime, keyword_for_a_position,
    forgotten_input, strings_beside, outputs_of_a_step, runtime_made_again, loaded_into_the_pipe,
    second_pipe_to_evaluate, ragged_last_batch, one_row, one_axis_more, as_numpy, as_a_list_of_rows,
    in_double, too_few_targets, target_that_broadcasts, not_a_number, not_a_number_passed_over,
    loss_as_a_dict, loss_as_a_tuple, loss_of_each_row, loss_as_a_number, loss_without_the_output,
    loss_that_sums, losses_of_the_model_added, loss_with_a_weight, loss_around_a_weight,
    loss_around_a_frozen_weight, plateau, one_cycle, fused_optimizer, anomalies_looked_for,
    default_dtype_changed, evaluated_between, weight_norm, pruned, wrapped_layer, appended_layer,
    on_the_host_again, sparse_gradients, state_of_one_rank_for_all, evaluated_on_one_rank,
    evaluation_mode_on_one_rank, frozen_on_one_rank,
]  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(HABITS, REFUSED if IS_ALONE else REFUSED_ON_RANKS)
