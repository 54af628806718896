"""What every plan must do for a microbatch, from which steps are bounded: sums, and the longest ways of data.

The bounds themselves are left to ``proof.step``.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from ...costs import CostTable
from ...graph import OpGraph
from ..proof.step import Work

__all__ = ["work_of"]


def work_of(
    graph: OpGraph,
    costs: CostTable,
    clones: Collection[str],
    copied: Collection[str],
    sizes: Mapping[str, int],
    *,
    training: bool,
    may_recompute: bool,
) -> Work:
    """The work of ops that are not clones; ``copied`` values, which may be made again, are off all paths."""
    forward = dict.fromkeys((op.name for op in graph.ops), 0.0)
    both, came_from = dict(forward), dict[str, str]()
    dearest = total = forwards = backwards = 0.0
    takes = graph.takes
    waits = any(costs[op.name].host_s for op in graph.compute)
    for op in graph.compute:
        cost = costs[op.name]
        own = cost.forward_s + cost.backward_s * training
        if op.name in clones:
            own_path = 0.0
        else:
            total, dearest = total + own, max(dearest, own)
            # a stage goes at its host's pace where both ways together take longer at that
            own_path = min(cost.forward_s, cost.host_forward_s) if waits else cost.forward_s
            back_s = min(cost.backward_s, cost.host_backward_s) if waits else cost.backward_s
            forwards, backwards = forwards + own_path, backwards + back_s * training
        if op.name in copied:
            continue
        forward[op.name] = own_path + max((forward[u] for u in takes[op.name]), default=0.0)
        if op.requires_grad and training and op.name not in clones:
            longest = max(takes[op.name], key=both.__getitem__, default="")
            both[op.name] = own + both.get(longest, 0.0)
            if both.get(longest):
                came_from[op.name] = longest
    path = [max(both, key=both.__getitem__, default="")]
    while path[-1] in came_from:
        path.append(came_from[path[-1]])
    runs, own_s, anywhere_s = 1 + may_recompute, dict[str, float](), 0.0
    for op in graph.compute:
        cost = costs[op.name]
        once_s = max(cost.forward_s, cost.host_forward_s)
        anywhere_s += runs * once_s * (op.name in clones or op.name in copied)
        if op.name not in clones:
            ways_s = (cost.forward_s, cost.backward_s), (cost.host_forward_s, cost.host_backward_s)
            own_s[op.name] = (runs - 1) * once_s + max(fore + back * training for fore, back in ways_s)
    aside_s = anywhere_s + _aside_s(graph, takes, path[::-1], own_s)
    longest_s, longest_both_s = (max(ways.values(), default=0.0) for ways in (forward, both))
    hop_bytes = min((sizes[name] for name in path[1:]), default=0)
    paths_ns = 1e9 * longest_s, 1e9 * longest_both_s
    sums_ns = 1e9 * total, 1e9 * max(forwards, backwards), 1e9 * dearest
    return Work(*sums_ns, *paths_ns, 1e9 * aside_s, hop_bytes)


def _aside_s(
    graph: OpGraph, takes: Mapping[str, Sequence[str]], path: Sequence[str], own_s: Mapping[str, float]
) -> float:
    """The most that a stage holds which has no op of a path.

    It lies between the stages of two of its neighbouring ops, so that nothing the first takes is in it, nor
    anything made of the second.
    """
    place = {name: x for x, name in enumerate(path)}
    # per op, the last op of the path that it is made of, and the first that is made of it
    after = dict.fromkeys((op.name for op in graph.ops), -1)
    before = dict.fromkeys(after, len(path))
    for op in graph.ops:
        after[op.name] = place.get(op.name, max((after[u] for u in takes[op.name]), default=-1))
    for op in reversed(graph.ops):
        first = min((before[c] for c in graph.consumers[op.name]), default=len(path))
        before[op.name] = place.get(op.name, first)
    changes = [0.0] * (len(path) + 2)
    for name, seconds in own_s.items():
        if name not in place and after[name] < before[name]:
            # behind the path's op x, from the last that it is made of to the one ahead of what is made of it
            changes[after[name] + 1] += seconds
            changes[before[name] + 1] -= seconds
    return max(itertools.accumulate(changes))
