"""One run of a model, recorded. What becomes of the recording is left to ``graphs`` and ``sizes``."""
