"""What is asked for seldom, and together with what else is: held to exhaustive search, or refused by name."""

import dataclasses
import itertools
import time

import pytest
from language_model import LINK, cluster, costs, graph, made

from autopipe.costs import CostTable, OpCost
from autopipe.errors import CostError, InfeasibleError, InputError
from autopipe.formula import parse_size
from autopipe.graph import Dim, Op, OpGraph, TensorSpec
from autopipe.hardware import Cluster, Device, Link
from autopipe.schedule import MOST_ACTIONS
from autopipe.simulator import simulate
from autopipe.solve import solve

SMALL = graph(3)
SLOW, FAST, FREE = Link(1e-3, 1e6), Link(1e-6, 1e12), Link()
UNLIKE = {(0, 1): SLOW, (1, 2): FAST, (2, 0): Link(0.0, 1e3), (2, 1): SLOW}
DEVICES = (Device(),) * 3


def ranks(*speeds: float, link: Link = LINK, **fields) -> Cluster:
    return Cluster(tuple(Device(speed=speed) for speed in speeds), local=link, **fields)


def asked(name: str, n_stages, on: Cluster, *, table: CostTable | None = None, **options):
    """What is asked of the small model, as the fuzz takes it."""
    from benchmarks.solver.drawn import Asked

    fields = {"n_stages": n_stages, "n_microbatches": 4, "schedule": name} | options
    return Asked(SMALL, table or costs(), on, fields)


def zeros(**fields) -> CostTable:
    return CostTable({name: OpCost(**fields) for name in costs().costs})


def without(*names: str) -> CostTable:
    table = costs()
    return CostTable({name: cost for name, cost in table.costs.items() if name not in names}, table.dims)


SEVERAL = ("interleaved", 4), ("zbv", 4), ("dualpipev", 4), ("looped-bfs", 4), ("zbv", 3)
PINS = {"embed": 0, "head": -1}, {"layer1": 1}, {"head": 2}, {"layer0": -1}, {"embed": 1, "layer2": -1}
HOSTS = {"hosts": (0, 1, 0), "remote": SLOW}


@pytest.mark.parametrize(("name", "n_stages"), SEVERAL)
@pytest.mark.parametrize("pin", PINS, ids=str)
def test_pins_of_ties_on_ranks_of_several_stages(name, n_stages, pin):
    from benchmarks.solver.fuzz import plan_fault

    for ties, limit in itertools.product(("auto", "colocate"), (None, 700_000)):
        given = asked(name, n_stages, cluster(2), pin=pin, ties=ties, recompute="auto", memory_limit=limit)
        assert plan_fault(given) is None


@pytest.mark.parametrize("recompute", ["never", "auto", "always"])
@pytest.mark.parametrize("limit", [530_000, 700_000])
@pytest.mark.parametrize(
    "fields",
    [
        {"links": UNLIKE},
        HOSTS,
        {**HOSTS, "nics": (0, 0, 0)},
        {**HOSTS, "hosts": (5, 5, 2), "cores": (1,) * 6},
    ],
    ids=["links", "hosts", "shared interfaces", "shared cores"],
)
def test_unlike_links_with_little_memory(fields, limit, recompute):
    from benchmarks.solver.fuzz import plan_fault

    given = asked("1f1b", 3, ranks(1, 2, 0.5, **fields), memory_limit=limit, recompute=recompute)
    assert plan_fault(given) is None


@pytest.mark.parametrize(
    "given",
    [
        asked("1f1b", 3, cluster(3), table=zeros()),
        asked("zbv", 4, cluster(2, FREE), table=zeros()),
        asked("interleaved", 4, cluster(2), table=zeros(), memory_limit=700_000),
        asked("auto", "auto", cluster(2), table=zeros()),
        asked("1f1b", 3, cluster(3), table=zeros(forward_s=1e-9)),
        asked("1f1b", 3, cluster(3), table=zeros(forward_s=1e6, backward_s=1e6)),
        asked("1f1b", 3, cluster(3), table=zeros(forward_s=1e-3, saved_bytes=2**50), memory_limit=2**59),
        asked("1f1b", 1, cluster(1)),
        asked("auto", "auto", cluster(1)),
        asked("interleaved", 3, cluster(1), memory_limit=1_500_000),
        asked("1f1b", 3, ranks(1e24, 1e-9, 1)),
        asked("1f1b", 3, ranks(1e24, 1e24, 1e24), overlap=False),
        asked("zbv", 4, ranks(1e-3, 1e20), memory_limit=700_000, recompute="auto"),
        asked("1f1b", 3, ranks(1e-3, 1e20, 3), memory_limit=700_000, recompute="always"),
        asked("1f1b", 3, ranks(1, 3, 0.2, links=UNLIKE), device_order="auto", memory_limit=530_000),
        asked("gpipe", 3, cluster(3), n_microbatches=1, recompute="auto", memory_limit=530_000),
        asked("1f1b", 3, cluster(3), pin={"mask": 2}, clone="never"),
        asked("1f1b", 3, cluster(3), uncut=["embed", "layer0", "layer1", "layer2"]),
    ],
    ids=lambda given: f"{given.options['schedule']}-{given.options['n_stages']}",
)
def test_costs_of_nothing_and_of_the_most_on_one_rank_and_on_unlike_ones(given):
    from benchmarks.solver.fuzz import plan_fault

    assert plan_fault(given) is None


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"n_stages": 10**18}, InputError, "n_stages is 1000000000000000000; it can be at most"),
        ({"n_stages": 2**20}, InputError, "n_microbatches is 6; it can be at most 1"),
        ({"n_stages": True}, InputError, "n_stages is True"),
        ({"n_stages": "3"}, InputError, "n_stages is '3'"),
        ({"n_microbatches": 0}, InputError, "n_microbatches is 0"),
        ({"n_microbatches": -1, "n_stages": "auto"}, InputError, "n_microbatches is -1"),
        ({"n_microbatches": "auto"}, InputError, "n_microbatches is 'auto'; it must be a whole number"),
        ({"n_microbatches": 10**30}, InputError, "n_microbatches is 10"),
        ({"n_stages": "auto", "min_ranks": 4}, InputError, "min_ranks is 4; it can be at most 3"),
        ({"n_stages": "auto", "min_ranks": 0}, InputError, "min_ranks is 0"),
        ({"overlap": "no"}, InputError, "overlap is 'no'; it must be True or False"),
        ({"pin": {"embed": 3}}, InputError, "pin 'embed' names stage 3"),
        ({"memory_limit": [1, 2]}, InputError, "2 entries for 3 ranks"),
        ({"memory_limit": float("inf")}, InputError, "cannot read inf as bytes"),
        ({"memory_limit": 0}, InfeasibleError, "at least 294.7 KiB on each rank would be needed"),
        ({"memory_limit": "1 KiB"}, InfeasibleError, "at least 294.7 KiB on each rank would be needed"),
        ({"memory_limit": "250 KiB"}, InfeasibleError, "at least n_stages=4 on as many ranks like these, or"),
        ({"cluster": ranks(1, 1, 1e-24)}, InputError, "check the costs"),
        ({"costs": zeros(forward_s=1e7)}, CostError, "forward_s of op 'embed'"),
        (
            {"costs": without("layer1", "layer4")},
            CostError,
            r"for 2 of the 9 ops .* of LM .*\(layer1, layer4\)",
        ),
        ({"costs": zeros(forward_s=1.4e-9)}, CostError, "is lost in whole nanoseconds"),
        ({"costs": CostTable({})}, CostError, "no cost for 9 of the 9 ops"),
        ({"costs": CostTable({"Layer1": OpCost(1e-3)})}, CostError, "profile the model as it is captured"),
        ({"cluster": cluster(1000)}, InputError, "3 stages on 1000 ranks"),
        ({"cluster": cluster(1000), "n_stages": 1000}, InfeasibleError, "9 stages at most"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_told_at_once(options, error, told):
    started = time.process_time()
    with pytest.raises(error, match=told):
        made(**options)
    assert time.process_time() - started < 2.0


def test_a_table_of_no_size_of_the_inputs_is_refused():
    rows = (TensorSpec((parse_size("8*batch"), 64), "float32", True),)
    ops = [Op("x", "input", "x", outputs=rows), Op("one", "module", "one", "one", outputs=rows)]
    ops += [Op("n", "method", "torch.Tensor.size", is_size=True), Op("output", "output", "output")]
    sized = OpGraph("Sized", tuple(ops), (("x", "one"), ("one", "output")), dims=(Dim("batch", 4),))
    with pytest.raises(CostError, match="at which batch its costs hold"):
        solve(sized, CostTable({"one": OpCost(1e-3)}), cluster(1), n_stages=1, n_microbatches=2)
    there = CostTable({"one": OpCost(1e-3)}, {"batch": 2})
    assert solve(sized, there, cluster(1), n_stages=1, n_microbatches=2).stages[0].ops == ("one", "n")


def test_a_thousand_ranks_are_as_many_as_the_model_has_use_for():
    many = Cluster(tuple(Device(speed=1 + rank % 7) for rank in range(1000)), local=LINK)
    plan = made(n_stages="auto", cluster=many, device_order="auto", n_microbatches=4)
    assert plan.n_stages <= 8
    assert all(plan.cluster.devices[rank].speed == 7 for rank in plan.placement)


@pytest.mark.parametrize("free", [{}, {"n_stages": "auto", "schedule": "auto"}])
def test_a_hundredth_of_a_second_has_a_plan_and_keeps_its_time(free):
    started = time.process_time()
    plan = made(time_limit_s=0.01, **free)
    assert time.process_time() - started < 1.0
    assert plan.bounds.bottleneck_lower_s <= plan.bounds.bottleneck_s
    assert plan.bounds.step_lower_s <= plan.step_s


def test_a_model_of_one_op_is_one_stage_wherever_it_is_free():
    hidden = (TensorSpec((8, 64), "float32", True),)
    ops = (Op("x", "input", "x", outputs=hidden), Op("one", "module", "one", "one", outputs=hidden))
    single = OpGraph("Single", (*ops, Op("output", "output", "output")), (("x", "one"), ("one", "output")))
    free = {"n_stages": "auto", "schedule": "auto"}
    plan = solve(single, CostTable({"one": OpCost(1e-3)}), cluster(3), n_microbatches=4, **free)
    assert plan.n_stages == 1


def test_one_byte_decides_with_one_rank_too_small():
    """The ranks' limits are what the plan takes; then any one of them a byte less."""
    plan = made(recompute="auto", memory_limit=[2_000_000] * 3)
    limits = [stage.memory_bytes for stage in plan.stages]
    assert made(recompute="auto", memory_limit=limits).bounds.bottleneck_s <= plan.bounds.bottleneck_s
    for rank in range(3):
        less = [limit - (x == rank) for x, limit in enumerate(limits)]
        try:
            other = made(recompute="auto", memory_limit=less)
        except InfeasibleError:
            continue
        assert all(s.memory_bytes <= most for s, most in zip(other.stages, less, strict=True))


TWO = (Device(), Device())


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cluster(2), lambda: Cluster((1, 2)), lambda: Cluster("ab"),
        lambda: Cluster(TWO, hosts=("a", "b")), lambda: Cluster(TWO, hosts=(0, -1)),
        lambda: Cluster(TWO, nics=0.5), lambda: Cluster(TWO, cores=None),
        lambda: Cluster(TWO, local=None), lambda: Cluster(TWO, remote=3),
        lambda: Cluster(TWO, links=[(0, 1)]), lambda: Cluster(TWO, links={(0, 1): 3}),
        lambda: Cluster(TWO, links={"01": Link()}), lambda: Cluster(TWO, links={(0, "1"): Link()}),
        lambda: Cluster(TWO).picked([0, 5]), lambda: Cluster(TWO).picked(["0"]),
        lambda: Device(flops_s=3), lambda: Device(name=None), lambda: Device(attention="flash"),
        lambda: Device(launches_ahead="yes"), lambda: Link(source=3),
    ],
)  # fmt: skip
def test_what_is_made_of_other_things_than_a_cluster_is_refused(make):
    with pytest.raises(InputError, match=r"must be|use one of|can be at most"):
        make()


@pytest.mark.parametrize("odd", ["x", None, (), b"1"])
def test_costs_that_are_no_numbers_are_refused(odd):
    table = costs()
    first = next(iter(table.costs))
    table = CostTable({**table.costs, first: OpCost(forward_s=odd)}, table.dims)
    with pytest.raises(CostError, match="forward_s of op"):
        solve(SMALL, table, Cluster(TWO), n_stages=2, n_microbatches=4)


def test_the_longest_step_is_simulated_in_seconds_and_a_longer_one_is_told_at_once():
    plan = made()
    most = MOST_ACTIONS // plan.n_stages
    started = time.process_time()
    assert simulate(dataclasses.replace(plan, n_microbatches=most)).step_s > 0
    assert time.process_time() - started < 6.0
    with pytest.raises(InputError, match=f"at most {most}"):
        simulate(dataclasses.replace(plan, n_microbatches=most + 1))
