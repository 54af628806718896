"""Ranks of one host that share a network interface, and stages laid host by host."""

import dataclasses
import itertools
import random
import time

import pytest
from language_model import cluster, costs, graph, made

from autopipe.errors import InputError
from autopipe.hardware import Cluster, Link
from autopipe.schedule import build
from autopipe.solve import Item, Net, Problem, Stage, chain
from autopipe.solve.making.formulate import formulate
from autopipe.solve.making.options import Settings
from autopipe.solve.making.source import Source
from benchmarks.solver.exhaustive import exhaustive

NEAR, FAR = Link(1e-5, 1e10), Link(1e-4, 1e8)


def two_by_two(nics=(0, 0, 0, 0)) -> Problem:
    """Four stages on two hosts that all send to one another; the skips cross between hosts."""
    items = tuple(Item((f"o{v}",), 10, 20) for v in range(6))
    nets = (*(Net(v, (v + 1,), 6, 6, f"v{v}") for v in range(5)), Net(0, (3, 5), 8, 8), Net(1, (4,), 9, 9))
    edges = tuple(sorted({(n.producer, c) for n in nets for c in n.consumers}))
    stages = tuple(Stage(s, host=s // 2, nic=2 * (s // 2) + nics[s]) for s in range(4))
    return Problem(items, edges, nets, (), stages, overlap=True)


def test_an_interface_is_loaded_with_every_message_of_its_ranks_to_other_hosts():
    problem = two_by_two()
    loads = problem.loads((0, 0, 1, 2, 2, 3))
    # stage 0 sends o0 to stages 2 and 3 and o1 to stage 2, stage 1 sends o2 to stage 2
    assert [load.wire_ns for load in loads] == [8 + 8 + 9, 6, 8 + 9 + 6, 8]
    assert problem.loads_of(loads)[4:] == [31, 31]
    assert problem.bottleneck(loads) == 60
    heavy = dataclasses.replace(problem, items=tuple(Item(i.ops, 1, 1) for i in problem.items))
    assert heavy.bottleneck(heavy.loads((0, 0, 1, 2, 2, 3))) == 31


@pytest.mark.parametrize("work", [1, 5, 12])
@pytest.mark.parametrize("nics", [(0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 0, 0)])
def test_the_least_bottleneck_with_shared_interfaces_is_found_and_proved(work, nics):
    problem = two_by_two(nics)
    items = tuple(Item(i.ops, work + v % 3, work) for v, i in enumerate(problem.items))
    problem = dataclasses.replace(problem, items=items)
    answer, best = chain(problem), exhaustive(problem)
    assert best is not None
    assert answer.proved
    assert answer.bottleneck_ns == best[0]


def test_sharing_an_interface_never_makes_a_plan_look_faster():
    apart = made(cluster=Cluster.of_hosts(2, 2, local=NEAR, remote=FAR), n_stages=4)
    shared = made(cluster=Cluster.of_hosts(2, 2, local=NEAR, remote=FAR, nics_per_host=1), n_stages=4)
    assert shared.bounds.bottleneck_s >= apart.bounds.bottleneck_s
    assert shared.step_s >= apart.step_s


@pytest.mark.parametrize(
    ("n", "n_hosts", "overlap"), [(64, 2, True), (64, 64, True), (64, 8, False), (64, 64, False)]
)
def test_hosts_that_share_interfaces_are_proved_like_one(n, n_hosts, overlap):
    """Only one rank of a host sends on; its interface has no more to do than the rank itself."""
    items = (*(Item((f"l{v}",), 1_000, 2_000) for v in range(5 * n)), Item(("head",), 2_500, 5_000))
    nets = tuple(Net(v, (v + 1,), 300, 300, f"v{v}") for v in range(len(items) - 1))
    edges = tuple((v, v + 1) for v in range(len(items) - 1))
    there = Cluster.of_hosts(n_hosts, n // n_hosts, nics_per_host=1)
    far = tuple((900, 900) for _ in nets)
    near = tuple((300, 300) for _ in nets)
    pairs = {
        (a, b): near if there.host(a) == there.host(b) else far
        for a, b in itertools.permutations(range(n), 2)
    }
    stages = tuple(Stage(s, host=there.host(s), nic=there.shared_nics.get(s, -1)) for s in range(n))
    started = time.process_time()
    answer = chain(Problem(items, edges, nets, (), stages, pairs, overlap=overlap), time_limit_s=60.0)
    assert answer.proved
    assert time.process_time() - started < 5.0


def test_stages_go_host_by_host_unless_told_otherwise():
    mixed = Cluster(cluster(6).devices, (1, 0, 1, 0, 1, 0), NEAR, FAR)
    plan = made(cluster=mixed, n_stages=6)
    assert plan.placement == (0, 2, 4, 1, 3, 5)
    given = made(cluster=mixed, n_stages=6, device_order="given")
    assert given.placement == (0, 1, 2, 3, 4, 5)
    assert plan.step_s < given.step_s
    best = made(cluster=mixed, n_stages=6, device_order="auto")
    assert best.step_s <= plan.step_s
    assert best.bounds.bottleneck_lower_s <= plan.bounds.bottleneck_lower_s


@pytest.mark.parametrize("schedule", ["forward-only", "1f1b"])
def test_any_order_of_many_hosts_is_proved(schedule):
    """At once where the first meets the bound; trained, the tie of first and last is best within a host."""
    hosts = tuple(r % 4 for r in range(6))
    there = Cluster(cluster(6).devices, hosts, NEAR, dataclasses.replace(FAR, bandwidth_bytes_s=1e9))
    started = time.process_time()
    options = {"device_order": "auto", "clone": "always", "time_limit_s": 20.0, "schedule": schedule}
    plan = made(cluster=there, n_stages=6, **options)
    assert plan.bounds.proved
    if schedule == "1f1b":
        assert hosts[plan.placement[0]] == hosts[plan.placement[-1]]
        order = (0, 1, 5, 2, 3, 4)  # its best bottleneck's step alone is longer than six other orders'
        given = made(cluster=there.picked(order), n_stages=6, **options | {"device_order": "given"})
        assert plan.step_s <= given.step_s * (1 + 1e-9)
    else:
        assert time.process_time() - started < 6.0


def test_an_interface_that_only_one_stage_uses_is_that_stages_own():
    there = Cluster.of_hosts(3, 2, local=NEAR, remote=FAR, nics_per_host=1)
    source = Source.of(graph(), costs(), there.picked((0, 2, 4)), Settings())
    problem = formulate(source, build("1f1b", 3, 3, 6))
    assert {s.nic for s in problem.stages} == {-1}


def test_clusters_say_who_shares_an_interface():
    there = Cluster.of_hosts(2, 4, local=NEAR, remote=FAR, nics_per_host=2)
    assert there.shared_nics == {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2, 6: 3, 7: 3}
    assert there.wires(0, 3) == ()
    assert there.wires(1, 6) == (0, 7)
    assert Cluster.from_dict(there.to_dict()) == there
    assert there.picked((0, 2, 5)).shared_nics == {}
    with pytest.raises(InputError, match="nics has 1 entries for 8 ranks"):
        dataclasses.replace(there, nics=(0,))
    assert Cluster(there.devices, (0, 1, 0, 0, 1, 0, 0, 1)).with_nics(2).nics == (0, 0, 0, 0, 0, 1, 1, 1)
    assert Cluster.of_hosts(2, 4, nics_per_host=4).shared_nics == {}
    with pytest.raises(InputError, match="nics_per_host is 5; it can be at most 4"):
        Cluster.of_hosts(2, 4, nics_per_host=5)


def test_the_kinds_of_links_are_those_of_all_pairs():
    for seed in range(300):
        draw = random.Random(seed)
        n = draw.randint(1, 5)
        hosts = tuple(draw.randint(0, 2) for _ in range(n)) if draw.random() < 0.7 else ()
        given, some = [Link(0, 1.0 + x) for x in range(3)], draw.choice((0, 0.5, 1))
        links = {p: draw.choice(given) for p in itertools.permutations(range(n), 2) if draw.random() < some}
        there = Cluster(cluster(n).devices, hosts, Link(0, 10.0), Link(0, 20.0), links)
        pairs = {there.link(a, b) for a, b in itertools.permutations(range(n), 2)}
        assert set(there.kinds) == pairs
