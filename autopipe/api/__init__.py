"""The face: one function that does it all, and one verb for each step of it.

Every step's work is left to its own room; this one wires them and decides defaults.
"""

from .pipe import Pipe
from .probing import probe
from .verbs import capture, plan, profile, simulate, split

__all__ = ["Pipe", "capture", "plan", "probe", "profile", "simulate", "split"]
