"""A rank of the command line, which probes in few turns."""

from autopipe.api import rehearsal
from autopipe.cli import main

rehearsal._TURNS = 2
main()
