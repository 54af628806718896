"""What people write in a hurry: ``python hurried_ranks.py``, in one process or as a rank.

Each habit trains as the plain model does (a function gives its largest difference), or is refused by an error
that names the remedy. Alone most are right; over ranks a part of them cannot be.
"""

import copy
import functools
import io
import os
import pickle

import torch
from torch import nn
from torch.nn import functional as F

import autopipe

IS_ALONE = "RANK" not in os.environ
CLIP = 0.05


def network():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))


def batch(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def split(model=None):
    """A model, its pipe and a runtime; of a model's own, copies of what is recorded and planned once."""
    pipe = _split(model) if model is not None else copy.deepcopy(_template())
    return pipe.model, pipe, pipe.runtime(F.mse_loss)


@functools.cache
def _template():
    return _split(network())


def _split(model):
    return autopipe.split(model, 2, (batch(0)[0],), n_microbatches=4, costs="estimated", balance="uniform")


def train(rt, optimizer, n=2, between=lambda: None):
    for i in range(n):
        x, y = batch(i)
        rt.step(x, target=y)
        between()
        optimizer.step()
        optimizer.zero_grad()


def plainly(n=2, prepare=lambda model: None, between=lambda model: None):
    model = network()
    prepare(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    for i in range(n):
        x, y = batch(i)
        F.mse_loss(model(x), y).backward()
        between(model)
        optimizer.step()
        optimizer.zero_grad()
    return model


def apart(model, other):
    return max(
        float((a - b).abs().max())
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )


def trained(n=2):
    model, pipe, rt = split()
    train(rt, torch.optim.SGD(rt.parameters(), 0.1), n)
    return model, pipe, rt


def average_of_weights():
    model, _, rt = split()
    average = torch.optim.swa_utils.AveragedModel(model)
    train(rt, torch.optim.SGD(rt.parameters(), 0.1))
    average.update_parameters(model)
    return apart(average.module, plainly())


def saved_state():
    file = io.BytesIO()
    torch.save(trained()[0].state_dict(), file)
    file.seek(0)
    model = network()
    model.load_state_dict(torch.load(file))
    return apart(model, plainly())


def evaluation_between():
    expected = plainly()(batch(0)[0]).detach()
    model, _, _ = trained()
    model.eval()
    with torch.no_grad():
        return float((model(batch(0)[0]) - expected).abs().max())


def pipe_without_gradients():
    expected = plainly()(batch(0)[0]).detach()
    _, pipe, _ = trained()
    with torch.no_grad():
        return float((pipe(batch(0)[0]) - expected).abs().max())


def clipped(parameters):
    _, pipe, rt = made = split()
    train(
        rt,
        torch.optim.SGD(rt.parameters(), 0.1),
        between=lambda: nn.utils.clip_grad_norm_(parameters(*made), CLIP),
    )
    expected = plainly(between=lambda m: nn.utils.clip_grad_norm_(m.parameters(), CLIP))
    return apart(pipe.merge(), expected)


def clipped_model():
    return clipped(lambda model, pipe, rt: model.parameters())


def clipped_own():
    return clipped(lambda model, pipe, rt: rt.parameters())


def clipped_values():
    _, pipe, rt = split()
    train(
        rt,
        torch.optim.SGD(rt.parameters(), 0.1),
        between=lambda: nn.utils.clip_grad_value_(rt.parameters(), 0.003),
    )
    return apart(pipe.merge(), plainly(between=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.003)))


def optimizer_of_the_model():
    model, pipe, rt = split()
    train(rt, torch.optim.SGD(model.parameters(), 0.1))
    return apart(pipe.merge(), plainly())


def two_optimizers_by_layers():
    model, pipe, rt = split()
    first, second = (torch.optim.SGD(part.parameters(), 0.1) for part in (model[:3], model[3:]))
    for i in range(2):
        x, y = batch(i)
        rt.step(x, target=y)
        for one in (first, second):
            one.step()
            one.zero_grad()
    return apart(pipe.merge(), plainly())


def frozen_layers():
    def freeze(model):
        for parameter in model[:4].parameters():
            parameter.requires_grad_(False)

    model = network()
    freeze(model)
    _, pipe, rt = split(model)
    train(rt, torch.optim.SGD(filter(lambda p: p.requires_grad, rt.parameters()), 0.1))
    return apart(pipe.merge(), plainly(prepare=freeze))


def backward_of_the_loss():
    _, _, rt = split()
    rt.step(batch(0)[0], target=batch(0)[1]).backward()


def backward_through(call):
    made = split()
    optimizer = torch.optim.SGD(made[2].parameters(), 0.1)
    for i in range(2):
        x, y = batch(i)
        F.mse_loss(call(*made)(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return apart(made[1].merge(), plainly())


def backward_through_the_pipe():
    return backward_through(lambda model, pipe, rt: pipe)


def backward_through_the_model():
    return backward_through(lambda model, pipe, rt: model)


def penalty_on_weights():
    def penalty(model):
        (0.1 * sum(p.square().sum() for p in model.parameters())).backward()

    model, pipe, rt = split()
    penalty(model)
    train(rt, torch.optim.SGD(rt.parameters(), 0.1), 1)
    return apart(pipe.merge(), plainly(1, between=penalty))


def hooks_on_gradients():
    def hook(model):
        for parameter in model.parameters():
            parameter.register_hook(lambda g: g.clamp(-0.003, 0.003))

    model, pipe, rt = split()
    hook(model)
    train(rt, torch.optim.SGD(rt.parameters(), 0.1))
    return apart(pipe.merge(), plainly(prepare=hook))


def optimizers_in_backward():
    _, pipe, rt = split()
    for parameter in rt.parameters():
        own = torch.optim.SGD([parameter], 0.1)
        parameter.register_post_accumulate_grad_hook(lambda p, own=own: (own.step(), own.zero_grad()))
    for i in range(2):
        x, y = batch(i)
        rt.step(x, target=y)
    return apart(pipe.merge(), plainly())


def other_dtype_after_split():
    model, _, rt = split()
    model.double()
    rt.step(batch(0)[0].double(), target=batch(0)[1].double())


def pickled_pipe():
    return apart(pickle.loads(pickle.dumps(trained()[1])).model, plainly())


def copied_model():
    return apart(copy.deepcopy(trained()[0]), plainly())


def unsharded_sampler():
    _, _, rt = split()
    shuffled = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    for rows in torch.randperm(16, generator=shuffled).split(8):
        rt.step(rows[:, None].float().expand(8, 8), target=torch.zeros(8, 8))
    return 0.0


def trained_after_merging():
    model, pipe, _ = trained(1)
    pipe.merge()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batch(1)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    return apart(model, plainly())


REFUSED = {
    "backward_of_the_loss": r"leave backward\(\) out",
    "other_dtype_after_split": "capture again",
}
REFUSED_ON_RANKS = {
    **REFUSED,
    "average_of_weights": r"rt\.named_parameters",
    "saved_state": r"rt\.save",
    "evaluation_between": r"rt\.evaluate",
    "pipe_without_gradients": r"rt\.forward",
    "clipped_model": r"rt\.clip_grad_norm_",
    "clipped_own": r"rt\.clip_grad_norm_",
    "backward_through_the_pipe": r"rt\.step",
    "backward_through_the_model": r"rt\.step",
    "penalty_on_weights": r"rt\.step",
    "pickled_pipe": r"pipe\.merge",
    "copied_model": r"pipe\.merge",
    "unsharded_sampler": "same batches",
}
HABITS = [
    average_of_weights, saved_state, evaluation_between, pipe_without_gradients, clipped_model, clipped_own,
    clipped_values, optimizer_of_the_model, two_optimizers_by_layers, frozen_layers, backward_of_the_loss,
    backward_through_the_pipe, backward_through_the_model, penalty_on_weights, hooks_on_gradients,
    optimizers_in_backward, other_dtype_after_split, pickled_pipe, copied_model, trained_after_merging,
    unsharded_sampler,
]  # fmt: skip


def main(habits, refused):
    import pytest

    for habit in habits:
        name = habit.__name__
        if name in refused:
            with pytest.raises((autopipe.AutopipeError, AttributeError), match=refused[name]):
                habit()
        else:
            difference = habit()
            assert difference < 1e-6, (name, difference)
        print(name, flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(HABITS, REFUSED if IS_ALONE else REFUSED_ON_RANKS)
