"""Costs: measured op by op, estimated from FLOPs and bytes, fitted as formulas, kept in a store.

The cost types are plain data in ``costs``; what costs imply for a plan is left to ``solve``.
"""

from __future__ import annotations

from .devices import DEVICES, LINKS, described, device, link
from .efficiency import Efficiency, fit
from .estimate import GUESSED, estimate
from .flops import count_flops
from .kernel_counts import UNCOUNTED
from .ledger import Entry, entries, opened, recalibrate, record
from .probe import probe
from .profiler import profile
from .store import Store
from .symbolic import SymbolicCosts, fit_costs
from .timers import device_name

__all__ = [
    "DEVICES",
    "GUESSED",
    "LINKS",
    "UNCOUNTED",
    "Efficiency",
    "Entry",
    "Store",
    "SymbolicCosts",
    "count_flops",
    "described",
    "device",
    "device_name",
    "entries",
    "estimate",
    "fit",
    "fit_costs",
    "link",
    "opened",
    "probe",
    "profile",
    "recalibrate",
    "record",
]
