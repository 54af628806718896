"""Bounds on whole steps: under every assignment's simulated step, and near the best one's."""

import contextlib
import dataclasses
import itertools
import math
import random

import pytest
from language_model import cluster, costs, graph

from autopipe.costs import CostTable, OpCost
from autopipe.errors import InfeasibleError
from autopipe.graph import Op, OpGraph, ParameterSpec, TensorSpec
from autopipe.hardware import Cluster, Device, Link
from autopipe.schedule import StageTimes, build
from autopipe.simulator import simulate, simulate_schedule
from autopipe.solve import chain, solve
from autopipe.solve.answers import fullest_work_ns, least_sums_ns
from autopipe.solve.definition.answer import Answer
from autopipe.solve.definition.problem import HUGE
from autopipe.solve.definition.relaxed import working
from autopipe.solve.making.cases import Case
from autopipe.solve.making.options import Settings
from autopipe.solve.making.source import Source
from autopipe.solve.proof.step import Line
from autopipe.solve.step import plan_of
from autopipe.solve.stopping import clock_s

HIDDEN = (TensorSpec((8, 64), "float32", True),)


def case_of(source: Source, n_stages: int, n_microbatches: int, schedule: str = "1f1b") -> Case:
    ranks = tuple(range(source.cluster.n_ranks))
    return Case(source, schedule, n_stages, n_microbatches, "cost", ranks, ranks)


def steps_of(case: Case, problem) -> list[float]:
    """The simulated step of every assignment that fits."""
    none, found = Answer(None, HUGE, 0), []
    for stage_of in itertools.product(range(problem.n_stages), repeat=len(problem.items)):
        if not problem.is_valid(stage_of):
            continue
        loads = problem.loads(stage_of)
        if problem.bottleneck(loads) < HUGE:
            found.append(plan_of(case, problem, none, stage_of, loads).step_s)
    return found


def drawn(draw: random.Random, n_ops: int) -> tuple[OpGraph, CostTable]:
    """Ops that take one or two of those before them, some cheap, some beside the way of gradients."""
    ops, edges = [Op("x", "input", "x", outputs=HIDDEN)], []
    table, names = {}, ["x"]
    for v in range(n_ops):
        name, trained = f"op{v}", draw.random() < 0.85
        out = (TensorSpec((8, 64), "float32", trained),)
        ops.append(Op(name, "module", name, name, outputs=out, parameters=(f"w{v}",)))
        edges += [(u, name) for u in sorted({draw.choice(names[-3:]), draw.choice(names)}, key=names.index)]
        names.append(name)
        forward_s = draw.choice((1e-5, 1e-3, 2e-3, 5e-3))
        backward_s = 2 * forward_s * trained
        table[name] = OpCost(forward_s, backward_s, forward_s, forward_s, draw.choice((0, 1 << 16)))
    last = [name for name in names[1:] if name not in {u for u, _ in edges}]
    ops.append(Op("output", "output", "output"))
    edges += [(name, "output") for name in last]
    place = {op.name: x for x, op in enumerate(ops)}
    weights = tuple(ParameterSpec(f"w{v}", (f"w{v}",), (64, 64), "float32") for v in range(n_ops))
    edges.sort(key=lambda e: (place[e[0]], place[e[1]]))
    return OpGraph("Drawn", tuple(ops), tuple(edges), parameters=weights), CostTable(table)


@pytest.mark.parametrize("number", [*range(12), 176])
def test_no_assignment_of_a_drawn_graph_is_under_the_bound(number):
    """Side branches, stages that no gradient passes, recomputation for memory, transfers that fill."""
    draw = random.Random(number)
    ops, table = drawn(draw, 5)
    limits = () if draw.random() < 0.3 else (draw.choice((400_000, 800_000, 1_200_000)),) * 3
    recompute, overlap = draw.choice(("auto", "never")), draw.random() < 0.7
    settings = Settings(overlap=overlap, recompute=recompute, memory_limit=limits or None)
    source = Source.of(
        ops, table, Cluster.uniform(3, link=Link(1e-5, draw.choice((1e6, 1e8, 1e10)))), settings
    )
    case = case_of(source, 3, draw.choice((4, 5, 9)))
    check(case)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("n_microbatches", [1, 2, 3, 4])
def test_nor_of_few_microbatches_or_with_every_forward_first(schedule, n_microbatches):
    for number in (0, 3, 176):
        draw = random.Random(number)
        ops, table = drawn(draw, 5)
        limits = (draw.choice((600_000, 1_200_000)),) * 3
        settings = Settings(recompute="auto", memory_limit=limits)
        source = Source.of(ops, table, Cluster.uniform(3, link=Link(1e-5, 1e10)), settings)
        check(case_of(source, 3, n_microbatches, schedule))


def check(case: Case) -> None:
    """No assignment's step is under the bounds of a case."""
    problem = case.problem()
    answer, steps = chain(problem), steps_of(case, problem)
    assert case.least_step_s <= min(steps, default=HUGE)
    until = clock_s() + 60.0
    for fullest_ns in (fullest_work_ns(problem, answer.lower_ns, until), chain(working(problem)).lower_ns):
        assert case.least_step_in_room_s(problem, fullest_ns, until) <= min(steps, default=HUGE)
    for over in (1.0, 1.01, 1.3, 3.0):
        known_s = over * min(steps, default=0.0)
        sums_ns, chains = least_sums_ns(case, problem, known_s, until)
        assert case.least_step_in_room_s(problem, 0, until, sums_ns) <= min(steps, default=HUGE) * (1 + 1e-5)
        assert all(map(problem.is_valid, chains))


@pytest.mark.parametrize("n_microbatches", [4, 8, 20])
def test_of_alike_layers_in_a_row_the_bound_is_the_step(n_microbatches):
    """Two ops a stage, nothing to send: M + S − 1 of them, once the batch is taken in."""
    ops = [Op("x", "input", "x", outputs=HIDDEN)]
    ops += [Op(f"op{v}", "module", f"op{v}", f"op{v}", outputs=HIDDEN) for v in range(6)]
    names = [op.name for op in ops]
    edges = (*itertools.pairwise(names), ("op5", "output"))
    alike = OpGraph("Alike", (*ops, Op("output", "output", "output")), edges)
    table = CostTable({f"op{v}": OpCost(1e-3, 2e-3) for v in range(6)}, start_s=5e-3)
    plan = solve(alike, table, Cluster((Device(),) * 3), n_stages=3, n_microbatches=n_microbatches)
    assert plan.step_s >= 5e-3 + (n_microbatches + 2) * 6e-3
    assert plan.bounds.step_lower_s >= 0.999 * plan.step_s


@pytest.mark.parametrize("n_microbatches", [1, 2, 5, 16, 40])
def test_of_even_ranks_the_bound_is_near_the_step_for_any_microbatches(n_microbatches):
    """Sixteen ranks of a second each: M + 15 of them; of no more microbatches than ranks, within a ninth."""
    of_each = 16.0, 32 / 3, 1.0, 0.0
    in_turn, forwards_first = (Line(16, n_microbatches, way).least_ns(*of_each) for way in (True, False))
    step_s = n_microbatches + 15
    assert forwards_first == pytest.approx(step_s)
    assert in_turn <= step_s * (1 + 1e-9)
    assert in_turn >= step_s * (0.999 if n_microbatches > 16 else 8 / 9)


@pytest.mark.parametrize("bytes_s", [1e12, 1e8, 3e7])
@pytest.mark.parametrize("n_ops", [5, 9])
def test_ops_that_cannot_be_shared_out_evenly_are_in_the_bound_however_slow_links_are(n_ops, bytes_s):
    """On four ranks, one has an op more than a fair share; all values together take longer than it does."""
    names = ["x", *(f"op{v}" for v in range(n_ops)), "output"]
    wide = (TensorSpec((256, 64), "float32", True),)
    ops = [Op(name, "module", name, name, outputs=wide) for name in names[1:-1]]
    graph_ = OpGraph(
        "Uneven",
        (Op("x", "input", "x", outputs=wide), *ops, Op("output", "output", "output")),
        tuple(itertools.pairwise(names)),
    )
    table = CostTable({name: OpCost(1e-3, 2e-3) for name in names[1:-1]})
    slow = Cluster((Device(),) * 4, local=Link(0.0, bytes_s), remote=Link(0.0, bytes_s))
    plan = solve(graph_, table, slow, n_stages=4, n_microbatches=32)
    fullest_s, total_s = 3e-3 * -(-n_ops // 4), 3e-3 * n_ops
    least_s = (32 - 4 - 1) * fullest_s + 2 * total_s
    assert 0.999 * least_s <= plan.bounds.step_lower_s <= plan.step_s


@pytest.mark.parametrize("n_ops", [9, 13, 22])
def test_ops_are_whole_in_every_sum_that_bounds_a_step(n_ops):
    """Later ranks wait longer, so they are to hold less: of ops that are few, less than any shares allow."""
    works = [5, 2, 4, 3, 7, 1, 6, 3]
    names = ["x", *(f"op{v}" for v in range(n_ops)), "output"]
    ops = [Op(name, "module", name, name, outputs=HIDDEN) for name in names[1:-1]]
    ends = Op("x", "input", "x", outputs=HIDDEN), Op("output", "output", "output")
    graph_ = OpGraph("Whole", (ends[0], *ops, ends[1]), tuple(itertools.pairwise(names)))
    table = CostTable({f"op{v}": OpCost(works[v % 8] * 1e-3, works[v % 8] * 2e-3) for v in range(n_ops)})
    fast = Link(0.0, 1e15)
    plan = solve(graph_, table, Cluster((Device(),) * 4, local=fast), n_stages=4, n_microbatches=16)
    assert 0.995 * plan.step_s <= plan.bounds.step_lower_s <= plan.step_s


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("n_microbatches", [1, 2, 3, 5, 8, 13])
def test_no_sum_of_a_line_is_over_its_simulated_step(schedule, n_microbatches):
    """Whatever ranks work, in forward and in backward, also where some work nothing."""
    draw = random.Random(n_microbatches)
    for n_ranks in (1, 2, 5, 8):
        line = Line(n_ranks, n_microbatches, schedule == "1f1b")
        made = build(schedule, n_ranks, n_ranks, n_microbatches)
        for _ in range(20):
            ways = [draw.choice(((1.0, 2.0), (3.0, 1.0), (0.5, 0.5), (0.0, 0.0))) for _ in range(n_ranks)]
            ways = [(f * draw.choice((1, 1, 1.3)), b * draw.choice((1, 1, 1.7))) for f, b in ways]
            step_s = simulate_schedule(made, [StageTimes(*way) for way in ways]).step_s
            works = [sum(way) for way in ways]
            for r, row in enumerate(line.sums()):
                longest = tuple(max((way[x] for way in ways[:r]), default=0.0) for x in range(2))
                of_rank = line.sum_of(r, sum(works[:r]), *ways[r], sum(works[r + 1 :]), longest)
                assert sum(w * x for w, x in zip(row, works, strict=True)) <= of_rank * (1 + 1e-9)
                assert of_rank <= step_s * (1 + 1e-9)
            most = line.most_works(sum(works), step_s)
            assert all(work <= limit * (1 + 1e-9) for work, limit in zip(works, most, strict=True))


@pytest.mark.parametrize("n_microbatches", [3, 6, 8])
@pytest.mark.parametrize("room", [4.0, 0.6])
def test_the_bound_is_near_the_step_of_more_ranks_than_microbatches(n_microbatches, room):
    """Backward is longer than forward; early ranks hold more, and compute again what does not fit."""
    works = [5, 2, 4, 3, 7, 1, 6, 3]
    names = ["x", *(f"op{v}" for v in range(30)), "output"]
    ops = [Op(name, "module", name, name, outputs=HIDDEN) for name in names[1:-1]]
    ends = Op("x", "input", "x", outputs=HIDDEN), Op("output", "output", "output")
    graph_ = OpGraph("Few", (ends[0], *ops, ends[1]), tuple(itertools.pairwise(names)))
    each = ((works[v % 8] * 1e-3, 1 << 20) for v in range(30))
    table = CostTable({f"op{v}": OpCost(s, 2 * s, saved_bytes=n) for v, (s, n) in enumerate(each)})
    plan = solve(
        graph_,
        table,
        Cluster((Device(),) * 8, local=Link(0.0, 1e15)),
        n_stages=8,
        n_microbatches=n_microbatches,
        recompute="auto",
        memory_limit=int(room * 30 / 8 * n_microbatches * (1 << 20)) + (1 << 20),
    )
    assert any(stage.recomputed for stage in plan.stages) == (room < 1)
    assert 0.95 * plan.step_s <= plan.bounds.step_lower_s <= plan.step_s


@pytest.mark.parametrize(("number", "n_ops", "n_ranks"), [(14, 12, 5), (102, 14, 6), (139, 12, 5)])
def test_no_chain_has_the_longest_backward_ahead_and_all_work_at_their_least_at_once(number, n_ops, n_ranks):
    """The bound is the least largest sum over all chains, on more ranks than there are microbatches."""
    draw = random.Random(number)
    names = ["x", *(f"op{v}" for v in range(n_ops)), "output"]
    ops = [Op(name, "module", name, name, outputs=HIDDEN) for name in names[1:-1]]
    ends = Op("x", "input", "x", outputs=HIDDEN), Op("output", "output", "output")
    graph_ = OpGraph("Parts", (ends[0], *ops, ends[1]), tuple(itertools.pairwise(names)))
    each = {name: draw.choice((1, 2, 3, 5)) * 1e-3 for name in names[1:-1]}
    table = CostTable({name: OpCost(s, 2 * s, saved_bytes=1 << 20) for name, s in each.items()})
    room = (int(0.4 * 4 * n_ops / n_ranks * (1 << 20)) + (1 << 20),) * n_ranks
    ranks = Cluster.uniform(n_ranks, link=Link(0.0, 1e15))
    case = case_of(Source.of(graph_, table, ranks, Settings(recompute="auto", memory_limit=room)), n_ranks, 4)
    problem, least_ns = case.problem(), math.inf
    n_items = len(problem.items)
    for cuts in itertools.combinations(range(1, n_items), n_ranks - 1):
        stage_of = tuple(sum(cut <= v for cut in cuts) for v in range(n_items))
        if problem.is_valid(stage_of) and problem.bottleneck(loads := problem.loads(stage_of)) < HUGE:
            least_ns = min(least_ns, largest_sum(case.line, [(x.forward_ns, x.load_ns) for x in loads]))
    sums_ns, _ = least_sums_ns(case, problem, 1.3 * least_ns / 1e9, clock_s() + 60.0)
    assert 0.999 * least_ns <= sums_ns <= least_ns * (1 + 1e-6)


def largest_sum(line: Line, ranks: list[tuple[float, float]]) -> float:
    """The largest of a line's sums, of what each rank works in forward and in all."""
    sums, longest = [], (0.0, 0.0)
    for r, (forward, work) in enumerate(ranks):
        before, after = (sum(x for _, x in part) for part in (ranks[:r], ranks[r + 1 :]))
        own = forward, work - forward
        sums.append(float(line.sum_of(r, before, *own, after, longest)))
        longest = max(longest[0], own[0]), max(longest[1], own[1])
    return max(sums)


@pytest.mark.parametrize("latency_s", [0.0, 1e-3])
@pytest.mark.parametrize("n_microbatches", [2, 4, 12])
def test_what_a_microbatch_waits_for_messages_is_in_the_bound(n_microbatches, latency_s):
    """Each of six ranks has two ops of 3 ms; from one to the next and back messages take up to 4 ms."""
    names = ["x", *(f"op{v}" for v in range(12)), "output"]
    ops = [Op(name, "module", name, name, outputs=HIDDEN) for name in names[1:-1]]
    ends = Op("x", "input", "x", outputs=HIDDEN), Op("output", "output", "output")
    graph_ = OpGraph("Slow", (ends[0], *ops, ends[1]), tuple(itertools.pairwise(names)))
    table = CostTable({name: OpCost(1e-3, 2e-3) for name in names[1:-1]})
    slow = Link(latency_s, HIDDEN[0].bytes_at({}) / 1e-3)
    ranks = Cluster((Device(),) * 6, local=slow, remote=slow)
    plan = solve(graph_, table, ranks, n_stages=6, n_microbatches=n_microbatches)
    # of more microbatches than ranks, later ones wait for messages too
    part = 0.97 if n_microbatches < 6 else 0.88
    assert part * plan.step_s <= plan.bounds.step_lower_s <= plan.step_s


def test_what_memory_has_computed_again_is_in_the_bound():
    """The tighter the limit, the more; never over the best plan's step, and near it."""
    heavy = CostTable(
        {name: OpCost(c.forward_s, c.backward_s, saved_bytes=1 << 18) for name, c in costs().costs.items()}
    )
    room, found = 4 << 20, []
    while True:
        settings = Settings(recompute="auto", memory_limit=(room,) * 3)
        case = case_of(Source.of(graph(), heavy, cluster(), settings), 3, 9)
        try:
            plan = solve(
                graph(), heavy, cluster(), n_stages=3, n_microbatches=9, recompute="auto", memory_limit=room
            )
        except InfeasibleError:
            break
        assert plan.step_s == pytest.approx(simulate(plan).step_s)
        assert case.least_step_s <= plan.bounds.step_lower_s <= plan.step_s
        found.append(plan.bounds.step_lower_s / case.least_step_s)
        room -= 1 << 18
    assert found[-1] > found[0] + 0.02
    assert all(a <= b + 1e-3 for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("number", [21, 30, 43, 111])
def test_where_ranks_may_be_in_any_order_no_order_is_under_the_bound(number):
    """Ranks with unlike room: what memory costs in the order that is kept is no bound on the others."""
    draw = random.Random(number)
    table = {"mask": OpCost(1e-7)}
    for name in ("embed", *(f"layer{i}" for i in range(6)), "head"):
        forward_s = draw.choice((1e-3, 2e-3, 3e-3, 5e-3))
        table[name] = OpCost(forward_s, 2 * forward_s, saved_bytes=draw.choice((1 << 16, 1 << 18)))
    room = [draw.choice((2 << 19, 3 << 19, 4 << 19, 6 << 19)) for _ in range(3)]
    asked = {"n_stages": 3, "n_microbatches": draw.choice((3, 4, 6)), "recompute": "auto"}
    ranks, steps_s = Cluster((Device(),) * 3, local=Link(1e-5, 1e10)), []
    for limits in itertools.permutations(room):
        with contextlib.suppress(InfeasibleError):
            plan = solve(graph(), CostTable(table), ranks, device_order="given", memory_limit=limits, **asked)
            steps_s.append(plan.step_s)
    plan = solve(graph(), CostTable(table), ranks, device_order="auto", memory_limit=room, **asked)
    assert plan.bounds.step_lower_s <= min(steps_s)


def side_branch(before_s: float, aside_s: float, after_s: float) -> tuple[OpGraph, CostTable]:
    """``after`` takes what ``before`` makes, and so does ``aside``, which no gradient reaches."""
    names = "before", "aside", "after"
    frozen = (TensorSpec((8, 64), "float32"),)
    made = {"before": HIDDEN, "aside": frozen, "after": HIDDEN}
    ops = [Op(name, "module", name, name, outputs=made[name]) for name in names]
    ends = Op("x", "input", "x", outputs=HIDDEN), Op("output", "output", "output")
    edges = (
        ("x", "before"),
        ("before", "aside"),
        ("before", "after"),
        ("aside", "output"),
        ("after", "output"),
    )
    each = zip(names, (before_s, aside_s, after_s), strict=True)
    table = CostTable({name: OpCost(s, 2 * s * (name != "aside")) for name, s in each})
    return OpGraph("Branch", (ends[0], *ops, ends[1]), edges), table


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("n_microbatches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("place", [1, 2])
def test_a_message_past_a_stage_beside_the_way_of_data_is_one(schedule, n_microbatches, place):
    """A message takes longer than an op; the stage between or behind passes no gradient back."""
    ops, table = side_branch(1e-3, 1e-4, 1e-3)
    slow = Cluster.uniform(3, link=Link(0.0, 1e5))
    source = Source.of(ops, table, slow, Settings(pin={"aside": place}))
    check(case_of(source, 3, n_microbatches, schedule))


@pytest.mark.parametrize("speed", [0.5, 1.0, 3.0])
def test_many_layers_on_alike_ranks_of_any_speed(speed):
    """More cuts than are priced in one go: those near one another are told by work at speed 1."""
    names = ["x", *(f"op{v}" for v in range(240)), "output"]
    ops = [Op(name, "module", name, name, outputs=HIDDEN) for name in names[1:-1]]
    ends = Op("x", "input", "x", outputs=HIDDEN), Op("output", "output", "output")
    graph_ = OpGraph("Many", (ends[0], *ops, ends[1]), tuple(itertools.pairwise(names)))
    table = CostTable({name: OpCost(1e-3, 2e-3) for name in names[1:-1]})
    ranks = Cluster((Device(speed=speed),) * 3, local=Link(0.0, 1e15))
    plan = solve(graph_, table, ranks, n_stages=3, n_microbatches=8)
    case = case_of(Source.of(graph_, table, ranks, Settings()), 3, 8)
    sums_ns, _ = least_sums_ns(case, case.problem(), 1.3 * plan.step_s, clock_s() + 60.0)
    assert 0.99 * plan.step_s <= sums_ns / 1e9 <= plan.step_s


@pytest.mark.parametrize("host", [(5.0, 5.0), (1.5, 0.76), (0.5, 1.3)])
@pytest.mark.parametrize("n_microbatches", [1, 2, 3, 8])
def test_nor_where_hosts_may_be_slower_than_devices(host, n_microbatches):
    """In all, or in one way alone: a stage then takes another part of its time in forward."""
    for aside_s in (1e-4, 2e-3):
        ops, table = side_branch(1e-3, aside_s, 1e-3)
        launched = {
            name: dataclasses.replace(
                cost, host_forward_s=host[0] * cost.forward_s, host_backward_s=host[1] * cost.backward_s
            )
            for name, cost in table.costs.items()
        }
        ranks = Cluster.uniform(3, link=Link(0.0, 1e5))
        check(case_of(Source.of(ops, CostTable(launched), ranks, Settings()), 3, n_microbatches))


@pytest.mark.parametrize("alone", [0.7, 1.5])
@pytest.mark.parametrize("n_microbatches", [1, 3, 8])
def test_nor_where_ranks_share_cores_and_are_slower_or_faster_alone(alone, n_microbatches):
    ops, table = drawn(random.Random(3), 5)
    shared = Cluster((Device(),) * 3, hosts=(0, 0, 0), local=Link(0.0, 1e8), cores=(3,))
    costs_ = dataclasses.replace(table, alone=alone)
    check(case_of(Source.of(ops, costs_, shared, Settings()), 3, n_microbatches))
