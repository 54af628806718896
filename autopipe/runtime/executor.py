"""Carries out a program: runs actions on workers, moves messages, times everything, names what fails.

Which steps the program has is left to ``program``; what all ranks make of a failure to ``failure``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ..errors import AutopipeError, StepError
from ..plans import Plan
from ..schedule import Action
from ..units import format_bytes, parse_bytes
from .boundary import Edge
from .channel import Channel
from .failure import Position
from .program import Program, ProgramStep
from .worker import Worker

__all__ = ["Clock", "Executor"]


class Clock:
    """Start and end of each action of one step, in seconds; on CUDA taken on the device's stream.

    ``origin_s`` is the host's clock (seconds since the epoch) at the step's start.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Action, float, float]] = []
        self._events: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []
        if self._cuda:
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record()
        self.origin_s = time.time()
        self._start = time.perf_counter()

    def run(self, action: Action, act: Callable[[int], None]) -> None:
        """Run one action and note when."""
        if self._cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            act(action.microbatch)
            end.record()
            self._events.append((action, begin, end))
        else:
            begin_s = time.perf_counter()
            act(action.microbatch)
            self._marks.append((action, begin_s, time.perf_counter()))

    def read(self) -> list[tuple[Action, float, float]]:
        """(action, start, end) in seconds since the step began; on CUDA waits for the device."""
        if self._cuda:
            torch.cuda.synchronize()
            first = self._first
            return [
                (a, first.elapsed_time(b) * 1e-3, first.elapsed_time(e) * 1e-3) for a, b, e in self._events
            ]
        return [(a, b - self._start, e - self._start) for a, b, e in self._marks]


class Executor:
    """The workers of this process, the edges they share, and the channel to other ranks, if any."""

    def __init__(
        self,
        workers: Mapping[int, Worker],
        edges: Sequence[Edge],
        plan: Plan,
        channel: Channel | None,
        position: Position,
    ) -> None:
        self._workers, self._plan, self._placement = workers, plan, plan.placement
        self._edges = {(e.source, e.destination): e for e in edges}
        self._channel, self._position = channel, position
        self._acts = {
            kind: {stage: getattr(worker, name) for stage, worker in workers.items()}
            for kind, name in _METHODS.items()
        }
        self._remote_in: dict[int, tuple[Edge, ...]] = {}
        self._remote_out: dict[int, tuple[Edge, ...]] = {}
        for stage, worker in workers.items():
            self._remote_in[stage] = tuple(e for e in worker.edges_in if e.source not in workers)
            self._remote_out[stage] = tuple(e for e in worker.edges_out if e.destination not in workers)

    def run(self, program: Program, clock: Clock) -> None:
        """Carry out ``program``. Raises :class:`StepError` naming stage, microbatch and action."""
        position = self._position
        for index, step in enumerate(program):
            position.index = index
            if step.kind == "run":
                self._act(step, clock)
            else:
                self._move(step)
        if self._channel is not None:
            self._channel.flush()

    def _act(self, step: ProgramStep, clock: Clock) -> None:
        action = step.action
        assert action is not None
        stage, kind, m = action.stage, action.kind, action.microbatch
        if kind == "F":
            for edge in self._remote_in[stage]:
                self._wait_for(edge.source, action)
                self._workers[stage].accept(edge, m, self._channel.take_values(edge, m))  # type: ignore[union-attr]
        elif kind != "W":
            for edge in self._remote_out[stage]:
                self._wait_for(edge.destination, action)
                self._channel.take_grads(edge, m)  # type: ignore[union-attr]
        self._position.waits_for = -1
        self._position.words = action
        try:
            clock.run(action, self._acts[kind][stage])
        except AutopipeError:
            raise
        except Exception as error:
            raise StepError(self._words(action, error)) from error

    def _wait_for(self, stage: int, action: Action) -> None:
        self._position.waits_for = self._placement[stage]
        self._position.words = action

    def _move(self, step: ProgramStep) -> None:
        message, channel = step.message, self._channel
        assert message is not None
        assert channel is not None
        self._position.waits_for = step.peer
        self._position.words = step
        m = message.microbatch
        if message.kind == "F":
            edge = self._edges[message.source, message.destination]
            (channel.send_values if step.kind == "send" else channel.recv_values)(edge, m, step.peer)
        else:
            edge = self._edges[message.destination, message.source]
            (channel.send_grads if step.kind == "send" else channel.recv_grads)(edge, m, step.peer)

    def _words(self, action: Action, error: BaseException) -> str:
        place = f"rank {self._placement[action.stage]}, stage {action.stage}, microbatch {action.microbatch}"
        words = f"{place}, action {action}: {type(error).__name__}: {error}"
        if isinstance(error, torch.OutOfMemoryError):
            words += f" ({self._memory_words(action.stage)})"
        return words

    def _memory_words(self, stage: int) -> str:
        rank, plan = self._placement[stage], self._plan
        predicted = sum(s.memory_bytes for s in plan.stages if s.rank == rank)
        limit = plan.settings.get("memory_limit") or plan.cluster.devices[rank].memory_bytes
        return (
            f"the plan predicted {format_bytes(predicted)} for rank {rank}'s stages, limit "
            f"{format_bytes(parse_bytes(limit)) if limit else 'unknown'}; use more microbatches, or plan with "
            "a lower memory_limit"
        )


_METHODS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
