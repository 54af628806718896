"""The order of messages between ranks: one stream per pair of ranks that cannot deadlock or cross tensors.

Moving the tensors is left to ``runtime``.

NCCL's point-to-point calls carry no tags: between two ranks they match in the order they are issued, both
directions in one stream, and a send completes only with its receive. So all orders are read off one global
line of events: compute actions at the time they end in a simulated run, each message right after the action
that produces it. Each rank's program is that line restricted to the rank. The first event of the line that
has not happened can always happen, since everything either side does before it already has: no deadlock,
even when every call blocks and all of a rank's peers share one stream. And as an action stands on the line
where it ends, what arrives while it runs is received by a call posted before it starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from .actions import KINDS, Action, F, Schedule, StageTimes, Transfer, W
from .clock import Edges, run

__all__ = ["Compute", "Message", "Recv", "Send", "Wire", "wire_order"]


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Message:
    """All values (or gradients) one stage sends another for one microbatch, in the order of its transfers.

    ``kind`` is ``"F"`` for values, sent from an earlier stage to a later, and ``"B"`` for the gradients of
    the differentiable ones among them on their way back: then ``source`` is the later stage.
    """

    kind: str
    source: int
    destination: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.source}→{self.destination}{self.kind}{self.microbatch}"


@dataclasses.dataclass(frozen=True, slots=True)
class Compute:
    """Run the action; blocks until the messages it needs have arrived."""

    action: Action

    def __str__(self) -> str:
        return str(self.action)


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """Start sending ``message`` to rank ``peer``."""

    message: Message
    peer: int

    def __str__(self) -> str:
        return f"{self.message}!{self.peer}"


@dataclasses.dataclass(frozen=True, slots=True)
class Recv:
    """Start receiving ``message`` from rank ``peer``."""

    message: Message
    peer: int

    def __str__(self) -> str:
        return f"{self.message}?{self.peer}"


Step = Compute | Send | Recv


@dataclasses.dataclass(frozen=True)
class Wire:
    """What each rank does, messages included.

    Attributes
    ----------
    line: the global line of events: each action where it ends, each message after the action it is from.
    programs: per rank, its steps in order. Messages between two stages of one rank are not in it.
    pairs: for each pair of ranks (lower first) that talk, all their messages in the one order both see.
    """

    line: tuple[Action | Message, ...]
    programs: tuple[tuple[Step, ...], ...]
    pairs: Mapping[tuple[int, int], tuple[Message, ...]]


def wire_order(
    schedule: Schedule,
    transfers: Iterable[Transfer] | None = None,
    *,
    times: Sequence[StageTimes] | None = None,
) -> Wire:
    """The programs of a schedule's ranks for what crosses between its stages.

    ``transfers`` may skip stages, repeat pairs and go to several consumers; several between the same two
    stages make one message. For None, each stage hands one differentiable value to the next. ``times``
    (default F = I = W = 1, B = 2) shape the order, never its soundness. O(actions + messages).
    """
    edges = Edges.of(schedule, transfers)
    ends = run(schedule, times or (StageTimes(),) * schedule.n_stages, edges).ends_in_order()
    line = sorted(range(len(ends)), key=ends.__getitem__)
    events: list[Action | Message] = []
    programs: list[list[Step]] = [[] for _ in schedule.actions]
    pairs: dict[tuple[int, int], list[Message]] = {}
    for rank, code, m in map(schedule.order.__getitem__, line):
        stage, kind = code >> 2, code & 3
        action = Action(stage, KINDS[kind], m)
        events.append(action)
        programs[rank].append(Compute(action))
        if kind == W:
            continue
        for other in edges.forward[stage] if kind == F else edges.backward[stage]:
            peer = schedule.placement[other]
            if peer != rank:
                message = Message("F" if kind == F else "B", stage, other, m)
                events.append(message)
                programs[rank].append(Send(message, peer))
                programs[peer].append(Recv(message, rank))
                pairs.setdefault((min(rank, peer), max(rank, peer)), []).append(message)
    streams = {pair: tuple(found) for pair, found in pairs.items()}
    return Wire(tuple(events), tuple(map(tuple, programs)), streams)
