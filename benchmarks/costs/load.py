"""Tells how much of the machine others used while a check ran, and so whether its times can be trusted.

What is done with a disturbed run is left to the reader: it is kept and marked. No count of CPU time shows
a core whose other half works for another guest of the same host; the pace of the cores does.
"""

from __future__ import annotations

import os
import pathlib
import resource
import time
from types import TracebackType

__all__ = ["DISTURBED", "UNSTEADY", "OtherLoad"]

DISTURBED = 0.03
"""Share of the machine's CPU time used by others from which a run is marked."""

UNSTEADY = 0.04
"""Change of pace from which what was predicted before and what was measured after are not compared."""


class OtherLoad:
    """``share`` of the machine's CPU time that went to other processes than this one and its children.

    The kernel's count of busy time (``/proc/stat``, time stolen by other virtual machines included) less
    what the process and the children it has waited for used.
    """

    share = 0.0

    def __enter__(self) -> OtherLoad:
        self._start, self._busy, self._own = time.perf_counter(), _busy_s(), _own_s()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        total = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        self.share = max(0.0, (_busy_s() - self._busy) - (_own_s() - self._own)) / total


def _busy_s() -> float:
    """Seconds that all cores together were busy since the start: user, nice, system, irq, softirq, steal."""
    user, nice, system, _, _, irq, softirq, steal = map(
        int, pathlib.Path("/proc/stat").read_text().split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)
