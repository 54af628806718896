"""Small problems of every kind against exhaustive search: ``python -m benchmarks.solver.fuzz``.

Each is drawn from its number alone, so one that fails is told by it. Of four, two are integer problems; one
is an op graph with costs and a cluster, planned by :func:`autopipe.solve.solve` as users do: its default
settings, and now and then one that they change. One is too large to look through, with pins and memory limits
that a drawn assignment just meets.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import random
import sys
import time
from typing import Any

from autopipe.costs import CostTable, OpCost
from autopipe.errors import InfeasibleError
from autopipe.graph import Op, OpGraph, ParameterSpec, TensorSpec
from autopipe.hardware import Cluster, Device, Link
from autopipe.schedule import build
from autopipe.solve import Block, Item, Net, Problem, Share, Stage, chain, solve
from autopipe.solve.definition.problem import HUGE
from autopipe.solve.making.formulate import formulate
from autopipe.solve.making.source import Settings, Source
from autopipe.solve.proof.exhaustive import exhaustive

__all__ = ["fault_of", "main"]

_MISSED = "nothing found in half a second"
"""Half a second is little: this is told, and no fault, as long as the answer claims no proof."""

PLACED = (
    ("1f1b", 1, 1),
    ("1f1b", 2, 2),
    ("1f1b", 3, 3),
    ("zb-h1", 3, 3),
    ("gpipe", 2, 2),
    ("1f1b", 4, 4),
    ("interleaved", 2, 4),
    ("zbv", 2, 4),
    ("dualpipev", 2, 4),
    ("interleaved", 2, 3),
    ("looped-bfs", 2, 4),
    ("interleaved", 1, 3),
    ("interleaved", 2, 6),
)


def fault_of(number: int) -> str | None:
    """What is wrong with the solver's answer to problem ``number``; None where nothing is."""
    draw = random.Random(number)
    kinds = _solved, _planned, _solved, _planted
    return kinds[number % 4](draw)


def _planted(draw: random.Random) -> str | None:
    """A problem with limits and pins that one assignment meets: it must not be beaten by the bound."""
    problem, stage_of = _large(draw)
    known = problem.bottleneck(problem.loads(stage_of))
    answer = chain(problem, time_limit_s=0.5)
    if answer.lower_ns > known:
        return f"{answer} has a bound over {known}, which is met by {stage_of}"
    if answer.stage_of is None and answer.proved:
        return f"nothing is said to fit, but {stage_of} does"
    if answer.stage_of is None:
        return f"{_MISSED}, but {stage_of} fits"
    value = problem.bottleneck(problem.loads(answer.stage_of))
    is_right = problem.is_valid(answer.stage_of) and value == answer.bottleneck_ns < HUGE
    return None if is_right else f"{answer} is not valid, or has the bottleneck {value}"


def _large(draw: random.Random) -> tuple[Problem, tuple[int, ...]]:
    """Ten to forty items, and an assignment that leaves some ranks hardly a byte and meets some pins."""
    problem = _problem(draw, draw.randint(10, 40))
    k, n = problem.n_stages, len(problem.items)
    cuts = sorted(draw.sample(range(1, n), k - 1))
    stage_of = tuple(sum(v >= cut for cut in cuts) for v in range(n))
    items = [dataclasses.replace(i, first=0, last=-1) for i in problem.items]
    for v in draw.sample(range(n), draw.choice((0, 0, 1, 3))):
        items[v] = dataclasses.replace(items[v], first=stage_of[v], last=stage_of[v])
    stages = tuple(dataclasses.replace(s, limit_bytes=HUGE) for s in problem.stages)
    problem = dataclasses.replace(problem, items=tuple(items), stages=stages)
    loads = problem.loads(stage_of)
    fullest = max(problem.rank_bytes(r, [loads[s] for s in own]) for r, own in problem.stages_of.items())
    limit = draw.choice((HUGE, fullest, round(1.1 * fullest)))
    stages = tuple(dataclasses.replace(s, limit_bytes=limit) for s in stages)
    return dataclasses.replace(problem, stages=stages), stage_of


def _solved(draw: random.Random) -> str | None:
    problem = _problem(draw)
    answer, best = chain(problem), exhaustive(problem)
    if best is None:
        return None if answer.stage_of is None and answer.proved else f"nothing fits, but {answer}"
    if answer.stage_of is None:
        return f"no answer{' with a proof' * answer.proved}, but {best} fits"
    if not problem.is_valid(answer.stage_of):
        return f"{answer.stage_of} is not valid"
    value = problem.bottleneck(problem.loads(answer.stage_of))
    if value != answer.bottleneck_ns or value < best[0]:
        return f"{answer} has the bottleneck {value}; the least is {best}"
    if answer.lower_ns > best[0]:
        return f"{answer} has a bound over {best}"
    return None if value == best[0] and answer.proved else f"{answer} is not the proved optimum {best}"


def _problem(draw: random.Random, n_items: int = 0) -> Problem:
    """Items in a random order of need, with everything a problem may have; a few, or so many."""
    name, n_ranks, k = draw.choice(PLACED)
    schedule = build(name, n_ranks, k, draw.randint(1, 6))
    n = n_items or draw.randint(1, 7 if k < 4 else 6)
    limit = draw.choice((HUGE, HUGE, 15, 25, 40, 60))
    items = [_item(draw, v) for v in range(n)]
    for _ in range(draw.choice((0, 0, 1, 2))):
        v, s = draw.randrange(n), draw.randrange(k)
        items[v] = dataclasses.replace(items[v], first=s, last=s)
    nets = [_net(draw, v, range(v + 1, n)) for v in range(n - 1) if draw.random() < 0.9]
    edges = {(net.producer, c) for net in nets for c in net.consumers}
    shares = [_share(draw, n) for _ in range(draw.choice((0, 0, 1, 2))) if n > 1]
    speeds = [draw.choice((1.0, 1.0, 1.0, 2.0, 0.7)) for _ in range(n_ranks)]
    alive = zip(schedule.placement, schedule.in_flight, strict=True)
    pairs = None
    if draw.random() < 0.3:
        pairs = {
            (a, b): tuple((m.send_ns + draw.randint(0, 4), m.receive_ns + draw.randint(0, 4)) for m in nets)
            for a, b in itertools.permutations(range(n_ranks), 2)
        }
    return Problem(
        tuple(items),
        tuple(sorted(edges)),
        tuple(nets),
        tuple(shares),
        tuple(Stage(rank, speeds[rank], limit, n) for rank, n in alive),
        pairs,
        draw.choice(("once", "once", "once", "receiver")),
        draw.random() < 0.7,
        draw.choice(("never", "auto", "auto", "always")),
        holds_received=draw.random() < 0.1,
        moments=schedule.moments,
    )


def _item(draw: random.Random, v: int) -> Item:
    most = draw.choice((6, 6, 40))
    saved = draw.randint(0, 6)
    item = Item((f"o{v}",), draw.randint(0, most), draw.randint(0, most), draw.randint(0, 6), saved)
    if saved and draw.random() < 0.5:
        block = Block(item.ops, item.forward_ns, saved, draw.randrange(saved))
        item = dataclasses.replace(item, blocks=(block,))
    return dataclasses.replace(item, workspace_bytes=draw.randint(0, 4))


def _net(draw: random.Random, v: int, later: range) -> Net:
    takers = sorted(draw.sample(later, min(len(later), draw.choice((1, 1, 1, 2, 3)))))
    price, n_bytes = draw.choice((3, 6, 20)), draw.randint(0, 4)
    again = draw.choice((-1, -1, -1, 0, 2, 5))
    sent = draw.choice((0, n_bytes))
    send, receive = draw.randint(0, price), draw.randint(0, price)
    return Net(v, tuple(takers), send, receive, f"v{v}", n_bytes, sent, again)


def _share(draw: random.Random, n: int) -> Share:
    held = tuple(sorted(draw.sample(range(n), min(n, draw.choice((2, 2, 3))))))
    if draw.random() < 0.3:
        return Share(held, "clone", draw.randint(0, 6), saved_bytes=draw.randint(0, 3))
    sync = draw.randint(0, 8)
    more = tuple(sync + draw.randint(0, 4) for _ in range(draw.choice((0, 1, 2))))
    return Share(held, "w", static_bytes=draw.randint(0, 6), sync_ns=sync, more_ns=more, tied=True)


def _planned(draw: random.Random) -> str | None:
    graph, costs, cluster, name, n_stages, options = _case(draw)
    settings = Settings(
        pin=options.get("pin", {}),
        recompute=options.get("recompute", "never"),
        memory_limit=(options["memory_limit"],) * cluster.n_ranks if "memory_limit" in options else (),
        overlap=options.get("overlap", True),
        ties=options.get("ties", "auto"),
    )
    n_microbatches = options["n_microbatches"]
    schedule = build(name, cluster.n_ranks, n_stages, n_microbatches)
    problem = formulate(Source.of(graph, costs, cluster, settings), schedule)
    best = exhaustive(problem)
    try:
        plan = solve(graph, costs, cluster, n_stages=n_stages, schedule=name, **options)
    except InfeasibleError as error:
        return None if best is None else f"{best} fits, but {error}"
    if best is None:
        return "a plan where nothing fits"
    bounds = plan.bounds
    if bounds.bottleneck_lower_s > best[0] / 1e9 * (1 + 1e-12):
        return f"the bound {bounds.bottleneck_lower_s} is over {best}"
    if bounds.step_lower_s > plan.step_s * (1 + 1e-9):
        return f"a step of {plan.step_s} is under its bound {bounds.step_lower_s}"
    least = min((c.step_s for c in plan.candidates if c.feasible), default=plan.step_s)
    return None if plan.step_s <= least * (1 + 1e-8) else f"{plan.step_s} where a candidate has {least}"


def _case(draw: random.Random) -> tuple[OpGraph, CostTable, Cluster, str, int, dict[str, Any]]:
    """A graph of a few ops, what they cost, where they run, and what is asked."""
    n = draw.randint(2, 5)
    wide = TensorSpec((draw.choice((8, 64, 4096)), 64), "float32", True)
    weights = [ParameterSpec(f"w{v}", (f"w{v}",), (draw.choice((16, 256)), 64), "float32") for v in range(n)]
    tied = n > 2 and draw.random() < 0.4
    ops = [Op("x", "input", "x", outputs=(TensorSpec((8, 64), "float32"),))]
    edges = []
    for v in range(n):
        held = "w0" if tied and v == n - 1 else f"w{v}"
        ops.append(Op(f"o{v}", "module", f"o{v}", f"o{v}", outputs=(wide,), parameters=(held,)))
        takes = {f"o{u}" for u in range(v) if (u == v - 1 and draw.random() < 0.8) or draw.random() < 0.2}
        edges += [(u, f"o{v}") for u in takes or {"x"}]
    ops.append(Op("output", "output", "output"))
    used = {a for a, _ in edges}
    edges += [(f"o{v}", "output") for v in range(n) if f"o{v}" not in used]
    place = {op.name: i for i, op in enumerate(ops)}
    edges.sort(key=lambda e: (place[e[0]], place[e[1]]))
    graph = OpGraph("Small", tuple(ops), tuple(edges), parameters=tuple(weights))
    costs = CostTable({f"o{v}": _cost(draw) for v in range(n)})
    name, n_ranks, n_stages = draw.choice([row for row in PLACED if row[2] <= n])
    links = Link(1e-5, 1e9), Link(1e-4, 1e8)
    hosts = tuple(sorted(draw.randint(0, 1) for _ in range(n_ranks))) if draw.random() < 0.4 else ()
    devices = tuple(Device(speed=draw.choice((1.0, 1.0, 1.0, 0.5))) for _ in range(n_ranks))
    cluster = Cluster(devices, hosts, *links)
    options: dict[str, Any] = {"n_microbatches": draw.choice((1, 2, 4, 6))}
    if draw.random() < 0.5:
        options["memory_limit"] = draw.choice((200_000, 400_000, 700_000, 1_500_000))
    if draw.random() < 0.4:
        options["recompute"] = draw.choice(("auto", "always"))
    if draw.random() < 0.3:
        options["pin"] = {f"o{draw.randrange(n)}": draw.randrange(n_stages)}
    if draw.random() < 0.2:
        options["overlap"] = False
    return graph, costs, cluster, name, n_stages, options


def _cost(draw: random.Random) -> OpCost:
    forward = draw.choice((1e-5, 1e-4, 1e-3)) * draw.randint(1, 9)
    saved = draw.choice((0, 10_000, 60_000))
    return OpCost(forward, 2 * forward, forward, forward, saved, draw.choice((0, 20_000)))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.solver.fuzz", description=__doc__)
    parser.add_argument("--problems", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="kept as it goes; a run that was ended goes on")
    given = parser.parse_args()
    tried: dict[str, Any] = {"first": given.first, "problems": 0, "faults": {}, "missed": [], "cpu_s": 0.0}
    if given.json is not None and given.json.exists():
        tried = json.loads(given.json.read_text())
    end = given.first + given.problems
    for number in range(tried["first"] + tried["problems"], end):
        _try(number, tried)
        if given.json is not None and (tried["problems"] % _KEPT_EVERY == 0 or number + 1 == end):
            given.json.write_text(json.dumps(tried, indent=1))
    words = f"{len(tried['faults'])} faults, {len(tried['missed'])} not found in time"
    print(f"{tried['problems']} problems, {words}, {tried['cpu_s']:.0f} CPU s")
    sys.exit(bool(tried["faults"]))


_KEPT_EVERY = 100
"""Problems after which what was found so far is written."""


def _try(number: int, tried: dict[str, Any]) -> None:
    """Try a problem and enter what came of it."""
    started = time.process_time()
    fault = fault_of(number)
    tried["cpu_s"] += time.process_time() - started
    tried["problems"] += 1
    if fault is None:
        return
    print(f"{number}: {fault}", flush=True)
    if fault.startswith(_MISSED):
        tried["missed"].append(number)
    else:
        tried["faults"][str(number)] = fault


if __name__ == "__main__":
    main()
