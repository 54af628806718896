"""Prices that depend on who holds what: links of unlike speed, senders paid per receiver, many-way ties."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_problems import problems, solved

from autopipe.costs import CostTable, OpCost
from autopipe.errors import InfeasibleError
from autopipe.graph import Op, OpGraph, TensorSpec
from autopipe.hardware import DIRECT_BYTES, Cluster, Device, Link
from autopipe.memory import plan_memory
from autopipe.schedule import StageTimes, Transfer, build
from autopipe.simulator import simulate_schedule
from autopipe.solve import Item, Net, Problem, Share, Stage, chain, solve
from autopipe.solve.definition.problem import HUGE, scaled
from autopipe.solve.making.source import cheapest_link, slowest_link


@st.composite
def entangled(draw) -> Problem:
    """A problem of the oracle with true prices above those of its nets and shares."""
    problem = dataclasses.replace(draw(problems()), sender_pays=draw(st.sampled_from(("once", "receiver"))))
    more = st.lists(st.integers(0, 4), min_size=1, max_size=2)
    shares = tuple(
        dataclasses.replace(s, more_ns=tuple(itertools.accumulate(draw(more), initial=s.sync_ns))[1:])
        for s in problem.shares
    )
    pairs = None
    if draw(st.booleans()):
        pairs = {
            (a, b): tuple(
                (n.send_ns + draw(st.integers(0, 3)), n.receive_ns + draw(st.integers(0, 3)))
                for n in problem.nets
            )
            for a, b in itertools.permutations(range(problem.n_stages), 2)
        }
    link_of = None
    if draw(st.booleans()):
        longer = 0, draw(st.integers(0, 5)), draw(st.integers(0, 9))
        shares = tuple(
            dataclasses.replace(
                s, link_ns=tuple(tuple(n + x for x in longer) for n in (s.sync_ns, *s.more_ns))
            )
            for s in shares
        )
        pairs_of = itertools.permutations(range(problem.n_stages), 2)
        link_of = {pair: draw(st.integers(0, 2)) for pair in pairs_of}
    return dataclasses.replace(problem, shares=shares, pair_ns=pairs, link_of=link_of)


@settings(max_examples=300)
@given(entangled())
def test_equals_exhaustive_search_with_true_prices(problem):
    if (found := solved(problem)) is not None:
        answer, least_ns = found
        assert answer.bottleneck_ns == least_ns
        assert answer.proved


_LONG_NS = 4200
"""Whole nanoseconds, and even, at every speed that is drawn."""


def choices(problem, stage_of):
    """The bottleneck under every choice of the stages that compute a value again, by the formula."""
    takers = [sorted({stage_of[v] for v in net.consumers} - {stage_of[net.producer]}) for net in problem.nets]
    rows = [
        itertools.product((True, False) if net.again_ns >= 0 else (False,), repeat=len(there))
        for net, there in zip(problem.nets, takers, strict=True)
    ]
    both = max if problem.overlap else lambda *x: sum(x)
    for chosen in itertools.product(*rows):
        again, moving = [0] * problem.n_stages, [0] * problem.n_stages
        for n, (net, there, row) in enumerate(zip(problem.nets, takers, chosen, strict=True)):
            here, sends = stage_of[net.producer], [0]
            for s, redo in zip(there, row, strict=True):
                pair = problem.pair_ns[here, s][n] if problem.pair_ns else (net.send_ns, net.receive_ns)
                if redo:
                    again[s] += scaled(net.again_ns, problem.stages[s].speed)
                else:
                    moving[s] += pair[1]
                    sends.append(pair[0])
            moving[here] += max(sends) if problem.sender_pays == "once" else sum(sends)
        ways = list(kept_ways(problem, stage_of, takers, chosen))
        totals = []
        for s, stage in enumerate(problem.stages):
            fitting = [row[s] for row in ways if row[s].memory_bytes <= stage.limit_bytes]
            works = [w.forward_ns + w.backward_ns + again[s] * (1 + w.recompute) for w in fitting]
            sums = (both(w, moving[s]) + x.sync_ns for w, x in zip(works, fitting, strict=True))
            totals.append(min(sums, default=HUGE))
        yield max(totals)


def kept_ways(problem, stage_of, takers, chosen):
    """Each stage's load without transfers, with blocks computed again where that fits, and as a whole.

    Of what a stage computes again it receives nothing; its workspace and what is kept are an item's.
    """
    nets, beside, places = [], [], []
    for net, there, row in zip(problem.nets, takers, chosen, strict=True):
        redone = {s for s, redo in zip(there, row, strict=True) if redo}
        received = tuple(v for v in net.consumers if stage_of[v] not in redone)
        nets.append(
            dataclasses.replace(
                net.without_bytes(),
                consumers=received,
                send_ns=0,
                receive_ns=0,
                again_ns=-1,
                n_bytes=net.n_bytes,
                sent_bytes=net.sent_bytes,
            )
        )
        for s in there:
            held = net.again_bytes * (s in redone)
            beside.append(Item(saved_bytes=net.kept_bytes, workspace_bytes=held))
            places.append(s)
    bare = dataclasses.replace(
        problem, nets=tuple(nets), pair_ns=None, items=(*problem.items, *beside), sender_pays="once"
    )
    homes = (*stage_of, *places)
    if problem.recompute != "never":
        yield dataclasses.replace(bare, recompute="always").loads(homes)
    if problem.recompute != "always":
        # so long a forward that blocks are chosen over the whole stage
        long = tuple(Item(forward_ns=_LONG_NS) for _ in problem.stages)
        slow = dataclasses.replace(bare, items=(*bare.items, *long))
        yield tuple(
            dataclasses.replace(
                load,
                forward_ns=load.forward_ns - (took := scaled(_LONG_NS, stage.speed)),
                backward_ns=load.backward_ns - took * load.recompute,
            )
            for load, stage in zip(
                slow.loads((*homes, *range(problem.n_stages))), problem.stages, strict=True
            )
        )


@st.composite
def copied(draw) -> Problem:
    """A problem with true prices where some values may be computed again by those that take them."""
    problem = draw(entangled())
    again, small = st.sampled_from((-1, 0, 1, 2, 4)), st.sampled_from((0, 0, 3, 7))
    nets = []
    for net in problem.nets:
        net = dataclasses.replace(net, again_ns=draw(again))
        if net.again_ns >= 0:
            net = dataclasses.replace(net, again_bytes=draw(small), kept_bytes=draw(small))
        nets.append(net)
    return dataclasses.replace(problem, nets=tuple(nets))


@settings(max_examples=100)
@given(copied())
def test_each_taker_receives_or_computes_again_whichever_is_best(problem):
    best = HUGE
    for stage_of in itertools.product(range(problem.n_stages), repeat=len(problem.items)):
        if problem.is_valid(stage_of):
            least_ns = min(choices(problem, stage_of))
            assert min(problem.bottleneck(problem.loads(stage_of)), HUGE) == least_ns
            best = min(best, least_ns)
    answer = chain(problem)
    assert (answer.stage_of is None) == (best >= HUGE)
    if answer.stage_of is not None:
        assert answer.bottleneck_ns == best == problem.bottleneck(problem.loads(answer.stage_of))
        assert answer.proved


def masked() -> tuple[OpGraph, CostTable]:
    """Three layers that all take a mask, which costs half a millisecond to make."""
    wide = (TensorSpec((8, 64), "float32", True),)
    ids, mask = TensorSpec((8,), "int64"), TensorSpec((100, 10), "float32")
    ops = [Op("ids", "input", "ids", outputs=(ids,))]
    ops.append(Op("range", "function", "torch.arange", outputs=(ids,), is_movable=True))
    ops.append(Op("mask", "function", "torch.tril", outputs=(mask,), is_movable=True))
    ops += [Op(f"layer{i}", "module", f"layer{i}", f"layer{i}", outputs=wide) for i in range(3)]
    ops.append(Op("output", "output", "output"))
    edges = [("ids", "range"), ("range", "mask"), *(("mask", f"layer{i}") for i in range(3))]
    edges += itertools.pairwise(("ids", "layer0", "layer1", "layer2", "output"))
    place = {op.name: x for x, op in enumerate(ops)}
    edges.sort(key=lambda e: (place[e[0]], place[e[1]]))
    costs = {f"layer{i}": OpCost(10e-3, 20e-3) for i in range(3)}
    costs |= {"range": OpCost(1e-4), "mask": OpCost(4e-4)}
    return OpGraph("Masked", tuple(ops), tuple(edges)), CostTable(costs)


def test_a_stage_behind_a_slow_link_computes_the_mask_again():
    """4 kB: 0.4 ms from stage 0 to 1, 4 ms to 2, against 0.5 ms to make it there."""
    graph, costs = masked()
    near, far = Link(0.0, 1e7), Link(0.0, 1e6)
    devices = tuple(Device("d") for _ in range(3))
    cluster = Cluster(devices, local=near, links={(0, 2): far, (2, 0): far})
    plan = solve(graph, costs, cluster, n_stages=3, n_microbatches=6, overlap=False)
    assert plan.stages_of["mask"] == plan.stages_of["range"] == (0, 2)
    assert [b.destinations for b in plan.boundaries if b.value == "mask"] == [(1,)]
    assert plan.bounds.proved
    assert plan.stages[2].forward_s == pytest.approx(10.5e-3)
    sent = solve(graph, costs, cluster, n_stages=3, n_microbatches=6, overlap=False, clone="never")
    assert sent.bounds.bottleneck_s > plan.bounds.bottleneck_s
    assert sent.stages_of["mask"] == (0,)


def test_a_mask_that_has_no_room_to_arrive_is_made_where_it_is_needed():
    """Making it takes 0.5 ms, receiving it 0.4 and 8 kB of buffers; each microbatch in flight keeps 4 kB."""
    graph, costs = masked()
    made = dataclasses.replace(costs["mask"], saved_bytes=4000, workspace_bytes=1000)
    costs = dataclasses.replace(costs, costs={**costs.costs, "mask": made})
    cluster = Cluster(tuple(Device("d") for _ in range(3)), local=Link(0.0, 1e7))
    asked = {"n_stages": 3, "n_microbatches": 6, "overlap": False, "device_order": "given"}
    asked["pin"] = {f"layer{i}": i for i in range(3)}
    free = solve(graph, costs, cluster, **asked)
    assert free.stages_of["mask"] == (0,)
    layer, mask = 2 * 8 * 64 * 4, 4000
    assert [s.memory_bytes for s in free.stages] == [
        3 * mask + layer // 2 + 1000, 2 * mask + 2 * mask + layer // 2 + layer, mask + 2 * mask + layer
    ]  # fmt: skip
    limits = free.stages[0].memory_bytes, 2 * mask + layer // 2 + layer + 1000, mask + layer + 1000
    tight = solve(graph, costs, cluster, memory_limit=list(limits), **asked)
    assert tight.stages_of["mask"] == (0, 1, 2)
    assert tuple(s.memory_bytes for s in tight.stages) == limits
    for plan in (free, tight):
        assert [m.total_bytes for m in plan_memory(plan)] == [s.memory_bytes for s in plan.stages]
        walked = [m.total_bytes for m in plan_memory(plan, costs)]
        assert all(n >= s.memory_bytes for n, s in zip(walked, plan.stages, strict=True))
    for rank in (1, 2):
        short = [n - (r == rank) for r, n in enumerate(limits)]
        with pytest.raises(InfeasibleError):
            solve(graph, costs, cluster, memory_limit=short, **asked)


@pytest.mark.parametrize(("n_stages", "n_values"), [(8, 3), (16, 3), (64, 3), (4, 12)])
@pytest.mark.parametrize("n_arriving", [0, 1])
def test_what_fits_is_found_among_more_choices_than_can_be_looked_at(n_stages, n_values, n_arriving):
    """To receive takes 1 ns and 20 bytes, to make again 20 ns: each receives what it has room for."""
    items = tuple(Item((f"o{s}",), 100) for s in range(n_stages))
    takers = tuple(range(1, n_stages))
    nets = tuple(Net(0, takers, 1, 1, f"v{x}", n_bytes=10, again_ns=20) for x in range(n_values))
    stages = tuple(Stage(s, limit_bytes=20 * n_arriving) for s in range(n_stages))
    problem = Problem(items, tuple(itertools.pairwise(range(n_stages))), nets, (), stages)
    loads = problem.loads(range(n_stages))
    least_ns = 100 + n_arriving + 20 * (n_values - n_arriving)
    assert problem.least(loads) <= least_ns == problem.bottleneck(loads)
    answer = chain(problem, time_limit_s=1.0)
    assert answer.bottleneck_ns == least_ns >= answer.lower_ns


def test_a_rank_that_is_short_whether_values_are_received_or_made_again_is_not_left_open():
    """Rank 1 is short of room whether it receives the last value, 10 ns dearer to make again, or not."""
    items = tuple(Item((f"o{v}",), 1, 1, n) for v, n in enumerate((1, 15, 1, 15)))
    nets = (Net(0, (3,), 20, 20, "o0", n_bytes=5, again_ns=10),)
    stages = tuple(Stage(s % 2, limit_bytes=25) for s in range(4))
    problem = Problem(items, tuple(itertools.pairwise(range(4))), nets, (), stages)
    assert problem.least(problem.loads(range(4))) >= HUGE


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
@pytest.mark.parametrize("limit_bytes", [19, 20])
def test_a_stage_of_the_same_rank_makes_a_value_again_where_its_buffers_have_no_room(n_ranks, limit_bytes):
    """Taken from a stage of its own rank, a value waits for no message, and has two buffers of 10 bytes."""
    n_stages, is_short = 2 * n_ranks, limit_bytes < 20
    items = tuple(Item((f"o{s}",), 100) for s in range(n_stages))
    nets = (Net(0, (n_ranks,), 1, 1, "x", n_bytes=10, again_ns=30),)
    stages = tuple(Stage(s % n_ranks, limit_bytes=limit_bytes) for s in range(n_stages))
    problem = Problem(items, tuple(itertools.pairwise(range(n_stages))), nets, (), stages)
    loads = problem.loads(range(n_stages))
    assert loads[n_ranks].copies == ("x",) * is_short
    assert problem.bottleneck(loads) == 200 + 30 * is_short == chain(problem).bottleneck_ns


def test_a_tie_of_three_costs_more_than_one_of_two():
    share = Share((0, 1, 2), "w", sync_ns=10, more_ns=(15,))
    assert [share.price_ns(n) for n in (1, 2, 3, 4)] == [0, 10, 15, 15]
    items = tuple(Item((f"o{v}",), 5, 5) for v in range(3))
    problem = Problem(items, ((0, 1), (1, 2)), (), (share,), tuple(Stage(s) for s in range(3)))
    assert [load.sync_ns for load in problem.loads((0, 1, 2))] == [15, 15, 15]
    assert [load.sync_ns for load in problem.loads((0, 0, 2))] == [10, 0, 10]
    assert [load.sync_ns for load in problem.loads((1, 1, 1))] == [0, 0, 0]


@pytest.mark.parametrize("n_ranks", [2, 3, 8])
def test_an_all_reduce_goes_twice_round_the_ring(n_ranks):
    link = Link(1e-3, 1e6)
    assert link.all_reduce_s(1e6, n_ranks) == pytest.approx(2 * (n_ranks - 1) * (1e-3 + 1 / n_ranks))
    assert link.all_reduce_s(1e6, 1) == 0
    working = dataclasses.replace(link, host_s=1e-4, host_s_per_byte=1e-9)
    pieces_s = 2 * (n_ranks - 1) * 2 * (1e-4 + 1e-9 * 1e6 / n_ranks)  # each is sent, and one received
    more_s = pieces_s + 2 * 1e-3  # into a row and back
    assert working.all_reduce_s(1e6, n_ranks) - link.all_reduce_s(1e6, n_ranks) == pytest.approx(more_s)
    assert working.all_reduce_s(1e6, 1) == 0


DIRECT = Link(1e-3, 1e6, host_s=2e-4, host_s_per_byte=1e-9, direct_s=1e-5, direct_host_s=2e-6)
SHARED = dataclasses.replace(
    DIRECT, direct_s_per_byte=1e-10, direct_host_s_per_byte=5e-11, direct_below_bytes=1 << 25
)


def test_small_messages_go_directly_where_they_can():
    small, large = DIRECT_BYTES - 1, DIRECT_BYTES
    assert (DIRECT.seconds(small), DIRECT.working_s(small)) == (1e-5, 2e-6)
    assert DIRECT.parts(small) == (0.0, 1e-5)
    plain = dataclasses.replace(DIRECT, direct_s=0.0)
    for link, n_bytes in ((DIRECT, large), (plain, large), (plain, small)):
        assert link.seconds(n_bytes) == pytest.approx(1e-3 + n_bytes / 1e6)
        assert link.working_s(n_bytes) == pytest.approx(2e-4 + n_bytes * 1e-9)
    assert DIRECT.seconds(0) == DIRECT.working_s(0) == 0.0
    # a sum over ranks goes through the communicator, however small its pieces
    assert DIRECT.all_reduce_s(64, 4) == plain.all_reduce_s(64, 4)
    cluster = Cluster.uniform(2, link=DIRECT)
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_messages_that_go_directly_take_longer_the_larger_they_are():
    for n_bytes in (1, DIRECT_BYTES, (1 << 25) - 1):
        assert SHARED.seconds(n_bytes) == pytest.approx(1e-5 + n_bytes * 1e-10)
        assert SHARED.parts(n_bytes)[0] == 0.0  # no link is held: each rank copies for itself
        assert SHARED.working_s(n_bytes) == pytest.approx(2e-6 + n_bytes * 5e-11)
    assert SHARED.seconds(1 << 25) == DIRECT.seconds(1 << 25)
    assert SHARED.all_reduce_s(1 << 20, 4) == DIRECT.all_reduce_s(1 << 20, 4)
    cluster = Cluster.uniform(2, link=SHARED)
    assert Cluster.from_dict(cluster.to_dict()) == cluster


SIZES = 1, DIRECT_BYTES - 1, DIRECT_BYTES, 1 << 20, 1 << 24, 1 << 25, 1 << 28


@pytest.mark.parametrize("latency_s", [0.0, 1e-6, 1e-3])
@pytest.mark.parametrize("n_links", [1, 2, 3, 4])
def test_prices_that_bound_all_links_are_above_and_below_each(latency_s, n_links):
    kinds = SHARED, DIRECT, Link(latency_s, 1e7), Link(5e-4, 1e5, direct_s=2e-6, direct_s_per_byte=1e-6)
    pairs = (0, 1), (1, 0), (0, 2), (2, 0)
    for chosen in itertools.combinations(kinds, n_links):
        links = dict(zip(pairs, chosen * 4, strict=False))
        there = Cluster(Cluster.uniform(3).devices, links=links, local=chosen[0])
        least, most = cheapest_link(there), slowest_link(there)
        for n_bytes in SIZES:
            found = [link.seconds(n_bytes) for link in chosen]
            assert least.seconds(n_bytes) <= min(found) + 1e-12
            assert most.seconds(n_bytes) >= max(found) - 1e-12
            assert most.working_s(n_bytes) >= max(link.working_s(n_bytes) for link in chosen)


@pytest.mark.parametrize("latency_s", [0.0, 1e-6, 1e-3])
def test_a_price_that_bounds_them_all_is_above_none(latency_s):
    kinds = DIRECT, Link(latency_s, 1e7), Link(5e-4, 1e5, direct_s=2e-6)
    links = dict(zip(((0, 1), (1, 0), (0, 2)), kinds, strict=True))
    least = cheapest_link(Cluster(Cluster.uniform(3).devices, links=links, local=DIRECT))
    for n_bytes in (1, DIRECT_BYTES - 1, DIRECT_BYTES, 1 << 20):
        assert least.seconds(n_bytes) <= min(link.seconds(n_bytes) for link in kinds) + 1e-12
    plain = cheapest_link(Cluster.uniform(3, link=Link(1e-3, 1e6)))
    assert plain.seconds(8) == Link(1e-3, 1e6).seconds(8)


def test_a_step_of_small_messages_is_priced_with_the_way_they_take():
    schedule, times = build("1f1b", 2, 2, 4), (StageTimes(1.0, 2.0),) * 2
    ways = {True: DIRECT, False: dataclasses.replace(DIRECT, direct_s=0.0)}
    for n_bytes in (100, 2 * DIRECT_BYTES):
        steps = {
            is_direct: simulate_schedule(
                schedule, times, (Transfer(0, 1, n_bytes),), Cluster.uniform(2, link=link)
            ).step_s
            for is_direct, link in ways.items()
        }
        assert (steps[True] < steps[False]) is (n_bytes < DIRECT_BYTES)
