"""Steps, bottlenecks and bytes of small plans, worked out by hand beside each.

Ops take 1 s forward and 2 s backward, make 1 MB, keep 100 B, need 7 B while they run and have 1,000 B of
weights; links move 1 MB/s at once, so a value takes 1 s each way. Two microbatches, 1F1B, unless said.
"""

import dataclasses
import math

import pytest

from autopipe.costs import CostTable, OpCost
from autopipe.errors import InfeasibleError
from autopipe.graph import Op, OpGraph, ParameterSpec, TensorSpec
from autopipe.hardware import Cluster, Device, Link
from autopipe.plans import Plan
from autopipe.simulator import simulate
from autopipe.solve import solve

MB = 1_000_000
LINK = Link(0.0, MB)
COST = OpCost(1.0, 2.0, 1.0, 1.0, saved_bytes=100, workspace_bytes=7)
AGREED_S, LOSS_S = 24 / MB, 8 / MB
"""Ranks show each the next 24 B before a step, and the last rank sends the others 8 B, the loss."""


def planned(
    takes: dict[str, str],
    n_stages: int,
    *,
    cost: OpCost = COST,
    tied: str = "",
    cluster: Cluster | None = None,
    fields: dict[str, float] | None = None,
    **options: object,
) -> Plan:
    """A plan of ops that each take those written beside them; those in ``tied`` share their weight."""
    value = TensorSpec((MB // 4,), "float32", requires_grad=True)
    ops = [Op("x", "input", "x", outputs=(value,))]
    edges = []
    weight = {name: tied[0] if name in tied else name for name in takes}
    for name, before in takes.items():
        ops.append(Op(name, "module", name, name, outputs=(value,), parameters=(f"{weight[name]}.w",)))
        edges += [(b, name) for b in before or "x"]
    edges.append((list(takes)[-1], "output"))
    ops.append(Op("output", "output", "output"))
    place = {op.name: i for i, op in enumerate(ops)}
    held = {
        w: tuple(f"{name}.w" for name in takes if weight[name] == w) for w in dict.fromkeys(weight.values())
    }
    parameters = tuple(ParameterSpec(f"{w}.w", names, (250,), "float32") for w, names in held.items())
    edges.sort(key=lambda e: (place[e[0]], place[e[1]]))
    graph = OpGraph("Chain", tuple(ops), tuple(edges), parameters=parameters)
    table = CostTable(dict.fromkeys(takes, cost), **(fields or {}))
    ranks = cluster or Cluster.uniform(n_stages, link=LINK)
    asked = {"n_stages": n_stages, "n_microbatches": 2, "schedule": "1f1b"} | options
    return solve(graph, table, ranks, **asked)


def seconds(plan: Plan) -> tuple[float, float]:
    """The bottleneck and the step."""
    assert plan.bounds.proved
    return plan.bounds.bottleneck_s, plan.step_s


TWO = {"a": "", "b": "a"}


def about(*values: float) -> object:
    return pytest.approx(values, abs=1e-9)


def test_two_stages():
    """Rank 1 has F0 at 2, when it came, until 3, B0 until 5, F1 until 6, B1 until 8.

    Rank 0 has F0 and F1 until 2; B0's gradient comes at 6, B1's at 9, and it is done at 11. A stage works for
    3 s a microbatch and moves a value and its gradient for 2.
    """
    assert seconds(planned(TWO, 2)) == about(3, 11 + AGREED_S)
    assert seconds(planned(TWO, 2, overlap=False))[0] == pytest.approx(3 + 2)


@pytest.mark.parametrize(("n", "step_s"), [(1, 8), (2, 11), (3, 16), (4, 19)])
def test_any_number_of_microbatches(n, step_s):
    """One is F, a second on the way, F and B, a second on the way, B. Of more, the start is that of two.

    Of three, rank 0 has B0 from 6, F2 from 8, B1 from 9 to 11; F2 comes at 10, rank 1 has it until 11 and B2
    until 13, which rank 0 has from 14 to 16. Of four, F3 leaves at 12; rank 1 has it from 13, after B2, and
    B3 until 16; rank 0 has B2 from 14 and B3 from 17 to 19.
    """
    assert seconds(planned(TWO, 2, n_microbatches=n)) == about(3, step_s + AGREED_S)


def test_latency_and_the_first_message():
    """As above with 0.5 s before each arrives: F0 comes at 2.5; B0's gradient leaves at 5.5, comes at 7.

    F1 then runs at 5.5 until 6.5, B1 until 8.5; its gradient comes at 10, and rank 0 is done at 12.
    """
    cluster = Cluster.uniform(2, link=Link(0.5, MB))
    assert seconds(planned(TWO, 2, cluster=cluster)) == about(3, 12 + 0.5 + AGREED_S)


def test_the_optimizer_takes_time_for_bytes_and_tensors():
    """1,000 B at 1 ms each and one tensor at 0.25 s, after rank 0's last action."""
    plan = planned(TWO, 2, fields={"optimizer_s_per_byte": 1e-3, "optimizer_s_per_tensor": 0.25})
    assert seconds(plan) == about(3, 11 + AGREED_S + 1.25)


def test_bytes_of_each_rank_and_limits_that_are_just_met():
    """Rank 0 keeps two microbatches, rank 1 one. Weights, gradients and Adam's moments are 4,000 B.

    Beside them lie the gradient that comes back to rank 0, and at rank 1 the next microbatch's value and the
    last one's gradient.
    """
    held = 4000 + 2 * 100 + 7 + MB, 4000 + 100 + 7 + 2 * MB
    plan = planned(TWO, 2, memory_limit=list(held))
    assert tuple(s.memory_bytes for s in plan.stages) == held
    assert tuple(m.total_bytes for m in simulate(plan).rank_memory) == held
    for short in ((held[0] - 1, held[1]), (held[0], held[1] - 1)):
        with pytest.raises(InfeasibleError, match="fits"):
            planned(TWO, 2, memory_limit=list(short))


def test_a_limit_decides_the_cut():
    """Of four ops two each take 6 s; where rank 0 has room for one alone it is 9."""
    four = {"a": "", "b": "a", "c": "b", "d": "c"}
    assert seconds(planned(four, 2, n_microbatches=4))[0] == 6
    one = 4000 + 2 * 100 + 7 + MB
    assert seconds(planned(four, 2, memory_limit=[one, 10 * MB]))[0] == 9
    assert seconds(planned(four, 2, memory_limit=[one + 4200, 10 * MB]))[0] == 6


def test_stages_that_run_again():
    """Each backward takes 3 s: rank 1 has B0 from 3 to 6, F1, B1 from 7 to 10; rank 0 ends at 11 + 3.

    A stage then keeps what it received of each microbatch, and what one saves while it runs again.
    """
    plan = planned(TWO, 2, recompute="always")
    assert seconds(plan) == about(4, 14 + AGREED_S)
    held = [4000 + 100 + 7 + MB, 4000 + MB + 100 + 7 + 2 * MB]
    assert [s.memory_bytes for s in plan.stages] == held


def test_what_must_run_again_does():
    """Rank 0 has no room for the second microbatch's 100 B: it alone runs again, at 4 s a microbatch."""
    plan = planned(TWO, 2, recompute="auto", memory_limit=[4000 + 2 * 100 + 7 + MB - 1, 10 * MB])
    assert [bool(s.recompute or s.recomputed) for s in plan.stages] == [True, False]
    assert plan.stages[0].backward_s == 3
    assert seconds(plan)[0] == 4


def test_tied_weights():
    """Copies of 1,000 B on ranks 0 and 2 are summed round a ring of two: 500 B twice at 250 B/s, 4 s.

    That follows the last action of both, and is 2 s for each of two microbatches beside 3 s of work; then
    rank 2 tells rank 0 the loss. Both hold a copy. Kept together there is one, and nothing is summed.
    """
    three, slow = {**TWO, "c": "b"}, Link(0.0, 250)
    cluster = dataclasses.replace(Cluster.uniform(3, link=LINK), links={(0, 2): slow, (2, 0): slow})
    plain = planned(three, 3, cluster=cluster)
    apart = planned(three, 3, tied="ac", cluster=cluster)
    assert apart.ties[0].seconds == 4
    assert seconds(apart) == about(3 + 2, plain.step_s + 4 + 8 / 250)
    assert [s.memory_bytes for s in apart.stages] == [s.memory_bytes for s in plain.stages]
    beside = planned(three, 2, tied="ab", ties="colocate")
    assert [s.ops for s in beside.stages] == [("a", "b"), ("c",)]
    assert beside.stages[0].memory_bytes == 4000 + 2 * 200 + 7 + MB
    assert (beside.ties[0].mode, beside.ties[0].seconds) == ("colocate", 0)


def test_unlike_devices():
    """Rank 1 is twice as fast: of six ops it takes four, and both work for 6 s.

    Of two ops, its F0 runs from 2 to 2.5, B0 to 3.5, F1 to 4, B1 to 5; gradients come at 4.5 and 6, and rank
    0 works from 4.5 to 8.5.
    """
    fast = dataclasses.replace(Cluster.uniform(2, link=LINK), devices=(Device(), Device(speed=2.0)))
    six = dict(zip("abcdef", ("", *"abcde"), strict=True))
    plan = planned(six, 2, cluster=fast)
    assert [len(s.ops) for s in plan.stages] == [2, 4]
    assert plan.bounds.bottleneck_s == 6
    assert seconds(planned(TWO, 2, cluster=fast)) == about(3, 8.5 + AGREED_S)


def test_hosts_and_the_interfaces_that_their_ranks_share():
    """A value takes 10 s each way between the hosts. Stage 0 sends to 1 and 3, 1 to 2, 2 to 3.

    Stages 1, 2 and 3 move one value within a host, 2 s with its gradient, and one between hosts, 20 s. One
    interface of the first host sends those of stages 0 and 1, 40 s.
    """
    four = {"a": "", "b": "a", "c": "b", "d": "ac"}
    apart = Cluster.of_hosts(2, 2, local=LINK, remote=Link(0.0, MB / 10))
    assert seconds(planned(four, 4, cluster=apart))[0] == 22
    shared = Cluster.of_hosts(2, 2, local=LINK, remote=Link(0.0, MB / 10), nics_per_host=1)
    assert seconds(planned(four, 4, cluster=shared))[0] == 40


def test_ranks_are_laid_so_that_slow_links_are_crossed_once():
    """In the given order every value crosses between hosts; laid host by host the middle one alone does."""
    four = {"a": "", "b": "a", "c": "b", "d": "c"}
    mixed = dataclasses.replace(Cluster.uniform(4, link=LINK), hosts=(0, 1, 0, 1), remote=Link(0.0, MB / 10))
    assert seconds(planned(four, 4, cluster=mixed, device_order="given"))[0] == 40
    assert seconds(planned(four, 4, cluster=mixed))[0] == 22


@pytest.mark.parametrize(
    ("schedule", "step_s", "in_flight"),
    [("forward-only", 3, (0, 0)), ("gpipe", 9, (2, 2)), ("1f1b", 9, (2, 1)), ("zb-h1", 7, (2, 2))],
)
def test_schedules_on_links_of_no_time(schedule, step_s, in_flight):
    """Forwards end at 3. With backwards of 2 s rank 1 ends at 7, rank 0 has the last from then until 9.

    ZB-H1: rank 1 has F0, I0, F1, I1 until 5, then W0 and W1. Rank 0 owes nobody a gradient: its backwards are
    W, of 2 s, the first at 3 and the second at 5.
    """
    plan = planned(TWO, 2, cluster=Cluster.uniform(2), schedule=schedule)
    assert plan.step_s == pytest.approx(step_s)
    assert tuple(s.in_flight for s in plan.stages) == in_flight


def test_several_stages_a_rank():
    """Rank 0 has F of stages 0 and 2 until 4, rank 1 those of 1 until 3 and F, B of 3 until 6 and 9.

    Rank 0 has B of 2 from 6 and 9 to 11; rank 1 B of 1 from 9 and 11 to 13, rank 0 those of 0 from 11 and 13
    to 15. Each rank has the weights of two ops. Rank 0 has two microbatches of both, and buffers of three
    values for stage 2 and one for stage 0; rank 1 three in all, and buffers of three and two.
    """
    four = {"a": "", "b": "a", "c": "b", "d": "c"}
    plan = planned(four, 4, cluster=Cluster.uniform(2), schedule="interleaved")
    assert plan.placement == (0, 1, 0, 1)
    assert seconds(plan) == about(6, 15)
    held = [m.total_bytes for m in simulate(plan).rank_memory]
    assert held == [8000 + 4 * 100 + 7 + 4 * MB, 8000 + 3 * 100 + 7 + 5 * MB]


@pytest.mark.parametrize("n_stages", [1, 2])
def test_ops_of_no_time(n_stages):
    plan = planned(TWO, n_stages, cost=OpCost(), cluster=Cluster.uniform(n_stages))
    assert seconds(plan) == (0, 0)


def test_more_stages_than_ops():
    with pytest.raises(InfeasibleError, match="3"):
        planned(TWO, 3)


def test_one_op_on_one_rank():
    """Three seconds for each of two microbatches, none of it waiting."""
    assert seconds(planned({"a": ""}, 1)) == (3, 6)
    assert math.isclose(planned({"a": ""}, 1, n_microbatches=5).step_s, 15)
