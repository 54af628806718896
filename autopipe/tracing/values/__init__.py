"""What a recording knows of values: the call behind each tensor and number, what Python went by of them.

- Tensors: ``ledger`` (the call behind each), ``origin`` (those from elsewhere), ``refs`` (pieces of
  results), ``extent`` (shapes that depend on data).
- Numbers made of sizes: ``tracked`` (the numbers), ``numbers`` (their calls), ``casts`` (``int`` and
  ``float``), ``keys`` (look-ups by a number).
- What Python asks: ``reads`` (all of it), ``branches`` (what can be asked again before each run).
"""
