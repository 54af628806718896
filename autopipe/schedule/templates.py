"""The known schedules, for any number of microbatches and any stage count that fits their placement.

Each template is written for *slots*: P ranks with v slots each, the chain of stages laid over them. Slots
without a stage are left out of the pattern (what remains keeps its order, so it cannot deadlock); more
stages than slots share one, and run one after another. Schedules from measured times are left to
``cost_aware``.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from ..errors import InputError
from .actions import Action, Kind, Schedule, may_overlap
from .list_scheduling import Rules, list_schedule

__all__ = ["BREADTH_FIRST", "COST_AWARE", "NAMES", "SPLIT", "TEMPLATES", "placement", "template"]

Cell = tuple[int, Kind, int]
"""(slot, kind, microbatch) of a pattern."""
Pattern = Callable[[int, int, int, int], Iterator[Cell]]
"""(position of the rank in the chain, n_ranks, slots per rank, n_microbatches) → its cells in order."""

TEMPLATES = (
    "forward-only",
    "gpipe",
    "1f1b",
    "interleaved",
    "looped-bfs",
    "zb-h1",
    "zb-h2",
    "zbv",
    "dualpipev",
)
COST_AWARE = "cost-aware"
NAMES = (*TEMPLATES, COST_AWARE)
"""Every name ``build`` knows."""
SPLIT = frozenset({"zb-h1", "zb-h2", "zbv", "dualpipev"})
"""The names that split backward into I and W."""
LOOPED = frozenset({"interleaved", "looped-bfs", "forward-only"})
BREADTH_FIRST = {"1f1b": "gpipe", "interleaved": "looped-bfs"}
"""What runs every forward before a backward, in the places of another schedule."""
V_SHAPED = frozenset({"zbv", "dualpipev"})


@functools.lru_cache(maxsize=4096)
def placement(name: str, n_ranks: int, n_stages: int) -> tuple[int, ...]:
    """The rank of each stage: looped for interleaved, looped-bfs and forward-only, a V for zbv and dualpipev,
    else blocks. Cost-aware takes the V where there are two stages per rank, else loops.

    Raises :class:`InputError` for an unknown name or more ranks than stages.

    >>> placement("interleaved", 2, 4), placement("zbv", 2, 4), placement("1f1b", 2, 4)
    ((0, 1, 0, 1), (0, 1, 1, 0), (0, 0, 1, 1))
    """
    if name not in NAMES:
        raise InputError(f"unknown schedule {name!r}; known are {', '.join(NAMES)}")
    if not 1 <= n_ranks <= n_stages:
        raise InputError(
            f"{n_stages} stages on {n_ranks} ranks leave a rank without one; use 1 to {n_stages} ranks, "
            f"or at least {n_ranks} stages"
        )
    if name in LOOPED or (name == COST_AWARE and n_stages != 2 * n_ranks):
        return tuple(s % n_ranks for s in range(n_stages))
    n_slots = 2 * n_ranks if name in V_SHAPED or name == COST_AWARE else n_ranks
    slots = [s * n_slots // n_stages if n_stages > n_slots else s for s in range(n_stages)]
    return tuple(slot if slot < n_ranks else 2 * n_ranks - 1 - slot for slot in slots)


def template(name: str, placed: tuple[int, ...], n_ranks: int, n_microbatches: int) -> Schedule:
    """The named schedule over stages placed as given.

    Where the pattern does not fit the placement (neither blocks, loops nor a V, whatever the ranks' order)
    or a V has too few microbatches to fill, a list schedule takes its place: backward first, and no more in
    flight than the template allows.
    """
    slots = _slots(name, placed, n_ranks)
    if name in ("forward-only", "gpipe", "looped-bfs"):
        return _assemble(name, placed, n_microbatches, slots, _breadth_first(slots, name, n_microbatches))
    fills = name not in V_SHAPED or n_microbatches >= 2 * n_ranks - (name == "zbv")
    if name == "zb-h2" or not fills or not _fits(name, slots, n_ranks):
        rules = _rules(name, placed, slots, n_ranks, n_microbatches)
        return list_schedule(name, placed, n_ranks, n_microbatches, rules)
    per_rank = 2 if name in V_SHAPED else -(-len(slots) // n_ranks)
    pattern = _PATTERNS[name]
    cells = {slots[p][0]: list(pattern(p, n_ranks, per_rank, n_microbatches)) for p in range(n_ranks)}
    schedule = _assemble(name, placed, n_microbatches, slots, [cells[r] for r in range(n_ranks)])
    return _overlapping(schedule, slots[n_ranks - 1][0]) if name == "dualpipev" else schedule


def _slots(name: str, placed: Sequence[int], n_ranks: int) -> list[tuple[int, list[int]]]:
    """The stages in runs on one rank: (rank, stages) of each slot; at the turn of a V one run makes two."""
    slots: list[tuple[int, list[int]]] = []
    for stage, rank in enumerate(placed):
        if slots and slots[-1][0] == rank and n_ranks > 1:
            slots[-1][1].append(stage)
        else:
            slots.append((rank, [stage]))
    if n_ranks == 1:
        half = -(-len(placed) // 2) if name in V_SHAPED else len(placed)
        stages = list(range(len(placed)))
        return [(0, part) for part in (stages[:half], stages[half:]) if part]
    if name in V_SHAPED and len(slots) >= n_ranks and len(slots[n_ranks - 1][1]) > 1:
        rank, stages = slots[n_ranks - 1]
        half = -(-len(stages) // 2)
        slots[n_ranks - 1 : n_ranks] = [(rank, stages[:half]), (rank, stages[half:])]
    return slots


def _fits(name: str, slots: list[tuple[int, list[int]]], n_ranks: int) -> bool:
    ranks = [rank for rank, _ in slots]
    chain = ranks[:n_ranks]
    if len(set(chain)) < n_ranks:
        return False
    if name == "interleaved":
        return all(rank == chain[i % n_ranks] for i, rank in enumerate(ranks))
    if name in V_SHAPED:
        return ranks == (chain + chain[::-1])[: len(ranks)]
    return len(ranks) == n_ranks


def _rules(
    name: str, placed: Sequence[int], slots: list[tuple[int, list[int]]], n_ranks: int, n: int
) -> Rules:
    """What the template may hold: 1F1B's first rank everywhere, for ZB-H2 twice that to fill the warm-up.

    In a V a rank may hold P microbatches per stage, in which of its stages does not matter. ZB-H2 is from
    Qi et al., "Zero Bubble Pipeline Parallelism" (2024).
    """
    n_stages = len(placed)
    slot_of = {s: i for i, (_, stages) in enumerate(slots) for s in stages}
    to_end = [len(slots) - slot_of[s] for s in range(n_stages)]
    if name == "zb-h2":
        return Rules(True, tuple(2 * k - 1 for k in to_end), (2 * len(slots) - 1,) * n_stages)
    if name in V_SHAPED:
        budget = tuple(n_ranks * list(placed).count(rank) for rank in range(n_ranks))
        return Rules(
            split=True,
            active=(n,) * n_stages,
            held=(n,) * n_stages,
            patience=0.0,
            saved_bytes=(1,) * n_stages,
            budget_bytes=budget,
        )
    return Rules(name in SPLIT, tuple(to_end), (len(slots),) * n_stages)


def _assemble(
    name: str,
    placed: tuple[int, ...],
    n_microbatches: int,
    slots: list[tuple[int, list[int]]],
    cells: Sequence[list[Cell]],
) -> Schedule:
    """Slots become their stages, in order forward and reversed backward; slots without any are left out."""
    rows = []
    for row in cells:
        actions: list[Action] = []
        for slot, kind, m in row:
            if slot < len(slots):
                stages = slots[slot][1]
                actions += [Action(s, kind, m) for s in (stages if kind in "FW" else reversed(stages))]
        rows.append(tuple(actions))
    return Schedule(name, placed, n_microbatches, tuple(rows))


def _overlapping(schedule: Schedule, turn: int) -> Schedule:
    """DualPipeV's pairs: a whole backward right behind a forward of another microbatch.

    Not the first pair of the rank at the V's turn: all others wait for its backward alone.
    """
    marked: set[Action] = set()
    for rank, row in enumerate(schedule.actions):
        pairs = [b for a, b in itertools.pairwise(row) if may_overlap(a, b) and b.kind == "B"]
        marked.update(pairs[1:] if rank == turn else pairs)
    return dataclasses.replace(schedule, overlapped=frozenset(marked))


def _breadth_first(slots: list[tuple[int, list[int]]], name: str, n: int) -> list[list[Cell]]:
    """All microbatches through a slot before the next; then backward the same way round."""
    rows: list[list[Cell]] = [[] for _ in {rank for rank, _ in slots}]
    for slot, (rank, _) in enumerate(slots):
        rows[rank] += [(slot, "F", m) for m in range(n)]
    if name != "forward-only":
        for slot, (rank, _) in reversed(list(enumerate(slots))):
            rows[rank] += [(slot, "B", m) for m in range(n)]
    return rows


def _one_f_one_b(p: int, n_ranks: int, per_rank: int, n: int) -> Iterator[Cell]:
    """Megatron-LM's order: warm up, then one forward and one backward in turn, then drain.

    Microbatches go in groups of at least P, as equal as can be and the larger first, a group through all of
    a rank's slots before the next group. With one slot per rank this is plain 1F1B (PipeDream-flush).
    """
    rounds = max(1, n // n_ranks)
    size, larger = divmod(n, rounds)
    ends = [(g + 1) * size + min(g + 1, larger) for g in range(rounds)]
    groups = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    slots = [slot * n_ranks + p for slot in range(per_rank)]
    forward: list[Cell] = [(slot, "F", m) for group in groups for slot in slots for m in group]
    backward: list[Cell] = [(slot, "B", m) for group in groups for slot in reversed(slots) for m in group]
    ahead = n_ranks - 1 - p
    warmup = min(len(forward), ahead if per_rank == 1 else 2 * ahead + (per_rank - 1) * len(groups[0]))
    yield from forward[:warmup]
    for pair in zip(forward[warmup:], backward, strict=False):
        yield from pair
    yield from backward[len(forward) - warmup :]


def _zb_h1(p: int, n_ranks: int, per_rank: int, n: int) -> Iterator[Cell]:
    """ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism" (2024): 1F1B's peak, a third of its bubble.

    1F1B with B cut to I; rank p runs each W p microbatches late, so that W fills what would be idle.
    """
    warmup, done = min(n, n_ranks - p), 0
    yield from ((p, "F", m) for m in range(warmup))
    for m in range(n):
        yield p, "I", m
        if m >= p:
            yield p, "W", done
            done += 1
        if warmup + m < n:
            yield p, "F", warmup + m
    yield from ((p, "W", m) for m in range(done, n))


class _Counter:
    """Hands out each (slot, kind)'s microbatches in order, and its weight gradients oldest first."""

    def __init__(self) -> None:
        self.next: dict[tuple[int, Kind], int] = collections.defaultdict(int)
        self.pending: collections.deque[int] = collections.deque()

    def phase(self, times: int, *cells: tuple[int, Kind]) -> Iterator[Cell]:
        """The cells in turn, so many times. A full backward counts as both its parts."""
        for _ in range(times):
            for slot, kind in cells:
                yield self._take(slot, kind)

    def _take(self, slot: int, kind: Kind) -> Cell:
        key: tuple[int, Kind] = (slot, "I" if kind == "B" else kind)
        m = self.next[key]
        self.next[key] += 1
        if kind == "B":
            self.next[slot, "W"] += 1
        elif kind == "I":
            self.pending.append(slot)
        return slot, kind, m

    def weight(self) -> Iterator[Cell]:
        """The weight gradient that has waited longest, if any does."""
        if self.pending:
            yield self._take(self.pending.popleft(), "W")


def _zbv(p: int, n_ranks: int, per_rank: int, n: int) -> Iterator[Cell]:
    """ZB-V of Qi et al., "Pipeline Parallelism with Controllable Memory" (2024)."""
    down, up, take = p, 2 * n_ranks - 1 - p, _Counter()
    ahead = n_ranks - p
    yield from take.phase(2 * ahead - 1, (down, "F"))
    yield from take.phase(p, (up, "F"), (down, "F"))
    yield from take.phase(ahead, (up, "F"), (up, "I"), (up, "W"))
    while take.next[up, "F"] < n:
        if take.next[down, "F"] < n:
            yield from take.phase(1, (down, "F"))
        yield from take.phase(1, (down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W"))
    yield from take.phase(p, (down, "I"), (up, "I"))
    yield from take.phase(ahead, (down, "I"), (down, "W"))
    for slot in (up, down):
        yield from take.phase(n - take.next[slot, "W"], (slot, "W"))


def _dualpipev(p: int, n_ranks: int, per_rank: int, n: int) -> Iterator[Cell]:
    """DualPipeV of DeepSeek-AI (2025): DualPipe folded into a V, so that each rank holds one copy.

    Forward and backward of different microbatches stand next to each other, where a runtime with two
    compute streams could overlap them; run one after another they keep the order.
    """
    down, up, take = p, 2 * n_ranks - 1 - p, _Counter()
    ahead = n_ranks - 1 - p
    yield from take.phase(2 * ahead, (down, "F"))
    yield from take.phase(p + 1, (down, "F"), (up, "F"))
    for _ in range(ahead):
        yield from take.phase(1, (up, "I"))
        yield from take.weight()
        yield from take.phase(1, (up, "F"))
    yield from take.phase(n - 2 * n_ranks + p + 1, (down, "F"), (up, "B"), (up, "F"), (down, "B"))
    yield from take.phase(ahead, (up, "B"), (up, "F"), (down, "B"))
    # From halfway through the drain on, weight gradients are put off to fill the bubbles at its end.
    kinds: list[Kind] = ["B" if i <= p else "I" for i in range(2 * (p + 1))]
    for i in range(p + 1):
        yield from take.phase(1, (up, kinds[2 * i]), (down, kinds[2 * i + 1]))
    for _ in range(ahead):
        yield from take.weight()
        yield from take.phase(1, (down, kinds[-1]))
    for _ in range(p + 1):
        yield from take.weight()


_PATTERNS: dict[str, Pattern] = {
    "1f1b": _one_f_one_b,
    "interleaved": _one_f_one_b,
    "zb-h1": _zb_h1,
    "zbv": _zbv,
    "dualpipev": _dualpipev,
}
