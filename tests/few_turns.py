"""Probes in few turns where it is imported; as a script, a rank of :func:`autopipe.probe`."""

import os
import sys

from autopipe.api import probing
from autopipe.measure import message_times

probing._TURNS = message_times._TURNS = 2

if __name__ == "__main__":
    probing._main(*sys.argv[1:], os.environ["RANK"])
