"""Forms of a model under common names: inputs and what holds weights have one name, whatever differs."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import autopipe
from autopipe.tracing import capture
from autopipe.tracing.calls.call import Call, Recording
from autopipe.tracing.graphs import modes
from autopipe.tracing.inputs.structure import Spec

WIDTH = 8


class Shortened(nn.Module):
    """Halves its input and its mask, each by arithmetic of its own, and leaves a mask of ones out.

    Where there is one, sizes and tables for it come early in one form and late or never in the others; the
    labels are read at the very end.
    """

    def __init__(self, *, by_mode: bool = False) -> None:
        super().__init__()
        self.by_mode = by_mode
        self.halve = nn.Conv1d(WIDTH, WIDTH, 3, stride=2)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        length = int((int((int((mask.shape[-1] - 3) / 1 + 1) - 2) / 2 + 1) + 1) / 1)
        late = mask[..., ::2][..., :length].int()
        if (missing := length - late.shape[1]) > 0:
            late = nn.functional.pad(late, (0, missing))
        x = self.halve(x.mT).tanh().mT
        wants = self.training if self.by_mode else not late.all()
        if wants:
            places = torch.arange(late.shape[1], device=x.device)
            x = x + (late * places)[..., None] / length
        for layer in self.layers:
            x = layer(x).relu()
        x = (self.scale * x).sum(1, keepdim=True) + nn.functional.one_hot(ids, WIDTH)
        if wants:
            x = x * late.sum(1)[:, None, None]
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def example(rows: int = 2, length: int = 9, *, ragged: bool = False) -> tuple[Tensor, ...]:
    mask = torch.ones(rows, length, dtype=torch.int64)
    if ragged:
        mask[:, 1:5] = 0
    ids = torch.randint(0, WIDTH, (2, rows, 4))
    return torch.randn(rows, length, WIDTH), mask, ids[0], ids[1]


def fixed_names(graph: torch.fx.Graph) -> list[str]:
    """Inputs, and ops that hold weights."""
    held = ("call_module", "placeholder")
    reads = (n for n in graph.nodes if any("scale" in str(i.target) for i in n.all_input_nodes))
    return [*(n.name for n in graph.nodes if n.op in held), *(n.name for n in reads)]


@pytest.mark.parametrize("by_mode", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_inputs_and_weights_go_by_one_name_in_every_form(*, by_mode: bool, ragged: bool) -> None:
    captured = capture(Shortened(by_mode=by_mode), example(ragged=ragged))
    forms = {id(f): f for forms in captured.forms.values() for f in forms}.values()
    assert len(forms) > 1
    for form in forms:
        placeholders = [n for n in form.graph.nodes if n.op == "placeholder"]
        assert [n.name for n in placeholders] == [n.target for n in placeholders] == [*captured.inputs.names]
    assert len({tuple(fixed_names(form.graph)) for form in forms}) == 1


@pytest.mark.parametrize("by_mode", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_pipe_is_the_model_in_every_form(*, by_mode: bool, ragged: bool) -> None:
    model = Shortened(by_mode=by_mode).double()
    x, *rest = example(ragged=ragged)
    pipe = autopipe.split(model, 3, args=(x.double(), *rest), costs="estimated")
    for training, other, length in itertools.product((True, False), (True, False), (9, 13)):
        x, *rest = example(3, length, ragged=other)
        model.train(training)
        pipe.train(training)
        torch.testing.assert_close(pipe(x.double(), *rest), model(x.double(), *rest))


def recording(letters: str) -> Recording:
    """Inputs, then a call for each letter, a leaf where it is a capital; the output last."""
    calls = [Call("placeholder", name, hint=name) for name in ("x", "mask")]
    calls += [Call("call_module" if c.isupper() else "call_function", c, hint=c) for c in letters]
    return Recording(False, [*calls, Call("output", "output", hint="output")], Spec("leaf"), [], {})


@given(st.lists(st.text("aabbcdABC", max_size=12), min_size=2, max_size=4))
def test_names_of_forms_stand_in_one_order_that_is_that_of_each(texts: list[str]) -> None:
    first, *others = map(recording, texts)
    modes.name_like([], first)
    named = list(first.calls)
    for form in others:
        modes.name_like(named, form)
        named = modes.union(named, form.calls)
    order = [c.name for c in named]
    assert len({*order}) == len(order)
    assert order[:2] == ["x", "mask"]
    assert order[-1] == "output"
    for form in (first, *others):
        places = [order.index(c.name) for c in form.calls]
        assert places == sorted(places)
        alike = dict(zip(order, named, strict=True))
        assert all(alike[c.name].target == c.target for c in form.calls)


class InOneMode(nn.Module):
    """In evaluation alone dropout gives the memory that it is given, and a layer draws and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.drop, self.sampler = nn.Dropout(0.5), Sampler()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        y = self.drop(x)
        y += 1
        for layer in self.layers[1:]:
            y = layer(y)
        return self.sampler(x * y)


class Sampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x * self.weight
        self.n += 1
        return x * self.weight + 0 * torch.randn_like(x)


def test_one_form_of_both_modes_does_what_is_done_in_either():
    found = capture(InOneMode(), (torch.randn(2, 4),))
    assert found.graphs[True] is found.graphs[False]
    ops = {op.name: op for op in found.ops.ops}
    assert ops["sampler"].is_random
    assert ops["sampler"].mutated_buffers == ("sampler.n",)
    assert any({"layers_0", "drop", "add"} <= {*group} for group in found.ops.groups)
    assert ("add", "mul") in found.ops.order_edges
