"""A user who sets torch's default device: what the runtime makes for itself is where it belongs."""

import contextlib
import copy

import pytest
import torch
from torch import nn

import autopipe


@pytest.fixture
def elsewhere():
    """The device that factories use unless they say so is one without numbers."""
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(torch.device("meta"))


def counts_its_steps_there() -> bool:
    """Whether torch's AdamW keeps its number of steps on the default device, where 2.11 cannot read it."""
    weight = nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    optimizer = torch.optim.AdamW([weight])
    with torch.device("meta"):
        try:
            optimizer.step()
        except RuntimeError:
            return True
    return False


@pytest.mark.skipif(counts_its_steps_there(), reason="this torch's AdamW takes no other default device")
def test_training_under_a_default_device_equals_the_plain_model(elsewhere, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    plain, x = copy.deepcopy(model), torch.randn(8, 8, dtype=torch.float64)
    nn.functional.mse_loss(plain(x), x).backward()
    elsewhere()
    pipe = autopipe.split(model, 2, (x,), n_microbatches=2)
    assert pipe.verify()
    runtime = pipe.runtime(nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(runtime.parameters(), 0.01)
    runtime.step(x, target=x)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-12, rtol=0)
    runtime.clip_grad_norm_(1.0)
    optimizer.step()
    runtime.save(tmp_path / "at", optimizer=optimizer)
    runtime.load(tmp_path / "at", optimizer=optimizer)
    found = runtime.evaluate(x, target=x, return_outputs=True)
    assert found.loss.isfinite()
    assert torch.equal(found.outputs, pipe.merge()(x))
