"""What of a plan contradicts itself: in its stages, its bounds, between stages, in its settings.

What it must share with the model's graph is left to ``between``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import InputError
from ..schedule import NAMES
from ..units import parse_bytes

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["faults"]


def faults(plan: Plan) -> Iterator[tuple[str, str]]:
    """(path, fault) of parts that contradict one another."""
    n = plan.n_stages
    if not n or not plan.n_microbatches:
        yield ("n_microbatches" if n else "stages"), "has none; there is at least one"
    for place, schedule in [
        ("schedule", plan.schedule),
        *((f"candidates[{x}].schedule", c.schedule) for x, c in enumerate(plan.candidates)),
    ]:
        if schedule not in NAMES:
            yield place, f"is {schedule!r}; known are {', '.join(NAMES)}"
    yield from _faults_of_stages(plan)
    yield from _faults_of_bounds(plan)
    yield from _faults_between(plan)
    yield from _faults_of_settings(plan)


def _faults_of_stages(plan: Plan) -> Iterator[tuple[str, str]]:
    n, ranks = plan.n_stages, plan.n_ranks
    for x, stage in enumerate(plan.stages):
        place, own = f"stages[{x}]", set(stage.ops)
        again = [op for ops in stage.recomputed for op in ops]
        if stage.index != x:
            yield f"{place}.index", f"is {stage.index}, in place {x}"
        if stage.rank >= ranks:
            yield f"{place}.rank", f"is {stage.rank}, there are {ranks} ranks"
        if len(own) < len(stage.ops):
            yield f"{place}.ops", "has an op twice"
        if strange := {*stage.clones, *again} - own:
            yield place, f"has {min(strange)!r} among clones or recomputed, which is none of its ops"
        if twice := [op for op in stage.ops if len(plan.stages_of[op]) > 1 and op not in stage.clones]:
            yield f"{place}.ops", f"has {twice[0]!r}, as another stage has, and it is no clone"
        if not all(stage.recomputed) or len({*again}) < len(again):
            yield f"{place}.recomputed", "has a block without ops, or an op twice"
        if stage.recompute and again:
            yield (
                f"{place}.recompute",
                "is True, and recomputed has blocks; either all runs again, or these do",
            )
        if stage.held_bytes > stage.saved_bytes:
            yield f"{place}.held_bytes", f"is {stage.held_bytes} of {stage.saved_bytes} saved_bytes"
        if stage.in_flight > max(1, plan.n_microbatches):
            yield f"{place}.in_flight", f"is {stage.in_flight}, of {plan.n_microbatches} microbatches"
    if idle := [rank for rank in range(min(ranks, n + 1)) if rank not in plan.placement]:
        yield "stages", f"has none on rank {idle[0]}; each of the cluster's ranks holds at least one"


def _faults_of_bounds(plan: Plan) -> Iterator[tuple[str, str]]:
    least, most = plan.bounds.bottleneck_lower_s, plan.bounds.bottleneck_s
    if least > most or (plan.bounds.proved and least < most):
        words = "proved" if plan.bounds.proved else "not proved"
        yield "bounds", f"has a bottleneck of {most} s, {words}, and {least} s as the least"
    if plan.bounds.step_lower_s > plan.step_s:
        yield "bounds.step_lower_s", f"is {plan.bounds.step_lower_s} s, and the plan's step {plan.step_s} s"
    if plan.n_candidates < len(plan.candidates):
        yield "n_candidates", f"is {plan.n_candidates}, and candidates has {len(plan.candidates)}"


def _faults_between(plan: Plan) -> Iterator[tuple[str, str]]:
    """Of what crosses between stages, and of ties."""
    n, names = plan.n_stages, {"boundaries": [b.value for b in plan.boundaries]}
    for what, listed in {**names, "ties": [t.parameter for t in plan.ties]}.items():
        if twice := sorted({name for name in listed if listed.count(name) > 1}):
            yield what, f"has {twice[0]!r} twice"
    for x, b in enumerate(plan.boundaries):
        if len({*b.destinations}) < len(b.destinations):
            yield f"boundaries[{x}].destinations", f"is {b.destinations}, a stage of which is there twice"
        if not b.destinations or not all(b.source < d < n for d in b.destinations):
            yield f"boundaries[{x}]", f"goes from stage {b.source} to {b.destinations}, of {n} stages"
        elif b.value not in plan.stages[b.source].ops:
            yield f"boundaries[{x}].value", f"is {b.value!r}, which stage {b.source} does not compute"
    for x, tie in enumerate(plan.ties):
        if not tie.stages or max(tie.stages) >= n or len(set(tie.stages)) < len(tie.stages):
            yield f"ties[{x}].stages", f"is {tie.stages}, of {n} stages"
        elif tie.mode == "colocate" and len({plan.placement[s] for s in tie.stages}) > 1:
            yield f"ties[{x}].mode", f"is 'colocate', and its stages {tie.stages} are on several ranks"
        if tie.parameter not in tie.names or len({*tie.names}) < len(tie.names):
            yield f"ties[{x}].names", f"is {tie.names}, of {tie.parameter!r}"


def _faults_of_settings(plan: Plan) -> Iterator[tuple[str, str]]:
    n, ranks, given = plan.n_stages, plan.n_ranks, plan.settings
    limits = given.get("memory_limit")
    each = limits if isinstance(limits, (list, tuple)) else [limits] * ranks
    if len(each) != ranks:
        yield "settings.memory_limit", f"has {len(each)} entries for {ranks} ranks; give one, or one per rank"
    try:
        for limit in each:
            if limit is not None:
                parse_bytes(limit)
    except InputError as error:
        yield "settings.memory_limit", f"cannot be: {error}"
    again = [s.recompute or bool(s.recomputed) for s in plan.stages]
    if given.get("recompute") == "never" and any(again):
        yield "settings.recompute", f"is 'never', and stage {again.index(True)} runs ops again"
    trains = any(s.gradient_bytes for s in plan.stages)
    if given.get("recompute") == "always" and trains and not all(s.recompute for s in plan.stages):
        yield "settings.recompute", "is 'always', and not every stage runs all again"
    apart = [tie.parameter for tie in plan.ties if tie.mode == "sync"]
    if given.get("ties") == "colocate" and trains and apart and ranks == n:
        yield "settings.ties", f"is 'colocate', and {apart[0]!r} is on several ranks"
    for name, stage in given.get("pin", {}).items():
        if not -n <= stage < n:
            yield f"settings.pin[{name!r}]", f"is stage {stage}, of {n} stages"
    chosen = given.get("ranks")
    if chosen is not None and (len(chosen) != ranks or len({*chosen}) < ranks):
        yield "settings.ranks", f"is {chosen}; it names a rank for each of {ranks}, once"
