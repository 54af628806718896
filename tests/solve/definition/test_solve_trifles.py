"""What hangs at a problem's side and costs next to nothing is left out, put back, and decides nothing."""

import dataclasses
import itertools

from hypothesis import HealthCheck, given, settings

from autopipe.solve import Block, Item, Net, Problem, Stage, chain
from autopipe.solve.definition.trifles import trim
from autopipe.solve.lines.exact import Chains
from benchmarks.solver.exhaustive import ordered
from tests.solve.random_problems import problems


@given(problems())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_assignment_of_the_whole_costs_less_than_what_is_left_of_it(problem):
    trimmed = trim(problem)
    if trimmed is None:
        return
    for stage_of in filter(problem.is_valid, ordered(problem)):
        left = tuple(stage_of[v] for v in trimmed.kept)
        whole = problem.bottleneck(problem.loads(stage_of))
        assert trimmed.problem.bottleneck(trimmed.problem.loads(left)) <= whole
        back = trimmed.expand(left)
        assert tuple(back[v] for v in trimmed.kept) == left
        assert all(back[a] <= back[b] for a, b in problem.edges)


def layers_with_guards(n_layers: int, n_guards: int, k: int) -> Problem:
    """Layers in a line, of which blocks run again where memory is short, guards of sizes and a late label."""
    ms, gib = 1_000_000, 1 << 30
    items = [
        Item(
            (f"layer{v}",),
            9 * ms + v % 7,
            18 * ms,
            gib,
            gib // 4,
            gib // 8,
            blocks=(Block((f"layer{v}",), 9 * ms + v % 7, gib // 4, gib // 32),),
        )
        for v in range(n_layers)
    ]
    items += [Item((f"guard{v}",), 5_000) for v in range(n_guards)]
    items = [Item(("label",), 5_000), *items, Item(("loss",), ms)]
    line = [*range(1, n_layers + 1), len(items) - 1]
    guards = [1, *range(n_layers + 1, n_layers + n_guards + 1)]
    pairs = [*itertools.pairwise(line), *itertools.pairwise(guards), (0, len(items) - 1)]
    nets = tuple(Net(a, (b,), 100_000, 100_000, items[a].ops[0], gib // 32) for a, b in sorted(pairs))
    stages = tuple(Stage(s, limit_bytes=11 * gib, in_flight=k - s) for s in range(k))
    return Problem(tuple(items), tuple(sorted(pairs)), nets, (), stages, overlap=True, recompute="auto")


def test_trifles_fill_the_stages_that_are_empty_of_all_else():
    """A label, six layers and a loss, of which two stages are empty; three guards behind the first layer."""
    problem = layers_with_guards(6, 3, 7)
    trimmed = trim(problem, part=1e-2)
    assert trimmed is not None
    assert [problem.items[v].ops[0] for v in trimmed.kept] == [*(f"layer{v}" for v in range(6)), "loss"]
    for left in itertools.combinations_with_replacement(range(7), 7):
        stage_of = trimmed.expand(left)
        assert all(stage_of[a] <= stage_of[b] for a, b in problem.edges)
        if len(set(left)) == 5 and left[0] == 0:
            assert problem.is_valid(stage_of)


def test_guards_beside_a_line_of_layers_are_no_more_places_to_cut(monkeypatch):
    """Each of twelve in turn may be the last before any cut: thirteen times as many, squared for a stage."""
    priced = []
    once = Chains.best

    def counted(self):
        try:
            return once(self)
        finally:
            priced.append(self.n_pairs)

    monkeypatch.setattr(Chains, "best", counted)
    sums = []
    for n_guards in (0, 12):
        answer = chain(layers_with_guards(60, n_guards, 8), time_limit_s=60.0)
        assert answer.stage_of is not None
        assert answer.bottleneck_ns <= answer.lower_ns * 1.0001
        sums.append(sum(priced))
        priced.clear()
    assert 0 < sums[1] <= 3 * sums[0]


def test_an_item_that_is_pinned_or_returned_is_no_trifle():
    problem = layers_with_guards(8, 3, 2)
    pinned = dataclasses.replace(problem.items[0], first=1, last=1)
    trimmed = trim(dataclasses.replace(problem, items=(pinned, *problem.items[1:])))
    assert trimmed is not None
    assert 0 in trimmed.kept
    assert len(trimmed.kept) == len(problem.items) - 3
