"""Tied parameters over unlike links: what their sums cost hangs on who holds them, and on their size.

Held against a search through all assignments that prices them for itself.
"""

import dataclasses
import itertools
import random

import pytest

from autopipe.costs import CostTable, OpCost
from autopipe.graph import Op, OpGraph, ParameterSpec, TensorSpec
from autopipe.hardware import Cluster, Device, Link
from autopipe.simulator import simulate
from autopipe.solve import Item, Problem, Share, Stage, solve

VALUE_BYTES = 8 * 64 * 4
LATE, NARROW = Link(1e-3, 1e12), Link(1e-6, 1e6)
"""The first is slow for few bytes, the second for many."""


def a_line(held_by, rows, works):
    """Ops in a line; those of ``held_by`` share one weight of ``rows`` × 64."""
    out = (TensorSpec((8, 64), "float32", True),)
    ops = [Op("x", "input", "x", outputs=(TensorSpec((8, 64), "float32"),))]
    ops += [
        Op(f"o{v}", "module", f"m.{v}", f"m.{v}", outputs=out, parameters=("w",) if v in held_by else ())
        for v in range(len(works))
    ]
    ops.append(Op("output", "output", "output"))
    edges = tuple(itertools.pairwise(op.name for op in ops))
    weight = ParameterSpec("w", ("w", "v"), (rows, 64), "float32")
    costs = {f"o{v}": OpCost(w * 1e-6, 2 * w * 1e-6) for v, w in enumerate(works)}
    return OpGraph("Line", tuple(ops), edges, parameters=(weight,)), CostTable(costs)


def dearest(cluster, ranks, n_bytes):
    """Seconds of a ring's 2 (n − 1) pieces over the slowest way between two of the ranks."""
    n, links = len(ranks), [cluster.link(a, b) for a in ranks for b in ranks if a != b]
    return max((2 * (n - 1) * (k.latency_s + n_bytes / n / k.bandwidth_bytes_s) for k in links), default=0.0)


def bottleneck_ns(stage_of, placed, works, held_by, n_bytes, cluster, n_microbatches):
    """The fullest rank of an assignment, by hand."""
    n_stages = len(placed)
    work, moved, summed = [0] * n_stages, [0] * n_stages, [0] * n_stages
    for v, w in enumerate(works):
        work[stage_of[v]] += 3000 * w
    for a, b in itertools.pairwise(stage_of):
        if placed[a] != placed[b]:
            seconds = 2 * cluster.link(placed[a], placed[b]).seconds(VALUE_BYTES)
            moved[a] += round(seconds * 1e9)
            moved[b] += round(seconds * 1e9)
    first = {}
    for s in sorted({stage_of[v] for v in held_by}):
        first.setdefault(placed[s], s)
    for s in first.values():
        summed[s] += round(dearest(cluster, [*first], n_bytes) / n_microbatches * 1e9)
    loads = [max(w, m) + t for w, m, t in zip(work, moved, summed, strict=True)]
    return max(sum(load for s, load in enumerate(loads) if placed[s] == r) for r in set(placed))


def drawn(seed):
    """A line of four to six ops, a weight that two to four of them hold, and two to four unlike ranks."""
    draw = random.Random(seed)
    n_ranks = draw.randint(2, 4)
    several = n_ranks < 3 and draw.random() < 0.5
    n_stages = n_ranks * (1 + several)
    works = [draw.randint(1, 900) for _ in range(draw.randint(n_stages, 6))]
    held_by = sorted(draw.sample(range(len(works)), draw.randint(2, min(4, len(works)))))
    hosts = tuple(sorted(draw.randint(0, 1) for _ in range(n_ranks)))
    kinds = [LATE, NARROW, Link(1e-5, 1e9)]
    pairs = draw.sample([*itertools.permutations(range(n_ranks), 2)], draw.randint(0, 2))
    links = {pair: draw.choice(kinds) for pair in pairs}
    cluster = Cluster((Device(),) * n_ranks, hosts, draw.choice(kinds), draw.choice(kinds), links)
    options = {"n_stages": n_stages, "n_microbatches": draw.choice((1, 4, 8))}
    options["schedule"] = "interleaved" if several else "1f1b"
    return held_by, draw.choice((1, 4, 64, 4096)), works, cluster, options


@pytest.mark.parametrize("seed", range(80))
def test_the_bottleneck_is_the_least_of_all_assignments_priced_by_hand(seed):
    held_by, rows, works, cluster, options = drawn(seed)
    graph, costs = a_line(held_by, rows, works)
    plan = solve(graph, costs, cluster, time_limit_s=30.0, **options)
    given = plan.placement, works, held_by, rows * 64 * 4, cluster, plan.n_microbatches
    stage_of = [plan.stages_of[f"o{v}"][0] for v in range(len(works))]
    assert round(plan.bounds.bottleneck_s * 1e9) == bottleneck_ns(stage_of, *given)
    cuts = itertools.combinations(range(1, len(works)), plan.n_stages - 1)
    each = ([sum(v >= cut for cut in at) for v in range(len(works))] for at in cuts)
    best = min(bottleneck_ns(stages, *given) for stages in each)
    assert round(plan.bounds.bottleneck_lower_s * 1e9) == best
    for tie in plan.ties:
        ranks = sorted({plan.placement[s] for s in tie.stages})
        assert tie.seconds == pytest.approx(dearest(cluster, ranks, tie.n_bytes))


def test_a_small_tie_is_priced_by_the_latency_and_a_large_one_by_the_bandwidth():
    cluster = Cluster((Device(),) * 3, links={(0, 1): LATE, (1, 0): LATE, (1, 2): NARROW, (2, 1): NARROW})
    assert cluster.all_reduce_s(100, (0, 1, 2)) == LATE.all_reduce_s(100, 3)
    assert cluster.all_reduce_s(1 << 20, (0, 1, 2)) == NARROW.all_reduce_s(1 << 20, 3)
    assert cluster.all_reduce_s(1 << 20, (0, 1)) == LATE.all_reduce_s(1 << 20, 2)
    assert cluster.all_reduce_s(1 << 20, (2,)) == cluster.all_reduce_s(0, (0, 1)) == 0.0


def test_a_tie_within_a_host_does_not_pay_for_the_way_to_another():
    near, far = Link(1e-6, 1e11), Link(1e-3, 1e8)
    cluster = Cluster((Device(),) * 4, (0, 0, 1, 1), near, far)
    graph, costs = a_line((0, 1), 4096, [300, 300, 300, 300])
    (tie,) = solve(graph, costs, cluster, n_stages=4, n_microbatches=4).ties
    assert (tie.stages, tie.seconds) == ((0, 1), near.all_reduce_s(tie.n_bytes, 2))
    graph, costs = a_line((0, 3), 4096, [300, 300, 300, 300])
    plan = solve(graph, costs, cluster, n_stages=4, n_microbatches=4)
    assert plan.ties[0].seconds == far.all_reduce_s(plan.ties[0].n_bytes, 2)
    assert sum(e.end_s - e.start_s for e in simulate(plan).tail if e.action == "ties") == pytest.approx(
        2 * plan.ties[0].seconds
    )


def test_what_several_ranks_sum_costs_more_the_more_there_are():
    share = Share((0, 1, 2), sync_ns=2, more_ns=(3,), link_ns=((2, 9), (3, 12)), tied=True)
    items = tuple(Item((f"o{v}",), 5, 5) for v in range(3))
    stages = tuple(Stage(r) for r in range(3))
    link_of = {pair: 1 if 2 in pair else 0 for pair in itertools.permutations(range(3), 2)}
    problem = Problem(items, ((0, 1), (1, 2)), (), (share,), stages, link_of=link_of)
    sync = {at: [load.sync_ns for load in problem.loads(at)] for at in ((0, 1, 2), (0, 0, 1), (0, 0, 2))}
    assert sync == {(0, 1, 2): [12, 12, 12], (0, 0, 1): [2, 2, 0], (0, 0, 2): [9, 0, 9]}
    assert not problem.is_separable
    assert dataclasses.replace(problem, link_of=None).loads((0, 1, 2))[0].sync_ns == 3
