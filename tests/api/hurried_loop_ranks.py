"""More of what people write in a hurry, around the step: ``hurried_loop_ranks.py``, alone or as a rank.

Losses that are scaled or differentiated again, lists of parameters, weights that are written between steps,
other optimizers. As in ``hurried_ranks``: each is right, or refused with the remedy.
"""

import copy
import io
import itertools
import logging

import torch
from hurried_ranks import CLIP, IS_ALONE, apart, batch, main, network, plainly, split, train
from torch import nn
from torch.nn import functional as F


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def loss_over_two():
    _, _, rt = split()
    loss = rt.step(batch(0)[0], target=batch(0)[1]).loss / 2
    loss.backward()


def loss_with_a_penalty():
    _, _, rt = split()
    extra = torch.ones((), requires_grad=True)
    (rt.step(batch(0)[0], target=batch(0)[1]).loss + extra).backward()


def result_over_two():
    _, _, rt = split()
    rt.step(batch(0)[0], target=batch(0)[1]) / 2


def result_as_a_loss():
    _, _, rt = split()
    rt.step(batch(0)[0], target=batch(0)[1]).item()


def gradient_of_the_loss():
    _, _, rt = split()
    torch.autograd.grad(rt.step(batch(0)[0], target=batch(0)[1]).loss, list(rt.parameters()))


def scaler_beside():
    _, _, rt = split()
    optimizer, scaler = sgd(rt.parameters()), torch.amp.GradScaler("cpu")
    scaler.scale(rt.step(batch(0)[0], target=batch(0)[1]).loss)
    scaler.step(optimizer)


def accumulation_by_dividing():
    _, _pipe, rt = split()
    optimizer, told = sgd(rt.parameters()), []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("autopipe.runtime.step_result").addHandler(handler)
    for i in range(4):
        rt.step(batch(i)[0], target=batch(i)[1]).loss / 2
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    logging.getLogger("autopipe.runtime.step_result").removeHandler(handler)
    (said,) = told
    assert "rt.accumulate(batches)" in said
    return 0.0


def losses_kept():
    _, _, rt = split()
    optimizer, total, kept = sgd(rt.parameters()), 0, []
    for i in range(3):
        loss = rt.step(batch(i)[0], target=batch(i)[1]).loss
        total += loss / 3
        kept.append(loss)
        optimizer.step()
        optimizer.zero_grad()
    mean = torch.stack(kept).mean()
    file = io.BytesIO()
    torch.save({"loss": mean, "last": kept[-1]}, file)
    file.seek(0)
    read = torch.load(file)["loss"]
    assert f"{total:.3f}" == f"{mean.item():.3f}"
    assert repr(kept[0]).startswith("tensor(")
    assert copy.deepcopy(kept[0]) == kept[0]
    assert kept[0].numpy() == float(kept[0])
    assert kept[0] < 1e9
    return abs(float(total) - float(read))


def clipped_list():
    return clipped(lambda rt, optimizer: list(rt.parameters()))


def clipped_by_name():
    return clipped(lambda rt, optimizer: [p for _, p in rt.named_parameters()])


def clipped_groups():
    return clipped(lambda rt, optimizer: optimizer.param_groups[0]["params"])


def clipped_stage():
    return clipped(lambda rt, optimizer: [p for stage in rt.stages for p in stage.parameters()])


def clipped(chosen):
    _, pipe, rt = split()
    optimizer = sgd(rt.parameters())
    train(rt, optimizer, between=lambda: nn.utils.clip_grad_norm_(chosen(rt, optimizer), CLIP))
    return apart(pipe.merge(), plainly(between=lambda m: nn.utils.clip_grad_norm_(m.parameters(), CLIP)))


def norm_by_hand():
    model, _pipe, rt = split()
    norms = []
    train(
        rt,
        sgd(rt.parameters()),
        between=lambda: norms.append(sum(p.grad.square().sum() for p in model.parameters())),
    )
    expected = []
    plainly(between=lambda m: expected.append(sum(p.grad.square().sum() for p in m.parameters())))
    return max(abs(float(a - b)) for a, b in zip(norms, expected, strict=True))


def clipped_after_merging():
    model, pipe, rt = split()
    train(rt, sgd(rt.parameters()), 1)
    pipe.merge()
    optimizer = sgd(model.parameters())
    F.mse_loss(model(batch(1)[0]), batch(1)[1]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    calls = itertools.count()
    return apart(
        model,
        plainly(between=lambda m: next(calls) and nn.utils.clip_grad_norm_(m.parameters(), CLIP)),
    )


def line_search():
    def fit(parameters, loss):
        optimizer = torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)

        def closure():
            optimizer.zero_grad()
            return loss()

        optimizer.step(closure)

    x, y = batch(0)
    expected = network()

    def plain():
        loss = F.mse_loss(expected(x), y)
        loss.backward()
        return loss

    fit(expected.parameters(), plain)
    _, pipe, rt = split()
    fit(list(rt.parameters()), lambda: rt.step(x, target=y).loss)
    return apart(pipe.merge(), expected)


def closure_of_sgd():
    _, pipe, rt = split()
    optimizer = sgd(rt.parameters())
    for i in range(2):

        def closure(i=i):
            optimizer.zero_grad()
            return rt.step(batch(i)[0], target=batch(i)[1]).loss

        optimizer.step(closure)
    return apart(pipe.merge(), plainly())


def optimizer_before_the_split():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1, momentum=0.9)
    _, pipe, rt = split(model)
    train(rt, optimizer)
    expected = network()
    plain = torch.optim.SGD(expected.parameters(), 0.1, weight_decay=0.1, momentum=0.9)
    for i in range(2):
        F.mse_loss(expected(batch(i)[0]), batch(i)[1]).backward()
        plain.step()
        plain.zero_grad()
    return apart(pipe.merge(), expected)


def thawed_between_steps():
    def freeze(model, frozen):
        for parameter in model[:4].parameters():
            parameter.requires_grad_(not frozen)

    model, expected = network(), network()
    for one in (model, expected):
        freeze(one, True)
    _, pipe, rt = split(model)
    optimizer, plain = sgd(rt.parameters()), sgd(expected.parameters())
    for i in range(3):
        if i == 1:
            freeze(model, False)
            freeze(expected, False)
        rt.step(batch(i)[0], target=batch(i)[1])
        optimizer.step()
        optimizer.zero_grad()
        F.mse_loss(expected(batch(i)[0]), batch(i)[1]).backward()
        plain.step()
        plain.zero_grad()
    return apart(pipe.merge(), expected)


def written_weights(write):
    model, pipe, rt = split()
    train(rt, sgd(rt.parameters()), 1)
    write(model)
    train(rt, sgd(rt.parameters()), 1)
    expected = plainly(1)
    write(expected)
    F.mse_loss(expected(batch(0)[0]), batch(0)[1]).backward()
    sgd(expected.parameters()).step()
    return apart(pipe.merge(), expected)


def decayed_by_hand():
    @torch.no_grad()
    def write(model):
        for parameter in model.parameters():
            parameter.mul_(0.9)

    return written_weights(write)


def clamped_data():
    def write(model):
        for parameter in model.parameters():
            parameter.data.clamp_(-0.1, 0.1)

    return written_weights(write)


def other_weights():
    return {name: torch.full_like(value, 0.05) for name, value in network().state_dict().items()}


def loaded_between_steps():
    return written_weights(lambda model: model.load_state_dict(other_weights()))


def assigned_between_steps():
    return written_weights(lambda model: model.load_state_dict(other_weights(), assign=True))


def initialised_between_steps():
    def write(model):
        torch.manual_seed(6)
        model.apply(lambda m: nn.init.normal_(m.weight, std=0.1) if isinstance(m, nn.Linear) else None)

    return written_weights(write)


def new_head_between_steps():
    def write(model):
        torch.manual_seed(7)
        model[6] = nn.Linear(8, 8)

    return written_weights(write)


def tied_after_the_split():
    model, pipe, rt = split()
    model[6].weight = model[0].weight
    train(rt, sgd(rt.parameters()), 1)

    def tie(m):
        m[6].weight = m[0].weight

    return apart(pipe.merge(), plainly(1, prepare=tie))


def zeroed_through_the_model():
    model, pipe, rt = split()
    optimizer = sgd(rt.parameters())
    for i in range(2):
        model.zero_grad(set_to_none=False)
        rt.step(batch(i)[0], target=batch(i)[1])
        optimizer.step()
    return apart(pipe.merge(), plainly())


def never_zeroed():
    _, pipe, rt = split()
    optimizer = sgd(rt.parameters())
    for i in range(2):
        rt.step(batch(i)[0], target=batch(i)[1])
        optimizer.step()
    expected = network()
    plain = sgd(expected.parameters())
    for i in range(2):
        F.mse_loss(expected(batch(i)[0]), batch(i)[1]).backward()
        plain.step()
    return apart(pipe.merge(), expected)


def target_by_position():
    _, _, rt = split()
    rt.step(*batch(0))


def batch_as_a_dict():
    _, _, rt = split()
    rt.step({"input": batch(0)[0]}, target=batch(0)[1])


def labels_by_another_name():
    _, _, rt = split()
    rt.step(batch(0)[0], labels=batch(0)[1])


def mode_of_the_runtime():
    _, _, rt = split()
    rt.train()


def weights_of_the_runtime():
    _, _, rt = split()
    rt.state_dict()


def step_without_gradients():
    _, _, rt = split()
    with torch.no_grad():
        rt.step(batch(0)[0], target=batch(0)[1])


def weights_as_a_vector():
    model, _, rt = split()
    train(rt, sgd(rt.parameters()))
    found = nn.utils.parameters_to_vector(model.parameters())
    return float((found - nn.utils.parameters_to_vector(plainly().parameters())).abs().max().detach())


REFUSED = {
    "loss_over_two": r"leave backward\(\) out",
    "loss_with_a_penalty": r"leave backward\(\) out",
    "result_over_two": r"result\.loss",
    "result_as_a_loss": r"result\.loss\.item",
    "gradient_of_the_loss": r"leave backward\(\) out",
    "scaler_beside": r"runtime\(scaler=",
    "new_head_between_steps": "capture again",
    "target_by_position": "too many positional arguments",
    "batch_as_a_dict": "argument input",
    "labels_by_another_name": "'labels'",
    "mode_of_the_runtime": r"pipe\.train",
    "weights_of_the_runtime": r"rt\.save",
    "step_without_gradients": "evaluate",
}
REFUSED_ON_RANKS = {
    **REFUSED,
    "clipped_list": r"rt\.clip_grad_norm_",
    "clipped_by_name": r"rt\.clip_grad_norm_",
    "clipped_groups": r"rt\.clip_grad_norm_",
    "clipped_stage": r"rt\.clip_grad_norm_",
    "norm_by_hand": r"rt\.clip_grad_norm_",
    "line_search": "one by one",
    "decayed_by_hand": r"rt\.named_parameters",
    "clamped_data": r"rt\.named_parameters",
    "initialised_between_steps": r"rt\.named_parameters",
    "tied_after_the_split": "one tensor only since the runtime was made",
    "weights_as_a_vector": r"pipe\.merge",
}
HABITS = [
    loss_over_two, loss_with_a_penalty, result_over_two, result_as_a_loss, gradient_of_the_loss,
    scaler_beside, accumulation_by_dividing, losses_kept, clipped_list, clipped_by_name, clipped_groups,
    clipped_stage, norm_by_hand, clipped_after_merging, line_search, closure_of_sgd,
    optimizer_before_the_split, thawed_between_steps, decayed_by_hand, clamped_data, loaded_between_steps,
    assigned_between_steps, initialised_between_steps, new_head_between_steps, zeroed_through_the_model,
    never_zeroed, target_by_position, batch_as_a_dict, labels_by_another_name, mode_of_the_runtime,
    weights_of_the_runtime, step_without_gradients, weights_as_a_vector, tied_after_the_split,
]  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(HABITS, REFUSED if IS_ALONE else REFUSED_ON_RANKS)
