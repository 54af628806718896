"""A batch on its way in and out: microbatches, their weights, who feeds them, the outputs joined again.

Running it is left to ``stage`` and ``execute``.
"""
