"""The solver's optimum equals that of an independent integer program under HiGHS."""

import pytest
from integer_program import Program, random_problem

from autopipe.solve import chain


@pytest.mark.parametrize("seed", range(40))
def test_equals_the_integer_program(seed):
    problem = random_problem(seed)
    answer, optimum = chain(problem), Program(problem).optimum()
    if optimum is None:
        assert answer.stage_of is None
        return
    assert answer.proved
    assert answer.bottleneck_ns == optimum
    assert problem.bottleneck(problem.loads(answer.stage_of)) == optimum
