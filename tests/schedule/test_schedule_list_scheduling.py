"""List schedules keep their limits and never deadlock; the cost-aware one is no slower than any template."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import boundaries, clusters, schedules, stage_times

from autopipe.hardware import Cluster, Link
from autopipe.schedule import NAMES, StageTimes, Transfer, build, check, in_flight
from autopipe.schedule.clock import Edges, run
from autopipe.schedule.cost_aware import saved_peaks
from autopipe.schedule.list_scheduling import Rules, list_schedule
from autopipe.schedule.templates import SPLIT, TEMPLATES

SAVED = st.integers(0, 5)


def step_s(schedule, times, transfers=None, cluster=None):
    return max(row[-1] for row in run(schedule, times, Edges.of(schedule, transfers), cluster).ends_s)


@settings(max_examples=300)
@given(data=st.data(), frame=schedules(("gpipe",)))
def test_limits_hold_and_nothing_deadlocks(data, frame):
    n = frame.n_stages
    limit = st.lists(st.integers(1, 5), min_size=n, max_size=n).map(tuple)
    rules = Rules(
        data.draw(st.booleans()), data.draw(limit), data.draw(limit), data.draw(st.sampled_from((0.0, 2.0)))
    )
    times = data.draw(stage_times(n))
    transfers = data.draw(boundaries(n))
    cluster = data.draw(clusters(frame.n_ranks))
    schedule = list_schedule(
        "listed",
        frame.placement,
        frame.n_ranks,
        frame.n_microbatches,
        rules,
        times=times,
        transfers=transfers,
        cluster=cluster,
    )
    check(schedule)
    assert all(a <= b for a, b in zip(in_flight(schedule), rules.held, strict=True))


@settings(max_examples=300)
@given(data=st.data(), frame=schedules(("gpipe",)))
def test_a_budget_holds_wherever_one_microbatch_fits(data, frame):
    n = frame.n_stages
    saved = tuple(data.draw(st.lists(SAVED, min_size=n, max_size=n)))
    one = [sum(saved[s] for s in frame.stages_of(r)) for r in range(frame.n_ranks)]
    budget = tuple(o + data.draw(st.integers(0, 8)) for o in one)
    many = (frame.n_microbatches,) * n
    rules = Rules(data.draw(st.booleans()), many, many, 0.0, saved, budget)
    times = data.draw(stage_times(n))
    schedule = list_schedule(
        "listed", frame.placement, frame.n_ranks, frame.n_microbatches, rules, times=times
    )
    check(schedule)
    assert all(p <= b for p, b in zip(saved_peaks(schedule, saved), budget, strict=True))


def test_a_budget_too_small_for_one_still_runs():
    schedule = list_schedule("listed", (0, 1), 2, 3, Rules(False, (3, 3), (3, 3), 0.0, (5, 5), (1, 1)))
    check(schedule)
    assert in_flight(schedule) == (1, 1)


def test_patience_waits_for_an_input_rather_than_start_a_weight_gradient():
    """Rank 0 is done with 0I0 at 4 s, 1I1 arrives at 5 s, and a W takes 3 s."""
    times = (StageTimes(1.0, 4.0, 1.0, 3.0), StageTimes(0.5, 2.0, 1.5, 0.5))
    eager, patient = (
        str(list_schedule("listed", (0, 1), 2, 2, Rules(True, (2, 2), (2, 2), patience), times=times))
        for patience in (0.0, 1.0)
    )
    assert eager.splitlines()[0].endswith("0I0 0W0 0I1 0W1")
    assert patient.splitlines()[0].endswith("0I0 0I1 0W0 0W1")


@settings(max_examples=60)
@given(data=st.data(), frame=schedules(TEMPLATES, max_microbatches=6))
def test_cost_aware_is_no_slower_than_any_template_that_fits(data, frame):
    n, ranks, m = frame.n_stages, frame.n_ranks, frame.n_microbatches
    times = data.draw(stage_times(n, least=0.25))
    transfers, cluster = data.draw(boundaries(n)), data.draw(clusters(ranks))
    saved = tuple(data.draw(st.lists(SAVED, min_size=n, max_size=n)))
    one = [sum(saved[s] for s in frame.stages_of(r)) for r in range(ranks)]
    budget = tuple(o + data.draw(st.integers(0, 20)) for o in one) if data.draw(st.booleans()) else ()
    best = build(
        "cost-aware",
        ranks,
        n,
        m,
        placement=frame.placement,
        times=times,
        transfers=transfers,
        cluster=cluster,
        saved_bytes=saved,
        budget_bytes=budget,
    )
    check(best)
    assert best.name == "cost-aware"
    limits = budget or (math.inf,) * ranks
    assert all(p <= b for p, b in zip(saved_peaks(best, saved), limits, strict=True))
    ours = step_s(best, times, transfers, cluster)
    for name in TEMPLATES[1:]:
        other = build(name, ranks, n, m, placement=frame.placement)
        if all(p <= b for p, b in zip(saved_peaks(other, saved), limits, strict=True)):
            assert ours <= step_s(other, times, transfers, cluster) + 1e-9, name


def test_cost_aware_beats_every_template_on_uneven_stages():
    """Eight interleaved stages, the last twice as heavy, behind a slow link: no template fits that."""
    times = (*(StageTimes(1.0, 2.0, 1.0, 1.0),) * 7, StageTimes(2.0, 4.0, 2.0, 2.0))
    transfers = [Transfer(s, s + 1, 100) for s in range(7)]
    cluster = Cluster.uniform(4, link=Link(0.05, 300.0))
    args = {"placement": (0, 1, 2, 3) * 2}
    steps = {
        name: step_s(
            build(name, 4, 8, 8, times=times, transfers=transfers, cluster=cluster, **args),
            times,
            transfers,
            cluster,
        )
        for name in NAMES[1:]
    }
    assert steps.pop("cost-aware") < min(steps.values())


def test_cost_aware_does_not_split_what_is_not_known_in_parts():
    times = (StageTimes(1.0, 2.0, 0.0, 0.0),) * 4
    assert not build("cost-aware", 4, 4, 8, times=times).splits_backward
    assert build("cost-aware", 4, 4, 8).splits_backward
    assert "cost-aware" not in SPLIT


def test_a_dear_split_is_not_used():
    """Where I + W cost far more than B, whole backwards win."""
    times = (StageTimes(1.0, 2.0, 2.0, 2.0),) * 4
    assert not build("cost-aware", 4, 4, 16, times=times).splits_backward


def test_of_equally_fast_schedules_the_one_that_holds_least():
    """Without a split GPipe and 1F1B take the same time on equal stages; 1F1B holds less."""
    times = (StageTimes(1.0, 2.0, 0.0, 0.0),) * 4
    assert in_flight(build("cost-aware", 4, 4, 16, times=times)) == (4, 3, 2, 1)


def test_a_tighter_budget_is_never_faster():
    times = (StageTimes(),) * 4
    steps = []
    for budget in (2, 3, 4, 6, 8):
        schedule = build(
            "cost-aware", 4, 4, 12, times=times, saved_bytes=(1,) * 4, budget_bytes=(budget,) * 4
        )
        assert max(in_flight(schedule)) <= budget
        steps.append(step_s(schedule, times))
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > steps[-1]


def test_the_same_arguments_give_the_same_schedule():
    args = {"times": (StageTimes(1.0, 2.1, 1.2, 0.9),) * 8, "placement": (0, 1, 2, 3, 3, 2, 1, 0)}
    assert build("cost-aware", 4, 8, 9, **args) == build("cost-aware", 4, 8, 9, **args)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_made_once(name):
    assert build(name, 2, 4, 5) is build(name, 2, 4, 5)
