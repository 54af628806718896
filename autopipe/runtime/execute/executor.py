"""Carries out a program: runs actions on workers, moves messages, times everything, names what fails.

Which steps the program has is left to ``program``; what all ranks make of a failure to ``failure``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

from ... import accelerator
from ...errors import AutopipeError, StepError
from ...memory import memory_limits
from ...plans import Plan
from ...schedule import Action, Message
from ...units import format_bytes
from ..stage.worker import Worker
from ..wire.boundary import Edge
from ..wire.channel import Channel, Gradients, Values
from ..wire.position import Doing, Position
from .program import Program, ProgramStep

__all__ = ["Clock", "Executor", "Line"]


Timed = Action | ProgramStep
Call = tuple[Callable[[], object], Doing, Timed | None]
"""One call of a :class:`Line`."""
W = TypeVar("W", Values, Gradients)


class Clock:
    """Start and end of each action of one step; on an accelerator taken on the device's stream.

    ``origin_s`` is this process's ``time.perf_counter()`` at the step's start. ``now`` is a mark in time;
    ``taken`` has one before the first call of ``line`` and one after each. Nothing else is kept of them: the
    garbage collector would go through it.
    ``signatures`` are those of the step's microbatches, which say how large messages are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.is_async = device, accelerator.is_async(device)
        self.now: Callable[[], Any] = (
            functools.partial(accelerator.mark, device) if self.is_async else time.perf_counter
        )
        self.line = Line((), (), ())
        self.taken: list[Any] = []
        self.signatures: Sequence[int] = ()
        self.origin_s = time.perf_counter()
        self._start = self._end = self.now()

    @property
    def marks(self) -> list[tuple[Timed, Any, Any]]:
        """(what, mark before, mark after) of all that is timed: actions, sends, waits for messages."""
        spans = zip(self.line.timed, itertools.pairwise(self.taken), strict=False)
        return [(what, before, after) for what, (before, after) in spans if what is not None]

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


@dataclasses.dataclass(frozen=True)
class Line:
    """A program as plain calls in a line.

    ``doings`` are what each is in words, and the rank it waits for or -1; ``timed`` what it is timed as, if
    at all.
    """

    calls: tuple[Callable[[], object], ...]
    doings: tuple[Doing, ...]
    timed: tuple[Timed | None, ...]


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
        self._ways: dict[tuple[type, Edge], Values | Gradients] = {}

    def compile(self, program: Program) -> Line:
        """A program as plain calls, with a wait for each message an action needs in front of it.

        Between hosts' processors what comes next from a rank is asked for as soon as what came before it is
        here: in the same order, so what crosses stays as the schedule has it.
        """
        calls: list[Call] = []
        taken: dict[int, int] = {}
        ahead: dict[int, Call] = {}
        for step in program:
            if step.action is not None:
                for call in self._waits(step.action):
                    taken[call[1][1]] = len(calls)
                    calls.append(call)
                calls.append((self._act(step.action), (step.action, -1), step.action))
            elif step.gather is not None:
                replicas, is_end = self._workers[step.gather.stage].replicas, step.gather.is_end
                calls.append((replicas.let_go if is_end else replicas.gather, (step, -1), None))
            else:
                is_send = step.kind == "send"
                if not is_send and self._channel is not None and self._channel.is_of_hosts:
                    place = taken.pop(step.peer, None)
                    if place is not None:
                        ahead[place] = self._move(step, "recv_ahead"), (step, -1), None
                calls.append((self._move(step, step.kind), (step, step.peer), step if is_send else None))
        calls = [c for i, call in enumerate(calls) for c in ((call, ahead[i]) if i in ahead else (call,))]
        return Line(*map(tuple, zip(*calls, strict=True))) if calls else Line((), (), ())

    def _act(self, action: Action) -> Callable[[], None]:
        method = getattr(self._workers[action.stage], _METHODS[action.kind])
        return functools.partial(method, action.microbatch)

    def _waits(self, action: Action) -> Iterator[Call]:
        worker, m = self._workers[action.stage], action.microbatch
        if action.kind == "F":
            for edge in worker.edges_in:
                if edge.source not in self._workers:
                    values = self._way(Values, edge, edge.source)
                    take = functools.partial(values.take, worker.accept, m)
                    yield take, (action, values.peer), _arrival("F", edge.source, action, values.peer)
        elif action.kind != "W":
            for edge in worker.edges_out:
                if edge.destination not in self._workers:
                    grads = self._way(Gradients, edge, edge.destination)
                    take = functools.partial(grads.take, m)
                    yield take, (action, grads.peer), _arrival("B", edge.destination, action, grads.peer)

    def _way(self, kind: type[W], edge: Edge, other: int) -> W:
        """The way of messages of a kind along an edge, whose other end is a stage elsewhere."""
        assert self._channel is not None
        key = kind, edge
        if key not in self._ways:
            self._ways[key] = kind(self._channel, edge, self._placement[other])
        return cast(W, self._ways[key])

    def _move(self, step: ProgramStep, how: str) -> Callable[[], None]:
        """What a step that moves a message calls of its way: ``send``, ``recv`` or ``recv_ahead``."""
        message = step.message
        assert message is not None
        ends = message.source, message.destination
        other = ends[step.kind == "send"]
        way = (
            self._way(Values, self._edges[ends], other)
            if message.kind == "F"
            else self._way(Gradients, self._edges[ends[::-1]], other)
        )
        return functools.partial(getattr(way, how), message.microbatch)

    def run(self, line: Line, clock: Clock) -> None:
        """Make the calls of a program. Raises :class:`StepError` naming stage, microbatch and action."""
        position, now, mark = self._position, clock.now, clock.taken.append
        clock.line = line
        position.follow(line.doings, clock.taken if clock.is_async else ())
        numbered = enumerate(line.calls, position.index + 1)
        mark(now())
        try:
            for position.index, call in numbered:
                call()
                mark(now())
        except AutopipeError:
            raise
        except Exception as error:
            what = line.timed[len(clock.taken) - 1]
            if not isinstance(what, Action):
                raise
            raise StepError(self._words(what, error)) from error
        finally:
            position.settle()
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


def _arrival(kind: str, source: int, action: Action, peer: int) -> ProgramStep:
    return ProgramStep("recv", message=Message(kind, source, action.stage, action.microbatch), peer=peer)


_METHODS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
