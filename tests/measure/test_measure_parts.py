"""Parts of a model that run by themselves, as ranks run them, and what that tells of their ops' costs."""

from __future__ import annotations

import contextlib
import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from measure_models import Stack, captured
from torch import nn

from autopipe.measure import profile, profiler
from autopipe.measure.parts import Parts
from autopipe.measure.passes import Passes
from autopipe.measure.replay import Replay
from autopipe.measure.samples import Samples
from autopipe.measure.standins import stand_ins
from autopipe.measure.survey import survey
from autopipe.measure.timers import Stopwatch

QUICK: dict[str, Any] = {"progress": False, "min_s": 0.0, "min_passes": 3}


@pytest.fixture(autouse=True)
def every_op_is_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of larger models are."""
    monkeypatch.setattr(Passes, "_is_heavy", lambda self, name: True)


class Skips(nn.Module):
    """Blocks of which the last also takes what the first gave, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = h = self.layers[0](x)
        for layer in self.layers[1:]:
            h = layer(h).relu()
        return (h + first).sum()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("n_parts", [2, 3])
def test_parts_make_the_gradients_of_the_whole_and_each_op_is_in_one(n_parts: int) -> None:
    torch.manual_seed(0)
    model, x = Skips(), torch.randn(4, 16)
    model(x).backward()
    whole = gradients(model)
    model.zero_grad()
    capture = captured(model, x)
    replay = Replay(capture, dims={"batch": 4} if "batch" in capture.ops.example_dims else None)
    with stand_ins(replay):
        passes = Passes(replay, survey(replay, None), Samples({}, "model"), None)
        passes.divide(n_parts)
        parts, watch = passes.parts, Stopwatch("cpu")
        assert parts is not None
        assert len(parts) == n_parts
        assert sorted(parts.of) == sorted(n.name for n in replay.nodes)
        for number in range(n_parts):
            parts.run(number, watch)
        for parameter in replay.parameters:
            parameter.grad = None
        for number in range(n_parts):
            parts.run(number, watch)
            assert set(watch.read()) == {"F", "B"}
        found = {p.data_ptr(): p.grad for p in replay.parameters}
    for parameter, expected in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(found[parameter.data_ptr()], expected)


def fake(part_s: list[list[float]]) -> Passes:
    """Passes over four ops of a second each, in two parts that take what is said in each round."""
    passes = Passes.__new__(Passes)
    passes.samples, passes._leanings = Samples({}, "model"), {}
    passes.key = lambda name: name  # type: ignore[method-assign]
    passes.replay = types.SimpleNamespace(ran=lambda name: name)  # type: ignore[assignment]
    of = {"a": 0, "b": 0, "c": 1, "d": 1}

    class Two:
        def __len__(self) -> int:
            return 2

    passes.parts = Two()  # type: ignore[assignment]
    passes.parts.of = of  # type: ignore[union-attr]
    for name in of:
        passes.samples.add(name, "F", 1.0)
    for round_ in part_s:
        for number, seconds in enumerate(round_):
            passes.samples.add("", f"F of part {number}", seconds)
    return passes


@pytest.mark.parametrize(
    ("part_s", "told"),
    [
        ([[1.5, 0.5]] * 5, (1.5, 0.5)),
        # rounds at another pace tell the same
        ([[1.5 * pace, 0.5 * pace] for pace in (1.0, 1.4, 0.8, 1.1, 2.0)], (1.5, 0.5)),
        ([[1.1, 0.9], [0.9, 1.1], [1.1, 0.9], [0.9, 1.1], [1.1, 0.9]], (1.0, 1.0)),
        ([], (1.0, 1.0)),
    ],
)
def test_ops_cost_what_their_part_takes_by_itself_where_every_round_tells_it(
    part_s: list[list[float]], told: tuple[float, float]
) -> None:
    passes = fake(part_s)
    assert passes._leaning("F", "a") == pytest.approx(told[0])
    assert passes._leaning("F", "d") == pytest.approx(told[1])


def test_the_whole_takes_as_long_however_its_parts_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "places", lambda: 2)
    seen: list[Passes] = []
    made = profiler._table
    monkeypatch.setattr(
        profiler, "_table", lambda c, passes, notes: seen.append(passes) or made(c, passes, notes)
    )
    tables = {}
    for lean in (1.0, 3.0):

        def by_parts(self: Passes, peers: object, lean: float = lean) -> None:
            for number, times in enumerate((lean, 1.0)):
                for part in "FB":
                    self.samples.add("", f"{part} of part {number}", times)

        monkeypatch.setattr(Passes, "by_parts", by_parts)
        tables[lean] = profile(captured(Stack(4), torch.randn(4, 16)), n_peers=1, **QUICK)
        assert seen[-1].parts is not None
        whole = sum(seen[-1].samples.mean("", part) for part in "FB")
        total = sum(c.forward_s + c.backward_s for c in tables[lean].costs.values())
        assert total == pytest.approx(whole)
    by_part: list[float] = [0.0, 0.0]
    for name, number in seen[-1].parts.of.items():  # type: ignore[union-attr]
        by_part[number] += tables[3.0].costs[name].forward_s
    assert by_part[0] == pytest.approx(3 * by_part[1])


def test_large_models_and_one_rank_are_not_run_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "places", lambda: 2)
    divided: list[int] = []
    monkeypatch.setattr(Passes, "divide", lambda self, n: divided.append(n))
    net = captured(Stack(2), torch.randn(4, 16))
    profile(net, **QUICK)
    monkeypatch.setattr(profiler, "OUT_OF_CACHE", 1)
    profile(net, n_peers=1, **QUICK)
    assert not divided


def test_parts_that_cannot_run_are_told_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "places", lambda: 2)

    def fails(self: object, number: int, watch: Stopwatch) -> None:
        raise RuntimeError("no part")

    monkeypatch.setattr("autopipe.measure.parts.Parts.run", fails)
    table = profile(captured(Stack(2), torch.randn(4, 16)), n_peers=1, **QUICK)
    assert any("by themselves: RuntimeError: no part" in note for note in table.notes)
    assert all(cost.forward_s >= 0 for cost in table.costs.values())


@pytest.mark.parametrize("fault", [RuntimeError("no part"), KeyboardInterrupt()])
def test_a_round_that_ends_between_parts_leaves_nothing_in_the_store(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: BaseException
) -> None:
    monkeypatch.setattr(profiler, "places", lambda: 2)
    net, run, parent = captured(Stack(4), torch.randn(4, 16)), Parts.run, os.getpid()
    begun: list[int] = []

    def ends(self: Parts, number: int, watch: Stopwatch) -> None:
        if os.getpid() == parent:
            begun.append(number)
        if begun and number:
            raise fault
        run(self, number, watch)

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(Parts, "run", ends)
        profile(net, n_peers=1, store=tmp_path, **QUICK)
    assert {*begun} == {0, 1}
    table = profile(net, n_peers=1, store=tmp_path, **QUICK)
    assert not any("by themselves" in note for note in table.notes)
