"""Costs: measured op by op, estimated from FLOPs and bytes, fitted as formulas, kept in a store.

The cost types are plain data in ``costs``; what costs imply for a plan is left to ``solve``.
"""

from __future__ import annotations

from .clock import device_name
from .devices import DEVICES, LINKS, described, device, link
from .estimate import estimate
from .profiler import profile

__all__ = ["DEVICES", "LINKS", "described", "device", "device_name", "estimate", "link", "profile"]
