"""Sizes at which a model's own code goes another way have forms of their own, under the same cut."""

from __future__ import annotations

import contextlib
import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from splitting import split_by_layers
from torch import Tensor, nn
from traps.registry import WIDTH, Net

import autopipe
from autopipe.errors import InputError
from autopipe.tracing import Capture, capture, validation


class Windowed(Net):
    """Works on windows of four, padded where that is needed, and counts long texts twice."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        pad = -n % 4
        if pad:
            x = F.pad(x, (0, 0, 0, pad))
        x = self.layers[1](self.layers[0](x))
        if n > 10:
            x = 2 * x
        x = x.unflatten(1, (-1, 4))
        x = (x.mean(2, keepdim=True) + x).flatten(1, 2)
        x = self.layers[3](self.layers[2](x))
        return x[:, :n] if pad else x


class Masked(Net):
    """Fills up to a multiple of four, and leaves a mask of ones aside."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        n = x.shape[1]
        if pad := -n % 4:
            x, mask = F.pad(x, (0, 0, 0, pad)) + 1, F.pad(mask, (0, pad), value=1)
        x = self.layers[1](self.layers[0](x))
        if not bool(mask.all()):
            x = 3 * x * mask.unsqueeze(2)
        x = self.layers[3](self.layers[2](x.unflatten(1, (-1, 4)).cumsum(2).flatten(1, 2)))
        return x[:, :n] if pad else x


class Rounded(Net):
    """Fills up to a multiple of three, told by a quotient, and to one of four, told by numpy."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        whole = math.ceil(n / 3) * 3
        if whole != n:
            x = F.pad(x, (0, 0, 0, whole - n)) + 1
        x = self.layers[1](self.layers[0](x))
        x = F.pad(x, (0, 0, 0, int(np.ceil(x.shape[1] / 4) * 4 - x.shape[1])))
        return self.layers[3](self.layers[2](x.unflatten(1, (-1, 4)).sum(2)))


class Fractional(Net):
    """Asks about fractions and a root of a size, which no size near the example tells apart."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        x = 2 * x if x.shape[1] / 4 > 10 else x
        return 3 * x if x.shape[1] ** 0.5 > 9 or x.shape[1] * 0.3 > 15 else x


class Crossed(Net):
    """Two towers, of which the second looks at the first for long texts."""

    def forward(self, x: Tensor) -> Tensor:
        a = self.layers[1](self.layers[0](x))
        b = x + a if x.shape[1] > 10 else x
        return a + self.layers[3](self.layers[2](b))


class Turned(Net):
    """Takes its layers the other way round for long texts."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers if x.shape[1] <= 10 else reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


class Drawing(Net):
    """Draws for long texts alone."""

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x + torch.randn_like(x) if x.shape[1] > 10 else x)


class ByMode(Net):
    """Does at other sizes the same things in one mode and in the other, but in another order."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        x = self.layers[1](self.layers[0](x))
        if n % 4:
            x = x.exp().neg().sinh() if self.training else x.neg().sinh().exp()
        if n > 10:
            x = x.cosh() if self.training else x.sigmoid()
        return self.layers[3](self.layers[2](x))


def of_length(n: int, rows: int = 2) -> Tensor:
    return torch.randn(rows, n, WIDTH)


@pytest.fixture(scope="module")
def windowed() -> Capture:
    torch.manual_seed(0)
    return capture(Windowed().double(), (of_length(8).double(),))


@pytest.mark.parametrize("length", [3, 4, 8, 9, 12, 13])
def test_padded_or_not_and_long_or_short(windowed: Capture, length: int) -> None:
    for training in (False, True):
        windowed.model.train(training)
        x = of_length(length, 3).double()
        torch.testing.assert_close(windowed(x), windowed.model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_model_that_asks_of_values_has_forms_for_other_sizes_too(is_cut: bool) -> None:
    torch.manual_seed(0)
    model = Masked().double()
    example = of_length(8).double(), torch.ones(2, 8, dtype=torch.int64)
    if is_cut:
        run = split_by_layers(model, 2, example)
        found = run.graph
    else:
        found = run = capture(model, example)
    assert [form.for_sizes for form in found.forms[True]].count(True) == 1
    for length in (3, 5, 8, 11, 12):
        for training in (False, True):
            model.train(training)
            x, mask = of_length(length, 3).double(), torch.ones(3, length, dtype=torch.int64)
            torch.testing.assert_close(run(x, mask), model(x, mask), rtol=1e-12, atol=1e-12)
            mask[1, 2:] = 0
            torch.testing.assert_close(run(x, mask), model(x, mask), rtol=1e-12, atol=1e-12)
    assert [form.for_sizes for form in found.forms[True]].count(True) == 2  # one was met at a call


@pytest.mark.parametrize("kind", [Rounded, Fractional])
def test_quotients_of_sizes_are_right_or_refused_at_any_length(kind: type[Net]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    found = capture(model, (of_length(8).double(),))
    n_right = 0
    for length in (2, 3, 4, 7, 9, 12, 13, 39, 41, 48, 60, 90):
        x = of_length(length, 3).double()
        with contextlib.suppress(InputError):
            torch.testing.assert_close(found(x), model(x), rtol=1e-12, atol=1e-12)
            n_right += 1
    assert n_right >= (12 if kind is Rounded else 8)


def test_no_plan_is_asked_for_more_than_the_example_has(windowed: Capture) -> None:
    first = {n.name for n in windowed.graphs[False].nodes if n.op != "get_attr"}
    assert {op.name for op in windowed.ops.ops} == first
    assert sum(form.for_sizes for form in windowed.forms[False]) >= 2


def test_stages_and_microbatches_of_any_length_train_as_the_model_does() -> None:
    torch.manual_seed(0)
    model = Windowed()
    pipe = split_by_layers(model, 4, (of_length(8),), n_microbatches=2)
    rt = pipe.runtime(loss_fn=lambda out, target: (out - target).square().mean())
    for length in (8, 9, 12):
        x, target = of_length(length, 4), of_length(length, 4)
        expected = torch.autograd.grad((model(x) - target).square().mean(), [*model.parameters()])
        model.zero_grad()
        rt.step(x, target=target)
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_values_that_would_flow_to_an_earlier_stage_are_refused_there_alone() -> None:
    model = Crossed()
    pins = {"layers.2": 0, "layers.3": 0, "layers.0": 1, "layers.1": 1}
    pipe = autopipe.split(model, 2, (of_length(8),), costs="estimated", pin=pins)
    for length in (7, 12):
        torch.testing.assert_close(pipe.graph(of_length(length)).shape, torch.Size([2, length, WIDTH]))
    x = of_length(7)
    torch.testing.assert_close(pipe(x), model(x))
    with pytest.raises(InputError, match="another order"):
        pipe(of_length(12))


def test_layers_called_where_other_stages_hold_them_are_refused_at_those_sizes_alone() -> None:
    pipe = split_by_layers(Turned(), 2, (of_length(8),))
    with pytest.raises(InputError, match="another order"):
        pipe(of_length(12))
    x = of_length(7)
    torch.testing.assert_close(pipe(x), pipe.model(x))


def test_draws_at_some_sizes_alone_do_not_depend_on_the_cut() -> None:
    found = []
    for n_stages in (1, 2, 3):
        torch.manual_seed(0)
        pipe = split_by_layers(Drawing(), n_stages, (of_length(8),))
        rt = pipe.runtime(loss_fn=lambda out, _: out.square().mean(), n_microbatches=1)
        torch.manual_seed(1)
        found.append([rt.step(of_length(n)).loss.item() for n in (12, 12, 7)])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-6)
    assert found[0][0] != found[0][1]


class Unrolled(Net):
    """Goes through the positions one by one, with a state and layers that all of them share."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        state, out = x.new_zeros(len(x), WIDTH), []
        for t in range(x.shape[1]):
            state = torch.tanh(self.layers[0](x[:, t]) + self.layers[1](state))
            out.append(self.layers[2](state))
        return torch.stack(out, 1), self.layers[3](state)


AFTER_THE_LOOP = {"layers.0": 0, "layers.1": 0, "layers.2": 0, "layers.3": 1}
"""A cut that any number of positions goes through: none of the loop's layers is in the second stage."""


def test_a_length_that_unrolls_a_loop_is_recorded_when_it_is_met() -> None:
    torch.manual_seed(0)
    model = Unrolled().double()
    pipe = autopipe.split(model, 2, (of_length(5).double(),), costs="estimated", pin=AFTER_THE_LOOP)
    for length, rows in ((5, 3), (3, 2), (3, 4), (8, 2), (3, 1), (1, 2)):
        for training in (False, True):
            model.train(training)
            x = of_length(length, rows).double()
            for run in (pipe, pipe.graph):
                for found, expected in zip(run(x), model(x), strict=True):
                    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert len(pipe.graph.forms[True]) == 4  # one for each length, however many rows
    pipe.verify(of_length(7).double())


class Longest(Net):
    """Goes through as many positions as the longest row has, which data alone tell, and marks odd ones."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out = self.run(x)
        n = int(lengths.max())
        return torch.stack([out[:, i] for i in range(n)]).sum(0) * (-1 if n % 2 else 1)


def test_a_step_records_what_it_meets_and_goes_on_as_if_it_were_known() -> None:
    """Lengths that unroll a loop in a training step, in evaluation and in some microbatches of a step."""
    torch.manual_seed(0)
    model = Unrolled().double()
    pipe = autopipe.split(
        model, 2, (of_length(5).double(),), costs="estimated", pin=AFTER_THE_LOOP, n_microbatches=2
    )
    rt = pipe.runtime(loss_fn=lambda out, target: (out[0] - target).square().mean())
    for length in (5, 3, 8, 3):
        x, target = of_length(length, 4).double(), of_length(length, 4).double()
        expected = (model(x)[0] - target).square().mean()
        gradients = torch.autograd.grad(expected, [*model.parameters()][:6])
        model.zero_grad()
        torch.testing.assert_close(rt.step(x, target=target).loss, expected.detach())
        for parameter, gradient in zip(model.parameters(), gradients, strict=False):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-12)
    model.eval()
    x = of_length(7, 4).double()
    torch.testing.assert_close(rt.forward(x)[0], model(x)[0])
    torch.testing.assert_close(pipe(x)[0], model(x)[0])


def test_a_step_records_nothing_for_stages_that_were_wrapped() -> None:
    torch.manual_seed(0)
    pipe = autopipe.split(Unrolled(), 2, (of_length(5),), costs="estimated", pin=AFTER_THE_LOOP)
    pipe(of_length(4))
    rt = pipe.runtime(loss_fn=lambda out, target: out[0].square().mean())
    rt.wrap(lambda stage: None)
    assert rt.step(of_length(4)).loss.isfinite()
    with pytest.raises(InputError, match="wrapped; call pipe"):
        rt.step(of_length(3))


def test_an_answer_of_the_data_is_recorded_when_it_is_met() -> None:
    torch.manual_seed(0)
    model = Longest().double()
    pipe = split_by_layers(model, 2, (of_length(8).double(), torch.tensor([3, 5])))
    for lengths in ([5, 1], [2, 4], [8, 8], [1, 4], [3, 2]):
        x = of_length(8).double()
        given = x, torch.tensor(lengths)
        torch.testing.assert_close(pipe(*given), model(*given), rtol=1e-12, atol=1e-12)


def test_a_form_is_met_under_no_grad_too_and_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = Unrolled()
    pipe = autopipe.split(model, 2, (of_length(5),), costs="estimated", pin=AFTER_THE_LOOP)
    model.eval()
    x, before = of_length(4), torch.get_rng_state()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with torch.no_grad():
        found = pipe(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(bool((p.grad == 1).all()) for p in model.parameters())
    torch.testing.assert_close(found[0], model(x)[0])
    with torch.inference_mode():
        torch.testing.assert_close(pipe(of_length(6))[1].shape, (2, WIDTH))


def test_a_copy_runs_the_forms_that_there_are() -> None:
    torch.manual_seed(0)
    pipe = autopipe.split(Unrolled(), 2, (of_length(5),), costs="estimated", pin=AFTER_THE_LOOP)
    pipe(of_length(4))
    again = copy.deepcopy(pipe)
    x = of_length(4)
    torch.testing.assert_close(again(x)[0], pipe(x)[0])


def test_modes_that_go_other_ways_at_other_sizes_do_so_in_any_order() -> None:
    torch.manual_seed(0)
    found = capture(ByMode().double(), (of_length(8).double(),))
    assert [len(found.forms[flag]) for flag in (True, False)] == [3, 3]
    for length in (7, 8, 13):
        for training in (True, False):
            found.model.train(training)
            x = of_length(length, 3).double()
            torch.testing.assert_close(found(x), found.model(x), rtol=1e-12, atol=1e-12)


class Pieces(Net):
    """Goes by how many pieces of a quarter there are, and by where a length lies among others."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([piece.cumsum(1) for piece in self.layers[0](x).chunk(4, 1)], 1)
        place = sum(x.shape[1] > n for n in (4, 6, 16))
        return self.layers[2](self.layers[1](x) * (1 + place))


def test_a_kind_of_two_sizes_is_recorded_when_it_is_met() -> None:
    torch.manual_seed(0)
    model = Pieces().eval()
    pipe = split_by_layers(model, 2, (torch.randn(2, 8, WIDTH),))
    for length in (8, 5, 6, 12, 5, 16):
        x = torch.randn(3, length, WIDTH)
        torch.testing.assert_close(pipe(x), model(x))


class Odd(Net):
    """Goes another way for an odd length, so that a recording of one way is not right for the other."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.run(x)
        return x * 2 if x.shape[1] % 2 else x.flip(1)


def test_forms_for_other_sizes_are_made_of_the_recording_that_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready: list[Any] = []
    original = validation.record_at_sizes
    monkeypatch.setattr(validation, "record_at_sizes", lambda *args: (ready.append(args), original(*args)))
    model = Odd()
    captured = capture(model, (torch.randn(2, 6, WIDTH),))
    assert len(ready) == 1
    for length in (6, 8, 5):
        x = torch.randn(3, length, WIDTH)
        assert torch.equal(captured(x), model(x))


class Shrinks(nn.Module):
    """Layers whose lengths no formula of a few lengths tells."""

    def __init__(self, fills):
        super().__init__()
        self.a, self.b, self.fills = nn.Conv1d(8, 8, 3, 2), nn.Conv1d(8, 8, 2, 2), fills

    def forward(self, x):
        x = self.b(self.a(x.mT).relu())
        # an element that was not made where the tensor is, as finfo(...).min is
        return (x.masked_fill(x > 9, torch.tensor(0.5)) if self.fills else x).mT


class Pooled(nn.Module):
    """Fills up what it pools to the length that it had."""

    def __init__(self, fills):
        super().__init__()
        self.first, self.second, self.out = Shrinks(fills), nn.Linear(8, 8), nn.Linear(8, 8)
        self.pool = nn.AvgPool1d(2, 2)

    def forward(self, x):
        h = self.first(x)
        y = self.pool(h.mT).mT.repeat_interleave(2, 1)
        if y.shape[1] < h.shape[1]:
            y = F.pad(y, (0, 0, 0, h.shape[1] - y.shape[1]))
        return self.out(self.second(h) + y)


@pytest.mark.parametrize("fills", [False, True])
def test_lengths_that_only_the_graph_can_tell_are_recorded_as_they_are_met(fills):
    model = Pooled(fills)
    closed = ["first"] if fills else []
    found = capture(model, (torch.randn(2, 36, 8),), closed=closed)
    assert any("expect_size" in node.name for node in found.module.graph.nodes)
    for training in (False, True):
        model.train(training)
        for length in (36, 37, 40, 28, 29, 32, 47, 64):
            x = torch.randn(3, length, 8)
            torch.testing.assert_close(found(x), model(x))
    assert {len(forms) for forms in found.forms.values()} == {2}


class Normed(Net):
    """Counts what a layer sees, in training alone, and fills up to an even length."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        whole = math.ceil(n / 2) * 2
        if whole != n:
            x = F.pad(x, (0, 0, 0, whole - n)) + 1
        x = self.norm(self.run(x).transpose(1, 2)).transpose(1, 2)
        return x.unflatten(1, (-1, 2)).sum(2)


def test_a_layer_that_writes_in_one_mode_alone_is_placed_in_the_other_at_other_sizes() -> None:
    model = Normed()
    twin = copy.deepcopy(model)
    pipe = split_by_layers(model, 2, args=(torch.randn(2, 8, WIDTH),))
    for training in (False, True):
        for length in (8, 7, 12, 5):
            x = torch.randn(2, length, WIDTH)
            torch.testing.assert_close(pipe.train(training)(x), twin.train(training)(x))
    torch.testing.assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
