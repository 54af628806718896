"""Still more of what people write in a hurry: ``hurried_more_ranks.py``, alone or as a rank.

Hooks, wrappers and modes of the model, whole models saved, batches that are none. As in
``hurried_ranks``: each is right, or refused with the remedy.
"""

import io
import itertools
import os
import warnings

import torch
from hurried_ranks import IS_ALONE, apart, batch, main, network, plainly, split, train
from torch import nn
from torch.nn import functional as F

import autopipe

RANK = int(os.environ.get("RANK", "0"))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def prepared(change, n=2):
    """Train after ``change`` was made to the model, once the runtime was there."""
    model, pipe, rt = split()
    change(model)
    train(rt, sgd(rt.parameters()), n)
    return apart(pipe.merge(), plainly(n, prepare=change))


def hook_on_a_layer():
    return prepared(lambda m: m[2].register_forward_hook(lambda _, args, out: out * 0.5))


def hook_before_a_layer():
    return prepared(lambda m: m[4].register_forward_pre_hook(lambda _, args: (args[0] * 0.5,)))


def backward_hook_on_a_layer():
    return prepared(lambda m: m[2].register_full_backward_hook(lambda _, given, got: (given[0] * 0.5,)))


def hook_on_the_model():
    return prepared(lambda m: m.register_forward_hook(lambda _, args, out: out * 0.5))


def frozen_after_the_split():
    return prepared(lambda m: m[:4].requires_grad_(False))


def all_frozen():
    return prepared(lambda m: m.requires_grad_(False))


def layer_in_another_mode():
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh())

    made, expected = model(), model()
    _, pipe, rt = split(made)
    pipe.eval()
    train(rt, sgd(rt.parameters()), 1)
    expected.eval()
    F.mse_loss(expected(batch(0)[0]), batch(0)[1]).backward()
    sgd(expected.parameters()).step()
    return apart(pipe.merge(), expected)


def second_group_of_parameters():
    model, pipe, rt = split()
    optimizer = sgd(model[:4].parameters())
    train(rt, optimizer, 1)
    optimizer.add_param_group({"params": list(model[4:].parameters()), "lr": 0.1})
    train(rt, optimizer, 1)
    expected = network()
    plain = sgd(expected[:4].parameters())
    for added in (None, expected[4:]):
        if added is not None:
            plain.add_param_group({"params": list(added.parameters()), "lr": 0.1})
        F.mse_loss(expected(batch(0)[0]), batch(0)[1]).backward()
        plain.step()
        plain.zero_grad()
    return apart(pipe.merge(), expected)


def zeroed_through_the_pipe():
    _, pipe, rt = split()
    optimizer = sgd(rt.parameters())
    for i in range(2):
        pipe.zero_grad()
        rt.step(batch(i)[0], target=batch(i)[1])
        optimizer.step()
    return apart(pipe.merge(), plainly())


def whole_model_saved():
    model, _, rt = split()
    train(rt, sgd(rt.parameters()))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return apart(torch.load(file, weights_only=False), plainly())


def average_of_the_pipe():
    _, pipe, rt = split()
    average = torch.optim.swa_utils.AveragedModel(pipe)
    train(rt, sgd(rt.parameters()))
    average.update_parameters(pipe)
    return apart(average.module.model, plainly())


def average_of_own_weights():
    _, _pipe, rt = split()
    optimizer, average = sgd(rt.parameters()), {}
    for i in range(2):
        rt.step(batch(i)[0], target=batch(i)[1])
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in rt.named_parameters():
            average[name] = average.get(name, 0) + parameter.detach() / 2
    expected = {n: (a + b) / 2 for (n, a), b in zip(
        plainly(1).state_dict().items(), plainly(2).state_dict().values(), strict=True
    )}  # fmt: skip
    return max(float((value - expected[name]).abs().max()) for name, value in average.items())


def verified_after_steps():
    _, pipe, rt = split()
    train(rt, sgd(rt.parameters()))
    return pipe.verify().max_gradient_error


def weight_read():
    model, _, rt = split()
    train(rt, sgd(rt.parameters()))
    found = [layer.weight.detach().cpu().numpy() for layer in model[::2]]
    expected = [layer.weight.detach().numpy() for layer in plainly()[::2]]
    return max(float(abs(a - b).max()) for a, b in zip(found, expected, strict=True))


def parameters_counted():
    model, pipe, rt = split()
    train(rt, sgd(rt.parameters()))
    n = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert n == sum(p.numel() for p in pipe.parameters()) == sum(p.numel() for p in network().parameters())
    assert repr(model) == repr(network())
    assert {str(p.device) for p in model.parameters()} == {"cpu"}
    return 0.0


def through(wrap):
    """Train two steps by backward through what ``wrap`` makes of the pipe."""
    _, pipe, rt = split()
    warnings.filterwarnings("ignore", message="Dynamo detected a call")
    wrapped, optimizer = wrap(pipe), sgd(rt.parameters())
    for i in range(2):
        F.mse_loss(wrapped(batch(i)[0]), batch(i)[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return apart(pipe.merge(), plainly())


def data_parallel():
    return through(nn.DataParallel)


def compiled_pipe():
    return through(lambda pipe: torch.compile(pipe, backend="eager"))


def compiled_model_after_steps():
    model, _, rt = split()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        before = float((compiled(batch(0)[0]) - network()(batch(0)[0])).abs().max())
    train(rt, sgd(rt.parameters()))
    expected = plainly()
    try:
        with torch.no_grad():
            return max(before, float((compiled(batch(0)[0]) - expected(batch(0)[0])).abs().max()))
    except torch._dynamo.exc.InternalTorchDynamoError as error:  # what it makes of any error of its inputs
        raise autopipe.AutopipeError(str(error)) from None


def split_of_a_compiled_model():
    compiled = torch.compile(network(), backend="eager")
    _, pipe, rt = split(compiled)
    train(rt, sgd(rt.parameters()))
    return apart(pipe.merge(), plainly())


def split_of_a_model_compiled_in_place():
    model = network()
    model.compile(backend="eager")
    split(model)


def compiled_in_place_after_the_split():
    return prepared(lambda m: m.compile(backend="eager"))


def split_of_a_scripted_model():
    split(torch.jit.script(network()))


def split_of_a_traced_model():
    split(torch.jit.trace(network(), (batch(0)[0],)))


def split_of_a_data_parallel_model():
    _, pipe, rt = split(nn.DataParallel(network()))
    train(rt, sgd(rt.parameters()))
    return apart(pipe.merge(), plainly())


def autocast_around_the_step():
    _, pipe, rt = split()
    optimizer, expected = sgd(rt.parameters()), network()
    plain = sgd(expected.parameters())
    for i in range(2):
        x, y = batch(i)
        with torch.autocast("cpu", torch.bfloat16):
            rt.step(x, target=y, n_microbatches=1)
            loss = F.mse_loss(expected(x), y)
        loss.backward()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    return apart(pipe.merge(), expected)


def inference_between():
    _, pipe, rt = split()
    optimizer = sgd(rt.parameters())
    train(rt, optimizer, 1)
    with torch.inference_mode():
        outputs = rt.forward(batch(0)[0])
        rt.evaluate(batch(0)[0], target=batch(0)[1])
    found = float((outputs - plainly(1)(batch(0)[0]).detach()).abs().max())
    rt.step(batch(1)[0], target=batch(1)[1])
    optimizer.step()
    return max(found, apart(pipe.merge(), plainly()))


def step_without_a_target():
    _, _, rt = split()
    rt.step(batch(0)[0])


def own_loss_without_a_target():
    _, pipe, _ = split()
    rt = pipe.runtime(lambda output, target: (output - target).square().mean())
    rt.step(batch(0)[0])


def loss_that_needs_no_target():
    _, pipe, _ = split()
    rt = pipe.runtime(lambda output, target: output.square().mean())
    loss = rt.step(batch(0)[0]).loss
    return abs(float(loss) - network()(batch(0)[0]).square().mean().item())


def accumulated_tensors():
    _, _, rt = split()
    rt.accumulate([batch(0)[0], batch(1)[0]])


def accumulated_mapping():
    _, _, rt = split()
    rt.accumulate({"input": batch(0)[0], "target": batch(0)[1]})


def accumulated_lists():
    _, pipe, _ = split()
    rt = pipe.runtime(lambda output, target: output.square().mean())
    rt.accumulate([[batch(0)[0]], (batch(1)[0],)])
    sgd(rt.parameters()).step()
    expected = network()
    both = torch.cat([batch(0)[0], batch(1)[0]])
    expected(both).square().mean().backward()
    sgd(expected.parameters()).step()
    return apart(pipe.merge(), expected)


def order_that_parts_later():
    """Ranks shuffle alike at first, and otherwise from the fourth batch on."""
    model, _, rt = split()
    optimizer = sgd(model.parameters())
    for i in itertools.chain(range(5), [5 + RANK]):
        x, y = batch(i)
        rt.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
    return 0.0


def model_of_another_job():
    """Wrapped for data parallelism before it is split."""
    _, _, rt = split(nn.parallel.DistributedDataParallel(network()))
    train(rt, sgd(rt.parameters()))


def replicas_of_other_stages():
    """DistributedDataParallel over all ranks, as it is without a group."""
    _, _, rt = split()
    rt.wrap(nn.parallel.DistributedDataParallel)


def step_of_the_pipe():
    _, pipe, _ = split()
    assert not hasattr(pipe, "clip_grad_norm_")
    pipe.step(batch(0)[0], target=batch(0)[1])


REFUSED = {
    "split_of_a_compiled_model": r"rt\.wrap\(torch\.compile\)",
    "split_of_a_model_compiled_in_place": r"rt\.wrap\(torch\.compile\)",
    "split_of_a_scripted_model": "RecursiveScriptModule.*made of",
    "split_of_a_traced_model": "TopLevelTracedModule.*made of",
    "step_of_the_pipe": r"rt\.step",
    "hook_on_the_model": "capture again",
    "all_frozen": "frozen",
    "step_without_a_target": r"target=y",
    "own_loss_without_a_target": r"target=y",
    "accumulated_tensors": "batch 0 of accumulate",
    "accumulated_mapping": "batch 0 of accumulate",
    "model_of_another_job": r"rt\.wrap",
    "replicas_of_other_stages": "'pp' dim",
}
REFUSED_ON_RANKS = {
    **REFUSED,
    "whole_model_saved": r"rt\.save",
    "average_of_the_pipe": r"rt\.named_parameters",
    "verified_after_steps": r"pipe\.merge",
    "weight_read": r"pipe\.merge",
    "data_parallel": r"rt\.step",
    "compiled_pipe": r"rt\.step",
    "compiled_model_after_steps": r"rt\.forward",
    "order_that_parts_later": "same batches",
}
HABITS = [
    hook_on_a_layer, hook_before_a_layer, backward_hook_on_a_layer, hook_on_the_model, frozen_after_the_split,
    layer_in_another_mode, second_group_of_parameters, zeroed_through_the_pipe, whole_model_saved,
    average_of_the_pipe, average_of_own_weights, verified_after_steps, weight_read, parameters_counted,
    data_parallel, compiled_pipe, compiled_model_after_steps, split_of_a_compiled_model,
    split_of_a_model_compiled_in_place, compiled_in_place_after_the_split, split_of_a_scripted_model,
    split_of_a_traced_model, split_of_a_data_parallel_model, autocast_around_the_step, inference_between,
    loss_that_needs_no_target, step_of_the_pipe, accumulated_tensors, accumulated_mapping, accumulated_lists,
    step_without_a_target, own_loss_without_a_target, all_frozen, order_that_parts_later,
]  # fmt: skip
ON_RANKS = [model_of_another_job, replicas_of_other_stages]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(
        HABITS if IS_ALONE else HABITS[:1] + ON_RANKS + HABITS[1:], REFUSED if IS_ALONE else REFUSED_ON_RANKS
    )
