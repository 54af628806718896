"""Blocks that run again in backward: the same gradients to the bit, dropout included, fewer bytes kept."""

import dataclasses

import pytest
import torch
from runtime_models import grads, worst
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import autopipe
from autopipe.hardware import Cluster
from autopipe.measure.kernel_counts import Counter
from autopipe.memory import plan_memory
from autopipe.plans import StagePlan
from autopipe.runtime import Runtime
from autopipe.solve import solve
from autopipe.stages import build


class Layers(nn.Module):
    """Transformer layers with dropout, a skip over all of them, and a mask."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 128, dropout, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(32, 50)

    def forward(self, ids):
        x = start = self.embed(ids)
        mask = torch.triu(torch.full((ids.shape[1], ids.shape[1]), float("-inf"), device=ids.device), 1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(F.dropout(x, 0.1, self.training) + start)


def planned(model, **options):
    """Layers as they are captured, whole."""
    captured = autopipe.capture(model, (ids(),))
    costs = autopipe.profile(captured, n_microbatches=2)
    given = {"n_stages": 2, "n_microbatches": 2, "pin": {"layers.1": 0, "layers.2": 1}} | options
    return captured, costs, solve(captured.ops, costs, Cluster.uniform(2), **given)


def ids():
    torch.manual_seed(1)
    return torch.randint(50, (4, 16))


def loss_of(out, target):
    return F.cross_entropy(out.flatten(0, 1), target.flatten())


def layer_blocks(plan, names=("layers_0", "layers_1", "layers_2", "layers_3")):
    """The plan with those ops of each stage recomputed that are named."""
    stages = (
        dataclasses.replace(s, recomputed=tuple((op,) for op in s.ops if op in names)) for s in plan.stages
    )
    return dataclasses.replace(plan, stages=tuple(stages), settings={**plan.settings, "recompute": "auto"})


def stepped(model, captured, plan):
    model.zero_grad()
    runtime = Runtime(captured, plan, build(captured, plan), loss_fn=loss_of)
    torch.manual_seed(5)
    losses = [runtime.step(ids(), target=ids()).loss.item() for _ in range(2)]
    return losses, grads(model.named_parameters())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_gradients_with_dropout_are_the_same_to_the_bit(schedule):
    torch.manual_seed(0)
    model = Layers().train()
    captured, _, plan = planned(model, schedule=schedule)
    again = layer_blocks(plan)
    assert sum(len(s.recomputed) for s in again.stages) == 4
    losses, wanted = stepped(model, captured, plan)
    assert losses[0] != losses[1]
    found = stepped(model, captured, again)
    assert found[0] == losses
    assert worst(found[1], wanted) == 0.0


def test_gpt2_trains_the_same():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=3, n_head=2)).train()
    captured = autopipe.capture(model, (), {"input_ids": ids(), "labels": ids()})
    plan = solve(
        captured.ops,
        autopipe.profile(captured, n_microbatches=2),
        Cluster.uniform(2),
        n_stages=2,
        n_microbatches=2,
    )
    again = layer_blocks(
        plan, [op.name for op in captured.ops.compute if op.target.startswith("transformer.h.")]
    )
    assert sum(len(s.recomputed) for s in again.stages) == 3
    results = []
    for made in (plan, again):
        model.zero_grad()
        runtime = Runtime(captured, made, build(captured, made))
        torch.manual_seed(5)
        results.append((runtime.step(input_ids=ids(), labels=ids()).loss, grads(model.named_parameters())))
    assert results[0][0] == results[1][0]
    assert worst(results[0][1], results[1][1]) == 0.0


def test_called_in_one_process_it_draws_what_the_model_draws():
    torch.manual_seed(0)
    model = Layers().train()
    plan = planned(model)[2]
    pipe = autopipe.split(model, args=(ids(),), plan=layer_blocks(plan))
    results = []
    for call in (model, pipe):
        model.zero_grad()
        torch.manual_seed(9)
        loss_of(call(ids()), ids()).backward()
        # what is drawn after a backward that ran blocks again is what it would have been
        results.append((grads(model.named_parameters()), torch.rand(3)))
    assert worst(results[0][0], results[1][0]) == 0.0
    assert torch.equal(results[0][1], results[1][1])


def test_generated_code_says_which_blocks_run_again():
    captured, _, plan = planned(Layers())
    plain = build(captured, plan)[0]
    stage = build(captured, layer_blocks(plan, ("layers_1",)))[0]
    assert "self._recomputed('', True, 0, 0, layers_0" in stage.code
    assert "# block 0, run again in backward, of stage 0" in stage.code
    assert set(stage.state_dict()) == set(plain.state_dict())


@pytest.mark.parametrize(("share", "n_blocks"), [(1.0, 0), (0.99, 1), (0.85, 2)])
def test_bytes_kept_are_those_predicted(share, n_blocks):
    """The solver recomputes what a limit asks for; what the first stage then keeps is what it said."""
    model = Layers(dropout=0.0).train()
    most = planned(model)[2].stages[0].memory_bytes
    captured, costs, plan = planned(model, memory_limit=[share * most, "1GB"], recompute="auto")
    assert len(plan.stages[0].recomputed) == n_blocks
    first, given = build(captured, plan)[0], ids()[:2].clone()
    with Counter() as counter:
        out = first(given)
    # of what is sent only the last layer's value is kept by no one here
    kept = counter.live_bytes + given.nbytes - out[first.outputs.index("layers_1")].nbytes
    assert kept == plan.stages[0].saved_bytes == plan_memory(plan, costs)[0].saved_bytes


def test_a_mask_may_be_sent_to_one_stage_and_made_again_in_another():
    torch.manual_seed(0)
    model = Layers(dropout=0.0).eval()
    captured = planned(model)[0]
    names = [op.name for op in captured.ops.compute]
    glue = ("size", "full", "triu")
    first, second = names.index("layers_1"), names.index("layers_3")
    rows = (names[:first], names[first:second], [*glue, *names[second:]])
    stages = tuple(StagePlan(s, s, tuple(ops)) for s, ops in enumerate(rows))
    plan = dataclasses.replace(
        planned(model)[2], stages=stages, boundaries=(), cluster=Cluster.uniform(3), n_microbatches=2
    )
    built = build(captured, plan)
    assert "triu" in built[0].outputs
    assert "triu" in built[1].inputs
    assert "triu" not in built[2].inputs
    runtime = Runtime(captured, plan, built, loss_fn=loss_of)
    loss_of(model(ids()), ids()).backward()
    wanted = grads(model.named_parameters())
    model.zero_grad()
    runtime.step(ids(), target=ids())
    assert worst(grads(model.named_parameters()), wanted) < 1e-6


@pytest.mark.parametrize("again", ["always", "never"])
def test_a_stage_that_runs_again_keeps_nothing_of_that_from_i_to_w(again):
    """The last stage of zb-h1 has all microbatches between I and W; the memory planned has one of them."""
    torch.manual_seed(0)
    model = Layers(dropout=0.0).train()
    captured, _, plan = planned(model, schedule="zb-h1", recompute=again)
    stages = build(captured, plan)
    runtime = Runtime(captured, plan, stages, loss_fn=loss_of, loss_on="microbatches")
    for _ in range(2):
        runtime.step(ids(), target=ids())
    last, kept = runtime.engine.workers[1], []
    inner = last.backward_input
    with Counter() as counter:

        def backward_input(m):
            inner(m)
            kept.append(counter.live_bytes)

        last.backward_input = backward_input
        runtime.engine._lines.clear()
        runtime.step(ids(), target=ids())
    saved = planned(model)[2].stages[1].saved_bytes
    assert len(kept) == 2
    assert (max(kept) < saved) == (again == "always")
    stage = plan.stages[1]
    assert (stage.backward_weight_s == 0.0) == (again == "always")
    assert stage.backward_input_s + stage.backward_weight_s == pytest.approx(stage.backward_s, rel=0.5)
