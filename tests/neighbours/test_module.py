"""A loop that calls ``backward`` on a PipelineModule's loss trains as it does with the plain model."""

import copy
import functools
import pathlib

import pytest
import torch
from processes import run_ranks
from torch import nn

import autopipe
from autopipe.errors import InputError
from autopipe.neighbours.module import PipelineModule


class Blocks(nn.Module):
    """The head is registered between the blocks that it comes after, as in no stage of two."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.a_head = nn.Linear(6, 6)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.a_head(x)


class Weighted(nn.Module):
    """A loss with a weight that is trained."""

    def __init__(self):
        super().__init__()
        self.log_variance = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, output, target):
        return (output - target).square().mean() * (-self.log_variance).exp() + self.log_variance


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2)]


@functools.cache
def split():
    torch.manual_seed(0)
    return autopipe.split(Blocks().double(), 2, (batch(0)[0],), costs="estimated")


def made(is_piped):
    """What gives a loss, its parameters, and the loss's weight."""
    criterion = Weighted()
    if is_piped:
        module = PipelineModule(copy.deepcopy(split()).runtime(criterion))
        return lambda x, y: module(x, target=y), module, criterion
    model = copy.deepcopy(split().model)
    return lambda x, y: criterion(model(x), y), model, criterion


def trained(is_piped, prepare):
    """Weights after steps of two batches each, whose losses are divided by two."""
    loss_of, module, criterion = made(is_piped)
    optimizer = torch.optim.SGD([*module.parameters(), *criterion.parameters()], 0.1)
    prepare(module)
    for i in range(4):
        (loss_of(*batch(i)) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [*map(torch.clone, module.parameters()), criterion.log_variance.clone()]


def clip_each(module):
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def step_in_backward(module):
    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.3)
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)


@pytest.mark.parametrize("prepare", [lambda module: None, clip_each, step_in_backward])
def test_backward_makes_what_the_plain_loops_does(prepare):
    for ours, plain in zip(trained(True, prepare), trained(False, prepare), strict=True):
        assert torch.allclose(ours, plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_scaled_twice", [False, True])
def test_a_scaler_of_the_runtime_scales_once(is_scaled_twice):
    """However its loop calls backward; what is added to the loss is scaled by the loop alone."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    pipe = copy.deepcopy(split())
    module, plain = PipelineModule(pipe.runtime(nn.MSELoss(), scaler=scaler)), copy.deepcopy(pipe.model)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    x, y = batch(0)
    for _ in range(2):
        loss = module(x, target=y) / 2
        if is_scaled_twice:
            scaler.scale(loss + pipe.model.a_head.bias.sum()).backward()
            plain.a_head.bias.sum().backward()
        else:
            loss.backward()
        (nn.functional.mse_loss(plain(x), y) / 2).backward()
    scaler.unscale_(optimizer)
    for ours, theirs in zip(pipe.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_no_hook_is_called_before_backward():
    loss_of, module, _ = made(True)
    seen = []
    for parameter in module.parameters():
        parameter.register_hook(seen.append)
    loss = loss_of(*batch(0))
    assert not seen
    loss.backward()
    assert len(seen) == len([*module.parameters()])


@pytest.mark.parametrize("prepare", [lambda module: None, clip_each])
def test_gradients_that_are_there_are_added_to_in_place(prepare):
    """As a backward does, also of views of one buffer."""
    found = []
    for is_piped in (True, False):
        loss_of, module, _ = made(is_piped)
        prepare(module)
        parameters = [*module.parameters()]
        buffer = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
        views = buffer.split([p.numel() for p in parameters])
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)
        for i in range(2):
            loss_of(*batch(i)).backward()
        found.append(buffer)
    assert torch.allclose(*found, rtol=1e-10, atol=1e-12)
    assert found[1].any()


def test_in_evaluation_mode_backward_says_what_to_do():
    loss_of, module, _ = made(True)
    module.eval()
    loss = loss_of(*batch(0))
    with pytest.raises(InputError, match=r"module\.train\(\).*runtime\.step"):
        loss.backward()


def test_parameters_are_in_the_models_order():
    pipe = copy.deepcopy(split())
    runtime = pipe.runtime(nn.MSELoss())
    names = [name for name, _ in pipe.model.named_parameters()]
    assert [name for name, _ in runtime.named_parameters()] == names
    assert [name for name, _ in PipelineModule(runtime).named_parameters()] == names
    for ours, model in zip(runtime.parameters(), pipe.model.parameters(), strict=True):
        assert ours is model


@pytest.mark.timeout(120)
def test_on_two_ranks():
    script = pathlib.Path(__file__).with_name("module_ranks.py")
    run_ranks(script, 2, "rebalanced", "hooked_on_one", "overflowing_on_one", timeout_s=100)
