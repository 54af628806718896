"""What derivatives that a forward takes hang on.

Recording them is left to ``record``.
"""

from __future__ import annotations

from .call import Call, calls_in

__all__ = ["derived"]


def derived(derivative: Call) -> set[str]:
    """A derivative and all between what is derived and what it is derived by: one stage must hold them."""
    by = calls_in(derivative.args[1])
    parameters = {c.target for c in by if c.op == "get_attr"}
    reached: dict[int, bool] = {id(c): True for c in by}
    inside = {derivative.name, *(c.name for c in by if c.op not in ("get_attr", "placeholder"))}
    waiting = calls_in(derivative.args[0])
    while waiting:
        call = waiting[-1]
        unknown = [c for c in call.inputs if id(c) not in reached]
        if unknown and id(call) not in reached:
            waiting += unknown
            continue
        waiting.pop()
        if id(call) not in reached:
            holds = call.op == "call_module" and any(p.startswith(f"{call.target}.") for p in parameters)
            reached[id(call)] = holds or any(reached[id(c)] for c in call.inputs)
            inside |= {call.name} if reached[id(call)] else set()
    return inside
