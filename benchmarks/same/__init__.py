"""Is the pipe the same model, kernel by kernel? What runs is in ``__main__``, models are in ``models``."""
