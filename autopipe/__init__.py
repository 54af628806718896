"""autopipe: any ``nn.Module``, unmodified, as a balanced pipeline.

The rooms, bottom first. A room imports only from rooms in earlier rows; rooms marked ``no torch`` open
without it. ``tests/test_layers.py`` reads this table and checks every import against it.

=============  ==========================================================  ========
layer          rooms                                                       torch
=============  ==========================================================  ========
base           errors, arguments, files, schema, formula, units, shown     no torch
data           graph, costs, hardware, schedule, presets, plans            no torch
device         torch_private, accelerator, host_link                       torch
tracing        tracing                                                     torch
measure        measure                                                     torch
predict        memory, simulator                                           no torch
solve          solve                                                       no torch
stages         stages                                                      torch
runtime        runtime                                                     torch
exports        exports                                                     torch
look           look                                                        no torch
neighbours     neighbours                                                  torch
face           api                                                         torch
command line   cli, demo                                                   torch
=============  ==========================================================  ========

Within a row of several rooms, a room may import those to its left. ``import autopipe`` is light: torch,
sympy and networkx load when a name that needs them is first used.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from .errors import (
    AutopipeError,
    CaptureError,
    CostError,
    InfeasibleError,
    InputError,
    ModelError,
    PlanError,
    ScheduleError,
    StaleError,
    StepError,
    StoreError,
    UndecidedError,
    VerificationError,
)

if TYPE_CHECKING:
    from .api import Pipe, capture, plan, probe, profile, simulate, split
    from .costs import CostTable, OpCost
    from .graph import OpGraph
    from .hardware import Cluster, Device, Link
    from .look import watch
    from .plans import Plan
    from .schedule import Schedule

__version__ = "0.1.0"

_LAZY = {
    "api": ("Pipe", "capture", "plan", "probe", "profile", "simulate", "split"),
    "costs": ("CostTable", "OpCost"),
    "graph": ("OpGraph",),
    "hardware": ("Cluster", "Device", "Link"),
    "look": ("watch",),
    "plans": ("Plan",),
    "schedule": ("Schedule",),
}
_ROOM_OF = {name: room for room, names in _LAZY.items() for name in names}

__all__ = [
    "AutopipeError",
    "CaptureError",
    "Cluster",
    "CostError",
    "CostTable",
    "Device",
    "InfeasibleError",
    "InputError",
    "Link",
    "ModelError",
    "OpCost",
    "OpGraph",
    "Pipe",
    "Plan",
    "PlanError",
    "Schedule",
    "ScheduleError",
    "StaleError",
    "StepError",
    "StoreError",
    "UndecidedError",
    "VerificationError",
    "capture",
    "plan",
    "probe",
    "profile",
    "simulate",
    "split",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module 'autopipe' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_ROOM_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def _is_in_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return bool(getattr(distributed, "is_initialized", bool)())  # torch may be half imported, or without it


@atexit.register
def _say_ended() -> None:
    """Leave word for other ranks that this process ends, also where it called nothing yet."""
    if _is_in_group():
        importlib.import_module(".runtime.wire.ended", __name__).say_ended()


def _be_no_rank() -> None:
    """The end of a process that a rank forked is not that rank's."""
    if _is_in_group():
        atexit.unregister(_say_ended)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_be_no_rank)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
