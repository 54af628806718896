"""``python -m autopipe`` is the ``autopipe`` command; what it does is left to ``cli``."""

from .cli import main

main()
