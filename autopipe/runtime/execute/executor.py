"""Carries out a program: runs actions on workers, moves messages, times everything, names what fails.

Which steps the program has is left to ``program``; what all ranks make of a failure to ``failure``.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ... import accelerator
from ...errors import AutopipeError, StepError
from ...memory import memory_limits
from ...plans import Plan
from ...schedule import Action, Message
from ...units import format_bytes
from ..stage.worker import Worker
from ..wire.boundary import Edge
from ..wire.channel import Channel
from ..wire.position import Position
from .program import Program, ProgramStep

__all__ = ["Clock", "Executor"]


Timed = Action | ProgramStep


class Clock:
    """Start and end of each action of one step; on an accelerator taken on the device's stream.

    ``origin_s`` is this process's ``time.perf_counter()`` at the step's start. ``now`` is a mark in
    time; ``taken`` has one before and one after each of ``calls`` that is timed: actions, sends, and waits
    for what is received. Nothing else is kept of them: the garbage collector would go through it.
    ``signatures`` are those of the step's microbatches, which say how large messages are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.is_async = device, accelerator.is_async(device)
        self.now: Callable[[], Any] = (
            functools.partial(accelerator.mark, device) if self.is_async else time.perf_counter
        )
        self.calls: Sequence[Call] = ()
        self.taken: list[Any] = []
        self.signatures: Sequence[int] = ()
        self.origin_s = time.perf_counter()
        self._start = self._end = self.now()

    @property
    def marks(self) -> list[tuple[Timed, Any, Any]]:
        """(what, mark before, mark after) of all that was timed."""
        taken = iter(self.taken)
        return list(zip(timed(self.calls), taken, taken, strict=False))

    def read(self) -> list[tuple[Timed, float, float]]:
        """(what, start, end) in seconds since the step began; on an accelerator waits for the device."""
        since = self._since
        if not self.has_passed():
            accelerator.synchronize(self._device)
        return [(a, since(b), since(e)) for a, b, e in self.marks]

    def has_passed(self) -> bool:
        """Whether all that was marked is done, so that reading waits for nothing."""
        return isinstance(self._end, float) or bool(self._end.query())

    def stop(self) -> None:
        """Mark the step's end."""
        self._end = self.now()

    def length_s(self, host_s: float) -> float:
        """The step's length: the host's, or on an accelerator the device's, which is waited for."""
        if isinstance(self._end, float):
            return host_s
        if not self.has_passed():
            accelerator.synchronize(self._device)
        return self._since(self._end)

    def _since(self, mark: Any) -> float:
        start = self._start
        return mark - start if isinstance(start, float) else accelerator.seconds(start, mark)


Call = tuple[object, int, Timed | None, Callable[[], object]]
"""(what it is in words, the rank it waits for or -1, what to time it as if at all, what to call)."""


def timed(calls: Sequence[Call]) -> Iterator[Timed]:
    """What is timed of a program, in order."""
    return (what for _, _, what, _ in calls if what is not None)


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

    def compile(self, program: Program) -> tuple[Call, ...]:
        """A program as plain calls, with a wait for each message an action needs in front of it."""
        calls: list[Call] = []
        for step in program:
            if step.action is not None:
                calls += self._waits(step.action)
                calls.append((step.action, -1, step.action, self._act(step.action)))
            elif step.gather is not None:
                replicas, is_end = self._workers[step.gather.stage].replicas, step.gather.is_end
                calls.append((step, -1, None, replicas.let_go if is_end else replicas.gather))
            else:
                calls.append((step, step.peer, step if step.kind == "send" else None, self._move(step)))
        return tuple(calls)

    def _act(self, action: Action) -> Callable[[], None]:
        method = getattr(self._workers[action.stage], _METHODS[action.kind])
        return functools.partial(method, action.microbatch)

    def _waits(self, action: Action) -> Iterator[Call]:
        worker, m = self._workers[action.stage], action.microbatch
        if action.kind == "F":
            for edge in worker.edges_in:
                if edge.source not in self._workers:
                    step = self._arrival("F", edge.source, action)
                    yield action, step.peer, step, functools.partial(self._take, worker, edge, m)
        elif action.kind != "W":
            for edge in worker.edges_out:
                if edge.destination not in self._workers:
                    assert self._channel is not None
                    step = self._arrival("B", edge.destination, action)
                    yield action, step.peer, step, functools.partial(self._channel.take_grads, edge, m)

    def _arrival(self, kind: str, source: int, action: Action) -> ProgramStep:
        message = Message(kind, source, action.stage, action.microbatch)
        return ProgramStep("recv", message=message, peer=self._placement[source])

    def _take(self, worker: Worker, edge: Edge, m: int) -> None:
        assert self._channel is not None
        worker.accept(edge, m, self._channel.take_values(edge, m))

    def _move(self, step: ProgramStep) -> Callable[[], None]:
        message, channel = step.message, self._channel
        assert message is not None
        assert channel is not None
        if message.kind == "F":
            edge = self._edges[message.source, message.destination]
            method = channel.send_values if step.kind == "send" else channel.recv_values
        else:
            edge = self._edges[message.destination, message.source]
            method = channel.send_grads if step.kind == "send" else channel.recv_grads
        return functools.partial(method, edge, message.microbatch, step.peer)

    def run(self, calls: Sequence[Call], clock: Clock) -> None:
        """Make the calls of a program. Raises :class:`StepError` naming stage, microbatch and action."""
        position, now, mark = self._position, clock.now, clock.taken.append
        clock.calls = calls
        what: Timed | None = None
        position.follow(*((clock.taken, tuple(timed(calls))) if clock.is_async else ((), ())))
        numbered = enumerate(calls, position.index + 1)
        try:
            for position.index, (position.words, position.waits_for, what, call) in numbered:
                if what is None:
                    call()
                else:
                    mark(now())
                    call()
                    mark(now())
        except AutopipeError:
            raise
        except Exception as error:
            if not isinstance(what, Action):
                raise
            raise StepError(self._words(what, error)) from error
        if self._channel is not None:
            self._channel.flush()
            clock.signatures = self._channel.signatures

    def message_bytes(self, clock: Clock) -> dict[Message, int]:
        """How large the messages were that this rank sent in a step."""
        sent = [t.message for t, _, _ in clock.marks if isinstance(t, ProgramStep) and t.kind == "send"]
        sizes = {}
        for message in filter(None, sent):
            ends = message.source, message.destination
            edge = self._edges[ends if message.kind == "F" else ends[::-1]]
            book = edge.values if message.kind == "F" else edge.gradients
            sizes[message] = book.last[clock.signatures[message.microbatch]].n_bytes
        return sizes

    def _words(self, action: Action, error: BaseException) -> str:
        place = f"rank {self._placement[action.stage]}, stage {action.stage}, microbatch {action.microbatch}"
        words = f"{place}, action {action}: {type(error).__name__}: {error}"
        if isinstance(error, torch.OutOfMemoryError):
            words += f" ({self._memory_words(action.stage)})"
        return words

    def _memory_words(self, stage: int) -> str:
        rank, plan = self._placement[stage], self._plan
        predicted = sum(s.memory_bytes for s in plan.stages if s.rank == rank)
        limit = memory_limits(plan)[rank]
        limit_words = format_bytes(limit) if limit else "unknown"
        return (
            f"the plan predicted {format_bytes(predicted)} for rank {rank}'s stages, limit {limit_words}; "
            "use more microbatches, or plan with a lower memory_limit"
        )


_METHODS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
