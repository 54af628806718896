"""``python -m autopipe.cli`` is ``autopipe``; what it does is left to ``app``."""

from . import main

main()
