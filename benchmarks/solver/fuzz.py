"""Small problems of every kind against exhaustive search: ``python -m benchmarks.solver.fuzz``.

Each is drawn from its number alone (``drawn``), so one that fails is told by it. Of eight, four are integer
problems; three are op graphs with costs and a cluster, planned by :func:`autopipe.solve.solve` as users do,
with its defaults and now and then other settings or everything left free. One is too large to look through,
with pins and memory limits that a drawn assignment just meets.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import itertools
import json
import pathlib
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import autopipe.solve
from autopipe.errors import InfeasibleError, PlanError, UndecidedError
from autopipe.plans import Plan
from autopipe.schedule import placement
from autopipe.solve import chain, solve
from autopipe.solve.answers import least_sums_ns
from autopipe.solve.definition.answer import Answer
from autopipe.solve.definition.problem import HUGE, Problem
from autopipe.solve.making.cases import Case, cases
from autopipe.solve.making.options import Options
from autopipe.solve.making.source import Source
from autopipe.solve.step import plan_of
from autopipe.solve.stopping import clock_s, timed_by_work

from .drawn import Asked, asked, planted, problem
from .exhaustive import exhaustive, ordered

__all__ = ["MISSED", "fault_of", "main", "plan_fault"]

MISSED = "nothing found in the time"
"""A fraction of a second is little: this is told, and no fault, as long as the answer claims no proof."""

_SHORT_S = 0.5
"""What is left free, or too large to look through, gets so many seconds of the processor's."""

_LONG_S = 60.0
"""The others end by themselves, however busy the machine is."""

_LOOKED = 50_000
"""Assignments that exhaustive search looks at, at most; a plan of more is held to itself alone."""

_DRAWN, _SIMULATED = 400, 40
"""Of so many assignments so many are simulated, and none may be under the bound on steps."""

_WORSE = 1.3
"""No bound is over the best step known: bounds are also taken where so much of it is."""

_FEW = 8
"""So many cases of what is left free are looked at where none is said to fit."""


def fault_of(number: int) -> str | None:
    """What is wrong with the solver's answer to problem ``number``; None where nothing is."""
    draw = random.Random(number)
    kinds = _solved, _planned, _solved, _planted, _solved, _planned, _solved, _planned
    with timed_by_work():
        return kinds[number % 8](draw)


def _planted(draw: random.Random) -> str | None:
    """A problem with limits and pins that one assignment meets: it must not be beaten by the bound."""
    made, stage_of = planted(draw)
    known = made.bottleneck(made.loads(stage_of))
    answer = chain(made, time_limit_s=_SHORT_S)
    if answer.lower_ns > known:
        return f"{answer} has a bound over {known}, which is met by {stage_of}"
    if answer.stage_of is None and answer.proved:
        return f"nothing is said to fit, but {stage_of} does"
    if answer.stage_of is None:
        return f"{MISSED}, but {stage_of} fits"
    value = made.bottleneck(made.loads(answer.stage_of))
    is_right = made.is_valid(answer.stage_of) and value == answer.bottleneck_ns < HUGE
    return None if is_right else f"{answer} is not valid, or has the bottleneck {value}"


def _solved(draw: random.Random) -> str | None:
    made = problem(draw)
    answer, best = chain(made, time_limit_s=_LONG_S), exhaustive(made)
    if best is None:
        return None if answer.stage_of is None and answer.proved else f"nothing fits, but {answer}"
    if answer.stage_of is None:
        return f"no answer{' with a proof' * answer.proved}, but {best} fits"
    if not made.is_valid(answer.stage_of):
        return f"{answer.stage_of} is not valid"
    value = made.bottleneck(made.loads(answer.stage_of))
    if value != answer.bottleneck_ns or value < best[0]:
        return f"{answer} has the bottleneck {value}; the least is {best}"
    if answer.lower_ns > best[0]:
        return f"{answer} has a bound over {best}"
    return None if value == best[0] and answer.proved else f"{answer} is not the proved optimum {best}"


def _planned(draw: random.Random) -> str | None:
    return plan_fault(asked(draw))


def plan_fault(given: Asked) -> str | None:
    """What is wrong with the plan, or with there being none: exhaustive search over its case, or over all."""
    options = dict(given.options)
    is_free = any(options.get(name) == "auto" for name in _FREE)
    options["time_limit_s"] = _SHORT_S if is_free else _LONG_S
    try:
        plan = solve(given.graph, given.costs, given.cluster, **options)
    except UndecidedError:
        return MISSED if is_free else "a small problem is left open"
    except InfeasibleError as error:
        few = itertools.islice(_problems(given), _FEW)
        found = next(filter(None, map(exhaustive, few)), None)
        return None if found is None else f"{found} fits, but {error}"
    except PlanError as error:
        # of pins and groups that contradict one another nothing is solved
        return None if next(_problems(given), None) is None else f"a problem can be made, but {error}"
    return next(_faults(given, plan, is_free), None)


_FREE = "n_stages", "schedule", "device_order"


def _source(given: Asked) -> Source:
    return Source.of(given.graph, given.costs, given.cluster, Options(**given.options))


def _problems(given: Asked) -> Iterator[Problem]:
    """The integer problems of every case that is left free and can be made."""
    for case in cases(_source(given), Options(**given.options)):
        try:
            made = case.problem()
        except PlanError:
            continue
        if made.n_stages ** len(made.items) <= _LOOKED:
            yield made


def _faults(given: Asked, plan: Plan, is_free: bool) -> Iterator[str]:
    bounds = plan.bounds
    steps = [plan.step_s, *(c.step_s for c in plan.candidates if c.feasible)]
    if bounds.step_lower_s > min(steps) * (1 + 1e-9):
        yield f"{min(steps)} s are under the bound {bounds.step_lower_s} of a step"
    least = min((c.step_s for c in plan.candidates if c.feasible), default=plan.step_s)
    if not is_free and plan.step_s > least * (1 + 1e-8):
        yield f"{plan.step_s} where a candidate has {least}"
    made = _case(given, plan).problem()
    if made.n_stages ** len(made.items) > _LOOKED:
        return
    best = exhaustive(made)
    if best is None:
        yield "a plan where nothing fits"
        return
    if bounds.bottleneck_lower_s > best[0] / 1e9 * (1 + 1e-12):
        yield f"the bound {bounds.bottleneck_lower_s} is over {best}"
    if not is_free and bounds.bottleneck_lower_s < best[0] / 1e9 * (1 - 1e-12):
        yield f"the bound {bounds.bottleneck_lower_s} is not closed: {best}"
    case = _case(given, plan)
    lower_s = max(bounds.step_lower_s, _sums_s(case, made, _WORSE * plan.step_s))
    for stage_of, step_s in _steps(case, made):
        if lower_s > step_s * (1 + 1e-5):
            yield f"{stage_of} takes {step_s} s, under the bound {lower_s} of a step"


def _sums_s(case: Case, made: Problem, known_s: float) -> float:
    """What sums bound steps by where one of so many seconds is known; 0 where they are not known."""
    until = clock_s() + _SHORT_S
    sums_ns, _ = least_sums_ns(case, made, known_s, until)
    return case.least_step_in_room_s(made, 0, until, sums_ns) if sums_ns else 0.0


def _steps(case: Case, made: Problem) -> Iterator[tuple[tuple[int, ...], float]]:
    """The simulated steps of those of some assignments that fit which have the least bottlenecks."""
    all_of = [*ordered(made)]
    some = random.Random(0).sample(all_of, min(_DRAWN, len(all_of)))
    loads = {stage_of: made.loads(stage_of) for stage_of in some if made.is_valid(stage_of)}
    values = {stage_of: made.bottleneck(row) for stage_of, row in loads.items()}
    for stage_of in sorted(values, key=values.__getitem__)[:_SIMULATED]:
        if values[stage_of] < HUGE:
            plan = plan_of(case, made, Answer(None, HUGE, 0), stage_of, loads[stage_of])
            yield stage_of, plan.step_s


def _case(given: Asked, plan: Plan) -> Case:
    """What a plan is the answer to, the order of its ranks included."""
    ranks = tuple(plan.settings["ranks"])
    source = _source(given).on(ranks).filling(plan.n_stages).cut_into(plan.n_microbatches)
    slots = placement(plan.schedule, plan.n_ranks, plan.n_stages)
    order = tuple(rank for _, rank in sorted(set(zip(slots, plan.placement, strict=True))))
    return Case(source, plan.schedule, plan.n_stages, plan.n_microbatches, "cost", order, ranks)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver.fuzz", description=__doc__)
    parser.add_argument("--problems", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=pathlib.Path, help="kept as it goes; a run that was ended goes on")
    given = parser.parse_args()
    tried: dict[str, Any] = {"first": given.first, "problems": 0, "faults": {}, "missed": [], "cpu_s": 0.0}
    tried["code"] = _code()
    if given.json is not None and given.json.exists():
        before = json.loads(given.json.read_text())
        if (before["code"], before["first"]) != (tried["code"], given.first):
            sys.exit(f"{given.json} is of other code or other problems; move it away")
        tried = before
    end = given.first + given.problems
    numbers = range(tried["first"] + tried["problems"], end)
    with concurrent.futures.ProcessPoolExecutor(given.jobs) as pool:
        for number, (fault, cpu_s) in zip(numbers, pool.map(_timed, numbers, chunksize=10), strict=True):
            _enter(tried, number, fault, cpu_s)
            if given.json is not None and (tried["problems"] % _KEPT_EVERY == 0 or number + 1 == end):
                given.json.write_text(json.dumps(tried, indent=1))
    words = f"{len(tried['faults'])} faults, {len(tried['missed'])} not found in time"
    print(f"{tried['problems']} problems, {words}, {tried['cpu_s']:.0f} CPU s")
    sys.exit(bool(tried["faults"]))


_KEPT_EVERY = 100
"""Problems after which what was found so far is written."""


def _code() -> str:
    """What tells the solver and the drawing of problems from other states of them: one count is of one."""
    here = pathlib.Path(__file__).parent
    files = [here / f"{name}.py" for name in ("drawn", "exhaustive", "fuzz")]
    files += sorted(pathlib.Path(autopipe.solve.__path__[0]).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _timed(number: int) -> tuple[str | None, float]:
    """What is wrong with the answer to a problem, and the CPU seconds it took."""
    started = time.process_time()
    try:
        fault = fault_of(number)
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    return fault, time.process_time() - started


def _enter(tried: dict[str, Any], number: int, fault: str | None, cpu_s: float) -> None:
    """Enter what came of a problem."""
    tried["cpu_s"] += cpu_s
    tried["problems"] += 1
    if fault is None:
        return
    print(f"{number}: {fault}", flush=True)
    if fault.startswith(MISSED):
        tried["missed"].append(number)
    else:
        tried["faults"][str(number)] = fault


if __name__ == "__main__":
    main()
