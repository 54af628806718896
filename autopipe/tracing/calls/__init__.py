"""What a recording is made of. Making one is left to ``record``."""
