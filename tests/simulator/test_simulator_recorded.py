"""What a rank's record of a step tells beside its actions."""

import pytest
from plans import make_plan

from autopipe.schedule import Action, Message
from autopipe.simulator import Ran, Recorded, make_report


def ran(stage: int = 0, longer_s: float = 0.0) -> Ran:
    """A wait of 1 s, two actions of 2 s with a send of 0.5 s and another 0.25 s in between, and a send."""
    message = Message("F", 0, 1, 0)
    return Ran(
        0.0,
        7.0 + longer_s,
        [(Action(stage, "F", 0), 1.5, 3.5), (Action(stage, "B", 0), 4.25, 6.25)],
        [(message, 3.5, 4.0), (message, 6.25, 6.5)],
        [(message, 0.5, 1.5)],
    )


def test_what_lies_between_actions_is_no_wait_for_a_message():
    assert ran().span_s == 6.0
    assert ran().between_s == pytest.approx((0.5 + 0.25 + 0.25) / 2)
    nothing = Ran(0.0, 2.0, [], [], [])
    assert (nothing.span_s, nothing.between_s) == (0.0, 0.0)


def test_a_report_has_the_medians_of_each_rank():
    plan = make_plan(2, 1, ties=())
    sizes = [(ran().sent[0][0], 100)]
    longer_s = (0.0, 0.5, 9.0), (1.0, 1.0, 1.0)
    ranks = [Recorded([ran(r, x) for x in of_rank], sizes, None) for r, of_rank in enumerate(longer_s)]
    report = make_report(plan, ranks)
    assert report.beside_actions_s == (1.5, 2.0)
    assert report.between_actions_s == (0.5, 0.5)
    before_a_step = make_report(plan, [Recorded([], [], None)] * 2)
    assert before_a_step.between_actions_s == before_a_step.beside_actions_s == ()
