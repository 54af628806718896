"""Where problems end: nothing to do, no one to wait for, not a byte to spare, more than anyone has."""

import dataclasses
import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from language_model import cluster, costs, made, stage_of

from autopipe.costs import CostTable, OpCost
from autopipe.errors import CostError, InfeasibleError, InputError, UndecidedError
from autopipe.graph import Op, OpGraph, TensorSpec
from autopipe.hardware import Link
from autopipe.memory import plan_memory, rank_memory, tied_bytes
from autopipe.simulator import plan_schedule
from autopipe.solve import Item, Net, Problem, Share, Stage, chain, solve
from autopipe.solve.proof.bounds import _beside_another

HIDDEN = (TensorSpec((8, 64), "float32", True),)


def line(works, k: int, *, price: int = 0, overlap: bool = True, **fields) -> Problem:
    """Items in a row, each of which hands one value on."""
    n = len(works)
    nets = tuple(Net(v, (v + 1,), price, price, f"v{v}") for v in range(n - 1))
    items = tuple(Item((f"o{v}",), w, 2 * w, **fields) for v, w in enumerate(works))
    edges = tuple(itertools.pairwise(range(n)))
    return Problem(items, edges, nets, (), tuple(Stage(s) for s in range(k)), overlap=overlap)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("n", "k", "price"), [(4096, 16, 0), (3000, 100, 1), (1200, 7, 2)])
def test_a_long_chain_of_equals_has_the_optimum_anyone_can_see(n, k, price, overlap):
    answer = chain(line([1] * n, k, price=price, overlap=overlap), time_limit_s=10.0)
    share = 3 * -(-n // k)
    # the first and the last stage have one neighbour each, and so room for what others move
    moves = 2 * price * (not overlap)
    assert share <= answer.bottleneck_ns <= share + moves
    assert answer.proved


@pytest.mark.parametrize("k", [1, 2, 5])
def test_items_that_cost_nothing_still_fill_every_stage(k):
    answer = chain(line([0] * 5, k), time_limit_s=5.0)
    assert answer.proved
    assert answer.bottleneck_ns == 0
    assert answer.stage_of is not None
    assert {*answer.stage_of} == {*range(k)}


def test_items_that_nothing_joins_are_packed():
    """No values, no edges: any item may lie in any stage, in any order."""
    items = tuple(Item((f"o{v}",), w) for v, w in enumerate((7, 3, 6, 4, 5, 5, 8, 2)))
    answer = chain(Problem(items, (), (), (), tuple(Stage(s) for s in range(4))), time_limit_s=10.0)
    assert answer.bottleneck_ns == 10
    assert answer.proved


@pytest.mark.parametrize(("n", "k"), [(300, 299), (300, 200), (600, 500)])
def test_almost_as_many_stages_as_items_are_proved(n, k):
    """Two of the items share a stage, however the others lie: no share of the work says so."""
    answer = chain(line([5] * n, k), time_limit_s=10.0)
    assert answer.proved
    assert answer.bottleneck_ns == 30
    assert chain(dataclasses.replace(line([5] * n, k), allow_empty=True), time_limit_s=10.0).lower_ns == 30


@settings(max_examples=80)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4))
def test_what_must_share_a_stage_is_no_more_than_the_least_there_is(works, k):
    least = min(
        max(sum(w for w, s in zip(works, stages, strict=True) if s == there) for there in range(k))
        for stages in itertools.product(range(k), repeat=len(works))
    )
    assert _beside_another(sorted(works), k) <= least


def branches(works, k: int) -> Problem:
    """Items side by side between two that take no time, in stages with room for as much as they do."""
    n, room = len(works), -(-sum(works) // k)
    items = [Item(("in",)), *(Item((f"b{v}",), w, 2 * w, w) for v, w in enumerate(works)), Item(("out",))]
    nets = [Net(0, tuple(range(1, n + 1)), 1, 1, "in"), *(Net(v, (n + 1,), 1, 1) for v in range(1, n + 1))]
    edges = tuple((net.producer, v) for net in nets for v in net.consumers)
    stages = tuple(Stage(s, limit_bytes=room + 1) for s in range(k))
    return Problem(tuple(items), tuple(sorted(edges)), tuple(nets), (), stages, overlap=True)


@pytest.mark.parametrize(
    ("problem", "least"),
    [
        (line([1] * 2500 + [10**9] + [1] * 2499, 8), 3 * 10**9),
        (line([10**12, *[1] * 999, 10**6, *[1] * 999], 3), 3 * 10**12),
        (branches([10] * 2000, 8), 7500),
        (
            Problem(
                tuple(Item((f"o{v}",), 5, 5) for v in range(2000)),
                tuple((v, v + 2) for v in range(1998)),
                tuple(Net(v, (v + 2,), 1, 1) for v in range(1998)),
                (),
                tuple(Stage(s) for s in range(8)),
                overlap=True,
            ),
            2500,
        ),
    ],
    ids=["one larger than all", "twelve orders", "2,000 branches", "two components"],
)
def test_odd_shapes_have_the_optimum_anyone_can_see(problem, least):
    answer = chain(problem, time_limit_s=10.0)
    assert answer.proved
    assert answer.bottleneck_ns == least


def test_a_weight_of_every_item_is_summed_by_every_stage():
    """Each stage pays for the whole sum, so the bound is its work and that."""
    tie = Share(tuple(range(40)), "w", sync_ns=9, more_ns=(10, 11, 12, 13, 14, 15), tied=True)
    answer = chain(dataclasses.replace(line([5] * 40, 8), shares=(tie,)), time_limit_s=10.0)
    assert answer.bottleneck_ns == 5 * 15 + 15
    assert answer.lower_ns <= answer.bottleneck_ns


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "cost-aware"])
def test_more_stages_than_ops_say_how_many_there_may_be(schedule):
    ops = (Op("x", "input", "x", outputs=HIDDEN), Op("one", "module", "one", "one", outputs=HIDDEN))
    ops += (Op("output", "output", "output"),)
    single = OpGraph("Single", ops, (("x", "one"), ("one", "output")))
    n = 4 if schedule == "interleaved" else 2
    with pytest.raises(InfeasibleError, match="can be cut into 1 stage at most"):
        solve(single, CostTable({"one": OpCost(1e-3)}), cluster(2), n_stages=n, n_microbatches=2)
    plan = solve(single, CostTable({"one": OpCost(1e-3)}), cluster(1), n_stages=1, n_microbatches=2)
    assert plan.bounds.proved
    assert plan.stages[0].ops == ("one",)


@pytest.mark.parametrize(
    ("schedule", "n_stages"), [("1f1b", 3), ("gpipe", 3), ("interleaved", 6), ("zbv", 6)]
)
def test_a_limit_is_kept_to_the_byte(schedule, n_stages):
    """At the least limit that is told to fit a plan fits; one byte less is proved to be too little."""
    limit, told = None, None
    for _ in range(40):
        try:
            plan = made(schedule=schedule, n_stages=n_stages, time_limit_s=20.0, memory_limit=limit)
        except InfeasibleError as error:
            told = error
            break
        held = rank_memory(plan_schedule(plan), plan_memory(plan), tied_bytes(plan))
        need = max(r.total_bytes for r in held)
        assert limit is None or need <= limit
        again = made(schedule=schedule, n_stages=n_stages, time_limit_s=20.0, memory_limit=need)
        assert again.step_s == plan.step_s
        limit = need - 1
    assert told is not None
    assert not isinstance(told, UndecidedError)


def test_pins_hold_with_everything_else_asked_for():
    pins = {"embed": 0, "layer3": 1, "head": -1}
    for schedule, recompute, ties in itertools.product(
        ("1f1b", "gpipe", "zb-h1", "cost-aware"), ("auto", "always"), ("auto", "sync")
    ):
        plan = made(
            schedule=schedule,
            recompute=recompute,
            ties=ties,
            pin=pins,
            clone="always",
            memory_limit="2MB",
            together=[("layer1", "layer2")],
            uncut=["layer4"],
            device_order="auto",
            sender_pays="receiver",
            time_limit_s=5.0,
        )
        assert {op: stage_of(plan, op) for op in pins} == {"embed": 0, "layer3": 1, "head": 2}
        assert stage_of(plan, "layer1") == stage_of(plan, "layer2")
        assert stage_of(plan, "layer4") == stage_of(plan, "layer5")
        assert plan.bounds.bottleneck_lower_s <= plan.bounds.bottleneck_s


@pytest.mark.parametrize(
    ("field", "value"),
    [("optimizer_s_per_byte", float("nan")), ("optimizer_s_per_tensor", -1.0), ("alone", float("inf"))],
)
def test_figures_of_a_whole_table_that_are_none_are_refused_by_name(field, value):
    with pytest.raises(CostError, match=field):
        made(costs=dataclasses.replace(costs(), **{field: value}))


def test_ties_that_no_link_could_ever_sum_are_refused():
    with pytest.raises(InputError, match="check the costs"):
        made(cluster=cluster(3, Link(0.0, 1e-3)))


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, float("nan")])
def test_links_that_move_nothing_are_refused(bandwidth):
    with pytest.raises(InputError, match="bandwidth_bytes_s"):
        Link(1e-5, bandwidth)


def test_links_that_take_for_ever_are_refused_and_those_that_take_nothing_are_free():
    with pytest.raises(InputError, match="latency_s"):
        Link(float("inf"), 1e9)
    plan = made(cluster=cluster(3, Link(0.0, float("inf"))))
    assert plan.bounds.proved


def test_many_ops_in_little_memory_are_planned_in_the_time():
    """Ranks keep unlike counts of microbatches in flight; the first have room for less than a share."""
    draw = random.Random(0)
    n, k = 4_000, 16
    works = [draw.choice((5, 40, 300)) for _ in range(n)]
    loose = line(works, k, price=30)
    items = tuple(
        dataclasses.replace(i, static_bytes=2 * w, saved_bytes=w)
        for i, w in zip(loose.items, works, strict=True)
    )
    room = int(0.8 * (2 + k) * sum(works) / k)
    stages = tuple(Stage(s, limit_bytes=room, in_flight=k - s) for s in range(k))
    started = time.process_time()
    answer = chain(dataclasses.replace(loose, items=items, stages=stages), time_limit_s=12.0)
    assert time.process_time() - started < 14.0
    assert answer.stage_of is not None
    # ranks with room for their share have some of the work that the first have no room for
    assert answer.bottleneck_ns <= 1.1 * answer.lower_ns


def test_one_value_that_hundreds_take_keeps_the_time_on_ranks_of_several_stages():
    """What a span receives is counted by how many takers came before it: for values with so many alone."""
    n = 320
    chained = line([100] * n, 4, price=5)
    everywhere = Net(0, tuple(range(2, n)), 7, 7, "cos")
    edges = {*chained.edges, *((0, v) for v in range(2, n))}
    stages = tuple(Stage(s % 2) for s in range(4))
    shares = (Share(tuple(range(1, n, 2)), "w", 0, 0, sync_ns=1, tied=True),)
    problem = dataclasses.replace(
        chained, edges=tuple(sorted(edges)), nets=(*chained.nets, everywhere), stages=stages, shares=shares
    )
    started = time.process_time()
    answer = chain(problem, time_limit_s=1.0)
    assert time.process_time() - started < 3.5
    assert answer.stage_of is not None
    assert answer.lower_ns <= answer.bottleneck_ns <= 1.02 * answer.lower_ns
