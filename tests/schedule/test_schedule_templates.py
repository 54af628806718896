"""The templates: sound for every size, and equal to what is known of them in closed form."""

import itertools

import pytest
from hypothesis import given, settings
from strategies import schedules

from autopipe.errors import InputError
from autopipe.schedule import NAMES, Schedule, StageTimes, build, check, in_flight, placement
from autopipe.schedule.clock import Edges, run
from autopipe.schedule.cost_aware import saved_peaks
from autopipe.schedule.templates import TEMPLATES

UNIFORM = (StageTimes(1.0, 2.0, 1.0, 1.0), StageTimes(1.0, 2.5, 1.5, 1.0), StageTimes(2.0, 5.0, 3.0, 2.0))


def step_s(schedule: Schedule, times: StageTimes) -> float:
    clock = run(schedule, (times,) * schedule.n_stages, Edges.of(schedule))
    return max(row[-1] for row in clock.ends_s)


@pytest.mark.parametrize("name", TEMPLATES)
def test_sound_for_every_size(name):
    for n_ranks in range(1, 6):
        for n_stages in range(n_ranks, 3 * n_ranks + 2):
            for n_microbatches in (1, 2, 3, 5, 8, 13):
                check(build(name, n_ranks, n_stages, n_microbatches))


@settings(max_examples=200)
@given(schedules())
def test_sound_on_any_placement(schedule):
    check(schedule)


def test_orders_written_out():
    assert str(build("1f1b", 3, 3, 4)).splitlines() == [
        "rank 0: 0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "rank 1: 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "rank 2: 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]
    assert str(build("gpipe", 2, 2, 2)).splitlines() == ["rank 0: 0F0 0F1 0B0 0B1", "rank 1: 1F0 1F1 1B0 1B1"]
    assert str(build("looped-bfs", 2, 4, 2)).splitlines() == [
        "rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "rank 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1",
    ]
    assert str(build("interleaved", 2, 4, 2)).splitlines() == [
        "rank 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
        "rank 1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
    ]
    assert str(build("zb-h1", 2, 2, 3)).splitlines() == [
        "rank 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2",
        "rank 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2",
    ]


def test_uneven_blocks_run_as_one_stage():
    schedule = build("1f1b", 2, 5, 2)
    assert schedule.placement == (0, 0, 0, 1, 1)
    assert str(schedule).splitlines()[1] == "rank 1: 3F0 4F0 4B0 3B0 3F1 4F1 4B1 3B1"
    check(build("zbv", 3, 11, 7))


def test_ranks_in_any_order_keep_the_pattern():
    swapped, plain = build("1f1b", 2, 2, 5, placement=(1, 0)), build("1f1b", 2, 2, 5)
    assert swapped.actions == plain.actions[::-1]
    assert build("zbv", 2, 4, 5, placement=(1, 0, 0, 1)).actions == build("zbv", 2, 4, 5).actions[::-1]


@pytest.mark.parametrize(("s", "m"), [(1, 1), (2, 1), (3, 8), (4, 2), (8, 8), (8, 32)])
def test_in_flight(s, m):
    assert in_flight(build("1f1b", s, s, m)) == tuple(min(s - i, m) for i in range(s))
    assert in_flight(build("gpipe", s, s, m)) == (m,) * s
    assert in_flight(build("forward-only", s, s, m)) == (0,) * s
    assert max(in_flight(build("zb-h1", s, s, m))) == min(s, m)
    assert max(in_flight(build("zb-h2", s, s, m))) == min(2 * s - 1, m)
    for name in ("zbv", "dualpipev"):
        peak = max(saved_peaks(build(name, s, 2 * s, m), (1,) * (2 * s)))
        assert peak <= min(2 * m, 2 * s + (name == "dualpipev"))


@pytest.mark.parametrize(("s", "m"), [(1, 4), (2, 2), (3, 5), (4, 16), (8, 11)])
@pytest.mark.parametrize("t", UNIFORM)
def test_step_of_gpipe_and_1f1b(s, m, t):
    for name in ("gpipe", "1f1b"):
        assert step_s(build(name, s, s, m), t) == pytest.approx((m + s - 1) * (t.forward_s + t.backward_s))


@pytest.mark.parametrize(("s", "v"), list(itertools.product((2, 3, 4), (1, 2, 3))))
@pytest.mark.parametrize("t", UNIFORM)
def test_interleaving_divides_the_bubble(s, v, t):
    """v slots per rank leave (S − 1)(F + B) / v, where F and B are a rank's: one slot's times v.

    Whether or not the microbatches divide by the ranks, as long as there is one for each.
    """
    work = t.forward_s + t.backward_s
    for m in range(s, 4 * s + 1):
        assert step_s(build("interleaved", s, s * v, m), t) == pytest.approx((m * v + s - 1) * work)


@pytest.mark.parametrize(("s", "k"), list(itertools.product((2, 3, 4, 7), (1, 2, 5))))
@pytest.mark.parametrize("t", UNIFORM)
def test_bubble_of_zb_h1(s, k, t):
    """(S − 1)(F + B − 2W) with B the whole backward, from S microbatches on."""
    f, i, w = t.forward_s, t.backward_input_s, t.backward_weight_s
    assert step_s(build("zb-h1", s, s, s * k), t) == pytest.approx(
        s * k * (f + i + w) + (s - 1) * (f + i - w)
    )


@pytest.mark.parametrize("s", [2, 3, 4, 7])
@pytest.mark.parametrize("t", UNIFORM)
def test_zb_h2_leaves_idle_what_two_weight_gradients_do_not_fill(s, t):
    """Between first and last action a rank idles at most (S − 1)(F + I − 2W): nothing where F = I = W."""
    schedule = build("zb-h2", s, s, 3 * s)
    clock = run(schedule, (t,) * s, Edges.of(schedule))
    work = 3 * s * (t.forward_s + t.backward_input_s + t.backward_weight_s)
    spans = [ends[-1] - starts[0] for starts, ends in zip(clock.starts_s, clock.ends_s, strict=True)]
    left = (s - 1) * (t.forward_s + t.backward_input_s - 2 * t.backward_weight_s)
    assert max(spans) - work == pytest.approx(left)


@pytest.mark.parametrize(("s", "m"), [(2, 2), (2, 4), (4, 4), (4, 8), (4, 9), (6, 6), (6, 30), (8, 8)])
def test_zbv_idles_only_while_the_first_microbatch_comes_down(s, m):
    """With F = I = W the last rank waits S − 1 forwards and no rank anything else."""
    assert step_s(build("zbv", s, 2 * s, m), UNIFORM[0]) == 2 * m * 3 + s - 1


@pytest.mark.parametrize(("s", "m"), [(2, 4), (4, 8), (4, 9), (6, 30)])
@pytest.mark.parametrize("t", UNIFORM)
def test_dualpipev_is_within_its_formula(s, m, t):
    """(S/2 − 1)(F&B + B − 3W) for S stages, with nothing overlapped: F&B = F + B."""
    f, b, w = t.forward_s, t.backward_input_s + t.backward_weight_s, t.backward_weight_s
    assert (
        step_s(build("dualpipev", s, 2 * s, m), t) <= 2 * m * (f + b) + (s - 1) * (f + b + b - 3 * w) + 1e-9
    )


def test_wrong_arguments_say_what_is_right():
    with pytest.raises(InputError, match=r"unknown schedule '1f2b'; known are .*1f1b"):
        build("1f2b", 2, 2, 2)
    with pytest.raises(InputError, match="unknown schedule"):
        placement("1f2b", 2, 2)
    with pytest.raises(InputError, match="2 stages on 3 ranks leave a rank without one"):
        build("gpipe", 3, 2, 1)
    with pytest.raises(InputError, match="n_microbatches is 0"):
        build("gpipe", 2, 2, 0)
    with pytest.raises(InputError, match="placement"):
        build("gpipe", 2, 2, 1, placement=(0, 0))


def test_names_are_fixed():
    assert (*TEMPLATES, "cost-aware") == NAMES
    for name in ("gpipe", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zbv", "dualpipev"):
        assert build(name, 2, 4, 3).name == name
