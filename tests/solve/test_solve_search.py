"""``solve`` on a small language model by hand: what it is asked for holds, and hand-made splits never win."""

import collections
import contextlib
import dataclasses
import itertools
import random
import re
import signal
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from language_model import LINK, N_LAYERS, cluster, costs, graph, made, stage_of

from autopipe.costs import CostTable, OpCost
from autopipe.errors import CostError, InfeasibleError, InputError, PlanError
from autopipe.hardware import Cluster, Device, Link
from autopipe.look.tables import candidate_table
from autopipe.plans import Plan
from autopipe.simulator import plan_schedule, simulate
from autopipe.solve import Item, Net, Problem, Stage, answers, chain, chains, infeasible, options_of
from autopipe.solve.making.options import Options
from autopipe.units import parse_bytes


def test_the_balanced_cut_is_found_and_proved():
    plan = made()
    assert [stage_of(plan, f"layer{i}") for i in range(N_LAYERS)] == [0, 0, 0, 1, 1, 1]
    assert stage_of(plan, "head") == 2
    assert plan.bounds.proved
    assert plan.bounds.gap == 0
    assert plan.bounds.step_lower_s <= plan.step_s
    assert [b.value for b in plan.boundaries] == ["layer2", "layer5"]


def test_a_cheap_mask_is_computed_where_it_is_needed():
    plan = made()
    assert plan.stages_of["mask"] == (0, 1)
    assert plan.stages[1].clones == ("mask",)
    sent = made(clone="never")
    assert len(sent.stages_of["mask"]) == 1
    assert "mask" in {b.value for b in sent.boundaries}


@pytest.mark.parametrize("stage", [0, -1])
def test_pins_hold(stage):
    plan = made(pin={"layer3": stage})
    assert stage_of(plan, "layer3") == stage % 3


def test_pins_that_cannot_be_met_say_so():
    with pytest.raises(InputError, match="stages 0 to 2"):
        made(pin={"layer3": 3})
    with pytest.raises(PlanError, match="matches no op"):
        made(pin={"layers.3": 1})
    with pytest.raises(PlanError, match="did you mean 'layer3' or"):
        made(pin={"layer_3": 1})
    with pytest.raises(PlanError, match=r"uncut value 'heads' is no op .* did you mean 'head'\?"):
        made(uncut=["heads"])
    with pytest.raises(PlanError, match=r"'layer3' is one op here: .* open=\['layer3'\]"):
        made(pin={"layer3.inner": 1})
    with pytest.raises(InfeasibleError, match="drop a pin"):
        made(pin={"embed": 1})


def test_together_and_uncut_hold():
    plan = made(together=[["layer2", "layer4"]], uncut=["layer5"])
    assert stage_of(plan, "layer2") == stage_of(plan, "layer4")
    assert stage_of(plan, "layer5") == stage_of(plan, "head")


def test_a_tied_weight_is_synchronised_where_that_is_cheap():
    (tie,) = made().ties
    assert (tie.parameter, tie.mode, tie.stages) == ("embed.weight", "sync", (0, 2))
    assert tie.seconds == pytest.approx(2e-5 + 500 * 64 * 4 / 1e9)


@pytest.mark.parametrize("n_stages", [2, 3])
def test_colocated_users_leave_nothing_between_them(n_stages):
    """Every other op lies on a path from the embedding to the head, so nothing is left to cut."""
    with pytest.raises(InfeasibleError, match=r"1 stage at most, .* ties='colocate' keeps ops"):
        made(n_stages=n_stages, cluster=cluster(n_stages), ties="colocate")


def test_a_v_placement_makes_the_tie_free():
    plan = made(n_stages=4, cluster=cluster(2), schedule="zbv")
    assert plan.placement == (0, 1, 1, 0)
    (tie,) = plan.ties
    assert (tie.stages, tie.mode, tie.seconds) == ((0, 3), "colocate", 0.0)


def test_too_little_memory_names_stage_limit_and_remedy():
    with pytest.raises(
        InfeasibleError, match=r"needs .* on rank \d \(stage \d, .* in flight\), limit 322.3 KiB"
    ):
        made(memory_limit=330_000)
    need = max(s.memory_bytes for s in made().stages)
    assert max(s.memory_bytes for s in made(memory_limit=need).stages) <= need


def test_what_an_infeasible_answer_names_fits_and_no_less_does():
    with pytest.raises(InfeasibleError) as refused:
        made(n_stages=2, cluster=cluster(2), memory_limit=600_000, time_limit_s=60)
    assert "n_stages found to fit is 3" in str(refused.value)
    assert made(n_stages=3, cluster=cluster(3), memory_limit=600_000).n_stages == 3
    enough = re.search(r"a limit of ([\d.]+ KiB) per rank fits", str(refused.value))[1]
    least = made(n_stages=2, cluster=cluster(2), memory_limit=enough)
    assert max(s.memory_bytes for s in least.stages) > parse_bytes(enough) - 110
    with pytest.raises(InfeasibleError):
        made(n_stages=2, cluster=cluster(2), memory_limit=parse_bytes(enough) - 110)


@pytest.mark.parametrize("short", [1, 60, 3_000])
def test_a_limit_that_is_told_to_fit_does_and_tells_the_need_apart(short, monkeypatch):
    """As it is written, rounded up, whatever is missing; and where a byte is, figures that differ."""
    monkeypatch.setattr(infeasible, "_TELLING_S", 60.0)  # on a busy machine the least is found too
    with pytest.raises(InfeasibleError) as refused:
        made(memory_limit=330_000, time_limit_s=200)
    enough = re.search(r"a limit of ([\d.]+ \w+) per rank fits", str(refused.value))[1]
    least = max(s.memory_bytes for s in made(memory_limit=enough).stages)
    with pytest.raises(InfeasibleError) as refused:
        made(memory_limit=least - short, time_limit_s=200)
    needs, limit = re.search(r"needs ([\d.,]+ \w+) on .* limit ([\d.,]+ \w+);", str(refused.value)).groups()
    assert needs != limit
    assert re.search(r"a limit of ([\d.]+ \w+) per rank fits", str(refused.value))[1] == enough


def test_saved_activations_that_do_not_fit_can_be_recomputed():
    """32 MiB saved per layer and microbatch: what is kept does not fit, what is recomputed does."""
    table = costs()
    heavy = {op: dataclasses.replace(c, saved_bytes=32 << 20) for op, c in table.costs.items()}
    given = {"costs": dataclasses.replace(table, costs=heavy), "memory_limit": 140 << 20}
    with pytest.raises(InfeasibleError, match="recompute='auto' fits"):
        made(**given)
    assert any(s.recomputed for s in made(**given, recompute="auto").stages)


def test_free_stage_counts_are_all_tried_and_the_fastest_wins():
    plan = made(n_stages="auto", schedule="auto", n_microbatches=4, time_limit_s=60)
    assert {c.n_stages for c in plan.candidates} == {1, 2, 3, 4, 6}
    assert plan.step_s == min(c.step_s for c in plan.candidates if c.feasible)
    for n in (1, 2, 3):
        assert plan.step_s <= made(n_stages=n, cluster=cluster(n), schedule="auto", n_microbatches=4).step_s
    assert plan.n_ranks == plan.cluster.n_ranks == len(plan.settings["ranks"])
    assert Plan.from_json(plan.to_json()) == plan


def test_dear_links_make_fewer_stages_the_faster_choice():
    plan = made(n_stages=None, cluster=cluster(link=Link(1.0, 1e3)))
    assert (plan.n_stages, plan.n_ranks) == (1, 1)
    assert made(n_stages=None, cluster=cluster(link=Link(1.0, 1e3)), min_ranks=2).n_ranks == 2


@pytest.mark.parametrize("speeds", [(1.0, 2.0, 0.5), (0.5, 1.0, 1.0), (2.0, 0.5, 2.0)])
def test_a_free_order_of_devices_is_the_best_of_all(speeds):
    def on(order) -> Cluster:
        return Cluster(tuple(Device(speed=speeds[r]) for r in order), local=LINK)

    plan = made(cluster=on((0, 1, 2)), device_order="auto", overlap=False)
    each = [made(cluster=on(order), overlap=False) for order in itertools.permutations(range(3))]
    assert plan.step_s == pytest.approx(min(p.step_s for p in each))
    assert plan.bounds.bottleneck_lower_s == pytest.approx(min(p.bounds.bottleneck_lower_s for p in each))
    assert sorted(plan.placement) == [0, 1, 2]
    with pytest.raises(InputError, match="'given', 'auto'"):
        made(device_order="any")


@pytest.mark.parametrize("options", [{"n_stages": "auto", "schedule": "auto"}, {"device_order": "auto"}])
def test_ctrl_c_returns_the_best_so_far(options, monkeypatch):
    """The key is pressed in the second of many chains, which answers it itself; no third is begun."""
    calls = []

    def chain_interrupted(problem, **limits):
        calls.append(problem)
        if len(calls) == 2:
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        return chain(problem, **limits)

    monkeypatch.setattr("autopipe.solve.answers.chain", chain_interrupted)
    devices = Cluster(tuple(Device(speed=f) for f in (1.0, 2.0, 0.5)), local=LINK)
    plan = made(cluster=devices, **options)
    assert len(calls) == 2
    assert plan.step_s > 0
    assert plan.bounds.bottleneck_lower_s <= plan.bounds.bottleneck_s
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("pinned", [("embed",), ("embed", "layer5", "head"), ()])
def test_a_free_order_finds_room_on_whichever_rank_it_is(order, pinned):
    known = made(ties="sync")
    limits = [known.stages[s].memory_bytes for s in order]
    pin = {op: stage_of(known, op) for op in pinned}
    plan = made(ties="sync", pin=pin, memory_limit=limits, device_order="auto")
    assert plan.step_s == pytest.approx(known.step_s)
    assert all(s.memory_bytes <= limits[s.rank] for s in plan.stages)
    least = min(limits)
    with pytest.raises(InfeasibleError):
        made(ties="sync", pin=pin, memory_limit=[least // 4] * 3, device_order="auto")


@pytest.mark.parametrize("asked", [{}, {"memory_limit": [1 << 10, None, None]}])
def test_a_free_count_of_ranks_finds_those_with_room(asked):
    """The fastest has hardly any, and none of the counts of the fastest ranks does without it."""
    small = 1 << 10 if not asked else None
    devices = Device(speed=3.0, memory_bytes=small), Device(), Device(speed=2.0)
    limits = {"memory_limit": [n or 1 << 40 for n in asked["memory_limit"]]} if asked else {}
    plan = made(n_stages="auto", device_order="auto", cluster=Cluster(devices, local=LINK), **limits)
    assert 0 not in plan.settings["ranks"]
    with pytest.raises(InfeasibleError):
        made(n_stages="auto", cluster=Cluster(devices, local=LINK), **limits)


def test_many_different_devices_are_ordered_within_the_time():
    devices = tuple(Device(speed=1 + r / 10) for r in range(6))
    given = {"cluster": Cluster(devices, local=LINK), "n_stages": 6, "time_limit_s": 60.0}
    plan = made(**given, device_order="auto")
    assert plan.step_s <= made(**given).step_s
    assert plan.bounds.bottleneck_lower_s <= plan.bounds.bottleneck_s
    assert plan == made(**given, device_order="auto")


def test_memory_may_be_limited_per_rank():
    plain = made()
    limits = [s.memory_bytes for s in plain.stages]
    assert made(memory_limit=limits).placement == plain.placement
    tight = made(memory_limit=[limits[0] - 1, *(10**9 for _ in limits[1:])])
    assert tight.stages[0].memory_bytes < limits[0]
    assert Plan.from_json(tight.to_json()).settings["memory_limit"] == [limits[0] - 1, 10**9, 10**9]
    with pytest.raises(InputError, match="2 entries for 3 ranks"):
        made(memory_limit=limits[:2])


def test_unequal_memory_moves_the_cut():
    plain = made()
    short = Device(memory_bytes=plain.stages[1].memory_bytes - 1)
    devices = (Device(), short, Device())
    plan = made(cluster=Cluster(devices, local=LINK))
    assert plan.stages[1].memory_bytes < plain.stages[1].memory_bytes


@pytest.mark.parametrize("head_s", [1e-4, 1e-3, 6e-3])
@pytest.mark.parametrize("link", [Link(1e-6, 1e10), Link(1e-3, 1e6)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_never_slower_than_hand_made_splits(head_s, link, schedule):
    given = {"costs": costs(head_s), "cluster": cluster(link=link), "schedule": schedule}
    plan = made(**given)
    for balance in ("uniform", "parameters"):
        assert plan.step_s <= made(**given, balance=balance).step_s * (1 + 1e-8)
        assert any(c.label.endswith(balance) for c in plan.candidates)
    # steps that are equal to nine digits are told apart by memory
    assert plan.step_s == pytest.approx(min(c.step_s for c in plan.candidates if c.feasible), rel=1e-8)


@pytest.mark.parametrize("recompute", ["never", "always"])
@pytest.mark.parametrize(
    ("schedule", "n_stages"),
    [("1f1b", 3), ("gpipe", 3), ("zb-h2", 3), ("zbv", 4), ("dualpipev", 6), ("interleaved", 6), ("1f1b", 6)],
)
def test_the_solver_counts_memory_as_the_formula_does(schedule, n_stages, recompute):
    plan = made(
        n_stages=n_stages,
        cluster=cluster(2 if n_stages == 4 else 3),
        schedule=schedule,
        recompute=recompute,
        memory_limit="1GB",
    )
    best = next(c for c in plan.candidates if c.step_s == plan.step_s)
    assert best.memory_bytes == max(simulate(plan).peak_bytes)
    one = [s for s in plan.stages if plan.placement.count(s.rank) == 1]
    assert [s.memory_bytes for s in one] == [simulate(plan).peak_bytes[s.rank] for s in one]


def test_a_plan_survives_json():
    plan = made(schedule="auto", n_stages=None, cluster=cluster(2))
    assert Plan.from_json(plan.to_json()) == plan
    assert len({(c.schedule, c.n_stages) for c in plan.candidates}) > 4


def test_of_other_schedules_and_counts_only_the_best_is_listed():
    plan = made(schedule="auto", n_stages=None, cluster=cluster(2))
    kinds = collections.Counter((c.schedule, c.n_stages) for c in plan.candidates)
    own = plan.schedule, plan.n_stages
    assert kinds.pop(own) > 2
    assert set(kinds.values()) == {1}
    assert plan.n_candidates > len(plan.candidates)
    assert f"{plan.n_candidates - len(plan.candidates)} more were simulated" in candidate_table(plan).note


def test_the_same_problem_has_the_same_plan():
    first, second = made(), made()
    assert first.to_json() == second.to_json()


@pytest.mark.parametrize(
    ("schedule", "n_ranks", "n_stages"),
    [("zbv", 2, 4), ("interleaved", 3, 6), ("1f1b", 3, 3), ("dualpipev", 2, 4)],
)
def test_a_difference_has_the_fullest_rank_that_the_simulation_has(schedule, n_ranks, n_stages):
    plan = made(schedule=schedule, cluster=cluster(n_ranks), n_stages=n_stages)
    (figure,) = (a for what, a, _, _ in plan.diff(plan).figures if what == "fullest rank")
    assert figure == max(simulate(plan).peak_bytes)


def test_pins_leave_out_the_stage_counts_that_lack_their_stages():
    plan = made(n_stages="auto", pin={"head": 1})
    assert stage_of(plan, "head") == 1
    assert {c.n_stages for c in plan.candidates} == {2, 3}
    with pytest.raises(InfeasibleError, match="pins"):
        made(n_stages="auto", pin={"head": 7})


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv", "looped-bfs", "dualpipev"])
def test_pins_are_met_under_every_schedule(schedule):
    """One of them is an op that each stage would else compute for itself."""
    n_stages = 6 if schedule in ("interleaved", "looped-bfs", "zbv", "dualpipev") else 3
    pins = {"layer1": 1, "layer4": n_stages - 2, "mask": 0}
    plan = made(schedule=schedule, n_stages=n_stages, pin=pins)
    assert {op: stage_of(plan, op) for op in pins} == pins


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("forward_s", float("nan")),
        ("backward_s", -1.0),
        ("forward_s", float("inf")),
        ("host_backward_s", float("nan")),
    ],
)
def test_costs_that_are_none_are_refused_by_name(field, value):
    table = costs()
    broken = {**table.costs, "layer2": dataclasses.replace(table["layer2"], **{field: value})}
    with pytest.raises(CostError, match=f"{field} of op 'layer2'"):
        made(costs=dataclasses.replace(table, costs=broken))


@pytest.mark.parametrize(
    "absurd", [Cluster.uniform(3, link=Link(1e-5, 1e-9)), Cluster.uniform(3, Device(speed=1e-12))]
)
def test_sums_that_no_integer_holds_are_refused(absurd):
    with pytest.raises(InputError, match="check the costs"):
        made(cluster=absurd)


def test_a_draft_simulates_nothing_near_its_bottleneck_and_what_comes_of_it_does():
    known = {}
    options = {"costs": costs(head_s=1e-3), "n_microbatches": 4, "known": known}
    draft, plan = (made(**options, is_draft=is_draft) for is_draft in (True, False))
    labels = {c.label.split(": ")[1] for c in draft.candidates}
    assert labels == {"best bottleneck", "uniform", "parameters"}
    assert draft.n_candidates < plan.n_candidates
    assert plan.step_s < draft.step_s
    assert [answer.proved for answer in known.values()] == [True]


def test_what_a_draft_leaves_unproved_near_its_bound_is_proved_by_what_comes_of_it():
    known = {}
    options = {"costs": costs(head_s=1e-3), "n_microbatches": 4, "known": known}
    made(**options, is_draft=True)
    ((case, proved),) = known.items()
    near = dataclasses.replace(proved, lower_ns=proved.lower_ns * 995 // 1000)
    for is_draft, after in ((True, near), (False, proved)):
        known[case] = near
        plan = made(**options, is_draft=is_draft)
        assert known == {case: after}
        assert plan.bounds.bottleneck_lower_s == pytest.approx(after.lower_ns / 1e9)


def test_a_draft_has_nearly_all_its_time_for_a_bottleneck_near_its_bound(monkeypatch):
    asked = []

    def spied(problem, **how):
        asked.append(how)
        return chain(problem, **how)

    monkeypatch.setattr(answers, "chain", spied)
    for is_draft in (True, False):
        made(is_draft=is_draft, time_limit_s=1000.0)
    draft, plan = asked
    assert draft["time_limit_s"] > 900 > plan["time_limit_s"]
    assert draft["near"] > plan["near"]


def test_what_is_near_enough_to_its_bound_is_not_moved(monkeypatch):
    """Senders pay for each receiver, which the bound leaves out."""
    items = tuple(Item((f"op{v}",), 10_000 + 37 * v, 20_000) for v in range(120))
    nets = tuple(Net(v, (v + 1, *range(v + 20, min(120, v + 21))), 300, 300) for v in range(119))
    edges = tuple((n.producer, v) for n in nets for v in n.consumers)
    stages = tuple(Stage(s) for s in range(8))
    problem = Problem(items, edges, nets, (), stages, sender_pays="receiver")
    moved = []
    monkeypatch.setattr(chains, "improve", lambda p, stage_of, _: moved.append(p) or stage_of)
    answers = [chain(problem, **how) for how in ({}, {"near": 0.05})]
    assert all(a.lower_ns < a.bottleneck_ns < 1.05 * a.lower_ns for a in answers)
    assert len(moved) == 1


def test_what_would_be_cloned_fills_a_stage_where_other_ops_are_too_few():
    """The mask is an op too: nine ops are cut into nine stages, and ten are told to be too many."""
    n_ops = len(graph().compute)
    plan = made(n_stages=n_ops, cluster=cluster(n_ops))
    assert sorted(stage.ops for stage in plan.stages) == sorted((op.name,) for op in graph().compute)
    assert made(n_stages=n_ops - 1, cluster=cluster(n_ops - 1)).stages_of["mask"] != ()
    with pytest.raises(InfeasibleError, match=f"can be cut into {n_ops} stages at most"):
        made(n_stages=n_ops + 1, cluster=cluster(n_ops + 1))


@pytest.mark.parametrize("options", [{"together": [["embed", "head"]]}, {"uncut": ["layer0"], "n_stages": 9}])
def test_what_keeps_ops_together_is_named_where_that_leaves_too_few(options):
    (name,) = {*options} - {"n_stages"}
    n_stages = options.get("n_stages", 3)
    with pytest.raises(InfeasibleError, match=f"fewer than n_stages={n_stages}: {name} keeps ops"):
        made(cluster=cluster(n_stages), clone="never", **{"n_stages": n_stages, **options})


def test_numbers_of_numpy_and_fractions_are_costs_and_their_plans_are_written():
    """Whole bytes and finite seconds of any type of number, as Python's own in the plan."""
    plain = made(costs=given_in(float, int))
    for second, whole in (
        (np.float64, np.int64),
        (np.float32, np.int32),
        (Fraction, np.uint16),
        (Decimal, int),
    ):
        if second is Decimal:
            with pytest.raises(CostError, match="costs are from 0"):
                made(costs=given_in(second, whole))
            continue
        plan = made(costs=given_in(second, whole))
        assert Plan.from_json(plan.to_json()) == plan
        assert plan.step_s == pytest.approx(plain.step_s, rel=1e-6)
    with pytest.raises(CostError, match=r"saved_bytes of op 'embed' is 1024\.5; costs are whole numbers"):
        made(costs=given_in(float, lambda n: n + 0.5))
    with pytest.raises(CostError, match="forward_s of op 'embed' is True"):
        made(costs=given_in(bool, int))


def test_a_plan_of_numpys_sizes_and_devices_is_written_too():
    table = dataclasses.replace(costs(), dims={"batch": np.int64(4)})
    device = Device("a", speed=np.float32(0.5), memory_bytes=np.int64(1 << 30))
    link = Link(np.float32(1e-5), np.float64(1e9))
    there = Cluster((device,) * 3, (np.int64(0), np.int64(0), np.int64(1)), link, link)
    plan = made(costs=table, cluster=there)
    assert Plan.from_json(plan.to_json()) == plan


def given_in(second, whole):
    """The costs with their figures in other types of numbers."""
    table = costs()
    rows = {
        op: dataclasses.replace(
            c,
            forward_s=second(c.forward_s),
            backward_s=second(c.backward_s),
            saved_bytes=whole(c.saved_bytes),
        )
        for op, c in table.costs.items()
    }
    return dataclasses.replace(table, costs=rows, start_s=second(0.0))


def test_a_plan_is_solved_again_under_all_that_was_asked_for():
    """Of every option another value than its default; a new one is to be added here."""
    asked = {
        "n_stages": 3,
        "n_microbatches": 6,
        "schedule": "gpipe",
        "balance": "uniform",
        "min_ranks": 3,
        "memory_limit": [1 << 30, 1 << 31, 1 << 30],
        "ties": "sync",
        "pin": {"layer1": 0},
        "together": [["layer2", "layer3"]],
        "uncut": ["layer4"],
        "recompute": "auto",
        "clone": "never",
        "overlap": False,
        "sender_pays": "receiver",
        "device_order": "given",
        "loss_on": "batch",
        "optimizer_bytes_per_parameter_byte": 3.0,
    }
    defaults = {f.name: f.default for f in dataclasses.fields(Options)}
    assert all(asked[name] != default for name, default in defaults.items())
    plan = made(**asked)
    assert options_of(plan) == asked
    assert options_of(Plan.from_json(plan.to_json())) == asked


@pytest.mark.parametrize("number", [1, 9, 19])
def test_where_ranks_are_unlike_no_order_of_them_is_shorter_than_the_one_that_is_taken(number):
    """The least bottlenecks are of other orders than the shortest step: 0.2 to 5% were left."""
    draw = random.Random(number)
    table = {"mask": OpCost(1e-7)}
    for name in ("embed", *(f"layer{i}" for i in range(N_LAYERS)), "head"):
        forward_s = draw.choice((1e-3, 2e-3, 3e-3, 5e-3))
        table[name] = OpCost(forward_s, 2 * forward_s, saved_bytes=draw.choice((1 << 16, 1 << 18)))
    speeds = [draw.choice((0.5, 1.0, 1.5, 2.0)) for _ in range(3)]
    asked = {"n_microbatches": draw.choice((2, 3, 4, 8)), "recompute": "auto"}
    limits = [draw.choice((2 << 19, 4 << 19, 8 << 19)) for _ in range(3)] if draw.random() < 0.4 else None
    link = Link(1e-5, draw.choice((1e7, 1e8, 1e10)))
    steps_s = []

    def step_of(ranks, **more):
        return made(cluster=ranks, costs=CostTable(table), **asked, **more).step_s

    for order in itertools.permutations(range(3)):
        there = Cluster(tuple(Device(speed=speeds[r]) for r in order), local=link)
        limit = limits and [limits[r] for r in order]
        with contextlib.suppress(InfeasibleError):
            steps_s.append(step_of(there, device_order="given", memory_limit=limit))
    ranks = Cluster(tuple(Device(speed=speed) for speed in speeds), local=link)
    step_s = step_of(ranks, device_order="auto", memory_limit=limits)
    assert step_s <= min(steps_s) * (1 + 1e-6)


@pytest.mark.parametrize("head_s", [1e-3, 4e-3])
def test_a_cost_aware_plan_tells_the_microbatches_and_memory_of_the_schedule_that_runs(head_s):
    plan = made(schedule="cost-aware", costs=costs(head_s))
    assert tuple(s.in_flight for s in plan.stages) == plan_schedule(plan).in_flight
    assert tuple(s.memory_bytes for s in plan.stages) == simulate(plan).peak_bytes
