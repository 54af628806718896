"""Pricing only pairs of which one holds the other finds what pricing all pairs finds."""

import dataclasses
import random
import time

import numpy as np
import pytest
from integer_program import Program

from autopipe.solve import Item, Net, Problem, Stage, chain
from autopipe.solve.lines import contained, exact
from autopipe.solve.lines.exact import Chains
from autopipe.solve.lines.pairs import Loads


def layered(seed: int, least: int = 0, width: int = 4) -> Problem:
    """Random layers, values taken by one to three ops each, some by ops of a later layer, some back."""
    draw, items, nets, before, last = random.Random(seed), [], [], [], []
    n_layers = draw.randint(3, 6)
    for layer in range(n_layers):
        n = 1 if least and layer in (0, n_layers - 1) else draw.randint(1, width)
        row = list(range(len(items), len(items) + n))
        items += [Item((f"o{v}",), draw.randint(0, 40)) for v in row]
        for v in last:
            takers = tuple(sorted(draw.sample(row, draw.randint(1, min(3, len(row))))))
            nets.append(Net(v, takers, draw.randint(least, 9), draw.randint(least, 9), f"o{v}"))
        if before:
            nets.append(Net(before[0], (row[-1],), draw.randint(least, 9), draw.randint(least, 9), "skip"))
        before, last = last, row
    edges = tuple(sorted({(net.producer, v) for net in nets for v in net.consumers}))
    for v in range(len(items)) if seed % 3 or least else ():
        earlier = sorted({a for a, b in edges if b == v})
        if earlier:
            takers = tuple(sorted(draw.sample(earlier, draw.randint(1, len(earlier)))))
            nets.append(Net(v, takers, draw.randint(least, 9), draw.randint(least, 9), f"gradient {v}"))
    stages = tuple(Stage(s) for s in range(draw.randint(2, 4 if not least else len(items))))
    return Problem(tuple(items), edges, tuple(nets), (), stages, allow_empty=seed % 2 == 0)


def dense(problem: Problem, bound: int) -> Chains:
    """Chains that look at every pair of downsets, with nothing bounded but what is looked for."""
    chains = Chains(problem, bound, time.perf_counter() + 60)
    chains.contained, chains.alike = None, ()
    chains.ordered, chains.loads = chains.problem, Loads(chains.problem)
    return chains


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("seed", "least", "width"), [(s, 0, 4) for s in range(40)] + [(s, 5, 2) for s in range(60)]
)
def test_what_all_pairs_find_under_any_bound(seed, least, width, overlap):
    problem = dataclasses.replace(layered(seed, least, width), overlap=overlap)
    best = dense(problem, 10_000).best()
    for bound in (10_000, best[0]):
        found = Chains(problem, bound, time.perf_counter() + 60).best()
        assert found[0] == best[0]
        assert problem.is_valid(found[1])
        assert problem.bottleneck(problem.loads(found[1])) == best[0]
    assert Chains(problem, best[0] - 1, time.perf_counter() + 60).best() is None


@pytest.mark.parametrize("seed", range(12))
def test_equals_the_integer_program_with_values_that_flow_back(seed):
    problem = layered(seed)
    assert Chains(problem, 10_000, time.perf_counter() + 60).best()[0] == Program(problem).optimum()


def test_a_value_sent_back_to_several_stages_is_sent_once():
    items = tuple(Item((f"o{v}",), 10) for v in range(4))
    nets = (*(Net(v, (v + 1,), 1, 1, f"o{v}") for v in range(3)), Net(3, (0, 1, 2), 20, 0, "gradient"))
    problem = Problem(items, ((0, 1), (1, 2), (2, 3)), nets, (), tuple(Stage(s) for s in range(4)))
    assert Chains(problem, 31, time.perf_counter() + 60).best()[0] == 31


def test_fewer_stages_than_there_are_where_all_that_an_item_makes_is_dear():
    items = tuple(Item((f"o{v}",), 30) for v in range(9))
    nets = tuple(Net(0, (v,), 0, 12, f"o{v}") for v in range(1, 9))
    edges = tuple((0, v) for v in range(1, 9))
    problem = Problem(items, edges, nets, (), tuple(Stage(s) for s in range(30)), allow_empty=True)
    assert Chains(problem, 42, time.perf_counter() + 60).best()[0] == 42


def test_pairs_of_which_one_holds_the_other_over_many_words():
    draw = np.random.default_rng(0)
    held, lacked = draw.random((50, 200)) < 0.05, draw.random((60, 200)) < 0.3
    lacked[:20, :100] = False
    x, y = contained._holds(contained._words(held), contained._words(lacked))
    expected = ~(held[:, None] & lacked).any(axis=2)
    assert 0 < len(x) < held.shape[0] * lacked.shape[0]
    assert set(zip(x.tolist(), y.tolist(), strict=True)) == set(
        zip(*map(list, np.nonzero(expected)), strict=True)
    )


def test_bounds_do_not_creep_up_to_the_best_known(monkeypatch):
    problem, long = layered(47), 10**9
    items = tuple(Item(i.ops, i.forward_ns * long) for i in problem.items)
    nets = tuple(Net(n.producer, n.consumers, n.send_ns * long, n.receive_ns * long) for n in problem.nets)
    problem = dataclasses.replace(problem, items=items, nets=nets)
    tried = []
    best = Chains.best
    monkeypatch.setattr(Chains, "best", lambda chains: tried.append(chains.bound) or best(chains))
    monkeypatch.setattr(exact, "_SHORT", 0)
    assert chain(problem).proved
    assert 0 < len(tried) < 25
