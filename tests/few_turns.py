"""Probes in few turns where it is imported; as a script, a process of :func:`autopipe.probe`."""

import sys

from autopipe.api import rehearsal
from autopipe.measure import exchange

rehearsal._TURNS = exchange._TURNS = 2

if __name__ == "__main__":
    rehearsal._main(*sys.argv[1:])
