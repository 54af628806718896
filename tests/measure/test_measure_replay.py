"""Replays: what is taken out when it fails, what the whole-model pass runs, and the processes beside it."""

from __future__ import annotations

import mmap
import os
import signal
import time

import pytest
import torch
from processes import children
from torch import Tensor, nn

import autopipe
from autopipe.graph import TensorSpec
from autopipe.measure import alike_ops, estimate
from autopipe.measure.alike_ops import INSTANCES, MOST_INSTANCES, OUT_OF_CACHE
from autopipe.measure.busy_cores import busy
from autopipe.measure.kernel_counts import Counter
from autopipe.measure.passes import Passes
from autopipe.measure.replay import Replay
from autopipe.measure.samples import Samples
from autopipe.measure.standins import stand_ins
from autopipe.measure.survey import survey
from autopipe.units import parse_size


class Twice(nn.Module):
    """More residual sums than linear layers per block, so the sums are skipped blocks earlier."""

    def __init__(self, n: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + x
            x = x + layer(x)
        return x.sum()


def test_the_whole_backward_reaches_every_parameter_that_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike_ops, "OUT_OF_CACHE", 0)
    capture = autopipe.capture(Twice(3 * INSTANCES), (torch.ones(4, 8),))
    replay = Replay(capture)
    with stand_ins(replay):
        passes = Passes(replay, survey(replay), Samples({}, ""), None)
        for parameter in replay.parameters:
            parameter.grad = None
        assert 2 * INSTANCES <= len(replay.parameters) < 3 * 2 * INSTANCES
        passes._whole()
        assert all(parameter.grad is not None for parameter in replay.parameters)


def test_what_is_fitted_to_sizes_that_data_decide_does_not_fall_below_nothing() -> None:
    replay = Replay(autopipe.capture(Twice(1), (torch.ones(4, 8),)))
    picked = TensorSpec((parse_size("2*batch - 9"), 8), "float32")
    assert picked.shape_at(replay.dims) == (0, 8)
    assert picked.bytes_at(replay.dims) == 0
    assert replay._zeros(picked).shape == (0, 8)


def test_the_whole_keeps_what_a_stage_keeps() -> None:
    """Values that neither a later op nor the backward reads are gone, whose memory the next ones take."""

    class Moves(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first = x
            for _ in range(30):
                x = x + 1.0
            return x, first * 2

    x = torch.zeros(1 << 16, requires_grad=True)
    replay = Replay(autopipe.capture(Moves(), (x,)))
    with stand_ins(replay):
        passes = Passes(replay, survey(replay), Samples({}, ""), None)
        with Counter() as counter:
            passes._whole()
    # the input, two values, what they are made of, and gradients of all
    assert counter.peak_bytes < 10 * x.nbytes


def test_what_the_graph_says_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    replay = Replay(autopipe.capture(model, (torch.ones(2, 4),)))
    with stand_ins(replay):
        passes = Passes(replay, survey(replay), Samples({}, ""), None)
        monkeypatch.delattr(nn.Module, "get_submodule")
        passes._whole()


@pytest.mark.parametrize("width", [256, 512, 2048])
def test_equal_ops_are_run_until_no_cache_holds_their_weights(width: int) -> None:
    n = 40
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(n)))
    capture = autopipe.capture(model, (torch.ones(2, width, device="meta"),))
    fills = OUT_OF_CACHE // (2 * 4 * width**2)  # a weight and its gradient, beside small values
    # the first takes an input without gradient and is of another kind
    assert len(Replay(capture).nodes) == 1 + min(MOST_INSTANCES, max(INSTANCES, fills - 1))
    assert len(Replay(capture, device="meta").nodes) == 1 + INSTANCES  # where nothing runs, nothing is held


class Gated(nn.Module):
    """Several linears of one kind take one value; what two of them give is kept by one op."""

    def __init__(self, n: int):
        super().__init__()
        self.ways = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(4)) for _ in range(n))
        self.joined = nn.ModuleList(nn.Linear(8, 24) for _ in range(n))

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for (gate, up, down, key), joined in zip(self.ways, self.joined, strict=True):
            x = x + down(torch.nn.functional.silu(gate(x)) * up(x))
            a, b, c = joined(x).view(-1, 3, 8).unbind(1)
            x = x + (a * b).sigmoid() * c + key(a.reshape(-1, 2, 4).transpose(1, 2).reshape(-1, 8)) * key(b)
            seen.append(x)
        return (torch.cat(seen[1:], dim=1) * torch.cat(seen[:-1], dim=1)).sum()


def test_ops_that_are_not_run_are_counted_as_if_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two values that one op stands for are two: each is kept, and no gradient is of both."""
    x = torch.ones(4, 8, device="meta")
    with torch.device("meta"):
        capture = autopipe.capture(Gated(9), (x,))
    replay = Replay(capture, device="meta")
    assert replay.skipped
    some = estimate(capture, "H200")
    monkeypatch.setattr(alike_ops, "INSTANCES", 1000)
    assert not Replay(capture, device="meta").skipped
    every = estimate(capture, "H200")
    for op, cost in every.costs.items():
        assert some[op].saved_bytes == cost.saved_bytes, op
        assert some[op].saved_values == cost.saved_values, op
        if op not in replay.skipped:
            assert some[op].backward_s <= cost.backward_s, op


def test_an_op_without_its_input_is_estimated() -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + 1, x + 2

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.last = Pair(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.pair(x)
            return self.last(a * b)

    capture = autopipe.capture(Net(), (torch.ones(4, 8),))
    replay = Replay(capture)
    with stand_ins(replay):
        piece = replay.pieces(lambda name: True)[-1]
        env: dict[str, object] = {}
        with replay.attempt(piece, env):
            replay.forward(piece, env, torch.no_grad())
    (reason,) = set(replay.failures.values())
    assert "could not be run" in reason
    assert piece.takes[0] in reason


def test_peers_share_no_signal_handler_and_end_with_an_error() -> None:
    before = children()
    read, write = os.pipe()
    seen = signal.signal(signal.SIGTERM, lambda *_: os.write(write, b"handled"))
    try:
        with pytest.raises(ZeroDivisionError), busy(lambda *_: os.write(write, b"."), 2, torch.device("cpu")):
            raise ZeroDivisionError
        with busy(lambda *_: os.kill(os.getpid(), signal.SIGTERM), 1, torch.device("cpu")):
            time.sleep(0.05)
    finally:
        signal.signal(signal.SIGTERM, seen)
    os.close(write)
    rest = b""
    while chunk := os.read(read, 1 << 16):
        rest += chunk
    os.close(read)
    assert b"handled" not in rest
    assert children() == before


def test_peers_do_not_outlive_failing_work() -> None:
    before = children()

    def fails(number: int, asked: int) -> None:
        raise RuntimeError("no work")

    with busy(fails, 1, torch.device("cpu")):
        time.sleep(0.01)
    assert children() == before


def test_peers_rest_while_they_are_asked_to_and_go_on_afterwards() -> None:
    count = mmap.mmap(-1, 2)

    def works(number: int, asked: int) -> None:
        count[number] = (count[number] + 1) % 256
        time.sleep(0.001)

    def goes_on() -> bool:
        before = count[0]
        until = time.monotonic() + 5.0
        while count[0] == before and time.monotonic() < until:
            time.sleep(0.01)
        return count[0] != before

    with busy(works, 1, torch.device("cpu")) as peers:
        assert goes_on()
        with peers.resting():
            before = count[0]
            time.sleep(0.1)
            assert count[0] == before
        assert goes_on()


def test_peers_know_their_number_and_what_is_asked_of_them() -> None:
    done = mmap.mmap(-1, 2)

    def works(number: int, asked: int) -> None:
        done[number] = 100 * number + asked
        time.sleep(0.001)

    def come(*expected: int) -> bool:
        until = time.monotonic() + 5.0
        while tuple(done[:]) != expected and time.monotonic() < until:
            time.sleep(0.01)
        return tuple(done[:]) == expected

    with busy(works, 2, torch.device("cpu")) as peers:
        assert come(0, 100)
        peers.ask(7)
        assert come(7, 107)
        peers.ask(0)
        assert come(0, 100)


def test_a_peer_that_has_ended_is_not_waited_for() -> None:
    def fails(number: int, asked: int) -> None:
        raise RuntimeError("no work")

    with busy(fails, 2, torch.device("cpu")) as peers:
        start = time.monotonic()
        with peers.resting():
            assert time.monotonic() - start < 5.0
