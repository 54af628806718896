"""The op graph of a capture: order, edges, groups, parameters, shapes; opening and closing leaves."""

import copy
import itertools
import pathlib
import time

import networkx as nx
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from autopipe.api import split
from autopipe.graph import OpGraph
from autopipe.runtime.peak_memory import resident_bytes
from autopipe.tracing import capture
from autopipe.tracing.inputs import caches
from autopipe.units import symbol


@pytest.fixture(scope="module")
def gpt2():
    config = GPT2Config(
        n_layer=4,
        n_embd=32,
        n_head=2,
        vocab_size=50,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        loss_type="ForCausalLM",
    )
    return GPT2LMHeadModel(config)


@pytest.fixture(scope="module")
def captured(gpt2):
    ids = torch.randint(0, 50, (2, 16))
    return capture(gpt2, kwargs={"input_ids": ids, "labels": ids})


def test_blocks_are_whole_and_alike(captured):
    blocks = [op for op in captured.ops.ops if op.target.startswith("transformer.h.")]
    assert [b.target for b in blocks] == [f"transformer.h.{i}" for i in range(4)]
    assert len({b.signature for b in blocks}) == 1
    assert all(b.is_random and b.is_tainted and b.requires_grad for b in blocks)
    assert all(len(b.parameters) == 12 for b in blocks)


def test_order_is_topological_and_inputs_first(captured):
    ops = captured.ops
    assert [op.name for op in ops.ops[:2]] == ["input_ids", "labels"]
    assert ops.ops[-1].kind == "output"
    assert all(ops.position[a] < ops.position[b] for a, b in (*ops.edges, *ops.order_edges))


def test_names_are_those_of_the_fx_graph(captured):
    names = {n.name for n in captured.graphs[True].nodes if n.op != "get_attr"}
    assert names == {op.name for op in captured.ops.ops}
    captured.module.graph.lint()


def test_shapes_are_formulas(captured):
    batch, seq = symbol("batch"), symbol("seq")
    assert captured.ops.by_name["lm_head"].outputs[0].shape == (batch, seq, 50)
    flat = next(
        op for op in captured.ops.ops if op.target == "torch.Tensor.view" and len(op.outputs[0].shape) == 1
    )
    assert flat.outputs[0].shape == (batch * seq,)
    assert captured.ops.example_dims == {"batch": 2, "seq": 16}


def test_tied_parameter_has_both_names(captured):
    tied = captured.ops.parameter["lm_head.weight"]
    assert tied.names == ("transformer.wte.weight", "lm_head.weight")
    assert "transformer.wte.weight" in captured.ops.by_name["lm_head"].parameters


def test_masks_and_positions_are_movable(captured):
    movable = {op.target for op in captured.ops.ops if op.is_movable}
    assert "torch.arange" in movable
    assert not any(op.is_movable for op in captured.ops.ops if op.parameters or op.is_random)


class Placed(nn.Module):
    """Names the device of its input, as code that makes masks and positions does."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x) + torch.arange(4, device=x.device).to(device=x.device, dtype=x.dtype)


def test_the_device_is_not_part_of_a_digest():
    made = [capture(Placed().to(device), (torch.ones(2, 4, device=device),)) for device in ("cpu", "meta")]
    assert made[0].ops.digest == made[1].ops.digest


def test_digest_and_json_round_trip(gpt2, captured):
    again = capture(gpt2, *captured.example)
    assert again.ops.digest == captured.ops.digest
    assert OpGraph.from_dict(captured.ops.to_dict()).digest == captured.ops.digest


def test_labels_ignored_and_longer(gpt2, captured):
    ids = torch.randint(0, 50, (3, 21))
    labels = ids.masked_fill(torch.rand(3, 21) < 0.3, -100)
    for mode in (True, False):
        gpt2.train(mode)
        torch.manual_seed(1)
        expected = gpt2(input_ids=ids, labels=labels, use_cache=False)
        torch.manual_seed(1)
        found = captured(input_ids=ids, labels=labels)
        assert type(found) is type(expected)
        torch.testing.assert_close(found.loss, expected.loss)


def test_capture_without_the_cache_is_said_once_and_visibly(gpt2, captured, caplog):
    caches._say_once.cache_clear()
    for _ in range(2):
        caches.without_cache(gpt2, {"input_ids": torch.zeros(1, 2, dtype=torch.long)})
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("WARNING", "GPT2LMHeadModel is captured without its key-value cache (use_cache=False)")
    ]
    assert gpt2.config.use_cache


def test_an_encoder_has_no_cache_to_speak_of(caplog):
    caches._say_once.cache_clear()
    config = BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, intermediate_size=8)
    assert config.use_cache
    assert caches.without_cache(BertForMaskedLM(config), {}) == {}
    assert not caplog.records


def test_open_and_closed(gpt2, captured):
    opened = captured.open("transformer.h.1")
    targets = [op.target for op in opened.ops.ops if op.kind == "module"]
    assert {"transformer.h.0", "transformer.h.1.attn", "transformer.h.1.mlp"} <= set(targets)
    assert "transformer.h.1" not in targets
    closed = capture(gpt2, *captured.example, closed=("transformer",))
    assert "transformer" in [op.target for op in closed.ops.ops]


def test_padded_batches_stay_right():
    config = BertConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16, vocab_size=30
    )
    model = BertModel(config).eval()
    ids = torch.randint(0, 30, (2, 8))
    captured = capture(model, kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    mask = torch.ones(3, 8, dtype=torch.long)
    mask[0, 4:] = 0
    ids = torch.randint(0, 30, (3, 8))
    expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(captured(input_ids=ids, attention_mask=mask).last_hidden_state, expected)


@pytest.mark.skipif(
    not pathlib.Path("/proc/self/clear_refs").exists(), reason="memory is read as Linux says it"
)
def test_a_70b_llama_on_meta_is_captured_in_seconds():
    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    ids = torch.zeros(1, 64, dtype=torch.long)
    before = resident_bytes("VmRSS")
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    start = time.process_time()
    captured = capture(model, kwargs={"input_ids": ids, "labels": ids})
    assert time.process_time() - start < 8
    assert resident_bytes("VmHWM") - before < 2e9
    blocks = [op for op in captured.ops.ops if op.target.startswith("model.layers.")]
    assert len(blocks) == 80
    assert captured.ops.example_dims == {"batch": 1, "seq": 64}


class Aliased(nn.Module):
    """A write through a view, seen by an earlier value's later reader."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        h = self.layers(x).clone()
        part = h[:, :2]
        part.mul_(2)
        a, b = torch.split(self.norm(self.norm(h)), 2, 1)
        return F.dropout(a) + b


def test_aliases_and_shared_buffers_are_grouped():
    graph = capture(Aliased(), (torch.randn(3, 4),)).ops
    by_target = {op.target: op.name for op in graph.ops}
    group = next(g for g in graph.groups if by_target["torch.Tensor.mul_"] in g)
    assert by_target["torch.Tensor.clone"] in group
    norms = [op.name for op in graph.ops if op.target == "norm"]
    assert len(norms) == 2
    assert any(set(norms) <= set(g) for g in graph.groups)
    assert graph.by_name[norms[0]].mutated_buffers[:2] == ("norm.running_mean", "norm.running_var")
    assert next(op for op in graph.ops if "dropout" in op.target).is_random


class Ring(nn.Module):
    """Writes rows to a queue, at a place that a buffer has and that is moved on before the queue is."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        self.register_buffer("queue", torch.zeros(8, 4))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        place = int(self.place)
        self.place[0] = (place + 4) % 8
        h = self.body(x) + self.queue.mean(0)
        self.queue[place : place + 4] = h.detach()
        return h


def test_a_number_read_from_a_buffer_is_read_ahead_of_its_write():
    x, model = torch.randn(4, 4), Ring()
    twin = copy.deepcopy(model)
    captured = capture(model, (x,), open=["body"])
    read = next(op for op in captured.ops.ops if op.target == "torch.Tensor.item")
    assert not read.is_movable
    write = next(op.name for op in captured.ops.ops if "place" in op.buffers and op.name != read.name)
    assert (read.name, write) in captured.ops.order_edges
    assert any({read.name, write} <= set(group) for group in captured.ops.groups)
    pipe = split(captured, 3, costs="estimated")
    for _ in range(3):
        torch.testing.assert_close(pipe(x), twin(x))
        torch.testing.assert_close(model.queue, twin.queue)


class Draws(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout()) for _ in range(3)))

    def forward(self, x):
        torch.rand(3)
        return self.layers(x) + F.dropout(x, 0.5, self.training)


def test_random_ops_keep_their_order():
    graph = capture(Draws(), (torch.randn(3, 4),)).ops
    draws = [op.name for op in graph.ops if op.is_random]
    assert len(draws) == 5
    linked = {*graph.edges, *graph.order_edges}
    order = nx.DiGraph(linked)
    assert all(nx.has_path(order, a, b) for a, b in itertools.pairwise(draws))


@pytest.mark.parametrize("batch", [1, 2])
def test_one_row_and_many(gpt2, batch):
    gpt2.eval()
    captured = capture(gpt2, kwargs={"input_ids": torch.randint(0, 50, (batch, 8))})
    for other in (1, 2, 5):
        ids = torch.randint(0, 50, (other, 8))
        torch.testing.assert_close(captured(input_ids=ids).logits, gpt2(input_ids=ids).logits)


class Overlapping(nn.Module):
    """Three layers, whose first and last weights lie in one memory as two parameters."""

    def __init__(self, last):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        whole = torch.randn(12, 4)
        self.layers[0].weight = nn.Parameter(whole[:4])
        self.layers[2].weight = nn.Parameter(last(whole))

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize(
    ("last", "is_shared"),
    [
        (lambda whole: whole[:4], True),
        (lambda whole: whole[:4].t(), True),
        (lambda whole: whole[2:6], True),
        (lambda whole: whole[8:], False),
    ],
    ids=["alike", "transposed", "in part", "apart"],
)
def test_parameters_in_one_memory_stay_in_one_stage(last, is_shared):
    graph = capture(Overlapping(last), (torch.randn(2, 4),)).ops
    assert any({"layers_0", "layers_2"} <= {*group} for group in graph.groups) == is_shared


class Views(nn.Module):
    """A buffer that is a part of another, which a forward writes to."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        sums = torch.zeros(2, 4)
        self.register_buffer("sums", sums)
        self.register_buffer("top", sums[0])

    def forward(self, x):
        h = self.first(x)
        self.sums.add_(h.detach().mean(0))
        return self.last(h + self.top)


def test_a_buffer_within_another_is_read_after_it_is_written():
    model, x = Views(), torch.randn(3, 4)
    twin, captured = copy.deepcopy(model), capture(model, (x,))
    twin.top = twin.sums[0]  # copies lie apart
    for _ in range(2):
        torch.testing.assert_close(captured(x), twin(x))
