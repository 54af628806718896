"""Dropout under a runtime: losses and gradients hang on neither cut, leaves nor schedule."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import autopipe
from autopipe.api import Pipe
from autopipe.api.options import Options
from autopipe.api.planning import make_plan


class Attention(nn.Module):
    """Draws in its own forward twice, and in a dropout that its block shares."""

    def __init__(self, d: int, shared: nn.Dropout) -> None:
        super().__init__()
        self.qkv, self.out, self.shared = nn.Linear(d, 3 * d), nn.Linear(d, d), shared

    def forward(self, x):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        p = 0.3 if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p).squeeze(1)
        return self.shared(F.dropout(self.out(y), 0.2, self.training))


class Routed(nn.Module):
    """Experts, of which the data say how many run and so how many draws there are."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(d, d), nn.Dropout(0.2)) for _ in range(4))

    def forward(self, x):
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for i in chosen.unique().tolist():
            out[chosen == i] = self.experts[i](x[chosen == i])
        return out


class Block(nn.Module):
    def __init__(self, d: int, *, routed: bool = False, checkpointed: bool = False) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.attention = Attention(d, self.drop)
        self.mlp = Routed(d) if routed else nn.Sequential(nn.Linear(d, d), nn.GELU(), nn.Dropout(0.2))
        self.checkpointed = checkpointed

    def inner(self, x):
        x = x + self.drop(self.attention(x))
        x = x + F.dropout(self.mlp(x), 0.3, self.training)
        return F.dropout(x, 0.1, self.training) + x

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)


class Model(nn.Module):
    def __init__(self, *, repeated: bool = False, **how: bool) -> None:
        super().__init__()
        d = 8
        self.embed = nn.Linear(4, d)
        self.blocks = nn.ModuleList(Block(d, **how) for _ in range(1 if repeated else 3))
        self.order = [0] * 3 if repeated else range(3)
        self.head = nn.Linear(d, 4)

    def forward(self, x):
        x = F.dropout(self.embed(x), 0.1, self.training)
        for i in self.order:
            x = self.blocks[i](x)
        return F.dropout(self.head(x), 0.5, self.training).square().mean()


HOW = {"n_microbatches": 2, "costs": "estimated", "balance": "uniform", "time_limit_s": 0.2}
KINDS = {
    "plain": {},
    "routed": {"routed": True},
    "repeated": {"repeated": True},
    "checkpointed": {"checkpointed": True},
}


def trained(model: nn.Module, x: torch.Tensor, n_stages: int, opened=(), seed=3, **options):
    """Two steps: the losses, and every gradient after the second."""
    model.zero_grad()
    asked = Options.of(n_stages=n_stages, **HOW, **options)
    planned = make_plan(autopipe.capture(model, (x,), open=opened), (), None, asked)
    pipe = Pipe(planned.capture, planned.plan)
    torch.manual_seed(seed)
    runtime = pipe.runtime()
    losses = [float(runtime.step(x).loss) for _ in range(2)]
    return losses, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def made(kind: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Model(**KINDS[kind]).double().train(), torch.randn(4, 6, 4, dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_gradients_hang_neither_on_the_cut_nor_on_what_is_open(kind):
    model, x = made(kind)
    blocks = [f"blocks.{i}" for i in range(len(model.blocks))]
    inside = [block + part for block in blocks for part in ("", ".attention", ".mlp")]
    losses, gradients = trained(model, x, 1)
    assert losses != trained(model, x, 1, seed=4)[0]
    for n_stages, opened in [(2, ()), (3, blocks[:1]), (4, inside)]:
        found, others = trained(model, x, n_stages, opened)
        assert found == pytest.approx(losses, rel=1e-12)
        for a, b in zip(gradients, others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_the_models_own_checkpoints_change_nothing():
    model, x = made("checkpointed")
    losses, gradients = trained(model, x, 2)
    for block in model.blocks:
        block.checkpointed = False
    found, others = trained(model, x, 2)
    assert found == losses
    for a, b in zip(gradients, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zb-h1", "zbv"])
def test_losses_and_gradients_do_not_hang_on_the_schedule(schedule):
    model, x = made("plain")
    losses, gradients = trained(model, x, 2)
    n_ranks = {"n_ranks": 2} if schedule in ("interleaved", "zbv") else {}
    found, others = trained(model, x, 4 if n_ranks else 2, ["blocks.1"], schedule=schedule, **n_ranks)
    assert found == pytest.approx(losses, rel=1e-12)
    for a, b in zip(gradients, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("recompute", ["always", "auto"])
def test_parts_that_run_again_draw_the_same(recompute):
    model, x = made("plain")
    losses, gradients = trained(model, x, 2)
    found, others = trained(model, x, 3, ["blocks.1"], recompute=recompute)
    assert found == pytest.approx(losses, rel=1e-12)
    for a, b in zip(gradients, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_compiled_blocks_draw_from_one_stream_each():
    model, x = made("plain")
    block = model.blocks[1]
    block._compiled_call_impl = block._call_impl  # what Module.compile() sets, with nothing compiled
    losses, _ = trained(model, x, 1)
    assert trained(model, x, 3)[0] == pytest.approx(losses, rel=1e-12)


class DrawsInEvaluation(nn.Module):
    """In training it draws nothing, as a rank whose stages have no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.last(x if self.training else F.dropout(x, 0.5, training=True))


@pytest.mark.parametrize("of", ["loss_fn", "a hook"])
def test_what_others_draw_where_stages_draw_nothing_is_another_number_at_each_step(of):
    drawn = []

    def note(value):
        drawn.append(torch.rand(()).item())
        return value

    torch.manual_seed(0)
    model, x = DrawsInEvaluation(), torch.randn(6, 4)
    if of == "a hook":
        model.last.bias.register_hook(note)
    pipe = autopipe.split(model, 2, (x,), n_microbatches=1, costs="estimated")
    runtime = pipe.runtime(lambda y, t: note(F.mse_loss(y, t)) if of == "loss_fn" else F.mse_loss(y, t))
    drawn.clear()  # a capture calls the hook
    before = torch.get_rng_state()
    for _ in range(3):
        runtime.step(x, target=x)
    assert len(drawn) == len({*drawn}) == 3
    torch.testing.assert_close(torch.get_rng_state(), before)
