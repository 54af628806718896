"""A slice of ``benchmarks.solver.audit``: plans held to a second reading of the cost model."""

import pytest


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_plans_are_what_a_second_reading_of_the_costs_says(first):
    from benchmarks.solver.audit import faults_of

    faults = {number: faults_of(number) for number in range(first, first + 10)}
    assert {number: found for number, found in faults.items() if found} == {}
