"""The partitioning problem as plain integers, and what an assignment of items to stages costs in it.

Making a problem from an op graph is left to ``formulate``, merging items to ``contract``, answers to the
solvers. This module is the definition that every solver, bound and test is held against.

::

    minimise  max over ranks and shared network interfaces of  the sum of their loads
    load(s) = work(s) + transfers(s) + sync(s)          nothing hidden
            = max(work(s), transfers(s)) + sync(s)      overlap
    work(s)      = (forward + backward of its items and of the shares it touches, or what the host takes to
                 launch them all, if that is more) / speed(s)
                 + forward once more of what is recomputed: blocks, or the whole stage
                 + values it computes again rather than receive, each rounded
    transfers(s) = what it sends and receives, once per value (or per receiver)
    sync(s)      = summing the gradients of the shares it is its rank's first to touch and others touch too,
                   as long as over the slowest link between any two of these ranks
    memory(s)    = static + in flight × kept + workspace + 2 × received + sent
                   of what it computes again nothing is received; that takes its own workspace
    kept         = saved, what it keeps of values that it may compute again included,
                   less what recomputed blocks give up (the largest counts once as workspace)
                 + received, where that is held and what is saved is not

What is computed again rather than received, and what in backward, is what fits at the least largest load.
A rank's load is the sum of its stages'. A network interface that ranks share is loaded with all they send to
and receive from other hosts, each message by itself, and counts like a rank. What stays on a rank adds up
too, a tied parameter counted once; of what comes and goes the fullest moment of the schedule counts. A
device's speed divides the sums of a stage, which are then rounded: merging items changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from .blocks import cheapest_blocks, freed_bytes, redone_bytes
from .copies import Crossing, Moving, Priced, Taker, settle
from .pieces import HUGE, Array, Item, Net, Share, Stage, StageLoad, memory_bytes, most_work, scaled, stage_ns
from .precedence import closures
from .tally import Again, Tally, by_worth, whole_choices

__all__ = [
    "HUGE",
    "Array",
    "Item",
    "Net",
    "Problem",
    "Share",
    "Stage",
    "StageLoad",
    "memory_bytes",
    "most_work",
    "peak_bytes",
    "scaled",
    "stage_ns",
]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Items in a topological order, what runs between them, and the stages to put them in.

    Attributes
    ----------
    edges: (earlier, later) item pairs with earlier < later; stages must not decrease along them.
    pair_ns: prices of each net by (sender's rank, receiver's rank), (send, receive) where links differ; the
        nets' own prices are then the cheapest pair's, so every bound holds.
    link_of: the kind of link from rank to rank, where what shares cost hangs on it (``Share.link_ns``).
    sender_pays: ``once`` per value, or per ``receiver`` stage.
    holds_received: what items save lies elsewhere; a microbatch in flight keeps what its stage received.
    recompute: ``never``, ``always`` (whole stages) or ``auto``: where a rank would not fit otherwise, the
        cheapest blocks that let it, or whole stages. On a rank of several stages blocks go by rising time
        per byte given up, until it fits.
    allow_empty: stages may hold no item (the published model: fewer devices are allowed).
    moments: per rank, what its schedule lets be at once: (microbatches alive in each of its stages, which of
        them acts). Without them, all stages are at their most at once.
    """

    items: tuple[Item, ...]
    edges: tuple[tuple[int, int], ...]
    nets: tuple[Net, ...]
    shares: tuple[Share, ...]
    stages: tuple[Stage, ...]
    pair_ns: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] | None = None
    sender_pays: str = "once"
    overlap: bool = False
    recompute: str = "never"
    allow_empty: bool = False
    holds_received: bool = False
    moments: tuple[tuple[tuple[tuple[int, ...], int], ...], ...] = ()
    link_of: Mapping[tuple[int, int], int] | None = None

    @property
    def n_stages(self) -> int:
        return len(self.stages)

    @property
    def total_ns(self) -> int:
        """Work of all items, each once."""
        return sum(i.work_ns for i in self.items)

    @functools.cached_property
    def one_stage_per_rank(self) -> bool:
        return len({s.rank for s in self.stages}) == self.n_stages

    @functools.cached_property
    def is_separable(self) -> bool:
        """Whether a stage's load depends on its own items alone, and adds up, as the exact method needs."""
        paid_alike = not any(s.more_ns and len(s.items) > 2 for s in self.shares)
        alike = self.pair_ns is None and self.link_of is None
        once = alike and self.sender_pays == "once" and not self.stages_on
        alone = self.one_stage_per_rank and all(n.again_ns < 0 for n in self.nets)
        return alone and once and paid_alike and not self.has_hosts

    @functools.cached_property
    def has_hosts(self) -> bool:
        """Whether hosts may be slower than their devices, so that either may say what a stage takes."""
        return any(part.host_ns != (0, 0) for part in self.parts)

    @functools.cached_property
    def has_memory(self) -> bool:
        """Whether bytes decide anything: limits, or what is computed again."""
        return self.recompute != "never" or any(s.limit_bytes < HUGE for s in self.stages)

    @functools.cached_property
    def has_blocks(self) -> bool:
        """Whether parts of stages may be computed again."""
        return self.recompute == "auto" and any(i.blocks for i in self.items)

    @functools.cached_property
    def dearest_ns(self) -> int:
        """What the dearest item takes on the fastest device."""
        speed = max(s.speed for s in self.stages)
        works = (scaled(i.forward_ns, speed) + scaled(i.backward_ns, speed) for i in self.items)
        return max(works, default=0)

    @property
    def parts(self) -> tuple[Item | Share, ...]:
        """All that takes time: items, and what several stages hold."""
        return (*self.items, *self.shares)

    @functools.cached_property
    def stages_of(self) -> Mapping[int, tuple[int, ...]]:
        """The stages of each rank, in order."""
        ranks: dict[int, list[int]] = {}
        for s, stage in enumerate(self.stages):
            ranks.setdefault(stage.rank, []).append(s)
        return {rank: tuple(own) for rank, own in ranks.items()}

    @functools.cached_property
    def stages_on(self) -> Mapping[int, tuple[int, ...]]:
        """The stages that share each network interface."""
        nics = sorted({s.nic for s in self.stages if s.nic >= 0})
        return {nic: tuple(x for x, s in enumerate(self.stages) if s.nic == nic) for nic in nics}

    @functools.cached_property
    def shares_of(self) -> tuple[tuple[int, ...], ...]:
        """The shares each item touches."""
        out: list[list[int]] = [[] for _ in self.items]
        for x, share in enumerate(self.shares):
            for v in set(share.items):
                out[v].append(x)
        return tuple(map(tuple, out))

    @functools.cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """The items that must not come later than each item."""
        out: list[list[int]] = [[] for _ in self.items]
        for a, b in self.edges:
            out[b].append(a)
        return tuple(map(tuple, out))

    @functools.cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """The items that must not come earlier than each item."""
        out: list[list[int]] = [[] for _ in self.items]
        for a, b in self.edges:
            out[a].append(b)
        return tuple(map(tuple, out))

    @functools.cached_property
    def above(self) -> Sequence[int]:
        """Per item, as bits: itself and all that must not come later."""
        return closures(self.before, range(len(self.items)))

    @functools.cached_property
    def below(self) -> Sequence[int]:
        """Per item, as bits: itself and all that must not come earlier."""
        return closures(self.after, range(len(self.items) - 1, -1, -1))

    @functools.cached_property
    def directions(self) -> tuple[int, ...]:
        """Per net 1 where no taker may come before its maker, −1 where none may come after, 0 otherwise."""
        edges = set(self.edges)
        if all((n.producer, v) in edges for n in self.nets for v in n.consumers):
            return (1,) * len(self.nets)
        below = self.below
        ahead = (all(below[n.producer] >> v & 1 for v in n.consumers) for n in self.nets)
        back = (all(below[v] >> n.producer & 1 for v in n.consumers) for n in self.nets)
        return tuple(a - b for a, b in zip(ahead, back, strict=True))

    @functools.cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """The first and the last stage that each item may be in."""
        return tuple((item.first, self.last_of(v)) for v, item in enumerate(self.items))

    def last_of(self, item: int) -> int:
        """The last stage an item may be in."""
        last = self.items[item].last
        return self.n_stages - 1 if last < 0 else last

    def is_valid(self, stage_of: Sequence[int]) -> bool:
        """Whether order, pins and the need for every stage to hold an item are met."""
        if any(not first <= s <= last for s, (first, last) in zip(stage_of, self.windows, strict=True)):
            return False
        if any(stage_of[a] > stage_of[b] for a, b in self.edges):
            return False
        used = {stage_of[v] for v, i in enumerate(self.items) if i.ops}
        return self.allow_empty or len(used) == self.n_stages

    def loads(self, stage_of: Sequence[int]) -> tuple[StageLoad, ...]:
        """What each stage costs under an assignment, with the true prices of every transfer."""
        tallies = [Tally() for _ in self.stages]
        for v, item in enumerate(self.items):
            tallies[stage_of[v]].add(item)
        for share in self.shares:
            self._share(share, sorted({stage_of[v] for v in share.items}), tallies)
        crossings: list[Crossing] = []
        for n, net in enumerate(self.nets):
            here = stage_of[net.producer]
            takers = {stage_of[v] for v in net.consumers} - {here}
            if takers:
                self._transfer(n, here, sorted(takers), tallies, crossings)
        if crossings:
            return self._settled(tallies, crossings)
        out: dict[int, StageLoad] = {}
        for rank, own in self.stages_of.items():
            out |= zip(own, self._rank(rank, [tallies[s] for s in own]), strict=True)
        return tuple(out[s] for s in range(self.n_stages))

    def _settled(self, tallies: Sequence[Tally], crossings: Sequence[Crossing]) -> tuple[StageLoad, ...]:
        """The loads once it is chosen which stages compute values again."""

        @functools.cache
        def ranked(rank: int, rows: Moving) -> tuple[tuple[StageLoad, ...], int, int, bool]:
            """A rank's loads, their sum, by how much that may be less, and whether memory is short."""
            own = self.stages_of[rank]
            loads = self._rank(rank, [tallies[s].moved(row) for s, row in zip(own, rows, strict=True)])
            is_short = self.rank_bytes(rank, loads) > self.stages[own[0]].limit_bytes
            return loads, sum(x.load_ns for x in loads), sum(x.open_ns for x in loads), is_short

        def priced(paid: Moving) -> Priced:
            ranks = [ranked(rank, tuple(paid[s] for s in own)) for rank, own in self.stages_of.items()]
            wires = [t.wire_ns + row.wire_ns for t, row in zip(tallies, paid, strict=True)]
            total = max([row[1] for row in ranks] + self._sums(self.stages_on, wires))
            total += HUGE * sum(row[3] for row in ranks)
            return total, total - max(row[2] for row in ranks)

        chosen, paid, least = settle(crossings, priced, self.n_stages, self.sender_pays == "once")
        open_ns = priced(paid)[1] - least
        copies: list[tuple[str, ...]] = [()] * self.n_stages
        takers = ((c.net, taker.stage) for c in crossings for taker in c.takers)
        for (net, s), redo in zip(takers, chosen, strict=True):
            copies[s] += (self.nets[net].value,) * redo
        out: dict[int, StageLoad] = {}
        for rank, own in self.stages_of.items():
            out |= zip(own, ranked(rank, tuple(paid[s] for s in own))[0], strict=True)
            out[own[0]] = dataclasses.replace(out[own[0]], open_ns=out[own[0]].open_ns + open_ns)
        return tuple(dataclasses.replace(out[s], copies=copies[s]) for s in range(self.n_stages))

    def _share(self, share: Share, touched: Sequence[int], tallies: list[Tally]) -> None:
        first: dict[int, int] = {}
        for s in touched:
            tallies[s].add(share)
            if first.setdefault(self.stages[s].rank, s) != s and share.tied:
                tallies[s].extra_bytes += share.static_bytes
        price_ns = share.price_ns(len(first), self._kinds(first) if share.link_ns else ())
        for s in first.values():
            tallies[s].sync_ns += price_ns

    def _kinds(self, ranks: Iterable[int]) -> set[int]:
        """The kinds of links between these ranks, where they are told apart."""
        return {self.link_of[pair] for pair in itertools.permutations(ranks, 2)} if self.link_of else set()

    def _transfer(
        self, n: int, source: int, touched: Sequence[int], tallies: list[Tally], crossings: list[Crossing]
    ) -> None:
        """What stages pay that take a value from another; those of its maker's rank wait for no message."""
        net, here = self.nets[n], self.stages[source]
        takers = []
        for s in touched:
            there = self.stages[s]
            tallies[s].saved_bytes += net.kept_bytes
            pair = net.prices_ns((here.links[0], there.links[1]))
            if there.rank == here.rank:
                pair = 0, 0
            elif self.pair_ns:
                pair = self.pair_ns[here.rank, there.rank][n]
            takers.append(Taker(s, *pair, scaled(net.again_ns, there.speed), there.host != here.host))
        if net.again_ns >= 0:
            crossings.append(Crossing(n, source, tuple(takers), net.n_bytes, net.sent_bytes, net.again_bytes))
            return
        sends = [taker.send_ns for taker in takers]
        tallies[source].send_ns += max(sends) if self.sender_pays == "once" else sum(sends)
        tallies[source].sent_bytes += net.sent_bytes
        for taker in takers:
            tallies[taker.stage].received_bytes += net.n_bytes
            tallies[taker.stage].receive_ns += taker.receive_ns
            if taker.is_far:
                tallies[source].wire_ns += taker.send_ns
                tallies[taker.stage].wire_ns += taker.receive_ns

    def _rank(self, rank: int, tallies: Sequence[Tally]) -> tuple[StageLoad, ...]:
        """The loads of a rank's stages; those recompute that let it fit at the least load."""
        stages = [self.stages[s] for s in self.stages_of[rank]]

        def made(chosen: Sequence[Again]) -> tuple[StageLoad, ...]:
            return tuple(self._finish(*row) for row in zip(stages, tallies, chosen, strict=True))

        def short(loads: Sequence[StageLoad]) -> int:
            return self.rank_bytes(rank, loads) - stages[0].limit_bytes

        loads = made([self.recompute == "always"] * len(stages))
        if self.recompute != "auto" or short(loads) <= 0:
            return loads
        if len(stages) == 1:
            found = cheapest_blocks(tallies[0].blocks, stages[0].in_flight, short(loads))
            ways: Iterator[list[Again]] = iter([] if found is None else [[found.blocks]])
        else:
            ways = by_worth(stages, tallies)
        by_block = next((fit for way in ways if short(fit := made(way)) <= 0), None)
        whole = [made(way) for way in whole_choices(len(stages))]
        fitting = [way for way in (by_block, *whole) if way is not None and short(way) <= 0]
        chosen = min(fitting, key=lambda way: sum(load.load_ns for load in way), default=whole[-1])
        if len(stages) > 1 or found is None:
            return chosen
        open_ns = scaled(sum(b.forward_ns for b in found.blocks), stages[0].speed)
        open_ns -= scaled(found.least_ns, stages[0].speed)
        return (dataclasses.replace(chosen[0], open_ns=open_ns),)

    def _finish(self, stage: Stage, t: Tally, again: Again) -> StageLoad:
        recompute, blocks = (again, ()) if isinstance(again, bool) else (False, again)
        redone = scaled(sum(b.forward_ns for b in blocks), stage.speed)
        paces = [(scaled(f, stage.speed), scaled(b, stage.speed)) for f, b in t.paces_ns]
        forward, backward = max(((f, b + (f if recompute else redone)) for f, b in paces), key=sum)
        forward, backward = forward + t.again_ns, backward + t.again_ns * recompute
        saved_bytes = t.saved_bytes + t.received_bytes * self.holds_received
        kept, acting = saved_bytes - freed_bytes(blocks), t.workspace_bytes + redone_bytes(blocks)
        bytes_of = t.static_bytes, kept, acting, t.received_bytes, t.sent_bytes
        return StageLoad(
            forward,
            backward,
            t.send_ns,
            t.receive_ns,
            t.sync_ns,
            t.static_bytes,
            saved_bytes,
            t.workspace_bytes,
            t.received_bytes,
            memory_bytes(stage.in_flight, *bytes_of)[recompute],
            recompute,
            t.extra_bytes,
            stage_ns(forward + backward, t.send_ns + t.receive_ns, t.sync_ns, self.overlap),
            blocks,
            wire_ns=t.wire_ns,
        )

    def least(self, loads: Sequence[StageLoad]) -> int:
        """What :meth:`bottleneck` is at least, whatever a search among recomputations left open."""
        open_ns = max(sum(loads[s].open_ns for s in own) for own in self.stages_of.values())
        return self.bottleneck(loads) - open_ns

    def rank_bytes(self, rank: int, loads: Sequence[StageLoad]) -> int:
        """A rank's peak, from the loads of its stages."""
        if len(loads) == 1:
            return loads[0].memory_bytes
        stages = [self.stages[s] for s in self.stages_of[rank]]
        kept = [load.kept_bytes for load in loads]
        acting = [load.acting_bytes for load in loads]
        still = sum(
            load.memory_bytes - load.extra_bytes - stage.in_flight * k - a
            for load, stage, k, a in zip(loads, stages, kept, acting, strict=True)
        )
        return still + max(
            sum(n * k for n, k in zip(alive, kept, strict=True)) + acting[x]
            for alive, x in self.moments_of(rank)
        )

    def moments_of(self, rank: int) -> Sequence[tuple[tuple[int, ...], int]]:
        """What a rank's schedule lets be at once."""
        if self.moments:
            return self.moments[rank]
        most = tuple(self.stages[s].in_flight for s in self.stages_of[rank])
        return [(most, x) for x in range(len(most))]

    def bottleneck(self, loads: Sequence[StageLoad]) -> int:
        """The largest load of a rank, the sum over its stages, or of a network interface that ranks share.

        :data:`HUGE` or more where memory is short.
        """
        short = sum(
            self.rank_bytes(rank, [loads[s] for s in own]) > self.stages[own[0]].limit_bytes
            for rank, own in self.stages_of.items()
        )
        return max(self.loads_of(loads)) + short * HUGE

    def loads_of(self, loads: Sequence[StageLoad]) -> list[int]:
        """The load of each rank, then of each network interface that ranks share."""
        ranks = self._sums(self.stages_of, [load.load_ns for load in loads])
        return ranks + self._sums(self.stages_on, [load.wire_ns for load in loads])

    @staticmethod
    def _sums(groups: Mapping[int, Sequence[int]], each: Sequence[int]) -> list[int]:
        return [sum(each[s] for s in own) for own in groups.values()]


def peak_bytes(problem: Problem, v: int) -> int:
    """Workspace of a stage that holds an item, as far as the item decides it."""
    shares = (problem.shares[s].workspace_bytes for s in problem.shares_of[v])
    return max(problem.items[v].workspace_bytes, *shares, 0)
