"""Stages hold the model's own parts under their own names and give back the model's numbers."""

import dataclasses
import queue

import pytest
import torch
from torch import nn

from autopipe.errors import InputError, PlanError, VerificationError
from autopipe.hardware import Cluster
from autopipe.plans import Bounds, Plan, StagePlan
from autopipe.stages import build, find_loss, verify
from autopipe.tracing import capture


class Skips(nn.Module):
    """A skip over two stages, a tied weight, an unused parameter, an unused buffer, sizes, a mode flag."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.spare = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("scratch", torch.arange(3.0), persistent=False)

    def forward(self, ids, scale=None):
        h = first = self.embed(ids)
        for block in self.blocks:
            h = torch.tanh(block(h))
        h = nn.functional.dropout(h + first, 0.5, training=self.training)
        h = h.view(ids.shape[0] * ids.shape[1], 6)
        if scale is not None:
            h = h * scale
        return {"logits": self.head(h), "first": (first, None)}


def cut(capture, *last_of_stage):
    """A plan that ends stage i after the i-th named op."""
    pieces, current = [], []
    for op in capture.ops.compute:
        current.append(op.name)
        if op.name in last_of_stage:
            pieces.append(tuple(current))
            current = []
    pieces.append(tuple(current))
    stages = tuple(StagePlan(i, i, ops) for i, ops in enumerate(pieces))
    return Plan(
        capture.ops.model,
        capture.ops.digest,
        stages,
        (),
        (),
        "1f1b",
        2,
        0.0,
        Bounds(0.0, 0.0, 0.0, False),
        Cluster.uniform(len(stages)),
    )


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Skips()


@pytest.fixture
def captured(model):
    return capture(model, (torch.randint(0, 11, (4, 5)),), {"scale": torch.rand(())})


def thirds(captured):
    leaves = [op.name for op in captured.ops.compute if op.kind == "module"]
    return cut(captured, leaves[0], leaves[2])


@pytest.mark.parametrize("training", [True, False])
def test_parity_in_both_modes(model, captured, training):
    model.train(training)
    stages = build(captured, thirds(captured))
    args, kwargs = captured.example
    parity = verify(captured, stages, args, kwargs)
    assert parity.gradients == 7
    assert max(parity.max_output_error, parity.max_gradient_error) <= 1e-6


def test_other_batch_size(model, captured):
    stages = build(captured, thirds(captured))
    assert verify(captured, stages, (torch.randint(0, 11, (7, 5)),), {"scale": torch.rand(())}).outputs == 2


def test_state_dict_of_the_stages_is_the_models(model, captured):
    stages = build(captured, thirds(captured))
    ours = {k: v for s in stages for k, v in s.state_dict(keep_vars=True).items()}
    theirs = model.state_dict(keep_vars=True)
    assert set(ours) == set(theirs)
    assert all(ours[k] is theirs[k] for k in theirs)


def test_tied_weight_is_one_object_in_both_stages(model, captured):
    first, *_, last = build(captured, thirds(captured))
    assert first.get_parameter("embed.weight") is last.get_parameter("head.weight") is model.head.weight


def test_skip_goes_straight_to_its_consumer(captured):
    first, middle, last = build(captured, thirds(captured))
    assert set(first.outputs) & set(last.inputs) - set(middle.inputs)


def test_mode_follows_the_model(model, captured):
    stages = build(captured, thirds(captured))
    model.eval()
    assert not any(s.training for s in stages)
    model.train()
    assert all(s.training for s in stages)


def test_generated_code_reads_like_code(captured):
    first = build(captured, thirds(captured))[1]
    assert first.code.startswith(f"# stage 1 of 3 of Skips, graph {captured.ops.digest}")
    assert "self.blocks[1](" in first.code


def test_a_plan_for_another_graph_is_refused(captured):
    plan = dataclasses.replace(thirds(captured), graph_digest="0" * 16)
    with pytest.raises(PlanError, match="plan again for this model"):
        build(captured, plan)


def test_a_value_flowing_back_is_refused(captured):
    plan = thirds(captured)
    a, b, c = plan.stages
    swapped = dataclasses.replace(
        plan, stages=(dataclasses.replace(a, ops=b.ops), dataclasses.replace(b, ops=a.ops), c)
    )
    with pytest.raises(PlanError, match="is computed in stage 1 but"):
        build(captured, swapped)


def test_a_forgotten_op_is_refused(captured):
    plan = thirds(captured)
    a, *rest = plan.stages
    with pytest.raises(PlanError, match="places none of 1 ops"):
        build(captured, dataclasses.replace(plan, stages=(dataclasses.replace(a, ops=a.ops[1:]), *rest)))


def test_verify_names_the_first_op_that_differs(model, captured):
    stages = build(captured, thirds(captured))
    args, kwargs = captured.example
    calls = queue.SimpleQueue()  # a list is put back between the runs

    def drift(module, inputs, output):
        calls.put(module)
        return output + calls.qsize() * 1e-2

    model.blocks[1].register_forward_hook(drift)
    with pytest.raises(VerificationError, match=r"first op that differs is blocks\.1"):
        verify(captured, stages, args, kwargs)


def test_verify_leaves_gradients_buffers_and_randomness_alone(model, captured):
    model.spare.grad = torch.ones(2)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    args, kwargs = captured.example
    verify(captured, build(captured, thirds(captured)), args, kwargs)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(model.spare.grad, torch.ones(2))
    assert model.embed.weight.grad is None


def test_find_loss():
    loss = torch.tensor(1.0)
    assert find_loss({"loss": loss, "logits": torch.zeros(3)}) is loss
    assert find_loss((loss, torch.zeros(3))) is loss
    assert find_loss(torch.zeros(3)) is None
    assert find_loss({"logits": torch.zeros(3)}) is None


def check(model, *args):
    captured = capture(model, args)
    return verify(captured, build(captured, cut(captured)), args, {})


def test_gradients_of_complex_outputs_are_compared():
    parity = check(nn.Linear(4, 4, dtype=torch.complex64), torch.randn(3, 4, dtype=torch.complex64))
    assert (parity.outputs, parity.gradients) == (1, 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_compared_where_they_are_off(mode):
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    with mode():
        assert check(model, x).gradients == 2


def test_inputs_keep_their_gradients_and_their_graph():
    leaf = torch.randn(3, 4, requires_grad=True)
    twice = leaf * 2
    assert check(nn.Linear(4, 4), twice).gradients == 2
    assert leaf.grad is None
    twice.sum().backward()
    check(nn.Linear(4, 4), leaf)
    assert torch.equal(leaf.grad, torch.full((3, 4), 2.0))


def test_a_model_without_values_is_not_verified():
    with pytest.raises(InputError, match="meta device and has no values to compare"):
        check(nn.Linear(4, 4, device="meta"), torch.randn(3, 4, device="meta"))
