"""Values of every kind that cross between ranks, into a pipeline and out of it; one rank of a check.

On the simulated accelerator where ``SIM`` is set, on ``DEVICE`` where that is, else on the CPU. Each kind has
a way to be made out of the stage's values and a way to be used that tells a wrong number, layout or device.
"""

import copy
import functools
import os
import sys

import torch
import torch.distributed as dist
from runtime_models import captured_once, cut, grads, worst
from torch import nn
from torch.nn import functional as F

from autopipe.runtime import Runtime

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
EXACT = 1e-12


def used(value):
    """A number for each row that depends on every element and its place."""
    value = value.to(torch.float64)
    flat = value.reshape(value.shape[0], -1) if value.ndim else value.reshape(1, 1)
    weights = torch.linspace(0.1, 1.0, flat.shape[1], device=flat.device, dtype=torch.float64)
    return (flat * weights).sum(1, keepdim=True) / max(1, flat.shape[1])


def lies(value):
    """Of the memory itself, so that another layout gives another number."""
    return value.as_strided((value.numel(),), (1,))[: value.shape[0]].reshape(-1, 1)


def on_host(value):
    assert value.device.type == "cpu", value.device
    return value


KINDS = {
    "bool": (lambda h: h > 0, used),
    "int8": (lambda h: h.mul(9).to(torch.int8), used),
    "int16": (lambda h: h.mul(9).to(torch.int16), used),
    "uint16": (lambda h: h.mul(9).abs().to(torch.uint16), used),
    "int64": (lambda h: h.argsort(1), used),
    "float8": (lambda h: h.detach().to(torch.float8_e4m3fn), used),
    "bfloat16": (lambda h: h.to(torch.bfloat16), used),
    "half": (lambda h: h.to(torch.float16), used),
    "float32": (lambda h: h.float(), used),
    "complex": (lambda h: torch.complex(h, 2 * h), lambda z: used(z.real * z.imag)),
    "complex half": (
        lambda h: torch.complex(h.detach().half(), h.detach().half()),
        lambda z: used(z.to(torch.complex64).imag),
    ),
    "complex, large": (lambda h: torch.complex(h, h.cos()).repeat(1, 600), lambda z: used(z.real * z.imag)),
    "conjugated": (lambda h: torch.complex(h, h.cos()).conj(), lambda z: used(z.imag)),
    "negated": (lambda h: torch.complex(h, h.cos()).conj().imag, used),
    "no rows": (lambda h: h[:0], lambda e: e.sum()),
    "no columns": (lambda h: h[:, :0], lambda e: e.sum(1, keepdim=True)),
    "scalar": (lambda h: h[0, 0], used),
    "number of a row": (lambda h: h.detach().sum(), lambda s: (s == s).to(torch.float64)),
    "none": (lambda h: None, lambda n: 0.0 if n is None else 1e9),
    "int": (lambda h: h.shape[1], lambda n: n * 1e-3),
    "float": (lambda h: 0.25, lambda n: n * 1e-3),
    "text": (lambda h: "yes", lambda t: 0.5 if t == "yes" else 1e9),
    "nested": (
        lambda h: {"a": (h, None), "b": [h * 2, 3]},
        lambda n: used(n["a"][0] * n["b"][0]) * n["b"][1],
    ),
    "view": (lambda h: h[:, 1:3], used),
    "twice": (lambda h: (h, h), lambda t: used(t[0] + t[1])),
    "halves": (lambda h: h.chunk(2, 1), lambda t: used(t[0] * t[1])),
    "expanded": (lambda h: h[:, :1].expand(-1, 8), used),
    "strided": (lambda h: h[:, ::2], used),
    "transposed": (lambda h: h.t().contiguous().t(), lambda t: used(t) + lies(t)),
    "channels last": (
        lambda h: h.reshape(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last),
        lambda t: used(t) + lies(t),
    ),
    "on the host": (
        lambda h: torch.tensor([0.5, 2.0]),
        lambda t: used(on_host(t)).to(torch.float64)[0].item(),
    ),
    "to the host": (lambda h: h.cpu(), lambda t: used(on_host(t))),
    "to the host, large": (lambda h: h.cpu().repeat(1, 600), lambda t: used(on_host(t))),
    "large": (lambda h: h.repeat(1, 600), used),
}


class Makes(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names, self.lin = tuple(names), nn.Linear(8, 8)

    def forward(self, x):
        h = torch.tanh(self.lin(x))
        return {"unchanged": x, **{name: KINDS[name][0](h) for name in self.names}}


class Takes(nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names, self.lin = tuple(names), nn.Linear(8, 8)

    def forward(self, h, kinds):
        y = self.lin(h) + used(kinds["unchanged"])
        for name in self.names:
            part = KINDS[name][1](kinds[name])
            y = y + (part.to(h.device) if isinstance(part, torch.Tensor) else part)
        return y


class Kinds(nn.Module):
    def __init__(self, names=KINDS):
        super().__init__()
        self.makes, self.mid, self.takes = Makes(names), nn.Linear(8, 8), Takes(names)

    def forward(self, x):
        kinds = self.makes(x)
        return self.takes(torch.tanh(self.mid(x)), kinds)


class Gives(nn.Module):
    """The same kinds as the model's output."""

    def __init__(self, names):
        super().__init__()
        self.first, self.makes = nn.Linear(8, 8), Makes(names)

    def forward(self, x):
        kinds = self.makes(self.first(x))
        return [kinds["bfloat16"].float().sum(), kinds]


def batch(rows=4):
    return torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def kinds():
    return Kinds().double(), (batch(),)


def crossing(device):
    """Every kind between two stages, settled and not: losses and gradients are the plain model's."""
    for schedule in ("1f1b", "zb-h1"):
        captured = captured_once(kinds, closed=("makes", "takes"))  # each made, and used, in one op
        plain, x = copy.deepcopy(captured.model), batch()
        made = cut(captured, n_stages=WORLD, cuts=[1], schedule=schedule)
        runtime = Runtime(*made, loss_fn=F.mse_loss, device=device, mixed_rows="allow")
        for i in range(6):
            loss = runtime.step(x + i, target=x, n_microbatches=2).loss
            # rows of a microbatch see one another where a scalar crosses
            losses = [F.mse_loss(plain(part + i), part) / 2 for part in x.chunk(2)]
            sum(losses).backward()
            assert abs(loss.item() - sum(losses).item()) < EXACT, (schedule, i)
        assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT, schedule


def all_kinds():
    names = [name for name in KINDS if name not in ("text", "complex half")]  # which torch does not compare
    return Gives(names).double(), (batch(),)


def coming_out(device):
    """Every kind as an output, on every rank."""
    captured = captured_once(all_kinds, closed=("makes",))
    plain, x = copy.deepcopy(captured.model), batch()
    made = cut(captured, n_stages=WORLD)
    runtime = Runtime(*made, loss_fn=lambda out, target: out[0], device=device, mixed_rows="allow")
    found = runtime.forward(x, n_microbatches=1)
    wanted = plain(x)
    for a, b in zip(*(torch.utils._pytree.tree_leaves(t) for t in (found, wanted)), strict=True):
        if isinstance(b, torch.Tensor):
            assert a.dtype is b.dtype
            assert a.shape == b.shape
            error = (a.detach().cpu().to(torch.complex128) - b.detach().to(torch.complex128)).abs()
            assert not error.numel() or error.max() < EXACT, (b.dtype, b.shape)
        else:
            assert a == b


class Eats(nn.Module):
    """Inputs of several kinds."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, z, negated, mask, picked, last):
        h = torch.tanh(self.first(x)) + used(z.imag) + used(negated)
        h = torch.where(mask, h, -h) + used(picked)
        return self.last(h) + used(last) + used(z.real * z.imag)


def given():
    x = batch()
    z = torch.complex(x, x.cos()).conj()
    return {
        "x": x.t().contiguous().t(),
        "z": z,
        "negated": z.imag,
        "mask": x > 0,
        "picked": x.mul(9).to(torch.int16)[:, ::2],
        "last": x.reshape(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last),
    }


def eats():
    return Eats().double(), (), given()


def going_in(device):
    """Fed by one rank, or given to all: conjugated, negated, strided, boolean, narrow."""
    x, kinds = batch(), given()
    for feed in (None, 0, WORLD - 1):
        captured = captured_once(eats)
        plain = copy.deepcopy(captured.model)
        made = cut(captured, n_stages=WORLD)
        runtime = Runtime(*made, loss_fn=F.mse_loss, device=device, feed=feed)
        for _ in range(2):
            if feed in (None, RANK):
                loss = runtime.step(**kinds, target=x, n_microbatches=2).loss
            else:
                loss = runtime.step().loss
            wanted = F.mse_loss(plain(**kinds), x)
            wanted.backward()
            assert abs(loss.item() - wanted.item()) < EXACT, feed
        assert worst(grads(runtime.named_parameters()), grads(plain.named_parameters())) < EXACT, feed


CHECKS = (crossing, coming_out, going_in)


def main(*words):
    if "SIM" not in os.environ:
        dist.init_process_group("gloo")
        for check in CHECKS:
            check(os.environ.get("DEVICE"))
        dist.destroy_process_group()
        return
    import accelerated_checks

    # ranks that have one card are on one device: messages go by way of the host
    device = torch.device("sim", 0) if "SIM_CARD" in os.environ else accelerated_checks.DEVICE
    ways = [accelerated_checks.ways_of(i + (device.index == 0), "whole" in words) for i in range(len(CHECKS))]
    calls = [functools.partial(check, device) for check in CHECKS]
    accelerated_checks.in_ways(zip(calls, ways, strict=True))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
