"""Blocks to compute again: the cheapest that fit, by trying all; how plans say, count and price them."""

import dataclasses
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from language_model import LINK, cluster, costs, graph, made

from autopipe.look.tables import stage_table
from autopipe.memory import plan_memory
from autopipe.plans import Plan
from autopipe.schedule import build
from autopipe.simulator import simulate
from autopipe.solve import Block, Item, Problem, Stage, explain
from autopipe.solve.definition.blocks import cheapest_blocks
from autopipe.solve.making.formulate import formulate
from autopipe.solve.making.options import Settings
from autopipe.solve.making.source import Source

MIB = 1 << 20


@st.composite
def blocks(draw) -> list[Block]:
    """Some alike, some not; each gives something up."""
    kinds = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12), st.integers(0, 11)), max_size=4))
    rows = [kind for kind in kinds for _ in range(draw(st.integers(1, 3)))]
    return [Block((f"b{x}",), f, saved, held) for x, (f, saved, held) in enumerate(rows) if held < saved]


@settings(max_examples=400)
@given(blocks(), st.integers(1, 4), st.integers(1, 80))
def test_the_cheapest_blocks_are_those_of_all_subsets(given_blocks, in_flight, over):
    every = itertools.chain.from_iterable(
        itertools.combinations(given_blocks, n) for n in range(len(given_blocks) + 1)
    )
    enough = [
        sum(b.forward_ns for b in some)
        for some in every
        if in_flight * sum(b.freed_bytes for b in some) - max((b.saved_bytes for b in some), default=0)
        >= over
    ]
    found = cheapest_blocks(given_blocks, in_flight, over)
    if found is None:
        assert not enough
    else:
        assert sum(b.forward_ns for b in found.blocks) == found.least_ns == min(enough)
        assert len(set(found.blocks)) == len(found.blocks)
        assert set(found.blocks) <= set(given_blocks)
        freed = in_flight * sum(b.freed_bytes for b in found.blocks)
        freed -= max(b.saved_bytes for b in found.blocks)
        assert freed >= over


def test_a_hundred_unlike_blocks_are_chosen_from_at_once():
    given_blocks = [Block((f"b{x}",), 1000 + 37 * x % 101, 5000 + 53 * x % 97, 100) for x in range(100)]
    found = cheapest_blocks(given_blocks, 2, 300_000)
    assert found is not None
    per_byte = min(b.forward_ns / b.freed_bytes for b in given_blocks)
    assert sum(b.forward_ns for b in found.blocks) <= 1.2 * 150_000 * per_byte


def test_a_stage_gives_up_no_more_than_it_must():
    """Three of four blocks would do it; the dearest stays."""
    items = tuple(Item((f"o{v}",), 10 + v, 20, saved_bytes=100) for v in range(4))
    items = tuple(dataclasses.replace(i, blocks=(Block(i.ops, i.forward_ns, 100, 10),)) for i in items)
    problem = Problem(items, (), (), (), (Stage(0, 1.0, 700, 3),), recompute="auto")
    (load,) = problem.loads((0, 0, 0, 0))
    assert [b.ops for b in load.blocks] == [("o0",), ("o1",), ("o2",)]
    assert load.backward_ns == 80 + 10 + 11 + 12
    assert load.memory_bytes == 3 * (400 - 270) + 100
    assert not load.recompute


def heavy(**changes) -> Plan:
    """32 MiB saved per op and microbatch."""
    table = costs()
    dear = {op: dataclasses.replace(c, saved_bytes=32 * MIB) for op, c in table.costs.items()}
    return made(costs=dataclasses.replace(table, costs=dear), time_limit_s=60.0, **changes)


def test_only_as_many_blocks_are_recomputed_as_memory_asks_for():
    at = {limit: heavy(recompute="auto", memory_limit=limit * MIB) for limit in (2000, 250, 180, 140)}
    counts = [sum(len(s.recomputed) for s in plan.stages) for plan in at.values()]
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] > counts[1] > 0
    steps = [plan.step_s for plan in at.values()]
    assert steps == sorted(steps)
    for limit, plan in at.items():
        assert max(simulate(plan).peak_bytes) <= limit * MIB
        assert plan.bounds.gap < 0.05


def test_what_is_recomputed_survives_json_and_is_counted_alike():
    plan = heavy(recompute="auto", memory_limit=180 * MIB)
    assert Plan.from_json(plan.to_json()) == plan
    best = next(c for c in plan.candidates if c.step_s == plan.step_s)
    assert best.memory_bytes == max(simulate(plan).peak_bytes)
    table = costs()
    dear = {op: dataclasses.replace(c, saved_bytes=32 * MIB) for op, c in table.costs.items()}
    closer = plan_memory(plan, dataclasses.replace(table, costs=dear))
    for stage, planned, walked in zip(plan.stages, plan_memory(plan), closer, strict=True):
        given_up = sum(len(ops) for ops in stage.recomputed)
        assert planned.saved_bytes == (len(stage.ops) - given_up) * 32 * MIB + stage.held_bytes
        assert planned.saved_bytes <= walked.saved_bytes < planned.saved_bytes + MIB
        assert walked.total_bytes <= planned.total_bytes + MIB


def test_plans_and_explanations_say_what_runs_again():
    table = costs()
    dear = {op: dataclasses.replace(c, saved_bytes=32 * MIB) for op, c in table.costs.items()}
    table = dataclasses.replace(table, costs=dear)
    plan = made(costs=table, recompute="auto", memory_limit=180 * MIB)
    said = explain(plan, graph(), table, time_limit_s=1.0)
    for stage, seconds in zip(plan.stages, said.recomputed_s, strict=True):
        assert (f"stage {stage.index} runs ops again" in str(said)) == bool(stage.recomputed)
        assert stage.backward_s - 2 * stage.forward_s <= seconds + 1e-9
    stages = stage_table(plan)
    assert stages.columns[-1].title == "runs again"
    assert [row[-1] for row in stages.rows] == [
        ", ".join(ops for (ops,) in s.recomputed) for s in plan.stages
    ]
    assert stage_table(made()).columns[-1].title == "memory"


def test_blocks_are_not_offered_where_the_backward_is_split():
    for name, offered in (("1f1b", True), ("zb-h1", False)):
        schedule = build(name, 3, 3, 6)
        settings_ = Settings(recompute="auto", overlap=False)
        table = dataclasses.replace(
            costs(),
            costs={op: dataclasses.replace(cost, saved_bytes=MIB) for op, cost in costs().costs.items()},
        )
        problem = formulate(Source.of(graph(), table, cluster(3, LINK), settings_), schedule)
        assert any(i.blocks for i in problem.items) == offered


def test_a_block_holds_what_it_takes_unless_another_keeps_it():
    table = costs()
    kept = {op: dataclasses.replace(c, saved_bytes=10_000) for op, c in table.costs.items()}
    hidden = 8 * 64 * 4

    def held(**saved_values: tuple[str, ...]) -> dict[str, int]:
        given_costs = {
            op: dataclasses.replace(c, saved_values=saved_values.get(op, ())) for op, c in kept.items()
        }
        table_ = dataclasses.replace(table, costs=given_costs)
        problem = formulate(
            Source.of(graph(), table_, cluster(), Settings(recompute="auto", overlap=False)),
            build("1f1b", 3, 3, 6),
        )
        return {i.ops[0]: i.blocks[0].held_bytes for i in problem.items if i.blocks}

    # no one says what it keeps: the mask counts for each layer
    assert held()["layer1"] == hidden + 8 * 8
    assert held()["layer2"] == hidden + 8 * 8
    # the first layer keeps the mask, so the others do not count it again
    said = held(layer0=("mask",))
    assert said["layer0"] == hidden + 8 * 8
    assert said["layer1"] == hidden
    # a layer whose own value is kept by itself for the next one still holds it
    assert held(layer1=("layer1", "mask"))["layer1"] == 2 * hidden + 8 * 8
