"""What a step will take: simulate a schedule or a plan, and look at the result or at a measured run.

Generating schedules is left to ``schedule``, choosing among them to ``solve``, drawing pages to ``look``.
"""

from ..schedule.actions import StageTimes, Transfer
from .bubbles import Bubble
from .planned import plan_schedule, plan_transfers, stage_times
from .report import Report, StageReport
from .simulate import in_turn_s, simulate, simulate_schedule
from .timeline import Event, Sent
from .trace import chrome_trace
from .views import Timeline

__all__ = [
    "Bubble",
    "Event",
    "Report",
    "Sent",
    "StageReport",
    "StageTimes",
    "Timeline",
    "Transfer",
    "chrome_trace",
    "in_turn_s",
    "plan_schedule",
    "plan_transfers",
    "simulate",
    "simulate_schedule",
    "stage_times",
]
