"""What a graph and its stages make cross and be tied, and whether a plan says the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from ..errors import PlanError
from ..graph import Op, OpGraph, ParameterSpec

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["check_between", "crossing", "shared"]


def check_between(plan: Plan, graph: OpGraph) -> None:
    """Raise :class:`PlanError` where what crosses or is tied is not what its stages and the graph make so.

    Or where its stages are not as its pins say. As in a plan that was edited by hand. Linear in ops and
    edges, for each pin in ops.
    """
    crosses = crossing(graph, plan.stages_of, plan.n_stages)
    ties = shared(graph, plan.stages_of)
    for what, said, made in (
        (
            "boundaries",
            {b.value: (b.source, tuple(sorted(b.destinations))) for b in plan.boundaries},
            {op.name: (min(plan.stages_of[op.name]), there) for op, there in crosses},
        ),
        (
            "ties",
            {t.parameter: (tuple(sorted(t.stages)), t.names) for t in plan.ties},
            {p.name: (stages, p.names) for p, stages in ties},
        ),
    ):
        if said != made:
            name = next(name for name in {**made, **said} if said.get(name) != made.get(name))
            words = [f"{name!r} as {rows[name]}" if name in rows else "nothing" for rows in (said, made)]
            raise PlanError(
                f"the plan's {what} have {words[0]}, and its stages make that {words[1]} for this "
                f"{graph.model}; plan again, or change both"
            )
    for prefix, stage in plan.settings.get("pin", {}).items():
        for op in graph.under(prefix):
            if (held := plan.stages_of.get(op.name, ())) != (stage % plan.n_stages,):
                raise PlanError(
                    f"the plan pins {prefix!r} to stage {stage}, and has {op.name!r} of it in "
                    f"{held or 'none'} of its {plan.n_stages} stages; plan again with it, or change both"
                )


def crossing(
    graph: OpGraph, stages_of: Mapping[str, Collection[int]], n_stages: int
) -> Iterator[tuple[Op, tuple[int, ...]]]:
    """Ops whose values are sent, and where: to stages with an op that takes them and none that makes them.

    What no stage computes, as the model's outputs, is in the last.
    """
    last = (n_stages - 1,)
    for op in graph.compute:
        here, there = stages_of[op.name], set[int]()
        for taker in graph.consumers[op.name]:
            stages = stages_of.get(taker, last)
            if stages != here:
                there.update(stages)
        if there := there.difference(here):
            yield op, tuple(sorted(there))


def shared(
    graph: OpGraph, stages_of: Mapping[str, Collection[int]]
) -> Iterator[tuple[ParameterSpec, tuple[int, ...]]]:
    """Parameters that are trained and used by several stages or known by several names, and their stages."""
    for name, ops in graph.users.items():
        p = graph.parameter[name]
        if p.requires_grad and not p.is_buffer:
            stages = {s for op in ops for s in stages_of[op]}
            if len(stages) > 1 or len(p.names) > 1:
                yield p, tuple(sorted(stages))
