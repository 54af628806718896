"""On one CUDA device: all stages in this process, and several ranks that share the card by way of the host.

Between devices the runtime goes over NCCL, whose order of messages ``rendezvous`` in ``runtime_checks``
imitates; that needs two GPUs to see for itself.
"""

import copy
import pathlib

import pytest
import torch
from processes import run_ranks
from runtime_models import Noisy, adversary, adversary_batch, adversary_loss, grads, make, worst
from torch import nn

from autopipe.runtime import Runtime
from autopipe.schedule import NAMES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
ATOMIC = 1e-10
"""Sums by atomics come in another order each time."""


def on_device(tree):
    return torch.utils._pytree.tree_map(lambda x: x.to(CUDA) if isinstance(x, torch.Tensor) else x, tree)


@pytest.mark.parametrize("schedule", [name for name in NAMES if name != "forward-only"])
def test_adversary_equals_full_batch(schedule):
    model, *made = adversary(4, schedule, 2, (1,))
    plain = copy.deepcopy(model).to(CUDA)
    runtime = Runtime(*made, loss_fn=adversary_loss, device=CUDA)
    for rows, length in ((8, 6), (7, 5), (3, 6)):
        args, kwargs, target = adversary_batch(rows, length)
        out = runtime.step(*args, **kwargs, target=target)  # from the host: the runtime moves it
        args, kwargs, target = on_device((args, kwargs, target))
        loss = adversary_loss(plain(*args, **kwargs), target)
        loss.backward()
        assert abs(out.loss.item() - loss.item()) < ATOMIC
    assert worst(grads(model.named_parameters()), grads(plain.named_parameters())) < ATOMIC


def test_random_numbers_do_not_depend_on_the_cut():
    def train(n_stages, schedule):
        torch.manual_seed(3)
        model, x = Noisy().double(), torch.randn(8, 5, dtype=torch.float64)
        made = make(model, (x,), {}, n_stages=n_stages, schedule=schedule, recompute=(0,))
        torch.manual_seed(5)
        before = torch.cuda.get_rng_state()
        Runtime(*made, loss_fn=nn.functional.mse_loss, device=CUDA).step(x, target=x[:, :2])
        assert torch.equal(before, torch.cuda.get_rng_state())
        return {**dict(model.named_buffers()), **grads(model.named_parameters())}

    assert worst(train(3, "zb-h1"), train(1, "1f1b")) < ATOMIC


def test_half_precision_scales_and_skips_alike():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(8, 8)
    made = make(model, (x,), {}, n_stages=2)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    runtime = Runtime(
        *made, loss_fn=nn.functional.mse_loss, device=CUDA, autocast=torch.float16, scaler=scaler
    )
    optimizer = torch.optim.SGD(runtime.parameters(), 0.1)
    plain = copy.deepcopy(model).to(CUDA)
    runtime.step(x, target=x)
    scaler.unscale_(optimizer)
    nn.functional.mse_loss(plain(x.to(CUDA)), x.to(CUDA)).backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, p.grad, rtol=0.05, atol=0.01)
    scaler.step(optimizer)
    scaler.update()
    before = [p.detach().clone() for p in runtime.parameters()]
    optimizer.zero_grad()
    handle = model[0].weight.register_hook(lambda g: g * float("inf"))
    runtime.step(x, target=x)
    handle.remove()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert all(torch.equal(a, b) for a, b in zip(before, runtime.parameters(), strict=True))


def test_actions_are_timed_on_the_device():
    model, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), torch.randn(64, 512)
    runtime = Runtime(
        *make(model, (x,), {}, n_stages=2), loss_fn=nn.functional.mse_loss, device=CUDA, check_finite=False
    )
    for _ in range(3):
        runtime.step(x, target=x)
    report = runtime.report()
    assert all(seconds > 0 for stage in report.stages for seconds in stage.measured.values())
    assert 0 < report.timeline.step_s < 10


@pytest.mark.timeout(200)
@pytest.mark.parametrize("n_ranks", [2, 4])
@pytest.mark.parametrize(
    "check", ["adversary_on_every_schedule", "one_rank_feeds", "shapes_may_depend_on_data"]
)
def test_ranks_share_a_card(check, n_ranks):
    script = pathlib.Path(__file__).with_name("runtime_ranks.py")
    run_ranks(script, n_ranks, check, environment={"DEVICE": "cuda:0"}, timeout_s=180)


@pytest.mark.timeout(200)
def test_every_kind_of_value_crosses_on_a_card():
    script = pathlib.Path(__file__).parents[1] / "accelerator" / "crossing_checks.py"
    run_ranks(script, 2, environment={"DEVICE": "cuda:0"}, timeout_s=180)
