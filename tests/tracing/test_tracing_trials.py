"""Runs at other sizes: leaves of a kind run once where only shapes count, and all of them where data do."""

import queue
from typing import Any

import pytest
import torch
from torch import nn

import autopipe
from autopipe.tracing import capture
from autopipe.tracing.calls.call import Call
from autopipe.tracing.calls.perform import run_call, way_to
from autopipe.tracing.rows import mixing, row_questions
from autopipe.tracing.sizes import rerun
from autopipe.tracing.sizes.trials import Explorer

D = 4
RUNS: Any = queue.SimpleQueue()  # a list or an array is put back by a capture


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x):
        RUNS.put(id(self))
        return x + self.inner(x).tanh() ** 2 + 1


class Stack(nn.Module):
    """Blocks that each add one or more."""

    def __init__(self, kinds=(0, 0, 0, 0), checks=None):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in kinds)
        for layer, kind in zip(self.layers, kinds, strict=True):
            layer.kind = kind
        self.checks = checks

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.checks is not None and (x < self.checks * (i + 1)).any():
                raise ValueError("a layer added nothing")
        return x


def n_runs(model):
    """How often a block runs in a capture, in which two sizes are found to vary."""
    before = RUNS.qsize()
    captured = capture(model, (torch.rand(2, 12, D),))
    found = RUNS.qsize() - before
    assert {"batch", "seq"} <= {d.name for d in captured.ops.dims}
    x = torch.rand(5, 7, D)
    torch.testing.assert_close(captured(x), model(x))
    return found


def test_leaves_of_a_kind_run_once_where_only_shapes_count():
    alone = n_runs(Stack((0, 1, 2, 3)))
    assert n_runs(Stack((0, 0, 0, 0))) == alone - 2 * 3
    assert n_runs(Stack((0, 0, 1, 1))) == alone - 2 * 2


def test_hooked_leaves_run_each():
    model = Stack()
    model.layers[1].register_forward_hook(lambda module, args, out: out * 1.5)
    assert n_runs(model) >= n_runs(Stack((0, 1, 0, 0))) > n_runs(Stack())


def test_all_leaves_run_where_a_check_of_the_data_fails_for_shared_ones(monkeypatch):
    # questions about rows end where a check fails, as of other values than the example's
    monkeypatch.setattr(mixing, "first_found", lambda asked: row_questions.Answer())
    # a value that later layers share has not grown by what they add
    assert n_runs(Stack(checks=1)) == n_runs(Stack(checks=-9)) + 2 * 4


class Skipping(nn.Module):
    """Batch norm, and a branch that each row skips by chance."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.branch, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        x = self.norm(self.first(x))
        if self.training:
            kept = x.new_empty(x.shape[0], 1).bernoulli_(0.8)
            x = x + self.branch(x) * kept
        return self.last(x)


def test_what_memory_held_before_is_no_value(monkeypatch):
    """Whatever is there, ranks find the same: nothing but batch norm mixes rows."""
    junk = torch.Generator()

    def filled(model, constants, call, *rest):
        value = run_call(model, constants, call, *rest)
        if call.target == "new_empty":
            value.copy_(torch.randn(value.shape, generator=junk))
        return value

    monkeypatch.setattr(rerun, "run_call", filled)
    model, x = Skipping(), torch.randn(4, 4)
    assert not {capture(model, (x,)).ops.tail for _ in range(3)} - {()}


def test_layers_are_found_where_they_are_held():
    class Shown(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Sequential())

    class Hidden(Shown):
        inner = property(lambda self: 0)

    class Wrapped(Shown):
        def __getattr__(self, name):
            return [super().__getattr__(name)]

    call, x = Call("call_module", "inner"), torch.ones(2)
    for model in (Shown(), Hidden(), Wrapped()):
        assert way_to(model, "inner.0") == ("inner", "0")
        assert way_to(model, "inner.1") is None
        for way in (("inner",), None):
            assert run_call(model, {}, call, (x,), {}, {}, x.device, way) is x


def test_what_a_run_shows_is_noted_where_it_is_asked_for_alone():
    model, x = nn.Linear(4, 2), torch.ones(3, 4)
    (form, *_), device = capture(model, (x,)).new_forms.made.forms[False], x.device
    (name,) = (c.target for c in form.calls if c.op == "placeholder")
    into = {}, {}
    seen = rerun.replay(model, form, {name: x}, device, None, None, into)
    assert seen.shapes is into[0]
    assert [*seen.shapes.values()][-1] == ((3, 2),)
    plain = rerun.replay(model, form, {name: x}, device, notes=False)
    assert not plain.shapes
    assert torch.equal(*plain.result, *seen.result)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_sizes_that_are_tried_compile_nothing() -> None:
    compiled: list[Any] = []

    def backend(graph: Any, given: Any) -> Any:
        compiled.append(given)
        return graph.forward

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[1] = torch.compile(model[1], backend=backend)
    found = capture(model, (torch.randn(3, 4),))
    assert [d.name for d in found.ops.dims] == ["batch"]
    assert len(compiled) <= 2  # in each mode, for the example
    x = torch.randn(5, 4)
    torch.testing.assert_close(found(x), model(x))


class Hardest(nn.Module):
    """The mean loss of the larger half of its rows, and of one at least."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x, labels):
        losses = nn.functional.cross_entropy(self.b(self.a(x).tanh()), labels, reduction="none")
        return losses.topk(max(1, len(losses) // 2)).values.mean()


def test_a_limit_on_sizes_that_rows_hide_which_come_again_is_one():
    torch.manual_seed(0)
    model = Hardest().double()

    def batch(n):
        return torch.randn(n, 4, dtype=torch.float64), torch.randint(0, 3, (n,))

    pipe = autopipe.split(model, 2, batch(8), costs="estimated", n_microbatches=3)
    for n in (2, 3, 4, 8, 12):
        given = batch(n)
        torch.testing.assert_close(pipe(*given), model(*given))
    runtime, given = pipe.runtime(), batch(8)
    assert runtime.step(*given).loss.item() == pytest.approx(model(*given).item(), rel=1e-12)


class Halved(nn.Module):
    """Cuts in two where a row is long, which is the same whatever the length."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        y = self.a(x).relu()
        if y.shape[1] > 16:
            y = torch.cat([y[:, :16], y[:, 16:]], 1)
        return self.b(y)


def test_whether_a_question_does_harm_is_asked_in_each_mode_and_of_other_data_once(monkeypatch):
    judge, answer, asked = Explorer.judge, Explorer._answer, []

    def judging(self, sizes):
        asked.append([])
        return judge(self, sizes)

    def answering(self, sizes, form, training=None, *told, **how):
        if asked:
            asked[-1].append((self._redraws is not None, self.mode(form, training)))
        return answer(self, sizes, form, training, *told, **how)

    monkeypatch.setattr(Explorer, "judge", judging)
    monkeypatch.setattr(Explorer, "_answer", answering)
    captured = capture(Halved(), (torch.randn(2, 12, D),))
    assert not captured.variation.checks
    assert [(False, False), (True, False), (True, True)] in asked
