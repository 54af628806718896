"""What a step will take: simulate a schedule or a plan, and look at the result or at a measured run.

Generating schedules is left to ``schedule``, choosing among them to ``solve``, drawing pages to ``look``.
"""

from ..schedule.actions import StageTimes, Transfer
from .bubbles import Bubble
from .chrome_trace import chrome_trace
from .other_cluster import on_cluster
from .plan_inputs import plan_schedule, plan_transfers, stage_times
from .recorded import Ran, Recorded, make_report
from .report import DRIFTED, Report, StageReport
from .simulate_plan import check_costs, in_turn_s, simulate, warn_if_changed
from .simulate_schedule import simulate_schedule
from .timeline import Timeline
from .timeline_data import Event, Sent
from .watched import Watchable, Watched, plan_file, rank_file, watched

__all__ = [
    "DRIFTED",
    "Bubble",
    "Event",
    "Ran",
    "Recorded",
    "Report",
    "Sent",
    "StageReport",
    "StageTimes",
    "Timeline",
    "Transfer",
    "Watchable",
    "Watched",
    "check_costs",
    "chrome_trace",
    "in_turn_s",
    "make_report",
    "on_cluster",
    "plan_file",
    "plan_schedule",
    "plan_transfers",
    "rank_file",
    "simulate",
    "simulate_schedule",
    "stage_times",
    "warn_if_changed",
    "watched",
]
