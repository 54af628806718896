"""A slice of ``benchmarks.solver.audit``: plans held to a second reading of the cost model."""

import pytest


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_plans_are_what_a_second_reading_of_the_costs_says(first):
    from benchmarks.solver.audit import faults_of

    faults = {number: faults_of(number) for number in range(first, first + 10)}
    assert {number: found for number, found in faults.items() if found} == {}


@pytest.mark.parametrize("number", [72241, 72759])
def test_few_more_items_than_stages_leave_no_bound_open(number):
    from benchmarks.solver.audit import Reading, drawn

    asked = drawn(number)
    reading = Reading(asked)
    priced = map(reading.priced, reading.splits())
    least = min(p.seconds for p in priced if p.fits(reading.limits()))
    assert asked.plan(time_limit_s=60.0).bounds.bottleneck_lower_s == pytest.approx(least, abs=1e-8)


@pytest.mark.parametrize("number", [100138, 100398])
def test_stages_of_a_rank_that_make_a_mask_again_fit_where_they_would_not_take_it(number):
    from benchmarks.solver.audit import faults_of

    assert faults_of(number) == []
