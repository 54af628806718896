"""The proof: prices of all pairs, wide graphs, what it does where there is too much to look at, Ctrl-C."""

import itertools
import random
import time

import numpy as np
import pytest
from integer_program import Program, random_problem

from autopipe.solve import Block, Item, Net, Problem, Stage, chain, chains
from autopipe.solve.definition.answer import Answer
from autopipe.solve.definition.problem import HUGE
from autopipe.solve.lines import exact
from autopipe.solve.lines.intervals import best_chain
from autopipe.solve.lines.pairs import Loads
from autopipe.solve.lines.reach import Reach
from autopipe.solve.lines.windows import Window


def towers(n_towers: int, n_blocks: int, n_stages: int) -> Problem:
    """Chains side by side, joined at the end."""
    draw, items, nets = random.Random(n_towers), [], []
    for _ in range(n_towers):
        work, price = draw.randint(50, 150), draw.randint(1, 5)
        for b in range(n_blocks):
            v = len(items)
            items.append(Item((f"o{v}",), work))
            end = b == n_blocks - 1
            nets.append(Net(v, (n_towers * n_blocks if end else v + 1,), price, price, f"o{v}"))
    items.append(Item(("join",), 40))
    edges = tuple((n.producer, n.consumers[0]) for n in nets)
    return Problem(tuple(items), edges, tuple(nets), (), tuple(Stage(s) for s in range(n_stages)))


@pytest.mark.parametrize("seed", range(30))
def test_prices_of_pairs_are_those_of_the_definition(seed):
    problem = random_problem(seed)
    n, none = len(problem.items), np.zeros(len(problem.items), dtype=bool)
    whole = Window(problem, none, none, (0, HUGE), (-HUGE, HUGE), (0, 0)).downsets(lambda: None, 1 << 16)
    loads = Loads(problem)
    some = random.Random(seed).sample(range(len(whole)), min(40, len(whole)))
    layer = loads.layer(whole.picked(np.array(sorted(some))))
    priced = loads.of(1, layer, layer).loads
    rows = [layer.downsets.holds(x) for x in range(len(some))]
    for (x, a), (y, b) in itertools.product(enumerate(rows), repeat=2):
        if (a & ~b).any() or not (b & ~a).any():
            continue
        # stage 1 of three; where the last is the second, nothing may be left
        if problem.n_stages == 2 and not b.all():
            continue
        stage_of = [0 if a[v] else 1 if b[v] else 2 for v in range(n)]
        load = problem.loads(stage_of)[1]
        fits = load.memory_bytes <= problem.stages[1].limit_bytes
        assert priced[x, y] == (load.load_ns if fits else np.inf)


def test_links_dearer_than_the_least_rule_nothing_out():
    """Where all else is cheap, what no chain exceeds is made of the dearest links."""
    items = Item(("a",), 5), Item(("b",), 5)
    value = Net(0, (1,), 1, 1, "a", link_ns=((1, 1), (1000, 2000)))
    stages = Stage(0, links=(1, 0)), Stage(1, links=(0, 1))
    problem = Problem(items, ((0, 1),), (value,), (), stages, overlap=False)
    found = exact.prove(problem, Answer(None, HUGE, 0), time.perf_counter() + 5)
    assert found.stage_of == (0, 1)


def test_blocks_of_which_parts_alone_would_do_are_ruled_out():
    """Parts of them give up enough; no whole ones do, nor does the whole stage where it runs again."""
    blocks = Block(("a",), 1, 10, 0), Block(("b",), 1, 100, 10)
    items = (Item(("a", "b"), 10, 20, 0, 110, blocks=blocks),)
    problem = Problem(items, (), (), (), (Stage(0, limit_bytes=70, in_flight=2),), recompute="auto")
    answer = chain(problem)
    assert answer.stage_of is None
    assert answer.proved


@pytest.mark.parametrize(("n_towers", "n_blocks", "n_stages"), [(2, 6, 3), (3, 4, 3), (4, 3, 2)])
def test_towers_equal_the_integer_program(n_towers, n_blocks, n_stages):
    problem = towers(n_towers, n_blocks, n_stages)
    answer = chain(problem)
    assert answer.proved
    assert answer.bottleneck_ns == Program(problem).optimum()


def test_wide_towers_are_proved():
    answer = chain(towers(4, 12, 6))
    assert answer.proved


@pytest.mark.parametrize("moves", [0, 64])
def test_too_many_downsets_leave_a_valid_answer_and_bound(monkeypatch, moves):
    monkeypatch.setattr(exact, "_DOWNSETS", 4)
    monkeypatch.setattr(exact, "_PROBED", 4)
    monkeypatch.setattr(exact, "_SAMPLE", 8)
    monkeypatch.setattr(exact, "_MOVES", moves)
    problem = towers(3, 4, 3)
    answer, optimum = chain(problem), Program(problem).optimum()
    assert answer.lower_ns <= optimum <= answer.bottleneck_ns
    assert problem.is_valid(answer.stage_of)
    assert problem.bottleneck(problem.loads(answer.stage_of)) == answer.bottleneck_ns
    assert answer.proved == (moves > 0)


def interrupted(after: int):
    """The search over one order, with Ctrl-C after so many."""
    calls = itertools.count()

    def search(*arguments):
        if next(calls) >= after:
            raise KeyboardInterrupt
        return best_chain(*arguments)

    return search


def test_ctrl_c_among_the_first_answers_returns_the_best(monkeypatch):
    monkeypatch.setattr(chains, "best_chain", interrupted(after=2))
    problem = towers(3, 4, 3)
    answer = chain(problem)
    assert problem.is_valid(answer.stage_of)
    assert answer.lower_ns <= answer.bottleneck_ns


def test_ctrl_c_before_any_answer_is_raised(monkeypatch):
    monkeypatch.setattr(chains, "near_chain", interrupted(after=0))
    with pytest.raises(KeyboardInterrupt):
        chain(towers(3, 4, 3))


def test_ctrl_c_in_the_proof_returns_the_best(monkeypatch):
    monkeypatch.setattr(exact.Chains, "best", lambda self: interrupted(after=0)())
    answer = chain(towers(3, 4, 3))
    assert answer.stage_of is not None
    assert not answer.proved


@pytest.mark.parametrize("seed", range(20))
def test_the_work_that_items_need_and_bar_is_that_of_all_above_and_below(seed):
    problem = random_problem(seed) if seed % 2 else towers(seed + 2, 3, 2)
    reach = Reach(problem, lambda: None)
    for sets, works in ((problem.above, reach.needed), (problem.below, reach.barred)):
        held = [[i.work_ns for w, i in enumerate(problem.items) if bits >> w & 1] for bits in sets]
        assert works.tolist() == [sum(row) for row in held]


def test_a_first_answer_near_the_bound_is_proved_by_one_look_at_all_under_it(monkeypatch):
    draw, looked = random.Random(0), []
    items = tuple(Item((f"o{v}",), draw.randint(10_000, 20_000)) for v in range(2000))
    nets = tuple(Net(v, (v + 1,), 10, 10, f"o{v}") for v in range(1999))
    edges = tuple((v, v + 1) for v in range(1999))
    problem = Problem(items, edges, nets, (), tuple(Stage(s) for s in range(8)), overlap=True)

    def best(self):
        looked.append(self.bound)
        return real(self)

    real = exact.Chains.best
    monkeypatch.setattr(exact.Chains, "best", best)
    answer = chain(problem)
    assert answer.proved
    assert problem.total_ns / 8 < answer.bottleneck_ns
    assert looked == [answer.bottleneck_ns - 1]
