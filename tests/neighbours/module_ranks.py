"""A PipelineModule on ranks; ``module_ranks.py CHECK`` is one of two."""

import copy

import pytest
import rank_checks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import autopipe
from autopipe.errors import InputError
from autopipe.neighbours.module import PipelineModule

X, Y = torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    """The first layer's weight is the last one's too."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def split(model, **options):
    return autopipe.split(model, 2, (X,), n_microbatches=2, costs="estimated", balance="uniform", **options)


def made(**options):
    torch.manual_seed(0)
    model = Tied().double()
    plain = copy.deepcopy(model)
    return split(model).runtime(loss_fn=mse_loss, **options), plain


def rebalanced():
    """Weights that moved here have gradients, and those that moved away are left alone."""
    rt, plain = made()
    module, optimizer = PipelineModule(rt), torch.optim.SGD(rt.parameters(), 0.1)
    module(X, target=Y).backward()
    optimizer.zero_grad()
    assert rt.rebalance(plan=split(copy.deepcopy(plain), pin={"layers.1": 1}).plan, optimizer=optimizer)
    (3 * module(X, target=Y)).backward()
    (3 * mse_loss(plain(X), Y)).backward()
    for name, parameter in rt.named_parameters():
        torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad)


def hooked_on_one():
    """A hook on a tied weight that one of its ranks has alone is refused before anything is made."""
    rt, _ = made()
    if dist.get_rank() == 0:
        rt.engine.capture.model.layers[0].weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(InputError, match="has unlike hooks on its gradient"):
        PipelineModule(rt)(X, target=Y)


def overflowing_on_one():
    """A scaler of the runtime leaves out a step on every rank; one that looks at each rank's is refused."""
    for is_given in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).double()
        nn.init.normal_(model[0].weight, std=1e-307)  # its gradient alone is as large as inputs are
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        rt = split(model).runtime(loss_fn=mse_loss, scaler=scaler if is_given else None)
        module, optimizer = PipelineModule(rt), torch.optim.SGD(rt.parameters(), 0.1)
        before = [p.detach().clone() for p in rt.parameters()]
        scaler.scale(module(X * 1e307, target=Y)).backward()
        if is_given:
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0**11
        else:
            for look in (scaler.unscale_, scaler.step):
                with pytest.raises(InputError, match=r"pipe\.runtime\(scaler=scaler\)"):
                    look(optimizer)
        assert all(torch.equal(p, was) for p, was in zip(rt.parameters(), before, strict=True))


if __name__ == "__main__":
    rank_checks.run({check.__name__: check for check in (rebalanced, hooked_on_one, overflowing_on_one)})
