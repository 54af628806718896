"""Schedules as data: which rank runs which action of which stage and microbatch, in which order.

Timing them is left to ``simulate``, running them to ``runtime``.
"""

from .actions import Action, Schedule

__all__ = ["Action", "Schedule"]
