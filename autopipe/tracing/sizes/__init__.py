"""Which sizes a recording holds for. Recording it is left to ``record``."""
