"""A slice of the fuzz of ``benchmarks.solver.fuzz``, and what its kinds of problems leave out."""

import contextlib
import dataclasses
import itertools
import random
import time

import pytest
from language_model import cluster, costs, graph, made

from autopipe.errors import InfeasibleError, UndecidedError
from autopipe.hardware import Cluster, Link
from autopipe.plans import Candidate
from autopipe.schedule import build
from autopipe.solve import Block, Item, Net, Problem, Stage, chain
from autopipe.solve.definition.blocks import cheapest_blocks
from autopipe.solve.definition.problem import HUGE
from autopipe.solve.making.cases import Case
from autopipe.solve.making.formulate import formulate
from autopipe.solve.making.options import Settings
from autopipe.solve.making.source import Source
from autopipe.solve.proof.step import Work, least_step_ns
from autopipe.solve.step import plan_of


@pytest.mark.parametrize("first", range(0, 200, 40))
def test_small_problems_equal_exhaustive_search(first):
    from benchmarks.solver.fuzz import MISSED, fault_of

    faults = {number: fault_of(number) for number in range(first, first + 40) if number % 8 != 3}
    assert {n: fault for n, fault in faults.items() if fault and not fault.startswith(MISSED)} == {}


@pytest.mark.parametrize("number", range(3, 128, 8))
def test_an_assignment_that_fits_is_never_ruled_out(number):
    from benchmarks.solver.drawn import planted

    problem, stage_of = planted(random.Random(number))
    answer = chain(problem, time_limit_s=1.0)
    assert answer.lower_ns <= problem.bottleneck(problem.loads(stage_of))
    if answer.stage_of is not None:
        assert problem.is_valid(answer.stage_of)
        assert problem.bottleneck(problem.loads(answer.stage_of)) == answer.bottleneck_ns < HUGE


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zbv", "interleaved"])
@pytest.mark.parametrize("n_microbatches", [1, 3, 8])
def test_no_assignment_has_a_step_under_the_bound(schedule, n_microbatches):
    """Every cut of the model in a row, simulated."""
    n_stages = 4 if schedule in ("zbv", "interleaved") else 3
    n_ranks = 2 if n_stages == 4 else 3
    source = Source.of(graph(), costs(), cluster(n_ranks), Settings())
    case = Case(source, schedule, n_stages, n_microbatches, "cost", tuple(range(n_ranks)), (0,) * n_ranks)
    problem = case.problem()
    answer = chain(problem)
    steps = []
    for stage_of in itertools.product(range(n_stages), repeat=len(problem.items)):
        if sorted(stage_of) == list(stage_of) and problem.is_valid(stage_of):
            steps.append(plan_of(case, problem, answer, stage_of, problem.loads(stage_of)).step_s)
    assert case.least_step_s <= min(steps)
    assert case.least_step_s >= 0.4 * min(steps)


def test_the_bound_of_a_line_has_its_fill_and_drain():
    """Equal work on each of four ranks: a step is at least M + 1.5 or so of its parts, not M."""
    work = Work(4.0, 8 / 3, 1.0, 4 / 3, 4.0, 0.0)
    fair, lined = (
        least_step_ns(work, [1.0] * 4, 8, in_line=way, split=False, line=None) for way in (False, True)
    )
    assert fair == pytest.approx(8.0, rel=1e-5)
    assert 9.0 < lined < 11.0


def test_forty_unlike_blocks_have_a_bound_under_the_best_choice():
    draw = random.Random(1)
    blocks = [Block((f"b{x}",), draw.randint(3000, 9000), draw.randint(20, 90), 0) for x in range(40)]
    need = sum(b.saved_bytes for b in blocks) // 2
    found = cheapest_blocks(blocks, 8, 8 * need)
    assert found is not None
    # the least forward by bytes given up, block by block: exact, and as slow as it looks
    largest = max(b.saved_bytes for b in blocks)
    target = -(-(8 * need + largest) // 8)
    least = {0: 0}
    for b in blocks:
        for freed, cost in sorted(least.items(), reverse=True):
            there = min(target, freed + b.freed_bytes)
            least[there] = min(least.get(there, HUGE), cost + b.forward_ns)
    assert found.least_ns <= least[target]
    assert sum(b.forward_ns for b in found.blocks) <= 1.001 * least[target]


@pytest.mark.parametrize("n_hosts", [2, 4])
def test_unlike_links_are_proved_like_one(n_hosts):
    """A chain over hosts: each stage pays for the link it has, so the relaxed optimum is the true one."""
    hosts = tuple(r * n_hosts // 8 for r in range(8))
    there = Cluster(cluster(8).devices, hosts, Link(1e-5, 1e9), Link(1e-4, 1e8))
    for overlap in (True, False):
        source = Source.of(graph(), costs(), there, Settings(overlap=overlap, clone="always"))
        problem = formulate(source, build("1f1b", 8, 8, 8))
        answer = chain(problem)
        assert answer.proved
        assert problem.bottleneck(problem.loads(answer.stage_of)) == answer.bottleneck_ns


def test_a_value_that_sixty_stages_may_make_again_is_chosen_for_at_once():
    items = [Item(("mask",), 1), *(Item((f"l{v}",), 100) for v in range(63))]
    nets = [Net(0, tuple(range(1, 64)), 30, 30, "mask", again_ns=1)]
    nets += [Net(v, (v + 1,), 5, 5, f"l{v}") for v in range(1, 63)]
    edges = tuple((n.producer, c) for n in nets for c in n.consumers)
    problem = Problem(tuple(items), edges, tuple(nets), (), tuple(Stage(s) for s in range(32)))
    started = time.process_time()
    answer = chain(problem, time_limit_s=2.0)
    assert time.process_time() - started < 4.0
    assert answer.stage_of is not None


def test_parallel_branches_that_fit_when_pinned_are_found_without_pins():
    """Twenty-two branches side by side: more downsets than can be looked through, and tight memory."""
    draw = random.Random(0)
    held = [draw.randint(5, 40) for _ in range(22)]
    items = [
        Item(("in",), 1, 1),
        *(Item((f"b{v}",), 20, 20, h) for v, h in enumerate(held)),
        Item(("out",), 1, 1),
    ]
    nets = [Net(0, tuple(range(1, 23)), 1, 1, "in"), *(Net(v, (23,), 1, 1, f"b{v}") for v in range(1, 23))]
    edges = tuple((n.producer, c) for n in nets for c in n.consumers)
    limit = -(-sum(held) // 3) + 2
    stages = tuple(Stage(s, 1.0, limit) for s in range(3))
    answer = chain(Problem(tuple(items), edges, tuple(nets), (), stages, overlap=True), time_limit_s=2.0)
    assert answer.stage_of is not None


@pytest.mark.parametrize("options", [{"n_stages": "auto", "schedule": "auto"}, {}])
def test_the_time_limit_holds(options):
    for limit in (0.0, 0.3):
        started = time.process_time()
        plan = made(
            cluster=cluster(8),
            n_stages=options.get("n_stages", 8),
            time_limit_s=limit,
            **{k: v for k, v in options.items() if k != "n_stages"},
        )
        assert plan.step_s > 0
        assert plan.bounds.step_lower_s <= plan.step_s
        assert time.process_time() - started < limit + 0.7


def test_memory_that_parameters_alone_exceed_is_told_with_the_arithmetic():
    with pytest.raises(InfeasibleError, match=r"before any activation; at least .* on each rank") as told:
        made(memory_limit=100_000, time_limit_s=60.0)
    assert not told.value.finer_may_help
    assert not isinstance(told.value, UndecidedError)


def test_activations_that_no_rank_has_room_for_are_told_with_the_arithmetic():
    heavy = {op: dataclasses.replace(cost, saved_bytes=1 << 20) for op, cost in costs().costs.items()}
    table = dataclasses.replace(costs(), costs=heavy)
    started = time.process_time()
    with pytest.raises(
        InfeasibleError,
        match=r"what microbatches in flight keep is .* at least .* on each rank would be needed",
    ) as told:
        made(costs=table, memory_limit="4MB", time_limit_s=60.0)
    assert "recompute='auto' fits" in str(told.value)
    assert not isinstance(told.value, UndecidedError)
    assert time.process_time() - started < 1.0


def test_what_was_not_found_in_no_time_is_not_ruled_out():
    """A limit that just fits, and no time to look: whatever is said, it is not that no plan fits."""
    need = max(s.memory_bytes for s in made(schedule="interleaved", n_stages=6).stages)
    with contextlib.suppress(UndecidedError):
        made(schedule="interleaved", n_stages=6, memory_limit=2 * need, time_limit_s=0.0)


@pytest.mark.parametrize("fits", [True, False])
def test_a_bound_is_at_fault_over_steps_of_what_fits_alone(fits, monkeypatch):
    """What a limit rules out may be faster than all that it leaves."""
    from benchmarks.solver import drawn, fuzz

    given = drawn.asked(random.Random(5))
    plan = fuzz.solve(given.graph, given.costs, given.cluster, **given.options)
    quick = Candidate("quick", plan.schedule, plan.n_stages, 1, plan.bounds.step_lower_s / 2, 0, fits)
    plan = dataclasses.replace(plan, candidates=(*plan.candidates, quick))
    monkeypatch.setattr(fuzz, "solve", lambda *_, **__: plan)
    fault = fuzz.plan_fault(given)
    assert (fault is not None and "are under the bound" in fault) is fits
