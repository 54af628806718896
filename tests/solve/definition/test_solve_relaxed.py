"""Which problems another rules out: those that hold the same, and more of it at once."""

import dataclasses
import random

import pytest
from language_model import costs, graph

from autopipe.errors import InfeasibleError, UndecidedError
from autopipe.hardware import Cluster
from autopipe.schedule import build
from autopipe.solve import answers, chain, solve
from autopipe.solve.definition.problem import HUGE
from autopipe.solve.definition.relaxed import needs_more
from autopipe.solve.making.formulate import formulate
from autopipe.solve.making.options import Settings
from autopipe.solve.making.source import Source
from benchmarks.solver.exhaustive import exhaustive


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_what_needs_more_than_a_problem_that_nothing_fits_has_no_answer(first):
    from benchmarks.solver.drawn import problem

    n_ruled_out = 0
    for number in range(first, first + 100):
        draw = random.Random(number)
        made = problem(draw, 4)
        if exhaustive(made) is not None:
            continue
        more, less = draw.randint(0, 2), draw.randint(0, 10)
        stages = tuple(
            dataclasses.replace(s, in_flight=s.in_flight + more, limit_bytes=s.limit_bytes - less)
            for s in made.stages
        )
        moments = tuple(
            tuple((tuple(n + more for n in alive), acting) for alive, acting in rank) for rank in made.moments
        )
        tighter = dataclasses.replace(made, stages=stages, moments=moments)
        if needs_more(tighter, made):
            n_ruled_out += 1
            assert exhaustive(tighter) is None
        items = (dataclasses.replace(made.items[0], static_bytes=999), *made.items[1:])
        assert not needs_more(dataclasses.replace(tighter, items=items), made)
        if more and max(s.limit_bytes for s in made.stages) < HUGE:
            assert not needs_more(made, tighter)
    assert n_ruled_out > 5


@pytest.mark.parametrize(
    ("one", "other", "n_stages"),
    [("gpipe", "1f1b", 4), ("zb-h2", "zb-h1", 4), ("gpipe", "zb-h1", 4)],
)
def test_schedules_that_keep_more_in_flight_need_more(one, other, n_stages):
    source = Source.of(graph(), costs(), Cluster.uniform(4), Settings(memory_limit=(100_000,) * 4))
    more, fewer = (formulate(source, build(name, 4, n_stages, 8)) for name in (one, other))
    assert needs_more(more, fewer)
    assert needs_more(fewer, fewer)
    assert not needs_more(fewer, more)


def test_what_nothing_fits_is_proved_for_a_few_cases_of_many(monkeypatch):
    """Nine schedules, and only those that hold least are solved."""
    asked = []

    def counted(problem, **given):
        asked.append(problem)
        return chain(problem, **given)

    monkeypatch.setattr(answers, "chain", counted)
    with pytest.raises(InfeasibleError) as told:
        solve(
            graph(),
            costs(),
            Cluster.uniform(2),
            n_stages=2,
            schedule="auto",
            n_microbatches=8,
            memory_limit=600_000,
            time_limit_s=60.0,
        )
    assert not isinstance(told.value, UndecidedError)
    assert 1 <= len(asked) <= 4
