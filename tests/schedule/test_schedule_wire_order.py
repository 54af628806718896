"""The wire order neither deadlocks nor crosses tensors, whatever a rank's calls block on."""

import collections
import itertools
import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import boundaries, schedules, stage_times

from autopipe.schedule import Action, Compute, Message, Recv, Send, Transfer, build, wire_order
from autopipe.schedule.templates import TEMPLATES

N_WIRES = int(os.environ.get("AUTOPIPE_WIRES", "150"))


class Crossed(Exception):
    """A receive got another tensor than it was for."""


class Deadlock(Exception):
    """Nobody can go on."""


def needs(edges, action):
    """The messages and local actions an action waits for."""
    m, s = action.microbatch, action.stage
    if action.kind == "F":
        return [Message("F", a, s, m) for a, b in edges if b == s]
    if action.kind in "BI":
        return [Message("B", b, s, m) for (a, b), back in edges.items() if a == s and back]
    return []


class Ranks:
    """Ranks running their programs: what each has computed and received is checked at every action."""

    def __init__(self, schedule, transfers, wire):
        chain = tuple(Transfer(s, s + 1) for s in range(schedule.n_stages - 1))
        self.schedule, self.wire = schedule, wire
        edges = collections.defaultdict(bool)
        for t in chain if transfers is None else transfers:
            edges[t.source, t.destination] |= t.differentiable
        self.needs = {action: needs(edges, action) for row in schedule.actions for action in row}
        self.done = [set() for _ in wire.programs]
        self.received = [set() for _ in wire.programs]

    def ready(self, rank, action):
        for message in self.needs[action]:
            if self.schedule.placement[message.source] == rank:
                assert self.is_made(rank, message), action
            elif message not in self.received[rank]:
                return False
        return True

    def is_made(self, rank, message):
        kinds = "F" if message.kind == "F" else "BI"
        return any((message.source, k, message.microbatch) in self.done[rank] for k in kinds)

    def compute(self, rank, action):
        self.done[rank].add((action.stage, action.kind, action.microbatch))

    def deliver(self, send_rank, send, recv_rank, recv):
        if send.message != recv.message:
            raise Crossed(f"{send} met {recv}")
        assert self.is_made(send_rank, send.message), f"{send} before it is computed"
        assert send.message not in self.received[recv_rank], f"{send} twice"
        self.received[recv_rank].add(send.message)

    def finish(self):
        for rank, program in enumerate(self.wire.programs):
            actions = [step.action for step in program if isinstance(step, Compute)]
            assert actions == list(self.schedule.actions[rank])
            assert len(self.done[rank]) == len(actions)
        place = self.schedule.placement
        messages = itertools.chain(*self.needs.values())
        wanted = collections.Counter(m for m in messages if place[m.source] != place[m.destination])
        assert collections.Counter(itertools.chain(*self.received)) == wanted


def run_blocking(ranks, rng):
    """Every send and receive blocks until the other side is at its own call for this pair."""
    programs = ranks.wire.programs
    at = [0] * len(programs)

    def current(rank):
        return programs[rank][at[rank]] if at[rank] < len(programs[rank]) else None

    moved = True
    while moved:
        moved = False
        for rank in rng.sample(range(len(programs)), len(programs)):
            step = current(rank)
            if isinstance(step, Compute) and ranks.ready(rank, step.action):
                ranks.compute(rank, step.action)
                at[rank] += 1
                moved = True
            elif isinstance(step, Send):
                other = current(step.peer)
                if isinstance(other, Recv) and other.peer == rank:
                    ranks.deliver(rank, step, step.peer, other)
                    at[rank] += 1
                    at[step.peer] += 1
                    moved = True
    if any(current(rank) is not None for rank in range(len(programs))):
        raise Deadlock([str(current(r)) for r in range(len(programs))])


def run_async(ranks, rng, per_peer, batched):
    """Calls return at once and queue on a stream; an action blocks until what it needs has arrived.

    ``per_peer``: a stream for each peer, else one for all. ``batched``: calls with no action between them
    are one group, whose parts go on side by side (those of a pair in order); a stream's next group waits.
    """
    programs = ranks.wire.programs
    at = [0] * len(programs)
    streams = [collections.defaultdict(collections.deque) for _ in programs]

    def blocked(rank):
        if at[rank] == len(programs[rank]):
            return True
        step = programs[rank][at[rank]]
        return isinstance(step, Compute) and not ranks.ready(rank, step.action)

    def advance(rank):
        step = programs[rank][at[rank]]
        if isinstance(step, Compute):
            ranks.compute(rank, step.action)
            at[rank] += 1
            return
        group = [step]
        for following in programs[rank][at[rank] + 1 :]:
            if not batched or isinstance(following, Compute):
                break
            group.append(following)
        at[rank] += len(group)
        streams[rank][step.peer if per_peer else "all"].append(group)

    while True:
        free = [rank for rank in range(len(programs)) if not blocked(rank)]
        pairs = matches(streams)
        if not free and not pairs:
            break
        if free and (not pairs or rng.random() < 0.5):
            advance(rng.choice(free))
        else:
            (rank, stream, send), (peer, other, recv) = rng.choice(pairs)
            ranks.deliver(rank, send, peer, recv)
            for queue, call in ((streams[rank][stream], send), (streams[peer][other], recv)):
                queue[0].remove(call)
                if not queue[0]:
                    queue.popleft()
    if any(at[r] < len(p) for r, p in enumerate(programs)) or any(q for s in streams for q in s.values()):
        raise Deadlock(at)


def matches(streams):
    """Calls that can meet now: each the first for the other side in its stream's first group."""
    heads = {}
    for rank, own in enumerate(streams):
        for name, queue in own.items():
            for call in queue[0] if queue else ():
                heads.setdefault((rank, call.peer), (rank, name, call))
    return [
        (call, heads[b, a])
        for (a, b), call in heads.items()
        if isinstance(call[2], Send) and (b, a) in heads and isinstance(heads[b, a][2], Recv)
    ]


WAYS = {
    "blocking": run_blocking,
    "one stream": lambda ranks, rng: run_async(ranks, rng, per_peer=False, batched=False),
    "stream per peer": lambda ranks, rng: run_async(ranks, rng, per_peer=True, batched=False),
    "batched": lambda ranks, rng: run_async(ranks, rng, per_peer=False, batched=True),
}


@settings(max_examples=N_WIRES, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), schedule=schedules(TEMPLATES), seed=st.integers(0, 2**16))
def test_no_deadlock_and_nothing_crossed(data, schedule, seed):
    """Boundaries, schedules and placements by the hundred, each over four kinds of channel."""
    transfers = data.draw(st.none() | boundaries(schedule.n_stages))
    wire = wire_order(schedule, transfers, times=data.draw(st.none() | stage_times(schedule.n_stages)))
    for way in WAYS.values():
        ranks = Ranks(schedule, transfers, wire)
        way(ranks, random.Random(seed))
        ranks.finish()


@settings(max_examples=200)
@given(data=st.data(), schedule=schedules())
def test_both_sides_see_one_order(data, schedule):
    wire = wire_order(schedule, data.draw(boundaries(schedule.n_stages)))
    for (a, b), messages in wire.pairs.items():
        for rank, peer in ((a, b), (b, a)):
            calls = [s for s in wire.programs[rank] if not isinstance(s, Compute) and s.peer == peer]
            assert tuple(c.message for c in calls) == messages
            assert all(isinstance(c, Send) == (schedule.placement[c.message.source] == rank) for c in calls)


def test_the_model_finds_a_deadlock_and_a_crossing():
    """What the properties above rest on: orders known to be wrong are told apart."""
    schedule = build("1f1b", 2, 2, 2)
    wire = wire_order(schedule)
    chain = (Transfer(0, 1),)
    late = [s for s in wire.programs[1] if isinstance(s, Compute)]
    late += [s for s in wire.programs[1] if not isinstance(s, Compute)]
    broken = type(wire)(wire.line, (wire.programs[0], tuple(late)), wire.pairs)
    for way in WAYS.values():
        with pytest.raises(Deadlock):
            way(Ranks(schedule, chain, broken), random.Random(0))
    swapped = list(wire.programs[1])
    recvs = [i for i, s in enumerate(swapped) if isinstance(s, Recv)]
    swapped[recvs[0]], swapped[recvs[1]] = swapped[recvs[1]], swapped[recvs[0]]
    broken = type(wire)(wire.line, (wire.programs[0], tuple(swapped)), wire.pairs)
    for way in WAYS.values():
        with pytest.raises(Crossed):
            way(Ranks(schedule, chain, broken), random.Random(0))


def test_receives_are_posted_before_the_action_under_way():
    """The second microbatch's values may arrive while the first is computed."""
    program = [str(s) for s in wire_order(build("forward-only", 2, 2, 3)).programs[1]]
    assert program == ["0→1F0?0", "0→1F1?0", "1F0", "0→1F2?0", "1F1", "1F2"]


def test_values_between_stages_of_one_rank_stay_off_the_wire():
    wire = wire_order(build("zbv", 2, 4, 2), [Transfer(0, 3), Transfer(1, 2), Transfer(0, 2)])
    assert {(m.source, m.destination) for m in wire.pairs[0, 1]} == {(0, 2), (2, 0)}
    assert wire_order(build("1f1b", 1, 3, 2)).pairs == {}
    assert wire_order(build("1f1b", 2, 2, 2), []).pairs == {}


def test_no_gradient_for_what_is_not_differentiable():
    wire = wire_order(build("1f1b", 2, 2, 2), [Transfer(0, 1, differentiable=False)])
    assert {m.kind for m in wire.pairs[0, 1]} == {"F"}
    mixed = wire_order(build("1f1b", 2, 2, 2), [Transfer(0, 1, differentiable=False), Transfer(0, 1)])
    assert [m.kind for m in mixed.pairs[0, 1]].count("B") == 2


def test_split_backward_sends_gradients_after_the_input_part():
    program = wire_order(build("zb-h1", 2, 2, 2)).programs[1]
    for i, step in enumerate(program):
        if isinstance(step, Send):
            before = [s.action for s in program[:i] if isinstance(s, Compute)]
            assert Action(1, "I", step.message.microbatch) == before[-1]
