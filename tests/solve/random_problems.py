"""Small problems with ties, memory, pins and recompute, and what an answer to one must hold."""

import dataclasses

from hypothesis import strategies as st

from autopipe.solve import Block, Item, Net, Problem, Share, Stage, chain
from autopipe.solve.definition.problem import HUGE
from benchmarks.solver.exhaustive import exhaustive


def _with_block(draw, item: Item) -> Item:
    """The item, now and then with its ops as a block that may be computed again."""
    if not item.saved_bytes or not draw(st.booleans()):
        return item
    held = draw(st.integers(0, item.saved_bytes - 1))
    block = Block(item.ops, item.forward_ns, item.saved_bytes, held)
    return dataclasses.replace(item, blocks=(block,))


@st.composite
def _backward(draw, n: int) -> Net:
    """A value that nothing orders: gradients may flow to items that come before."""
    maker = draw(st.integers(0, n - 1))
    takers = draw(st.sets(st.integers(0, n - 1).filter(lambda v: v != maker), min_size=1, max_size=3))
    small = st.integers(0, 6)
    return Net(maker, tuple(sorted(takers)), draw(small), draw(small), "g", draw(small), draw(small))


@st.composite
def problems(draw) -> Problem:
    n, k = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    small = st.integers(0, 6)
    limit = draw(st.sampled_from((HUGE, HUGE, 30, 15)))
    pinned = draw(st.sampled_from((None, None, *range(k))))
    items = [Item((f"o{v}",), *draw(st.tuples(small, small, small, small, small))) for v in range(n)]
    items = [_with_block(draw, item) for item in items]
    if pinned is not None:
        v = draw(st.integers(0, n - 1))
        items[v] = Item(items[v].ops, 4, 2, first=pinned, last=pinned)
    nets = []
    for v in range(n - 1):
        takers = draw(st.sets(st.integers(v + 1, n - 1), max_size=3))
        if takers:
            prices = draw(small), draw(small), f"v{v}", draw(small), draw(small)
            nets.append(Net(v, tuple(sorted(takers)), *prices))
    edges = tuple(sorted({(m.producer, c) for m in nets for c in m.consumers}))
    if draw(st.integers(0, 3)) == 0:
        nets += draw(st.lists(_backward(n), max_size=2)) if n > 1 else []
    shares = []
    if n > 1 and draw(st.booleans()):
        held = draw(st.sets(st.integers(0, n - 1), min_size=2, max_size=3))
        shares.append(Share(tuple(sorted(held)), "w", draw(small), 0, draw(small), sync_ns=draw(small)))
    speeds = st.sampled_from((1.0, 1.0, 2.0, 1.5, 0.7))
    stages = tuple(Stage(s, draw(speeds), limit, draw(st.integers(1, 3))) for s in range(k))
    return Problem(
        tuple(items),
        edges,
        tuple(nets),
        tuple(shares),
        stages,
        overlap=draw(st.booleans()),
        recompute=draw(st.sampled_from(("never", "auto", "always"))),
        allow_empty=draw(st.booleans()),
    )


def solved(problem):
    """The answer, held to be valid, truly priced and rightly bounded, and the least bottleneck there is.

    None where neither the answer nor exhaustive search has a valid assignment.
    """
    answer, best = chain(problem), exhaustive(problem)
    if best is None:
        assert answer.stage_of is None
        return None
    assert answer.stage_of is not None
    assert problem.is_valid(answer.stage_of)
    assert problem.bottleneck(problem.loads(answer.stage_of)) == answer.bottleneck_ns
    assert answer.lower_ns <= best[0]
    return answer, best[0]
