"""The solver equals exhaustive search on small problems with ties, memory, pins and recompute."""

from hypothesis import given, settings
from random_problems import problems, solved


@settings(max_examples=300)
@given(problems())
def test_equals_exhaustive_search(problem):
    if (found := solved(problem)) is not None:
        answer, least_ns = found
        assert answer.bottleneck_ns == least_ns
        assert answer.proved
