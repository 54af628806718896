"""A rank of the command line, which probes in few turns."""

import few_turns  # noqa: F401

from autopipe.cli import main

main()
