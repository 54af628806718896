"""What is stopped early says so: nothing found is not nothing there, and Ctrl-C costs no plan."""

import contextlib
import math
import signal
import threading
import time

import pytest
from language_model import cluster, costs, graph, made

from autopipe.errors import InfeasibleError, InputError, UndecidedError
from autopipe.hardware import Cluster, Device, Link
from autopipe.schedule import build
from autopipe.solve import Answer, chain
from autopipe.solve.definition.problem import HUGE
from autopipe.solve.making.formulate import formulate
from autopipe.solve.making.options import Settings
from autopipe.solve.making.source import Source
from autopipe.solve.stopping import interrupts


def answers(monkeypatch, lowers):
    """Every chain finds nothing, with these bounds in turn, the last of them from then on."""
    rest = list(lowers)

    def nothing(problem, **limits):
        return Answer(None, HUGE, rest.pop(0) if len(rest) > 1 else rest[0])

    monkeypatch.setattr("autopipe.solve.answers.chain", nothing)
    monkeypatch.setattr("autopipe.solve.step.by_weight", lambda *given: None)


@pytest.mark.parametrize("lowers", [(0, HUGE), (HUGE, 0, HUGE), (HUGE, HUGE, 0)])
def test_one_open_case_leaves_the_whole_question_open(monkeypatch, lowers):
    answers(monkeypatch, lowers)
    monkeypatch.setattr("autopipe.solve.infeasible.chain", lambda problem, **limits: Answer(None, HUGE, 0))
    with pytest.raises(UndecidedError, match="none was ruled out"):
        made(n_stages=None, time_limit_s=5.0)


@pytest.mark.parametrize("limit", [None, 600_000, 517_120])
def test_what_the_look_for_a_reason_finds_is_the_plan(monkeypatch, limit):
    """Where the search found nothing and ruled nothing out, and then something turns out to fit."""
    known = made(memory_limit=limit)
    answers(monkeypatch, (0,))
    plan = made(memory_limit=limit, time_limit_s=5.0)
    assert plan.step_s <= known.step_s * 1.5
    assert max(s.memory_bytes for s in plan.stages) <= (limit or HUGE)
    assert plan.candidates


def test_pins_keep_no_split_by_hand_from_being_found(monkeypatch):
    """Where the search had no time at all, the splits that need none are the plan, whatever is pinned."""
    monkeypatch.setattr("autopipe.solve.answers.chain", lambda problem, **limits: Answer(None, HUGE, 0))
    for stage in (0, 1, 2):
        plan = made(pin={"layer2": stage}, time_limit_s=0.0)
        assert plan.stages_of["layer2"] == (stage,)


def test_only_proofs_for_every_case_rule_out_a_plan(monkeypatch):
    answers(monkeypatch, (HUGE,))
    with pytest.raises(InfeasibleError) as told:
        made(n_stages=None, time_limit_s=5.0)
    assert not isinstance(told.value, UndecidedError)


def test_cases_there_was_no_time_for_are_open(monkeypatch):
    answers(monkeypatch, (HUGE,))
    with pytest.raises(UndecidedError, match="there was no time for the others"):
        made(n_stages=None, schedule="auto", time_limit_s=0.0)


@pytest.mark.parametrize("memory", [250_000, 320_000])
def test_a_limit_nothing_fits_in_keeps_the_time_too(memory):
    def took_s() -> float:
        started = time.process_time()
        with pytest.raises(InfeasibleError):
            made(
                cluster=cluster(8),
                n_stages=None,
                schedule="auto",
                memory_limit=memory,
                time_limit_s=0.3,
            )
        return time.process_time() - started

    # what is imported on the way, and a moment when the machine is busy, is none of the solver's time
    assert min(took_s() for _ in range(3)) < 0.8


@pytest.mark.parametrize("call", [2, 3, 5])
def test_ctrl_c_while_a_split_is_simulated_keeps_those_before_it(monkeypatch, call):
    from autopipe.solve import step

    calls, simulate = [], step.simulate

    def interrupted(plan):
        calls.append(plan)
        if len(calls) == call:
            signal.raise_signal(signal.SIGINT)
        return simulate(plan)

    monkeypatch.setattr(step, "simulate", interrupted)
    plan = made()
    assert len(calls) == call
    assert plan.step_s == simulate(plan).step_s


def test_a_search_within_a_search_hears_the_same_key():
    with interrupts() as outer:
        with interrupts() as inner, pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert inner is outer
        assert outer.is_set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_thread_is_never_told():
    heard = []

    def search():
        with interrupts() as pressed:
            heard.append(pressed.is_set())

    thread = threading.Thread(target=search)
    thread.start()
    thread.join(timeout=10)
    assert heard == [False]


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0, "heavy", None, 1e300])
def test_a_balance_that_is_no_weight_is_refused(weight):
    with pytest.raises(
        InputError, match=r"the weight that balance gave op 'embed' is .*; it must be a number"
    ):
        made(balance=lambda op: weight)


def test_a_balance_that_raises_is_told_with_what_it_is_called_with():
    with pytest.raises(InputError, match=r"balance raises KeyError for op 'embed'.*autopipe\.graph\.Op"):
        made(balance=lambda op: {}[op.name])
    with pytest.raises(InputError, match="balance raises TypeError"):
        made(balance=lambda: 1.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_limit_s", math.nan),
        ("time_limit_s", -1),
        ("time_limit_s", math.inf),
        ("optimizer_bytes_per_parameter_byte", math.nan),
        ("optimizer_bytes_per_parameter_byte", -2.0),
        ("memory_limit", math.nan),
        ("pin", {"embed": 0.5}),
        ("pin", {"embed": True}),
        ("pin", {"embed": 10**20}),
    ],
)
def test_numbers_that_are_none_are_refused(name, value):
    with pytest.raises(InputError):
        made(**{name: value})


def pressed(*given, **named):
    signal.raise_signal(signal.SIGINT)
    raise AssertionError("Ctrl-C was not heard")


def test_ctrl_c_while_items_are_placed_one_by_one_keeps_the_chain(monkeypatch):
    """Loads that hang on others are closed last, by a search of its own."""
    monkeypatch.setattr("autopipe.solve.chains.close", pressed)
    answer = chain(two_hosts(), time_limit_s=60.0)
    assert answer.stage_of is not None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_among_the_orders_of_the_ranks_keeps_those_before_it(monkeypatch):
    from autopipe.solve import answers

    calls, orders = [], answers._others

    def interrupted(*given):
        calls.append(given)
        monkeypatch.setattr(answers, "chain", pressed)
        return orders(*given)

    monkeypatch.setattr(answers, "_others", interrupted)
    monkeypatch.setattr(answers, "_least_of_any", lambda *given: 0)
    slow = [Device(speed=speed) for speed in (1.0, 0.5, 1.0)]
    plan = made(cluster=Cluster(tuple(slow)), device_order="auto", time_limit_s=60.0)
    assert len(calls) == 1
    assert plan.placement == (0, 1, 2)


def test_ctrl_c_while_orders_of_the_ranks_are_told_by_their_steps_keeps_their_bottlenecks(monkeypatch):
    from autopipe.solve import step

    once = step.plan_of

    def interrupted(*given):
        monkeypatch.setattr(step, "plan_of", once)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(step, "plan_of", interrupted)
    slow = tuple(Device(speed=speed) for speed in (1.0, 0.5, 1.0))
    plan = made(cluster=Cluster(slow), device_order="auto", time_limit_s=60.0)
    assert plan.bounds.bottleneck_s > 0
    assert step.plan_of is once


def test_ctrl_c_with_nothing_found_is_raised(monkeypatch):
    def nothing(problem, **limits):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return Answer(None, HUGE, 0)

    monkeypatch.setattr("autopipe.solve.answers.chain", nothing)
    monkeypatch.setattr("autopipe.solve.step.by_weight", lambda *given: None)
    with pytest.raises(KeyboardInterrupt):
        made(time_limit_s=60.0)


def two_hosts():
    """Six ranks whose links differ."""
    there = Cluster(cluster(6).devices, (0, 0, 0, 1, 1, 1), Link(1e-5, 1e9), Link(1e-4, 1e8))
    return formulate(Source.of(graph(), costs(), there, Settings(overlap=False)), build("1f1b", 6, 6, 6))


def test_parameters_that_all_ranks_together_cannot_hold_are_told_before_anything_is_tried():
    """Whatever is left free: fewer ranks hold no more, so none of their cases is looked at."""
    started = time.process_time()
    with pytest.raises(InfeasibleError, match=r"the 8 ranks hold .* before any activation") as told:
        made(
            cluster=cluster(8),
            n_stages=None,
            schedule="auto",
            memory_limit=50_000,
            time_limit_s=60.0,
        )
    assert not isinstance(told.value, UndecidedError)
    assert time.process_time() - started < 0.5


def waiting(monkeypatch, s):
    """Every chain waits so long on the wall before it is looked for, as on a machine with other work.

    The seconds that each was given.
    """
    given = []

    def late(problem, *, time_limit_s, near):
        given.append(time_limit_s)
        time.sleep(s)
        return chain(problem, time_limit_s=time_limit_s, near=near)

    monkeypatch.setattr("autopipe.solve.answers.chain", late)
    return given


def test_a_busy_machine_plans_as_a_calm_one_unless_the_user_gave_a_time(monkeypatch):
    calm = made(n_stages=None)
    given = waiting(monkeypatch, 1.5)
    assert made(n_stages=None).candidates == calm.candidates
    usual = len(given)
    assert usual > 1
    with contextlib.suppress(UndecidedError):
        made(n_stages=None, time_limit_s=1.0)
    assert len(given) - usual < usual


@pytest.mark.parametrize("part", ["least_sums_ns", "fullest_work_ns"])
def test_ctrl_c_while_steps_are_bounded_keeps_the_plan(part, monkeypatch):
    """Devices of unlike speeds have no sums, so that the other bound is looked for."""
    monkeypatch.setattr(f"autopipe.solve.step.{part}", pressed)
    speeds = (1.0, 1.0, 1.0) if part == "least_sums_ns" else (1.0, 0.5, 1.0)
    plan = made(cluster=Cluster(tuple(Device(speed=speed) for speed in speeds)), time_limit_s=60.0)
    assert 0 < plan.bounds.step_lower_s <= plan.step_s
