"""Chains over intervals of one order: every bound leaves in what is within it, at the definition's price."""

import dataclasses
import itertools
import random

import pytest

from autopipe.solve import Item, Net, Problem, Stage
from autopipe.solve.definition.problem import HUGE
from autopipe.solve.lines.intervals import Rows, best_chain, lightest_chains, near_chain


def drawn(seed: int) -> Problem:
    """A problem of the fuzz with every stage on a rank of its own and nothing that others decide."""
    from benchmarks.solver.drawn import problem

    draw = random.Random(seed)
    while True:
        made = problem(draw)
        if all(a < b for a, b in made.edges):
            break
    stages = (dataclasses.replace(s, rank=x, nic=-1) for x, s in enumerate(made.stages))
    return dataclasses.replace(
        made,
        items=tuple(dataclasses.replace(i, blocks=()) for i in made.items),
        nets=tuple(dataclasses.replace(n, again_ns=-1, again_bytes=0, kept_bytes=0) for n in made.nets),
        shares=tuple(dataclasses.replace(s, more_ns=()) for s in made.shares),
        stages=tuple(stages),
        pair_ns=None,
        link_of=None,
        sender_pays="once",
        moments=(),
    )


def chains(problem: Problem):
    """Every chain along the items' own order that is allowed, with its loads."""
    n, k = len(problem.items), problem.n_stages
    for cuts in itertools.combinations_with_replacement(range(n + 1), k - 1):
        stage_of = tuple(sum(v >= cut for cut in cuts) for v in range(n))
        if problem.is_valid(stage_of):
            yield stage_of, problem.loads(stage_of)


@pytest.mark.parametrize("seed", range(120))
def test_chains_within_a_limit_are_those_of_the_definition(seed):
    problem = drawn(seed)
    order = range(len(problem.items))
    each = {stage_of: problem.bottleneck(loads) for stage_of, loads in chains(problem)}
    least = min(each.values(), default=HUGE)
    limits = sorted({0, *(value for value in each.values() if value < HUGE)})
    bounds = [bound for limit in limits for bound in (limit - 1, limit)]
    for bound, lightest in zip(bounds, lightest_chains(problem, order, bounds), strict=True):
        found = best_chain(problem, order, bound)
        assert (found is None) == (least > bound)
        if found is not None:
            assert (found[0], each[found[1]]) == (least, least)
        assert [lightest] == lightest_chains(problem, order, [bound])
        assert (lightest is None) == (least > bound)
    found = near_chain(problem, order, 1)
    assert (found is None) == (least >= HUGE)
    assert found is None or found[0] == least


@pytest.mark.parametrize("seed", range(40))
def test_nothing_within_a_limit_is_left_out(seed):
    """Whatever else a limit rules out: the stages of chains within it are all there, at their price."""
    problem = drawn(seed)
    fitting = [(s, loads) for s, loads in chains(problem) if problem.bottleneck(loads) < HUGE]
    limit = sorted(problem.bottleneck(loads) for _, loads in fitting)[len(fitting) // 2] if fitting else 0
    rows = {i: row for i, *row in Rows(problem, range(len(problem.items))).descend(limit)}
    for stage_of, loads in fitting:
        if problem.bottleneck(loads) > limit:
            continue
        for s, load in enumerate(loads):
            inside = [v for v, there in enumerate(stage_of) if there == s]
            if inside:
                stages, ends, priced = rows[inside[0]]
                assert stages.start <= s < stages.stop
                assert ends.start <= inside[-1] + 1 < ends.stop
                assert priced[s - stages.start, inside[-1] + 1 - ends.start] == load.load_ns


@pytest.mark.parametrize("allow_empty", [False, True])
def test_a_tight_limit_looks_at_few_stages_and_ends(allow_empty):
    """A thousand items on sixteen stages: all that is near the fair share, and hardly anything else."""
    nets = tuple(Net(v, (v + 1,), 3, 3) for v in range(1023))
    edges = tuple((v, v + 1) for v in range(1023))
    items = tuple(Item((f"o{v}",), 5, 11) for v in range(1024))
    stages = tuple(Stage(s, in_flight=16 - s) for s in range(16))
    problem = Problem(items, edges, nets, (), stages, overlap=True, allow_empty=allow_empty)
    looked = sum(loads.size for *_, loads in Rows(problem, range(1024)).descend(64 * 16 + 16))
    assert looked < 16 * 1024
    found = best_chain(problem, range(1024), 64 * 16 + 16)
    assert found is not None
    assert found[0] == 64 * 16
